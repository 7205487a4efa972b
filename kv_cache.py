"""The two-tier KV cache: who is where (`KVCache`, integers only) and the bytes (`KVPool`, tensors only). Paper §4.3.

    position   0        32        64        96        128   140
    chunk      | absent |  CPU    | GPU_AND | GPU      | GPU  |  a tail, filled = 12
    eviction   dropped <- dropped <- reclaimed <- copied ahead of time      (leading end first)

A chunk is 32 consecutive tokens of a conversation; it owns its GPU slots and its CPU place. Its life: computed -> GPU; copied
ahead of need -> GPU_AND_CPU; its slots taken by someone, lazily -> CPU; its place taken -> absent. A copy in flight is a
ticket: both of its ends stay busy until it completes, and a finished copy counts only if the chunk did not change meanwhile.

Invariants: no KV is believed cached that is not; every slot and place is free, busy or in exactly one chunk; the slot table agrees
with the chunks (`check_integrity`). Admission and release cost O(context), a decode step nothing that grows with contexts or with
the number of conversations."""
import heapq
import math
from array import array
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from eviction import Policy, VictimIndex

MOVES = ("swap_out", "reclaim", "drop")    # what eviction does next to a chunk in state GPU, GPU_AND_CPU, CPU


class Chunk:
    """Up to chunk_size tokens of one conversation. `filled`: how many leading tokens of it have KV."""
    __slots__ = ("index", "filled", "slots", "place", "ticket", "condemned", "move")

    def __init__(self, index: int):
        self.index, self.filled = index, 0
        self.slots = []            # of its tokens in order; more than `filled` while they are being computed
        self.place = None          # in the CPU tier
        self.ticket = None         # the copy in flight, either way
        self.condemned = False     # won no CPU place: its slots are to be had though no copy exists, until its conversation returns
        self.move = None           # as its conversation has counted it

    @property
    def state(self) -> str:
        return "GPU" if self.place is None else "GPU_AND_CPU" if self.slots else "CPU"

    def next_move(self) -> str | None:
        """What eviction may do with this chunk once its conversation is idle; None while empty or while a copy is in flight."""
        if self.ticket or not self.filled:
            return None
        if not self.slots:
            return "drop"
        return "swap_out" if self.place is None and not self.condemned else "reclaim"


class Conversation:
    """What survives turns: raw tokens, and the chunks that cache their KV. Kept up to date by KVCache alone."""

    def __init__(self, name: str | None, order: int, tokens, chunk_size: int, toward: int):
        self.one_off = name is None                   # to be forgotten at the end of its request
        self.name, self.order = order if self.one_off else name, order     # order of creation
        self.tokens = array("i", tokens)
        self.known = max(len(self.tokens) - 1, 0)     # leading tokens that have had KV at some time (a last sampled one never had)
        self.chunks: list[Chunk | None] = []          # None: absent
        self.row = None                               # in the slot table, while it runs (pinned)
        self.waiting = False                          # a turn of it waits in the queue
        self.last_active = 0.0
        self.listed = False                           # its chunks may be evicted
        self.held = 0                                 # slots in its chunks
        self.reclaimable = 0                          # of these, in chunks whose next move is "reclaim"
        self.cached = 0                               # chunks that are not absent
        self.count = dict.fromkeys(MOVES, 0)          # chunks by next move
        self.frontier = dict.fromkeys(MOVES, 0 if toward > 0 else math.inf)    # no chunk of that move goes before this index
        self.chunk_size, self.toward = chunk_size, toward

    def next(self, move: str) -> Chunk:
        """The chunk that goes first for this move; there must be one."""
        index = min(self.frontier[move], len(self.chunks) - 1)
        while self.chunks[index] is None or self.chunks[index].move != move:
            index += self.toward
        self.frontier[move] = index
        return self.chunks[index]

    def sources(self) -> tuple[int, int]:
        """Tokens whose KV is on the GPU (a CPU copy may exist, too) and on the CPU alone."""
        gpu = sum(chunk.filled for chunk in self.chunks if chunk and chunk.slots)
        return gpu, sum(chunk.filled for chunk in self.chunks if chunk) - gpu


@dataclass(eq=False)
class Ticket:
    """A copy in flight between `slots` (the first `filled` of a chunk) and a CPU `place`."""
    conversation: Conversation
    chunk: Chunk
    direction: str                 # "in" or "out"
    start: int                     # position of the chunk's first token
    filled: int
    slots: list[int]
    place: int
    stale: bool = False            # the chunk changed meanwhile: a copy out is worthless
    orphans: list[int] = field(default_factory=list)     # slots given up meanwhile, free on completion

    @property
    def end(self) -> int:
        return self.start + self.filled


class KVCache:
    """The bookkeeping. A conversation is *pinned* (admit .. release) while a request of it runs, else its chunks may be evicted."""

    def __init__(self, num_slots: int, num_places: int, chunk_size: int, rows: int, max_context: int, policy: Policy):
        self.num_slots, self.num_places, self.chunk_size, self.policy = num_slots, num_places, chunk_size, policy
        self.free_slots = list(range(num_slots - 1, -1, -1))     # a stack
        self.free_places = list(range(num_places))               # a heap: neighbours leave together, so they are copied as one run
        self.free_rows = list(range(rows - 1, -1, -1))
        self.table = np.full((rows, max_context), -1, np.int32)  # the slot table's master copy
        self.table_updates = []                                  # (row, start, end) written since the worker last looked
        self.conversations: dict[str | int, Conversation] = {}
        self.pinned: dict[int, Conversation] = {}                # by order
        self.in_flight: set[Ticket] = set()
        self.indexes = {move: VictimIndex(policy) for move in MOVES}
        self.changed: dict[int, Conversation] = {}               # by order: not yet filed again in the indexes
        self.reclaimable = 0                                     # slots of listed chunks whose next move is "reclaim"
        self.cold: dict[int, Conversation] = {}
        self.opened = 0
        self.stats = Counter(chunks_swapped_in=0, chunks_swapped_out=0, chunks_dropped=0)

    # ---- conversations

    def open(self, name: str | None, tokens=()) -> Conversation:
        """The conversation of that name, made from `tokens` if it is new here; None: a one-off."""
        if name in self.conversations:
            return self.conversations[name]
        conversation = Conversation(name, self.opened, tokens, self.chunk_size, self.policy.toward)
        self.opened += 1
        self.conversations[conversation.name] = conversation
        self._list(conversation)
        return conversation

    def forget(self, conversation: Conversation):
        """Frees everything in both tiers; what a copy in flight still uses is freed on its completion. It must not be pinned."""
        self.truncate(conversation, 0, 0)
        self._unlist(conversation)
        if self.conversations.get(conversation.name) is conversation:
            del self.conversations[conversation.name]
        self.cold.pop(conversation.order, None)

    def truncate(self, conversation: Conversation, length: int, known: int):
        """Undoes a cancelled or failed turn: keeps `length` tokens, and KV for no more than the first `known` of them.
        It must not be pinned."""
        assert conversation.row is None
        del conversation.tokens[length:]
        conversation.known = min(conversation.known, known)
        for chunk in conversation.chunks[known // self.chunk_size:]:
            if chunk and (kept := max(known - chunk.index * self.chunk_size, 0)) < chunk.filled:
                with self._changing(conversation, chunk):
                    chunk.filled = kept
                    if chunk.ticket:
                        chunk.ticket.stale = True
                self._trim(conversation, chunk)
        del conversation.chunks[-(-known // self.chunk_size):]

    def drop_all(self, conversation: Conversation):
        """Frees the KV of a conversation that is not pinned, and keeps its tokens."""
        known = conversation.known
        self.truncate(conversation, len(conversation.tokens), 0)
        conversation.known = known

    def set_waiting(self, conversation: Conversation, waiting: bool):
        conversation.waiting = waiting
        self.changed[conversation.order] = conversation

    def take_cold(self) -> list[Conversation]:
        """Those that are idle and have nothing cached: whoever keeps a history may forget them."""
        self._index_changed()
        return list(self.cold.values())

    # ---- admission

    @property
    def available(self) -> int:
        """Slots to be had at once: free, or of listed chunks that have a CPU copy or are condemned."""
        return len(self.free_slots) + self.reclaimable

    def shortfall(self, conversation: Conversation, total: int, reserve: int) -> int:
        """How many more slots must become available before `admit(conversation, total)` leaves `reserve` of them.
        Its own chunks are no help: those on the GPU are used where they are, and pinned before anything is taken."""
        own = conversation.reclaimable if conversation.listed else 0
        return total - conversation.held + reserve - (self.available - own)

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        """Pins the conversation and takes every slot for positions [0, total) at once: for what comes back from the CPU, for
        holes and for new tokens; writes its row of the slot table. None of its chunks is condemned or waiting any more.
        The caller has seen that there is no shortfall and a free row. Returns the swap-ins, one ticket per chunk."""
        self._unlist(conversation)
        self.pinned[conversation.order] = conversation
        conversation.row, conversation.waiting = self.free_rows.pop(), False
        for chunk in conversation.chunks:
            if chunk and chunk.condemned:
                with self._changing(conversation, chunk):
                    chunk.condemned = False
        arriving = [chunk for chunk in conversation.chunks if chunk and chunk.filled and not chunk.slots]
        self._extend(conversation, 0, total, now)
        return [self._issue(conversation, chunk, "in", chunk.place) for chunk in arriving]

    def grow(self, conversation: Conversation, now: float) -> bool:
        """Slots for the tokens that a pinned conversation has grown by; False if there are none to be had."""
        total = len(conversation.tokens)
        if self.available < total - conversation.held:
            return False
        if conversation.held < total:
            self._extend(conversation, conversation.held // self.chunk_size, total, now)
        return True

    def release(self, conversation: Conversation, now: float):
        """The end of admit: unpins. Slots that got no KV are free again, a hole that was not begun is absent again."""
        self.free_rows.append(conversation.row)
        conversation.row = None
        del self.pinned[conversation.order]
        for chunk in conversation.chunks:
            if chunk:
                self._trim(conversation, chunk)
        conversation.last_active = now
        self._list(conversation)

    def computed(self, conversation: Conversation, start: int, end: int):
        """Positions [start, end) have KV now. A chunk that grows outgrows its CPU copy, one in flight included."""
        for index in range(start // self.chunk_size, -(-end // self.chunk_size)):
            chunk, first = conversation.chunks[index], index * self.chunk_size
            assert first + chunk.filled == max(start, first), "spans fill a chunk from the left"
            with self._changing(conversation, chunk):
                self._release_place(chunk)
                chunk.filled = min(end - first, self.chunk_size)
                if chunk.ticket:
                    chunk.ticket.stale = True
        conversation.known = max(conversation.known, end)

    def take_table_updates(self) -> list[tuple[int, int, np.ndarray]]:
        """(row, start, slots): what was written to the slot table since the last call."""
        updates, self.table_updates = self.table_updates, []
        return [(row, start, self.table[row, start:end].copy()) for row, start, end in updates]

    # ---- eviction

    def plan_swap_out(self, wanted: int, now: float) -> list[Ticket]:
        """Copies ahead of time, cheapest first, until `wanted` more slots are available or on their way to be: copies in flight of
        listed conversations count, and whole policy units go, so that it may be more. A GPU copy stays valid until its slots are
        reclaimed. A chunk that wins no CPU place against the worth of what is there is condemned instead: available, not copied."""
        tickets = []
        if wanted > 0:
            wanted -= sum(ticket.filled for ticket in self.in_flight if self._leaving(ticket))
        while wanted > 0 and (conversation := self._cheapest("swap_out", now)):
            for _ in range(self.policy.unit(conversation.count["swap_out"])):
                chunk = conversation.next("swap_out")
                place = self._take_place(self._rank(conversation, "swap_out", now), now)
                if place is None:
                    with self._changing(conversation, chunk):
                        chunk.condemned = True
                else:
                    tickets.append(self._issue(conversation, chunk, "out", place))
                wanted -= chunk.filled
        return tickets

    def plan_swap_out_for(self, conversation: Conversation, total: int, reserve: int, now: float) -> list[Ticket]:
        """Copies ahead of time what keeps `conversation` from being admitted, never its own chunks."""
        if self.shortfall(conversation, total, reserve) <= 0:
            return []
        self._unlist(conversation)
        tickets = self.plan_swap_out(self.shortfall(conversation, total, reserve), now)
        self._list(conversation)
        return tickets

    def reclaim(self, conversation: Conversation):
        """Frees the slots of one policy unit of the conversation's reclaimable chunks (there is one at least), from the policy's
        end. A chunk with a CPU copy lives on there; a condemned one is dropped."""
        for _ in range(self.policy.unit(conversation.count["reclaim"])):
            chunk = conversation.next("reclaim")
            if chunk.place is None:
                self._drop(conversation, chunk)
            else:
                with self._changing(conversation, chunk):
                    self._release_slots(chunk, 0)

    def complete(self, ticket: Ticket):
        """What follows a finished copy. A copy out gives the chunk its place, unless the chunk changed or was freed meanwhile
        (stale). What was given up during the copy, slots and place, becomes free only now. Stale copies are counted, too."""
        self.in_flight.remove(ticket)
        chunk = ticket.chunk
        with self._changing(ticket.conversation, chunk):
            chunk.ticket = None
            if ticket.direction == "out" and not ticket.stale:
                chunk.place = ticket.place
            if chunk.place != ticket.place:
                heapq.heappush(self.free_places, ticket.place)
            self.free_slots += ticket.orphans
        self.stats["chunks_swapped_" + ticket.direction] += 1

    # ---- the small steps, each on one chunk

    def _extend(self, conversation, first_index, total, now):
        """Slots for every position below `total` that has none, from chunk `first_index` on, and their slot table entries."""
        slots, chunks = iter(self._take_slots(total - conversation.held, now)), conversation.chunks
        for index in range(first_index, -(-total // self.chunk_size)):
            if index == len(chunks):
                chunks.append(None)
            if chunks[index] is None:
                chunks[index] = Chunk(index)
                conversation.cached += 1
            with self._changing(conversation, chunks[index]):
                have = chunks[index].slots
                have += islice(slots, min(self.chunk_size, total - index * self.chunk_size) - len(have))
        start = first_index * self.chunk_size
        self.table[conversation.row, start:total] = [slot for chunk in chunks[first_index:] for slot in chunk.slots]
        self.table_updates.append((conversation.row, start, total))

    def _take_slots(self, count, now):
        while len(self.free_slots) < count:
            self.reclaim(self._cheapest("reclaim", now))
        cut = len(self.free_slots) - count
        taken = self.free_slots[cut:]
        del self.free_slots[cut:]
        return taken

    def _take_place(self, rank, now):
        """A place in the CPU tier for a chunk of that rank: a free one, or one that a running conversation does not need for
        now, or that of the cheapest chunk if that is worth less; else None."""
        if not self.free_places:
            for conversation in self.pinned.values():
                if conversation.count["reclaim"]:
                    chunk = conversation.next("reclaim")
                    with self._changing(conversation, chunk):
                        self._release_place(chunk)
                    break
            else:
                conversation = self._cheapest("drop", now)
                if conversation is None or self._rank(conversation, "drop", now) >= rank:
                    return None
                self._drop(conversation, conversation.next("drop"))
        return heapq.heappop(self.free_places)

    def _rank(self, conversation, move, now):
        """Orders the conversation's next chunk among all: by value, then by conversation, then by its distance from the end that goes first."""
        index, policy = conversation.next(move).index, self.policy
        key = policy.key(conversation, index, conversation.count[move])
        return policy.value(key, policy.idle(now, policy.activity(conversation))), conversation.order, policy.toward * index

    def _issue(self, conversation, chunk, direction, place):
        ticket = Ticket(conversation, chunk, direction, chunk.index * self.chunk_size, chunk.filled, chunk.slots[:chunk.filled], place)
        with self._changing(conversation, chunk):
            chunk.ticket = ticket
        self.in_flight.add(ticket)
        return ticket

    def _leaving(self, ticket):
        return ticket.direction == "out" and not ticket.stale and ticket.conversation.listed

    def _drop(self, conversation, chunk):
        self._discard(conversation, chunk)
        self.stats["chunks_dropped"] += 1

    def _trim(self, conversation, chunk):
        """Gives up what holds no KV: slots beyond `filled`, and a chunk that has nothing left."""
        if not chunk.filled:
            self._discard(conversation, chunk)
        elif len(chunk.slots) > chunk.filled:
            with self._changing(conversation, chunk):
                self._release_slots(chunk, chunk.filled)

    def _discard(self, conversation, chunk):
        """From now on it is absent."""
        with self._changing(conversation, chunk):
            self._release_slots(chunk, 0)
            self._release_place(chunk)
            chunk.filled = 0
            conversation.chunks[chunk.index] = None
            conversation.cached -= 1

    def _release_slots(self, chunk, keep):
        (chunk.ticket.orphans if chunk.ticket else self.free_slots).extend(chunk.slots[keep:])
        del chunk.slots[keep:]

    def _release_place(self, chunk):
        if chunk.place is not None and not chunk.ticket:
            heapq.heappush(self.free_places, chunk.place)
        chunk.place = None

    # ---- counts and indexes, derived from the chunks

    def _changing(self, conversation, chunk):
        """Every change of a chunk happens inside: counts, frontiers and the indexes of victims follow."""
        return _Change(self, conversation, chunk)

    def _tally(self, conversation, chunk, sign):
        conversation.held += sign * len(chunk.slots)
        if chunk.move:
            conversation.count[chunk.move] += sign
        if chunk.move == "reclaim":
            conversation.reclaimable += sign * len(chunk.slots)
            self.reclaimable += sign * len(chunk.slots) * conversation.listed

    def _list(self, conversation):
        conversation.listed = True
        self.reclaimable += conversation.reclaimable
        self.changed[conversation.order] = conversation

    def _unlist(self, conversation):
        self.reclaimable -= conversation.reclaimable * conversation.listed
        conversation.listed = False
        for index in self.indexes.values():
            index.discard(conversation)

    def _cheapest(self, move, now):
        """The conversation whose next chunk for this move is worth least, or None."""
        self._index_changed()
        return self.indexes[move].cheapest(now)

    def _index_changed(self):
        """Files what has changed since the last look: many changes of one conversation are filed once."""
        for conversation in self.changed.values():
            if conversation.listed:
                self._index(conversation)
        self.changed.clear()

    def _index(self, conversation):
        """Files a listed conversation in the index of every move that a chunk of it can make."""
        for move, index in self.indexes.items():
            if count := conversation.count[move]:
                key = self.policy.key(conversation, conversation.next(move).index, count)
                index.file(conversation, key, self.policy.activity(conversation))
            else:
                index.discard(conversation)
        if not conversation.cached and not conversation.waiting:
            self.cold[conversation.order] = conversation
        else:
            self.cold.pop(conversation.order, None)

    def check_integrity(self):
        """Every invariant of the bookkeeping, from scratch. O(everything): for tests and `debug=True`."""
        self._index_changed()
        everyone = {id(c): c for c in [*self.conversations.values(), *self.pinned.values(), *(t.conversation for t in self.in_flight)]}
        slots, places = Counter(self.free_slots), Counter(self.free_places)
        for ticket in self.in_flight:
            slots.update(ticket.orphans)
            places.update([ticket.place] if ticket.chunk.place != ticket.place else [])
            assert ticket.chunk.ticket is ticket
        for conversation in everyone.values():
            self._check_conversation(conversation)
            for chunk in filter(None, conversation.chunks):
                slots.update(chunk.slots)
                places.update([] if chunk.place is None else [chunk.place])
        assert slots == Counter(range(self.num_slots)), "a slot is lost, or owned twice"
        assert places == Counter(range(self.num_places)), "a CPU place is lost, or owned twice"
        assert self.reclaimable == sum(c.reclaimable for c in everyone.values() if c.listed)
        rows = [c.row for c in self.pinned.values()] + self.free_rows
        assert sorted(rows) == list(range(len(self.table))), "a row is lost, or owned twice"

    def _check_conversation(self, conversation):
        chunks = [chunk for chunk in conversation.chunks if chunk]
        pinned = conversation.row is not None
        assert pinned == (conversation.order in self.pinned) and not (pinned and conversation.listed)
        assert not (pinned or conversation.listed) or self.conversations[conversation.name] is conversation
        assert conversation.cached == len(chunks) and conversation.held == sum(len(chunk.slots) for chunk in chunks)
        assert conversation.count == {move: sum(c.next_move() == move for c in chunks) for move in MOVES}
        assert conversation.reclaimable == sum(len(c.slots) for c in chunks if c.next_move() == "reclaim")
        for chunk in chunks:
            assert conversation.chunks[chunk.index] is chunk and chunk.move == chunk.next_move()
            assert not chunk.filled or chunk.index * self.chunk_size + chunk.filled <= min(conversation.known, len(conversation.tokens))
            assert chunk.filled <= self.chunk_size and (pinned or chunk.filled)
            assert not chunk.slots or len(chunk.slots) == chunk.filled or pinned and len(chunk.slots) > chunk.filled
            assert chunk.slots or chunk.place is not None
            assert chunk.ticket is None or chunk.place in (None, chunk.ticket.place)
        for move, index in self.indexes.items():
            filed = index.members.get(conversation.order)
            assert (filed is not None) == bool(conversation.listed and conversation.count[move])
            assert filed is None or filed[:2] == (self.policy.key(conversation, conversation.next(move).index, conversation.count[move]),
                                                  self.policy.activity(conversation))
        if pinned:
            slots = [slot for chunk in conversation.chunks if chunk for slot in chunk.slots]
            assert self.table[conversation.row, :len(slots)].tolist() == slots, "the slot table disagrees"


class _Change:
    """What `KVCache._changing` returns. A class, since the decorator for generators takes twice as long, and this is what runs most."""
    __slots__ = ("cache", "conversation", "chunk")

    def __init__(self, cache, conversation, chunk):
        self.cache, self.conversation, self.chunk = cache, conversation, chunk

    def __enter__(self):
        self.cache._tally(self.conversation, self.chunk, -1)

    def __exit__(self, kind, error, trace):
        cache, conversation, chunk = self.cache, self.conversation, self.chunk
        chunk.move = move = chunk.next_move()
        cache._tally(conversation, chunk, +1)
        if move:
            nearer = min if cache.policy.toward > 0 else max
            conversation.frontier[move] = nearer(conversation.frontier[move], chunk.index)
        cache.changed[conversation.order] = conversation


class KVPool:
    """The bytes of both tiers, and the copies between them on two side streams. Without CUDA the same code runs in order.

    A copy in is issued layer by layer with an event per layer, so that layer l computes while layer l+1 arrives (paper §4.3).
    Copies out start when the copies in of their step have ended: the paper measured a loss of 18-20% when both ways compete.
    Both go through a staging tensor on the GPU, so that neighbouring places of one layer are one large copy."""

    def __init__(self, layers, heads, head_dim, num_slots, num_places, chunk_size, device, dtype, pipeline=True):
        """heads: K/V heads. pipeline=False: the model starts when everything has arrived."""
        cuda = torch.device(device).type == "cuda"
        self.gpu = torch.empty(layers, 2, num_slots, heads, head_dim, device=device, dtype=dtype)     # [layers, K and V, slots, H_kv, D]
        self.cpu = torch.empty(layers, num_places, 2, chunk_size, heads, head_dim, dtype=dtype, pin_memory=cuda)
        self.chunk_size, self.pipeline = chunk_size, pipeline
        self.stream = torch.cuda.current_stream if cuda else _InOrder
        self.on = torch.cuda.stream if cuda else nullcontext
        self.event = torch.cuda.Event if cuda else _InOrder
        self.stream_in, self.stream_out = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else (_InOrder(), _InOrder())
        self.arrived = [self.event() for _ in range(layers)]
        self.flights = []                                         # (event, tickets) by time of issue

    def store(self, layer, slots, k, v):
        """k, v [T, H_kv, D] of new tokens into slots [T]."""
        self.gpu[layer, 0].index_copy_(0, slots, k)
        self.gpu[layer, 1].index_copy_(0, slots, v)

    def wait(self, layer):
        """The running stream, not the host, waits until this layer of what was last swapped in has arrived; pipeline=False: all layers."""
        self.stream().wait_event(self.arrived[layer if self.pipeline else -1])

    def swap_in(self, tickets):
        """Starts the copies CPU -> GPU, layer by layer, of the first `filled` tokens of each ticket's place into its slots; layer l
        may be read after wait(l). The host does not wait; the tickets are in landed() later."""
        if not tickets:
            return
        self.stream_in.wait_stream(self.stream())                 # earlier steps may still read the slots' former content
        with self.on(self.stream_in):
            tickets = sorted(tickets, key=lambda ticket: ticket.place)
            runs, slots, offsets = self._itinerary(tickets)
            for layer, arrived in enumerate(self.arrived):
                places = [self.cpu[layer, first:last].to(self.gpu.device, non_blocking=True) for first, last in runs]
                staging = torch.cat(places).transpose(0, 1).flatten(1, 2)                        # [2, n * chunk, H_kv, D]
                self.gpu[layer].index_copy_(1, slots, staging[:, offsets])
                arrived.record(self.stream_in)
            self._depart(tickets, self.stream_in)

    def swap_out(self, tickets):
        """Starts the copies GPU -> CPU, the other way round, behind what is being swapped in at the moment."""
        if not tickets:
            return
        self.stream_out.wait_stream(self.stream())                # earlier steps wrote these slots
        self.stream_out.wait_stream(self.stream_in)
        with self.on(self.stream_out):
            tickets = sorted(tickets, key=lambda ticket: ticket.place)
            runs, slots, offsets = self._itinerary(tickets)
            for layer in range(len(self.gpu)):
                staging = self.gpu.new_empty(2, len(tickets) * self.chunk_size, *self.gpu.shape[3:])
                staging.index_copy_(1, offsets, self.gpu[layer][:, slots])
                staging = staging.unflatten(1, (len(tickets), self.chunk_size)).transpose(0, 1).contiguous()   # [n, 2, chunk, H_kv, D]
                done = 0
                for first, last in runs:
                    self.cpu[layer, first:last].copy_(staging[done:done + last - first], non_blocking=True)
                    done += last - first
            self._depart(tickets, self.stream_out)

    def landed(self, wait: bool) -> list[Ticket]:
        """The tickets whose copies have ended since the last call; wait: waits for the oldest flight if there is any."""
        if wait and self.flights:
            self.flights[0][0].synchronize()
        landed = [flight for flight in self.flights if flight[0].query()]
        self.flights = [flight for flight in self.flights if flight not in landed]
        return [ticket for _, tickets in landed for ticket in tickets]

    def _itinerary(self, tickets):
        """Runs [first, last) of neighbouring places, and for each token on the way its slot and its offset in the staging tensor."""
        runs = []
        for ticket in tickets:
            if runs and runs[-1][1] == ticket.place:
                runs[-1][1] += 1
            else:
                runs.append([ticket.place, ticket.place + 1])
        slots = [slot for ticket in tickets for slot in ticket.slots]
        offsets = [n * self.chunk_size + i for n, ticket in enumerate(tickets) for i in range(ticket.filled)]
        indices = torch.tensor([slots, offsets], pin_memory=self.gpu.is_cuda)      # else the upload would wait for the stream
        return runs, *indices.to(self.gpu.device, non_blocking=True)

    def _depart(self, tickets, stream):
        event = self.event()
        event.record(stream)
        self.flights.append((event, tickets))


class _InOrder:
    """A stream and an event where everything runs in order."""
    def wait_stream(self, stream): pass
    def wait_event(self, event): pass
    def record(self, stream): pass
    def query(self): return True
    def synchronize(self): pass
