"""Lab 2: what is missing, what a batch takes, who runs, who gives way. Chunks of 4 tokens, at most 16 tokens
a step, unless a test says otherwise."""
import random

import pytest

from fakes import World, answer
from grading import SEED, block_of_the_handout, same_lines
from scheduler import Batch, Request

points = pytest.mark.points


def admitted(total, filled, chunk=4):
    """A running request whose chunks have that many leading tokens cached each."""
    cache = World(slots=100, chunk=chunk).cache
    conversation = cache.open("a", range(total))
    cache.admit(conversation, total, 0.0)
    for index, count in enumerate(filled):
        if count := min(count, total - index * chunk):
            cache.computed(conversation, index * chunk, index * chunk + count)
    return Request(conversation, [], tokens_before=0, prefilling=True)


def lose(world, name, chunks):
    """The first chunks of an idle conversation are dropped."""
    cache, conversation = world.cache, world.cache.conversations[name]
    known = conversation.known
    for chunk in conversation.chunks[:chunks]:
        cache._drop(chunk)
    assert conversation.known == known
    cache.check_integrity()


def traces(world, steps=None):
    """Run that many steps, or all. Their traces, without the steps' numbers."""
    begin = len(world.worker.traces)
    if steps is None:
        world.run(200)
    else:
        for _ in range(steps):
            world.step()
    return [trace.split("  ", 1)[1] for trace in world.worker.traces[begin:]]


def check(right, message):
    if not right:
        pytest.fail(message, pytrace=False)


# ---- Request.missing

def missing(request):
    runs = list(request.missing())
    check(all(start < end for start, end in runs), f"a run is empty\n  yours     {runs}")
    return runs


@points(2, "Request.missing")
def test_a_new_prompt_is_one_run():
    assert missing(admitted(6, [0, 0])) == [(0, 6)]


@points(2, "Request.missing")
def test_a_decode_is_the_last_position():
    request = admitted(9, [4, 4, 0])
    assert missing(request) == [(8, 9)]
    request.prefilling = False
    assert missing(request) == [(8, 9)]


@points(2, "Request.missing")
def test_dropped_chunks_in_front_and_a_new_prompt_at_the_end():
    assert missing(admitted(11, [0, 4, 2])) == [(0, 4), (10, 11)]


@points(2, "Request.missing")
def test_a_chunk_that_is_partly_filled_joins_the_hole_behind_it():
    assert missing(admitted(20, [4, 0, 2, 0, 1])) == [(4, 8), (10, 16), (17, 20)]


@points(2, "Request.missing")
def test_nothing_is_missing():
    assert missing(admitted(12, [4, 4, 4])) == []


@points(3, "Request.missing")
def test_300_random_contexts():
    rng = random.Random(SEED)
    for _ in range(300):
        chunk, chunks = rng.randint(1, 5), rng.randint(1, 8)
        filled = [rng.choice([0, chunk, rng.randint(0, chunk)]) for _ in range(chunks)]
        total = (chunks - 1) * chunk + rng.randint(1, chunk)
        holes = [position for position in range(total) if position % chunk >= filled[position // chunk]]
        runs = missing(admitted(total, filled, chunk))
        case = f"chunks of {chunk}, {total} tokens, filled {filled}: {runs}"
        assert [position for start, end in runs for position in range(start, end)] == holes, case
        assert all(end < start for (_, end), (start, _) in zip(runs, runs[1:])), case + " is not maximal"


# ---- Batch.take

def taken(budget, *requests):
    batch = Batch(0, budget)
    for request in requests:
        batch.take(request)
    return [(span.start, span.end) for span in batch.spans], batch.budget


@points(2, "Batch.take")
def test_take_everything_that_fits():
    assert taken(20, admitted(21, [0, 0, 4, 0, 2, 0])) == ([(0, 8), (12, 16), (18, 21)], 5)


@points(2, "Batch.take")
def test_the_last_span_stops_early():
    request = admitted(21, [0, 0, 4, 0, 2, 0])
    assert taken(13, request) == ([(0, 8), (12, 16), (18, 19)], 0)
    assert taken(3, request) == ([(0, 3)], 0)


@points(2, "Batch.take")
def test_no_span_is_empty():
    request = admitted(21, [0, 0, 4, 0, 2, 0])
    assert taken(8, request) == ([(0, 8)], 0)
    assert taken(0, request) == ([], 0)


@points(2, "Batch.take")
def test_a_second_request_takes_what_is_left():
    assert taken(7, admitted(4, [2]), admitted(9, [0, 0, 0])) == ([(2, 4), (0, 5)], 0)


# ---- Scheduler.compose

def small_case():
    """The case of the handout, predicted on paper."""
    world = World(slots=20, max_batch_tokens=8, swap_threshold=0.5)
    world.submit("a", 10, 3)
    world.submit("b", 3, 4)
    traces(world, 3)
    world.submit("c", 6, 2)
    world.run()
    return world.worker.traces


@points(3, "Scheduler.compose")
def test_decodes_never_stall_behind_a_long_prompt():
    world = World(slots=64, max_batch_tokens=8)
    world.submit("a", 20, 2)
    world.submit("b", 3, 6)
    assert traces(world, 3) == ["a[0:8]", "a[8:16]", "a[16:20] b[0:3]"]
    world.submit("c", 20, 2)
    assert traces(world, 1) == ["a[20:21] b[3:4] c[0:6]"]


@points(3, "Scheduler.compose")
def test_the_case_of_the_handout():
    handout = block_of_the_handout("2_spans_and_batches", "text answer")
    same_lines(handout, [trace.strip() for trace in small_case()])


@points(3, "Scheduler.compose")
def test_a_hole_and_a_prompt_in_one_batch():
    world = World(slots=64)
    world.turn("a", 13, 4)
    lose(world, "a", 1)
    request = world.submit("a", 6, 2)
    assert traces(world) == ["a[0:4] a[16:23]", "a[23:24]"]
    assert request.usage == dict(gpu=12, cpu=0, recomputed=4, new=7)


@points(3, "Scheduler.compose")
def test_nobody_overtakes_the_head_of_the_queue():
    """c would fit; b, before it, does not yet."""
    world = World(slots=20, swap_threshold=0)
    world.submit("a", 12, 3)
    traces(world, 1)
    world.submit("b", 8, 2)
    world.submit("c", 1, 2)
    assert [trace for trace in traces(world) if "c[0:1]" in trace or "b[0:8]" in trace] == [
        "b[0:8] | out a[4:8]", "c[0:1]"]


@points(3, "Scheduler.compose")
def test_nobody_is_admitted_without_budget():
    world = World(slots=64, max_batch_tokens=2)
    for name in "abc":
        world.submit(name, 1, 3)
    assert traces(world, 2) == ["a[0:1] b[0:1]", "a[1:2] b[1:2]"] and len(world.scheduler.running) == 2


@points(3, "Scheduler.compose")
def test_separate_phases_keep_nothing_beside_a_prefill():
    world = World(slots=64, max_batch_tokens=8, separate_phases=True)
    world.submit("b", 3, 4)
    traces(world, 1)
    world.submit("a", 12, 2)
    assert traces(world, 3) == ["a[0:7]", "a[7:12]", "b[3:4] a[12:13]"]


@points(5, "Scheduler.compose")
def test_a_starved_request_sits_out_and_is_counted():
    """a finds no slot: it gets no span, and one slot is copied free for it, though the threshold is 0."""
    world = World(slots=16, swap_threshold=0, reserve=0)
    world.turn("idle", 5, 2)                                    # 6 of 16 slots
    world.submit("a", 5, 5)
    world.submit("b", 5, 4)
    assert traces(world, 2) == ["a[0:5] b[0:5]", " | out idle[0:4]"]
    check(not world.scheduler.stats["suspensions"],
          "a request was suspended, though a copy out could serve the starved ones")
    assert traces(world, 1) == ["a[5:6] b[5:6]"]


@points(5, "Scheduler.compose")
def test_a_starved_request_does_not_stop_those_behind_it():
    """a and c find no slot, b has one left."""
    world = World(slots=24, places=0, swap_threshold=0, reserve=0)
    world.submit("a", 6, 8)
    world.submit("b", 5, 8)
    traces(world, 2)
    world.submit("c", 8, 8)
    assert traces(world, 2) == ["a[7:8] b[6:7] c[0:8]", "b[7:8]"]


@points(5, "Scheduler.compose")
def test_decodes_come_before_a_prompt_that_arrived_before_them():
    """The second turn of a arrived before b, and joins when the first has ended."""
    world = World(slots=64, max_batch_tokens=8)
    world.submit("a", 3, 2)
    world.submit("a", 18, 2)
    world.submit("b", 3, 8)
    assert traces(world, 4) == ["a[0:3] b[0:3]", "a[3:4] b[3:4]", "b[4:5] a[4:11]", "b[5:6] a[11:18]"]


@points(5, "Scheduler.compose")
def test_a_context_that_is_as_long_as_it_may_become_has_nothing_left_to_compute():
    """The host is one step ahead: the last token of a is on its way when b goes on."""
    world = World(slots=64, depth=1)
    world.submit("a", 4, 2)
    world.submit("b", 4, 4)
    assert traces(world, 4) == ["a[0:4] b[0:4]", "a[4:5] b[4:5]", "b[5:6]", "b[6:7]"]


# ---- Scheduler.give_way, Scheduler.suspend

def crowded():
    """a and b grow until no slot is left; there is no CPU tier."""
    world = World(slots=16, places=0, swap_threshold=0, reserve=0)
    return world, world.submit("a", 6, 8), world.submit("b", 6, 8)


@points(2, "Scheduler.give_way")
def test_the_latest_arrival_gives_way():
    world, a, b = crowded()
    assert traces(world, 4) == ["a[0:6] b[0:6]", "a[6:7] b[6:7]", "a[7:8] b[7:8]", "a[8:9]"]
    assert world.scheduler.running == [a]


@points(2, "Scheduler.give_way")
def test_arrival_counts_not_the_order_of_admission():
    world = World(slots=24, places=0, swap_threshold=0, reserve=0)
    requests = [world.submit(name, 4, 6) for name in "abc"]
    traces(world, 1)
    world.scheduler.suspend(requests[0], world.now)             # and it is admitted again, after the others
    traces(world, 1)
    world.scheduler.give_way(world.now)
    assert world.scheduler.running == requests[:2]


@points(3, "Scheduler.suspend")
def test_nothing_generated_is_lost():
    world, a, b = crowded()
    traces(world)
    assert world.scheduler.stats["suspensions"] == 1
    for request in a, b:
        tokens = request.conversation.tokens
        assert request.generated == [answer(tokens[:6 + count]) for count in range(8)]


@points(9, "Scheduler.suspend")
def test_a_suspended_request_returns_to_its_place_in_the_queue():
    world = World(slots=64, rows=2)
    world.submit("a", 3, 9)
    b = world.submit("b", 3, 9)
    traces(world, 2)
    world.submit("c", 3, 9)
    world.scheduler.suspend(b, world.now)
    check(b.conversation.waiting, "its conversation does not wait (set_waiting), so its chunks count as "
                                  "idle and leave first")
    check(world.scheduler.prepare_head(world.now) is b, "it is not the head of the queue")
    assert traces(world, 1) == ["a[4:5] b[4:5]"]


# ---- all of it

# Conversations, longest prompt and reply, chance of a cancellation in a step; a World's arguments.
LOADS = {
    "short_prompts": ("abcdefgh", 12, 12, 0.05, dict(slots=48, places=8)),
    "launched_ahead": ("abcdefgh", 12, 12, 0.1, dict(slots=40, places=6, depth=1)),
    "long_prompts": ("abcd", 24, 12, 0.1, dict(slots=80, places=12, depth=1, max_batch_tokens=6)),
    "suspensions": ("abcdefgh", 6, 24, 0.05, dict(slots=40, places=8, depth=1, swap_threshold=0, rows=8)),
    "no_cpu_tier": ("abcdefgh", 12, 12, 0.05, dict(slots=36, places=0, swap_threshold=0)),
}


@points(5, "all together")
@pytest.mark.parametrize("name", LOADS)
def test_the_trace_of_a_random_load(name, compare):
    traces = []
    try:
        for trace in random_load(name, SEED):
            traces.append(trace)
    finally:
        compare(traces)


def random_load(name, seed):
    """The traces of 120 steps of conversations in tiers that are too small for them."""
    rng, (names, prompt, reply, cancelled, arguments) = random.Random(seed), LOADS[name]
    world = World(reserve=0, seed=seed, **arguments,
                  land=lambda tickets: [ticket for ticket in tickets if rng.random() < 0.6])
    requests = []
    for _ in range(120):
        if rng.random() < 0.4:
            requests.append(world.submit(rng.choice(names), rng.randint(1, prompt), rng.randint(2, reply)))
        unfinished = [request for request in requests if not request.finish_reason]
        if unfinished and rng.random() < cancelled:
            world.scheduler.cancel(rng.choice(unfinished), world.now)
        seen = len(world.worker.traces)
        world.step()
        yield from world.worker.traces[seen:]


def reference(seed):
    return {f"test_the_trace_of_a_random_load[{name}]": list(random_load(name, seed)) for name in LOADS}
