"""The server seen from outside: the unmodified openai client, and raw sockets for clients that misbehave."""
import contextlib
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import Engine
from serving import operations
from serving.history import History
from serving.openai_api import API
from serving.operations import OPERATIONS
from serving.sessions import Sessions
from serving.sockets import LARGE_BYTES, MAX_BODY_BYTES, SERVER_OPERATIONS, Handler
from serving.tokenizer import compile_template
from server import parse_flags
from clients import (CONTEXT, ROOT, SPECIAL, TEMPLATE, ask, connect, eventually, fetch, hang_up_after,
                     posting, program, raw, serving, user)

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=3 * CONTEXT, cpu_cache_tokens=3 * CONTEXT,
                        max_running=2)
    with serving(sessions) as server:
        yield server


# ---- a chat

@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("hint", [None, "mine"], ids=["no hint", "hint"])
def test_a_resent_history_comes_from_the_cache(client, stream, hint):
    """Ten turns. All that was fed to the model is cached: the context so far but for the reply's last token.
    New are that one, the end token if the model did not give it itself, and the new message."""
    messages, length, last = [dict(role="system", content="Be brief.")], 0, None
    ends, conversations, hint = set(), set(), hint and f"{hint} {stream}"
    for turn in range(10):
        messages.append(user(f"message {turn} of {stream} {hint}"))
        text, end, usage, conversation = ask(client, messages, stream, max_tokens=(5, 120)[turn % 2],
                                             temperature=2, seed=turn, extra_body=dict(conversation_id=hint))
        if turn == 0:
            assert usage.prompt_tokens_details.cached_tokens == 0
            assert usage.prompt_tokens == sum(len(m["content"]) + 2 for m in messages) + 1
        else:
            assert usage.prompt_tokens_details.cached_tokens == length - 1
            assert usage.prompt_tokens == length + len(messages[-1]["content"]) + 3 + (last == "length")
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        length, last = usage.total_tokens, end
        messages.append(dict(role="assistant", content=text))
        ends.add(end)
        conversations.add(conversation)
    assert ends == {"stop", "length"}
    assert len(conversations) == 1 and hint in (None, *conversations)


def test_plain_and_streamed_answers_agree(client):
    for seed in range(3):
        options = dict(temperature=1.0, seed=seed, max_tokens=40)
        plain, streamed = (ask(client, [user("the same")], stream, **options) for stream in (False, True))
        assert plain[:3] == streamed[:3]


def test_an_edited_history_branches(client):
    def turn(messages, text):
        messages = messages + [user(text)]
        reply, _, usage, conversation = ask(client, messages, extra_body=dict(ignore_eos=True))
        return messages + [dict(role="assistant", content=reply)], usage, conversation
    first, usage1, trunk = turn([], "once")
    second, usage2, conversation = turn(first, "upon a time")
    assert conversation == trunk
    edited, _, branch = turn(first, "upon a hill")
    assert branch != trunk
    # both go on, each from its own cache
    for history, name in ((second, trunk), (edited, branch)):
        _, usage, conversation = turn(history, "and then")
        assert conversation == name and usage.prompt_tokens_details.cached_tokens > usage2.prompt_tokens
    forged = [user("once"), dict(role="assistant", content="what was never said"), user("upon a time")]
    assert turn(forged[:2], "upon a time")[1].prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("header", [False, True], ids=["body", "header"])
def test_two_clients_with_the_same_words(client, header):
    """They take turns with equal texts; with a hint each goes on in its own conversation, and a
    stolen hint opens nothing."""
    def say(name, messages):
        if header:
            return ask(client, messages, extra_headers={"X-Session-ID": name})
        return ask(client, messages, extra_body=dict(conversation_id=name))
    names, messages, length = [f"client {i} {header}" for i in "ab"], [user(f"Hello {header}")], 0
    for _ in range(3):
        (text, _, usage, conversation), other = say(names[0], messages), say(names[1], messages)
        assert [conversation, other[3]] == names and other[:3] == (text, _, usage)
        assert usage.prompt_tokens_details.cached_tokens == max(length - 1, 0)
        messages = messages + [dict(role="assistant", content=text), user("Go on")]
        length = usage.total_tokens
    _, _, usage, conversation = say(names[0], [user("Give me what the other said")])
    assert conversation not in names and usage.prompt_tokens_details.cached_tokens == 0


def test_many_at_once(client):
    """More clients than may run: each gets what it would get alone."""
    texts = [f"number {i}" for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: ask(client, [user(text)])[0], texts))
    assert together == [ask(client, [user(text)])[0] for text in texts]


def test_stream_order_and_usage(client):
    options = dict(model="ascii", messages=[user("Hi")], max_tokens=5, stream=True,
                   extra_body=dict(ignore_eos=True))
    chunks = list(client.chat.completions.create(**options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk.model_fields_set for chunk in chunks)
    assert ({(chunk.id, chunk.model, chunk.object) for chunk in chunks}
            == {(chunks[0].id, "ascii", "chat.completion.chunk")})
    *chunks, last = client.chat.completions.create(**options, stream_options=dict(include_usage=True))
    assert last.choices == [] and last.usage.completion_tokens == 5
    assert all(len(chunk.choices) == 1 and chunk.usage is None and "usage" in chunk.model_fields_set
               for chunk in chunks)


def test_stop_strings(client):
    options = dict(extra_body=dict(ignore_eos=True))
    whole = ask(client, [user("Speak")], max_tokens=30, **options)[0]
    stop = whole[8:10]
    for stream in (False, True):
        for stops in (stop, ["never said at all", stop]):
            text, end, usage, _ = ask(client, [user("Speak")], stream, max_tokens=30, stop=stops, **options)
            assert text == whole[:whole.index(stop)] and end == "stop"
    assert ask(client, [user("Speak")], max_tokens=3, **options)[1] == "length"


def several(client, n, stream, **options):
    """([(text, finish_reason, tokens), ...] of the choices, usage)."""
    options = dict(model="ascii", n=n, stream=stream, max_tokens=12, logprobs=True) | options
    if not stream:
        answer = client.chat.completions.create(**options)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [(c.message.content, c.finish_reason, [t.token for t in c.logprobs.content])
                for c in answer.choices], answer.usage
    *chunks, last = client.chat.completions.create(**options, stream_options=dict(include_usage=True))
    assert last.choices == [] and len({chunk.id for chunk in (*chunks, last)}) == 1
    told = [[chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index] for index in range(n)]
    assert sum(map(len, told)) == len(chunks) and all(events[0].delta.role == "assistant" for events in told)
    return [("".join(e.delta.content or "" for e in events), events[-1].finish_reason,
             [t.token for e in events for t in e.logprobs.content])
            for events in told], last.usage


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_several_choices(server, client, stream):
    """Choice i is the answer to seed + i. Whichever is resent is recognised; branches share what
    their turn had cached, and the new prompt is computed by the first, but for its last
    token."""
    options, length = dict(temperature=1.5, seed=7), 0
    messages = [user(f"Say something, {stream}: " + "x" * 40)]
    for turn in range(3):
        choices, usage = several(client, 3, stream, messages=messages, **options)
        turns = list(server.recent_turns)[-3:]
        assert usage.prompt_tokens_details.cached_tokens == max(length - 1, 0)
        assert (turns[0]["gpu"] >= 32) == (turn > 0)
        assert ([entry["gpu"] + entry["cpu"] for entry in turns[1:]]
                == 2 * [usage.prompt_tokens - 1])
        assert usage.completion_tokens == sum(entry["completion_tokens"] for entry in turns)
        assert len({text for text, *_ in choices}) == len({entry["conversation"] for entry in turns}) == 3
        assert all("".join(token for token in tokens if token not in SPECIAL) == text
                   for text, _, tokens in choices)
        assert sum(len(tokens) for *_, tokens in choices) == usage.completion_tokens
        for index, choice in enumerate(choices):
            single, alone = several(client, 1, stream, messages=messages, temperature=1.5, seed=7 + index)
            assert single == [choice] and alone.prompt_tokens == usage.prompt_tokens
        messages = messages + [dict(role="assistant", content=choices[2 - turn][0]), user("Go on")]
        length = usage.prompt_tokens + turns[2 - turn]["completion_tokens"]


def test_choices_without_a_seed_differ_and_their_seeds_have_a_limit(client):
    choices, _ = several(client, 16, False, messages=[user("Hi")], temperature=2)
    assert len({text for text, *_ in choices}) > 8
    with pytest.raises(openai.BadRequestError, match="seed"):
        several(client, 2, False, messages=[user("Hi")], seed=2**63 - 1)
    assert several(client, 1, False, messages=[user("Hi")], seed=2**63 - 1)


def test_every_choice_counts_as_a_turn(server, client, monkeypatch):
    monkeypatch.setattr(server, "most_turns", 3)
    assert len(several(client, 3, False, messages=[user("Hi")])[0]) == 3
    eventually(lambda: not server.unsettled.total())
    with server.counted("", 1), pytest.raises(openai.RateLimitError):
        several(client, 3, False, messages=[user("Hi")])
    with pytest.raises(openai.BadRequestError, match="3 replies at most, got 4"):   # it would never fit
        several(client, 4, False, messages=[user("Hi")])


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_choice_that_cannot_begin_ends_all(server, client, stream, monkeypatch):
    """The client gets one error. Nothing runs on for it, and nothing is kept."""
    said, *_ = ask(client, [user("Good day")])
    messages = [user("Good day"), dict(role="assistant", content=said), user("And?")]
    before, conversations = server.engine.stats(), server.sessions.history.conversations()
    tokens, calls = History.tokens, []

    def damaged(history, turn_id):
        calls.append(turn_id)
        if len(calls) == 3:
            raise sqlite3.OperationalError("disk I/O error")
        return tokens(history, turn_id)

    monkeypatch.setattr(History, "tokens", damaged)
    with pytest.raises(openai.InternalServerError, match="disk I/O error"):
        ask(client, messages, stream, n=4, max_tokens=None, extra_body=dict(ignore_eos=True))
    after = server.engine.stats()
    assert len(calls) == 3 and not server.sessions.turns and not server.engine.owner.handles
    assert after["running"] == after["waiting"] == 0 and after["cancelled"] == before["cancelled"] + 2
    assert after["slots_free"] >= before["slots_free"]
    assert server.sessions.history.conversations() == conversations


def test_parts_of_text_are_one_content(client):
    parts = [dict(type="text", text="one "), dict(type="text", text="text")]
    assert ask(client, [dict(role="user", content=parts)])[:3] == ask(client, [user("one text")])[:3]


def test_a_developers_message_is_a_system_message(client):
    """OpenAI's newer name for the role, which many chat templates do not know."""
    system, developer = (ask(client, [dict(role=role, content="Be brief."), user("Hi")])
                         for role in ("system", "developer"))
    assert developer[0] == system[0] and developer[2].prompt_tokens == system[2].prompt_tokens


def test_options_of_the_chat_template(server, client, monkeypatch):
    template = compile_template(TEMPLATE + "{{ 'Think!' if enable_thinking }}")
    monkeypatch.setattr(server.sessions.tokenizer, "_template", template)
    def prompt(**options):
        return ask(client, [user("Hi")], store=False, extra_body=dict(options))[2].prompt_tokens
    thinking, not_thinking = (prompt(chat_template_kwargs=dict(enable_thinking=value))
                              for value in (True, False))
    assert thinking == not_thinking + len("Think!") == prompt() + len("Think!")
    counted = client.responses.input_tokens.count(
        input="Hi", extra_body=dict(chat_template_kwargs=dict(enable_thinking=True)))
    assert counted.input_tokens == thinking
    for value in ([1], "x" * 513):
        with pytest.raises(openai.BadRequestError, match="style should be a boolean, a number or a string of "
                                                         "at most 512 characters, got") as refused:
            prompt(chat_template_kwargs=dict(style=value))
        assert refused.value.param == "chat_template_kwargs.style" and ";" not in refused.value.message
    for name in ("messages", "tools", "documents", "add_generation_prompt"):        # which we set
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as refused:
            prompt(chat_template_kwargs={name: False})
        assert refused.value.param == f"chat_template_kwargs.{name}"
    assert prompt(chat_template_kwargs=dict(add_generation_prompt=True)) == not_thinking


def test_who_answers_an_operation():
    for operation in OPERATIONS:
        ours = operation.name in SERVER_OPERATIONS
        assert hasattr(Handler if ours else API, operation.name)
        assert not (ours and operation.fields.model_fields)


def test_the_document_says_whether_a_body_may_be_left_out(server):
    paths = fetch(server, "GET", "/openapi.json")[1]["paths"]
    for path in ("/v1/conversations", "/v1/responses"):
        refused = fetch(server, "POST", path, b"")[0] >= 400
        assert paths[path]["post"]["requestBody"]["required"] == refused == (path == "/v1/responses")


MANY = 100_000
WRONG = {"a list of the wrong kind": [True] * MANY, "a list of empty objects": [{}] * MANY,
         "an object of unknown members": {f"x{n}": n for n in range(MANY)},
         "messages of wrong parts": [dict(role="user", content=[{}] * 999)] * 60}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.method == "POST" and o.fields.model_fields],
                         ids=lambda operation: operation.name)
def test_a_body_full_of_faults(operation, wrong, monkeypatch):
    """We stop at the first fault of a list, and at an object that has too many members, since pydantic would
    describe each of a million faults, and nobody else would be answered meanwhile."""
    counts = []
    refusal = operations.refusal
    monkeypatch.setattr(operations, "refusal", lambda faults: counts.append(len(faults)) or refusal(faults))
    bodies = [{name: wrong} for name in operation.fields.model_fields]
    for body in bodies + [wrong]:
        with pytest.raises(operations.APIError):
            operations.parse(operation, body)
    assert max(counts) <= operations.MAX_MEMBERS + 100


STRANGE = dict(app="mine", messages=[dict(user("Hi"), mood=1, content=[
    dict(type="text", text="Hi", cache_control=dict(type="ephemeral"))])])


def test_fields_that_we_do_not_know_are_ignored_and_named_once(server, capfd):
    """In the body, in messages and in parts of their content. A strict server refuses each of them."""
    for _ in range(2):
        assert fetch(server, "POST", "/v1/chat/completions", dict(STRANGE, max_tokens=2))[0] == 200
    line, = [line for line in capfd.readouterr().err.splitlines() if "ignored" in line]
    assert line.endswith(": ChatBody.app, Message.mood, TextPart.cache_control")
    server.first_ignored({str(n) for n in range(5000)})                     # there is an end to it
    assert len(server.ignored) == 1000
    assert fetch(server, "GET", "/v1/models?limit=")[1]["data"]


def test_a_strict_server_refuses_fields_that_it_does_not_know(server, monkeypatch):
    monkeypatch.setattr(server, "strict", True)
    for body, place in ((dict(app="mine", messages=[user("Hi")]), "app"),
                        (dict(messages=[dict(user("Hi"), mood=1)]), "messages[0].mood"),
                        (dict(STRANGE, app=None), "messages[0].content[0].cache_control")):
        status, answer = fetch(server, "POST", "/v1/chat/completions", body)
        assert status == 400 and answer["error"]["param"] == place
    neutral = dict(messages=[user("Hi")], app={}, max_tokens=1)
    assert fetch(server, "POST", "/v1/chat/completions", neutral)[0] == 200


def test_an_int_may_be_written_with_a_point(client):
    options = dict(extra_body=dict(ignore_eos=True, seed=7.0, n=1.0, top_k=5.0))
    assert ask(client, [user("Hi")], max_tokens=8.0, **options)[2].completion_tokens == 8


def test_top_p_0_is_greedy(client):
    greedy = ask(client, [user("Hi")], max_tokens=30)[0]
    assert ask(client, [user("Hi")], max_tokens=30, temperature=2, top_p=0)[0] == greedy
    assert ask(client, [user("Hi")], max_tokens=30, temperature=2, top_p=1e-9)[0] == greedy


def test_names_and_results_of_tools(client):
    """Agents name who speaks. This chat template shows neither a name nor the id of a call."""
    plain = [user("Hi"), dict(role="assistant", content="Yes?"), dict(role="tool", content="42")]
    named = [dict(message, name="Ada") for message in plain]
    named[2]["tool_call_id"] = "call_1"
    assert ask(client, named)[:2] == ask(client, plain)[:2]


def test_as_many_choices_as_there_are_places(client):
    assert len(several(client, 128, False, messages=[user("Hi")], max_tokens=1)[0]) == 128


def test_ids_of_requests(server, client):
    """An answer has the id that the client sent, or else one of ours. So has an error."""
    def answered(path="/health", **headers):
        request = urllib.request.Request(server.url + path, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.headers["X-Request-Id"]
        except urllib.error.HTTPError as error:
            return error.headers["X-Request-Id"]
    assert answered(**{"X-Request-Id": "mine"}) == answered("/no", **{"X-Request-Id": "mine"}) == "mine"
    ours = {answered(), answered("/nothing"), answered(**{"X-Request-Id": "x" * 201})}
    assert len(ours) == 3 and all(re.fullmatch("req_[0-9a-f]{32}", id) for id in ours)
    sent = client.chat.completions.create(model="ascii", messages=[user("Hi")], max_tokens=1,
                                          extra_headers={"X-Request-Id": "one"})
    assert sent._request_id == "one" and client.models.list()._request_id.startswith("req_")


def test_an_idle_server_is_not_full(server, client):
    """vLLM counts the slots of running requests alone: routers send nothing to a full server."""
    def used(*names):
        values = read_metrics(server)
        return [values[name,] for name in names]
    ask(client, [user("Remember this")])
    names = "vllm:kv_cache_usage_perc", "nano_pensieve:slots_used_share", "nano_pensieve:slots_free"
    running, share, free = used(*names)
    total = server.engine.stats()["slots_total"]
    assert running == 0 < share == pytest.approx(1 - free / total)
    handles = [server.engine.submit([1] * 200, ignore_eos=True) for _ in range(2)]
    for handle in handles:
        next(iter(handle))
    running, share, _ = used(*names)
    for handle in handles:
        handle.cancel()
    assert 400 / total <= running <= share and running < 0.7


def test_models_and_names(server, client, checkpoint):
    model, = client.models.list()
    assert (model.id, model.root) == ("ascii", str(checkpoint))
    for name in ("ascii", str(checkpoint)):
        assert ask(client, [user("Hi")], model=name) and client.models.retrieve(name) == model
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.models.retrieve("gpt-4")
    status, found = fetch(server, "GET", f"/v1/models/{checkpoint}")        # its slashes as they are
    assert status == 200 and found["id"] == "ascii"


def test_a_stateless_engine_gives_the_same_answers(server, client, checkpoint, monkeypatch):
    """It answers each turn after ours: a turn that begins, goes on, branches, or restarts its context, with
    or without chance, and however it ends."""
    engine = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, stateless=True).start()
    monkeypatch.setattr(server, "stateless", Sessions(engine, history=server.sessions.history))
    monkeypatch.setattr(server.engine, "depth", 1)      # as on a GPU
    def respond(text, after=None, **options):
        options = dict(max_output_tokens=20, temperature=0) | options
        response = client.responses.create(model="ascii", input=text, previous_response_id=after, **options)
        turn = fetch(server, "GET", "/cache")[1]["turns"][-1]
        stateless = turn["stateless"]
        assert turn["response"] == response.id and stateless["text"] == response.output_text
        assert all(stateless[tokens] == turn[tokens] for tokens in ("prompt_tokens", "completion_tokens"))
        assert stateless["recomputed"] + stateless["new"] == turn["prompt_tokens"]
        return response
    first = respond("Hello").id
    second = respond("Go on", first).id
    chance = dict(seed=7)
    text = respond("Go on", second, temperature=1, extra_body=chance).output_text
    stopped = respond("Go on", second, temperature=1, extra_body=chance | dict(stop=text[5:8]))
    assert 0 < len(stopped.output_text) < len(text)
    respond("Branch", first)
    respond("Restart", second, instructions="Be brief.")
    end = dict(logit_bias={str(token): 100 for token in engine.worker.stop_ids})
    assert respond("End", extra_body=end).usage.output_tokens == 1
    assert respond("End late", extra_body=end | dict(min_tokens=3)).usage.output_tokens == 3
    assert respond("Never end", extra_body=end | dict(ignore_eos=True)).usage.output_tokens == 20
    limit = dict(min_tokens=engine.scheduler.limit)         # there is no room for so many
    respond("x" * (limit["min_tokens"] - 50), max_output_tokens=None, extra_body=limit)
    engine.close()
    alone = client.responses.create(model="ascii", input="Without it", max_output_tokens=4)
    turn = fetch(server, "GET", "/cache")[1]["turns"][-1]
    assert turn["response"] == alone.id and turn["stateless"] is None


def test_a_stateless_engine_keeps_to_the_grammar(server, client, checkpoint, monkeypatch):
    """Which is compiled code, and cannot be copied."""
    pytest.importorskip("llguidance", reason="needs llguidance (requirements-dev.txt)")
    engine = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, stateless=True).start()
    monkeypatch.setattr(server, "stateless", Sessions(engine, history=server.sessions.history))
    schema = dict(type="json_schema", json_schema=dict(name="n", schema=dict(enum=["one", "two"])))
    said = ask(client, [user("Hi")], response_format=schema)[0]
    assert said in ('"one"', '"two"')
    assert fetch(server, "GET", "/cache")[1]["turns"][-1]["stateless"]["text"] == said
    engine.close()


def test_cache_and_metrics_tell_where_the_context_came_from(server, client, capsys):
    earlier_stats, earlier_values = server.engine.stats(), read_metrics(server)
    _, _, usage, conversation = ask(client, [user("Where from?")])
    cache = fetch(server, "GET", "/cache")[1]
    turn = cache["turns"][-1]
    assert turn["conversation"] == conversation and turn["finish_reason"] in ("stop", "length")
    assert turn["new"] == usage.prompt_tokens and turn["gpu"] == turn["cpu"] == turn["recomputed"] == 0
    line = rf"^gpu 0 · cpu 0 · recomputed 0 · new {usage.prompt_tokens} · first token \d+ ms$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)
    assert conversation in [entry["id"] for entry in cache["conversations"]]
    stats, values = cache["stats"], read_metrics(server)
    prompt = [stats[f"prompt_tokens_{source}"] for source in ("gpu", "cpu", "recomputed", "new")]
    assert values["vllm:prompt_tokens_total",] == sum(prompt) > 0
    assert values["vllm:prefix_cache_queries_total",] == sum(prompt)
    assert values["vllm:prefix_cache_hits_total",] == prompt[0]
    assert values["vllm:external_prefix_cache_queries_total",] == sum(prompt) - prompt[0]
    assert values["vllm:external_prefix_cache_hits_total",] == prompt[1]
    answered = [values["vllm:request_success_total", reason] for reason in ("stop", "length")]
    assert sum(answered) == stats["finished"]
    by_source = [values["vllm:prompt_tokens_by_source_total", source]
                 for source in ("local_cache_hit", "external_kv_transfer", "local_compute")]
    assert by_source == [prompt[0], prompt[1], prompt[2] + prompt[3]]
    names = ("request_queue_time", "time_to_first_token", "e2e_request_latency")
    for name in names:
        assert values[f"vllm:{name}_seconds_count",] == stats["finished"]
        assert values[f"vllm:{name}_seconds_bucket", "+Inf"] == stats["finished"]
    waits = [values[f"vllm:{name}_seconds_sum",] for name in names]
    assert 0 < waits[0] < waits[1] <= waits[2]
    gaps, generated = "vllm:inter_token_latency_seconds_count", "generated_tokens"
    assert values[gaps,] - earlier_values[gaps,] == stats[generated] - earlier_stats[generated] - 1
    assert values["vllm:generation_tokens_total",] == stats["generated_tokens"]
    assert values["vllm:num_requests_running",] == values["vllm:num_requests_waiting",] == 0
    assert values["nano_pensieve:prompt_tokens_new_total",] == prompt[3]
    assert values["nano_pensieve:slots",] == stats["slots_total"]


def read_metrics(server):
    """{(name, labels but for the model's ...): value}, as Prometheus' own parser reads them."""
    values = {}
    for family in text_string_to_metric_families(fetch(server, "GET", "/metrics")[1]):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "ascii"
            values[(sample.name, *sample.labels.values())] = sample.value
    return values


# ---- what is refused

WRONG = dict(
    max_tokens=[-1, 0, 10**9, 10**30, "5", True, 1.5], temperature=[-1, "hot", float("nan"), 1e999],
    top_p=[-1, 2], min_p=[-1], seed=[1.5], frequency_penalty=[2.5], n=[0, 129], model=[7],
    stop=["", ["a", ""], 3, ["a"] * 5], stream=[1], stream_options=[dict(nothing=1)],
    conversation_id=[5, "", "\ud800"], tools=[[{}]], functions=[[{}]],
    logprobs=[1], top_logprobs=[3, 99], response_format=[dict(type="xml"), "text"],
    logit_bias=[[1], {"x": 1}, {"5": 101}, {"99999": 1}], metadata=[dict(a=1), {"a" * 65: ""}, ["a"]],
    messages=[[], "Hi", None, ["Hi"], [{}], [dict(role="user")], [dict(content="Hi")],
              [dict(role="king", content="Hi")], [dict(role="user", content=5)],
              [dict(role=["user"], content="Hi")], [user("lone \ud800")], [user("too long " * CONTEXT)],
              [dict(role="user", content="Hi", name=5)],
              [dict(role="assistant", content="Hi", tool_calls=[dict(id="1")])],
              [dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])]])


@pytest.mark.parametrize("field, value", [(field, value) for field, values in WRONG.items()
                                          for value in values])
def test_what_cannot_be_served_is_a_bad_request(server, field, value):
    status, content = fetch(server, "POST", "/v1/chat/completions",
                            dict(messages=[user("Hi")], max_tokens=4) | {field: value})
    assert status == 400 and content["error"]["type"] == "invalid_request_error"
    assert content["error"]["message"]
    assert set(content["error"]) == {"message", "type", "param", "code"}


def test_harmless_fields_are_accepted(client):
    assert ask(client, [user("Hi")], n=1, user="me", store=False, metadata={}, frequency_penalty=0,
               presence_penalty=0.0, logprobs=False, response_format=dict(type="text"), stop=None,
               max_tokens=None, max_completion_tokens=2)[2].completion_tokens <= 2


def test_a_chat_that_is_not_stored_leaves_nothing(server, client):
    """It is recognised all the same: what is kept already may be used."""
    kept = ask(client, [user("Keep")], extra_body=dict(ignore_eos=True), max_tokens=40)
    names, messages = server.sessions.history.conversations(), [user("Forget this")]
    for stream in (False, True):
        text, _, usage, conversation = ask(client, messages, stream, store=False)
        assert conversation is None and usage.prompt_tokens_details.cached_tokens == 0
        messages += [dict(role="assistant", content=text), user("And?")]
    assert len(several(client, 2, False, messages=messages, store=False)[0]) == 2
    resent = [user("Keep"), dict(role="assistant", content=kept[0]), user("And?")]
    assert ask(client, resent, store=False)[2].prompt_tokens_details.cached_tokens > 0
    assert server.sessions.history.conversations() == names
    assert ask(client, resent)[2].prompt_tokens_details.cached_tokens == kept[2].total_tokens - 1


def test_a_salt_separates_clients(server, client):
    """Chats with the same words share nothing, unless they have the same salt."""
    def cached(salt):
        body = dict(cache_salt=salt) if salt else {}
        usage = ask(client, [user("Salt and pepper, please. " * 4)], extra_body=body)[2]
        return usage.prompt_tokens_details.cached_tokens
    assert [cached(salt) > 32 for salt in (None, "x", "x", "y", None)] == [False, False, True, False, True]
    status, answer = fetch(server, "POST", "/v1/responses", dict(
        input="Salt and pepper, please. " * 4, cache_salt="z", max_output_tokens=2))
    assert status == 200 and answer["usage"]["input_tokens_details"]["cached_tokens"] == 0


def test_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="gpt-4") as error:
        ask(client, [user("Hi")], model="gpt-4")
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="tool_choice") as error:
        ask(client, [user("Hi")], tool_choice="required")
    assert error.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match=f"{CONTEXT}") as error:
        ask(client, [user("Hi")], max_tokens=CONTEXT)
    assert error.value.code == "context_length_exceeded"
    for field, value in dict(logit_bias={"99999": 1}, min_tokens=CONTEXT + 1).items():
        with pytest.raises(openai.BadRequestError, match=field) as error:       # the engine's limits
            ask(client, [user("Hi")], max_tokens=None, extra_body={field: value})
        assert error.value.param == field
    with pytest.raises(openai.BadRequestError):
        ask(client, [user("Hi")], stream=True, max_tokens=CONTEXT)


@pytest.mark.parametrize("words", [1000, CONTEXT, 100_000])
def test_overflow_in_openais_words(client, words):
    """Other programs look for them, and shorten the messages."""
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [user("x" * words)], max_tokens=CONTEXT if words == 1000 else None)
    asked = (r"you requested \d+ tokens \(\d+ in the messages, 2048 in the completion\)" if words == 1000
             else r"your messages resulted in \d+ tokens" if words == CONTEXT
             else r"the text has \d+ bytes.*")
    remedy = r"Please reduce the length of the messages( or completion)?\."
    assert re.fullmatch(fr"This model's maximum context length is {CONTEXT} tokens\. However, {asked}\. "
                        + remedy, error.value.body["message"])
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


def test_a_chat_whose_conversation_is_deleted_at_that_moment(server, client, monkeypatch):
    """We recognise the history that it resends, and then it is gone. A second try needs nothing of it."""
    said, *_ = ask(client, [user("Hello")])
    messages = [user("Hello"), dict(role="assistant", content=said), user("And?")]
    match, found = History.match, []

    def match_then_forget(history, *arguments):
        found.append(match(history, *arguments))
        if found[-1]:
            server.sessions.forget(found[-1][0].conversation)
        return found[-1]

    monkeypatch.setattr(History, "match", match_then_forget)
    with pytest.raises(openai.ConflictError, match="is gone.* again"):
        ask(client, messages)
    _, _, usage, _ = ask(client, messages)
    assert usage.prompt_tokens_details.cached_tokens == 0 and len(found) == 2


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1]", b"\"text\"", b"null", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_a_body_that_is_no_json_object(server, body):
    assert fetch(server, "POST", "/v1/chat/completions", body)[0] == 400


def test_unknown_paths_and_wrong_methods(server):
    assert fetch(server, "GET", "/nothing")[0] == 404
    assert fetch(server, "POST", "/v1/nothing", {})[0] == 404
    for method, path in (("GET", "/v1/chat/completions"), ("POST", "/health"), ("DELETE", "/v1/models"),
                         ("OPTIONS", "/cache")):
        assert fetch(server, method, path, b"")[0] == 405
    for method in ("POST", "GET"):
        assert fetch(server, method, "/v1/responses/compact", b"")[0] == 404      # it is no response
    answer = raw(server, b"PUT /v1/conversations/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"\r\nAllow: GET, POST, DELETE\r\n" in answer
    assert fetch(server, "GET", "/health?verbose=1") == (200, dict(status="ok"))


@pytest.mark.parametrize("headers, status", [
    (b"", b"411"), (b"Transfer-Encoding: gzip\r\n", b"411"), (b"Content-Length: -5\r\n", b"400"),
    (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"411"),
    (b"Content-Length: many\r\n", b"400"),
    (b"Content-Length: %d\r\n" % (MAX_BODY_BYTES + 1), b"413"),
    (b"Content-Length: " + b"9" * 50_000 + b"\r\n", b"400")])
def test_lengths(server, headers, status):
    answer = raw(server, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("chunks, status", [
    (b'7\r\n{"input\r\n7;x=y\r\n":"Hi"}\r\n0\r\n\r\n', b"200"), (b'3\r\n{"input":"Hi"}\r\n0\r\n\r\n', b"400"),
    (b"+7\r\n", b"400"), (b"1\r\n{\r\n%x\r\n" % MAX_BODY_BYTES, b"413")])
def test_a_body_in_chunks(server, chunks, status):
    """As Spring AI sends it."""
    head = (b"POST /v1/responses/input_tokens HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    assert raw(server, head, chunks).startswith(b"HTTP/1.1 " + status)


def test_a_body_of_100_megabytes(server):
    """It is refused by its length, and the client gets to read why though it was still sending."""
    status, content = fetch(server, "POST", "/v1/chat/completions", bytes(100 * 2**20))
    assert status == 413 and str(MAX_BODY_BYTES) in content["error"]["message"]


@pytest.mark.parametrize("lengths", [(50, 50), (50, 51), ("50, 50",), ("+50",), ("5_0",), ("0x32",), ("",)])
def test_a_length_that_leaves_doubts(server, lengths):
    headers = "".join(f"Content-Length: {length}\r\n" for length in lengths)
    answer = raw(server, f"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode(),
                 b"{}" + b" " * 49)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_a_body_that_ends_too_early(server):
    """Even if the part that came is valid JSON."""
    before = server.sessions.history.conversations()
    with socket.create_connection(server.server_address, timeout=30) as connection:
        head = b"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(head + b"Content-Length: 10\r\n\r\n{}")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 400")
    assert server.sessions.history.conversations() == before


def test_the_absolute_form(server):
    """As a client writes that takes us for a proxy."""
    for url in (b"http://localhost", b"HTTP://localhost:8000", server.url.encode()):
        answer = raw(server,
                     b"GET %b/health?a=b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % url)
        assert answer.endswith(b'{"status": "ok"}')
    assert b"HTTP/1.1 400" in raw(server, b"GET http://[/health HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_head(server):
    """The headers of GET, and no body, on a connection that goes on."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    for path in ("/health", "/cache", "/cache/events", "/"):
        headers = {}
        for method in ("HEAD", "GET") if path != "/cache/events" else ("HEAD",):
            connection.request(method, path)
            response = connection.getresponse()
            headers[method] = response.status, response.getheader("Content-Type")
            assert bool(response.read()) == (method == "GET")
        assert len(set(headers.values())) == 1 and headers["HEAD"][0] == 200
    connection.request("HEAD", "/nothing")
    assert connection.getresponse().status == 404


def test_a_header_that_never_ends(server):
    for endless in ([b"X: " + b"x" * 2**16] * 100, [b"X: y\r\n"] * 1000):
        assert raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
                   *endless).startswith(b"HTTP/1.1 431")
    assert raw(server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("line",
                         [b"no colon", b"Content-Length : 2", b"X: a\rContent-Length: 2", b" folded: x",
                                  b": no name", b"X\0: y", b"X: y\0"])
def test_a_header_line_that_leaves_doubts(server, line):
    """Another program might read it as something else, and so take a body for a request."""
    answer = raw(server, HEALTH + line + b"\r\nX: y\r\n\r\n", HEALTH + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


def test_a_post_of_unknown_length_is_the_last_of_its_connection(server):
    """Its body, if it has one, is not taken for a request."""
    head = b"POST /v1/conversations HTTP/1.1\r\nHost: localhost\r\nContent-Lenth: 50\r\n\r\n"
    answer = raw(server, head, HEALTH + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_http_1_1_needs_a_host(server):
    assert raw(server, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_headers_have_a_size_limit_together(server):
    line = b"X: " + b"x" * 1000 + b"\r\n"
    assert raw(server, HEALTH + line * 60 + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert raw(server, HEALTH + line * 70 + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("length, body", [
    (b"Content-Length: %d \t\r\n", b"%b"), (b"Transfer-Encoding: chunked \r\n", b"%x\r\n%b\r\n0\r\n\r\n"),
    (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\nX-Sum: 5\r\nX-Other: 6\r\n\r\n")])
def test_rare_but_legal(server, length, body):
    """Blanks behind a value, a trailer behind the chunks. The next request is read from where it begins."""
    said = json.dumps(dict(input="Hi")).encode()
    length = length % len(said) if b"%" in length else length
    body = body % ((len(said), said) if b"%x" in body else said)
    head = b"POST /v1/responses/input_tokens HTTP/1.1\r\nHost: localhost\r\n"
    answer = raw(server, head + length + b"\r\n" + body, HEALTH + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and answer.endswith(b'{"status": "ok"}')


def test_content_encodings(server, monkeypatch):
    said = json.dumps(dict(input="Hi" * 500)).encode()
    zstd = pytest.importorskip("backports.zstd", reason="needs backports.zstd (requirements-dev.txt)")
    makers = dict(gzip=gzip.compress, deflate=zlib.compress, zstd=zstd.compress, identity=bytes)
    for coding, compress in makers.items():
        data = compress(said)

        def answered(data, coding=coding):
            return fetch(server, "POST", "/v1/responses/input_tokens", data, {"Content-Encoding": coding})
        assert answered(data)[1]["input_tokens"] > 1000
        if coding != "identity":
            for broken in (data[:-5], said, data + b"more", data + data):
                status, answer = answered(broken)
                assert status == 400 and "Content-Encoding" in answer["error"]["message"]
            bomb = compress(bytes(100 * MAX_BODY_BYTES))
            assert answered(bomb)[0] == 413
    status, answer = answered(said, "br")
    assert status == 415
    assert all(name in answer["error"]["message"] for name in ("Content-Encoding", "br", "zstd"))
    wide = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})      # 128 MiB
    status, answer = answered(wide.compress(said) + wide.flush(), "zstd")
    assert status == 400 and "Content-Encoding" in answer["error"]["message"]
    monkeypatch.setitem(sys.modules, "backports", None)
    status, answer = answered(zstd.compress(said), "zstd")
    assert status == 415 and "pip install backports.zstd" in answer["error"]["message"]


def test_a_hang_up_behind_the_next_request_is_seen(server):
    before = server.engine.stats()["cancelled"]
    with socket.create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(posting(dict(messages=[user("Hi")], ignore_eos=True)) + HEALTH)
        eventually(lambda: server.at_work)
    eventually(lambda: not server.at_work)
    assert server.engine.stats()["cancelled"] == before + 1


@pytest.mark.parametrize("path, body, told", [
    ("/v1/responses", dict(input="Hi", max_output_tokens=2),
     dict(type="response.in_progress", sequence_number=1)),
    ("/v1/chat/completions", dict(messages=[user("Hi")], max_tokens=2),
     dict(choices=[dict(index=0, delta={}, finish_reason=None, logprobs=None)])),
    ("/v1/completions", dict(prompt="Hi", max_tokens=2),
     dict(choices=[dict(index=0, text="", finish_reason=None, logprobs=None)]))],
    ids=["responses", "chat", "completions"])
def test_a_stream_is_neither_held_back_nor_silent(server, monkeypatch, path, body, told):
    """nginx passes it on at once, and a stream that waits for its turn is not taken for dead: it has
    events that say nothing new."""
    monkeypatch.setattr("serving.courier.KEEPALIVE_SECONDS", 0.1)
    running = [server.engine.submit([1], ignore_eos=True) for _ in range(2)]            # max_running
    request = urllib.request.Request(server.url + path, json.dumps(dict(body, stream=True)).encode())

    def events(stream):
        for line in stream:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
    with urllib.request.urlopen(request, timeout=30) as stream:
        assert stream.headers["X-Accel-Buffering"] == "no"
        repeated = [event for event, _ in zip(events(stream), range(5)) if told.items() <= event.items()]
        assert len(repeated) >= 3
        for handle in running:
            handle.cancel()
        assert all("error" not in event for event in events(stream))


def test_no_versions_are_told(server):
    with urllib.request.urlopen(server.url + "/health") as answer:
        assert answer.headers["Server"] == "nano-pensieve"


def test_ipv6(checkpoint):
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    with serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0), host="::1") as server:
        assert re.fullmatch(r"http://\[::1\]:\d+", server.url)
        with urllib.request.urlopen(server.url + "/health") as answer:
            assert answer.status == 200


def test_a_slow_but_steady_reader_gets_a_long_answer_whole(server, monkeypatch):
    """The time limit is for each piece of it."""
    monkeypatch.setattr(Handler, "timeout", 0.5)
    def long_answer(self, prefix):
        self.send(200, "x" * 8_000_000, "text/plain")
    monkeypatch.setattr(Handler, "openapi", long_answer)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect(server.server_address)
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        begin, got = time.monotonic(), 0
        while got < 8_000_000 and (piece := connection.recv(30_000)):
            got += len(piece)
            time.sleep(max(0, got / 4e6 - (time.monotonic() - begin)))          # 2 seconds for all
    assert got >= 8_000_000


@pytest.fixture
def untaken(checkpoint):
    """A server whose system keeps a few KB of an answer, and a client that takes nothing."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    with serving(sessions) as server, socket.socket() as slow:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.server_address)
        yield server, slow


# Its answer has some 200 KB.
LONG = dict(messages=[user("long")], max_tokens=100, ignore_eos=True, logprobs=True, top_logprobs=20)


def test_a_settled_turn_frees_its_place_before_its_reader_is_done(untaken, monkeypatch):
    server, slow = untaken
    monkeypatch.setattr(server, "most_turns", 1)
    chat = dict(messages=[user("Hi")], max_tokens=2)
    with server.engine.owner.lock:                          # no turn goes on
        slow.sendall(posting(LONG))
        eventually(lambda: len(server.at_work) == 1)
        assert fetch(server, "POST", "/v1/chat/completions", chat)[0] == 429
    eventually(lambda: not server.unsettled.total(), 60)
    assert len(server.at_work) == 1 and fetch(server, "POST", "/v1/chat/completions", chat)[0] == 200


def test_a_client_that_takes_nothing_is_not_told_again_and_again_that_we_are_here(untaken, monkeypatch):
    monkeypatch.setattr("serving.courier.KEEPALIVE_SECONDS", 0.1)
    server, slow = untaken
    slow.sendall(posting(LONG | dict(stream=True)))
    eventually(lambda: server.at_work and not server.unsettled.total(), 60)
    threads = threading.active_count()
    time.sleep(1)                                           # ten looks
    assert server.at_work and threading.active_count() <= threads


def test_an_answer_that_cannot_be_watched_does_not_leave_the_others_unwatched(server, capsys):
    looked = []

    def fails():
        raise ValueError("this answer is odd")
    another = lambda: looked.append(None)
    server.courier.checks |= {fails, another}
    eventually(lambda: fails not in server.courier.checks and len(looked) > 3)
    server.courier.checks.discard(another)
    assert capsys.readouterr().err.count("ValueError: this answer is odd") == 1


def test_a_stream_has_one_thread_and_a_server_two(checkpoint):
    """One of the two accepts, the other one watches over all streams."""
    asked = posting(dict(messages=[user("Hi")], stream=True, ignore_eos=True))
    with contextlib.ExitStack() as opened:
        sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0, max_running=4).start()
        sessions.writer.submit(int).result()                # now its thread exists
        threads = threading.active_count()
        server = opened.enter_context(serving(sessions))
        for _ in range(8):
            stream = opened.enter_context(socket.create_connection(server.server_address))
            stream.sendall(asked)
        eventually(lambda: len(server.at_work) == 8)
        assert threading.active_count() <= threads + 2 + 8
    eventually(lambda: threading.active_count() <= threads - 2)     # the engine's and the history's


def test_an_engine_that_takes_no_step(checkpoint, monkeypatch):
    """Its GPU may be lost. The health check fails, so a router passes us by. We still say how full we are."""
    monkeypatch.setattr("serving.sockets.STUCK_SECONDS", 0.5)
    sessions, hang = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0), threading.Event()
    with serving(sessions) as server, ThreadPoolExecutor(1) as pool:
        assert fetch(server, "GET", "/health")[0] == 200
        execute = sessions.engine.worker.execute
        monkeypatch.setattr(sessions.engine.worker, "execute", lambda batch: hang.wait(60) and execute(batch))
        asked = pool.submit(fetch, server, "POST", "/v1/chat/completions",
                            dict(messages=[user("Hi")], max_tokens=2))
        eventually(lambda: fetch(server, "GET", "/health")[0] == 503)
        assert fetch(server, "GET", "/cache")[1]["stats"]["running"] == 1
        assert "vllm:num_requests_running" in fetch(server, "GET", "/metrics")[1]
        hang.set()
        assert asked.result()[0] == 200
        eventually(lambda: fetch(server, "GET", "/health")[0] == 200)


def test_large_bodies_leave_most_of_the_time_to_others(server):
    """Whoever sends one after another gets a quarter of the interpreter, also on several connections."""
    body = json.dumps(dict(input="Hi", include=[1] * 600_000)).encode()
    begin, used = time.monotonic(), 0
    def read_one(_):
        with server.unhurried(body):
            before = time.thread_time()
            json.loads(body)
            return time.thread_time() - before
    with ThreadPoolExecutor(4) as pool:
        used = sum(pool.map(read_one, range(12)))
    assert used < 0.3 * (time.monotonic() - begin)


def test_a_silent_client_is_cut_off(server, monkeypatch):
    assert 0 < Handler.timeout <= 60
    monkeypatch.setattr(Handler, "timeout", 0.2)
    for sent in (b"", b"GET /health",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"):
        assert raw(server, sent) == b""


def test_connections_are_kept(server):
    """Several requests on one connection, a streamed answer among them; an old client's connection is
    closed instead."""
    connection = http.client.HTTPConnection(*server.server_address, timeout=30)
    for body in [dict(messages=[user("Hi")], max_tokens=2, stream=stream) for stream in (False, True, False)]:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        kept, response = connection.sock, connection.getresponse()
        content = response.read()
        assert connection.sock is kept and content.endswith(b"data: [DONE]\n\n" if body["stream"] else b"}")
    connection.close()
    body = json.dumps(dict(messages=[user("Hi")], max_tokens=2, stream=True)).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = raw(server, head + body)
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: {") and answer.endswith(b"data: [DONE]\n\n")


def test_we_say_that_we_close_a_connection(server):
    """Otherwise a client takes it for its next request. Some clients send a length with a GET or DELETE."""
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"Connection: close\r\n") == 1
    assert raw(server,
               b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n").count(b"Connection: close\r\n") == 1
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").count(b"Connection: close\r\n") == 1


def test_early_bytes_of_the_next_request(server):
    """They don't look like hanging up, and a body that nobody reads is not taken for a request."""
    body = json.dumps(dict(messages=[user("Hi")], max_tokens=300, ignore_eos=True)).encode()
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 27\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    chat = head % len(body) + body
    answer = raw(server, chat, health, b"GET /cache HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and b'"finish_reason": "length"' in answer
    assert answer.endswith(b'{"status": "ok"}')


# ---- clients that leave, an engine that fails

@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_who_hangs_up_cancels_the_turn(server, stream, n):
    before, conversations = server.engine.stats(), server.sessions.history.conversations()
    # as long as the context allows
    body = dict(messages=[user("long")], stream=stream, n=n, ignore_eos=True)
    enough = before["generated_tokens"] + 5
    hang_up_after(server, body, lambda: server.engine.stats()["generated_tokens"] > enough)
    eventually(lambda: not server.at_work and not server.sessions.turns)
    after = server.engine.stats()
    assert after["running"] == after["waiting"] == 0
    assert after["cancelled"] == before["cancelled"] + n and after["finished"] == before["finished"]
    assert after["slots_free"] >= before["slots_free"]
    assert server.sessions.history.conversations() == conversations


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
def test_who_hangs_up_needs_no_shorter_context(server, monkeypatch, path):
    """Beside a client that is gone, the messages that are too many are not even tokenised once."""
    monkeypatch.setattr(server.sessions.tokenizer, "turn", lambda *given: pytest.fail("we tokenise"))
    monkeypatch.setattr("serving.sockets.has_hung_up", lambda connection: True)
    assert raw(server, posting(dict(input="Hi", truncation="auto"), path)) == b""


def test_who_hangs_up_while_other_large_bodies_are_read_is_not_read(server, monkeypatch):
    """Else a client that sends and hangs up in a loop would fill the queue of those who wait to be read."""
    read = []
    monkeypatch.setattr("serving.sockets.json.loads", lambda body: read.append(len(body)) or {})
    with server.reading:
        for _ in range(5):
            with socket.create_connection(server.server_address, timeout=30) as connection:
                connection.sendall(posting(dict(input="x" * LARGE_BYTES)))
        time.sleep(0.3)
    eventually(lambda: not server.deadlines)
    assert read == []


def test_who_hangs_up_leaves_the_queue(server):
    body, engine = dict(messages=[user("long")], ignore_eos=True), server.engine
    before = engine.stats()["cancelled"]
    running = [engine.submit([1], ignore_eos=True) for _ in range(2)]               # max_running
    eventually(lambda: engine.stats()["running"] == 2)
    hang_up_after(server, body, lambda: engine.stats()["waiting"] == 1)
    eventually(lambda: engine.stats()["waiting"] == 0)
    assert engine.stats()["running"] == 2 and engine.stats()["cancelled"] == before + 1
    for handle in running:
        handle.cancel()
        handle.result()


def test_nothing_is_done_before_it_is_committed(server, client, monkeypatch):
    def full(*args, **options):
        raise RuntimeError("the disk is full")
    monkeypatch.setattr(server.sessions.history, "commit", full)
    with pytest.raises(openai.InternalServerError, match="disk is full"):
        ask(client, [user("Hi")])
    chunks = []
    with pytest.raises(openai.APIError, match="disk is full"):
        for chunk in client.chat.completions.create(model="ascii", messages=[user("Hi")], max_tokens=4,
                                                    stream=True):
            chunks.append(chunk)
    assert chunks and all(chunk.choices[0].finish_reason is None for chunk in chunks)
    # what fails one choice ends all
    with pytest.raises(openai.InternalServerError, match="disk is full"):
        ask(client, [user("Hi")], n=4)
    assert not server.sessions.turns
    monkeypatch.undo()
    assert ask(client, [user("Hi")])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_has_failed(checkpoint, monkeypatch):
    with (serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)) as server,
          connect(server.url) as client):
        def burn(batch):
            eventually(lambda: server.at_work)              # a server that nobody asks would stop at once
            raise RuntimeError("the GPU is on fire")
        client.models.list()                # opens the connection: a server that stops accepts no new one
        asking = server.engine.submit([1], ignore_eos=True)
        next(iter(asking))
        monkeypatch.setattr(server.engine.worker, "execute", burn)
        with pytest.raises(openai.InternalServerError, match="on fire"):
            ask(client, [user("Hi")])
        with pytest.raises(RuntimeError, match="on fire"):
            asking.result()
        assert server.drained.wait(10)


# ---- the program

def test_every_field_of_config_is_a_flag():
    flags = parse_flags("--model a/b --gpu-cache-tokens 9 --swap-threshold 0.5 --policy lru --stateless "
                        "--no-pipeline --api-key k".split())
    assert ((flags.model, flags.gpu_cache_tokens, flags.swap_threshold, flags.policy, flags.api_key)
            == ("a/b", 9, 0.5, "lru", ["k"]))
    assert flags.stateless and flags.no_pipeline and not flags.separate_phases
    assert parse_flags(["--strict"]).strict and not flags.strict
    assert flags.cpu_cache_tokens is None
    assert flags.history == str(ROOT / "history-a-b.sqlite")
    assert parse_flags([]).history == str(ROOT / "history.sqlite")


def test_keys_from_files_and_the_environment(tmp_path, monkeypatch):
    """Others can read a process's flags."""
    monkeypatch.setenv("NANO_PENSIEVE_API_KEYS", "of the environment")
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "metrics").write_text("counts\n")
    flags = parse_flags(["--api-key", f"@{tmp_path}/keys", "--api-key", "k", "--metrics-key",
                         f"@{tmp_path}/metrics"])
    assert flags.api_key == ["of", "the", "environment", "one", "two", "k"]
    assert flags.metrics_key == "counts"


@pytest.mark.parametrize("content, named", [("", "api_key must be"), ("\n\n", "api_key must be"),
                                            ("two words", "api_key must be"), (None, "No such file")])
def test_a_file_without_keys_opens_no_server_to_all(content, named, tmp_path, monkeypatch, capsys,
                                                    checkpoint):
    if content is not None:
        (tmp_path / "keys").write_text(content)
    words = last_words(checkpoint, f"--api-key @{tmp_path}/keys", monkeypatch, capsys)
    assert words.count("\n") == 1 and named in words


@pytest.mark.parametrize("flags, warns", [("--host 0.0.0.0", True), ("--host 0.0.0.0 --api-key k", False),
                                          ("--host 127.0.0.1", False)])
def test_a_server_for_all_without_a_key_warns(flags, warns, monkeypatch, capsys, checkpoint):
    import server
    monkeypatch.setattr(sys, "argv", ["server.py", "--model", str(checkpoint), "--history", ":memory:",
                                      "--port", "0", *flags.split()])
    monkeypatch.setattr(server, "settle_in", lambda: None)
    def end(server):
        server.drain()
        server.server_close()
        server.sessions.close()
    monkeypatch.setattr(server, "serve_until_stopped", end)
    server.main()
    errors = capsys.readouterr().err
    assert ("without a key" in errors, errors.count("\n")) == (warns, warns)


def last_words(model, flags, monkeypatch, capsys):
    """What server.py says before it exits with 2."""
    import server
    monkeypatch.setattr(sys, "argv", ["server.py", "--model", str(model), "--history", ":memory:",
                                      "--port", "0", *flags.split()])
    with pytest.raises(SystemExit) as exit:
        server.main()
    assert exit.value.code == 2
    return capsys.readouterr().err


SIZES = ["gpu-cache-tokens", "cpu-cache-tokens", "chunk-size", "max-batch-tokens", "max-running", "port"]


@pytest.mark.parametrize("flags", ["--bogus", "--policy best", "--port many", "--gpu-cache-tokens 0",
                                   "--reserve 2", *(f"--{size} {10**20}" for size in SIZES)])
def test_bad_flags_are_one_line(flags, capsys, monkeypatch, checkpoint):
    assert last_words(checkpoint, flags, monkeypatch, capsys).count("\n") == 1


@pytest.mark.parametrize("file, content", [
    ("config.json", "{"), ("config.json", "[1]"), ("config.json", '{"model_type": "gpt2", "n_embd": [1]}'),
    ("generation_config.json", "{"), ("tokenizer.json", "{"), ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[1]"), ("tokenizer_config.json", '{"chat_template": 5}'),
    ("tokenizer_config.json", '{"chat_template": [1]}'), ("chat_template.jinja", "{% if %}")])
def test_a_damaged_checkpoint_is_one_line(file, content, tmp_path, capsys, monkeypatch, checkpoint):
    shutil.copytree(checkpoint, tmp_path / "damaged")
    (tmp_path / "damaged" / file).write_text(content)
    words = last_words(tmp_path / "damaged", "", monkeypatch, capsys)
    assert words.count("\n") == 1 and (file in words or "template" in words)


def test_a_checkpoint_without_a_tokenizer_that_we_read_is_one_line(tmp_path, capsys, monkeypatch, checkpoint):
    shutil.copytree(checkpoint, tmp_path / "older", ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "older" / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    words = last_words(tmp_path / "older", "", monkeypatch, capsys)
    assert words.count("\n") == 1 and "tokenizer.json" in words and str(tmp_path / "older") in words


def test_a_connection_that_rests_is_not_worth_a_line(server, capfd, monkeypatch):
    """Clients keep connections for later; after a while the server closes them."""
    monkeypatch.setattr(Handler, "timeout", 0.2)
    with socket.create_connection(server.server_address, timeout=30) as connection:
        assert connection.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_the_log_says_why(server, capfd):
    fetch(server, "POST", "/v1/chat/completions", dict(messages=[user("Hi")], temperature=3))
    line, = [line for line in capfd.readouterr().err.splitlines() if "chat/completions" in line]
    assert " 400 temperature should be less than or equal to 2, got 3" in line


@pytest.mark.parametrize("flags, opens", [("--gpu-cache-tokens 1", False), ("--allow-origin nonsense", True)])
def test_what_was_opened_is_closed_if_the_server_cannot_start(flags, opens, checkpoint, monkeypatch):
    """The port, and the sessions, if these were opened."""
    import server
    closed, close = [], Sessions.close
    monkeypatch.setattr(Sessions, "close", lambda self: closed.append(self) or close(self))
    listeners, listen = [], server.listen
    monkeypatch.setattr(server, "listen", lambda *address: listeners.append(listen(*address)) or listeners[0])
    with pytest.raises(ValueError):
        server.open_server(parse_flags(["--model", str(checkpoint), "--history", ":memory:", "--port", "0",
                                        *flags.split()]))
    assert len(closed) == opens and listeners[0].fileno() == -1


def test_a_demo_whose_stateless_engine_cannot_start_is_one_line(monkeypatch, capsys, checkpoint):
    import server

    def no_second(**options):
        raise ValueError("there is no memory for it")
    monkeypatch.setattr(server, "Engine", no_second)
    errors = last_words(checkpoint, "--demo", monkeypatch, capsys)
    assert errors == "server.py: there is no memory for it\n"


def test_a_port_that_is_taken(server, checkpoint, tmp_path, capsys, monkeypatch):
    from server import main
    monkeypatch.setattr("server.Sessions", None)            # the port is told before anything loads
    port = str(server.server_address[1])
    monkeypatch.setattr(sys, "argv", ["server.py", "--model", str(checkpoint), "--port", port, "--history",
                                      ":memory:", "--gpu-cache-tokens", "2048"])
    threads = set(threading.enumerate())
    with pytest.raises(SystemExit) as exit:
        main()
    assert set(threading.enumerate()) <= threads            # the engine is closed, and so is the history
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and f"127.0.0.1:{port}" in error


def test_banner_and_ctrl_c(checkpoint, tmp_path):
    flags = "--gpu-cache-tokens", "4096", "--cpu-cache-tokens", "8192"
    with program(checkpoint, tmp_path / "history", *flags) as (process, url, banner):
        assert re.search(r"ascii.*\n.*4,096 tokens +3\.0 MiB\n.*8,192 tokens +6\.0 MiB\n", banner)
        assert ("ordinary memory" in banner) == ("on cpu" in banner)
        with connect(url) as client:
            stream = client.chat.completions.create(model="ascii", messages=[user("Hi")], stream=True,
                                                    extra_body=dict(ignore_eos=True))
            next(iter(stream))
            process.send_signal(signal.SIGINT)             # while a turn runs
            output, errors = process.communicate(timeout=60)
        assert process.returncode in (0, 130) and "Traceback" not in errors and "leaked" not in errors


def test_ctrl_c_while_it_imports_torch():
    with subprocess.Popen([sys.executable, ROOT / "server.py", "--history", ":memory:"],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), 60)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "stopped\n" and process.returncode == 130


def test_kill_9(checkpoint, zygote, tmp_path):
    """What was told to be done is there after a crash, and the next answer is that of a server that
    was never killed."""
    history, texts = tmp_path / "history", ["one", "two", "three", "four"]
    options = dict(max_tokens=24, extra_body=dict(ignore_eos=True))

    def converse(client, messages, texts):
        for text in texts:
            messages = messages + [user(text)]
            messages.append(dict(role="assistant", content=ask(client, messages, **options)[0]))
        return messages

    with (serving(Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT)) as server,
          connect(server.url) as client):
        uninterrupted, fingerprint = converse(client, [], texts), server.sessions.tokenizer.fingerprint
    pid, url = zygote.start(checkpoint, history, "--gpu-cache-tokens", "2048")
    with connect(url) as client:
        told = converse(client, [], texts[:3])
        stream = client.chat.completions.create(model="ascii", messages=told + [user("four")], stream=True,
                                                extra_body=dict(ignore_eos=True))
        for chunk, _ in zip(stream, range(10)):
            pass
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception):                     # it ends, but not as if it were done
            list(stream)
    assert zygote.exit_code() == -signal.SIGKILL
    pid, url = zygote.start(checkpoint, history, "--gpu-cache-tokens", "2048")
    with connect(url) as client:
        conversation = ask(client, told + [user("four")], **options)[3]
    os.kill(pid, signal.SIGTERM)
    assert zygote.exit_code() == 0
    kept = History(str(history), fingerprint)
    assert kept.messages(kept.head(conversation).id) == uninterrupted
    assert kept.conversations() == [conversation]
