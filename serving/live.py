"""The live picture: where every chunk of every conversation is, and what moves, as it moves. Nothing is computed while nobody looks.

    {"id": "c1", "tokens": 140, "gpu": 76, "cpu": 32, "idle_seconds": 3.2, "chunks": ".CBGG", ...}

A letter per chunk: G for GPU, B for both tiers, C for CPU, . for absent, R for one that is being recomputed (its slots are there, its
KV is not). What chunk i is worth is recompute_seconds[i] / idle_seconds."""
import threading
import time
from collections import deque

from engine import Engine
from kv_cache import Conversation
from scheduler import Batch

STATES = {"GPU": "G", "GPU_AND_CPU": "B", "CPU": "C", None: "."}
EVENT_SECONDS, STILL_SECONDS = 0.1, 1.0         # between two pictures: while steps run, and without


def portrait(conversation: Conversation, idle: float) -> dict:
    """idle: in seconds; gpu, cpu: tokens on the GPU, and on the CPU alone."""
    def letter(index, chunk):
        begin = index * conversation.chunk_size
        if chunk.slots and begin + chunk.filled < min(conversation.known, begin + conversation.chunk_size):
            return "R"
        return STATES[chunk.state]
    gpu, cpu = conversation.sources()
    return dict(id=conversation.name, tokens=len(conversation.tokens), gpu=gpu, cpu=cpu, running=conversation.row is not None,
                waiting=bool(conversation.waiting), idle_seconds=round(idle, 3), chunks="".join(letter(*numbered) for numbered in enumerate(conversation.chunks)))


def picture(engine: Engine, owner: str = "") -> dict:
    """The engine's stats, and every conversation that has KV and is the owner's."""
    def read():
        policy, now = engine.cache.policy, engine.clock()
        return [portrait(c, policy.idle(now, policy.last_needed(c))) for c in engine.cache.conversations.values() if any(c.sources())]
    return dict(stats=engine.stats(), conversations=outside(owner, engine.call(read), "id"))


def scale(engine: Engine) -> dict:
    """What it takes to read the picture. recompute_seconds: of each chunk of the longest context."""
    policy, size, limit = engine.cache.policy, engine.config.chunk_size, engine.scheduler.limit
    return dict(chunk_size=size, limit=limit, policy=engine.config.policy,
                recompute_seconds=[policy.cost(end) for end in range(size, limit + size, size)])


def follow(engine: Engine, owner: str, over):
    """Yields the picture, with the `transfers` since the last one, whenever a step has changed it, else once a second; until over()."""
    moved, woken, chunks = deque(maxlen=1000), threading.Event(), {}
    def watch(batch):
        if batch:
            moved.extend(moves(batch))
            woken.set()
    engine.watchers.append(watch)
    try:
        while not over():
            woken.clear()
            transfers = outside(owner, [moved.popleft() for _ in range(len(moved))], "conversation")
            now, before = picture(engine, owner), chunks
            chunks = {entry["id"]: entry["chunks"] for entry in now["conversations"]}
            yield dict(now, transfers=transfers + drops(before, chunks, engine.config.chunk_size))
            time.sleep(EVENT_SECONDS)
            woken.wait(STILL_SECONDS)
    finally:
        engine.watchers.remove(watch)


def moves(batch: Batch) -> list[dict]:
    """What a batch moves between the tiers and what it recomputes, before it is executed; start and end are positions."""
    runs = [(kind, ticket.conversation, ticket.start, ticket.end)
            for kind, tickets in (("swap_in", batch.swap_in), ("swap_out", batch.swap_out)) for ticket in tickets]
    runs += [("recompute", span.request.conversation, span.start, min(span.end, span.request.conversation.known))
             for span in batch.spans if span.start < span.request.conversation.known]
    return [dict(step=batch.step, kind=kind, conversation=conversation.name, start=start, end=end) for kind, conversation, start, end in runs]


def drops(before: dict[str, str], after: dict[str, str], size: int) -> list[dict]:
    """The chunks that are gone between two pictures; before, after: the letters of each conversation."""
    return [dict(step=None, kind="drop", conversation=name, start=i * size, end=(i + 1) * size)
            for name, chunks in before.items() for i, letter in enumerate(chunks)
            if letter != "." and after.get(name, "")[i:i + 1] in ("", ".")]


def outside(owner: str, entries: list[dict], key: str) -> list[dict]:
    """Those whose conversation, under `key`, is the owner's, named as the owner names it."""
    return [dict(entry, **{key: entry[key].removeprefix(owner) if owner else entry[key]}) for entry in entries if str(entry[key]).startswith(owner)]
