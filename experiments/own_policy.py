"""Lab 4's last part: a policy of your own. `labs/lab.py check 4` measures it on ten loads.

Nothing else uses it. With a line in `EXPERIMENTS` (policies.py) `bench.py fig14` compares it, too.
"""
import math
from statistics import NormalDist

from eviction import MIN_IDLE, Policy


class OwnPolicy(Policy):
    """A policy of your own. `eviction.Policy` says what it answers, and what it hears of turns."""

    # Ours: the seconds of recomputation that one more second in the cache saves on average.
    #
    #     V = rate(turns, T) * Cost(l)
    #
    # It learns which share of the conversations that have had so many turns returns at all, and
    # after how long: the logarithm of the seconds is taken for normal, as some are away for long.
    # Example: half return, after 60 s in the median, with a spread of 1. After 60 s one quarter is
    # back, and of all that are still away 0.44% return in a second. After 600 s it is 0.005%.

    TURNS = 8                           # conversations with more turns count as one kind

    def __init__(self, cost, chunk_size):
        super().__init__(cost, chunk_size)
        # We begin as if 2 of 4 had returned, and 5 had waited for 60 s, with a spread of 1.
        self.left = [4] * (self.TURNS + 1)          # [turns]: how many became idle
        self.returns = [2] * (self.TURNS + 1)       # [turns]: how many of them returned
        self.count, self.total, self.squares = 5, 5 * math.log(60), 5 * (math.log(60) ** 2 + 1)
        self.waits = NormalDist(math.log(60), 1)

    def ended(self, conversation):
        conversation.turns = min(conversation.turns + 1, self.TURNS)
        self.left[conversation.turns] += 1

    def returned(self, conversation, now):
        if conversation.turns:                      # its first turn is no return
            self.returns[conversation.turns] += 1
            wait = math.log(max(now - conversation.last_active, MIN_IDLE))
            self.count, self.total = self.count + 1, self.total + wait
            self.squares += wait ** 2
            mean = self.total / self.count
            spread = math.sqrt(self.squares / self.count - mean ** 2)
            self.waits = NormalDist(mean, spread)

    def key(self, conversation, index):
        return index * (self.TURNS + 1) + conversation.turns

    def value(self, key, idle):
        index, turns = divmod(key, self.TURNS + 1)
        return self.cost((index + 1) * self.chunk_size) * self.rate(turns, idle)

    def rate(self, turns: int, idle: float) -> float:
        """The chance that it returns within the next second."""
        share = min(self.returns[turns] / self.left[turns], 0.99)
        # In most seconds after the mode fewer return than before; until then more, but no value may
        # rise. So the rate at the start is that of the mode, and it is never more than that.
        waits, mode = self.waits, self.waits.mean - self.waits.variance
        at_most = share * waits.pdf(mode) / math.exp(mode)
        log = math.log(idle)
        if log < mode:
            return at_most
        still = share * (1 - waits.cdf(log)) + 1 - share        # of those who left, this share
        return min(share * waits.pdf(log) / math.exp(log) / still, at_most)
