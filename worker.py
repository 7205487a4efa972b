"""A batch becomes tensors: inputs, copies, forward, sampling (paper §4.2-4.4).

The scheduler speaks of integers; from here on there are tensors. The spans of a batch are packed
into one ragged sequence of T tokens and go through the model together, whatever phase their
requests are in. In each layer the worker stores the new K and V into their slots, waits until the
swapped-in KV of this layer has arrived, and attends.

    tokens      a0 a1 a2 a3 | a16 ... a22 | b31         [T]
    positions    0  1  2  3 |  16 ...  22 |  31         [T]    slot = slot_table[table_row, position]
    sampled at                         ^     ^          [N]    where a span ends its request's context

The worker uploads tokens, positions, plan and table changes in one copy, before it starts the
copies of KV: behind them the upload would have to wait for the link. In a small batch, a GPU would
wait for the host to launch many short kernels. So at the start loading.py lets the worker capture these
launches for some sizes of batch (CUDA graphs). A small batch that waits for no swap-in is padded to
one of the sizes and replayed. Padding has a row and a slot of its own.

A launch does not wait for the device, so the last token of a context may be one that the device has
yet to sample. The host says PLACEHOLDER, and the device takes the token that it last sampled in that
row of the slot table.

A batch without spans skips the model; it still writes the slot table and moves chunks. Invariant: a
token depends on its request alone: the context, where the reply begins in it, and the options of
sampling, seed included. The other spans of the batch change logits by rounding only.
"""
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from attention_kernel import (NO_MERGES, Plan, SpanTensors, enumerate_each, join, make_plan,
                              multi_token_attention, runs_triton, split_like, upload, wanted_items)
from eviction import RecomputeCost
from kv_cache import Ticket
from kv_pool import KVPool
from model import Model
from rotary_store import rotate_and_store
from sampling import read, sample
from scheduler import PLACEHOLDER, Batch, Request, Result, Span

# The most tokens of a batch with a prompt that has a graph. On an H100 with models of 13B, a graph of 128
# tokens takes 2 to 23% less time than launching each kernel, but one of 320 tokens 7% more: with so many
# tokens the host is faster than the GPU.
MOST_REPLAYED = 256


class Packed(NamedTuple):
    """The spans of a batch, one behind another, on the host."""
    table_row: list[int]        # [S] the row of the slot table
    start: list[int]            # [S] the span's positions are [start, end)
    end: list[int]              # [S]
    tokens: array               # [T]
    sample_at: list[int]        # [N] where in tokens each span ends that ends its request's context
    sampling_requests: list[Request]    # [N] the requests of those spans

    def padded(self, size: int, table_row: int) -> "Packed":
        """Append spans of one token, at position 0 of `table_row`, until there are `size` tokens."""
        missing = size - len(self.tokens)
        return self._replace(table_row=self.table_row + [table_row] * missing,
                             start=self.start + [0] * missing, end=self.end + [1] * missing,
                             tokens=self.tokens + array("i", [0]) * missing)


def pack(spans: list[Span]) -> Packed:
    """Concatenate the spans: the worker's one loop over them. `_inputs` makes arrays of these lists."""
    table_rows, starts, ends, tokens, sample_at, sampling_requests = [], [], [], array("i"), [], []
    for request, start, end in spans:
        conversation = request.conversation
        table_rows.append(conversation.row)
        starts.append(start)
        ends.append(end)
        tokens.extend(conversation.tokens[start:end])
        if end == len(conversation.tokens):             # Span.samples, without a call
            sample_at.append(len(tokens) - 1)
            sampling_requests.append(request)
    return Packed(table_rows, starts, ends, tokens, sample_at, sampling_requests)


def table_changes(updates: list[tuple[int, int, np.ndarray]]) -> list[np.ndarray]:
    """Changes (row, start, slots) of the slot table -> row, position and slot of each entry that
    changes: three arrays. [(3, 10, [7, 5])] -> [3, 3], [10, 11], [7, 5]."""
    no_change = 0, 0, np.zeros(0, np.int32)             # so that there is always something to concatenate
    rows, starts, slots = zip(no_change, *updates)
    change, nth = enumerate_each(np.array([len(some) for some in slots]))
    return [np.array(rows)[change], np.array(starts)[change] + nth, np.concatenate(slots)]


class Inputs(NamedTuple):
    """What the worker tells the device about a step. The tensors are int32, and on the device."""
    tokens: Tensor              # [T]
    positions: Tensor           # [T]
    table_rows: Tensor          # [T] of the slot table
    spans: SpanTensors          # with the plan of the kernels
    sample_at: Tensor           # [N] indices into T: the next token is sampled from the hidden state of each
    flat: Tensor                # tokens, positions, table_rows and the plan are parts of this one tensor

    def refill(self, other: "Inputs"):
        """Copy the other inputs, of a batch of the same size, into the memory of these: a captured
        graph reads that memory at each replay. The device copies when earlier replays have ended. Of
        the inputs, captured kernels read `flat` alone. (CPU tests capture torch's reference of the
        attention kernel instead, which reads spans.host.)"""
        self.flat.copy_(other.flat)
        self.spans.host = other.spans.host


class GraphSize(NamedTuple):
    """The batches that a captured graph has room for."""
    tokens: int
    decodes: bool       # every span is one token; otherwise there may be prompts, too


class Worker:
    """Owns the model, the KV pool and the device's slot table."""

    def __init__(self, model: Model, num_slots: int, num_places: int, chunk_size: int, max_running: int,
                 max_context: int, pipeline: bool = True):
        """num_slots, num_places: the sizes of the two tiers, in tokens and in chunks. max_running:
        requests that can run at a time; each has a row of the slot table, with max_context
        positions. pipeline=False: no layer attends before all layers of what is swapped in are there."""
        config, parameter = model.config, next(model.parameters())
        self.model, self.device, self.dtype = model, parameter.device, parameter.dtype
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.max_running, self.max_context = max_running, max_context
        self.vocab_size, self.stop_ids = config.vocab_size, config.eos_ids
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        self.pool = KVPool(config.num_layers, self.kv_heads, self.head_dim, num_slots + 1, num_places,
                           chunk_size, self.device, self.dtype, pipeline)
        # `profile` reads row 0 before any request has it: so every entry names some slot. Padding has
        # the last row, whose only slot is one more than the scheduler knows of.
        any_slots = torch.arange(max_context, dtype=torch.int32, device=self.device) % num_slots
        self.slot_table = any_slots.repeat(max_running + 1, 1)          # [max_running + 1, max_context]
        self.padding_row = max_running
        self.slot_table[self.padding_row] = num_slots
        self.sampled = self.slot_table.new_zeros(max_running + 1)       # the last token sampled in each row
        self.depth = int(self.device.type == "cuda")                    # batches in flight, see Engine
        self.graphs: dict[GraphSize, tuple[Inputs, Callable]] = {}      # the function returns hidden states

    def execute(self, batch: Batch) -> Result:
        """Run the batch's spans and start its copies. With nothing to compute, wait for a copy in
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
        sampled = sample(logits, packed.sampling_requests)
        # -1 says that the logits were not finite. It has no embedding, so a step launched already reads 0.
        self._remember(inputs, sampled[0].clamp(min=0).int())
        on_host = [part.to("cpu", non_blocking=True) for part in sampled]       # into pinned memory
        done = self.pool.now()

        def wait() -> Result:
            done.synchronize()
            tokens, logprobs = read(packed.sampling_requests, *on_host)
            return Result(tokens, self.pool.landed(wait=False), logprobs)
        return wait

    def stats(self) -> dict:
        return self.pool.stats()

    # ---- a step

    def _start(self, packed: Packed, changes: list[np.ndarray], slot_copies: dict[int, int],
               swap_in: list[Ticket], swap_out: list[Ticket]) -> tuple[Inputs, Tensor | None]:
        """All of a step but the sampling. (parallel.py sends the numbers in these arguments to other
        processes.) Returns the inputs, and the logits [N, vocab]: None if there is nothing to compute."""
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

    def _graph_size(self, packed: Packed, swap_in: list[Ticket]) -> GraphSize | None:
        """The smallest graph that the batch fits in; None if it must run without a graph. A graph waits
        for no swap-in."""
        tokens, spans = len(packed.tokens), len(packed.table_row)
        if not tokens or swap_in or self.pool.arriving:
            return None
        decodes = tokens == spans
        return min((size for size in self.graphs if size.tokens >= tokens and size.decodes == decodes),
                   default=None)

    def _inputs(self, packed: Packed, changes: list[np.ndarray], size: GraphSize | None) -> Inputs:
        """Upload the batch, padded to the graph's size if there is a graph, and bring the slot table up to
        date. changes: see table_changes."""
        if size:
            packed = packed.padded(size.tokens, self.padding_row)
        columns = [packed.table_row, packed.start, packed.end]
        table_row, start, end = np.array(columns, dtype=np.int64)               # [S] each
        spans = SpanTensors.build(table_row, end - start, end, self.device)
        plan = self._plan(spans.host, size)
        span, nth = enumerate_each(end - start)                                 # [T] each
        tokens, positions, table_rows = np.array(packed.tokens), start[span] + nth, table_row[span]
        sample_at = np.array(packed.sample_at, dtype=np.int64)                  # [N]

        # The plan first: the kernels want it aligned.
        graph_reads = [*plan.arrays(), tokens, positions, table_rows]
        flat, sample_at, changed_rows, changed_positions, new_slots = upload(
            [join(graph_reads), sample_at, *changes], self.device)
        # An entry named twice has the same slot both times.
        self.slot_table[changed_rows, changed_positions] = new_slots
        *planned, tokens, positions, table_rows = split_like(flat, graph_reads)
        # In place: the tokens are a part of `flat`.
        tokens.copy_(torch.where(tokens == PLACEHOLDER, self.sampled[table_rows], tokens))
        spans.plans[self.group, self.kv_heads, self.head_dim, self.dtype] = plan.with_arrays(planned)
        return Inputs(tokens, positions, table_rows, spans, sample_at, flat)

    def _plan(self, host: np.ndarray, size: GraphSize | None) -> Plan:
        """The work of the kernels for spans, host [3, S], planned on the host. For a graph, the plan
        has as much room as any batch of this size can need."""
        if not runs_triton(self.device, self.dtype):
            return Plan([], NO_MERGES, 0)
        wanted = wanted_items(self.kv_heads, self.head_dim, self.dtype, self.device)
        plan = make_plan(host, self.group, wanted)
        return plan.padded(size.tokens, size.decodes, self.group, wanted) if size else plan

    def _logits(self, inputs: Inputs, size: GraphSize | None) -> Tensor:
        """One forward over all spans -> logits [N, vocab] of the tokens at `sample_at`."""
        if size:
            captured, forward = self.graphs[size]
            captured.refill(inputs)
            hidden = forward()                          # [T, width]: its padding is left out below
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
        that their tiles are split wherever any are."""
        wanted = wanted_items(self.kv_heads, self.head_dim, self.dtype, self.device)
        held = [0, *(shape.rows for shape in wanted)]
        for rows in held[:-1]:
            q_len = min(rows // self.group + 1, self.max_context)
            span = [self.padding_row], [self.max_context - q_len], [self.max_context]
            packed = Packed(*span, array("i", [0]) * q_len, sample_at=[q_len - 1], sampling_requests=[])
            self._logits(self._inputs(packed, table_changes([]), size=None), size=None)

    @torch.inference_mode()
    def capture(self, make_graph: Callable):
        """Capture graphs for 1, 2, 4, 8, then 16, 32, 48, ... decodes (multiples of 16), up to the
        first size that holds max_running; and for batches with prompts, of 64, 128, ... tokens in all, up
        to MOST_REPLAYED. The largest comes first: the others share its memory. But each keeps the memory of
        its result. So a graph ends at the hidden states: the logits of all decodes up to 256 would be
        2,191 rows, which is 1.1 GB with a vocabulary of 128,256.

        make_graph(run) returns a function that does, and returns, the same as run() on whatever
        run's tensors hold when the function is called."""
        decodes = [1, 2, 4, 8, *range(16, self.max_running + 16, 16)]
        needed = [GraphSize(tokens, True) for smaller, tokens in zip([0, *decodes], decodes)
                  if smaller < self.max_running]
        needed += [GraphSize(tokens, False) for tokens in range(64, MOST_REPLAYED + 1, 64)]
        for size in tqdm(sorted(needed, reverse=True), "CUDA graphs", leave=False, disable=None):
            inputs = self._inputs(pack([]), table_changes([]), size)        # nothing but padding
            self.graphs[size] = inputs, make_graph(partial(self._forward, inputs))

    # ---- the cost of recomputation

    @torch.inference_mode()
    def profile(self, repeats: int = 4) -> RecomputeCost:
        """Measure what one more chunk adds to a batch that runs anyway: its attention, of one chunk alone,
        at context lengths of chunk_size, twice it, four times it, ...; and the rest, the paper's c.

        The batch reads the weights and launches its kernels with or without the chunk. So c is the
        difference of two batches that both take longer to compute than to read the weights, divided
        by the number of chunks between them. In a simulation of OPT-13B on an A100:

            1,024 tokens take 63.5 ms longer than 512 tokens, which is 16 chunks:  c = 4.0 ms"""
        chunk = min(self.chunk_size, self.max_context)
        lengths = [chunk]
        while 2 * lengths[-1] <= self.max_context:
            lengths.append(2 * lengths[-1])
        few, many = (512, 1024) if self.device.type == "cuda" else (64, 128)        # tokens

        def fastest(run: Callable) -> float:            # the first run compiles and warms up
            return min(device_seconds(self.device, run) for _ in range(repeats))
        small, large = (fastest(partial(self._all_but_attention, count)) for count in (few, many))
        added = max(large - small, 1e-9)                # noise of a busy machine can turn it around
        rest = added * chunk / (many - few)
        attention = {length: fastest(partial(self._attention, chunk, length)) for length in lengths}
        return RecomputeCost(attention, rest)

    def _all_but_attention(self, count: int):
        """All layers on that many tokens, but for attention. Dropped chunks need no logits. (K and V go
        into some slots: no request has any yet.)"""
        tokens = torch.arange(count, device=self.device)
        slots = tokens % self.num_slots

        def store(layer, q, k, v, rotation):
            return rotate_and_store(q, k, v, *self.pool.gpu[layer], slots, rotation)
        self.model(tokens % self.vocab_size, tokens % self.max_context, store)

    def _attention(self, chunk: int, length: int):
        """The attention of all layers for one chunk that ends at that context length."""
        heads = self.kv_heads * self.group
        q = torch.zeros(chunk, heads, self.head_dim, device=self.device, dtype=self.dtype)
        spans = SpanTensors.build(row=[0], q_len=[chunk], kv_len=[length], device=self.device)
        for layer in range(self.model.config.num_layers):
            multi_token_attention(q, *self.pool.gpu[layer], self.slot_table, spans)


def device_seconds(device: torch.device, run: Callable) -> float:
    """The seconds that the device works on run().

    On CUDA the GPU first spins for some 4 ms. If the host launches everything in that time, the time
    between the two events contains no wait for the host."""
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
