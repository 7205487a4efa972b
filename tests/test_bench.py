"""The laboratory: every turn at its time, figures that add up and repeat, one clear line for bad input."""
import io
import json
import re
import sys
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from tqdm import tqdm

import bench
from engine import Engine
from eviction import POLICIES, RecomputeCost
from experiments import curves, fleet, memory as memory_file, run
from experiments.policies import EXPERIMENTS
from experiments.simulator import OPERATORS
from experiments.workload import PlannedConversation, PlannedTurn

COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
USERS = [
    PlannedConversation(str(n), [
        PlannedTurn(5 + n, 6), PlannedTurn(4, 3, think_seconds=0.05), PlannedTurn(7, 4, think_seconds=0.02)],
        arrival=0.03 * n)
    for n in range(4)]


@pytest.mark.parametrize("system", ["stateless", "gpu cache", "pensieve"])
def test_drive_serves_every_turn_at_its_time(system):
    flags = dict(gpu_cache_tokens=64, cpu_cache_tokens=256, chunk_size=8) | run.SYSTEMS[system].flags
    engine = Engine("tiny_chat", cost=COST, **flags)
    served = run.drive(engine, USERS, seed=0)
    engine.close()
    planned = sorted(turn.output_tokens for user in USERS for turn in user.turns)
    assert sorted(turn.output_tokens for turn in served) == planned
    assert all(turn.due <= turn.first_token <= turn.ended for turn in served)
    contexts = sorted(turn.usage["prompt_tokens"] for turn in served)
    # Prompts and replies add up.
    assert contexts == sorted(length for n in range(4) for length in (5 + n, 15 + n, 25 + n))
    for user in USERS:
        assert min(turn.due for turn in served) <= user.arrival
    row = run.summary(served)
    # The last token of a reply was never fed, so it is new to the next turn.
    assert row["prompt_tokens_new"] == sum(5 + n + 4 + 1 + 7 + 1 for n in range(4))
    assert (row["gpu_hit_rate"] + row["cpu_hit_rate"] == 0) == (system == "stateless")
    assert row["computed_tokens"] == row["prompt_tokens_recomputed"] + row["prompt_tokens_new"] + 4 * 13


def rewinding(*keeps):
    """A conversation whose turns keep so many tokens; each adds 30 and 10."""
    return [PlannedTurn(30, 10, 0.01, keep) for keep in keeps]


@pytest.mark.parametrize("flags", [
    dict(gpu_cache_tokens=512), dict(gpu_cache_tokens=136, cpu_cache_tokens=32), run.STATELESS,
    dict(gpu_cache_tokens=136, cpu_cache_tokens=32, policy=EXPERIMENTS["oracle"])])
def test_a_turn_that_rewinds_finds_what_it_keeps(flags):
    """What it keeps has had KV; of a whole context the last token has not."""
    users = [PlannedConversation(name, rewinding(None, None, 50, None, 0, 39), 0.01 * n)
             for n, name in enumerate("ab")]
    flags = dict(cpu_cache_tokens=256, chunk_size=8, debug=True) | flags
    with closing(Engine("tiny_chat", cost=COST, **flags)) as engine:
        foresee = getattr(engine.cache.policy, "foresee", None)
        served = run.drive(engine, users, seed=0, foresee=foresee)
    usages = [turn.usage for turn in served]
    assert sorted(usage["prompt_tokens"] for usage in usages) == sorted(2 * [30, 70, 80, 120, 30, 69])
    attainable = sorted(usage["prompt_tokens"] - usage["new"] for usage in usages)
    assert attainable == sorted(2 * [0, 39, 50, 89, 0, 39])
    hits = sum(usage["gpu"] + usage["cpu"] for usage in usages)
    if "policy" in flags or flags.get("gpu_cache_tokens") == 136:
        assert 0 < hits < sum(attainable)
    else:
        assert hits == (0 if flags.get("stateless") else sum(attainable))


def test_a_branch_that_was_left_is_evicted_and_then_forgotten():
    """Nobody tells the engine that no user returns to a branch. Each turn rewinds by 31 tokens."""
    users = [PlannedConversation("a", rewinding(None, *[9] * 20))]
    flags = dict(gpu_cache_tokens=112, cpu_cache_tokens=64, chunk_size=8, debug=True)
    with closing(Engine("tiny_chat", cost=COST, **flags)) as engine:
        held, cache = [], engine.cache
        engine.watchers.append(lambda batch: held.append(len(cache.conversations)))
        run.drive(engine, users, seed=0)
        assert cache.conversations["a@20"].chunks[0].users[-1].name == "a@20"
        assert "a@19" in cache.conversations and "a@1" not in cache.conversations
    assert 3 <= max(held) <= 8          # 22 slots and places hold no more chunks of old branches


def test_the_workload_repeats_and_fits():
    first, again, other = (run.many_turns(512, 60.0, run.exponential_think, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert run.longest_context(first) <= 512


def run_bench(tmp_path, monkeypatch, command):
    """Run bench.py in this process, simulations included -> the JSON that it writes."""
    path = tmp_path / "figure.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *command.split(), "--jobs", "1", "--json", str(path)])
    bench.main()
    figure = json.loads(path.read_text())
    assert figure.keys() == {"figure", "command", "commit", "machine", "seed", "rows", "ratios"}
    assert all(ratio.keys() == {"name", "paper", "ours", "how"} for ratio in figure["ratios"])
    return figure


def test_without_git_a_figure_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    bench.write_json(tmp_path / "figure.json", "default", curves.Found(rows=[], ratios=[]), seed=0)
    assert json.loads((tmp_path / "figure.json").read_text())["commit"] == "unknown"


def test_a_figure_keeps_its_command_but_not_the_servers_key():
    for key in (["--server-key", "sk-1"], ["--server-key=sk-1"]):
        told = bench.command(["bench.py", "serve", *key, "--trace", "my file"])
        assert told in ("python bench.py serve --server-key KEY --trace 'my file'",
                        "python bench.py serve --server-key=KEY --trace 'my file'")


def test_the_default_figure_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "many_turns", lambda limit, rate, think, seed: USERS)
    figure = run_bench(tmp_path, monkeypatch, "--seed 0")
    assert [row["system"] for row in figure["rows"]] == ["stateless", "gpu cache", "pensieve"]
    fields = {"model", "dataset", "request_rate", "throughput", "normalized_latency_ms", "p99_ttft_ms"}
    assert fields <= figure["rows"][0].keys()
    assert all(ratio["how"] == "measured" and ratio["ours"] > 0 for ratio in figure["ratios"])
    assert not any("cpu_gb" in row for row in figure["rows"])           # this machine's tier has another size
    printed = capsys.readouterr().out
    assert "pensieve" in printed and "turn by turn" in printed and "p95_ttft_ms" in printed
    for row in figure["rows"]:
        assert [(each["turn"], each["turns"]) for each in row["by_turn"]] == [("1", 4), ("2", 4), ("3", 4)]
        recomputed = sum(each["turns"] * each["recomputed_tokens"] for each in row["by_turn"])
        assert recomputed == pytest.approx(row["recomputed_tokens"])
    stateless, *_, pensieve = (row["by_turn"] for row in figure["rows"])
    assert not any(each["hit_rate"] for each in stateless) and pensieve[2]["hit_rate"] > 0.5


def test_turns_are_grouped_by_their_number():
    """Turn n of 20 takes n seconds to its first token, and finds half of 10 n tokens."""
    def turn(number, ended):
        usage = dict(gpu=2 * number, cpu=3 * number, recomputed=number, new=4 * number)
        return run.Served(1.0, 1.0 + number, ended, 5, usage, turn=number)
    served = [turn(number, 50.0) for number in range(20, 0, -1)] + [turn(1, 10.0)]
    rows = run.by_turn(served, begin=10.0)
    assert [(row["turn"], row["turns"]) for row in rows] == [
        ("1", 1), ("2", 1), ("3", 1), ("4", 1), ("5-8", 4), ("9-16", 8), ("17-32", 4)]
    assert all(row["hit_rate"] == 0.5 for row in rows)
    assert [row["recomputed_tokens"] for row in rows] == [1, 2, 3, 4, 6.5, 12.5, 18.5]
    assert rows[4]["median_ttft_ms"] == 6500 and rows[4]["p95_ttft_ms"] == pytest.approx(7850)


def test_the_draft_has_a_rule_of_its_own_for_thinking(tmp_path, monkeypatch):
    figure = run_bench(tmp_path, monkeypatch,
                       "draft --simulate --model gpt3-6.7b --dataset lmsys-draft --rates 1 --seconds 60")
    assert {row["system"] for row in figure["rows"]} == {"vllm then", "stateless", "pensieve", "draft"}
    assert {row["think"] for row in figure["rows"]} == {"reading"}


@pytest.mark.slow
def test_a_latency_figure_is_simulated_and_repeats(tmp_path, monkeypatch):
    command = "fig15 --simulate --rates 0.5,1 --seconds 60 --seed 7"
    figure = run_bench(tmp_path, monkeypatch, command)
    assert len(figure["rows"]) == 8 * 3 * 2 and len(figure["ratios"]) == 8 * 2      # panels x systems x rates
    fields = {"system", "model", "dataset", "request_rate", "throughput", "normalized_latency_ms"}
    assert fields <= figure["rows"][0].keys()
    assert all(ratio["how"] == "simulated" for ratio in figure["ratios"])
    assert run_bench(tmp_path, monkeypatch, command) == figure


TRACE = [dict(timestamp=1000 * n, input_length=600 + 300 * (n // 3), output_length=20,
              hash_ids=[n % 3 * 10 + i for i in range(3)])
         for n in range(9)]         # three conversations of three turns


def test_pensieve_beside_itself_with_hints(tmp_path, monkeypatch):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    figure = run_bench(tmp_path, monkeypatch, f"fig15 --simulate --trace {trace} --gpu-cache-tokens 2048 "
                                              "--cpu-cache-tokens 1024 --warm 5")
    without, hinted = figure["rows"]
    assert (without["hints"], hinted["hints"]) == (0, 6)
    assert hinted["prompt_tokens_gpu"] > without["prompt_tokens_gpu"]
    assert figure["ratios"][0]["ours"] == hinted["mean_ttft_ms"] / without["mean_ttft_ms"]


def test_policies_on_a_trace(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    figure = run_bench(tmp_path, monkeypatch, f"fig14 --simulate --trace {trace} --gpu-cache-tokens 2048 "
                                              "--cpu-cache-tokens 1024")
    rows = {row["policy"]: row for row in figure["rows"]}
    assert rows.keys() == {*POLICIES, *EXPERIMENTS}
    fields = {"recomputed_tokens", "gpu_hit_rate", "cpu_hit_rate", "normalized_latency_ms"}
    assert all(fields <= row.keys() for row in rows.values())
    assert all(row["turns"] == 9 and row["dataset"] == "trace" for row in rows.values())
    assert rows["oracle"]["recomputed_tokens"] <= rows["lru"]["recomputed_tokens"]
    # The same tokens return under every policy; only their sources differ.
    seen, = {row["prompt_tokens_gpu"] + row["prompt_tokens_cpu"] + row["recomputed_tokens"]
             for row in rows.values()}
    for row in rows.values():
        assert (row["recomputed_seconds"] > 0) == (row["recomputed_tokens"] > 0)
        assert row["hits_of_attainable"] == pytest.approx(1 - row["recomputed_tokens"] / seen)
    assert rows["lru"]["recomputed_tokens"] > 0
    assert [each["turn"] for each in rows["lru"]["by_turn"]] == ["1", "2", "3"]
    assert "turn by turn" in capsys.readouterr().out


def test_progress_bars_name_what_they_count(tmp_path, monkeypatch):
    """A run that ends at a time counts its seconds, since most planned turns lie behind its end."""
    screen, trace = io.StringIO(), tmp_path / "trace.jsonl"
    screen.isatty = lambda: True
    for module in (curves, run):
        monkeypatch.setattr(module, "tqdm", partial(tqdm, file=screen, mininterval=0, miniters=1))
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    for load in ("--rates 1 --seconds 60", f"--trace {trace}"):
        run_bench(tmp_path, monkeypatch, f"fig13 --simulate {load}")
    for bar in ("curves of fig13: 100%[^\r]* 6/6 ", "seconds of a run: 100%[^\r]* 60/60 ",
                "turns of a run: 100%[^\r]* 9/9 "):
        assert re.search(bar, screen.getvalue()), bar


@pytest.mark.parametrize("name", ["fig3", "fig4"])
def test_costs_of_a_model(tmp_path, monkeypatch, name):
    rows = run_bench(tmp_path, monkeypatch, f"{name} --simulate")["rows"]
    first = [row["seconds"] for row in rows if row["system"] == rows[0]["system"]]
    # Prefill rises with the history, attention with the context.
    assert first == sorted(first) and first[-1] > 2 * first[0]


def test_a_chunk_alone_pays_for_reading_all_weights(tmp_path, monkeypatch):
    for how, paid in (("--simulate", 21.6e-3), ("--device cpu", None)):
        figure = run_bench(tmp_path, monkeypatch, f"fig4 {how}")
        attention, alone = ([row["seconds"] for row in figure["rows"] if row["system"] == system]
                            for system in ("attention", "all else, alone"))
        assert len(set(alone)) == 1 and alone[0] == pytest.approx(paid or alone[0], rel=1e-2)
        assert figure["ratios"][1]["ours"] == attention[-1] / alone[0]


def test_a_single_user_waits_turn_by_turn(tmp_path, monkeypatch):
    figure = run_bench(tmp_path, monkeypatch, "turns --gpu-cache-tokens 400 --cpu-cache-tokens 0")
    rows = figure["rows"]
    assert [row["system"] for row in rows] == ["stateless"] * 4 + ["pensieve"] * 4
    assert [row["context"] for row in rows] == 2 * [92, 192, 292, 392]
    last, kept = rows[3]["ttft_ms"], rows[7]["ttft_ms"]
    assert figure["ratios"][0]["ours"] == last / kept > 1       # 392 tokens to compute, or 93


@pytest.mark.slow
def test_a_profile_is_saved_and_loaded(tmp_path, monkeypatch):
    figure = run_bench(tmp_path, monkeypatch, "profile")
    cost = run.load_profile(tmp_path / "figure.json")
    lengths = [row["context"] for row in figure["rows"] if row["system"] == "attention"]
    assert [cost(length) - cost.rest for length in lengths] == pytest.approx(cost.seconds)
    with pytest.raises(ValueError, match="no profile"):
        run.load_profile(__file__)
    hardware, operators = run.load_machine(tmp_path / "figure.json")
    assert min(hardware) > 0 and hardware.element_size == 4
    assert operators.attention > 0 and 0 <= operators.per_step < 1
    assert 0 < operators.matmul <= 1 and 0 < operators.memory < 1           # no decode reads KV at full speed
    (tmp_path / "figure.json").rename(tmp_path / "here.json")
    # The prediction of the default figure on this machine.
    predicted = run_bench(tmp_path, monkeypatch, f"--simulate --hardware {tmp_path / 'here.json'}")
    assert [row["system"] for row in predicted["rows"]] == ["stateless", "gpu cache", "pensieve"]
    assert all(row["model"] == "tiny_chat" and row["turns"] == 63 for row in predicted["rows"])
    assert predicted["ratios"][0]["how"] == "simulated" and predicted["ratios"][0]["ours"] > 0.9


@pytest.mark.slow
def test_the_simulator_is_checked_against_measured_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "many_turns", lambda limit, rate, think, seed: USERS)
    figure = run_bench(tmp_path, monkeypatch, "check --rates 20")
    assert [row["how"] for row in figure["rows"]] == ["measured", "simulated"] * 3
    measured, simulated = figure["rows"][::2], figure["rows"][1::2]
    expected = [abs(ours["throughput"] / real["throughput"] - 1) for ours, real in zip(simulated, measured)]
    assert figure["ratios"][0]["ours"] == pytest.approx(100 * sum(expected) / 3)


def test_throughput_is_read_where_the_curve_crosses():
    curve = [(1.0, 20.0), (2.0, 30.0), (2.5, 130.0)]
    assert curves.throughput_at(curve, 80.0) == pytest.approx(2.25)
    assert curves.throughput_at(curve, 500.0) == 2.5
    assert curves.throughput_at(curve, 10.0) == pytest.approx(0.5)
    rows = [dict(throughput=throughput, normalized_latency_ms=latency, system="any")
            for throughput, latency in curve]
    slow = [dict(row, normalized_latency_ms=9 * row["normalized_latency_ms"]) for row in rows]
    for at_ms, other, last, doubt in (
            (80.0, rows, rows, "any / any"), (500.0, rows, rows, "at their highest rates: try higher ones"),
            (500.0, slow, rows, "at least"), (500.0, rows, slow, "at most"),
            (10.0, rows, rows, "extrapolated: try lower rates")):
        panel = run.HERE[0]._replace(at_ms=at_ms)
        assert curves.compared(panel, other, last, None, bench.parse_flags([]))["name"].endswith(doubt)


@pytest.mark.parametrize("at_ms, played", [
    (55, [1, 5, 6, 7, 8]), (5, [1]), (999, [1, 8, 12, 14]), (None, list(range(1, 15)))])
def test_only_the_rates_around_a_latency_are_played(monkeypatch, at_ms, played):
    """Of a system that takes 10 ms times the rate."""
    monkeypatch.setattr(curves, "play", lambda system, panel, rate, options: dict(
        request_rate=rate, normalized_latency_ms=10 * rate))
    panel = run.Panel("opt-13b", "sharegpt", tuple(range(1, 15)), at_ms)
    assert [row["request_rate"] for row in curves.play_curve((panel, "pensieve", None))] == played


def test_ratios_stand_beside_the_papers(monkeypatch):
    """A system with a number here serves so many turns per second, the others serve one."""
    served = {"vllm then": 2.0, "stateless, fused": 2.5, "pensieve": 3.0}
    monkeypatch.setattr(curves, "play_curve", lambda task: [
        dict(system=task[1], throughput=served.get(task[1], 1.0), normalized_latency_ms=1.0,
             p90_normalized_latency_ms=1.0)])

    def papers(figure):
        ratios = bench.FIGURES[figure].run(bench.parse_flags([figure, "--simulate", "--jobs", "1"])).ratios
        return [(ratio["paper"], ratio["ours"]) for ratio in ratios if ratio["paper"] or ratio["ours"] == 1.2]
    llama = [(1.70, 1.5), (1.58, 1.2)], [(1.58, 1.5), (1.47, 1.2)]
    # Ours, and then the Llama panels with their kernels.
    assert papers("fig10") == [(1.36, 1.5), (1.14, 1.2), *llama[0], (1.17, 1.5), (1.14, 1.2), *llama[1],
                               *llama[0], *llama[1]]
    assert papers("fig11") == [(2.04, 1.5), (1.64, 1.2), (3.0, 1.5), (2.47, 1.2), (3.0, 1.5), (2.47, 1.2)]
    served.update(draft=3.0)
    assert papers("draft") == [(1.51, 1.5), (1.65, 1.5), (1.84, 1.5), (1.95, 1.5)]


def test_their_kernels_are_played_only_where_heads_share_k_and_v():
    for name, sharing in (("fig10", 2), ("fig11", 1), ("fig13", 1), ("fig15", 4)):
        theirs = [panel for panel in bench.FIGURES[name].run.args[1] if panel.per_query_head]
        assert len(theirs) == sharing
        assert all(panel.model.startswith("llama") for panel in theirs)
        assert all(str(panel).endswith("their kernels") for panel in theirs)
    options = bench.parse_flags(["fig10", "--simulate"])
    users = [PlannedConversation("", [PlannedTurn(9, 9)])]
    for system, operators in (("vllm then", "eager"), ("stateless, fused", "fused")):
        for panel in theirs[0], theirs[0]._replace(per_query_head=False):
            engine = run.build(run.SYSTEMS[system], panel, users, options)
            assert engine.worker.operators == OPERATORS[operators]._replace(
                per_query_head=panel.per_query_head)
            engine.close()


def test_figures_have_the_papers_models_and_measures():
    panels = {name: bench.FIGURES[name].run.args[1] for name in ("fig13", "fig15", "draft")}
    assert {panel.model for name in ("fig13", "fig15") for panel in panels[name]} == {"llama2-13b-gqa"}
    assert {panel.latency for panel in panels["draft"]} == {"p90_normalized_latency_ms"}
    assert run.SYSTEMS["vllm then"].flags == dict(stateless=True, cpu_cache_tokens=0, separate_phases=True,
                                                  reserve=0.01)


def test_policies_are_compared_in_seconds_beside_three_sizes_of_the_cpu_tier(monkeypatch):
    seconds = {"lru": 10.0, "retention": 8.0, "oracle": 2.0}
    monkeypatch.setattr(curves, "play_curve", lambda task: [
        dict(task[0]._asdict(), system=task[1], policy=task[1], request_rate=rate, throughput=rate,
             normalized_latency_ms=1.0, recomputed_tokens=100, cpu_hit_rate=0.5,
             recomputed_seconds=seconds.get(task[1], 9.0)) for rate in task[0].rates])
    figure = bench.FIGURES["fig14"]
    found = figure.run(bench.parse_flags(["fig14", "--simulate", "--jobs", "1"]))
    ours = {ratio["name"]: ratio["ours"] for ratio in found.ratios}
    for size in (110, 165, 220):
        load = f"at 2.5/s, {size} GB"
        assert ours[f"{load}: seconds of recomputation, retention / lru"] == 0.8
        assert ours[f"{load}: share of the gap from lru to oracle that retention closes"] == 0.25
        for pair in ("retention / lru", "literal idleness / literal lru"):
            assert ours[f"{load}: recomputed tokens, {pair} (paper: at best)"] == 1
    assert figure.seeds == 5 and "hits_of_attainable" in figure.columns


def test_seeds_give_the_spread():
    def run(options):
        return curves.Found([dict(x=options.seed)], [dict(name="r", paper=None, ours=options.seed, how="")])
    rows, [ratio] = curves.over_seeds(run, 3, bench.parse_flags(["--seed", "4"]))
    assert [row["seed"] for row in rows] == [row["x"] for row in rows] == [4, 5, 6]
    assert ratio["ours"] == 5 and ratio["spread"] == 1


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [dict(system=system, model="m", dataset="d", throughput=x, normalized_latency_ms=2 * x)
            for system in "ab" for x in (1.0, 2.0)]
    bars = [dict(row, request_rate=60.0, mean_ttft_ms=9.5, computed_tokens=126_200) for row in rows[::2]]
    for name, drawn in (("fig10", rows), ("default", bars)):
        bench.plot(bench.FIGURES[name], drawn, str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_each_way_to_run_a_system_has_its_line(monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    row = dict(system="a", request_rate=1.0, normalized_latency_ms=2.0)
    rows = [dict(row, how=how) for how in ("measured", "simulated") for _ in range(2)]
    bench.draw_lines(figure, dict(panel=rows), "request_rate", "normalized_latency_ms")
    assert [line.get_label() for line in figure.axes[0].lines] == ["a, measured", "a, simulated"]
    bench.draw_lines(figure, dict(panel=rows), "request_rate", "normalized_latency_ms", linear=True)
    # Each line carries its name and last value; there is no legend.
    assert [text.get_text() for text in figure.axes[-1].texts] == ["a, measured: 2", "a, simulated: 2"]
    assert figure.axes[-1].get_yscale() == "linear" and not figure.axes[-1].get_legend()


def test_a_plot_shows_the_first_of_several_seeds(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    rows = [dict(system="a", model="m", dataset="d", throughput=1.0, normalized_latency_ms=2.0, seed=seed)
            for seed in (3, 4)]
    drawn = []
    monkeypatch.setattr(bench, "draw_lines", lambda canvas, panels, *axes: drawn.extend(panels.values()))
    bench.plot(bench.FIGURES["fig10"], rows, str(tmp_path / "plot"))
    assert drawn == [rows[:1]]
    with pytest.raises(ValueError, match="nothing to plot"):
        bench.plot(bench.FIGURES["fig10"], [dict(seed=3)], str(tmp_path / "plot"))


def test_policies_on_a_trace_are_bars(tmp_path, monkeypatch):
    """There is one load, the trace's own: nothing that lines could be drawn over."""
    pytest.importorskip("matplotlib")
    rows = [dict(system=system, model="m", dataset="trace", request_rate=None, recomputed_seconds=1.5)
            for system in "ab"]
    drawn, draw = [], bench.draw_bars

    def draw_and_note(canvas, *arguments):
        drawn.append(arguments)
        draw(canvas, *arguments)

    monkeypatch.setattr(bench, "draw_bars", draw_and_note)
    bench.plot(bench.FIGURES["fig14"], rows, str(tmp_path / "plot"))
    assert drawn == [(rows, ("recomputed_seconds",))]


def test_help_describes_each_figure_with_its_time(capsys):
    with pytest.raises(SystemExit):
        bench.parse_flags(["--help"])
    told = capsys.readouterr().out
    for name, figure in bench.FIGURES.items():
        assert f"  {name:12}{figure.about}\n" in told
        assert re.search(r"\(.*\b([0-9]+ s|minutes?|hours?)\b.*\)$", figure.about), name


def test_every_figure_can_be_plotted():
    """Its axes and bars have words."""
    for figure in bench.FIGURES.values():
        assert {*(figure.bars or (figure.x, figure.y))} <= bench.WORDS.keys()


@pytest.mark.parametrize("flags, message", [
    (["--plot", "plot.png"], "pip install matplotlib"),
    (["fig10", "--json", "no/such/directory/figure.json"], "no/such/directory"),
    (["fig10", "--plot", "/"], "/ cannot be written"),
    (["fig10", "--gpus", "2"], "add --simulate"),
    (["fig10", "--simulate", "--guesses", "4"], "would all be right"),
    (["fig10", "--trace", "trace.jsonl", "--dataset", "sharegpt"], "give one of them")])
def test_a_flag_that_cannot_work_fails_before_anything_runs(monkeypatch, capsys, flags, message):
    monkeypatch.setitem(sys.modules, "matplotlib", None)        # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        bench.parse_flags(flags)
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_flag_counts_even_if_it_repeats_the_default():
    """A simulation runs up to 256 requests at once, and Engine by default 64: a given 64 must win."""
    given = bench.parse_flags(["fig10", "--simulate", "--max-running", "64", "--model", "tiny_chat"])
    assert given.given == dict(max_running=64) and given.model == "tiny_chat"
    assert bench.parse_flags([]).given == {} and bench.parse_flags([]).model is None


def test_a_run_too_short_to_fill_the_caches_says_so(tmp_path, monkeypatch, capsys):
    command = "fig15 --simulate --model opt-13b --think 60 --rates 3 --seconds 60"
    rows = run_bench(tmp_path, monkeypatch, f"{command} --gpu-cache-tokens 9000000")["rows"]
    assert [row.get("too_short") for row in rows] == [None, None, "GPU"]
    told = capsys.readouterr().out
    assert "opt-13b, sharegpt, think 60 s\n" in told and "the run was too short" in told
    tiers = "--gpu-cache-tokens 4000 --cpu-cache-tokens"
    rows = run_bench(tmp_path, monkeypatch, f"{command} {tiers} 9000000")["rows"]
    assert [row.get("too_short") for row in rows] == [None, None, "CPU"]
    capsys.readouterr()
    rows = run_bench(tmp_path, monkeypatch, f"{command} {tiers} 2000")["rows"]
    assert rows[-1]["turnovers"] > 1


def turns_of_a_half(ended, hits, context):
    usage = dict(gpu=hits, cpu=0, recomputed=1000 - hits, new=context - 1000, prompt_tokens=context)
    return [run.Served(ended - 2, ended - 1, ended, 10, usage)]


@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("late, until, reason", [
    ((500, 2000), 30, None), ((530, 2000), 30, "hits"), ((485, 2300), 30, None), ((500, 2500), 30, "load"),
    ((530, 2500), np.inf, None)])
def test_a_run_that_has_not_settled_says_so(stateless, late, until, reason):
    """Turns count from 10 s on. At first half of the tokens are hits, and the context has 2,000 tokens."""
    engine = SimpleNamespace(config=SimpleNamespace(stateless=stateless),
                             stats=lambda: dict(chunks_dropped=9, chunks_swapped_out=9))
    served = turns_of_a_half(5, 0, 9000) + turns_of_a_half(15, 500, 2000) + turns_of_a_half(25, *late)
    assert run.too_short(engine, served, 10, until) == reason


@pytest.mark.parametrize("flags, message", [
    (["fig99"], "fig99"),
    (["--gpu-cache-tokens", "16"], "no conversation"),
    (["--model", "no/model at all"], "no/model"),
    (["fig10", "--simulate", "--jobs", "1", "--model", "no/such/model"], "no/such/model"),
    (["fig14", "--simulate", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    (["fig14", "--simulate", "--trace", __file__], "test_bench.py"),
    (["fig10", "--rates", "1,x"], "--rates: must be a number above 0, got 'x'"),
    (["--rates", "20,40"], "one number"),
    (["fleet", "--simulate", "--rates", "1,2"], "one number"),
    (["serve", "--rates", "1,2"], "one number"),
    (["fig14", "--simulate", "--at-ms", "120"], "leave --at-ms out"),
    (["--simulate", "--hardware", __file__, "--cpu-gb", "10"], "give --cpu-cache-tokens instead"),
    (["--simulate"], "leave --simulate out"),
    (["--simulate", "--jobs", "1", "--hardware", "b200"], "b200"),
    (["--think", "soon"], "--think: must be a number above 0, got 'soon'"),
    (["--hardware", "h100"], "add --simulate"),
    (["profile", "--simulate"], "profile"),
    (["check", "--simulate"], "check"),
    (["serve", "--simulate"], "serve"),
    (["kernel", "--simulate"], "kernel"),
    (["fig10", "--profile", __file__], "no profile")])
def test_bad_input_gets_one_line_and_exit_2(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as exit:
        bench.main()
    assert exit.value.code == 2 and message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("flags, message", [
    (["fig10", "--simulate", "--think", "30"], "leave --think out"),
    (["fleet", "--simulate"], "add --rates")])
def test_a_trace_with_times_has_a_load_of_its_own(tmp_path, monkeypatch, capsys, flags, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in TRACE))
    test_bad_input_gets_one_line_and_exit_2(monkeypatch, capsys, [*flags, "--trace", str(trace)], message)


def test_a_fleet_does_not_rewind(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
                     "a,0,0,90,10,5\na,1,50,90,10,5\n")
    flags = ["fleet", "--simulate", "--jobs", "1", "--rates", "1", "--trace", str(trace)]
    test_bad_input_gets_one_line_and_exit_2(monkeypatch, capsys, flags, "does not play: name another figure")


def test_a_measured_trace_is_played_by_the_embedded_model(tmp_path):
    options = bench.parse_flags(["fig10"])
    options.trace, options.conversations = "trace.jsonl", USERS
    panel, = curves.adapted(run.HERE, options)
    assert (panel.model, panel.dataset, panel.gpus) == ("tiny_chat", "trace", 1)


def test_a_run_sleeps_no_longer_than_it_lasts():
    engine = Engine("tiny_chat", cost=COST, gpu_cache_tokens=64, cpu_cache_tokens=256)
    late = [PlannedConversation("late", [PlannedTurn(5, 6)], arrival=1000.0)]
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        time.sleep(0.1)
    assert run.drive(engine, late, seed=0, sleep=sleep, until=0.1) == [] and max(slept) <= 0.1
    engine.close()


def test_a_broken_line_is_named(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "trace.jsonl"
    broken = '{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}'
    trace.write_text(f"{json.dumps(TRACE[0])}\n{broken}\n")
    monkeypatch.setattr(sys, "argv", ["bench.py", "fig14", "--simulate", "--trace", str(trace)])
    with pytest.raises(SystemExit):
        bench.main()
    assert "line 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fleet():
    """With affinity a conversation is as well cached as on one server; otherwise it mostly is not."""
    options = bench.parse_flags(["fleet", "--simulate", "--seconds", "120"])
    panel = run.Panel("opt-13b", "sharegpt", rates=(1.0,), think=20.0)
    affine, random, least = [fleet.play_fleet((panel, 8, router, options)) for router in fleet.ROUTERS]
    assert affine["hit_rate"] > 0.9 and random["hit_rate"] < 0.3 and least["hit_rate"] < 0.3
    assert affine["busiest_server"] > least["busiest_server"] >= 1
    assert affine["too_short"] == "GPU"
    assert affine["request_rate"] == 8 and affine["turns"] == pytest.approx(random["turns"], rel=0.1)


# ---- memory: rules that give slots

@pytest.mark.parametrize("slots", [64, 100])
def test_contiguous_slots_never_overlap_and_are_joined_again(slots):
    rng, held = np.random.default_rng(0), []
    memory = memory_file.Buddies(slots, lambda prompt, reply: prompt + reply)
    whole = {size: set(free) for size, free in memory.free.items()}
    for prompt in rng.integers(1, 20, 300).tolist():
        if piece := memory.take(prompt, 3):
            assert prompt + 3 <= piece[1] < 2 * (prompt + 3)
            held.append(piece)
        else:
            memory.give_back(held.pop(int(rng.integers(len(held)))))
        taken = [slot for first, size in held for slot in range(first, first + size)]
        assert len(taken) == len(set(taken)) and set(taken) <= set(range(slots))
    for piece in held:
        memory.give_back(piece)
    assert {size: free for size, free in memory.free.items() if free} == whole


def test_requests_are_served_under_any_rule():
    """Chunks too few for all: the latest request gives way, and all replies are complete in the end."""
    lengths = [(5, 8), (3, 1), (9, 12), (4, 4), (6, 2)]
    worker = memory_file.simulated_worker()
    for memory in (memory_file.Chunks(24, 4), memory_file.Buddies(32, lambda prompt, reply: prompt + reply)):
        steps = list(memory_file.play([*lengths, (24, 1)], memory, worker))     # the last one must run alone
        assert sum(running for _, running, _ in steps) == 27 + 1
        assert max(kv for kv, _, _ in steps) <= 24 and all(seconds > 0 for _, _, seconds in steps)


def test_slots_of_replies_are_counted():
    rng = np.random.default_rng(0)
    # Chunks of 2: two replies of 2 tokens share the two chunks of a prompt of 4 in both steps; each holds 3.
    assert memory_file.parallel_sampling(4, 2, 2, 2, rng) == (8, 24)
    assert memory_file.parallel_sampling(5, 1, 2, 2, rng) == memory_file.beams(5, 1, 2, 2, rng) == (4, 12)
    assert memory_file.beams(5, 9, 1, 2, rng)[0] == 0
    saved = [memory_file.beams(20, 60, width, 4, rng) for width in (2, 4)]
    assert 0.3 < saved[0][0] / saved[0][1] < 0.5 < saved[1][0] / saved[1][1] < 0.75


def test_replies_and_a_prefix_are_played_by_our_engine():
    """A prompt of 64 tokens, 3 replies of 2: the prompt is computed once. So is a prefix of 64."""
    def slots(lengths, **load):
        steps = list(memory_file.play_ours(lengths, memory_file.simulated_worker(), stateless=True, **load))
        return max(kv for kv, _, _ in steps)
    held, apart = slots([(64, 2)], replies=3), slots([(64, 2)] * 3)
    assert held < 64 + 3 * 32 < 3 * 64 <= apart
    assert slots([(5, 2)] * 3, prefix=64) < 64 + 3 * 32 < slots([(69, 2)] * 3)


@pytest.mark.slow
def test_sharing_makes_larger_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "TOGETHER_REPLIES", 1200)
    figure = run_bench(tmp_path, monkeypatch, "together")
    *_, short, long = figure["ratios"]
    assert (short["paper"], long["paper"]) == (1.67, 3.58) and long["ours"] > short["ours"] > 1
    assert figure["rows"] == run_bench(tmp_path, monkeypatch, "together")["rows"]


@pytest.mark.slow
def test_waste_and_sharing_are_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_file, "SLOTS", 4_200)
    monkeypatch.setattr(memory_file, "WASTE_TOKENS", 60_000)
    monkeypatch.setattr(memory_file, "SHARING_REQUESTS", 5)
    figure = run_bench(tmp_path, monkeypatch, "waste")
    rows = {row["system"]: row for row in figure["rows"] if row["dataset"] == "sharegpt"}
    systems = "whole context", "true length", "chunks of 128", "chunks of 16"
    shares = [rows[system]["kv_share"] for system in systems]
    assert shares == sorted(shares) and rows["whole context"]["running"] == pytest.approx(2)
    assert rows["ours, stateless"]["kv_share"] < rows["ours"]["kv_share"] <= 1
    papers = {ratio["name"]: ratio["paper"] for ratio in figure["ratios"]}
    assert papers["sharegpt, power of two: slots that hold KV, %"] == 26.8
    assert papers["alpaca, chunks of 16: requests at once"] == 132.44
    assert run_bench(tmp_path, monkeypatch, "waste")["rows"] == figure["rows"]
    saved = {(row["dataset"], row["chunk"], row["system"], row["replies"]): row["saved"]
             for row in run_bench(tmp_path, monkeypatch, "sharing")["rows"]}
    assert saved["alpaca", 16, "parallel sampling", 2] < saved["alpaca", 16, "beam search", 2] < 1 / 2
