"""The live picture: where every chunk of every conversation is, and which chunks move, as they
move.

    {"id": "c1", "tokens": 140, "gpu": 75, "cpu": 32, "idle_seconds": 3.2, "chunks": ".CBGG",
     "leaves_next": 2, ...}

`chunks` has one letter for each chunk of the conversation, the leading one first:

    G    on the GPU
    B    in both tiers: copied ahead of time
    C    on the CPU
    .    in neither: dropped, or not computed yet
    R    being recomputed: it has slots again, but not all of its KV yet

`leaves_next` is the index of the chunk that leaves the GPU next. It is null for all conversations
but one (or a few, if they share the chunk). Under the policy "retention", chunk i is worth
recompute_seconds[i] / idle_seconds, times the number of conversations that share it (see
eviction.py).

While nobody watches or asks, none of this costs the engine any time.
"""
import json
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, Queue
from typing import Any

from engine import Engine
from eviction import Policy
from kv_cache import Chunk, Conversation
from scheduler import Batch

LETTERS = {"GPU": "G", "GPU_AND_CPU": "B", "CPU": "C", None: "."}      # by the state of a chunk
EVENT_SECONDS = 0.1     # between two pictures, at least
PIECE_SECONDS = 0.0005  # of drawing between two steps
STILL_SECONDS = 1.0     # the longest rest after a picture, and then the longest wait for a step
RESTS = 9               # seconds of rest for each second of drawing
MOST_MOVES = 1000       # remembered between two pictures


def letter(conversation: Conversation, chunk: Chunk) -> str:
    start = chunk.index * conversation.chunk_size
    computed_before = min(conversation.known, start + conversation.chunk_size)
    if chunk.slots and start + chunk.filled < computed_before:
        return "R"
    return LETTERS[chunk.state]


def portrait(conversation: Conversation, policy: Policy, now: float, leaving: Chunk | None) -> dict:
    """The picture of one conversation. leaving: the chunk that leaves the GPU next; it may belong
    to another conversation."""
    gpu, cpu = conversation.cached()    # tokens on the GPU, and on the CPU alone
    idle = policy.idle(now, policy.last_needed(conversation))
    letters = [letter(conversation, chunk) for chunk in conversation.chunks]
    return dict(id=conversation.name, tokens=len(conversation.tokens), gpu=gpu, cpu=cpu,
                running=conversation.row is not None, waiting=bool(conversation.waiting),
                idle_seconds=round(idle, 3), chunks="".join(letters),
                leaves_next=leaving.index if leaving in conversation.chunks else None)


def portrait_of(engine: Engine, name: str | int) -> dict | None:
    """The picture of that conversation, if it has KV in a tier. The engine's owner calls this."""
    cache, now = engine.cache, engine.clock()
    one = cache.conversations.get(name)
    if one and any(one.cached()):
        return portrait(one, cache.policy, now, cache.next_to_leave(now))
    return None


def picture(engine: Engine, call: Callable[[Callable], Any]) -> dict:
    """The engine's stats, and every conversation that has KV in a tier. call: runs a function
    between two steps, as Engine.call does. We call it once for each piece of the drawing."""
    whole = dict(stats={}, conversations=[])
    pieces = drawing(engine, whole)
    while call(partial(next, pieces, False)):       # False: there are no more pieces
        pass
    return whole


def drawing(engine: Engine, whole: dict) -> Iterator[bool]:
    """Draws the whole picture. The engine's owner draws a piece of it between two steps: we yield
    True when PIECE_SECONDS are over and some conversations are left."""
    cache, now = engine.cache, engine.clock()
    leaving = cache.next_to_leave(now)                  # the same one in all pieces
    whole["stats"] = engine.read_stats()
    pause = time.monotonic() + PIECE_SECONDS
    for one in list(cache.conversations.values()):
        if time.monotonic() > pause:
            yield True
            now, pause = engine.clock(), time.monotonic() + PIECE_SECONDS
        if any(one.cached()):                          # not if it was forgotten meanwhile
            whole["conversations"].append(portrait(one, cache.policy, now, leaving))


def part_for(prefix: str, whole: dict, private: bool) -> dict:
    """The part of a picture that a client may see: the conversations and transfers whose names
    begin with its prefix. private: the engine's stats would tell how long the turns of other
    clients are. So we show only how much of the tiers the client's own KV-tokens fill."""
    part = dict(whole, conversations=outside(prefix, whole["conversations"], "id"))
    if "transfers" in whole:
        part["transfers"] = outside(prefix, whole["transfers"], "conversation")
    if private:
        part["stats"] = own_stats(whole["stats"], part["conversations"])
    return part


def own_stats(stats: dict, conversations: list[dict]) -> dict:
    """The stats of the tiers, as if they held these conversations alone."""
    slots, places = stats["slots_total"], stats["cpu_chunks_total"]
    gpu = sum(entry["gpu"] for entry in conversations)
    # A copy of a chunk takes a place, also while the chunk is on the GPU.
    cpu = sum(entry["chunks"].count("C") + entry["chunks"].count("B") for entry in conversations)
    # Forks count the chunks that they share several times.
    return dict(slots_total=slots, slots_free=max(slots - gpu, 0),
                cpu_chunks_total=places, cpu_chunks_free=max(places - cpu, 0))


def scale(engine: Engine) -> dict:
    """The constants that a reader of the picture needs. recompute_seconds: for each chunk of the
    longest context."""
    policy, size, limit = engine.cache.policy, engine.config.chunk_size, engine.scheduler.limit
    seconds = [policy.cost(end) for end in range(size, limit + size, size)]
    return dict(chunk_size=size, limit=limit, policy=engine.config.policy,
                recompute_seconds=seconds)


class Broadcast:
    """The live picture for all who watch it. While anybody watches, one thread draws for all of
    them. After each picture it rests RESTS times as long as the picture took (STILL_SECONDS at
    most), so the engine has most of its time for turns."""

    def __init__(self, engine: Engine, private: bool = False):
        """private: see `part_for`."""
        self.engine, self.private = engine, private
        self.lock = threading.Lock()                            # guards the next two
        self.queues: dict[Queue, str] = {}                      # a watcher's -> its prefix
        self.drawing = False                                    # is there a thread that draws?
        self.recent = deque(maxlen=MOST_MOVES)                  # transfers since the last picture
        self.changed = threading.Event()    # a step has run, or a watcher has come

    def follow(self, prefix: str, over: Callable[[], bool]) -> Iterator[str]:
        """Yields events, as JSON: the picture and the `transfers` since the last one, whenever a
        step has changed it, otherwise every second or two. A reader that is late gets the latest
        one alone. Ends when over() is true, or when we fail to draw."""
        events = Queue(1)
        try:
            self._come(events, prefix)
            while not over():
                with suppress(Empty):
                    if (event := events.get(timeout=EVENT_SECONDS)) is None:
                        return
                    yield event
        finally:
            self._leave(events)

    def _come(self, events: Queue, prefix: str):
        with self.lock:
            if not self.queues:
                self.recent.clear()
                self.engine.watchers.append(self._remember)
            self.queues[events] = prefix
            if not self.drawing:
                threading.Thread(target=self._draw, daemon=True).start()
                self.drawing = True
        self.changed.set()

    def _leave(self, events: Queue):
        with self.lock:
            del self.queues[events]
            if not self.queues:
                self.engine.watchers.remove(self._remember)

    def _remember(self, batch: Batch):
        """The engine calls this with each batch."""
        if batch:
            self.recent.extend(moves(batch))
            self.changed.set()

    def _draw(self):
        """Draws pictures as long as anybody watches. Runs in a thread of its own."""
        before = {}                                             # the letters of each conversation
        try:
            while self._anybody_watches():
                self.changed.clear()
                begin = time.monotonic()
                with self.lock:                                 # `_come` may clear them
                    transfers = [self.recent.popleft() for _ in range(len(self.recent))]
                now = picture(self.engine, self.engine.call)
                after = {entry["id"]: entry["chunks"] for entry in now["conversations"]}
                transfers += departures(before, after, self.engine.config.chunk_size)
                self._send(dict(now, transfers=transfers))
                before = after
                rest = RESTS * (time.monotonic() - begin)
                time.sleep(min(max(rest, EVENT_SECONDS), STILL_SECONDS))
                self.changed.wait(STILL_SECONDS)
        except Exception as error:                              # a bug; it should not stay unseen
            traceback.print_exception(error)
            with self.lock:
                self.drawing = False
            for events in self._watchers():
                replace(events, None)

    def _anybody_watches(self) -> bool:
        with self.lock:
            self.drawing = bool(self.queues)
            return self.drawing

    def _watchers(self) -> dict[Queue, str]:
        with self.lock:
            return dict(self.queues)

    def _send(self, whole: dict):
        """Puts each client's part of the picture into the queues of its watchers, written as JSON
        once."""
        watchers = self._watchers()
        for prefix in set(watchers.values()):
            event = json.dumps(part_for(prefix, whole, self.private))
            for events in [events for events, other in watchers.items() if other == prefix]:
                replace(events, event)


def replace(events: Queue, event: str | None):
    """The queue holds this event alone now. One thread calls this, so there is room."""
    with suppress(Empty):
        events.get_nowait()
    events.put_nowait(event)


def moves(batch: Batch) -> list[dict]:
    """The copies between the tiers and the recomputations of a batch that is about to be
    executed."""
    def move(kind: str, conversation: Conversation, start: int, end: int) -> dict:
        return dict(step=batch.step, kind=kind, conversation=conversation.name, start=start,
                    end=end)

    swap_in = [move("swap_in", ticket.conversation, ticket.start, ticket.end)
               for ticket in batch.swap_in]
    swap_out = [move("swap_out", ticket.conversation, ticket.start, ticket.end)
                for ticket in batch.swap_out]
    recomputed = []
    for span in batch.spans:
        conversation = span.request.conversation
        if span.start < conversation.known:
            recomputed.append(move("recompute", conversation, span.start,
                                   min(span.end, conversation.known)))
    return swap_in + swap_out + recomputed


def departures(before: dict[str, str], after: dict[str, str], chunk_size: int) -> list[dict]:
    """The chunks that were dropped or lost their slots between two pictures, from the letters of
    each conversation in both. "BBG" before and ".CG" after: chunk 0 was dropped, chunk 1 is on the
    CPU alone."""
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
    """The entries of one client, with the names that it knows. entry[key] is the name of a
    conversation: we keep the entries whose name begins with the prefix, and remove the prefix. (A
    one-off has a number for a name, or none. It belongs to no key.)"""
    if not prefix:
        return entries
    return [dict(entry, **{key: entry[key].removeprefix(prefix)})
            for entry in entries if isinstance(entry[key], str) and entry[key].startswith(prefix)]
