"""A step on the device: told in one upload; decodes padded and replayed give what they give
otherwise, and touch nothing else."""
import os
import random
import re
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import attention_kernel
import interpreter  # noqa: F401
import loading
import recompute_cost
import worker as module
from attention_plan import AMPERE, FLOAT32, Merge, make_plan
from config import Config
from engine import Engine
from eviction import RecomputeCost
from experiments.simulator import VirtualClock
from kv_cache import Conversation, Ticket
from loading import (INDUCTOR, fuse, largest_step, make_cuda_graph, run_every_kernel, tier_sizes,
                     try_capture)
from model import ModelConfig, empty_model
from sampling import Sampling
from scheduler import PLACEHOLDER, Batch, Request, Span
from worker import Worker, pack, table_changes

SLOTS, ROWS, CONTEXT, CHUNK, VOCAB = 128, 4, 80, 4, 61
COST = RecomputeCost({4: 1e-3, 32: 2e-3}, rest=1e-3)


def eagerly(run):
    """In place of a graph: whatever a graph would launch again, on the same tensors."""
    return run


def make_worker(kv_heads=2, rows=ROWS, device="cpu", dtype=torch.float32, **options):
    """Two layers of random weights, a cache full of random KV, and ROWS contexts in shuffled
    slots."""
    torch.manual_seed(0)
    model = empty_model(ModelConfig(VOCAB, 2, 4, kv_heads, 64, 64, CONTEXT, "relu"), device, dtype)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    worker = Worker(model, SLOTS, 8, CHUNK, rows, CONTEXT, **options)
    worker.pool.gpu.copy_(torch.randn(worker.pool.gpu.shape))
    return worker


def requests(worker, lengths, **sampling):
    """One in each row, with as many tokens. The batch that brings the slot table up to date, and
    slots for each."""
    rng, found = np.random.default_rng(1), []
    slots = iter(np.random.default_rng(2).permutation(SLOTS).tolist())
    batch = Batch(0, 0)
    for row, length in enumerate(lengths):
        conversation = Conversation(str(row), row, rng.integers(VOCAB, size=length), CHUNK)
        conversation.row = row
        found.append(Request(conversation, [], sampling=Sampling(seed=row, **sampling)))
        batch.table_updates.append((row, 0, np.array([next(slots) for _ in range(length)])))
    worker.execute(batch)
    return found


def decode(found, step=1):
    """The batch in which each of them computes its last token."""
    batch = Batch(step, 0)
    batch.spans = [Span(request, request.total - 1, request.total) for request in found]
    return batch


def replays(worker):
    """Notes the size of each graph that is replayed."""
    counts = []
    for size, graph in worker.graphs.captured.items():
        def replay(size=size, graph=graph):
            counts.append(size.tokens)
            return graph.replay()
        worker.graphs.captured[size] = graph._replace(replay=replay)
    return counts


# ---- the sizes of the tiers

def test_the_cpu_tier_is_four_times_the_gpu_tier_unless_it_is_given():
    model = make_worker().model
    assert tier_sizes(Config(gpu_cache_tokens=64), model, 1) == (64, 256)
    assert tier_sizes(Config(gpu_cache_tokens=64, cpu_cache_tokens=0), model, 1) == (64, 0)
    assert tier_sizes(Config(), model, 1) == (16 * CONTEXT, 64 * CONTEXT)


def test_the_processes_of_one_model_share_a_quarter_of_the_hosts_memory(monkeypatch):
    model = make_worker().model
    plenty = Config(gpu_cache_tokens=10**6)
    monkeypatch.setattr(loading, "host_memory", lambda: 4 * 2**20)
    _, alone = tier_sizes(plenty, model, 1)
    _, one_of_four = tier_sizes(plenty, model, 4)
    assert 0 < one_of_four == alone // 4


@torch.inference_mode()
def test_the_largest_step_runs_with_more_tokens_than_requests_and_with_fewer():
    """On CUDA, free_memory measures it."""
    model = make_worker().model
    for num_tokens in 9, 2:
        largest_step(model, num_tokens, 4)


# ---- the upload

def test_the_profile_is_what_a_chunk_adds_to_a_batch_that_reads_the_weights_anyway(monkeypatch):
    """A device that reads the weights in 10 s, computes a token in 1 s, and attends to 1,000 in 1
    s."""
    worker, clock = make_worker(), VirtualClock()
    worker.model.forward = lambda tokens, positions, attend: clock.sleep(10 + len(tokens))
    monkeypatch.setattr(recompute_cost, "multi_token_attention",
                        lambda q, k, v, table, spans: clock.sleep(spans.host[2].max() / 1000))
    monkeypatch.setattr(recompute_cost, "time", SimpleNamespace(perf_counter=clock))
    cost, layers = worker.profile(), 2
    assert cost.rest == pytest.approx(CHUNK) and cost.lengths == [4, 8, 16, 32, 64]
    assert cost(64) == pytest.approx(CHUNK + layers * 64 / 1000)


def test_the_profile_stops_where_attention_takes_long_enough_to_be_measured(monkeypatch):
    """It is linear in the context, so longer ones lie on the line."""
    worker, clock = make_worker(), VirtualClock()
    worker.model.forward = lambda tokens, positions, attend: clock.sleep(1)
    monkeypatch.setattr(recompute_cost, "time", SimpleNamespace(perf_counter=clock))
    for seconds, lengths in ((1e-4, [4, 8, 16, 32, 64]), (4e-3, [4, 8, 16]), (1.0, [4, 8, 16])):
        monkeypatch.setattr(recompute_cost, "multi_token_attention",
                            lambda q, k, v, table, spans: clock.sleep(seconds * spans.host[2].max()))
        cost = worker.profile()
        assert cost.lengths == lengths and cost(64) - cost.rest == pytest.approx(2 * 64 * seconds)


def test_table_changes_names_each_entry():
    updates = [(3, 10, np.array([7, 5, 6])), (0, 0, np.array([], int)), (1, 4, np.array([9]))]
    assert [part.tolist() for part in table_changes(updates)] == [[3, 3, 3, 1], [10, 11, 12, 4], [7, 5, 6, 9]]
    assert [part.tolist() for part in table_changes([])] == [[], [], []]


def test_inputs_are_the_batch():
    worker = make_worker()
    found = requests(worker, [9, 5, 20])
    spans = [Span(found[0], 2, 6), Span(found[2], 19, 20), Span(found[1], 0, 5)]
    packed = pack(spans)
    inputs = worker.upload_inputs(packed, table_changes([(1, 3, np.array([40, 41]))]))
    tokens = [token for request, start, end in spans for token in request.conversation.tokens[start:end]]
    assert inputs.tokens.tolist() == tokens
    # Behind the first span nothing is sampled: its context goes on.
    assert inputs.sample_at.tolist() == [4, 9] and packed.sampling_requests == [found[2], found[1]]
    assert inputs.positions.tolist() == [2, 3, 4, 5, 19, 0, 1, 2, 3, 4]
    assert inputs.row_of_token.tolist() == [0] * 4 + [2] + [1] * 5
    assert inputs.spans.host.tolist() == [[0, 2, 1], [4, 1, 5], [6, 20, 5]]
    assert worker.slot_table[1, 3:5].tolist() == [40, 41]


def test_a_step_is_uploaded_at_once_before_its_copies_and_those_out_start_while_it_computes(monkeypatch):
    worker, order = make_worker(), []
    batch = decode(requests(worker, [9, 5]))
    batch.table_updates = [(0, 8, np.array([90]))]
    batch.swap_out = [Ticket(None, None, "", 0, 2, [80, 81], 3)]

    def watch(owner, name):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: order.append(name) or inner(*args))
    for owner, name in ((module, "upload"), (worker.pool, "swap_in"), (worker.pool, "swap_out"),
                        (worker, "_forward"), (module, "sample")):
        watch(owner, name)
    worker.execute(batch)
    assert order == ["upload", "swap_in", "_forward", "swap_out", "sample"]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_token_that_the_host_does_not_know_yet_is_the_one_that_was_sampled(graphs):
    """By the last launch, in the same row, whatever the order of the spans."""
    tokens = []
    for known in (True, False):
        worker = make_worker()
        if graphs:
            worker.capture(eagerly)
        found = requests(worker, [9, 5, 20])
        first = worker.launch(decode(found))
        for request, token in zip(found, first().tokens if known else [PLACEHOLDER] * 3):
            request.conversation.tokens.append(token)
        second = decode(found[::-1], step=2)
        second.table_updates = [(row, length, np.array([100 + row])) for row, length in enumerate([9, 5, 20])]
        tokens.append([*first().tokens, *worker.launch(second)().tokens])
    assert tokens[0] == tokens[1] and len(set(tokens[0][:3])) > 1


# ---- graphs: what one replays, run as it is

@pytest.mark.parametrize("max_running, sizes",
                         [(1, [1]), (3, [4, 2, 1]), (8, [8, 4, 2, 1]), (9, [16, 8, 4, 2, 1]),
                          (40, [48, 32, 16, 8, 4, 2, 1])])
def test_sizes_are_captured_largest_first(max_running, sizes):
    worker = make_worker(rows=max_running)
    worker.capture(eagerly)
    assert [tokens for tokens, decodes in worker.graphs.captured if decodes] == sizes
    assert [tokens for tokens, decodes in worker.graphs.captured if not decodes] == [256, 192, 128, 64]


def test_a_graph_keeps_no_logits():
    """The result of a graph stays in memory, and there are dozens of graphs."""
    worker = make_worker()
    worker.capture(eagerly)
    assert [list(graph.replay().shape) for graph in worker.graphs.captured.values()] == [
        [size, worker.model.config.width] for size, _ in worker.graphs.captured]


@pytest.mark.parametrize("lengths", [[9], [9, 5], [80, 5, 1], [7, 8, 9, 30]])
def test_a_padded_decode_computes_the_same_and_touches_its_own_slots_only(lengths):
    plain, padded = make_worker(), make_worker()
    padded.capture(eagerly)
    before, used = padded.pool.gpu.clone(), replays(padded)
    results = [worker.execute(decode(requests(worker, lengths, logprobs=3))) for worker in (plain, padded)]
    assert used == [1 << (len(lengths) - 1).bit_length()]
    assert results[0].tokens == results[1].tokens
    for ours, theirs in zip(*(result.logprobs for result in results)):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    torch.testing.assert_close(plain.pool.gpu[:, :, :SLOTS], padded.pool.gpu[:, :, :SLOTS])
    written = [padded.slot_table[row, length - 1].item() for row, length in enumerate(lengths)]
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(padded.pool.gpu[:, :, others], before[:, :, others])


def test_the_slot_of_padding_is_nobodys():
    worker = make_worker()
    worker.capture(eagerly)
    worker.pool.gpu[:, :, SLOTS:] = torch.nan                    # what it holds does not matter
    assert worker.num_slots == SLOTS and worker.pool.gpu.shape[2] == SLOTS + 1
    assert (worker.slot_table[:ROWS] < SLOTS).all() and (worker.slot_table[ROWS] == SLOTS).all()
    result = worker.execute(decode(requests(worker, [6, 3, 2], logprobs=0)))
    assert all(np.isfinite(report[0]) for report in result.logprobs)


def mixture(found, starts):
    """The batch in which each request computes its context from a start on."""
    batch = decode(found)
    batch.spans = [Span(request, start, request.total) for request, start in zip(found, starts)]
    return batch


def test_a_padded_mixture_computes_the_same_and_touches_its_own_slots_only():
    """A prompt, a decode, a prompt behind a history; and the first tokens of the latter once more,
    as if they had been dropped."""
    lengths, starts = [9, 20, 30], [0, 19, 12]
    plain, padded = make_worker(), make_worker()
    padded.capture(eagerly)
    used, results, befores = replays(padded), [], []
    for worker in plain, padded:
        batch = mixture(requests(worker, lengths, logprobs=3), starts)
        batch.spans.insert(2, Span(batch.spans[2].request, 0, 4))
        befores.append(worker.pool.gpu.clone())
        results.append(worker.execute(batch))
    assert used == [64] and results[0].tokens == results[1].tokens
    for ours, theirs in zip(*(result.logprobs for result in results)):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    torch.testing.assert_close(plain.pool.gpu[:, :, :SLOTS], padded.pool.gpu[:, :, :SLOTS])
    spans = [*zip(range(3), starts, lengths), (2, 0, 4)]
    written = [slot for row, start, end in spans for slot in padded.slot_table[row, start:end].tolist()]
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(padded.pool.gpu[:, :, others], befores[1][:, :, others])


def test_what_waits_for_a_swap_in_or_is_too_large_is_not_replayed():
    worker = make_worker()
    worker.capture(eagerly)
    found, used = requests(worker, [9, 5, 20, 8]), replays(worker)
    arriving, beyond, hole = (decode(found) for _ in range(3))
    arriving.swap_in = [Ticket(None, None, "", 0, 2, [80, 81], 3)]
    beyond.spans.append(Span(found[0], 2, 3))                    # more than the largest
    for batch in arriving, beyond:
        worker.execute(batch)
    assert used == []
    hole.spans = [Span(found[0], 2, 3), hole.spans[1]]  # one token, behind which none is sampled
    assert len(worker.execute(hole).tokens) == 1 and used == [2]


def test_a_decode_waits_for_what_was_swapped_in_before():
    """By a step that had nothing to compute, and so did not wait itself."""
    worker = make_worker()
    worker.capture(eagerly)
    found, used = requests(worker, [9]), replays(worker)
    moving = Batch(1, 0)
    moving.swap_in = [Ticket(None, None, "", 0, 2, [80, 81], 3)]
    for batch in moving, decode(found), decode(found):
        worker.execute(batch)
    assert used == [1]                                           # the second decode


@pytest.mark.parametrize("options", [dict(), dict(temperature=1.0)], ids=str)
def test_conversations_are_the_same_with_graphs(options):
    """Interleaved, under pressure, the engine checking its books after every step."""
    def replies(graphs):
        engine = Engine("tiny_chat", cost=COST, debug=True, device="cpu", gpu_cache_tokens=128,
                        cpu_cache_tokens=96, chunk_size=8, max_running=3)
        if graphs:
            engine.worker.capture(eagerly)
        used, rng, found = replays(engine.worker), random.Random(0), []
        for _ in range(3):
            prompts = [[rng.randrange(250) for _ in range(rng.randint(1, 12))] for _ in "abcd"]
            handles = [engine.submit(prompt, name, max_tokens=7, ignore_eos=True, seed=3, **options)
                       for name, prompt in zip("abcd", prompts)]
            found += [handle.result().token_ids for handle in handles]
        stats = engine.stats()
        assert stats["chunks_swapped_in"] and stats["swap_in_bytes"] and bool(used) == graphs
        engine.close()
        return found
    assert replies(graphs=True) == replies(graphs=False)


def test_without_graphs_the_server_still_serves(capsys):
    worker = make_worker()

    def make_graph(run):
        if len(worker.graphs.captured) == 1:
            raise RuntimeError("no such luck")
        return run
    try_capture(worker, make_graph)
    assert not worker.graphs.captured and "no such luck" in capsys.readouterr().err
    assert len(worker.execute(decode(requests(worker, [9, 5]))).tokens) == 2


# ---- fusion

def rotary_model(device="cpu"):
    # What was compiled, or failed to be, for another one.
    torch.compiler.reset()
    torch.manual_seed(0)
    shape = dict(norm="rms", gated=True, biases=frozenset(), rope_theta=10000.0, tied_embeddings=False)
    model = empty_model(ModelConfig(VOCAB, 3, 4, 2, 64, 64, CONTEXT, "silu", **shape), device, torch.float32)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


@torch.inference_mode()
def hidden(model, tokens):
    """With no attention, but a function of all of q, k and v."""
    numbers = torch.arange(tokens, device=model.tokens.weight.device)
    return model(numbers, numbers, lambda layer, q, k, v, rotation: q * (k + v).repeat_interleave(2, dim=1))


@pytest.mark.parametrize("device, compiler", [
    ("cpu", partial(torch.compile, backend="eager")),
    pytest.param("cuda", INDUCTOR, marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def test_a_fused_model_computes_the_same_and_is_compiled_for_all_its_layers_at_once(device, compiler):
    plain, fused, counts = rotary_model(device), rotary_model(device), torch._dynamo.utils.counters["stats"]
    fuse(fused, compiler)
    before, compiled = counts["unique_graphs"], []
    for tokens in (8, 4, 1, 7, 60, 2, 16):
        torch.testing.assert_close(hidden(fused, tokens), hidden(plain, tokens), atol=1e-4, rtol=1e-4)
        compiled.append(counts["unique_graphs"] - before)
    assert compiled == [1, 2, 3, 3, 3, 3, 3]


def test_a_fused_model_leaves_memory_at_once():
    """Else its weights would stay until a garbage collection."""
    model = rotary_model()
    fuse(model, partial(torch.compile, backend="eager"))
    hidden(model, 4)
    kept = weakref.ref(model)
    del model
    assert kept() is None


def test_a_model_that_cannot_be_compiled_runs_as_it_is():
    def backend(graph, inputs):
        failures.append(RuntimeError("no such luck"))
        raise failures[0]
    plain, fused, failures = rotary_model(), rotary_model(), []
    fuse(fused, partial(torch.compile, backend=backend))
    assert torch.equal(hidden(fused, 4), hidden(plain, 4)) and failures


@pytest.mark.slow
def test_seven_launches_between_two_attentions(monkeypatch):
    """As Inductor plans them for Triton. It plans for a GPU that is not there: no kernel is
    compiled, and what was planned runs without its Triton kernels, so the results mean nothing."""
    triton = pytest.importorskip("triton")
    from torch._inductor import async_compile, config, utils
    from triton.backends.compiler import GPUTarget
    gpu = GPUTarget("cuda", 90, 32)
    target = SimpleNamespace(get_current_target=lambda: gpu, get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", target)
    kernel = SimpleNamespace(run=lambda *args, **kwargs: None)
    monkeypatch.setattr(async_compile.AsyncCompile, "triton", lambda *args, **kwargs: kernel)
    model = rotary_model()
    fuse(model)
    with config.patch(cpu_backend="triton", force_disable_caches=True):
        _, codes = utils.run_and_get_code(hidden, model, 8)
    launches = re.findall(r"extern_kernels\.(\w+)\(|(triton)_\w+\.run\(", "".join(codes))
    assert ["".join(one) for one in launches] == ["mm", "triton", "mm", "triton", "mm", "triton", "mm"]


# ---- with the kernel: its work items are planned on the host, uploaded with the rest, and padded

def check_kernel():
    """Runs where the kernels do: in the interpreter, or on a GPU. Contexts are cut finely, or none
    would need a merge."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wanted_items", lambda *_: dict.fromkeys(FLOAT32, 6))
        patch.setattr(module, "make_plan", partial(make_plan, min_piece=32))
        patch.setattr(attention_kernel, "make_plan", None)       # no layer plans anew
        plain, padded = (make_worker(kv_heads=1, device=device) for _ in range(2))
        padded.capture(eagerly)
        used, merges = replays(padded), []
        # Each fills in what the one before has left. The last has prompts, and one of them a
        # history.
        for lengths, starts in (([CONTEXT, 9, 1], [CONTEXT - 1, 8, 0]), ([2, 70, 8], [1, 69, 7]),
                                ([70, 20, 9], [60, 0, 8])):
            batches = [mixture(requests(worker, lengths, logprobs=0), starts) for worker in (plain, padded)]
            results = [worker.execute(batch) for worker, batch in zip((plain, padded), batches)]
            assert results[0].tokens == results[1].tokens
            np.testing.assert_allclose(*([report[0] for report in result.logprobs] for result in results),
                                       atol=1e-4)
            torch.testing.assert_close(plain.pool.gpu[:, :, :SLOTS], padded.pool.gpu[:, :, :SLOTS])
            plan, = padded.graphs.captured[4, True].spans.plans.values()
            pieces = plan.merges[:, Merge._fields.index("pieces")]
            merges.append(int((pieces > 0).sum()))
        assert used == [4, 4, 64] and merges == [4, 4, 4]   # heads of the one long context, twice
        assert len(plan.merges) == 6 // 2 * 4               # of 4 decodes at most 3 can be split


def check_every_kernel_runs():
    """Every kind of tile, and the kernel that merges, run before there is a request."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = dict.fromkeys(AMPERE, 6)
    with pytest.MonkeyPatch.context() as patch:
        for file in module, loading:
            patch.setattr(file, "wanted_items", lambda *_: shapes)
        patch.setattr(module, "make_plan", partial(make_plan, min_piece=32))
        worker = make_worker(kv_heads=1, device=device, dtype=torch.float16)
        plan, planned, before = worker._plan, [], worker.pool.gpu[:, :, :SLOTS].clone()
        patch.setattr(worker, "_plan", lambda *args: planned.append(plan(*args)) or planned[-1])
        run_every_kernel(worker)
    assert [[shape for shape, _ in plan.launches] for plan in planned] == [[shape] for shape in AMPERE]
    assert all(len(plan.merges) for plan in planned)
    assert torch.equal(worker.pool.gpu[:, :, :SLOTS], before)    # nothing but padding was stored
    assert not worker.pool.gpu[:, :, SLOTS:].isnan().any()


@pytest.mark.slow
def test_padded_plans_and_warm_up_in_the_interpreter():
    pytest.importorskip("triton")
    root = os.path.dirname(module.__file__)
    path = os.pathsep.join([os.path.dirname(__file__), root])
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], cwd=root, capture_output=True,
                          text=True,
                          env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_padded_plans_and_warm_up_on_the_gpu():
    check_kernel()
    check_every_kernel_runs()


@pytest.mark.gpu
def test_graphs_on_the_gpu():
    """Captured and replayed, many times, with other lengths and tokens each time. Some are
    prompts."""
    plain, captured = (make_worker(device="cuda") for _ in range(2))
    captured.capture(lambda run, pool=torch.cuda.graph_pool_handle(): make_cuda_graph(run, pool))
    used, chance = replays(captured), random.Random(0)
    for _ in range(40):
        lengths = [chance.randint(1, 20) for _ in range(chance.randint(1, ROWS))]
        starts = [chance.choice([length - 1, chance.randrange(length)]) for length in lengths]
        batches = [mixture(requests(worker, lengths, logprobs=0), starts) for worker in (plain, captured)]
        results = [worker.execute(batch) for worker, batch in zip((plain, captured), batches)]
        assert results[0].tokens == results[1].tokens
        torch.testing.assert_close(plain.pool.gpu[:, :, :SLOTS], captured.pool.gpu[:, :, :SLOTS])
    assert len(used) == 40 and set(used) == {1, 2, 4, 64}


@pytest.mark.gpu
def test_a_launch_waits_for_nothing_on_the_gpu():
    """A prompt, a swap-in, and decodes of tokens that the host does not know yet."""
    worker = make_worker(device="cuda")
    found = requests(worker, [9, 5])
    prompt, first, second = decode(found), decode(found), decode(found, step=2)
    prompt.spans[0] = Span(found[0], 0, 9)
    first.swap_in = [Ticket(None, None, "", 0, 2, [80, 81], 3)]
    for batch in prompt, first:                             # what compiles and allocates may wait
        worker.execute(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        waits = [worker.launch(prompt), worker.launch(first)]
        for request, slot in zip(found, (90, 91)):
            second.table_updates.append((request.conversation.row, request.total, np.array([slot])))
            request.conversation.tokens.append(PLACEHOLDER)
        second.spans = [Span(request, request.total - 1, request.total) for request in found]
        waits.append(worker.launch(second))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(wait().tokens) for wait in waits] == [2, 2, 2]


@pytest.mark.gpu
def test_an_engine_on_the_gpu_replays_its_steps():
    replies = []
    for eager in (False, True):
        engine = Engine("tiny_chat", cost=COST, device="cuda", dtype="float32", gpu_cache_tokens=512,
                        cpu_cache_tokens=128, eager=eager)
        assert bool(engine.worker.graphs.captured) != eager
        used = replays(engine.worker)
        replies.append(engine.generate([72, 101, 108, 108, 111], max_tokens=20, ignore_eos=True).token_ids)
        assert len(used) == (0 if eager else 20)
        engine.close()
    assert replies[0] == replies[1]


@pytest.mark.gpu
def test_the_cache_leaves_room_for_the_largest_step():
    """Sized from free memory: then a prompt of max_batch_tokens is served."""
    engine = Engine("opt-125m", random_weights=True, cost=COST, device="cuda", cpu_cache_tokens=0,
                    max_batch_tokens=2000)
    free, _ = torch.cuda.mem_get_info()
    assert engine.worker.pool.gpu.nbytes > free
    assert len(engine.generate([5] * 2000, max_tokens=3, ignore_eos=True).token_ids) == 3
    engine.close()


if __name__ == "__main__":
    check_kernel()
    check_every_kernel_runs()
