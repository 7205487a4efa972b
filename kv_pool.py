"""The bytes of both tiers, and the copies between them on two side streams (paper §4.3). What goes where, kv_cache.py has decided.

    layer      0   1   2   3          a copy in is issued layer by layer, with an event for each layer:
    copy in   [==][==][==][==]        layer 1 computes while layer 2 arrives
    compute       [==][==][==][==]
    copy out                  [====]  begins when the copies in of its step have ended: both at once are slower

Invariants: a slot is written only when earlier steps have read it, a copy out reads only what earlier steps wrote, and a ticket has
landed only when its copy has ended. Without CUDA the same code runs in order."""
import math
import mmap
import time
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from kv_cache import Ticket


@dataclass(eq=False)
class _Flight:
    """Copies one way that were started together."""
    way: str
    tickets: list
    nbytes: int
    begin: object                                                 # events
    end: object = None
    arrived: list = field(default_factory=list)                   # one for each layer, on the way in
    waits: list = field(default_factory=list)                     # (the running stream was ready for a layer, the layer had arrived)

    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3

    def stalled(self) -> float:
        """Seconds for which the running stream stood still for it. It has ended: who is not ready yet will not wait."""
        return sum(max(0.0, ready.elapsed_time(arrived)) for ready, arrived in self.waits if ready.query()) / 1e3


class KVPool:
    """Both tiers of all layers. Copies out start when the copies in of their step have ended: the paper measured a loss of 18-20% when
    both ways compete. Both go through a staging tensor on the GPU, so that neighbouring places of one layer are one large copy."""

    def __init__(self, layers, heads, head_dim, num_slots, num_places, chunk_size, device, dtype, pipeline=True):
        """heads: K/V heads. pipeline=False: the model starts when everything has arrived."""
        cuda = torch.device(device).type == "cuda"
        self.gpu = torch.empty(layers, 2, num_slots, heads, head_dim, device=device, dtype=dtype)     # [layers, K and V, slots, H_kv, D]
        shape = layers, num_places, 2, chunk_size, heads, head_dim
        self.cpu = pinned(shape, dtype, owner=self) if cuda else torch.empty(shape, dtype=dtype)
        self.chunk_size, self.pipeline = chunk_size, pipeline
        self.stream = torch.cuda.current_stream if cuda else _InOrder
        self.on = torch.cuda.stream if cuda else nullcontext
        self.event = partial(torch.cuda.Event, enable_timing=True) if cuda else _InOrder
        self.stream_in, self.stream_out = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else (_InOrder(), _InOrder())
        self.flights = []                                         # by time of issue
        self.arriving = None                                      # the latest flight in, until a step has waited for all its layers
        self.totals = Counter(swap_in_bytes=0, swap_out_bytes=0, swap_in_seconds=0.0, swap_out_seconds=0.0)
        self.stalled = 0.0                                        # seconds in which the host or the running stream did nothing but swap

    def store(self, layer, slots, k, v):
        """k, v [T, H_kv, D] of new tokens into slots [T]."""
        self.gpu[layer, 0].index_copy_(0, slots, k)
        self.gpu[layer, 1].index_copy_(0, slots, v)

    def wait(self, layer):
        """The running stream, not the host, waits until this layer of what was last swapped in has arrived; pipeline=False: all layers.
        A step waits for its layers in order."""
        if self.arriving:
            ready, arrived = self.now(), self.arriving.arrived[layer if self.pipeline else -1]
            self.stream().wait_event(arrived)
            self.arriving.waits.append((ready, arrived))
            if layer == len(self.gpu) - 1:
                self.arriving = None

    def swap_in(self, tickets):
        """Starts the copies CPU -> GPU, layer by layer, of the first `filled` tokens of each ticket's place into its slots; layer l
        may be read after wait(l). The host does not wait; the tickets are in landed() later."""
        if not tickets:
            return
        self.stream_in.wait_stream(self.stream())                 # earlier steps may still read the slots' former content
        with self._flight("in", tickets, self.stream_in) as (flight, staging, runs, slots, k, v):
            for layer in range(len(self.gpu)):
                for n, first, last in runs:
                    staging[n:n + last - first].copy_(self.cpu[layer, first:last], non_blocking=True)
                self.store(layer, slots, staging.flatten(0, 2)[k], staging.flatten(0, 2)[v])
                flight.arrived.append(self.now())
        self.arriving = flight

    def swap_out(self, tickets, written=None):
        """Starts the copies GPU -> CPU, the other way round, behind what is being swapped in at the moment. written: the event, by
        default now, up to which earlier steps wrote these slots."""
        if not tickets:
            return
        self.stream_out.wait_event(written or self.now())
        self.stream_out.wait_stream(self.stream_in)
        with self._flight("out", tickets, self.stream_out) as (_, staging, runs, slots, k, v):
            for layer in range(len(self.gpu)):
                staging.flatten(0, 2).index_copy_(0, k, self.gpu[layer, 0][slots]).index_copy_(0, v, self.gpu[layer, 1][slots])
                for n, first, last in runs:
                    self.cpu[layer, first:last].copy_(staging[n:n + last - first], non_blocking=True)

    def now(self):
        """An event at this point of the running stream."""
        event = self.event()
        event.record(self.stream())
        return event

    def landed(self, wait: bool) -> list[Ticket]:
        """The tickets whose copies have ended since the last call; wait: waits for the oldest flight if there is any."""
        if wait and self.flights:
            with self._stalling():
                self.flights[0].end.synchronize()
        landed = [flight for flight in self.flights if flight.end.query()]
        self.flights = [flight for flight in self.flights if flight not in landed]
        for flight in landed:
            self.totals.update({f"swap_{flight.way}_bytes": flight.nbytes, f"swap_{flight.way}_seconds": flight.seconds()})
            self.stalled += flight.stalled()
        return [ticket for flight in landed for ticket in flight.tickets]

    def stats(self) -> dict:
        """Bytes and seconds of the copies that have ended, and the share of these seconds that was hidden behind computation: in which
        neither the running stream waited for them nor the host was busy starting them. Without CUDA nothing is hidden."""
        seconds = self.totals["swap_in_seconds"] + self.totals["swap_out_seconds"]
        return dict(self.totals, swap_hidden_share=max(0.0, 1 - self.stalled / seconds) if seconds else 0.0)

    @contextmanager
    def _flight(self, way, tickets, stream):
        """For the copies to be started in the meantime: the flight; staging, which has room for one layer of all tickets' places (the
        stream keeps the layers apart); and their itinerary."""
        tickets = sorted(tickets, key=lambda ticket: ticket.place)
        nbytes = sum(ticket.filled for ticket in tickets) * self.gpu[:, :, 0].nbytes
        with self._stalling(), self.on(stream):                   # which is the running one in here
            flight = _Flight(way, tickets, nbytes, self.now())
            staging = self.gpu.new_empty(len(tickets), *self.cpu.shape[2:])                      # [n, 2, chunk, H_kv, D]
            yield flight, staging, *self._itinerary(tickets)
            flight.end = self.now()
        self.flights.append(flight)

    def _itinerary(self, tickets):
        """For tickets in the order of their places: runs (n, first, last) of neighbouring places [first, last), from the n-th ticket on; and
        for each token on the way its slot, and where the staging tensor, seen as [n * 2 * chunk, H_kv, D], holds its K and its V."""
        runs = []
        for n, ticket in enumerate(tickets):
            if runs and runs[-1][2] == ticket.place:
                runs[-1][2] += 1
            else:
                runs.append([n, ticket.place, ticket.place + 1])
        slots = [slot for ticket in tickets for slot in ticket.slots]
        k = [2 * n * self.chunk_size + i for n, ticket in enumerate(tickets) for i in range(ticket.filled)]
        indices = torch.tensor([slots, k], pin_memory=self.gpu.is_cuda)                         # else the upload would wait for the stream
        slots, k = indices.to(self.gpu.device, non_blocking=True)
        return runs, slots, k, k + self.chunk_size

    @contextmanager
    def _stalling(self):
        start = time.perf_counter()
        yield
        self.stalled += time.perf_counter() - start


def pinned(shape, dtype, owner):
    """An uninitialised tensor in host memory which the GPU copies from and to by itself, for as long as `owner` exists.
    torch's own pinned memory comes in powers of two: 128 GB for a tier of 70 GB."""
    size = max(1, math.prod(shape) * dtype.itemsize)
    memory = torch.empty(size + 2 * mmap.PAGESIZE, dtype=torch.uint8)
    start = -memory.data_ptr() % mmap.PAGESIZE                    # whole pages, in which there is nothing else
    cudart, address = torch.cuda.cudart(), memory.data_ptr() + start
    if error := int(cudart.cudaHostRegister(address, size, 0)):
        raise RuntimeError(f"{size:,} bytes of host memory could not be pinned (CUDA error {error})")
    weakref.finalize(owner, cudart.cudaHostUnregister, address)
    return memory[start:start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class _InOrder:
    """A stream and an event where everything runs in order."""
    def __init__(self): self.time = 0.0
    def wait_stream(self, stream): pass
    def wait_event(self, event): pass
    def record(self, stream): self.time = time.perf_counter()
    def elapsed_time(self, end): return 1e3 * (end.time - self.time)
    def query(self): return True
    def synchronize(self): pass
