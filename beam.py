"""Beam search: look for the most likely replies, several at a time.

The most likely reply need not begin with the most likely token. So the search follows several
beginnings, the *beams*. In each step the model tells how likely each next token is behind each
beam, and of all beams that are one token longer the `width` best go on. With width 2 and summed log
probabilities:

    a -0.6   -->   a b -1.2   -->   a b a -1.8      both come from a b; the search gives up b a
                   a c -1.9         a b b -2.1
    b -1.0   -->   b a -1.3   -->   b a c -2.2
                   b c -2.5         b a a -2.3

To make a beam longer, a new conversation is forked from that of its beginning, and computes its
last token. So beams share the full chunks of what they have in common (see sharing.py).
"""
from typing import NamedTuple
from uuid import uuid4

from config import require
from engine import Engine


class Beam(NamedTuple):
    tokens: list[int]           # of the reply so far
    score: float                # the sum of their log probabilities
    parent: str | None          # the conversation of the prompt and all these tokens but the last


def beam_search(engine: Engine, prompt: list[int], width: int, max_tokens: int,
                ignore_eos: bool = False) -> list[tuple[list[int], float]]:
    """Returns `width` replies as (token ids, their summed log probability), the best first.

    A beam is a finished reply when it has max_tokens tokens or ends with a stop token, if it is
    among the `width` best of its step. A longer beam is never more likely. So the search ends when
    `width` replies are finished and no beam is better than the worst of them. ignore_eos: a stop
    token is like any other token. ValueError for what cannot be served."""
    check(engine, prompt, width, max_tokens)
    stop_ids = frozenset() if ignore_eos else engine.worker.stop_ids
    beams, finished, held = [Beam([], 0.0, None)], [], []
    try:
        while beams:
            parents, children = held, [f"beam {uuid4()}" for _ in beams]
            held = parents + children           # to be forgotten if `advance` fails
            # All `width` beams that go on may come from one beam, and every stop token may be
            # likelier there.
            longer = advance(engine, prompt, beams, children, top=width + len(stop_ids))
            forget(engine, parents)
            held = children

            going_on, ended = [], []
            for rank, beam in enumerate(longer):
                if len(beam.tokens) < max_tokens and beam.tokens[-1] not in stop_ids:
                    going_on.append(beam)
                elif rank < width:
                    ended.append(beam)
            beams, finished = going_on[:width], best_first(finished + ended)[:width]
            if len(finished) == width and beams and beams[0].score <= finished[-1].score:
                break
    finally:
        forget(engine, held)
    return [(beam.tokens, beam.score) for beam in finished]


def check(engine: Engine, prompt: list[int], width: int, max_tokens: int):
    """ValueError for what the engine would not notice, or only late."""
    for name, value in dict(width=width, max_tokens=max_tokens).items():
        require(type(value) is int and value >= 1, name, "an int of at least 1", value)
    length, limit = len(prompt) + max_tokens, engine.scheduler.limit
    require(length <= limit, "prompt and max_tokens together", f"at most {limit} tokens", length)


def advance(engine: Engine, prompt: list[int], beams: list[Beam], names: list[str], top: int
            ) -> list[Beam]:
    """Compute the last token of each beam (at first: the prompt) in a new conversation, which gets
    a name of `names`. Returns the beams that are one token longer, with the `top` most likely
    tokens behind each beam; the best first. The token that the turn samples does not matter."""
    handles = []
    for beam, name in zip(beams, names):
        context = [*prompt, *beam.tokens]
        new = 1 if beam.parent else len(context)        # its last token; at first the whole prompt
        handles.append(engine.submit(context[-new:], name, context=context[:-new],
                                     parent=beam.parent, max_tokens=1, logprobs=top))
    longer = []
    for beam, name, handle in zip(beams, names, handles):
        reply = handle.result()
        if reply.finish_reason == "cancelled":
            raise RuntimeError("the engine was closed during a beam search")
        ((_, most_likely),) = reply.logprobs
        longer += [Beam(beam.tokens + [token], beam.score + logprob, name)
                   for token, logprob in most_likely]
    return best_first(longer)


def best_first(beams: list[Beam]) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score)


def forget(engine: Engine, names: list[str]):
    for name in names:
        engine.forget(name)
