"""The measured benchmark: every turn at its time, figures that add up, one clear line for bad input."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from engine import Engine
from eviction import RecomputeCost
from workload import Conversation, Turn

COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
USERS = [Conversation(str(n), [Turn(5 + n, 6), Turn(4, 3, think_seconds=0.05), Turn(7, 4, think_seconds=0.02)], arrival=0.03 * n) for n in range(4)]


@pytest.mark.parametrize("system", bench.SYSTEMS)
def test_drive_serves_every_turn_at_its_time(system):
    engine = Engine("tiny_chat", cost=COST, **(dict(gpu_cache_tokens=64, cpu_cache_tokens=256, chunk_size=8) | bench.SYSTEMS[system]))
    served = bench.drive(engine, USERS, seed=0)
    engine.close()
    assert sorted(turn.output_tokens for turn in served) == sorted(turn.output_tokens for user in USERS for turn in user.turns)
    assert all(turn.due <= turn.first_token <= turn.ended for turn in served)
    contexts = sorted(turn.usage["prompt_tokens"] for turn in served)
    assert contexts == sorted(length for n in range(4) for length in (5 + n, 15 + n, 25 + n))      # prompts and replies add up
    for user in USERS:
        assert min(turn.due for turn in served) <= user.arrival
    row = bench.summary(served)
    assert row["prompt_tokens_new"] == sum(5 + n + 4 + 1 + 7 + 1 for n in range(4))               # the last token of a reply was never fed
    assert (row["gpu_hit_rate"] + row["cpu_hit_rate"] == 0) == (system == "stateless")
    assert row["computed_tokens"] == row["prompt_tokens_recomputed"] + row["prompt_tokens_new"] + 4 * 13


def test_the_workload_repeats_and_fits():
    workload = bench.many_turns(512, seed=3)
    assert workload == bench.many_turns(512, seed=3) != bench.many_turns(512, seed=4)
    assert max(sum(turn.input_tokens + turn.output_tokens for turn in user.turns) for user in workload) <= 512


def test_the_json_has_rows_and_ratios(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "many_turns", lambda limit, seed: USERS)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--json", str(tmp_path / "figures.json")])
    bench.main()
    figure = json.loads((tmp_path / "figures.json").read_text())
    assert figure.keys() == {"figure", "command", "commit", "machine", "seed", "rows", "ratios"}
    assert [row["system"] for row in figure["rows"]] == list(bench.SYSTEMS)
    assert {"model", "dataset", "request_rate", "throughput", "normalized_latency_ms"} <= figure["rows"][0].keys()
    assert all(ratio["how"] == "measured" and ratio["ours"] > 0 for ratio in figure["ratios"])
    assert "pensieve" in capsys.readouterr().out


@pytest.mark.parametrize("flags, message", [(["fig99"], "fig99"), (["--gpu-cache-tokens", "16"], "conversations"), (["--model", "no/model at all"], "no/model")])
def test_bad_flags_get_one_line_and_exit_2(flags, message):
    done = subprocess.run([sys.executable, Path(bench.__file__), *flags], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr.strip().splitlines()[-1]
