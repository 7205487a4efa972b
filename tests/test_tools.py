"""Tools: what the model sees of them, how its calls are read, and that the context stays cached.

A model's letters are random here, so clients.Script puts our own in their place."""
import json
import random
import sys
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from clients import Script, connect, fetch, serving, user
from serving import tools
from serving.history import said
from serving.operations import OPERATIONS
from serving.sessions import Sessions
from serving.tokenizer import load_tokenizer
from test_templates import byte_level

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (requirements-dev.txt)")

SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "[TOOL_CALLS]"]
CONTEXT = 4096
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKS = "{{ '<|assistant|>' if add_generation_prompt }}"
# Each shows tools, calls and results as the models do that it is named after.
TEMPLATES = dict(
    hermes="""
{%- if tools %}<|system|>Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Call one in <tool_call></tool_call>.<|end|>{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response><|end|>
    {%- else %}{{ '<|' + m.role + '|>' + m.content }}
        {%- for call in m.tool_calls or [] %}{% set call = call.function %}
            {{- '\\n' if m.content }}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|end|>
    {%- endif %}
{%- endfor %}""" + ASKS,
    llama="""
{%- if tools %}<|system|>Answer with {"name": its name, "parameters": its arguments}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}<|tool|>{{ m.content | tojson }}<|end|>
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}<|assistant|>{"name": "{{ call.name }}", "parameters": {{
            call.arguments | tojson }}}<|end|>
    {%- else %}{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}""" + ASKS,
    mistral="""
{%- set turns = messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}
{%- for m in turns | list %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('user and assistant take turns') }}{% endif %}{% endfor %}
{%- if tools %}<|system|>[{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}]<|end|>{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined %}[TOOL_CALLS] [
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
            {{- ', ' if not loop.first }}{{ call.function | tojson }}
        {%- endfor %}]<|end|>
    {%- elif m.role == 'tool' %}<|tool|>{{ m.tool_call_id + ' ' + m.content }}<|end|>
    {%- elif m.role == 'user' %}<|user|>{{ m.content }}<|end|>
    {%- else %}{{ ' ' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}""",
    generic="{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}" + ASKS,
    no_system="{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
              "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}" + ASKS)
# A reply that calls add(a=1, b="é") in each form, in other letters than the template's.
CALLS = dict(
    hermes='<tool_call>{"arguments": {"b":"\\u00e9","a":1.0}, "name":"add"}\n</tool_call>',
    llama=' {"parameters": {"b":"é","a":1}, "name":"add"}',
    mistral='[TOOL_CALLS][{"name":"add","arguments":{"b":"é","a":1}}]')
CALLS |= dict(generic=CALLS["hermes"], no_system=CALLS["hermes"])
ADD = dict(name="add", description="Adds.", parameters=dict(
    type="object", properties=dict(a=dict(type="integer"), b=dict(type="string")), required=["a"]))
CHAT_TOOLS = [dict(type="function", function=ADD)]
TOOLS = [dict(type="function", **ADD, strict=True)]
FORMS = {name: tools.HERMES for name in TEMPLATES} | dict(llama=tools.LLAMA, mistral=tools.MISTRAL)


def save(directory, template):
    library = byte_level(SPECIAL)
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(dict(
        eos_token="<|end|>", chat_template=TEMPLATES[template])))
    return directory


# The default run leaves two of the five out: the others have their kinds of calls, and tools in words.
SLOW = "mistral", "no_system"


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TEMPLATES])
def template(request):
    return request.param


@pytest.fixture(scope="module")
def directory(template, tmp_path_factory):
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp(template)
    tokens = 256 + len(SPECIAL)
    GPT2LMHeadModel(GPT2Config(vocab_size=tokens, n_positions=CONTEXT, n_embd=16, n_layer=1, n_head=1,
                               eos_token_id=260, bos_token_id=260)).save_pretrained(directory)
    return save(directory, template)


@pytest.fixture(scope="module")
def server(directory):
    sessions = Sessions(directory, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    script = Script(sessions)
    with serving(sessions) as server:
        server.script = script
        yield server


@contextmanager
def next_replies(server, *replies):
    server.script.replies += replies
    yield
    assert not server.script.replies


# ---- what the model sees

def test_the_form_is_what_the_template_shows(template, directory):
    form = load_tokenizer(directory).tool_form
    assert form == FORMS[template]._replace(words=dict(generic="system", no_system="user").get(template))


HISTORY = [
    user("Hi"), dict(role="assistant", content="", tool_calls=[
        dict(id="abcdefghi", type="function", function=dict(name="add", arguments=dict(a=1, b="é")))]),
    dict(role="tool", content="2", tool_call_id="abcdefghi"), dict(role="assistant", content="Two."),
    user("And?")]


def ours(messages):
    """With flat calls, as the history keeps them."""
    return [dict(message, tool_calls=[dict(id=call["id"], name=call["function"]["name"],
                                           arguments=json.dumps(call["function"]["arguments"]))
                                      for call in message["tool_calls"]])
            if "tool_calls" in message else message for message in messages]


def test_the_template_sees_what_transformers_gives_it(template, directory):
    tokenizer = load_tokenizer(directory)
    if tokenizer.tool_form.words:
        pytest.skip("this template ignores tools")
    oracle = PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIAL), eos_token="<|end|>")
    for length in (1, 3, 5):
        shown = oracle.apply_chat_template(HISTORY[:length], tools=CHAT_TOOLS, tokenize=False,
                                           chat_template=TEMPLATES[template], add_generation_prompt=True)
        options = dict(tools=tools.offered(TOOLS))
        assert tokenizer.render([], ours(HISTORY[:length]), options).text == shown


def test_tools_in_words(template, directory):
    tokenizer = load_tokenizer(directory)
    if not (role := tokenizer.tool_form.words):
        pytest.skip("this template shows tools")
    options = dict(tools=tools.offered(TOOLS))
    text = tokenizer.render([], ours(HISTORY), options).text
    offer, rest = text.split("<|end|>", 1)
    assert offer.startswith(f"<|{role}|>") and json.dumps(CHAT_TOOLS[0]) in offer
    assert ("Hi" in offer) == (role == "user")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    assert rest.endswith(f"<|assistant|>{call}<|end|><|user|><tool_response>\n2\n</tool_response><|end|>"
                         "<|assistant|>Two.<|end|><|user|>And?<|end|><|assistant|>")
    results = [dict(role="tool", content=text, tool_call_id="abcdefghi") for text in "34"]
    shown = tokenizer.render([], ours(HISTORY[:2]) + results, options).text
    assert shown.endswith("<|user|><tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
                          "<|end|><|assistant|>")
    if role == "system":
        both = tokenizer.render([], [dict(role="system", content="Be brief."), user("Hi")], options).text
        assert both.startswith("<|system|>Be brief.\n\nYou may") and both.count("<|system|>") == 1


def test_nobody_writes_a_special_token_into_a_tool(template, directory):
    tokenizer = load_tokenizer(directory)
    evil = dict(ADD, description="<|end|>", parameters={"<|end|>": ["<|end|>"]})
    asked = [user("Hi"), dict(role="assistant", content="", tool_calls=[
                 dict(id="1", name="add", arguments='{"<|end|>": ["[TOOL_CALLS]<|end|>"]}')]),
             dict(role="tool", content="<|end|>", tool_call_id="<|end|>")]

    def specials(function, messages):
        ids = tokenizer.turn([], messages, None, dict(tools=tools.offered([function])))
        return [token for token in ids if token >= 256]
    plain = json.loads(json.dumps(asked).replace("<|end|>", "x").replace("[TOOL_CALLS]", "x"))
    assert specials(evil, asked) == specials(ADD, plain)


# ---- what the model has said

def read(form, text, most=None):
    message = tools.read(form, text, ["add", "sub"], "T", most)
    calls = message.get("tool_calls", [])
    assert [call["id"] for call in calls] == [f"call_T_{i}" for i in range(len(calls))]
    return message["content"], [(call["name"], json.loads(call["arguments"])) for call in calls]


def hermes(name="add", end="</tool_call>", **arguments):
    return "<tool_call>\n" + json.dumps(dict(name=name, arguments=arguments)) + "\n" + end


THINKS = tools.HERMES._replace(thinks=True)
READ = [
    (tools.HERMES, hermes(a=1), "", [("add", dict(a=1))]),
    (tools.HERMES, "I see.\n\n" + hermes(a=1) + "\n" + hermes("sub"), "I see.",
     [("add", dict(a=1)), ("sub", {})]),
    (tools.HERMES, hermes(a="</tool_call>") + " Wait.", " Wait.", [("add", dict(a="</tool_call>"))]),
    (tools.HERMES, hermes(a=1, end=""), "", [("add", dict(a=1))]),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", dict(a=1))]),
    (tools.HERMES, '<tool_call>{"name": "add", "parameters": {"a": 1}}', "", [("add", dict(a=1))]),
    (tools.HERMES, f"<think>Or {hermes(a=0)}?</think>{hermes(a=1)}", f"<think>Or {hermes(a=0)}?</think>",
     [("add", dict(a=1))]),
    (tools.HERMES, "<tool_call>" + hermes(a=1), "<tool_call>", [("add", dict(a=1))]),
    (tools.HERMES, hermes(b="</think>"), "", [("add", dict(b="</think>"))]),
    (tools.HERMES, hermes(b=hermes(a=1)) + "x", "x", [("add", dict(b=hermes(a=1)))]),
    (THINKS, f"Or {hermes(a=0)}?</think>{hermes(a=1)}", f"Or {hermes(a=0)}?</think>", [("add", dict(a=1))]),
    (THINKS, hermes(a=1), "", [("add", dict(a=1))]),
    (tools.LLAMA, '<think>{</think>\n{"name": "add", "parameters": {"a": 1}}', "<think>{</think>",
     [("add", dict(a=1))]),
    (tools.LLAMA, ' {"name": "add", "parameters": {"a": [1, {}]}}\n', "", [("add", dict(a=[1, {}]))]),
    (tools.MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "sub"}]', "",
     [("add", {}), ("sub", {})]),
    (tools.MISTRAL, 'So: [TOOL_CALLS][{"name": "add", "arguments": {}, "id": "123456789"}]', "So:",
     [("add", {})]),
    (tools.MISTRAL, '[TOOL_CALLS][{"name": "add"}]  B', "  B", [("add", {})]),
    # What reads as a call, or as no calls, within a call's argument is a part of that.
    (tools.HERMES, hermes(a="<tool_call>[]") + " B", " B", [("add", dict(a="<tool_call>[]"))]),
    (tools.MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": "[TOOL_CALLS][] here"}}] B', " B",
     [("add", dict(a="[TOOL_CALLS][] here"))]),
    (tools.HERMES, '<tool_call>{"name": "sub", "arguments": {"a": "<tool_call>{"}}": 1, "name": "add"}',
     '": 1, "name": "add"}', [("sub", dict(a="<tool_call>{"))]),
    (tools.HERMES, "x <tool_call>[]</tool_call> y " + hermes(a=1), "x <tool_call>[]</tool_call> y",
     [("add", dict(a=1))]),
]
DEEP = '{"a":' * 5000 + "1" + "}" * 5000
TEXT = [
    (tools.HERMES, ""), (tools.HERMES, " 4 \n"), (tools.HERMES, hermes("mul")), (tools.HERMES, "<tool_call>"),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": {"a": '),
    (tools.HERMES, "<tool_call>[]</tool_call>x"), (tools.HERMES, "<tool_call>5"),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
    (tools.HERMES, '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>'),
    (tools.HERMES, f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>'),
    (tools.HERMES, '<tool_call>{"name": "add", "arguments": {"b": "\\ud83d"}}</tool_call>'),
    (tools.HERMES, f"<think>Or {hermes(a=0)}"), (tools.LLAMA, '[{"name": "add", "parameters": {}}]'),
    (tools.LLAMA, '<think>x</think>{"answer": 4}'),
    (tools.HERMES, '{"name": "add", "arguments": {}}'), (tools.LLAMA, hermes(a=1)),
    (tools.LLAMA, '{"name": "Ada", "parameters": {}}'), (tools.LLAMA, '{"answer": 4}'), (tools.LLAMA, "5"),
    (tools.LLAMA, '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}'),
    (tools.LLAMA, 'So {"name": "add", "parameters": {}}'), (tools.MISTRAL, "[TOOL_CALLS] add(1)"),
    (tools.MISTRAL, '[{"name": "add", "arguments": {}}]')]


@pytest.mark.parametrize("form, text, content, calls", READ)
def test_calls_are_read(form, text, content, calls):
    assert read(form, text) == (content, calls)
    assert read(form, text, most=1) == (content, calls[:1])
    assert tools.read(form, text, [], "T") == dict(role="assistant", content=text)


@pytest.mark.parametrize("form, text", TEXT)
def test_what_is_no_call_stays_text(form, text):
    assert read(form, text) == (text, [])


def test_a_part_of_a_list_is_no_call():
    """All entries are calls, or it is text."""
    text = '[TOOL_CALLS][{"name": "add"}, {"name": "mul"}]'
    assert read(tools.MISTRAL, text) == (text, [])


@pytest.mark.parametrize("form, text", [case[:2] for case in READ] + TEXT)
def test_streamed_text_is_the_beginning_of_the_content(form, text):
    content, calls = read(form, text)
    for seed in range(30):
        chance, before, given, rest = random.Random(seed), tools.TextBefore(form, ["add"]), "", text
        while rest:
            length = chance.randint(1, 7)
            given, rest = given + before.push(rest[:length]), rest[length:]
        assert content.startswith(given) and before.length == len(given)
        assert form.mark == "" or not form.mark or form.mark not in given


def test_text_is_held_back_only_where_a_call_may_begin():
    before = tools.TextBefore(tools.HERMES, ["add"])
    pieces = ["Let me ", "see.", " <tool", "s>", "\n\n", "x <tool_call>", "{}", "</tool_call> y"]
    given = [before.push(piece) for piece in pieces]
    assert given == ["Let me", " see.", "", " <tools>", "", "\n\nx", "", ""]
    before = tools.TextBefore(tools.LLAMA, ["add"])
    assert [before.push(piece) for piece in (" ", "So ", "{", " ")] == ["", " So ", "{", " "]
    before = tools.TextBefore(tools.LLAMA, ["add"])
    pieces = "<think>x</", "think>", " {", "}"
    assert [before.push(piece) for piece in pieces] == ["<think>x", "", "", ""]
    assert tools.TextBefore(tools.LLAMA, ["add"]).push("<think>x</think>{") == "<think>x"
    for thoughts in "", "<think>x":         # the call's "</think>" ends no thoughts, in one piece, too
        text = ("</think>" if thoughts else "") + '{"name": "add", "parameters": {"a": "</think>{"}}'
        assert tools.TextBefore(tools.LLAMA, ["add"]).push(thoughts + text) == thoughts
    assert tools.TextBefore(tools.HERMES, []).push("<tool_call>") == "<tool_call>"


def test_no_text_takes_long():
    """A weak model writes blanks, or marks, without an end: neither may cost its square."""
    for form, text in ((tools.HERMES, "    "), (tools.LLAMA, "\n"), (tools.HERMES, "<tool_call>\n")):
        before, begin = tools.TextBefore(form, ["add"]), time.perf_counter()
        for _ in range(100_000):
            before.push(text)
        tools.read(form, text * 20_000, ["add"], "T")
        assert time.perf_counter() - begin < 10


def test_how_deep_an_object_may_be():
    def nested(depth, inner):
        return json.loads('{"a":' * depth + inner + "}" * depth)
    for inner, depth in (("1", tools.MOST_DEEP), ("{}", tools.MOST_DEEP - 1), ("[]", tools.MOST_DEEP - 1)):
        assert tools.is_object(nested(depth, inner)) and not tools.is_object(nested(depth + 1, inner))
    assert not any(map(tools.is_object, ([], "a", None, dict(a=float("nan")), {"\ud800": 1})))


def test_a_result_in_words_swallows_no_other_message():
    said = [user("<tool_response>u"), dict(role="assistant", content="<tool_response>a"),
            dict(role="tool", content="r", tool_call_id="1")]
    assert tools.in_words(said, None, "system") == [
        *said[:2], user("<tool_response>\nr\n</tool_response>")]


# How Qwen3-Coder, newer Mistral models, and DeepSeek's show a call.
OTHERS = ["<tool_call>\n<function={0.name}>\n</function>\n</tool_call>", "[TOOL_CALLS]{0.name}[ARGS]{{}}",
          "<calls>function<sep>{0.name}\n```json\n{{}}\n```"]


@pytest.mark.parametrize("shown", OTHERS)
def test_a_form_that_we_cannot_read_gives_way_to_words(shown):
    def render(messages, offer):
        calls = [shown.format(SimpleNamespace(**call["function"])) for message in messages
                 for call in message.get("tool_calls", ())]
        texts = [message["content"] for message in messages]
        return "".join([json.dumps(offer), *texts, *calls, "<think>\n"])
    assert tools.form_of(render) == tools.HERMES._replace(words="system", thinks=True)


def test_calls_are_equal_by_value():
    def message(name, arguments, content=""):
        call = dict(id="1", name=name, arguments=arguments)
        return dict(role="assistant", content=content, tool_calls=[call])
    same = [message("add", '{"a":1,"b":["é"]}'), message("add", '{ "b": ["\\u00e9"], "a": 1.0 }', "\n"),
            message("add", '{"a":1e0,"b":["é"]}', "<think>Hm</think>")]
    others = [message("sub", '{"a":1,"b":["é"]}'), message("add", '{"a":"1","b":["é"]}'),
              message("add", "{}"), message("add", '{"a":1,"b":["é"]}', "x"),
              dict(role="assistant", content="")]
    assert len({said(message, False) for message in same}) == 1
    assert len({said(message, False) for message in same[:1] + others}) == 1 + len(others)


# ---- an agent

def rewritten(calls):
    """As a client sends them back that has parsed the JSON."""
    def anew(arguments):
        return json.dumps(dict(sorted(json.loads(arguments).items(), reverse=True)), indent=1)
    return [dict(call, function=dict(call["function"], arguments=anew(call["function"]["arguments"])))
            for call in calls]


def chat(client, messages, stream=False, **options):
    """(message, finish_reason, usage)"""
    body = dict(model=client.models.list().data[0].id, messages=messages, tools=CHAT_TOOLS) | options
    if not stream:
        made = client.chat.completions.create(**body)
        choice, = made.choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason, made.usage
    with client.chat.completions.stream(**body, stream_options=dict(include_usage=True)) as events:
        for _ in events:
            pass
        made = events.get_final_completion()
    message = made.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message, made.choices[0].finish_reason, made.usage


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_agent_in_chat_completions(server, client, template, stream):
    """It asks, calls twice, and answers; all that was fed before is cached in each step, although the model
    writes its calls in other letters than the template, and the client in yet others."""
    messages, length = [user(f"What is it? {stream}")], 0
    said = "" if template == "llama" else "Let me see.\n"       # Llama's form has no text beside a call
    for step, reply in enumerate([said + CALLS[template], CALLS[template], "Two."]):
        with next_replies(server, reply):
            message, reason, usage = chat(client, messages, stream)
        if step:        # others may have begun like the first
            assert usage.prompt_tokens_details.cached_tokens == length - 1
        length = usage.total_tokens
        if step == 2:
            assert (message["content"], reason) == ("Two.", "stop") and "tool_calls" not in message
            break
        call, = message["tool_calls"]
        assert call["type"] == "function" and call["function"]["name"] == "add" and reason == "tool_calls"
        assert json.loads(call["function"]["arguments"]) == dict(a=1, b="é")
        assert message.get("content") or None == ("Let me see." if said and step == 0 else None)
        messages += [
            dict(role="assistant", content=message.get("content"), tool_calls=rewritten([call])),
            dict(role="tool", tool_call_id=call["id"], content=[dict(type="text", text=f"Result {step}")])]


def respond(client, input, stream=False, **options):
    body = dict(model=client.models.list().data[0].id, input=input, tools=TOOLS) | options
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        kinds = [event.type for event in events]
        made = events.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.function_call_arguments.done") == sum(
        item.type == "function_call" for item in made.output)
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert kinds.count(kind) == len(made.output)
    return made


def wire(items):
    """As they were sent, without what openai's helper for streams adds."""
    dumps = [item.model_dump(exclude_none=True) for item in items]
    return [{name: value for name, value in dump.items() if name != "parsed_arguments"} for dump in dumps]


@pytest.mark.parametrize("follows", ["resends all", "previous_response_id", "conversation", "item_reference"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_agent_in_responses(server, client, template, stream, follows):
    said = "" if template == "llama" else "Let me see.\n"
    history, new, length = [], [user(f"What is it? {stream} {follows}")], 0
    options = dict(conversation=client.conversations.create().id) if follows == "conversation" else {}
    for step, reply in enumerate([said + CALLS[template], CALLS[template], "Two."]):
        history += new
        with next_replies(server, reply):
            sent = new if follows in ("previous_response_id", "conversation") else history
            made = respond(client, sent, stream, **options)
        if step:        # others may have begun like the first
            assert made.usage.input_tokens_details.cached_tokens == length - 1
        length, last = made.usage.total_tokens, made.output[-1]
        assert wire(client.responses.retrieve(made.id).output) == wire(made.output)
        if follows == "previous_response_id":
            options = dict(previous_response_id=made.id)
        if step == 2:
            assert [item.type for item in made.output] == ["message"] and made.output_text == "Two."
            break
        spoken = "Let me see." if said and step == 0 else ""
        assert [item.type for item in made.output] == ["message"] * bool(spoken) + ["function_call"]
        assert made.output_text == spoken
        assert (last.name, json.loads(last.arguments), last.status) == ("add", dict(a=1, b="é"), "completed")
        if follows == "item_reference":
            history += [dict(type="item_reference", id=item.id) for item in made.output]
        else:
            history += wire(made.output)
        new = [dict(type="function_call_output", call_id=last.call_id, output=f"Result {step}")]
    listed = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    kinds = ["message"] + (["message"] if said else []) + ["function_call", "function_call_output"] * 2
    assert [item.type for item in listed] == kinds
    newest_first = list(client.responses.input_items.list(made.id, limit=2))
    assert [item.id for item in newest_first] == [item.id for item in reversed(listed)]
    if follows == "conversation":
        for item in listed:
            found = client.conversations.items.retrieve(item.id, conversation_id=options["conversation"])
            assert found.type == item.type
            path = f"/v1/conversations/{options['conversation']}/items/{item.id}"
            retrieve = next(entry for entry in OPERATIONS if entry.name == "retrieve_item")
            retrieve.answer.model_validate(fetch(server, "GET", path)[1])


def test_items_of_a_reply_with_two_calls(server, client, template):
    """A list cuts between its items; a deleted call takes its message and the results along."""
    if template == "llama":
        pytest.skip("this form has one call in a reply")
    two = {"mistral": CALLS["mistral"][:-1] + "," + CALLS["mistral"].removeprefix("[TOOL_CALLS][")}
    conversation = client.conversations.create().id
    with next_replies(server, "So.\n" + two.get(template, CALLS[template] * 2)):
        made = respond(client, [user("Hi")], conversation=conversation)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    results = [dict(type="function_call_output", call_id=call.call_id, output="4")
               for call in made.output[1:]]
    with next_replies(server, "Four."):
        respond(client, results, conversation=conversation)
    items = client.conversations.items
    whole = [item.id for item in items.list(conversation, order="asc").data]
    assert len(whole) == 7          # the question, the reply's three, two results, "Four."
    for order, expected in ("asc", whole), ("desc", whole[::-1]):
        for limit in 1, 2, 3:
            page = items.list(conversation, order=order, limit=limit)
            assert [item.id for item in page.data] == expected[:limit] and page.has_more
            assert [item.id for item in page] == expected
    reference = [dict(type="item_reference", id=made.output[2].id), results[1]]
    with next_replies(server, "Yes."):
        assert respond(client, [user("Hi"), *reference]).output_text == "Yes."
    kept = client.conversations.items.delete(made.output[2].id, conversation_id=conversation)
    assert kept.id == conversation
    assert [item.id for item in items.list(conversation, order="asc")] == [whole[0], whole[-1]]


def test_no_item_is_referred_to_that_is_not_there(server, client, template):
    """A reply that is calls alone has no message of text."""
    with next_replies(server, CALLS[template]):
        call, = respond(client, [user("Alone")]).output
    with pytest.raises(openai.NotFoundError, match="no item"):
        respond(client, [dict(type="item_reference", id=call.id.removeprefix("fc_0_"))])


def test_results_in_another_order_are_another_history(server, template):
    """Though the client's next message stands behind the same texts."""
    if template != "mistral":
        pytest.skip("only this template shows the ids of results")
    call = '{"name":"add","arguments":{"a":1}}'
    with next_replies(server, f"[TOOL_CALLS][{call},{call}]"):
        message = fetch(server, "POST", CHAT, dict(messages=[user("Swap")], tools=CHAT_TOOLS)
                        )[1]["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    for order in ids, ids[::-1], ids:
        history = [user("Swap"), message] + [dict(role="tool", tool_call_id=id, content=content)
                                             for id, content in zip(order, ["one", "two"])]
        with next_replies(server, "Two."):
            reply = fetch(server, "POST", CHAT, dict(messages=history, tools=CHAT_TOOLS))[1]
        history += [reply["choices"][0]["message"], user("More")]
        with next_replies(server, "Three."):
            again = fetch(server, "POST", CHAT, dict(messages=history, tools=CHAT_TOOLS))[1]
        tokens = server.engine.cache.conversations[again["conversation_id"]].tokens
        text = server.sessions.tokenizer.decode(tokens)
        assert text.index(tools.short(order[0]) + " one") < text.index(tools.short(order[1]) + " two")


def test_events_of_a_call(server, client, template):
    with next_replies(server, CALLS[template]):
        *events, last = client.responses.create(model=client.models.list().data[0].id, input="Add",
                                                tools=TOOLS, stream=True)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done"]
    item, = last.response.output
    assert events[-1].item == item and events[2].item.arguments == ""
    assert events[3].delta == events[4].arguments == item.arguments
    assert {event.item_id for event in events[3:5]} == {item.id}
    assert [event.sequence_number for event in [*events, last]] == list(range(7))
    again = list(client.responses.retrieve(last.response.id, stream=True))
    assert [event.model_dump() for event in again] == [event.model_dump() for event in [*events, last]]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_what_cannot_be_parsed_is_text(server, client, template, stream):
    text = 'So <tool_call> {"name": "add", "argu'
    with next_replies(server, text):
        message, reason, _ = chat(client, [user("Hi")], stream)
    assert (message["content"], reason) == (text, "stop") and "tool_calls" not in message
    with next_replies(server, text):
        assert respond(client, "Hi", stream).output_text == text


def test_who_offers_nothing_gets_text(server, client, template):
    for options in (dict(tools=[]), dict(tool_choice="none")):
        with next_replies(server, CALLS[template]):
            message, reason, _ = chat(client, [user("Hi")], **options)
        assert (message["content"], reason) == (CALLS[template], "stop")
    with next_replies(server, CALLS[template]):
        made = respond(client, "Hi", tool_choice="none")
    assert made.output_text == CALLS[template] and made.tool_choice == "none"


def test_one_call_at_a_time(server, client, template):
    if template in ("llama", "mistral"):
        pytest.skip("one call, or several in one list")
    for parallel, calls in ((True, 2), (False, 1)):
        messages = [user(f"Twice {parallel}")]
        with next_replies(server, CALLS[template] * 2):
            message, _, usage = chat(client, messages, parallel_tool_calls=parallel)
        assert len(message["tool_calls"]) == calls
        messages += [message] + [dict(role="tool", tool_call_id=call["id"], content="2")
                                 for call in message["tool_calls"]]
        with next_replies(server, "Two."):
            again = chat(client, messages, parallel_tool_calls=parallel)
        assert again[2].prompt_tokens_details.cached_tokens == usage.total_tokens - 1


def test_several_calls_in_a_response(server, client, template):
    """Each is an item; sent back, they are one message again."""
    if template in ("llama", "mistral"):
        pytest.skip("one call, or several in one list")
    with next_replies(server, CALLS[template] * 2):
        made = respond(client, [user("Two calls")])
    assert [item.type for item in made.output] == ["function_call"] * 2
    results = [dict(type="function_call_output", call_id=item.call_id, output="2") for item in made.output]
    references = [dict(type="item_reference", id=item.id) for item in made.output]
    for sent in (wire(made.output), references):
        with next_replies(server, "Two."):
            again = respond(client, [user("Two calls"), *sent, *results])
        assert again.usage.input_tokens_details.cached_tokens >= made.usage.total_tokens - 1
    with pytest.raises(openai.NotFoundError, match="fc_2_"):
        respond(client, [user("Two calls"), dict(references[0], id=f"fc_2_msg_{made.id[5:]}"), *results])


@pytest.mark.parametrize("odd", [{}, [], 1, None])
def test_a_tool_of_an_odd_type_is_refused(server, odd):
    tools = [dict(type="function", function=dict(name="f")), dict(type=odd)]
    body = dict(messages=[user("Hi")], tools=tools, max_tokens=2)
    assert fetch(server, "POST", "/v1/chat/completions", body)[0] == 400


def test_other_tools_keep_what_both_begin_with(server, client, template):
    """The template shows another beginning: the context starts anew."""
    messages = [dict(role="system", content="Be brief. " * 5)] * (template not in ("no_system", "mistral"))
    messages += [user("Add them")]
    with next_replies(server, CALLS[template]):
        message, _, _ = chat(client, messages)
    messages += [message, dict(role="tool", tool_call_id=message["tool_calls"][0]["id"], content="2")]
    other = [dict(type="function", function=dict(ADD, parameters=dict(type="object", properties={})))]
    shown = dict(tools=tools.offered(other))
    with next_replies(server, "Two."):
        answer, _, usage = chat(client, messages, tools=other)
    assert answer["content"] == "Two."
    flat = [dict(m, content=m.get("content") or "") for m in messages]
    for m in flat:
        if "tool_calls" in m:
            m["tool_calls"] = [dict(id=c["id"], **c["function"]) for c in m["tool_calls"]]
    assert usage.prompt_tokens == len(server.sessions.tokenizer.turn([], flat, None, shown))
    assert 32 <= usage.prompt_tokens_details.cached_tokens < 300


def test_logprobs_beside_a_call(server, client, template):
    for stream in (False, True):
        with next_replies(server, CALLS[template]):
            body = dict(messages=[user("Hi")], tools=CHAT_TOOLS, logprobs=True, stream=stream)
            assert fetch(server, "POST", "/v1/chat/completions", body)[0] == 200


def test_a_reply_that_is_cut_off_in_a_call(server, client, template):
    for stream in (False, True):
        with next_replies(server, CALLS[template]):
            message, reason, _ = (chat_chunks(client) if stream
                                  else chat(client, [user("Hi")], max_tokens=20))
        assert reason == "length" and message["content"].startswith(CALLS[template][:5])


def chat_chunks(client):
    chunks = list(client.chat.completions.create(model=client.models.list().data[0].id, messages=[user("Hi")],
                                                 tools=CHAT_TOOLS, max_tokens=20, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return dict(content=text), chunks[-1].choices[0].finish_reason, None


# ---- a reply that must call

# Arguments that end soon, whatever the weights; one schema refers to its own definitions.
BOUND = [
    dict(name="add", strict=True, parameters=dict(
        type="object", required=["a", "b"], additionalProperties=False, properties=dict(
            a=dict(type="integer", minimum=-9, maximum=99),
            b=dict(enum=["é", 'quo"te', "</tool_call>", "]"])))),
    dict(name="find-it.2", parameters={
        "$defs": dict(word=dict(type="string", maxLength=3)), "required": ["words"], "properties": dict(
            words=dict(type="array", maxItems=2, items={"$ref": "#/$defs/word"}))}),
    dict(name="stop")]
MORE = {"11": 2, "198": 2}       # biases of the comma and the line break that stand between two calls
FORCED = dict(required=None, named=["find-it.2"], allowed=["add", "stop"])


@pytest.fixture(scope="module")
def free(directory):
    """A server whose model says what it likes."""
    pytest.importorskip("llguidance", reason="needs llguidance (requirements-dev.txt)")
    with serving(Sessions(directory, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)) as server:
        yield server


def function(path, **fields):
    return dict(type="function", function=fields) if path == CHAT else dict(type="function", **fields)


def tools_for(path):
    """BOUND, and the choices of FORCED, as this path has them."""
    allowed = dict(mode="required", tools=[function(path, name=name) for name in FORCED["allowed"]])
    return [function(path, **each) for each in BOUND], dict(
        required="required", named=function(path, name="find-it.2"),
        allowed=dict(type="allowed_tools", **(dict(allowed_tools=allowed) if path == CHAT else allowed)))


def calls_of(answer):
    """(name, arguments) of each, and whether there is nothing else."""
    if "choices" in answer:
        message, = [choice["message"] for choice in answer["choices"]]
        return [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message["tool_calls"]], message["content"] is None
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [(call["name"], json.loads(call["arguments"])) for call in calls], calls == answer["output"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", FORCED)
def test_a_reply_that_must_call_does(free, template, path, choice):
    offer, choices = tools_for(path)
    names, seen = FORCED[choice] or [each["name"] for each in BOUND], []
    for seed in range(2):
        text = f"Do it, {choice} {seed}"
        asked = dict(messages=[user(text)]) if path == CHAT else dict(input=text)
        one = dict(parallel_tool_calls=False) if seed % 2 else dict(logit_bias=MORE)
        status, answer = fetch(free, "POST", path, asked | one | dict(
            tools=offer, tool_choice=choices[choice], temperature=seed / 3, seed=seed))
        assert status == 200, answer
        calls, alone = calls_of(answer)
        assert alone and 1 <= len(calls) <= (1 if seed % 2 or choice == "named" else 8)
        seen.append(len(calls))
        for name, arguments in calls:
            schema = next(each for each in BOUND if each["name"] == name).get("parameters", {})
            jsonschema.validate(arguments, schema)
            assert name in names and (schema or arguments == {})
        if path == CHAT:
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
        else:
            assert answer["status"] == "completed" and answer["tool_choice"] == choices[choice]
    assert template == "llama" or choice == "named" or max(seen) > 1


def test_a_marker_that_is_one_token_is_written_as_one(free, template):
    offer, _ = tools_for(CHAT)
    _, answer = fetch(free, "POST", CHAT, dict(messages=[user("Mark it")], tools=offer, logprobs=True,
                                               tool_choice="required", parallel_tool_calls=False))
    first, second, *_ = answer["choices"][0]["logprobs"]["content"]
    assert first["token"] == dict(mistral="[TOOL_CALLS]", llama="{").get(template, "<") and second["token"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_call_that_a_limit_cuts_is_text(free, template, stream):
    offer, _ = tools_for(CHAT)
    options = dict(messages=[user("Be short")], tools=offer, tool_choice="required", max_tokens=15)
    with closing(connect(free.url)) as client:
        message, reason, _ = chat(client, **options)
        if stream:
            chunks = list(client.chat.completions.create(model=client.models.list().data[0].id, **options,
                                                         stream=True))
            assert chunks[-1].choices[0].finish_reason == reason
            assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == message["content"]
    assert reason == "length" and len(message["content"]) >= 15 and "tool_calls" not in message
    assert '{"name"'.startswith(message["content"].replace(FORMS[template].mark, "").strip(" \n[")[:7])


def test_an_agent_that_must_call_finds_its_context(free, template):
    offer, _ = tools_for(CHAT)
    messages, length = [user("Go on")], 0
    with closing(connect(free.url)) as client:
        for step in range(3):
            message, reason, usage = chat(client, messages, tools=offer, temperature=1, seed=step,
                                          tool_choice="required", parallel_tool_calls=False)
            if step:
                assert usage.prompt_tokens_details.cached_tokens == length - 1
            call, length = message["tool_calls"][0], usage.total_tokens
            messages += [dict(role="assistant", content=None, tool_calls=rewritten([call])),
                         dict(role="tool", tool_call_id=call["id"], content="4")]


@pytest.mark.parametrize("calls, likely", [(True, '<"n'), (False, "{s")])
def test_who_asks_for_json_may_get_a_call_first(free, template, calls, likely):
    """Beside tools, the schema is for the reply that calls none of them."""
    offer, _ = tools_for(CHAT)
    answer = dict(type="object", properties=dict(sum=dict(enum=[1, 2])), required=["sum"],
                  additionalProperties=False)
    marks = [261] if calls and template == "mistral" else []
    body = dict(messages=[user("Sum")], tools=offer, parallel_tool_calls=False,
                logit_bias={str(token): 50 for token in marks + [ord(letter) - 33 for letter in likely]},
                response_format=dict(type="json_schema", json_schema=dict(name="sum", schema=answer)))
    for options, called in ((dict(), calls), (dict(tool_choice="none"), False)):
        message = fetch(free, "POST", CHAT, body | options)[1]["choices"][0]["message"]
        assert ("tool_calls" in message) == called
        if not called:
            jsonschema.validate(json.loads(message["content"]), answer)


BAD = dict(type="object", properties=dict(a=dict(type="foo")))


@pytest.mark.parametrize("template", ["hermes"], indirect=True)
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("fields, problem", [
    (dict(tool_choice="required", tools=[]), "tool_choice is 'required', but there are no tools"),
    (dict(tool_choice="maybe"), "tool_choice.mode should be 'none', 'auto' or 'required', got 'maybe'"),
    (dict(tool_choice=5), "tool_choice should be a string or an object"),
    (dict(tool_choice=dict(type="web_search")), "tool_choice.type should be 'function' or 'allowed_tools'"),
    (dict(tool_choice=dict(type="function")), "tool_choice.tools[0].name is missing"),
    (dict(tool_choice=dict(type="function", name="mul")), "tool_choice names 'mul', which is not in tools"),
    (dict(tool_choice=dict(type="allowed_tools", mode="auto", tools=[dict(type="function", name="mul")])),
     "tool_choice names 'mul', which is not in tools"),
    (dict(tool_choice="required", parameters=BAD), "tool_choice cannot be served: Invalid type: foo"),
    (dict(tool_choice="required", parameters=dict(enum=["x" * 2**16])),
     "tool_choice cannot be served: it has 658")])
def test_a_choice_that_is_refused(free, path, fields, problem):
    fields = dict(fields)
    offer = [function(path, name="add", parameters=fields.pop("parameters", {}))]
    asked = dict(messages=[user("Hi")]) if path == CHAT else dict(input="Hi")
    status, answer = fetch(free, "POST", path, asked | dict(tools=offer) | fields)
    assert status == 400 and answer["error"]["message"].startswith(problem), answer
    assert answer["error"]["param"].startswith("tool_choice") and "\n" not in answer["error"]["message"]


def test_without_the_package_nobody_must_call(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = dict(messages=[user("Hi")], tools=CHAT_TOOLS, tool_choice="required")
    status, answer = fetch(server, "POST", CHAT, body)
    assert status == 400 and "pip install llguidance" in answer["error"]["message"]
    assert answer["error"]["param"] == "tool_choice"


def test_a_function_has_no_other_members_unless_it_says_so():
    named = dict(properties=dict(a={}))
    assert tools.closed(named) == named | dict(type="object", additionalProperties=False)
    assert tools.closed(dict(additionalProperties=True)) == dict(additionalProperties=True, type="object")
    assert tools.closed(dict(anyOf=[named])) == dict(anyOf=[named], type="object")


# ---- what agents send


def silent(arguments="{}", **fields):
    call = dict(id="1", type="function", function=dict(name="add", arguments=arguments))
    return dict(role="assistant", tool_calls=[call]) | fields


@pytest.mark.parametrize("path, body", [
    *((CHAT, dict(messages=[user("Hi"), message, dict(role="tool", tool_call_id="1", content=result)]))
      for message, result in [(silent(content=None), ""), (silent(), "2"), (silent("", content=[]), None)]),
    (RESPONSES, dict(input="Hi", reasoning=dict(summary="auto"), client_metadata=dict(a="b"),
                     include=["reasoning.encrypted_content"])),
    (RESPONSES, dict(input=[user("Hi"), dict(type="function_call", call_id="1", name="add", arguments="{}"),
                            dict(type="function_call_output", call_id="1",
                                 output=[dict(type="input_text", text="2")])])),
    (RESPONSES, dict(input=[user("Hi"), dict(type="function_call", call_id="1", name="add", arguments="{}"),
                            dict(type="function_call_output", call_id="1", output=None)]))])
def test_what_agents_send(server, template, path, body):
    with next_replies(server, "Two."):
        status, answer = fetch(server, "POST", path, body | dict(tools=CHAT_TOOLS if path == CHAT else TOOLS))
    assert status == 200, answer


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_that_are_no_functions(server, template, path):
    """The model sees the functions alone; nobody can force the others."""
    usual = dict(messages=[user("Hi")]) if path == CHAT else dict(input="Hi")
    own = CHAT_TOOLS if path == CHAT else TOOLS
    others = [dict(type="web_search", external_web_access=False),
              dict(type="namespace", name="a", tools=TOOLS),
              dict(type="custom", name="apply_patch", format=dict(type="grammar", definition="start: /a/"))]
    tokens = []
    for offer in (own, [*others[:1], *own, *others[1:]]):
        with next_replies(server, "Two."):
            usage = fetch(server, "POST", path, usual | dict(tools=offer))[1]["usage"]
        tokens.append(usage.get("prompt_tokens", usage.get("input_tokens")))
    assert tokens[0] == tokens[1]
    for fields in (dict(tools=others), dict(tools=[*own, *others], tool_choice=dict(type="web_search"))):
        assert fetch(server, "POST", path, usual | fields)[0] == 400


def test_thoughts_of_another_server(server, template):
    thoughts = dict(type="reasoning", id="rs_1", summary=[dict(type="summary_text", text="Hm")], content=None,
                    encrypted_content="gAAA")
    said = [user("Hi"), dict(role="assistant", content="Ho"), user("And?")]
    tokens = []
    for sent in (said, [said[0], thoughts, *said[1:]]):
        with next_replies(server, "Two."):
            made = fetch(server, "POST", RESPONSES, dict(input=sent, tools=TOOLS))[1]
        tokens.append(made["usage"]["input_tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("path, fields, place", [
    (RESPONSES, dict(tools=[dict(type="web_search")]), "tools[0].name"),
    (RESPONSES, dict(reasoning=dict(effort="low", summary="auto")), "reasoning.effort"),
    (CHAT, dict(messages=[user("Hi"), silent("[1]")]), "messages[1].tool_calls[0].function.arguments"),
    *((CHAT, dict(messages=[user("Hi"), silent(text)]), "messages[1].tool_calls[0].function.arguments")
      for text in (DEEP, '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}')),
    (CHAT, dict(messages=[user("Hi"), dict(role="assistant")]), "messages[1].content"),
    (CHAT, dict(tools=[dict(type="function", function=dict(name="a b"))]), "tools[0].function.name"),
    (CHAT, dict(tools=[dict(type="function", function=dict(name="a", parameters=json.loads(DEEP[:400 * 5]
        + "1" + "}" * 400)))]), "tools[0].function.parameters")])
def test_what_is_refused(server, template, path, fields, place):
    usual = dict(messages=[user("Hi")]) if path == CHAT else dict(input="Hi")
    usual |= dict(tools=CHAT_TOOLS if path == CHAT else TOOLS)
    status, answer = fetch(server, "POST", path, usual | fields)
    assert status == 400 and answer["error"]["param"] == place, answer


def test_a_history_outlives_the_server(directory, template, tmp_path):
    """The calls of a turn are read from the file."""
    made = None
    for reply in (CALLS[template], "Two."):
        with closing(Sessions(directory, history=tmp_path / "history", gpu_cache_tokens=CONTEXT,
                              cpu_cache_tokens=0)) as sessions:
            Script(sessions).replies.append(reply)
            with serving(sessions) as server, connect(server.url) as client:
                messages = [user("Hi")]
                if made:
                    assert client.responses.retrieve(made.id).output == made.output
                    call = made.output[0]
                    messages += [call.model_dump(exclude_none=True),
                                 dict(type="function_call_output", call_id=call.call_id, output="2")]
                after, made = made, respond(client, messages)
                assert not after or made.conversation == after.conversation
