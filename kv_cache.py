"""The two-tier KV cache: which chunk is where (paper §4.3). The bytes are in kv_pool.py.

A *slot* holds the KV of one token on the GPU. A *chunk* is chunk_size (32) consecutive tokens of a
conversation, and a *place* holds one chunk on the CPU. A chunk owns its slots and its place:

    position   0        32       64             96       128   140
    chunk      | absent |  CPU   | GPU_AND_CPU  |  GPU   | GPU |     the last one has filled = 12

A running conversation is *pinned*: it keeps the slots of all its chunks. When space runs out,
chunks of idle conversations leave (`Chunk.next_move`), the cheapest first (eviction.py). A
conversation that returns gets slots for all its chunks (`admit`). Those in state CPU are copied in,
and absent ones are computed again. A copy in flight is a `Ticket`. A row of the *slot table* has
the slots of a running conversation by position: there attention finds its KV.

Invariants: KV that counts as cached is there when a step reads it. Every slot and every place is
free, or in exactly one chunk, or held by a copy in flight alone. (integrity.py checks the books.)
"""
import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

import integrity
from eviction import Member, Policy, VictimIndex, worth


class Chunk:
    """Up to `chunk_size` consecutive tokens of a conversation. The first `filled` have KV: in a
    tier, arriving, or computed by a step that is launched.

    An absent chunk (never computed, or dropped) has neither slots nor a place."""
    __slots__ = ("users", "index", "filled", "slots", "place", "ticket", "evictable_without_copy",
                 "member", "reclaimable")

    def __init__(self, users: "tuple[Conversation, ...]", index: int):
        self.users = users              # its conversation (sharing.py: its conversations)
        self.index = index              # its first token is at position index * chunk_size
        self.filled = 0
        self.slots: list[int] = []      # of its tokens; more than `filled` while they are computed
        self.place: int | None = None   # in the CPU tier
        self.ticket: Ticket | None = None       # the copy in flight, in either direction
        # "Marked": there was no place for a copy, so its slots may be taken without one. `admit`
        # removes the mark when its conversation runs again.
        self.evictable_without_copy = False
        # Both may be out of date until the next KVCache.refile:
        self.reclaimable = 0            # how many slots of it KVCache.reclaimable counts
        self.member: Member | None = None       # second day: in the index of its next move

    @property
    def state(self) -> str | None:
        """In which tiers it has slots or a place, be its KV there or on the way. None: absent."""
        if self.place is None:
            return "GPU" if self.slots else None
        return "GPU_AND_CPU" if self.slots else "CPU"

    @property
    def pinned(self) -> bool:
        for user in self.users:         # any() would take three times as long
            if user.pinned:
                return True
        return False

    @property
    def next_move(self) -> str | None:
        """How eviction may change its state next:

            state         idle                                     pinned
            GPU           swap_out: copy it, then GPU_AND_CPU
            GPU *         reclaim: take its slots, then absent
            GPU_AND_CPU   reclaim: take its slots, then CPU        spare: take its place, then GPU
            CPU           drop: take its place, then absent

            * marked `evictable_without_copy`; usable until another request takes its slots

        None: it is pinned and not in both tiers, or has no KV, or a copy of it is in flight."""
        if self.ticket or not self.filled:
            return None
        if self.pinned:
            return "spare" if self.slots and self.place is not None else None
        if not self.slots:
            return "drop"
        return "swap_out" if self.place is None and not self.evictable_without_copy else "reclaim"

    def __lt__(self, other: "Chunk") -> bool:
        """Second day: of two Members that are equal otherwise, the leading chunk's is lower."""
        return self.index < other.index


class Conversation:
    """What survives turns: raw tokens, and the chunks that cache their KV."""

    def __init__(self, name: str | None, order: int, tokens: Iterable[int], chunk_size: int):
        """order: its number in the order of creation."""
        self.one_off = name is None     # forgotten at the end of its request; its name is a number
        self.name = order if self.one_off else name
        self.order, self.chunk_size = order, chunk_size
        self.tokens = array("i", tokens)
        # The first `known` tokens had KV once, here or before a restart. Usage calls those of them
        # that lack it now "recomputed", and all later tokens "new". (The last token of a reply was
        # sampled, but never fed to the model.)
        self.known = max(len(self.tokens) - 1, 0)
        self.chunks: list[Chunk] = []
        self.alone = (self,)            # the users of each chunk that it does not share
        self.row: int | None = None     # in the slot table, while it runs
        # While it runs, positions [0, room) have slots: handed out, maybe ahead of the tokens.
        self.room = 0
        self.pinned = False             # it runs (and for a moment in plan_swap_out_for)
        self.waiting = False            # a turn of it waits in the queue
        self.last_active = 0.0          # when it last ran, in s (warm.py may set a later time)
        self.turns = 0                  # for a policy that counts them (experiments/policies.py)

    @property
    def held(self) -> int:
        """Slots of its chunks."""
        return sum([len(chunk.slots) for chunk in self.chunks])

    def cached(self) -> tuple[int, int]:
        """How many tokens with KV are in chunks that have slots (those that still arrive, too), and
        how many in chunks on the CPU alone."""
        gpu = sum(chunk.filled for chunk in self.chunks if chunk.slots)
        return gpu, sum(chunk.filled for chunk in self.chunks) - gpu


@dataclass(eq=False, slots=True)
class Ticket:
    """A copy in flight between `slots` (of the first `filled` tokens of a chunk) and a CPU `place`.

    Until it has ended nobody else gets the slots or the place, and the chunk is not evicted. But
    the chunk may grow, if its conversation runs again, or be truncated, if a turn is cancelled:
    `outdated` and `orphans` note what that means for `complete`. While KV comes in, the chunk owns
    the place. While it goes out, only the ticket does."""
    conversation: Conversation     # "in": the one that returns; "out": the first user of the chunk
    chunk: Chunk
    direction: str                 # "in" or "out"
    start: int                     # position of the chunk's first token
    filled: int
    slots: list[int]
    place: int
    outdated: bool = False         # the chunk has grown or become absent: the copy is of no use
    orphans: list[int] = field(default_factory=list)     # slots that the chunk has given up

    @property
    def end(self) -> int:
        return self.start + self.filled


def chunks_for(tokens: int, chunk_size: int) -> int:
    """How many chunks so many tokens need: 3 for 70 tokens in chunks of 32."""
    return -(-tokens // chunk_size)


class KVCache:
    """The books of both tiers. Admission and release cost O(tokens of the context), a decode O(1),
    however many conversations there are."""

    def __init__(self, num_slots: int, num_places: int, chunk_size: int, rows: int,
                 max_context: int, policy: Policy):
        """num_slots: GPU tier, in tokens. num_places: CPU tier, in chunks. rows: slot table."""
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.policy = policy
        self.free_slots = list(range(num_slots - 1, -1, -1))        # a stack
        # A heap: the lowest place is taken first, so chunks that leave together lie side by side.
        self.free_places = list(range(num_places))
        self.free_rows = list(range(rows - 1, -1, -1))              # a stack
        self.table = np.full((rows, max_context), -1, np.int32)     # the worker has a copy of it
        self.table_updates: list[tuple[int, int, int]] = []     # (row, start, end) written lately
        self.conversations: dict[str | int, Conversation] = {}      # by name
        self.running: dict[int, Conversation] = {}                  # by order
        self.in_flight: set[Ticket] = set()
        self.changed: set[Chunk] = set()            # since the last `refile`, see "eviction"
        self.reclaimable = 0                        # slots of all chunks whose next move is reclaim
        self.orders = count()
        self.stats = Counter(chunks_swapped_in=0, chunks_swapped_out=0, chunks_dropped=0)
        # Second day:
        self.indexes = {move: VictimIndex(policy)
                        for move in ("swap_out", "reclaim", "drop", "spare")}
        self.maybe_cold: dict[int, Conversation] = {}       # by order, see cold_conversations
        self.slot_copies: dict[int, int] = {}               # target -> source, only in sharing.py

    # ---- conversations

    def open(self, name: str | None, tokens: Iterable[int] = ()) -> Conversation:
        """Return the conversation of that name. If there is none, a new one begins with `tokens`.
        None as a name: always a new one, a one-off."""
        if name in self.conversations:
            return self.conversations[name]
        conversation = Conversation(name, next(self.orders), tokens, self.chunk_size)
        self.conversations[conversation.name] = conversation
        self._note_change(conversation)
        return conversation

    def extend(self, conversation: Conversation, prompt: Sequence[int]) -> bool:
        """Append the prompt to the conversation's tokens, and return True. (sharing.py may return
        False instead: the prompt has to wait, ask again later.)"""
        conversation.tokens.extend(prompt)
        return True

    def set_waiting(self, conversation: Conversation, waiting: bool):
        """Note whether a turn of the conversation waits in the queue."""
        conversation.waiting = waiting
        self._note_change(conversation)

    # ---- while a conversation runs

    @property
    def available(self) -> int:
        """Slots that can be taken at once: free ones, and those of idle chunks that have a CPU copy
        or need none."""
        self.refile()
        return len(self.free_slots) + self.reclaimable

    def shortfall(self, conversation: Conversation, total: int, reserve: int) -> int:
        """How many more slots must become available before `admit(conversation, total)` leaves
        `reserve` of them.

        Its own chunks are no help: they are pinned before any slot is taken. Example: 100 slots are
        available, 20 of them in chunks of this conversation, which holds 50 slots. With total = 200
        it needs 150 more, and with reserve = 10 another 10 must remain. It finds 80. So the
        shortfall is 150 + 10 - 80 = 80 slots."""
        # (`available` comes first, since it refiles the chunks.)
        others = self.available - sum([chunk.reclaimable for chunk in conversation.chunks])
        return total - conversation.held + reserve - others

    def admit(self, conversation: Conversation, total: int, now: float) -> list[Ticket]:
        """The conversation runs from now on: pinned, in a row of the table, with a slot for each
        position below `total`. Its turn waits no longer, and none of its chunks is evictable
        without a copy. Returns the swap-ins, one (`_begin_copy`) for each chunk that was in state
        CPU. The caller has checked `shortfall` and `free_rows`.

        Example, in chunks of 4: absent, CPU, GPU, and 6 new tokens, so total = 18. 14 slots are
        taken at once, for [0:8) and [12:18), and [4:8) is copied in."""
        conversation.pinned, conversation.waiting = True, False
        conversation.row = self.free_rows.pop()
        self.running[conversation.order] = conversation
        for chunk in conversation.chunks:
            chunk.evictable_without_copy = False
        self._note_change(conversation)
        arriving = [chunk for chunk in conversation.chunks if chunk.filled and not chunk.slots]
        taken = self._take_slots(total - conversation.held, now)
        self._give_slots(conversation, 0, total, taken)
        slots = [slot for chunk in conversation.chunks for slot in chunk.slots]
        self._write_table(conversation, 0, slots)
        return [self._begin_copy(conversation, chunk, "in", chunk.place) for chunk in arriving]

    def grow(self, conversation: Conversation, now: float) -> bool:
        """Give a running conversation slots for the tokens that it has grown by. False if there are
        too few.

        While every running conversation could get a whole chunk, this one gets all slots of its
        last chunk at once. Then it asks again only a chunk later. When slots are rare, it gets as
        many as it has grown by: one, after a decode."""
        total, begin = len(conversation.tokens), conversation.room
        if total <= begin:
            return True
        end, available = total, self.available
        if available >= self.chunk_size * len(self.running):
            whole_chunks = chunks_for(total, self.chunk_size) * self.chunk_size
            end = min(whole_chunks, self.table.shape[1])
        if end - begin > available:
            return False
        taken = self._take_slots(end - begin, now)
        self._give_slots(conversation, begin // self.chunk_size, end, taken)
        self._write_table(conversation, begin, taken)
        return True

    def computed(self, conversation: Conversation, start: int, end: int):
        """The positions [start, end) of a running conversation count as computed: a step that has
        been launched computes their KV before any later step reads it. (These books run ahead of
        the device: Scheduler.launched.)

        They fill one or more chunks from the left, and `known` is at least `end` now. A chunk that
        has grown needs more than its copy holds: it gives up its place, and a copy in flight is
        outdated. (A shared chunk may be filled further already. Then it stays as it is.)"""
        size = self.chunk_size
        while start < end:
            chunk = conversation.chunks[start // size]
            first = chunk.index * size
            assert chunk.filled >= start - first, "spans fill a chunk from the left"
            filled = end - first if end < first + size else size
            if filled > chunk.filled:
                chunk.filled = filled
                if chunk.ticket:
                    chunk.ticket.outdated = True
                if chunk.place is not None:
                    self._give_up_place(chunk)
            start = first + size
        if end > conversation.known:
            conversation.known = end

    def release(self, conversation: Conversation, now: float):
        """Unpin the conversation and take back its row: the counterpart of `admit`. Slots without
        KV are free again, unless another user of the chunk still runs."""
        del self.running[conversation.order]
        self.free_rows.append(conversation.row)
        conversation.row, conversation.room = None, 0
        conversation.pinned, conversation.last_active = False, now
        for chunk in conversation.chunks:
            if len(chunk.slots) > chunk.filled and not chunk.pinned:
                self._trim(chunk)
        self._note_change(conversation)

    def take_table_updates(self) -> list[tuple[int, int, np.ndarray]]:
        """(row, start, slots): the entries of the slot table written since the last call."""
        updates, self.table_updates = self.table_updates, []
        return [(row, start, self.table[row, start:end].copy()) for row, start, end in updates]

    # ---- eviction
    #
    # How the cheapest chunk is found: second day. Of the chunks whose next move is `move`,
    #
    #     _cheapest(move, now)        is the one that is worth least; None: there is none
    #     _victims(move, now)         are that one and those that leave with it: all of them, even
    #                                 if fewer would do (Policy.part; under Pensieve's policy none
    #                                 leave with it); empty: there is none
    #     _worth_less(one, two, now)  tells whether chunk `one` leaves before chunk `two` (both have
    #                                 a next move, as of the last refile)
    #     refile()                    looks again at the chunks in `changed`: files each under its
    #                                 next move, and updates `reclaimable`, its own and the cache's
    #
    # Whoever changes a chunk adds it to `changed`. `available`, `_cheapest` and `_victims` begin
    # with refile.

    def plan_swap_out(self, wanted: int, now: float) -> list[Ticket]:
        """Begin copies to the CPU ahead of need, of the cheapest idle chunks, and return them. When
        all copies in flight have ended, `wanted` more slots are available than now, or no chunk is
        left to copy. A chunk for which there is no place (`_take_place`) is marked
        `evictable_without_copy` instead: its slots are available at once.

        Three full chunks of 32 tokens are idle on the GPU, worth 1, 2 and 3. 60 slots are wanted.
        The CPU tier has one place, and the chunk there is worth 1.5:

            worth 1    less than the one in the tier: marked                         32 of 60 slots
            worth 2    takes the place, and the one worth 1.5 is dropped             64 of 60 slots
            worth 3    is not needed
        """
        tickets = []
        if wanted > 0:
            wanted -= self._coming_available()  # else we would copy again what is already leaving
        while wanted > 0 and (victims := self._victims("swap_out", now)):
            for chunk in victims:
                place = self._take_place(chunk, now)
                if place is None:
                    chunk.evictable_without_copy = True
                    self.changed.add(chunk)
                else:
                    tickets.append(self._begin_copy(chunk.users[0], chunk, "out", place))
                wanted -= chunk.filled
        return tickets

    def plan_swap_out_for(self, conversation: Conversation, total: int, reserve: int,
                          now: float) -> list[Ticket]:
        """`plan_swap_out` for what the waiting request of the conversation lacks. Its own chunks
        are no help, so for this one call it counts as pinned."""
        wanted = self.shortfall(conversation, total, reserve)
        if wanted <= 0:
            return []
        conversation.pinned = True
        tickets = self.plan_swap_out(wanted, now)
        conversation.pinned = False
        # Second day: `_cheapest` has taken those that it met out of the index. File them again.
        self.changed.update([chunk for chunk in conversation.chunks if not chunk.member])
        return tickets

    def complete(self, ticket: Ticket):
        """The copy has ended. `stats` counts it, and its orphans are free. What has happened to the
        chunk meanwhile decides who owns the place:

            nothing; or steps have read it, or it was truncated in part     the chunk: GPU_AND_CPU
            it has grown, or become absent: the copy is outdated            nobody: it is free
        """
        self.in_flight.remove(ticket)
        chunk = ticket.chunk
        chunk.ticket = None
        if ticket.direction == "out" and not ticket.outdated:
            chunk.place = ticket.place
        if chunk.place != ticket.place:         # nobody owns it
            heapq.heappush(self.free_places, ticket.place)
        self.free_slots += ticket.orphans
        self.changed.add(chunk)
        self.stats["chunks_swapped_" + ticket.direction] += 1

    def reclaim(self, chunk: Chunk):
        """Free the slots of an idle chunk. With a place it lives on in the CPU tier. Without one
        its only KV is lost, and it becomes absent (`_drop`)."""
        if chunk.place is None:
            self._drop(chunk)
        else:
            self._give_up_slots(chunk, 0)

    def _coming_available(self) -> int:
        """Slots that will be available when the copies in flight have ended: orphans, and those of
        chunks that a copy out makes reclaimable. (A copy in whose conversation has stopped running
        is not counted. So we may copy a few chunks too many.)"""
        copied = sum(len(ticket.chunk.slots) for ticket in self.in_flight
                     if ticket.direction == "out" and not (ticket.outdated or ticket.chunk.pinned))
        return copied + sum(len(ticket.orphans) for ticket in self.in_flight)

    def _take_slots(self, needed: int, now: float) -> list[int]:
        """Take free slots; if they do not suffice, first reclaim those of idle chunks, the cheapest
        first. The caller has checked that so many are available."""
        while len(self.free_slots) < needed:
            victims = self._victims("reclaim", now)
            assert victims, "too few slots are available"
            for chunk in victims:
                self.reclaim(chunk)
        kept = len(self.free_slots) - needed
        taken = self.free_slots[kept:]
        del self.free_slots[kept:]
        return taken

    def _take_place(self, chunk: Chunk, now: float) -> int | None:
        """Take a place for an idle chunk: a free one, or one that a running conversation can spare,
        or that of the cheapest chunk in state CPU if that is worth less. None: there is none."""
        if not self.free_places:
            if spare := self._cheapest("spare", now):
                self._give_up_place(spare)
            elif (loser := self._cheapest("drop", now)) and self._worth_less(loser, chunk, now):
                self._drop(loser)
        return heapq.heappop(self.free_places) if self.free_places else None

    # ---- the small steps

    def _note_change(self, conversation: Conversation):
        """Something about it has changed that decides what its chunks are worth, or whether they
        may leave."""
        self.changed.update(conversation.chunks)
        self.maybe_cold[conversation.order] = conversation      # second day

    def _begin_copy(self, conversation: Conversation, chunk: Chunk, direction: str, place: int
                    ) -> Ticket:
        start, slots = chunk.index * self.chunk_size, chunk.slots[:chunk.filled]
        chunk.ticket = Ticket(conversation, chunk, direction, start, chunk.filled, slots, place)
        self.in_flight.add(chunk.ticket)
        self.changed.add(chunk)
        return chunk.ticket

    def _give_slots(self, conversation: Conversation, first_index: int, total: int,
                    slots: list[int]):
        """Hand out `slots` to every position below `total` that has none, from chunk `first_index`
        on."""
        remaining, chunks = iter(slots), conversation.chunks
        for index in range(first_index, chunks_for(total, self.chunk_size)):
            if index == len(chunks):
                chunks.append(Chunk(conversation.alone, index))
            chunk, wanted = chunks[index], min(self.chunk_size, total - index * self.chunk_size)
            if len(chunk.slots) < wanted:
                chunk.slots += islice(remaining, wanted - len(chunk.slots))     # the next ones

    def _write_table(self, conversation: Conversation, start: int, slots: list[int]):
        """Write `slots` into the conversation's row of the slot table, from position `start` on.
        Its `room` ends behind them."""
        conversation.room = start + len(slots)
        self.table[conversation.row, start:conversation.room] = slots
        self.table_updates.append((conversation.row, start, conversation.room))

    def _drop(self, chunk: Chunk):
        """Evict its only KV: it becomes absent."""
        self._empty(chunk)
        self.stats["chunks_dropped"] += 1

    def _empty(self, chunk: Chunk):
        """It becomes absent, for whatever reason. It gives up all that it has."""
        chunk.filled = 0
        if chunk.ticket:
            chunk.ticket.outdated = True
        self._give_up_slots(chunk, 0)
        self._give_up_place(chunk)
        for user in chunk.users:
            self.maybe_cold[user.order] = user          # second day

    def _trim(self, chunk: Chunk):
        """Give up the slots behind `filled`. Without KV the chunk becomes absent."""
        if not chunk.filled:
            self._empty(chunk)
        else:
            self._give_up_slots(chunk, chunk.filled)

    def _give_up_slots(self, chunk: Chunk, keep: int):
        """Give up all but the first `keep` slots. If a copy is in flight they are its orphans."""
        if chunk.ticket:
            chunk.ticket.orphans += chunk.slots[keep:]
        else:
            self.free_slots += chunk.slots[keep:]
        del chunk.slots[keep:]
        self.changed.add(chunk)

    def _give_up_place(self, chunk: Chunk):
        """Give up the chunk's place, if it has one. If a copy is in flight, `complete` frees it."""
        if chunk.place is not None and not chunk.ticket:
            heapq.heappush(self.free_places, chunk.place)
        chunk.place = None
        self.changed.add(chunk)

    # ---- second day: the cheapest chunk
    #
    # `indexes` has one VictimIndex per move. A chunk stands in that of its next move, as
    # `chunk.member`. A Member that it had before is stale: its index drops it when it meets it.
    # However often a chunk changes between two calls of `refile`, it is filed once.

    def refile(self):
        """Bring the indexes up to date with the chunks that have changed."""
        for chunk in self.changed:
            move = chunk.next_move
            member = self.member(chunk, move) if move else None
            if chunk.member != member:
                chunk.member = member
                if member:
                    self.indexes[move].file(member)
            reclaimable = len(chunk.slots) if move == "reclaim" else 0
            self.reclaimable += reclaimable - chunk.reclaimable
            chunk.reclaimable = reclaimable
        self.changed.clear()

    def member(self, chunk: Chunk, move: str) -> Member:
        """The chunk as an index knows it. It was last needed when any of its users was."""
        policy, users = self.policy, chunk.users
        last_needed = max(map(policy.last_needed, users))
        nth, key = policy.nth_to_leave(chunk.index), policy.key(users[0], chunk.index)
        return Member(last_needed, nth, users[0].order, key, len(users), move, chunk)

    def _cheapest(self, move: str, now: float) -> Chunk | None:
        """See "eviction". The chunks of a conversation that plan_swap_out_for pins for one call are
        still filed as idle: it may have hundreds, and to file all of them twice would cost too
        much. We skip those that we meet, and take their members away. plan_swap_out_for then adds
        them to `changed`, so the next `refile` files them."""
        self.refile()
        while member := self.indexes[move].cheapest(now):
            if member.chunk.next_move == move:
                return member.chunk
            member.chunk.member = None
        return None

    def _victims(self, move: str, now: float) -> list[Chunk]:
        """The cheapest chunk, and those of its conversation that leave with it (`Policy.part`):
        all of them, even if fewer would do. Shared chunks leave alone."""
        chunk = self._cheapest(move, now)
        if not chunk or not self.policy.part or len(chunk.users) > 1:
            return [chunk] if chunk else []
        peers = [peer.member for peer in chunk.users[0].chunks
                 if peer.users == chunk.users and peer.member and peer.member.move == move]
        peers.sort(key=lambda member: member.nth)
        return [member.chunk for member in peers[:math.ceil(self.policy.part * len(peers))]]

    def _worth_less(self, chunk: Chunk, other: Chunk, now: float) -> bool:
        """Is the chunk worth less than the other one? (Or the same, but it would leave first.)"""
        one, two = chunk.member, other.member
        return (worth(self.policy, one, now), one) < (worth(self.policy, two, now), two)

    # ---- forgetting, and what others ask

    def expect(self, conversation: Conversation, until: float):
        """A turn of the conversation is likely until then (warm.py): so it begins to be idle only
        then. It may be evicted like any other."""
        conversation.last_active = max(conversation.last_active, until)
        self._note_change(conversation)

    def forget(self, conversation: Conversation):
        """Free everything in both tiers. The conversation must not be running."""
        self.truncate(conversation, 0, 0)
        if self.conversations.get(conversation.name) is conversation:
            del self.conversations[conversation.name]
        self.maybe_cold.pop(conversation.order, None)

    def truncate(self, conversation: Conversation, length: int, known: int):
        """Keep `length` tokens, and the KV of no more than the first `known` of them. The
        conversation must not be running.

        Chunks of 32, length 50, known 49: chunk 0 stays, chunk 1 keeps 17 tokens, all others go.
        (If chunk 1 has other users, they keep it as it is, and this conversation loses it.)"""
        assert conversation.row is None
        del conversation.tokens[length:]
        conversation.known = min(conversation.known, known)
        whole, rest = divmod(known, self.chunk_size)
        cut = conversation.chunks[whole:]
        del conversation.chunks[whole:]
        if rest and cut and cut[0].users == conversation.alone:
            chunk = cut.pop(0)
            chunk.filled = min(chunk.filled, rest)      # a copy on the CPU stays right for these
            self._trim(chunk)
            conversation.chunks.append(chunk)
        for chunk in cut:
            self._stop_using(chunk, conversation)
        self._note_change(conversation)

    def _stop_using(self, chunk: Chunk, conversation: Conversation):
        """The conversation uses the chunk no longer. Without any user the chunk becomes absent."""
        chunk.users = tuple(user for user in chunk.users if user is not conversation)
        if not chunk.users:
            self._empty(chunk)
        self.changed.add(chunk)

    def drop_all(self, conversation: Conversation):
        """Free the KV of a conversation that is not running, and keep its tokens."""
        known = conversation.known
        self.truncate(conversation, len(conversation.tokens), 0)
        conversation.known = known          # these tokens count as recomputed when they return

    def drop_everything(self):
        """Free all KV. No conversation may be running, and no copy may be moving any more (whether
        we have heard of its end or not)."""
        for conversation in self.conversations.values():
            self.drop_all(conversation)
        for ticket in list(self.in_flight):
            self.complete(ticket)

    def cold_conversations(self) -> list[Conversation]:
        """Those that `is_cold`: whoever keeps their tokens may forget them (Engine.forgets_cold).
        All are in `maybe_cold`, by order, so we need not look at all conversations."""
        for order, conversation in list(self.maybe_cold.items()):
            if not self.is_cold(conversation):
                del self.maybe_cold[order]
        return list(self.maybe_cold.values())

    @staticmethod
    def is_cold(conversation: Conversation) -> bool:
        """It neither runs nor waits, and nothing of its own is cached. (The designated prefix of
        sharing.py is not its own.)"""
        cached = any(chunk.state and conversation in chunk.users for chunk in conversation.chunks)
        return not (conversation.pinned or conversation.waiting or cached)

    def restore(self, users: Iterable[Conversation], index: int, filled: int) -> int | None:
        """Chunk `index` of these conversations comes back from a file (kv_file.py). They share it,
        in state CPU. Returns its place, where the caller puts the KV before the next step.

        Who runs, or has that chunk in a tier already, does without. None if nobody is left, or if
        no place is free."""
        lacking = []
        for user in users:
            if not user.pinned:
                missing = range(len(user.chunks), index + 1)
                user.chunks += [Chunk(user.alone, number) for number in missing]
                own = user.chunks[index]
                if own.state is None and user in own.users:
                    lacking.append(user)
        if not lacking or not self.free_places:
            return None
        chunk = Chunk(tuple(lacking), index)
        chunk.filled, chunk.place = filled, heapq.heappop(self.free_places)
        for user in lacking:
            self._stop_using(user.chunks[index], user)
            user.chunks[index] = chunk
            user.known = max(user.known, index * self.chunk_size + filled)
        self.changed.add(chunk)
        return chunk.place

    def next_to_leave(self, now: float) -> Chunk | None:
        """The chunk that leaves the GPU next, if nobody returns before: the cheapest whose slots
        may be taken at once. If there is none, it is the one that is copied to the CPU next."""
        return self._cheapest("reclaim", now) or self._cheapest("swap_out", now)

    def take_slot_copies(self) -> dict[int, int]:
        """target -> source: the next step begins by copying the KV of these slots. (Only sharing.py
        plans such copies.)"""
        copies, self.slot_copies = self.slot_copies, {}
        return copies

    def check_integrity(self):
        """Check the invariants of the books from scratch: see integrity.py. O(everything)."""
        integrity.check(self, list(self.conversations.values()))
