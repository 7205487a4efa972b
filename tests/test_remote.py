"""A running server as an engine: our own, over its sockets, and others' ways to write a stream."""
import contextlib
import http.server
import json
import os
import socketserver
import sys
import threading

import pytest
from tokenizers import Tokenizer

import bench
from serving.sessions import Sessions
from experiments import chats, run
from experiments.remote import WORDS, RemoteEngine, Said, beginning, event_data, joined
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


@pytest.mark.parametrize("stateful", [False, True])
def test_who_rewinds_sends_a_shorter_history(server, stateful):
    """It keeps nothing, a part of the prompt, a part of the reply, all."""
    engine, contexts = RemoteEngine(server.url, "secret", stateful=stateful), []
    for keep in (0, 12, 33, 36, None):
        turns = [PlannedTurn(30, 6), PlannedTurn(30, 6, 0.01, keep)]
        _, second = run.drive(engine, [PlannedConversation(f"keep {keep}", turns)], seed=0)
        contexts.append(second.usage["prompt_tokens"])
    nothing, of_prompt, of_reply, all_36, everything = contexts
    assert nothing < of_prompt < of_reply and all_36 == everything > of_prompt


def test_the_beginning_of_a_history():
    history = [Said(dict(role=role, content=10 * letter), 5, response)
               for role, letter, response in (("user", "a", None), ("assistant", "b", "r1"),
                                              ("user", "c", None), ("assistant", "d", "r2"))]
    for keep in (0, 5, 10, 15, 20, 99):
        assert beginning(history, keep) == history[:keep // 5]
    *whole, cut = beginning(history, 18)
    assert whole == history[:3] and cut == Said(dict(role="assistant", content="d" * 6), 3)
    said = joined(*beginning(history, 2), Said(dict(role="user", content="e"), 4))
    assert said == Said(dict(role="user", content="aaaa e"), 6)


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
    assert [each["turn"] for each in rows[1]["by_turn"]] == ["1", "2", "3"]
    printed = capsys.readouterr().out
    assert printed.count("p95_ttft_ms") == 1 and "turn by turn" in printed and "by_turn" not in printed


@pytest.mark.parametrize("flags", [[], ["--server-pid", str(os.getpid())]])
def test_chats_are_measured_turn_by_turn(server, tmp_path, monkeypatch, flags):
    path = tmp_path / "figure.json"
    monkeypatch.setattr(chats, "TURNS", 3)
    monkeypatch.setattr(chats, "LOADS", {"one chat": [["a"], ["b"]], "2 chats": [["c", "d"]]})
    monkeypatch.setattr(sys, "argv", ["bench.py", "chats", "--url", server.url, "--server-key", "secret",
                                      "--seed", str(len(flags)), "--json", str(path), *flags])
    bench.main()
    *turns, one, eight = json.loads(path.read_text())["rows"]
    assert [(row["system"], row["turn"]) for row in turns] == [
        (load, turn) for load in ("one chat", "2 chats") for turn in (1, 2, 3)]
    for first, second, third in (turns[:3], turns[3:]):
        assert first["context"] < second["context"] < third["context"]
        assert first["context"] <= second["cached"] <= second["context"] < third["cached"]
    for row in turns:
        assert 0 < row["ttft_ms_low"] <= row["ttft_ms"] <= row["ttft_ms_high"]
        assert (row.get("cpu_ms_high", -1) >= 0) == bool(flags)
    assert [one["system"], eight["system"]] == ["one reply", "8 replies at once"]
    for row in (one, eight):
        assert 0 < row["tokens_per_second_low"] <= row["tokens_per_second_high"]
        assert (100 < row.get("memory_mb", 0) <= row.get("peak_mb", 0) < 100_000) == bool(flags)


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
    lengths = [len(tokenizer.encode(f" {word}").ids) for word in WORDS]
    assert engine.tokens_per_word == sum(lengths) / len(WORDS)


def test_close_waits_for_the_turns_under_way(server):
    engine, ended = RemoteEngine(server.url, "secret"), []
    turns = [engine.submit([0] * 20, name, 20, True, ended.append) for name in "ab"]
    engine.close()
    assert {*ended} == {*turns} and all(turn.result().text for turn in turns)


# ---- what other servers write

@contextlib.contextmanager
def writing(answer, bodies=None):
    """A server that answers every POST with answer(body), which gives bytes: its url. Bodies are kept."""
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(b'{"data": [{"id": "other", "max_model_len": 4096}]}')

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if bodies is not None:
                bodies.append(body)
            self.send(answer(body))

        def send(self, data):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def chunk(**delta):
    return dict(choices=[dict(delta=delta)])


def counted(body):
    """The last chunk of a chat completion: a token for each word, and 3 of the template."""
    prompt = sum(len(message["content"].split()) for message in body["messages"])
    return dict(choices=[], usage=dict(prompt_tokens=prompt + 3, completion_tokens=2))


def in_lines(events, form="data: {}\n\n"):
    return "".join(form.format(json.dumps(event)) for event in events).encode()


def ask(url, stateful=False, turns=1):
    engine = RemoteEngine(url, stateful=stateful)
    for _ in range(turns):
        turn = engine.submit([0, 1, 2], "c", 2, True, lambda turn: None)
        engine.close()
    return turn.result()


@pytest.mark.parametrize("form", [
    "data:{}\n\n", "data: {}\r\n\r\n", "data:{}\r\r", "\ufeffdata: {}\n\n", ": still here\n\ndata: {}\n\n",
    "id: 7\nevent: message\nretry: 5\ndata: {}\n\n"])
def test_the_lines_of_a_stream_may_have_any_form(form):
    def answer(body):
        events = chunk(role="assistant", content=""), chunk(content="one "), chunk(content="two")
        first, rest = form, form.removeprefix("\ufeff")         # a mark stands at the beginning only
        return (in_lines(events[:1], first) + in_lines([*events[1:], counted(body)], rest)
                + rest.format("[DONE]").encode())
    with writing(answer) as url:
        turn = ask(url)
    assert turn.text == "one two" and len(turn.times) == 2 and turn.usage["completion_tokens"] == 2


def test_the_json_of_an_event_may_take_several_lines():
    def answer(body):
        texts = (json.dumps(event, indent=1) for event in (chunk(content="one"), counted(body)))
        return "".join(f"data: {text}\n\n".replace("\n ", "\ndata:  ").replace("\n}", "\ndata: }")
                       for text in texts).encode()
    with writing(answer) as url:
        assert ask(url).text == "one"


def test_the_lines_of_an_event_stay_lines_and_half_an_event_is_none():
    lines = ["data: one\n", "data: more\n", "\n", ": still here\n", "\n", "data: half\n"]
    assert list(event_data(lines)) == [" one\n more\n"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "refusal"])
def test_thoughts_are_tokens_but_no_part_of_the_reply(name):
    def answer(body):
        first = chunk(role="assistant", content="", provider_specific_fields=dict(n=1), **{name: None})
        return in_lines([first, chunk(**{name: "hm "}), chunk(content=None, **{name: "yes"}),
                         chunk(content="answer"), counted(body)])
    bodies = []
    with writing(answer, bodies) as url:
        turn = ask(url, turns=2)
    assert turn.text == "answer" and len(turn.times) == 3
    assert bodies[-1]["temperature"] == 0 and bodies[-1]["ignore_eos"]
    assert [message["content"] for message in bodies[-1]["messages"]][1::2] == ["answer"]


def test_a_stateful_client_goes_back_to_a_whole_reply():
    """It keeps two thirds of the second prompt, then the first prompt, then half of its reply."""
    def answer(body):
        text = body["input"] if isinstance(body["input"], str) else "of several"
        usage = dict(input_tokens=3 + len(text.split()), output_tokens=2)
        completed = dict(id=f"r{len(bodies)}", usage=usage)
        return in_lines([dict(type="response.output_text.delta", delta="answer"),
                         dict(type="response.completed", response=completed)])
    bodies = []
    with writing(answer, bodies) as url:
        engine = RemoteEngine(url, stateful=True)
        users = [PlannedConversation("c", [PlannedTurn(3, 2), PlannedTurn(3, 2),
                                           PlannedTurn(3, 2, keep=7), PlannedTurn(3, 2, keep=3),
                                           PlannedTurn(3, 2, keep=7)])]
        run.drive(engine, users, seed=0)
        assert not engine.histories.keys() - {"c@4"}        # nobody returns to the others
    first, second, third, fourth, fifth = bodies[-5:]
    assert [body["previous_response_id"] for body in bodies[-5:]] == [None, "r3", "r3", None, None]
    assert third["input"].startswith(second["input"][:round(len(second["input"]) * 2 / 3)] + " ")
    assert len(third["input"].split()) >= 4
    assert fourth["input"].startswith(first["input"] + " ")
    prompt, reply, _ = fifth["input"]
    assert prompt["content"] == fourth["input"] and reply == dict(role="assistant", content="ans")


def test_thoughts_of_responses_are_tokens_too():
    def answer(body):
        usage = dict(input_tokens=3 + len(body["input"].split()), output_tokens=2)
        deltas = [("output_text", ""), ("reasoning_text", "hm "), ("reasoning_summary_text", "so"),
                  ("output_text", "answer")]
        return in_lines([dict(type="response.created", response={}),
                         *(dict(type=f"response.{kind}.delta", delta=text) for kind, text in deltas),
                         dict(type="response.completed", response=dict(id="r", usage=usage))])
    with writing(answer) as url:
        turn = ask(url, stateful=True)
    assert turn.text == "answer" and len(turn.times) == 3


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("usage", [{}, dict(usage=None)])
def test_a_server_that_counts_no_tokens_is_told_in_one_line(stateful, usage):
    def answer(body):
        return in_lines([dict(type="response.completed", response=dict(id="r") | usage) if stateful
                         else chunk(content="one") | usage])
    with writing(answer) as url, pytest.raises(ValueError, match=f"{url} .*no usage"):
        ask(url, stateful)


@pytest.mark.parametrize("answer, message", [
    (in_lines([dict(choices=[], usage=dict(prompt_tokens=0, completion_tokens=1))]), "counts 0 prompt"),
    (b"data: <html>\n\n", "did not answer as it should.*JSON")])
def test_a_stream_of_nonsense_is_told_in_one_line(answer, message):
    with writing(lambda body: answer) as url, pytest.raises(ValueError, match=message):
        ask(url)
