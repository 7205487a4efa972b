"""From a config.Config to a worker: the model, the sizes of its tiers, and what makes it fast.

    Config -> load_worker:   checkpoint, or random weights -> Model
                             tier_sizes                    -> how many slots and places
                             speed_up                      -> the same Worker, faster

Without `speed_up` the worker gives the same tokens, up to rounding, but later. On CUDA, `fuse`
compiles the small kernels between two attentions, and CUDA graphs spare the host the launches of a
small batch. On a CPU, cpu_linear.py stores the weights of a larger model in the order in which they
are multiplied.
"""
import gc
import os
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import cpu_linear
from arrays import runs_triton
from attention_plan import wanted_items
from checkpoint import NOT_PARAMETERS, load_model, random_model, read_tensors, weight_files
from graphs import MOST_REPLAYED, Graphs
from model import ALONE, Alone, Attend, Layer, Model
from sampling import keep_top_p
from worker import Packed, Worker, table_changes

SMALL_MODEL = 10_000_000    # parameters; below, threads on a CPU mostly wait for one another


def load_worker(config, directory: Path | None, ranks: Alone = ALONE,
                kind: Callable = Worker) -> Worker:
    """The worker that a config.Config asks for, with the checkpoint in `directory`; None: with
    random weights. ranks, kind: see parallel.py. ValueError, with the remedy, where the machine
    cannot do it."""
    device, dtype = config.device, config.dtype
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use 'cpu'")
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else dtype_on_cpu(directory)
    dtype = getattr(torch, dtype)
    if device == "cuda":
        gc.collect()    # a closed engine that is in a reference cycle has its GPU memory until then
    try:
        model = (load_model(directory, device, dtype, ranks) if directory else
                 random_model(config.model, device, dtype, config.max_context, ranks=ranks))
    except (MemoryError, RuntimeError) as error:
        raise ValueError("the weights do not fit into memory, choose a smaller model: "
                         f"{error}") from error
    small = is_small(model)
    if device == "cpu" and small:
        torch.set_num_threads(1)                        # in the whole process
    if device == "cpu" and dtype == torch.float16:
        # On a CPU float16 is for weights alone: all else is in float32, and so are the weights
        # where packing does not pay, or FBGEMM is missing.
        if small or config.eager or not cpu_linear.multiplies_float16():
            model.float()
        else:
            cpu_linear.keep_float16(model)
    slots, cpu_tokens = ranks.smallest(tier_sizes(config, model, ranks.size))
    try:
        worker = kind(model, slots, cpu_tokens // config.chunk_size, config.chunk_size,
                      config.max_running, min(model.config.max_context, slots),
                      pipeline=not config.no_pipeline)
    except (OSError, RuntimeError) as error:            # out of memory, on the GPU or on the host
        raise ValueError(f"tiers of {slots} and {cpu_tokens} tokens cannot be allocated, choose a "
                         f"smaller gpu_cache_tokens or cpu_cache_tokens: {error}") from error
    if not config.eager:
        speed_up(worker, small)
    return worker


def dtype_on_cpu(directory: Path | None) -> str:
    """In which number format a CPU keeps the weights of a checkpoint: float16 if they are stored in
    it, or in GGUF, which has rounded them far more; else float32. (A checkpoint that cannot be read
    is load_model's to refuse.)"""
    if directory and cpu_linear.multiplies_float16():
        if directory.is_file():                         # GGUF
            return "float16"
        with suppress(ValueError):
            tensors = (tensor for file in weight_files(directory)
                       for name, tensor in read_tensors(file, {}) if not name.endswith(NOT_PARAMETERS))
            if all(tensor.dtype == torch.float16 for tensor in tensors):
                return "float16"
    return "float32"


def is_small(model: Model) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL


def tier_sizes(config, model: Model, processes: int) -> tuple[int, int]:
    """Tokens of the GPU tier and of the CPU tier: as given, or else by default. ValueError if no
    memory is left.

    On CUDA the GPU tier takes nine tenths of the free memory of the GPU, but room for at most a
    thousand whole contexts. The CPU tier is four times as large as the GPU tier, given or not, but
    takes at most a quarter of the host's memory; `processes` of one model share that quarter. On a
    CPU both tiers lie in that quarter, unless their sizes are given: so the GPU tier takes a fifth
    of it, but room for at most sixteen contexts."""
    parameter, shape = next(model.parameters()), model.config
    kv_heads = shape.num_layers * shape.num_kv_heads
    token_bytes = 2 * kv_heads * shape.head_dim * parameter.element_size()
    host = host_memory() // 4 // processes // token_bytes
    if parameter.device.type == "cuda":
        sampled = config.max_running * (1 + config.guesses)     # tokens, at most, in a step
        free = free_memory(model, config.max_batch_tokens, sampled)
        gpu = min(1000 * shape.max_context, int(0.9 * free) // token_bytes)
    else:
        gpu = min(16 * shape.max_context, host // 5)
    gpu = gpu if config.gpu_cache_tokens is None else config.gpu_cache_tokens
    cpu = min(4 * gpu, host) if config.cpu_cache_tokens is None else config.cpu_cache_tokens
    if gpu < 2:
        raise ValueError(f"no memory is left for the cache: {gpu} tokens of {token_bytes} bytes; "
                         "choose a smaller model or gpu_cache_tokens >= 2")
    return gpu, cpu


@torch.inference_mode()
def free_memory(model: Model, max_batch_tokens: int, sampled: int) -> int:
    """Bytes of the GPU that neither the weights nor the largest steps need. It runs these to find
    out: a step of max_batch_tokens, and the largest that is replayed. Both are needed at once,
    because graphs have memory of their own. sampled: tokens, at most, in a step. The tenth that
    tier_sizes leaves free is for what is small: the partial results of attention, the columns of a
    batch, log probabilities, fragments."""
    try:
        step = peak_memory(partial(largest_step, model, max_batch_tokens, sampled))
        replayed = max(sampled, MOST_REPLAYED)
        graph = peak_memory(partial(largest_step, model, replayed, sampled))
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"a step of max_batch_tokens={max_batch_tokens} does not fit beside the "
                         f"weights, choose less: {error}") from error
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(next(model.parameters()).device)
    return free - step - graph


def largest_step(model: Model, num_tokens: int, sampled: int):
    """Run the model on num_tokens, and sampling's largest stage behind the first `sampled`."""
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device=next(model.parameters()).device)
    hidden = model(tokens, tokens, lambda layer, q, k, v, rotation: q.clone())
    logits = model.logits(hidden[:sampled])
    keep_top_p(logits, torch.full_like(logits[:, 0], 0.9))


def peak_memory(run: Callable) -> int:
    """Bytes of the current GPU that run() allocates at most, at a time."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def host_memory() -> int:
    """Bytes of the machine's memory, or of the container's, if that has a limit (by cgroup v2); if
    the system does not tell, those of a small machine."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):                # Windows
        return 8 * 2**30
    with suppress(OSError, ValueError):                 # there is no such file, or it says "max"
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


# ---- faster

# A layer's matrix product is followed by one kernel for the sum with the residual and the norm. One
# of inductor's patterns moves that sum into the matrix product, which on CUDA costs a copy of the
# residual. So we switch off its pattern matcher.
INDUCTOR = partial(torch.compile, options={"pattern_matcher": False})


def speed_up(worker: Worker, small: bool):
    """On CUDA, compile the small kernels, and capture the launches for which the GPU would
    otherwise wait. On a CPU, pack the weights of a model that is not small; those that keep_float16
    has packed stay as they are."""
    if worker.device.type == "cuda" and runs_triton(worker.device, worker.dtype):
        fuse(worker.model)
        run_every_kernel(worker)
        try_capture(worker, partial(make_cuda_graph, pool=torch.cuda.graph_pool_handle()))
    if worker.device.type == "cpu" and cpu_linear.packs(worker.dtype) and not small:
        cpu_linear.pack(worker.model)


def fuse(model: Model, compiler: Callable = INDUCTOR):
    """Compile all that lies between the attentions of two neighbouring layers as one function. The
    two layers are its arguments, so that one compiled function serves all layers. Torch compiles it
    up to three times: for the number of tokens of the first call, for any number, and for a single
    token. If compiling fails, torch logs why and the model runs as it was.

    In a decode, a Llama layer then launches ten kernels: four matrix products; two sums with norms
    and the activation of the MLP between them; rotate_and_store, attention and its merge. (If
    several processes share the model, two sums over them cut the function into parts.)"""
    torch._dynamo.config.suppress_errors = True

    @compiler
    def between(layer: Layer, x: Tensor, attended: Tensor, following: Layer) -> tuple[Tensor, ...]:
        x = layer.after_attention(x, attended)
        return x, *following.before_attention(x)

    # With `model` in it, the function would be part of a cycle, and a model that nobody needs would
    # stay in memory until a garbage collection.
    layers, norm = list(model.layers), model.norm

    def fused_layers(x: Tensor, attend: Attend) -> Tensor:  # computes what run_layers does
        q_k_v = layers[0].before_attention(x)
        for number, (layer, following) in enumerate(pairwise(layers)):
            x, *q_k_v = between(layer, x, attend(number, *q_k_v), following)
        return norm(layers[-1].after_attention(x, attend(len(layers) - 1, *q_k_v)))
    model.fused_layers = fused_layers


@torch.inference_mode()
def run_every_kernel(worker: Worker):
    """Use every kernel once, so that none of them has to be compiled while a request waits.

    For each shape of tile, a step computes the fewest tokens that take it: one more than the next
    smaller shape holds. With shapes of 16, 64 and 128 rows, and 4 heads in a group, a token has 4
    rows: so these steps compute 1, 5 and 17 tokens.

    The tokens are padding, at the end of the longest context: there attention splits a tile, if it
    splits any, and the kernel that merges runs, too."""
    *smaller, _ = wanted_items(worker.kv_heads, worker.head_dim, worker.dtype, worker.device)
    for rows in [0, *(shape.rows for shape in smaller)]:
        end = worker.max_context
        q_len = min(rows // worker.group + 1, end)
        packed = Packed([worker.padding_row], [end - q_len], [end], array("i", [0]) * q_len,
                        sample_at=[q_len - 1], sampling_requests=[])
        worker.compute_logits(worker.upload_inputs(packed, table_changes([])))


def try_capture(worker: Worker, make_graph: Callable):
    """Capture graphs, or go on without them: a slower server is better than none. (If several
    processes share the model, one that cannot capture ends, and ends all: see RankWorker.)"""
    try:
        worker.capture(make_graph)
    except Exception as error:
        worker.graphs = Graphs()
        print("warning: small batches will be slower, they could not be captured as CUDA graphs: "
              f"{error!r}", file=sys.stderr)


def make_cuda_graph(run: Callable, pool) -> Callable:
    """For Worker.capture: a CUDA graph of the kernels that run() launches, in the memory `pool`."""
    run()                                       # what compiles and allocates must not be captured
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads do on the GPU meanwhile does not end the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = run()

    def replay():
        graph.replay()
        return result
    return replay
