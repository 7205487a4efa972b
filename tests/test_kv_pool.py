"""The bytes of both tiers: whatever goes out comes back, into other slots, and its neighbours stay
as they are."""
import mmap
import random
from types import SimpleNamespace

import pytest
import torch

import interpreter  # noqa: F401
import kv_pool
from kv_cache import Ticket
from kv_pool import Flight, KVPool
from streams import OperatorWatcher
from tier_copies import copy_kernel, copy_tokens, page_locked

LAYERS, HEADS, DIM, CHUNK, SLOTS, PLACES = 3, 2, 5, 4, 64, 12
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(device="cpu", dtype=torch.float32, pipeline=True):
    """A pool whose every byte is told apart from every other."""
    pool = KVPool(LAYERS, HEADS, DIM, SLOTS, PLACES, CHUNK, device, dtype, pipeline)
    pool.gpu.copy_(torch.randn(pool.gpu.shape, generator=torch.Generator().manual_seed(0)))
    pool.cpu.copy_(torch.randn(pool.cpu.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def ticket(direction, slots, place):
    return Ticket(None, None, direction, 0, len(slots), list(slots), place)


def at(place, filled=CHUNK):
    """Where the first tokens of that place are in pool.cpu [layers, 2, rows, H_kv, D]."""
    return slice(None), slice(None), slice(place * CHUNK, place * CHUNK + filled)


def land(pool, tickets):
    """Waits until every flight has ended; checks that each ticket lands once."""
    landed = []
    while pool.flights:
        landed += pool.landed(wait=True)
    assert sorted(map(id, landed)) == sorted(map(id, tickets))
    return landed


def some_tickets(seed):
    """Chunks, some of them partial, at random slots and places."""
    chance = random.Random(seed)
    slots = chance.sample(range(SLOTS), SLOTS)
    places = chance.sample(range(PLACES), chance.randint(1, PLACES))
    filled = [chance.choice([CHUNK, CHUNK, chance.randint(1, CHUNK)]) for _ in places]
    return [ticket("out", [slots.pop() for _ in range(n)], place) for n, place in zip(filled, places)]


def elsewhere(tickets, seed):
    """The same chunks on their way back, into other slots and in another order."""
    chance = random.Random(seed)
    slots = chance.sample(range(SLOTS), SLOTS)
    back = [ticket("in", [slots.pop() for _ in t.slots], t.place) for t in tickets]
    return chance.sample(back, len(back))


# ---- KVPool.copy_slots

@devices
def test_slots_are_copied_all_at_once(device):
    """7 and 9 change places, and 30 gets what 9 had; all others stay as they are."""
    pool = make(device)
    expected = pool.gpu.clone()
    expected[:, :, [7, 9, 30]] = pool.gpu[:, :, [9, 7, 9]]
    pool.copy_slots({7: 9, 9: 7, 30: 9})
    pool.copy_slots({})
    assert torch.equal(pool.gpu, expected)


# ---- KVPool.swap_out, KVPool.swap_in

@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_swap_out_and_swap_in_restore_exactly_the_kv(device, dtype, seed):
    pool = make(device, dtype)
    out = some_tickets(seed)
    content = {t.place: pool.gpu[:, :, t.slots].clone() for t in out}
    places = pool.cpu.clone()
    pool.swap_out(out)
    land(pool, out)
    for place, kv in content.items():
        places[at(place, kv.shape[2])] = kv.cpu()
    assert torch.equal(pool.cpu, places)                         # and no other place changed

    pool.gpu.normal_()                                           # others have used the slots since
    before, back = pool.gpu.clone(), elsewhere(out, seed + 100)
    pool.swap_in(back)
    for layer in range(LAYERS):
        pool.wait(layer)
    for t in back:
        assert torch.equal(pool.gpu[:, :, t.slots], content[t.place])
        before[:, :, t.slots] = content[t.place]
    assert torch.equal(pool.gpu, before)                         # the neighbours
    land(pool, back)


@devices
def test_swap_out_keeps_the_order_of_tokens_in_a_place(device):
    """cpu [layers, 2, places * chunk, H_kv, D]: in each layer K and V of a place are one piece
    each."""
    pool = make(device)
    t = ticket("out", [50, 3, 17], place=7)
    pool.swap_out([t])
    land(pool, [t])
    assert torch.equal(pool.cpu[at(7, filled=3)], pool.gpu[:, :, [50, 3, 17]].cpu())


@devices
def test_swap_in_of_a_prefix_of_what_was_copied(device):
    """A truncated chunk comes back as far as it is valid."""
    pool = make(device)
    out = ticket("out", [10, 11, 12, 13], place=2)
    pool.swap_out([out])
    land(pool, [out])
    before = pool.gpu.clone()
    back = ticket("in", [20, 21], place=2)
    pool.swap_in([back])
    pool.wait(LAYERS - 1)
    assert torch.equal(pool.gpu[:, :, 20:22], before[:, :, 10:12])
    assert torch.equal(pool.gpu[:, :, 22:], before[:, :, 22:])


@devices
def test_swaps_of_nothing(device):
    pool = make(device)
    gpu, cpu = pool.gpu.clone(), pool.cpu.clone()
    pool.swap_in([])
    pool.swap_out([])
    assert pool.landed(wait=True) == [] and torch.equal(pool.gpu, gpu) and torch.equal(pool.cpu, cpu)


# ---- few calls

class Counter(OperatorWatcher):
    """Counts the operators that move bytes of a tier."""
    calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += operator._schema.name in ("aten::index_copy_", "aten::copy_")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("places", [[4], [0, 1, 2, 3], [3, 1, 0, 9, 8], range(0, PLACES, 2)])
def test_the_calls_of_a_swap_do_not_depend_on_the_number_or_the_neighbourhood_of_places(places):
    """On CUDA each is one launch, for which the GPU may wait: one per layer in, one for all out."""
    pool = make()
    tickets = [ticket("", range(CHUNK * n, CHUNK * n + 3), place) for n, place in enumerate(places)]
    for swap, calls in (pool.swap_out, 1), (pool.swap_in, LAYERS):
        with Counter() as counter:
            swap(tickets)
        assert counter.calls == calls


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel that copies on CUDA, run by Triton's interpreter."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    return triton.jit(copy_kernel.fn)


@pytest.mark.parametrize("halves, tokens, width", [(2, 5, 12), (6, 1, 16), (1, 17, 40), (4, 0, 8)])
def test_the_kernel_copies_what_torch_copies(interpreted, halves, tokens, width):
    random = torch.Generator().manual_seed(tokens)
    source = torch.randn(halves, 40, 1, width, generator=random)
    ours = torch.randn(halves, 30, 1, width, generator=random)
    theirs = ours.clone()
    source_rows = torch.randperm(40, generator=random)[:tokens]
    target_rows = torch.randperm(30, generator=random)[:tokens]
    copy_tokens(source, source_rows, theirs, target_rows)
    interpreted[3,](source, source_rows, ours, target_rows, halves, tokens, 40, 30,
                    WIDTH=width, TILE_T=4, TILE_W=1 << (width - 1).bit_length())
    assert torch.equal(ours, theirs)


# ---- KVPool.wait, KVPool.landed

class Recorder:
    """Stands for the current stream: which events it waits for."""
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, stream):
        self.waited.append(stream)


@pytest.mark.parametrize("pipeline, awaited", [(True, [0, 1, 2]), (False, [2, 2, 2])])
def test_wait_is_for_its_own_layer_or_without_a_pipeline_for_the_last(pipeline, awaited):
    pool, stream = make(pipeline=pipeline), Recorder()
    pool.stream = lambda: stream
    pool.wait(0)
    assert stream.waited == []                                   # nothing arrives
    pool.swap_in([ticket("in", [1, 2], 0)])
    arrived = pool.flights[0].arrived
    for layer in range(LAYERS):
        pool.wait(layer)
    assert stream.waited == [arrived[layer] for layer in awaited]
    pool.wait(0)
    assert len(stream.waited) == LAYERS, "a step after the one that waited waits again"


def test_swap_out_starts_behind_earlier_steps_and_what_is_being_swapped_in():
    pool, stream = make(), Recorder()
    pool.stream_out = stream
    pool.swap_out([ticket("out", [1, 2], 0)])
    assert len(stream.waited) == 2 and pool.stream_in in stream.waited


def test_landed_gives_each_ticket_once_when_its_copy_has_ended():
    pool = make()
    first, second = ticket("out", [1], 0), ticket("out", [2], 1)
    pool.swap_out([first])
    pool.swap_out([second])
    early, late = pool.flights[0].end, pool.flights[1].end
    early.query = late.query = lambda: False
    early.synchronize = lambda: setattr(early, "query", lambda: True)
    assert pool.landed(wait=False) == []
    assert pool.landed(wait=True) == [first]                    # the oldest flight
    late.query = lambda: True
    assert pool.landed(wait=False) == [second] and pool.landed(wait=True) == []


@devices
@pytest.mark.parametrize("way", ["in", "out"])
def test_copies_that_were_started_before_a_failure_are_waited_for(device, way, monkeypatch):
    """Memory can run out in the middle of a swap; by then some layers are on their way."""
    pool, tickets = make(device), [ticket(way, [1, 2], 0)]

    def no_memory(*args):
        raise RuntimeError("out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(kv_pool, "copy_tokens", no_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            (pool.swap_in if way == "in" else pool.swap_out)(tickets)
    flight, = pool.flights
    assert flight.end is not None and not pool.arriving
    assert land(pool, tickets) == tickets


# ---- KVPool.stats

@devices
def test_stats_count_what_was_copied(device):
    pool = make(device)
    assert not any(pool.stats().values())
    out, back = [ticket("out", [1, 2, 3], 0), ticket("out", [7], 4)], [ticket("in", [9, 8], 0)]
    pool.swap_out(out)
    land(pool, out)
    pool.swap_in(back)
    land(pool, back)
    stats, token = pool.stats(), LAYERS * 2 * HEADS * DIM * 4
    assert (stats["swap_out_bytes"], stats["swap_in_bytes"]) == (4 * token, 2 * token)
    assert stats["swap_out_seconds"] > 0 < stats["swap_in_seconds"]
    if device == "cpu":
        assert stats["swap_hidden_share"] == 0                  # the host did nothing else
    assert 0 <= stats["swap_hidden_share"] <= 1


class At:
    """An event at that time, in ms; None: not yet."""
    def __init__(self, ms): self.ms = ms
    def query(self): return self.ms is not None
    def elapsed_time(self, end): return end.ms - self.ms


@pytest.mark.parametrize("reached, arrived, waited", [
    ([0, 4, 9], [3, 8, 9], 3 + 4), ([5, 6, 7], [1, 2, 3], 0), ([2, 2.5, None], [2.5, 3, 3.5], 0.5 + 0.5)])
def test_a_copy_is_hidden_where_nobody_waits_for_it(reached, arrived, waited):
    """The current stream reaches each layer at `reached`; the layer has arrived at `arrived`."""
    pool = make()
    waits = [(At(r), At(a)) for r, a in zip(reached, arrived)]
    flight = Flight("in", [], 100, At(0), At(10), waits=waits)
    pool.flights = [flight]
    assert pool.landed(wait=False) == []
    assert pool.stats()["swap_hidden_share"] == pytest.approx(1 - waited / 10)
    assert pool.stats()["swap_in_seconds"] == pytest.approx(0.01)


# ---- pinned memory

def test_pinned_memory_is_whole_pages_and_unpinned_with_its_owner(monkeypatch):
    """The storage begins where the pinned pages do: torch asks about that address."""
    registered = {}

    def register(address, size, flags):
        registered[address] = size
        return 0                                                # no error
    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    owner = KVPool(LAYERS, HEADS, DIM, SLOTS, PLACES, CHUNK, "cpu", torch.float32)
    tier = page_locked((3, 1000), torch.float16, owner)
    tier[:] = 7
    assert tier.shape == (3, 1000) and tier.dtype == torch.float16 and (tier == 7).all()
    assert registered == {tier.untyped_storage().data_ptr(): 6000} and tier.data_ptr() % mmap.PAGESIZE == 0
    assert page_locked((0, 5), torch.float32, owner).shape == (0, 5)         # no CPU tier
    del owner
    assert registered == {} and (tier == 7).all()


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    cudart = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(RuntimeError, match="4,000 bytes of host memory could not be pinned .CUDA error 2"):
        page_locked((1000,), torch.float32, owner=cudart)


# ---- on real streams

def busy(stream, cycles=200_000_000):
    """Some tenths of a second of work."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


@pytest.mark.gpu
def test_swap_in_waits_for_earlier_steps_and_wait_for_the_swap_in():
    pool = make("cuda")
    place, slots = pool.cpu[at(3)].clone(), [8, 5, 30, 31]
    torch.cuda._sleep(100_000_000)                      # an earlier step that still reads the slots
    before = pool.gpu.clone()
    t = ticket("in", slots, 3)
    pool.swap_in([t])
    busy(pool.stream_in, 1_000_000)
    for layer in range(LAYERS):
        pool.wait(layer)
    arrived = pool.gpu[:, :, slots].cpu()                        # [layers, 2, chunk, H_kv, D]
    assert torch.equal(arrived, place) and not torch.equal(before[:, :, slots].cpu(), place)
    assert land(pool, [t]) == [t]


@pytest.mark.gpu
def test_a_swap_out_reads_what_the_step_before_has_written():
    pool = make("cuda")
    slots = torch.tensor([8, 5, 30, 31], device="cuda")
    k, v = torch.randn(2, 4, HEADS, DIM, device="cuda")
    torch.cuda._sleep(100_000_000)
    for layer in range(LAYERS):
        pool.gpu[layer, :, slots] = torch.stack([k, v])
    t = ticket("out", slots.tolist(), 3)
    pool.swap_out([t])
    land(pool, [t])
    for layer in range(LAYERS):
        assert torch.equal(pool.cpu[at(3)][layer], torch.stack([k, v]).cpu())


@pytest.mark.gpu
def test_neither_swap_makes_the_host_wait():
    """Else nothing overlaps: the model is launched after both have been issued."""
    pool = make("cuda")
    for issue, tickets in ((pool.swap_in, [ticket("in", [1, 2], 0)]),
                           (pool.swap_out, [ticket("out", [5, 6], 1)])):
        # Once before, so that what is slow the first time is done.
        issue(tickets)
    torch.cuda.synchronize()
    busy(pool.stream_in)
    pool.swap_in([ticket("in", [3, 4], 0)])
    assert not pool.stream_in.query(), "swap_in waited for the copies before it"
    pool.swap_out([ticket("out", [7, 8], 2)])
    assert not pool.stream_in.query(), "swap_out waited for the copies in"
    assert pool.landed(wait=False) != [] and len(pool.flights) == 2      # those of the first round alone
    torch.cuda.synchronize()
    assert len(pool.landed(wait=False)) == 2


@pytest.mark.gpu
def test_the_cpu_tier_is_pinned():
    pool = make("cuda")
    assert pool.cpu.is_pinned() and pool.cpu[-1, -1].is_pinned()
    tier = pool.cpu
    del pool
    assert not tier.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_many_flights_at_once_arrive_intact(seed):
    """Several rounds out and in without waiting on the host in between, each chunk compared in the
    end."""
    pool, chance = make("cuda", torch.float16), random.Random(seed)
    slots = chance.sample(range(SLOTS), 2 * PLACES * CHUNK // 2)
    groups = [slots[i * CHUNK:(i + 1) * CHUNK] for i in range(PLACES)]
    content = [pool.gpu[:, :, group].clone() for group in groups]
    pool.swap_out([ticket("out", group, place) for place, group in enumerate(groups)])
    while pool.flights:
        pool.landed(wait=True)
    moved = chance.sample(groups, PLACES)
    for first in range(0, PLACES, 3):
        pool.swap_in([ticket("in", moved[place], place) for place in range(first, first + 3)])
        for layer in range(LAYERS):
            pool.wait(layer)
    for place in range(PLACES):
        assert torch.equal(pool.gpu[:, :, moved[place]], content[place])
