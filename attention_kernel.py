"""Multi-token attention over non-contiguous context (paper §4.4).

PagedAttention reads a scattered KV cache, but it takes one query token per request. A stateful
server needs any number of them: a new prompt over a cached history, dropped tokens that are
recomputed at the front of a context, and decodes, all in one batch. Each of these is a *span*:
queries at consecutive positions of one request. A query sees every position up to its own, wherever
the KV-token of that position lies.

    the request in row 1 has 6 positions; a span of the queries at 3, 4 and 5 (q_len 3, kv_len 6)

    slot_table[1]    7   2   9   4   0   5   ?   ?   position -> slot; unused from kv_len on
    query at 3       x   x   x   x   .   .           x: attends to k_cache[slot] and v_cache[slot]
    query at 4       x   x   x   x   x   .
    query at 5       x   x   x   x   x   x           a decode is this last line alone

Invariant: the KV-token of every position that a span sees is in the cache when attention starts.

Up to the mark `second day`, this file says what is computed, in plain torch. Behind the mark stand
a faster way for a single query, and multi_token_attention, which does the same: on a CPU by calling
this, on a GPU with kernels.
"""
from __future__ import annotations      # where triton is absent, `tl.constexpr` is, too

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from arrays import jit, runs_triton, tl, triton, upload
from attention_plan import Merge, Plan, WorkItem, make_plan, wanted_items


@dataclass(eq=False)
class SpanTensors:
    """The spans of a batch, for all layers of a step. Make one with `build`."""
    host: np.ndarray                # [3, S] int64: table row, q_len and kv_len of each span
    device: torch.device
    num_tokens: int                 # T, the sum of all q_len
    max_row: int                    # the largest table row; for check_arguments
    max_kv_len: int                 # for check_arguments
    plans: dict = field(default_factory=dict)   # second day: see plan_of

    @staticmethod
    def build(row, q_len, kv_len, device="cpu") -> SpanTensors:
        """Three sequences of ints with one entry per span: its row of the slot table, how many
        queries it has, and how many positions its last query sees. ValueError unless row >= 0 and
        1 <= q_len <= kv_len."""
        host = np.array([row, q_len, kv_len], dtype=np.int64)
        row, q_len, kv_len = host
        bad = (row < 0) | (q_len < 1) | (q_len > kv_len)
        if bad.any():
            first = int(bad.argmax())
            raise ValueError(f"a span of row {row[first]}, q_len {q_len[first]}, kv_len "
                             f"{kv_len[first]}: needs row >= 0 and 1 <= q_len <= kv_len")
        return SpanTensors(host, torch.device(device), int(q_len.sum()), int(row.max(initial=0)),
                           int(kv_len.max(initial=0)))


def multi_token_attention_reference(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, slot_table: Tensor, spans: SpanTensors,
        scale: float | None = None, out: Tensor | None = None) -> Tensor:
    """Attention of every span's queries over the span's own context, in plain torch: the
    specification of the kernels, and what runs on a CPU.

    q           [T, H, D]               the queries of all spans, packed one span after another
    k_cache     [num_slots, H_kv, D]    the K of ONE layer of the GPU cache, at any slots
    v_cache     [num_slots, H_kv, D]    its V, with the same strides
    slot_table  [rows, max_context]     int32; from kv_len on a row may hold anything
    spans                               row, q_len and kv_len of each span; T is the sum of q_len
    scale                               of the scores, positive; 1 / sqrt(D) unless given
    out         [T, H, D]               where to write the result; a new tensor unless given

    Query i of a span stands at position p = kv_len - q_len + i and sees the positions 0, 1, ..., p.
    Query head h reads KV head g = h // (H / H_kv), so H must be a multiple of H_kv (grouped-query
    attention). With slot(j) = slot_table[row, j]:

        score(j)  = scale * (q[i, h] . k_cache[slot(j), g])              for j = 0, 1, ..., p
        out[i, h] = sum over j of softmax(score)(j) * v_cache[slot(j), g]

    Returns out. ValueError if shapes, strides or types do not fit together.
    """
    check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out)     # at the end of the file
    out = torch.empty_like(q) if out is None else out
    start = 0
    for table_row, q_len, kv_len in spans.host.T.tolist():
        queries = q[start:start + q_len]                                        # [q_len, H, D]
        slots = slot_table[table_row, :kv_len]                                  # [kv_len]
        k = k_cache.index_select(0, slots)                                      # [kv_len, H_kv, D]
        v = v_cache.index_select(0, slots)                                      # [kv_len, H_kv, D]
        # Second day: for a single query, attend_one_query gives the same faster.
        attend = attend_one_query if q_len == 1 else attend_many_queries
        out[start:start + q_len] = attend(queries, k, v, scale)
        start += q_len
    return out


def attend_many_queries(queries: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attention of queries [q_len, H, D] over k and v [kv_len, H_kv, D]. Returns [q_len, H, D].

    The causal mask of a span is aligned to the lower right: its last query sees everything.
    torch's is_causal is aligned to the upper left, so it serves only where both are the same, in a
    span from position 0 on."""
    q_len, kv_len = len(queries), len(k)
    from_the_start = q_len == kv_len
    mask = None
    if not from_the_start:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=k.device).tril(kv_len - q_len)
    queries, k, v = (x.transpose(0, 1)[None] for x in (queries, k, v))      # [1, heads, tokens, D]
    attended = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=from_the_start, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)                                          # [q_len, H, D]


# ---- second day: one query alone

def attend_one_query(query: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """attend_many_queries for one query, [1, H, D], which sees all of k and v [kv_len, H_kv, D].
    Returns [1, H, D]. (On a CPU the other takes 1.2 to 1.9 times as long.)

    No mask is needed, so the H / H_kv query heads that share a KV head take the place of tokens,
    and K and V are read once for all of them."""
    _, heads, D = query.shape
    kv_heads = k.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, D)              # [1, H_kv, H / H_kv, D]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]                 # [1, H_kv, kv_len, D]
    attended = F.scaled_dot_product_attention(grouped, k, v, scale=scale)   # [1, H_kv, H / H_kv, D]
    return attended.reshape(1, heads, D)


# ---- the kernels; read attention_plan.py first

LOG2_E = 1.4426950408889634
PIECES_AT_ONCE = 32         # partial results that are merged at a time


def multi_token_attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, slot_table: Tensor, spans: SpanTensors,
        scale: float | None = None, out: Tensor | None = None) -> Tensor:
    """Attention of every span's queries over the span's own context. Arguments, result and errors
    are those of `multi_token_attention_reference`; all tensors, and the spans, are on one device.

    Triton computes it on CUDA, and in Triton's interpreter under TRITON_INTERPRET=1; elsewhere, and
    for float64, the reference does."""
    if not runs_triton(q.device, q.dtype):
        return multi_token_attention_reference(q, k_cache, v_cache, slot_table, spans, scale, out)
    check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out)
    out = torch.empty_like(q) if out is None else out
    D, kv_heads = q.shape[2], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    plan = plan_of(spans, group, kv_heads, D, q.dtype)
    partial_out = torch.empty(plan.partial_rows, kv_heads, D, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(plan.partial_rows, kv_heads, dtype=torch.float32, device=q.device)
    scale = D ** -0.5 if scale is None else scale
    sizes = dict(GROUP=group, D=D, TILE_D=max(16, triton.next_power_of_2(D)))
    for shape, items in plan.launches:
        attention_kernel[kv_heads, len(items)](
            q, k_cache, v_cache, slot_table, out, partial_out, partial_lse, items, scale * LOG2_E,
            *q.stride()[:2], *k_cache.stride()[:2], slot_table.stride(0), *out.stride()[:2],
            TILE_M=shape.rows, TILE_N=shape.keys, **sizes,
            enable_fp_fusion=True, num_warps=shape.warps, num_stages=shape.stages)
    if len(plan.merges):
        merge_kernel[kv_heads, len(plan.merges)](
            partial_out, partial_lse, out, plan.merges, *out.stride()[:2],
            TILE_P=PIECES_AT_ONCE, **sizes, enable_fp_fusion=True)  # given, or else triton warns
    return out


def plan_of(spans: SpanTensors, group: int, kv_heads: int, D: int, dtype: torch.dtype) -> Plan:
    """The plan for `kv_heads` KV heads of `group` query heads each, of D dimensions, uploaded. All
    layers use the same one. (The worker uploads it together with its inputs, so only profiling and
    tests plan here.)"""
    key = group, kv_heads, D, dtype
    if key not in spans.plans:
        plan = make_plan(spans.host, group, wanted_items(kv_heads, D, dtype, spans.device))
        spans.plans[key] = plan.with_arrays(upload(plan.arrays(), spans.device))
    return spans.plans[key]


@jit
def attention_kernel(q, k_cache, v_cache, slot_table, out, partial_out, partial_lse, items,
                     scale_log2, stride_qt, stride_qh, stride_slot, stride_kh, stride_row,
                     stride_ot, stride_oh,
                     TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                     GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """One of the work items [n, 8] for one KV head: a tile of query rows against the positions
    [kv_start, kv_end).

    Grid (H_kv, n): the KV heads of one item run side by side, and read neighbouring parts of the
    same slots. The result goes to `out`, or, if the tile is split, to the item's partial rows in
    partial_out [partial_rows, H_kv, D] and partial_lse [partial_rows, H_kv]. Registers are scarce,
    so each number of the item is loaded where it is needed.

    Strides are in elements: from a token, and from a head, to the next one in q (stride_qt,
    stride_qh) and in out (stride_ot, stride_oh); from a slot, and from a head, to the next one in
    k_cache and v_cache (stride_slot, stride_kh); from a row to the next one in slot_table."""
    kv_head, item = tl.program_id(0), pointers_to_item(items + tl.program_id(1) * 8)
    table = slot_table + tl.load(item.table_row).to(tl.int64) * stride_row
    offsets, inside, token, _ = query_rows(item, kv_head, stride_qt, stride_qh,
                                           TILE_M, GROUP, D, TILE_D)
    query = tl.load(q + offsets, mask=inside, other=0.0)                # [TILE_M, TILE_D]
    head_start = kv_head.to(tl.int64) * stride_kh
    k_head, v_head = k_cache + head_start, v_cache + head_start
    position = token + tl.load(item.shift)                              # [TILE_M]
    kv_start, kv_end = tl.load(item.kv_start), tl.load(item.kv_end)
    acc, lse = attend_range(query, position, k_head, v_head, table, kv_start, kv_end,
                            scale_log2, stride_slot, TILE_M, TILE_N, D, TILE_D)
    first_partial = tl.load(item.first_partial)
    offsets, inside, _, exists = query_rows(item, kv_head, stride_ot, stride_oh,
                                            TILE_M, GROUP, D, TILE_D)
    if first_partial < 0:
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)
    else:
        rows, dims = tl.arange(0, TILE_M), tl.arange(0, TILE_D)
        entry = (first_partial + rows).to(tl.int64) * tl.num_programs(0) + kv_head      # of H_kv
        tl.store(partial_out + entry[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(partial_lse + entry, lse, mask=exists)


@jit
def pointers_to_item(first):
    """A WorkItem whose fields are pointers to the eight numbers from `first` on."""
    return WorkItem(first_query_row=first, end_query_row=first + 1, first_partial=first + 2,
                    table_row=first + 3, shift=first + 4, kv_start=first + 5, kv_end=first + 6,
                    unused=first + 7)


@jit
def query_rows(item, kv_head, stride_token, stride_head,
               TILE_M: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """The query rows of an item: their offsets in q or out, and which of these to touch [TILE_M,
    TILE_D]; the token of each row, and whether the row exists [TILE_M]. GROUP 4: row 22 is token 5,
    and for KV head 1 query head 1 * 4 + 2.

    Kept over the loop over K and V, these would take a third of the registers. So the kernel calls
    this before the loop and again behind it, and the volatile load makes the compiler compute all
    of it again."""
    first_query_row = tl.load(item.first_query_row, volatile=True)
    query_row, dims = first_query_row + tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    token, head = query_row // GROUP, kv_head * GROUP + query_row % GROUP
    exists = query_row < tl.load(item.end_query_row)
    offsets = (token.to(tl.int64) * stride_token + head * stride_head)[:, None] + dims[None, :]
    return offsets, exists[:, None] & (dims < D)[None, :], token, exists


@jit
def attend_range(query, position, k_head, v_head, table, kv_start, kv_end, scale_log2, stride_slot,
                 TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """Attention of a tile's queries over the positions [kv_start, kv_end), TILE_N at a time, with
    an online softmax.

    query       [TILE_M, TILE_D]
    position    [TILE_M]            each row sees the positions up to its own
    k_head, v_head                  one KV head of the cache; stride_slot elements from slot to slot
    table                           the request's row of the slot table
    scale_log2                      the scale times log2(e), since exp2 is faster than exp

    Returns the output [TILE_M, TILE_D] in float32, normalised over this range, and
    log2(sum(exp(score))) [TILE_M]: 0 and -inf for a row that sees nothing here.

    A strip is the K and V of TILE_N positions. When a strip raises the maximum so far, `highest`,
    the sums so far shrink by exp2(old maximum - new maximum). With strips of one position and the
    scores 1 and 3 (multiplied by scale_log2):

        highest 1, total 1;     then shrink 2^(1 - 3), total 0.25 + 1, lse 3 + log2(1.25),
                                output (0.25 v1 + v2) / 1.25

    kv_start is a multiple of TILE_N. A kv_end that is none is the end of all that the tile sees.
    With kv_end 6 and TILE_N 4, the strip 4..7 reads the slots of the positions 4, 5, 5, 5, because
    behind kv_end the table may hold anything. No row stands at 6 or 7, so the causal mask hides
    both. Strips up to the first row's position need no mask. (Rows that do not exist may see
    6 and 7. What they compute is never stored.)"""
    columns, dims = tl.arange(0, TILE_N), tl.arange(0, TILE_D)
    seen_by_all = tl.min(position, 0) + 1
    last = tl.maximum(kv_end - 1, 0)                    # 0: an item of zeros, which does nothing
    highest = tl.full([TILE_M], -1e38, tl.float32)      # not -inf: -inf - -inf is NaN
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    slots = tl.load(table + tl.minimum(kv_start + columns, last))
    for start in range(kv_start, kv_end, TILE_N):
        # Slots are loaded a strip ahead, or the copies of K and V would have to wait for them.
        # Offsets are int64: int32 overflows at a million slots of 16 KV heads of D 128. K is loaded
        # as rows, so that it shares V's offsets.
        next_slots = tl.load(table + tl.minimum(start + TILE_N + columns, last))
        offsets = slots.to(tl.int64)[:, None] * stride_slot + dims[None, :]
        k = tl.load(k_head + offsets, mask=dims[None, :] < D, other=0.0)        # [TILE_N, TILE_D]
        v = tl.load(v_head + offsets, mask=dims[None, :] < D, other=0.0)        # [TILE_N, TILE_D]
        scores = tl.dot(query, k.T, input_precision="ieee")                     # [TILE_M, TILE_N]
        if start + TILE_N > seen_by_all:
            seen = (start + columns)[None, :] <= position[:, None]              # [TILE_M, TILE_N]
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)       # [TILE_M]
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])           # [TILE_M, TILE_N]
        shrink = tl.exp2(highest - new_highest)                                 # [TILE_M]
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest, slots = new_highest, next_slots
    return acc / tl.where(total > 0, total, 1.0)[:, None], highest + tl.log2(total)


@jit
def merge_kernel(partial_out, partial_lse, out, merges, stride_ot, stride_oh,
                 TILE_P: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """One query row of a split tile for one KV head: the mean of its pieces' outputs, weighted by
    exp2(lse), TILE_P pieces at a time. merges [m, 4]. Grid (H_kv, m).

    Every query row sees something in the first piece, which holds position 0, so `highest` is
    finite from there on. A plan for a CUDA graph is filled up with merges of zeros: they have no
    pieces, and store nothing."""
    kv_head, first = tl.program_id(0), merges + tl.program_id(1) * 4
    merge = Merge(query_row=first, first_partial=first + 1, stride=first + 2, pieces=first + 3)
    query_row, first_partial = tl.load(merge.query_row), tl.load(merge.first_partial)
    stride, pieces = tl.load(merge.stride), tl.load(merge.pieces)
    dims = tl.arange(0, TILE_D)
    highest, total, acc = float("-inf"), 0.0, tl.zeros([TILE_D], tl.float32)
    for start in range(0, pieces, TILE_P):
        piece = start + tl.arange(0, TILE_P)
        entry = (first_partial + piece * stride).to(tl.int64) * tl.num_programs(0) + kv_head  # H_kv
        lse = tl.load(partial_lse + entry, mask=piece < pieces, other=float("-inf"))    # [TILE_P]
        inside = (piece < pieces)[:, None] & (dims < D)[None, :]
        values = tl.load(partial_out + entry[:, None] * D + dims[None, :], mask=inside, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink, weights = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    offsets = ((query_row // GROUP).to(tl.int64) * stride_ot
               + (kv_head * GROUP + query_row % GROUP) * stride_oh + dims)
    stored = tl.where(pieces > 0, D, 0)
    tl.store(out + offsets, (acc / total).to(out.dtype.element_ty), mask=dims < stored)


def check_arguments(q, k_cache, v_cache, slot_table, spans: SpanTensors, scale: float | None, out):
    """ValueError unless shapes, strides and types fit together. That the slots in the table exist
    is the caller's promise. Every layer of every step comes here, except in a replayed graph, so
    nothing is computed that only a message needs."""
    if q.dim() != 3 or k_cache.dim() != 3 or q.shape[2] != k_cache.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}: "
                         "need [T, H, D] and [num_slots, H_kv, D]")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} "
                         "differ in shape or strides")
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k_cache.shape[1]} KV heads")
    if not q.stride(2) == k_cache.stride(2) == slot_table.stride(1) == 1:
        raise ValueError("the last dimension of an argument is not contiguous")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q, k_cache, v_cache differ: {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if slot_table.dtype != torch.int32:
        raise ValueError(f"slot_table is {slot_table.dtype}, not int32")
    if len(q) != spans.num_tokens:
        raise ValueError(f"q holds {len(q)} tokens, the spans {spans.num_tokens}")
    if spans.max_row >= slot_table.shape[0] or spans.max_kv_len > slot_table.shape[1]:
        raise ValueError(f"slot_table {tuple(slot_table.shape)} has no row {spans.max_row} "
                         f"of {spans.max_kv_len} positions")
    if scale is not None and scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(f"out must be {q.dtype} {tuple(q.shape)} with a contiguous last dimension")
