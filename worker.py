"""A batch becomes tensors: inputs, transfers, forward, sampling (paper §4.2-4.4).

The scheduler speaks of integers; from here on there are tensors. The spans of a batch are packed
into one ragged sequence of T tokens and go through the model together, whatever phase their
requests are in. In each layer the worker stores the new K and V into their slots, waits until the
swapped-in KV of this layer has arrived, and attends.

    tokens      a0 a1 a2 a3 | a16 ... a22 | b31         [T]
    positions    0  1  2  3 |  16 ...  22 |  31         [T]    slot = slot_table[table_row, position]
    sampled at                         ^     ^          [N]    where a span ends its request's context

The worker uploads tokens, positions, plan and table changes in one copy, before it starts the
copies of KV: behind them the upload would have to wait. If every span is one token, a GPU would
wait for the host to launch many small kernels. So the worker captures these launches at the start,
for a few sizes of batch (CUDA graphs), and pads each such batch to one of the sizes. Padding has a
row and a slot of its own.

A launch does not wait for the device, so the last token of a context may be one that the device has
yet to sample. The host says PLACEHOLDER, and the device takes the token that it last sampled in that
row of the slot table.

A batch without spans only moves chunks. Invariant: a token depends on its context, its seed and its
position. The other spans of the batch change logits by rounding only.
"""
import os
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from attention_kernel import (Plan, SpanTensors, enumerate_each, join, make_plan, multi_token_attention,
                              runs_triton, split_like, upload, wanted_items)
from checkpoint import load_model, random_model
from eviction import RecomputeCost
from kv_cache import Conversation, Ticket
from kv_pool import KVPool
from model import ALONE, Alone, Attend, Layer, Model
from rotary_store import rotate_and_store
from sampling import Sampling, read, sample
from scheduler import PLACEHOLDER, Batch, Request, Result, Span

SMALL_MODEL = 10_000_000    # parameters; below, threads on a CPU wait for one another longer than they work


class Packed(NamedTuple):
    """The spans of a batch, one behind another, on the host."""
    table_row: list[int]        # [S] the row of the slot table
    start: list[int]            # [S] the span's positions are [start, end)
    end: list[int]              # [S]
    tokens: array               # [T]
    sample_at: list[int]        # [N] the last token of each span that ends its request's context
    sampling: list[Request]     # [N] the requests of these spans

    def padded(self, size: int, table_row: int) -> "Packed":
        """With spans of one token, at position 0 of `table_row`, until there are `size` spans."""
        missing = size - len(self.table_row)
        return self._replace(table_row=self.table_row + [table_row] * missing,
                             start=self.start + [0] * missing, end=self.end + [1] * missing,
                             tokens=self.tokens + array("i", [0]) * missing)


def pack(spans: list[Span]) -> Packed:
    """The one loop over the spans of a step. Everything after it works on arrays."""
    table_rows, starts, ends, tokens, sample_at, sampling = [], [], [], array("i"), [], []
    for request, start, end in spans:
        conversation = request.conversation
        table_rows.append(conversation.row)
        starts.append(start)
        ends.append(end)
        tokens.extend(conversation.tokens[start:end])
        if end == len(conversation.tokens):             # the same as Span.samples, at half the cost
            sample_at.append(len(tokens) - 1)
            sampling.append(request)
    return Packed(table_rows, starts, ends, tokens, sample_at, sampling)


def table_changes(updates: list[tuple[int, int, np.ndarray]]) -> list[np.ndarray]:
    """Changes (row, start, slots) of the slot table -> row, position and slot of each entry that
    changes: three arrays. [(3, 10, [7, 5])] -> [3, 3], [10, 11], [7, 5]."""
    no_change = 0, 0, np.zeros(0, np.int32)             # so that there is always something to concatenate
    rows, starts, slots = zip(no_change, *updates)
    change, nth = enumerate_each(np.array([len(some) for some in slots]))
    return [np.array(rows)[change], np.array(starts)[change] + nth, np.concatenate(slots)]


class Inputs(NamedTuple):
    """What the worker tells the device about a step: int32 tensors on the device."""
    tokens: Tensor              # [T]
    positions: Tensor           # [T]
    table_rows: Tensor          # [T] of the slot table
    spans: SpanTensors          # with the plan of the kernels
    sample_at: Tensor           # [N] indices into T: the next token is sampled from the hidden state of each
    flat: Tensor                # tokens, positions, table_rows and the plan are parts of this one tensor

    def refill(self, other: "Inputs"):
        """Copy the other inputs, of a batch of the same size, into the memory of these: a captured
        graph reads that memory at each replay. The device copies when earlier replays have ended. The
        kernels read `flat` alone. The reference, in CPU tests of capture, reads spans.host."""
        self.flat.copy_(other.flat)
        self.spans.host[:] = other.spans.host


class Worker:
    """Owns the model, the KV pool and the device's slot table."""

    def __init__(self, model: Model, num_slots: int, num_places: int, chunk_size: int, max_running: int,
                 max_context: int, pipeline: bool = True):
        """num_slots, num_places: the sizes of the two tiers, in tokens and in chunks. max_running:
        requests that can run at a time; each has a row of the slot table, with max_context
        positions. pipeline=False: the model starts when everything that is swapped in has arrived."""
        config, parameter = model.config, next(model.parameters())
        self.model, self.device, self.dtype = model, parameter.device, parameter.dtype
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.max_running, self.max_context = max_running, max_context
        self.vocab_size, self.stop_ids = config.vocab_size, config.eos_ids
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.pool = KVPool(config.num_layers, config.num_kv_heads, config.head_dim, num_slots + 1, num_places,
                           chunk_size, self.device, self.dtype, pipeline)
        # Any slots will do until the scheduler writes a row: the profile reads them. Padding has
        # the last row, whose only slot is one more than the scheduler knows of.
        any_slots = torch.arange(max_context, dtype=torch.int32, device=self.device) % num_slots
        self.slot_table = any_slots.repeat(max_running + 1, 1)          # [max_running + 1, max_context]
        self.padding_row = max_running
        self.slot_table[self.padding_row] = num_slots
        self.sampled = self.slot_table.new_zeros(max_running + 1)       # the last token sampled in each row
        self.depth = int(self.device.type == "cuda")                    # see Engine
        self.graphs: dict[int, tuple[Inputs, Callable]] = {}    # by size; the function returns hidden states

    def execute(self, batch: Batch) -> Result:
        """Run the batch's spans and start its transfers. With nothing to compute, wait for a copy in
        flight, if there is one."""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Callable[[], Result]:
        """Tell the device to execute the batch, behind everything that was launched before. Returns a
        function that waits for the result. The books may change as soon as launch has returned. A
        batch without spans still writes the slot table."""
        packed = pack(batch.spans)
        changes = table_changes(batch.table_updates)
        inputs, logits = self._start(packed, changes, batch.slot_copies, batch.swap_in, batch.swap_out)
        if not batch.spans:
            return lambda: Result([], self.pool.landed(wait=True))
        sampled = sample(logits, packed.sampling)
        self._remember(inputs, sampled[0].clamp(min=0).int())
        on_host = [part.to("cpu", non_blocking=True) for part in sampled]       # into pinned memory
        done = self.pool.now()

        def wait() -> Result:
            done.synchronize()
            tokens, logprobs = read(packed.sampling, *on_host)
            return Result(tokens, self.pool.landed(wait=False), logprobs)
        return wait

    def stats(self) -> dict:
        return self.pool.stats()

    # ---- a step

    def _start(self, packed: Packed, changes: list[np.ndarray], slot_copies: dict[int, int],
               swap_in: list[Ticket], swap_out: list[Ticket]) -> tuple[Inputs, Tensor | None]:
        """Start all that is known of a step before its tokens are sampled: it is all numbers. Returns its
        inputs and logits [N, vocab]; None if there is nothing to compute."""
        size = self._graph_size(packed, swap_in)
        inputs = self._inputs(packed, changes, size)
        self.pool.copy_slots(slot_copies)
        self.pool.swap_in(swap_in)
        earlier = self.pool.now()                       # earlier steps have written what is swapped out
        logits = self._logits(inputs, size) if packed.table_row else None       # [N, vocab]
        self.pool.swap_out(swap_out, earlier)           # the host starts these copies while the GPU computes
        return inputs, logits

    def _remember(self, inputs: Inputs, tokens: Tensor):
        """The device notes the tokens [N] that were sampled, for later steps."""
        self.sampled[inputs.table_rows[inputs.sample_at]] = tokens

    def _graph_size(self, packed: Packed, swap_in: list[Ticket]) -> int:
        """The smallest size of a captured decode that the batch fits in; 0 if it must run without a
        graph. A graph waits for no swap-in."""
        only_decodes = len(packed.tokens) == len(packed.table_row) > 0
        if not only_decodes or swap_in or self.pool.arriving:
            return 0
        return min((size for size in self.graphs if size >= len(packed.table_row)), default=0)

    def _inputs(self, packed: Packed, changes: list[np.ndarray], size: int) -> Inputs:
        """Upload the batch, padded to `size` spans unless that is 0, and bring the slot table up to
        date. changes: see table_changes."""
        if size:
            packed = packed.padded(size, self.padding_row)
        columns = [packed.table_row, packed.start, packed.end]
        table_row, start, end = np.array(columns, dtype=np.int64)               # [S] each
        spans = SpanTensors.build(table_row, end - start, end, self.device)
        plan = self._plan(spans.host, size)
        span, nth = enumerate_each(end - start)                                 # [T] each
        tokens, positions, table_rows = np.array(packed.tokens), start[span] + nth, table_row[span]
        sample_at = np.array(packed.sample_at, dtype=np.int64)                  # [N]

        graph_reads = [*plan.arrays(), tokens, positions, table_rows]   # the plan first: it is aligned
        flat, sample_at, changed_rows, changed_positions, new_slots = upload(
            [join(graph_reads), sample_at, *changes], self.device)
        # An entry named twice has the same slot both times.
        self.slot_table[changed_rows, changed_positions] = new_slots
        *planned, tokens, positions, table_rows = split_like(flat, graph_reads)
        tokens.copy_(torch.where(tokens == PLACEHOLDER, self.sampled[table_rows], tokens))
        spans.plans[self.group, self.kv_heads, self.dtype] = plan.with_arrays(planned)
        return Inputs(tokens, positions, table_rows, spans, sample_at, flat)

    def _plan(self, host: np.ndarray, size: int) -> Plan:
        """The work of the kernels for spans, host [3, S], planned on the host. Unless size is 0, the
        plan has as much room as any `size` decodes can need."""
        if not runs_triton(self.device, self.dtype):
            return Plan([], np.zeros((0, 4), np.int32), 0)
        wanted = wanted_items(self.kv_heads, self.dtype, self.device)
        plan = make_plan(host, self.group, wanted)
        return plan.padded(size, self.group, wanted) if size else plan

    def _logits(self, inputs: Inputs, size: int) -> Tensor:
        """One forward over all spans -> logits [N, vocab] behind the tokens at which one is
        sampled."""
        if size:
            captured, forward = self.graphs[size]
            captured.refill(inputs)
            hidden = forward()                          # [size, width]: its padding is left out below
        else:
            hidden = self._forward(inputs)              # [T, width]
        return self.model.logits(hidden[inputs.sample_at])

    def _forward(self, inputs: Inputs) -> Tensor:
        """The hidden state of every token: [T, width]. This is what a graph captures."""
        slots = self.slot_table[inputs.table_rows, inputs.positions].long()     # [T]

        def attend(layer, q, k, v, rotation):       # [T, H, D], [T, H_kv, D] twice -> [T, H, D]
            k_cache, v_cache = self.pool.gpu[layer]     # [slots, H_kv, D] each
            q = rotate_and_store(q, k, v, k_cache, v_cache, slots, rotation)
            self.pool.wait(layer)
            return multi_token_attention(q, k_cache, v_cache, self.slot_table, inputs.spans)

        return self.model(inputs.tokens, inputs.positions, attend)              # [T, width]

    # ---- before the first request

    @torch.inference_mode()
    def warm_up(self):
        """Use every kernel once, so that none of them has to be compiled while a request waits.

        For each shape of tile, a step computes the fewest tokens that take it, one more than the
        next smaller shape holds. They are padding, and they stand at the end of a whole context, so
        that their tiles are split and merged if that ever happens."""
        held = [0, *(shape.rows for shape in wanted_items(self.kv_heads, self.dtype, self.device))]
        for rows in held[:-1]:
            q_len = min(rows // self.group + 1, self.max_context)
            span = [self.padding_row], [self.max_context - q_len], [self.max_context]
            packed = Packed(*span, array("i", [0]) * q_len, sample_at=[q_len - 1], sampling=[])
            self._logits(self._inputs(packed, table_changes([]), size=0), size=0)

    @torch.inference_mode()
    def capture(self, make_graph: Callable):
        """Prepare decodes of 1, 2, 4, 8, then 16, 32, 48, ... tokens (multiples of 16), up to the
        first size that holds max_running. The largest comes first: the others share its memory.
        But each keeps the memory of its result. So a graph ends at the hidden states: the logits of all
        sizes up to 256 would be 2,191 rows, which is 1.1 GB with a vocabulary of 128,256.

        make_graph(run) returns a function that does, and returns, the same as run() on whatever
        run's tensors hold when the function is called."""
        sizes = [1, 2, 4, 8, *range(16, self.max_running + 16, 16)]
        needed = [size for smaller, size in zip([0, *sizes], sizes) if smaller < self.max_running]
        for size in tqdm(reversed(needed), "CUDA graphs", len(needed), leave=False, disable=None):
            inputs = self._inputs(pack([]), table_changes([]), size)        # nothing but padding
            self.graphs[size] = inputs, make_graph(partial(self._forward, inputs))

    # ---- the cost of recomputation

    @torch.inference_mode()
    def profile(self, repeats: int = 4) -> RecomputeCost:
        """Measure what one more chunk adds to a batch that runs anyway: its attention, at context
        lengths of chunk_size, twice it, four times it, ...; and all else, which is c.

        The batch reads the weights and launches its kernels with or without the chunk. So c is the
        difference of two batches that both take longer to compute than to read the weights, divided
        by the number of chunks between them. In a simulation of OPT-13B on an A100:

            32 tokens alone: 21.6 ms (16.6 of them read weights)
            1,024 tokens take 63.5 ms longer than 512 tokens, which is 16 chunks:  c = 4.0 ms"""
        chunk = min(self.chunk_size, self.max_context)
        lengths = [chunk]
        while 2 * lengths[-1] <= self.max_context:
            lengths.append(2 * lengths[-1])
        few, many = (512, 1024) if self.device.type == "cuda" else (64, 128)        # tokens

        def fastest(run: Callable) -> float:            # the first run compiles and warms up
            return min(device_seconds(self.device, run) for _ in range(repeats))
        small, large = (fastest(partial(self._all_but_attention, tokens)) for tokens in (few, many))
        added = max(large - small, 1e-9)                # noise of a busy machine can turn it around
        rest = added * chunk / (many - few)
        attention = {length: fastest(partial(self._attention, chunk, length)) for length in lengths}
        return RecomputeCost(attention, rest)

    def _all_but_attention(self, tokens: int):
        """All layers on that many tokens, but for attention. Dropped chunks need no logits."""
        tokens = torch.arange(tokens, device=self.device)
        self.model(tokens % self.vocab_size, tokens % self.max_context, lambda layer, q, k, v, rotation: q)

    def _attention(self, chunk: int, length: int):
        """The attention of all layers for one chunk that ends at that context length."""
        q = torch.zeros(chunk, self.kv_heads * self.group, self.model.config.head_dim,
                        device=self.device, dtype=self.dtype)
        spans = SpanTensors.build(row=[0], q_len=[chunk], kv_len=[length], device=self.device)
        for layer in range(self.model.config.num_layers):
            multi_token_attention(q, *self.pool.gpu[layer], self.slot_table, spans)


def device_seconds(device: torch.device, run: Callable) -> float:
    """The seconds that the device works on run().

    On CUDA the GPU first spins for some milliseconds. Meanwhile the host launches everything, so the
    time between the two events contains no wait for the host."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(8_000_000)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# ---- from an engine.Config to a worker

def load_worker(config, directory: Path | None, ranks: Alone = ALONE, kind: Callable = Worker) -> Worker:
    """The worker that an engine.Config asks for, with the checkpoint in `directory`; None: with
    random weights. ranks, kind: see parallel.py. ValueError, with the remedy, where the machine cannot
    do it."""
    device, dtype = config.device, config.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use 'cpu'")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    dtype = getattr(torch, dtype)
    try:
        model = (load_model(directory, device, dtype, ranks) if directory else
                 random_model(config.model, device, dtype, ranks=ranks))
    except (MemoryError, RuntimeError) as error:
        raise ValueError(f"the weights do not fit into memory, choose a smaller model: {error}") from error
    if device == "cpu" and is_small(model):
        torch.set_num_threads(1)                        # in the whole process
    slots, cpu_tokens = ranks.smallest(tier_sizes(config, model))
    try:
        worker = kind(model, slots, cpu_tokens // config.chunk_size, config.chunk_size, config.max_running,
                      min(model.config.max_context, slots), pipeline=not config.no_pipeline)
    except (OSError, RuntimeError) as error:            # out of memory, on the GPU or on the host
        raise ValueError(f"tiers of {slots} and {cpu_tokens} tokens cannot be allocated, "
                         f"choose smaller ones: {error}") from error
    if not config.eager:
        speed_up(worker)
    return worker


def is_small(model: Model) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL


def tier_sizes(config, model: Model) -> tuple[int, int]:
    """Tokens of the GPU tier and of the CPU tier: as given, or else by default. ValueError if no
    memory is left.

    On CUDA the GPU tier takes nine tenths of the free memory of the GPU, but room for at most a
    thousand whole contexts. The CPU tier is four times as large as the GPU tier, given or not, but
    takes at most a quarter of the host's memory. On a CPU both tiers lie in the host's memory;
    there the first has room for at most sixteen contexts."""
    parameter, shape = next(model.parameters()), model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * parameter.element_size()
    host = host_memory() // 4 // token_bytes
    if parameter.device.type == "cuda":
        free = free_memory(model, config.max_batch_tokens, config.max_running)
        gpu = min(1000 * shape.max_context, int(0.9 * free) // token_bytes)
    else:
        gpu = min(16 * shape.max_context, host // 5)
    gpu = gpu if config.gpu_cache_tokens is None else config.gpu_cache_tokens
    cpu = min(4 * gpu, host) if config.cpu_cache_tokens is None else config.cpu_cache_tokens
    if gpu < 2:
        raise ValueError(f"no memory is left for the cache: {gpu} tokens of {token_bytes} bytes; "
                         "choose a smaller model or gpu_cache_tokens >= 2")
    return gpu, cpu


@torch.inference_mode()
def free_memory(model: Model, max_batch_tokens: int, max_running: int) -> int:
    """Bytes of the GPU that neither the weights nor the largest steps need. It runs these to find
    out: a step of all tokens, sampling included, and a step of decodes alone, because graphs have
    memory of their own. The tenth that tier_sizes leaves free is for what is small: the partial
    results of attention, the columns of a batch, fragments."""
    try:
        step = peak_memory(partial(largest_step, model, max_batch_tokens, max_running))
        graph = peak_memory(partial(largest_step, model, max_running, max_running))
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"a step of max_batch_tokens={max_batch_tokens} does not fit beside the weights, "
                         f"choose less: {error}") from error
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(next(model.parameters()).device)
    return free - step - graph


def largest_step(model: Model, num_tokens: int, max_running: int):
    """Run the model on num_tokens, and draw a token for each of max_running requests."""
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device=next(model.parameters()).device)
    hidden = model(tokens, tokens, lambda layer, q, k, v, rotation: q.clone())
    logits = model.logits(hidden[:max_running])
    drawn = Request(Conversation("", 0, [0], 1, toward=1), [], sampling=Sampling(temperature=1.0, top_p=0.9))
    sample(logits, [drawn] * len(logits))


def peak_memory(run: Callable) -> int:
    """Bytes of the current GPU that run() allocates at most, at a time."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def host_memory() -> int:
    """Bytes of the machine's memory; if the system does not tell, those of a small machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):                # Windows
        return 8 * 2**30


# ---- faster: the worker stays plain, and this is applied from outside

# Without its patterns. One of them takes the sum with the residual out of the norm's kernel, into the
# matrix product before it. There CUDA first copies the residual, which is a launch more.
INDUCTOR = partial(torch.compile, options={"pattern_matcher": False})


def speed_up(worker: Worker):
    """On CUDA, compile and capture the small kernels that the GPU would otherwise wait for the host
    to launch. On a CPU, pack the weights."""
    if worker.device.type == "cuda" and runs_triton(worker.device, worker.dtype):
        fuse(worker.model)
        worker.warm_up()
        try_capture(worker, partial(make_cuda_graph, pool=torch.cuda.graph_pool_handle()))
    packable = worker.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    if worker.device.type == "cpu" and packable and not is_small(worker.model):
        pack_weights(worker.model)


class PackedLinear(nn.Module):
    """A linear layer whose weights lie in the order in which oneDNN multiplies them: tiles of some
    16 by 64. nn.Linear keeps rows, and MKL copies them into an order of its own in every call.

    Both operators are those that torch.compile uses for frozen weights. The module that
    torch.utils.mkldnn.to_mkldnn makes keeps rows, too: it is no faster than nn.Linear on 8 rows."""

    def __init__(self, dense: nn.Linear):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(dense.weight.detach(), 32)    # for few rows
        self.bias = dense.bias

    def forward(self, x: Tensor) -> Tensor:                                 # [T, in] -> [T, out]
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_weights(model: Model):
    """Pack the linear layers of a model on a CPU, in float32. Each layer's dense weights are let go
    before the next layer is packed, so the model is never in memory twice.

    An embedding that is also the output layer stays dense, since its rows are looked up. We store it
    by columns: the output layer then reads it in order, and a copy is not needed."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    if model.config.tied_embeddings:
        table = model.tokens.weight                                         # [vocab, width]
        table.data = table.t().contiguous().t()


def fuse(model: Model, compiler: Callable = INDUCTOR):
    """Compile all that lies between the attentions of two neighbouring layers as one function. Its
    layers are arguments, so that torch compiles it for all of them at once: at the first call, for
    any other number of tokens, and for a single one. If compiling fails, torch logs why and the
    model runs as it was.

    A Llama layer then launches ten kernels: four matrix products; two sums with norms and the
    activation of the MLP between them; rotate_and_store, attention and its merge."""
    torch._dynamo.config.suppress_errors = True

    @compiler
    def between(layer: Layer, x: Tensor, attended: Tensor, following: Layer) -> tuple[Tensor, ...]:
        x = layer.after_attention(x, attended)
        return x, *following.before_attention(x)

    def through_layers(x: Tensor, attend: Attend) -> Tensor:        # computes what the model's own does
        q_k_v = model.layers[0].before_attention(x)
        for number, (layer, following) in enumerate(pairwise(model.layers)):
            x, *q_k_v = between(layer, x, attend(number, *q_k_v), following)
        last = len(model.layers) - 1
        return model.norm(model.layers[last].after_attention(x, attend(last, *q_k_v)))
    model.through_layers = through_layers


def try_capture(worker: Worker, make_graph: Callable):
    """Capture graphs, or go on without them: a slower server is better than none."""
    try:
        worker.capture(make_graph)
    except Exception as error:
        worker.graphs.clear()
        print(f"warning: decodes will be slower, they could not be captured as CUDA graphs: {error!r}",
              file=sys.stderr)


def make_cuda_graph(run: Callable, pool) -> Callable:
    """For Worker.capture: a CUDA graph of the kernels that run() launches, in the memory `pool`."""
    run()                                               # what compiles and allocates must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()

    def replay():
        graph.replay()
        return result
    return replay
