"""Lab 4: what a chunk is worth, which one is the cheapest, and how good that is on a starved load."""
import heapq
import math
import random

import pytest

import eviction
import kv_cache
from eviction import POLICIES, Member, RecomputeCost, RetentionValue, cheapest_by_scanning
from experiments.policies import EXPERIMENTS, Oracle
from grading import SEED

points = pytest.mark.points
CHUNK = 32
COST = RecomputeCost({32: 0.2e-3, 16384: 200e-3}, rest=1e-3)    # attention is most of it


# ---- RecomputeCost.__call__

@points(4, "RecomputeCost.__call__")
@pytest.mark.parametrize("length, seconds", [(1, 1.5), (100, 1.5), (150, 2.5), (200, 3.5), (300, 5.5)])
def test_two_lengths(length, seconds):
    assert RecomputeCost({200: 3.0, 100: 1.0}, rest=0.5)(length) == pytest.approx(seconds)


@points(6, "RecomputeCost.__call__")
def test_several_lengths():
    cost = RecomputeCost({100: 1.0, 200: 1.0, 400: 5.0, 800: 6.0}, rest=0.0)
    assert [cost(length) for length in (150, 200, 300, 400, 600, 800, 1200)] == pytest.approx(
        [1.0, 1.0, 3.0, 5.0, 5.5, 6.0, 7.0])


@points(4, "RecomputeCost.__call__")
def test_one_length_is_all_we_know():
    assert [RecomputeCost({64: 2.0}, rest=1.0)(length) for length in (1, 64, 9999)] == [3.0] * 3


# ---- RetentionValue.value

@points(10, "RetentionValue.value")
def test_the_numbers_of_the_module():
    """c = 4.0 ms, attention = 0.1 ms per 1,000 tokens of context; chunks of 1,000 tokens."""
    policy = RetentionValue(RecomputeCost({1000: 0.1e-3, 2000: 0.2e-3}, rest=4e-3), 1000)
    values = [1e3 * policy.value(key, idle) for key, idle in [(0, 60.0), (15, 60.0), (15, 90.0)]]
    assert values == pytest.approx([4.1 / 60, 5.6 / 60, 5.6 / 90])


@points(5, "RetentionValue.value")
def test_a_value_never_rises_with_idle_time():
    policy = RetentionValue(COST, CHUNK)
    for key in (0, 1, 100):
        values = [policy.value(key, idle) for idle in (1e-3, 1.0, 60.0, 3600.0)]
        assert values == sorted(values, reverse=True) and len(set(values)) == 4


# ---- cheapest_by_scanning

class Plain(eviction.Policy):
    """Idle for 0, 1 or 2 s: the key, half of it, or a third."""

    def value(self, key, idle):
        return key / (1 + round(idle))


def cheapest(*members, now=10.0):
    """members: (order, key, users, last_needed)."""
    chunks = [Member(last_needed, 0, order, key, users, "reclaim", None)
              for order, key, users, last_needed in members]
    member = cheapest_by_scanning(Plain(COST, CHUNK), chunks, now)
    return member and member.order


@points(5, "cheapest_by_scanning")
def test_the_lowest_worth():
    assert cheapest((0, 5, 1, 10.0), (1, 3, 1, 10.0), (2, 4, 1, 10.0)) == 1
    assert cheapest((0, 5, 1, 8.0), (1, 3, 1, 10.0), (2, 4, 1, 10.0)) == 0


@points(5, "cheapest_by_scanning")
def test_a_chunk_with_more_users_is_worth_more():
    assert cheapest((0, 2, 3, 10.0), (1, 5, 1, 10.0)) == 1


@points(5, "cheapest_by_scanning")
def test_equal_worth():
    assert cheapest((0, 5, 1, 10.0), (1, 10, 1, 9.0), (2, 15, 1, 8.0)) == 2
    assert cheapest((3, 5, 1, 10.0), (1, 5, 1, 10.0), (2, 5, 1, 10.0)) == 1


@points(5, "cheapest_by_scanning")
def test_nobody():
    assert cheapest() is None


# ---- a starved load

class Scan:
    """A `VictimIndex` that scans: the load below runs with the functions of this lab alone."""

    def __init__(self, policy):
        self.policy, self.members = policy, []

    def file(self, member):
        self.members.append(member)

    def cheapest(self, now):
        self.members = [member for member in self.members if not member.stale]
        return cheapest_by_scanning(self.policy, self.members, now)


def load(seed):
    """50 conversations as (arrival, [(new tokens, seconds until the next turn)]). A few users write much more
    than most, and a few turns come much later than most."""
    rng = random.Random(seed)
    for _ in range(50):
        arrival, scale, total, turns = rng.uniform(0, 1000), rng.lognormvariate(0, 1), 0, []
        for _ in range(rng.randint(4, 16)):
            tokens = round(100 * scale * rng.lognormvariate(0, 0.5)) + 1
            total += tokens
            if total > 3900:
                break
            turns.append((tokens, rng.lognormvariate(4, 1.5)))
        if turns:
            yield arrival, turns


def seconds_recomputed(policy_class, seed) -> float:
    """Play the load on 4,096 slots and 64 places. No model, no scheduler: one turn at a time."""
    policy = policy_class(COST, CHUNK)
    cache = kv_cache.KVCache(4096, 64, CHUNK, 1, 4096, policy)
    conversations, seconds = list(load(seed)), 0.0
    due = [(arrival, number, 0) for number, (arrival, _) in enumerate(conversations)]
    heapq.heapify(due)
    while due:
        now, number, index = heapq.heappop(due)
        tokens, think = conversations[number][1][index]
        is_last = index + 1 == len(conversations[number][1])
        if isinstance(policy, Oracle):
            policy.foresee(str(number), math.inf if is_last else think)
        seconds += turn(cache, policy, cache.open(str(number)), tokens, now)
        if not is_last:
            heapq.heappush(due, (now + think, number, index + 1))
    return seconds


def turn(cache, policy, conversation, tokens, now) -> float:
    """One turn, at once. Returns the seconds for which dropped chunks were recomputed."""
    known = conversation.known
    conversation.tokens.extend([0] * tokens)
    total = len(conversation.tokens)
    while cache.shortfall(conversation, total, 0) > 0:
        for ticket in cache.plan_swap_out_for(conversation, total, 0, now):
            cache.complete(ticket)
    policy.returned(conversation, now)
    dropped = [chunk for chunk in conversation.chunks if not chunk.filled]
    seconds = sum(COST(min((chunk.index + 1) * CHUNK, known)) for chunk in dropped)
    for ticket in cache.admit(conversation, total, now):
        cache.complete(ticket)
    for chunk in conversation.chunks:
        start = chunk.index * CHUNK
        end = min(start + CHUNK, total)
        if chunk.filled < end - start:
            cache.computed(conversation, start + chunk.filled, end)
    cache.release(conversation, now)
    policy.ended(conversation)
    for ticket in cache.plan_swap_out(cache.num_slots // 4 - cache.available, now):
        cache.complete(ticket)
    return seconds


@points(35, "a starved load")
@pytest.mark.seconds(20)
def test_the_gap_between_lru_and_the_oracle(compare, monkeypatch):
    """A policy of one's own, in experiments/policies.py, is measured, too (but earns no points)."""
    monkeypatch.setattr(kv_cache, "VictimIndex", Scan)
    known = ("literal idleness", "literal lru", "tail-optimized", "reuse by category", "expected cost",
             "oracle")
    own = {name: policy for name, policy in EXPERIMENTS.items() if name not in known}
    found = {}
    try:
        for name, policy in {"retention": RetentionValue, **own}.items():
            found[name] = seconds_recomputed(policy, SEED)
    finally:
        compare(found)


def reference(seed):
    policies = {"lru": POLICIES["lru"], "retention": RetentionValue, "oracle": Oracle}
    return {"test_the_gap_between_lru_and_the_oracle": {
        name: seconds_recomputed(policy, seed) for name, policy in policies.items()}}
