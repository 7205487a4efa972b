"""Conversations that begin alike share chunks, whatever happens to their owners; without a scheduler."""
import pytest

from eviction import POLICIES
from fakes import COST
from sharing import SharingCache
from test_kv_cache import copy, finish, grow_to, idle, move_to_cpu, runs, slots_of, states


def make(slots=32, places=8, chunk=4, rows=4, policy="retention", max_context=64):
    return SharingCache(slots, places, chunk, rows, max_context, POLICIES[policy](COST, chunk))


# ---- KVCache.fork

def forked(cache, shared=8, own=4, now=0.0):
    """b shares the first `shared` tokens of a, which has 4 more; b computes `own` tokens of its own, and
    both are idle since `now`."""
    a = idle(cache, "a", shared + 4, now)
    b = cache.fork(a, "b", a.tokens[:shared + 1])
    if own:
        grow_to(cache, b, shared + own, now)
    cache.check_integrity()
    return a, b


def test_fork_shares_full_chunks_and_the_child_copies_its_own_tail():
    cache = make()
    a = idle(cache, "a", 14)
    b = cache.fork(a, "b", a.tokens[:11])                       # a[8:11) is part of a chunk: copied later
    assert b.chunks == a.chunks[:2] and b.cached() == (8, 0) and b.known == 11
    assert len(cache.free_slots) == 32 - 14
    assert [chunk.users for chunk in a.chunks] == [(a, b), (a, b), (a,), (a,)]
    assert (a.held, b.held) == (14, 8)
    assert cache.shortfall(b, 12, 0) == 4 - (32 - 14)
    cache.take_table_updates()
    assert cache.admit(b, 12, 1.0) == [] and len(cache.free_slots) == 32 - 14 - 4
    ((row, start, slots),) = cache.take_table_updates()         # shared slots are in its row, too
    assert (row, start, slots.tolist()) == (b.row, 0, slots_of(b)) and slots_of(b)[:8] == slots_of(a)[:8]
    cache.check_integrity()


@pytest.mark.parametrize("tokens, shared", [
    (range(13), 3), (range(12), 2), (range(9), 2), (range(8), 1), (range(3), 0), ((), 0),
    ([*range(6), 99, *range(7, 13)], 1), ([99], 0),
    (range(40), 3)])
def test_fork_shares_no_more_than_both_begin_with(tokens, shared):
    """The last token of the child was sampled, never fed: it is not shared."""
    cache = make()
    a = idle(cache, "a", 14)
    b = cache.fork(a, "b", tokens)
    assert b.chunks == a.chunks[:shared] and list(b.tokens) == list(tokens) and cache.open("b") is b
    cache.check_integrity()


@pytest.mark.parametrize("state", ["GPU", "leaving", "GPU_AND_CPU", "CPU", "arriving", None])
def test_fork_shares_a_chunk_wherever_it_is(state):
    cache = make()
    a = idle(cache, "a", 9)
    if state == "leaving":
        cache.plan_swap_out(4, 10.0)
    elif state == "GPU_AND_CPU":
        copy(cache, 4)
    elif state is None:
        cache.drop_all(a)
        cache.admit(a, 9, 10.0)                                 # it is being recomputed when b comes
    elif state != "GPU":
        move_to_cpu(cache, a, 1)
        if state == "arriving":
            cache.admit(a, 9, 10.0)
    b = cache.fork(a, "b", range(9))
    assert b.chunks == a.chunks[:2]
    for ticket in list(cache.in_flight):
        cache.complete(ticket)
    assert states(b)[0] == states(a)[0] == {"leaving": "GPU_AND_CPU", "arriving": "GPU_AND_CPU",
                                            None: "GPU"}.get(state, state)
    cache.check_integrity()
    cache.admit(b, 9, 11.0)
    assert slots_of(b)[:8] == slots_of(a)[:8]
    cache.check_integrity()


def test_a_shared_chunk_is_pinned_while_any_owner_runs():
    cache = make(slots=16)
    a, b = forked(cache)
    cache.admit(a, 12, 10.0)
    assert runs(cache.plan_swap_out(99, 10.0)) == [("b", 8, 12)] and cache.available == 0
    finish(cache, list(cache.in_flight))
    cache.admit(b, 12, 10.0)
    cache.release(a, 11.0)
    assert runs(cache.plan_swap_out(99, 12.0)) == [("a", 8, 12)]
    cache.release(b, 12.0)
    assert runs(cache.plan_swap_out(99, 12.0)) == [("a", 0, 4), ("a", 4, 8)]
    finish(cache, list(cache.in_flight))
    # what it has is no help
    assert cache.available == 16 and cache.shortfall(a, 12, 0) == cache.shortfall(b, 12, 0) == -4


def test_a_shared_chunk_is_worth_as_many_times_as_it_has_owners():
    """Costs of chunks at 0, 4, 8 are 2, 2.3, 2.7 and more: three owners outweigh the position."""
    cache = make(slots=32, chunk=4)
    a, b = forked(cache)
    grow_to(cache, cache.fork(a, "c", a.tokens[:9]), 12)
    assert [ticket.conversation.name for ticket in cache.plan_swap_out(20, 10.0)] == ["a", "b", "c", "a", "a"]
    assert [ticket.start for ticket in sorted(cache.in_flight, key=lambda t: t.place)] == [8, 8, 8, 0, 4]
    cache.check_integrity()


def test_the_place_of_a_running_conversation_is_taken_though_the_chunk_is_shared():
    cache = make(slots=32, places=3)
    a = idle(cache, "a", 13)
    copy(cache, 12)
    cache.fork(a, "b", a.tokens)
    cache.admit(a, 13, 20.0)
    idle(cache, "d", 12, 21.0)
    assert len(copy(cache, 12, 22.0)) == 3 and cache.stats["chunks_dropped"] == 0


def test_what_a_shared_chunk_is_worth_counts_against_a_chunk_on_a_full_cpu_tier():
    """old[0:4] has been idle for 10 s, what is shared for 15 s: worth more, but only because it is shared."""
    cache = make(slots=16, places=1)
    old = idle(cache, "old", 4, now=90.0)
    move_to_cpu(cache, old, 1, now=100.0)
    a, b = forked(cache, shared=4, own=0, now=85.0)
    cache.truncate(a, 5, 4)
    (ticket,) = copy(cache, 4, now=100.0)
    assert ticket.chunk is a.chunks[0] is b.chunks[0] and states(old) == [None]


def test_a_shared_chunk_is_as_idle_as_its_most_recently_active_owner():
    cache = make()
    forked(cache, now=0.0)
    idle(cache, "other", 4, now=50.0)
    grow_to(cache, cache.conversations["b"], 12, now=99.0)
    assert runs(cache.plan_swap_out(8, 100.0)) == [("a", 8, 12), ("other", 0, 4)]
    cache.set_waiting(cache.conversations["a"], True)
    assert runs(cache.plan_swap_out(99, 100.0)) == [("b", 8, 12), ("a", 0, 4), ("a", 4, 8)]
    cache.check_integrity()


@pytest.mark.parametrize("policy", ["trailing", "trailing-half"])
def test_a_trailing_policy_takes_a_shared_chunk_when_nothing_is_behind_it(policy):
    cache = make(slots=64, places=16, policy=policy)
    a, b = forked(cache, shared=28, own=4)                      # the longest first, says trailing-half
    # shares the first half of that: some chunks have three users
    c = cache.fork(a, "c", a.tokens[:17])
    grow_to(cache, c, 20)
    copied = runs(cache.plan_swap_out(99, 10.0))
    assert set(copied[:2]) <= {("a", 28, 32), ("b", 28, 32), ("c", 16, 20)} and len(copied) == 10
    assert max(copied.index(name) for name in (("a", 28, 32), ("b", 28, 32))) < copied.index(("a", 24, 28))
    assert max(copied.index(name) for name in (("c", 16, 20), ("a", 16, 20))) < copied.index(("a", 12, 16))
    cache.check_integrity()
    finish(cache, list(cache.in_flight))
    while member := cache.indexes["reclaim"].cheapest(10.0):    # and so it is with what is reclaimed
        behind = [user.chunks[member.chunk.index + 1:] for user in member.chunk.users]
        assert not any(chunk.slots for chunks in behind for chunk in chunks)
        for chunk in cache._victims("reclaim", 10.0):
            cache.reclaim(chunk)
        cache.check_integrity()
    assert cache.available == len(cache.free_slots) == 64


def test_what_one_owner_gives_up_stays_with_the_others():
    cache = make()
    a, b = forked(cache)
    # before the branch point, in the middle of a chunk
    cache.truncate(a, 7, 6)
    assert a.chunks == b.chunks[:1] and states(b) == ["GPU"] * 3
    assert a.chunks[0].users == (a, b)
    cache.forget(a)
    assert [chunk.users for chunk in b.chunks] == [(b,)] * 3 and len(cache.free_slots) == 32 - 12
    assert not cache.cold_conversations()
    assert runs(cache.plan_swap_out(4, 10.0)) == [("b", 0, 4)]   # its own frontier
    cache.check_integrity()
    cache.forget(b)
    finish(cache, list(cache.in_flight))
    assert len(cache.free_slots) == 32 and len(cache.free_places) == 8


def test_drop_all_of_one_owner():
    cache = make()
    a, b = forked(cache)
    cache.drop_all(a)
    assert a.cached() == (0, 0) and a.known == 12 and b.cached() == (12, 0)
    grow_to(cache, a, 13)                                       # a recomputes its own from now on
    assert not set(slots_of(a)) & set(slots_of(b))


def test_a_dropped_shared_chunk_is_recomputed_for_all():
    cache = make(slots=16, places=0)
    a, b = forked(cache)
    copy(cache, 99)
    grow_to(cache, cache.open("other"), 16, 11.0)
    assert states(a) == states(b) == [None] * 3 and cache.stats["chunks_dropped"] == 4
    cache.forget(cache.conversations["other"])
    cache.admit(a, 12, 12.0)
    cache.computed(a, 0, 4)
    cache.admit(b, 12, 12.0)
    assert b.cached() == (4, 0)
    cache.computed(a, 4, 12)
    cache.computed(b, 4, 6)                                     # in the same batch: a was further
    assert b.cached() == (8, 0)
    cache.check_integrity()


def test_a_shared_chunk_that_is_being_recomputed_survives_whoever_began_with_it():
    cache = make(slots=16, places=0)
    a, b = forked(cache)
    copy(cache, 99)
    grow_to(cache, cache.open("other"), 16, 11.0)
    cache.forget(cache.conversations["other"])
    cache.admit(a, 12, 12.0)
    cache.computed(a, 0, 2)
    cache.admit(b, 12, 12.0)
    cache.release(a, 13.0)                                      # suspended: b goes on where a stopped
    cache.check_integrity()
    assert [chunk.filled for chunk in b.chunks] == [2, 0, 0] and len(slots_of(b)) == 12
    cache.computed(b, 2, 4)
    cache.release(b, 14.0)
    assert states(a) == ["GPU", None, None] and a.cached() == (4, 0) and len(cache.free_slots) == 12
    cache.check_integrity()


def test_a_conversation_is_not_cold_while_what_it_shares_is_cached():
    cache = make(slots=16, places=0)
    a, b = forked(cache, own=0)
    cache.truncate(a, 9, 8)
    assert not cache.cold_conversations()
    cache.set_waiting(b, True)
    copy(cache, 99)
    grow_to(cache, cache.open("other"), 16, 11.0)
    assert states(a) == states(b) == [None] * 2 and cache.cold_conversations() == [a]


def test_a_conversation_that_leaves_what_it_shares_is_cold():
    cache = make()
    a = idle(cache, "a", 12)
    b = cache.fork(a, "b", a.tokens[:9])
    assert not cache.cold_conversations()
    cache.drop_all(b)
    assert cache.cold_conversations() == [b]


# ---- KVCache.designate

def test_the_designated_prefix_is_shared_and_never_evicted():
    cache = make(slots=24, places=8)
    cache.designate(range(10))                                  # two full chunks
    a = cache.open("a")
    assert cache.extend(a, range(12))
    cache.admit(a, 12, 0.0)
    cache.computed(a, 0, 12)
    cache.release(a, 0.0)
    b, c = cache.open("b"), cache.open("c")
    assert cache.extend(b, range(11)) and cache.extend(c, [7, *range(1, 20)])
    assert b.chunks == a.chunks[:2] and b.cached() == (8, 0) and not c.chunks
    assert runs(cache.plan_swap_out(99, 10.0)) == [("a", 8, 12)] and cache.shortfall(c, 16, 0) == 4
    cache.check_integrity()
    assert cache.cold_conversations() == [b, c]                          # what is never evicted keeps nobody
    for conversation in (a, b, c):
        cache.forget(conversation)
    finish(cache, list(cache.in_flight))
    d = cache.open("d", range(9))
    assert cache.extend(d, [9]) and d.cached() == (8, 0) and len(cache.free_slots) == 24 - 8


def test_a_designated_prefix_of_more_than_half_of_the_slots_is_refused():
    with pytest.raises(ValueError, match="36 tokens .* half of 64 slots"):
        make(slots=64).designate(range(36))


def test_drop_everything():
    cache = make()
    cache.designate(range(4))
    a, b = forked(cache)
    cache.plan_swap_out(8, 10.0)
    cache.drop_everything()
    cache.check_integrity()
    assert len(cache.free_slots) == 32 and len(cache.free_places) == 8 and not cache.in_flight
    assert a.known == 12
    assert a.chunks == b.chunks[:1] == cache.designated.chunks and not a.cached()[0]
    grow_to(cache, b, 13)


# ---- KVCache.extend: one prompt, several replies

@pytest.mark.parametrize("length, shared", [(7, 1), (8, 1), (9, 2), (4, 0)])
def test_a_child_keeps_the_last_token_of_a_shared_prompt_for_itself(length, shared):
    """Its reply is sampled there. A prompt of whole chunks that was shared entirely would leave nothing to
    compute."""
    cache = make()
    leader, child = cache.open("leader"), cache.open("child")
    cache.extend(leader, range(length))
    cache.admit(leader, length, 0.0)
    cache.follow(child, leader)
    assert not cache.extend(child, range(length)) and not child.tokens       # the leader computes it just now
    cache.computed(leader, 0, length)
    assert cache.extend(child, range(length)) and child.chunks == leader.chunks[:shared]
    cache.admit(child, length, 0.0)
    cache.check_integrity()


def test_a_child_does_not_wait_for_a_leader_that_has_gone():
    cache = make()
    leader, child = cache.open("leader"), cache.open("child")
    cache.extend(leader, range(9))
    cache.admit(leader, 9, 0.0)
    cache.computed(leader, 0, 5)
    cache.follow(child, leader)
    cache.release(leader, 1.0)
    cache.truncate(leader, 0, 0)
    assert cache.extend(child, range(9)) and child.cached() == (0, 0)
    cache.forget(child)
    assert not cache.origins


# ---- KVCache.admit: the tail is copied

def admitted(cache, child, prompt, now=20.0):
    """The child's first turn begins -> the copies between slots, and the tokens that it must not compute."""
    assert cache.extend(child, prompt)
    cache.admit(child, len(child.tokens), now)
    cache.check_integrity()
    return cache.take_slot_copies(), sum(chunk.filled for chunk in child.chunks)


@pytest.mark.parametrize("tokens, prompt, copied", [
    (range(10), [99], 2), (range(8), [99], 0), (range(9), [9, 10, 11, 99], 0), (range(9), [9, 10, 11], 3),
    (range(10), [10, 99, 11], 3), ([*range(5), 99], [99], 1), ([99], [99], 0), ((), range(3), 2)])
def test_a_child_copies_what_it_has_in_common_behind_the_full_chunks(tokens, prompt, copied):
    """But for its last token, which it must compute itself. Full chunks are shared, not copied."""
    cache = make()
    a = idle(cache, "a", 14)
    b = cache.fork(a, "b", tokens)
    copies, filled = admitted(cache, b, prompt)
    shared = 4 * sum(len(chunk.users) > 1 for chunk in b.chunks)
    assert copies == dict(zip(slots_of(b)[shared:shared + copied], slots_of(a)[shared:]))
    assert filled == shared + copied


def test_a_copy_of_a_copy_is_one_of_the_original():
    """Both are made at the beginning of the same step."""
    cache = make()
    a = idle(cache, "a", 7)
    b = cache.fork(a, "b", range(7))
    assert cache.extend(b, [99])
    cache.admit(b, 8, 20.0)
    c = cache.fork(b, "c", range(7))
    copies, filled = admitted(cache, c, [98])
    assert filled == 7 and slots_of(c)[:4] == slots_of(a)[:4]
    assert [copies[slot] for slot in slots_of(c)[4:7]] == slots_of(a)[4:7]


@pytest.mark.parametrize("fate", ["CPU", "arriving", None, "forgotten", "other tokens"])
def test_a_tail_whose_origin_has_lost_it_is_computed(fate):
    cache = make(places=2)
    a = idle(cache, "a", 3)
    b = cache.fork(a, "b", range(3))
    if fate == "other tokens":
        cache.truncate(a, 0, 0)
        cache.extend(a, [7, 8, 9])
        cache.admit(a, 3, 10.0)
        cache.computed(a, 0, 3)
    elif fate == "forgotten":
        cache.forget(a)
    elif fate is None:
        cache.drop_all(a)
    else:
        move_to_cpu(cache, a, 1)
        if fate == "arriving":
            cache.admit(a, 3, 15.0)
    assert admitted(cache, b, [99]) == ({}, 0)


# ---- check_integrity itself

def miscount_users(cache, chunk, b):
    chunk.users = chunk.users[:-1]


def lose_a_chunk(cache, chunk, b):
    b.chunks.pop(0)


def lose_a_shared_victim(cache, chunk, b):
    chunk.member = None


@pytest.mark.parametrize("corrupt", [miscount_users, lose_a_chunk, lose_a_shared_victim])
def test_check_integrity_notices(corrupt):
    cache = make()
    b = idle(cache, "b", 14)
    copy(cache, 4)
    cache.plan_swap_out(4, 10.0)
    # shares what has been copied and what is being copied
    cache.fork(b, "c", range(9))
    cache.check_integrity()
    corrupt(cache, b.chunks[0], b)
    with pytest.raises(AssertionError):
        cache.check_integrity()
