"""What a chunk is worth, and which chunk leaves first (paper §4.3.1).

When a tier is full, some chunk must leave it. Pensieve takes the chunk with the lowest *retention
value*:

    V = Cost(l) / T          Cost(l) = attention(l) + c

Cost(l) is the time that the recomputed chunk adds to a batch that runs anyway; l is the context
length at the chunk's end. Attention grows with l, everything else (c) is the same for every chunk.
So the leading chunks of a conversation are the cheapest, and they leave first. T is the time for
which the conversation has been idle.

    c = 4.0 ms, attention = 0.1 ms per 1,000 tokens of context. V in ms of recomputation per s:

    chunk that ends at    1,000 tokens, idle for 60 s      V = 4.1 / 60 = 0.068
    chunk that ends at   16,000 tokens, idle for 60 s      V = 5.6 / 60 = 0.093
    chunk that ends at   16,000 tokens, idle for 90 s      V = 5.6 / 90 = 0.062    leaves first

`RecomputeCost` holds the profile of Cost. A `Policy` says what a chunk is worth. `VictimIndex`
(second day) finds the cheapest chunk among many thousands without looking at all of them.

Invariant: a value never rises with idle time. So of two chunks that differ in nothing else, the one
that has been idle longer is never worth more. `VictimIndex` relies on this.
"""
import heapq
import math
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

MIN_IDLE = 1e-3     # seconds; no conversation counts as idle for less


class RecomputeCost:
    """Seconds that one more recomputed chunk adds to a batch, by the context length at its end. The
    profile has attention at a few lengths. Between two of them we interpolate."""

    def __init__(self, attention: dict[int, float], rest: float):
        """attention: context length in tokens -> seconds of attention for one chunk. rest: c, in
        seconds.

        ValueError if there is no length, or if a time is negative."""
        if not attention or min(rest, *attention.values()) < 0:
            raise ValueError("a cost profile needs at least one length, and no time below 0, "
                             f"got {attention} and {rest}")
        self.lengths = sorted(attention)
        # Measurements are noisy. With a running maximum no chunk looks cheaper than an earlier one.
        self.seconds = list(accumulate((attention[length] for length in self.lengths), max))
        self.rest = rest

    def __call__(self, length: int) -> float:
        """Cost(length) in seconds.

        Before the first profiled length attention costs what it costs there. Beyond the last one
        the line through the last two goes on. If only one length is profiled, attention costs the
        same everywhere. With {100: 1.0, 200: 3.0} and rest 0.5:

            Cost(50) = 1.5      Cost(150) = 2.5      Cost(300) = 5.5
        """
        lengths, seconds = self.lengths, self.seconds
        if length <= lengths[0] or len(lengths) == 1:
            return seconds[0] + self.rest
        right = min(bisect_right(lengths, length), len(lengths) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (lengths[right] - lengths[left])
        return seconds[left] + slope * (length - lengths[left]) + self.rest


class Policy:
    """What chunks are worth. Of all that could leave a tier now, the one that is worth least leaves
    first, whichever conversation it belongs to.

    Most policies override `value` and `key`; all else is optional. A chunk's users are the
    conversations that it belongs to: one, unless sharing.py shares it. The chunk is worth its value
    once for each of them."""
    # 0: each chunk leaves the GPU alone. 0.5: of a conversation's chunks that could leave now, half
    # leave together. 1: all of them.
    part = 0.0

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        self.cost = cache(cost)         # asked for the same few hundred lengths again and again
        self.chunk_size = chunk_size

    def value(self, key: int, idle: float) -> float:
        """What one user loses if the chunk leaves. It must not rise with `idle` (seconds)."""
        raise NotImplementedError

    def key(self, conversation, index: int) -> int:
        """What the value of chunk number `index` depends on besides idle time, as one small
        integer. So of two chunks with the same key, the one that has been idle longer is never
        worth more. The key may depend on the conversation's tokens, its turns, and how many chunks
        it has: we ask again when it has run or been truncated. (More rules stand with the other
        policies.)"""
        return 0

    def nth_to_leave(self, index: int) -> float:
        """Chunk number `index` leaves after those for which this is lower, if they are worth the
        same and idle for as long. Here: chunk 0 first."""
        return index

    def last_needed(self, conversation) -> float:
        """When the conversation was last needed, in seconds; inf if a turn of it waits: it is
        needed soon, so `idle` (next) gives MIN_IDLE."""
        return math.inf if conversation.waiting else conversation.last_active

    def idle(self, now: float, last_needed: float) -> float:
        """The idle time in seconds, at least MIN_IDLE."""
        return max(now - last_needed, MIN_IDLE)

    def returned(self, conversation, now: float):
        """A turn of the conversation has been admitted, be it its first."""

    def ended(self, conversation):
        """A turn of the conversation has ended by itself, neither cancelled nor failed."""


class LeastRecentlyUsed(Policy):
    """The paper's baseline: nothing but idle time counts."""

    def value(self, key, idle):
        return 1 / idle


class RetentionValue(Policy):
    """Pensieve: seconds of recomputation, per second of idleness."""

    def key(self, conversation, index):
        return index

    def value(self, key, idle):
        """V = Cost(l) / T. The key is the chunk number, and l is where that chunk ends when it is
        full: chunk 0 at chunk_size, chunk 1 at 2 * chunk_size. idle is T."""
        end_of_chunk = (key + 1) * self.chunk_size
        return self.cost(end_of_chunk) / idle


# ---- second day: the other policies
#
# If only conversations should be ranked, as in LeastRecentlyUsed, return the same value for all
# chunks of one; `nth_to_leave` then orders them. If chunks differ in worth, as in RetentionValue,
# let `value` depend on the key. To move one chunk among others of different values, give it the
# key of another chunk: if RetentionValue.key returned `index or len(conversation.chunks) - 1`,
# chunk 0 would be worth as much as the last one, and `nth_to_leave` would decide between the two.
#
# To make a chunk worth more, multiply its value and do not add: 1 + 1 / idle never falls below 1,
# so a conversation that nobody continues would stay for ever, but 2 / idle falls.
#
# A key must not depend on the time or on other conversations. If several share a chunk, we ask with
# the first of them alone; `worth` counts the others. VictimIndex has a heap for each key, so a few
# hundred different keys are fine, and one per conversation is not.

class Trailing(LeastRecentlyUsed):
    """SGLang and RAGCache: least recently used, but from the trailing end. Their prefix lookup
    stops at the first missing chunk, so a chunk behind a gap would be useless to them."""

    def nth_to_leave(self, index):
        return -index


class TrailingHalf(Trailing):
    """The paper's draft: half of a conversation at once, from its trailing end; long and idle ones
    first.

    The key is the number of chunks up to this one. So the last chunk of a conversation is its
    cheapest."""
    part = 0.5

    def key(self, conversation, index):
        return index + 1

    def value(self, key, idle):
        return 1 / (key * idle)


class WholeConversation(LeastRecentlyUsed):
    """CachedAttention: all chunks of the least recently used conversation at once."""
    part = 1.0


POLICIES = {"retention": RetentionValue, "lru": LeastRecentlyUsed, "trailing-half": TrailingHalf,
            "conversation": WholeConversation, "trailing": Trailing}


# ---- how to find the cheapest chunk fast

class Member(NamedTuple):
    """A chunk that could leave, as an index knows it. (`VictimIndex` needs `group` and `stale`.)

    Members compare as tuples do: the lowest is the first in tuple order."""
    last_needed: float      # the latest of policy.last_needed(user), in seconds; inf: a turn waits
    nth: float              # the policy's nth_to_leave
    order: int              # its conversation's: the older one's is lower
    key: int                # the policy's
    num_users: int          # conversations that use the chunk: one, unless sharing.py shares it
    move: str               # how it would leave: each index is for one move, see kv_cache.py
    chunk: Any

    @property
    def group(self) -> tuple[int, int]:
        """Members of one group differ in nothing but idle time and the order of equal ones."""
        return self.key, self.num_users

    @property
    def stale(self) -> bool:
        """The chunk has another member now, or none. (A chunk may leave its index and come back.
        Then the old entry may still be in a heap; two equal entries must not both count.)"""
        return self.chunk.member is not self


def worth(policy: Policy, member: Member, now: float) -> float:
    """What the chunk is worth: its value, times the number of its users."""
    return member.num_users * policy.value(member.key, policy.idle(now, member.last_needed))


def cheapest_by_scanning(policy: Policy, members: list[Member], now: float) -> Member | None:
    """The member that is worth least: the specification of `VictimIndex.cheapest`. O(members).

    Of equally cheap ones we take the lowest: the one that was needed least recently, then the one
    whose `nth` is lowest, then that of the oldest conversation."""
    def rank(member: Member) -> tuple[float, Member]:
        return worth(policy, member, now), member
    return min(members, key=rank, default=None)


class VictimIndex:
    """Finds what `cheapest_by_scanning` finds, without looking at every chunk.

    What chunks are worth changes all the time, because idle time grows. But in one group the
    ranking never changes: the member that has been idle longest is the cheapest, now and later. So
    we keep one heap per group and compare only their tops. There are a few hundred groups (as many
    as the longest context has chunks; more if chunks are shared), however many conversations there
    are.

        group (0, 1)   [ A0 12:00, D0 12:07, ... ]     key 0, one user: leading chunks of A, D, ...
        group (1, 1)   [ A1 12:00, B1 12:03, ... ]
        group (5, 1)   [ C5 11:58, ... ]

    At 12:10 we compute what A0, A1 and C5 are worth and keep them in one more heap, `tops`, for all
    further victims of that moment. If a chunk changes, KVCache.refile gives it another
    `chunk.member` (None: it cannot leave now) and files that. The old one is *stale* then.

    Invariant, unless `now` is None: the top of every heap is in `tops`. Others may be there as
    well, without harm. A stale one is dropped when it comes to the top. One that a cheaper member
    of its group has overtaken (A0, if E0 11:50 is filed at 12:10) comes after its overtaker."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.heaps: dict[tuple, list[Member]] = {}      # by group
        self.until_cleanup = 64                         # filings until the next `_drop_stale`
        self.now: float | None = None                   # the moment of `tops`; None: `tops` is void
        self.tops: list[tuple[float, Member]] = []      # a heap of (worth, member)

    def file(self, member: Member):
        """Add a chunk's new member."""
        self._push(member)
        self.until_cleanup -= 1
        if not self.until_cleanup:
            self._drop_stale()

    def cheapest(self, now: float) -> Member | None:
        """O(groups) at a new moment, then O(log members), amortised, for every further call at this
        moment."""
        if now != self.now:
            self.now, self.tops = now, []
            for group in list(self.heaps):
                self._push_top(group)
        while self.tops:
            _, member = self.tops[0]
            if not member.stale:
                return member
            heapq.heappop(self.tops)
            heap = self.heaps.get(member.group)
            if heap and heap[0] is member:
                self._push_top(member.group)        # the second of its group is the first now
        return None

    def _push_top(self, group: tuple[int, int]):
        """Drop stale members from the top of a group's heap, then put its top into `tops`."""
        heap = self.heaps[group]
        while heap and heap[0].stale:
            heapq.heappop(heap)
        if heap:
            heapq.heappush(self.tops, (worth(self.policy, heap[0], self.now), heap[0]))
        else:
            del self.heaps[group]

    def _push(self, member: Member):
        heap = self.heaps.setdefault(member.group, [])
        heapq.heappush(heap, member)
        if heap[0] is member and self.now is not None:
            heapq.heappush(self.tops, (worth(self.policy, member, self.now), member))

    def _drop_stale(self):
        """O(members), but only after as many filings as there are members: O(1) for each."""
        members = [member for heap in self.heaps.values() for member in heap if not member.stale]
        self.heaps, self.until_cleanup, self.now, self.tops = {}, len(members) + 64, None, []
        for member in members:
            self._push(member)
