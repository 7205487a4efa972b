"""Before each attention: q and k are rotated to their positions, and K and V go into their slots.

Rotary embedding treats dimensions i and i + D/2 of a head as a point in a plane, and turns it by
the token's i-th angle, which is the token's position times a frequency. So q . k depends on the
distance between two tokens and not on where they stand. The cache holds rotated keys.

    D 4, a token whose angles are 90 and 0 degrees:     [1, 2, 3, 4] -> [-3, 2, 1, 4]

A layer without rotary positions rotates nothing; we store its K and V all the same. On a GPU one
kernel does all of this. Torch would launch 18 (in bfloat16): for one token each of them takes
longer to launch than to run.
"""
from __future__ import annotations      # where triton is absent, `tl.constexpr` is, too

import torch
from torch import Tensor

from arrays import jit, runs_triton, tl, triton

Rotation = tuple[Tensor, Tensor]    # cos and sin of each token's angles, [T, D/2] float32
ELEMENTS = 1024                     # of one tile: 8 for each of 128 threads (in bfloat16 16 bytes)


def rotate_and_store(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
                     slots: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate q and k of T tokens, write k and v into the slots, and return q, rotated [T, H, D].

    q               [T, H, D]               tokens may lie apart, as in one projection of q, k, v
    k, v            [T, H_kv, D]            likewise
    k_cache         [num_slots, H_kv, D]    the K of one layer of the GPU cache
    v_cache         [num_slots, H_kv, D]    its V, with the same strides
    slots           [T] int64               where each token's k and v go; contiguous
    rotation        two of [T, D/2]         cos and sin, contiguous; None: nothing is rotated

    Triton computes it wherever it computes the attention; elsewhere the reference does."""
    if not runs_triton(q.device, q.dtype):
        return rotate_and_store_reference(q, k, v, k_cache, v_cache, slots, rotation)
    (T, heads, D), kv_heads = q.shape, k.shape[1]
    rotated = q if rotation is None else torch.empty_like(q)
    cos, sin = rotation or (None, None)
    tile_d = triton.next_power_of_2(D)
    tile_h = triton.cdiv(ELEMENTS, tile_d)
    q_tiles, kv_tiles = (triton.cdiv(n, tile_h) for n in (heads, kv_heads))
    rotate_and_store_kernel[T, kv_tiles if rotation is None else kv_tiles + q_tiles](
        q, k, v, rotated, k_cache, v_cache, slots, cos, sin,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *rotated.stride()[:2],
        *k_cache.stride()[:2],
        HEADS=heads, KV_HEADS=kv_heads, KV_TILES=kv_tiles, D=D, TILE_H=tile_h, TILE_D=tile_d,
        ROTATE=rotation is not None, enable_fp_fusion=True)         # given, or else triton warns
    return rotated


def rotate_and_store_reference(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor,
                               slots: Tensor, rotation: Rotation | None) -> Tensor:
    """The same in plain torch: the specification of the kernel, and what runs on a CPU."""
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by its tokens' angles, cos and sin [T, D/2]. Computed in float32 and
    returned in x's type."""
    cos, sin = cos[:, None], sin[:, None]                                   # [T, 1, D/2]
    a, b = x.chunk(2, dim=-1)                                               # [T, heads, D/2] each
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


@jit
def rotate_and_store_kernel(q, k, v, rotated, k_cache, v_cache, slots, cos, sin,
                            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                            stride_rt, stride_rh, stride_slot, stride_ch,
                            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KV_TILES: tl.constexpr,
                            D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
                            ROTATE: tl.constexpr):
    """A tile is TILE_H heads of one token. Each of the first KV_TILES programs of a token copies a
    tile of k and one of v; each of the others, which there are only with ROTATE, a tile of q. Grid
    (T, programs). Offsets of tokens and slots are int64.

        32 heads, 8 KV heads, D 128: TILE_H 8; program 0 copies k and v, programs 1 to 4 copy q"""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if ROTATE:
        cos += token * (D // 2)
        sin += token * (D // 2)
    if tile < KV_TILES:
        slot = tl.load(slots + token)
        copy_heads(k + token * stride_kt, stride_kh, k_cache + slot * stride_slot, stride_ch,
                   tile, cos, sin, KV_HEADS, D, TILE_H, TILE_D, ROTATE)
        copy_heads(v + token * stride_vt, stride_vh, v_cache + slot * stride_slot, stride_ch,
                   tile, cos, sin, KV_HEADS, D, TILE_H, TILE_D, False)
    else:
        copy_heads(q + token * stride_qt, stride_qh, rotated + token * stride_rt, stride_rh,
                   tile - KV_TILES, cos, sin, HEADS, D, TILE_H, TILE_D, ROTATE)


@jit
def copy_heads(source, stride_source, target, stride_target, tile, cos, sin, HEADS: tl.constexpr,
               D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr, ROTATE: tl.constexpr):
    """Copy a tile of the heads of one token from source to target. With ROTATE, turn them on the
    way: each dimension is loaded together with its partner, half a head away."""
    heads, dims = tile * TILE_H + tl.arange(0, TILE_H), tl.arange(0, TILE_D)
    inside = (heads < HEADS)[:, None] & (dims < D)[None, :]
    source += heads[:, None] * stride_source                            # [TILE_H, 1]
    x = tl.load(source + dims[None, :], mask=inside)                    # [TILE_H, TILE_D]
    if ROTATE:
        partner = tl.load(source + ((dims + D // 2) % D)[None, :], mask=inside)
        c = tl.load(cos + dims % (D // 2))                              # [TILE_D]
        s = tl.load(sin + dims % (D // 2))
        x = x * c[None, :] + partner * tl.where(dims < D // 2, -s, s)[None, :]
    target += heads[:, None] * stride_target
    tl.store(target + dims[None, :], x.to(target.dtype.element_ty), mask=inside)
