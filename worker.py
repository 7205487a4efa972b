"""Runs a batch: inputs, transfers, forward, sampling (paper §4.2-4.4). Below this line there are tensors, above it integers.

All spans of a batch are packed into one ragged sequence of T tokens and go through the model together, whatever they mean.
In each layer: store the new K and V into their slots, wait for that layer's swap-ins, attend.

    tokens     a0 a1 a2 a3 | a16 ... a22 | b31          [T]
    positions   0  1  2  3 |  16 ...  22 |  31          [T]   and slots = slot_table[row, position]
    sampled at                         ^     ^                where a span ends its request's context

Whatever the device must be told of a step goes up in one copy, before the copies of KV get busy: it would wait behind them. Where every
span is one token, a GPU would wait for the host to launch all its small kernels; so these batches are padded to one of a few sizes,
for which the launches were captured at the start (CUDA graphs). The padding has a row and a slot of which nobody else knows.

A step with no spans only moves chunks. The token of (seed, position) never depends on what else is in the batch."""
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from attention_kernel import Plan, SpanTensors, ceil_div, cut, enumerate_each, make_plan, multi_token_attention, runs_triton, tiling, upload
from eviction import RecomputeCost
from kv_pool import KVPool
from checkpoint import load_model, random_model
from sampling import sample
from scheduler import Batch, Result, Span

SMALL_MODEL = 10_000_000    # parameters: below, threads on a CPU wait for one another longer than they work


def table_changes(updates: list[tuple]) -> list[np.ndarray]:
    """(row, start, slots) of each change of the slot table -> row, position and slot of each entry."""
    rows, starts, slots = zip((0, 0, ()), *updates)              # one of no entries, or there would be nothing to join
    change, nth = enumerate_each([len(some) for some in slots])
    return [np.array(rows)[change], np.array(starts)[change] + nth, np.concatenate(slots)]


def record_graph(run, pool):
    """For Worker.capture: a CUDA graph of what run() launches, in the memory `pool`."""
    run()                                                        # compiles and allocates what will not change
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()

    def replay():
        graph.replay()
        return result
    return replay


class Inputs(NamedTuple):
    """What the device is told of a step: int32 tensors, cut from one."""
    flat: torch.Tensor
    tokens: torch.Tensor        # [T]
    positions: torch.Tensor     # [T]
    rows: torch.Tensor          # [T], of the slot table
    spans: SpanTensors
    last: torch.Tensor          # [N], the tokens behind which one is sampled

    def refill(self, other):
        """Takes over what another one says of a batch of the same size."""
        self.flat.copy_(other.flat)
        self.spans.host[:] = other.spans.host


class Worker:
    """Owns the model, the KV pool and the device's slot table."""

    def __init__(self, model, num_slots: int, num_places: int, chunk_size: int, rows: int, max_context: int, pipeline: bool = True):
        config, parameter = model.config, next(model.parameters())
        self.model, self.device, self.dtype, self.chunk_size = model, parameter.device, parameter.dtype, chunk_size
        self.group, self.kv_heads = config.num_heads // config.num_kv_heads, config.num_kv_heads
        self.pool = KVPool(config.num_layers, config.num_kv_heads, config.head_dim, num_slots + 1, num_places, chunk_size,
                           self.device, self.dtype, pipeline)
        self.num_slots, self.num_places, self.max_context, self.max_running = num_slots, num_places, max_context, rows
        self.vocab_size, self.stop_ids = config.vocab_size, config.eos_ids
        anywhere = torch.arange(max_context, dtype=torch.int32, device=self.device) % num_slots      # for the profile
        self.slot_table = anywhere.repeat(rows + 1, 1)           # [rows + 1, max_context]
        self.slot_table[rows] = num_slots                        # padding: a row and a slot beyond all that the scheduler knows of
        self.graphs = {}                                         # batch size -> (Inputs, function that returns logits [size, vocab])

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Result:
        """Runs the batch's spans and starts its transfers. With nothing to compute it waits for a copy in flight, if there is one."""
        size = self._graph_size(batch)
        inputs = self._inputs(batch.spans, batch.table_updates, size)
        self.pool.swap_in(batch.swap_in)
        earlier = self.pool.now()
        logits = self._logits(inputs, size) if batch.spans else None                                     # [N, vocab]
        self.pool.swap_out(batch.swap_out, earlier)              # the host starts these copies while the GPU computes
        tokens, logprobs = sample(logits, [span.request for span in batch.spans if span.samples]) if batch.spans else ([], None)
        return Result(tokens, self.pool.landed(wait=not batch.spans), logprobs)

    def stats(self) -> dict:
        return self.pool.stats()

    # ---- a step

    def _graph_size(self, batch: Batch) -> int:
        """The smallest size of a captured decode that the batch fits in; 0 if it must run without. A graph waits for no swap-in."""
        if not batch.spans or batch.swap_in or self.pool.arriving or any(end - start > 1 for _, start, end in batch.spans):
            return 0
        return min((size for size in self.graphs if size >= len(batch.spans)), default=0)

    def _inputs(self, spans: list[Span], updates: list[tuple], size: int) -> Inputs:
        """Uploads the batch, padded to `size` tokens where that is more, and brings the slot table up to date."""
        padding = max(0, size - len(spans))
        built = SpanTensors.build([span.request.conversation.row for span in spans] + [self.max_running] * padding,
                                  [span.end - span.start for span in spans] + [1] * padding,
                                  [span.end for span in spans] + [1] * padding)
        plan, (row, q_len, kv_len) = self._plan(built.host, size), built.host
        owner, nth = enumerate_each(q_len)                                                               # [T]
        tokens = np.concatenate([span.request.conversation.tokens[span.start:span.end] for span in spans] + [np.zeros(padding, int)])
        last = (np.cumsum(q_len) - 1)[[n for n, span in enumerate(spans) if span.samples]]               # [N]

        fixed = [*plan.tensors(), built.row, built.q_start, built.kv_len]       # the plan first: Triton wants it aligned
        fixed = [tensor.numpy() for tensor in fixed] + [tokens, (kv_len - q_len)[owner] + nth, row[owner]]
        flat, last, *changes = upload([np.concatenate([array.ravel() for array in fixed]), last, *table_changes(updates)], self.device)
        self.slot_table[changes[0], changes[1]] = changes[2]
        *planned, row, q_start, kv_len, tokens, positions, rows = cut(flat, fixed)
        plans = {(self.group, self.kv_heads, self.dtype): plan.moved(planned)}
        return Inputs(flat, tokens, positions, rows, replace(built, row=row, q_start=q_start, kv_len=kv_len, plans=plans), last)

    def _plan(self, host, size: int) -> Plan:
        """The kernel's work items for the spans, on the host; in as much room as `size` decodes can need, unless it is 0."""
        if not runs_triton(self.device, self.dtype):
            return Plan([], torch.zeros(0, 4, dtype=torch.int32), 0)
        tiles, wanted = tiling(self.kv_heads, self.dtype, self.device)
        plan = make_plan(host, self.group, tiles, wanted, torch.device("cpu"))
        if not size:
            return plan
        (tile, _), = plan.launches                               # all decodes are of one kind
        return plan.padded(wanted + size * ceil_div(self.group, tile.rows), size * self.group)

    def _logits(self, inputs: Inputs, size: int):
        """One forward over all spans -> logits [N, vocab] behind those that sample."""
        if not size:
            return self.model.logits(self._forward(inputs)[inputs.last])
        captured, replay = self.graphs[size]
        captured.refill(inputs)
        return replay()[inputs.last]

    def _forward(self, inputs: Inputs):
        slots = self.slot_table[inputs.rows, inputs.positions].long()

        def attend(layer, q, k, v):                              # q [T, H, D], k and v [T, H_kv, D]
            self.pool.store(layer, slots, k, v)
            self.pool.wait(layer)
            return multi_token_attention(q, *self.pool.gpu[layer], self.slot_table, inputs.spans)      # [T, H, D]

        return self.model(inputs.tokens, inputs.positions, attend)                               # [T, width]

    # ---- graphs

    @torch.inference_mode()
    def capture(self, record):
        """Prepares decodes of 1, 2, 4, 8, 16, 32, ... tokens, the largest first: the others share its memory.
        record(run): a function that does, and returns, the same as run(), on whatever its tensors hold by then."""
        sizes = [1, 2, 4, 8, *range(16, self.max_running + 16, 16)]
        needed = [size for smaller, size in zip([0, *sizes], sizes) if smaller < self.max_running]
        for size in tqdm(reversed(needed), "CUDA graphs", len(needed), leave=False, disable=None):
            inputs = self._inputs([], [], size)                  # nothing but padding
            self.graphs[size] = inputs, record(partial(self._decode, inputs))

    def _decode(self, inputs: Inputs):
        """Logits [T, vocab] behind every token: what a graph consists of."""
        return self.model.logits(self._forward(inputs))

    @torch.inference_mode()
    def profile(self, repeats: int = 3) -> RecomputeCost:
        """Measures what recomputing one chunk costs: attention at context lengths of powers of two, and everything else."""
        config, chunk = self.model.config, min(self.chunk_size, self.max_context)
        q = torch.zeros(chunk, config.num_heads, config.head_dim, device=self.device, dtype=self.dtype)
        tokens, positions = torch.arange(chunk, device=self.device) % config.vocab_size, torch.arange(chunk, device=self.device)
        lengths = [chunk]
        while 2 * lengths[-1] <= self.max_context:
            lengths.append(2 * lengths[-1])

        def attention(length):
            spans = SpanTensors.build(row=[0], q_len=[chunk], kv_len=[length], device=self.device)
            return config.num_layers * self._seconds(lambda: multi_token_attention(q, *self.pool.gpu[0], self.slot_table, spans), repeats)

        rest = self._seconds(lambda: self.model(tokens, positions, lambda layer, q, k, v: q), repeats)
        return RecomputeCost({length: attention(length) for length in lengths}, rest)

    def _seconds(self, run, repeats):
        def once():
            start = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start
        once()
        return median(once() for _ in range(repeats))


def load_worker(config, directory: Path | None) -> Worker:
    """The worker that an engine.Config asks for, with the checkpoint in `directory`, or with made-up weights where there is none."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use 'cpu'")
    model = (load_model(directory, device, getattr(torch, dtype)) if directory else
             random_model(config.model, device, getattr(torch, dtype)))
    if device == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)                                 # of the process; tensors this small are not worth sharing
    slots, cpu_tokens = tier_sizes(config, model)
    try:
        worker = Worker(model, slots, cpu_tokens // config.chunk_size, config.chunk_size, config.max_running,
                        min(model.config.max_context, slots), pipeline=not config.no_pipeline)
    except RuntimeError as error:                                # out of memory, here or there
        raise ValueError(f"tiers of {slots} and {cpu_tokens} tokens cannot be had, choose smaller ones: {error}") from error
    if not config.eager:
        speed_up(worker)
    return worker


def speed_up(worker: Worker):
    """Compiles and captures, on CUDA, what would otherwise wait for the host to launch it."""
    if worker.device.type == "cuda" and runs_triton(worker.device, worker.dtype):
        if worker.model.config.rope_theta is not None:
            fuse(worker.model)
        try_capture(worker, partial(record_graph, pool=torch.cuda.graph_pool_handle()))


def fuse(model, backend="inductor"):
    """Rotating q and k takes sixteen small kernels, half of all in a Llama layer; compiled, one, or two where k has fewer heads.
    torch compiles three times, for all layers at once: at the first call, for any other number of tokens, and for a single one. Where
    that fails, it logs why and the model stays as it was."""
    torch._dynamo.config.suppress_errors = True
    model.rotate_both = torch.compile(model.rotate_both, backend=backend)


def try_capture(worker: Worker, record):
    """Whatever goes wrong, a server without graphs is better than none."""
    try:
        worker.capture(record)
    except Exception as error:
        worker.graphs.clear()
        print(f"warning: decodes will be slower, they could not be captured as CUDA graphs: {error!r}", file=sys.stderr)


def tier_sizes(config, model) -> tuple[int, int]:
    """Tokens of the GPU and the CPU tier: as given, else nine tenths of the GPU's free memory, but room for no more than a thousand
    whole contexts, and four times that, but no more than a quarter of the host's. Where the host's memory is both tiers, the first has
    room for sixteen contexts."""
    parameter, shape = next(model.parameters()), model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * parameter.element_size()
    host = host_memory() // 4 // token_bytes
    if parameter.device.type == "cuda":
        gpu = min(1000 * shape.max_context, int(0.9 * free_memory(model, config.max_batch_tokens, config.max_running)) // token_bytes)
    else:
        gpu = min(16 * shape.max_context, host // 5)
    cpu = min(4 * gpu, host)
    gpu = gpu if config.gpu_cache_tokens is None else config.gpu_cache_tokens
    cpu = cpu if config.cpu_cache_tokens is None else config.cpu_cache_tokens
    if gpu < 2:
        raise ValueError(f"no memory is left for the cache: {gpu} tokens of {token_bytes} bytes; choose a smaller model or gpu_cache_tokens >= 2")
    return gpu, cpu


@torch.inference_mode()
def free_memory(model, max_batch_tokens: int, max_running: int) -> int:
    """Bytes of the GPU that neither the weights nor the largest step need: one is tried out."""
    device = next(model.parameters()).device
    tokens = torch.zeros(max_batch_tokens, dtype=torch.int32, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        model.logits(model(tokens, tokens, lambda layer, q, k, v: q.clone())[:max_running])
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"a step of max_batch_tokens={max_batch_tokens} does not fit beside the weights, choose less: {error}") from error
    step = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] - step


def host_memory() -> int:
    """Bytes of the machine's memory; where the system does not tell, a small machine's."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):                         # Windows
        return 8 * 2**30
