"""One model on several GPUs: each process has a part of every layer, and all take the same steps.

    torchrun --nproc-per-node 4 server.py --model DIR     (or bench.py, or a program with an Engine)

Each rank (process) has some of the heads with their K and V, and some of each MLP's inner values.
Its attention and its MLP give a part of a sum, and an all_reduce behind each makes the sum
(model.Layer). A bias of such a sum is rank 0's to add. Embeddings and the output layer are the same
on all ranks.

    rank 0 (Leader)    schedule | numbers -> | layers | logits | sample | tokens -> | settle
    rank 1 (Follower)             -> numbers | layers | logits            -> tokens | wait for more

Rank 0 alone has the scheduler, the books of the cache, and the history. It describes each step in
numbers. It alone samples, and sends the tokens from its device to the others. So no decision
depends on two devices computing equal floats.

Copies between the tiers end at different times on different ranks. Rank 0 names the ones that it
saw end. If a follower's own copy has not ended, then its stream, not its host, waits for the copy.

Invariant: all ranks start the same collectives in the same order. A rank whose step fails breaks
this, so it ends its process. A process that ends while an engine is open ends all others.
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
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arrays import join
from checkpoint import find_checkpoint
from kv_cache import Ticket
from kv_pool import Flight
from loading import load_worker
from model import Alone
from scheduler import Batch, Result
from worker import Inputs, Packed, Worker

STEP_ARRAYS = 17                    # describe a step, see to_numbers
FIRST_SIZE = 1024       # numbers in the first broadcast of a step; most steps need no second one
FOREVER = timedelta(days=3650)      # an idle server sends nothing; Ranks.watch notices a death


# ---- the processes that torchrun has started

class Ranks(Alone):
    """The processes that share a model, seen by one of them."""

    def __init__(self):
        backend = "gloo"
        if gpus := torch.cuda.device_count():
            # (More ranks than GPUs here: NCCL refuses two on one, and says so.)
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=FOREVER)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Nobody sends in this group while an engine is open. So whoever receives in it meanwhile
        # learns when the other process ends.
        self.silence = dist.new_group(backend="gloo", timeout=FOREVER)
        self.others = range(1, self.size) if self.rank == 0 else [0]    # whose end must end us
        self.watchers: list[threading.Thread] = []  # while an engine is open, one for each of them

    def watch(self):
        """From now on the end of one of the others ends this process, until both say goodbye. Rank
        0 watches all, and all watch rank 0: so the end of one is the end of all."""
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
        """An engine is closed. Wait until the others say goodbye, too."""
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
        """Rank 0 calls this with a thing, and all ranks get it."""
        dist.broadcast_object_list(box := [thing], src=0, device=torch.device("cpu"))
        return box[0]

    def tell(self, arrays: list[np.ndarray]):
        """Rank 0 sends STEP_ARRAYS arrays of integers, or none. They are one message: all sizes,
        then all numbers. Most fit into the first broadcast; a second one takes the rest."""
        sizes = [len(numbers) for numbers in arrays] or [-1] * STEP_ARRAYS
        message = join([np.array(sizes), *arrays])
        first = np.zeros(FIRST_SIZE, np.int32)
        first[:len(message)] = message[:FIRST_SIZE]
        dist.broadcast(torch.from_numpy(first), src=0)
        if len(message) > FIRST_SIZE:
            dist.broadcast(torch.from_numpy(message[FIRST_SIZE:]), src=0)

    def hear(self) -> list[np.ndarray]:
        """The arrays that rank 0 tells; none: it dismisses us (the sizes are -1)."""
        dist.broadcast(message := torch.zeros(FIRST_SIZE, dtype=torch.int32), src=0)
        sizes = message[:STEP_ARRAYS].tolist()
        if sizes[0] < 0:
            return []
        end = STEP_ARRAYS + sum(sizes)
        if end > FIRST_SIZE:
            rest = torch.zeros(end - FIRST_SIZE, dtype=torch.int32)
            dist.broadcast(rest, src=0)
            message = torch.cat([message, rest])
        return np.split(message[STEP_ARRAYS:end].numpy(), np.cumsum(sizes)[:-1])


@cache
def join_ranks() -> Ranks | None:
    """The processes that share a model; None if this one is alone. A process can join only once."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and dist.is_torchelastic_launched()
    return Ranks() if several else None


@contextmanager
def or_end_process():
    """End this process if the block fails: the other ranks are in the middle of it, waiting."""
    try:
        yield
    except BaseException:
        time.sleep(1)           # if another rank is gone, the watching thread says so and ends us
        traceback.print_exc()
        os._exit(1)


# ---- a step as numbers

def to_numbers(packed: Packed, changes: list[np.ndarray], slot_copies: dict[int, int],
               swap_in: list[Ticket], swap_out: list[Ticket], landed: list[int]) -> list[np.ndarray]:
    """The arguments of Worker._start, without the requests that sample: only rank 0 needs these.
    landed: the flights that have landed since the last step, by their numbers in Leader.told."""
    columns = [*packed[:5], *changes, list(slot_copies), list(slot_copies.values()),
               *columns_of(swap_in), *columns_of(swap_out), landed]
    return [np.asarray(column, dtype=np.int32) for column in columns]


def columns_of(tickets: list[Ticket]) -> list[list[int]]:
    """What a pool must know of tickets: places, numbers of tokens, and the slots of all these
    tokens. For two tickets, place 5 with slots 9 and 2, and place 0 with slot 7: [5, 0], [2, 1],
    [9, 2, 7]"""
    return [[ticket.place for ticket in tickets], [ticket.filled for ticket in tickets],
            [slot for ticket in tickets for slot in ticket.slots]]


def from_numbers(arrays: list[np.ndarray]) -> tuple:
    """The arguments of to_numbers. The tickets have no conversation, and the packed spans no
    requests: a follower needs neither."""
    (table_row, start, end, tokens, sample_at, rows, positions, slots, targets, sources,
     *copies, landed) = arrays
    packed = Packed(table_row.tolist(), start.tolist(), end.tolist(), array("i", tokens.tolist()),
                    sample_at.tolist(), sampling_requests=[])
    slot_copies = dict(zip(targets.tolist(), sources.tolist()))
    swap_in, swap_out = tickets_of("in", *copies[:3]), tickets_of("out", *copies[3:])
    return packed, [rows, positions, slots], slot_copies, swap_in, swap_out, landed


def tickets_of(direction: str, places: np.ndarray, filled: np.ndarray,
               slots: np.ndarray) -> list[Ticket]:
    """The tickets again, of which columns_of has told."""
    each = np.split(slots, np.cumsum(filled)[:-1])
    return [Ticket(None, None, direction, 0, int(count), some.tolist(), int(place))
            for place, count, some in zip(places, filled, each)]


# ---- workers that share a model

class RankWorker(Worker):
    """The worker of one rank, with its part of the model, and the K and V of its own heads."""

    def __init__(self, ranks: Ranks, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ranks = ranks

    def capture(self, make_graph: Callable):
        # The others would wait for us in a step; or they would pad a batch that we do not pad.
        with or_end_process():
            super().capture(make_graph)

    def _remember(self, inputs: Inputs, tokens: Tensor):
        """Rank 0 has sampled the tokens. The others hand in as many zeros, and get the tokens."""
        if len(tokens):
            dist.broadcast(tokens, src=0)
        super()._remember(inputs, tokens)


class Leader(RankWorker):
    """Rank 0's worker. It tells the others of each step, then it takes part in the step itself."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # The flights that the followers believe to be in the air, in the order of their lists:
        #
        #     step    told, behind it    a follower's pool.flights    landed, before it
        #     7       a b c              a b c                        []
        #     8       a c d              a c d                        [1]: b had landed
        self.told: list[Flight] = []

    def launch(self, batch: Batch) -> Callable[[], Result]:
        with or_end_process():
            return super().launch(batch)

    def _start(self, *step) -> tuple[Inputs, Tensor | None, Tensor | None]:
        landed = [n for n, flight in enumerate(self.told) if flight not in self.pool.flights]
        self.ranks.tell(to_numbers(*[*step, landed]))
        started = super()._start(*step)
        self.told = list(self.pool.flights)
        return started

    def dismiss(self):
        """The engine is closed, and the followers may end. A second call does nothing."""
        if self.ranks.watchers:
            self.ranks.tell([])
            self.ranks.say_goodbye()


class Follower(RankWorker):
    """The worker of any other rank. No engine calls it: it does what rank 0 tells."""

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
        inputs, *_ = self._start(*step)
        self._remember(inputs, torch.zeros_like(inputs.sample_at))

    def _forget_flights(self, landed: np.ndarray):
        """These flights have landed on rank 0, so later steps use their slots and places again.
        Here some of them may be in the air still: then the current stream waits for them, and the
        host does not."""
        for flight in [self.pool.flights[n] for n in landed]:
            self.pool.stream().wait_event(flight.end)
            self.pool.flights.remove(flight)


def open_worker(config, directory: Path | None, profiles: bool) -> Worker:
    """Load the worker of an engine with this config.Config. Under torchrun only rank 0 returns from
    here: any other rank follows this one engine until rank 0 closes it, and then ends its process.
    A program that opens several engines calls follow_every_engine first. profiles: the engine will
    call profile() at once, so the followers call it, too."""
    ranks = join_ranks()
    if not ranks:
        return load_worker(config, directory)
    if ranks.rank:
        follow_engine(ranks)
        leave()                                 # it never returns
    if ranks.watchers:
        raise ValueError("these processes can have only one open engine at a time: "
                         "close the open one first")
    ranks.agree((config, profiles))
    worker = load_worker(config, directory, ranks, partial(Leader, ranks))
    ranks.watch()
    return worker


def follow_engine(ranks: Ranks):
    """Follow the next engine that rank 0 opens, and return when rank 0 closes it. If rank 0 ends
    without opening one, end this process. A follower ignores Ctrl-C and SIGTERM: rank 0 may have
    turns to finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        config, profiles = ranks.agree()
    except RuntimeError:
        leave()                                 # rank 0 has ended without another engine
    directory = None if config.random_weights else find_checkpoint(config.model)
    worker: Any = load_worker(config, directory, ranks, partial(Follower, ranks))
    ranks.watch()
    if profiles:
        worker.profile()
    worker.follow()


def leave() -> NoReturn:
    """End this follower's process. It leaves the group first: else gloo's threads may still hold
    tensors while Python shuts down, and then the process aborts (pytorch/pytorch#190489)."""
    dist.destroy_process_group()
    sys.exit(0)


def follow_every_engine():
    """A program that opens several engines, one after another, calls this first. A rank other than
    0 follows them all, and ends its process when rank 0 ends. Rank 0 joins the others and goes on.
    Without torchrun this does nothing."""
    ranks = join_ranks()
    while ranks and ranks.rank:
        follow_engine(ranks)
