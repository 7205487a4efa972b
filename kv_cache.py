"""The two-tier KV cache: who is where (paper §4.3). Integers only; the bytes are in kv_pool.py.

    position   0        32        64        96        128   140
    chunk      | absent |  CPU    | GPU_AND | GPU      | GPU  |  a tail, filled = 12
    eviction   dropped <- dropped <- reclaimed <- copied ahead of time      (leading end first)

A chunk is 32 consecutive tokens of a conversation; it owns its GPU slots and its CPU place. Its life: computed -> GPU; copied
ahead of need -> GPU_AND_CPU; its slots taken by someone, lazily -> CPU; its place taken -> absent. A copy in flight is a
ticket: both of its ends stay busy until it completes, and a finished copy counts only if the chunk did not change meanwhile.

Conversations that begin alike share chunks: a tree, its leaves are conversations, its inner nodes *stems*. Each chunk has one holder, a
leaf or a stem, and eviction sees holders only. Whoever recomputes a shared chunk does it for all; it is pinned while any owner runs.

Invariants: no KV is believed cached that is not; every slot and place is free, busy or in exactly one chunk; the slot table agrees
with the chunks (`check_integrity`). Admission and release cost O(context), a decode step nothing that grows with contexts or with
the number of conversations."""
import heapq
import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from eviction import Policy, VictimIndex

MOVES = ("swap_out", "reclaim", "drop")    # what eviction does next to a chunk in state GPU, GPU_AND_CPU, CPU


class Chunk:
    """Up to chunk_size consecutive tokens. `filled`: how many leading ones of them have KV. Absent: without slots and place."""
    __slots__ = ("holder", "index", "filled", "slots", "place", "ticket", "condemned", "move")

    def __init__(self, holder: "Stem", index: int):
        self.holder, self.index, self.filled = holder, index, 0
        self.slots = []            # of its tokens in order; more than `filled` while they are being computed
        self.place = None          # in the CPU tier
        self.ticket = None         # the copy in flight, either way
        self.condemned = False     # won no CPU place: its slots are to be had though no copy exists, until its conversation returns
        self.move = None           # as its holder has counted it

    @property
    def state(self) -> str | None:
        if self.place is None:
            return "GPU" if self.slots else None
        return "GPU_AND_CPU" if self.slots else "CPU"

    def next_move(self) -> str | None:
        """What eviction may do with this chunk once its owners are idle; None while empty or while a copy is in flight."""
        if self.ticket or not self.filled:
            return None
        if not self.slots:
            return "drop"
        return "swap_out" if self.place is None and not self.condemned else "reclaim"


class Stem:
    """Who holds chunks. A conversation holds its own; the full chunks that several conversations begin with are held by a stem, from
    which they branch off, and which may itself branch off another. To eviction both are the same. Kept up to date by KVCache alone."""

    def __init__(self, name: str | int, order: int, chunk_size: int, toward: int):
        self.name, self.order = name, order           # order of creation
        self.parent: Stem | None = None               # what it branches off
        self.branches: set[Stem] = set()              # what branches off it
        self.chunks: list[Chunk] = []                 # from position 0 on: first its parent's, then those that it holds
        self.owners = 1                               # conversations that grow from it, itself included
        self.pins, self.waiting = 0, 0                # of these, how many run, and how many have a turn that waits in the queue
        self.last_active = 0.0                        # the latest of any of them
        self.turns = 0                                # that have ended, as far as a policy counts them
        self.held = 0                                 # slots in the chunks that it holds
        self.reclaimable = 0                          # of these, in chunks whose next move is "reclaim"
        self.cached = 0                               # chunks that it holds and that are not absent
        self.count = dict.fromkeys(MOVES, 0)          # chunks that it holds, by next move
        self.chunk_size, self.toward = chunk_size, toward
        self.branch_off(None)

    def branch_off(self, parent: "Stem | None"):
        if self.parent:
            self.parent.branches.discard(self)
        if parent:
            parent.branches.add(self)
        self.parent = parent
        self.start = len(parent.chunks) if parent else 0       # the first chunk that it holds itself
        self.frontier = dict.fromkeys(MOVES, self.start if self.toward > 0 else math.inf)      # no chunk of that move goes before this index

    def lineage(self):
        """Itself and all that it grows from."""
        holder = self
        while holder:
            yield holder
            holder = holder.parent

    def next(self, move: str) -> Chunk:
        """The chunk that goes first for this move; it must hold one."""
        index = min(self.frontier[move], len(self.chunks) - 1)
        while self.chunks[index].move != move:
            index += self.toward
        self.frontier[move] = index
        return self.chunks[index]

    def followed(self, move: str) -> bool:
        """Whether a chunk behind its own, in anything that grows from it, has to make this move first."""
        return self.toward < 0 and any(branch.count[move] or branch.followed(move) for branch in self.branches)


class Conversation(Stem):
    """What survives turns: raw tokens, and the chunks that cache their KV."""

    def __init__(self, name: str | None, order: int, tokens, chunk_size: int, toward: int):
        self.one_off = name is None                   # to be forgotten at the end of its request
        super().__init__(order if self.one_off else name, order, chunk_size, toward)
        self.tokens = array("i", tokens)
        self.known = max(len(self.tokens) - 1, 0)     # leading tokens that have had KV at some time (a last sampled one never had)
        self.row = None                               # in the slot table, while it runs (pinned)

    def sources(self) -> tuple[int, int]:
        """Tokens whose KV is on the GPU (a CPU copy may exist, too) and on the CPU alone."""
        gpu = sum(chunk.filled for chunk in self.chunks if chunk.slots)
        return gpu, sum(chunk.filled for chunk in self.chunks) - gpu


@dataclass(eq=False)
class Ticket:
    """A copy in flight between `slots` (the first `filled` of a chunk) and a CPU `place`."""
    conversation: Stem             # that returns, or that holds what leaves
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
        self.changed: dict[int, Stem] = {}                       # by order: not yet filed again in the indexes
        self.reclaimable = 0                                     # slots of chunks that are not pinned and whose next move is "reclaim"
        self.cold: dict[int, Conversation] = {}
        self.orders = count()
        self.stats = Counter(chunks_swapped_in=0, chunks_swapped_out=0, chunks_dropped=0)
        self.designate(())

    # ---- conversations

    def open(self, name: str | None, tokens=()) -> Conversation:
        """The conversation of that name, made from `tokens` if it is new here; None: a one-off."""
        if name in self.conversations:
            return self.conversations[name]
        conversation = Conversation(name, next(self.orders), tokens, self.chunk_size, self.policy.toward)
        self.conversations[conversation.name] = self.changed[conversation.order] = conversation
        self.share_prefix(conversation, conversation.tokens)
        return conversation

    def fork(self, parent: Conversation, name: str | None, tokens) -> Conversation:
        """A new conversation made from `tokens`, of which `parent` holds a beginning. The full chunks of what both have in common are
        shared from now on, wherever they are and whatever the parent is doing; the rest the child computes itself."""
        assert name not in self.conversations
        child = self.open(name, tokens)
        self.share(child, child.tokens[:child.known], parent)
        return child

    def share(self, child: Conversation, tokens, parent: Conversation):
        """`child`, of whose context `tokens` are, or are about to be, the beginning, shares the full chunks that they have in common with
        the KV of `parent`; unless it holds chunks of its own."""
        known = min(len(tokens), parent.known)
        same = np.equal(tokens[:known], parent.tokens[:known])
        end = min((known if same.all() else int(same.argmin())) // self.chunk_size, len(parent.chunks))
        if end > child.start == len(child.chunks):
            self._graft(child, self._stem(parent, end))
            child.known = max(child.known, end * self.chunk_size)

    def designate(self, tokens):
        """The full chunks of these tokens are shared from now on by all conversations that begin with them, computed by the first of
        these, and never evicted. ValueError if that would be more than half of the slots."""
        full = len(tokens) // self.chunk_size
        if 2 * full * self.chunk_size > self.num_slots:
            raise ValueError(f"a prefix of {len(tokens)} tokens would fill more than half of {self.num_slots} slots: shorten it")
        self.prefix = array("i", tokens[:full * self.chunk_size])
        self.designated = Stem("prefix", next(self.orders), self.chunk_size, self.policy.toward)
        self.designated.owners, self.designated.pins = 0, math.inf
        self.designated.chunks = [Chunk(self.designated, index) for index in range(full)]

    def share_prefix(self, conversation: Conversation, tokens):
        """A conversation that has no chunks yet, and is about to have these tokens, shares the designated prefix if it begins with it."""
        begins = 0 < len(self.prefix) < len(tokens) and array("i", tokens[:len(self.prefix)]) == self.prefix
        self._graft(conversation, self.designated if begins else None)

    def forget(self, conversation: Conversation):
        """Frees everything in both tiers; what a copy in flight still uses is freed on its completion. It must not be pinned."""
        self.truncate(conversation, 0, 0)
        self._pin(conversation)
        if self.conversations.get(conversation.name) is conversation:
            del self.conversations[conversation.name]
        self.cold.pop(conversation.order, None)

    def truncate(self, conversation: Conversation, length: int, known: int):
        """Undoes a cancelled or failed turn: keeps `length` tokens, and KV for no more than the first `known` of them.
        It must not be pinned."""
        assert conversation.row is None
        del conversation.tokens[length:]
        conversation.known = min(conversation.known, known)
        full = known // self.chunk_size
        for chunk in conversation.chunks[max(full, conversation.start):]:
            if (kept := max(known - chunk.index * self.chunk_size, 0)) < chunk.filled:
                with self._changing(chunk):
                    chunk.filled = kept
                    if chunk.ticket:
                        chunk.ticket.stale = True
                self._trim(chunk)
        if full < conversation.start:
            self._graft(conversation, self._stem(conversation, full))
        del conversation.chunks[-(-known // self.chunk_size):]

    def drop_all(self, conversation: Conversation):
        """Frees the KV of a conversation that is not pinned, and keeps its tokens."""
        known = conversation.known
        self.truncate(conversation, len(conversation.tokens), 0)
        conversation.known = known
        self.share_prefix(conversation, conversation.tokens)

    def drop_everything(self):
        """Frees all KV, when no conversation is pinned, and when no copy moves any more, whether it is known to have ended or not."""
        for conversation in self.conversations.values():
            self.drop_all(conversation)
        for chunk in self.designated.chunks:
            self._discard(chunk)
        for ticket in list(self.in_flight):
            self.complete(ticket)

    def set_waiting(self, conversation: Conversation, waiting: bool):
        self._count(conversation, 0, waiting - conversation.waiting)

    def take_cold(self) -> list[Conversation]:
        """Those that are idle and have nothing cached: whoever keeps a history may forget them."""
        self._index_changed()
        return list(self.cold.values())

    # ---- admission

    @property
    def available(self) -> int:
        """Slots to be had at once: free, or of chunks that are not pinned and have a CPU copy or are condemned."""
        return len(self.free_slots) + self.reclaimable

    def shortfall(self, conversation: Conversation, total: int, reserve: int) -> int:
        """How many more slots must become available before `admit(conversation, total)` leaves `reserve` of them.
        Its own chunks are no help: those on the GPU are used where they are, and pinned before anything is taken."""
        own = sum(holder.reclaimable for holder in conversation.lineage() if not holder.pins)
        return total - self._held(conversation) + reserve - (self.available - own)

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        """Pins the conversation and takes every slot for positions [0, total) at once: for what comes back from the CPU, for
        holes and for new tokens; writes its row of the slot table. None of its chunks is condemned or waiting any more.
        The caller has seen that there is no shortfall and a free row. Returns the swap-ins, one ticket per chunk."""
        self._pin(conversation)
        self.pinned[conversation.order] = conversation
        conversation.row = self.free_rows.pop()
        self.set_waiting(conversation, False)
        for chunk in conversation.chunks:
            if chunk.condemned:
                with self._changing(chunk):
                    chunk.condemned = False
        arriving = [chunk for chunk in conversation.chunks if chunk.filled and not chunk.slots]
        self._fill(conversation, 0, total, self._take_slots(total - self._held(conversation), now))
        self._write_table(conversation.row, 0, [slot for chunk in conversation.chunks for slot in chunk.slots])
        return [self._issue(conversation, chunk, "in", chunk.place) for chunk in arriving]

    def grow(self, conversation: Conversation, now: float) -> bool:
        """Slots for the tokens that a pinned conversation has grown by; False if there are none to be had."""
        total, held = len(conversation.tokens), self._held(conversation)
        if self.available < total - held:
            return False
        if held < total:
            slots = self._take_slots(total - held, now)
            self._fill(conversation, held // self.chunk_size, total, slots)
            self._write_table(conversation.row, held, slots)
        return True

    def release(self, conversation: Conversation, now: float):
        """The end of admit: unpins. Slots that got no KV are free again, unless somebody else computes them; a hole that was not begun
        is absent again."""
        self.free_rows.append(conversation.row)
        conversation.row = None
        del self.pinned[conversation.order]
        self._unpin(conversation)
        for holder in conversation.lineage():
            holder.last_active = now
        for chunk in conversation.chunks:
            if len(chunk.slots) > chunk.filled and not chunk.holder.pins:
                self._trim(chunk)

    def computed(self, conversation: Conversation, start: int, end: int):
        """Positions [start, end) have KV now. A chunk that grows outgrows its CPU copy, one in flight included. In a batch two may
        have computed the same tokens of a chunk that they share, with the same result."""
        for index in range(start // self.chunk_size, -(-end // self.chunk_size)):
            chunk, first = conversation.chunks[index], index * self.chunk_size
            assert first + chunk.filled == max(start, first) or chunk.holder is not conversation, "spans fill a chunk from the left"
            if (filled := min(end - first, self.chunk_size)) > chunk.filled:
                with self._changing(chunk):
                    self._release_place(chunk)
                    chunk.filled = filled
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
        idle conversations count, and whole policy units go, so that it may be more. A GPU copy stays valid until its slots are
        reclaimed. A chunk that wins no CPU place against the worth of what is there is condemned instead: available, not copied."""
        tickets = []
        if wanted > 0:
            wanted -= sum(t.filled for t in self.in_flight if t.direction == "out" and not t.stale and not t.chunk.holder.pins)
        while wanted > 0 and (holder := self._cheapest("swap_out", now)):
            for _ in range(self.policy.unit(holder.count["swap_out"])):
                chunk = holder.next("swap_out")
                place = self._take_place(self._rank(holder, "swap_out", now), now)
                if place is None:
                    with self._changing(chunk):
                        chunk.condemned = True
                else:
                    tickets.append(self._issue(holder, chunk, "out", place))
                wanted -= chunk.filled
        return tickets

    def plan_swap_out_for(self, conversation: Conversation, total: int, reserve: int, now: float) -> list[Ticket]:
        """Copies ahead of time what keeps `conversation` from being admitted, never its own chunks."""
        if self.shortfall(conversation, total, reserve) <= 0:
            return []
        self._pin(conversation)
        tickets = self.plan_swap_out(self.shortfall(conversation, total, reserve), now)
        self._unpin(conversation)
        return tickets

    def reclaim(self, holder: Stem):
        """Frees the slots of one policy unit of the holder's reclaimable chunks (there is one at least), from the policy's end. A chunk
        with a CPU copy lives on there; a condemned one is dropped."""
        for _ in range(self.policy.unit(holder.count["reclaim"])):
            chunk = holder.next("reclaim")
            if chunk.place is None:
                self._drop(chunk)
            else:
                with self._changing(chunk):
                    self._release_slots(chunk, 0)

    def complete(self, ticket: Ticket):
        """What follows a finished copy. A copy out gives the chunk its place, unless the chunk changed or was freed meanwhile
        (stale). What was given up during the copy, slots and place, becomes free only now. Stale copies are counted, too."""
        self.in_flight.remove(ticket)
        chunk = ticket.chunk
        with self._changing(chunk):
            chunk.ticket = None
            if ticket.direction == "out" and not ticket.stale:
                chunk.place = ticket.place
            if chunk.place != ticket.place:
                heapq.heappush(self.free_places, ticket.place)
            self.free_slots += ticket.orphans
        self.stats["chunks_swapped_" + ticket.direction] += 1

    # ---- the small steps, each on one chunk

    def _fill(self, conversation, first_index, total, slots):
        """Gives one of `slots` to every position below `total` that has none, from chunk `first_index` on."""
        slots, chunks = iter(slots), conversation.chunks
        for index in range(first_index, -(-total // self.chunk_size)):
            if index == len(chunks):
                chunks.append(Chunk(conversation, index))
            chunk = chunks[index]
            with self._changing(chunk):
                chunk.slots += islice(slots, min(self.chunk_size, total - index * self.chunk_size) - len(chunk.slots))

    def _write_table(self, row, start, slots):
        """Of the positions from `start` on."""
        end = start + len(slots)
        self.table[row, start:end] = slots
        self.table_updates.append((row, start, end))

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
                    with self._changing(chunk):
                        self._release_place(chunk)
                    break
            else:
                holder = self._cheapest("drop", now)
                if holder is None or self._rank(holder, "drop", now) >= rank:
                    return None
                self._drop(holder.next("drop"))
        return heapq.heappop(self.free_places)

    def _rank(self, holder, move, now):
        """Orders the holder's next chunk among all: by value, then by holder, then by its distance from the end that goes first."""
        index, policy = holder.next(move).index, self.policy
        value = policy.value(policy.key(holder, index, holder.count[move]), policy.idle(now, policy.activity(holder)))
        return holder.owners * value, holder.order, policy.toward * index

    def _issue(self, conversation, chunk, direction, place):
        ticket = Ticket(conversation, chunk, direction, chunk.index * self.chunk_size, chunk.filled, chunk.slots[:chunk.filled], place)
        with self._changing(chunk):
            chunk.ticket = ticket
        self.in_flight.add(ticket)
        return ticket

    def _drop(self, chunk):
        self._discard(chunk)
        self.stats["chunks_dropped"] += 1

    def _trim(self, chunk):
        """Gives up what holds no KV: slots beyond `filled`, and the place of a chunk that has nothing left."""
        if not chunk.filled:
            self._discard(chunk)
        elif len(chunk.slots) > chunk.filled:
            with self._changing(chunk):
                self._release_slots(chunk, chunk.filled)

    def _discard(self, chunk):
        """From now on it is absent."""
        with self._changing(chunk):
            self._release_slots(chunk, 0)
            self._release_place(chunk)
            chunk.filled = 0

    def _release_slots(self, chunk, keep):
        (chunk.ticket.orphans if chunk.ticket else self.free_slots).extend(chunk.slots[keep:])
        del chunk.slots[keep:]

    def _release_place(self, chunk):
        if chunk.place is not None and not chunk.ticket:
            heapq.heappush(self.free_places, chunk.place)
        chunk.place = None

    # ---- the tree of stems

    def _stem(self, holder, end):
        """What holds the last of the holder's first `end` chunks, and none behind: there is such a stem in its lineage, or one is split off."""
        while holder and holder.start >= end:
            holder = holder.parent
        if not holder or holder.branches and len(holder.chunks) == end:
            return holder
        stem = Stem(holder.name, next(self.orders), self.chunk_size, self.policy.toward)
        stem.owners, stem.pins, stem.waiting, stem.last_active = holder.owners, holder.pins, holder.waiting, holder.last_active
        stem.chunks = holder.chunks[:end]
        self._hand_over(stem.chunks[holder.start:], stem)
        stem.branch_off(holder.parent)
        holder.branch_off(stem)
        return stem

    def _graft(self, conversation, stem):
        """Makes a conversation that has no chunks of its own branch off there, or (None) stand alone. A stem with one branch left
        becomes one with it."""
        old, waiting = conversation.parent, conversation.waiting
        self._count(conversation, -1, -waiting)
        conversation.branch_off(stem)
        self._count(conversation, +1, waiting)
        conversation.chunks = stem.chunks[:] if stem else []
        if old and len(old.branches) == 1 and old.pins < math.inf:
            (branch,) = old.branches
            self._hand_over(old.chunks[old.start:], branch)
            branch.branch_off(old.parent)
            old.branch_off(None)
            self._pin(old)

    def _hand_over(self, chunks, holder):
        for chunk in chunks:
            self.changed[chunk.holder.order] = chunk.holder
            with self._changing(chunk):
                chunk.holder = holder

    def _count(self, conversation, owners, waiting):
        for holder in conversation.lineage():
            holder.owners += owners
            holder.waiting += waiting
            self.changed[holder.order] = holder

    def _held(self, holder):
        """Slots in all chunks of its lineage."""
        return holder.held + (self._held(holder.parent) if holder.parent else 0)

    # ---- counts and indexes, derived from the chunks

    def _changing(self, chunk):
        """Every change of a chunk happens inside: counts, frontiers and the indexes of victims follow."""
        return _Change(self, chunk)

    def _tally(self, chunk, sign):
        holder, slots, move = chunk.holder, sign * len(chunk.slots), chunk.move
        holder.held += slots
        if slots or chunk.place is not None:
            holder.cached += sign
        if move:
            holder.count[move] += sign
            if move == "reclaim":
                holder.reclaimable += slots
                self.reclaimable += slots * (not holder.pins)

    def _pin(self, conversation):
        """What it holds or shares is not evicted until `_unpin`."""
        for holder in conversation.lineage():
            if not holder.pins:
                self.reclaimable -= holder.reclaimable
                for index in self.indexes.values():
                    index.discard(holder)
            holder.pins += 1

    def _unpin(self, conversation):
        for holder in conversation.lineage():
            holder.pins -= 1
            if not holder.pins:
                self.reclaimable += holder.reclaimable
            self.changed[holder.order] = holder

    def _cheapest(self, move, now):
        """The one whose next chunk for this move is worth least, or None."""
        self._index_changed()
        return self.indexes[move].cheapest(now)

    def _index_changed(self):
        """Files what has changed since the last look: many changes of one holder are filed once."""
        for holder in self.changed.values():
            self._index(holder)
            self._note_cold(holder)
        self.changed.clear()

    def _index(self, holder):
        """Files it in the index of every move that a chunk of it can make. Under a trailing policy its stem may have its turn now."""
        if not holder.pins:
            policy = self.policy
            for move, index in self.indexes.items():
                count = holder.count[move]
                if count and not (holder.branches and holder.followed(move)):
                    index.file(holder, policy.key(holder, holder.next(move).index, count), policy.activity(holder))
                else:
                    index.discard(holder)
            if holder.parent and policy.toward < 0:
                self._index(holder.parent)

    def _note_cold(self, holder):
        """Conversations are cold that neither run nor wait nor have anything cached, what is never evicted aside."""
        if holder.branches:
            for branch in holder.branches if not holder.cached else ():
                self._note_cold(branch)
        elif holder.cached or holder.pins or holder.waiting or any(stem.cached for stem in holder.lineage() if stem.pins < math.inf):
            self.cold.pop(holder.order, None)
        else:
            self.cold[holder.order] = holder

    def check_integrity(self):
        """Every invariant of the bookkeeping, from scratch. O(everything): for tests and `debug=True`."""
        self._index_changed()
        ends = [*self.conversations.values(), *self.pinned.values(), *(t.chunk.holder for t in self.in_flight), self.designated]
        everyone = {id(holder): holder for end in ends for holder in end.lineage()}
        slots, places = Counter(self.free_slots), Counter(self.free_places)
        for ticket in self.in_flight:
            slots.update(ticket.orphans)
            places.update([ticket.place] if ticket.chunk.place != ticket.place else [])
            assert ticket.chunk.ticket is ticket
        filed = [dict(index.members) for index in self.indexes.values()]
        for holder in everyone.values():
            self._index(holder)
            self._check_holder(holder)
            (self._check_conversation if isinstance(holder, Conversation) else self._check_stem)(holder)
            for chunk in holder.chunks[holder.start:]:
                slots.update(chunk.slots)
                places.update([] if chunk.place is None else [chunk.place])
        assert slots == Counter(range(self.num_slots)), "a slot is lost, or owned twice"
        assert places == Counter(range(self.num_places)), "a CPU place is lost, or owned twice"
        assert filed == [index.members for index in self.indexes.values()]
        assert self.reclaimable == sum(holder.reclaimable for holder in everyone.values() if not holder.pins)
        rows = [c.row for c in self.pinned.values()] + self.free_rows
        assert sorted(rows) == list(range(len(self.table))), "a row is lost, or owned twice"

    def _check_holder(self, holder):
        chunks = holder.chunks[holder.start:]
        assert [(chunk.holder, chunk.index) for chunk in chunks] == [(holder, index) for index in range(holder.start, len(holder.chunks))]
        assert holder.cached == sum(chunk.state is not None for chunk in chunks) and holder.held == sum(len(chunk.slots) for chunk in chunks)
        assert holder.count == {move: sum(c.next_move() == move for c in chunks) for move in MOVES}
        assert holder.reclaimable == sum(len(c.slots) for c in chunks if c.next_move() == "reclaim")
        for chunk in chunks:
            assert chunk.move == chunk.next_move() and chunk.filled <= self.chunk_size
            assert len(chunk.slots) in (0, chunk.filled) or holder.pins and len(chunk.slots) > chunk.filled
            assert (chunk.filled or chunk.place is None) and (chunk.state or not chunk.filled)
            assert chunk.ticket is None or chunk.place in (None, chunk.ticket.place)
        assert not holder.pins or not any(holder.order in index.members for index in self.indexes.values())

    def _check_stem(self, stem):
        owners, waiting, pins = map(sum, zip((0, 0, 0), *((branch.owners, branch.waiting, branch.pins) for branch in stem.branches)))
        assert (stem.owners, stem.waiting) == (owners, waiting)
        assert stem.pins == math.inf or stem.pins == pins and len(stem.branches) > 1 and len(stem.chunks) > stem.start
        for branch in stem.branches:
            assert branch.parent is stem and branch.start == len(stem.chunks) and branch.chunks[:branch.start] == stem.chunks

    def _check_conversation(self, conversation):
        pinned = conversation.row is not None
        assert pinned == (conversation.order in self.pinned) and pinned <= conversation.pins <= 1 and conversation.owners == 1
        assert conversation.pins > pinned or self.conversations[conversation.name] is conversation
        cached = any(holder.cached for holder in conversation.lineage() if holder.pins < math.inf)
        assert cached or conversation.pins or conversation.waiting or conversation.order in self.cold
        for chunk in conversation.chunks[conversation.start:]:
            assert not chunk.filled or chunk.index * self.chunk_size + chunk.filled <= min(conversation.known, len(conversation.tokens))
        if pinned:
            slots = [slot for chunk in conversation.chunks for slot in chunk.slots]
            assert len(slots) == self._held(conversation)
            assert self.table[conversation.row, :len(slots)].tolist() == slots, "the slot table disagrees"


class _Change:
    """What `KVCache._changing` returns. A class, since the decorator for generators takes twice as long, and this is what runs most."""
    __slots__ = ("cache", "chunk")

    def __init__(self, cache, chunk):
        self.cache, self.chunk = cache, chunk

    def __enter__(self):
        self.cache._tally(self.chunk, -1)

    def __exit__(self, kind, error, trace):
        cache, chunk = self.cache, self.chunk
        holder, chunk.move = chunk.holder, chunk.next_move()
        cache._tally(chunk, +1)
        if move := chunk.move:
            nearer = min if holder.toward > 0 else max
            holder.frontier[move] = nearer(holder.frontier[move], chunk.index)
        cache.changed[holder.order] = holder
