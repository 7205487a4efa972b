"""What it costs to recompute a chunk, measured when the engine starts (paper §4.3.1).

    Cost(l) = attention(l) + c      of one more chunk, ending at position l, in a batch that runs

The batch reads the weights and launches its kernels with or without the chunk. So c is the
difference of two batches that both take longer to compute than to read the weights, divided by the
number of chunks between them. In a simulation of OPT-13B on an A100:

    1,024 tokens take 63.5 ms longer than 512 tokens, which is 16 chunks:  c = 4.0 ms

On a CPU one chunk's attention to a long context takes a second. It is linear in the context, so we
stop where it takes long enough to be measured well; RecomputeCost continues the line.

Invariant: no request has KV yet, so we may write to any slot.
"""
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention_kernel import SpanTensors, multi_token_attention
from eviction import RecomputeCost
from kv_pool import KVPool
from model import Model
from rotary_store import rotate_and_store


WELL_MEASURED = 0.1     # seconds; what takes longer needs neither repeats nor longer contexts


@torch.inference_mode()
def measure_recompute_cost(model: Model, pool: KVPool, slot_table: Tensor,
                           repeats: int = 4) -> RecomputeCost:
    """The attention of one chunk at context lengths of chunk_size, twice it, four times it, ..., at
    least three of them if they fit; and the rest, the paper's c. Every entry of slot_table [rows,
    max_context] names some slot."""
    device, max_context = slot_table.device, slot_table.shape[1]
    chunk = min(pool.chunk_size, max_context)
    few, many = (512, 1024) if device.type == "cuda" else (64, 128)         # tokens

    def fastest(run: Callable, *arguments) -> float:
        work = partial(run, *arguments)
        taken = [device_seconds(device, work) for _ in range(2)]    # one compiles and warms up
        while len(taken) < repeats and len(taken) * min(taken) < WELL_MEASURED:
            taken.append(device_seconds(device, work))
        return min(taken)
    small, large = (fastest(all_but_attention, model, pool, count) for count in (few, many))
    added = max(large - small, 1e-9)                    # noise of a busy machine can turn it around
    attention: dict[int, float] = {}
    length = chunk
    while length <= max_context and (len(attention) < 3 or max(attention.values()) < WELL_MEASURED):
        attention[length] = fastest(attention_of_chunk, model, pool, slot_table, chunk, length)
        length *= 2
    return RecomputeCost(attention, rest=added * chunk / (many - few))


def all_but_attention(model: Model, pool: KVPool, count: int):
    """All layers on `count` tokens, but for attention. Dropped chunks need no logits."""
    tokens = torch.arange(count, device=pool.gpu.device)
    slots = tokens % pool.gpu.shape[2]

    def store(layer, q, k, v, rotation):
        k_cache, v_cache = pool.gpu[layer]                              # [slots, H_kv, D] each
        return rotate_and_store(q, k, v, k_cache, v_cache, slots, rotation)
    model(tokens % model.config.vocab_size, tokens % model.config.max_context, store)


def attention_of_chunk(model: Model, pool: KVPool, slot_table: Tensor, chunk: int, length: int):
    """The attention of all layers for one chunk that ends at that context length."""
    config = model.config
    q = torch.zeros(chunk, config.num_heads, config.head_dim, device=pool.gpu.device,
                    dtype=pool.gpu.dtype)                                   # [chunk, H, D]
    spans = SpanTensors.build(row=[0], q_len=[chunk], kv_len=[length], device=slot_table.device)
    for k_cache, v_cache in pool.gpu:                                  # [slots, H_kv, D] each
        multi_token_attention(q, k_cache, v_cache, slot_table, spans)


def device_seconds(device: torch.device, run: Callable) -> float:
    """The seconds that the device works on run().

    On CUDA the GPU first spins for some 4 ms. If the host launches everything in that time, the
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
