"""Single parts, measured against the limits of the hardware that they run on.

A figure is a function (device, seed) -> (rows, ratios):

    kernel        attention: Figure 12, decodes, prompts, a mixed batch (baselines: rivals.py)
    swap          copies between the tiers: alone, and behind a step
    step          decodes and prompts through the whole engine
    scheduling    the host's work for a step, beside many idle conversations

On CUDA the sizes are the paper's; on a CPU they are small, so the same code runs anywhere in a
minute or two. `machine` measures the rates that a simulation of this machine needs.

Rules of measuring: systems that we compare run in turns, and we take medians. The same run
measures the device's own bandwidth of copies and rate of matrix products. `share` is the time
that the bytes and the flops need at those rates, whichever is longer, divided by the time
taken: 1.0 is the hardware's limit.
"""
import math
import sys
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import median
from typing import Callable

import numpy as np
import torch

from checkpoint import PRESETS, random_model
from cpu_linear import Float16Embedding
from engine import Engine
from experiments.curves import Found
from experiments.rivals import Scene, ours, packed, rivals, rounds
from experiments.simulator import (HARDWARE, OPERATORS, Hardware, Operators, SimulatedWorker,
                                   VirtualClock)
from graphs import Graphs
from kv_cache import Conversation, Ticket
from kv_pool import KVPool
from loading import speed_up
from recompute_cost import device_seconds
from sampling import Sampling
from scheduler import Batch, Request, Span
from worker import Worker


# ---- measuring

def in_turns(device: str, runs: dict[str, Callable], repeats: int, after: Callable | None = None
             ) -> dict[str, float]:
    """The median seconds of each run(n), n = 1 to repeats; run(0) warms up and does not count.

    device: whose time counts; "cpu" for a run that returns when its work is done, wherever that is.
    after: called after each run, outside the measured time."""
    times = {name: [] for name in runs}
    for n in range(repeats + 1):
        for name, run in runs.items():
            times[name].append(device_seconds(torch.device(device), partial(run, n)))
            if after:
                after()
    return {name: median(taken[1:]) for name, taken in times.items()}


def read_bandwidth(device: str) -> float:
    """Bytes per second of a matrix times one vector, which does little but read the matrix."""
    matrix = torch.ones(8192, 8192, device=device)
    taken = in_turns(device, {"read": lambda n: matrix @ matrix[0]}, repeats=5)
    return matrix.nbytes / taken["read"]


class Bench:
    """Collects rows and ratios, beside the measured peaks of the device.

    bandwidth: bytes per second of a large copy; bytes read and bytes written both count.
    flops: per second, of a large matrix product."""

    def __init__(self, device: str):
        self.device, self.cuda = device, device != "cpu"
        self.rows, self.ratios = [], []
        if self.cuda:
            self.dtype, size, width = torch.bfloat16, 2**31, 8192
        else:
            self.dtype, size, width = torch.float32, 2**27, 1024
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        # Random, because a product of ones takes less power, and so runs faster than any real one.
        matrix = torch.randn(width, width, dtype=self.dtype, device=device)
        runs = {"copy": lambda n: target.copy_(source), "product": lambda n: matrix @ matrix}
        taken = in_turns(device, runs, repeats=10)
        self.bandwidth = 2 * size / taken["copy"]
        self.flops = 2 * width**3 / taken["product"]

    def scene(self, model: str, q_len: list[int], kv_len: list[int], seed: int,
              shuffled: bool = True) -> Scene:
        return Scene(self.device, self.dtype, model, q_len, kv_len, seed, shuffled)

    def row(self, system: str, model: str, dataset: str, context: int, seconds: float,
            moved: int = 0, flops: int = 0) -> dict:
        """Add a row and return it. moved: bytes that must be read or written."""
        floor = max(moved / self.bandwidth, flops / self.flops)
        self.rows.append(dict(
            system=system, model=model, dataset=dataset, context=context, seconds=seconds,
            share=floor / seconds,
            gbytes_per_second=moved / seconds / 1e9, copy_gbytes_per_second=self.bandwidth / 1e9,
            tflops=flops / seconds / 1e12, matmul_tflops=self.flops / 1e12))
        return self.rows[-1]

    def ratio(self, name: str, ours: float, must: float | None = None, on: str = "cuda"):
        """Add a ratio. must: the value that we want to reach on `on`:
        "cuda" (a Hopper GPU) or "cpu"."""
        if on != self.device:
            must = None
        self.ratios.append(dict(name=name, paper=None, ours=ours, how="measured", must=must))


# ---- kernel: multi-token attention and its rivals

def compare(bench: Bench, dataset: str, scene: Scene, runs: dict[str, Callable]) -> dict[str, dict]:
    """Measure the runs in turns -> their rows, by name."""
    taken = in_turns(bench.device, runs, repeats=20 if bench.cuda else 5)
    context = max(scene.kv_len)
    return {name: bench.row(name, scene.model, dataset, context, seconds, scene.moved, scene.flops)
            for name, seconds in taken.items()}


def figure_12(bench: Bench, seed: int, model: str, batch: int, contexts: list[int]):
    """Prompts of 8 tokens behind contexts of growing length."""
    for context in contexts:
        scene = bench.scene(model, [8] * batch, [context] * batch, seed)
        found = compare(bench, "fig12", scene, rivals(scene) | {"a round per token": rounds(scene)})
        our_seconds = found["ours"]["seconds"]
        best = min(row["seconds"] for name, row in found.items() if name.startswith("contiguous"))
        case = f"fig12, {context} tokens: time"
        bench.ratio(f"{case}, ours / contiguous, the best", our_seconds / best, must=1.0)
        for name in ("copy-out", "a round per token"):
            bench.ratio(f"{case}, {name} / ours", found[name]["seconds"] / our_seconds)


def decodes(bench: Bench, seed: int, model: str, batch: int, context: int):
    """One query per request, over shuffled slots and over slots in order."""
    scene = bench.scene(model, [1] * batch, [context] * batch, seed)
    in_order = bench.scene(model, [1] * batch, [context] * batch, seed, shuffled=False)
    found = compare(bench, "decode", scene,
                    {"ours": ours(scene), "ours, slots in order": ours(in_order)})
    shuffled, ordered = found.values()
    case = f"decode, {model}, batch {batch}, {context} tokens"
    bench.ratio(f"{case}: bytes per second / device copy",
                shuffled["gbytes_per_second"] / shuffled["copy_gbytes_per_second"],
                must=0.85 if batch > 1 else 0.55)
    bench.ratio(f"{case}: speed, shuffled / sequential slots",
                ordered["seconds"] / shuffled["seconds"], must=0.97)


def prompts(bench: Bench, seed: int, model: str, length: int, short: int, history: int):
    """Two prompts of `length` tokens without history; then four short
    ones behind `history` tokens."""
    scene = bench.scene(model, [length] * 2, [length] * 2, seed)
    found = compare(bench, "prefill", scene, rivals(scene))
    case = f"prefill, {length} tokens"
    bench.ratio(f"{case}: TFLOP/s / matrix product",
                found["ours"]["tflops"] / found["ours"]["matmul_tflops"], must=0.5)
    bench.ratio(f"{case}: speed, ours / contiguous",
                found["contiguous"]["seconds"] / found["ours"]["seconds"], must=1.1)

    scene = bench.scene(model, [short] * 4, [history + short] * 4, seed)
    found = compare(bench, "short prompts", scene, rivals(scene))
    bench.ratio(f"{short} tokens over {history}, batch 4: floor / time", found["ours"]["share"],
                must=0.5)


def mixed(bench: Bench, seed: int, model: str, q_len: list[int], kv_len: list[int]):
    """Decodes and prompts in one call."""
    scene = bench.scene(model, q_len, kv_len, seed)
    found = compare(bench, "mixed batch", scene, {"ours": ours(scene), "paged|sdpa": packed(scene)})
    bench.ratio("mixed batch: speed, ours / paged|sdpa",
                found["paged|sdpa"]["seconds"] / found["ours"]["seconds"], must=5.0)


def kernel(device: str, seed: int) -> Found:
    """Figure 12, and everything else about attention."""
    bench = Bench(device)
    if bench.cuda:
        figure_12(bench, seed, "llama2-13b", 32, [1024, 2048, 4096, 8192, 16384])
        decodes(bench, seed, "llama2-13b", 64, 4096)
        decodes(bench, seed, "llama2-13b-gqa", 64, 16384)
        decodes(bench, seed, "llama2-70b", 1, 32768)
        prompts(bench, seed, "llama2-13b", 8192, 64, 16384)
        mixed(bench, seed, "llama2-13b", [1] * 32 + [64] * 4 + [1024],
              [2048] * 32 + [4096] * 4 + [1024])
    else:
        figure_12(bench, seed, "opt-125m", 4, [128, 512])
        decodes(bench, seed, "opt-125m", 8, 256)
        decodes(bench, seed, "opt-125m", 1, 1024)
        prompts(bench, seed, "opt-125m", 512, 16, 512)
        mixed(bench, seed, "opt-125m", [1] * 4 + [16, 64], [256] * 5 + [64])
    return Found(bench.rows, bench.ratios)


# ---- swap: copies between the tiers, alone and behind a step

CHUNK = 32      # tokens


def tickets(places, slots: list[int]) -> list[Ticket]:
    """A copy between each place and the next 32 of the slots."""
    return [Ticket(None, None, "", 0, CHUNK, slots[CHUNK * n:CHUNK * (n + 1)], place)
            for n, place in enumerate(places)]


def drain(pool: KVPool):
    """Wait until all copies have ended."""
    while pool.flights:
        pool.landed(wait=True)


def copying(pool: KVPool, swap_in=(), swap_out=()) -> Callable:
    """A run that makes these copies alone, and both ways at once if there are both. (A copy out
    waits for the copies in before it, so it starts first.)"""
    def run(n):
        pool.swap_out(swap_out)
        pool.swap_in(swap_in)
        drain(pool)
    return run


def stepping(worker: Worker, spans: list[Span], swap_in=(), swap_out=()) -> Callable:
    """A run that executes one batch. It returns when the tokens are on the
    host; copies out may go on."""
    def run(n):
        batch = Batch(n, 0)
        batch.spans, batch.swap_in, batch.swap_out = spans, list(swap_in), list(swap_out)
        worker.execute(batch)
    return run


def copies(bench: Bench, model: str, pool: KVPool, slots: list[int], chunks: int):
    """Copies of chunks in shuffled slots: in, out, and both ways at once, as when a step's copies
    in find the copies out of the step before still under way.

    The limit is one large copy of as many bytes, from and to page-locked memory."""
    host = torch.empty_like(pool.cpu[:, :, :CHUNK * chunks], pin_memory=bench.cuda)
    there = torch.empty_like(host, device=bench.device)
    neighbours = tickets(range(chunks), slots)
    scattered = tickets(range(0, 2 * chunks, 2), slots)
    others = tickets(range(chunks, 2 * chunks), slots[CHUNK * chunks:])
    runs = {"one copy in": lambda n: there.copy_(host),
            "one copy out": lambda n: host.copy_(there),
            "swap in": copying(pool, swap_in=neighbours),
            "swap out": copying(pool, swap_out=neighbours),
            "swap in, scattered places": copying(pool, swap_in=scattered),
            "both ways": copying(pool, swap_in=neighbours, swap_out=others)}
    taken = in_turns("cpu", runs, repeats=10)
    for name, seconds in taken.items():
        moved = 2 * host.nbytes if name == "both ways" else host.nbytes
        bench.row(name, model, "copies", CHUNK * chunks, seconds, moved)
    bench.ratio("swap in, shuffled slots / one copy in",
                taken["one copy in"] / taken["swap in"], must=0.9)
    bench.ratio("swap out, shuffled slots / one copy out",
                taken["one copy out"] / taken["swap out"], must=0.9)
    bench.ratio("swap in, scattered places / neighbouring ones",
                taken["swap in"] / taken["swap in, scattered places"])
    bench.ratio("both ways: time / one after the other",
                taken["both ways"] / (taken["swap in"] + taken["swap out"]))


def cached_request(worker: Worker, row: int, slots: list[int], seed: int) -> Request:
    """A request in this row of the slot table, whose whole context is cached in `slots`."""
    tokens = np.random.default_rng([seed, row]).integers(worker.vocab_size, size=len(slots))
    conversation = Conversation(str(row), row, tokens, CHUNK)
    conversation.row = row
    worker.slot_table[row, :len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return Request(conversation, [], sampling=Sampling(seed=seed))


def overlap(bench: Bench, model: str, worker: Worker, slots: list[int], batch: int, context: int,
            chunks: int, prompt: int, seed: int):
    """How well copies hide behind the computation of a step.

    `batch` requests decode behind `context` tokens each. One more request returns: its history of
    `chunks` chunks is copied in, and its new prompt is computed. Then the same requests decode
    while other chunks are copied out.

        slots         | request 0 | request 1 | ... | history | prompt | ...
        CPU places    | arriving, to the history | leaving, from the first slots |
    """
    decoding = []
    for row in range(batch):
        request = cached_request(worker, row, slots[row * context:(row + 1) * context], seed)
        decoding.append(Span(request, context - 1, context))
    history = CHUNK * chunks
    returning_slots = slots[batch * context:]
    request = cached_request(worker, batch, returning_slots[:history + prompt], seed)
    returning = [*decoding, Span(request, history, history + prompt)]
    arriving = tickets(range(chunks), returning_slots)
    leaving = tickets(range(chunks, 2 * chunks), slots)

    runs = {"step": stepping(worker, returning),
            "copy": copying(worker.pool, swap_in=arriving),
            "step with copies in": stepping(worker, returning, swap_in=arriving),
            "decode": stepping(worker, decoding),
            "decode with copies out": stepping(worker, decoding, swap_out=leaving)}
    taken = in_turns("cpu", runs, repeats=10, after=partial(drain, worker.pool))
    for name, seconds in taken.items():
        bench.row(name, model, "overlap", history + prompt, seconds)
    bench.ratio("step with copies in / max(copy, step)",
                taken["step with copies in"] / max(taken["copy"], taken["step"]), must=1.15)
    bench.ratio("decode with copies out / decode",
                taken["decode with copies out"] / taken["decode"], must=1.10)


def swap(device: str, seed: int) -> Found:
    """The copies of KVPool. Without CUDA everything runs in order, and nothing can overlap."""
    bench = Bench(device)
    if bench.cuda:
        model, chunks, batch, context, prompt = "llama2-13b-gqa", 256, 32, 1024, 512
    else:
        model, chunks, batch, context, prompt = "opt-125m", 16, 4, 128, 32
    history = CHUNK * chunks
    num_slots = batch * context + 2 * history + prompt
    decoder = random_model(model, device, bench.dtype, seed=seed)
    worker = Worker(decoder, num_slots, 2 * chunks, CHUNK, batch + 1, history + prompt)
    speed_up(worker, small=False)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed)).tolist()
    copies(bench, model, worker.pool, slots, chunks)
    overlap(bench, model, worker, slots, batch, context, chunks, prompt, seed)
    return Found(bench.rows, bench.ratios)


# ---- step: whole steps of the engine

def time_steps(engine: Engine, batch: int, prompt: int, new: int, seed: int, during=nullcontext()
               ) -> tuple[float, float]:
    """Serve `batch` requests of `prompt` random tokens, `new` tokens each.

    Returns the seconds until all requests have their first tokens, and the median of the later
    steps, in which all requests decode. (On a GPU the first step only launches the prompts: the
    second one waits for them.) during: a context manager around the decodes."""
    def step() -> float:
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start

    rng = np.random.default_rng(seed)
    tokens = rng.integers(engine.worker.vocab_size, size=(batch, prompt)).tolist()
    handles = [engine.submit(one, None, max_tokens=new, ignore_eos=True) for one in tokens]
    first = 0.0
    while not all(handle.token_ids for handle in handles):
        first += step()
    with during:
        decodes = [step() for _ in range(new - 1)]
    assert all(handle.result().token_ids for handle in handles)
    return first, median(decodes)


def time_transformers(model, batch: int, prompt: int, new: int, seed: int) -> tuple[float, float]:
    """The same as `time_steps` with a model of transformers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (batch, prompt), generator=generator)
    times = []

    def note(ids, scores, **others):    # transformers asks after every token whether it should stop
        times.append(time.perf_counter())
        return torch.zeros(batch, dtype=torch.bool)

    start = time.perf_counter()
    model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                   max_new_tokens=new, min_new_tokens=new, stopping_criteria=[note])
    return times[0] - start, median(np.diff(times))


def read_bytes(worker: Worker, batch: int, context: int) -> int:
    """Bytes that a decode must read: the KV of its contexts, the matrices of all layers, and the
    output layer. Biases, norms and a few rows of the embeddings, less than 1%, are left out."""
    config = worker.model.config
    weights = config.matmul_parameters + config.vocab_size * config.width
    kv_token = worker.pool.gpu[:, :, 0].nbytes
    keeps_float16 = isinstance(worker.model.tokens, Float16Embedding)
    return batch * context * kv_token + weights * (2 if keeps_float16 else worker.dtype.itemsize)


def peak_resident() -> int:
    """The most bytes of memory that this process has had so far."""
    import resource                         # Windows has none
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def opt_125m_of_transformers():
    """transformers' OPT-125m with random weights; None where the library is not installed."""
    try:
        from transformers import OPTConfig, OPTForCausalLM
    except ImportError:
        print("transformers is not installed: there is nothing to compare with")
        return None
    return OPTForCausalLM(OPTConfig()).eval()       # OPTConfig's defaults are OPT-125m's


def small_steps(bench: Bench, seed: int, prompt: int = 128, new: int = 16, whole: int = 1024):
    """On a CPU: decodes against reading the weights, decodes and a long
    prompt against transformers."""
    engine = Engine("opt-125m", random_weights=True, device="cpu", gpu_cache_tokens=4 * whole,
                    cpu_cache_tokens=0, max_batch_tokens=whole,
                    dtype="float16")            # as OPT is stored
    systems = {"ours": partial(time_steps, engine, seed=seed)}
    # batch, prompt, new
    cases = single, eight, long = (1, prompt, new), (8, prompt, new), (1, whole, 2)
    for case in cases:
        systems["ours"](*case)              # the first write of memory is slow
    weights_and_cache = read_bytes(engine.worker, 0, 0) + engine.worker.pool.gpu.nbytes
    bench.ratio("memory: peak resident of the process, ours / weights and cache",
                peak_resident() / weights_and_cache)
    if library := opt_125m_of_transformers():
        systems["transformers"] = partial(time_transformers, library, seed=seed)
        for case in cases:
            systems["transformers"](*case)
    reads, times = [], {}              # times: (system, case) -> [(prompt, decode), ...] in seconds
    for _ in range(3):
        reads.append(read_bandwidth("cpu"))
        for case, (name, run) in product(cases, systems.items()):
            times.setdefault((name, case), []).append(run(*case))
    medians = {key: np.median(taken, axis=0).tolist() for key, taken in times.items()}

    for (name, case), (first, decode) in medians.items():
        batch, length, _ = case
        context = length + new // 2         # in the middle of the reply
        moved = read_bytes(engine.worker, batch, context)
        bench.row(name, "opt-125m", f"prompt, batch {batch}", length, first)
        bench.row(name, "opt-125m", f"decode, batch {batch}", context, decode, moved)
        if case == single:
            bench.ratio(f"decode, batch 1, {name}: bytes per second / read bandwidth",
                        moved / decode / median(reads), must=0.75 if name == "ours" else None,
                        on="cpu")
    if library:
        bench.ratio("decode, batch 8: speed, ours / transformers",
                    medians["transformers", eight][1] / medians["ours", eight][1], must=1.8,
                    on="cpu")
        bench.ratio(f"prompt of {whole}: speed, ours / transformers",
                    medians["transformers", long][0] / medians["ours", long][0], must=1.5, on="cpu")


def large_steps(bench: Bench, seed: int, model: str = "llama2-13b", prompt: int = 1024,
                new: int = 64):
    """On a GPU: decodes against reading at copy bandwidth, decodes beside a prompt, and how long
    the GPU waits for the host."""
    engine = Engine(model, random_weights=True, device=bench.device,
                    gpu_cache_tokens=40 * (prompt + new),
                    cpu_cache_tokens=0, max_batch_tokens=32 * prompt)
    context = prompt + new // 2             # in the middle of the reply
    decodes = {}                            # batch -> seconds
    for batch in (1, 8, 32):
        time_steps(engine, batch, prompt, new, seed)                    # compiles
        first, decode = time_steps(engine, batch, prompt, new, seed)
        decodes[batch] = decode
        moved = read_bytes(engine.worker, batch, context)
        bench.row("ours", model, f"prompt, batch {batch}", prompt, first)
        bench.row("ours", model, f"decode, batch {batch}", context, decode, moved)
        bench.ratio(f"decode, batch {batch}: time / (weights + KV) at copy bandwidth",
                    decode * bench.bandwidth / moved, must=1.20 if batch == 1 else None)
    mixed_steps(bench, model, engine.worker, prompt, seed)
    # The profiler slows everything that runs after it, so it comes last.
    for batch, decode in decodes.items():
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        time_steps(engine, batch, prompt, new, seed, during=profile)
        busy_us = sum(event.self_device_time_total for event in profile.key_averages())
        busy = busy_us / 1e6 / (new - 1)
        bench.ratio(f"decode, batch {batch}: share of the step in which the GPU is idle",
                    1 - busy / decode)


def mixed_steps(bench: Bench, model: str, worker: Worker, context: int, seed: int, batch: int = 32):
    """On a GPU: decodes, and one short prompt behind half of a context; replayed as a CUDA graph,
    and launched kernel by kernel."""
    *requests, last = [cached_request(worker, row, list(range(row * context, (row + 1) * context)),
                                      seed)
                       for row in range(batch + 1)]
    decoding = [Span(request, context - 1, context) for request in requests]
    for prompt in (16, 64, 200):
        prompt = min(prompt, context // 2)              # a test has a small model
        spans = [*decoding, Span(last, context // 2, context // 2 + prompt)]
        run, graphs = stepping(worker, spans), worker.graphs

        def launched(n):
            worker.graphs = Graphs()
            run(n)
            worker.graphs = graphs
        taken = in_turns("cpu", {"replayed": run, "launched": launched}, repeats=10)
        for name, seconds in taken.items():
            bench.row(name, model, f"{batch} decodes, a prompt", prompt, seconds)
        bench.ratio(f"{batch} decodes and a prompt of {prompt}: "
                    "time, launched / replayed as a graph",
                    taken["launched"] / taken["replayed"])


def step(device: str, seed: int) -> Found:
    """Decodes and prompts through the whole engine."""
    bench = Bench(device)
    if bench.cuda:
        large_steps(bench, seed)
    else:
        small_steps(bench, seed)
    return Found(bench.rows, bench.ratios)


# ---- scheduling: the host's work before any tensor moves

def scheduling(device: str, seed: int) -> Found:
    """Seconds of scheduling and accounting in a step of 256 decodes,
    beside many idle conversations.

    Beside 100 of them a step evicts nothing. Beside 100,000 or more it moves about 17 chunks, which
    is nearly all that it costs more.

    For scale: the seconds that OPT-13B would take for that step on an H200. (The measurement needs
    neither device nor seed.)"""
    steps, rows = 100, []
    for idle in (100, 1_000, 10_000, 100_000, 1_000_000):
        engine = decoding_engine(idle, running=256, context=500, steps=steps)
        host, simulated = zip(*(timed_step(engine) for _ in range(steps)))
        engine.close()
        row = dict(model="opt-13b", dataset="256 decodes", idle=idle)
        rows.append(dict(system="scheduling and accounting, here", **row, seconds=median(host)))
        rows.append(dict(system="the step, simulated on an H200", **row, seconds=median(simulated)))

    few, h200_step, many, most = (rows[n]["seconds"] for n in (0, 1, -4, -2))
    kind = dict(paper=None, how="measured")
    ratios = [
        dict(name="scheduling: 100,000 idle conversations / 100", ours=many / few, must=1.5,
             **kind),
        dict(name="scheduling: 1,000,000 idle conversations / 100,000", ours=most / many, must=1.1,
             **kind),
        dict(name="scheduling: share of an OPT-13B step", ours=few / h200_step, must=0.05, **kind)]
    return Found(rows, ratios)


def decoding_engine(idle: int, running: int, context: int, steps: int) -> Engine:
    """An engine whose cache holds `idle` short conversations, and in
    which `running` requests decode.

    Each request has `context` tokens or a few more behind it, and at least `steps` to come. The
    contexts have different lengths, so that about as many chunks end in each step. With many idle
    conversations the slots are full, so every new token takes a slot from one of them."""
    clock = VirtualClock()
    num_slots = 2 * running * (context + 2 * steps) + 8 * idle
    worker = SimulatedWorker(PRESETS["opt-13b"], HARDWARE["h200"], OPERATORS["eager"], clock,
                             num_slots, num_places=idle + 1000, max_context=2048)
    engine = Engine("opt-13b", worker=worker, clock=clock, max_running=running,
                    max_batch_tokens=8192)
    for n in range(idle):
        engine.generate([0] * 15, f"idle {n}", max_tokens=1, ignore_eos=True)
    handles = [engine.submit([0] * (context + n % engine.config.chunk_size), f"running {n}",
                             max_tokens=2 * steps, ignore_eos=True) for n in range(running)]
    while not all(handle.request and handle.request.generated for handle in handles):
        engine.step()
    return engine


def timed_step(engine: Engine) -> tuple[float, float]:
    """One engine.step(), taken apart -> seconds of scheduling and
    accounting, seconds of the worker.

    The former are of this machine, the latter of the worker's own clock."""
    begin, now = time.perf_counter(), engine.clock()
    batch = engine.scheduler.schedule(now)
    scheduled = time.perf_counter()
    result = engine.worker.execute(batch)
    executed = time.perf_counter()
    engine.scheduler.launched(batch)
    engine.scheduler.account(batch, result, engine.clock())
    accounted = time.perf_counter()
    return (scheduled - begin) + (accounted - executed), engine.clock() - now


# ---- this machine, to be simulated

def machine(engine: Engine, seed: int) -> tuple[Hardware, Operators]:
    """The rates and shares with which a SimulatedWorker imitates this
    machine and the engine's model."""
    hardware = measure_hardware(engine.worker)
    return hardware, measure_operators(engine, hardware, seed)


def measure_hardware(worker: Worker) -> Hardware:
    """The rates of this machine, from large products and copies."""
    bench = Bench(worker.device.type)
    host = torch.ones(2**27, dtype=torch.uint8, pin_memory=bench.cuda)
    there = torch.empty(2**27, dtype=torch.uint8, device=worker.device)
    runs = {"copy": lambda n: there.copy_(host)}
    link = host.nbytes / in_turns("cpu", runs, repeats=10)["copy"]
    return Hardware(bench.flops, read_bandwidth(bench.device), link, link, worker.dtype.itemsize)


def measure_operators(engine: Engine, hardware: Hardware, seed: int) -> Operators:
    """The shares of the hardware's rates that the engine's model reaches,
    and the host's work, in seconds.

    All of it comes from the model's own steps. Three loads take turns, and we compare medians:

        one     1 request with a prompt of 8 tokens
        many    16 requests with prompts of 32
        long    4 requests with prompts of 2,048, or fewer: together they fill half of the GPU tier

        a decode of many - a decode of one               the host's work for 15 spans
        prompts of many - a decode of many               matrix products of 512 tokens
        prompts of long - such products - the host       attention
        a decode of long - a decode of one - 3 spans     reading KV

    What is left of a decode of `one` is the host's work for a step; we count none for a layer.
    Replies have 32 tokens: with 512 tokens per step, the first of the long requests decodes up to
    12 before the last has read its prompt, so in most steps all four decode."""
    worker, config = engine.worker, engine.config
    count = max(2, min(config.max_running, 16))
    few = 4
    far = min(2048, engine.scheduler.limit - 32, engine.stats()["slots_total"] // 2 // few)
    loads = (1, 8), (count, 32), (few, far)
    times = [[time_steps(engine, *load, 32, seed) for load in loads] for _ in range(6)]
    medians = np.median(times[1:], axis=0).tolist()         # the first round warms up
    (_, one), (prompts, many), (long_prompts, long) = medians
    per_span = max((many - one) / (count - 1), 0.0)
    products = prompts - many                           # of count * 32 tokens
    attention = long_prompts - few * far * (one / config.max_batch_tokens + products / (count * 32))
    reading = long - one - (few - 1) * per_span

    def simulated(operators: Operators, memory: float) -> SimulatedWorker:
        return SimulatedWorker(worker.model.config, hardware._replace(memory=memory), operators,
                               None, 1, 0, worker.max_context, worker.chunk_size)

    def share(ideal: float, seconds: float) -> float:
        """Noise of a busy machine must not make it 0 or more than 1."""
        return min(max(ideal / max(seconds, 1e-9), 1e-3), 1.0)

    ideal = Operators(matmul=1, attention=1, memory=1, link=1, per_layer=0, per_step=0)
    peak = simulated(ideal, math.inf)                   # computes, and reads in no time
    operators = ideal._replace(
        matmul=share(peak.linear_seconds(count * 32, count), products),
        attention=share(few * peak.attention_seconds(far, far), attention),
        memory=share(few * (far - 8) * peak.token_bytes / hardware.memory, reading))
    per_step = max(one - per_span - simulated(operators, hardware.memory).linear_seconds(1, 1), 0.0)
    return operators._replace(per_step=per_step, per_span=per_span)
