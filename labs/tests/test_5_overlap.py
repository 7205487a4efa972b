"""Lab 5: copies that hide behind computation, and the orderings that they need all the same.

The pool runs on the CPU, on streams that record what happens before what (tests/streams.py). A test
plays a step of the model by reading the slots of each layer; then it asks which of these reads and
copies are ordered."""
from types import SimpleNamespace

import pytest
import torch

from experiments.simulator import HARDWARE, OPERATORS, SimulatedWorker, VirtualClock
from kv_cache import Ticket
from kv_pool import KVPool
from streams import Access, Recorder

points = pytest.mark.points
LAYERS, HEADS, DIM, CHUNK, SLOTS, PLACES = 4, 2, 3, 4, 32, 8


# ---- SimulatedWorker.overlapped

def simulated(layers, pipeline=True):
    shape = SimpleNamespace(num_layers=layers, num_kv_heads=1, num_heads=1, head_dim=1, width=1, vocab_size=1,
                            matmul_parameters=1)
    return SimulatedWorker(shape, HARDWARE["a100"], OPERATORS["eager"], VirtualClock(), 64, 8, 64,
                           pipeline=pipeline)


@points(4, "SimulatedWorker.overlapped")
def test_the_copies_take_longer():
    assert simulated(2).overlapped(copy=10, compute=4) == pytest.approx(12)


@points(4, "SimulatedWorker.overlapped")
def test_the_layers_take_longer():
    assert simulated(4).overlapped(copy=4, compute=40) == pytest.approx(41)


@points(4, "SimulatedWorker.overlapped")
def test_nothing_comes_in():
    assert simulated(4).overlapped(copy=0, compute=40) == pytest.approx(40)


@points(4, "SimulatedWorker.overlapped")
def test_without_a_pipeline_both_add_up():
    assert simulated(4, pipeline=False).overlapped(copy=4, compute=40) == pytest.approx(44)


@points(4, "SimulatedWorker.overlapped")
def test_layer_by_layer():
    """A layer starts when its copy has ended and the layer before it is done."""
    for layers in (1, 3, 40):
        for copy in (0.5, 1.0, 30.0):
            arrived = done = 0.0
            for _ in range(layers):
                arrived += copy / layers
                done = max(done, arrived) + 6.0 / layers
            assert simulated(layers).overlapped(copy, 6.0) == pytest.approx(done)


# ---- the bytes

def make(pipeline=True):
    pool = KVPool(LAYERS, HEADS, DIM, SLOTS, PLACES, CHUNK, "cpu", torch.float32, pipeline)
    pool.gpu.copy_(torch.arange(pool.gpu.numel()).view(pool.gpu.shape))
    pool.cpu.copy_(-torch.arange(pool.cpu.numel()).view(pool.cpu.shape))
    return pool


def ticket(direction, slots, place):
    return Ticket(None, None, direction, 0, len(slots), list(slots), place)


def at(place, filled=CHUNK):
    """Where the first tokens of that place are in pool.cpu [layers, 2, rows, H_kv, D]."""
    return slice(None), slice(None), slice(place * CHUNK, place * CHUNK + filled)


def check(right, message):
    if not right:
        pytest.fail(message, pytrace=False)


@points(7, "KVPool.swap_in")
def test_tokens_of_a_place_arrive_in_their_slots():
    pool = make()
    expected, tickets = pool.gpu.clone(), [ticket("in", [9, 2], 5), ticket("in", [7, 30, 1, 4], 2)]
    pool.swap_in(tickets)
    pool.swap_in([])
    for each in tickets:
        expected[:, :, each.slots] = pool.cpu[at(each.place, each.filled)]
    check(torch.equal(pool.gpu, expected), "a slot has a wrong K or V")
    assert {id(each) for each in pool.landed(wait=True)} == set(map(id, tickets))


@points(7, "KVPool.swap_out")
def test_tokens_of_slots_arrive_in_their_place():
    pool = make()
    before, tickets = pool.cpu.clone(), [ticket("out", [9, 2], 5), ticket("out", [7, 30, 1, 4], 2)]
    pool.swap_out(tickets)
    pool.swap_out([])
    for each in tickets:
        check(torch.equal(pool.cpu[at(each.place, each.filled)], pool.gpu[:, :, each.slots]),
              f"place {each.place} does not have the K and V of its slots")
        before[at(each.place)] = pool.cpu[at(each.place)]
    check(torch.equal(pool.cpu, before), "a place of no ticket changed")
    assert {id(each) for each in pool.landed(wait=True)} == set(map(id, tickets))


# ---- the orderings

OLD, BACK, NEW, LEAVING = [1, 2, 3, 4], [3, 4, 5, 6], [20, 21], [10, 11]


def read(recorder, label, layer, slots):
    with recorder.doing(label):
        recorder.pool.gpu[layer, :, slots].sum()


def store(recorder, label, layer, slots):
    zeros = torch.zeros(len(slots), HEADS, DIM)
    with recorder.doing(label):
        for half in recorder.pool.gpu[layer]:           # K and V
            half.index_copy_(0, torch.tensor(slots), zeros)


def recording(pipeline=True):
    """A recorder for a new pool. It notes uploads of addresses, too, as a tier of their own."""
    recorder = Recorder(make(pipeline))
    upload = recorder.pool._upload

    def noted(addresses):
        stream = recorder.running
        number = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        recorder.accesses.append(Access(recorder.label, stream.name, number, dict(stream.clock),
                                        "addresses", frozenset(), writes=True))
        return upload(addresses)
    recorder.pool._upload = noted
    return recorder


def a_step_with_copies_in(pipeline=True):
    """An earlier step reads the slots OLD. Then KV comes back into BACK, two slots of which are
    among them, and the next step reads it."""
    recorder = recording(pipeline)
    with recorder:
        for layer in range(LAYERS):
            read(recorder, "earlier step", layer, OLD)
        with recorder.doing("copy in"):
            recorder.pool.swap_in([ticket("in", BACK, 3)])
        for layer in range(LAYERS):
            recorder.pool.wait(layer)
            read(recorder, f"layer {layer}", layer, BACK)
    return recorder


def a_step_with_copies_both_ways(given=True):
    """An earlier step writes the slots LEAVING, which are copied out while the next step computes.
    given: the caller says up to where earlier steps wrote."""
    recorder = recording()
    with recorder:
        for layer in range(LAYERS):
            store(recorder, "earlier step", layer, LEAVING)
        with recorder.doing("copy in"):
            recorder.pool.swap_in([ticket("in", BACK, 3)])
        written = recorder.pool.mark() if given else None
        for layer in range(LAYERS):
            recorder.pool.wait(layer)
            store(recorder, f"layer {layer}", layer, NEW)
        with recorder.doing("copy out"):
            recorder.pool.swap_out([ticket("out", LEAVING, 5)], *([written] if given else []))
        store(recorder, "next step", 0, NEW)
    return recorder


def told(access) -> str:
    """An access in words."""
    verb = "writes" if access.writes else "reads"
    return f"{access.label or 'a copy'} {verb} the {access.tier} tier on stream {access.stream!r}"


def race(earlier, later) -> str | None:
    """Every access of the one must be before every access of the other, and there must be some of
    both. If not: the pair that may race."""
    if not earlier or not later:
        return f"{'the first' if not earlier else 'the second'} of the two accesses never happens"
    for one in earlier:
        for other in later:
            if not one.before(other):
                return f"nothing orders these two:\n  {told(one)}\n  {told(other)}"
    return None


def needless_wait(earlier, later) -> str | None:
    """No access of the one may be before one of the other. If one is: which waits for which."""
    for one in earlier:
        for other in later:
            if one.before(other):
                return f"a wait without need:\n  {told(one)}\n  before {told(other)}"
    return None


def first(problems) -> str | None:
    return next(filter(None, problems), None)


def copies(recorder, way):
    return [access for access in recorder.labelled(f"copy {way}") if access.tier != "addresses"]


def arrivals(recorder, layer):
    """The writes of the copy in to the slots of one layer."""
    vectors = set(range(layer * 2 * SLOTS, (layer + 1) * 2 * SLOTS))
    written = recorder.labelled("copy in", "gpu", writes=True)
    return [access for access in written if access.vectors <= vectors]


def slots_are_overwritten_only_when_earlier_steps_have_read_them():
    recorder = a_step_with_copies_in()
    return race(recorder.labelled("earlier step"), recorder.labelled("copy in", "gpu", writes=True))


def no_layer_is_read_before_it_has_arrived():
    recorder = a_step_with_copies_in()
    return first(race(arrivals(recorder, layer), recorder.labelled(f"layer {layer}"))
                 for layer in range(LAYERS))


def the_first_layer_does_not_wait_for_the_others():
    recorder = a_step_with_copies_in()
    others = [access for layer in range(1, LAYERS) for access in arrivals(recorder, layer)]
    return needless_wait(others, recorder.labelled("layer 0"))


def without_a_pipeline_the_first_layer_waits_for_all():
    recorder = a_step_with_copies_in(pipeline=False)
    return first(race(arrivals(recorder, layer), recorder.labelled("layer 0"))
                 for layer in range(LAYERS))


def a_later_step_does_not_wait_again():
    recorder = a_step_with_copies_in()
    before = len(recorder.events)
    recorder.pool.wait(0)
    if len(recorder.events) > before:
        return "wait(0) after wait(last layer) waits for the same flight again"
    return None


def a_flight_notes_what_waited_for_it():
    recorder = a_step_with_copies_in()
    (flight,) = recorder.pool.flights
    pairs = [(reached, arrived) for reached, arrived in flight.waits]
    if len(pairs) != LAYERS:
        return (f"the flight's `waits` has {len(pairs)} entries after {LAYERS} layers have waited:\n"
                "  the metrics then call all of the copies' time hidden")
    if [arrived for _, arrived in pairs] != flight.arrived:
        return "in the flight's `waits` the second of each pair is not that layer's event of arrival"
    if any(reached in flight.arrived for reached, _ in pairs):
        return "in the flight's `waits` the first of a pair is not an event of the model's stream"
    return None


def what_has_landed_has_been_copied():
    recorder = a_step_with_copies_both_ways()
    ends = {flight.direction: flight.end for flight in recorder.pool.flights}
    for access in copies(recorder, "in") + copies(recorder, "out"):
        if access.stream not in ends or ends[access.stream].clock[access.stream] < access.number:
            return f"the flight's `end` is recorded before this:\n  {told(access)}"
    return None


def copies_run_on_their_own_streams():
    recorder = a_step_with_copies_both_ways()
    return first(f"a copy runs on the wrong stream:\n  {told(access)}"
                 for way in ("in", "out") for access in copies(recorder, way)
                 if access.stream != way)


def uploads_elsewhere(way) -> str | None:
    """On CUDA an upload is an operation of the current stream, and its memory belongs to that
    stream. Copies of another stream that do not wait for it read addresses that are not there yet;
    and whoever uses the first stream next may get that memory before the copies have read it."""
    return first(
        f"nothing orders these two:\n  the upload of the addresses (`_addresses`) on stream "
        f"{upload.stream!r}\n  the copies {way} on stream {way!r}, which read them"
        for upload in a_step_with_copies_both_ways().labelled(f"copy {way}", "addresses")
        if upload.stream != way)


def addresses_of_copies_in_are_uploaded_on_their_stream():
    return uploads_elsewhere("in")


def addresses_of_copies_out_are_uploaded_on_their_stream():
    return uploads_elsewhere("out")


def a_copy_out_reads_what_earlier_steps_wrote():
    recorders = a_step_with_copies_both_ways(), a_step_with_copies_both_ways(given=False)
    return first(race(recorder.labelled("earlier step"), recorder.labelled("copy out", "gpu"))
                 for recorder in recorders)


def a_copy_out_starts_when_the_copies_in_have_ended():
    recorder = a_step_with_copies_both_ways()
    return race(copies(recorder, "in"), recorder.labelled("copy out", "gpu"))


def a_copy_out_does_not_wait_for_the_step_that_computes():
    recorder = a_step_with_copies_both_ways()
    return needless_wait(recorder.labelled(f"layer {LAYERS - 1}"), copies(recorder, "out"))


def the_next_step_does_not_wait_for_a_copy_out():
    recorder = a_step_with_copies_both_ways()
    return needless_wait(copies(recorder, "out"), recorder.labelled("next step"))


def the_host_never_waits():
    if a_step_with_copies_in().host_waited or a_step_with_copies_both_ways().host_waited:
        return "the host waits for an event (synchronize): it must only tell the streams to wait"
    return None


ORDERINGS = {           # function -> points for each of these
    "KVPool.swap_in": (5, [slots_are_overwritten_only_when_earlier_steps_have_read_them,
                           addresses_of_copies_in_are_uploaded_on_their_stream]),
    "KVPool.wait": (4, [no_layer_is_read_before_it_has_arrived,
                        the_first_layer_does_not_wait_for_the_others,
                        without_a_pipeline_the_first_layer_waits_for_all,
                        a_later_step_does_not_wait_again, a_flight_notes_what_waited_for_it]),
    "KVPool.swap_out": (4, [a_copy_out_reads_what_earlier_steps_wrote,
                            a_copy_out_starts_when_the_copies_in_have_ended,
                            a_copy_out_does_not_wait_for_the_step_that_computes,
                            the_next_step_does_not_wait_for_a_copy_out,
                            addresses_of_copies_out_are_uploaded_on_their_stream]),
    "all together": (3, [copies_run_on_their_own_streams, what_has_landed_has_been_copied,
                         the_host_never_waits]),
}


@pytest.mark.parametrize("ordering", [
    pytest.param(ordering, marks=points(number, function), id=ordering.__name__)
    for function, (number, orderings) in ORDERINGS.items() for ordering in orderings])
def test_ordering(ordering):
    problem = ordering()
    check(not problem, problem)


@points(7, "all together")
def test_how_much_is_hidden(progress):
    """Orderings that hold, and the share of the copies' time that a simulated step hides."""
    orderings = [ordering for _, each in ORDERINGS.values() for ordering in each]
    held, problems, share = 0, [], "unknown"
    try:
        for ordering in orderings:
            problem = ordering()
            held += not problem
            problems += [f"{ordering.__name__.replace('_', ' ')}: {problem}"] if problem else []
        copy, compute = 20e-3, 30e-3
        share = f"{1 - (simulated(40).overlapped(copy, compute) - compute) / copy:.1%}"
    finally:
        progress(f"{held} of {len(orderings)} orderings hold; "
                 f"swap_hidden_share in simulation {share}")
    check(not problems, "".join(problems[:1]))
    check(share == "97.5%", f"swap_hidden_share is {share}, the reference's is 97.5%")
