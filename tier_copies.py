"""Copies of KV-tokens between the tiers, by one kernel, and the host memory that it reaches.

Neighbouring tokens of a chunk lie in slots anywhere, so a copy moves single tokens. To call the
driver for each would take longer than the copies. So one kernel reads one tier and writes the
other, for all tokens of a layer (on the way out: of all layers). The GPU reaches the host's memory
by itself, if that memory is page-locked: its pages never move. (CUDA and torch call it pinned.)

    copy_tokens     target[:, [9, 2]] = source[:, [20, 21]]     two tokens of place 5 go to slots

Without CUDA torch copies.
"""
from __future__ import annotations      # where triton is absent, `tl.constexpr` is, too

import math
import mmap
import weakref

import torch
from torch import Tensor

from arrays import jit, tl, triton

# Each program keeps a processor of the GPU busy, for which the model's matrix products wait. On an
# H100, copies out by 16 programs made decodes take 1.67 times as long, by 2 programs 1.02 times.
COPYING_PROGRAMS = 2
COPYING_WARPS = 16
TILE_BYTES = 128 * 1024     # in flight per program: so one reached 30 GB/s, two reached 40 to 50


def copy_tokens(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor):
    """target[:, target_rows] = source[:, source_rows]; source and target [n, rows, H_kv, D],
    contiguous: n = 2 for one layer, its K and its V, and 2 more for each further layer; source_rows
    and target_rows [t] int64. On CUDA one of the two tiers is page-locked memory of the host."""
    if not source_rows.is_cuda:
        target.index_copy_(1, target_rows, source.index_select(1, source_rows))
        return
    width = math.prod(source.shape[2:])
    tile_width = triton.next_power_of_2(width)
    tile_tokens = max(1, TILE_BYTES // source.element_size() // tile_width)
    copy_kernel[COPYING_PROGRAMS,](
        source, source_rows, target, target_rows, len(source), len(source_rows), source.shape[1],
        target.shape[1], WIDTH=width, TILE_T=tile_tokens, TILE_W=tile_width,
        num_warps=COPYING_WARPS, enable_fp_fusion=True)         # given, or else triton warns


# One kernel fits all swaps, whatever the values of the arguments and wherever the rows begin.
@jit(do_not_specialize=["halves", "tokens", "source_size", "target_size"],
     do_not_specialize_on_alignment=["source_rows", "target_rows"])
def copy_kernel(source, source_rows, target, target_rows, halves, tokens, source_size, target_size,
                WIDTH: tl.constexpr, TILE_T: tl.constexpr, TILE_W: tl.constexpr):
    """copy_tokens by a few programs that take the tiles in turns. A tile has TILE_T tokens of one
    half: of the K or the V of a layer. source [halves, source_size, WIDTH], target likewise.

        2 halves of 10 tokens, TILE_T 8:    tiles 0 and 1 are K of tokens 0-7 and 8-9, 2 and 3 are V
    """
    tiles = (tokens + TILE_T - 1) // TILE_T
    column = tl.arange(0, TILE_W)[None, :]
    for tile in range(tl.program_id(0), halves * tiles, tl.num_programs(0)):
        half = (tile // tiles).to(tl.int64)
        token = tile % tiles * TILE_T + tl.arange(0, TILE_T)
        source_row = half * source_size + tl.load(source_rows + token, mask=token < tokens, other=0)
        target_row = half * target_size + tl.load(target_rows + token, mask=token < tokens, other=0)
        inside = (token < tokens)[:, None] & (column < WIDTH)
        values = tl.load(source + source_row[:, None] * WIDTH + column, mask=inside)
        tl.store(target + target_row[:, None] * WIDTH + column, values, mask=inside)


def page_locked(shape: tuple[int, ...], dtype: torch.dtype, owner: object) -> Tensor:
    """A tensor in host memory which the GPU reads and writes by itself, for as long as `owner`
    exists. OSError or RuntimeError if there is not enough memory.

    What torch pins comes in powers of two: it takes 128 GB for a tier of 70 GB. Here the tensor's
    storage begins where the locked pages do, since is_pinned() asks about that address."""
    nbytes = math.prod(shape) * dtype.itemsize
    size = max(1, nbytes)
    memory = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)       # whole pages, ours alone
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    cudart, address = torch.cuda.cudart(), flat.data_ptr()
    if error := int(cudart.cudaHostRegister(address, size, 0)):
        raise RuntimeError(f"{size:,} bytes of host memory could not be pinned "
                           f"(CUDA error {error})")
    weakref.finalize(owner, cudart.cudaHostUnregister, address)
    return flat[:nbytes].view(dtype).view(shape)
