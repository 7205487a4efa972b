"""What a chunk is worth, and in which order chunks leave: against hand-worked figures and a brute-force
sort."""
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from eviction import MIN_IDLE, POLICIES, Member, RecomputeCost, VictimIndex, cheapest_by_scanning, worth
from experiments.policies import LiteralIdleness, Oracle

COST = RecomputeCost({32: 1.0, 64: 2.0, 128: 6.0}, rest=10.0)


# ---- RecomputeCost.__call__

@pytest.mark.parametrize("length, seconds", [
    (1, 11.0), (32, 11.0),                       # up to the first profiled length: the first's
    (48, 11.5), (64, 12.0), (80, 13.0), (96, 14.0), (128, 16.0),
    (192, 20.0), (256, 24.0)])                   # beyond the last: 4 seconds more every 64 tokens
def test_recompute_cost_interpolates_and_extrapolates(length, seconds):
    assert COST(length) == pytest.approx(seconds)


def test_recompute_cost_takes_its_profile_in_any_order():
    shuffled = RecomputeCost({128: 6.0, 32: 1.0, 64: 2.0}, rest=10.0)
    assert [shuffled(length) for length in range(1, 300)] == [COST(length) for length in range(1, 300)]


def test_recompute_cost_is_a_running_maximum_under_noise():
    cost = RecomputeCost({32: 2.0, 64: 1.5, 128: 3.0, 256: 2.5}, rest=0.0)
    lengths = 32, 48, 64, 96, 128, 200, 1000
    assert [cost(length) for length in lengths] == [2.0, 2.0, 2.0, 2.5, 3.0, 3.0, 3.0]


def test_recompute_cost_of_a_single_length_is_constant():
    assert {RecomputeCost({64: 2.0}, rest=1.0)(length) for length in (1, 64, 10_000)} == {3.0}


@given(st.dictionaries(st.integers(1, 4096), st.floats(0, 10), min_size=1, max_size=8))
def test_recompute_cost_never_falls(profile):
    costs = [RecomputeCost(profile, rest=0.5)(length) for length in range(1, 6000, 37)]
    assert all(a <= b + 1e-9 for a, b in zip(costs, costs[1:]))


@pytest.mark.parametrize("profile, rest", [({}, 1.0), ({32: 1.0}, -1.0), ({32: -1.0}, 2.0)])
def test_recompute_cost_refuses_a_profile_without_sense(profile, rest):
    with pytest.raises(ValueError, match="cost profile"):
        RecomputeCost(profile, rest)


# ---- policies

# of chunk 3, idle for 4 s
@pytest.mark.parametrize("name, step, key, part, value", [
    ("retention", +1, 3, 0, 16.0 / 4), ("lru", +1, 0, 0, 1 / 4), ("trailing", -1, 0, 0, 1 / 4),
    ("trailing-half", -1, 4, 0.5, 1 / (4 * 4)), ("conversation", +1, 0, 1, 1 / 4)])
def test_policy_end_key_part_value(name, step, key, part, value):
    policy = POLICIES[name](COST, 32)
    assert (policy.key(None, 3), policy.part) == (key, part)
    assert [policy.nth_to_leave(index) for index in range(4)] == [0, step, 2 * step, 3 * step]
    assert policy.value(key, 4.0) == pytest.approx(value)


def test_the_command_line_has_at_least_these_policies():
    assert set(POLICIES) >= {"retention", "lru", "trailing-half", "conversation", "trailing"}


def test_retention_value_weighs_cost_against_idleness():
    """A late chunk goes before an early one once its conversation has been idle longer by more than the
    ratio of their costs."""
    policy = POLICIES["retention"](COST, 32)
    early, late = policy.key(None, 0), policy.key(None, 3)                   # they cost 11 and 16
    assert policy.value(early, 10) < policy.value(late, 10)
    assert policy.value(early, 10) < policy.value(late, 14)
    assert policy.value(late, 15) < policy.value(early, 10)


@pytest.mark.parametrize("name", POLICIES)
@given(st.integers(1, 500), st.floats(MIN_IDLE, 1e6), st.floats(1, 1e3))
def test_value_never_rises_with_idle(name, key, idle, factor):
    policy = POLICIES[name](COST, 32)
    assert policy.value(key, idle * factor) <= policy.value(key, idle)


def test_idle_time_has_a_floor_and_a_conversation_that_waits_is_not_idle():
    policy = POLICIES["retention"](COST, 32)
    waits, rests = (SimpleNamespace(waiting=waiting, last_active=4.0) for waiting in (True, False))
    assert policy.idle(10.0, policy.last_needed(rests)) == 6.0
    assert policy.idle(4.0, policy.last_needed(rests)) == MIN_IDLE
    assert policy.idle(10.0, policy.last_needed(waits)) == MIN_IDLE


def test_the_papers_letter_ignores_who_waits():
    policy = LiteralIdleness(COST, 32)
    assert policy.idle(10.0, policy.last_needed(SimpleNamespace(waiting=True, last_active=4.0))) == 6.0


def test_the_oracle_prefers_to_evict_who_returns_last():
    policy, last = Oracle(COST, 32), SimpleNamespace(waiting=False, name="never told", last_active=9.0)
    policy.foresee("soon", 5.0)
    policy.foresee("late", 50.0)
    soon, late = (SimpleNamespace(waiting=False, name=name, last_active=8.0) for name in ("soon", "late"))
    assert policy.idle(10.0, policy.last_needed(soon)) == 3.0
    assert policy.idle(10.0, policy.last_needed(late)) == 48.0
    index = VictimIndex(policy)
    chunks = [Chunk(order, 0) for order in range(3)]
    for chunk, conversation in zip(chunks, (soon, late, last)):
        index.file(chunk.become(policy, policy.last_needed(conversation), 1))
    assert index.cheapest(10.0).chunk is chunks[2] and policy.value(0, math.inf) == 0
    chunks[2].member = None
    assert index.cheapest(10.0).chunk is chunks[1]


def test_to_the_oracle_a_chunk_that_the_next_turn_does_not_keep_is_worth_nothing():
    policy, rewinds = Oracle(COST, 32), SimpleNamespace(name="rewinds")
    policy.foresee("rewinds", 5.0, keep=70)
    worths = [policy.value(policy.key(rewinds, index), 5.0) for index in range(4)]
    assert 0 < worths[0] <= worths[1] and worths[2:] == [0, 0]          # chunk 2 ends at 96
    policy.foresee("rewinds", 5.0)
    assert all(policy.value(policy.key(rewinds, index), 5.0) for index in range(4))


# ---- VictimIndex.cheapest

OF_SIXTEEN = SimpleNamespace(chunks=range(16), name="c")          # a conversation, as far as a key may look

class Chunk:
    """Number `index` of a conversation with that order."""

    def __init__(self, order, index):
        self.order, self.index, self.member = order, index, None

    def become(self, policy, last_active, users):
        """What the cache does after every change, but for filing it."""
        key, nth = policy.key(OF_SIXTEEN, self.index), policy.nth_to_leave(self.index)
        self.member = Member(last_active, nth, self.order, key, users, "reclaim", self)
        return self.member


def members(policy, chunks, order, first=0, count=1, last_active=0.0, users=1):
    """Of the conversation with that order: its chunks [first, first + count) can leave, no others."""
    for index in range(16):
        chunks.setdefault((order, index), Chunk(order, index)).member = None
    return [chunks[order, index].become(policy, last_active, users) for index in range(first, first + count)]


def file(index, *arguments, chunks=None):
    for member in members(index.policy, {} if chunks is None else chunks, *arguments):
        index.file(member)


def drain(index, now, most=math.inf):
    """Evicts what cheapest() names; the (value, order) of each eviction."""
    evictions = []
    while len(evictions) < most and (member := index.cheapest(now)):
        evictions.append((worth(index.policy, member, now), member.order))
        member.chunk.member = None
    return evictions


def brute_force(policy, living, now, most):
    """The same by looking at all chunks for every eviction; they leave the list."""
    evictions = []
    while len(evictions) < most and living:
        cheapest = cheapest_by_scanning(policy, living, now)
        evictions.append((worth(policy, cheapest, now), cheapest.order))
        living.remove(cheapest)
    return evictions


def test_cheapest_by_scanning_by_hand():
    """retention: chunks cost 11, 12, 14, 16 s. The value decides, then the order; three users are worth
    three times."""
    policy = POLICIES["retention"](COST, 32)
    a, b = Member(0.0, 0, 3, 0, 1, "", "a"), Member(0.0, 3, 1, 3, 1, "", "b")
    c, d = Member(0.0, 0, 2, 0, 1, "", "c"), Member(0.0, 0, 0, 0, 3, "", "d")
    assert cheapest_by_scanning(policy, [a, b, c, d], 10.0) is c
    assert cheapest_by_scanning(policy, [b, d], 10.0) is b
    assert worth(policy, d, 10.0) == pytest.approx(3 * 1.1)
    assert cheapest_by_scanning(policy, [], 10.0) is None


def test_of_equal_worth_the_longest_idle_leaves_first_then_the_nth_then_the_oldest():
    """The cost is flat, and nobody counts as idle for less than MIN_IDLE."""
    policy = POLICIES["retention"](RecomputeCost({32: 1.0}, rest=0.0), 32)
    later = 10.0 + MIN_IDLE / 2
    a, b, c, d = left = [
        Member(last, nth, order, nth, 1, "", SimpleNamespace()) for last, nth, order in [
            (10.0, 9, 9), (later, 0, 8), (later, 1, 6), (later, 1, 7)]]
    assert len({worth(policy, member, 10.0) for member in left}) == 1
    index = VictimIndex(policy)
    for member in reversed(left):
        member.chunk.member = member
        index.file(member)
    for expected in (a, b, c, d):
        assert cheapest_by_scanning(policy, left[::-1], 10.0) is index.cheapest(10.0) is expected
        left.remove(expected)
        expected.chunk.member = None


ORDERS = range(12)
# inf: its turn waits in the queue. Ties are common, and idle times below MIN_IDLE occur.
whole_seconds = st.one_of(st.integers(0, 20).map(float), st.sampled_from([20.4995, 20.4999, math.inf]))
changes = st.lists(max_size=60, elements=st.one_of(
    st.tuples(st.just("file"), st.sampled_from(ORDERS), st.integers(0, 3), st.integers(1, 6), whole_seconds,
              st.integers(1, 3)),
    st.tuples(st.just("discard"), st.sampled_from(ORDERS)),
    st.tuples(st.just("evict"), st.integers(0, 8)), st.tuples(st.just("tick"))))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=80, deadline=None)
@given(changes)
def test_victim_index_cheapest_is_a_sort_of_all(name, todo):
    policy, now = POLICIES[name](COST, 32), 20.5
    index, chunks, twins = VictimIndex(policy), {}, []
    for kind, *arguments in todo + [("evict", math.inf)]:
        if kind == "tick":
            now += 1
        elif kind == "evict":
            assert drain(index, now, *arguments) == brute_force(policy, twins, now, *arguments)
        else:
            order, state = arguments[0], arguments[1:] or (0, 0)
            changed = members(policy, chunks, order, *state)
            twins[:] = [twin for twin in twins if twin.order != order] + changed
            for member in changed:
                index.file(member)
    assert index.cheapest(now) is None


def test_victim_index_cheapest_by_hand():
    """retention: chunks cost 11, 12, 14, 16 s; a has been idle 10 s, b 5 s, c not at all (its turn waits)."""
    index = VictimIndex(POLICIES["retention"](COST, 32))
    for order, last_active in enumerate([0.0, 5.0, math.inf]):
        file(index, order, 0, 4 if order < 2 else 1, last_active)
    values = [(11 / 10, 0), (12 / 10, 0), (14 / 10, 0), (16 / 10, 0), (11 / 5, 1), (12 / 5, 1), (14 / 5, 1),
              (16 / 5, 1), (11 / MIN_IDLE, 2)]
    assert drain(index, now=10.0) == [(pytest.approx(value), order) for value, order in values]


def test_victim_index_cheapest_takes_turns():
    """Equal idleness: the leading chunks of all go before the second chunk of anyone, ties by order."""
    index = VictimIndex(POLICIES["retention"](COST, 32))
    for order in (2, 0, 1):
        file(index, order, 0, 2)
    assert [order for _, order in drain(index, now=7.0)] == [0, 1, 2, 0, 1, 2]


def test_victim_index_cheapest_depends_on_now():
    """Values cross as time goes by, while their idle times level out."""
    index = VictimIndex(POLICIES["retention"](COST, 32))
    file(index, 0, 3, 1, 0.0)
    file(index, 1, 0, 1, 1.0)
    assert index.cheapest(1.5).order == 0      # 16 / 1.5 < 11 / 0.5
    assert index.cheapest(9.0).order == 1      # 16 / 9 > 11 / 8


def test_victim_index_of_nobody():
    index = VictimIndex(POLICIES["lru"](COST, 32))
    assert index.cheapest(0.0) is None
    chunks = {}
    file(index, 0, chunks=chunks)
    file(index, 0, 0, 0, chunks=chunks)
    assert index.cheapest(0.0) is None


def test_victim_index_does_not_collect_stale_entries():
    index, most = VictimIndex(POLICIES["retention"](COST, 32)), 0
    chunks = [Chunk(order, 0) for order in range(50)]
    for now in range(5000):
        chunk = chunks[now % 50]
        chunk.index = now % 7
        index.file(chunk.become(index.policy, float(now), 1))
        most = max(most, sum(map(len, index.heaps.values())), len(index.tops))
    assert most <= 3 * 50 + 65
    twins = [chunk.member for chunk in chunks]
    assert drain(index, 6000.0) == brute_force(index.policy, twins, 6000.0, math.inf)


@pytest.mark.parametrize("name", POLICIES)
def test_victim_index_cheapest_costs_a_few_values_for_each_victim(name):
    """Thousands of victims at one moment: each needs the value of its key's next member and perhaps of its
    own next key, no more."""
    policy, calls = POLICIES[name](COST, 32), 0
    index, value = VictimIndex(policy), policy.value

    def count(*arguments):
        nonlocal calls
        calls += 1
        return value(*arguments)

    for order in range(300):
        file(index, order, 0, 8, float(order))
    policy.value = count
    now, victims = 5000.0, 0
    while member := index.cheapest(now):
        member.chunk.member = None
        victims += 1
    assert victims >= 300 and calls < 5 * victims, (calls, victims)
