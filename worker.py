"""A batch becomes tensors: inputs, copies, forward, sampling (paper §4.2-4.4).

The scheduler speaks of integers; from here on there are tensors. The spans of a batch are packed
into one ragged sequence of T tokens and go through the model together, whatever phase their
requests are in. In each layer the worker stores the new K and V into their slots, waits until the
swapped-in KV of this layer has arrived, and attends.

    tokens      b31 | a0 a1 a2 a3 | a16 ... a22         [T]   a decode of b; two spans of a
    positions    31 |  0  1  2  3 |  16 ...  22         [T]   slot = slot_table[row, position]
    sampled at    ^                          ^          [N]   where a span ends its context

A launch does not wait for the device, so the last token of a context may be one that the device has
yet to sample. The host says PLACEHOLDER, and the device takes the token that it last sampled for
the request's row (`sampled`): a request keeps its row while it runs. A batch without spans skips
the model; it still writes the slot table and moves chunks. A small batch that waits for no swap-in
is launched as one captured CUDA graph.

Invariant: a token depends on its request alone: the context, where the reply begins in it, and the
options of sampling, seed included.
"""
from array import array
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from arrays import enumerate_each, join, runs_triton, split_like, upload
from attention_kernel import SpanTensors, multi_token_attention
from attention_plan import NO_MERGES, Plan, make_plan, largest_plan, wanted_items
from eviction import RecomputeCost
from graphs import Captured, Graphs, GraphSize, graph_sizes
from guesses import take_along
from kv_cache import Ticket
from kv_pool import KVPool
from model import Model
from recompute_cost import measure_recompute_cost
from rotary_store import rotate_and_store
from sampling import read, sample
from scheduler import PLACEHOLDER, Batch, Request, Result, Span
from scoring import score_prompts


class Packed(NamedTuple):
    """The spans of a batch, one behind another, on the host (take_along adds guesses)."""
    table_row: list[int]        # [S] the span's row of the slot table
    start: list[int]            # [S] the span's positions are [start, end)
    end: list[int]              # [S]
    tokens: array               # [T]
    sample_at: list[int]        # [N] where in tokens each span ends that ends its request's context
    sampling_requests: list[Request]    # [N] the requests of those spans


def pack(spans: list[Span]) -> Packed:
    """Concatenate the spans: the worker's one loop over them."""
    table_rows, starts, ends, tokens, sample_at, sampling_requests = [], [], [], array("i"), [], []
    for request, start, end in spans:
        conversation = request.conversation
        table_rows.append(conversation.row)
        starts.append(start)
        ends.append(end)
        tokens.extend(conversation.tokens[start:end])
        if end == len(conversation.tokens):             # the span ends its context
            sample_at.append(len(tokens) - 1)
            sampling_requests.append(request)
    return Packed(table_rows, starts, ends, tokens, sample_at, sampling_requests)


def describe(packed: Packed) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The packed spans as arrays: for each span its table row, q_len and kv_len, [S] each; for each
    token its id, position and table row, [T] each. For b31 and a0 ... a3 above, in rows 1 and 0:

        [1, 0], [1, 4], [32, 4]     and     [b31, a0, ...], [31, 0, 1, 2, 3], [1, 0, 0, 0, 0]"""
    table_row, start, end = np.array([packed.table_row, packed.start, packed.end], dtype=np.int64)
    span, nth = enumerate_each(end - start)                                     # [T] each
    of_spans = [table_row, end - start, end]
    return of_spans, [np.array(packed.tokens), start[span] + nth, table_row[span]]


def table_changes(updates: list[tuple[int, int, np.ndarray]]) -> list[np.ndarray]:
    """Changes (row, start, slots) of the slot table -> row, position and slot of each entry that
    changes: three arrays. [(3, 10, [7, 5])] -> [3, 3], [10, 11], [7, 5]."""
    no_change = 0, 0, np.zeros(0, np.int32)             # so that something can be concatenated
    rows, starts, slots = zip(no_change, *updates)
    change, nth = enumerate_each(np.array([len(some) for some in slots]))
    return [np.array(rows)[change], np.array(starts)[change] + nth, np.concatenate(slots)]


class Inputs(NamedTuple):
    """What the worker tells the device about a step. The tensors are int32, and on the device."""
    tokens: Tensor              # [T]
    positions: Tensor           # [T]
    row_of_token: Tensor        # [T] of the slot table
    spans: SpanTensors          # with the plan of the kernels
    sample_at: Tensor           # [N] indices into T: behind these tokens the next one is sampled
    flat: Tensor                # second day: the memory of what the model reads, see Worker._upload


class Worker:
    """Owns the model, the KV pool and the device's slot table."""

    def __init__(self, model: Model, num_slots: int, num_places: int, chunk_size: int,
                 max_running: int, max_context: int, pipeline: bool = True):
        """num_slots, num_places: the sizes of the two tiers, in tokens and in chunks. max_running:
        requests that can run at a time; each has a row of the slot table, with max_context
        positions. pipeline=False: no layer attends before all layers of a swap-in have arrived."""
        config, parameter = model.config, next(model.parameters())
        self.model, self.device, self.dtype = model, parameter.device, parameter.dtype
        self.num_slots, self.num_places, self.chunk_size = num_slots, num_places, chunk_size
        self.max_running, self.max_context = max_running, max_context
        self.vocab_size, self.stop_ids = config.vocab_size, config.eos_ids
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.head_dim = config.head_dim
        # Padding (second day) has a slot and a row of its own, behind all others.
        self.padding_row = max_running
        self.pool = KVPool(config.num_layers, self.kv_heads, self.head_dim, num_slots + 1,
                           num_places, chunk_size, self.device, self.dtype, pipeline)
        self.slot_table = self._first_table()   # [max_running + 1, max_context], at first any slots
        self.sampled = self.slot_table.new_zeros(max_running + 1)       # the last token of each row
        self.depth = int(self.device.type == "cuda")                # steps that the host runs ahead
        self.graphs = Graphs()

    def execute(self, batch: Batch) -> Result:
        """Run the batch's spans and start its copies. With nothing to compute, wait for a copy in
        flight, if there is one. (An engine of depth 0 calls it, and any that drains its copies.)"""
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Callable[[], Result]:
        """Tell the device to execute the batch, behind all that was launched before. Returns a
        function that waits for the result. The books may change as soon as launch has returned."""
        packed = pack(batch.spans)
        if batch.guesses:                                   # second day
            take_along(packed, batch.guesses)
        changes = table_changes(batch.table_updates)
        inputs, logits, hidden = self._start(packed, changes, batch.slot_copies, batch.swap_in,
                                             batch.swap_out)
        if not batch.spans:
            return lambda: Result([], self.pool.landed(wait=True))
        note_scores = self._scores(packed, hidden, batch.spans)     # second day
        sampled = sample(logits, packed.sampling_requests)      # [tokens [N], maybe logprobs]
        # NOT_FINITE is -1, which has no embedding. A step already launched behind must read
        # something: 0. Its result is ignored.
        self._remember(inputs, sampled[0].clamp(min=0).int())
        on_host = [part.to("cpu", non_blocking=True) for part in sampled]       # page-locked
        done = self.pool.mark()

        def wait() -> Result:
            done.synchronize()
            note_scores()
            tokens, logprobs = read(packed.sampling_requests, *on_host)
            return Result(tokens, self.pool.landed(wait=False), logprobs)
        return wait

    # ---- a step

    def _start(self, packed: Packed, changes: list[np.ndarray], slot_copies: dict[int, int],
               swap_in: list[Ticket], swap_out: list[Ticket]
               ) -> tuple[Inputs, Tensor | None, Tensor | None]:
        """All of a step but the sampling. (parallel.py sends the numbers in these arguments to
        other processes.) Returns the inputs, the logits [N, vocab], and the hidden states
        [T, width]; the last two are None if there is no span.

        The upload of the inputs comes first: behind the copies of KV it would wait for the bus
        between CPU and GPU."""
        size = self._graph_for(packed, swap_in)     # second day
        inputs = self.upload_inputs(packed, changes, size)
        self.pool.copy_slots(slot_copies)           # second day: for sharing.py
        self.pool.swap_in(swap_in)
        written = self.pool.mark()                  # earlier steps have written what is swapped out
        logits, hidden = self.compute_logits(inputs, size) if packed.tokens else (None, None)
        # Last, so that the host launches the model first; on the device both run side by side.
        self.pool.swap_out(swap_out, written)
        return inputs, logits, hidden

    def _remember(self, inputs: Inputs, tokens: Tensor):
        """The device notes the tokens [N] that were sampled, for later steps."""
        self.sampled[inputs.row_of_token[inputs.sample_at]] = tokens

    def upload_inputs(self, packed: Packed, changes: list[np.ndarray],
                      size: GraphSize | None = None) -> Inputs:
        """Upload a batch and the changes of the slot table (see table_changes), in one copy. Then
        carry the changes out, and put the sampled token where the host said PLACEHOLDER.

        size (second day): pad the batch to the size of this graph."""
        if size:
            packed = self._padded(packed, size)
        (row, q_len, kv_len), of_tokens = describe(packed)
        spans = SpanTensors.build(row, q_len, kv_len, self.device)
        others = [np.array(packed.sample_at, dtype=np.int64), *changes]
        # Second day: `_upload` also makes the plan of the kernels, and puts it into `spans`. The
        # plan and `of_tokens` lie in one piece of memory, `flat`.
        flat, (tokens, positions, row_of_token), (sample_at, rows, columns, slots) = self._upload(
            spans, of_tokens, others, size)
        # An entry is named twice if its row has changed hands since the last step: both times with
        # the slot that it has now (KVCache.take_table_updates reads the present table).
        self.slot_table[rows, columns] = slots
        resolved = torch.where(tokens == PLACEHOLDER, self.sampled[row_of_token], tokens)
        tokens.copy_(resolved)                  # in place: a graph reads them from `flat`
        return Inputs(tokens, positions, row_of_token, spans, sample_at, flat)

    def compute_logits(self, inputs: Inputs, size: GraphSize | None = None
                       ) -> tuple[Tensor, Tensor]:
        """One forward over all spans -> logits [N, vocab] of the tokens at `sample_at`, and the
        hidden states of all tokens. size (second day): replay the graph of this size instead."""
        hidden = (self.graphs.replay(size, inputs.flat, inputs.spans) if size else
                  self._forward(inputs))                # [T, width], of padding too
        return self.model.logits(hidden[inputs.sample_at]), hidden

    def _forward(self, inputs: Inputs) -> Tensor:
        """The hidden state of every token: [T, width]. This is what a graph captures."""
        slots = self.slot_table[inputs.row_of_token, inputs.positions].long()   # [T]

        def attend(layer, q, k, v, rotation):       # [T, H, D], [T, H_kv, D] twice -> [T, H, D]
            k_cache, v_cache = self.pool.gpu[layer]     # [slots, H_kv, D] each
            q = rotate_and_store(q, k, v, k_cache, v_cache, slots, rotation)
            self.pool.wait(layer)
            return multi_token_attention(q, k_cache, v_cache, self.slot_table, inputs.spans)

        return self.model(inputs.tokens, inputs.positions, attend)              # [T, width]

    # ---- second day: the first table, plans and graphs for a GPU, scores, what is measured

    def _first_table(self) -> Tensor:
        """The slot table [max_running + 1, max_context] before the first request. Each entry names
        some slot, because `profile` reads them. Those of padding's row name padding's slot, which
        is one more than the scheduler knows of."""
        any_slots = torch.arange(self.max_context, dtype=torch.int32, device=self.device)
        table = (any_slots % self.num_slots).repeat(self.max_running + 1, 1)
        table[self.padding_row] = self.num_slots
        return table

    def _graph_for(self, packed: Packed, swap_in: list[Ticket]) -> GraphSize | None:
        """The size of the graph to replay for a batch, if any. A graph has no waits in it, so it
        cannot wait for layers to arrive."""
        if not packed.tokens or swap_in or self.pool.arriving:
            return None
        return self.graphs.size_for(len(packed.tokens), len(packed.table_row))

    def _scores(self, packed: Packed, hidden: Tensor, spans: list[Span]) -> Callable[[], None]:
        """See score_prompts. A batch that samples at every position, as most do, scores no prompt:
        we need not look at its spans."""
        scores = None
        if len(packed.tokens) > len(packed.sample_at):
            scores = score_prompts(self.model, hidden, spans)
        return scores or (lambda: None)

    def _upload(self, spans: SpanTensors, of_tokens: list[np.ndarray], others: list[np.ndarray],
                size: GraphSize | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Upload the plan of these spans for the attention kernel (on a CPU it is empty), the
        arrays `of_tokens` and `others`, all in one copy. It begins with what the model reads, first
        the plan, since the kernels want it aligned. That part is `flat`: a graph's replay copies it
        into the graph's own memory.

            | plan | tokens | positions | row_of_token | sample_at | changes |
            | flat                                     | others              |

        Returns flat, the tensors of `of_tokens`, and those of `others`; `spans` gets the plan."""
        plan = self._plan(spans.host, size)
        for_model = [*plan.arrays(), *of_tokens]
        flat, *other_tensors = upload([join(for_model), *others], self.device)
        *planned, tokens, positions, row_of_token = split_like(flat, for_model)
        key = self.group, self.kv_heads, self.head_dim, self.dtype
        spans.plans[key] = plan.with_arrays(planned)
        return flat, [tokens, positions, row_of_token], other_tensors

    def _padded(self, packed: Packed, size: GraphSize) -> Packed:
        """Append spans of one token, at position 0 of the padding's row, up to size.tokens tokens:
        a CUDA graph always computes that many."""
        padding = size.tokens - len(packed.tokens)
        return packed._replace(table_row=packed.table_row + [self.padding_row] * padding,
                               start=packed.start + [0] * padding, end=packed.end + [1] * padding,
                               tokens=packed.tokens + array("i", [0]) * padding)

    def _plan(self, host: np.ndarray, size: GraphSize | None) -> Plan:
        """The plan of the attention kernel's work (attention_plan.py) for spans, host [3, S]; for a
        graph, filled up to what any batch of this size can need."""
        if not runs_triton(self.device, self.dtype):
            return Plan([], NO_MERGES, 0)
        wanted = wanted_items(self.kv_heads, self.head_dim, self.dtype, self.device)
        plan = make_plan(host, self.group, wanted)
        if not size:
            return plan
        return plan.padded(largest_plan(size.tokens, size.longest, self.group, wanted))

    @torch.inference_mode()
    def capture(self, make_graph: Callable):
        """Capture a graph for each of graph_sizes(). make_graph(run) returns a function that does
        run() again, on what run's tensors hold by then, and returns the result."""
        for size in tqdm(graph_sizes(self.max_running), "CUDA graphs", leave=False, disable=None):
            inputs = self.upload_inputs(pack([]), table_changes([]), size)  # nothing but padding
            replay = make_graph(partial(self._forward, inputs))
            self.graphs.captured[size] = Captured(inputs.flat, inputs.spans, replay)

    def profile(self) -> RecomputeCost:
        """What it costs to recompute a chunk, measured. Call it before the first request."""
        return measure_recompute_cost(self.model, self.pool, self.slot_table)

    def stats(self) -> dict:
        return self.pool.stats()
