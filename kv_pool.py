"""The bytes of both tiers, and the copies between them on two side streams (paper §4.3).

kv_cache.py decides which chunk goes where. This file allocates the two tiers and moves the bytes.
It copies chunks in layer by layer, and records an event after each layer, so that the model
computes one layer while the next one arrives.

    copy in   [ 0][ 1][ 2][ 3]          the layers' KV arrives
    compute       [ 0][ 1][ 2][ 3]      layer 1 computes while layer 2 arrives
    copy out                  [====]    begins when the copies in of its step have ended

A copy out waits for the copies in of its step because both ways at once are slower: the paper
measured a loss of 18-20%. The next step's copies in do not wait for it, because a step waits for
them.

Without CUDA the same code runs in order: every copy has ended when the call returns.

Invariants: a slot is overwritten only when earlier steps have read it; a copy out reads only what
earlier steps have written; a ticket has landed only when its copy has ended. (kv_cache.py gives no
slot away that a copy still reads or writes.)
"""
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arrays import enumerate_each
from kv_cache import Chunk, Ticket
from tier_copies import copy_tokens, page_locked


@dataclass(eq=False)
class Flight:
    """Copies in one direction, started together. begin, end and all in arrived and waits are CUDA
    events (InOrder without CUDA)."""
    direction: str                  # "in" or "out"
    tickets: list[Ticket]
    nbytes: int
    begin: Any
    end: Any = None
    arrived: list = field(default_factory=list)     # one for each layer, on the way in
    # Second day, for each layer (reached, arrived): the model's stream reached it; it had arrived.
    waits: list = field(default_factory=list)


class KVPool:
    """Both tiers of all layers. The CPU tier has a line for each token of each place: that of token
    i of place p is line p * chunk_size + i."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, num_slots: int, num_places: int,
                 chunk_size: int, device, dtype: torch.dtype, pipeline: bool = True):
        """num_slots: those of the scheduler, and the worker's one for padding. pipeline=False: no
        layer attends before all layers have arrived."""
        gpu_shape = layers, 2, num_slots, kv_heads, head_dim                # 2: K and V
        cpu_shape = layers, 2, num_places * chunk_size, kv_heads, head_dim
        self.gpu = torch.empty(gpu_shape, device=device, dtype=dtype)
        self.cpu = self._host_memory(cpu_shape)         # page-locked on CUDA
        self.chunk_size, self.pipeline = chunk_size, pipeline
        self.flights: list[Flight] = []         # by time of issue
        # The latest flight in: set by swap_in, cleared by wait(last layer). One stream copies all
        # flights in order, so whoever waits for the latest has waited for those before.
        self.arriving: Flight | None = None
        # Sets stream_in and stream_out, the two side streams; and three functions that hide CUDA:
        # stream(), the current stream; on(s), a block in which s is the current one; event(), a new
        # event. Without CUDA they are stand-ins: nobody waits, and every event has happened.
        self._make_streams()
        self.metrics = SwapMetrics()            # second day: host_time() and add() only measure

    def mark(self):
        """An event at this point of the current stream."""
        event = self.event()
        event.record(self.stream())
        return event

    @contextmanager
    def _flight(self, direction: str, tickets: list[Ticket], stream) -> Iterator[Flight]:
        """The flight of these tickets, for copies that the caller starts on `stream`, which is the
        current stream meanwhile. If the caller fails halfway, the copies that it has started are
        still waited for: the flight is recorded all the same."""
        token_nbytes = self.gpu[:, :, 0].nbytes         # K and V of one token, in all layers
        nbytes = sum(ticket.filled for ticket in tickets) * token_nbytes
        with self.metrics.host_time(), self.on(stream):
            flight = Flight(direction, tickets, nbytes, begin=self.mark())
            try:
                yield flight
            finally:
                flight.end = self.mark()
                self.flights.append(flight)

    def wait(self, layer: int):
        """Let the current stream, not the host, wait until this layer of the latest swap-in has
        arrived; with pipeline=False until all layers have. A step waits for its layers in order.

        Nothing happens if no flight is `arriving`. When a step has waited for the last layer, none
        is any more. The flight notes each wait in `waits`."""
        if not self.arriving:
            return
        reached = self.mark()                               # second day: for the metrics
        arrived = self.arriving.arrived[layer if self.pipeline else -1]     # -1: the last, so all
        self.stream().wait_event(arrived)
        self.arriving.waits.append((reached, arrived))      # second day
        if layer == len(self.gpu) - 1:
            self.arriving = None

    def swap_in(self, tickets: list[Ticket]):
        """Start the copies CPU -> GPU, layer by layer: the first `filled` tokens of each ticket's
        place go into its slots. Layer l may be read after wait(l). The host does not wait; landed()
        gives the tickets back later. No tickets: nothing happens.

        stream_in first waits for the current stream, because earlier steps may still use what the
        slots held before. Behind the copy of each layer it records an event, for wait(). Then the
        flight is `arriving`."""
        if not tickets:
            return
        self.stream_in.wait_stream(self.stream())
        with self._flight("in", tickets, self.stream_in) as flight:
            slots, lines = self._addresses(tickets)
            for layer in range(len(self.gpu)):
                copy_tokens(self.cpu[layer], lines, self.gpu[layer], slots)
                flight.arrived.append(self.mark())      # on stream_in: _flight made it current
        self.arriving = flight

    def swap_out(self, tickets: list[Ticket], written=None):
        """Start the copies GPU -> CPU, from each ticket's slots into its place. Nobody waits for a
        single layer, so one copy takes all layers. No tickets: nothing happens.

        stream_out waits for the copies in, and for `written`: an event of the current stream,
        behind all that writes to these slots (None: behind all that is launched so far).
        Worker._start records it just before the model, because nothing in this step writes to these
        slots: so the copies run while the model computes."""
        if not tickets:
            return
        self.stream_out.wait_event(written or self.mark())
        self.stream_out.wait_stream(self.stream_in)
        with self._flight("out", tickets, self.stream_out):
            slots, lines = self._addresses(tickets)
            copy_tokens(self.gpu.flatten(0, 1), slots, self.cpu.flatten(0, 1), lines)

    def landed(self, wait: bool) -> list[Ticket]:
        """The tickets whose copies have ended since the last call, for KVCache.complete. wait: if a
        copy is in flight, the host first waits for the oldest flight."""
        if wait and self.flights:
            with self.metrics.host_time():
                self.flights[0].end.synchronize()
        ended = [flight for flight in self.flights if flight.end.query()]
        self.flights = [flight for flight in self.flights if flight not in ended]
        for flight in ended:
            self.metrics.add(flight)
        return [ticket for flight in ended for ticket in flight.tickets]

    def _addresses(self, tickets: list[Ticket]) -> Tensor:
        """The slot [t] and the line of the CPU tier [t] of each token, together [2, t].

        chunk_size 4, a ticket of place 5 with slots 9 and 2: [[9, 2], [20, 21]]"""
        places, filled = np.array([(ticket.place, ticket.filled) for ticket in tickets]).T
        which, nth = enumerate_each(filled)     # filled [2, 3]: which 0 0 1 1 1, nth 0 1 0 1 2
        slots = np.array([slot for ticket in tickets for slot in ticket.slots])
        return self._upload(np.stack([slots, places[which] * self.chunk_size + nth]))

    def _upload(self, addresses: np.ndarray) -> Tensor:
        on_host = torch.from_numpy(addresses)
        if self.gpu.is_cuda:
            on_host = on_host.pin_memory()  # page-locked: else the host would wait for the stream
        return on_host.to(self.gpu.device, non_blocking=True)

    # ---- second day: CUDA or not, copies for sharing.py, how much of the copies is hidden

    def _host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised. On CUDA the GPU reaches it, too, until this pool is gone."""
        if self.gpu.is_cuda:
            return page_locked(shape, self.gpu.dtype, self)
        return torch.empty(shape, dtype=self.gpu.dtype)

    def _make_streams(self):
        """For __init__, which says what each of them is."""
        self.stream: Callable = InOrder
        self.on: Callable = nullcontext
        self.event: Callable = InOrder
        self.stream_in: Any = InOrder()
        self.stream_out: Any = InOrder()
        if self.gpu.is_cuda:
            device = self.gpu.device
            self.stream, self.on = torch.cuda.current_stream, torch.cuda.stream
            self.event = partial(torch.cuda.Event, enable_timing=True)
            self.stream_in = torch.cuda.Stream(device, priority=-1)     # before the model's kernels
            self.stream_out = torch.cuda.Stream(device)
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            copy_tokens(self.cpu[0], nothing, self.gpu[0], nothing)     # compiles the kernel

    def copy_slots(self, copies: dict[int, int]):
        """Copy KV into each slot `target` from slot copies[target], in the order of the current
        stream: earlier steps have written the sources, and a later swap_in may overwrite them. In
        each layer all sources are read before a target is written, because a slot may be both."""
        if copies:
            both = np.array([list(copies), list(copies.values())])
            targets, sources = self._upload(both)                           # [c] each
            for layer in self.gpu:                                          # [2, slots, H_kv, D]
                layer.index_copy_(1, targets, layer.index_select(1, sources))

    @property
    def chunk_shape(self) -> list[int]:
        """Of the KV of one chunk: [layers, 2, chunk_size, H_kv, D]."""
        layers, both, _, kv_heads, head_dim = self.gpu.shape
        return [layers, both, self.chunk_size, kv_heads, head_dim]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * self.gpu.itemsize

    def read_chunk(self, chunk: Chunk) -> bytes:
        """The bytes of a chunk's KV, wherever it is; 0 behind its last token. (For kv_file.py, when
        no step and no copy is under way.)"""
        kv, place = torch.zeros(self.chunk_shape, dtype=self.cpu.dtype), chunk.place
        if place is None:
            kv[:, :, :chunk.filled] = self.gpu[:, :, chunk.slots[:chunk.filled]].cpu()
        else:
            line = place * self.chunk_size
            kv[:, :, :chunk.filled] = self.cpu[:, :, line:line + chunk.filled]
        return kv.view(torch.uint8).numpy().tobytes()

    def write_place(self, place: int, data: bytearray):
        """The reverse, for a place that no step and no copy uses."""
        kv = torch.frombuffer(data, dtype=self.cpu.dtype).view(self.chunk_shape)
        line = place * self.chunk_size
        self.cpu[:, :, line:line + self.chunk_size] = kv

    def stats(self) -> dict:
        return self.metrics.stats()


class InOrder:
    """Without CUDA, a stream and an event: everything runs in order, and nothing is waited for."""

    def __init__(self):
        self.time = 0.0

    def record(self, stream):
        self.time = time.perf_counter()

    def elapsed_time(self, end: "InOrder") -> float:
        return 1e3 * (end.time - self.time)

    def query(self) -> bool:
        return True

    def synchronize(self):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass


class SwapMetrics:
    """Bytes and seconds of the copies that have ended."""

    def __init__(self):
        self.totals: dict[str, float] = dict(swap_in_bytes=0, swap_out_bytes=0,
                                             swap_in_seconds=0.0, swap_out_seconds=0.0)
        self.overhead_seconds = 0.0     # the host was busy swapping, or the model's stream waited

    @contextmanager
    def host_time(self) -> Iterator[None]:
        """Count the seconds in which the host is busy with swapping."""
        start = time.perf_counter()
        yield
        self.overhead_seconds += time.perf_counter() - start

    def add(self, flight: Flight):
        """Count a flight that has ended, and how long the model's stream waited for its layers."""
        self.totals[f"swap_{flight.direction}_bytes"] += flight.nbytes
        seconds = flight.begin.elapsed_time(flight.end) / 1e3
        self.totals[f"swap_{flight.direction}_seconds"] += seconds
        for reached, arrived in flight.waits:
            if reached.query():         # else the stream has not come to this layer yet
                self.overhead_seconds += max(0.0, reached.elapsed_time(arrived)) / 1e3      # of ms

    def stats(self) -> dict:
        """The totals, and the share of these seconds that was hidden: neither did the model's
        stream wait for a copy, nor was the host busy with copies. (0 without CUDA.) Under load it
        is a lower bound: the GPU may have computed while the host was busy."""
        seconds = self.totals["swap_in_seconds"] + self.totals["swap_out_seconds"]
        hidden = max(0.0, 1 - self.overhead_seconds / seconds) if seconds else 0.0
        return dict(self.totals, swap_hidden_share=hidden)
