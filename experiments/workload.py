"""Conversations, and when their turns happen: the load of every experiment (paper §6.1, Table 2).

An experiment needs no text. A planned turn is three numbers: the tokens that the user adds, the tokens
that the model answers, and the seconds that the user thinks before. A planned conversation is a list of
turns and the arrival time of the first one.

    arrival          reply ends           reply ends
       | turn 1 ........| think | turn 2 ....| think | turn 3 ...

Sources (synthetic data, a dataset of texts, a request trace) make conversations. `cut_to_context`
shortens them to the model's context. `with_arrivals` adds the times:

    with_arrivals(synthetic("sharegpt", 1000, seed=0), request_rate=2.0, seed=0)
    with_arrivals(cut_to_context(sharegpt("sharegpt.json", count_tokens), 16_384), request_rate=2.0, seed=0)
    list(cut_to_context(mooncake("conversation_trace.jsonl"), 131_072))      # a trace has its own times

Invariants: turns of one conversation never overlap, because the next turn comes `think_seconds` after
the reply, however late the reply is; a turn's context is the sum of all tokens before it; the same seed
gives the same load.
"""
import json
from contextlib import contextmanager
from itertools import accumulate, cycle, groupby, pairwise
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np


class PlannedTurn(NamedTuple):
    input_tokens: int               # the new tokens only, without the history
    output_tokens: int
    think_seconds: float = 0.0      # from the end of the previous reply; 0 for the first turn

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class PlannedConversation(NamedTuple):
    name: str
    turns: list[PlannedTurn]
    arrival: float = 0.0            # of the first turn, in seconds from the start of the experiment

    @property
    def tokens(self) -> int:
        """Length of the context at the end of the last reply."""
        return sum(turn.tokens for turn in self.turns)


def numbered(turn_lists: Iterable[list[PlannedTurn]]) -> Iterator[PlannedConversation]:
    """Name conversations by their number in the source; leave out those without turns."""
    for number, turns in enumerate(turn_lists):
        if turns:
            yield PlannedConversation(str(number), turns)


def cut_to_context(conversations: Iterable[PlannedConversation], limit: int) -> Iterator[PlannedConversation]:
    """End each conversation before its context would grow above `limit` tokens.

    The turn that does not fit is lost, and so are all later turns, which build on it. With limit 100,
    turns of 60, 30 and 20 tokens become turns of 60 and 30. A conversation whose first turn is too long
    disappears.
    """
    for conversation in conversations:
        contexts = accumulate(turn.tokens for turn in conversation.turns)
        turns = [turn for turn, context in zip(conversation.turns, contexts) if context <= limit]
        if turns:
            yield conversation._replace(turns=turns)


# ---- arrivals

def exponential_think(rng: np.random.Generator, reply_tokens: int, mean: float = 60.0) -> float:
    """Seconds between a reply and the next turn, independent of the reply (the paper's rule)."""
    return rng.exponential(mean)


def reading_think(rng: np.random.Generator, reply_tokens: int) -> float:
    """Seconds to read the reply: 100 ms per token, and at least 5 s (the rule of the paper's draft)."""
    return max(5.0, 0.1 * reply_tokens)


def with_arrivals(conversations: Iterable[PlannedConversation], request_rate: float, seed: int,
                  think: Callable[[np.random.Generator, int], float] = exponential_think
                  ) -> list[PlannedConversation]:
    """Give every conversation an arrival time (Poisson) and every later turn a think time.

    request_rate: turns per second. Conversations arrive at request_rate / mean turns: 2 turns per second
    and 5 turns per conversation make 0.4 conversations per second. After a while the later turns of old
    conversations mix with the first turns of new ones, and together they come at `request_rate`.
    think: (rng, tokens of the previous reply) -> seconds.
    ValueError: there are no conversations, or the rate is not positive.
    """
    conversations = list(conversations)
    if not conversations or not request_rate > 0:
        raise ValueError("arrivals need conversations and a request rate above 0, "
                         f"got {len(conversations)} and {request_rate}")
    # A stream of its own: with the stream of synthetic(seed), gaps would depend on the numbers of turns.
    rng = np.random.default_rng([seed, 1])
    mean_turns = sum(len(conversation.turns) for conversation in conversations) / len(conversations)
    gaps = rng.exponential(mean_turns / request_rate, len(conversations))       # [conversations]
    arrived = []
    for (name, turns, _), arrival in zip(conversations, np.cumsum(gaps).tolist()):
        later = [turn._replace(think_seconds=think(rng, previous.output_tokens))
                 for previous, turn in pairwise(turns)]
        arrived.append(PlannedConversation(name, turns[:1] + later, arrival))
    return arrived


# ---- synthetic conversations

def many_turns(limit: int, rate: float, think: Callable, seed: int) -> list[PlannedConversation]:
    """24 users who come within a few seconds and stay for about 16 short turns.

    Their contexts grow to some 800 tokens.
    limit: the longest context, in tokens. rate, think: see `with_arrivals`.
    """
    rng = np.random.default_rng(seed)
    conversations = []
    for number in range(24):
        count = rng.integers(8, 25)
        lengths = rng.integers((8, 12), (40, 36), (count, 2)).tolist()         # [count, 2]: input, output
        conversations.append(PlannedConversation(str(number), [PlannedTurn(*turn) for turn in lengths]))
    return with_arrivals(cut_to_context(conversations, limit), rate, seed, think)


class Shape(NamedTuple):
    """A dataset as papers describe it: mean lengths, the longest context used, the spread of lengths.

    The papers give no spread, so the sigmas (of the logarithm of a length) are our choice. People send
    one word or paste a page: at 1.2 the mean is twice the median, and one message in a hundred is eight
    times as long as the mean. A model's replies vary less: 0.8. In UltraChat both sides are models: 0.7
    and 0.5.
    """
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


def synthetic(dataset: str, count: int, seed: int) -> list[PlannedConversation]:
    """`count` random conversations with the means of SHAPES[dataset], each within its max_context.

    ValueError: there is no such dataset, or count < 1.
    """
    if dataset not in SHAPES or count < 1:
        raise ValueError(f"expected one of {', '.join(SHAPES)} and a count of at least 1, "
                         f"got {dataset!r} and {count}")
    shape = SHAPES[dataset]
    owner, lengths = draw(shape, means_before_cut(shape), count, np.random.default_rng(seed))
    first_of_next = np.flatnonzero(np.diff(owner)) + 1
    each = np.split(lengths, first_of_next)
    return list(numbered([PlannedTurn(*turn) for turn in turns.tolist()] for turns in each))


def draw(shape: Shape, means: np.ndarray, count: int, rng: np.random.Generator
         ) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` conversations, and cut them to the shape's max_context as `cut_to_context` does.

    The number of turns is geometric: after each turn the user leaves with the same probability. Lengths
    are lognormal, at least 1 and at most half of max_context, so that the first turn always fits.
    means [3]: of turns, input tokens and output tokens, before the cut.
    Returns owner [turns]: the number of each turn's conversation; and lengths [turns, 2]: its input and
    output tokens.
    """
    sigma = np.array([shape.input_sigma, shape.output_sigma])
    turns = rng.geometric(1 / means[0], count)                                              # [count]
    owner = np.repeat(np.arange(count), turns)                                              # [all turns]
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    lengths = rng.lognormal(np.log(means[1:]) - sigma**2 / 2, sigma, (len(owner), 2))       # [all turns, 2]
    lengths = np.clip(np.rint(lengths), 1, shape.max_context // 2).astype(int)
    # A turn's context is the running total of all tokens, less the total before its conversation.
    total = np.cumsum(lengths.sum(axis=1))                                                  # [all turns]
    first_turn = np.cumsum(turns) - turns                                                   # [count]
    before = np.append(0, total)[first_turn]                                                # [count]
    context = total - before[owner]                                                         # [all turns]
    fits = context <= shape.max_context                                                     # [all turns]
    return owner[fits], lengths[fits]


def means_before_cut(shape: Shape) -> np.ndarray:
    """The means [3] that `draw` needs, so that the shape's means remain after the cut.

    The cut takes late turns, and conversations with long messages lose more of them. So all three means
    shrink: of sharegpt-draft's 7.58 turns only 5.5 would be left. We draw, measure the means that are
    left, scale each mean by its shortfall, and repeat until all are within 0.5%. The seed here is
    fixed, so the correction is the same for every load.
    ValueError: contexts that short cannot have these means.
    """
    wanted, count = np.array(shape[:3]), 20_000
    means = wanted
    # A mean that has moved by a factor of ten and is still not right never will be.
    while np.abs(np.log10(means / wanted)).max() < 1:
        owner, lengths = draw(shape, means, count, np.random.default_rng(0))
        shortfall = wanted / [len(owner) / count, *lengths.mean(axis=0)]
        if np.abs(shortfall - 1).max() < 0.005:
            return means
        means = means * shortfall
    raise ValueError(f"no conversations of at most {shape.max_context} tokens have the means {shape[:3]}: "
                     "raise max_context")


# ---- datasets of text

# The names that datasets give to the model. Messages from everyone else are input.
ASSISTANT = {"assistant", "gpt", "chatgpt", "bing", "bard"}


def turns_of(messages: Iterable[tuple[str, str]], count_tokens: Callable[[str], int]) -> list[PlannedTurn]:
    """The turns of a conversation's (role, text) messages.

    Consecutive messages of one side count as one message, so a system prompt belongs to the user's
    first message. Empty messages do not count. We drop a reply at the start, which nobody asked for,
    and a prompt at the end, which nobody answered.
    """
    counted = [(role in ASSISTANT, count_tokens(text)) for role, text in messages]
    counted = [(is_reply, tokens) for is_reply, tokens in counted if tokens]
    sides = [(is_reply, sum(tokens for _, tokens in run))
             for is_reply, run in groupby(counted, key=lambda message: message[0])]
    if sides and sides[0][0]:
        del sides[0]
    prompts, replies = sides[::2], sides[1::2]
    return [PlannedTurn(prompt, reply) for (_, prompt), (_, reply) in zip(prompts, replies)]


def sharegpt(path: str, count_tokens: Callable[[str], int]) -> Iterator[PlannedConversation]:
    """ShareGPT: an array of {"conversations": [{"from": "human" or "gpt", "value": text}, ...]}."""
    def turns(record):
        messages = ((message["from"], message["value"]) for message in record["conversations"])
        return turns_of(messages, count_tokens)
    return numbered(json_array(path, turns))


def ultrachat(path: str, count_tokens: Callable[[str], int]) -> Iterator[PlannedConversation]:
    """UltraChat: lines of {"data": [user text, assistant text, user text, ...]}."""
    def turns(record):
        return turns_of(zip(cycle(["user", "assistant"]), record["data"]), count_tokens)
    return numbered(json_lines(path, turns))


def lmsys(path: str, count_tokens: Callable[[str], int]) -> Iterator[PlannedConversation]:
    """LMSYS-Chat-1M: lines of {"conversation": [{"role": ..., "content": text}, ...]}."""
    def turns(record):
        messages = ((message["role"], message["content"]) for message in record["conversation"])
        return turns_of(messages, count_tokens)
    return numbered(json_lines(path, turns))


# ---- Mooncake traces

PIECE = 512     # tokens of input for which the trace has one id


class TraceRequest(NamedTuple):
    arrival: float                  # seconds
    input_tokens: int               # the whole context
    output_tokens: int
    prefix: list[int]               # an id for each full piece of input; equal ids: equal input up to here

    @property
    def context(self) -> int:
        return self.input_tokens + self.output_tokens


def mooncake(path: str) -> list[PlannedConversation]:
    """The conversations of a request trace, with the trace's own times.

    The file has JSON lines of {"timestamp": ms, "input_length", "output_length", "hash_ids"}: one id
    for every 512 tokens of input, the last one perhaps for fewer. Every request keeps exactly its
    context of the trace. The trace does not tell when a reply ended. So a think time is the whole gap
    between two requests, and a replay falls behind by the time that the answers take.
    """
    requests = sorted(json_lines(path, trace_request), key=lambda request: request.arrival)
    return [PlannedConversation(str(number), replay(chain), chain[0].arrival)
            for number, chain in enumerate(rebuild(requests))]


def trace_request(record: dict) -> TraceRequest:
    prompt, reply = int(record["input_length"]), int(record["output_length"])
    if min(prompt, reply) < 1:
        raise ValueError(f"lengths must be at least 1, got {prompt} and {reply}")
    prefix = record["hash_ids"][:prompt // PIECE]
    return TraceRequest(float(record["timestamp"]) / 1000, prompt, reply, prefix)


def rebuild(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    """Find out which request continues which. requests: in order of arrival. Returns conversations.

    A request continues a conversation if it begins with the whole prefix of that conversation's latest
    request, and is longer than that request with its reply. (A request that is not longer repeats or
    edits the question; it does not answer the reply.) Of several such conversations we take the one
    with the longest prefix.

        request   input   output   prefix
        1           600       50   [7]
        2         1,100       20   [7 8]      continues 1: begins with 7, and 1,100 > 600 + 50
        3         1,200       20   [7 9]      new: the conversation of 1 has moved on to [7 8]

    Many conversations share some prefixes: a system prompt, or a document that many people ask about. If
    an earlier conversation has shown a request's whole prefix, that prefix does not tell which request
    continues this one. Then we let no request continue it.
    """
    ends: dict[int, list[TraceRequest]] = {}    # last id of a conversation's latest prefix -> its requests
    seen: set[int] = set()
    conversations = []
    for request in requests:
        end = continued_end(request, ends)
        if end is None:
            conversation = []
            conversations.append(conversation)
        else:
            conversation = ends.pop(end)
        conversation.append(request)
        if request.prefix:
            last = request.prefix[-1]
            if last == end or last not in seen:
                ends[last] = conversation
        seen.update(request.prefix)
    return conversations


def continued_end(request: TraceRequest, ends: dict[int, list[TraceRequest]]) -> int | None:
    """The key in `ends` of the conversation that the request continues; None: it begins a new one."""
    for id in reversed(request.prefix):             # the longest prefix first
        if id in ends and request.input_tokens > ends[id][-1].context:
            return id
    return None


def replay(chain: list[TraceRequest]) -> list[PlannedTurn]:
    """The turns of one conversation's requests: the tokens that each adds, and the time between them."""
    turns = [PlannedTurn(chain[0].input_tokens, chain[0].output_tokens)]
    for previous, request in pairwise(chain):
        new_tokens = request.input_tokens - previous.context
        turns.append(PlannedTurn(new_tokens, request.output_tokens, request.arrival - previous.arrival))
    return turns


# ---- reading files

# A file's kind is told by a field of its first record.
KINDS = {"conversations": sharegpt, "data": ultrachat, "conversation": lmsys, "hash_ids": mooncake}


def load(path: str, tokenizer: str) -> list[PlannedConversation]:
    """The conversations of a file of any kind in KINDS. Those of a Mooncake trace have arrival times.

    tokenizer: a checkpoint's directory or hub name; its tokenizer counts the tokens of texts.
    ValueError: the file cannot be read, is of another kind, or has no turn.
    """
    with naming(path):
        fields = first_record(path)
        reader = next((KINDS[field] for field in KINDS if field in fields), None)
        if reader is None:
            raise ValueError(f"its first record has none of the fields {', '.join(KINDS)}")
    conversations = list(reader(path) if reader is mooncake else reader(path, token_counter(tokenizer)))
    if not conversations:
        raise ValueError(f"{path} has no conversation with a turn in it")
    return conversations


def first_record(path: str):
    """The first line as JSON. A file that begins with "[" is ShareGPT's; we do not parse it here."""
    with open(path, "rb") as file:
        start = file.read(1 << 20).lstrip()
    if start.startswith(b"["):
        return {"conversations": []}
    return json.loads(start.partition(b"\n")[0])


def token_counter(model: str) -> Callable[[str], int]:
    # Imported here, because these import torch; a trace of lengths needs neither.
    from checkpoint import find_checkpoint
    from serving.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(find_checkpoint(model))
    return lambda text: len(tokenizer.encode(text))


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
    """parse(record) for each (number, record). ValueError: names the record, or says "empty"."""
    number = None
    for number, record in records:
        with naming(f"{path}, {unit} {number}"):
            result = parse(record)
        yield result
    if number is None:
        raise ValueError(f"{path} is empty")


@contextmanager
def naming(place: str):
    """Turn any error of reading or parsing into one ValueError that names the place."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {place}: {error!r}") from error
