"""The live picture: where every chunk of every conversation is, and which chunks move, as they move.

    {"id": "c1", "tokens": 140, "gpu": 76, "cpu": 32, "idle_seconds": 3.2, "chunks": ".CBGG",
     "leaves_next": 2, ...}

`chunks` has one letter for each chunk of the conversation, the leading one first:

    G    on the GPU
    B    in both tiers: copied ahead of time
    C    on the CPU
    .    in neither: dropped, or not computed yet
    R    being recomputed: it has slots again, but not all of its KV yet

`leaves_next` is the index of the chunk that leaves the GPU next. It is null for all conversations but one (or
a few, if they share the chunk). Chunk i is worth recompute_seconds[i] / idle_seconds (see eviction.py).

While nobody watches, none of this costs the engine any time.
"""
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from engine import Engine
from kv_cache import Chunk, Conversation
from scheduler import Batch

LETTERS = {"GPU": "G", "GPU_AND_CPU": "B", "CPU": "C", None: "."}      # by the state of a chunk
EVENT_SECONDS = 0.1     # between two pictures, at least
STILL_SECONDS = 1.0     # between two pictures while no step runs
MOST_MOVES = 1000       # remembered between two pictures


def letter(conversation: Conversation, index: int, chunk: Chunk) -> str:
    start = index * conversation.chunk_size
    computed_before = min(conversation.known, start + conversation.chunk_size)
    if chunk.slots and start + chunk.filled < computed_before:
        return "R"
    return LETTERS[chunk.state]


def portrait(conversation: Conversation, idle: float, leaving: Chunk | None) -> dict:
    """One conversation. idle: seconds. leaving: the chunk that leaves the GPU next, perhaps of another
    conversation. gpu, cpu: tokens on the GPU, and on the CPU alone."""
    gpu, cpu = conversation.sources()
    letters = [letter(conversation, index, chunk) for index, chunk in enumerate(conversation.chunks)]
    return dict(id=conversation.name, tokens=len(conversation.tokens), gpu=gpu, cpu=cpu,
                running=conversation.row is not None, waiting=bool(conversation.waiting),
                idle_seconds=round(idle, 3), chunks="".join(letters),
                leaves_next=leaving.index if leaving in conversation.chunks else None)


def picture(engine: Engine, prefix: str = "") -> dict:
    """The engine's stats, and every conversation that has KV in a tier, of those whose names begin with the
    prefix."""
    def read() -> list[dict]:
        policy, now = engine.cache.policy, engine.clock()
        leaving = engine.cache.next_to_leave(now)
        return [portrait(conversation, policy.idle(now, policy.last_needed(conversation)), leaving)
                for conversation in engine.cache.conversations.values() if any(conversation.sources())]
    return dict(stats=engine.stats(), conversations=outside(prefix, engine.call(read), "id"))


def scale(engine: Engine) -> dict:
    """The constants that a reader of the picture needs. recompute_seconds: for each chunk of the longest
    context."""
    policy, size, limit = engine.cache.policy, engine.config.chunk_size, engine.scheduler.limit
    seconds = [policy.cost(end) for end in range(size, limit + size, size)]
    return dict(chunk_size=size, limit=limit, policy=engine.config.policy, recompute_seconds=seconds)


def follow(engine: Engine, prefix: str, over: Callable[[], bool]) -> Iterator[dict]:
    """Yields the picture and the `transfers` since the last one, whenever a step has changed it, otherwise
    once a second. Ends when over() is true."""
    recent, stepped = deque(maxlen=MOST_MOVES), threading.Event()

    def watch(batch: Batch):
        if batch:
            recent.extend(moves(batch))
            stepped.set()
    before = {}                                             # the letters of each conversation
    engine.watchers.append(watch)
    try:
        while not over():
            stepped.clear()
            transfers = outside(prefix, [recent.popleft() for _ in range(len(recent))], "conversation")
            now = picture(engine, prefix)
            after = {entry["id"]: entry["chunks"] for entry in now["conversations"]}
            yield dict(now, transfers=transfers + departures(before, after, engine.config.chunk_size))
            before = after
            time.sleep(EVENT_SECONDS)
            stepped.wait(STILL_SECONDS)
    finally:
        engine.watchers.remove(watch)


def moves(batch: Batch) -> list[dict]:
    """The copies between the tiers and the recomputations of a batch that is about to be executed."""
    def move(kind: str, conversation: Conversation, start: int, end: int) -> dict:
        return dict(step=batch.step, kind=kind, conversation=conversation.name, start=start, end=end)

    swap_in = [move("swap_in", ticket.conversation, ticket.start, ticket.end) for ticket in batch.swap_in]
    swap_out = [move("swap_out", ticket.conversation, ticket.start, ticket.end) for ticket in batch.swap_out]
    recomputed = []
    for span in batch.spans:
        conversation = span.request.conversation
        if span.start < conversation.known:
            recomputed.append(move("recompute", conversation, span.start, min(span.end, conversation.known)))
    return swap_in + swap_out + recomputed


def departures(before: dict[str, str], after: dict[str, str], chunk_size: int) -> list[dict]:
    """The chunks that were dropped or lost their slots between two pictures, from the letters of each
    conversation in both. "BBG" before and ".CG" after: chunk 0 was dropped, chunk 1 is on the CPU alone."""
    departed = []
    for name, letters in before.items():
        now = after.get(name, "").ljust(len(letters), ".")
        for index, change in enumerate(zip(letters, now)):
            match change:
                case ("G" | "B" | "R" | "C", "."):
                    kind = "drop"
                case ("G" | "B" | "R", "C"):
                    kind = "reclaim"
                case _:
                    continue
            departed.append(dict(step=None, kind=kind, conversation=name,
                                 start=index * chunk_size, end=(index + 1) * chunk_size))
    return departed


def outside(prefix: str, entries: list[dict], key: str) -> list[dict]:
    """The entries whose conversation, which stands under `key`, has the prefix; there without it, as its
    client knows it."""
    if not prefix:
        return entries
    return [dict(entry, **{key: entry[key].removeprefix(prefix)})
            for entry in entries if entry[key] and entry[key].startswith(prefix)]
