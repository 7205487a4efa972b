"""Policies that no server has: the paper's letter, one of ours, and one that knows the future (for fig14)."""
import math
from bisect import bisect_right
from itertools import accumulate

from eviction import MIN_IDLE, Policy, RetentionValue


class LiteralIdleness(RetentionValue):
    """The paper's letter: idle since the last answer, even for a conversation whose turn waits in the queue."""

    def last_needed(self, conversation):
        return conversation.last_active


class ReturnHazard(Policy):
    """Ours: what is worth least is what is least likely to be asked for soon. It learns at what rate idle conversations return, by
    the number of turns that they have had and by how long they have been idle, in intervals that double:

        hazard = returns in the interval / (conversations that were still idle when it began x its seconds)

    made monotone from the longest interval down. What a chunk costs to recompute is left out: this saves tokens."""
    EDGES = [0.0] + [2.0 ** n for n in range(14)]     # seconds, the beginnings of the intervals
    TURNS = 6                                       # so many, and more, are one class
    EVERY = 64                                      # returns between two estimates

    def __init__(self, cost, chunk_size):
        super().__init__(cost, chunk_size)
        self.left = [0] * (self.TURNS + 1)          # by turns: how often a conversation became idle
        self.returns = [[0] * len(self.EDGES) for _ in self.left]
        self.hazards = None                         # [turns][interval], per second

    def ended(self, conversation):
        conversation.turns = min(conversation.turns + 1, self.TURNS)
        self.left[conversation.turns] += 1

    def returned(self, conversation, now):
        if conversation.turns:
            self.returns[conversation.turns][self._interval(now - conversation.last_active)] += 1
            if sum(map(sum, self.returns)) % self.EVERY == 0:
                self.hazards = [self.estimate(*counts) for counts in zip(self.left, self.returns)]

    def estimate(self, left: int, returns: list[int]) -> list[float]:
        """The hazard in each interval; half a return is added to each, so that the unseen is not impossible."""
        seconds = [end - begin for begin, end in zip(self.EDGES, [*self.EDGES[1:], 2 * self.EDGES[-1]])]
        still = [max(left - sum(returns[:n]), 0) + 1 for n in range(len(returns))]
        hazards = [(count + 0.5) / (idle * width) for count, idle, width in zip(returns, still, seconds)]
        return list(accumulate(reversed(hazards), max))[::-1]

    def _interval(self, idle):
        return bisect_right(self.EDGES, idle) - 1

    def key(self, conversation, index, count):
        return conversation.turns

    def value(self, key, idle):
        """Of all chunks of a conversation alike: the hazard, linear from one interval's beginning to the next's. Before anything is
        learnt, least recently used."""
        if not self.hazards:
            return 1 / idle
        n, hazards = self._interval(idle), [*self.hazards[key], self.hazards[key][-1]]
        begin, end = self.EDGES[n], [*self.EDGES, 2 * self.EDGES[-1]][n + 1]
        share = min((idle - begin) / (end - begin), 1.0)
        return (1 - share) * hazards[n] + share * hazards[n + 1]


class Oracle(RetentionValue):
    """Not to be had: recomputation cost per second until the conversation *returns*. `foresee` tells it what nobody knows."""

    def __init__(self, cost, chunk_size):
        super().__init__(cost, chunk_size)
        self.thinks = {}

    def foresee(self, name: str, think_seconds: float):
        """How long the conversation will be idle after the turn that it is in; inf: for ever."""
        self.thinks[name] = think_seconds

    def last_needed(self, conversation):
        """Minus the time of its return: the less, the later."""
        if conversation.waiting:
            return math.inf
        return -(conversation.last_active + self.thinks.get(conversation.name, math.inf))

    def idle(self, now, last_needed):
        return max(-last_needed - now, MIN_IDLE)


EXPERIMENTS = {"literal idleness": LiteralIdleness, "return hazard": ReturnHazard, "oracle": Oracle}
