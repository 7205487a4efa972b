"""Multi-token attention over non-contiguous context (the paper, section 4.4).

PagedAttention reads a scattered KV cache but takes one query token per request. A stateful server needs any number: a new prompt
over a cached history, dropped tokens recomputed at the front of a context, and decodes, all in one batch. Each of these is a *span*:
query tokens at consecutive positions of one request, each of which sees every position up to its own, wherever its KV-token lies.

    the request in row 1 at 6 positions; a span of the queries at 3, 4, 5 (q_len 3, kv_len 6)

    slot_table[1]    7   2   9   4   0   5   ?   ?       position -> slot; what stands beyond kv_len is never used
    query at 3       x   x   x   x   .   .               x: attends to k_cache[slot], v_cache[slot]
    query at 4       x   x   x   x   x   .
    query at 5       x   x   x   x   x   x               a decode is this last line alone

Invariant: the KV-token of every position that a span sees is in the cache when the kernel starts.
"""
from __future__ import annotations      # those of the kernels name tl, which is absent where triton is

import os
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # macOS, Windows: the reference serves
    triton, jit = None, lambda function: function

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # triton itself looks once, when a kernel is defined
LOG2_E = 1.4426950408889634


# ---- the specification --------------------------------------------------------------------------------------------------------

def multi_token_attention_reference(q, k_cache, v_cache, slot_table, spans, scale=None, out=None):
    """Arguments, result and errors of `multi_token_attention`, in plain torch: the specification, and the path of the CPU.
    Per span one gather of K and V and one scaled_dot_product_attention; no loop over heads or tokens."""
    check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out)
    out = torch.empty_like(q) if out is None else out
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    start = 0
    for row, q_len, kv_len in spans.host.T.tolist():
        slots = slot_table[row, :kv_len]
        k, v = (cache.index_select(0, slots).transpose(0, 1)[None] for cache in (k_cache, v_cache))    # [1, H_kv, kv_len, D]
        queries = q[start:start + q_len]                                                               # [q_len, H, D]
        if q_len == 1:  # it sees everything; the query heads of a KV head share one pass over it, as if they were tokens
            grouped = queries.reshape(1, kv_heads, heads // kv_heads, -1)
            attended = F.scaled_dot_product_attention(grouped, k, v, scale=scale).reshape(1, heads, -1)
        else:
            causal = q_len == kv_len  # torch aligns is_causal to the upper left, a span to the lower right
            mask = None if causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)
            attended = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=causal,
                                                      scale=scale, enable_gqa=True)[0].transpose(0, 1)
        out[start:start + q_len] = attended
        start += q_len
    return out


# ---- the batch: spans, cut into work items once per step ----------------------------------------------------------------------

class Tile(NamedTuple):
    """What one program holds at a time: `rows` query rows against `keys` positions; a query row is one head of one token."""
    rows: int
    keys: int
    warps: int
    stages: int  # K and V are copied stages - 1 tiles ahead


# A span takes the first tile that holds all its rows, or the last. Found by compiling: no register is spilled, and the copies of further
# tiles go on while one is used (with two stages they would wait for its end). Hopper's tensor cores want 64 rows and more, and its shared
# memory holds 227 KB; elsewhere all stays within the 99 KB of consumer GPUs. Exact float32 has no tensor cores: it is for checking.
HOPPER = Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3)
AMPERE = Tile(16, 64, 4, 3), Tile(64, 32, 4, 4), Tile(128, 32, 8, 4)
FLOAT32 = (Tile(16, 32, 8, 2),)
MERGE_PIECES = 32  # joined at a time
ITEMS_PER_PROCESSOR = 3
MIN_PIECE = 256  # positions: what finer splitting gains in parallelism it loses in merging


class Plan(NamedTuple):
    """Who computes what in every layer of a step: int32 tensors on the device. A row of zeros does nothing, so it can pad them.

    Query row r is head r % group (of those that share a KV head) of token r // group of the packed queries; a tile is rows of one
    span. A tile that is split leaves a partial row for each of its rows and pieces."""
    launches: list        # of (Tile, items [n, 8]) for each kind of tile that occurs: first and end query row,
    #                       first partial row (-1: write to out), table row, position minus index of a token, kv_start, kv_end, 0
    merges: torch.Tensor  # [m, 4]: query row, its first partial row, partial rows from a piece to the next, pieces
    partial_rows: int

    def tensors(self):
        return [*(items for _, items in self.launches), self.merges]

    def moved(self, tensors):
        """The same plan with these for its tensors()."""
        *items, merges = tensors
        return self._replace(launches=[(tile, moved) for (tile, _), moved in zip(self.launches, items)], merges=merges)

    def padded(self, num_items: int, num_merges: int):
        """The same plan in as much room as any of that size needs: what a captured graph launches never changes."""
        sizes = [num_items] * len(self.launches) + [num_merges]
        tensors = [F.pad(tensor, (0, 0, 0, size - len(tensor))) for tensor, size in zip(self.tensors(), sizes)]
        return self.moved(tensors)._replace(partial_rows=max(num_items * tile.rows for tile, _ in self.launches))


@dataclass(eq=False)
class SpanTensors:
    """The spans of a batch as the attention of every layer needs them; made by `build`."""
    row: torch.Tensor      # [S] int32, row of the slot table
    q_start: torch.Tensor  # [S+1] int32, offsets into the packed queries
    kv_len: torch.Tensor   # [S] int32
    max_q_len: int
    max_kv_len: int
    max_row: int
    num_tokens: int        # T
    host: np.ndarray       # [3, S] row, q_len, kv_len: planning and the reference never wait for the device
    plans: dict = field(default_factory=dict)

    @staticmethod
    def build(row, q_len, kv_len, device="cpu"):
        """Three sequences of ints, one entry per span. ValueError unless 1 <= q_len <= kv_len."""
        for q, kv in zip(q_len, kv_len, strict=True):
            if not 1 <= q <= kv:
                raise ValueError(f"a span with q_len {q} and kv_len {kv}: needs 1 <= q_len <= kv_len")
        host = np.array([row, q_len, kv_len], dtype=np.int64)
        tensors = upload([host[0], np.cumsum([0, *q_len]), host[2]], torch.device(device))
        return SpanTensors(*tensors, max(q_len, default=0), max(kv_len, default=0), max(row, default=0), sum(q_len), host)

    def plan(self, group, kv_heads, dtype):
        """The Plan for `kv_heads` KV heads of `group` query heads each: made and uploaded at the first call, for all layers."""
        key = group, kv_heads, dtype
        if key not in self.plans:
            self.plans[key] = make_plan(self.host, group, *tiling(kv_heads, dtype, self.row.device), self.row.device)
        return self.plans[key]


def tiling(kv_heads, dtype, device):
    """The tiles for that device, and how many work items fill it."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    tiles = FLOAT32 if dtype == torch.float32 else HOPPER if gpu and gpu.major == 9 else AMPERE
    return tiles, max(1, (gpu.multi_processor_count if gpu else 100) * ITEMS_PER_PROCESSOR // kv_heads)


def make_plan(host, group, tiles, wanted, device, min_piece=MIN_PIECE):
    """Spans [3, S] -> Plan. Each kind of tile is a launch of its own, to be cut into some `wanted` items."""
    used, items, merges, partial_rows = [], [], [np.zeros((0, 4), np.int64)], 0
    spans = np.vstack([host, np.cumsum(host[1]) - host[1]])  # row, q_len, kv_len, q_start
    kind = np.searchsorted([tile.rows for tile in tiles[:-1]], host[1] * group)
    for index in np.unique(kind):
        first, end, row, shift, kv_end = cut_into_tiles(spans[:, kind == index], group, tiles[index].rows)
        pieces, length = split_context(kv_end, wanted, min_piece, tiles[index].keys)
        needed = np.where(pieces > 1, pieces * (end - first), 0)
        partial = np.where(pieces > 1, partial_rows + np.cumsum(needed) - needed, -1)
        partial_rows += int(needed.sum())
        used.append(tiles[index])
        items.append(list_items(first, end, partial, row, shift, kv_end, pieces, length))
        merges.append(list_merges(first, end, partial, pieces))
    *items, merges = upload([*items, np.concatenate(merges)], device)
    return Plan(list(zip(used, items)), merges, partial_rows)


def cut_into_tiles(spans, group, tile_rows):
    """Spans [4, S] (row, q_len, kv_len, q_start) -> tiles, five arrays [n]: first and end query row, row of the slot table,
    shift (a token's position minus its index in the packed queries), kv_end (the positions that the tile's last token sees)."""
    row, q_len, kv_len, q_start = spans
    span, nth = enumerate_each(ceil_div(q_len * group, tile_rows))
    first = q_start[span] * group + nth * tile_rows
    end = np.minimum(first + tile_rows, (q_start + q_len)[span] * group)
    shift = (kv_len - q_len - q_start)[span]
    return first, end, row[span], shift, (end - 1) // group + shift + 1


def split_context(kv_end, wanted, min_piece, keys):
    """Into how many pieces to cut the positions 0..kv_end of each tile, and how long they are (the last may be shorter): arrays [n].

    A short prompt over a long history, the main case of a stateful server, has few tiles and would leave most of a GPU idle. So a
    tile is cut into as many pieces as its share of the `wanted` items, rounded down (a GPU that is full, and then runs a few items
    more, takes nearly twice as long), but none shorter than `min_piece`. Lengths are multiples of `keys`: no tile of keys straddles
    two pieces."""
    share = np.maximum(kv_end * wanted // kv_end.sum(), 1)
    length = ceil_div(np.maximum(ceil_div(kv_end, share), min_piece), keys) * keys
    return ceil_div(kv_end, length), length


def list_items(first, end, partial, row, shift, kv_end, pieces, length):
    """The work items [sum(pieces), 8] of n tiles, longest first. `partial`: first partial row of a tile that is split, else -1."""
    tile, nth = enumerate_each(pieces)
    kv_start = nth * length[tile]
    kv_end = np.minimum(kv_start + length[tile], kv_end[tile])
    partial = partial[tile] + nth * (end - first)[tile]  # a tile that is not split has piece 0 only
    items = np.stack([first[tile], end[tile], partial, row[tile], shift[tile], kv_start, kv_end, np.zeros_like(tile)], axis=1)
    return items[np.argsort(kv_start - kv_end, kind="stable")]


def list_merges(first, end, partial, pieces):
    """The merges [m, 4]: one for each query row of those of n tiles that are split."""
    tile, nth = enumerate_each(np.where(pieces > 1, end - first, 0))
    return np.stack([first[tile] + nth, partial[tile] + nth, (end - first)[tile], pieces[tile]], axis=1)


def enumerate_each(counts):
    """[2, 3] -> [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]: who each one belongs to, and its place there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def ceil_div(a, b):
    return -(-a // b)


def upload(arrays, device):
    """Integer arrays -> int32 tensors on the device, in one copy for which the host does not wait."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(np.int32))
    flat = flat.pin_memory() if device.type == "cuda" else flat
    return cut(flat.to(device, non_blocking=True), arrays)


def cut(flat, arrays):
    """A flat tensor, cut into tensors of the arrays' shapes."""
    return [part.view(array.shape) for part, array in zip(flat.split([array.size for array in arrays]), arrays)]


# ---- the kernels --------------------------------------------------------------------------------------------------------------

def runs_triton(device, dtype):
    """Whether it is Triton that attends there, and not the reference."""
    return triton is not None and (device.type == "cuda" or INTERPRETED) and dtype != torch.float64


def multi_token_attention(q, k_cache, v_cache, slot_table, spans, scale=None, out=None):
    """q [T, H, D]: the queries of all spans, packed.
    k_cache, v_cache [num_slots, H_kv, D]: ONE layer of the GPU cache; any slot order, alike in strides.
    slot_table [rows, max_context] int32; entries at kv_len and beyond may hold anything.
    spans: a SpanTensors on q's device. Query i of span s stands at position kv_len[s] - q_len[s] + i and sees positions 0..itself.
    H is a multiple of H_kv (grouped-query attention); scale is 1 / sqrt(D) unless given, and positive.
    Returns [T, H, D], in `out` if given. ValueError if shapes do not fit together.
    Triton on CUDA, and in its interpreter under TRITON_INTERPRET=1; the reference elsewhere and for float64."""
    if not runs_triton(q.device, q.dtype):
        return multi_token_attention_reference(q, k_cache, v_cache, slot_table, spans, scale, out)
    check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out)
    out = torch.empty_like(q) if out is None else out
    D, kv_heads = q.shape[2], k_cache.shape[1]
    group = q.shape[1] // kv_heads
    plan = spans.plan(group, kv_heads, q.dtype)
    partial_out = torch.empty(plan.partial_rows, kv_heads, D, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(plan.partial_rows, kv_heads, dtype=torch.float32, device=q.device)
    options = dict(GROUP=group, D=D, TILE_D=max(16, triton.next_power_of_2(D)), enable_fp_fusion=True)  # else triton warns
    for tile, items in plan.launches:
        attention_kernel[kv_heads, len(items)](
            q, k_cache, v_cache, slot_table, out, partial_out, partial_lse, items, (D ** -0.5 if scale is None else scale) * LOG2_E,
            *q.stride()[:2], *k_cache.stride()[:2], slot_table.stride(0), *out.stride()[:2],
            TILE_M=tile.rows, TILE_N=tile.keys, **options, num_warps=tile.warps, num_stages=tile.stages)
    if len(plan.merges):
        merge_kernel[kv_heads, len(plan.merges)](
            partial_out, partial_lse, out, plan.merges, *out.stride()[:2], TILE_P=MERGE_PIECES, **options)
    return out


@jit
def attention_kernel(q, k_cache, v_cache, slot_table, out, partial_out, partial_lse, items, scale_log2,
                     stride_qt, stride_qh, stride_slot, stride_kh, stride_row, stride_ot, stride_oh,
                     TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """One work item for one KV head: a tile of query rows against one range of positions.
    Grid (H_kv, items): the heads of an item run side by side, so that they read their parts of a slot together."""
    kv_head, item = tl.program_id(0), items + tl.program_id(1) * 8
    table = slot_table + tl.load(item + 3).to(tl.int64) * stride_row
    offsets, inside, token, exists = query_rows(item, kv_head, stride_qt, stride_qh, TILE_M, GROUP, D, TILE_D)
    query = tl.load(q + offsets, mask=inside, other=0.0)
    head_start = kv_head.to(tl.int64) * stride_kh
    acc, lse = attend(query, k_cache + head_start, v_cache + head_start, table, token + tl.load(item + 4),
                      tl.load(item + 5), tl.load(item + 6), scale_log2, stride_slot, TILE_M, TILE_N, D, TILE_D)
    partial = tl.load(item + 2)
    offsets, inside, token, exists = query_rows(item, kv_head, stride_ot, stride_oh, TILE_M, GROUP, D, TILE_D)
    if partial < 0:
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)
    else:
        rows, dims = tl.arange(0, TILE_M), tl.arange(0, TILE_D)
        entry = (partial + rows).to(tl.int64) * tl.num_programs(0) + kv_head
        tl.store(partial_out + entry[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(partial_lse + entry, lse, mask=exists)


@jit
def query_rows(item, kv_head, stride_token, stride_head,
               TILE_M: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """The query rows of an item: their offsets in q or out and which of them to touch [TILE_M, TILE_D], the token of each row and
    whether the row exists [TILE_M]. Volatile: what is computed before the loop over K and V is computed anew behind it;
    kept, it would take a third of the registers."""
    rows, dims = tl.load(item, volatile=True) + tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    token, head, exists = rows // GROUP, kv_head * GROUP + rows % GROUP, rows < tl.load(item + 1)
    offsets = (token.to(tl.int64) * stride_token + head * stride_head)[:, None] + dims[None, :]
    return offsets, exists[:, None] & (dims < D)[None, :], token, exists


@jit
def attend(query, k_head, v_head, table, position, kv_start, kv_end, scale_log2, stride_slot,
           TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """Attention of a tile's queries over positions [kv_start, kv_end), TILE_N at a time, with the softmax kept online.

    query [TILE_M, TILE_D]; position [TILE_M]: a row sees positions up to its own. k_head, v_head: one KV head of the cache,
    `stride_slot` elements from slot to slot; table: the request's row of the slot table; scale_log2: the scale times log2(e).
    kv_end is a multiple of TILE_N or follows the last position of all rows: the causal mask is the only one, and only for tiles that
    reach beyond the first row's position.
    Returns the output [TILE_M, TILE_D] in float32, normalised over this range, and log2(sum(exp(score))) [TILE_M]:
    0 and -inf for a row that sees nothing here.

    A step: K and V at this tile's slots; scores; the new running maximum; what was summed so far shrinks by
    exp2(old maximum - new); the tile's weights and weighted values are added."""
    columns, dims = tl.arange(0, TILE_N), tl.arange(0, TILE_D)
    seen_by_all = tl.min(position, 0) + 1
    last = tl.maximum(kv_end - 1, 0)  # beyond it table entries are garbage: read its slot again
    highest = tl.full([TILE_M], -1e38, tl.float32)  # finite: a row that sees nothing must not compute -inf - -inf
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    slots = tl.load(table + tl.minimum(kv_start + columns, last))
    for start in range(kv_start, kv_end, TILE_N):
        next_slots = tl.load(table + tl.minimum(start + TILE_N + columns, last))  # a tile ahead, or the copies of K and V wait for it
        offsets = slots.to(tl.int64)[:, None] * stride_slot + dims[None, :]  # int32 overflows at a million slots
        k = tl.load(k_head + offsets, mask=dims[None, :] < D, other=0.0)  # [TILE_N, TILE_D]; as rows, it shares V's slots
        v = tl.load(v_head + offsets, mask=dims[None, :] < D, other=0.0)
        scores = tl.dot(query, k.T, input_precision="ieee")  # [TILE_M, TILE_N]
        if start + TILE_N > seen_by_all:
            scores = tl.where((start + columns)[None, :] <= position[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest, slots = new_highest, next_slots
    return acc / tl.where(total > 0, total, 1.0)[:, None], highest + tl.log2(total)


@jit
def merge_kernel(partial_out, partial_lse, out, merges, stride_ot, stride_oh,
                 TILE_P: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """One query row of a split tile for one KV head: the mean of its pieces' outputs weighted by exp2(lse), TILE_P pieces at a time.
    Grid (H_kv, merges). Every row sees something in the first piece, which holds position 0: `highest` is finite from there on."""
    kv_head, merge = tl.program_id(0), merges + tl.program_id(1) * 4
    row, partial, stride, pieces = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    dims = tl.arange(0, TILE_D)
    highest, total, acc = float("-inf"), 0.0, tl.zeros([TILE_D], tl.float32)
    for first in range(0, pieces, TILE_P):
        piece = first + tl.arange(0, TILE_P)
        entry = (partial + piece * stride).to(tl.int64) * tl.num_programs(0) + kv_head
        lse = tl.load(partial_lse + entry, mask=piece < pieces, other=float("-inf"))
        inside = (piece < pieces)[:, None] & (dims < D)[None, :]
        values = tl.load(partial_out + entry[:, None] * D + dims[None, :], mask=inside, other=0.0)  # [TILE_P, TILE_D]
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink, weights = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    offsets = (row // GROUP).to(tl.int64) * stride_ot + (kv_head * GROUP + row % GROUP) * stride_oh + dims
    tl.store(out + offsets, (acc / total).to(out.dtype.element_ty), mask=dims < tl.where(pieces > 0, D, 0))


def check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out):
    """ValueError unless shapes, strides and types fit together (what slots the table names is the caller's promise).
    Every layer of every step comes here: nothing is computed that the message alone needs."""
    if q.dim() != 3 or k_cache.dim() != 3 or q.shape[2] != k_cache.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}: need [T, H, D] and [num_slots, H_kv, D]")
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} differ in shape or strides")
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
        raise ValueError(f"slot_table {tuple(slot_table.shape)} has no row {spans.max_row} of {spans.max_kv_len} positions")
    if scale is not None and scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(f"out must be {q.dtype} {tuple(q.shape)} with a contiguous last dimension")
