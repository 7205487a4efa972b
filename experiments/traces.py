"""Files of conversations: datasets of texts, and traces of requests that somebody has recorded.

    load("trace.jsonl", tokenizer)      knows the kind by the fields of the first record

    kind          records (JSON lines)                                       times  an id stands for
    Mooncake      timestamp, input_length, output_length, hash_ids           ms     512 tokens
    the same      session_id, input_length, output_length, delay, timestamp  ms     512 tokens
    Qwen-Bailian  chat_id, parent_chat_id, timestamp, input_length, ...      s      16 tokens
    Weka, AgentX  requests: t, type, in, out, hash_ids                       s      64 tokens
    TraceLab      id, round_idx, prefix_len, input_len, ... (CSV)            ms     -
    ShareGPT (lines, or one array), UltraChat, LMSYS-Chat-1M: texts without times

A field that is null counts as left out. A file may begin with a byte order mark.

In a trace with sessions `input_length` counts the new tokens of a turn. In the other traces it
counts the whole context, and we must find the conversations first. A request *continues* an earlier
one if it begins with the whole prefix of the earlier one (the ids of its full pieces), and is
longer than the earlier one with its reply. Within one session of Weka's a request that begins with
a part of that prefix *rewinds*: it drops some of the reply, goes back, or begins with a summary.

Only sessions and TraceLab tell the time from a reply to the next turn. In the other traces we take
the whole gap between two requests for it, so a replay falls behind by the time that answers take.
"""
import codecs
import csv
import json
import math
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import cycle, groupby, pairwise, takewhile
from os.path import commonprefix
from typing import Callable, Iterable, Iterator, NamedTuple

from checkpoint import find_checkpoint
from experiments.workload import Piece, PlannedConversation, PlannedTurn, numbered
from serving.tokenizer import load_tokenizer


# ---- datasets of text

# The names that datasets give to the model. Messages from everyone else are input.
ASSISTANT = {"assistant", "gpt", "chatgpt", "bing", "bard"}


def turns_of(messages: Iterable[tuple[str, str]],
             count_tokens: Callable[[str], int]) -> list[PlannedTurn]:
    """The turns of a conversation's (role, text) messages.

    Consecutive messages of one side count as one message, so a system prompt belongs to the user's
    first message. Empty messages do not count. We drop a reply at the start, which nobody asked
    for, and a prompt at the end, which nobody answered.
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
    """ShareGPT: an array, or lines, of
    {"conversations": [{"from": "human" or "gpt", "value": text}, ...]}."""
    def turns(record):
        messages = ((message["from"], message["value"]) for message in record["conversations"])
        return turns_of(messages, count_tokens)
    with naming(path):
        records = json_array if is_array(path) else json_lines
    return numbered(records(path, turns))


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


# ---- traces of requests

class TraceRequest(NamedTuple):
    arrival: float                  # seconds
    input_tokens: int               # the whole context
    output_tokens: int
    prefix: list[int]      # an id for each full piece of input. Equal ids: all is equal up to there
    piece: int             # tokens of a piece

    @property
    def context(self) -> int:
        return self.input_tokens + self.output_tokens

    def continues(self, earlier: "TraceRequest") -> bool:
        start = self.prefix[:len(earlier.prefix)]
        return self.input_tokens > earlier.context and start == earlier.prefix

    def kept(self, earlier: "TraceRequest") -> int:
        """How many tokens of the earlier one and its reply it goes on from. If it does not continue
        the earlier one: the full pieces that both begin with, but not its own last token.

        With pieces of 64: of [1 2 3], with 200 tokens and 10 of the reply, the request
        [1 2 3 4] of 290 keeps 210, and [1 2 5] of 195 keeps 128."""
        if self.continues(earlier):
            return earlier.context
        common = len(commonprefix([self.prefix, earlier.prefix]))
        return min(common * self.piece, self.input_tokens - 1)


def trace_request(seconds: float, prompt: int, reply: int, ids: list[int],
                  piece: int) -> TraceRequest:
    """ids: one for every `piece` tokens of the prompt, the last one perhaps for fewer."""
    if min(prompt, reply) < 1 or not 0 <= seconds < math.inf:
        raise ValueError("lengths must be at least 1 and times at least 0, "
                         f"got {prompt}, {reply}, {seconds}")
    return TraceRequest(float(seconds), int(prompt), int(reply), ids[:int(prompt) // piece], piece)


def conversations_of(chains: Iterable[list[TraceRequest]]) -> list[PlannedConversation]:
    return [PlannedConversation(str(number), replay(chain), chain[0].arrival)
            for number, chain in enumerate(chains)]


def replay(chain: list[TraceRequest]) -> list[PlannedTurn]:
    """The turns of one conversation's requests: the tokens that each keeps and adds, and the time
    between them."""
    turns = [PlannedTurn(chain[0].input_tokens, chain[0].output_tokens)]
    for previous, request in pairwise(chain):
        kept = request.kept(previous)
        turns.append(PlannedTurn(request.input_tokens - kept, request.output_tokens,
                                 request.arrival - previous.arrival,
                                 kept if kept < previous.context else None))
    return turns


def begin_alike(conversations: Iterable[PlannedConversation],
                prefixes: Iterable[list[tuple]]) -> list[PlannedConversation]:
    """Let first prompts share the full pieces with which several of them begin, such as those of a
    system prompt. prefixes: of each conversation's first prompt the (id, tokens) of its full
    pieces."""
    prefixes = list(prefixes)
    users = Counter(piece for prefix in prefixes for piece in prefix)
    numbers = {piece: number for number, piece in enumerate(users)}
    alike = []
    for conversation, prefix in zip(conversations, prefixes, strict=True):
        shared = takewhile(lambda piece: users[piece] > 1, prefix)
        begins = tuple(Piece(numbers[piece], piece[1]) for piece in shared)
        alike.append(conversation._replace(begins=begins))
    return alike


def check_unit(path: str, arrivals: list[float], unit: str):
    """ValueError: the times seem to have another unit than `unit`, which this kind of trace has.

    arrivals: in seconds. An hour in ms, read as seconds, makes 42 days; the other way round it
    makes 3.6 s, with thousands of requests in each."""
    covered = max(arrivals, default=0) - min(arrivals, default=0)
    if unit == "s" and covered > 30 * 86400:
        raise ValueError(f"{path}: its times cover {covered / 86400:,.0f} days. This kind of trace "
                         "has seconds; they look like milliseconds: divide them by 1,000")
    if unit == "ms" and len(arrivals) > max(20, 100 * covered):
        raise ValueError(f"{path}: {len(arrivals):,} requests come in {covered:.3g} s. This kind "
                         "of trace has milliseconds; they look like seconds: "
                         "multiply them by 1,000")


def mooncake(path: str) -> list[PlannedConversation]:
    """A Mooncake trace, with its own times. We find its conversations by their prefixes.

    Every request keeps exactly its context of the trace."""
    def parse(record):
        return trace_request(record["timestamp"] / 1000, record["input_length"],
                             record["output_length"], record["hash_ids"], piece=512)
    requests = list(json_lines(path, parse))
    check_unit(path, [request.arrival for request in requests], "ms")
    return conversations_of(rebuild(requests))


def sessions(path: str) -> list[PlannedConversation]:
    """A trace with sessions, as AIPerf and Dynamo write them: the turns of a `session_id`, in
    order.

    A turn comes `delay` ms after the previous reply. A turn without a delay comes as long after the
    previous turn as their timestamps tell. A session whose first turn has no timestamp begins at 0.
    The `hash_ids` of the first turns tell which sessions begin alike: as far as they do, they
    share."""
    turns: dict[object, list[PlannedTurn]] = {}         # session_id -> its turns so far
    arrivals: dict[object, float] = {}                  # session_id -> when it begins
    latest: dict[object, float] = {}                    # session_id -> its latest time, in seconds
    prefixes: dict[object, list] = {}                   # session_id -> its first turn's hash_ids
    timestamps: list[float] = []                        # of all sessions

    def parse(record):
        session = record["session_id"]
        previous = latest.get(session, 0.0)
        if record.get("context_mode", "deltas_without_responses") != "deltas_without_responses":
            raise ValueError(f"context_mode {record['context_mode']!r}: "
                             "input_length must count new tokens")
        if "timestamp" in record:
            latest[session] = record["timestamp"] / 1000
            timestamps.append(latest[session])
        if session not in turns:
            turns[session], arrivals[session] = [], latest.get(session, 0.0)
            ids = record.get("hash_ids", [])[:int(record["input_length"]) // 512]
            prefixes[session] = [(id, 512) for id in ids]
            think = 0.0
        elif "delay" in record:
            think = record["delay"] / 1000
        else:
            think = record["timestamp"] / 1000 - previous
        turn = PlannedTurn(int(record["input_length"]), int(record["output_length"]), think)
        if think < 0 or min(turn[:2]) < 1:
            raise ValueError(f"lengths must be at least 1 and waits at least 0, got {turn[:3]}")
        turns[session].append(turn)

    for _ in json_lines(path, parse):           # parse collects
        pass
    check_unit(path, timestamps, "ms")
    conversations = [PlannedConversation(str(session), of_session, arrivals[session])
                     for session, of_session in turns.items()]
    return begin_alike(conversations, prefixes.values())


def tracelab(path: str) -> list[PlannedConversation]:
    """TraceLab's coding agents (arXiv 2606.30560), a CSV file: a line for each round of a session.

        id (or session_id)        the session
        round_idx                 rounds may be in any order
        prefix_len                tokens that the round keeps of the context so far
        input_len, output_len     new tokens, and those of the reply
        tool_wait_after_ms        from the reply to the next round: what the tools take
        arrival_time              of the session, in ms; without it, 0

    No column tells how long a user thinks: the next request follows at once where no tool was
    called.

    If less is kept than prompt and reply before, the round rewinds. A prefix that the session has
    not said, such as that of the first round, counts as new. (The file does not tell whether
    sessions have it in common.)

        prefix  input  output
           100     50      10     150 new tokens
           160     20      10     continues: 20 new tokens
           155      9      10     rewinds: keeps 155 of 190, 9 new tokens"""
    rounds: dict[str, dict[int, tuple]] = {}            # session_id -> round_idx -> its round
    arrivals: dict[str, float] = {}

    def parse(record):
        column = "id" if "id" in record and "session_id" not in record else "session_id"
        session = record[column]
        of_session = rounds.setdefault(session, {})
        index = whole(record, "round_idx")
        if index in of_session:
            raise ValueError(f"session {session} has two rounds with the round_idx {index}: "
                             "number its rounds")
        kept, new = whole(record, "prefix_len"), whole(record, "input_len")
        if not kept + new:
            raise ValueError("a round needs a prompt, but prefix_len and input_len are both 0: "
                             "leave it out")
        of_session[index] = (kept, new, whole(record, "output_len", least=1),
                             milliseconds(record, "tool_wait_after_ms"))
        if "arrival_time" in record:
            arrival = milliseconds(record, "arrival_time")
            arrivals[session] = min(arrival, arrivals.get(session, arrival))

    for _ in csv_lines(path, parse):            # parse collects
        pass
    check_unit(path, [seconds for seconds in arrivals.values() if seconds], "ms")
    return [PlannedConversation(name, turns_of_rounds(round for _, round in sorted(each.items())),
                                arrivals.get(name, 0.0))
            for name, each in rounds.items()]


def turns_of_rounds(rounds: Iterable[tuple[int, int, int, float]]) -> list[PlannedTurn]:
    """The turns of a session's (prefix, input, output, seconds to the next round)."""
    turns, context, think = [], 0, 0.0
    for prefix, new, output, wait in rounds:
        kept = min(prefix, context)
        turns.append(PlannedTurn(prefix + new - kept, output, think,
                                 kept if kept < context else None))
        context, think = prefix + new + output, wait
    return turns


def whole(record: dict[str, str], name: str, least: int = 0) -> int:
    """A field of a CSV file: "12" or "12.0". ValueError: it is less than `least`, or no number."""
    with suppress(ValueError, OverflowError):               # "x", nan; inf
        if least <= (value := float(record[name])) == int(value):
            return int(value)
    raise ValueError(f"{name} must be a whole number of at least {least}, got {record[name]!r}")


def milliseconds(record: dict[str, str], name: str) -> float:
    """A time of a CSV file, in seconds: 0.0125 for "12.5". ValueError: it is negative, or no
    number."""
    with suppress(ValueError):
        if 0 <= (value := float(record[name])) < math.inf:
            return value / 1000
    raise ValueError(f"{name} must be a number of at least 0, got {record[name]!r}")


def bailian(path: str) -> list[PlannedConversation]:
    """Qwen-Bailian, the trace of "KVCache in the wild", with its own times and its own links.

    A request whose parent it does not continue (an edited history), or whose parent another one has
    continued before, begins a new conversation.
    ValueError: a chat_id is there twice, a parent is unknown, or parents form a loop."""
    def parse(record):
        request = trace_request(record["timestamp"], record["input_length"],
                                record["output_length"], record["hash_ids"], piece=16)
        return record["chat_id"], record["parent_chat_id"], request

    requests, parents = {}, {}
    for chat, parent, request in json_lines(path, parse):
        if chat in requests:
            raise ValueError(f"{path}: two lines have the chat_id {chat}")
        requests[chat], parents[chat] = request, parent
    check_unit(path, [request.arrival for request in requests.values()], "s")
    check_parents(path, parents)

    chains, ends = [], {}                        # ends: chat_id -> the conversation that ends there
    for chat, request in sorted(requests.items(), key=lambda item: item[1].arrival):
        chain = ends.get(parents[chat])
        if chain and request.continues(chain[-1]):
            del ends[parents[chat]]
        else:
            chain = []
            chains.append(chain)
        chain.append(request)
        ends[chat] = chain
    return conversations_of(chains)


ROOT = -1           # the parent of a conversation's first request


def check_parents(path: str, parents: dict[int, int]):
    """ValueError: a parent is in no line, or a request is its own ancestor."""
    sound = {ROOT}
    for chat in parents:
        ancestors = []              # the chat_id and its ancestors that are not known to be sound
        while chat not in sound:
            if chat not in parents:
                child = ancestors[-1]
                raise ValueError(f"{path}: the parent_chat_id {chat} of chat_id {child} "
                                 "is in no line")
            if chat in ancestors:
                raise ValueError(f"{path}: the parents of chat_id {chat} form a loop")
            ancestors.append(chat)
            chat = parents[chat]
        sound.update(ancestors)


def weka(path: str) -> list[PlannedConversation]:
    """Weka's and AgentX's coding sessions: one session per line, and we find its conversations.

    All sessions begin at 0. Equal ids of two sessions mean nothing. We leave out what a subagent
    asks. Conversations of one session share what their first prompts begin with."""
    def parse(record):
        asked = [entry for entry in record["requests"] if entry["type"] != "subagent"]
        return [trace_request(entry["t"], entry["in"], entry["out"], entry["hash_ids"],
                              record.get("block_size", 64))
                for entry in asked]
    of_session = list(json_lines(path, parse))
    check_unit(path, [request.arrival for requests in of_session for request in requests], "s")
    chains = [(session, chain) for session, requests in enumerate(of_session)
              for chain in conversations_of_session(requests)]
    prefixes = [[((session, id), chain[0].piece) for id in chain[0].prefix]
                for session, chain in chains]
    return begin_alike(conversations_of(chain for _, chain in chains), prefixes)


def conversations_of_session(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    """The conversations of one session, in the order of their arrival.

    A request joins the conversation of which it keeps most, if it keeps a piece of it at all: one
    that it continues, else one that it rewinds.

        request   input   output   prefix
        1           200       10   [1 2 3]
        2           300       10   [1 2 3 4]       continues 1
        3           195       10   [1 2 5]         new, for it must not rewind 2: see 5
        4           210       10   [1 2 6]         rewinds 3, keeps [1 2]
        5           400       10   [1 2 3 4 7 8]   continues 2

    Request 5 continues 2, but not 3: so the conversation of 2 goes on without 3, beside it. No
    request rewinds a conversation that goes on without it.
    """
    ordered = sorted(requests, key=lambda request: request.arrival)
    conversations: list[list[TraceRequest]] = []

    def goes_on_without(number: int, end: TraceRequest) -> bool:
        """Does a later request continue the conversation with this end, but not request number?"""
        return any(later.continues(end) and not later.continues(ordered[number])
                   for later in ordered[number + 1:])

    for number, request in enumerate(ordered):
        known = [one for one in conversations if one[-1].prefix and request.kept(one[-1])]
        joined = ([one for one in known if request.continues(one[-1])]
                  or [one for one in known if not goes_on_without(number, one[-1])])
        if joined:
            max(joined, key=lambda one: request.kept(one[-1])).append(request)
        else:
            conversations.append([request])
    return conversations


def rebuild(requests: Iterable[TraceRequest]) -> list[list[TraceRequest]]:
    """Find out which request continues which, if nobody tells to which session a request belongs.
    Returns conversations, in the order of their arrival.

    A request continues a conversation if it continues the latest request there. (A request that is
    not longer than that one with its reply repeats or edits the question; it does not answer the
    reply.) Of several such conversations we take the one with the longest prefix.

        request   input   output   prefix
        1           600       50   [7]
        2         1,100       20   [7 8]      continues 1: begins with 7, and 1,100 > 600 + 50
        3         1,200       20   [7 9]      new: the conversation of 1 has moved on to [7 8]

    Many conversations share some prefixes: a system prompt, or a document that many people ask
    about. If another conversation has had the whole prefix of a request before, then we cannot tell
    which of the two a later request continues, and let none continue the newer one. Nobody
    continues a request that is shorter than a piece.

    (An id stands for all tokens up to the end of its piece, so the last id is the whole prefix.)
    """
    # last id of a conversation's latest prefix -> its requests
    ends: dict[int, list[TraceRequest]] = {}
    seen: set[int] = set()
    conversations = []
    for request in sorted(requests, key=lambda request: request.arrival):
        end = continued_end(request, ends)
        if end is None:
            conversation = []
            conversations.append(conversation)
        else:
            conversation = ends.pop(end)
        conversation.append(request)
        if request.prefix:
            last = request.prefix[-1]
            # The same prefix, and less than a piece is new; or nobody has had this prefix before.
            if last == end or last not in seen:
                ends[last] = conversation
        seen.update(request.prefix)
    return conversations


def continued_end(request: TraceRequest, ends: dict[int, list[TraceRequest]]) -> int | None:
    """The key in `ends` of the conversation that the request continues; None: it begins a new
    one."""
    for id in reversed(request.prefix):             # the longest prefix first
        if id in ends and request.input_tokens > ends[id][-1].context:
            return id
    return None


# ---- reading files

class Kind(NamedTuple):
    name: str
    fields: set[str]                # any of them in its first record tells the kind
    read: Callable                  # (path) or (path, count_tokens) -> conversations
    has_text: bool = False


# A file is of the first kind that has a field in common with its first record. So a record of
# Bailian's that lacks its chat_id is refused, and not read as Mooncake's.
KINDS = [
    Kind("ShareGPT", {"conversations"}, sharegpt, has_text=True),
    Kind("UltraChat", {"data"}, ultrachat, has_text=True),
    Kind("LMSYS-Chat-1M", {"conversation"}, lmsys, has_text=True),
    Kind("Weka", {"requests"}, weka),
    Kind("TraceLab", {"prefix_len", "round_idx"}, tracelab),
    Kind("Qwen-Bailian", {"chat_id", "parent_chat_id"}, bailian),
    Kind("Mooncake with sessions", {"session_id", "delay"}, sessions),
    Kind("Mooncake", {"hash_ids"}, mooncake),
]


def load(path: str, tokenizer: str) -> list[PlannedConversation]:
    """The conversations of a file of any kind in KINDS. Traces have times of their own.

    tokenizer: a checkpoint's directory or hub name; its tokenizer counts the tokens of texts.
    ValueError: the file cannot be read, is of another kind, or has no turn.
    """
    with naming(path):
        fields = first_record(path).keys()
    kind = next((kind for kind in KINDS if kind.fields & fields), None)
    if kind is None:
        known = "; ".join(f"{kind.name} has {' or '.join(sorted(kind.fields))}" for kind in KINDS)
        found = ", ".join(fields) or "no field"
        raise ValueError(f"cannot read {path}: its first record has {found}, so it is of no kind "
                         f"that we know ({known})")
    conversations = list(kind.read(path, token_counter(tokenizer))
                         if kind.has_text else kind.read(path))
    if not conversations:
        raise ValueError(f"{path} has no conversation with a turn in it")
    days = min(conversation.arrival for conversation in conversations) / 86400
    if days > 30:
        raise ValueError(f"{path}: its first turn comes after {days:,.0f} days: times count from "
                         "the beginning of the trace, so subtract the earliest from all of them")
    return conversations


def first_record(path: str) -> dict:
    """The first line as JSON, or the names of a CSV file. An array is ShareGPT's; we do not parse
    it here."""
    if is_array(path):
        return {"conversations": []}
    line = beginning(path).partition(b"\n")[0]
    if not line:
        raise ValueError("it is empty")
    if line.startswith(b"{"):
        return from_json(line)
    if b"," not in line:
        raise ValueError("its first line is neither JSON nor names with commas between them: "
                         "save it as JSON lines, or as CSV with commas")
    return dict.fromkeys(names_of(line.decode()))


def names_of(header: str) -> list[str]:
    return [name.strip(' "\r\n') for name in header.split(",")]


def is_array(path: str) -> bool:
    return beginning(path).startswith(b"[")


def beginning(path: str) -> bytes:
    """At least the first line that is not blank. (If there is a megabyte of blanks, less.)"""
    with open(path, "rb") as file:
        start = file.read(1 << 20).removeprefix(codecs.BOM_UTF8).lstrip()
        return start + file.readline()


def from_json(text: bytes):
    """The JSON value, without the fields that are null."""
    def without_nulls(fields):
        return {name: value for name, value in fields.items() if value is not None}
    return json.loads(text, object_hook=without_nulls)


def token_counter(model: str) -> Callable[[str], int]:
    """Counts with the tokenizer of a checkpoint."""
    tokenizer = load_tokenizer(find_checkpoint(model))
    return lambda text: len(tokenizer.encode(text))


def json_lines(path: str, parse: Callable) -> Iterator:
    """parse(record) for each line that is not blank. ValueError: names file and line."""
    with naming(path):
        file = open(path, "rb")
    with file:
        lines = ((number, line) for number, line in enumerate(file, 1)
                 if line.removeprefix(codecs.BOM_UTF8).strip())
        yield from parsed(path, "line", lines, lambda line: parse(from_json(line)))


def csv_lines(path: str, parse: Callable) -> Iterator:
    """parse(record) for each line of a CSV file, without the fields that are empty. ValueError:
    names file and line."""
    with naming(path), open(path, encoding="utf-8-sig", newline="") as file:
        lines = enumerate(file, 1)
        first, header = next((number, line) for number, line in lines if line.strip())
        names = names_of(header)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"its first line names {name} twice")
        reader = csv.reader(line for _, line in lines)
        rows = [(first + reader.line_num, [value.strip() for value in row])
                for row in reader if row]
    if not rows:
        raise ValueError(f"{path} is empty behind its first line")

    def record(row):
        if len(row) > len(names):
            raise ValueError(f"it has {len(row)} values, but the first line has {len(names)} names")
        return parse({name: value for name, value in zip(names, row) if value})
    yield from parsed(path, "line", rows, record)


def json_array(path: str, parse: Callable) -> Iterator:
    """parse(record) for each item of the array in a file. ValueError: names file and item."""
    with naming(path), open(path, "rb") as file:
        items = list(from_json(file.read()))
    yield from parsed(path, "item", enumerate(items, 1), parse)


def parsed(path: str, unit: str, records: Iterable[tuple[int, object]],
           parse: Callable) -> Iterator:
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
    except KeyError as error:
        raise ValueError(f"cannot read {place}: the field {error} is missing") from error
    except (OSError, ValueError, csv.Error) as error:           # these say what is wrong
        raise ValueError(f"cannot read {place}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {place}: {error!r}") from error
