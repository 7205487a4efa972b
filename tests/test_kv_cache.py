"""Who is where, without a scheduler: the life of a chunk, pinning, copies in flight that are overtaken by
events."""
from array import array

import pytest

from eviction import POLICIES, RecomputeCost
from fakes import COST
from kv_cache import KVCache


def make(slots=32, places=8, chunk=4, rows=4, policy="retention", max_context=64):
    return KVCache(slots, places, chunk, rows, max_context, POLICIES[policy](COST, chunk))


def grow_to(cache, conversation, total, now=0.0):
    """Admits an idle conversation, computes what is missing at its end, releases it."""
    conversation.tokens.extend(range(len(conversation.tokens), total))
    landed = cache.admit(conversation, total, now)
    begin = conversation.known if conversation.known < total else total
    cache.computed(conversation, begin, total)
    for ticket in landed:
        cache.complete(ticket)
    cache.release(conversation, now)
    cache.check_integrity()


def idle(cache, name, total, now=0.0):
    """A conversation of `total` tokens, idle since `now`, all its KV on the GPU."""
    conversation = cache.open(name)
    grow_to(cache, conversation, total, now)
    return conversation


def copy(cache, wanted, now=10.0):
    """Copies out ahead of time, to the end."""
    tickets = cache.plan_swap_out(wanted, now)
    finish(cache, tickets)
    return tickets


def finish(cache, tickets):
    for ticket in tickets:
        cache.complete(ticket)
    cache.check_integrity()


def move_to_cpu(cache, conversation, chunks, now=10.0):
    """The first chunks of the only conversation that could give any."""
    copy(cache, chunks * cache.chunk_size, now)
    for _ in range(chunks):
        reclaim(cache, conversation)
    assert states(conversation)[:chunks] == ["CPU"] * chunks


def reclaim(cache, conversation):
    """Takes the slots of its cheapest reclaimable chunks: as many as leave together."""
    others = [one for one in cache.conversations.values() if one is not conversation and not one.pinned]
    for other in others:
        other.pinned = True                                     # nobody else's
    for chunk in cache._victims("reclaim", 10.0):
        cache.reclaim(chunk)
    for other in others:
        other.pinned = False
        cache._note_change(other)


def states(conversation):
    return [chunk.state for chunk in conversation.chunks]


def runs(tickets):
    return [(ticket.conversation.name, ticket.start, ticket.end) for ticket in tickets]


def slots_of(conversation):
    return [slot for chunk in conversation.chunks for slot in chunk.slots]


# ---- the life of a chunk

def test_life_of_a_chunk():
    cache = make(slots=8, places=1)
    a = idle(cache, "a", 4)
    assert states(a) == ["GPU"] and (len(cache.free_slots), cache.available) == (4, 4)
    tickets = cache.plan_swap_out(1, 10.0)
    assert runs(tickets) == [("a", 0, 4)] and tickets[0].slots == a.chunks[0].slots and cache.available == 4
    finish(cache, tickets)
    assert states(a) == ["GPU_AND_CPU"] and (len(cache.free_slots), cache.available) == (4, 8)
    reclaim(cache, a)
    assert states(a) == ["CPU"] and (len(cache.free_slots), cache.available) == (8, 8)
    assert cache.free_places == []
    b = idle(cache, "b", 4, now=9.0)
    copy(cache, 1)                                              # worth more: takes the only place
    assert states(a) == [None] and states(b) == ["GPU_AND_CPU"]
    assert cache.stats == dict(chunks_swapped_in=0, chunks_swapped_out=2, chunks_dropped=1)
    assert a.known == 4 and a.cached() == (0, 0)               # dropped is not forgotten


def test_slots_are_handed_out_singly():
    cache = make(slots=16)
    a, b = idle(cache, "a", 5), idle(cache, "b", 6)
    assert (len(slots_of(a)), len(slots_of(b)), len(cache.free_slots)) == (5, 6, 5)
    grow_to(cache, a, 10)
    assert len(slots_of(a)) == 10 and len(cache.free_slots) == 0


def test_sources_counts_a_chunk_in_both_tiers_as_gpu():
    cache = make()
    a = idle(cache, "a", 14)
    move_to_cpu(cache, a, 1)
    copy(cache, 4)
    assert states(a) == ["CPU", "GPU_AND_CPU", "GPU", "GPU"] and a.cached() == (10, 4)


def test_open_a_name_twice_and_one_offs():
    cache = make()
    a, one, other = cache.open("a", [5, 6, 7]), cache.open(None), cache.open(None)
    assert cache.open("a") is a and a.tokens == array("i", [5, 6, 7])
    assert a.known == 2                                         # the last token was sampled, never fed
    assert one.one_off and not a.one_off and one is not other and one.name != other.name


# ---- KVCache.admit and its end

def test_admit_takes_every_slot_at_once():
    """[0:4) absent, [4:8) on the CPU, [8:12) on the GPU, [12:18) new."""
    cache = make()
    a = idle(cache, "a", 12)
    cache.drop_all(a)
    cache.admit(a, 12, 0.0)
    cache.computed(a, 4, 12)
    cache.release(a, 0.0)
    copy(cache, 4)
    reclaim(cache, a)
    assert states(a) == [None, "CPU", "GPU"]
    cache.take_table_updates()
    kept = a.chunks[2].slots[:]
    assert cache.shortfall(a, 18, 0) == 18 - 32
    tickets = cache.admit(a, 18, 11.0)
    assert [(t.direction, t.start, t.end, t.slots) for t in tickets] == [("in", 4, 8, a.chunks[1].slots)]
    assert [len(chunk.slots) for chunk in a.chunks] == [4, 4, 4, 4, 2] and a.chunks[2].slots == kept
    assert [chunk.filled for chunk in a.chunks] == [0, 4, 4, 0, 0] and len(cache.free_slots) == 14
    ((row, start, slots),) = cache.take_table_updates()
    assert (row, start, slots.tolist()) == (a.row, 0, slots_of(a)) and cache.take_table_updates() == []
    cache.check_integrity()


def test_admit_never_reclaims_its_own_chunks():
    cache = make(slots=12)
    a, b = idle(cache, "a", 4, now=0.0), idle(cache, "b", 8, now=5.0)
    copy(cache, 8)                                              # a[0:4] b[0:4]: a's is the cheaper
    assert states(a) == ["GPU_AND_CPU"] and states(b) == ["GPU_AND_CPU", "GPU"]
    assert cache.available == 8 and cache.shortfall(a, 8, 0) == 0
    kept = slots_of(a)
    assert cache.admit(a, 8, 10.0) == []                        # a chunk in both tiers costs nothing
    assert slots_of(a)[:4] == kept and states(b) == ["CPU", "GPU"]
    cache.check_integrity()


def test_admit_clears_evictable_without_copy():
    cache = make(slots=8, places=0)
    a = idle(cache, "a", 4)
    assert cache.plan_swap_out(4, 10.0) == [] and cache.available == 8
    grow_to(cache, a, 6, 11.0)
    assert states(a) == ["GPU", "GPU"] and cache.available == 2 and not a.chunks[0].evictable_without_copy


def test_shortfall_does_not_count_what_the_conversation_itself_could_give():
    cache = make(slots=12)
    a = idle(cache, "a", 8)
    copy(cache, 8)
    assert cache.available == 12
    assert [cache.shortfall(a, total, 0) for total in (8, 12, 13, 16)] == [-4, 0, 1, 4]
    assert cache.shortfall(a, 12, 3) == 3                       # with a reserve
    b = cache.open("b")
    assert cache.shortfall(b, 12, 0) == 0 and cache.shortfall(b, 12, 3) == 3


def test_release_gives_up_what_got_no_kv():
    cache = make(slots=16)
    a = cache.open("a", range(14))
    cache.admit(a, 14, 0.0)
    cache.computed(a, 0, 6)
    cache.release(a, 1.0)
    assert [chunk.filled for chunk in a.chunks] == [4, 2, 0, 0] and states(a)[2:] == [None, None]
    assert len(slots_of(a)) == 6 and len(cache.free_slots) == 10 and len(cache.free_rows) == 4
    assert a.last_active == 1.0
    cache.check_integrity()


def test_grow_takes_a_chunk_at_a_time_while_there_is_plenty():
    cache = make(slots=16)
    a, b = (cache.open(name, range(3)) for name in "ab")
    for conversation in (a, b):
        cache.admit(conversation, 3, 1.0)
    for total, held in [(4, 4), (5, 8), (8, 8)]:
        a.tokens.extend([0] * (total - len(a.tokens)))
        assert cache.grow(a, 2.0) and len(slots_of(a)) == a.room == held
        cache.check_integrity()
    a.tokens.append(0)
    # b could want four of the five
    assert cache.available == 5 and cache.grow(a, 2.0) and len(slots_of(a)) == 9
    cache.take_table_updates()
    cache.release(a, 3.0)
    assert len(cache.free_slots) == 13


def test_grow_takes_a_slot_at_a_time_when_slots_are_rare_and_says_when_there_is_none():
    cache = make(slots=10)
    b = idle(cache, "b", 4)
    a = cache.open("a", range(3))
    cache.admit(a, 3, 1.0)
    cache.computed(a, 0, 3)
    cache.take_table_updates()
    for total in (4, 5, 6):                                     # the last slots; 4 -> 5 begins a chunk
        a.tokens.append(0)
        assert cache.grow(a, 2.0) and cache.grow(a, 2.0) and len(slots_of(a)) == total
        (*_, update) = cache.take_table_updates()
        assert update[1] + len(update[2]) == total and update[2][-1] == slots_of(a)[-1]
        cache.computed(a, total - 1, total)
        cache.check_integrity()
    a.tokens.append(0)
    assert not cache.grow(a, 2.0) and len(slots_of(a)) == 6
    copy(cache, 1)
    assert cache.grow(a, 2.0) and states(b) == ["CPU"] and len(cache.free_slots) == 2


# ---- KVCache.computed

def test_computed_outgrows_the_copy_of_a_tail():
    cache = make()
    a = idle(cache, "a", 6)
    copy(cache, 8)
    assert states(a) == ["GPU_AND_CPU", "GPU_AND_CPU"] and len(cache.free_places) == 6
    grow_to(cache, a, 7)
    assert states(a) == ["GPU_AND_CPU", "GPU"] and a.chunks[1].filled == 3 and a.known == 7
    assert len(cache.free_places) == 7


def test_computed_books_each_chunk_of_a_span():
    cache = make()
    a = cache.open("a", range(14))
    cache.admit(a, 14, 0.0)
    for start, end, filled in [(0, 3, [3, 0, 0, 0]), (3, 9, [4, 4, 1, 0]), (9, 14, [4, 4, 4, 2])]:
        cache.computed(a, start, end)
        assert [chunk.filled for chunk in a.chunks] == filled
        cache.check_integrity()
    assert a.known == 14


def test_computed_refuses_to_leave_a_gap():
    cache = make()
    a = cache.open("a", range(8))
    cache.admit(a, 8, 0.0)
    with pytest.raises(AssertionError):
        cache.computed(a, 1, 4)


# ---- KVCache.plan_swap_out, reclaim

def test_plan_swap_out_is_cheapest_first_and_no_more_than_wanted():
    cache = make()
    idle(cache, "a", 8, now=8.0)
    idle(cache, "b", 8, now=0.0)
    # retention: b's leading chunk, its second, then a's
    tickets = cache.plan_swap_out(9, 10.0)
    assert runs(tickets) == [("b", 0, 4), ("b", 4, 8), ("a", 0, 4)]
    assert [ticket.place for ticket in tickets] == [0, 1, 2]    # neighbours: one copy
    assert cache.plan_swap_out(9, 10.0) == []                   # what is on its way counts
    assert runs(cache.plan_swap_out(13, 10.0)) == [("a", 4, 8)]
    assert all(cache.plan_swap_out(wanted, 10.0) == [] for wanted in (0, -5, 99))
    cache.check_integrity()


def test_plan_swap_out_takes_the_tail_as_it_is():
    cache = make()
    a = idle(cache, "a", 6)
    (first, tail) = cache.plan_swap_out(5, 10.0)
    assert (tail.start, tail.end, tail.filled, tail.slots) == (4, 6, 2, a.chunks[1].slots)


@pytest.mark.parametrize("policy, copied", [
    ("retention", [("b", 0, 4)]), ("lru", [("b", 0, 4)]), ("trailing", [("b", 12, 14)]),
    ("trailing-half", [("b", 12, 14), ("b", 8, 12)]),
    ("conversation", [("b", 0, 4), ("b", 4, 8), ("b", 8, 12), ("b", 12, 14)])])
def test_the_unit_and_the_end_are_the_policys(policy, copied):
    cache = make(policy=policy)
    idle(cache, "a", 8, now=8.0)
    b = idle(cache, "b", 14, now=0.0)
    assert runs(cache.plan_swap_out(1, 10.0)) == copied
    finish(cache, list(cache.in_flight))
    reclaim(cache, b)                                           # a unit of what is reclaimable now
    leading = policy in ("retention", "lru", "conversation")
    gone = states(b).count("CPU")
    assert gone == {"trailing-half": 1, "conversation": 4}.get(policy, 1)
    assert states(b)[:gone] == ["CPU"] * gone if leading else states(b)[-gone:] == ["CPU"] * gone
    cache.check_integrity()


@pytest.mark.parametrize("count, leave", [(1, 1), (2, 1), (3, 2), (4, 2), (7, 4)])
def test_trailing_half_rounds_up(count, leave):
    cache = make(policy="trailing-half")
    idle(cache, "a", 4 * count)
    assert len(cache.plan_swap_out(1, 10.0)) == leave


def test_reclaim_frees_slots_and_keeps_the_copy():
    cache = make(slots=8)
    a = idle(cache, "a", 8)
    slots = slots_of(a)
    copy(cache, 8)
    reclaim(cache, a)
    assert states(a) == ["CPU", "GPU_AND_CPU"] and cache.free_slots == slots[:4] and cache.available == 8
    assert cache.stats["chunks_dropped"] == 0
    cache.check_integrity()


def test_reclaim_drops_a_chunk_that_has_no_copy():
    cache = make(slots=8, places=0)
    a = idle(cache, "a", 8)
    assert cache.plan_swap_out(3, 10.0) == []
    # valid as long as nobody needs it
    assert states(a) == ["GPU", "GPU"] and cache.available == 4 and cache.stats["chunks_dropped"] == 0
    reclaim(cache, a)
    assert states(a) == [None, "GPU"] and len(cache.free_slots) == 4 and cache.stats["chunks_dropped"] == 1
    cache.check_integrity()


def test_the_next_to_leave_is_the_one_whose_slots_are_taken_next():
    cache = make(slots=32, places=8)
    assert cache.next_to_leave(10.0) is None
    b, a = idle(cache, "b", 12, now=0.0), idle(cache, "a", 12, now=5.0)
    assert cache.next_to_leave(10.0) is b.chunks[0]             # nothing is copied yet: it is copied first
    copy(cache, 24)
    for total in range(4, 28, 4):
        leaving = cache.next_to_leave(10.0)
        before = [chunk for chunk in (*a.chunks, *b.chunks) if chunk.slots]
        grow_to(cache, cache.open("new"), total + 8, now=10.0)
        gone = [chunk for chunk in before if not chunk.slots]
        assert gone == [leaving]
    assert states(a) == states(b) == ["CPU"] * 3 and cache.next_to_leave(11.0) is cache.open("new").chunks[0]


# ---- a CPU tier that is full, of one chunk, or absent

def full_cpu_tier(worth_more):
    """One place, taken by an old[0:4] of idle time 10 s; `other` has one chunk worth more, or less, than
    that."""
    cache = make(slots=16, places=1)
    old = idle(cache, "old", 4, now=90.0)
    move_to_cpu(cache, old, 1, now=100.0)
    return cache, old, idle(cache, "other", 4, now=99.0 if worth_more else 0.0)


def test_a_chunk_worth_less_does_not_displace_and_is_evictable_without_copy():
    cache, old, other = full_cpu_tier(worth_more=False)
    assert copy(cache, 4, now=100.0) == [] and states(old) == ["CPU"]
    assert states(other) == ["GPU"] and cache.available == 16                 # to be had, but still there
    assert cache.stats["chunks_dropped"] == 0
    grow_to(cache, cache.open("new"), 14, now=100.0)
    assert states(other) == [None] and states(old) == ["CPU"] and cache.stats["chunks_dropped"] == 1


def test_a_chunk_worth_more_displaces_the_cheapest():
    cache, old, other = full_cpu_tier(worth_more=True)
    assert runs(copy(cache, 4, now=100.0)) == [("other", 0, 4)]
    assert states(old) == [None] and states(other) == ["GPU_AND_CPU"] and cache.stats["chunks_dropped"] == 1


@pytest.mark.parametrize("policy, first, second", [("retention", 0, 1), ("lru", 0, 1), ("trailing", 1, 0)])
def test_of_equal_worth_the_chunk_that_leaves_first_gives_its_place_to_the_other(policy, first, second):
    """The cost is flat. The one that leaves first has the only place of the CPU tier."""
    cache = KVCache(16, 1, 4, 4, 64, POLICIES[policy](RecomputeCost({4: 1.0}, rest=0.0), 4))
    a = idle(cache, "a", 8)
    copy(cache, 4)
    reclaim(cache, a)
    assert states(a)[first] == "CPU"
    copy(cache, 4)
    assert states(a)[first] is None and states(a)[second] == "GPU_AND_CPU"


def test_what_is_copied_of_a_running_conversation_makes_no_room():
    cache = make(slots=16)
    a = idle(cache, "a", 4, now=0.0)
    idle(cache, "b", 4, now=5.0)
    assert runs(cache.plan_swap_out(4, 10.0)) == [("a", 0, 4)] and cache.plan_swap_out(4, 10.0) == []
    cache.admit(a, 4, 11.0)
    assert runs(cache.plan_swap_out(4, 11.0)) == [("b", 0, 4)]


def test_the_place_of_an_idle_chunk_in_both_tiers_is_never_taken():
    cache = make(slots=16, places=1)
    a, b = idle(cache, "a", 4, now=0.0), idle(cache, "b", 4, now=99.0)
    copy(cache, 4, now=100.0)
    assert states(a) == ["GPU_AND_CPU"]
    assert cache.plan_swap_out(4, 100.0) == [] and states(a) == ["GPU_AND_CPU"]
    assert b.chunks[0].evictable_without_copy
    cache.check_integrity()


def test_the_place_of_a_running_conversation_is_taken():
    cache = make(slots=16, places=1)
    a, b = idle(cache, "a", 4, now=0.0), idle(cache, "b", 4, now=99.0)
    copy(cache, 4, now=100.0)
    cache.admit(a, 5, 100.0)
    (ticket,) = cache.plan_swap_out(4, 100.0)
    assert (ticket.conversation, ticket.place) == (b, 0) and states(a) == ["GPU", "GPU"]
    assert a.chunks[0].filled == 4                              # its GPU copy is what counts
    cache.check_integrity()


def test_without_a_cpu_tier_everything_is_evictable_without_copy_leading_end_first():
    cache = make(slots=16, places=0)
    a = idle(cache, "a", 14)
    assert cache.plan_swap_out(6, 10.0) == []
    assert [chunk.evictable_without_copy for chunk in a.chunks] == [True, True, False, False]
    grow_to(cache, cache.open("b"), 7)
    assert states(a) == [None, None, "GPU", "GPU"]


# ---- waiting

def test_a_waiting_conversation_is_no_victim_while_an_idle_one_is_there():
    cache = make()
    a = idle(cache, "a", 8, now=0.0)
    idle(cache, "b", 8, now=9.0)
    cache.set_waiting(a, True)                                  # though its last answer is the older one
    assert runs(cache.plan_swap_out(10, 10.0)) == [("b", 0, 4), ("b", 4, 8), ("a", 0, 4)]
    cache.set_waiting(a, False)
    cache.check_integrity()


def test_plan_swap_out_for_never_takes_the_heads_own_chunks():
    cache = make(slots=16)
    a = idle(cache, "a", 4, now=0.0)
    idle(cache, "b", 8, now=9.0)
    assert cache.plan_swap_out_for(a, 8, 0, 10.0) == []         # 4 more are free
    assert runs(cache.plan_swap_out_for(a, 10, 0, 10.0)) == [("b", 0, 4)]
    assert runs(cache.plan_swap_out_for(a, 10, 3, 10.0)) == [("b", 4, 8)]
    assert not a.pinned and states(a) == ["GPU"]
    cache.check_integrity()


def test_cold_are_the_idle_that_have_nothing_cached():
    cache = make(slots=8, places=0)
    a, b = idle(cache, "a", 4), cache.open("b")
    assert cache.cold_conversations() == [b]
    cache.set_waiting(b, True)
    assert not cache.cold_conversations()
    cache.plan_swap_out(4, 10.0)
    reclaim(cache, a)
    assert cache.cold_conversations() == [a]
    cache.forget(a)
    assert not cache.cold_conversations()


# ---- KVCache.complete: copies in flight that are overtaken by events

def leaving_tail():
    """a[0:4] is copied; its tail a[4:6] is being copied out."""
    cache = make()
    a = idle(cache, "a", 6)
    copy(cache, 4)
    (ticket,) = cache.plan_swap_out(6, 10.0)
    assert (ticket.start, ticket.end) == (4, 6)
    return cache, a, ticket


def test_complete_gives_an_unchanged_chunk_its_place():
    cache, a, ticket = leaving_tail()
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU_AND_CPU"] and a.chunks[1].place == ticket.place
    cache.check_integrity()


def test_complete_of_a_tail_that_grew_meanwhile_does_not_count():
    cache, a, ticket = leaving_tail()
    grow_to(cache, a, 7)
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU"] and len(cache.free_places) == 7
    cache.check_integrity()


def test_complete_of_a_tail_that_was_truncated_and_regrown_to_the_same_length_does_not_count():
    """ABA: filled is 2 again, but the second token is another."""
    cache, a, ticket = leaving_tail()
    cache.truncate(a, 5, 5)
    cache.check_integrity()
    grow_to(cache, a, 6)
    assert a.chunks[1].filled == ticket.filled and a.chunks[1].slots != ticket.slots
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU"]
    cache.check_integrity()


def test_complete_of_a_tail_that_was_truncated_meanwhile_keeps_the_copy_of_what_is_left():
    cache = make()
    a = idle(cache, "a", 6)
    tickets = cache.plan_swap_out(99, 10.0)
    cache.truncate(a, 6, 5)
    finish(cache, tickets)
    assert states(a) == ["GPU_AND_CPU"] * 2 and a.cached() == (5, 0) and len(cache.free_slots) == 32 - 5


def test_plan_swap_out_counts_slots_that_copies_in_flight_give_up():
    """a was forgotten while it was copied out: its slots are free when the copies end."""
    cache = make(slots=16)
    a = idle(cache, "a", 8)
    tickets = cache.plan_swap_out(8, 10.0)
    cache.forget(a)
    idle(cache, "b", 8)
    assert not cache.plan_swap_out(8, 11.0)
    finish(cache, tickets)
    assert cache.available == 8


def test_slots_given_up_during_a_copy_out_are_busy_until_it_ends():
    cache, a, ticket = leaving_tail()
    slots, free = ticket.slots[:], len(cache.free_slots)
    cache.truncate(a, 4, 4)
    assert states(a) == ["GPU_AND_CPU"] and len(cache.free_slots) == free
    assert not set(slots) & set(cache.free_slots)
    cache.check_integrity()
    cache.complete(ticket)
    assert len(cache.free_slots) == free + 2 and len(cache.free_places) == 7
    cache.check_integrity()


def test_a_chunk_that_is_being_copied_out_is_not_reclaimed():
    cache = make(slots=8)
    idle(cache, "a", 4)
    (ticket,) = cache.plan_swap_out(4, 10.0)
    assert cache.available == 4 and cache.shortfall(cache.open("b"), 5, 0) == 1
    cache.complete(ticket)
    assert cache.available == 8


@pytest.mark.parametrize("direction", ["out", "in"])
def test_forget_during_a_copy(direction):
    cache = make(slots=8, places=2)
    a = idle(cache, "a", 4)
    (ticket,) = cache.plan_swap_out(4, 10.0)
    if direction == "in":
        cache.complete(ticket)
        reclaim(cache, a)
        (ticket,) = cache.admit(a, 4, 11.0)
        cache.release(a, 11.0)                                  # cancelled while its KV arrives
    cache.forget(a)
    cache.check_integrity()
    assert (len(cache.free_slots), len(cache.free_places)) == (4, 1) and "a" not in cache.conversations
    namesake = idle(cache, "a", 4)                              # the same name is another conversation
    cache.complete(ticket)
    assert (len(cache.free_slots), len(cache.free_places)) == (4, 2) and states(namesake) == ["GPU"]
    cache.check_integrity()


def test_release_and_truncate_during_a_copy_in():
    cache = make(slots=16)
    a = idle(cache, "a", 6)
    move_to_cpu(cache, a, 2)
    first, tail = cache.admit(a, 9, 11.0)
    cache.release(a, 11.0)
    cache.truncate(a, 5, 5)                                     # one token of the arriving tail survives
    cache.check_integrity()
    # what else the tail had is busy until the copy ends
    assert len(cache.free_slots) == 8
    finish(cache, [tail, first])
    assert states(a) == ["GPU_AND_CPU", "GPU_AND_CPU"] and a.cached() == (5, 0)
    assert len(cache.free_slots) == 11


def test_a_tail_that_grows_while_it_arrives():
    cache = make()
    a = idle(cache, "a", 6)
    move_to_cpu(cache, a, 2)
    a.tokens.extend([6, 7, 8])
    first, tail = cache.admit(a, 9, 11.0)
    cache.computed(a, 6, 9)
    finish(cache, [tail, first])
    assert states(a) == ["GPU_AND_CPU", "GPU", "GPU"] and len(cache.free_places) == 7
    assert cache.stats["chunks_swapped_in"] == 2


def test_tail_slots_taken_during_a_copy_out_and_never_filled():
    cache, a, ticket = leaving_tail()
    free = len(cache.free_slots)
    cache.admit(a, 8, 11.0)
    cache.release(a, 11.0)                                      # cancelled before it ran
    cache.check_integrity()
    cache.complete(ticket)
    assert states(a) == ["GPU_AND_CPU", "GPU_AND_CPU"] and len(cache.free_slots) == free
    cache.check_integrity()


# ---- KVCache.truncate, evict, forget

@pytest.mark.parametrize("known, filled", [(10, [4, 4, 2]), (9, [4, 4, 1]), (8, [4, 4]), (3, [3]), (0, [])])
def test_truncate_keeps_what_is_known(known, filled):
    cache = make(slots=16)
    a = idle(cache, "a", 10)
    cache.truncate(a, known + (known > 0), known)
    assert [chunk.filled for chunk in a.chunks] == filled
    assert a.known == known == len(slots_of(a)) == 16 - len(cache.free_slots)
    assert a.tokens.tolist() == list(range(min(known + (known > 0), 10)))
    cache.check_integrity()


def test_truncate_keeps_the_prefix_of_a_copy():
    cache = make()
    a = idle(cache, "a", 8)
    move_to_cpu(cache, a, 1)
    copy(cache, 4)
    assert states(a) == ["CPU", "GPU_AND_CPU"]
    cache.truncate(a, 7, 6)
    assert states(a) == ["CPU", "GPU_AND_CPU"] and a.cached() == (2, 4)
    cache.truncate(a, 3, 2)
    assert states(a) == ["CPU"] and a.cached() == (0, 2) and len(cache.free_places) == 7
    cache.check_integrity()
    (ticket,) = cache.admit(a, 3, 11.0)
    assert (ticket.start, ticket.end, ticket.slots) == (0, 2, slots_of(a)[:2])


def test_evict_keeps_tokens_and_what_is_known():
    cache = make(slots=16)
    a = idle(cache, "a", 10)
    copy(cache, 4)
    cache.drop_all(a)
    assert a.tokens.tolist() == list(range(10)) and a.known == 10 and a.cached() == (0, 0)
    assert len(cache.free_slots) == 16 and len(cache.free_places) == 8
    cache.check_integrity()


def test_forget_leaves_nothing():
    cache = make(slots=16)
    a = idle(cache, "a", 10)
    move_to_cpu(cache, a, 1)
    cache.forget(a)
    assert not cache.conversations and len(cache.free_slots) == 16 and len(cache.free_places) == 8
    assert cache.available == 16
    cache.check_integrity()
    assert all(index.cheapest(10.0) is None for index in cache.indexes.values())


def test_drop_everything():
    cache = make()
    a, b = idle(cache, "a", 12), idle(cache, "b", 8)
    cache.plan_swap_out(8, 10.0)
    cache.drop_everything()
    cache.check_integrity()
    assert len(cache.free_slots) == 32 and len(cache.free_places) == 8 and not cache.in_flight
    assert a.known == 12
    grow_to(cache, b, 13)


# ---- check_integrity itself

def lose_a_slot(cache, a, b):
    cache.free_slots.pop()


def free_a_slot_in_use(cache, a, b):
    cache.free_slots.append(b.chunks[1].slots[0])


def share_a_slot(cache, a, b):
    b.chunks[1].slots[0] = b.chunks[1].slots[1]


def lose_a_place(cache, a, b):
    cache.free_places.pop()


def share_a_place(cache, a, b):
    cache.free_places.append(b.chunks[0].place)


def believe_in_a_copy(cache, a, b):
    b.chunks[3].place = cache.free_places.pop()


def believe_in_kv(cache, a, b):
    b.chunks[1].filled += 1


def wrong_table_entry(cache, a, b):
    cache.table[a.row, 1] = cache.table[a.row, 0]


def wrong_reclaimable(cache, a, b):
    cache.reclaimable += 1


def wrong_offer_of_a_chunk(cache, a, b):
    b.chunks[0].reclaimable -= 4


def lose_a_row(cache, a, b):
    cache.free_rows.pop()


def unpin_a_running_conversation(cache, a, b):
    a.pinned = False


def unpin_behind_its_back(cache, a, b):
    del cache.running[a.order]


def lose_a_victim(cache, a, b):
    b.chunks[0].member = None


def file_a_victim_wrongly(cache, a, b):
    b.chunks[3].member = b.chunks[3].member._replace(key=7)
    cache.indexes["swap_out"].file(b.chunks[3].member)


def misplace_a_chunk(cache, a, b):
    b.chunks[1].index = 2


def know_less_than_is_cached(cache, a, b):
    b.known = 5


def lose_a_ticket(cache, a, b):
    cache.in_flight.clear()


def forget_a_ticket(cache, a, b):
    b.chunks[1].ticket = None


def share_a_chunk_with_a_stranger(cache, a, b):
    a.chunks[0] = b.chunks[0]


def forget_half(cache, a, b):
    finish(cache, list(cache.in_flight))
    del cache.conversations["b"]


@pytest.mark.parametrize("corrupt", [
    lose_a_slot, free_a_slot_in_use, share_a_slot, lose_a_place, share_a_place, believe_in_a_copy,
    believe_in_kv, wrong_table_entry,
    wrong_reclaimable, wrong_offer_of_a_chunk, lose_a_row,
    unpin_a_running_conversation, unpin_behind_its_back, lose_a_victim, file_a_victim_wrongly,
    misplace_a_chunk,
    know_less_than_is_cached, lose_a_ticket, forget_a_ticket, share_a_chunk_with_a_stranger, forget_half])
def test_check_integrity_notices(corrupt):
    cache = make(slots=32)
    a = cache.open("a", range(6))
    cache.admit(a, 6, 0.0)
    cache.computed(a, 0, 6)
    b = idle(cache, "b", 14)
    copy(cache, 4)
    cache.plan_swap_out(8, 10.0)
    assert states(b) == ["GPU_AND_CPU", "GPU", "GPU", "GPU"] and b.chunks[1].ticket
    cache.check_integrity()
    corrupt(cache, a, b)
    with pytest.raises(AssertionError):
        cache.check_integrity()
