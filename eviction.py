"""What a chunk is worth, and which chunk leaves first (paper §4.3.1).

When a tier is full, some chunk must leave it. Pensieve takes the chunk with the lowest *retention value*:

    V = Cost(l) / T          Cost(l) = attention(l) + c

Cost(l) is the time that the recomputed chunk adds to a batch that runs anyway; l is the context length at the
chunk's end. Attention grows with l, everything else (c) is the same for every chunk. So the leading chunks of
a conversation are the cheapest, and they leave first. T is the time for which the conversation has been idle.

    c = 4.0 ms, attention = 0.1 ms per 1,000 tokens of context:

    chunk that ends at    1,000 tokens, idle for 60 s      V = 4.1 / 60 = 0.068
    chunk that ends at   16,000 tokens, idle for 60 s      V = 5.6 / 60 = 0.093
    chunk that ends at   16,000 tokens, idle for 90 s      V = 5.6 / 90 = 0.062    leaves first

`RecomputeCost` holds the profile of Cost. A `Policy` says what a chunk is worth. `VictimIndex` finds the
cheapest chunk among many thousand conversations without looking at all of them.

Invariant: a value never rises with idle time. So of two chunks that differ in nothing else, the one that has
been idle longer is never worth more. `VictimIndex` relies on this. (If a policy learns between two victims
of one moment, the index shows it from the next moment on.)
"""
import heapq
import math
from bisect import bisect_right
from functools import cache
from itertools import accumulate
from typing import NamedTuple

MIN_IDLE = 1e-3     # seconds; no conversation counts as idle for less


class RecomputeCost:
    """Seconds that one more recomputed chunk adds to a batch, by the context length at its end. The profile
    has attention at a few lengths. Between two of them we interpolate."""

    def __init__(self, attention: dict[int, float], rest: float):
        """attention: context length in tokens -> seconds of attention for one chunk. rest: c, in seconds.

        ValueError if there is no length, or if a time is negative."""
        if not attention or min(rest, *attention.values()) < 0:
            raise ValueError("a cost profile needs at least one length, and no time below 0, "
                             f"got {attention} and {rest}")
        self.lengths = sorted(attention)
        # Measurements are noisy. A running maximum keeps later chunks from looking cheaper than earlier ones.
        self.seconds = list(accumulate((attention[length] for length in self.lengths), max))
        self.rest = rest

    def __call__(self, length: int) -> float:
        """Cost(length) in seconds.

        Before the first profiled length attention costs what it costs there. Beyond the last one the line
        through the last two goes on. If only one length is profiled, attention costs the same everywhere.
        With {100: 1.0, 200: 3.0} and rest 0.5:

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
    """Which chunks leave first. A policy answers three questions. (It may also count idle time in its own
    way, with `last_needed` and `idle`, and learn from turns, with `returned` and `ended`.)

    - From which end of a conversation do chunks leave? `toward` is the step from one victim to the next.
      +1: chunk 0 leaves first, then chunk 1, ... -1: the last chunk leaves first.
    - How many chunks leave the GPU together? `unit(count)`, of a conversation that has `count` chunks to
      give. (The CPU tier drops them one by one.)
    - What is its next chunk worth to one user? `value(key, idle)`. The key is a small integer that stands for
      everything but time. Chunks with equal keys differ only in how long they have been idle, and that is
      what makes `VictimIndex` fast.
    """
    toward = +1

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        self.cost = cache(cost)         # it is asked for the same few hundred lengths again and again
        self.chunk_size = chunk_size

    def last_needed(self, conversation) -> float:
        """When the conversation was last needed, in seconds; inf if a turn of it waits in the queue.

        Then it is needed soon: `idle` gives MIN_IDLE, and its chunks are worth most. (The paper counts from
        its last answer. On an hour of Mooncake's trace that recomputes 37% more tokens: `bench.py fig14
        --trace`, "literal idleness".)"""
        return math.inf if conversation.waiting else conversation.last_active

    def idle(self, now: float, last_needed: float) -> float:
        """Seconds, at least MIN_IDLE."""
        return max(now - last_needed, MIN_IDLE)

    def key(self, conversation, index: int, count: int) -> int:
        """index: the number of the conversation's next chunk to leave. count: how many it could give."""
        return 0

    def unit(self, count: int) -> int:
        return 1

    def value(self, key: int, idle: float) -> float:
        """What one user loses if the chunk leaves. The lowest leaves first. It must not rise with idle."""
        raise NotImplementedError

    def returned(self, conversation, now: float):
        """The scheduler reports here that a turn of the conversation has been admitted, be it its first."""

    def ended(self, conversation):
        """The scheduler reports here that a turn of the conversation has ended by itself: it was neither
        cancelled, nor has it failed."""


class LeastRecentlyUsed(Policy):
    """The paper's baseline: nothing but idle time counts."""

    def value(self, key, idle):
        return 1 / idle


class RetentionValue(Policy):
    """Pensieve: seconds of recomputation, per second of idleness."""

    def key(self, conversation, index, count):
        return index

    def value(self, key, idle):
        """V = Cost(l) / T. The key is the chunk's index, and l is where that chunk ends when it is full:
        chunk 0 at chunk_size, chunk 1 at 2 * chunk_size. idle is T."""
        end_of_chunk = (key + 1) * self.chunk_size
        return self.cost(end_of_chunk) / idle


class Trailing(LeastRecentlyUsed):
    """SGLang and RAGCache: least recently used, but from the trailing end. Their prefix lookup stops at the
    first missing chunk, so a chunk behind a gap would be useless to them."""
    toward = -1


class TrailingHalf(Policy):
    """The paper's draft: half of a conversation at once, from its trailing end; long and idle ones first."""
    toward = -1

    def key(self, conversation, index, count):
        return count

    def unit(self, count):
        return (count + 1) // 2

    def value(self, key, idle):
        return 1 / (key * idle)


class WholeConversation(LeastRecentlyUsed):
    """CachedAttention: all chunks of the least recently used conversation at once."""

    def unit(self, count):
        return count


POLICIES = {"retention": RetentionValue, "lru": LeastRecentlyUsed, "trailing-half": TrailingHalf,
            "conversation": WholeConversation, "trailing": Trailing}


class Member(NamedTuple):
    """A conversation that has a chunk to give, as the index knows it."""
    order: int              # the older conversation's is lower; decides between equal members
    key: int                # the policy's
    users: int              # conversations that use the chunk: one, unless sharing.py shares it
    last_needed: float      # the policy's
    conversation: object

    @property
    def group(self) -> tuple[int, int]:
        """In one group only idle time tells members apart."""
        return self.key, self.users


def worth(policy: Policy, member: Member, now: float) -> float:
    """What the member's next chunk is worth. If three conversations use it, it is worth three times its
    value."""
    return member.users * policy.value(member.key, policy.idle(now, member.last_needed))


def cheapest_by_scanning(policy: Policy, members: list[Member], now: float) -> Member | None:
    """The member whose next chunk is worth least: the specification of `VictimIndex.cheapest`. O(members).

    Of equally cheap ones we take the one that was needed least recently, then that of the lowest order."""
    def rank(member: Member) -> tuple[float, float, int]:
        return worth(policy, member, now), member.last_needed, member.order
    return min(members, key=rank, default=None)


class VictimIndex:
    """Finds what `cheapest_by_scanning` finds, without looking at every conversation.

    What chunks are worth changes all the time, because idle time grows. But in one group the ranking never
    changes: the member that has been idle longest is the cheapest, now and later. So we keep one heap per
    group and compare only their tops. There are a few hundred groups (the longest context divided by the
    chunk size; more if chunks are shared), however many conversations there are.

        group (0, 1)   [ A 12:00, D 12:07, ... ]       key 0, one user
        group (1, 1)   [ B 12:03, ... ]
        group (5, 1)   [ C 11:58, ... ]

    At 12:10 we compute what A, B and C are worth and keep them in one more heap, `tops`. Each further
    victim of that moment costs us only a look at what has moved since.

    A member that moves to another group leaves its old entry behind. Such an entry is *stale*: `members` says
    otherwise. We drop it when it comes to the top, or when too many entries have gathered.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.members: dict[int, Member] = {}                        # by order
        self.heaps: dict[tuple, list[tuple[float, int]]] = {}       # group -> heap of (last_needed, order)
        self.pushes = 0                                             # since the heaps were last rebuilt
        self.now: float | None = None                               # the moment for which `tops` holds
        self.tops: list[tuple] = []             # heap of (worth, last_needed, order, member)
        self.latest_top: dict[tuple, Member] = {}                   # group -> its latest entry in `tops`
        self.changed: set[tuple] = set()                            # groups that have got members since then

    def file(self, member: Member):
        """Add a conversation, or move it to another group or another time."""
        if self.members.get(member.order) == member:
            return
        self.members[member.order] = member
        self._push(member)
        if self.pushes > 2 * len(self.members) + 64:
            self._rebuild()

    def discard(self, order: int):
        self.members.pop(order, None)

    def cheapest(self, now: float) -> Member | None:
        """O(groups) at a new moment, then O(log members), amortised, for every further call at this
        moment."""
        if now != self.now:
            self.now, self.tops, self.latest_top, self.changed = now, [], {}, set(self.heaps)
        for group in self.changed:
            self._push_top(group)
        self.changed.clear()
        while self.tops:
            *_, order, member = self.tops[0]
            if self.members.get(order) == member:
                return member
            heapq.heappop(self.tops)
            self._push_top(member.group)        # the second of its group is the first now
        return None

    def _push_top(self, group: tuple[int, int]):
        """Put the longest idle member of a group among the tops, after dropping stale entries above it."""
        heap = self.heaps.get(group, [])
        while heap:
            last_needed, order = heap[0]
            member = self.members.get(order)
            if member and (member.group, member.last_needed) == (group, last_needed):
                if self.latest_top.get(group) != member:        # else the same top would gather in copies
                    self.latest_top[group] = member
                    entry = worth(self.policy, member, self.now), last_needed, order, member
                    heapq.heappush(self.tops, entry)
                return
            heapq.heappop(heap)
        self.heaps.pop(group, None)
        self.latest_top.pop(group, None)

    def _push(self, member: Member):
        heapq.heappush(self.heaps.setdefault(member.group, []), (member.last_needed, member.order))
        self.changed.add(member.group)
        self.pushes += 1

    def _rebuild(self):
        self.heaps = {}
        for member in self.members.values():
            self._push(member)
        self.pushes = 0
