"""Loads of agents and of reasoning models, and what the policies are told about them."""
import json
import math
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

import bench
from eviction import RecomputeCost
from experiments import agents, reasoning
from experiments.policies import Oracle, Told
from experiments.workload import PlannedConversation, PlannedTurn
import fakes
from kv_cache import KVCache
from test_bench import run_bench
from test_kv_cache import copy, idle as idle_in_cache

COST = RecomputeCost({32: 0.03, 64: 0.05}, rest=0.01)


# ---- agents

def test_sessions_have_the_published_pauses_and_counts():
    users, expected = agents.sessions(3000, seed=0)
    assert (users, expected) == agents.sessions(3000, seed=0)
    pauses = [turn.think_seconds for user in users for turn in user.turns[1:]]
    hints = np.array([expected[pause] for pause in pauses])
    assert 0.5 < median(pauses) < 1.5                               # three of four are shell commands
    assert np.median([pause for pause, hint in zip(pauses, hints) if hint > 20]) == pytest.approx(84, rel=0.2)
    assert max(user.tokens for user in users) <= agents.LIMIT and not any(user.arrival for user in users)
    new, generated = np.array([turn[:2] for user in users for turn in user.turns[1:]]).mean(axis=0)
    assert new == pytest.approx(1200 / 4, rel=0.1) and generated == pytest.approx(520 / 4, rel=0.1)


def test_a_hint_is_the_median_of_its_kind_and_never_the_pause():
    users, expected = agents.sessions(3000, seed=0)
    kinds = np.log([agents.FILES.median, agents.TASK.median, agents.SHELL.median, agents.USER.median])
    pauses = np.array(sorted(expected))
    hints = np.log([expected[pause] for pause in pauses])
    nearest = np.abs(hints[:, None] - kinds).min(axis=1)
    assert np.percentile(nearest, 95) < 2 * agents.NOISE            # noise, and nothing else
    shell = (np.abs(hints - kinds[2]) < agents.NOISE) & (pauses < 1e3)
    assert abs(np.corrcoef(hints[shell], np.log(pauses[shell]))[0, 1]) < 0.1


def test_hints_of_a_trace_know_short_pauses_from_long_ones():
    pauses = [0.5, 1.0, 2.0, 100.0, 200.0, 300.0] * 200
    turns = [PlannedTurn(5, 5, pause + n * 1e-6) for n, pause in enumerate(pauses)]
    expected = agents.hints_of_a_trace([PlannedConversation("a", turns)], seed=0)
    right = [(hint > 14) == (pause >= agents.TOOL_SECONDS) for pause, hint in expected.items()]
    assert np.mean(right) == pytest.approx(1 - agents.WRONG, abs=0.03)
    only_short = agents.hints_of_a_trace([PlannedConversation("a", turns[:3])], seed=0)
    assert all(0 < hint < math.inf for hint in only_short.values())


def test_only_the_oracle_is_told_the_pause_itself():
    told, oracle, lru = Told(COST, 32), Oracle(COST, 32), agents.SYSTEMS["lru"](COST, 32)
    agents.listener(told, {7.0: 0.8})("a", 7.0, None)
    assert told.expected == {"a": 0.8}
    agents.listener(told, {7.0: 0.8})("a", math.inf, None)          # the session is over
    assert told.expected == {"a": agents.USER.median}
    assert not hasattr(told, "leave") and hasattr(oracle, "leave")  # nor that nobody returns to a branch
    agents.listener(oracle, {7.0: 0.8})("a", 7.0, None)
    assert oracle.thinks == {"a": 7.0} and agents.listener(lru, {}) is None


def test_a_conversation_expected_late_leaves_first():
    cache = KVCache(32, 8, 4, 4, 64, Told(fakes.COST, 4))
    a, b = idle_in_cache(cache, "a", 8), idle_in_cache(cache, "b", 8)
    policy = cache.policy
    now = a.last_active
    assert policy.idle(now + 83.0, policy.last_needed(a)) == 83.0   # no hint: the retention value
    policy.expect("a", 1.0)
    policy.expect("b", 84.0)
    assert policy.idle(now + 83.0, policy.last_needed(a)) == policy.idle(now, policy.last_needed(b)) == 84.0
    assert policy.last_needed(SimpleNamespace(waiting=True, name="b", last_active=0.0)) == math.inf


def test_the_client_that_expects_its_user_makes_room_for_the_others():
    cache = KVCache(32, 8, 4, 4, 64, Told(fakes.COST, 4))
    cache.policy.expect("a", 1.0)
    cache.policy.expect("b", 84.0)
    a = idle_in_cache(cache, "a", 8)
    idle_in_cache(cache, "b", 8)
    assert [ticket.chunk.users[0].name for ticket in copy(cache, 8)] == ["b", "b"]
    assert [chunk.state for chunk in a.chunks] == ["GPU", "GPU"]


@pytest.mark.slow
def test_agents_are_simulated_and_repeat(tmp_path, monkeypatch):
    command = ("agents --simulate --jobs 1 --seconds 90 --seeds 1 --rates 2 "
               "--gpu-cache-tokens 40000 --cpu-gb 1")
    figure = run_bench(tmp_path, monkeypatch, command)
    assert [row["system"] for row in figure["rows"]] == list(agents.SYSTEMS)
    seconds = {row["system"]: row["recomputed_seconds"] for row in figure["rows"]}
    assert seconds["oracle"] <= min(seconds.values()) < seconds["lru"]
    assert figure == run_bench(tmp_path, monkeypatch, command)
    assert "share of the gap from lru to oracle that told closes" in figure["ratios"][-1]["name"]


def rows_of_agents(**seconds):
    return [dict(system=name, dataset="t", request_rate=2.0, cpu_gb=10.0, mean_ttft_ms=5.0,
                 recomputed_seconds=seconds.get(name, 0.0)) for name in agents.SYSTEMS]


def test_nobody_recomputes_is_no_gain():
    options = bench.parse_flags(["agents", "--simulate"])
    assert {one["ours"] for one in agents.ratios_to_lru(rows_of_agents(), options)[:-1]} == {1.0}
    halved = agents.ratios_to_lru(rows_of_agents(lru=4.0, told=2.0), options)
    assert [one["ours"] for one in halved if "told / lru" in one["name"]] == [0.5, 1.0]


@pytest.mark.parametrize("figure", ["agents", "fig14"])
def test_a_tier_in_tokens_is_not_called_one_in_gb(tmp_path, monkeypatch, figure):
    """Nor is the paper's number beside a trace."""
    lines = [dict(session_id=n, input_length=300, output_length=20, timestamp=0) for n in range(4)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    command = f"{figure} --simulate --jobs 1 --cpu-cache-tokens 1024 --trace {path} --rates 1 --seconds 9"
    found = run_bench(tmp_path, monkeypatch, command)
    assert not any("GB" in one["name"] or one["paper"] for one in found["ratios"])
    assert not any("cpu_gb" in row for row in found["rows"])


@pytest.mark.parametrize("figure", ["agents", "fig14"])
def test_a_tier_that_no_conversation_fits_is_named(tmp_path, monkeypatch, capsys, figure):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(dict(session_id=1, input_length=300, output_length=20, timestamp=0)))
    with pytest.raises(SystemExit):
        command = f"{figure} --simulate --jobs 1 --gpu-cache-tokens 128 --trace {path}"
        run_bench(tmp_path, monkeypatch, command)
    assert "no conversation fits 128 tokens: give --gpu-cache-tokens a larger" in capsys.readouterr().err


# ---- reasoning

TURNS, THOUGHTS = [PlannedTurn(10, 5, 0.0), PlannedTurn(20, 6, 60.0)], [30, 40]


@pytest.mark.parametrize("way, seen, contexts", [
    ("keep", [(10, 35, 0.0, None), (20, 46, 60.0, None)], [45, 111]),
    ("take back", [(10, 35, 0.0, None), (25, 46, 60.0, 10)], [45, 81]),
    ("take back at once", [(10, 35, 0.0, None), (5, 1, 0.0, 10), (20, 46, 60.0, 15), (6, 1, 0.0, 35)],
     [45, 16, 81, 42])])
def test_thoughts_are_kept_or_taken_back(way, seen, contexts):
    turns = reasoning.turns_of(way, TURNS, THOUGHTS)
    assert turns == [PlannedTurn(*turn) for turn in seen]
    assert PlannedConversation("a", turns).contexts == contexts


def test_thoughts_are_the_same_each_way_and_three_times_the_reply():
    users = [PlannedConversation(str(n), [PlannedTurn(10, 200)] * 4) for n in range(500)]
    kept, back = (reasoning.load(way, users, 0, reasoning.LIMIT) for way in reasoning.WAYS[:2])
    replies = [[turn.output_tokens for one in load for turn in one.turns] for load in (kept, back)]
    assert replies[0] == replies[1] and np.mean(replies[0]) == pytest.approx(800, rel=0.05)
    long = PlannedConversation("long", [PlannedTurn(reasoning.LIMIT, 200)])
    assert reasoning.load("take back", [long, *users], 0, reasoning.LIMIT)[0].name == "0"
    names = [[one.name for one in reasoning.load(way, users, 0, 3000)] for way in reasoning.WAYS]
    assert names[0] == names[1] == names[2] and 0 < len(names[0]) < 500     # the same users each way
    with pytest.raises(ValueError, match="no conversation fits 4096 tokens: give --gpu-cache-tokens"):
        reasoning.load("take back", [long], 0, 4096)


def test_what_is_taken_back_leaves_with_a_later_turn():
    clock, shortened = SimpleNamespace(now=1.0), []
    engine = SimpleNamespace(clock=lambda: clock.now, shorten=lambda *args: shortened.append(args))
    foresee, leave = reasoning.dropping(engine)
    leave("a", 10)
    foresee("a@1", 60.0, None)
    assert not shortened                                            # the engine opens a@1 in its next step
    clock.now = 2.0
    foresee("b", math.inf, None)                                    # a last turn: nothing is left
    foresee("c", 5.0, 7)
    assert shortened == [("a", 10)]
    leave("c", 7)
    clock.now = 3.0
    leave("d", 8)
    assert shortened == [("a", 10), ("c", 7)]


def test_a_gpu_tier_below_the_limit_leaves_out_longer_users(tmp_path, monkeypatch):
    command = "reasoning --simulate --jobs 1 --seconds 20 --seeds 1 --rates 2 --gpu-cache-tokens 4096"
    assert len(run_bench(tmp_path, monkeypatch, command)["rows"]) == 3


def test_reasoning_takes_no_trace():
    with pytest.raises(ValueError, match="leave --trace out"):
        bench.FIGURES["reasoning"].run(bench.parse_flags(["reasoning", "--simulate", "--trace", "t.csv"]))


@pytest.mark.slow
def test_reasoning_is_simulated_and_repeats(tmp_path, monkeypatch):
    command = "reasoning --simulate --jobs 1 --seconds 90 --seeds 1 --rates 0.7"
    figure = run_bench(tmp_path, monkeypatch, command)
    rows = {row["system"]: row for row in figure["rows"]}
    assert list(rows) == list(reasoning.WAYS) and len(figure["ratios"]) == 4
    assert rows["take back"]["prompt_tokens_new"] > rows["keep"]["prompt_tokens_new"]
    assert all(row["turns"] == pytest.approx(rows["keep"]["turns"], rel=0.1) for row in rows.values())
    assert figure == run_bench(tmp_path, monkeypatch, command)


@pytest.mark.parametrize("name", ["agents", "reasoning"])
def test_both_are_only_simulated(name):
    with pytest.raises(ValueError, match="add --simulate"):
        bench.FIGURES[name].run(bench.parse_flags([name]))
