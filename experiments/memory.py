"""How much of a KV cache holds KV, and how much of it sharing saves (the
PagedAttention paper, SOSP '23).

A slot without KV could hold a token of one more request, and a larger batch has more throughput.
`waste` serves the same queue, which is never empty, under several rules that give slots to
requests. A request with a prompt of 100 tokens and a reply of 30 gets

    whole context    Orca (Max)        2,048 slots, as any request does
    power of two     Orca (Pow2)       132: the length of its reply is rounded up to a power of two
    true length      Orca (Oracle)     130, as if we knew the length before
    chunks of 16     PagedAttention    7 chunks at first, and one more whenever the last one is full

In the first three a buddy allocator gives neighbouring slots, as the paper assumes: 256 for
132 or 130. `ours` is the real engine on a simulated worker. `sharing` counts slots of requests
with several replies to a prompt, and `together` plays them.

The paper gives the mean lengths of prompts and replies. The spread is our choice, the same as in
workload.py. What is longer than LIMIT is left out, so ShareGPT's means are a little lower: 148 and
325 tokens, not 161 and 338. No number here was fitted to the published results.
"""
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, product

import numpy as np

from checkpoint import PRESETS
from engine import Engine
from experiments.simulator import HARDWARE, OPERATORS, SimulatedWorker, VirtualClock

LIMIT = 2048                    # tokens of a context of OPT
SLOTS = 15_700                  # of OPT-13B on one A100 with 40 GB (the paper's Table 1)
# mean tokens of prompt and reply (Figure 11)
MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
SIGMAS = 1.2, 0.8               # of the logarithms of these lengths
MAX_RUNNING = 256               # requests at a time, as in our other simulations
WASTE_TOKENS, SHARING_REQUESTS = 400_000, 300           # how much of each dataset is played
TOGETHER_REPLIES = 3000         # that `together` plays of each load

# What the paper reports: shares of slots in percent (Figure 2), requests at once (Figure 13, at 2
# and at 30 requests per second), and slots saved in percent (Figure 15) by (system, replies);
# throughput over Orca (Oracle) by (replies, tokens of a shared prefix) (Figures 14 and 16).
PUBLISHED_USE = {"whole context": 20.4, "power of two": 26.8, "true length": 38.2,
                 "chunks of 16": 96.3}
PUBLISHED_RUNNING = {
    "sharegpt": {"whole context": 7.00, "power of two": 9.81, "true length": 13.62,
                 "chunks of 16": 30.42},
    "alpaca": {"whole context": 7.00, "power of two": 43.24, "true length": 72.75,
               "chunks of 16": 132.44}}
PUBLISHED_SAVING = {("parallel sampling", 2): 6.09, ("parallel sampling", 4): 8.53,
                    ("parallel sampling", 6): 9.79, ("beam search", 2): 37.56,
                    ("beam search", 4): 53.13, ("beam search", 6): 55.16}
PUBLISHED_GAIN = {(1, 0): 1.3, (1, 80): 1.67, (1, 341): 3.58}


def lengths_of(dataset: str, requests: int, seed: int) -> list[tuple[int, int]]:
    """(prompt tokens, reply tokens) of so many requests: lognormal.
    Those above LIMIT are left out."""
    means, sigmas = np.array(MEANS[dataset]), np.array(SIGMAS)
    mu = np.log(means) - sigmas**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, sigmas, (requests, 2))
    lengths = np.maximum(np.rint(drawn), 1).astype(int)
    return list(map(tuple, lengths[lengths.sum(axis=1) <= LIMIT].tolist()))


# ---- rules that give slots to requests

class Buddies:
    """Contiguous slots for whole requests. A piece of 2^n slots is half of one of 2^(n+1), and is
    joined with the other half when both are free. 100 slots are pieces of 64, 32 and 4 at first."""

    def __init__(self, slots: int, reserved: Callable[[int, int], int]):
        """reserved: (prompt, reply) -> the slots that a request gets, at once and for good."""
        self.reserved, self.free = reserved, {}             # size -> first slots of free pieces
        first = 0
        for size in reversed([1 << n for n in range(slots.bit_length())]):
            if slots & size:
                self.free[size] = {first}
                first += size
        self.largest = max(self.free)

    def take(self, prompt: int, reply: int) -> tuple[int, int] | None:
        """(first slot, size) of a piece for a request; None if there is none."""
        wanted = power_of_two(self.reserved(prompt, reply))
        size = wanted
        while not self.free.get(size):
            if size > self.largest:
                return None
            size *= 2
        first = self.free[size].pop()
        while size > wanted:                                # keep the left half, free the right one
            size //= 2
            self.free.setdefault(size, set()).add(first + size)
        return first, size

    def grow(self, piece: tuple[int, int], length: int) -> tuple[int, int]:
        return piece                                        # it has room for the whole request

    def give_back(self, piece: tuple[int, int]):
        first, size = piece
        while first ^ size in self.free.get(size, ()):      # its other half begins there
            self.free[size].remove(first ^ size)
            first, size = min(first, first ^ size), 2 * size
        self.free.setdefault(size, set()).add(first)


class Chunks:
    """Slots by the chunk, wherever they are: a request has as many chunks as it needs just now."""

    def __init__(self, slots: int, size: int):
        self.size, self.free = size, slots // size

    def take(self, prompt: int, reply: int) -> int | None:
        return self.grow(0, prompt)

    def grow(self, held: int, length: int) -> int | None:
        """The chunks that a request of this length holds; None if there are too few."""
        needed = -(-length // self.size)
        if needed - held > self.free:
            return None
        self.free -= needed - held
        return needed

    def give_back(self, held: int):
        self.free += held


def power_of_two(number: int) -> int:
    """The smallest that is not below the number: 64 for 33 to 64."""
    return 1 << (number - 1).bit_length()


RULES = {
    "whole context": lambda: Buddies(SLOTS, lambda prompt, reply: LIMIT),
    "power of two": lambda: Buddies(
        SLOTS, lambda prompt, reply: min(prompt + power_of_two(reply), LIMIT)),
    "true length": lambda: Buddies(SLOTS, lambda prompt, reply: prompt + reply),
} | {f"chunks of {size}": lambda size=size: Chunks(SLOTS, size)
     for size in (1, 2, 4, 8, 16, 32, 64, 128)}

OURS = {"ours, stateless": dict(stateless=True), "ours": {}}        # flags of Engine


# ---- waste

@dataclass(eq=False)
class Running:
    length: int                     # how many of its tokens have KV
    end: int                        # how many will; its last token needs none
    held: object                    # its slots: whatever `take` and `grow` have returned


def play(lengths: list[tuple[int, int]], memory: Buddies | Chunks, worker: SimulatedWorker
         ) -> Iterator[tuple[int, int, float]]:
    """Serve requests, first come first served, until none waits. Yields of each step: slots that
    hold KV, running requests, seconds. A step computes a token of each request that runs, and
    the whole prompts of new ones."""
    queue, running = deque(lengths), []
    while queue:
        grow_all(running, memory, queue)
        context, decodes, prompts = sum(request.length for request in running), len(running), []
        while queue and len(running) < MAX_RUNNING and (held := memory.take(*queue[0])) is not None:
            prompt, reply = queue.popleft()
            prompts.append(prompt)
            running.append(Running(prompt, prompt + reply - 1, held))
        # Decodes with contexts of 100 and 300 tokens take as long as one with 400.
        seconds = worker.linear_seconds(decodes + sum(prompts), len(running))
        seconds += worker.attention_seconds(min(decodes, 1), context)
        seconds += sum(worker.attention_seconds(prompt, prompt) for prompt in prompts)
        yield context + sum(prompts), len(running), seconds
        for request in [request for request in running if request.length == request.end]:
            memory.give_back(request.held)
            running.remove(request)


def grow_all(running: list[Running], memory: Buddies | Chunks, queue: deque):
    """Give each running request a slot for one more token, the oldest first. When none
    is left, the latest request gives way: it goes back to the queue, with all its
    tokens so far as its prompt."""
    number = 0
    while number < len(running):
        request = running[number]
        held = memory.grow(request.held, request.length + 1)
        if held is None:
            latest = running.pop()
            memory.give_back(latest.held)
            queue.appendleft((latest.length + 1, latest.end - latest.length))
        else:
            request.held, request.length = held, request.length + 1
            number += 1


def play_ours(lengths: list[tuple[int, int]], worker: SimulatedWorker, replies: int = 1,
              prefix: int = 0, **flags) -> Iterator[tuple[int, int, float]]:
    """`play` with our engine. If it is stateful, slots of requests that have ended hold KV, too.

    replies: to each prompt. prefix: tokens with which all prompts begin, before their own. The
    full chunks of both are shared: 64 tokens of a prefix of 80, with chunks of 32."""
    engine = Engine("opt-13b", worker=worker, clock=worker.clock, max_batch_tokens=LIMIT,
                    max_running=MAX_RUNNING, **flags)
    if prefix:
        engine.designate([1] * prefix)
    for number, (prompt, reply) in enumerate(lengths):
        first = None
        for nth in range(replies):
            handle = engine.submit([1] * prefix + [0] * prompt, f"{number}.{nth}", like=first,
                                   max_tokens=reply, ignore_eos=True)
            first = first or handle
    engine.owner.take_inbox()
    while engine.scheduler.queue:
        begin = engine.clock()
        batch = engine.step()
        running = engine.cache.running.values()
        without_kv = sum(conversation.room - conversation.known for conversation in running)
        used = SLOTS - len(engine.cache.free_slots)
        yield used - without_kv, len({span.request for span in batch.spans}), engine.clock() - begin
    engine.close()


def waste(seed: int) -> tuple[list[dict], list[dict]]:
    """Rows and ratios: for each rule the share of slots that hold KV,
    and what its batches achieve."""
    rows = []
    for dataset in MEANS:
        lengths = lengths_of(dataset, int(WASTE_TOKENS / sum(MEANS[dataset])), seed)
        for name, rule in RULES.items():
            rows.append(waste_row(name, dataset, play(lengths, rule(), simulated_worker())))
        for name, flags in OURS.items():
            rows.append(waste_row(name, dataset, play_ours(lengths, simulated_worker(), **flags)))
    ratios, by_name = [], {(row["dataset"], row["system"]): row for row in rows}
    for (dataset, name), row in by_name.items():
        paper = PUBLISHED_USE.get(name) if dataset == "sharegpt" else None
        ratios.append(ratio(f"{dataset}, {name}: slots that hold KV, %", 100 * row["kv_share"],
                            paper, how="simulated"))
        ratios.append(ratio(f"{dataset}, {name}: requests at once", row["running"],
                            PUBLISHED_RUNNING[dataset].get(name), how="simulated"))
    for dataset in MEANS:
        best = by_name[dataset, "chunks of 16"]["tokens_per_second"]
        for name in ("whole context", "power of two", "true length", *OURS):
            gain = best / by_name[dataset, name]["tokens_per_second"]
            ratios.append(ratio(f"{dataset}: throughput, chunks of 16 / {name}", gain,
                                how="simulated"))
    return rows, ratios


def waste_row(system: str, dataset: str, steps: Iterable[tuple[int, int, float]]) -> dict:
    """Means over time; the first tenth of the steps only fills the cache. A step samples a
    token for each running request."""
    steps = np.array(list(steps))                                           # [steps, 3]
    kv, running, seconds = steps[len(steps) // 10:].T
    total = seconds.sum()
    return dict(system=system, model="opt-13b", dataset=dataset,
                kv_share=kv @ seconds / total / SLOTS,
                running=running @ seconds / total, tokens_per_second=running.sum() / total)


def simulated_worker() -> SimulatedWorker:
    return SimulatedWorker(PRESETS["opt-13b"], HARDWARE["a100"], OPERATORS["eager"], VirtualClock(),
                           SLOTS, num_places=0, max_context=LIMIT)


# ---- sharing

def together(seed: int) -> tuple[list[dict], list[dict]]:
    """Rows and ratios: the throughput of our engine if requests share several replies' prompt
    (Figure 14), or all a prefix (Figure 16), over Orca (Oracle), which shares nothing.

    All lengths are Alpaca's. (The paper's Figure 16 translates sentences with LLaMA-13B, which has
    the same shape.)"""
    rows, ratios = [], []
    for replies, prefix in ((1, 0), (2, 0), (4, 0), (6, 0), (1, 80), (1, 341)):
        lengths = lengths_of("alpaca", TOGETHER_REPLIES // replies, seed)
        alone = [(prefix + prompt, reply) for prompt, reply in lengths for _ in range(replies)]
        orca, ours = (waste_row(name, "alpaca", steps) for name, steps in (
            ("true length", play(alone, RULES["true length"](), simulated_worker())),
            ("ours, stateless", play_ours(lengths, simulated_worker(), replies, prefix,
                                          stateless=True))))
        rows += [row | dict(replies=replies, prefix=prefix) for row in (orca, ours)]
        gain = ours["tokens_per_second"] / orca["tokens_per_second"]
        ratios.append(ratio(f"{replies} replies, prefix of {prefix} tokens: throughput, "
                            "ours / true length", gain, PUBLISHED_GAIN.get((replies, prefix)),
                            "simulated"))
    return rows, ratios


def sharing(seed: int) -> tuple[list[dict], list[dict]]:
    """Rows and ratios: the share of slots that are saved because replies
    to one prompt share chunks."""
    rows, ratios = [], []
    cases = product(MEANS, WAYS.items(), (16, 32), (2, 4, 6))
    for dataset, (system, saved_slots), chunk, replies in cases:
        rng, all_saved, all_slots = np.random.default_rng(seed), 0, 0
        for prompt, reply in lengths_of(dataset, SHARING_REQUESTS, seed):
            saved, slots = saved_slots(prompt, reply, replies, chunk, rng)
            all_saved, all_slots = all_saved + saved, all_slots + slots
        share = all_saved / all_slots
        rows.append(dict(system=system, model="any", dataset=dataset, chunk=chunk, replies=replies,
                         saved=share))
        is_published = (dataset, chunk) == ("alpaca", 16)
        paper = PUBLISHED_SAVING.get((system, replies)) if is_published else None
        name = f"{dataset}, {system}, {replies} replies, chunks of {chunk}: slots saved, %"
        ratios.append(ratio(name, 100 * share, paper))
    return rows, ratios


def parallel_sampling(prompt: int, reply: int, replies: int, chunk: int, rng) -> tuple[int, int]:
    """Slots that are saved, and slots without sharing, both summed over the steps of a request. All
    replies share the full chunks of the prompt.

    Two replies of 2 tokens to a prompt of 4, chunks of 2: in both steps each reply holds 3 chunks,
    and 2 of them are shared. So 8 of 24 slots are saved."""
    shared = prompt // chunk
    held = sum(-(-length // chunk) for length in range(prompt + 1, prompt + reply + 1))
    return (replies - 1) * shared * reply * chunk, replies * held * chunk


def beams(prompt: int, reply: int, width: int, chunk: int, rng) -> tuple[int, int]:
    """`parallel_sampling` for beam search. The model would decide which beams go on. We
    let chance decide: each beam of a step continues one of the `width` beams before it,
    all with the same probability.

    A beam here is the list of its chunks' numbers. If several beams continue one whose last chunk
    is not full, all but the first get a copy of that chunk."""
    numbers = count()
    parents = [[next(numbers) for _ in range(-(-prompt // chunk))]] * width
    saved = slots = 0
    for length in range(prompt, prompt + reply):
        chosen = [0] * width if length == prompt else rng.integers(width, size=width).tolist()
        taken, children = set(), []
        for index in chosen:
            chunks = parents[index]
            if length % chunk == 0:
                chunks = [*chunks, next(numbers)]
            elif index in taken:
                chunks = [*chunks[:-1], next(numbers)]
            taken.add(index)
            children.append(chunks)
        parents = children
        held = width * len(parents[0])
        saved += (held - len(set(chain(*parents)))) * chunk
        slots += held * chunk
    return saved, slots


WAYS = {"parallel sampling": parallel_sampling, "beam search": beams}


def ratio(name: str, ours: float, paper: float | None = None, how: str = "computed") -> dict:
    return dict(name=name, paper=paper, ours=ours, how=how)
