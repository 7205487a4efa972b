"""Who runs in which step: hand-worked traces, and the scenarios that break such designs. Chunks of 4, at
most 16 tokens a step, unless said otherwise."""
import signal
import sys

import pytest
from hypothesis import given, strategies as st

from fakes import World, answer
from test_kv_cache import reclaim
from kv_cache import Ticket
from scheduler import PLACEHOLDER, Batch, Request, Result, Scheduler, Span, decodes_first


@pytest.fixture(autouse=True)
def no_hanging():
    """A schedule that never finds anything to do would loop for ever."""
    def stop(number, frame):
        raise TimeoutError("the scheduler goes round in circles")
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)


class Landing:
    """Copies end when `open` says so (a step without spans waits for one all the same)."""
    open = False

    def __call__(self, tickets):
        return list(tickets) if self.open else []


def demote(world, name, drop=0, cpu=0, both=0):
    """Of an idle conversation that has all its KV on the GPU: drops the first chunks, then moves some to
    the CPU, then copies some. It must be the cheapest of all that could give some."""
    cache, conversation = world.cache, world.cache.conversations[name]
    known = conversation.known
    if drop:
        cache.drop_all(conversation)
        cache.admit(conversation, known, world.now)
        transfer(world, spans=[Span(Request(conversation, [], usage={}), 0, known)])
        # as if the first chunks had not been
        cache.computed(conversation, drop * cache.chunk_size, known)
        cache.release(conversation, conversation.last_active)
    transfer(world, swap_out=cache.plan_swap_out((cpu + both) * cache.chunk_size, world.now))
    for _ in range(cpu):
        reclaim(cache, conversation)
    assert states(world, name)[:drop + cpu + both] == [None] * drop + ["CPU"] * cpu + ["GPU_AND_CPU"] * both


def transfer(world, spans=(), swap_out=()):
    """A step of the worker alone."""
    batch = Batch(0, 0)
    batch.spans, batch.swap_out = list(spans), list(swap_out)
    batch.table_updates = world.cache.take_table_updates()
    for ticket in world.worker.execute(batch).landed:
        world.cache.complete(ticket)


def states(world, name):
    return [chunk and chunk.state for chunk in world.cache.conversations[name].chunks]


def steps(world, count):
    for _ in range(count):
        world.step()


def traces(world, count=None):
    """The next so many steps, or all until the end; without their numbers."""
    begin = len(world.worker.traces)
    steps(world, count) if count else world.run()
    return [trace.split("  ", 1)[1] for trace in world.worker.traces[begin:]]


def undisturbed(*turns):
    """The replies to these turns of one conversation, with nobody else there."""
    world = World(slots=200)
    return [world.turn("alone", prompt, max_tokens)[0].generated for prompt, max_tokens in turns]


def usage(gpu=0, cpu=0, recomputed=0, new=0):
    return dict(gpu=gpu, cpu=cpu, recomputed=recomputed, new=new)


def all_free(world):
    cache = world.cache
    return len(cache.free_slots) == cache.num_slots and len(cache.free_places) == cache.num_places


# ---- Request.missing

def admitted(total, filled, chunk=4):
    """A request whose chunks have that many leading tokens cached each."""
    cache = World(slots=100, chunk=chunk).cache
    conversation = cache.open("a", range(total))
    cache.admit(conversation, total, 0.0)
    for index, n in enumerate(filled):
        if n := min(n, total - index * chunk):
            cache.computed(conversation, index * chunk, index * chunk + n)
    return Request(conversation, [], tokens_before=0, prefilling=True)


@pytest.mark.parametrize("total, filled, runs", [
    (6, [0, 0], [(0, 6)]),                                      # a new prompt
    # a decode, at the beginning of a chunk and at the end
    (9, [4, 4, 0], [(8, 9)]), (8, [4, 3], [(7, 8)]),
    # dropped tokens at the front, the new prompt at the end
    (11, [0, 4, 2], [(0, 4), (10, 11)]),
    (22, [0, 0, 4, 1, 4, 0], [(0, 8), (13, 16), (20, 22)]),     # a hole of which a part has been recomputed
    (20, [4, 0, 2, 0, 1], [(4, 8), (10, 16), (17, 20)]),        # runs are maximal
    (12, [4, 4, 4], [])])
def test_missing_by_hand(total, filled, runs):
    assert list(admitted(total, filled).missing()) == runs


def cases(size):
    filled = st.lists(st.integers(0, size), min_size=1, max_size=8)
    return st.tuples(st.just(size), filled, st.integers(1, size))


@given(st.integers(1, 5).flatmap(cases))
def test_missing_is_every_position_without_kv_in_maximal_runs(case):
    chunk, filled, tail = case
    total = (len(filled) - 1) * chunk + tail
    holes = [position for position in range(total) if position % chunk >= filled[position // chunk]]
    runs = list(admitted(total, filled, chunk).missing())
    assert [position for start, end in runs for position in range(start, end)] == holes
    assert all(end < start for (_, end), (start, _) in zip(runs, runs[1:]))


def test_missing_does_not_yield_what_is_arriving():
    world = World()
    world.turn("a", 9, 4)
    demote(world, "a", drop=1, cpu=1)
    request = Request(world.cache.conversations["a"], [], tokens_before=0, prefilling=True)
    world.cache.admit(request.conversation, request.total, 0.0)
    assert list(request.missing()) == [(0, 4), (12, 13)]


# ---- Span, Batch.take, Batch.__str__

@pytest.mark.parametrize("budget, spans, left", [
    (20, [(0, 8), (12, 16), (18, 21)], 5), (15, [(0, 8), (12, 16), (18, 21)], 0),
    (13, [(0, 8), (12, 16), (18, 19)], 0),
    (12, [(0, 8), (12, 16)], 0), (8, [(0, 8)], 0), (3, [(0, 3)], 0), (0, [], 0)])
def test_batch_take_is_left_to_right_within_the_budget(budget, spans, left):
    request, batch = admitted(21, [0, 0, 4, 0, 2, 0]), Batch(0, budget)
    batch.take(request)
    assert batch.spans == [(request, start, end) for start, end in spans]
    assert batch.budget == left


def test_batch_take_appends():
    a, b, batch = admitted(4, [2]), admitted(9, [0, 0, 0]), Batch(0, 7)
    batch.take(a)
    batch.take(b)
    assert [tuple(span) for span in batch.spans] == [(a, 2, 4), (b, 0, 5)]


def test_a_span_samples_where_it_ends_its_context():
    request = admitted(7, [4, 1])
    assert Span(request, 5, 7).samples and not Span(request, 5, 6).samples


def test_batch_str_is_the_trace():
    """The line of the docstring. Neighbouring chunks are one run, whatever the order of the tickets;
    conversations by their order."""
    world = World()
    a, b, d = (Request(world.cache.open(name), []) for name in "abd")
    batch = Batch(45, 16)
    assert str(batch) == "step 45  " and not batch
    batch.spans = [Span(a, 0, 4), Span(a, 16, 23), Span(b, 31, 32)]
    assert str(batch) == "step 45  a[0:4] a[16:23] b[31:32]" and batch
    def tickets(request, *chunks):
        return [Ticket(request.conversation, None, "", 4 * chunk, 4, [0] * 4, 0) for chunk in chunks]
    batch.swap_in, batch.swap_out = tickets(a, 2, 1, 3), tickets(d, 1)
    assert str(batch) == "step 45  a[0:4] a[16:23] b[31:32] | in a[4:16] | out d[4:8]"
    batch.spans, batch.swap_in, batch.swap_out = [], [], tickets(d, 0, 2) + tickets(a, 1)
    assert str(batch) == "step 45   | out a[4:8] d[0:4] d[8:12]" and batch


def test_batch_with_transfers_alone_is_true():
    assert not Batch(0, 16)
    batch = Batch(0, 16)
    batch.swap_in = [None]
    assert batch


# ---- the paper's figures

def test_figure_5_a_context_in_four_parts():
    """When a returns: [0:4) was dropped, [4:12) is on the CPU, [12:16) on the GPU, [16:23) is its last
    token and the new prompt."""
    world = World(slots=64, swap_threshold=0)
    world.turn("a", 13, 4)
    demote(world, "a", drop=1, cpu=2)
    assert states(world, "a") == [None, "CPU", "CPU", "GPU"]
    a = world.submit("a", 6, 2)
    assert traces(world) == ["a[0:4] a[16:23] | in a[4:12]", "a[23:24]"]
    assert a.usage == usage(gpu=4, cpu=8, recomputed=4, new=7)


def test_figure_8_two_sub_requests_and_a_decode_in_one_batch():
    world = World(slots=64, reserve=0)
    world.turn("a", 13, 4)
    demote(world, "a", drop=1, cpu=3)
    world.turn("d", 6, 3)
    demote(world, "d", both=1)
    world.submit("b", 28, 8)
    steps(world, 5)
    a = world.submit("a", 6, 2)
    assert traces(world) == [
        # 23 slots for a leave 5 to be had; the threshold wants 16
        "b[31:32] a[0:4] a[16:23] | in a[4:16] | out d[4:8]",
        "b[32:33] a[23:24]", "b[33:34]", "b[34:35]"]
    assert a.usage == usage(cpu=12, recomputed=4, new=7)


# ---- compose: what goes into a batch

def test_compose_a_conversation_from_turn_to_turn():
    """Each reply's last token was sampled, never fed: it comes with the next prompt."""
    world = World()
    assert world.turn("a", 10, 3)[1] == ["step 0  a[0:10]", "step 1  a[10:11]", "step 2  a[11:12]"]
    request, trace = world.turn("a", 2, 2)
    assert trace == ["step 3  a[12:15]", "step 4  a[15:16]"] and request.usage == usage(gpu=12, new=3)


def test_compose_a_decode_never_stalls_behind_a_long_prompt():
    world = World(slots=64, max_batch_tokens=8)
    world.submit("a", 20, 2)
    world.submit("b", 3, 6)
    assert traces(world, 3) == ["a[0:8]", "a[8:16]", "a[16:20] b[0:3]"]
    world.submit("c", 20, 2)
    assert traces(world) == ["a[20:21] b[3:4] c[0:6]", "b[4:5] c[6:13] | out a[0:4]", "b[5:6] c[13:20]",
                             "b[6:7] c[20:21] | out a[4:8]", "b[7:8]"]


def test_compose_a_decode_never_stalls_behind_an_earlier_arrival_that_recovers():
    world = World(slots=64, max_batch_tokens=4)
    a = world.submit("a", 2, 9)
    world.submit("b", 2, 9)
    assert traces(world, 3) == ["a[0:2] b[0:2]", "a[2:3] b[2:3]", "a[3:4] b[3:4]"]
    world.scheduler.suspend(a, world.now)
    world.cache.drop_all(a.conversation)
    assert traces(world, 3) == ["b[4:5] a[0:3]", "b[5:6] a[3:5]", "a[5:6] b[6:7]"]


def test_compose_a_hole_and_a_prompt_over_several_steps():
    world = World(slots=64, max_batch_tokens=6)
    world.turn("a", 13, 4)
    demote(world, "a", drop=2, cpu=1)
    a = world.submit("a", 6, 2)
    assert traces(world) == ["a[0:6] | in a[8:12]", "a[6:8] a[16:20]", "a[20:23]", "a[23:24]"]
    assert a.usage == usage(gpu=4, cpu=4, recomputed=8, new=7)


def test_compose_prefills_go_on_by_arrival():
    world = World(slots=64, max_batch_tokens=8)
    for name in "abc":
        world.submit(name, 6, 1)
    assert traces(world) == ["a[0:6] b[0:2]", "b[2:6] c[0:4]", "c[4:6]"]


def test_decodes_first_then_by_arrival():
    requests = [Request(None, [], arrival=arrival, prefilling=prefilling)
                for arrival, prefilling in [(0, True), (1, False), (2, True), (3, False)]]
    assert [request.arrival for request in decodes_first(requests)] == [1, 3, 0, 2]


def test_compose_more_decodes_than_tokens():
    world = World(slots=64, max_batch_tokens=2)
    for name in "abc":
        world.submit(name, 1, 3)
    assert traces(world) == ["a[0:1] b[0:1]", "a[1:2] b[1:2]", "a[2:3] b[2:3]", "c[0:1]", "c[1:2]", "c[2:3]"]


def test_compose_rows_limit_who_runs():
    world = World(slots=64, rows=2)
    for name in "abc":
        world.submit(name, 2, 2)
    assert traces(world) == ["a[0:2] b[0:2]", "a[2:3] b[2:3]", "c[0:2]", "c[2:3]"]


def test_compose_separate_phases_never_mixes():
    world = World(slots=64, max_batch_tokens=8, separate_phases=True)
    world.submit("b", 3, 4)
    steps(world, 1)
    world.submit("a", 12, 2)
    assert traces(world) == ["a[0:7]", "a[7:12]", "b[3:4] a[12:13]", "b[4:5]", "b[5:6]"]


def test_a_decode_that_finds_no_slot_sits_out():
    """b is still recovering, so a step has work without a; then both have no slot, and b, the latest, gives
    way."""
    world = World(slots=20, places=0, max_batch_tokens=8, swap_threshold=0, reserve=0)
    a, b = world.submit("a", 5, 10), world.submit("b", 14, 4)
    assert traces(world, 5) == ["a[0:5] b[0:3]", "a[5:6] b[3:10]", "b[10:14]", "a[6:7]", "a[7:8]"]
    assert world.scheduler.stats["suspensions"] == 1 and world.scheduler.running == [a]
    world.run()
    assert len(a.generated) == 10 and len(b.generated) == 4


# ---- ahead of time: the threshold, the reserve, the two tiers

def test_swap_threshold_copies_ahead_of_need():
    """Half of 16 slots: available at the end of each step's planning, or on its way."""
    world = World(slots=16, swap_threshold=0.5)
    world.submit("a", 7, 2)
    assert traces(world) == ["a[0:7]", "a[7:8]"]
    world.submit("b", 3, 2)
    assert traces(world) == ["b[0:3] | out a[0:4]", "b[3:4]"]
    world.submit("c", 7, 2)
    assert traces(world) == ["c[0:7] | out a[4:8] b[0:4]", "c[7:8]"]
    assert states(world, "a") == ["CPU", "GPU_AND_CPU"] and states(world, "b") == ["GPU_AND_CPU"]


def test_swap_threshold_0_copies_only_on_demand():
    world = World(slots=16, swap_threshold=0)
    world.turn("a", 7, 2)
    world.turn("b", 3, 2)
    world.submit("c", 7, 2)
    assert traces(world) == [" | out a[0:4]", "c[0:7]", "c[7:8]"]


def test_admit_leaves_a_reserve_for_the_growth_of_running_requests():
    """10% of 40: b has to leave 4 slots while a runs, and does not as long as a holds 20."""
    world = World(slots=40, max_batch_tokens=40)
    world.submit("a", 20, 3)
    world.submit("b", 17, 1)
    assert traces(world) == ["a[0:20]", "a[20:21]", "a[21:22]", "b[0:17] | out a[0:12]"]
    world = World(slots=40, max_batch_tokens=40)
    world.submit("a", 20, 3)
    world.submit("b", 16, 1)                                    # exactly 4 left
    assert traces(world, 1) == ["a[0:20] b[0:16]"]
    world = World(slots=40, max_batch_tokens=40)
    world.submit("a", 38, 1)                                    # nothing runs: no reserve
    assert traces(world) == ["a[0:38]"]


def test_a_request_that_needs_nearly_the_whole_gpu_tier_among_idle_conversations():
    """Two places: a is copied, what is worth less than that waits to be dropped, and the best 4 tokens of d
    are kept."""
    world = World(slots=32, places=2, max_batch_tokens=32)
    for name in "abcd":
        world.turn(name, 7, 2)
    assert [states(world, name) for name in "abcd"] == [["GPU_AND_CPU"] * 2] + [["GPU"] * 2] * 3
    request = world.submit("x", 28, 4)
    assert traces(world) == ["x[0:28] | out d[4:8]", "x[28:29]", "x[29:30]", "x[30:31]"]
    assert [states(world, name) for name in "abcd"] == [[None, "CPU"], [None, None], [None, None],
                                                        [None, "CPU"]]
    assert request.usage == usage(new=28) and world.cache.stats["chunks_dropped"] == 6


def test_a_lone_request_fills_the_tier_exactly_to_the_limit():
    """16 slots, 10 + 6 tokens: the last one sampled needs none, so one slot is left."""
    world = World(slots=16, places=2, max_batch_tokens=16)
    world.turn("z", 6, 4)
    request = world.submit("a", 10, 6)
    assert traces(world) == [" | out z[0:4]", "a[0:10] | out z[4:8]", "a[10:11] | out z[8:9]", "a[11:12]",
                             "a[12:13]", "a[13:14]", "a[14:15]"]
    assert request.finish_reason == "length" and request.total == 16 == world.scheduler.limit
    assert request.generated == undisturbed((request.prompt, 6))[0]


def test_max_tokens_none_is_as_many_as_fit():
    world = World(slots=16)
    request, _ = world.turn("a", 10, None)
    assert (len(request.generated), request.finish_reason) == (6, "length")


def test_admit_does_not_reclaim_what_the_head_itself_could_give():
    world = World(slots=24)
    world.turn("b", 7, 2)
    world.turn("a", 11, 2)
    demote(world, "b", both=2)
    demote(world, "a", both=3)                                  # 4 free, 8 of b's and 12 of a's to be had
    a = world.submit("a", 10, 1)
    assert traces(world) == ["a[12:23]"] and a.usage == usage(gpu=12, new=11)
    assert states(world, "b") == ["CPU", "CPU"] and states(world, "a")[:3] == ["GPU_AND_CPU"] * 3


def test_admit_does_not_count_what_the_head_itself_could_give():
    """None is free but what a has; 4 more must come from b, and are not there before b has been copied."""
    world = World(slots=16)
    world.turn("a", 7, 2)
    demote(world, "a", both=2)
    world.turn("b", 7, 2)
    a = world.submit("a", 3, 2)
    assert traces(world) == [" | out b[0:4]", "a[8:12] | out b[4:8]", "a[12:13]"]
    assert a.usage == usage(gpu=8, new=4)


def test_a_chunk_in_both_tiers_costs_nothing_when_it_returns():
    world = World()
    world.turn("a", 7, 2)
    demote(world, "a", both=2)
    a = world.submit("a", 3, 2)
    assert traces(world) == ["a[8:12]", "a[12:13]"]             # no swap-in
    assert a.usage == usage(gpu=8, new=4) and world.cache.stats["chunks_swapped_in"] == 0


def test_a_cpu_tier_of_one_chunk():
    """Two requests grow until b gives way; b[4:8] is worth more than b[0:4] and takes the only place: b
    comes back in three parts."""
    world = World(slots=16, places=1, swap_threshold=0, reserve=0)
    a, b = world.submit("a", 6, 8), world.submit("b", 6, 8)
    assert traces(world) == [
        "a[0:6] b[0:6]", "a[6:7] b[6:7]", "a[7:8] b[7:8]",      # 16 slots taken
        " | out b[0:4]",                                        # b, the latest, is suspended
        "a[8:9]", "a[9:10]", "a[10:11]", "a[11:12]",
        " | out b[4:8]", "a[12:13]",
        "b[0:4] b[8:9] | in b[4:8]", "b[9:10]", "b[10:11]",
        # a[8:12] takes the place that b, running, does not need for now
        " | out a[8:12]", "b[11:12]", "b[12:13]"]
    assert b.generated == undisturbed((b.prompt, 8))[0] and a.generated == undisturbed((a.prompt, 8))[0]


def test_without_a_cpu_tier_a_suspended_request_is_recomputed():
    world = World(slots=16, places=0, swap_threshold=0, reserve=0)
    world.submit("a", 6, 8)
    b = world.submit("b", 6, 8)
    assert traces(world) == [
        "a[0:6] b[0:6]", "a[6:7] b[6:7]", "a[7:8] b[7:8]",
        "a[8:9]", "a[9:10]", "a[10:11]", "a[11:12]", "a[12:13]",
        "b[0:9]", "b[9:10]", "b[10:11]", "b[11:12]", "b[12:13]"]
    # usage is that of its first admission
    assert b.usage == usage(new=6) and b.generated == undisturbed((b.prompt, 8))[0]
    assert world.scheduler.stats["suspensions"] == 1 and world.scheduler.stats["prompt_tokens_new"] == 12


def test_a_full_cpu_tier_keeps_what_is_worth_more():
    """Both places hold late chunks of old; young's leading one is worth less: dropped when its slots are
    taken, not before."""
    world = World(slots=32, places=2, swap_threshold=0)
    world.turn("old", 22, 3)
    demote(world, "old", drop=4, cpu=2)
    world.turn("young", 7, 2)
    world.now += 1000                                           # both are idle for about the same time now
    world.submit("x", 24, 1)
    assert traces(world, 1) == ["x[0:16]"] and states(world, "young") == ["GPU", "GPU"]
    world.scheduler.threshold_slots = 4
    assert traces(world) == ["x[16:24]"] and states(world, "young") == ["GPU", "GPU"]
    assert world.cache.conversations["young"].chunks[0].evictable_without_copy
    assert world.cache.stats["chunks_dropped"] == 0
    world.cache.forget(world.cache.conversations["x"])
    world.submit("y", 25, 1)
    world.run()
    assert states(world, "young") == [None, "GPU"] and states(world, "old") == [None] * 4 + ["CPU"] * 2
    assert world.cache.stats["chunks_dropped"] == 1


# ---- FCFS

def test_nobody_overtakes_the_head():
    """c would fit; b, before it, does not. c needs a slot and 10% in reserve, since b runs by then, which has
    taken the slots of a whole chunk."""
    world = World(slots=20, swap_threshold=0)
    world.submit("a", 12, 3)
    steps(world, 1)
    world.submit("b", 8, 2)
    world.submit("c", 1, 2)
    assert traces(world) == ["a[12:13]", "a[13:14]", " | out a[0:4]", "b[0:8] | out a[4:8]",
                             "b[8:9] | out a[8:12]",
                             "c[0:1]", "c[1:2]"]


def test_turns_of_a_conversation_run_in_order_and_hold_up_nobody_else():
    world = World(slots=64)
    first, second = world.submit("a", 5, 3), world.submit("a", 2, 2)
    world.submit("b", 4, 2)
    assert traces(world) == ["a[0:5] b[0:4]", "a[5:6] b[4:5]", "a[6:7]", "a[7:10]", "a[10:11]"]
    assert [first.generated, second.generated] == undisturbed((first.prompt, 3), (second.prompt, 2))


def test_a_parked_turn_joins_the_queue_at_its_own_arrival():
    world = World(slots=64, rows=1)
    for name, max_tokens in [("a", 2), ("a", 1), ("b", 1)]:
        world.submit(name, 3, max_tokens)
    assert traces(world) == ["a[0:3]", "a[3:4]", "a[4:8]", "b[0:3]"]


def test_a_waiting_conversation_is_not_a_victim_while_an_idle_one_is_there():
    """a has been idle for longer than b, but its turn waits behind x, for which there is no room yet."""
    world = World(slots=24, swap_threshold=0, rows=1)
    for name in "abc":
        world.turn(name, 7, 2)
    world.submit("x", 8, 2)
    world.submit("a", 1, 2)
    assert traces(world) == [" | out b[0:8]", "x[0:8] | out c[0:4]", "x[8:9] | out c[4:8]", "a[8:10]",
                             "a[10:11]"]


def test_a_turn_that_outgrows_the_limit_while_it_waits_fails_alone():
    world = World(slots=32, limit=16)
    first, second, third = world.submit("a", 5, 6), world.submit("a", 5, 4), world.submit("a", 1, 2)
    other = world.submit("b", 5, 3)
    world.run()
    assert second.finish_reason == "failed" and isinstance(second.error, ValueError) and second.usage is None
    assert "16 tokens" in str(second.error) and "max_tokens is 4" in str(second.error)
    assert "limit of 16" in str(second.error)
    assert list(world.scheduler.ended) == [other, first, second, third] and second.generated == []
    assert [first.generated, third.generated] == undisturbed((first.prompt, 6), (third.prompt, 2))
    assert third.usage == usage(gpu=10, new=2) and len(other.generated) == 3
    assert world.scheduler.stats["cancelled"] == 1 and world.scheduler.stats["finished"] == 3


# ---- stateless, one-offs

def test_stateless_forgets_the_kv_and_keeps_the_tokens():
    world = World(slots=64, stateless=True)
    first, _ = world.turn("a", 5, 2)
    assert all_free(world)
    second = world.submit("a", 2, 2)
    assert traces(world) == ["a[0:9]", "a[9:10]"] and second.usage == usage(recomputed=6, new=3)
    assert second.generated == undisturbed((first.prompt, 2), (second.prompt, 2))[1]


def test_stateless_forgets_the_kv_of_a_cancelled_turn_too():
    """It has recomputed the context of the turn before."""
    world = World(slots=64, stateless=True)
    world.turn("a", 9, 2)
    request = world.submit("a", 3, 9)
    steps(world, 2)
    world.scheduler.cancel(request, world.now)
    assert all_free(world)
    assert world.turn("a", 3, 2)[0].usage == usage(recomputed=10, new=4)


def test_one_offs_leave_nothing_behind():
    world = World()
    world.submit(None, 9, 3)
    world.submit(None, 9, 3)
    world.run()
    assert all_free(world) and not world.cache.conversations and not world.cache.cold_conversations()
    assert all(index.cheapest(world.now) is None for index in world.cache.indexes.values())


# ---- ended_by, finish, account

def test_stop_ids_and_stop_strings_end_a_reply():
    world = World()
    expected, = undisturbed((list(range(6)), 8))
    stop = expected[3]
    assert stop not in expected[:3]
    by_id = Request(world.cache.open("a"), list(range(6)), 8, stop_ids=frozenset([stop]))
    by_text = Request(world.cache.open("b"), list(range(6)), 8, reached_stop=lambda token: token == stop)
    for request in by_id, by_text:
        world.scheduler.submit(request)
    world.run()
    assert list(world.scheduler.ended) == [by_id, by_text]
    for request in by_id, by_text:
        assert request.generated == expected[:4] and request.finish_reason == "stop"
        assert request.conversation.tokens.tolist() == list(range(6)) + expected[:4]


# ---- one step ahead of what the scheduler is told

def test_ahead_a_reply_that_may_not_be_longer_launches_no_step_more():
    world = World(depth=1)
    request, trace = world.turn("a", 10, 3)
    assert trace == ["step 0  a[0:10]", "step 1  a[10:11]", "step 2  a[11:12]"]
    assert [request.generated] == undisturbed((request.prompt, 3)) and request.times == [2, 3, 4]


def test_ahead_a_late_stop_wastes_one_span_and_nothing_else():
    """b goes on meanwhile, and a's next turn finds the conversation that it would have found in step."""
    whole, = undisturbed((list(range(6)), 8))
    assert whole[2] not in whole[:2]
    world = World(slots=64, depth=1)
    a, b = world.submit("a", list(range(6)), 8), world.submit("b", 6, 5)
    a.stop_ids = {whole[2]}
    assert traces(world) == ["a[0:6] b[0:6]", "a[6:7] b[6:7]", "a[7:8] b[7:8]",
                             "a[8:9] b[8:9]",                   # launched before we know a's third token
                             "b[9:10]"]
    assert a.generated == whole[:3] and a.finish_reason == "stop" and len(b.generated) == 5
    assert a.conversation.tokens.tolist() == list(range(6)) + whole[:3] and a.conversation.known == 8
    assert world.scheduler.stats["generated_tokens"] == 8
    again = world.submit("a", 2, 1)
    assert traces(world) == ["a[8:11]"] and again.usage == usage(gpu=8, new=3)


def test_ahead_only_whose_tokens_are_known_is_suspended(monkeypatch):
    """a and b need more slots than there are, in every step in which neither has one."""
    suspended, suspend = [], Scheduler.suspend
    def watched(scheduler, request, now):
        suspended.append(request.conversation.tokens[-1])
        suspend(scheduler, request, now)
    monkeypatch.setattr(Scheduler, "suspend", watched)
    world = World(slots=16, places=1, swap_threshold=0, reserve=0, depth=1)
    a, b = world.submit("a", 6, 8), world.submit("b", 6, 8)
    world.run()
    assert suspended and PLACEHOLDER not in suspended
    assert b.generated == undisturbed((b.prompt, 8))[0] and a.generated == undisturbed((a.prompt, 8))[0]


# ---- SharingCache.follow: one prompt, several replies

def test_a_prompt_that_is_asked_several_times_is_computed_once():
    """But for the last token. The others wait until that has been done: they share the full chunks and copy
    the slots behind them."""
    world = World(slots=64, rows=4)
    prompt = list(range(22))
    first = world.submit("a", prompt, 2)
    others = [world.submit(name, prompt, 2, like=first) for name in "bd"]
    assert world.run() == ["step 0  a[0:16]", "step 1  a[16:22]", "step 2  a[22:23] b[21:22] d[21:22]",
                           "step 3  b[22:23] d[22:23]"]
    assert [request.usage["gpu"] for request in (first, *others)] == [0, 21, 21]
    assert len({tuple(request.generated) for request in (first, *others)}) == 1
    assert [request.times for request in (first, *others)] == [[2, 3], [3, 4], [3, 4]]


def test_a_prompt_that_fills_most_slots_is_shared_at_once():
    """What the others share is their own when they ask for slots: it is neither copied out for them nor has
    to fit once more."""
    world = World(slots=32, rows=4, swap_threshold=0)
    first = world.submit("a", list(range(22)), 2)
    for name in "bd":
        world.submit(name, list(range(22)), 2, like=first)
    assert world.run() == ["step 0  a[0:16]", "step 1  a[16:22]", "step 2  a[22:23] b[21:22] d[21:22]",
                           "step 3  b[22:23] d[22:23]"]


def test_whoever_repeats_a_prompt_does_not_wait_for_one_that_has_ended():
    """Cancelled in mid-prefill, or forgotten by a stateless scheduler: the prompt is computed again."""
    world = World(slots=64)
    first = world.submit("a", list(range(22)), 2)
    other = world.submit("b", list(range(22)), 2, like=first)
    world.step()
    world.scheduler.cancel(first, world.now)
    assert world.run() == ["step 1  b[0:16]", "step 2  b[16:22]", "step 3  b[22:23]"]
    assert other.usage["new"] == 22
    stateless = World(slots=64, stateless=True)
    first = stateless.submit("a", list(range(10)), 1)
    other = stateless.submit("b", list(range(10)), 1, like=first)
    assert stateless.run() == ["step 0  a[0:10]", "step 1  b[0:10]"]


def test_a_conversation_that_has_chunks_of_its_own_shares_no_others():
    world = World(slots=64)
    world.turn("b", 5, 2)
    tokens = [*world.cache.conversations["b"].tokens, *range(9)]
    first = world.submit("a", tokens, 1)
    other = world.submit("b", list(range(9)), 1, like=first)
    world.run()
    assert other.usage == dict(gpu=6, cpu=0, recomputed=0, new=10)


def test_what_somebody_has_computed_and_all_have_lost_counts_as_recomputed():
    """b asks what a has asked. Before there are slots for b, c takes those of the first two chunks."""
    world = World(slots=34, places=0, rows=2, swap_threshold=0, reserve=0.25)
    world.turn("a", 9, 4)
    world.submit("c", 2, 20)
    steps(world, 1)
    first = world.submit("a", 8, 5)
    world.fork("a", "b", 13)
    other = world.submit("b", first.prompt, 2, like=first)
    assert "b[0:8] b[20:21]" in traces(world)
    assert other.usage == usage(gpu=12, recomputed=8, new=1)


def test_account_hands_out_each_token_and_counts():
    world = World()
    a, b = world.submit("a", 4, 2), world.submit("b", 20, 1)
    handed_out = {a: [], b: []}
    while world.scheduler.busy:
        batch = world.scheduler.schedule(0.0)
        result = world.worker.execute(batch)
        world.scheduler.launched(batch)
        for request in world.scheduler.account(batch, result, 0.0):
            handed_out[request].append(request.generated[-1])
    assert handed_out == {a: a.generated, b: b.generated} and list(world.scheduler.ended) == [a, b]
    assert world.scheduler.steps == 2
    assert world.scheduler.stats == dict(prompt_tokens_gpu=0, prompt_tokens_cpu=0,
                                         prompt_tokens_recomputed=0, prompt_tokens_new=24,
                                         generated_tokens=3, suspensions=0, finished=2, cancelled=0)


# ---- give_way, suspend

def recovering_pair():
    """a and b, both recovering a dropped history of 8 tokens, 4 a step; together they need all slots but
    two."""
    world = World(slots=24, places=0, max_batch_tokens=4, swap_threshold=0, reserve=0)
    for name in "ab":
        world.turn(name, 7, 2)
        demote(world, name, drop=2)
    return world, world.submit("a", 2, 8), world.submit("b", 2, 8)


def test_two_half_recovered_requests_exhaust_the_slots():
    """Each gets all its slots or none at admission, so both recover; when both need one more, the latest
    arrival gives way, not the oldest."""
    world, a, b = recovering_pair()
    trace = traces(world)
    assert trace[:9] == ["a[0:4]", "a[4:8]", "a[8:11] b[0:1]", "a[11:12] b[1:4]", "a[12:13] b[4:7]",
                         "b[7:11]", "a[13:14]", "a[14:15]", "a[15:16]"]
    assert world.scheduler.stats["suspensions"] == 1
    assert [r.usage for r in (a, b)] == [usage(recomputed=8, new=3)] * 2
    for request in a, b:
        whole = request.conversation.tokens
        assert request.generated == [answer(whole[:11 + i]) for i in range(8)]


def test_give_way_suspends_nobody_while_an_idle_conversation_has_a_chunk():
    """No copy can be made, so idle's only chunk is dropped when b finds no slot; when that is used up, b,
    the latest, gives way."""
    world = World(slots=16, places=0, swap_threshold=0, reserve=0)
    world.turn("idle", 3, 2)
    a, b = world.submit("a", 6, 8), world.submit("b", 5, 8)
    assert traces(world, 2) == ["a[0:6] b[0:5]", "a[6:7]"]      # b sits out
    assert states(world, "idle") == ["GPU"]
    assert traces(world, 2) == ["a[7:8] b[5:6]", "a[8:9] b[6:7]"]
    assert states(world, "idle") == [None] and world.scheduler.stats["suspensions"] == 0
    assert traces(world, 1) == ["a[9:10]"] and world.scheduler.stats["suspensions"] == 1
    assert world.scheduler.running == [a]
    world.run()
    assert world.scheduler.stats["suspensions"] == 1 and [b.generated] == undisturbed((b.prompt, 8))


@pytest.mark.parametrize("admitted_last", [0, 1, 2])
def test_give_way_is_by_arrival_not_by_order_of_admission(admitted_last):
    world = World(slots=24, places=0, swap_threshold=0, reserve=0)
    requests = [world.submit(name, 4, 6) for name in "abc"]
    steps(world, 1)
    world.scheduler.suspend(requests[admitted_last], world.now)
    steps(world, 1)
    assert world.scheduler.running == requests
    world.scheduler.give_way(world.now)
    assert world.scheduler.running == requests[:2]


def test_suspend_in_the_middle_of_a_hole():
    """What was recomputed stays, what was not begun is absent again, nothing generated is lost."""
    world, a, b = recovering_pair()
    steps(world, 4)                                             # b[0:4] is there
    steps(world, 1)                                             # b[4:7]
    free = len(world.cache.free_slots)
    world.scheduler.suspend(b, world.now)
    world.cache.check_integrity()
    assert states(world, "b") == ["GPU", "GPU", None]
    assert [c.filled for c in b.conversation.chunks] == [4, 3, 0]
    assert len(world.cache.free_slots) == free + 4 and world.scheduler.running == [a]
    assert b.conversation.waiting
    assert world.scheduler.stats["suspensions"] == 1
    world.run()
    assert b.usage == usage(recomputed=8, new=3)
    assert b.generated == [answer(b.conversation.tokens[:11 + i]) for i in range(8)]


def test_suspend_returns_the_request_to_its_place_in_the_queue():
    world = World(slots=64, rows=2)
    world.submit("a", 3, 9)
    b = world.submit("b", 3, 9)
    steps(world, 2)
    c = world.submit("c", 3, 9)
    world.scheduler.suspend(b, world.now)
    assert world.scheduler.prepare_head(world.now) is b
    assert traces(world, 1) == ["a[4:5] b[4:5]"] and c not in world.scheduler.running
    world.run()
    assert [b.generated] == undisturbed((b.prompt, 9))


def test_a_suspended_request_answers_as_if_undisturbed():
    world = World(slots=64, places=3)
    a = world.submit("a", 9, 12)
    for _ in range(6):
        steps(world, 1)
        world.scheduler.suspend(a, world.now)
        demote(world, "a", drop=1, cpu=1)
    world.run()
    assert [a.generated] == undisturbed((a.prompt, 12)) and a.usage == usage(new=9)
    assert world.scheduler.stats["suspensions"] == 6 and world.scheduler.stats["prompt_tokens_new"] == 9


# ---- Scheduler.cancel

def history():
    """a has had a turn: 7 tokens of which 6 are known, chunks [0:4) and [4:6)."""
    world = World(slots=32, places=4, rows=1)
    world.turn("a", 5, 2)
    return world


def snapshot(world):
    a = world.cache.conversations["a"]
    chunks, cache = [(chunk.filled, chunk.state) for chunk in a.chunks], world.cache
    return a.tokens.tolist(), a.known, chunks, len(cache.free_slots), len(cache.free_places)


def check_no_trace(world, before, request):
    """All is as before the turn, and the next one runs as if it had not been."""
    assert request.finish_reason == "cancelled" and snapshot(world) == before
    assert not world.scheduler.busy and not world.cache.conversations["a"].waiting
    assert not world.scheduler.running
    world.cache.check_integrity()
    again, twin = world.turn("a", 3, 2)[0], history()
    twin.turn("a", again.prompt, 2)
    assert again.usage == usage(gpu=6, new=4)
    assert again.conversation.tokens == twin.cache.conversations["a"].tokens


def test_cancel_a_queued_request():
    world = history()
    before, request = snapshot(world), world.submit("a", 3, 4)
    world.scheduler.cancel(request, world.now)
    assert traces(world) == [] and world.scheduler.prepare_head(world.now) is None
    check_no_trace(world, before, request)


def test_cancel_the_first_turn_of_a_conversation():
    """Nobody had heard of a before, so nobody has now."""
    world = World()
    request = world.submit("a", 3, 4)
    steps(world, 2)
    world.scheduler.cancel(request, world.now)
    assert not world.cache.conversations and all_free(world)


def test_cancel_a_parked_request():
    world = World(slots=64)
    first, parked, third = (world.submit("a", 3, 3) for _ in range(3))
    steps(world, 1)
    world.scheduler.cancel(parked, world.now)
    world.run()
    assert parked.usage is None and parked.generated == [] and parked.finish_reason == "cancelled"
    assert [first.generated, third.generated] == undisturbed((first.prompt, 3), (third.prompt, 3))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_cancel_a_running_request(count):
    """While it prefills (4 tokens a step), and while it decodes."""
    world = history()
    world.scheduler.max_batch_tokens = 4
    before, request = snapshot(world), world.submit("a", 9, 4)
    steps(world, count)
    assert request in world.scheduler.running and len(request.conversation.tokens) >= 16
    world.scheduler.cancel(request, world.now)
    check_no_trace(world, before, request)


def test_cancel_a_suspended_request():
    world = history()
    before, request = snapshot(world), world.submit("a", 3, 4)
    steps(world, 2)
    world.scheduler.suspend(request, world.now)
    world.scheduler.cancel(request, world.now)
    assert world.scheduler.prepare_head(world.now) is None
    check_no_trace(world, before, request)


def test_cancel_lets_the_next_turn_run():
    world = history()
    running, following = world.submit("a", 3, 4), world.submit("a", 2, 2)
    steps(world, 2)
    world.scheduler.cancel(running, world.now)
    world.run()
    assert following.usage == usage(gpu=6, new=3) and following.finish_reason == "length"


def test_cancel_twice_or_too_late_is_nothing():
    world = history()
    request = world.submit("a", 3, 1)
    world.run()
    after = snapshot(world)
    world.scheduler.cancel(request, world.now)
    assert snapshot(world) == after and request.finish_reason == "length"
    assert world.scheduler.stats["cancelled"] == 0


def test_cancel_with_an_error_has_failed():
    world = history()
    before, request = snapshot(world), world.submit("a", 3, 4)
    steps(world, 2)
    error = RuntimeError("the worker died")
    world.scheduler.cancel(request, world.now, error)
    assert request.finish_reason == "failed" and request.error is error and snapshot(world) == before


# ---- copies in flight that are overtaken by events; FakeWorker checks the content of everything that is read

def test_a_tail_that_grows_while_it_is_being_copied_out():
    world = World(slots=32, land=Landing(), swap_threshold=1.0)
    world.turn("a", 5, 2)
    world.submit("b", 2, 9)
    assert traces(world, 1) == ["b[0:2] | out a[0:6]"]
    world.submit("a", 1, 1)
    # its tail is full now, the copy of two tokens is on its way
    assert traces(world, 1) == ["b[2:3] a[6:8]"]
    world.worker.land.open = True
    steps(world, 1)
    assert states(world, "a") == ["GPU_AND_CPU", "GPU"]
    assert world.cache.stats["chunks_swapped_out"] == 2
    world.turn("x", 29, 2)
    a = world.submit("a", 1, 1)
    world.run()
    assert a.usage == usage(cpu=8, new=2)


def test_a_tail_truncated_and_regrown_to_the_same_length_while_it_is_being_copied_out():
    """ABA: a turn is suspended, its tail is being copied; it is cancelled, and another turn fills the tail
    as far, with other tokens."""
    world = World(slots=32, land=Landing(), swap_threshold=0)
    world.turn("a", 5, 1)
    first = world.submit("a", 1, 4)
    assert traces(world, 1) == ["a[5:7]"]
    world.scheduler.suspend(first, world.now)
    demote(world, "a", both=1)                                  # a[0:4] has landed
    tail = world.cache.conversations["a"].chunks[1]
    # so that the worker waits for no copy
    idle_span = Span(Request(world.cache.open("nobody"), []), 0, 0)
    transfer(world, spans=[idle_span], swap_out=world.cache.plan_swap_out(8, world.now))
    ticket = tail.ticket
    world.scheduler.cancel(first, world.now)
    assert tail.filled == 1
    world.submit("a", 1, 1)
    assert traces(world, 1) == ["a[5:7]"] and tail.filled == ticket.filled == 3
    world.worker.land.open = True
    world.run()
    assert states(world, "a") == ["GPU_AND_CPU", "GPU"]
    world.turn("x", 31, 1)
    again = world.submit("a", 1, 1)
    world.run()
    assert again.usage == usage(cpu=7, new=2)


@pytest.mark.parametrize("way", ["forget", "cancel"])
def test_a_conversation_that_goes_away_during_a_copy_out(way):
    world = World(slots=32, land=Landing(), swap_threshold=1.0)
    world.turn("a", 9, 2)
    world.submit("b", 2, 9)
    assert traces(world, 1) == ["b[0:2] | out a[0:10]"]
    a = world.cache.conversations["a"]
    if way == "cancel":
        request = world.submit("a", 3, 5)
        steps(world, 2)
        world.scheduler.cancel(request, world.now)
        assert a.known == 10
    else:
        world.cache.forget(a)
        assert len(world.cache.free_slots) == 32 - 10 - 2       # its slots are being read
    world.cache.check_integrity()
    world.worker.land.open = True
    steps(world, 1)
    if way == "cancel":
        assert states(world, "a") == ["GPU_AND_CPU", "GPU_AND_CPU", "GPU"]
    else:
        assert len(world.cache.free_places) == 8
    world.run()
    again, _ = world.turn("a", 3, 2)
    assert again.usage == (usage(gpu=10, new=4) if way == "cancel" else usage(new=3))


@pytest.mark.parametrize("way", ["forget", "cancel"])
def test_a_conversation_that_goes_away_during_a_copy_in(way):
    world = World(slots=32, land=Landing())
    world.worker.land.open = True
    world.turn("a", 9, 2)
    demote(world, "a", cpu=3)
    world.worker.land.open = False
    request = world.submit("a", 3, 5)
    assert traces(world, 2) == ["a[10:14] | in a[0:10]", "a[14:15]"]
    world.scheduler.cancel(request, world.now)
    if way == "forget":
        world.cache.forget(world.cache.conversations["a"])
        # busy until the copies end
        assert len(world.cache.free_slots) == 32 - 12 and len(world.cache.free_places) == 8 - 3
    world.cache.check_integrity()
    again = world.submit("a", 3, 2)
    steps(world, 1)
    world.worker.land.open = True
    world.run()
    assert again.usage == (usage(gpu=10, new=4) if way == "cancel" else usage(new=3))


def test_ahead_of_time_copying_never_destroys_a_valid_gpu_copy():
    world = World(slots=32, places=2, swap_threshold=1.0)
    world.turn("a", 15, 2)
    world.submit("b", 2, 9)
    # two chunks copied, two evictable without a copy, for want of places; slots are free
    steps(world, 5)
    assert states(world, "a") == ["GPU_AND_CPU"] * 2 + ["GPU"] * 2
    assert world.cache.conversations["a"].cached() == (16, 0)
    a = world.submit("a", 1, 1)
    world.run()
    assert a.usage == usage(gpu=16, new=2)


def test_the_place_of_an_idle_copied_chunk_is_not_taken_that_of_a_running_conversation_is():
    world = World(slots=40, places=2, swap_threshold=0)
    world.turn("a", 7, 2)
    demote(world, "a", both=2)
    world.turn("b", 7, 2)
    world.scheduler.threshold_slots = 40
    world.submit("c", 2, 9)
    # b is evictable without a copy instead
    assert traces(world, 2) == ["c[0:2]", "c[2:3]"] and states(world, "a") == ["GPU_AND_CPU"] * 2
    world.turn("b", 1, 1)
    world.submit("d", 2, 9)
    a = world.submit("a", 1, 9)
    assert traces(world, 1) == ["d[0:2] a[8:10] | out c[0:8]"] and states(world, "a") == ["GPU", "GPU", "GPU"]
    assert a.usage == usage(gpu=8, new=2)


# ---- complexity: bytecodes, not seconds

def bytecodes(function):
    """How many bytecodes of scheduler, cache and eviction the call executes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def world_of_idlers(others, context):
    """A request that decodes with so many tokens of context, among idle conversations with a chunk on the
    CPU and one on the GPU."""
    world = World(slots=8 * others + context + 64, places=2 * others, max_batch_tokens=2 * context,
                  swap_threshold=0)
    cache = world.cache
    for i in range(others):
        conversation = cache.open(f"idle{i}", range(8))
        cache.admit(conversation, 8, float(i))
        cache.computed(conversation, 0, 8)
        cache.release(conversation, float(i))
    world.now = 2.0 * others
    for ticket in cache.plan_swap_out(4 * others, world.now):
        cache.complete(ticket)
    cache.take_table_updates()
    cache.cold_conversations(), cache.next_to_leave(world.now)          # files them all: once, not in a step
    world.submit("a", [1] * context, 40)
    return world


def decode_steps(world, count, copies=0):
    """Without a worker. copies: tokens to copy out in each step."""
    for _ in range(count):
        world.now += 1.0
        if copies:
            world.scheduler.threshold_slots = world.cache.available + copies
        batch = world.scheduler.schedule(world.now)
        assert len(batch.spans) == 1 and bool(batch.swap_out) == bool(copies)
        world.scheduler.launched(batch)
        world.scheduler.account(batch, Result([1], batch.swap_out), world.now)


@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("small, large", [((10, 64), (2000, 64)), ((10, 64), (10, 8192))])
def test_a_step_costs_the_same_whatever_the_context_and_however_many_conversations(small, large, copies):
    counts = []
    for others, context in small, large:
        world = world_of_idlers(others, context)
        decode_steps(world, 2)
        counts.append(bytecodes(lambda: decode_steps(world, 8, copies)))
    assert counts[1] < 1.5 * counts[0], counts


def test_admission_does_not_look_at_other_conversations():
    counts = []
    for others in (10, 2000):
        world = world_of_idlers(others, 64)
        counts.append(bytecodes(lambda: decode_steps(world, 1)))
    assert counts[1] < 1.5 * counts[0], counts
