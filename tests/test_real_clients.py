"""What other people's clients send, replayed: we ran each of them against a server and wrote its requests
down. Each resends its history in a form of its own; in all of them we recognise it, and from the second turn
on every token that was fed before is cached.

Clients that need nothing but the `openai` package run themselves, in test_server.py and test_responses.py."""
import json
from functools import reduce
from itertools import groupby

import pytest

from clients import CONTEXT, ROOT, eventually, fetch, numbered, serving, user
from serving.sessions import Sessions

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(Sessions(checkpoint, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=0)) as server:
        yield server


def ask(server, path, history, headers=None, **options):
    """(our reply, its text, the prompt's cached tokens, all tokens, the conversation's name)."""
    is_chat = path == CHAT
    limit, field = ("max_tokens", "messages") if is_chat else ("max_output_tokens", "input")
    body = {field: history, limit: 20, "ignore_eos": True} | options
    status, answer = fetch(server, "POST", path, body, headers)
    assert status == 200, answer
    usage = answer["usage"]
    details = usage["prompt_tokens_details" if is_chat else "input_tokens_details"]
    reply = answer["choices"][0]["message"] if is_chat else answer["output"][0]
    text = reply["content"] if is_chat else reply["content"][0]["text"]
    conversation = answer["conversation_id"] if is_chat else answer["conversation"]["id"]
    return reply, text, details["cached_tokens"], usage["total_tokens"], conversation


def without(item, *names):
    return {name: value for name, value in item.items() if name not in names}


def parted(text):
    return dict(role="user", content=[dict(type="input_text", text=text)])


def said(item):
    return dict(role="assistant", content=item["content"][0]["text"])


# name: (path, the fields that are always sent, the user's text as it is sent, our reply as it is sent back).
# Our reply is choices[0].message of a chat, output[0] of a response.
CLIENTS = {
    "openai 3.54": (
        CHAT, {}, user,
        lambda message: message | dict(annotations=None, audio=None, function_call=None, tool_calls=None)),
    "openai 3.54, responses": (RESPONSES, {}, user, lambda item: item | dict(phase=None)),
    "openai (Node)": (CHAT, {}, user, lambda message: message | dict(parsed=None)),
    "llm": (CHAT, {}, user,
            lambda message: without(message, "refusal")),
    "litellm": (CHAT, {}, user, lambda message: without(message, "refusal") | dict(
        provider_specific_fields=dict(refusal=None))),
    "langchain, responses": (
        RESPONSES, dict(stream=False), lambda text: user(text) | dict(type="message"),
        lambda item: without(item, "status") | dict(
            content=[without(item["content"][0], "logprobs")])),
    "pydantic-ai, responses": (RESPONSES, dict(instructions="Be brief."), user, said),
    "haystack, responses": (RESPONSES, {}, parted, said),
    "openai-agents": (
        RESPONSES, dict(instructions="Be brief.", include=[], tools=[]), user, lambda item: item),
    "vercel ai": (
        RESPONSES, {}, parted, lambda item: dict(type="item_reference", id=item["id"])),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_resends_its_history(server, name):
    path, fields, as_sent, sent_back = CLIENTS[name]
    history, length = [], 0
    for turn in range(3):
        history.append(as_sent(f"Message {turn} from {name}"))
        reply, _, cached, total, _ = ask(server, path, history, temperature=2, seed=turn, **fields)
        assert cached == max(length - 1, 0)
        history.append(sent_back(reply))
        length = total


def test_an_agents_session_that_keeps_its_items_with_us(server):
    """openai-agents' OpenAIConversationsSession: a conversation is its store, but it resends all of it."""
    store = fetch(server, "POST", "/v1/conversations", dict(items=[]))[1]["id"]
    path, length = f"/v1/conversations/{store}/items", 0
    for turn in range(3):
        history = fetch(server, "GET", f"{path}?order=asc")[1]["data"] + [user(f"Item {turn}")]
        assert fetch(server, "POST", path, dict(items=history[-1:]))[0] == 200
        reply, _, cached, total, _ = ask(server, RESPONSES, history, tools=[], include=[])
        assert cached == max(length - 1, 0)
        assert fetch(server, "POST", path, dict(items=[without(reply, "id")]))[0] == 200
        length = total


# ---- Open Responses

def message(role, text, **fields):
    return dict(type="message", role=role, content=text, **fields)


# What the six tests of its suite that need neither tools nor images send, in our words.
OPEN_RESPONSES = {
    "text": dict(input=[message("user", "Hello!")]),
    "stream": dict(input=[message("user", "Who are you?")], stream=True),
    "system prompt": dict(input=[message("system", "Be brief."), message("user", "Say hello.")]),
    "several turns": dict(input=[message("user", "Hi, I'm Ada."), message("assistant", "Hello, Ada!"),
                                 message("user", "What is my name?")]),
    "phases": dict(input=[message("user", "Hi, I'm Ada."), message("assistant", "Hm.", phase="commentary"),
                          message("assistant", "Hello!", phase="final_answer"), message("user", "Bye!")]),
    "one after another": dict(input=[message("user", "And now?")])}
RESOURCE = dict(        # of what type each member of a response must be
    id=str, object=str, created_at=int, completed_at=int, status=str, incomplete_details=None, model=str,
    previous_response_id=(str, None), instructions=None, output=list, error=None, tools=list, tool_choice=str,
    truncation=str, parallel_tool_calls=bool, text=dict, top_p=float, presence_penalty=float,
    frequency_penalty=float, top_logprobs=int, temperature=float, reasoning=None, usage=dict,
    max_output_tokens=None, max_tool_calls=None, store=bool, background=bool, service_tier=str,
    metadata=dict, safety_identifier=None, prompt_cache_key=None)
EVENTS = ["response.created", "response.in_progress", "response.output_item.added",
          "response.content_part.added", "response.output_text.delta", "response.output_text.done",
          "response.content_part.done", "response.output_item.done", "response.completed"]


@pytest.fixture(scope="module")
def speaking():
    """A server whose model ends its replies."""
    with serving(Sessions(ROOT / "tiny_chat", gpu_cache_tokens=2048, cpu_cache_tokens=0)) as server:
        yield server


@pytest.mark.parametrize("name", OPEN_RESPONSES)
def test_open_responses(speaking, name):
    body = dict(OPEN_RESPONSES[name], model="tiny_chat")
    if name == "one after another":
        body["previous_response_id"] = fetch(speaking, "POST", RESPONSES, OPEN_RESPONSES["text"])[1]["id"]
    status, response = fetch(speaking, "POST", RESPONSES, body)
    assert status == 200
    if "stream" in body:
        events = [json.loads(line[6:]) for line in response.splitlines() if line.startswith("data: ")]
        assert numbered(events)
        assert [kind for kind, _ in groupby(event["type"] for event in events)] == EVENTS
        response = events[-1]["response"]
    for member, kinds in RESOURCE.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        assert response[member] is None and None in kinds or type(response[member]) in kinds, member
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    item, = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part, = item["content"]
    assert part["type"] == "output_text" and part["text"] and part["annotations"] == part["logprobs"] == []


# ---- empty says nothing

DEEP = reduce(lambda inner, _: dict(x=inner), range(700), None)
NEUTRAL = dict(
    tools=[], functions=None, tool_choice="auto", parallel_tool_calls=True, store=True, service_tier="auto",
    safety_identifier="me", prompt_cache_key="mine", prompt_cache_retention="24h", modalities=None,
    reasoning=dict(effort=None, summary=None), moderation=dict(input=dict(model=None)), prediction=[None],
    audio=DEEP, logit_bias={}, stop=[], stream_options=None, top_logprobs=0, background=False,
    skip_special_tokens=True, top_k=-1, function_call="none", best_of=1, use_beam_search=False,
    length_penalty=1.0, priority=0, echo=False, add_generation_prompt=True, stop_token_ids=[],
    continue_final_message=False, include_stop_str_in_output=False, structured_outputs=None)


@pytest.mark.parametrize("path, fields", [
    (CHAT, dict(messages=[user("Hi")], max_tokens=1, reasoning_effort=None, modalities=["text"])),
    (RESPONSES, dict(input=[user("Hi") | dict(phase="commentary")], max_output_tokens=1,
                     include=["reasoning.encrypted_content", "web_search_call.action.sources"]))])
def test_empty_fields_ask_for_nothing(server, path, fields):
    status, answer = fetch(server, "POST", path, NEUTRAL | fields)
    assert status == 200, answer
    reply = answer["choices"][0] if path == CHAT else answer["output"][0]["content"][0]
    assert not reply["logprobs"]                            # nobody has asked for them
    streaming = dict(stream=True, stream_options=dict(include_obfuscation=False))
    assert fetch(server, "POST", path, NEUTRAL | fields | streaming)[0] == 200


@pytest.mark.parametrize("path, field", [(CHAT, "messages"), (RESPONSES, "input")])
@pytest.mark.parametrize("wanted", [
    dict(tools=[dict(type="web_search")]), dict(functions=[{}]), dict(tool_choice="required"),
    dict(reasoning=dict(effort="low")), dict(background=True), dict(modalities=["audio"]),
    dict(skip_special_tokens=False), dict(stop_token_ids=[1]), dict(guided_json={"type": "object"}),
    dict(guided_choice=["a"]), dict(structured_outputs=dict(regex="a")), dict(regex="a"), dict(best_of=2),
    dict(continue_final_message=True), dict(include_stop_str_in_output=True), dict(echo=True),
    dict(cache_salt=""), dict(cache_salt=5), dict(length_penalty=1.5), dict(priority=1),
    dict(function_call="f"), dict(add_generation_prompt=False), dict(use_beam_search=True),
    dict(stream_options=dict(x=1))])
def test_anything_else_that_we_do_not_have_is_refused_by_name(server, path, field, wanted):
    status, answer = fetch(server, "POST", path, {field: [user("Hi")]} | wanted)
    assert status == 400 and answer["error"]["param"].startswith(*wanted)


# ---- names of sessions

@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("field, header", [
    ("conversation_id", None), ("session_id", None), ("prompt_cache_key", None),
    (None, "X-Session-ID"), (None, "X-Session-Affinity"), (None, "session_id")])
def test_a_session_name_is_a_hint(server, path, field, header):
    """Two clients with the same words and names of their own: each goes on in its own conversation."""
    histories = {f"{path[4:]} {field} {header} {i}": [user("Hello")] for i in range(2)}
    for turn in range(2):
        for name, history in histories.items():
            body, headers = {field: name} if field else {}, {header: name} if header else {}
            _, text, cached, _, conversation = ask(server, path, history, headers, **body)
            assert conversation == name and (cached > 0) == (turn > 0)
            history += [dict(role="assistant", content=text), user("And?")]


def test_an_empty_header_names_no_session(server):
    headers = {"X-Session-ID": "", "session_id": "named by the second"}
    conversation = ask(server, CHAT, [user("Hello")], headers)[-1]
    assert conversation == "named by the second"


# ---- benchmarks

def test_min_tokens(server):
    """Neither a stop token nor a stop string ends the reply before."""
    def say(**options):
        body = dict(messages=[user("Hi")], max_tokens=200, temperature=2, seed=1, logprobs=True) | options
        choice = fetch(server, "POST", CHAT, body)[1]["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason = say()
    assert reason == "stop" and 1 < len(text) < 100         # each token is a character
    longer, reason = say(min_tokens=len(text) + 30)
    assert longer.startswith(text) and len(longer) >= len(text) + 29
    assert say(stop=text[1])[0] == text[:1]
    later, reason = say(stop=text[1], min_tokens=len(text))
    assert later.startswith(text)
    assert say(min_tokens=200, stop=list(text[:4]))[1] == "length"
    assert fetch(server, "POST", CHAT, dict(messages=[user("Hi")], min_tokens=9, max_tokens=8))[0] == 400


def test_usage_in_every_chunk(server, client):
    options = dict(include_usage=True, continuous_usage_stats=True)
    *chunks, last = client.chat.completions.create(
        model="ascii", messages=[user("Hi")], max_tokens=6, stream=True, stream_options=options,
        extra_body=dict(ignore_eos=True, n=2))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts) and len(counts) >= len(chunks) - 1
    assert {6, 12} <= set(counts) and last.usage.completion_tokens == 12
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {last.usage.prompt_tokens}


def test_vllms_multi_turn_benchmark(server):
    """Its requests: the conversation's name in the body and in a header."""
    messages = [user("Round 1")]
    for turn in range(2):
        body = dict(model="ascii", messages=messages, seed=0, temperature=0.0, stream=True, max_tokens=12,
                    min_tokens=12, conversation_id="bench 1", stream_options=dict(include_usage=False))
        status, stream = fetch(server, "POST", CHAT, body, {"X-Session-ID": "bench 1"})
        assert status == 200 and stream.endswith("data: [DONE]\n\n")
    eventually(lambda: not server.at_work)
