"""What is only for measuring: the baselines of Figure 12, and our parts against what the hardware can do.

A figure is a function (device, seed) -> (rows, ratios): `kernel` (Figure 12 and all else about attention), `swap`, `step`,
`scheduling`. On CUDA the sizes are the paper's; on a CPU they are small, so that the same code runs anywhere in a minute or two.

What is compared is measured in turns, medians are taken, and the machine's own copy bandwidth and matrix rate, measured in the same run,
stand beside every time: `share` is the time that bytes and flops would need at those rates, whichever is longer, over the time taken.
Successive calls read different contexts, together larger than the L2. The baselines are the fastest that torch and what else is
installed offer; contexts of one length in contiguous memory are what a server does not have."""
import math
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from attention_kernel import SpanTensors, multi_token_attention
from engine import Engine
from eviction import RecomputeCost
from kv_cache import Conversation, Ticket
from kv_pool import KVPool
from checkpoint import PRESETS, random_model
from sampling import Sampling
from scheduler import Batch, Request, Span
from experiments.simulator import HARDWARE, OPERATORS, Hardware, Operators, SimulatedWorker, VirtualClock
from worker import Worker, speed_up


# ---- measuring

def host_seconds(device: str, run, n: int = 0) -> float:
    """Of a run(n) whose end the host sees."""
    start = time.perf_counter()
    run(n)
    return time.perf_counter() - start


def device_seconds(device: str, run, n: int = 0) -> float:
    """On CUDA between two events; the GPU spins for some milliseconds first, which hides what the host takes to launch."""
    if device == "cpu":
        return host_seconds(device, run, n)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(8_000_000)
    begin.record()
    run(n)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def in_turns(device: str, runs: dict, repeats: int, seconds=device_seconds, after=lambda: None) -> dict[str, float]:
    """The median seconds of each run(n), n = 0, 1, ..., after one call that is not counted."""
    times = {name: [] for name in runs}
    for n in range(repeats + 1):
        for name, run in runs.items():
            times[name].append(seconds(device, run, n))
            after()
    return {name: median(taken[1:]) for name, taken in times.items()}


def read_bandwidth(device: str) -> float:
    """Bytes per second of a product of one row, which does little but read."""
    matrix = torch.ones(8192, 8192, device=device)
    return matrix.nbytes / in_turns(device, {"read": lambda n: matrix @ matrix[0]}, 5)["read"]


class Bench:
    """Collects rows and ratios, beside the measured peaks of the device: bytes per second of a copy, read and written both counted, and
    flops per second of a large matrix product. `must`: what we hold ourselves to on a Hopper GPU, or on a CPU."""

    def __init__(self, device: str):
        self.device, self.cuda, self.rows, self.ratios = device, device != "cpu", [], []
        self.dtype, size, width = (torch.bfloat16, 2**31, 8192) if self.cuda else (torch.float32, 2**27, 1024)
        source, a = torch.ones(size, dtype=torch.uint8, device=device), torch.randn(width, width, dtype=self.dtype, device=device)
        target = torch.empty_like(source)                        # randn: a product of ones would be faster, it takes less power
        taken = in_turns(device, {"copy": lambda n: target.copy_(source), "product": lambda n: a @ a}, 10)
        self.bandwidth, self.flops = 2 * size / taken["copy"], 2 * width**3 / taken["product"]

    def row(self, system: str, model: str, dataset: str, context: int, seconds: float, moved: int = 0, flops: int = 0) -> dict:
        floor = max(moved / self.bandwidth, flops / self.flops)
        self.rows.append(dict(system=system, model=model, dataset=dataset, context=context, seconds=seconds, share=floor / seconds,
                              gbytes_per_second=moved / seconds / 1e9, copy_gbytes_per_second=self.bandwidth / 1e9,
                              tflops=flops / seconds / 1e12, matmul_tflops=self.flops / 1e12))
        return self.rows[-1]

    def ratio(self, name: str, ours: float, must: float | None = None, on: str = "cuda"):
        self.ratios.append(dict(name=name, paper=None, ours=ours, how="measured", must=must if on == self.device else None))


# ---- kernel: multi-token attention and its rivals

class Scene:
    """Queries, and spans over a cache whose slots are shuffled, or in the order of the positions. `tables`: contexts that share no slot,
    as many as it takes to be larger than any L2."""

    def __init__(self, bench: Bench, model: str, q_len: list[int], kv_len: list[int], seed: int, shuffled: bool = True):
        self.model, self.q_len, self.kv_len = model, q_len, kv_len
        shape, device = PRESETS[model], bench.device
        heads, kv_heads, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
        generator = torch.Generator(device).manual_seed(seed)
        random = lambda *shape: torch.randn(*shape, generator=generator, dtype=bench.dtype, device=device)
        tokens, token_bytes = sum(kv_len), 2 * kv_heads * D * bench.dtype.itemsize
        copies = 1 if device == "cpu" else 1 + 2**28 // (tokens * token_bytes)
        order = torch.randperm(copies * tokens, generator=generator, device=device) if shuffled else torch.arange(copies * tokens, device=device)
        self.slots = order.int().split(tokens)                                                  # [tokens] of each table
        self.tables = [torch.nn.utils.rnn.pad_sequence(part.split(kv_len), batch_first=True) for part in self.slots]
        self.q, self.k, self.v = random(sum(q_len), heads, D), random(copies * tokens, kv_heads, D), random(copies * tokens, kv_heads, D)
        self.spans = SpanTensors.build(range(len(q_len)), q_len, kv_len, device)
        visible = sum(q * (2 * kv - q + 1) // 2 for q, kv in zip(q_len, kv_len))
        self.moved, self.flops = tokens * token_bytes + 2 * self.q.numel() * bench.dtype.itemsize, 4 * heads * D * visible

    def turn(self, n: int) -> int:
        return n % len(self.tables)

    def gathered(self, n: int):
        """K and V [S, H_kv, kv_len, D] in contiguous memory, of spans that are equal."""
        return [cache.index_select(0, self.slots[self.turn(n)]).unflatten(0, (-1, self.kv_len[0])).transpose(1, 2) for cache in (self.k, self.v)]

    def queries(self):
        """[S, H, q_len, D], of spans that are equal."""
        return self.q.unflatten(0, (-1, self.q_len[0])).transpose(1, 2)


def ours(scene: Scene):
    return lambda n: multi_token_attention(scene.q, scene.k, scene.v, scene.tables[scene.turn(n)], scene.spans)


def attend(scene: Scene, k, v, backend, masked=True):
    """torch's attention over K and V [S, H_kv, kv_len, D]. cuDNN knows no mask that is aligned to the lower right: it goes without."""
    (q_len, kv_len), mask = (scene.q_len[0], scene.kv_len[0]), None
    if masked and q_len != kv_len:
        mask = causal_lower_right(q_len, kv_len)
    with sdpa_kernel(backend) if backend else nullcontext():
        return F.scaled_dot_product_attention(scene.queries(), k, v, attn_mask=mask, is_causal=q_len == kv_len > 1,
                                              enable_gqa=scene.q.shape[1] != k.shape[1])


def contiguous(scene: Scene, caches, backend, masked=True):
    """The ideal: no slot is ever looked up. caches: what the scene has `gathered`."""
    return lambda n: attend(scene, *caches[scene.turn(n)], backend, masked)


def copy_out(scene: Scene, backend):
    """The paper's first straw man: gathers all contexts into contiguous memory, then attends."""
    return lambda n: attend(scene, *scene.gathered(n), backend)


def rounds(scene: Scene):
    """The paper's second straw man: a kernel that takes one query per request, as PagedAttention does, called for each query in turn."""
    S, length = len(scene.q_len), scene.q_len[0]
    spans = [SpanTensors.build(range(S), [1] * S, [kv - length + 1 + i for kv in scene.kv_len], scene.q.device) for i in range(length)]
    out = torch.empty_like(scene.q)
    queries, parts = (x.unflatten(0, (S, length)).unbind(1) for x in (scene.q, out))                               # [S, H, D] each

    def run(n):
        for one, q, part in zip(spans, queries, parts):
            multi_token_attention(q, scene.k, scene.v, scene.tables[scene.turn(n)], one, out=part)
        return out
    return run


def packed(scene: Scene):
    """What transformers' continuous batching does with attention "paged|sdpa": gathers the contexts of all spans into one sequence and
    attends under one mask."""
    span_q = torch.arange(len(scene.q_len)).repeat_interleave(torch.tensor(scene.q_len))
    span_kv = torch.arange(len(scene.kv_len)).repeat_interleave(torch.tensor(scene.kv_len))
    sees_to = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(scene.q_len, scene.kv_len)])
    place = torch.cat([torch.arange(kv) for kv in scene.kv_len])
    seen = (span_q[:, None] == span_kv) & (sees_to[:, None] >= place)                                              # [T, sum of kv_len]
    mask = torch.zeros(seen.shape, dtype=scene.q.dtype).masked_fill_(~seen, torch.finfo(scene.q.dtype).min).to(scene.q.device)[None, None]
    group = scene.q.shape[1] // scene.k.shape[1]

    def run(n):
        k, v = (cache.index_select(0, scene.slots[scene.turn(n)]).transpose(0, 1)[None].repeat_interleave(group, 1) for cache in (scene.k, scene.v))
        return F.scaled_dot_product_attention(scene.q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)
    return run


def flash_attention_3(scene: Scene, caches):
    from flash_attn_interface import flash_attn_func
    return lambda n: flash_attn_func(*(x.transpose(1, 2) for x in (scene.queries(), *caches[scene.turn(n)])), causal=True)


def flashinfer(scene: Scene):
    """Its paged kernel with pages of one token: slots like ours."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    wrappers, (_, heads, D), kv_heads = [], scene.q.shape, scene.k.shape[1]
    for slots in scene.slots:
        wrappers.append(BatchPrefillWithPagedKVCacheWrapper(torch.empty(2**27, dtype=torch.uint8, device="cuda")))
        q_start = torch.tensor(np.cumsum([0, *scene.q_len]), dtype=torch.int32, device="cuda")
        kv_start = torch.tensor(np.cumsum([0, *scene.kv_len]), dtype=torch.int32, device="cuda")
        wrappers[-1].plan(q_start, kv_start, slots, torch.ones_like(kv_start[1:]), heads, kv_heads, D, 1, causal=True,
                          q_data_type=scene.q.dtype)
    return lambda n: wrappers[scene.turn(n)].run(scene.q, (scene.k[:, None], scene.v[:, None]))


def rivals(scene: Scene) -> dict:
    """By name, everything that can run here for spans that are equal."""
    caches = [scene.gathered(n) for n in range(len(scene.tables))]
    flash = SDPBackend.FLASH_ATTENTION if scene.q.is_cuda else None
    runs = {"ours": ours(scene), "contiguous": contiguous(scene, caches, flash), "copy-out": copy_out(scene, flash)}
    others = {"contiguous, cuDNN": lambda: contiguous(scene, caches, SDPBackend.CUDNN_ATTENTION, masked=False),
              "contiguous, FA3": lambda: flash_attention_3(scene, caches), "FlashInfer, page size 1": lambda: flashinfer(scene)}
    for name, make in others.items() if scene.q.is_cuda else ():
        try:
            run = make()
            run(0)
            runs[name] = run
        except (ImportError, RuntimeError, TypeError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
    return runs


def compare(bench: Bench, dataset: str, scene: Scene, runs: dict) -> dict[str, dict]:
    """Measures the runs in turns -> their rows by name."""
    taken = in_turns(bench.device, runs, 20 if bench.cuda else 5)
    return {name: bench.row(name, scene.model, dataset, max(scene.kv_len), seconds, scene.moved, scene.flops) for name, seconds in taken.items()}


def figure_12(bench: Bench, seed: int, model: str, batch: int, contexts: list[int]):
    """Prompts of 8 tokens."""
    for context in contexts:
        scene = Scene(bench, model, [8] * batch, [context] * batch, seed)
        found = compare(bench, "fig12", scene, rivals(scene) | {"a round per token": rounds(scene)})
        best = min(row["seconds"] for name, row in found.items() if name.startswith("contiguous"))
        bench.ratio(f"fig12, {context} tokens: time, ours / contiguous, the best", found["ours"]["seconds"] / best, 1.0)
        for name in ("copy-out", "a round per token"):
            bench.ratio(f"fig12, {context} tokens: time, {name} / ours", found[name]["seconds"] / found["ours"]["seconds"])


def decodes(bench: Bench, seed: int, model: str, batch: int, context: int):
    scenes = [Scene(bench, model, [1] * batch, [context] * batch, seed, mixed_up) for mixed_up in (True, False)]
    shuffled, ordered = compare(bench, "decode", scenes[0], {"ours": ours(scenes[0]), "ours, slots in order": ours(scenes[1])}).values()
    what = f"decode, {model}, batch {batch}, {context} tokens"
    bench.ratio(f"{what}: bytes per second / device copy", shuffled["gbytes_per_second"] / shuffled["copy_gbytes_per_second"],
                0.85 if batch > 1 else 0.55)
    bench.ratio(f"{what}: speed, shuffled / sequential slots", ordered["seconds"] / shuffled["seconds"], 0.97)


def prompts(bench: Bench, seed: int, model: str, length: int, short: int, history: int):
    """Two whole prompts, then four short ones over long histories."""
    scene = Scene(bench, model, [length] * 2, [length] * 2, seed)
    found = compare(bench, "prefill", scene, rivals(scene))
    bench.ratio(f"prefill, {length} tokens: TFLOP/s / matrix product", found["ours"]["tflops"] / found["ours"]["matmul_tflops"], 0.5)
    bench.ratio(f"prefill, {length} tokens: speed, ours / contiguous", found["contiguous"]["seconds"] / found["ours"]["seconds"], 1.1)
    scene = Scene(bench, model, [short] * 4, [history + short] * 4, seed)
    found = compare(bench, "short prompts", scene, rivals(scene))
    bench.ratio(f"{short} tokens over {history}, batch 4: floor / time", found["ours"]["share"], 0.5)


def mixed(bench: Bench, seed: int, model: str, q_len: list[int], kv_len: list[int]):
    scene = Scene(bench, model, q_len, kv_len, seed)
    found = compare(bench, "mixed batch", scene, {"ours": ours(scene), "paged|sdpa": packed(scene)})
    bench.ratio("mixed batch: speed, ours / paged|sdpa", found["paged|sdpa"]["seconds"] / found["ours"]["seconds"], 5.0)


def kernel(device: str, seed: int) -> tuple[list[dict], list[dict]]:
    """Figure 12, and all else about attention."""
    bench = Bench(device)
    if bench.cuda:
        figure_12(bench, seed, "llama2-13b", 32, [1024, 2048, 4096, 8192, 16384])
        decodes(bench, seed, "llama2-13b", 64, 4096)
        decodes(bench, seed, "llama2-13b-gqa", 64, 16384)
        decodes(bench, seed, "llama2-70b", 1, 32768)
        prompts(bench, seed, "llama2-13b", 8192, 64, 16384)
        mixed(bench, seed, "llama2-13b", [1] * 32 + [64] * 4 + [1024], [2048] * 32 + [4096] * 4 + [1024])
    else:
        figure_12(bench, seed, "opt-125m", 4, [128, 512])
        decodes(bench, seed, "opt-125m", 8, 256)
        decodes(bench, seed, "opt-125m", 1, 1024)
        prompts(bench, seed, "opt-125m", 512, 16, 512)
        mixed(bench, seed, "opt-125m", [1] * 4 + [16, 64], [256] * 5 + [64])
    return bench.rows, bench.ratios


# ---- swap: copies between the tiers, alone and behind a step

CHUNK = 32


def tickets(places, slots: list[int]) -> list[Ticket]:
    """Whole chunks between those places and as many of the slots as it takes."""
    return [Ticket(None, None, "", 0, CHUNK, slots[CHUNK * n:CHUNK * (n + 1)], place) for n, place in enumerate(places)]


def drain(pool: KVPool):
    while pool.flights:
        pool.landed(wait=True)


def one_way(bench: Bench, model: str, pool: KVPool, slots: list[int], chunks: int):
    """Chunks in shuffled slots, each way and both at once, against one large copy of as many bytes from and to pinned memory."""
    host = torch.empty_like(pool.cpu[:, :chunks], pin_memory=bench.cuda)
    there = torch.empty_like(host, device=bench.device)
    run, scattered = tickets(range(chunks), slots), tickets(range(0, 2 * chunks, 2), slots)
    others = tickets(range(chunks, 2 * chunks), slots[CHUNK * chunks:])
    taken = in_turns(bench.device, {
        "one copy in": lambda n: there.copy_(host), "one copy out": lambda n: host.copy_(there),
        "swap in": lambda n: (pool.swap_in(run), drain(pool)), "swap out": lambda n: (pool.swap_out(run), drain(pool)),
        "swap in, scattered places": lambda n: (pool.swap_in(scattered), drain(pool)),
        "both ways": lambda n: (pool.swap_in(run), pool.swap_out(others), drain(pool)),
    }, 10, host_seconds)
    for name, seconds in taken.items():
        bench.row(name, model, "one way", CHUNK * chunks, seconds, host.nbytes * (1 + (name == "both ways")))
    bench.ratio("swap in, shuffled slots / one copy in", taken["one copy in"] / taken["swap in"], 0.9)
    bench.ratio("swap out, shuffled slots / one copy out", taken["one copy out"] / taken["swap out"], 0.9)
    bench.ratio("swap in, scattered places / neighbouring ones", taken["swap in"] / taken["swap in, scattered places"])
    bench.ratio("both ways: time / one after the other", taken["both ways"] / (taken["swap in"] + taken["swap out"]))


def request(worker: Worker, row: int, slots: list[int], seed: int) -> Request:
    """One whose context is as long as `slots`, all of it cached there."""
    tokens = np.random.default_rng([seed, row]).integers(worker.vocab_size, size=len(slots))
    conversation = Conversation(str(row), row, tokens, CHUNK, toward=1)
    conversation.row = row
    worker.slot_table[row, :len(slots)] = torch.tensor(slots, dtype=torch.int32)
    return Request(conversation, [], sampling=Sampling(seed=seed))


def overlap(bench: Bench, model: str, worker: Worker, slots: list[int], batch: int, context: int, chunks: int, prompt: int, seed: int):
    """A step in which `batch` requests decode and one that returns has its chunks copied in and its new prompt computed; then decodes
    while other chunks are copied out."""
    ends = [context * (n + 1) for n in range(batch)] + [context * batch + CHUNK * chunks + prompt]
    requests = [request(worker, row, slots[start:end], seed) for row, (start, end) in enumerate(zip([0, *ends], ends))]
    decoding = [Span(one, context - 1, context) for one in requests[:batch]]
    returning = [*decoding, Span(requests[-1], CHUNK * chunks, CHUNK * chunks + prompt)]
    arriving, leaving = tickets(range(chunks), slots[context * batch:]), tickets(range(chunks, 2 * chunks), slots)

    def execute(spans, swap_in, swap_out, n):                    # returns when the tokens are on the host; copies out may go on
        step = Batch(n, 0)
        step.spans, step.swap_in, step.swap_out = spans, swap_in, swap_out
        worker.execute(step)

    taken = in_turns(bench.device, {
        "step": partial(execute, returning, [], []), "copy": lambda n: (worker.pool.swap_in(arriving), drain(worker.pool)),
        "step with copies in": partial(execute, returning, arriving, []),
        "decode": partial(execute, decoding, [], []), "decode with copies out": partial(execute, decoding, [], leaving)},
        10, host_seconds, after=partial(drain, worker.pool))
    for name, seconds in taken.items():
        bench.row(name, model, "overlap", CHUNK * chunks + prompt, seconds)
    bench.ratio("step with copies in / max(copy, step)", taken["step with copies in"] / max(taken["copy"], taken["step"]), 1.15)
    bench.ratio("decode with copies out / decode", taken["decode with copies out"] / taken["decode"], 1.10)


def swap(device: str, seed: int) -> tuple[list[dict], list[dict]]:
    """The copies of KVPool. Without CUDA everything runs in order: nothing can overlap."""
    bench = Bench(device)
    model, chunks, batch, context, prompt = ("llama2-13b-gqa", 256, 32, 1024, 512) if bench.cuda else ("opt-125m", 16, 4, 128, 32)
    num_slots = batch * context + 2 * CHUNK * chunks + prompt
    worker = Worker(random_model(model, device, bench.dtype, seed), num_slots, 2 * chunks, CHUNK, batch + 1, CHUNK * chunks + prompt)
    speed_up(worker)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed)).tolist()
    one_way(bench, model, worker.pool, slots, chunks)
    overlap(bench, model, worker, slots, batch, context, chunks, prompt, seed)
    return bench.rows, bench.ratios


# ---- this machine, to be simulated

def machine(engine: Engine, cost: RecomputeCost, seed: int) -> tuple[Hardware, Operators]:
    """What a SimulatedWorker must know of this machine, as the engine's model finds it. Rates are measured, so the shares are 1; but
    that of attention is what the profile says of a chunk behind the longest context; what launches take counts per step."""
    worker, bench, batch = engine.worker, Bench(engine.worker.device.type), engine.config.max_running
    host, there = torch.ones(2**27, dtype=torch.uint8, pin_memory=bench.cuda), torch.empty(2**27, dtype=torch.uint8, device=worker.device)
    link = host.nbytes / in_turns(bench.device, {"copy": lambda n: there.copy_(host)}, 10, host_seconds)["copy"]
    hardware, ideal = Hardware(bench.flops, read_bandwidth(bench.device), link, link, worker.dtype.itemsize), Operators(1, 1, 1, 1, 0, 0)

    def simulated(hardware):
        return SimulatedWorker(worker.model.config, hardware, ideal, None, 1, 0, worker.max_context, worker.chunk_size)
    attention = simulated(hardware._replace(memory=math.inf)).attention_seconds(worker.chunk_size, cost.lengths[-1]) / cost.seconds[-1]
    serve(engine, batch, 8, 32, seed)                            # to get warm
    one, many = (serve(engine, size, 8, 32, seed)[1] for size in (1, batch))
    per_span = max(0.0, (many - one) / max(batch - 1, 1))
    per_step = max(0.0, one - per_span - simulated(hardware).linear_seconds(1, 1))
    return hardware, ideal._replace(attention=attention, per_step=per_step, per_span=per_span)


# ---- step: whole steps of the engine

def serve(engine: Engine, batch: int, prompt: int, new: int, seed: int, during=nullcontext()) -> tuple[float, float]:
    """`batch` requests -> seconds of the step that computes their prompts, and the median of the following ones, in which all decode.
    during: a context to decode in."""
    def step():
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start

    tokens = np.random.default_rng(seed).integers(engine.worker.vocab_size, size=(batch, prompt)).tolist()
    handles = [engine.submit(one, max_tokens=new, ignore_eos=True) for one in tokens]
    first = step()
    with during:
        decodes = [step() for _ in range(new - 1)]
    assert all(handle.result().token_ids for handle in handles)
    return first, median(decodes)


def generate(model, batch: int, prompt: int, new: int, seed: int) -> tuple[float, float]:
    """The same with a model of transformers, which asks after every token whether it should stop."""
    tokens, times = torch.randint(model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(seed)), []

    def note(ids, scores, **others):
        times.append(time.perf_counter())
        return torch.zeros(batch, dtype=torch.bool)

    start = time.perf_counter()
    model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=new, min_new_tokens=new,
                   stopping_criteria=[note])
    return times[0] - start, median(np.diff(times))


def read_bytes(worker: Worker, batch: int, context: int) -> int:
    """What a decode reads: KV and weights, but of the table of positions and of an embedding that is not the output layer too a few rows."""
    model = worker.model
    tables = [getattr(model, "positions", None), None if model.config.tied_embeddings else model.tokens]
    rows_only = sum(parameter.nbytes for table in tables if table for parameter in table.parameters())
    return batch * context * worker.pool.gpu[:, :, 0].nbytes + sum(parameter.nbytes for parameter in model.parameters()) - rows_only


def small_steps(bench: Bench, seed: int, prompt: int = 128, new: int = 16, whole: int = 1024):
    """On a CPU: decodes against reading, decodes and a long prompt against transformers."""
    engine = Engine("opt-125m", random_weights=True, device="cpu", gpu_cache_tokens=4 * whole, cpu_cache_tokens=0, max_batch_tokens=whole)
    systems, cases, times = {"ours": partial(serve, engine, seed=seed)}, [(1, prompt, new), (8, prompt, new), (1, whole, 2)], {}
    reads = []
    try:
        from transformers import OPTConfig, OPTForCausalLM       # whose defaults are opt-125m
        systems["transformers"] = partial(generate, OPTForCausalLM(OPTConfig()).eval(), seed=seed)
    except ImportError:
        print("transformers is not installed: there is nothing to compare with")
    for case, run in product(cases, systems.values()):
        run(*case)                                               # warms up: memory is mapped when it is first written
    for _ in range(3):
        reads.append(read_bandwidth("cpu"))
        for case in cases:
            for name, run in systems.items():
                times.setdefault((name, *case[:2]), []).append(run(*case))
    read, took = median(reads), {key: np.median(taken, axis=0).tolist() for key, taken in times.items()}
    for (name, batch, length), (first, decode) in took.items():
        bench.row(name, "opt-125m", f"prompt, batch {batch}", length, first)
        moved = read_bytes(engine.worker, batch, length + new // 2)
        bench.row(name, "opt-125m", f"decode, batch {batch}", length + new // 2, decode, moved)
        if (batch, length) == (1, prompt):
            bench.ratio(f"decode, batch 1, {name}: bytes per second / read bandwidth", moved / decode / read, 0.75 if name == "ours" else None, "cpu")
    if "transformers" in systems:
        for what, case, part, must in (("decode, batch 8", (8, prompt), 1, 2.5), (f"prompt of {whole}", (1, whole), 0, 0.9)):
            bench.ratio(f"{what}: speed, ours / transformers", took["transformers", *case][part] / took["ours", *case][part], must, "cpu")


def large_steps(bench: Bench, seed: int, model: str = "llama2-13b", prompt: int = 1024, new: int = 64):
    """On a GPU: decodes against reading at copy bandwidth, and how long the GPU waits for the host between steps."""
    engine = Engine(model, random_weights=True, device=bench.device, gpu_cache_tokens=40 * (prompt + new), cpu_cache_tokens=0, max_batch_tokens=32 * prompt)
    times = {}
    for batch in (1, 8, 32):
        serve(engine, batch, prompt, new, seed)                  # compiles
        first, decode = times[batch] = serve(engine, batch, prompt, new, seed)
        moved = read_bytes(engine.worker, batch, prompt + new // 2)
        bench.row("ours", model, f"prompt, batch {batch}", prompt, first)
        bench.row("ours", model, f"decode, batch {batch}", prompt + new // 2, decode, moved)
        bench.ratio(f"decode, batch {batch}: time / (weights + KV) at copy bandwidth", decode * bench.bandwidth / moved, 1.20 if batch == 1 else None)
    for batch, (_, decode) in times.items():                     # the profiler slows what comes after it
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        serve(engine, batch, prompt, new, seed, during=profile)
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / (new - 1)
        bench.ratio(f"decode, batch {batch}: share of the step in which the GPU is idle", 1 - busy / decode)


def step(device: str, seed: int) -> tuple[list[dict], list[dict]]:
    """Decodes and prompts through the whole engine."""
    bench = Bench(device)
    (large_steps if bench.cuda else small_steps)(bench, seed)
    return bench.rows, bench.ratios


# ---- scheduling: what a step costs before any tensor moves

def scheduling(device: str, seed: int) -> tuple[list[dict], list[dict]]:
    """Seconds that scheduling and accounting take in a step of 256 decodes of some 500 tokens of context, beside idle conversations
    that are cached in both tiers; and what OPT-13B would take for that step on an H200."""
    rows, running, steps = [], 256, 100
    for idle in (100, 10_000, 100_000):
        clock, shape = VirtualClock(), PRESETS["opt-13b"]
        worker = SimulatedWorker(shape, HARDWARE["h200"], OPERATORS["eager"], clock, 2 * running * (500 + 2 * steps) + 8 * idle, idle + 1000, 2048)
        engine = Engine("opt-13b", worker=worker, clock=clock, max_running=running, max_batch_tokens=8192)
        for n in range(idle):
            engine.generate([0] * 15, f"idle {n}", max_tokens=1, ignore_eos=True)
        handles = [engine.submit([0] * 500, f"running {n}", max_tokens=2 * steps, ignore_eos=True) for n in range(running)]
        while not all(handle.request and handle.request.generated for handle in handles):
            engine.step()
        ours, step = map(median, zip(*(timed_step(engine) for _ in range(steps))))
        rows += [dict(system=system, model="opt-13b", dataset=f"{running} decodes", context=idle, seconds=seconds)
                 for system, seconds in (("scheduling and accounting, here", ours), ("the step, simulated on an H200", step))]
        engine.close()
    found = {"scheduling: 100,000 idle conversations / 100": (rows[-2]["seconds"] / rows[0]["seconds"], 1.5),
             "scheduling: share of an OPT-13B step": (rows[0]["seconds"] / rows[1]["seconds"], 0.05)}
    return rows, [dict(name=name, paper=None, ours=ours, how="measured", must=must) for name, (ours, must) in found.items()]


def timed_step(engine: Engine) -> tuple[float, float]:
    """engine.step() in slow motion: seconds of this machine's scheduling and accounting, seconds of the worker by its clock."""
    begin, now = time.perf_counter(), engine.clock()
    batch = engine.scheduler.schedule(now)
    scheduled = time.perf_counter()
    result = engine.worker.execute(batch)
    executed = time.perf_counter()
    for request, token in engine.scheduler.account(batch, result, engine.clock()):
        request.outbox.put(token)
    return time.perf_counter() - executed + scheduled - begin, engine.clock() - now
