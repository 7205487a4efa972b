"""How a batch is cut for the attention kernel: spans into tiles, and tiles into work items.

A GPU has many processors (an H100 has 132). A program is one run of a kernel's body on one of them,
by the four or eight warps that it gets. To keep all processors busy, the host plans once per step:

    a span                        q_len 50, kv_len 1050, 4 query heads per KV head: 200 query rows
    is cut into tiles             of at most 128 query rows: rows 0-127 and rows 128-199
    and these into work items     a tile and a piece of the context that it sees: 3 pieces each

A program computes one work item for one KV head, and takes the positions in strips. Most tiles have
one item, which sees all positions and writes to `out`. A tile that sees a long context is split
into several. Each of these leaves a partial result, one partial row for each query row of the tile.
A second kernel merges these: a merge is for one query row of a split tile.

`group` query heads share a KV head. A query row is a token and one of these heads: row r is token
r // group of the packed queries, head r % group of the group. With group 4, row 22 is token 5, head
2 of a group: for KV head 0 this is query head 2, for KV head 1 it is query head 6.

Invariant: every query row meets every position that it sees in exactly one work item.
"""
from typing import NamedTuple

import numpy as np
import torch

from arrays import enumerate_each


class TileShape(NamedTuple):
    """What one program holds at a time: `rows` query rows against a strip of `keys` positions."""
    rows: int
    keys: int
    warps: int
    stages: int         # K and V are copied stages - 1 strips ahead
    resident: int       # programs that a processor runs at a time: for D 128, on an H100 or A100


# A span takes the first shape that holds all its rows, or else the last. We found these shapes by
# compiling: no register is spilled, and copies of further strips go on while one is used (with two
# stages they would wait for its end). Hopper's tensor cores want 64 rows and more, and its shared
# memory holds 227 KB. Elsewhere all shapes stay within the 99 KB of consumer GPUs, up to D 128.
# Exact float32 has no tensor cores: it is for checking. Its small shape serves D above 128, too.
HOPPER = TileShape(16, 64, 4, 3, 3), TileShape(64, 64, 4, 3, 2), TileShape(128, 128, 8, 3, 1)
AMPERE = TileShape(16, 64, 4, 3, 2), TileShape(64, 32, 4, 4, 2), TileShape(128, 32, 8, 4, 1)
FLOAT32 = (TileShape(16, 32, 8, 2, 3),)
Wanted = dict[TileShape, int]       # see wanted_items
MIN_PIECE = 256                     # positions: finer pieces cost more to merge than they gain


class WorkItem(NamedTuple):
    """A tile and a piece of its context. On the host each field is a column of an array [n, 8]; the
    kernel has a pointer to each. Items of zeros do nothing: they fill up a graph's plan."""
    first_query_row: int    # the tile's query rows are [first_query_row, end_query_row)
    end_query_row: int
    first_partial: int      # the partial row of first_query_row; -1: not split, so write to `out`
    table_row: int          # the span's row of the slot table
    shift: int              # a token's position minus its index in the packed queries: 1000 - 7
    kv_start: int           # this item attends to the positions [kv_start, kv_end)
    kv_end: int
    unused: int = 0         # so that every item begins at a multiple of 16 bytes


class Merge(NamedTuple):
    """One query row of a split tile: [m, 4] on the host, as above. Merges of zeros likewise."""
    query_row: int
    first_partial: int  # its partial row in the first piece
    stride: int         # partial rows from one piece to the next
    pieces: int         # how many there are


ITEM = np.dtype([(name, np.int32) for name in WorkItem._fields])
MERGE = np.dtype([(name, np.int32) for name in Merge._fields])
NO_ITEMS = np.zeros((0, len(WorkItem._fields)), np.int32)
NO_MERGES = np.zeros((0, len(Merge._fields)), np.int32)


class Plan(NamedTuple):
    """Which program computes what, in every layer of a step. int32 arrays on the host when planned,
    tensors on the device when uploaded."""
    launches: list[tuple]       # (TileShape, work items [n, 8]) for each shape that occurs
    merges: np.ndarray          # [m, 4]
    partial_rows: int

    def arrays(self) -> list:
        return [*(items for _, items in self.launches), self.merges]

    def with_arrays(self, arrays) -> "Plan":
        """The same plan with these in place of its arrays()."""
        *items, merges = arrays
        launches = [(shape, moved) for (shape, _), moved in zip(self.launches, items)]
        return self._replace(launches=launches, merges=merges)

    def padded(self, size: "PlanSize") -> "Plan":
        """The same plan, filled up with zeros to that size. ValueError if it is larger."""
        planned = dict(self.launches)
        launches = [(shape, with_zeros(planned.get(shape, NO_ITEMS), n)) for shape, n in size.items]
        return Plan(launches, with_zeros(self.merges, size.merges), size.partial_rows)


def with_zeros(array: np.ndarray, length: int) -> np.ndarray:
    """The array [n, columns] with zeros behind it, [length, columns]. (np.pad takes 40 us.)"""
    longer = np.zeros((length, array.shape[1]), array.dtype)
    longer[:len(array)] = array
    return longer


# ---- planning: once per step, on the host --------------------------------------------------------

def wanted_items(kv_heads: int, D: int, dtype: torch.dtype, device: torch.device) -> Wanted:
    """The tile shapes for heads of D dimensions on that device, the smallest first, and how many
    work items of each, per KV head, should fill it. An H100 with 8 KV heads runs 3 programs of the
    smallest shape on each of 132 processors: 132 * 3 // 8 = 49. (A D below 128 has room for more.)
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    processors = gpu.multi_processor_count if gpu else 100      # about as many as a GPU has
    shapes: tuple[TileShape, ...] = FLOAT32
    if dtype != torch.float32 and D <= 128:
        shapes = HOPPER if gpu and gpu.major == 9 else AMPERE
    return {shape: max(1, processors * shape.resident // kv_heads) for shape in shapes}


def make_plan(host: np.ndarray, group: int, wanted: Wanted, min_piece: int = MIN_PIECE) -> Plan:
    """Plan the attention of spans, host [3, S] (table_row, q_len, kv_len). Each shape of tile is a
    launch of its own and must fill the GPU by itself, so the tiles of each shape are cut into about
    as many work items as are wanted of this shape.

    group 4, one span with q_len 50 and kv_len 1050, HOPPER, 8 wanted: 200 query rows in tiles of
    128 and 72. They see 1032 and 1050 positions, each split into 3 pieces (of 344 and 263, rounded
    up to strips of 128: 384). So there are 6 items, 200 merges and 3 x 200 partial rows."""
    table_row, q_len, kv_len = host
    q_start = np.cumsum(q_len) - q_len
    spans = np.stack([table_row, q_len, kv_len, q_start])                       # [4, S]
    shapes = list(wanted)
    # The first shape that holds all rows, or else the last: of 16, 64 and 128, 50 rows take 64.
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
    """n tiles of one shape: arrays [n]. The names are those of WorkItem."""
    first_query_row: np.ndarray
    end_query_row: np.ndarray
    table_row: np.ndarray
    shift: np.ndarray
    kv_end: np.ndarray          # the tile's last token sees the positions [0, kv_end)

    def rows(self) -> np.ndarray:
        return self.end_query_row - self.first_query_row


def cut_into_tiles(spans: np.ndarray, group: int, tile_rows: int) -> Tiles:
    """Cut the query rows of each span, spans [4, S] (table_row, q_len, kv_len, q_start), into tiles
    of `tile_rows`; the last tile of a span may have fewer. A span of 50 tokens in group 4 has 200
    rows: two tiles of 128 and 72."""
    table_row, q_len, kv_len, q_start = spans
    span, nth = enumerate_each(ceil_div(q_len * group, tile_rows))
    first_query_row = q_start[span] * group + nth * tile_rows
    end_query_row = np.minimum(first_query_row + tile_rows, (q_start + q_len)[span] * group)
    shift = (kv_len - q_len - q_start)[span]
    last_token = (end_query_row - 1) // group
    kv_end = last_token + shift + 1
    return Tiles(first_query_row, end_query_row, table_row[span], shift, kv_end)


def split_context(kv_end: np.ndarray, wanted: int, min_piece: int,
                  keys: int) -> tuple[np.ndarray, np.ndarray]:
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


def ceil_div(a, b):
    return -(-a // b)


def list_items(tiles: Tiles, first_partial, pieces, length) -> np.ndarray:
    """The work items [sum(pieces), 8] of n tiles, longest first. first_partial [n]: -1 for a tile
    that is not split."""
    tile, nth = enumerate_each(pieces)
    items = np.zeros(len(tile), ITEM)
    items["first_query_row"] = tiles.first_query_row[tile]
    items["end_query_row"] = tiles.end_query_row[tile]
    items["first_partial"] = first_partial[tile] + nth * tiles.rows()[tile]    # -1 + 0 if not split
    items["table_row"] = tiles.table_row[tile]
    items["shift"] = tiles.shift[tile]
    items["kv_start"] = nth * length[tile]
    items["kv_end"] = np.minimum(items["kv_start"] + length[tile], tiles.kv_end[tile])
    longest_first = np.argsort(items["kv_start"] - items["kv_end"], kind="stable")
    return items.view(np.int32).reshape(-1, len(WorkItem._fields))[longest_first]


def list_merges(tiles: Tiles, first_partial, pieces) -> np.ndarray:
    """The merges [m, 4] of n tiles: one for each query row of a tile that is split."""
    tile, nth = enumerate_each(np.where(pieces > 1, tiles.rows(), 0))
    merges = np.zeros(len(tile), MERGE)
    merges["query_row"] = tiles.first_query_row[tile] + nth
    merges["first_partial"] = first_partial[tile] + nth
    merges["stride"] = tiles.rows()[tile]
    merges["pieces"] = pieces[tile]
    return merges.view(np.int32).reshape(-1, len(Merge._fields))


# ---- the size of a captured graph's plan: it launches as many programs each time -----------------

class PlanSize(NamedTuple):
    """How large the plans of some batches can become."""
    items: list[tuple[TileShape, int]]      # (shape, work items) of each shape that can occur
    merges: int
    partial_rows: int


def largest_plan(tokens: int, longest: int, group: int, wanted: Wanted) -> PlanSize:
    """A size for the plan of any batch of `tokens` tokens, if no span has more than `longest`.

    64 decodes (longest 1), group 4, HOPPER, n = 10: 64 tiles of 4 query rows need at most 64 + 10
    items, 5 x 4 merges and 10 x 4 partial rows."""
    total, most = tokens * group, longest * group   # query rows: of all spans, and of the longest
    last = list(wanted)[-1]
    items, merges, partial_rows, smaller = [], 0, 0, 0
    for shape, n in wanted.items():
        # A span that takes this shape has a token, and more rows than the smaller shape holds.
        fewest = max(group, smaller + 1)
        smaller = shape.rows
        if fewest > most or fewest > shape.rows and shape != last:
            continue                                # no span takes it
        tiles = total // fewest                     # one for each span ...
        if most > shape.rows and shape == last:
            tiles += total // shape.rows            # ... and more for spans that fill several
        tallest = min(shape.rows, most)
        # A tile is one item, or has at most as many pieces as its share of the n wanted items (see
        # split_context): the split tiles have at most n pieces together.
        items.append((shape, tiles + n))
        # To be split, a tile needs a share of two or more. So at most n // 2 tiles are.
        merges += min(tiles, n // 2) * tallest
        # Each piece leaves a partial row for each query row of its tile.
        partial_rows += n * tallest
    return PlanSize(items, min(merges, total), partial_rows)    # a query row is merged once
