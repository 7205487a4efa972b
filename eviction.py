"""What a chunk is worth, and which chunk goes first (paper §4.3).

When space runs out we give up the chunk that is cheapest to bring back and least likely to be wanted soon:

    retention value = Cost(l) / idle        Cost(l) = attention(l) + c

l is the context length at the chunk. Attention to a long context costs more than to a short one, everything else (c) costs
the same for every chunk, so the *leading* chunks of a conversation are the cheap ones. `idle` is the time since its last turn.

A policy says which end of a conversation goes first, how much goes at once, and a value that never rises with idleness.
Invariant: within one key the longest idle conversation is the cheapest, whatever the time is. So `VictimIndex` keeps one heap
by last activity per key and only ever compares the few hundred heads: O(keys + k log C) for k victims of C conversations."""
import heapq
import math
from bisect import bisect_right
from itertools import accumulate

SHORTEST_IDLE = 1e-3    # seconds; also the idle time of a conversation whose turn waits in the queue


class RecomputeCost:
    """Seconds to recompute one chunk at context length l, from a profile of attention at a few lengths."""

    def __init__(self, attention: dict[int, float], rest: float):
        """attention: {context length in tokens: seconds of attention of one chunk}; rest: seconds of all else, the same for every chunk."""
        if not attention or rest < 0:
            raise ValueError(f"a cost profile needs at least one length and rest >= 0, got {attention} and {rest}")
        self.lengths = sorted(attention)
        self.seconds = list(accumulate((attention[length] for length in self.lengths), max))   # noise must not make later tokens cheaper
        self.rest = rest

    def __call__(self, length: int) -> float:
        """attention(length) + rest, in seconds, where attention is the running maximum of the profile: linear between the profiled
        lengths, the first's before the first; beyond the last it goes on with the slope of the last two (of one alone: constant)."""
        lengths, seconds = self.lengths, self.seconds
        if length <= lengths[0] or len(lengths) == 1:
            return seconds[0] + self.rest
        right = min(bisect_right(lengths, length), len(lengths) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (lengths[right] - lengths[left])
        return seconds[left] + slope * (length - lengths[left]) + self.rest


class Policy:
    """Least recently used, leading end first, one chunk at a time; the other policies override what differs.

    toward: +1 takes a conversation's chunks from the leading end, -1 from the trailing end.
    key(conversation, index, count): a small integer: all that a value may depend on besides idleness. index: of the conversation's
    next chunk to go; count: its chunks that could go.
    unit(count): how many of them go at once.
    value(key, idle): what is lost by evicting, the lowest goes first; idle in seconds, above 0; must not rise with idle.
    activity(conversation), idle(now, activity): what idleness is counted from, and how; the less activity, the longer idle.
    ended(conversation), returned(conversation, now): are told of the end of a turn and of the admission of the next."""
    toward = 1

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        self.cost, self.chunk_size = cost, chunk_size

    def activity(self, conversation) -> float:
        """When it was last active, in seconds; one whose turn waits is not idle, whatever its last answer's age."""
        return math.inf if conversation.waiting else conversation.last_active

    def idle(self, now: float, activity: float) -> float:
        return max(now - activity, SHORTEST_IDLE)

    def ended(self, conversation):
        pass

    def returned(self, conversation, now: float):
        pass

    def key(self, conversation, index: int, count: int) -> int:
        return 0

    def unit(self, count: int) -> int:
        return 1

    def value(self, key: int, idle: float) -> float:
        return 1 / idle


class RetentionValue(Policy):
    """Pensieve: recomputation cost per second of idleness."""

    def key(self, conversation, index, count):
        return index

    def value(self, key, idle):
        """Cost at the context length where chunk number `key` ends, divided by idle (seconds)."""
        return self.cost((key + 1) * self.chunk_size) / idle


class Trailing(Policy):
    """SGLang, RAGCache: least recently used, from the trailing end, since their prefix lookup stops at the first miss."""
    toward = -1


class TrailingHalf(Policy):
    """The paper's draft: half of a conversation from its trailing end; the longest and most idle conversation first."""
    toward = -1

    def key(self, conversation, index, count):
        return count

    def unit(self, count):
        return (count + 1) // 2

    def value(self, key, idle):
        """The fewer chunks it still has, the more each is worth."""
        return 1 / (key * idle)


class WholeConversation(Policy):
    """CachedAttention: all of the least recently used conversation at once."""

    def unit(self, count):
        return count


POLICIES = {"retention": RetentionValue, "lru": Policy, "trailing-half": TrailingHalf, "conversation": WholeConversation, "trailing": Trailing}



class VictimIndex:
    """The conversations that have a chunk to give up, and the stems that several conversations share, cheapest first at any time.
    What is shared is worth as many times what the policy says as it has owners.

    A member is filed under (key, last_active), the policy's key together with its owners. Moving it leaves its old heap entry behind
    as stale; stale entries are discarded when they surface, and all at once when they are too many."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.heaps = {}       # key -> heap of (last_active, member.order)
        self.members = {}     # member.order -> (key, last_active, member)
        self.entries = 0      # in all heaps, stale ones included
        self.now = None       # when the values in `heads` hold
        self.surfaced = {}    # key -> its entry in `heads`
        self.heads = []       # heap of (value, member.order, key, last_active): the longest idle member of every key, and stale ones

    def file(self, member, key: int, last_active: float):
        """Adds the member, or moves it to this key and last activity."""
        key = key, member.owners
        if self.members.get(member.order, (None, None))[:2] != (key, last_active):
            self.members[member.order] = (key, last_active, member)
            self._push(key, last_active, member.order)
            self._surface(key)
            if self.entries + len(self.heads) > 3 * len(self.members) + 64:
                self._rebuild()

    def discard(self, member):
        self.members.pop(member.order, None)

    def cheapest(self, now: float):
        """The member of the lowest value at `now`; ties by order (under one key the longest idle is first); None if there is none.
        The first call at a new `now` looks at every key, more of them cost O(log)."""
        if now != self.now:
            self.now, self.heads, self.surfaced = now, [], {}
            for key in list(self.heaps):
                self._surface(key)
        while self.heads:
            _, order, key, last_active = self.heads[0]
            if self._holds(key, last_active, order):
                return self.members[order][2]
            heapq.heappop(self.heads)
            if self.surfaced.get(key) == (last_active, order):
                del self.surfaced[key]
            self._surface(key)
        return None

    def _holds(self, key, last_active, order) -> bool:
        return self.members.get(order, (None, None))[:2] == (key, last_active)

    def _surface(self, key):
        """Puts the longest idle member under `key` among the heads, with its value."""
        heap = self.heaps.get(key, [])
        while heap and not self._holds(key, *heap[0]):
            heapq.heappop(heap)
            self.entries -= 1
        if not heap:
            self.heaps.pop(key, None)
        elif self.now is not None and self.surfaced.get(key) != heap[0]:
            self.surfaced[key] = last_active, order = heap[0]
            value = key[1] * self.policy.value(key[0], self.policy.idle(self.now, last_active))
            heapq.heappush(self.heads, (value, order, key, last_active))

    def _push(self, key, last_active, order):
        heapq.heappush(self.heaps.setdefault(key, []), (last_active, order))
        self.entries += 1

    def _rebuild(self):
        self.heaps, self.entries, self.heads, self.now = {}, 0, [], None
        for order, (key, last_active, _) in self.members.items():
            self._push(key, last_active, order)
