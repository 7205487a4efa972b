"""In which order chunks leave under each policy; and the rivals of experiments/: their values, by hand."""
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from eviction import POLICIES, LeastRecentlyUsed, RecomputeCost, RetentionValue
from experiments.policies import (ExpectedCost, LiteralIdleness, LiteralLRU, ReuseByCategory,
                                  TailOptimized)
from experiments.run import watch_recomputation
import fakes
from fakes import World, answer
from kv_cache import KVCache
from sharing import SharingCache
from test_kv_cache import copy, grow_to, idle as idle_in_cache

COST = RecomputeCost({32: 0.03, 64: 0.05}, rest=0.01)       # chunks of 32: 40 ms, 60 ms, 80 ms, ...
RISING, FLAT = fakes.COST, RecomputeCost({4: 1.0}, rest=0.0)


def idle(turns, last_active=0.0):
    return SimpleNamespace(turns=turns, last_active=last_active, waiting=False)


def learnt(policy):
    """1 of 4 conversations returns after the first turn, 3 of 4 after the second, always after 60 s."""
    for n in range(4000):
        for turns, returns in ((1, n % 4 == 0), (2, n % 4)):
            policy.ended(idle(turns - 1))
            if returns:
                policy.returned(idle(turns), 60.0)
    policy.returned(idle(0), 1e6)                           # a first turn is no return
    return policy


def test_chunks_that_can_be_recomputed_in_time_leave_first():
    patient = type("Patient", (TailOptimized,), dict(PROMPT=0))
    assert patient(COST, 32).free == 3                      # 40 + 60 + 80 ms are within 200 ms
    policy = type("Prompts", (TailOptimized,), dict(PROMPT=40))(COST, 32)
    assert policy.free == 2                                 # 40 + 60 ms, and 50 ms for a prompt of 40 tokens
    assert [policy.key(None, index) for index in range(5)] == [0, 0, 1, 1, 1]
    assert policy.value(0, 1.0) < policy.value(1, 1e6)
    assert policy.value(0, 2.0) < policy.value(0, 1.0)


def test_a_category_returns_with_its_own_chance():
    policy = learnt(ReuseByCategory(COST, 32))
    once, twice = (policy.chance_and_mean(turns, 60.0)[0] for turns in (1, 2))
    assert once == pytest.approx(1 / (1 + 3 * math.e), rel=0.05)        # odds of 1 / e : 3
    assert twice == pytest.approx(3 / (3 + math.e), rel=0.05)           # 3 / e : 1
    assert policy.value(1, 60.0) == pytest.approx(once * (1 - math.exp(-5)), rel=0.05)


def test_the_papers_letter_does_not_know_who_waits():
    waits = SimpleNamespace(last_active=5.0, waiting=True)
    for kind, known in ((LiteralIdleness, RetentionValue), (LiteralLRU, LeastRecentlyUsed)):
        policy = kind(COST, 32)
        assert policy.idle(9.0, policy.last_needed(waits)) == 4.0
        assert policy.value(3, 4.0) == known(COST, 32).value(3, 4.0)


def test_expected_cost_is_the_rate_of_return_times_the_cost():
    policy = learnt(ExpectedCost(COST, 32))
    key = policy.key(idle(2), 1)
    assert policy.value(key, 60.0) == pytest.approx(3 / (3 + math.e) / 60 * 0.060, rel=0.05)
    assert policy.value(policy.key(idle(1), 1), 60.0) < policy.value(key, 60.0)


@settings(deadline=None)                    # a busy machine takes its time
@given(st.sampled_from([ReuseByCategory, ExpectedCost]), st.integers(1, 8), st.integers(0, 50),
       st.floats(1e-3, 1e5), st.floats(1e-3, 1e5))
def test_no_value_rises_with_idle_time(kind, turns, index, one, other):
    policy = learnt_once[kind]
    key = policy.key(idle(turns), index)
    assert policy.value(key, max(one, other)) <= policy.value(key, min(one, other))


learnt_once = {kind: learnt(kind(COST, 32)) for kind in (ReuseByCategory, ExpectedCost)}


# ---- in which order chunks leave

# A new policy of eviction.POLICIES needs two entries here. a and b have three chunks each, and have been idle
# for as long. Shared: b has a's first two chunks, and one of its own. "a2 a1, b2" means: a2 and a1 together.
ORDERS = {"plain": {"retention": "a0 b0 a1 b1 a2 b2", "lru": "a0 b0 a1 b1 a2 b2",
                    "trailing": "a2 b2 a1 b1 a0 b0", "trailing-half": "a2 a1, b2 b1, a0, b0",
                    "conversation": "a0 a1 a2, b0 b1 b2"},
          "shared": {"retention": "a2 b2 a0 a1", "lru": "a2 b2 a0 a1", "trailing": "a2 b2 a1 a0",
                     "trailing-half": "a2 b2 a1 a0", "conversation": "a2 b2 a0 a1"}}
# What leaves together leaves the CPU tier one by one.
ONE_BY_ONE = {"trailing-half": "a2 b2 a1 b1 a0 b0", "conversation": "a0 b0 a1 b1 a2 b2"}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_chat_page_has_a_sentence_for_each_policy(policy):
    page = (Path(__file__).parent.parent / "serving/chat.html").read_text()
    rules = page[page.index("const RULES = {"):].partition("};")[0]
    assert re.search(rf'^  "?{policy}"?: ', rules, re.M)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("cost", [RISING, FLAT], ids=["rising", "flat"])
def test_the_order_in_which_chunks_leave(policy, how, cost):
    """The same for each move. What shared chunks cost would mix with their users, so it is flat there."""
    assert policy in ORDERS[how], f"a new policy: add to ORDERS in which order chunks leave under {policy!r}"
    if how == "shared":
        cost = FLAT
    cache = SharingCache(32, 8, 4, 4, 64, POLICIES[policy](cost, 4))
    a = idle_in_cache(cache, "a", 12)
    if how == "shared":
        grow_to(cache, cache.fork(a, "b", range(9)), 12)
    else:
        idle_in_cache(cache, "b", 12)
    names = {chunk: f"{chunk.users[0].name}{chunk.index}"
             for one in cache.conversations.values() for chunk in one.chunks}
    left = {"swap_out": [], "reclaim": [], "drop": []}
    while tickets := copy(cache, 1):
        left["swap_out"].append(" ".join(names[ticket.chunk] for ticket in tickets))
    while chunks := cache._victims("reclaim", 10.0):
        left["reclaim"].append(" ".join(names[chunk] for chunk in chunks))
        for chunk in chunks:
            cache.reclaim(chunk)
        cache.check_integrity()
    while chunk := cache._cheapest("drop", 10.0):
        left["drop"].append(names[chunk])
        cache._drop(chunk)
        cache.check_integrity()
    order = ORDERS[how][policy]
    together = order.split(", " if "," in order else " ")
    assert left["swap_out"] == left["reclaim"] == together
    assert left["drop"] == (ONE_BY_ONE.get(policy, order) if how == "plain" else order).split()


class FirstChunkLast(RetentionValue):
    """The first chunk of a conversation is worth as much as its last one, and leaves after it."""

    def key(self, conversation, index):
        return index or len(conversation.chunks) - 1

    def nth_to_leave(self, index):
        return index or math.inf


class LruFirstChunkLast(LeastRecentlyUsed):
    """All chunks of a conversation are worth the same, so the order alone decides."""
    nth_to_leave = FirstChunkLast.nth_to_leave


@pytest.mark.parametrize("kind, order", [
    (RetentionValue, [0, 1, 2]), (FirstChunkLast, [1, 2, 0]), (LruFirstChunkLast, [1, 2, 0])])
def test_a_policy_decides_which_chunk_of_a_conversation_leaves_last(kind, order):
    cache = KVCache(32, 8, 4, 4, 64, kind(COST, 4))
    a = idle_in_cache(cache, "a", 12)
    assert [ticket.chunk.index for ticket in cache.plan_swap_out(12, 10.0)] == order
    for ticket in list(cache.in_flight):
        cache.complete(ticket)
    for index in order:
        chunk = cache.next_to_leave(10.0)
        assert chunk is a.chunks[index]
        cache.reclaim(chunk)
        cache.check_integrity()


def test_a_policy_of_ones_own_gives_the_same_answers(monkeypatch):
    """FakeWorker checks what each span reads; many chunks leave and return."""
    monkeypatch.setitem(POLICIES, "first chunk last", FirstChunkLast)
    rng, world = random.Random(4), World(slots=48, places=6, policy="first chunk last")
    for _ in range(80):
        name = rng.choice("abcdef")
        request, _ = world.turn(name, rng.randint(1, 9), rng.randint(1, 5))
        tokens = request.conversation.tokens
        begin = len(tokens) - len(request.generated)
        assert request.generated == [answer(tokens[:length]) for length in range(begin, len(tokens))]
        if len(tokens) > 24:
            world.cache.forget(request.conversation)
    assert world.cache.stats["chunks_dropped"] > 20 and world.scheduler.stats["prompt_tokens_cpu"] > 20


def test_seconds_of_recomputation():
    """Of 70 tokens 64 were seen before; positions 16 to 48 are half of a chunk of 40 ms, half of 60 ms."""
    request = SimpleNamespace(conversation=SimpleNamespace(name="c"), prefilling=True,
                              usage=dict(gpu=0, cpu=32, recomputed=32, new=6))
    engine = SimpleNamespace(cache=SimpleNamespace(policy=ReuseByCategory(COST, 32)), watchers=[],
                             scheduler=SimpleNamespace(limit=100))
    seconds = watch_recomputation(engine)
    engine.watchers[0](SimpleNamespace(spans=[(request, 16, 48), (request, 64, 70)]))
    assert seconds == {"c": pytest.approx(0.5 * 0.040 + 0.5 * 0.060)}
