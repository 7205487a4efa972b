"""Replies that keep to a JSON schema, on random weights: what they say is noise, but noise of the right form.
Oracles: jsonschema, the openai client's own parsing."""
import json
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import BaseModel

import sampling
from engine import Engine
from sampling import Sampling, read, sample
from serving import schemas
from serving.schemas import Grammars, Unusable
from serving.sessions import Sessions
from serving.tokenizer import load_tokenizer
from clients import (CONTEXT, ROOT, ask, connect, eventually, fetch, hang_up_after, save_random_gpt2, serving,
                     user)

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")
pytest.importorskip("llguidance", reason="needs llguidance (requirements-dev.txt)")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (requirements-dev.txt)")

END = 98                                    # of `checkpoint`: a token for each character, 32 -> 0
ENDINGS = {"2": 6, "11": 6, "93": 6}        # biases of " , }
PERSON = dict(type="object", additionalProperties=False, required=["name", "age"],
              properties=dict(name=dict(type="string", maxLength=6), age=dict(type="integer", maximum=150)))


def ids(text):
    return [ord(character) - 32 for character in text]


def allowed(mask):
    """The tokens of a mask, as text; END as one, too."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[END + 1:].any()
    return "".join("§" if token == END else chr(token + 32) for token in bits.nonzero()[0])


def json_schema(schema):
    return dict(type="json_schema", json_schema=dict(name="mine", schema=schema))


@pytest.fixture(scope="module")
def grammars(checkpoint):
    return Grammars(load_tokenizer(checkpoint), 99, frozenset([END]))


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=2 * CONTEXT,
                        max_running=4)
    with serving(sessions) as server:
        yield server


# ---- masks

def test_the_end_may_come_when_the_form_is_complete_and_not_before(grammars):
    constraint = grammars.of_schema(dict(type="integer", minimum=0, maximum=99)).constraint()
    digits = "0123456789"
    assert allowed(constraint.mask([])) == digits
    assert allowed(constraint.mask(ids("4"))) == digits + "§"
    assert allowed(constraint.mask(ids("42"))) == "§"
    for more in 1, 2, 3:                    # with ignore_eos, or before min_tokens
        assert allowed(constraint.mask(ids("42") + more * [END])) == "§"


def test_a_model_may_have_several_end_tokens_and_other_special_ones_never_come(checkpoint):
    several = Grammars(load_tokenizer(checkpoint), 99, frozenset([END, END - 1]))
    constraint = several.of_schema(dict(type="string", maxLength=1)).constraint()
    assert all(chr(token + 32) not in allowed(constraint.mask(ids('"'))) for token in (95, 96, 97))
    assert allowed(constraint.mask(ids('""'))) == chr(END - 1 + 32) + "§"


def test_asking_again_changes_nothing_and_replies_share_nothing(grammars):
    grammar = grammars.of_schema(PERSON)
    first, second = grammar.constraint(), grammar.constraint()
    for _ in range(2):
        assert allowed(first.mask(ids('{"name'))) == '"'
    assert allowed(second.mask([])) == "{"


def test_an_object_has_no_end_before_its_last_brace(grammars):
    constraint, text = grammars.of_schema(PERSON).constraint(), '{"name":"Ada","age":36}'
    for length in range(len(text)):
        options = allowed(constraint.mask(ids(text[:length])))
        assert text[length] in options and "§" not in options
    assert allowed(constraint.mask(ids(text))) == "§"


def test_blanks_have_a_bound(grammars):
    constraint = grammars.of_schema(dict(type="object")).constraint()
    assert " " in allowed(constraint.mask(ids("{")))
    assert " " not in allowed(constraint.mask(ids("{ ")))


def test_a_schema_is_compiled_once(grammars):
    assert grammars.of_schema(PERSON) is grammars.of_schema(dict(PERSON))
    assert grammars.of_schema(PERSON) is not grammars.of_schema(dict(type="object"))


def test_a_refusal_is_known_from_then_on(grammars):
    """This one takes a second."""
    took = []
    for _ in range(2):
        start = time.process_time()
        with pytest.raises(Unusable):
            grammars.of_schema(dict(type="string", pattern="^((a{100}){100}){100}$"))
        took.append(time.process_time() - start)
    assert took[1] < took[0] / 20


def test_a_schema_of_nothing_is_any_json(grammars, client):
    assert {*'{["0tfn'} < {*allowed(grammars.of_schema({}).constraint().mask([]))}
    ask(client, [user("Say")], max_tokens=4, response_format=json_schema({}))


def test_a_grammar_of_another_kind(grammars):
    constraint = grammars.of_lark('start: "yes" | "no"').constraint()
    assert allowed(constraint.mask([])) == "ny"
    assert allowed(constraint.mask(ids("yes"))) == "§"
    for broken in "start: nothing", "start: <|nothing|>":
        with pytest.raises(Unusable, match="^[^\n<]+$"):       # no text of the grammar, no backtrace
            grammars.of_lark(broken)


def nested(depth):
    schema = dict(type="string")
    for _ in range(depth):
        schema = dict(type="array", items=schema)
    return schema


UNUSABLE = {
    "unknown type": dict(type="foo"), "unknown keyword": {"not": dict(type="string")},
    "nothing": dict(enum=[]), "empty range": dict(type="integer", minimum=5, maximum=3),
    "refers to nothing": {"$ref": "#/$defs/a"}, "refers to itself": {"$ref": "#"},
    "refers to the web": {"$ref": "http://localhost/schema"}, "no regex": dict(type="string", pattern="(a"),
    "look-ahead": dict(type="string", pattern="(?=a)b"),
    "parentheses": dict(pattern="(" * 5000 + ")" * 5000),
    "deep": nested(200), "very deep": nested(900), "lone surrogate": dict(enum=["\ud800"]),
    "overlapping oneOf": {"oneOf": [dict(type="integer"), dict(type="number")],
                          "x-guidance": dict(coerce_one_of=True)},
    "lenient": {"not": dict(type="string"), "x-guidance": dict(lenient=True)},
    "no remainder": dict(type="integer", multipleOf=1000003, default=dict(multipleOf=0)),
    "large": dict(enum=["x" * 2**16]), "many remainders": dict(type="integer", multipleOf=10**6),
    "product": dict(anyOf=[dict(type="number", multipleOf=n) for n in (0.97, 89, 83)]),
    "many choices": dict(type="object", properties={f"p{i}": {} for i in range(1500)}),
    "exponential": dict(allOf=[dict(anyOf=[dict(pattern=f"a{i}"), dict(pattern=f"b{i}")])
                               for i in range(20)]),
}


@pytest.mark.parametrize("schema", UNUSABLE.values(), ids=UNUSABLE)
def test_a_schema_that_cannot_be_served_is_refused_within_a_second(grammars, schema):
    with pytest.raises(Unusable, match=".") as error:
        grammars.of_schema(schema)
    assert "<non-verbose/>" not in str(error.value)


# The numbers of remainders: 25, 2 and 200.
@pytest.mark.parametrize("number, count", [("0.25", 25), ("2", 2), ("2e+2", 200), ("0.00020", 2), ("10", 10)])
def test_remainders(number, count):
    assert schemas.remainders(number) == count


def test_without_the_package_or_an_end_token(checkpoint, monkeypatch):
    tokenizer = load_tokenizer(checkpoint)
    for missing in Grammars(None, 99, frozenset([END])), Grammars(tokenizer, 99, frozenset()):
        with pytest.raises(Unusable, match="no tokenizer or no end token"):
            missing.of_schema(PERSON)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unusable, match="pip install llguidance"):
        Grammars(tokenizer, 99, frozenset([END])).of_schema(PERSON)


# ---- sampling

class Allows:
    """A grammar that allows the same tokens always."""

    def __init__(self, *tokens, size=99):
        bits = np.zeros(-(-size // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        self.words = np.packbits(bits, bitorder="little").view(np.int32)

    def constraint(self):
        return self

    def mask(self, reply):
        return self.words


def row(**values):
    return SimpleNamespace(sampling=Sampling(**values), total=3, generated=[],
                           conversation=SimpleNamespace(tokens=[1, 2, 3]))


@pytest.mark.parametrize("values", [
    dict(), dict(temperature=1.0), dict(temperature=50.0), dict(temperature=1.0, top_k=1),
    dict(temperature=1.0, top_p=0.1), dict(temperature=1.0, min_p=0.9), dict(logit_bias={0: 100.0}),
    dict(repetition_penalty=2.0, presence_penalty=-2.0, logit_bias={3: 100.0})])
def test_only_allowed_tokens_are_drawn_however_unlikely(values):
    """Next to rows that are free. Bit 31 is the sign of a word."""
    tokens, generator = (31, 32, 63, 98), torch.Generator().manual_seed(0)
    for _ in range(30):
        logits = torch.randn(3, 99, generator=generator)
        logits[1, list(tokens)] -= 30
        best = logits.argmax(-1).tolist()
        drawn, _ = read([], *sample(logits, [row(), row(grammar=Allows(*tokens), **values), row()]))
        assert drawn[1] in tokens and [drawn[0], drawn[2]] == [best[0], best[2]]


def test_a_row_without_an_allowed_token_has_none():
    drawn, _ = read([], *sample(torch.zeros(2, 99), [row(grammar=Allows()), row(grammar=Allows(7))]))
    assert drawn == [-1, 7]


def test_rows_without_a_grammar_ask_for_no_mask():
    masks, = (stage for stage in sampling.STAGES if stage.change is sampling.keep_allowed)
    assert not masks.is_asked_for(Sampling()) and masks.is_asked_for(Sampling(grammar=Allows(1)))


def test_log_probabilities_are_those_before_the_mask():
    logits = torch.randn(1, 99, generator=torch.Generator().manual_seed(1))
    requests = [row(grammar=Allows(5), logprobs=2)]
    (token,), ((logprob, top),) = read(requests, *sample(logits.clone(), requests))
    expected = logits.log_softmax(-1)[0]
    assert token == 5 and logprob == pytest.approx(expected[5].item())
    assert [id for id, _ in top] == expected.topk(2).indices.tolist()


# ---- the engine

def replies(engine, grammars, seeds=range(6)):
    """Of turns with and without a grammar that run together, two in each conversation."""
    found = []
    for turn in range(2):
        handles = [engine.submit([seed + 1, 5, 6], f"c{seed}", max_tokens=60, temperature=seed % 3, seed=seed,
                                 grammar=grammars.of_schema(PERSON) if seed % 2 else None)
                   for seed in seeds]
        found += [handle.result() for handle in handles]
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_neither_tiers_nor_suspension_nor_depth_change_a_constrained_reply(checkpoint, grammars, depth):
    large = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT)
    small = Engine(checkpoint, gpu_cache_tokens=160, cpu_cache_tokens=64, chunk_size=8, max_batch_tokens=16,
                   reserve=0.0, debug=True)
    small.depth = depth
    expected, got = replies(large, grammars), replies(small, grammars)
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in expected]
    assert small.stats()["suspensions"] > 0
    for reply in expected[1::2]:
        assert reply.finish_reason == "stop" and reply.token_ids[-1] == END
        text = "".join(chr(token + 32) for token in reply.token_ids[:-1])
        jsonschema.validate(json.loads(text), PERSON)
    large.close()
    small.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancelled_reply_and_one_that_is_too_complex_leave_the_others_alone(checkpoint, grammars, depth):
    engine = Engine(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=CONTEXT, debug=True)
    engine.depth = depth
    alone = engine.generate([1, 2], max_tokens=60, grammar=grammars.of_schema(PERSON))
    handles = [engine.submit([1, 2], max_tokens=60, grammar=grammar)
               for grammar in (grammars.of_schema(PERSON), grammars.of_schema(PERSON), Allows())]
    engine.step()
    handles[0].cancel()
    with pytest.raises(RuntimeError, match="grammar is too complex"):
        handles[2].result()
    assert handles[0].result().finish_reason == "cancelled"
    assert handles[1].result().token_ids == alone.token_ids
    engine.close()


# ---- the API

@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_chat_completions(client, stream, temperature):
    text, end, *_ = ask(client, [user("Who?")], stream, temperature=temperature, seed=1, max_tokens=200,
                        response_format=json_schema(PERSON))
    assert end == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_json_of_any_form(client):
    """The bias lets strings and objects end soon."""
    found = [ask(client, [user("Say")], max_tokens=200, temperature=2, seed=seed, logit_bias=ENDINGS,
                 response_format=dict(type="json_object"))[:2] for seed in range(8)]
    texts = [text for text, end in found if end == "stop"]
    assert len(set(texts)) > 4 and all(type(json.loads(text)) is dict for text in texts)


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.filterwarnings("error::UserWarning")       # pydantic's, when we write the format down
def test_the_clients_own_parsing(client):
    """Chat completions and Responses, from a class of pydantic's."""
    options = dict(model="ascii", temperature=2, extra_body=dict(seed=3, logit_bias=ENDINGS))
    chat = client.chat.completions.parse(messages=[user("Who?")], response_format=Person, max_tokens=500,
                                         **options)
    assert isinstance(chat.choices[0].message.parsed, Person)
    answer = client.responses.parse(input="Who?", text_format=Person, max_output_tokens=500, **options)
    assert isinstance(answer.output_parsed, Person)
    again = client.responses.retrieve(answer.id)
    for told in answer, again:
        assert told.text.format.schema_["required"] == ["name", "age"] and told.text.format.name == "Person"


def test_each_choice_keeps_to_the_schema(client):
    answer = client.chat.completions.create(model="ascii", messages=[user("Who?")], n=4, temperature=1.5,
                                            max_tokens=200, response_format=json_schema(PERSON))
    texts = [choice.message.content for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_turns_with_and_without_a_schema_continue_one_another(client):
    messages = []
    for turn in range(4):
        messages.append(user(f"turn {turn}"))
        options = dict(response_format=json_schema(PERSON)) if turn % 2 else {}
        text, _, usage, _ = ask(client, messages, max_tokens=100, **options)
        assert not turn or usage.prompt_tokens_details.cached_tokens > 0
        if options:
            jsonschema.validate(json.loads(text), PERSON)
        messages.append(dict(role="assistant", content=text))


def test_a_limit_cuts_the_reply_to_a_beginning(client):
    whole = ask(client, [user("Who?")], max_tokens=200, response_format=json_schema(PERSON))[0]
    text, end, *_ = ask(client, [user("Who?")], max_tokens=7, response_format=json_schema(PERSON))
    assert end == "length" and text == whole[:7]


@pytest.mark.parametrize("options", [dict(ignore_eos=True), dict(min_tokens=60)])
def test_no_option_adds_to_what_is_complete(client, options):
    text, *_ = ask(client, [user("Who?")], max_tokens=80, response_format=json_schema(PERSON),
                   extra_body=options)
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("format, problem", [
    (dict(type="foo"), "response_format.type should be 'text', 'json_object' or 'json_schema'"),
    (dict(type="json_schema"), "response_format.json_schema is missing"),
    (dict(type="json_schema", json_schema=dict(schema=PERSON)),
     "response_format.json_schema.name is missing"),
    (json_schema("x"), "response_format.json_schema.schema should be a valid dictionary"),
    *((json_schema(UNUSABLE[name]), "response_format cannot be served: ")
      for name in ("unknown keyword", "very deep", "large"))])
def test_what_is_refused(server, format, problem):
    status, answer = fetch(server, "POST", "/v1/chat/completions",
                           dict(messages=[user("Who?")], response_format=format))
    assert status == 400 and answer["error"]["message"].startswith(problem)
    assert answer["error"]["param"].startswith("response_format")
    assert answer["error"]["type"] == "invalid_request_error"


def test_responses_name_their_own_field(server, monkeypatch):
    """And a server without the package serves all others."""
    monkeypatch.setattr(schemas.Grammars, "of_schema", Grammars(None, 99, frozenset()).of_schema)
    format = dict(type="json_schema", name="mine", schema=PERSON)
    status, answer = fetch(server, "POST", "/v1/responses", dict(input="Who?", text=dict(format=format)))
    assert status == 400 and answer["error"]["param"] == "text.format"
    for format in dict(type="text"), None:
        status, _ = fetch(server, "POST", "/v1/responses", dict(input="Hi", max_output_tokens=2,
                                                                text=dict(format=format)))
        assert status == 200


def test_a_client_that_hangs_up_in_the_middle(server, client):
    turns = server.sessions.turns
    body = dict(messages=[user("Long")], stream=True, response_format=json_schema(
        dict(type="array", minItems=500, items=PERSON)))

    def is_writing():
        return any(len(turn.handle.token_ids) > 20 for turn in list(turns.values()) if turn.handle)
    with ThreadPoolExecutor(1) as beside:
        other = beside.submit(ask, client, [user("Who?")], response_format=json_schema(PERSON),
                              max_tokens=200)
        hang_up_after(server, body, is_writing)
        eventually(lambda: not turns)
        jsonschema.validate(json.loads(other.result()[0]), PERSON)


# ---- many schemas

WORDS = ["a", "b c", "name", "größe", "数量", "emoji🙂", 'quo"te', "back\\slash", "new\nline", "", "$ref",
         "é́"]


class Schemas:
    """Random schemas whose replies mostly end."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def whole(self):
        schema = self.schema(3)
        if "#/$defs/tree" in json.dumps(schema):
            schema["$defs"] = dict(tree=self.object(dict(
                label=self.schema(0), left={"anyOf": [dict(type="null"), {"$ref": "#/$defs/tree"}]},
                leaves=dict(type="array", items={"$ref": "#/$defs/tree"}, maxItems=1))))
        return schema

    def schema(self, depth):
        kinds = [self.integer, self.number, self.string, self.choice, self.constant, self.simple, self.format]
        if depth:
            deeper = [self.array, self.struct, self.struct, self.any_of, self.tree]
            return self.random.choice(kinds + 3 * deeper)(depth - 1)
        return self.random.choice(kinds)(depth)

    def integer(self, _):
        low = self.random.randint(-1000, 1000)
        return dict(type="integer", minimum=low, maximum=low + self.random.choice([0, 7, 10**6]))

    def number(self, _):
        return dict(type="number", minimum=self.random.choice([-2.5, 0]), exclusiveMaximum=99.25)

    def string(self, _):
        least = self.random.randint(0, 3)
        return self.random.choice([dict(type="string", minLength=least, maxLength=least + 4),
                                   dict(type="string", pattern=r"^[a-zé]{1,5}(-\d+)?$", maxLength=9),
                                   dict(type="string", maxLength=0)])

    def choice(self, _):
        return dict(enum=self.random.sample([*WORDS, 5, 2.5, True, None], 4))

    def constant(self, _):
        return dict(const=self.random.choice([*WORDS, 7, {"größe": [1, None]}]))

    def simple(self, _):
        return dict(type=self.random.choice(["boolean", "null", ["boolean", "null"]]))

    def format(self, _):
        return dict(type="string", format=self.random.choice(["uuid", "ipv4"]))

    def array(self, depth):
        least = self.random.randint(0, 2)
        return dict(type="array", items=self.schema(depth), minItems=least, maxItems=least + 2)

    def struct(self, depth):
        names = self.random.sample(WORDS, self.random.randint(0, 4))
        schema = self.object({name: self.schema(depth) for name in names})
        schema["required"] = self.random.sample(names, self.random.randint(0, len(names)))
        return schema

    def object(self, properties):
        return dict(type="object", properties=properties, required=[*properties], additionalProperties=False)

    def any_of(self, depth):
        return dict(anyOf=[self.schema(depth) for _ in range(3)])

    def tree(self, _):
        return {"$ref": "#/$defs/tree"}


@pytest.fixture(scope="module")
def any_text(tmp_path_factory):
    """A random model whose tokens are those of tiny_chat: bytes, and what they merge to."""
    directory = tmp_path_factory.mktemp("models") / "any_text"
    directory.mkdir()
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(ROOT / "tiny_chat" / name, directory)
    save_random_gpt2(directory, 512)
    return directory


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(200), marks=pytest.mark.slow)],
                         ids=["some", "many"])
def test_whatever_the_schema_the_reply_is_valid(any_text, seeds, depth):
    """Greedy and drawn, each beside seven others and one whose client hangs up."""
    engine = Engine(any_text, gpu_cache_tokens=4 * CONTEXT, cpu_cache_tokens=2 * CONTEXT, max_running=8)
    engine.depth = depth
    checker, ends = jsonschema.FormatChecker(), []

    def check(seed, temperature):
        schema = Schemas(seed).whole()
        text, end, *_ = ask(client, [user(f"{seed}")], temperature=temperature, seed=seed, max_tokens=600,
                            model="any_text", response_format=json_schema(schema))
        ends.append(end)
        if end == "stop":
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))

    def hang_up(seed):
        item = Schemas(seed).whole()
        schema = {"type": "array", "items": item, "minItems": 200, "$defs": item.pop("$defs", {})}
        body = dict(messages=[user(f"Long {seed}")], stream=True, response_format=json_schema(schema))
        hang_up_after(server, body, lambda: f"Long {seed}" in str([
            turn.plan.messages for turn in list(server.sessions.turns.values()) if turn.plan]))

    with serving(Sessions(engine)) as server, ThreadPoolExecutor(8) as pool:
        with connect(server.url) as client:
            checks = [pool.submit(check, seed, temperature) for seed in seeds for temperature in (0, 1.5)]
            gone = [pool.submit(hang_up, seed) for seed in list(seeds)[::5]]
            for each in checks + gone:
                each.result()
    assert ends.count("stop") > 0.8 * len(ends)      # the others: trees without an end
