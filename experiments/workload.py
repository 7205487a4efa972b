"""Conversations, and when their turns happen: the load of every experiment (paper §6.1, Table 2).

An experiment needs no text. A planned turn is three numbers: the tokens that the user adds, the
tokens that the model answers, and the seconds that the user thinks before. A fourth number says how
much of the context so far the turn keeps, if it does not keep all. A planned conversation is a list
of turns and the arrival time of the first one.

    arrival          reply ends           reply ends
       | turn 1 ........| think | turn 2 ....| think | turn 3 ...

Sources make conversations: `synthetic` and `many_turns` here, datasets of texts and traces in
traces.py. `with_arrivals` adds the times:

    with_arrivals(synthetic("sharegpt", 1000, seed=0), request_rate=2.0, seed=0)

Invariants: turns of one conversation never overlap, because the next turn comes `think_seconds`
after the reply, however late the reply is; a turn's context is what it keeps and its own tokens;
the same seed gives the same load.
"""
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np


class PlannedTurn(NamedTuple):
    input_tokens: int               # the new tokens only, without the history
    output_tokens: int
    think_seconds: float = 0.0      # from the end of the previous reply; 0 for the first turn
    # How many tokens of the context so far it goes on from. None: all. With 100 tokens so far and
    # keep 60, the turn *rewinds*: its first new token has position 60. A first turn keeps nothing.
    keep: int | None = None

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def kept(self, context: int) -> int:
        """How many tokens it keeps of a context of that length."""
        return context if self.keep is None else min(self.keep, context)


class Piece(NamedTuple):
    """A piece of text. Pieces of one id have the same tokens, and behind the same pieces."""
    id: int
    tokens: int


class PlannedConversation(NamedTuple):
    name: str
    turns: list[PlannedTurn]
    arrival: float = 0.0            # of the first turn, in seconds from the start of the experiment
    begins: tuple[Piece, ...] = ()  # the first prompt begins like that of another conversation

    @property
    def contexts(self) -> list[int]:
        """The length of the context at the end of each reply."""
        ends = accumulate(self.turns, lambda context, turn: turn.kept(context) + turn.tokens,
                          initial=0)
        return list(ends)[1:]

    @property
    def tokens(self) -> int:
        """Length of the longest context."""
        return max(self.contexts)


def numbered(turn_lists: Iterable[list[PlannedTurn]]) -> Iterator[PlannedConversation]:
    """Name conversations by their number in the source; leave out those without turns."""
    for number, turns in enumerate(turn_lists):
        if turns:
            yield PlannedConversation(str(number), turns)


def within_context(conversations: Iterable[PlannedConversation],
                   limit: int) -> list[PlannedConversation]:
    """Leave out the conversations whose context grows above `limit` tokens, as the paper does."""
    return [conversation for conversation in conversations if conversation.tokens <= limit]


def cut_to_context(conversations: Iterable[PlannedConversation],
                   limit: int) -> Iterator[PlannedConversation]:
    """End each conversation before its context would grow above `limit` tokens.

    The first turn that does not fit is lost, and so are all later turns. With
    limit 100, turns of 60, 30 and 20 tokens become turns of 60 and 30. A conversation whose
    first turn is too long disappears.
    """
    for conversation in conversations:
        fits = [context <= limit for context in conversation.contexts] + [False]
        if turns := conversation.turns[:fits.index(False)]:
            yield conversation._replace(turns=turns)


# ---- arrivals

def exponential_think(rng: np.random.Generator, reply_tokens: int, mean: float = 60.0) -> float:
    """Seconds between a reply and the next turn, independent of the reply (the paper's rule)."""
    return rng.exponential(mean)


def reading_think(rng: np.random.Generator, reply_tokens: int) -> float:
    """Seconds to read the reply: 100 ms per token, and at least 5 s (the
    rule of the paper's draft)."""
    return max(5.0, 0.1 * reply_tokens)


def with_arrivals(conversations: Iterable[PlannedConversation], request_rate: float, seed: int,
                  think: Callable[[np.random.Generator, int], float] | None = exponential_think
                  ) -> list[PlannedConversation]:
    """Give every conversation an arrival time (Poisson) and every later turn a think time.

    request_rate: turns per second. Conversations arrive at request_rate / mean turns: 2 turns per
    second and 5 turns per conversation make 0.4 conversations per second. After a while the later
    turns of old conversations mix with the first turns of new ones, and together they come at
    `request_rate`. think: (rng, tokens of the previous reply) -> seconds; None: the conversations
    keep their think times. ValueError: there are no conversations, or the rate is not positive.
    """
    conversations = list(conversations)
    if not conversations or not request_rate > 0:
        raise ValueError("arrivals need conversations and a request rate above 0, "
                         f"got {len(conversations)} and {request_rate}")
    # Not default_rng(seed): synthetic draws the turns from it, and the gaps
    # would repeat the same numbers.
    rng = np.random.default_rng([seed, 1])
    mean_turns = sum(len(conversation.turns) for conversation in conversations) / len(conversations)
    gaps = rng.exponential(mean_turns / request_rate, len(conversations))       # [conversations]
    arrived = []
    for conversation, arrival in zip(conversations, np.cumsum(gaps).tolist()):
        turns = conversation.turns
        if think:
            turns = turns[:1] + [turn._replace(think_seconds=think(rng, previous.output_tokens))
                                 for previous, turn in pairwise(turns)]
        arrived.append(conversation._replace(turns=turns, arrival=arrival))
    return arrived


def under_way(conversations: Iterable[PlannedConversation],
              begin: float) -> Iterator[PlannedConversation]:
    """The same load for somebody who comes `begin` seconds later, and so
    meets conversations of every age.

    What a conversation has said before is a part of its first prompt, and counts as new
    tokens there. (We do not know how long the replies take, and count think times only.)
    Turns of 10 tokens at 0, 50 and 90 s, and begin 60: one turn is left, at 30 s, with
    20 tokens more in its prompt."""
    for conversation in conversations:
        turns, begins = conversation.turns, conversation.arrival
        times = list(accumulate((turn.think_seconds for turn in turns[1:]), initial=begins))
        first = bisect_left(times, begin)
        if first < len(turns):
            context = conversation.contexts[first]
            prompt = PlannedTurn(context - turns[first].output_tokens, turns[first].output_tokens)
            yield conversation._replace(turns=[prompt, *turns[first + 1:]],
                                        arrival=times[first] - begin)


# ---- synthetic conversations

def many_turns(limit: int, rate: float, think: Callable, seed: int) -> list[PlannedConversation]:
    """6 users who come at random times and stay for about 11 turns of some 260 tokens.

    At 60 turns per second all come within about a second. Their contexts grow to some 3,000 tokens.
    limit: the longest context, in tokens. rate, think: see `with_arrivals`.
    """
    rng = np.random.default_rng(seed)
    # Of each user [turns, 2]: the input and output tokens of 8 to 16 turns.
    lengths = [rng.integers((120, 12), (360, 36), (rng.integers(8, 17), 2)).tolist()
               for _ in range(6)]
    users = numbered([PlannedTurn(*turn) for turn in turns] for turns in lengths)
    return with_arrivals(cut_to_context(users, limit), rate, seed, think)


class Shape(NamedTuple):
    """A dataset: the papers' means and limit, and our choice of the spread around them.

    The paper gives the mean number of turns, the mean lengths (Table 2) and the longest context; it
    leaves longer conversations out. Its draft also leaves out conversations of fewer than 5 turns.

    We chose the rest. Turns, input tokens and output tokens are lognormal; a sigma is the standard
    deviation of the logarithm. Of ShareGPT's conversations 0.57% exceed 16,384 tokens (paper); a
    turn_sigma of 1.26 gives 0.5%. People send one word or paste a page: with an input_sigma of 1.2
    the mean is twice the median. A model's replies vary less: 0.8. In UltraChat both sides are
    models: 0.7 and 0.5. The draft's conversations must hold 5 turns and more within 2,048 tokens,
    so their turns can vary little: 0.3.
    """
    turns: float
    input_tokens: float
    output_tokens: float
    max_context: int
    input_sigma: float = 1.2
    output_sigma: float = 0.8
    turn_sigma: float = 1.26
    least_turns: int = 1


SHAPES = {
    "sharegpt": Shape(5.56, 37.77, 204.58, 16_384),                     # Table 2
    "ultrachat": Shape(3.86, 51.78, 257.81, 16_384, 0.7, 0.5),
    # arXiv 2312.05516
    "sharegpt-draft": Shape(7.58, 31.26, 180.44, 2_048, turn_sigma=0.3, least_turns=5),
    "lmsys-draft": Shape(7.73, 22.49, 100.67, 2_048, turn_sigma=0.3, least_turns=5),
    # Its Figure 9 has no means: these are of the conversations of "sharegpt" with 5 turns or more.
    "sharegpt-draft-long": Shape(12.5, 37.4, 205.0, 16_384, least_turns=5),
}


def synthetic(dataset: str, count: int, seed: int) -> list[PlannedConversation]:
    """`count` random conversations with the means of SHAPES[dataset], each within its max_context.

    ValueError: there is no such dataset, or count < 1.
    """
    if dataset not in SHAPES or count < 1:
        raise ValueError(f"expected one of {', '.join(SHAPES)} and a count of at least 1, "
                         f"got {dataset!r} and {count}")
    shape, rng = SHAPES[dataset], np.random.default_rng(seed)
    means = means_of_all(shape)
    kept = []
    while len(kept) < count:
        turns, lengths = draw(shape, means, count, rng)
        kept += np.split(lengths, np.cumsum(turns))[:-1]      # behind the last one there is nothing
    return list(numbered([PlannedTurn(*turn) for turn in lengths.tolist()]
                         for lengths in kept[:count]))


def draw(shape: Shape, means: np.ndarray, count: int, rng: np.random.Generator
         ) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` conversations, and leave out those that are too long or have too few turns.

    means [3]: of turns, input tokens and output tokens, of all that we draw.
    Returns turns [kept]: how many each conversation has; and lengths [sum of turns, 2]: the input
    and output tokens of each turn.
    """
    sigma = np.array([shape.turn_sigma, shape.input_sigma, shape.output_sigma])
    # the mean of a lognormal is exp(mu + sigma^2 / 2)
    mu = np.log(means) - sigma**2 / 2
    turns = np.rint(rng.lognormal(mu[0], sigma[0], count)).astype(int)              # [count]
    turns = turns.clip(1, shape.max_context)
    owner = np.repeat(np.arange(count), turns)                                      # [all turns]
    lengths = rng.lognormal(mu[1:], sigma[1:], (len(owner), 2))                     # [all turns, 2]
    lengths = np.rint(lengths).clip(1).astype(int)
    context = np.bincount(owner, lengths.sum(axis=1), count)                        # [count]
    kept = (context <= shape.max_context) & (turns >= shape.least_turns)            # [count]
    return turns[kept], lengths[kept[owner]]


def means_of_all(shape: Shape) -> np.ndarray:
    """The means [3] that `draw` needs, so that the conversations that it keeps have the shape's
    means.

    Leaving out the longest shrinks all three means. We draw, measure the means that are left, scale
    each mean by its shortfall, and repeat until all are within 0.5%. The seed here is fixed, so the
    correction is the same for every load.
    ValueError: contexts that short cannot have these means.
    """
    wanted, count = np.array(shape[:3]), 20_000
    means = wanted
    # A mean that has moved by a factor of ten and is still not right never will be.
    while np.abs(np.log10(means / wanted)).max() < 1:
        turns, lengths = draw(shape, means, count, np.random.default_rng(0))
        if not len(turns):
            break
        shortfall = wanted / [turns.mean(), *lengths.mean(axis=0)]
        if np.abs(shortfall - 1).max() < 0.005:
            return means
        means = means * shortfall
    raise ValueError(f"no conversations of at most {shape.max_context} tokens have the means "
                     f"{shape[:3]}: raise max_context")
