"""The measuring code: rivals compute the same attention as we do, and figures follow from the
times."""
import time
from types import SimpleNamespace

import pytest
import torch

from checkpoint import PRESETS, gpt
from engine import Engine
from experiments import microbench, rivals
from experiments.simulator import Hardware
from model import ModelConfig, empty_model
from worker import Worker


@pytest.fixture(scope="module")
def bench():
    return microbench.Bench("cpu")


def attention(output):
    """[S, H, q_len, D] as [T, H, D]."""
    return output.transpose(1, 2).flatten(0, 1) if output.dim() == 4 else output


@pytest.mark.parametrize("model", ["opt-125m", "llama2-70b"])
@pytest.mark.parametrize("q_len, kv_len", [([3] * 4, [20] * 4), ([6] * 2, [6] * 2), ([1] * 3, [9] * 3)])
def test_rivals_compute_the_same(bench, model, q_len, kv_len):
    scene = bench.scene(model, q_len, kv_len, seed=0)
    runs = rivals.rivals(scene) | dict(rounds=rivals.rounds(scene), packed=rivals.packed(scene))
    ours, *others = (run(0) for run in runs.values())
    assert len(others) == 4
    for other in others:
        torch.testing.assert_close(attention(other), ours)


def test_packed_spans_of_any_length(bench):
    scene = bench.scene("opt-125m", [1, 5, 3], [7, 9, 3], seed=0)
    torch.testing.assert_close(rivals.packed(scene)(0), rivals.ours(scene)(0))


def test_a_scene_counts_what_must_be_read_and_computed(bench):
    scene = bench.scene("llama2-70b", [1, 5], [7, 9], seed=0)
    # A product and a sum, of K and of V, for each position that a query sees.
    assert scene.flops == 4 * 64 * 128 * (7 + 5 + 6 + 7 + 8 + 9)
    assert scene.moved == 4 * 128 * (2 * 8 * (7 + 9) + 2 * 64 * (1 + 5))


def check(found):
    rows, ratios = found
    assert rows and all(row["seconds"] > 0 and row["copy_gbytes_per_second"] > 0 for row in rows)
    assert ratios
    for ratio in ratios:
        assert ratio["ours"] > 0 and ratio["how"] == "measured" and {"name", "paper", "must"} < ratio.keys()
    assert len({ratio["name"] for ratio in ratios}) == len(ratios)


def test_attention_figures():
    bench = microbench.Bench("cpu")
    microbench.figure_12(bench, 0, "opt-125m", 2, [16, 32])
    microbench.decodes(bench, 0, "opt-125m", 2, 32)
    microbench.prompts(bench, 0, "opt-125m", 16, 4, 32)
    microbench.mixed(bench, 0, "opt-125m", [1, 4], [16, 8])
    check((bench.rows, bench.ratios))
    by_name = {row["system"]: row["seconds"] for row in bench.rows
               if (row["dataset"], row["context"]) == ("fig12", 32)}
    found, = (ratio["ours"] for ratio in bench.ratios
              if ratio["name"] == "fig12, 32 tokens: time, copy-out / ours")
    assert found == by_name["copy-out"] / by_name["ours"]


def test_swap_figures():
    bench, config = microbench.Bench("cpu"), ModelConfig(50, 2, 2, 2, 16, 16, 512, "relu")
    model = empty_model(config, "cpu", torch.float32)
    for parameter in model.parameters():
        parameter.zero_()
    worker = Worker(model, 512, 8, microbench.CHUNK, 3, 256)
    slots = torch.randperm(512).tolist()
    microbench.copies(bench, "tiny", worker.pool, slots, 4)
    microbench.overlap(bench, "tiny", worker, slots, batch=2, context=64, chunks=4, prompt=9, seed=0)
    check((bench.rows, bench.ratios))
    taken = {row["system"]: row["seconds"] for row in bench.rows}
    both, = (ratio["ours"] for ratio in bench.ratios if ratio["name"].startswith("both ways"))
    assert both == taken["both ways"] / (taken["swap in"] + taken["swap out"])


def test_a_copy_out_starts_before_the_copies_in_that_overlap_it():
    """The other way round it would wait for them."""
    calls = []
    pool = SimpleNamespace(flights=[], swap_in=lambda tickets: calls.append(("in", tickets)),
                           swap_out=lambda tickets: calls.append(("out", tickets)))
    microbench.copying(pool, swap_in=[1], swap_out=[2])(0)
    assert calls == [("out", [2]), ("in", [1])]


def test_time_steps_times_prompts_and_decodes():
    engine = Engine("tiny_chat", device="cpu", gpu_cache_tokens=512, cpu_cache_tokens=0)
    shapes = []
    engine.watchers.append(lambda batch: shapes.append([span.end - span.start for span in batch.spans]))
    first, decode = microbench.time_steps(engine, 3, 20, 5, seed=0)
    assert shapes == [[20] * 3] + 4 * [[1] * 3] and first > 0 and decode > 0
    model = engine.worker.model
    matrices = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    weights = microbench.read_bytes(engine.worker, 1, 0)
    assert weights == sum(weight.nbytes for weight in [*matrices, model.tokens.weight])
    kv_token = engine.worker.pool.gpu.nbytes // (512 + 1)   # the pool has one more slot, of padding
    assert microbench.read_bytes(engine.worker, 2, 10) - weights == 20 * kv_token


def test_a_prompt_takes_until_its_tokens_are_known():
    """One step ahead of the device, the first step does not wait for them."""
    engine = Engine("tiny_chat", device="cpu", gpu_cache_tokens=512, cpu_cache_tokens=0)
    engine.depth, launch = 1, engine.worker.launch

    def launch_on_slow_device(batch):
        wait = launch(batch)
        return lambda: time.sleep(0.1) or wait()
    engine.worker.launch = launch_on_slow_device
    first, _ = microbench.time_steps(engine, 2, 20, 3, seed=0)
    assert first >= 0.1


def test_the_share_of_the_memorys_rate_comes_from_the_decodes(monkeypatch):
    """A decode of four requests reads 56 tokens more of each than a decode of one, and takes half a
    second longer. This machine could read them in a fifth of a second."""
    engine = Engine("tiny_chat", device="cpu", gpu_cache_tokens=512, cpu_cache_tokens=0)
    times = {1: (0.1, 0.2), 16: (1.0, 0.2), 4: (2.0, 0.7)}  # requests -> their prompts, a decode
    monkeypatch.setattr(microbench, "time_steps", lambda engine, batch, *rest: times[batch])
    kv = microbench.read_bytes(engine.worker, 4, 56) - microbench.read_bytes(engine.worker, 4, 0)
    hardware = Hardware(flops=1e9, memory=5 * kv, host_link=1e9, peer_link=1e9, element_size=4)
    assert microbench.measure_operators(engine, hardware, seed=0).memory == pytest.approx(0.4)


@pytest.mark.slow
@pytest.mark.parametrize("figure", [microbench.kernel, microbench.swap, microbench.step])
def test_figures_on_a_cpu(figure):
    check(figure("cpu", 0))


def test_the_large_steps_run_on_a_small_model(monkeypatch):
    """The code that a GPU runs with 13B runs here, too. But a torch without CUDA sees no GPU at
    work, so the GPU seems idle all the time."""
    monkeypatch.setitem(PRESETS, "tiny", gpt(layers=2, heads=4, width=32, context=64))
    profile, on_cpu = torch.profiler.profile, [torch.profiler.ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profile(activities=on_cpu))
    steps = microbench.Bench("cpu")
    microbench.large_steps(steps, seed=0, model="tiny", prompt=4, new=3)
    assert [row["dataset"] for row in steps.rows] == [
        *(f"{part}, batch {batch}" for batch in (1, 8, 32) for part in ("prompt", "decode")),
        *["32 decodes, a prompt"] * 6]
    assert len(steps.ratios) == 9 and all(ratio["ours"] > 0 for ratio in steps.ratios)
