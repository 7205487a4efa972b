"""Lab 3: the life of a chunk in two tiers. Chunks of 4 tokens, 32 slots, 8 places, unless a test says
otherwise. `check_integrity` recomputes all books from scratch: if it fails, a helper was not called."""
import random

import pytest

from eviction import POLICIES
from fakes import COST, World
from grading import SEED, block_of_the_handout, same_lines
from kv_cache import KVCache
from scheduler import SOURCES

points = pytest.mark.points


def make(slots=32, places=8, chunk=4, rows=4, policy="retention"):
    return KVCache(slots, places, chunk, rows, 64, POLICIES[policy](COST, chunk))


def run(cache, name, total, now=0.0):
    """One turn of a conversation, up to `total` tokens: all its KV is on the GPU then, and it is idle."""
    conversation = cache.open(name)
    conversation.tokens.extend(range(len(conversation.tokens), total))
    arriving = cache.admit(conversation, total, now)
    for start in range(0, total, 4):
        chunk = conversation.chunks[start // 4]
        end = min(start + 4, total)
        if chunk.filled < end - start:
            cache.computed(conversation, start + chunk.filled, end)
    finish(cache, arriving)
    cache.release(conversation, now)
    cache.check_integrity()
    return conversation


def finish(cache, tickets):
    for ticket in tickets:
        cache.complete(ticket)
    cache.check_integrity()


def copy(cache, wanted, now=10.0):
    """Copies out ahead of need, to their end."""
    tickets = cache.plan_swap_out(wanted, now)
    finish(cache, tickets)
    return tickets


def states(conversation):
    return [chunk.state for chunk in conversation.chunks]


def filled(conversation):
    return [chunk.filled for chunk in conversation.chunks]


def slots_of(conversation):
    return [slot for chunk in conversation.chunks for slot in chunk.slots]


def runs(tickets):
    return [(ticket.conversation.name, ticket.start, ticket.end) for ticket in tickets]


def check(right, message):
    if not right:
        pytest.fail(message, pytrace=False)


# ---- admit

@points(4, "KVCache.admit")
def test_every_position_gets_a_slot_and_the_table_says_so():
    cache = make()
    a = cache.open("a", range(10))
    assert cache.admit(a, 10, 1.0) == []
    assert [len(chunk.slots) for chunk in a.chunks] == [4, 4, 2] and filled(a) == [0, 0, 0]
    assert len(cache.free_slots) == 22 and a.room == 10
    ((row, start, slots),) = cache.take_table_updates()
    assert (row, start, slots.tolist()) == (a.row, 0, slots_of(a))
    cache.check_integrity()


@points(4, "KVCache.admit")
def test_it_runs_is_pinned_and_does_not_wait():
    cache = make()
    a = cache.open("a", range(10))
    cache.set_waiting(a, True)
    cache.admit(a, 10, 1.0)
    assert a.pinned and not a.waiting and cache.running == {a.order: a} and len(cache.free_rows) == 3
    cache.check_integrity()


@points(4, "KVCache.admit")
def test_chunks_in_the_cpu_tier_come_in():
    """[0:4) absent, [4:8) on the CPU, [8:12) on the GPU, [12:18) new."""
    cache = make()
    a = run(cache, "a", 12)
    cache._drop(a.chunks[0])
    copy(cache, 4)
    cache._give_up_slots(a.chunks[1], 0)
    assert states(a) == [None, "CPU", "GPU"]
    kept = a.chunks[2].slots[:]
    a.tokens.extend(range(6))
    tickets = cache.admit(a, 18, 11.0)
    assert [(t.direction, t.start, t.end, t.slots) for t in tickets] == [("in", 4, 8, a.chunks[1].slots)]
    assert a.chunks[2].slots == kept and filled(a) == [0, 4, 4, 0, 0]
    assert len(cache.free_slots) == 32 - 18
    cache.check_integrity()


@points(4, "KVCache.admit")
def test_its_own_chunks_are_not_reclaimed_for_it():
    cache = make(slots=12)
    a, b = run(cache, "a", 4, now=0.0), run(cache, "b", 8, now=5.0)
    copy(cache, 8)                                              # a[0:4] and b[0:4]; a's is the cheaper
    kept = slots_of(a)
    a.tokens.extend(range(4))
    assert cache.admit(a, 8, 10.0) == [] and slots_of(a)[:4] == kept and states(b) == ["CPU", "GPU"]
    cache.check_integrity()


@points(4, "KVCache.admit")
def test_a_chunk_that_was_given_up_is_needed_again():
    cache = make(slots=8, places=0)
    a = run(cache, "a", 4)
    assert cache.plan_swap_out(4, 10.0) == [] and a.chunks[0].evictable_without_copy
    cache.admit(a, 4, 11.0)
    assert not a.chunks[0].evictable_without_copy
    cache.check_integrity()


# ---- computed

@points(4, "KVCache.computed")
def test_a_span_fills_chunk_after_chunk():
    cache = make()
    a = cache.open("a", range(14))
    cache.admit(a, 14, 0.0)
    for start, end, counts in [(0, 3, [3, 0, 0, 0]), (3, 9, [4, 4, 1, 0]), (9, 14, [4, 4, 4, 2])]:
        cache.computed(a, start, end)
        assert filled(a) == counts
        cache.check_integrity()
    assert a.known == 14


@points(4, "KVCache.computed")
def test_a_hole_in_front_does_not_lower_what_is_known():
    cache = make()
    a = run(cache, "a", 12)
    cache._drop(a.chunks[0])
    cache.admit(a, 12, 5.0)
    cache.computed(a, 0, 4)
    assert a.known == 12 and filled(a) == [4, 4, 4]
    cache.check_integrity()


@points(4, "KVCache.computed")
def test_a_tail_outgrows_its_copy():
    cache = make()
    a = run(cache, "a", 6)
    copy(cache, 8)
    assert states(a) == ["GPU_AND_CPU"] * 2 and len(cache.free_places) == 6
    run(cache, "a", 7)
    assert states(a) == ["GPU_AND_CPU", "GPU"] and len(cache.free_places) == 7


@points(4, "KVCache.computed")
def test_a_tail_that_grows_while_it_is_copied_out_outdates_the_copy():
    cache, a, ticket = leaving_tail()
    run(cache, "a", 7)
    check(ticket.outdated, "the ticket is not outdated: the copy lacks the new token")
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU"]


# ---- plan_swap_out

@points(3, "KVCache.plan_swap_out")
def test_the_cheapest_first_and_no_more_than_wanted():
    cache = make()
    run(cache, "a", 8, now=8.0)
    run(cache, "b", 8, now=0.0)
    tickets = cache.plan_swap_out(9, 10.0)
    assert runs(tickets) == [("b", 0, 4), ("b", 4, 8), ("a", 0, 4)]
    assert [ticket.direction for ticket in tickets] == ["out"] * 3
    assert [ticket.place for ticket in tickets] == [0, 1, 2]
    cache.check_integrity()


@points(3, "KVCache.plan_swap_out")
def test_what_is_on_its_way_counts():
    cache = make()
    run(cache, "a", 12)
    assert runs(cache.plan_swap_out(5, 10.0)) == [("a", 0, 4), ("a", 4, 8)]
    assert cache.plan_swap_out(8, 10.0) == []
    assert runs(cache.plan_swap_out(9, 10.0)) == [("a", 8, 12)]
    assert all(cache.plan_swap_out(wanted, 10.0) == [] for wanted in (0, -5, 99))


def full_cpu_tier(worth_more):
    """One place, taken by old[0:4]; other[0:4] is worth more than that, or less."""
    cache = make(slots=16, places=1)
    old = run(cache, "old", 4, now=90.0)
    copy(cache, 4, now=100.0)
    cache.reclaim(old.chunks[0])
    return cache, old, run(cache, "other", 4, now=99.0 if worth_more else 0.0)


@points(3, "KVCache.plan_swap_out")
def test_a_chunk_worth_more_displaces_the_cheapest():
    cache, old, other = full_cpu_tier(worth_more=True)
    assert runs(copy(cache, 4, now=100.0)) == [("other", 0, 4)]
    assert states(old) == [None] and states(other) == ["GPU_AND_CPU"] and cache.stats["chunks_dropped"] == 1


@points(3, "KVCache.plan_swap_out")
def test_a_chunk_worth_less_needs_no_copy_and_stays_until_its_slots_are_taken():
    cache, old, other = full_cpu_tier(worth_more=False)
    assert copy(cache, 4, now=100.0) == [] and states(old) == ["CPU"]
    assert states(other) == ["GPU"] and other.chunks[0].evictable_without_copy and cache.available == 16


@points(2, "KVCache.plan_swap_out")
def test_the_case_of_the_docstring():
    """Chunks worth 1, 2 and 3, and one worth 1.5 in the tier of one place."""
    cache = make(slots=16, places=1, policy="lru")
    old = run(cache, "old", 4, now=100 - 1 / 1.5)
    copy(cache, 4, now=100.0)
    cache.reclaim(old.chunks[0])
    one, two, three = (run(cache, str(worth), 4, now=100 - 1 / worth) for worth in (1, 2, 3))
    assert runs(cache.plan_swap_out(6, 100.0)) == [("2", 0, 4)]
    assert one.chunks[0].evictable_without_copy and states(old) == [None]
    assert not three.chunks[0].evictable_without_copy and not three.chunks[0].ticket
    cache.check_integrity()


@points(2, "KVCache.plan_swap_out")
def test_the_policy_says_how_many_leave_together():
    cache = make(policy="conversation")
    run(cache, "a", 8, now=8.0)
    run(cache, "b", 14, now=0.0)
    assert runs(cache.plan_swap_out(1, 10.0)) == [("b", 0, 4), ("b", 4, 8), ("b", 8, 12), ("b", 12, 14)]
    cache.check_integrity()


# ---- complete

def leaving_tail():
    """a[0:4] has a copy; its tail a[4:6] is being copied out."""
    cache = make()
    a = run(cache, "a", 6)
    copy(cache, 4)
    (ticket,) = cache.plan_swap_out(6, 10.0)
    assert (ticket.start, ticket.end) == (4, 6)
    return cache, a, ticket


@points(2, "KVCache.complete")
def test_an_unchanged_chunk_gets_its_place():
    cache, a, ticket = leaving_tail()
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU"] * 2 and a.chunks[1].place == ticket.place
    assert not cache.in_flight and a.chunks[1].ticket is None and cache.stats["chunks_swapped_out"] == 2
    cache.check_integrity()


@points(2, "KVCache.complete")
def test_a_tail_that_grew_meanwhile_keeps_no_copy():
    cache, a, ticket = leaving_tail()
    run(cache, "a", 7)
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU"] and len(cache.free_places) == 7
    cache.check_integrity()


@points(2, "KVCache.complete")
def test_a_tail_that_was_cut_and_grew_to_the_same_length_keeps_no_copy():
    """It has two tokens again, but the second one is another."""
    cache, a, ticket = leaving_tail()
    cache.truncate(a, 5, 5)
    run(cache, "a", 6)
    assert a.chunks[1].filled == ticket.filled
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU"]
    cache.check_integrity()


@points(2, "KVCache.complete")
def test_slots_given_up_during_a_copy_are_busy_until_it_ends():
    cache, a, ticket = leaving_tail()
    free = len(cache.free_slots)
    cache.truncate(a, 4, 4)
    assert len(cache.free_slots) == free and not set(ticket.slots) & set(cache.free_slots)
    cache.check_integrity()
    cache.complete(ticket)
    assert len(cache.free_slots) == free + 2 and len(cache.free_places) == 7
    cache.check_integrity()


@points(2, "KVCache.complete")
def test_a_copy_in_keeps_the_copy_in_the_cpu_tier():
    cache = make()
    a = run(cache, "a", 4)
    copy(cache, 4)
    cache.reclaim(a.chunks[0])
    (ticket,) = cache.admit(a, 4, 11.0)
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU"] and cache.stats["chunks_swapped_in"] == 1
    cache.check_integrity()


@points(2, "KVCache.complete")
def test_every_copy_that_has_ended_counts_in_the_statistics():
    """One that is outdated, too: its bytes were moved."""
    cache, a, ticket = leaving_tail()
    run(cache, "a", 7)
    cache.complete(ticket)
    assert dict(cache.stats) == dict(chunks_swapped_in=0, chunks_swapped_out=2, chunks_dropped=0)


# ---- reclaim

@points(3, "KVCache.reclaim")
def test_a_chunk_with_a_copy_lives_on_in_the_cpu_tier():
    cache = make(slots=8)
    a = run(cache, "a", 8)
    slots = slots_of(a)
    copy(cache, 8)
    cache.reclaim(a.chunks[0])
    assert states(a) == ["CPU", "GPU_AND_CPU"] and cache.free_slots == slots[:4]
    assert cache.stats["chunks_dropped"] == 0
    cache.check_integrity()


@points(3, "KVCache.reclaim")
def test_a_chunk_without_a_copy_is_dropped():
    cache = make(slots=8, places=0)
    a = run(cache, "a", 8)
    cache.plan_swap_out(3, 10.0)
    cache.reclaim(a.chunks[0])
    assert states(a) == [None, "GPU"] and len(cache.free_slots) == 4 and cache.stats["chunks_dropped"] == 1
    assert a.known == 8                                         # dropped is not forgotten
    cache.check_integrity()


@points(2, "KVCache.reclaim")
def test_all_that_leave_together():
    cache = make(slots=16, policy="conversation")
    a = run(cache, "a", 14)
    copy(cache, 14)
    run(cache, "b", 4, 10.0)                                    # two slots are free
    assert states(a) == ["CPU"] * 4
    cache.check_integrity()


# ---- all of it

def small_case():
    """The case of the handout, predicted on paper."""
    world = World(slots=16, places=2)
    for name, prompt, reply in [("a", 11, 2), ("b", 11, 2), ("a", 2, 1)]:
        request, traces = world.turn(name, prompt, reply)
        yield from traces
        counts = [f"{source} {request.usage[source]}" for source in SOURCES]
        yield f"{name}: " + ", ".join(counts)


@points(3, "all together")
def test_the_case_of_the_handout():
    handout = block_of_the_handout("3_two_tiers", "text answer")
    same_lines(handout, [line.strip() for line in small_case()])


# How probable it is that a copy ends in a step, and that a turn is cancelled; the longest prompt and
# reply; a World's arguments.
LOADS = {
    "copies_end_soon": (0.6, 0.05, 12, 6, dict(slots=64, places=16)),
    "copies_end_late": (0.1, 0.1, 12, 6, dict(slots=56, places=12)),
    "launched_ahead": (0.2, 0.05, 12, 6, dict(slots=64, places=16, depth=1)),
    "long_prompts": (0.3, 0.05, 20, 6, dict(slots=90, places=24, depth=1, max_batch_tokens=5)),
    "suspensions": (0.4, 0.05, 6, 24, dict(slots=40, places=8, depth=1, reserve=0, rows=8, swap_threshold=0)),
}


@points(5, "all together")
@pytest.mark.parametrize("name", LOADS)
def test_a_random_load(name, compare):
    played = dict(traces=[], turns=[], stats={})
    try:
        play(name, SEED, **played)
    finally:
        compare(played)


def play(name, seed, traces, turns, stats):
    """Ten conversations in small tiers. traces, turns (their sources, by arrival) and stats are
    filled, even if it fails halfway."""
    rng, (landing, cancelled, prompt, reply, arguments) = random.Random(seed), LOADS[name]
    world = World(seed=seed, **{"swap_threshold": 0.5, **arguments},
                  land=lambda tickets: [ticket for ticket in tickets if rng.random() < landing])
    requests, world.worker.traces = [], traces
    try:
        for _ in range(120):
            if rng.random() < 0.3:
                requests.append(world.submit(rng.choice("abcdefghij"), rng.randint(1, prompt),
                                             rng.randint(1, reply)))
            unfinished = [request for request in requests if not request.finish_reason]
            if unfinished and rng.random() < cancelled:
                world.scheduler.cancel(rng.choice(unfinished), world.now)
            world.step()
    finally:
        turns += [request.usage for request in requests if request.usage]
        stats.update(world.cache.stats)


def reference(seed):
    found = {}
    for name in LOADS:
        found[f"test_a_random_load[{name}]"] = played = dict(traces=[], turns=[], stats={})
        play(name, seed, **played)
    return found
