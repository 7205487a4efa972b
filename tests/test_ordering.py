"""What must happen before what when copies and computation overlap, on streams that record it (streams.py).

Results cannot show it: on a CPU everything runs in order, and a GPU goes wrong once a week."""
import random
from collections import deque

import pytest
import torch

from eviction import POLICIES, RecomputeCost
from kv_cache import KVCache
from sampling import Sampling
from scheduler import Batch, Request, Scheduler
from streams import Recorder, Stream
from test_kv_pool import LAYERS, make, ticket
from test_worker import CHUNK, CONTEXT, ROWS, VOCAB, decode, make_worker, requests


# ---- the streams themselves

def test_what_is_before_what():
    """The picture of streams.py."""
    recorder = Recorder(make())
    pool, side = recorder.pool, recorder.pool.stream_in
    with recorder:
        pool.gpu[0, 0, 3] = 0.0                                 # a0
        event = pool.mark()
        pool.gpu[0, 0, 3].sum()                                 # a1, behind the event
        side.wait_event(event)
        with pool.on(side):
            pool.gpu[0, 0, 3:5] = 1.0                           # b0
            arrived = pool.mark()
        pool.stream().wait_event(arrived)
        pool.gpu[0, :, [4, 9]].sum()                            # a2
    a0, a1, b0, a2 = recorder.accesses
    assert [access.stream for access in recorder.accesses] == ["main", "main", "in", "main"]
    assert a0.before(a1) and a0.before(b0) and b0.before(a2) and a1.before(a2)
    assert not a1.before(b0) and not b0.before(a1) and not a0.before(a0)
    assert [len(access.vectors) for access in recorder.accesses] == [1, 1, 2, 4]
    assert recorder.races() == [(a1, b0)]


def test_what_the_host_has_waited_for_is_before_all_that_it_starts_later():
    recorder = Recorder(make())
    with recorder:
        with recorder.pool.on(recorder.pool.stream_out):
            recorder.pool.gpu[0, 0, 3].sum()
            event = recorder.pool.mark()
        assert not event.query()
        event.synchronize()
        assert event.query() and recorder.host_waited
        recorder.pool.gpu[0, 0, 3] = 0.0
    first, second = recorder.accesses
    assert first.before(second) and recorder.races() == []


def test_views_touch_nothing_and_operators_what_they_select():
    recorder = Recorder(make())
    gpu, cpu = recorder.pool.gpu, recorder.pool.cpu
    with recorder:
        view = gpu[1, 0].transpose(0, 1)[:, :2]
        gpu.new_empty(3)
        assert recorder.accesses == []
        torch.index_select(gpu[1, 0], 0, torch.tensor([5, 6]))
        gpu[1, 0].index_copy_(0, torch.tensor([5]), torch.zeros(1, *gpu.shape[3:]))
        cpu[0, :, 2:6].copy_(torch.zeros(2, 4, *cpu.shape[3:]))
        view.sum()
    assert [(access.tier, access.writes, len(access.vectors)) for access in recorder.accesses] == [
        ("gpu", False, 2), ("gpu", True, 1), ("cpu", True, 2 * 4), ("gpu", False, 2)]


# ---- the pool

def layers_of(recorder, label):
    return [recorder.labelled(f"{label} {layer}") for layer in range(LAYERS)]


def one_step(pipeline=True, coming=True):
    """An earlier step writes; copies in; the layers; copies out that are started while the layers compute."""
    recorder = Recorder(make(pipeline=pipeline))
    pool = recorder.pool
    with recorder:
        with recorder.doing("earlier"):
            pool.gpu[:, :, 20:24] = 0.0
        with recorder.doing("in"):
            pool.swap_in([ticket("in", [1, 2, 20], 0)] if coming else [])
        written = pool.mark()
        for layer in range(LAYERS):
            pool.wait(layer)
            with recorder.doing(f"layer {layer}"):
                pool.gpu[layer, :, [1, 2]].sum()
        with recorder.doing("out"):
            pool.swap_out([ticket("out", [21, 22], 3)], written)
    return recorder


def test_a_layer_waits_for_its_own_copies_and_for_no_others():
    recorder = one_step()
    vectors = 2 * recorder.pool.gpu.shape[2]                    # of a layer
    for layer, (read,) in enumerate(layers_of(recorder, "layer")):
        for access in recorder.labelled("in", "gpu", writes=True):
            assert access.before(read) == (min(access.vectors) // vectors <= layer)


def test_without_a_pipeline_the_first_layer_waits_for_all_copies():
    recorder = one_step(pipeline=False)
    (first,), *_ = layers_of(recorder, "layer")
    assert all(access.before(first) for access in recorder.labelled("in"))


def test_a_step_waits_for_all_that_was_swapped_in_since_the_last_one():
    """A step without spans copies in, too; the next one that computes waits for both."""
    recorder = Recorder(make())
    with recorder:
        for place, slots in enumerate(([1, 2], [3, 4])):
            recorder.pool.swap_in([ticket("in", slots, place)])
        for layer in range(LAYERS):
            recorder.pool.wait(layer)
            recorder.pool.gpu[layer, :, [1, 2, 3, 4]].sum()
    assert recorder.races() == []


def test_copies_out_wait_for_earlier_steps_and_copies_in_and_not_for_this_step():
    recorder = one_step()
    copies = recorder.labelled("out")
    assert all(access.before(copy) for label in ("earlier", "in") for access in recorder.labelled(label)
               for copy in copies)
    assert not any(read.before(copy) for reads in layers_of(recorder, "layer") for read in reads
                   for copy in copies)
    assert not recorder.host_waited


@pytest.mark.parametrize("stream, method, coming", [
    ("in", "wait_stream", True), ("main", "wait_event", True), ("out", "wait_event", False)])
def test_without_any_one_of_the_waits_there_is_a_race(stream, method, coming, monkeypatch):
    """(With copies in, those out are behind earlier steps anyway: they wait for what waits for these.)"""
    assert one_step(coming=coming).races() == []
    wait = getattr(Stream, method)
    monkeypatch.setattr(Stream, method, lambda self, other: self.name == stream or wait(self, other))
    assert one_step(coming=coming).races()


# ---- a worker

def test_a_worker_starts_copies_out_beside_the_step_that_computes():
    """Not behind it, where they would hide nothing. It waits for them only if there is nothing to compute."""
    worker = make_worker()
    batch = decode(requests(worker, [9, 5]))
    batch.swap_out = [ticket("out", [80, 81], 3)]
    recorder = Recorder(worker.pool)
    with recorder:
        worker.launch(batch)
    computing, copying = ([access for access in recorder.accesses if access.stream == stream]
                          for stream in ("main", "out"))
    assert computing and copying
    assert not any(access.before(copy) for access in computing for copy in copying)
    assert not recorder.host_waited and worker.pool.flights
    assert worker.execute(Batch(2, 0)).landed == batch.swap_out and recorder.host_waited


@pytest.mark.parametrize("depth", [0, 1])
def test_conversations_in_small_tiers_never_race(depth):
    """Scheduler, cache, worker, model: whoever frees a slot or a place has heard that its copy has ended.
    With depth 1 each step is launched before the host has heard of the one before it, and some of these are
    of requests that are cancelled meanwhile."""
    chance, unsettled = random.Random(depth), deque()
    worker = make_worker()
    policy = POLICIES["retention"](RecomputeCost({CHUNK: 1.0, CONTEXT: 5.0}, rest=1.0), CHUNK)
    cache = KVCache(40, 8, CHUNK, ROWS, 40, policy)             # of the worker's 128 slots
    scheduler = Scheduler(cache, 40, max_batch_tokens=24)
    recorder = Recorder(worker.pool, ended=lambda event: chance.random() < 0.5)
    turns = [(chance.choice("abcdef"), chance.randint(2, 9)) for _ in range(30)]
    with recorder:
        now = 0.0
        while turns or scheduler.busy:
            if turns and chance.random() < 0.5:
                name, length = turns.pop()
                prompt = [chance.randrange(VOCAB) for _ in range(length)]
                scheduler.submit(Request(cache.open(name), prompt, max_tokens=4, sampling=Sampling(),
                                         stop_ids=frozenset(range(0, VOCAB, 4))))
            now += 1.0
            if scheduler.running and chance.random() < 0.1:
                scheduler.cancel(chance.choice(scheduler.running), now)
            batch = scheduler.schedule(now)
            if batch or cache.in_flight and not unsettled:
                unsettled.append((batch, worker.launch(batch)))
                scheduler.launched(batch)
            while len(unsettled) > (depth if batch.spans else 0):
                launched, wait = unsettled.popleft()
                scheduler.account(launched, wait(), now)
    assert cache.stats["chunks_swapped_in"] and cache.stats["chunks_swapped_out"]
    assert recorder.races() == []
