"""A running server as an engine: our own, over its sockets."""
import json
import socketserver
import sys
import threading

import pytest
from tokenizers import Tokenizer

import bench
from serving.sessions import Sessions
from experiments import run
from experiments.remote import RemoteEngine
from clients import serving
from experiments.workload import PlannedConversation, PlannedTurn
from scheduler import SOURCES

TURNS = [PlannedTurn(30, 6), PlannedTurn(30, 5, think_seconds=0.02), PlannedTurn(40, 4)]
USERS = [PlannedConversation(str(n), TURNS, arrival=0.02 * n) for n in range(3)]


@pytest.fixture(scope="module")
def server():
    with serving(Sessions("tiny_chat"), api_keys=["secret"]) as server:
        yield server


@pytest.mark.parametrize("stateful", [False, True])
def test_every_turn_is_served_and_counted(server, stateful):
    served = run.drive(RemoteEngine(server.url, "secret", stateful=stateful), USERS, seed=0)
    assert sorted(turn.output_tokens for turn in served) == [4, 4, 4, 5, 5, 5, 6, 6, 6]
    assert all(turn.due <= turn.first_token <= turn.ended for turn in served)
    contexts = [turn.usage["prompt_tokens"] for turn in served]
    for turn in served:
        assert sum(turn.usage[source] for source in SOURCES) == turn.usage["prompt_tokens"]
    assert max(contexts) > 2.5 * min(contexts)                      # later turns stand on earlier ones
    assert sum(turn.usage["gpu"] > 0 for turn in served) == 6       # and find them in the cache


def test_the_figure_has_the_names_that_others_use(server, tmp_path, monkeypatch, capsys):
    path = tmp_path / "figure.json"
    monkeypatch.setattr(run, "many_turns", lambda limit, rate, think, seed: USERS)
    monkeypatch.setattr(sys, "argv", ["bench.py", "serve", "--url", server.url, "--server-key", "secret",
                                      "--json", str(path)])
    bench.main()
    rows = json.loads(path.read_text())["rows"]
    assert [row["system"] for row in rows] == ["resend", "stateful"]
    assert {"request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms",
            "median_tpot_ms", "p99_e2el_ms"} <= rows[0].keys()


@pytest.mark.parametrize("url, key, message", [
    (None, "wrong", "401"), ("http://127.0.0.1:9", None, "cannot be reached"),
    ("nonsense", None, "cannot be reached")])
def test_a_server_that_does_not_serve_is_told_in_one_line(server, url, key, message):
    with pytest.raises(ValueError, match=message):
        RemoteEngine(url or server.url, key)


@pytest.mark.parametrize("answer", [
    b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])
def test_something_else_than_a_chat_server_is_told_in_one_line(answer):
    class Nonsense(socketserver.StreamRequestHandler):
        def handle(self):
            self.wfile.write(answer)
    with socketserver.TCPServer(("127.0.0.1", 0), Nonsense) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(ValueError, match="did not answer as it should"):
            RemoteEngine(f"http://127.0.0.1:{other.server_address[1]}")


def test_the_chat_template_does_not_count_as_words(server):
    engine = RemoteEngine(server.url, "secret")
    tokenizer = Tokenizer.from_file("tiny_chat/tokenizer.json")
    assert engine.tokens_per_word == len(tokenizer.encode(" time").ids)


def test_close_waits_for_the_turns_under_way(server):
    engine, ended = RemoteEngine(server.url, "secret"), []
    turns = [engine.submit([0] * 20, name, 20, True, ended.append) for name in "ab"]
    engine.close()
    assert {*ended} == {*turns} and all(turn.result().text for turn in turns)
