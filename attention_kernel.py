"""Multi-token attention over non-contiguous context (paper §4.4).

PagedAttention reads a scattered KV cache, but it takes one query token per request. A stateful
server needs any number of them: a new prompt over a cached history, dropped tokens that are
recomputed at the front of a context, and decodes, all in one batch. Each of these is a *span*:
queries at consecutive positions of one request. A query sees every position up to its own, wherever
the KV-token of that position lies.

    the request in row 1 has 6 positions; a span of the queries at 3, 4 and 5 (q_len 3, kv_len 6)

    slot_table[1]    7   2   9   4   0   5   ?   ?       position -> slot; unused from kv_len on
    query at 3       x   x   x   x   .   .               x: attends to k_cache[slot] and v_cache[slot]
    query at 4       x   x   x   x   x   .
    query at 5       x   x   x   x   x   x               a decode is this last line alone

Invariant: the KV-token of every position that a span sees is in the cache when the kernel starts.
"""
from __future__ import annotations      # they are not evaluated: without triton there is no tl.constexpr

import os
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:     # on macOS and Windows the reference serves
    triton = tl = None

    def jit(function=None, **options):
        return function or jit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"     # triton asks once: when a kernel is defined
LOG2_E = 1.4426950408889634


# ---- the specification ---------------------------------------------------------------------------

def multi_token_attention_reference(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, slot_table: Tensor, spans: SpanTensors,
        scale: float | None = None, out: Tensor | None = None) -> Tensor:
    """Attention of every span's queries over the span's own context, in plain torch. This is the
    specification of the kernels, and what runs on a CPU.

    q           [T, H, D]               the queries of all spans, packed one span after another
    k_cache     [num_slots, H_kv, D]    the K of ONE layer of the GPU cache, at any slots
    v_cache     [num_slots, H_kv, D]    its V, with the same strides
    slot_table  [rows, max_context]     int32; from kv_len on a row may hold anything
    spans                               row, q_len and kv_len of each span; T is the sum of all q_len
    scale                               of the scores, positive; 1 / sqrt(D) unless given
    out         [T, H, D]               where to write the result; a new tensor unless given

    Query i of a span stands at position p = kv_len - q_len + i and sees the positions 0, 1, ..., p.
    Query head h reads KV head g = h // (H / H_kv), so H must be a multiple of H_kv (grouped-query
    attention). With slot(j) = slot_table[row, j]:

        score(j)  = scale * (q[i, h] . k_cache[slot(j), g])              for j = 0, 1, ..., p
        out[i, h] = sum over j of softmax(score)(j) * v_cache[slot(j), g]

    Returns out. ValueError if shapes, strides or types do not fit together.
    """
    check_arguments(q, k_cache, v_cache, slot_table, spans, scale, out)
    out = torch.empty_like(q) if out is None else out
    start = 0
    for table_row, q_len, kv_len in spans.host.T.tolist():
        queries = q[start:start + q_len]                                        # [q_len, H, D]
        slots = slot_table[table_row, :kv_len]                                  # [kv_len]
        k = k_cache.index_select(0, slots)                                      # [kv_len, H_kv, D]
        v = v_cache.index_select(0, slots)                                      # [kv_len, H_kv, D]
        attend = attend_one_query if q_len == 1 else attend_many_queries
        out[start:start + q_len] = attend(queries, k, v, scale)
        start += q_len
    return out


def attend_one_query(query: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attention of one query, [1, H, D], over k and v [kv_len, H_kv, D]. Returns [1, H, D].

    A decode sees everything, so there is no mask. The query heads that share a KV head are passed
    as if they were tokens: then K and V are read once for all of them, and never repeated."""
    _, heads, D = query.shape                                                   # [1, H, D]
    kv_heads = k.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, D)                  # [1, H_kv, H / H_kv, D]
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]                     # [1, H_kv, kv_len, D]
    attended = F.scaled_dot_product_attention(grouped, k, v, scale=scale)       # [1, H_kv, H / H_kv, D]
    return attended.reshape(1, heads, D)


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
    queries, k, v = (x.transpose(0, 1)[None] for x in (queries, k, v))          # [1, heads, tokens, D]
    attended = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=from_the_start, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)                                          # [q_len, H, D]


# ---- the spans of a batch ------------------------------------------------------------------------

@dataclass(eq=False)
class SpanTensors:
    """The spans of a batch: as integers on the host, and as the kernels' plans for them on the
    device. All layers share both. Make one with `build`."""
    host: np.ndarray                # [3, S] int64: table row, q_len and kv_len of each span
    device: torch.device            # where the plans are
    num_tokens: int                 # T, the sum of all q_len
    max_row: int                    # the largest table row
    max_kv_len: int
    plans: dict = field(default_factory=dict)       # (group, kv_heads, D, dtype) -> Plan: see `plan`

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
            raise ValueError(f"a span of row {row[first]}, q_len {q_len[first]}, kv_len {kv_len[first]}: "
                             "needs row >= 0 and 1 <= q_len <= kv_len")
        return SpanTensors(host, torch.device(device), int(q_len.sum()), int(row.max(initial=0)),
                           int(kv_len.max(initial=0)))

    def plan(self, group: int, kv_heads: int, D: int, dtype: torch.dtype) -> Plan:
        """The work of the kernels for `kv_heads` KV heads of `group` query heads each, of D dimensions.
        It is planned and uploaded by the first layer that asks, unless Worker._inputs has done so."""
        key = group, kv_heads, D, dtype
        if key not in self.plans:
            plan = make_plan(self.host, group, wanted_items(kv_heads, D, dtype, self.device))
            self.plans[key] = plan.with_arrays(upload(plan.arrays(), self.device))
        return self.plans[key]


# ---- the plan: spans are cut into tiles, and tiles into work items, once per step ----------------
#
# `group` query heads share a KV head. A query row is a token of the packed queries and a number in
# 0..group-1, which says which of these heads: row r is token r // group, number r % group. With group
# 4, row 22 is token 5, number 2: for KV head 0 it means head 2, for KV head 1 head 6.
#
# A GPU has many processors (an H100 has 132). A program is one run of a kernel's body, by the four
# or eight warps that it gets on one of them. A tile is some query rows of one span. A work item is a
# tile and a piece of the context that it sees. A program computes one work item for one KV head, and
# takes the positions in strips of `keys`. Most tiles have one item, which sees all positions and
# writes to `out`. A tile that sees a long context is split into several. Each of these leaves a
# partial result, one partial row for each query row of the tile, and a second kernel merges these.

class TileShape(NamedTuple):
    """What one program holds at a time: `rows` query rows against a strip of `keys` positions."""
    rows: int
    keys: int
    warps: int
    stages: int         # K and V are copied stages - 1 strips ahead
    resident: int       # programs that a processor runs at a time: for D 128, on an H100 or A100


# A span takes the first shape that holds all its rows, or else the last. We found these shapes by
# compiling: no register is spilled, and the copies of further strips go on while one is used (with
# two stages they would wait for its end). Hopper's tensor cores want 64 rows and more, and its
# shared memory holds 227 KB. Elsewhere all shapes stay within the 99 KB of consumer GPUs, up to D 128.
# Exact float32 has no tensor cores: it is for checking. Its small shape serves any D above 128, too.
HOPPER = TileShape(16, 64, 4, 3, 3), TileShape(64, 64, 4, 3, 2), TileShape(128, 128, 8, 3, 1)
AMPERE = TileShape(16, 64, 4, 3, 2), TileShape(64, 32, 4, 4, 2), TileShape(128, 32, 8, 4, 1)
FLOAT32 = (TileShape(16, 32, 8, 2, 3),)
Wanted = dict[TileShape, int]       # how many work items of each shape, per KV head, should fill the GPU
PIECES_AT_ONCE = 32         # partial results that are merged at a time
MIN_PIECE = 256             # positions: finer pieces cost more to merge than they gain

# The columns of a work item. The kernel reads them into variables of the same names.
#     0 first_row, 1 end_row      the tile's query rows are [first_row, end_row)
#     2 first_partial             the partial row of first_row; -1: not split, so write to `out`
#     3 table_row                 the span's row of the slot table
#     4 shift                     a token's position minus its index in the packed queries:
#                                 packed at 7, position 1000: shift 993
#     5 kv_start, 6 kv_end        this item attends to the positions [kv_start, kv_end)
#     7 unused                    so that every item begins at a multiple of 16 bytes
# The columns of a merge. A merge is for one query row of a tile that is split.
#     0 query_row
#     1 first_partial             its partial row in the first piece
#     2 stride                    partial rows from one piece to the next
#     3 pieces                    how many there are
# An item or a merge of zeros does nothing. The kernels contain the numbers themselves, not global
# constants: Triton would compare these with their first values at every launch.
ITEM_COLUMNS = "first_row", "end_row", "first_partial", "table_row", "shift", "kv_start", "kv_end", "unused"
MERGE_COLUMNS = "query_row", "first_partial", "stride", "pieces"
ITEM = np.dtype([(name, np.int32) for name in ITEM_COLUMNS])
MERGE = np.dtype([(name, np.int32) for name in MERGE_COLUMNS])
NO_ITEMS = np.zeros((0, len(ITEM)), np.int32)
NO_MERGES = np.zeros((0, len(MERGE)), np.int32)


class Plan(NamedTuple):
    """Which program computes what, in every layer of a step. int32 arrays on the host when planned,
    tensors on the device when uploaded."""
    launches: list[tuple]       # (TileShape, work items [n, 8]) for each shape that occurs
    merges: np.ndarray          # [m, 4]
    partial_rows: int

    def arrays(self) -> list:
        return [*(items for _, items in self.launches), self.merges]

    def with_arrays(self, arrays) -> Plan:
        """The same plan with these in place of its arrays()."""
        *items, merges = arrays
        launches = [(shape, moved) for (shape, _), moved in zip(self.launches, items)]
        return self._replace(launches=launches, merges=merges)

    def padded(self, tokens: int, decodes: bool, group: int, wanted: Wanted) -> Plan:
        """The same plan, of a batch of so many tokens, in as much room as any such batch needs; decodes: as
        any batch of so many decodes needs. A captured graph launches the same number of programs, with
        the same memory, each time.

        n items of a shape are wanted, and a tile is split only if its share of them (see split_context) is
        two or more. So at most n // 2 tiles are split, into at most n pieces in all; every other tile is
        one item. 64 decodes, group 4, HOPPER, n = 10: 64 tiles of 4 rows, 74 items, 5 x 4 merges and
        10 x 4 partial rows."""
        rows, planned, (*_, last) = tokens * group, dict(self.launches), wanted
        most = group if decodes else rows                       # query rows of the largest span
        launches, merges, partial_rows, held = [], 0, 0, 0
        for shape, n in wanted.items():
            fewest, held = max(group, held + 1), shape.rows     # a span of fewer rows takes a smaller shape
            if fewest > most or group > held and shape != last:
                continue
            tiles = rows // fewest                              # one for each span ...
            if most > held and shape == last:
                tiles += rows // held                           # ... and more for spans that fill several
            launches.append((shape, with_zeros(planned.get(shape, NO_ITEMS), tiles + n)))
            merges += min(tiles, n // 2) * min(held, most)
            partial_rows += n * min(held, most)
        return Plan(launches, with_zeros(self.merges, min(merges, rows)), partial_rows)


def with_zeros(array: np.ndarray, length: int) -> np.ndarray:
    """The array [n, columns] with zeros behind it, [length, columns]. np.pad takes 40 us for this."""
    longer = np.zeros((length, array.shape[1]), array.dtype)
    longer[:len(array)] = array
    return longer


def wanted_items(kv_heads: int, D: int, dtype: torch.dtype, device: torch.device) -> Wanted:
    """The tile shapes for heads of D dimensions on that device, the smallest first, and how many
    work items of each, per KV head, it runs at a time if D is 128. (With a smaller D it could run
    more.)"""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    processors = gpu.multi_processor_count if gpu else 100      # about as many as a GPU has
    if dtype == torch.float32 or D > 128:
        shapes = FLOAT32
    else:
        shapes = HOPPER if gpu and gpu.major == 9 else AMPERE
    return {shape: max(1, processors * shape.resident // kv_heads) for shape in shapes}


def make_plan(host: np.ndarray, group: int, wanted: Wanted, min_piece: int = MIN_PIECE) -> Plan:
    """Plan the attention of spans, host [3, S] (table_row, q_len, kv_len), on the host. Each shape
    of tile is a launch of its own and must fill the GPU by itself, so the tiles of each shape are
    cut into about as many work items as are wanted of this shape.

    group 4, one span with q_len 50 and kv_len 1050, HOPPER, 8 wanted: 200 query rows in tiles of
    128 and 72. They see 1032 and 1050 positions, each split into 3 pieces. So there are 6 items,
    200 merges and 3 x 200 partial rows.
    """
    table_row, q_len, kv_len = host
    q_start = np.cumsum(q_len) - q_len
    spans = np.stack([table_row, q_len, kv_len, q_start])                       # [4, S]
    shapes = list(wanted)
    # The first shape that holds all rows, or else the last. Of 16, 64 and 128: 50 rows take shape 1 (64).
    shape_of = np.searchsorted([shape.rows for shape in shapes[:-1]], q_len * group)
    launches, merges, partial_rows = [], [NO_MERGES], 0
    for index in sorted(set(shape_of.tolist())):
        shape = shapes[index]
        tiles = cut_into_tiles(spans[:, shape_of == index], group, shape.rows)
        pieces, length = split_context(tiles.kv_end, wanted[shape], min_piece, shape.keys)
        split = pieces > 1
        needed = np.where(split, pieces * tiles.rows(), 0)                      # [n] partial rows
        first_partial = np.where(split, partial_rows + np.cumsum(needed) - needed, -1)
        partial_rows += int(needed.sum())
        launches.append((shape, list_items(tiles, first_partial, pieces, length)))
        if split.any():
            merges.append(list_merges(tiles, first_partial, pieces))
    return Plan(launches, np.concatenate(merges), partial_rows)


class Tiles(NamedTuple):
    """n tiles of one shape: arrays [n]. The names are those of ITEM."""
    first_row: np.ndarray
    end_row: np.ndarray
    table_row: np.ndarray
    shift: np.ndarray
    kv_end: np.ndarray          # the tile's last token sees the positions [0, kv_end)

    def rows(self) -> np.ndarray:
        return self.end_row - self.first_row


def cut_into_tiles(spans: np.ndarray, group: int, tile_rows: int) -> Tiles:
    """Cut the query rows of each span, spans [4, S] (table_row, q_len, kv_len, q_start), into tiles of
    `tile_rows`; the last tile of a span may have fewer. A span of 50 tokens in group 4 has 200
    rows: two tiles of 128 and 72."""
    table_row, q_len, kv_len, q_start = spans
    span, nth = enumerate_each(ceil_div(q_len * group, tile_rows))
    first_row = q_start[span] * group + nth * tile_rows
    end_row = np.minimum(first_row + tile_rows, (q_start + q_len)[span] * group)
    shift = (kv_len - q_len - q_start)[span]
    last_token = (end_row - 1) // group
    return Tiles(first_row, end_row, table_row[span], shift, kv_end=last_token + shift + 1)


def split_context(kv_end: np.ndarray, wanted: int, min_piece: int, keys: int):
    """Into how many pieces to split the positions [0, kv_end) of each tile, and how long they are
    (the last piece of a tile may be shorter): two arrays [n].

    A short prompt over a long history, the main case of a stateful server, has few tiles and would
    leave most of a GPU idle. So a tile gets as many pieces as its share of the `wanted` items. The
    share is rounded down: a GPU that is full and then runs a few items more takes nearly twice as
    long. All pieces but the last have at least `min_piece` positions, and lengths are multiples of
    `keys`, so that no strip straddles two pieces. With min_piece 256 and keys 64:

        one decode at kv_end 16384, wanted 50:          16384 / 50 = 328 -> length 384, 43 pieces
        two tiles at kv_end 12288 and 4096, wanted 8:   shares 6 and 2 -> length 2048 for both
    """
    share = np.maximum(kv_end * wanted // kv_end.sum(), 1)
    length = np.maximum(ceil_div(kv_end, share), min_piece)
    length = ceil_div(length, keys) * keys
    return ceil_div(kv_end, length), length


def list_items(tiles: Tiles, first_partial, pieces, length) -> np.ndarray:
    """The work items [sum(pieces), 8] of n tiles, longest first. first_partial [n]: -1 for a tile
    that is not split."""
    tile, nth = enumerate_each(pieces)
    items = np.zeros(len(tile), ITEM)
    items["first_row"] = tiles.first_row[tile]
    items["end_row"] = tiles.end_row[tile]
    items["first_partial"] = first_partial[tile] + nth * tiles.rows()[tile]     # -1 + 0 if not split
    items["table_row"] = tiles.table_row[tile]
    items["shift"] = tiles.shift[tile]
    items["kv_start"] = nth * length[tile]
    items["kv_end"] = np.minimum(items["kv_start"] + length[tile], tiles.kv_end[tile])
    longest_first = np.argsort(items["kv_start"] - items["kv_end"], kind="stable")
    return items.view(np.int32).reshape(-1, len(ITEM))[longest_first]


def list_merges(tiles: Tiles, first_partial, pieces) -> np.ndarray:
    """The merges [m, 4] of n tiles: one for each query row of a tile that is split."""
    tile, nth = enumerate_each(np.where(pieces > 1, tiles.rows(), 0))
    merges = np.zeros(len(tile), MERGE)
    merges["query_row"] = tiles.first_row[tile] + nth
    merges["first_partial"] = first_partial[tile] + nth
    merges["stride"] = tiles.rows()[tile]
    merges["pieces"] = pieces[tile]
    return merges.view(np.int32).reshape(-1, len(MERGE))


def enumerate_each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number `counts[i]` things of each owner i. [2, 3] -> owners [0, 0, 1, 1, 1] and numbers [0,
    1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def ceil_div(a, b):
    return -(-a // b)


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays -> int32 tensors on the device, in one copy for which the host does not wait.
    The tensors lie one behind another, the first of them aligned."""
    flat = torch.from_numpy(join(arrays))
    flat = flat.pin_memory() if device.type == "cuda" else flat
    return split_like(flat.to(device, non_blocking=True), arrays)


def join(arrays: list[np.ndarray]) -> np.ndarray:
    """All elements, one array behind another: [sum of sizes] int32."""
    return np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="same_kind")


def split_like(flat: Tensor, arrays: list[np.ndarray]) -> list[Tensor]:
    """The tensors that join(arrays) has put into `flat`, in the shapes of the arrays."""
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]


# ---- the kernels ---------------------------------------------------------------------------------

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
    plan = spans.plan(group, kv_heads, D, q.dtype)
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
            TILE_P=PIECES_AT_ONCE, **sizes, enable_fp_fusion=True)      # given, or else triton warns
    return out


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton computes the attention there. If not, the reference does."""
    return triton is not None and (device.type == "cuda" or INTERPRETED) and dtype != torch.float64


@jit
def attention_kernel(q, k_cache, v_cache, slot_table, out, partial_out, partial_lse, items, scale_log2,
                     stride_qt, stride_qh, stride_slot, stride_kh, stride_row, stride_ot, stride_oh,
                     TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                     GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """One work item for one KV head: a tile of query rows against the positions [kv_start, kv_end).

    items [n, 8]: the columns of ITEM. Grid (H_kv, n): the heads of one item run side by side, so
    that they read neighbouring parts of the same slots together. The result goes to `out`, or, if
    the tile is split, to the piece's rows of partial_out [partial_rows, H_kv, D] and partial_lse
    [partial_rows, H_kv]. Registers are scarce, so each column is loaded where it is needed."""
    kv_head, item = tl.program_id(0), items + tl.program_id(1) * 8
    table_row = tl.load(item + 3)
    table = slot_table + table_row.to(tl.int64) * stride_row
    offsets, inside, token, _ = query_rows(item, kv_head, stride_qt, stride_qh, TILE_M, GROUP, D, TILE_D)
    query = tl.load(q + offsets, mask=inside, other=0.0)                # [TILE_M, TILE_D]
    head_start = kv_head.to(tl.int64) * stride_kh
    k_head, v_head = k_cache + head_start, v_cache + head_start
    shift = tl.load(item + 4)
    position = token + shift                                            # [TILE_M]
    kv_start = tl.load(item + 5)
    kv_end = tl.load(item + 6)
    acc, lse = attend_range(query, position, k_head, v_head, table, kv_start, kv_end,
                            scale_log2, stride_slot, TILE_M, TILE_N, D, TILE_D)
    first_partial = tl.load(item + 2)
    offsets, inside, _, exists = query_rows(item, kv_head, stride_ot, stride_oh, TILE_M, GROUP, D, TILE_D)
    if first_partial < 0:
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)
    else:
        rows, dims = tl.arange(0, TILE_M), tl.arange(0, TILE_D)
        entry = (first_partial + rows).to(tl.int64) * tl.num_programs(0) + kv_head
        tl.store(partial_out + entry[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(partial_lse + entry, lse, mask=exists)


@jit
def query_rows(item, kv_head, stride_token, stride_head,
               TILE_M: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """The query rows of an item: their offsets in q or out, and which of these to touch [TILE_M,
    TILE_D]; the token of each row, and whether the row exists [TILE_M].

    The kernel calls this before the loop over K and V and once more behind it. The load of
    first_row is volatile, so that the compiler really computes everything again: kept over the
    loop, it would take a third of the registers."""
    first_row = tl.load(item, volatile=True)
    query_row, dims = first_row + tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    token, head = query_row // GROUP, kv_head * GROUP + query_row % GROUP
    end_row = tl.load(item + 1)
    exists = query_row < end_row
    offsets = (token.to(tl.int64) * stride_token + head * stride_head)[:, None] + dims[None, :]
    return offsets, exists[:, None] & (dims < D)[None, :], token, exists


@jit
def attend_range(query, position, k_head, v_head, table, kv_start, kv_end, scale_log2, stride_slot,
                 TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr):
    """Attention of a tile's queries over the positions [kv_start, kv_end), TILE_N at a time, with
    an online softmax.

    query [TILE_M, TILE_D]; position [TILE_M]: each row sees the positions up to its own. k_head,
    v_head: one KV head of the cache, stride_slot elements from one slot to the next. table: the
    request's row of the slot table. scale_log2: the scale times log2(e), since exp2 is faster than
    exp. Returns the output [TILE_M, TILE_D] in float32, normalised over this range, and
    log2(sum(exp(score))) [TILE_M]: 0 and -inf for a row that sees nothing here.

    The loop takes one strip at a time: the K and V at the slots of TILE_N positions. It computes the
    strip's scores, and raises the maximum so far, `highest`. The sums so far shrink by exp2(old
    maximum - new maximum), and the strip's weights and weighted values are added to them. Strips of
    one position with the scores 1 and 3, after the multiplication by scale_log2: highest 1, total 1;
    then shrink = 2^(1 - 3), total = 0.25 + 1, lse = 3 + log2(1.25), output = (0.25 v1 + v2) / 1.25.

    kv_start is a multiple of TILE_N. kv_end is one, too, or lies beyond every position that the tile's rows
    see. (Rows that do not exist compute garbage, which is never stored.) So the causal mask is the only one,
    and only strips that reach beyond the first row's position need it."""
    columns, dims = tl.arange(0, TILE_N), tl.arange(0, TILE_D)
    seen_by_all = tl.min(position, 0) + 1
    last = tl.maximum(kv_end - 1, 0)        # table entries behind it are garbage: its own is read instead
    highest = tl.full([TILE_M], -1e38, tl.float32)      # not -inf: -inf - -inf is NaN
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    slots = tl.load(table + tl.minimum(kv_start + columns, last))
    for start in range(kv_start, kv_end, TILE_N):
        # Slots are loaded a strip ahead, or the copies of K and V would have to wait for them.
        # Offsets are int64: int32 overflows at a million slots of 16 KV heads of D 128. K is loaded as
        # rows, so that it shares V's offsets.
        next_slots = tl.load(table + tl.minimum(start + TILE_N + columns, last))
        offsets = slots.to(tl.int64)[:, None] * stride_slot + dims[None, :]
        k = tl.load(k_head + offsets, mask=dims[None, :] < D, other=0.0)        # [TILE_N, TILE_D]
        v = tl.load(v_head + offsets, mask=dims[None, :] < D, other=0.0)        # [TILE_N, TILE_D]
        scores = tl.dot(query, k.T, input_precision="ieee")                     # [TILE_M, TILE_N]
        if start + TILE_N > seen_by_all:
            scores = tl.where((start + columns)[None, :] <= position[:, None], scores, float("-inf"))
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
    exp2(lse), TILE_P pieces at a time. merges [m, 4]: the columns of MERGE. Grid (H_kv, m).

    Every query row sees something in the first piece, which holds position 0, so `highest` is
    finite from there on. A merge of zeros, which pads a graph's plan, stores nothing."""
    kv_head, merge = tl.program_id(0), merges + tl.program_id(1) * 4
    query_row = tl.load(merge)
    first_partial = tl.load(merge + 1)
    stride = tl.load(merge + 2)
    pieces = tl.load(merge + 3)
    dims = tl.arange(0, TILE_D)
    highest, total, acc = float("-inf"), 0.0, tl.zeros([TILE_D], tl.float32)
    for first in range(0, pieces, TILE_P):
        piece = first + tl.arange(0, TILE_P)
        entry = (first_partial + piece * stride).to(tl.int64) * tl.num_programs(0) + kv_head
        lse = tl.load(partial_lse + entry, mask=piece < pieces, other=float("-inf"))        # [TILE_P]
        inside = (piece < pieces)[:, None] & (dims < D)[None, :]
        values = tl.load(partial_out + entry[:, None] * D + dims[None, :], mask=inside, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        shrink, weights = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    offsets = ((query_row // GROUP).to(tl.int64) * stride_ot
               + (kv_head * GROUP + query_row % GROUP) * stride_oh + dims)
    tl.store(out + offsets, (acc / total).to(out.dtype.element_ty), mask=dims < tl.where(pieces > 0, D, 0))


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
