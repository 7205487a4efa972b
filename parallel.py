"""One model on several GPUs: each process has a part of every layer, and all take the same steps.

    torchrun --nproc-per-node 4 server.py --model DIR       (or bench.py, or a program with Engine(...))

Each rank (process) has some of the heads with their K and V, and some of each MLP's inner values. Its
attention and its MLP give a part of a sum, and an all_reduce behind each makes the sum (model.Layer).
Embeddings and the output layer are the same on all ranks.

    rank 0 (Leader)     schedule | numbers -> | layers | logits | sample | tokens -> | settle
    rank 1 (Follower)              -> numbers | layers | logits            -> tokens | wait for numbers

Rank 0 alone has the scheduler, the books of the cache, and the history. It describes each step in
numbers. It alone samples, and sends the tokens from its device to the others. So no decision depends
on two devices computing equal floats.

Copies between the tiers end at different times on different ranks. Rank 0 names the ones that it saw
end. If a follower's own copy has not ended, then its stream, not its host, waits for the copy.

Invariant: all ranks start the same collectives in the same order. A rank whose step fails breaks this,
so it ends its process. A process that ends while an engine is open ends all others.
"""
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention_kernel import join
from checkpoint import find_checkpoint
from kv_cache import Ticket
from kv_pool import Flight
from loading import load_worker
from model import Alone
from scheduler import Batch, Result
from worker import Inputs, Packed, Worker

COUNT = 17                          # arrays of numbers that describe a step, see to_numbers
FIRST = 1024                        # numbers in the first broadcast of a step; most steps need no second
FOREVER = timedelta(days=3650)      # an idle server sends nothing; a death is noticed at once (Ranks.watch)


# ---- the processes that torchrun has started

class Ranks(Alone):
    """All of them, as one of them sees them."""

    def __init__(self):
        backend = "gloo"
        if gpus := torch.cuda.device_count():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)     # NCCL refuses two ranks on one
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=FOREVER)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Nobody sends in this group while an engine is open, so a receiver waits for the other's end.
        self.silence = dist.new_group(backend="gloo", timeout=FOREVER)
        self.others = range(1, self.size) if self.rank == 0 else [0]    # whose end must end us
        self.watchers: list[threading.Thread] = []      # while an engine is open, one for each of them

    def watch(self):
        """From now on the end of another process ends this one, until both say goodbye."""
        self.watchers = [threading.Thread(target=self._wait_for_end, args=(other,), daemon=True)
                         for other in self.others]
        for watcher in self.watchers:
            watcher.start()

    def _wait_for_end(self, other: int):
        try:
            dist.recv(torch.zeros(1), src=other, group=self.silence)
        except RuntimeError:                    # the connection is broken
            print(f"rank {other} is gone, so rank {self.rank} ends", file=sys.stderr, flush=True)
            os._exit(1)

    def say_goodbye(self):
        """Wait until the others say it, too."""
        for other in self.others:
            dist.send(torch.zeros(1), dst=other, group=self.silence)
        for watcher in self.watchers:
            watcher.join()
        self.watchers.clear()

    @torch.compiler.disable
    def add_up(self, part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    def smallest(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        dist.all_reduce(reduced := torch.tensor(numbers), dist.ReduceOp.MIN)
        return tuple(reduced.tolist())

    def agree(self, thing=None):
        """What rank 0 has given to this function."""
        dist.broadcast_object_list(box := [thing], src=0, device=torch.device("cpu"))
        return box[0]

    def tell(self, arrays: list[np.ndarray]):
        """Rank 0 sends COUNT arrays of integers, or none. They are one message: the size of each, and
        their numbers. The first broadcast has room for most messages; a second one takes the rest."""
        sizes = [array.size for array in arrays] or [-1] * COUNT
        message = join([np.array(sizes), *arrays])
        first = np.zeros(FIRST, np.int32)
        first[:len(message)] = message[:FIRST]
        dist.broadcast(torch.from_numpy(first), src=0)
        if len(message) > FIRST:
            dist.broadcast(torch.from_numpy(message[FIRST:]), src=0)

    def hear(self) -> list[np.ndarray]:
        """The arrays that rank 0 tells."""
        dist.broadcast(message := torch.zeros(FIRST, dtype=torch.int32), src=0)
        sizes = message[:COUNT].tolist()
        if sizes[0] < 0:
            return []
        missing = COUNT + sum(sizes) - FIRST
        if missing > 0:
            dist.broadcast(rest := torch.zeros(missing, dtype=torch.int32), src=0)
            message = torch.cat([message, rest])
        return np.split(message[COUNT:COUNT + sum(sizes)].numpy(), np.cumsum(sizes)[:-1])


@cache
def join_ranks() -> Ranks | None:
    """The processes that share a model; None if this one is alone. A process can join only once."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and dist.is_torchelastic_launched()
    return Ranks() if several else None


@contextmanager
def or_end_process():
    """End this process if the block fails: the other ranks are in the middle of it and cannot go on."""
    try:
        yield
    except BaseException:
        time.sleep(1)           # if another rank is gone, the watching thread says so and ends us
        traceback.print_exc()
        os._exit(1)


# ---- a step as numbers

def to_numbers(packed: Packed, changes: list[np.ndarray], slot_copies: dict[int, int], swap_in: list[Ticket],
               swap_out: list[Ticket], landed: list[int]) -> list[np.ndarray]:
    """The arguments of Worker._start, without what only rank 0 needs, and the flights that have landed."""
    columns = [*packed[:5], *changes, list(slot_copies), list(slot_copies.values()), *columns_of(swap_in),
               *columns_of(swap_out), landed]
    return [np.asarray(column, dtype=np.int32) for column in columns]


def columns_of(tickets: list[Ticket]) -> list[list[int]]:
    """What a pool must know of them: places, numbers of tokens, and the slots of all tokens."""
    return [[ticket.place for ticket in tickets], [ticket.filled for ticket in tickets],
            [slot for ticket in tickets for slot in ticket.slots]]


def from_numbers(arrays: list[np.ndarray]) -> tuple:
    """The arguments of to_numbers. The tickets are of no conversation, and no request samples."""
    table_row, start, end, tokens, sample_at, *others = arrays
    packed = Packed(table_row.tolist(), start.tolist(), end.tolist(), array("i", tokens.tolist()),
                    sample_at.tolist(), sampling=[])
    slot_copies = dict(zip(others[3].tolist(), others[4].tolist()))
    arriving, leaving = tickets_of("in", *others[5:8]), tickets_of("out", *others[8:11])
    return packed, others[:3], slot_copies, arriving, leaving, others[11]


def tickets_of(direction: str, places: np.ndarray, filled: np.ndarray, slots: np.ndarray) -> list[Ticket]:
    each = np.split(slots, np.cumsum(filled)[:-1])
    return [Ticket(None, None, direction, 0, int(count), some.tolist(), int(place))
            for place, count, some in zip(places, filled, each)]


# ---- workers that share a model

class SharingWorker(Worker):
    """A worker with a part of the model. Its pool has the K and V of its own heads."""

    def __init__(self, ranks: Ranks, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ranks = ranks

    def capture(self, make_graph: Callable):
        with or_end_process():                  # others would wait for us, or pad a batch that we do not
            super().capture(make_graph)

    def _remember(self, inputs: Inputs, tokens: Tensor):
        if len(tokens):
            dist.broadcast(tokens, src=0)
        super()._remember(inputs, tokens)


class Leader(SharingWorker):
    """Rank 0's."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.told: list[Flight] = []            # the flights that the followers believe to be in the air

    def launch(self, batch: Batch) -> Callable[[], Result]:
        with or_end_process():
            return super().launch(batch)

    def _start(self, packed: Packed, *known) -> tuple[Inputs, Tensor | None]:
        landed = [n for n, flight in enumerate(self.told) if flight not in self.pool.flights]
        self.ranks.tell(to_numbers(packed, *known, landed))
        started = super()._start(packed, *known)
        self.told = list(self.pool.flights)
        return started

    def dismiss(self):
        """The engine is closed, and the followers may end. A second call does nothing."""
        if self.ranks.watchers:
            self.ranks.tell([])
            self.ranks.say_goodbye()


class Follower(SharingWorker):
    """Any other rank's. It has no engine."""

    @torch.inference_mode()
    def follow(self):
        """Take part in every step, until rank 0 dismisses us."""
        with or_end_process():
            while numbers := self.ranks.hear():
                self.take_part(numbers)
            self.ranks.say_goodbye()

    def take_part(self, numbers: list[np.ndarray]):
        """The step that rank 0 describes."""
        *step, landed = from_numbers(numbers)
        self._forget_flights(landed)
        inputs, _ = self._start(*step)
        self._remember(inputs, torch.zeros_like(inputs.sample_at))

    def _forget_flights(self, landed: np.ndarray):
        """These have landed on rank 0, so what follows uses their slots and places again. Ours may be in
        the air still: the current stream waits for them. The host does not."""
        for flight in [self.pool.flights[n] for n in landed]:
            self.pool.stream().wait_event(flight.end)
            self.pool.flights.remove(flight)


def open_worker(config, directory: Path | None, profiles: bool) -> Worker:
    """For an engine with this engine.Config: its worker. Under torchrun this returns on rank 0 only.
    profiles: the engine will call profile() at once."""
    ranks = join_ranks()
    if not ranks:
        return load_worker(config, directory)
    if ranks.rank:
        follow_engine(ranks)
        sys.exit(0)
    if ranks.watchers:
        raise ValueError("several processes have one engine at a time: close the other one first")
    ranks.agree((config, profiles))
    worker = load_worker(config, directory, ranks, partial(Leader, ranks))
    ranks.watch()
    return worker


def follow_engine(ranks: Ranks):
    """Take part in the next engine that rank 0 opens, until it is closed. Ctrl-C and SIGTERM are rank 0's
    business: it may have turns to finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        config, profiles = ranks.agree()
    except RuntimeError:
        sys.exit(0)                             # rank 0 has ended without another engine
    directory = None if config.random_weights else find_checkpoint(config.model)
    worker = load_worker(config, directory, ranks, partial(Follower, ranks))
    ranks.watch()
    if profiles:
        worker.profile()
    worker.follow()


def follow_every_engine():
    """For programs that open several engines, one after another: on ranks other than 0 this follows all of
    them, and does not return. On rank 0, and without torchrun, it does nothing."""
    ranks = join_ranks()
    while ranks and ranks.rank:
        follow_engine(ranks)
