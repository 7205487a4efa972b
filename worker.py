"""Runs a batch: inputs, transfers, forward, sampling (paper §4.2-4.4). Below this line there are tensors, above it integers.

All spans of a batch are packed into one ragged sequence of T tokens and go through the model together, whatever they mean.
In each layer: store the new K and V into their slots, wait for that layer's swap-ins, attend.

    tokens     a0 a1 a2 a3 | a16 ... a22 | b31          [T]
    positions   0  1  2  3 |  16 ...  22 |  31          [T]   and slots = slot_table[row, position]
    sampled at                         ^     ^                where a span ends its request's context

A step with no spans only moves chunks. The token of (seed, position) never depends on what else is in the batch."""
import os
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from attention_kernel import SpanTensors, multi_token_attention, upload
from eviction import RecomputeCost
from kv_cache import KVPool
from model import load_model, random_model
from sampling import sample
from scheduler import Batch, Result, Span

SMALL_MODEL = 10_000_000    # parameters: below, threads on a CPU wait for one another longer than they work


class Worker:
    """Owns the model, the KV pool and the device's slot table."""

    def __init__(self, model, num_slots: int, num_places: int, chunk_size: int, rows: int, max_context: int, pipeline: bool = True):
        config, parameter = model.config, next(model.parameters())
        self.model, self.device, self.dtype, self.chunk_size = model, parameter.device, parameter.dtype, chunk_size
        self.pool = KVPool(config.num_layers, config.num_kv_heads, config.head_dim, num_slots, num_places, chunk_size,
                           self.device, self.dtype, pipeline)
        self.num_slots, self.num_places, self.max_context = num_slots, num_places, max_context
        self.vocab_size, self.stop_ids = config.vocab_size, config.eos_ids
        anywhere = torch.arange(max_context, dtype=torch.int32, device=self.device) % num_slots      # for the profile
        self.slot_table = anywhere.repeat(rows, 1)               # [rows, max_context]

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Result:
        """Runs the batch's spans and starts its transfers. With nothing to compute it waits for a copy in flight, if there is one."""
        self._update_table(batch.table_updates)
        inputs = self._inputs(batch.spans) if batch.spans else None      # uploaded before the copy engines get busy
        self.pool.swap_in(batch.swap_in)
        self.pool.swap_out(batch.swap_out)
        tokens, logprobs = self._run(batch.spans, *inputs) if inputs else ([], None)
        return Result(tokens, self.pool.landed(wait=not inputs), logprobs)

    def _update_table(self, updates):
        if updates:
            rows = np.concatenate([np.full(len(slots), row) for row, _, slots in updates])
            positions = np.concatenate([np.arange(start, start + len(slots)) for _, start, slots in updates])
            slots = np.concatenate([slots for _, _, slots in updates])
            rows, positions, slots = upload([rows, positions, slots], self.device)
            self.slot_table[rows, positions] = slots

    def _inputs(self, spans: list[Span]):
        """The packed batch: tokens, positions, slots [T] each, and the spans as the kernel takes them."""
        row = [span.request.conversation.row for span in spans]
        q_len = [span.end - span.start for span in spans]
        tokens = np.concatenate([span.request.conversation.tokens[span.start:span.end] for span in spans])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        tokens, positions, rows = upload([tokens, positions, np.repeat(row, q_len)], self.device)                # [T] each
        tensors = SpanTensors.build(row=row, q_len=q_len, kv_len=[span.end for span in spans], device=self.device)
        if self.device.type == "cuda":
            heads = self.model.config.num_kv_heads
            tensors.plan(self.model.config.num_heads // heads, heads, self.dtype)
        return tokens, positions, self.slot_table[rows, positions].long(), tensors

    def _run(self, spans, tokens, positions, slots, tensors: SpanTensors) -> tuple[list[int], list | None]:
        """One forward over all spans; a token for each span that samples, and the log probabilities that were asked for."""
        def attend(layer, q, k, v):                              # q [T, H, D], k and v [T, H_kv, D]
            self.pool.store(layer, slots, k, v)
            self.pool.wait(layer)
            return multi_token_attention(q, *self.pool.gpu[layer], self.slot_table, tensors)      # [T, H, D]

        hidden = self.model(tokens, positions, attend)           # [T, width]
        ends = np.cumsum([span.end - span.start for span in spans]) - 1
        last = [int(end) for end, span in zip(ends, spans) if span.samples]
        if not last:
            return [], None
        logits = self.model.logits(hidden[last])                 # [N, vocab]
        return sample(logits, [span.request for span in spans if span.samples])

    @torch.inference_mode()
    def profile(self, repeats: int = 3) -> RecomputeCost:
        """Measures what recomputing one chunk costs: attention at context lengths of powers of two, and everything else."""
        config, chunk = self.model.config, min(self.chunk_size, self.max_context)
        q = torch.zeros(chunk, config.num_heads, config.head_dim, device=self.device, dtype=self.dtype)
        tokens, positions = torch.arange(chunk, device=self.device) % config.vocab_size, torch.arange(chunk, device=self.device)
        lengths = [chunk]
        while 2 * lengths[-1] <= self.max_context:
            lengths.append(2 * lengths[-1])

        def attention(length):
            spans = SpanTensors.build(row=[0], q_len=[chunk], kv_len=[length], device=self.device)
            return config.num_layers * self._seconds(lambda: multi_token_attention(q, *self.pool.gpu[0], self.slot_table, spans), repeats)

        rest = self._seconds(lambda: self.model(tokens, positions, lambda layer, q, k, v: q), repeats)
        return RecomputeCost({length: attention(length) for length in lengths}, rest)

    def _seconds(self, run, repeats):
        def once():
            start = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start
        once()
        return median(once() for _ in range(repeats))


def load_worker(config, directory: Path | None) -> Worker:
    """The worker that an engine.Config asks for, with the checkpoint in `directory`, or with made-up weights where there is none."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use 'cpu'")
    model = (load_model(directory, device, getattr(torch, dtype)) if directory else
             random_model(config.model, device, getattr(torch, dtype)))
    if device == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)                                 # of the process; tensors this small are not worth sharing
    slots, cpu_tokens = tier_sizes(config, model)
    try:
        return Worker(model, slots, cpu_tokens // config.chunk_size, config.chunk_size, config.max_running,
                      min(model.config.max_context, slots), pipeline=not config.no_pipeline)
    except RuntimeError as error:                                # out of memory, here or there
        raise ValueError(f"tiers of {slots} and {cpu_tokens} tokens cannot be had, choose smaller ones: {error}") from error


def tier_sizes(config, model) -> tuple[int, int]:
    """Tokens of the GPU and the CPU tier: as given, else nine tenths of the GPU's free memory and a quarter of the host's.
    Where the host's memory is both tiers, the first has room for sixteen whole contexts, the second for four times that."""
    parameter, shape = next(model.parameters()), model.config
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * parameter.element_size()
    host = host_memory() // 4 // token_bytes
    if parameter.device.type == "cuda":
        gpu, cpu = int(0.9 * torch.cuda.mem_get_info(parameter.device)[0]) // token_bytes, host
    else:
        gpu = min(16 * shape.max_context, host // 5)
        cpu = 4 * gpu
    gpu = gpu if config.gpu_cache_tokens is None else config.gpu_cache_tokens
    cpu = cpu if config.cpu_cache_tokens is None else config.cpu_cache_tokens
    if gpu < 2:
        raise ValueError(f"no memory is left for the cache: {gpu} tokens of {token_bytes} bytes; choose a smaller model or gpu_cache_tokens >= 2")
    return gpu, cpu


def host_memory() -> int:
    """Bytes of the machine's memory; where the system does not tell, a small machine's."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):                         # Windows
        return 8 * 2**30
