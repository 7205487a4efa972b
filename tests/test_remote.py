"""A running server as an engine: our own, over its sockets."""
import json
import sys

import pytest

import bench
from experiments.remote import RemoteEngine
from serving.sessions import Sessions
from clients import serving
from experiments.workload import Conversation, Turn

USERS = [Conversation(str(n), [Turn(30, 6), Turn(30, 5, think_seconds=0.02), Turn(40, 4)], arrival=0.02 * n)
         for n in range(3)]


@pytest.fixture(scope="module")
def server():
    with serving(Sessions("tiny_chat"), api_keys=["secret"]) as server:
        yield server


@pytest.mark.parametrize("stateful", [False, True])
def test_every_turn_is_served_and_counted(server, stateful):
    served = bench.drive(RemoteEngine(server.url, "secret", stateful=stateful), USERS, seed=0)
    assert sorted(turn.output_tokens for turn in served) == [4, 4, 4, 5, 5, 5, 6, 6, 6]
    assert all(turn.due <= turn.first_token <= turn.ended for turn in served)
    contexts = [turn.usage["prompt_tokens"] for turn in served]
    assert all(sum(turn.usage[source] for source in bench.SOURCES) == turn.usage["prompt_tokens"]
               for turn in served)
    assert max(contexts) > 2.5 * min(contexts)                      # later turns stand on earlier ones
    # and all that were not the first come from the cache
    assert sum(turn.usage["gpu"] > 0 for turn in served) == 6


def test_the_figure_has_the_names_that_others_use(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "many_turns", lambda limit, rate, think, seed: USERS)
    monkeypatch.setattr(sys, "argv", ["bench.py", "serve", "--url", server.url, "--server-key", "secret",
                                      "--json", str(tmp_path / "figure.json")])
    bench.main()
    rows = json.loads((tmp_path / "figure.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["resend", "stateful"]
    assert {"request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms",
            "median_tpot_ms", "p99_e2el_ms"} <= rows[0].keys()


@pytest.mark.parametrize("url, key, message", [(None, "wrong", "401"),
                                               ("http://127.0.0.1:9", None, "cannot be reached"),
                                               ("nonsense", None, "cannot be reached")])
def test_a_server_that_does_not_serve_is_told_in_one_line(server, url, key, message):
    with pytest.raises(ValueError, match=message):
        RemoteEngine(url or server.url, key)
