"""Attention over scattered slots, computed in other ways: the baselines of the paper's Figure 12.

A `Scene` holds queries and a KV cache. Each baseline is a function that prepares what a server
could have prepared before the step, and returns run(n): the n-th call of the attention alone.

    ours                 the kernel of attention_kernel.py: looks up every slot
    contiguous           the ideal: each context lies in one piece of memory, as in no server
    copy-out             the paper's first straw man: copies contexts into one piece, then attends
    a round per token    the paper's second: a kernel for one query per request, run for each
    packed               transformers' "paged|sdpa": all contexts in one sequence, under one mask
    FA3, FlashInfer      other libraries' kernels, where they are installed

Invariant: on the same scene every run returns the same attention
(tests/test_microbench.py). The exception is cuDNN: it has no causal mask for queries at the
end of a longer context, so its run has none.
"""
from contextlib import nullcontext
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from attention_kernel import SpanTensors, multi_token_attention
from checkpoint import PRESETS

Run = Callable[[int], torch.Tensor]     # run(n), n = 0, 1, ...


class Scene:
    """Random queries of several requests, and their contexts in a cache whose slots are shuffled.

    A GPU would keep one small set of contexts in its L2 cache, and a second call would
    not read memory. So the scene has several sets, together larger than any L2.
    Successive calls read different sets.
    """

    def __init__(self, device: str, dtype: torch.dtype, model: str, q_len: list[int],
                 kv_len: list[int], seed: int, shuffled: bool = True):
        """model: a preset that names the heads. q_len, kv_len: of each request. shuffled: False
        puts the slots in the order of the positions."""
        self.model, self.q_len, self.kv_len = model, q_len, kv_len
        shape = PRESETS[model]
        heads, kv_heads, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
        tokens = sum(kv_len)
        token_bytes = 2 * kv_heads * D * dtype.itemsize
        sets = 1 if device == "cpu" else 1 + 2**28 // (tokens * token_bytes)
        num_slots = sets * tokens

        generator = torch.Generator(device).manual_seed(seed)
        if shuffled:
            order = torch.randperm(num_slots, generator=generator, device=device)
        else:
            order = torch.arange(num_slots, device=device)
        self.slots = order.int().split(tokens)                          # of each set: [tokens]
        self.slot_tables = [torch.nn.utils.rnn.pad_sequence(part.split(kv_len), batch_first=True)
                            for part in self.slots]               # of each set: [S, longest kv_len]

        def random(*size):
            return torch.randn(*size, generator=generator, dtype=dtype, device=device)
        self.q = random(sum(q_len), heads, D)                           # [T, H, D]
        self.k = random(num_slots, kv_heads, D)                         # [num_slots, H_kv, D]
        self.v = random(num_slots, kv_heads, D)                         # [num_slots, H_kv, D]
        self.spans = SpanTensors.build(range(len(q_len)), q_len, kv_len, device)

        # The least that any implementation must do: read the KV and q, write the output; two
        # products, QK and PV, over the positions that each query sees.
        self.moved = tokens * token_bytes + 2 * self.q.numel() * dtype.itemsize             # bytes
        seen = sum(q * (2 * kv - q + 1) // 2 for q, kv in zip(q_len, kv_len))
        self.flops = 4 * heads * D * seen

    def set_of(self, n: int) -> int:
        return n % len(self.slots)

    def gathered(self, n: int) -> list[torch.Tensor]:
        """K and V of call n in contiguous memory, [S, H_kv, kv_len, D]. All kv_len must be
        equal."""
        contiguous = [cache.index_select(0, self.slots[self.set_of(n)])
                      for cache in (self.k, self.v)]
        return [x.unflatten(0, (-1, self.kv_len[0])).transpose(1, 2) for x in contiguous]

    def queries(self) -> torch.Tensor:
        """The queries as [S, H, q_len, D]. All q_len must be equal."""
        return self.q.unflatten(0, (-1, self.q_len[0])).transpose(1, 2)


# ---- ours, the ideal, and the paper's straw men

def ours(scene: Scene) -> Run:
    def run(n):
        slot_table = scene.slot_tables[scene.set_of(n)]
        # [T, H, D]
        return multi_token_attention(scene.q, scene.k, scene.v, slot_table, scene.spans)
    return run


def torch_attention(scene: Scene, k, v, backend: SDPBackend | None,
                    masked: bool = True) -> torch.Tensor:
    """torch's attention over k and v [S, H_kv, kv_len, D] -> [S, H, q_len, D].

    backend: None lets torch choose. masked: False leaves out the mask
    that only q_len < kv_len needs."""
    q_len, kv_len = scene.q_len[0], scene.kv_len[0]
    mask = causal_lower_right(q_len, kv_len) if masked and q_len != kv_len else None
    with sdpa_kernel(backend) if backend else nullcontext():
        return F.scaled_dot_product_attention(
            scene.queries(), k, v, attn_mask=mask, is_causal=q_len == kv_len > 1,
            enable_gqa=scene.q.shape[1] != k.shape[1])


def contiguous(scene: Scene, caches: list, backend: SDPBackend | None, masked: bool = True) -> Run:
    """caches: of each set, K and V that the scene has `gathered` before the measurement."""
    def run(n):
        k, v = caches[scene.set_of(n)]
        return torch_attention(scene, k, v, backend, masked)
    return run


def copy_out(scene: Scene, backend: SDPBackend | None) -> Run:
    def run(n):
        k, v = scene.gathered(n)
        return torch_attention(scene, k, v, backend)
    return run


def rounds(scene: Scene) -> Run:
    """One call for the first query of every request, one for the second, and so on:
    PagedAttention's kernel takes one query per request. All q_len must be equal."""
    requests, q_len = len(scene.q_len), scene.q_len[0]
    spans = []
    for nth in range(q_len):
        seen = [kv_len - q_len + 1 + nth for kv_len in scene.kv_len]
        spans.append(SpanTensors.build(range(requests), [1] * requests, seen, scene.q.device))
    out = torch.empty_like(scene.q)
    queries = scene.q.unflatten(0, (requests, q_len)).unbind(1)         # q_len times [S, H, D]
    outputs = out.unflatten(0, (requests, q_len)).unbind(1)             # the same views of out

    def run(n):
        slot_table = scene.slot_tables[scene.set_of(n)]
        for span, q, output in zip(spans, queries, outputs):
            multi_token_attention(q, scene.k, scene.v, slot_table, span, out=output)
        return out                                                      # [T, H, D]
    return run


# ---- other libraries

def packed(scene: Scene) -> Run:
    """The contexts of all requests form one sequence, and a mask keeps
    each query to its own context.

    transformers' continuous batching does this with attention
    "paged|sdpa". Any q_len and kv_len."""
    requests = torch.arange(len(scene.q_len))
    request_of_query = requests.repeat_interleave(torch.tensor(scene.q_len))                # [T]
    request_of_key = requests.repeat_interleave(torch.tensor(scene.kv_len))                 # [K]
    position_of_query = torch.cat([torch.arange(kv - q, kv)
                                   for q, kv in zip(scene.q_len, scene.kv_len)])
    position_of_key = torch.cat([torch.arange(kv) for kv in scene.kv_len])
    own = request_of_query[:, None] == request_of_key                                       # [T, K]
    seen = own & (position_of_query[:, None] >= position_of_key)                            # [T, K]
    mask = torch.zeros(seen.shape, dtype=scene.q.dtype)
    mask.masked_fill_(~seen, torch.finfo(scene.q.dtype).min)
    mask = mask.to(scene.q.device)[None, None]                                        # [1, 1, T, K]
    group = scene.q.shape[1] // scene.k.shape[1]

    def gather(cache, n):
        keys = cache.index_select(0, scene.slots[scene.set_of(n)])              # [K, H_kv, D]
        return keys.transpose(0, 1)[None].repeat_interleave(group, 1)           # [1, H, K, D]

    def run(n):
        q = scene.q.transpose(0, 1)[None]                                       # [1, H, T, D]
        output = F.scaled_dot_product_attention(q, gather(scene.k, n), gather(scene.v, n),
                                                attn_mask=mask)
        return output[0].transpose(0, 1)                                        # [T, H, D]
    return run


def flash_attention_3(scene: Scene, caches: list) -> Run:
    from flash_attn_interface import flash_attn_func

    def run(n):
        k, v = caches[scene.set_of(n)]
        q, k, v = (x.transpose(1, 2) for x in (scene.queries(), k, v))
        return flash_attn_func(q, k, v, causal=True)
    return run


def flashinfer(scene: Scene) -> Run:
    """FlashInfer's kernel for scattered KV. In units of one token its
    table is a slot table like ours."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    (_, heads, D), kv_heads = scene.q.shape, scene.k.shape[1]
    q_start, kv_start = (torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
                         for lengths in (scene.q_len, scene.kv_len))                    # [S + 1]
    in_last_unit = torch.ones_like(kv_start[1:])                                        # [S]
    wrappers = []
    for slots in scene.slots:
        workspace = torch.empty(2**27, dtype=torch.uint8, device="cuda")
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace)
        wrapper.plan(q_start, kv_start, slots, in_last_unit, heads, kv_heads, D, 1,
                     causal=True, q_data_type=scene.q.dtype)
        wrappers.append(wrapper)
    return lambda n: wrappers[scene.set_of(n)].run(scene.q, (scene.k[:, None], scene.v[:, None]))


def rivals(scene: Scene) -> dict[str, Run]:
    """By name, every run that works here. All q_len must be equal, and all kv_len.

    The other libraries need CUDA. If one is absent or refuses the scene,
    we say so and leave it out."""
    caches = [scene.gathered(n) for n in range(len(scene.slots))]
    on_cuda = scene.q.is_cuda
    flash = SDPBackend.FLASH_ATTENTION if on_cuda else None
    runs = {"ours": ours(scene),
            "contiguous": contiguous(scene, caches, flash),
            "copy-out": copy_out(scene, flash)}
    if not on_cuda:
        return runs
    others = {
        "contiguous, cuDNN": lambda: contiguous(scene, caches, SDPBackend.CUDNN_ATTENTION,
                                                masked=False),
        "contiguous, FA3": lambda: flash_attention_3(scene, caches),
        "FlashInfer, page size 1": lambda: flashinfer(scene),
    }
    for name, make in others.items():
        try:
            run = make()
            run(0)
        except (ImportError, RuntimeError, TypeError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
        else:
            runs[name] = run
    return runs
