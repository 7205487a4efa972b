"""Conversations and when they happen: what the experiments feed the engine (paper, Table 2).

A conversation is a list of turns, and a turn is three numbers: tokens the user adds, tokens the model answers, and how long
the user thinks in between. Sources yield conversations, `cut` fits them into a context, `with_arrivals` says when they begin:

    with_arrivals(synthetic("sharegpt", 1000, seed=0), request_rate=2.0, seed=0)
    with_arrivals(cut(sharegpt("sharegpt.json", count_tokens), 16_384), request_rate=2.0, seed=0)
    list(cut(mooncake("conversation_trace.jsonl"), 131_072))         # a trace knows its own times

Invariants: conversations overlap, turns of one never do (the next one comes `think_seconds` after the reply, however late
that is); the context of a turn is the sum of all tokens before it; the same seed gives the same workload."""
import json
from contextlib import contextmanager
from itertools import accumulate, cycle, groupby, pairwise
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np


class Turn(NamedTuple):
    input_tokens: int               # new tokens only, not the history
    output_tokens: int
    think_seconds: float = 0.0      # from the end of the previous reply; 0 for the first turn


class Conversation(NamedTuple):
    name: str
    turns: list[Turn]
    arrival: float = 0.0            # of the first turn, in seconds from the start of the workload


def numbered(turn_lists: Iterable[list[Turn]]) -> Iterator[Conversation]:
    """Conversations named by their number in the source; those without turns are left out."""
    return (Conversation(str(number), turns) for number, turns in enumerate(turn_lists) if turns)


def cut(conversations: Iterable[Conversation], limit: int) -> Iterator[Conversation]:
    """End each conversation before the turn whose reply would bring its context above `limit` tokens: that turn and all later
    ones are lost, since they build on it. A conversation whose first turn is too long disappears."""
    for conversation in conversations:
        contexts = accumulate(turn.input_tokens + turn.output_tokens for turn in conversation.turns)
        turns = [turn for turn, context in zip(conversation.turns, contexts) if context <= limit]    # contexts only grow
        if turns:
            yield conversation._replace(turns=turns)


# --- arrivals ---

def exponential_think(rng: np.random.Generator, reply_tokens: int, mean: float = 60.0) -> float:
    """Seconds between a reply and the next turn, whatever the reply (the paper's rule)."""
    return rng.exponential(mean)


def reading_think(rng: np.random.Generator, reply_tokens: int) -> float:
    """Seconds to read the reply, 100 ms per token and at least 5 s (the rule of the paper's draft)."""
    return max(5.0, 0.1 * reply_tokens)


def with_arrivals(conversations: Iterable[Conversation], request_rate: float, seed: int,
                  think: Callable[[np.random.Generator, int], float] = exponential_think) -> list[Conversation]:
    """Poisson arrivals at `request_rate` requests (turns) per second, and a think time before every later turn.

    What arrives is a conversation, so their rate is request_rate / mean turns; once old conversations' later turns mix with
    new ones' first turns, requests come at `request_rate`. think: (rng, tokens of the previous reply) -> seconds.
    ValueError: no conversations, or a rate that is not positive."""
    conversations = list(conversations)
    if not conversations or not request_rate > 0:
        raise ValueError(f"arrivals need conversations and a request rate above 0, got {len(conversations)} and {request_rate}")
    rng = np.random.default_rng([seed, 1])      # not the stream of synthetic(seed): gaps would depend on the numbers of turns
    mean_turns = sum(len(conversation.turns) for conversation in conversations) / len(conversations)
    arrivals = np.cumsum(rng.exponential(mean_turns / request_rate, len(conversations))).tolist()
    return [Conversation(name, turns[:1] + [turn._replace(think_seconds=think(rng, previous.output_tokens))
                                            for previous, turn in pairwise(turns)], arrival)
            for (name, turns, _), arrival in zip(conversations, arrivals)]


# --- synthetic conversations ---

def many_turns(limit: int, rate: float, think: Callable, seed: int) -> list[Conversation]:
    """24 users who come within a few seconds and stay for about 16 short turns; contexts up to some 800 tokens."""
    rng = np.random.default_rng(seed)
    lengths = [rng.integers((8, 12), (40, 36), (rng.integers(8, 25), 2)).tolist() for _ in range(24)]
    users = [Conversation(str(n), [Turn(*turn) for turn in turns]) for n, turns in enumerate(lengths)]
    return with_arrivals(cut(users, limit), rate, seed, think)


class Shape(NamedTuple):
    """The published means of a dataset, the longest context used, and how widely message lengths spread.

    The papers give no spread, so the sigmas (of the logarithm of a length) are our choice. People send one word or paste a
    page: at 1.2 the mean is twice the median, and one message in a hundred is eight times the mean. A model's replies
    vary less: 0.8. In UltraChat both sides are models: 0.7 and 0.5."""
    turns: float
    input_tokens: float
    output_tokens: float
    max_context: int
    input_sigma: float = 1.2
    output_sigma: float = 0.8


SHAPES = {
    "sharegpt": Shape(5.56, 37.77, 204.58, 16_384),                     # Table 2
    "ultrachat": Shape(3.86, 51.78, 257.81, 16_384, 0.7, 0.5),
    "sharegpt-draft": Shape(7.58, 31.26, 180.44, 2_048),                # arXiv 2312.05516
    "lmsys-draft": Shape(7.73, 22.49, 100.67, 2_048),
}


def synthetic(dataset: str, count: int, seed: int) -> list[Conversation]:
    """`count` random conversations with the means of SHAPES[dataset], none above its max_context. ValueError: no such dataset."""
    if dataset not in SHAPES or count < 1:
        raise ValueError(f"expected one of {', '.join(SHAPES)} and a count of at least 1, got {dataset!r} and {count}")
    shape = SHAPES[dataset]
    owner, tokens = draw(shape, means_before_cut(shape), count, np.random.default_rng(seed))
    each = np.split(tokens, np.flatnonzero(np.diff(owner)) + 1)
    return list(numbered([Turn(*lengths) for lengths in turns.tolist()] for turns in each))


def draw(shape: Shape, means: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """All turns of `count` conversations that fit: owner [turns], the conversation of each, and tokens [turns, 2], its input and
    output. means: of turns, input and output before the cut.

    The number of turns is geometric (after each turn the user leaves with the same probability), lengths are lognormal, at
    least 1 and at most half of max_context, so that every first turn fits; then conversations are cut as `cut` does."""
    sigma = np.array([shape.input_sigma, shape.output_sigma])
    turns = rng.geometric(1 / means[0], count)                                                          # [count]
    owner = np.repeat(np.arange(count), turns)                                                          # [all turns]
    tokens = rng.lognormal(np.log(means[1:]) - sigma**2 / 2, sigma, (len(owner), 2))                    # [all turns, 2]
    tokens = np.clip(np.rint(tokens), 1, shape.max_context // 2).astype(int)
    total = np.cumsum(tokens.sum(axis=1))                                                               # [all turns]
    before = np.append(0, total)[np.cumsum(turns) - turns]                                              # [count]
    fits = total - before[owner] <= shape.max_context
    return owner[fits], tokens[fits]


def means_before_cut(shape: Shape) -> np.ndarray:
    """[3]: the means of turns, input and output to draw with, so that after the cut those of `shape` remain.

    The cut takes late turns and prefers long ones, so all three means shrink: of sharegpt-draft's 7.58 turns 5.5 are left.
    Fixed point: draw, measure what is left, scale each mean by what it lacks, until all are within 0.5%. It has a seed of
    its own, so the correction is the same for every workload. ValueError: contexts that short cannot have these means."""
    wanted, count = np.array(shape[:3]), 20_000
    means = wanted
    while np.abs(np.log10(means / wanted)).max() < 1:       # ten times off and still not there: it never will be
        owner, tokens = draw(shape, means, count, np.random.default_rng(0))
        lacking = wanted / [len(owner) / count, *tokens.mean(axis=0)]
        if np.abs(lacking - 1).max() < 0.005:
            return means
        means = means * lacking
    raise ValueError(f"no conversations of at most {shape.max_context} tokens have the means {shape[:3]}: raise max_context")


# --- datasets of text ---

ASSISTANT = {"assistant", "gpt", "chatgpt", "bing", "bard"}       # ShareGPT's names for the model; everyone else is input


def turns_of(messages: Iterable[tuple[str, str]], count_tokens: Callable[[str], int]) -> list[Turn]:
    """Turns of (role, text) messages. Consecutive messages of one side are one message (a system prompt belongs to the user's),
    empty ones are none; a reply that nobody asked for (at the start) and a prompt that nobody answered (at the end) are lost."""
    counted = [(role in ASSISTANT, tokens) for role, text in messages if (tokens := count_tokens(text))]
    sides = [(is_reply, sum(tokens for _, tokens in run)) for is_reply, run in groupby(counted, key=lambda side: side[0])]
    if sides and sides[0][0]:
        del sides[0]
    return [Turn(prompt, reply) for (_, prompt), (_, reply) in zip(sides[::2], sides[1::2])]


def sharegpt(path: str, count_tokens: Callable[[str], int]) -> Iterator[Conversation]:
    """A JSON array of {"conversations": [{"from": "human" or "gpt", "value": text}, ...]}."""
    return numbered(json_array(path, lambda record: turns_of(
        ((message["from"], message["value"]) for message in record["conversations"]), count_tokens)))


def ultrachat(path: str, count_tokens: Callable[[str], int]) -> Iterator[Conversation]:
    """JSON lines of {"data": [user text, assistant text, user text, ...]}."""
    return numbered(json_lines(path, lambda record: turns_of(zip(cycle(["user", "assistant"]), record["data"]), count_tokens)))


def lmsys(path: str, count_tokens: Callable[[str], int]) -> Iterator[Conversation]:
    """JSON lines of {"conversation": [{"role": "user" or "assistant", "content": text}, ...]} (LMSYS-Chat-1M)."""
    return numbered(json_lines(path, lambda record: turns_of(
        ((message["role"], message["content"]) for message in record["conversation"]), count_tokens)))


def load(path: str, tokenizer: str) -> list[Conversation]:
    """The conversations of a file, whichever of the kinds below it is: its first record tells. A Mooncake trace comes with its own
    times. tokenizer: a checkpoint's directory or hub name, whose tokenizer counts the tokens of texts."""
    with naming(path):
        with open(path, "rb") as file:
            start = file.read(1 << 20).lstrip()
        first = {"conversations": 0} if start.startswith(b"[") else json.loads(start.partition(b"\n")[0])
        reader = next((KINDS[field] for field in KINDS if field in first), None)
        if reader is None:
            raise ValueError(f"its first record has none of the fields {', '.join(KINDS)}")
    conversations = list(reader(path) if reader is mooncake else reader(path, token_counter(tokenizer)))
    if not conversations:
        raise ValueError(f"{path} has no conversation with a turn in it")
    return conversations


def token_counter(model: str) -> Callable[[str], int]:
    from checkpoint import find_checkpoint            # a trace of lengths needs neither model nor tokenizer
    from serving.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(find_checkpoint(model))
    return lambda text: len(tokenizer.encode(text))


# --- Mooncake traces ---

class TraceRequest(NamedTuple):
    arrival: float                  # seconds
    input_tokens: int               # the whole context
    output_tokens: int
    prefix: list[int]               # an id for each full 512 tokens of the input; equal ids mean equal input up to there

    @property
    def context(self) -> int:
        return self.input_tokens + self.output_tokens


def mooncake(path: str) -> list[Conversation]:
    """The conversations of a request trace, with its own times: JSON lines of {"timestamp": ms, "input_length",
    "output_length", "hash_ids": one for every 512 tokens of input, the last perhaps for fewer}.

    Every request's context is exactly the trace's. The trace does not tell when a reply ended, so a think time is the whole
    gap between two requests, and a replay falls behind by the time that it takes to answer."""
    requests = sorted(json_lines(path, trace_request), key=lambda request: request.arrival)
    return [Conversation(str(number), replay(chain), chain[0].arrival) for number, chain in enumerate(rebuild(requests))]


def trace_request(record: dict) -> TraceRequest:
    prompt, reply = int(record["input_length"]), int(record["output_length"])
    if min(prompt, reply) < 1:
        raise ValueError(f"lengths must be at least 1, got {prompt} and {reply}")
    return TraceRequest(float(record["timestamp"]) / 1000, prompt, reply, record["hash_ids"][:prompt // 512])


def rebuild(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    """Who continues whom: requests in order of arrival -> the requests of each conversation.

    A request continues the conversation whose latest request's prefix it begins with, the longest if there are several, and
    must be longer than that request with its reply: if not, it repeats or edits the question instead of answering the
    reply. Continuing moves the conversation's end, so of two requests that extend the same prefix the first continues the
    conversation and the second begins a new one (we share nothing between conversations).

    A prefix that another conversation showed first identifies nobody: it is a system prompt, or a document that many ask
    about. A request that has no more than that cannot be continued. One dictionary look-up per id."""
    ends: dict[int, list[TraceRequest]] = {}        # last id of a conversation's latest prefix -> the conversation
    seen: set[int] = set()
    conversations = []
    for request in requests:
        end = next((id for id in reversed(request.prefix) if id in ends and request.input_tokens > ends[id][-1].context), None)
        conversation = ends.pop(end, [])
        if not conversation:
            conversations.append(conversation)
        conversation.append(request)
        if request.prefix and (request.prefix[-1] == end or request.prefix[-1] not in seen):
            ends[request.prefix[-1]] = conversation
        seen.update(request.prefix)
    return conversations


def replay(chain: list[TraceRequest]) -> list[Turn]:
    """Turns of one conversation's requests: what each adds to the one before and its reply, and the time between them."""
    return [Turn(chain[0].input_tokens, chain[0].output_tokens)] + [
        Turn(request.input_tokens - previous.context, request.output_tokens, request.arrival - previous.arrival)
        for previous, request in pairwise(chain)]


KINDS = {"conversations": sharegpt, "data": ultrachat, "conversation": lmsys, "hash_ids": mooncake}      # by a field of a record


# --- reading files ---

def json_lines(path: str, parse: Callable) -> Iterator:
    """parse(record) for each line that is not blank. ValueError: names file and line."""
    with naming(path):
        file = open(path, "rb")
    with file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        yield from parsed(path, "line", lines, lambda line: parse(json.loads(line)))


def json_array(path: str, parse: Callable) -> Iterator:
    """parse(record) for each item of the array in a file. ValueError: names file and item."""
    with naming(path), open(path, "rb") as file:
        items = list(json.load(file))
    yield from parsed(path, "item", enumerate(items, 1), parse)


def parsed(path: str, unit: str, records: Iterable[tuple[int, object]], parse: Callable) -> Iterator:
    number = None
    for number, record in records:
        with naming(f"{path}, {unit} {number}"):
            result = parse(record)
        yield result
    if number is None:
        raise ValueError(f"{path} is empty")


@contextmanager
def naming(place: str):
    """Whatever is wrong with the input becomes one ValueError that says where."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {place}: {error!r}") from error
