"""The two-tier KV cache: which chunk is where (paper §4.3). Integers only; kv_pool.py has the bytes.

A *slot* holds the KV of one token on the GPU. A *chunk* is chunk_size (32) consecutive tokens of a
conversation, and a *place* holds one chunk on the CPU. A chunk owns its slots and its place:

    position   0        32       64             96       128   140
    chunk      | absent |  CPU   | GPU_AND_CPU  |  GPU   | GPU |     the tail has filled = 12 of 32 tokens

The life of a chunk, and who moves it on:

    absent --admit, grow--> GPU, not filled yet --computed--> GPU
    GPU --plan_swap_out, complete--> GPU_AND_CPU --reclaim--> CPU --drop--> absent         while it is idle
    GPU (evictable_without_copy) --reclaim--> absent                                       while it is idle
    CPU --admit--> GPU_AND_CPU, whose KV is there at `complete`                            when it returns
    GPU_AND_CPU --computed (it grows)--> GPU                                               while it runs
    GPU_AND_CPU --_free_spare_place (an idle chunk needs the place)--> GPU                 while it runs
    any --truncate (for example, a turn was cancelled)--> shorter, or absent               while it is idle

The policy decides which end of a conversation leaves first. A chunk is evictable_without_copy if it found no
place: none was free, no running conversation could spare one, and no idle chunk that was on the CPU alone was
worth less. A copy in flight is a `Ticket`. A running conversation is *pinned*: none of its chunks is evicted.
It has a row in the *slot table*: the slot of each of its positions, by which attention finds the KV.

Invariants: KV that counts as cached is there when a step reads it. Every slot and every place is free, or in
exactly one chunk, or held by a copy in flight alone. The slot table agrees with the chunks. `check_integrity`
checks all but the first: it sees no bytes.

Admission and release cost O(context). A decode costs O(1), however long its context is and however many
conversations there are. To take slots from idle chunks, or to copy such chunks ahead of need, costs a search
for victims as well (`VictimIndex` in eviction.py).
"""
import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from eviction import Member, Policy, VictimIndex, worth

MOVES = ("swap_out", "reclaim", "drop")    # what eviction does next to a chunk in state GPU, GPU_AND_CPU, CPU


class Chunk:
    """Up to `chunk_size` consecutive tokens of a conversation. The first `filled` of them have KV.

    An absent chunk (never computed, or dropped) has neither slots nor a place."""
    __slots__ = ("holder", "index", "filled", "slots", "place", "ticket", "evictable_without_copy", "booked")

    def __init__(self, holder: "Conversation", index: int):
        self.holder = holder            # its conversation (sharing.py may change that)
        self.index = index              # its first token is at position index * chunk_size
        self.filled = 0
        self.slots: list[int] = []      # of its tokens in order; more than `filled` while tokens are computed
        self.place: int | None = None   # in the CPU tier
        self.ticket: Ticket | None = None       # the copy in flight, in either direction
        # True if we chose not to copy this chunk. Its slots may be taken at any time. Cleared when the
        # conversation runs again.
        self.evictable_without_copy = False
        # What `_update` last added to the totals for it: to which holder, with which next move, how many
        # slots, and whether it was present.
        self.booked: tuple[Conversation, str | None, int, bool] = holder, None, 0, False

    @property
    def state(self) -> str | None:
        """Where its slots and its place are. None: it is absent. (A chunk in state GPU that is just being
        computed may have no KV yet: see `filled`.)"""
        if self.place is None:
            return "GPU" if self.slots else None
        return "GPU_AND_CPU" if self.slots else "CPU"

    @property
    def next_move(self) -> str | None:
        """What eviction may do with this chunk while its conversation is idle. None: nothing, because the
        chunk is empty or a copy of it is in flight."""
        if self.ticket or not self.filled:
            return None
        if not self.slots:
            return "drop"
        return "swap_out" if self.place is None and not self.evictable_without_copy else "reclaim"


class Conversation:
    """What survives turns: raw tokens, and the chunks that cache their KV.

    It *uses* all of its chunks, and it *holds* them: `holders` is [itself]. (With sharing.py other holders
    can hold some of its chunks, and other conversations can use them, too.)"""
    users = 1           # conversations that use the chunks which this one holds

    def __init__(self, name: str | None, order: int, tokens: Iterable[int], chunk_size: int, toward: int):
        """order: its number in the order of creation. toward: +1 if its first chunk leaves first, -1 if its
        last one does (`Policy.toward`)."""
        self.one_off = name is None                     # forgotten at the end of its request
        self.name = order if self.one_off else name
        self.order, self.chunk_size, self.toward = order, chunk_size, toward
        self.tokens = array("i", tokens)
        # The first `known` tokens count as computed before, by us or before a restart. If one of them has
        # no KV now, it is recomputed; all later tokens are new. The last token of a reply was sampled, but
        # never fed to the model.
        self.known = max(len(self.tokens) - 1, 0)
        self.chunks: list[Chunk] = []
        self.holders = [self]
        self.row: int | None = None     # in the slot table, while it runs
        self.room = 0                   # while it runs, positions [0, room) have slots
        self.pins = 0                   # how many users of what it holds run, or wait while we make room
        self.waiting = 0                # how many users of what it holds have a turn in the queue
        self.last_active = 0.0          # when it last stopped running, in seconds
        self.turns = 0                  # for a policy that counts them (experiments/policies.py has one)
        # Totals over the chunks that it holds.
        self.held = 0                               # slots
        self.present = 0                            # chunks that are not absent
        self.reclaimable = 0                        # slots in chunks whose next move is "reclaim"
        self.by_move = dict.fromkeys(MOVES, 0)      # chunks by next move
        # By move: where the search for the next victim begins. In the order in which chunks leave, no chunk
        # with this move comes before this index.
        self.frontier = dict.fromkeys(MOVES, 0)

    def next_victim(self, move: str) -> Chunk:
        """Return the next chunk to which eviction should apply `move`. At least one chunk must allow that
        move.

        We remember in `frontier` how far we had to look, so that the next search begins there."""
        index = min(self.frontier[move], len(self.chunks) - 1)      # the last chunks may have been truncated
        while self.chunks[index].holder is not self or self.chunks[index].next_move != move:
            index += self.toward
        self.frontier[move] = index
        return self.chunks[index]

    def sources(self) -> tuple[int, int]:
        """How many cached tokens are in chunks that have slots, and how many in chunks on the CPU alone. (If
        a copy in is in flight, the slots are there, and the KV will be.)"""
        gpu = sum(chunk.filled for chunk in self.chunks if chunk.slots)
        return gpu, sum(chunk.filled for chunk in self.chunks) - gpu


@dataclass(eq=False)
class Ticket:
    """A copy in flight between `slots` (those of the first `filled` tokens of a chunk) and a CPU `place`.

    A chunk with a ticket is never evicted. During a copy out the ticket owns the place. What holds when the
    copy has ended depends on what has happened to the chunk meanwhile:

        nothing; steps may have read it    the chunk gets the place: GPU_AND_CPU
        a part of it was truncated         the same; slots that it gave up are free now
        it has grown                       the copy is stale; the place is free, the chunk stays GPU
        it became absent                   the copy is stale; the place and all its slots are free now

    During a copy in the chunk has both slots and place. If it grows meanwhile, the place is free at the
    end."""
    conversation: Conversation     # "in": the one that returns; "out": the holder
    chunk: Chunk
    direction: str                 # "in" or "out"
    start: int                     # position of the chunk's first token
    filled: int
    slots: list[int]
    place: int
    stale: bool = False            # the place does not hold what the chunk needs
    orphans: list[int] = field(default_factory=list)     # slots given up meanwhile, free when the copy ends

    @property
    def end(self) -> int:
        return self.start + self.filled


class KVCache:
    """The books of both tiers. A conversation is pinned between `admit` and `release`, and while
    `plan_swap_out_for` looks for its slots."""

    def __init__(self, num_slots: int, num_places: int, chunk_size: int, rows: int, max_context: int,
                 policy: Policy):
        """num_slots: GPU tier, in tokens. num_places: CPU tier, in chunks. rows: of the slot table."""
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.policy = policy
        self.free_slots = list(range(num_slots - 1, -1, -1))        # a stack
        # A heap: the lowest place is taken first, so chunks that leave together lie side by side.
        self.free_places = list(range(num_places))
        self.free_rows = list(range(rows - 1, -1, -1))              # a stack
        self.table = np.full((rows, max_context), -1, np.int32)     # the slot table's master copy
        self.table_updates: list[tuple[int, int, int]] = []         # (row, start, end) written lately
        self.slot_copies: dict[int, int] = {}       # target -> source, see `take_slot_copies`
        self.conversations: dict[str | int, Conversation] = {}      # by name
        self.running: dict[int, Conversation] = {}                  # by order
        self.in_flight: set[Ticket] = set()
        self.reclaimable = 0            # slots that `reclaim` can free: those of pinned holders do not count
        self.indexes = {move: VictimIndex(policy) for move in MOVES}
        # For each index, and for `cold`: the holders that have changed since it was last brought up to date,
        # by order.
        self.changed: dict[str, dict[int, Conversation]] = {name: {} for name in (*MOVES, "cold")}
        self.cold: dict[int, Conversation] = {}                     # by order, see `cold_conversations`
        self.orders = count()
        self.stats = Counter(chunks_swapped_in=0, chunks_swapped_out=0, chunks_dropped=0)

    # ---- conversations

    def open(self, name: str | None, tokens: Iterable[int] = ()) -> Conversation:
        """Return the conversation of that name. If there is none, a new one begins with `tokens`. None as a
        name: always a new one, a one-off."""
        if name in self.conversations:
            return self.conversations[name]
        conversation = Conversation(name, next(self.orders), tokens, self.chunk_size, self.policy.toward)
        self.conversations[conversation.name] = conversation
        self._note_change(conversation)
        return conversation

    def extend(self, conversation: Conversation, prompt: Sequence[int]) -> bool:
        """Append the prompt to the conversation's tokens, and return True. (sharing.py may return False
        instead: the prompt has to wait, ask again later.)"""
        conversation.tokens.extend(prompt)
        return True

    def set_waiting(self, conversation: Conversation, waiting: bool):
        """Note whether a turn of the conversation waits in the queue. (The conversation itself counts 0 or 1.
        Another holder counts all of its users.)"""
        change = waiting - conversation.waiting
        for holder in conversation.holders:
            holder.waiting += change
            self._note_change(holder)

    def forget(self, conversation: Conversation):
        """Free everything in both tiers. A copy in flight frees its ends when it completes. The
        conversation must not be running."""
        self.truncate(conversation, 0, 0)
        if self.conversations.get(conversation.name) is conversation:
            del self.conversations[conversation.name]
        for index in self.indexes.values():
            index.discard(conversation.order)
        for noted in (*self.changed.values(), self.cold):       # they would keep it in memory
            noted.pop(conversation.order, None)

    def truncate(self, conversation: Conversation, length: int, known: int):
        """Keep `length` tokens, and the KV of no more than the first `known` of them. So the scheduler undoes
        a cancelled turn, and takes back what was computed after the end of a reply. The conversation must not
        be running.

        Chunks of 32, length 50, known 49: chunk 0 stays, chunk 1 keeps 17 tokens, all others go."""
        assert conversation.row is None
        del conversation.tokens[length:]
        conversation.known = min(conversation.known, known)
        for chunk in conversation.chunks[known // self.chunk_size:]:
            kept = max(known - chunk.index * self.chunk_size, 0)
            chunk.filled = min(chunk.filled, kept)      # a copy on the CPU stays right for these
            self._trim(chunk)
        del conversation.chunks[chunks_for(known, self.chunk_size):]

    def drop_all(self, conversation: Conversation):
        """Free the KV of a conversation that is not running, and keep its tokens."""
        known = conversation.known
        self.truncate(conversation, len(conversation.tokens), 0)
        conversation.known = known          # these tokens count as recomputed when they return, not as new

    def drop_everything(self):
        """Free all KV. No conversation may be running, and no copy may be moving any more (whether we have
        heard of its end or not)."""
        for conversation in self.conversations.values():
            self.drop_all(conversation)
        for ticket in list(self.in_flight):
            self.complete(ticket)

    def cold_conversations(self) -> list[Conversation]:
        """Those that neither run nor wait nor have anything cached. Whoever keeps their tokens may forget
        them."""
        for conversation in self.changed["cold"].values():
            self._update_cold(conversation)
        self.changed["cold"].clear()
        return list(self.cold.values())

    # ---- while a conversation runs

    @property
    def available(self) -> int:
        """Slots that can be taken at once: free ones, and those of idle chunks that have a CPU copy or need
        none."""
        return len(self.free_slots) + self.reclaimable

    def shortfall(self, conversation: Conversation, total: int, reserve: int) -> int:
        """How many more slots must become available before `admit(conversation, total)` leaves `reserve` of
        them.

        Its own chunks are no help: they are pinned before any slot is taken. Example: 100 slots are
        available, 20 of them in chunks of this conversation, which holds 50 slots. With total = 200 it needs
        150 more, and with reserve = 10 another 10 must remain. It finds 80. So the shortfall is 150 + 10 - 80
        = 80 slots."""
        own = sum(holder.reclaimable for holder in conversation.holders if not holder.pins)
        return total - self._slots_held(conversation) + reserve - (self.available - own)

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        """Pin the conversation. Give it a row, and a slot to each position below `total` that has none: in
        chunks that come back from the CPU, in absent chunks, and for new tokens. The caller has checked
        `shortfall` and `free_rows`.

        It is pinned first, so that `_take_slots` reclaims no chunk of its own. Its turn waits no longer, and
        none of its chunks stays evictable without a copy. `_give_slots` hands out the slots, all of them at
        once, and `_write_table` writes the whole row.

        Returns the swap-ins, one ticket (`_begin_copy`) for each chunk in state CPU."""
        self._pin(conversation)
        self.set_waiting(conversation, False)
        self.running[conversation.order] = conversation
        conversation.row = self.free_rows.pop()
        for chunk in conversation.chunks:
            if chunk.evictable_without_copy:
                chunk.evictable_without_copy = False
                self._update(chunk)
        arriving = [chunk for chunk in conversation.chunks if chunk.filled and not chunk.slots]
        taken = self._take_slots(total - self._slots_held(conversation), now)
        self._give_slots(conversation, 0, total, taken)
        self._write_table(conversation, 0, [slot for chunk in conversation.chunks for slot in chunk.slots])
        return [self._begin_copy(conversation, chunk, "in", chunk.place) for chunk in arriving]

    def grow(self, conversation: Conversation, now: float) -> bool:
        """Give a running conversation slots for the tokens that it has grown by. False if there are too few.

        While every running conversation could get a whole chunk, this one gets all slots of its last chunk at
        once. Then it asks again only a chunk later. When slots are rare, it gets one at a time."""
        total, begin = len(conversation.tokens), conversation.room
        if total <= begin:
            return True
        end = total
        if self.available >= self.chunk_size * len(self.running):
            whole_chunks = chunks_for(total, self.chunk_size) * self.chunk_size
            end = min(whole_chunks, self.table.shape[1])
        if end - begin > self.available:
            return False
        taken = self._take_slots(end - begin, now)
        self._give_slots(conversation, begin // self.chunk_size, end, taken)
        self._write_table(conversation, begin, taken)
        return True

    def computed(self, conversation: Conversation, start: int, end: int):
        """The model has computed the KV of positions [start, end) of a running conversation, or a step that
        has been launched will compute it before any later step.

        They fill one or more chunks from the left, and `known` is at least `end` now. A chunk that has grown
        needs more than its copy holds: it gives up its place, and a copy in flight is stale. (A chunk that
        is shared may be filled further already, by a faster request. Then it stays as it is.)"""
        size = self.chunk_size
        for index in range(start // size, (end - 1) // size + 1):
            chunk, first = conversation.chunks[index], index * size
            assert chunk.filled >= start - first, "spans fill a chunk from the left"
            filled = min(end - first, size)
            if filled > chunk.filled:
                first_kv, outgrew_copy = not chunk.filled, chunk.place is not None
                chunk.filled = filled
                if chunk.ticket:
                    chunk.ticket.stale = True
                if first_kv or outgrew_copy:        # else no total changes: most decodes skip this
                    self._give_up_place(chunk)
                    self._update(chunk)
        if end > conversation.known:
            conversation.known = end

    def release(self, conversation: Conversation, now: float):
        """Unpin the conversation and take back its row: the counterpart of `admit`. Slots without KV are free
        again, unless the chunk's holder is still pinned."""
        del self.running[conversation.order]
        self.free_rows.append(conversation.row)
        conversation.row, conversation.room = None, 0
        for holder in conversation.holders:
            holder.last_active = now
        self._unpin(conversation)
        for chunk in conversation.chunks:
            if len(chunk.slots) > chunk.filled and not chunk.holder.pins:
                self._trim(chunk)

    def take_table_updates(self) -> list[tuple[int, int, np.ndarray]]:
        """(row, start, slots): the entries of the slot table written since the last call."""
        updates, self.table_updates = self.table_updates, []
        return [(row, start, self.table[row, start:end].copy()) for row, start, end in updates]

    def take_slot_copies(self) -> dict[int, int]:
        """target -> source: the next step begins by copying the KV of these slots. (Only sharing.py plans
        such copies.)"""
        copies, self.slot_copies = self.slot_copies, {}
        return copies

    # ---- eviction

    def plan_swap_out(self, wanted: int, now: float) -> list[Ticket]:
        """Copy idle chunks to the CPU, the cheapest first, until `wanted` more slots are available or will be
        when the copies in flight have ended. Returns the new copies. The GPU copies stay valid until someone
        takes their slots.

        A chunk for which `_take_place` finds no place is not copied. It stays usable on the GPU until another
        request takes its slots; then it must be recomputed.

        Three full chunks of 32 tokens are idle on the GPU, worth 1, 2 and 3. 60 slots are wanted. The CPU
        tier has one place, and the chunk there is worth 1.5:

            the chunk worth 1 is cheaper than the one in the tier: evictable without a copy     32 of 60 slots
            the chunk worth 2 takes the place, and the one worth 1.5 is dropped                 64 of 60 slots
            the chunk worth 3 is not needed

        `_cheapest` names the conversation that gives the next chunk, and the policy says how many of its
        chunks leave together, so more than `wanted` slots may become available. `_coming_available` counts
        what the copies in flight will free."""
        tickets = []
        if wanted > 0:
            wanted -= self._coming_available()
        while wanted > 0 and (victim := self._cheapest("swap_out", now)):
            for _ in range(self.policy.unit(victim.by_move["swap_out"])):
                chunk = victim.next_victim("swap_out")
                place = self._take_place(self._rank(victim, "swap_out", now), now)
                if place is None:
                    chunk.evictable_without_copy = True
                    self._update(chunk)
                else:
                    tickets.append(self._begin_copy(victim, chunk, "out", place))
                wanted -= chunk.filled
        return tickets

    def plan_swap_out_for(self, conversation: Conversation, total: int, reserve: int,
                          now: float) -> list[Ticket]:
        """`plan_swap_out` for the shortfall of a request that waits, at the expense of all others."""
        wanted = self.shortfall(conversation, total, reserve)
        if wanted <= 0:
            return []
        self._pin(conversation)
        tickets = self.plan_swap_out(wanted, now)
        self._unpin(conversation)
        return tickets

    def complete(self, ticket: Ticket):
        """The copy has ended. A copy out gives the chunk its place, unless the chunk changed meanwhile.
        Slots and a place that were given up during the copy become free only now: the slots are the
        ticket's `orphans`, and the place is free if it is not the chunk's. (The statistics count stale
        copies, too: `chunks_swapped_in` and `chunks_swapped_out`.)"""
        self.in_flight.remove(ticket)
        chunk = ticket.chunk
        chunk.ticket = None
        if ticket.direction == "out" and not ticket.stale:
            chunk.place = ticket.place
        if chunk.place != ticket.place:
            heapq.heappush(self.free_places, ticket.place)
        self.free_slots += ticket.orphans
        self._update(chunk)
        self.stats["chunks_swapped_" + ticket.direction] += 1

    def next_to_leave(self, now: float) -> Chunk | None:
        """The chunk that leaves the GPU next, if nobody returns before: the cheapest whose slots may be taken
        at once. If there is none, it is the one that is copied to the CPU next. Changes no chunk."""
        for move in ("reclaim", "swap_out"):
            if victim := self._cheapest(move, now):
                return victim.next_victim(move)
        return None

    def reclaim(self, conversation: Conversation):
        """Free the slots of an idle conversation's next `unit(n)` reclaimable chunks, if n of them are
        reclaimable. A chunk with a CPU copy lives on there. A chunk without one becomes absent (`_drop`)."""
        for _ in range(self.policy.unit(conversation.by_move["reclaim"])):
            chunk = conversation.next_victim("reclaim")
            if chunk.place is None:
                self._drop(chunk)
            else:
                self._give_up_slots(chunk, 0)
                self._update(chunk)

    def _coming_available(self) -> int:
        """Slots that will be available when the copies in flight have ended: those that have been given up,
        and those of chunks that a copy out makes reclaimable."""
        given_up = sum(len(ticket.orphans) for ticket in self.in_flight)
        copied = sum(len(ticket.chunk.slots) for ticket in self.in_flight
                     if ticket.direction == "out" and not ticket.stale and not ticket.chunk.holder.pins)
        return given_up + copied

    def _take_slots(self, needed: int, now: float) -> list[int]:
        """Take free slots; if they do not suffice, first reclaim those of idle chunks, the cheapest first.
        The caller has checked that so many are available."""
        while len(self.free_slots) < needed:
            self.reclaim(self._cheapest("reclaim", now))
        cut = len(self.free_slots) - needed
        taken = self.free_slots[cut:]
        del self.free_slots[cut:]
        return taken

    def _take_place(self, rank: tuple, now: float) -> int | None:
        """Take a free place, or one that a running conversation does not need, or that of the cheapest idle
        chunk in state CPU if its rank is lower. None if there is no such place."""
        if self.free_places or self._free_spare_place() or self._drop_cheaper(rank, now):
            return heapq.heappop(self.free_places)
        return None

    def _free_spare_place(self) -> bool:
        """Free the place of a chunk that a running conversation has on the GPU, too. False if there is none.

        Such a chunk counts under "reclaim", the next move of an idle one. But here it keeps its slots."""
        for conversation in self.running.values():
            for holder in conversation.holders:
                if holder.by_move["reclaim"]:
                    chunk = holder.next_victim("reclaim")
                    self._give_up_place(chunk)
                    self._update(chunk)
                    return True
        return False

    def _drop_cheaper(self, rank: tuple, now: float) -> bool:
        """Drop the cheapest chunk of the CPU tier, if its rank is lower."""
        loser = self._cheapest("drop", now)
        if loser is None or self._rank(loser, "drop", now) >= rank:
            return False
        self._drop(loser.next_victim("drop"))
        return True

    def _rank(self, conversation: Conversation, move: str, now: float) -> tuple[float, int, int]:
        """Compares a chunk that should leave the GPU with one in the CPU tier: what they are worth comes
        first. If that is equal, the older conversation's is lower, and in one conversation the one that
        leaves first."""
        self._update_index(move)
        value = worth(self.policy, self.indexes[move].members[conversation.order], now)
        return value, conversation.order, self.policy.toward * conversation.next_victim(move).index

    # ---- the small steps, each on one chunk

    def _begin_copy(self, conversation: Conversation, chunk: Chunk, direction: str, place: int) -> Ticket:
        start, slots = chunk.index * self.chunk_size, chunk.slots[:chunk.filled]
        chunk.ticket = Ticket(conversation, chunk, direction, start, chunk.filled, slots, place)
        self.in_flight.add(chunk.ticket)
        self._update(chunk)
        return chunk.ticket

    def _give_slots(self, conversation: Conversation, first_index: int, total: int, slots: list[int]):
        """Hand out `slots` to every position below `total` that has none, from chunk `first_index` on."""
        remaining, chunks = iter(slots), conversation.chunks
        for index in range(first_index, chunks_for(total, self.chunk_size)):
            if index == len(chunks):
                chunks.append(Chunk(conversation, index))
            chunk, wanted = chunks[index], min(self.chunk_size, total - index * self.chunk_size)
            if len(chunk.slots) < wanted:
                chunk.slots += islice(remaining, wanted - len(chunk.slots))
                self._update(chunk)

    def _write_table(self, conversation: Conversation, start: int, slots: list[int]):
        """Write `slots` into the conversation's row of the slot table, from position `start` on. Its `room`
        ends behind them."""
        conversation.room = start + len(slots)
        self.table[conversation.row, start:conversation.room] = slots
        self.table_updates.append((conversation.row, start, conversation.room))

    def _drop(self, chunk: Chunk):
        self._empty(chunk)
        self.stats["chunks_dropped"] += 1

    def _trim(self, chunk: Chunk):
        """Give up what holds no KV: slots beyond `filled`, and everything of a chunk that has nothing
        left."""
        if not chunk.filled:
            self._empty(chunk)
        else:
            self._give_up_slots(chunk, chunk.filled)
            self._update(chunk)

    def _empty(self, chunk: Chunk):
        """The chunk becomes absent."""
        chunk.filled = 0
        if chunk.ticket:
            chunk.ticket.stale = True
        self._give_up_slots(chunk, 0)
        self._give_up_place(chunk)
        self._update(chunk)

    def _give_up_slots(self, chunk: Chunk, keep: int):
        """Give up all but the first `keep` slots. They stay busy while a copy is in flight."""
        (chunk.ticket.orphans if chunk.ticket else self.free_slots).extend(chunk.slots[keep:])
        del chunk.slots[keep:]

    def _give_up_place(self, chunk: Chunk):
        """Give up the chunk's place, if it has one. While a copy is in flight the place stays busy, and
        `complete` frees it."""
        if chunk.place is not None and not chunk.ticket:
            heapq.heappush(self.free_places, chunk.place)
        chunk.place = None

    # ---- totals and indexes, derived from the chunks

    def _slots_held(self, conversation: Conversation) -> int:
        return sum(holder.held for holder in conversation.holders)

    def _update(self, chunk: Chunk):
        """Call this whenever a chunk's holder, `state`, `next_move` or number of slots may have changed. The
        totals of a holder are sums over `booked`: we subtract what we last added for this chunk, and add what
        is true now."""
        before = chunk.booked
        chunk.booked = chunk.holder, chunk.next_move, len(chunk.slots), chunk.state is not None
        for sign, (holder, move, slots, present) in ((-1, before), (+1, chunk.booked)):
            holder.held += sign * slots
            if present:
                holder.present += sign
                self.changed["cold"][holder.order] = holder
            if move:
                holder.by_move[move] += sign
                self.changed[move][holder.order] = holder
                if (chunk.index - holder.frontier[move]) * holder.toward < 0:
                    holder.frontier[move] = chunk.index
            if move == "reclaim":
                holder.reclaimable += sign * slots
                if not holder.pins:
                    self.reclaimable += sign * slots

    def _pin(self, conversation: Conversation):
        for holder in conversation.holders:
            if not holder.pins:
                self.reclaimable -= holder.reclaimable
            holder.pins += 1
            self._note_change(holder)

    def _unpin(self, conversation: Conversation):
        for holder in conversation.holders:
            holder.pins -= 1
            if not holder.pins:
                self.reclaimable += holder.reclaimable
            self._note_change(holder)

    def _note_change(self, holder: Conversation):
        """Something has changed that all indexes and `cold` depend on. (A change of one chunk concerns only
        some of them: `_update` notes it there.)"""
        for changed in self.changed.values():
            changed[holder.order] = holder

    def _cheapest(self, move: str, now: float) -> Conversation | None:
        """The conversation whose next chunk for this move is worth least. None: no chunk allows the move."""
        self._update_index(move)
        member = self.indexes[move].cheapest(now)
        return member and member.conversation

    def _update_index(self, move: str):
        """File every conversation that has changed, once, however often it changed.

        We do so when somebody asks this index, and not before: a chunk changes several times on its way."""
        index, changed = self.indexes[move], self.changed[move]
        for conversation in changed.values():
            if conversation.by_move[move] and not conversation.pins:
                index.file(self._member(conversation, move))
            else:
                index.discard(conversation.order)
        changed.clear()

    def _update_cold(self, conversation: Conversation):
        """Add it to `cold`, or take it out."""
        if self._is_cold(conversation):
            self.cold[conversation.order] = conversation
        else:
            self.cold.pop(conversation.order, None)

    def _member(self, conversation: Conversation, move: str) -> Member:
        key = self.policy.key(conversation, conversation.next_victim(move).index, conversation.by_move[move])
        last_needed = self.policy.last_needed(conversation)
        return Member(conversation.order, key, conversation.users, last_needed, conversation)

    def _is_cold(self, conversation: Conversation) -> bool:
        needed = conversation.pins or conversation.waiting or conversation.present
        return not needed and self.conversations.get(conversation.name) is conversation

    # ---- checking

    def check_integrity(self):
        """Check every invariant of the books from scratch. O(everything): for tests and `debug=True`.

        It notes a change of every holder. So the indexes and `cold` look at each of them again, and must find
        nothing new."""
        filed, cold = self._filed(), self.cold_conversations()
        slots, places, reclaimable = Counter(self.free_slots), Counter(self.free_places), 0
        for ticket in self.in_flight:
            assert ticket.chunk.ticket is ticket
            slots.update(ticket.orphans)
            places.update([ticket.place] if ticket.chunk.place != ticket.place else [])
        for holder in self._all_holders():
            self._note_change(holder)
            self._check_holder(holder)
            reclaimable += 0 if holder.pins else holder.reclaimable
            for chunk in held_by(holder):
                slots.update(chunk.slots)
                places.update([] if chunk.place is None else [chunk.place])
        for conversation in self.conversations.values():
            self._check_conversation(conversation)
        assert slots == Counter(range(self.num_slots)), "a slot is lost, or owned twice"
        assert places == Counter(range(self.num_places)), "a CPU place is lost, or owned twice"
        assert filed == self._filed() and {*cold} == {*self.cold_conversations()}
        assert self.reclaimable == reclaimable
        rows = [conversation.row for conversation in self.running.values()] + self.free_rows
        assert sorted(rows) == list(range(len(self.table))), "a row is lost, or owned twice"

    def _filed(self) -> list[dict[int, Member]]:
        for move in MOVES:
            self._update_index(move)
        return [dict(index.members) for index in self.indexes.values()]

    def _all_holders(self) -> set[Conversation]:
        """Whoever holds a chunk, those with nothing but a copy in flight included."""
        used = {holder for conversation in self.conversations.values() for holder in conversation.holders}
        return used | {ticket.chunk.holder for ticket in self.in_flight}

    def _check_holder(self, holder: Conversation):
        chunks = held_by(holder)
        assert holder.held == sum(len(chunk.slots) for chunk in chunks)
        assert holder.present == sum(chunk.state is not None for chunk in chunks)
        assert holder.by_move == {move: sum(chunk.next_move == move for chunk in chunks) for move in MOVES}
        assert holder.reclaimable == sum(len(chunk.slots) for chunk in chunks if chunk.next_move == "reclaim")
        for chunk in chunks:
            assert chunk.filled <= self.chunk_size
            assert len(chunk.slots) in (0, chunk.filled) or holder.pins and len(chunk.slots) > chunk.filled
            assert (chunk.filled or chunk.place is None) and (chunk.state or not chunk.filled)
            assert chunk.ticket is None or chunk.place in (None, chunk.ticket.place)

    def _check_conversation(self, conversation: Conversation):
        runs = conversation.row is not None
        assert runs == bool(conversation.pins) == (conversation.order in self.running)
        assert runs or self.conversations[conversation.name] is conversation
        for index, chunk in enumerate(conversation.chunks):
            assert chunk.index == index and chunk.holder in conversation.holders
            if chunk.filled and chunk.holder is conversation:
                end = index * self.chunk_size + chunk.filled
                assert end <= min(conversation.known, len(conversation.tokens))
        if runs:
            slots = [slot for chunk in conversation.chunks for slot in chunk.slots]
            assert conversation.room == len(slots) == self._slots_held(conversation)
            assert self.table[conversation.row, :len(slots)].tolist() == slots, "the slot table disagrees"


def held_by(holder: Conversation) -> list[Chunk]:
    return [chunk for chunk in holder.chunks if chunk.holder is holder]


def chunks_for(tokens: int, chunk_size: int) -> int:
    """How many chunks so many tokens need: 3 for 70 tokens in chunks of 32."""
    return -(-tokens // chunk_size)
