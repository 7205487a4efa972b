"""Lab 4: what a chunk is worth, which one is the cheapest, how good that is on a starved load, and a policy
of one's own."""
import heapq
import importlib
import math
import random

import pytest

import eviction
import kv_cache
from eviction import MIN_IDLE, POLICIES, Member, RecomputeCost, RetentionValue, cheapest_by_scanning
from experiments.policies import ExpectedCost, Oracle
from grading import SEED

points = pytest.mark.points
CHUNK = 32


def new_cost():
    return RecomputeCost({32: 0.2e-3, 16384: 200e-3}, rest=1e-3)    # attention is most of it


COST = new_cost()


# ---- RecomputeCost.__call__

@points(2, "RecomputeCost.__call__")
@pytest.mark.parametrize("length, seconds", [(1, 1.5), (100, 1.5), (150, 2.5), (200, 3.5), (300, 5.5)])
def test_two_lengths(length, seconds):
    assert RecomputeCost({200: 3.0, 100: 1.0}, rest=0.5)(length) == pytest.approx(seconds)


@points(8, "RecomputeCost.__call__")
def test_several_lengths():
    cost = RecomputeCost({100: 1.0, 200: 1.0, 400: 5.0, 800: 6.0}, rest=0.0)
    assert [cost(length) for length in (150, 200, 300, 400, 600, 800, 1200)] == pytest.approx(
        [1.0, 1.0, 3.0, 5.0, 5.5, 6.0, 7.0])


@points(2, "RecomputeCost.__call__")
def test_one_length_is_all_we_know():
    assert [RecomputeCost({64: 2.0}, rest=1.0)(length) for length in (1, 64, 9999)] == [3.0] * 3


# ---- RetentionValue.value

@points(3, "RetentionValue.value")
def test_a_value_never_rises_with_idle_time():
    policy = RetentionValue(COST, CHUNK)
    for key in (0, 1, 100):
        values = [policy.value(key, idle) for idle in (1e-3, 1.0, 60.0, 3600.0)]
        assert values == sorted(values, reverse=True) and len(set(values)) == 4


@points(7, "RetentionValue.value")
def test_the_numbers_of_the_module():
    """c = 4.0 ms, attention = 0.1 ms per 1,000 tokens of context; chunks of 1,000 tokens."""
    policy = RetentionValue(RecomputeCost({1000: 0.1e-3, 2000: 0.2e-3}, rest=4e-3), 1000)
    values = [1e3 * policy.value(key, idle) for key, idle in [(0, 60.0), (15, 60.0), (15, 90.0)]]
    assert values == pytest.approx([4.1 / 60, 5.6 / 60, 5.6 / 90])


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


@points(3, "cheapest_by_scanning")
def test_the_lowest_worth():
    assert cheapest((0, 5, 1, 10.0), (1, 3, 1, 10.0), (2, 4, 1, 10.0)) == 1
    assert cheapest((0, 5, 1, 8.0), (1, 3, 1, 10.0), (2, 4, 1, 10.0)) == 0


@points(3, "cheapest_by_scanning")
def test_a_chunk_with_more_users_is_worth_more():
    assert cheapest((0, 2, 3, 10.0), (1, 5, 1, 10.0)) == 1


@points(3, "cheapest_by_scanning")
def test_equal_worth():
    assert cheapest((0, 5, 1, 10.0), (1, 10, 1, 9.0), (2, 15, 1, 8.0)) == 2
    assert cheapest((3, 5, 1, 10.0), (1, 5, 1, 10.0), (2, 5, 1, 10.0)) == 1


@points(3, "cheapest_by_scanning")
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
    """80 conversations as (arrival, [(new tokens, seconds until the next turn)]). Many end after one
    turn or two, the others after 8 to 16. A few users write much more than most."""
    rng = random.Random(seed)
    for _ in range(80):
        arrival, scale, total, turns = rng.uniform(0, 1000), rng.lognormvariate(0, 1), 0, []
        for _ in range(rng.choice((1, 2, rng.randint(8, 16)))):
            tokens = round(100 * scale * rng.lognormvariate(0, 0.5)) + 1
            total += tokens
            if total > 3900:
                break
            turns.append((tokens, rng.lognormvariate(4, 1)))
        if turns:
            yield arrival, turns


def play(policy, seed, foreseen=False) -> tuple[float, kv_cache.KVCache]:
    """Play the load on 4,096 slots and 64 places. No model, no scheduler: one turn at a time. Returns
    the seconds for which dropped chunks were recomputed, and the cache. foreseen: for the oracle."""
    cache = kv_cache.KVCache(4096, 64, CHUNK, 1, 4096, policy)
    conversations, seconds = list(load(seed)), 0.0
    due = [(arrival, number, 0) for number, (arrival, _) in enumerate(conversations)]
    heapq.heapify(due)
    while due:
        now, number, index = heapq.heappop(due)
        tokens, think = conversations[number][1][index]
        is_last = index + 1 == len(conversations[number][1])
        if foreseen:
            policy.foresee(str(number), math.inf if is_last else think)
        seconds += turn(cache, policy, cache.open(str(number)), tokens, now)
        if not is_last:
            heapq.heappush(due, (now + think, number, index + 1))
    return seconds, cache


def turn(cache, policy, conversation, tokens, now) -> float:
    """One turn, at one moment: chunk after chunk is computed, and every copy ends at once.

    Returns the seconds for which dropped chunks were recomputed."""
    known = conversation.known
    policy.returned(conversation, now)
    conversation.tokens.extend([0] * tokens)
    total = len(conversation.tokens)
    while cache.shortfall(conversation, total, 0) > 0:
        for ticket in cache.plan_swap_out_for(conversation, total, 0, now):
            cache.complete(ticket)
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
    # A moment later: at one moment VictimIndex asks what a chunk is worth only once.
    for ticket in cache.plan_swap_out(cache.num_slots // 4 - cache.available, now + MIN_IDLE):
        cache.complete(ticket)
    return seconds


@points(18, "a starved load")
@pytest.mark.seconds(20)
def test_the_gap_between_lru_and_the_oracle(compare, monkeypatch):
    monkeypatch.setattr(kv_cache, "VictimIndex", Scan)
    seconds = []
    try:
        seconds += [play(RetentionValue(COST, CHUNK), SEED)[0]]
    finally:                # if it fails, the grader still tells the oracle's seconds
        compare(seconds)


# ---- a policy of one's own

LOADS = range(10 * SEED, 10 * SEED + 10)


@points(40, "OwnPolicy")
@pytest.mark.seconds(50)
def test_the_mean_share_of_the_gap_on_ten_loads(compare, monkeypatch):
    def borrowed(*arguments):
        pytest.fail("OwnPolicy uses ExpectedCost.value, which works in a starter", pytrace=False)
    monkeypatch.setattr(ExpectedCost, "value", borrowed)
    own_policy = own_policy_class()         # imported now: it cannot have kept the function
    seconds = []
    try:
        for seed in LOADS:
            policy = own_policy(new_cost(), CHUNK)      # not the one with which we count
            recomputed, cache = play(policy, seed)
            never_rises(policy, cache.conversations.values())
            seconds.append(recomputed)
    finally:
        compare(seconds)


def own_policy_class():
    return importlib.import_module("experiments.own_policy").OwnPolicy


def never_rises(policy, conversations):
    """VictimIndex relies on this."""
    for key in {policy.key(each, chunk.index) for each in conversations for chunk in each.chunks}:
        values = [policy.value(key, idle) for idle in (1e-3, 1.0, 10.0, 30.0, 60.0, 120.0, 600.0, 3600.0)]
        if any(later > earlier * (1 + 1e-9) for earlier, later in zip(values, values[1:])):
            pytest.fail(f"the value rises with idle time\n  of key {key} after 0, 1, 10, 30, 60, 120, 600, "
                        f"3600 s:\n  {', '.join(f'{value:.3g}' for value in values)}", pytrace=False)


def reference(seed):
    def seconds(policy, number, **how):
        return play(policy(COST, CHUNK), number, **how)[0]

    def all_of(number):
        return dict(lru=seconds(POLICIES["lru"], number),
                    retention=seconds(RetentionValue, number),
                    oracle=seconds(Oracle, number, foreseen=True),
                    ours=seconds(own_policy_class(), number))
    loads = [all_of(number) for number in range(10 * seed, 10 * seed + 10)]
    return {"test_the_gap_between_lru_and_the_oracle": all_of(seed),
            "test_the_mean_share_of_the_gap_on_ten_loads": loads}
