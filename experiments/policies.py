"""Eviction policies that no server offers: `bench.py fig14` compares them with the others.

    literal idleness    the paper to the letter, which evicts a conversation whose turn waits
    literal lru         LRU that does so, too
    tail-optimized      LRU, but first the chunks whose loss would not make the next answer late
    reuse by category   the chance that a conversation of this category returns within minutes
    expected cost       ours: the recomputation that one more second in the cache saves on average
    oracle              knows when each conversation returns: how far any policy is from the best

A policy of your own is a class like these and a line in `EXPERIMENTS`; then `bench.py fig14`
compares it, too. `eviction.Policy` says what a policy answers.

Invariant, as for every policy: `value` never rises with `idle`. (To the oracle, `idle` is the time
until the return.)
"""
import math

from eviction import MIN_IDLE, LeastRecentlyUsed, Policy, RecomputeCost, RetentionValue


class LiteralIdleness(RetentionValue):
    """The paper's letter: idle since the last answer, even while the conversation's next turn
    waits."""

    def last_needed(self, conversation):
        return conversation.last_active


class LiteralLRU(LeastRecentlyUsed):
    """LRU that does not know who waits, either: the fair partner of `LiteralIdleness`."""
    last_needed = LiteralIdleness.last_needed


class TailOptimized(LeastRecentlyUsed):
    """Tail-Optimized LRU (arXiv 2510.15152).

    If a conversation returns, and its next prompt and all that must be recomputed take no more than
    200 ms, its first token still comes in time. Chunks within that budget are free: they leave
    first, in the order of LRU. (That paper's server can use a prefix only, so there the trailing
    chunks are free; here the leading ones are.)"""
    BUDGET = 0.2        # seconds
    PROMPT = 200        # tokens that we expect of the next prompt, as vLLM's implementation does
    FREE = 1e-9         # what a free chunk is worth, as a share of another one

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.free = 0                                   # so many leading chunks fit into the budget
        spent = cost(chunk_size) * (1 + self.PROMPT / chunk_size)
        while spent <= self.BUDGET and self.free < 4096:  # the bound ends the loop if the cost is 0
            self.free += 1
            spent += cost((self.free + 1) * chunk_size)

    def key(self, conversation, index):
        return int(index >= self.free)

    def value(self, key, idle):
        return (1 if key else self.FREE) / idle


class ReuseByCategory(Policy):
    """From "KVCache in the wild" (arXiv 2506.02634): conversations of a category return alike,
    and their think times are exponential. Our categories: conversations that have had equally
    many turns; TURNS or more count as one category. We count from a reply to the admission of the
    next turn, so waiting is included.

    A category's share p returns at all, after `mean` seconds on average. The odds that a
    conversation which has been idle for `idle` seconds still returns are

        p exp(-idle / mean) : 1 - p

    The value is the chance of a return within the next HORIZON seconds."""
    HORIZON = 300.0
    TURNS = 8

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        # We begin as if 5 of 10 conversations of a category had returned, after 60 s on average.
        self.left = [10] * (self.TURNS + 1)           # [turns]: how many conversations became idle
        self.returns = [5] * (self.TURNS + 1)         # [turns]: how many of them returned
        self.waited = [300.0] * (self.TURNS + 1)      # [turns]: seconds until they returned, summed

    def ended(self, conversation):
        conversation.turns = min(conversation.turns + 1, self.TURNS)
        self.left[conversation.turns] += 1

    def returned(self, conversation, now):
        if conversation.turns:                          # its first turn is no return
            self.returns[conversation.turns] += 1
            self.waited[conversation.turns] += max(now - conversation.last_active, 0.0)

    def key(self, conversation, index):
        return conversation.turns

    def chance_and_mean(self, turns: int, idle: float) -> tuple[float, float]:
        """The chance that it still returns, and the mean seconds until its category returns."""
        returns = self.returns[turns]
        mean = self.waited[turns] / returns
        waiting = returns * math.exp(-idle / mean)
        return waiting / (waiting + max(self.left[turns] - returns, 0) + 1), mean

    def value(self, key, idle):
        chance, mean = self.chance_and_mean(key, idle)
        return chance * (1 - math.exp(-self.HORIZON / mean))


class ExpectedCost(ReuseByCategory):
    """Ours: the seconds of recomputation that one more second in the cache saves on average.

        V = rate(turns, T) * Cost(l)        rate(turns, T) = chance(turns, T) / mean

    If 60% of the conversations that have had two turns and been idle for 30 s still return, after
    60 s on average, the rate is 0.01 per second, and a chunk of 4 ms is worth 40 us per second.
    (The retention value takes 1 / T for the rate, whatever the conversation has done before.) The
    key is the chunk's index and the turns in one number."""

    def key(self, conversation, index):
        return index * (self.TURNS + 1) + conversation.turns

    def value(self, key, idle):
        """V, as above, of a chunk with that key."""
        index, turns = divmod(key, self.TURNS + 1)
        chance, mean = self.chance_and_mean(turns, idle)
        return chance / mean * self.cost((index + 1) * self.chunk_size)


class Oracle(RetentionValue):
    """No real policy can do this: recomputation cost per second until the conversation *returns*.
    A chunk behind what the next turn keeps is worth nothing.

    Where turns rewind, it is no bound: of a chunk that branches share it asks the first user's next
    turn alone, and it multiplies by all users, though nobody returns to a branch that was left.

    The experiment, which has planned the turns, calls `foresee` and `leave`. `last_needed` is
    minus the time of the return. So the order is as for all policies: who returns later is counted
    as idle longer."""
    NOT_KEPT = -1       # the key of a chunk of which the next turn does not keep all

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.thinks: dict[str, float] = {}          # conversation -> seconds of its next think time
        self.keeps: dict[str, float] = {}           # and tokens that its next turn keeps

    def foresee(self, name: str, think_seconds: float, keep: int | None = None):
        """After its present turn the conversation will be idle for think_seconds (inf: for ever).
        Its next turn keeps `keep` tokens of the context (None: all)."""
        self.thinks[name] = think_seconds
        self.keeps[name] = math.inf if keep is None else keep

    def leave(self, name: str, keep: int):
        """Nobody returns to the conversation: only its first `keep` tokens go on, in a branch."""
        self.foresee(name, math.inf, keep)

    def key(self, conversation, index):
        kept = (index + 1) * self.chunk_size <= self.keeps.get(conversation.name, math.inf)
        return index if kept else self.NOT_KEPT

    def value(self, key, idle):
        return 0.0 if key == self.NOT_KEPT else super().value(key, idle)

    def last_needed(self, conversation):
        if conversation.waiting:
            return math.inf
        return -(conversation.last_active + self.thinks.get(conversation.name, math.inf))

    def idle(self, now, last_needed):
        """Seconds until the conversation returns."""
        return max(-last_needed - now, MIN_IDLE)


class Told(RetentionValue):
    """Ours: the client tells with each turn how long a pause it expects behind it.

        V = Cost(l) / (expected + T)

    So a conversation begins to be idle as if it had been idle for that long already. Expected after
    1 s and away for 83 s, it is worth as much as one that has just begun a pause of 84 s: the
    longer it stays away, the less we believe the hint. Without a hint this is the retention value.
    """

    def __init__(self, cost: RecomputeCost, chunk_size: int):
        super().__init__(cost, chunk_size)
        self.expected: dict[str, float] = {}        # conversation -> seconds of its next pause

    def expect(self, name: str, seconds: float):
        """After its present turn the conversation will be idle for about so many seconds."""
        self.expected[name] = seconds

    def last_needed(self, conversation):
        return super().last_needed(conversation) - self.expected.get(conversation.name, 0.0)


EXPERIMENTS = {
    "literal idleness": LiteralIdleness, "literal lru": LiteralLRU,
    "tail-optimized": TailOptimized, "reuse by category": ReuseByCategory,
    "expected cost": ExpectedCost, "oracle": Oracle}
