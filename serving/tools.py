"""Tools: how a model is shown the functions that it may call, and how its calls are read.

The chat template shows the functions, the calls and their results in the words that the model
learned. A call stands in a reply's text in one of three forms; the template tells which one:

    Hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Llama 3     {"name": "add", "parameters": {"a": 1}}                     the whole reply
    Mistral     [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]

For a template that ignores tools, or that shows calls in yet another form, we write them into the
system message, in Hermes' form (`in_words`), so any model can take part.

    reply's text -- read --> {"role": "assistant", "content": "Let me see.", "tool_calls": [
                                {"id": "call_T_0", "name": "add", "arguments": '{"a": 1}'}]}

Invariant: no text is lost. What does not read as a call of an offered function stays content.
(But a client that wants one call alone gets the first alone.)
"""
import hashlib
import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from os.path import commonprefix
from typing import Any, NamedTuple

MOST_DEEP = 64              # objects and lists within each other
THOUGHT, THOUGHT_END = "<think>", "</think>"    # what stands between them is no call
DECODER, BLANKS = json.JSONDecoder(), re.compile(r"\s*")
# The errors of reading something that is no call.
BROKEN = ValueError, TypeError, KeyError, AttributeError, RecursionError
RESULT = "<tool_response>\n{}\n</tool_response>"
OFFER = """You may call functions to answer the user. These are described in JSON:
<tools>
{}
</tools>
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
Its result follows between <tool_response> and </tool_response>."""


class Form(NamedTuple):
    """How a call stands in a reply's text."""
    mark: str                   # what a call begins with; "": the whole reply is the call
    end: str = ""
    # What stands before the calls, between two of them and behind them, as parts of the grammar
    # that `language` writes; between: "": there is one alone. That of HERMES allows
    #   <tool_call>\n{a call}\n</tool_call>\n<tool_call>\n{a call}\n</tool_call>
    frame: tuple[str, str, str] = '{mark} "\\n"', '"\\n" {end} "\\n" {mark} "\\n"', '"\\n" {end}'
    arguments: str = "arguments"    # the name of a call's arguments
    # The role of the message in which we offer the tools. None: the template offers them.
    words: str | None = None
    thinks: bool = False        # the template writes the <think> that a reply begins with


HERMES = Form("<tool_call>", "</tool_call>")
LLAMA = Form("", frame=("", "", ""), arguments="parameters")
MISTRAL = Form("[TOOL_CALLS]", frame=('{mark} " "? "["', '", "', '"]"'))
MARKS = HERMES.mark, HERMES.end, MISTRAL.mark     # we show them even if they are special tokens


# ---- what the template sees

def offered(tools: list[dict]) -> list[dict]:
    """The functions as transformers gives them to a template. A client names them in one of two
    ways: {"function": {"name": ...}} or {"name": ...}."""
    functions = [tool.get("function", tool) for tool in tools]
    nothing = dict(type="object", properties={})
    return [dict(type="function", function=dict(
                name=function["name"], description=function.get("description") or "",
                parameters=function.get("parameters") or nothing)) for function in functions]


def visible(message: dict) -> dict:
    """A message as transformers gives it to a template: the arguments of a call are an object."""
    shown = dict(role=message["role"], content=message["content"])
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            dict(id=short(call["id"]), type="function",
                 function=dict(name=call["name"], arguments=json.loads(call["arguments"])))
            for call in calls]
    if "tool_call_id" in message:
        shown["tool_call_id"] = short(message["tool_call_id"])
    return shown


def short(id: str) -> str:
    """Mistral's templates take ids of nine letters and digits alone."""
    return id if len(id) == 9 and id.isalnum() else hashlib.sha256(id.encode()).hexdigest()[:9]


def in_words(messages: list[dict], tools: list[dict] | None, role: str) -> list[dict]:
    """The visible messages, with tools, calls and results as plain text.

    role: "system", or "user" if the template shows no system message."""
    plain = []
    for before, message in zip([None, *messages], messages):
        content = message["content"]
        if message["role"] == "tool":
            message = dict(role="user", content=RESULT.format(content))
            if before and before["role"] == "tool":
                message["content"] = f"{plain.pop()['content']}\n{message['content']}"
        elif calls := message.get("tool_calls"):
            texts = [f"<tool_call>\n{as_json(call['function'])}\n</tool_call>" for call in calls]
            texts = [content, *texts] if content else texts
            message = dict(role=message["role"], content="\n".join(texts))
        plain.append(message)
    if tools:
        offer = OFFER.format("\n".join(map(as_json, tools)))
        first = next((i for i, message in enumerate(plain) if message["role"] == role), None)
        if first is None:
            return [dict(role=role, content=offer)] + plain
        texts = [plain[first]["content"], offer]
        # What the user asks stays last.
        joined = "\n\n".join(texts if role == "system" else reversed(texts))
        plain[first] = dict(plain[first], content=joined)
    return plain


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def form_of(render: Callable[[list[dict], list[dict]], str]) -> Form:
    """The form of a template's calls: the one in which we can read a call that the template shows.
    If we can read none, or if it ignores the tools, we write them in words, in Hermes' form.

    render(messages, tools): what the template shows; ValueError if it refuses them."""
    name, arguments = "a_function_of_an_odd_name", {"a": "b"}
    tools, question = offered([dict(name=name)]), dict(role="user", content="a")
    call = dict(id="123456789", name=name, arguments=as_json(arguments))
    calling = [question, visible(dict(role="assistant", content="", tool_calls=[call])),
               dict(role="tool", content="b", tool_call_id=call["id"])]

    def shown(messages: list[dict], tools: list[dict]) -> str:
        with suppress(ValueError):
            return render(messages, tools)
        return ""

    offer = shown([question], tools)
    thinks = offer.rstrip().endswith(THOUGHT)
    if name in offer:
        called = shown(calling, tools)
        behind = called[len(commonprefix([offer, called])):]        # what both show is the offer
        for form in MISTRAL, HERMES, LLAMA:
            if reads_back(form, behind, name, arguments):
                return form._replace(thinks=thinks)
    system = [dict(role="system", content="a")]
    takes_system = name in shown(in_words(system + [question], tools, "system"), [])
    return HERMES._replace(words="system" if takes_system else "user", thinks=thinks)


def reads_back(form: Form, shown: str, name: str, arguments: dict) -> bool:
    """Can we read this one call in what a template has shown?"""
    if not form.mark:               # then the call is the first object
        begin = shown.find("{")
        with suppress(*BROKEN):
            shown = shown[begin:DECODER.raw_decode(shown, begin)[1]]
    return split(form, shown, [name])[1] == [(name, arguments)]


# ---- what the model must say

def language(form: Form, functions: list[dict], most: int, special: dict[str, int],
             of_schema: Callable[[dict], str]) -> str:
    """A grammar in llguidance's form of Lark: `calls` is one to `most` calls of the functions,
    which are as in `offered`.

    special: the id of each special token; a model has learned to write that instead of its
    letters. of_schema: the Lark of what a JSON schema describes."""
    def literal(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    rules = []
    for tool in functions:
        function = tool["function"]
        begin = f'{{"name": "{function["name"]}", "{form.arguments}": '
        arguments = of_schema(closed(function["parameters"]))
        rules.append(f'call{len(rules)}: {json.dumps(begin)} {arguments} "}}"')
    before, between, behind = (part.format(mark=literal(form.mark), end=literal(form.end))
                               for part in form.frame)
    more = f"({between} call){{0,{most - 1}}}" if between and most > 1 else ""
    any_call = " | ".join(f"call{i}" for i in range(len(rules)))
    return "\n".join([f"calls: {before} call {more} {behind}", f"call: {any_call}", *rules])


def closed(parameters: dict) -> dict:
    """The schema of an object that has the named members alone, unless it says otherwise: a weak
    model would add others without an end."""
    composed = parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf"}  # they may name more members
    default = {} if composed else dict(additionalProperties=False)
    return default | parameters | dict(type="object")


# ---- what the model has said

def read(form: Form, text: str, names: Collection[str], turn_id: str,
         most: int | None = None) -> dict:
    """A whole reply as a message: its calls of the functions `names`, and the text around them.

    most: calls; None: all. A message without calls has no "tool_calls"."""
    thought, end, said = without_thoughts(text, form.thinks)
    rest, calls = split(form, said, names) if names else (said, [])
    if not calls:
        return dict(role="assistant", content=text)
    called = [dict(id=f"call_{turn_id}_{index}", name=name, arguments=as_json(arguments))
              for index, (name, arguments) in enumerate(calls[:most])]
    return dict(role="assistant", content=(thought + end + rest).rstrip(), tool_calls=called)


def without_thoughts(text: str, thinks: bool) -> tuple[str, str, str]:
    """The thoughts that a reply begins with, THOUGHT_END, and the rest.

        "<think>2 + 2</think> 4"    "<think>2 + 2", "</think>", " 4"
        "<think>2 + 2"              "<think>2 + 2", "", ""      it was cut off in its thoughts
        "4 </think>"                "", "", "4 </think>"        if `thinks`: "4 ", "</think>", ""

    thinks: see Form. Then a reply's thoughts begin without THOUGHT."""
    thought, end, said = text.partition(THOUGHT_END)
    if text.lstrip().startswith(THOUGHT) or thinks and end:
        return thought, end, said
    return "", "", text


def split(form: Form, text: str, names: Collection[str]) -> tuple[str, list[tuple[str, dict]]]:
    """The text around the calls, and the calls: (name, arguments) each.

        "A <tool_call>x <tool_call>{a call}</tool_call> B"      "A <tool_call>x  B", [the call]
    """
    if not form.mark:
        with suppress(*BROKEN):
            return "", calls_in([json.loads(text)], names)      # a list is none: it takes one alone
        return text, []
    calls, around, start = [], [], 0
    closing = re.compile(rf"\s*{re.escape(form.end)}" if form.end else "")
    for mark in re.finditer(re.escape(form.mark), text):
        if mark.start() < start:        # it stands in an argument of the call before
            continue
        with suppress(*BROKEN):
            value, end = DECODER.raw_decode(text, BLANKS.match(text, mark.end()).end())
            calls += calls_in(value, names)
            around.append(text[start:mark.start()])
            start = found.end() if (found := closing.match(text, end)) else end
    return "".join(around) + text[start:], calls


def calls_in(value: Any, names: Collection[str]) -> list[tuple[str, dict]]:
    """One of BROKEN unless it is a call, or a list of one or more."""
    if value == []:
        raise ValueError("no call at all")
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        arguments = entry["arguments"] if "arguments" in entry else entry.get("parameters", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if entry["name"] not in names or not is_object(arguments):
            raise ValueError("no call of a function that was offered")
        calls.append((entry["name"], arguments))
    return calls


def is_object(value: Any) -> bool:
    """Is it an object that JSON can write (so without NaN and half characters), nested less deeply
    than a function can call itself?"""
    level: list = [value] if isinstance(value, dict) else []
    for _ in range(MOST_DEEP):
        level = [member for outer in level
                 for member in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(member, dict | list)]
    with suppress(ValueError):
        return isinstance(value, dict) and not level and bool(as_json(value).encode())
    return False


class TextBefore:
    """Gives out a reply's text as it grows, up to where a call may begin. The rest is read when the
    reply is complete.

        "Let me ", "see.", " <tool", "_call>{"      given out "Let me", " see.", "", ""
    """

    def __init__(self, form: Form | None, names: Collection[str]):
        """names: of the functions that the reply may call. Without any, all text is certain."""
        self.form, self.length = form if names else None, 0     # length: of what was given out
        self._held, self._over = [], False      # _over: the rest is read when it is complete

    def push(self, text: str) -> str:
        waits = bool(self._held)
        if self._over or waits and text.isspace():      # a weak model writes blanks without an end
            self._held.append(text)
            return ""
        held = "".join([*self._held, text])
        end, self._over = self._certain(held)
        self._held = [held[end:]] if end < len(held) else []
        self.length += end
        return held[:end]

    def _certain(self, held: str) -> tuple[int, bool]:
        """How much of what we hold is certain to be text; does a call seem to follow?"""
        if self.form is None:
            return len(held), False
        if not (mark := self.form.mark):
            # The call is the whole reply, or all behind thoughts. So we hold what begins with "{"
            # (or has not begun) there. Some of that is no call after all; then `read` says so.
            if not self.length and held.lstrip()[:1] in ("", "{"):
                return 0, bool(held.strip())
            thought, end, said = held.partition(THOUGHT_END)
            if end and said.lstrip()[:1] in ("", "{"):
                return len(thought), bool(said.strip())
            return without_part(held, THOUGHT_END), False
        begin = held.find(mark) if mark in held else without_part(held, mark)
        return len(held[:begin].rstrip()), mark in held     # `read` drops the blanks before a call


def without_part(text: str, mark: str) -> int:
    """The length of the text without the part of a mark that it ends with: "So <tool" -> 3."""
    return len(text) - max(n for n in range(len(mark)) if text.endswith(mark[:n]))


def canonical(calls: list[dict]) -> str:
    """The values of calls, whoever has written their JSON: {"b": 1.0, "a": 2} is {"a":2,"b":1}.
    Numbers are those of JavaScript: its JSON makes 12345678901234567000 of 12345678901234567890."""
    return json.dumps([[call["name"], json.loads(call["arguments"], parse_int=float)]
                       for call in calls], sort_keys=True)
