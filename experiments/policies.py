"""Eviction policies that no server offers: `bench.py fig14` compares them with the others.

    literal idleness    the paper to the letter; shows what it costs to evict a conversation whose turn waits
    tail-optimized      LRU, but first the chunks whose loss would not make the next answer late
    reuse by category   the chance that a conversation of this category returns within the next minutes
    return hazard       ours: learns when conversations return, and ignores the cost of recomputing
    return chance       ours: the retention value, times the chance that the conversation returns at all
    oracle              knows when each conversation returns; shows how far any policy is from the best

A policy of your own is a class like these and a line in `EXPERIMENTS`; then `bench.py fig14` compares
it, too. `eviction.Policy` says what a policy answers.

Invariant, as for every policy: `value` never rises with `idle`. The longer idle of two conversations
with equal keys leaves first, now and later. (To the oracle, `idle` is the time until the return.)
"""
import math
from bisect import bisect_right
from itertools import accumulate

from eviction import MIN_IDLE, LeastRecentlyUsed, Policy, RecomputeCost, RetentionValue


class LiteralIdleness(RetentionValue):
    """The paper's letter: idle since the last answer, even while the conversation's next turn waits."""

    def last_needed(self, conversation):
        return conversation.last_active


class ByTurns(Policy):
    """The base of policies that learn when conversations return. Conversations with equally many turns so far
    are one category, and those with TURNS or more are one, too."""
    TURNS = 8

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.left = [0] * (self.TURNS + 1)              # [turns]: how many conversations became idle

    def ended(self, conversation):
        conversation.turns = min(conversation.turns + 1, self.TURNS)
        self.left[conversation.turns] += 1

    def key(self, conversation, index, count):
        return conversation.turns


class ReturnHazard(ByTurns):
    """Evict first the chunks of the conversation that is least likely to return soon.

    A chunk's value is its conversation's hazard: the rate at which idle conversations return. We
    estimate one hazard for each category and each interval of idle time (0 to 1 s, 1 to 2 s, 2 to 4 s, ...):

        hazard = returns in the interval / (conversations still idle at its beginning * its seconds)

    100 conversations become idle; 20 return in the first second, and 8 between 1 and 2 s. The hazards are
    20 / (100 * 1 s) = 0.20 per second, and 8 / (80 * 1 s) = 0.10 per second.

    The cost of recomputing a chunk plays no part, so this policy saves tokens, not seconds.
    """
    EDGES = [0.0] + [2.0 ** n for n in range(14)]       # seconds at which the intervals begin
    TURNS = 6
    EVERY = 64                                          # returns between two estimates

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.returns = [[0] * len(self.EDGES) for _ in self.left]       # [turns][interval]
        self.hazards = None                                             # [turns][interval], per second

    def returned(self, conversation, now: float):
        if not conversation.turns:
            return                                      # its first turn is no return
        self.returns[conversation.turns][self._interval(now - conversation.last_active)] += 1
        if sum(map(sum, self.returns)) % self.EVERY == 0:
            self.hazards = [self.estimate(*counts) for counts in zip(self.left, self.returns)]

    def estimate(self, left: int, returns: list[int]) -> list[float]:
        """The hazard of each interval, per second.

        We add half a return to each interval, because a return that we have not seen yet is still
        possible. A running maximum from the longest interval down keeps the hazard from rising with
        idle time."""
        ends = [*self.EDGES[1:], 2 * self.EDGES[-1]]
        hazards = []
        for interval, (begin, end) in enumerate(zip(self.EDGES, ends)):
            still_idle = max(left - sum(returns[:interval]), 0) + 1
            hazards.append((returns[interval] + 0.5) / (still_idle * (end - begin)))
        return list(accumulate(reversed(hazards), max))[::-1]

    def _interval(self, idle: float) -> int:
        return bisect_right(self.EDGES, idle) - 1

    def value(self, key, idle):
        """The hazard, linear from the beginning of one interval to the beginning of the next one.

        All chunks of a conversation are worth the same. Until the first estimate, LRU decides."""
        if not self.hazards:
            return 1 / idle
        n = self._interval(idle)
        edges = [*self.EDGES, 2 * self.EDGES[-1]]
        hazards = [*self.hazards[key], self.hazards[key][-1]]
        share = min((idle - edges[n]) / (edges[n + 1] - edges[n]), 1.0)
        return (1 - share) * hazards[n] + share * hazards[n + 1]


class TailOptimized(LeastRecentlyUsed):
    """Tail-Optimized LRU (arXiv 2510.15152).

    If a conversation returns, and its next prompt and all that must be recomputed take no more than 200 ms,
    its first token still comes in time. Chunks within that budget are free: they leave first, in the order of
    LRU. (The paper's server can use a prefix only, so there the trailing blocks are free; here the leading
    ones are.)"""
    BUDGET = 0.2        # seconds
    PROMPT = 200        # tokens that we expect of the next prompt, as vLLM's implementation does
    FREE = 1e-9         # of the value of other chunks

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.free = 0                                   # so many leading chunks fit into the budget
        spent = cost(chunk_size) * (1 + self.PROMPT / chunk_size)
        while spent <= self.BUDGET and self.free < 4096:        # the bound ends the loop if the cost is 0
            self.free += 1
            spent += cost((self.free + 1) * chunk_size)

    def key(self, conversation, index, count):
        return int(index >= self.free)

    def value(self, key, idle):
        return (1 if key else self.FREE) / idle


class ReuseByCategory(ByTurns):
    """From "KVCache in the wild" (arXiv 2506.02634): conversations of a category return alike, and their
    think times are exponential.

    A category's share p returns at all, after `mean` seconds on average. The odds that a conversation which
    has been idle for `idle` seconds still returns are p exp(-idle / mean) : 1 - p. The value is the chance
    of a return within the next HORIZON seconds.
    """
    HORIZON = 300.0

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        # We begin as if of 10 conversations of a category 5 had returned, after a minute on average.
        self.left = [10] * (self.TURNS + 1)
        self.returns = [5] * (self.TURNS + 1)           # [turns]: how many of them returned
        self.waited = [300.0] * (self.TURNS + 1)        # [turns]: their think times together, in seconds

    def returned(self, conversation, now):
        if conversation.turns:                          # its first turn is no return
            self.returns[conversation.turns] += 1
            self.waited[conversation.turns] += now - conversation.last_active

    def chance(self, turns: int, idle: float) -> tuple[float, float]:
        """The chance that it still returns, and the mean think time of its category in seconds."""
        returns = self.returns[turns]
        mean = self.waited[turns] / returns
        waiting = returns * math.exp(-idle / mean)
        return waiting / (waiting + max(self.left[turns] - returns, 0) + 1), mean

    def value(self, key, idle):
        chance, mean = self.chance(key, idle)
        return chance * (1 - math.exp(-self.HORIZON / mean))


class ReturnChance(ReuseByCategory):
    """The retention value, times the chance that the conversation returns at all.

        V = chance(turns, T) * Cost(l) / T

    If 22% of the conversations with one turn return, and 75% of those with six, then a chunk of the latter
    is worth 3.4 times as much. The key is the chunk's index and the turns in one number."""

    def key(self, conversation, index, count):
        return index * (self.TURNS + 1) + conversation.turns

    def value(self, key, idle):
        index, turns = divmod(key, self.TURNS + 1)
        chance, _ = self.chance(turns, idle)
        return chance * self.cost((index + 1) * self.chunk_size) / idle


class Oracle(RetentionValue):
    """No real policy can do this: recomputation cost per second until the conversation *returns*.

    The experiment, which has planned the turns, calls `foresee`. `last_needed` is minus the time of
    the return. So the order is as for all policies: who returns later is counted as idle longer."""

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.thinks: dict[str, float] = {}              # conversation -> seconds of its next think time

    def foresee(self, name: str, think_seconds: float):
        """After its present turn the conversation will be idle for think_seconds (inf: for ever)."""
        self.thinks[name] = think_seconds

    def last_needed(self, conversation):
        if conversation.waiting:
            return math.inf
        return -(conversation.last_active + self.thinks.get(conversation.name, math.inf))

    def idle(self, now, last_needed):
        """Seconds until the conversation returns."""
        return max(-last_needed - now, MIN_IDLE)


EXPERIMENTS = {
    "literal idleness": LiteralIdleness, "tail-optimized": TailOptimized,
    "reuse by category": ReuseByCategory, "return hazard": ReturnHazard, "return chance": ReturnChance,
    "oracle": Oracle}
