"""What a client may ask for: every operation of the server, and the fields of its body or its
query.

pydantic does three things with the fields: it checks what a client sends, says what is wrong with
it, and describes it in /openapi.json. A field that is not here is ignored, and the log names it
once. But a field that would change the answer is refused by its name (`Fields.refused`), because a
server that silently ignores it gives a wrong answer:

    {"messages": [...], "temperature": 3}    400  temperature should be less than or equal to 2, ...
    {"messages": [...], "grammar": "..."}    400  grammar is not supported here: leave it out
    {"messages": [...], "grammar": null}     200  an empty field asks for nothing
    {"messages": [...], "app": "mine"}       200  ignored (with --strict: 400)

openai_api.py answers most operations; sockets.py those about the server itself (health, metrics,
cache ...).

To add an operation, say GET /v1/conversations/{id}/stats:
1. add a line to OPERATIONS below; describe its answer in answers.py, and its fields here if it
   takes any;
2. write the method of that name: of openai_api.API, which gets the client's prefix, the names in
   the path and the fields; or of sockets.Handler, if it is about the server itself;
   (API._conversation finds a conversation or answers 404; API._cache_of says where its KV is);
3. tests/test_responses.py asks for each line of OPERATIONS. A request with a body needs one in
   BODIES there; a GET needs nothing. Then test what the operation promises.
"""
import json
import re
import reprlib
from collections.abc import Callable
from functools import cache, cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import (AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field,
                      GetCoreSchemaHandler, Tag, ValidationError, ValidationInfo, field_validator,
                      model_serializer, model_validator)
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from sampling import BIAS, LIMITS
from serving import answers, tools

MAX_FAULTS = 5          # of one request that we tell its client
MAX_MEMBERS = 1024      # of a JSON object


class APIError(Exception):
    """An error that the client is told in OpenAI's shape. param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: dict[str, str] | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        self.status, self.code, self.headers = status, code, headers or {}
        self.body = dict(error=dict(message=message, type=kind, param=param, code=code))


# --------------------------------------------------------------------------------------------------
# Kinds of fields.

def says_nothing(value: Any) -> bool:
    """Is it null, a list of nulls, or an object whose members say nothing?"""
    values = [value]
    for value in values:    # a client may nest objects deeper than a function can call itself
        if isinstance(value, dict):
            values += value.values()
        elif not (value is None or isinstance(value, list)
                  and all(member is None for member in value)):
            return False
    return True


def without_empty(value: Any) -> Any:
    """Clients fill in fields that they do not use: `tools: []`, `audio: null`, `reasoning:
    {"effort": null}`. A member that says nothing counts as left out, whether we know its name or
    not.

    Every object comes through here, so here we bound how many faults an object can have."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_MEMBERS:
        raise PydanticCustomError("too_long", f"Input should have at most {MAX_MEMBERS} members")
    return {name: member for name, member in value.items() if not says_nothing(member)}


class Fields(BaseModel):
    """A JSON object. Nothing is converted: "5" is not a number. A field with a default may be left
    out. Unknown fields: see `parse`, whose `ignored` our validators find in info.context."""
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    refused: ClassVar[str] = ""     # the names of those that we never ignore: a regular expression
    messages_in: ClassVar[str | None] = None        # the field with the messages, if there is one

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any, info: ValidationInfo) -> Any:
        """Without empty fields and, unless we are strict, without those that may be ignored."""
        given = without_empty(given)
        if info.context is None or not isinstance(given, dict):     # None: we are strict
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        ignored = {name for name in given
                   if not (name in known or re.fullmatch(cls.refused, name))}
        info.context.update(f"{cls.__name__}.{name:.100}" for name in ignored)
        return {name: member for name, member in given.items() if name not in ignored}


class OrString(NamedTuple):
    """In an Annotated type: a client may send a string, too. It stands for wrap(string), such as
    `stop: "x"` for `stop: ["x"]`. kind: what else a client may send, for error messages. We wrap a
    string before pydantic checks the value; /openapi.json shows that both are welcome."""
    kind: str
    wrap: Callable[[str], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler):
        schema = handler(source)
        either = core_schema.union_schema([core_schema.str_schema(), schema])
        return core_schema.no_info_before_validator_function(self.wrapped, schema,
                                                             json_schema_input_schema=either)

    def wrapped(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.wrap(value)
        if not isinstance(value, (list, dict)):
            raise PydanticCustomError("string_or", f"Input should be a string or {self.kind}")
        return value


def members(most: int, least: int = 0):
    """How many members a list may have. pydantic would describe the fault of every member; ours
    stops at the first."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def limited(name: str):
    """An optional number, within the limits that sampling.py sets for `name`."""
    least, most = LIMITS[name]
    return Field(None, ge=least, le=most)


def simple(value: Any) -> Any:
    """The value, if a template's option may have it. (A union alone would report a fault for each
    kind.)"""
    if isinstance(value, bool | int | float) or isinstance(value, str) and len(value) <= 512:
        return value
    raise PydanticCustomError("simple", "Input should be a boolean, a number or a string of at "
                                        "most 512 characters")


def as_int(value: Any) -> Any:
    """Some clients write 8 as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def template_option(name: str) -> str:
    if name in ("messages", "tools", "documents", "add_generation_prompt"):
        raise PydanticCustomError("extra_forbidden", "We set it ourselves")
    return name


def template_options(given: Any) -> Any:
    """Without those that ask for nothing."""
    given = without_empty(given)
    if isinstance(given, dict) and given.get("add_generation_prompt") is True:
        return {name: value for name, value in given.items() if name != "add_generation_prompt"}
    return given


def json_object(value: Any) -> Any:
    """The value, if it is a JSON object that a template can walk through."""
    if not tools.is_object(value):
        raise PydanticCustomError("json_object", "Input should be a JSON object, of at most "
                                  f"{tools.MOST_DEEP} objects within each other")
    return value


def functions(given: Any, info: ValidationInfo) -> Any:
    """The tools that are functions. codex always sends others beside them (web_search, namespace,
    custom), and no chat template shows these. So we ignore them, but where they are alone."""
    if info.context is None or not isinstance(given, list):
        return given
    types = [tool.get("type") if isinstance(tool, dict) else None for tool in given]
    others = {type for type in types if isinstance(type, str)} - {"function"}
    if "function" not in types:
        return given
    info.context.update(f"Tool.{type:.100}" for type in others)
    return [tool for tool, type in zip(given, types)
            if not (isinstance(type, str) and type in others)]


def text_of_object(value: Any) -> Any:
    """The text of a call's arguments, if it is such an object."""
    if isinstance(value, str):
        try:
            json_object(json.loads(value or "{}"))
        except (ValueError, RecursionError):
            raise PydanticCustomError("arguments",
                                      "Input should be a JSON object, as text") from None
    return value or "{}"


MOST_TOKENS = 2**20         # whose log probabilities a client gives back
Int = Annotated[int, BeforeValidator(as_int)]
Text = Annotated[str, Field(max_length=2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
StopString = Annotated[str, Field(min_length=1, max_length=100)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS[0], le=BIAS[1])]
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
OrText = OrString("a list of parts", lambda text: [dict(type="text", text=text)])
OrMessage = OrString("a list", lambda text: [dict(role="user", content=text)])
OneStop = OrString("a list", lambda text: [text])
OneMode = OrString("an object", lambda mode: dict(mode=mode))
OrId = OrString("an object with an id", lambda id: dict(id=id))
TopK = Annotated[int, BeforeValidator(lambda given: 0 if given == -1 else as_int(given))]
Option = Annotated[bool | int | float | Value, BeforeValidator(simple)]
OptionName = Annotated[Key, AfterValidator(template_option)]
TemplateOptions = Annotated[dict[OptionName, Option], Field(max_length=16),
                            BeforeValidator(template_options)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
JSONObject = Annotated[dict[str, Any], BeforeValidator(json_object)]
Arguments = Annotated[Text, BeforeValidator(text_of_object)]
Include = Annotated[list[Text], members(100), OrString("a list", lambda text: [text])]
Metadata = Annotated[dict[Key, Value], Field(max_length=16), BeforeValidator(without_empty)]


class ItemPart(Fields):
    """Part of a message's content. A client that gives our own parts back sends the last two
    fields."""
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[list, members(0)] = []
    logprobs: Annotated[list, members(MOST_TOKENS)] = []


class TextPart(ItemPart):
    type: Literal["text"]


class Function(Fields):
    """What the model may call. strict: while the model is free to call or not (tool_choice "auto"),
    we show it what to write, and force nothing. If it must call, its arguments are always valid."""
    name: FunctionName
    description: Text = None
    parameters: JSONObject = None
    strict: bool = None


class FunctionTool(Function):
    """A tool of a response."""
    type: Literal["function"]


class ChatTool(Fields):
    type: Literal["function"]
    function: Function


class ChosenFunction(Fields):
    """Of a response; chat completions have {"type": "function", "function": {"name": "add"}}."""
    type: Literal["function"]
    name: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        return unwrapped(given, "function")


class ToolChoice(Fields):
    """May the reply call functions, or must it? A client also writes

        "required"                              for  {"mode": "required"}
        {"type": "function", "name": "add"}     the same, but add alone, and once
    """
    type: Literal["function", "allowed_tools"] = "allowed_tools"
    mode: Literal["none", "auto", "required"]
    tools: Annotated[list[ChosenFunction], members(1000, least=1)] = None       # None: all

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "function":
            return dict(type="function", mode="required", tools=[given])
        return unwrapped(given, "allowed_tools")

    @model_serializer
    def told(self) -> str | dict:
        """As the response repeats it."""
        if self.tools is None:
            return self.mode
        functions = [function.model_dump() for function in self.tools]
        return functions[0] if self.type == "function" else dict(
            type=self.type, mode=self.mode, tools=functions)


def unwrapped(given: Any, name: str) -> Any:
    """{"type": ..., name: {...}} -> {"type": ..., ...}"""
    if isinstance(given, dict) and isinstance(inner := given.get(name), dict):
        return {key: value for key, value in given.items() if key != name} | inner
    return given


class CalledFunction(Fields):
    name: FunctionName
    arguments: Arguments = "{}"


class ToolCall(Fields):
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int = None       # of a client that sends a stream's pieces back


class Message(Fields):
    """A message of a chat. The chat template does not see `name`."""
    refused = "function_call|audio|prefix|partial"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], members(1000), OrText]
    name: Text = None
    tool_call_id: Text = None
    tool_calls: Annotated[list[ToolCall], members(1000)] = []

    @model_validator(mode="before")
    @classmethod
    def _may_call_in_silence(cls, given: Any) -> Any:
        """Beside its calls, a message may have no content; nor need a result have one."""
        if isinstance(given, dict) and not given.get("content") and (
                given.get("tool_calls") or given.get("role") == "tool"):
            return given | dict(content="")
        return given


class Item(Fields):
    """A message of a conversation."""
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ItemPart], members(1000), OrText]
    id: Name = None
    status: Literal["completed", "incomplete"] = None       # no reply goes on from a part of it
    phase: Text = None          # of an agent's work; it changes nothing


class ItemReference(Fields):
    """Stands for a message of a turn that we have, or of the request's conversation. (A message
    that was added to a conversation before its turn is found only there: its id names no turn.)"""
    type: Literal["item_reference"]
    id: Name


class FunctionCall(CalledFunction):
    """A call in a reply. It belongs to the message before it, if that is the assistant's."""
    type: Literal["function_call"]
    call_id: Name
    id: Name = None
    status: Literal["in_progress", "completed", "incomplete"] = None


class FunctionOutput(Fields):
    """What the client's function has answered."""
    type: Literal["function_call_output"]
    call_id: Name
    output: Annotated[list[ItemPart], members(1000), OrText] = []
    id: Name = None
    status: Literal["in_progress", "completed", "incomplete"] = None


class Thoughts(Fields):
    """Of another server's model, whose conversation goes on here. No chat template shows them."""
    type: Literal["reasoning"]
    id: Name = None
    summary: Annotated[list, members(1000)] = []
    content: Annotated[list, members(1000)] = []
    encrypted_content: Text = None
    status: Text = None


# The tags have brackets so that `place` can tell them from fields.
KINDS = dict(item_reference="[reference]", function_call="[call]", function_call_output="[output]",
             reasoning="[thoughts]")


def kind_of_item(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    return KINDS.get(kind, "[message]") if isinstance(kind, str) else "[message]"


InputItem = Annotated[
    Annotated[Item, Tag("[message]")] | Annotated[ItemReference, Tag("[reference]")]
    | Annotated[FunctionCall, Tag("[call]")] | Annotated[FunctionOutput, Tag("[output]")]
    | Annotated[Thoughts, Tag("[thoughts]")],
    Discriminator(kind_of_item)]


class PlainFormat(Fields):
    """What a reply may be. asked: its JSON schema; None: it may be any text."""
    type: Literal["text", "json_object", "json_schema"]     # with the last one: a SchemaFormat

    @property
    def asked(self) -> dict | None:
        return dict(type="object") if self.type == "json_object" else None


class Schema(Fields):
    """A reply keeps to the schema, whether or not it is called `strict`. {} is any JSON."""
    name: Text
    json_schema: dict = Field({}, alias="schema")
    description: Text = None
    strict: bool = None


class SchemaFormat(Schema):
    """As Responses write it."""
    type: Literal["json_schema"]

    @property
    def asked(self) -> dict:
        return self.json_schema


class ChatSchemaFormat(Fields):
    """As chat completions write it."""
    type: Literal["json_schema"]
    json_schema: Schema

    @property
    def asked(self) -> dict:
        return self.json_schema.json_schema


def kind_of_format(given: Any) -> str:
    """given: of a client, or a format of ours: pydantic asks again when model_dump() writes it."""
    type = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "[schema]" if type == "json_schema" else "[plain]"


Plain = Annotated[PlainFormat, Tag("[plain]")]
Format = Annotated[Plain | Annotated[SchemaFormat, Tag("[schema]")], Discriminator(kind_of_format)]
ChatFormat = Annotated[Plain | Annotated[ChatSchemaFormat, Tag("[schema]")],
                       Discriminator(kind_of_format)]


class TextOptions(Fields):
    refused = "verbosity"
    format: Format = PlainFormat(type="text")


class ReasoningOptions(Fields):
    """Which part of a model's thoughts a client would like to see. Ours are part of its text."""
    refused = "effort|max_tokens|enabled"
    summary: Text = None


class StreamOptions(Fields):
    # padding that would hide the length of each piece
    include_obfuscation: Literal[False] = False


class UsageOptions(StreamOptions):
    include_usage: bool = False


class ChatStreamOptions(UsageOptions):
    continuous_usage_stats: bool = False        # the usage so far in every chunk


def prompts(given: Any) -> Any:
    """A list of prompts: a text or a list of ids is one prompt."""
    if not isinstance(given, str | list):
        raise PydanticCustomError("prompt", "Input should be a string, a list of strings, or of "
                                  "token ids")
    one = isinstance(given, str) or given and all(isinstance(each, int) for each in given)
    return [given] if one else given


def kind_of_prompt(given: Any) -> str:
    return "[text]" if isinstance(given, str) else "[ids]"


Ids = Annotated[list[Annotated[int, Field(ge=0)]], members(2**20, least=1)]
Prompt = Annotated[Annotated[Text, Tag("[text]")] | Annotated[Ids, Tag("[ids]")],
                   Discriminator(kind_of_prompt)]


class ConversationId(Fields):
    id: Name


# --------------------------------------------------------------------------------------------------
# Bodies and queries.

class EngineOptions(Fields):
    """How the reply's tokens are chosen: the engine's keywords, under their own names."""
    temperature: float = Field(None, ge=0, le=2)
    top_k: TopK = limited("top_k")
    top_p: float = Field(None, ge=0, le=1)
    min_p: float = limited("min_p")
    presence_penalty: float = limited("presence_penalty")
    frequency_penalty: float = limited("frequency_penalty")
    repetition_penalty: float = limited("repetition_penalty")
    seed: Int = limited("seed")
    ignore_eos: bool = False
    min_tokens: Int = Field(None, ge=0)
    stop: Annotated[list[StopString], members(4), OneStop] = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024),
                          BeforeValidator(without_empty)] = None

    def engine_options(self) -> dict:
        """Those that the client has given."""
        options = self.model_dump(include=set(EngineOptions.model_fields), exclude_unset=True)
        if options.get("top_p", 1) < LIMITS["top_p"][0]:     # the most likely token alone
            options |= dict(top_p=1.0, temperature=0.0)
        if "logit_bias" in options:
            biases = options["logit_bias"].items()
            options["logit_bias"] = {int(token): bias for token, bias in biases}
        return options


# Names that vLLM, SGLang, llama.cpp and OpenAI know and we do not, of fields that would change the
# answer or keep a user apart. A body that has such a field of its own serves it, as ChatBody does
# with response_format.
REFUSED = "|".join(r"""functions max_tool_calls web_search_options prompt_embeds
    documents reasoning reasoning_effort thinking enable_thinking verbosity modalities audio
    response_format structured_outputs json_schema guided_\w+ regex ebnf grammar chat_template
    stop_token_ids bad_words allowed_token_ids logits_processors truncate_prompt_tokens
    prompt_logprobs lora_path""".split())


class GeneratingBody(EngineOptions):
    """What all ways to ask for generated text have in common."""
    model: Annotated[str, Field(min_length=1, max_length=1000)] = None
    stream: bool = False

    # vLLM's. Who does not know it cannot learn from cached_tokens that somebody sent the same text.
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] = ""

    # These change nothing here, where all turns are served alike.
    user: Text = None
    priority: Int = Field(0, ge=0, le=0)

    # Only these values of them are served.
    best_of: Int = Field(1, ge=1, le=1)
    use_beam_search: Literal[False] = False
    length_penalty: float = Field(1.0, ge=1, le=1)
    include_stop_str_in_output: Literal[False] = False
    skip_special_tokens: Literal[True] = True

    @property
    def turns(self) -> int:
        """How many turns its answer takes."""
        return getattr(self, "n", 1)

    @field_validator("stream_options", check_fields=False)      # each way to ask declares its own
    @classmethod
    def _of_a_stream(cls, options: Any, info: ValidationInfo) -> Any:
        if not info.data.get("stream"):
            raise PydanticCustomError("no_stream", "Input should be left out without stream: true")
        return options


class ReplyBody(GeneratingBody):
    """What both ways to ask for a reply have in common."""
    store: bool = True
    top_logprobs: Int = Field(None, ge=0, le=20)

    # Other servers' names for the client's conversation. Only hints: we verify them.
    conversation_id: Name = None
    session_id: Name = None
    prompt_cache_key: Name = None

    chat_template_kwargs: TemplateOptions = None    # vLLM's, such as {"enable_thinking": false}

    tools: list[Any] = []       # each way to ask has a shape of its own
    # Whatever it is, the model sees all tools: so the context stays cached.
    tool_choice: Annotated[ToolChoice, OneMode] = ToolChoice(mode="auto")
    parallel_tool_calls: bool = None                # False: we give out a reply's first call alone

    # These change no reply here, where all turns are served alike.
    metadata: Metadata = None
    safety_identifier: Text = None
    service_tier: Text = None
    prompt_cache_retention: Text = None

    # Only these values of them are served.
    background: Literal[False] = False
    function_call: Literal["auto", "none"] = None
    echo: Literal[False] = False
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False

    @cached_property
    def offer(self) -> list[dict]:
        """The tools as a chat template takes them."""
        return tools.offered([tool.model_dump() for tool in self.tools])

    def hint(self, prefix: str) -> str | None:
        """The full name of the conversation that the client may mean."""
        name = self.conversation_id or self.session_id or self.prompt_cache_key
        return name and prefix + name


class ChatBody(ReplyBody):
    refused = REFUSED + ("|prompt|input|instructions|previous_response_id|conversation|truncation"
                         "|max_output_tokens")
    messages_in = "messages"
    messages: Annotated[list[Message], members(10_000, least=1)]
    tools: Annotated[list[ChatTool], members(1000), BeforeValidator(functions)] = []
    max_tokens: Int = Field(None, ge=1)
    max_completion_tokens: Int = Field(None, ge=1)          # the newer name of max_tokens
    stream_options: ChatStreamOptions = ChatStreamOptions()
    n: Int = Field(1, ge=1, le=128)
    logprobs: bool = False
    response_format: ChatFormat = PlainFormat(type="text")
    modalities: Annotated[list[Literal["text"]], members(10)] = None


class ResponseBody(ReplyBody):
    refused = REFUSED + "|prompt|messages|max_tokens|max_completion_tokens|n|logprobs"
    messages_in = "input"
    input: Annotated[list[InputItem], members(10_000, least=1), OrMessage]
    instructions: Text = None
    previous_response_id: Name = None
    conversation: Annotated[ConversationId, OrId] = None
    max_output_tokens: Int = Field(None, ge=1)
    truncation: Literal["disabled", "auto"] = "disabled"
    include: Include = []           # what we do not have is never part of a response
    text: TextOptions = TextOptions()
    tools: Annotated[list[FunctionTool], members(1000), BeforeValidator(functions)] = []
    reasoning: ReasoningOptions = None
    stream_options: StreamOptions = None


class CompletionBody(GeneratingBody):
    """A prompt that no template has written, to be continued."""
    refused = REFUSED + "|suffix|tools|messages|input|top_logprobs|max_completion_tokens"
    messages_in = "prompt"
    prompt: Annotated[list[Prompt], members(1024, least=1), BeforeValidator(prompts)]
    max_tokens: Int = Field(16, ge=0)
    stream_options: UsageOptions = UsageOptions()
    n: Int = Field(1, ge=1, le=128)
    logprobs: Int = Field(None, ge=0, le=5)
    echo: bool = False
    stop: Annotated[list[StopString], members(32), OneStop] = None      # evaluations send many

    @property
    def turns(self) -> int:
        return self.n * len(self.prompt)


class MetadataBody(Fields):
    metadata: Metadata = {}


class ConversationBody(MetadataBody):
    messages_in = "items"
    items: Annotated[list[Item], members(20)] = []


class ItemsBody(Fields):
    messages_in = "items"
    items: Annotated[list[Item], members(20, least=1)]


class ItemsQuery(Fields):
    limit: int = Field(20, ge=1, le=100, strict=False)      # the values of a query are strings
    order: Literal["asc", "desc"] = "desc"
    after: Name = None
    include: Include = []


class ResponseQuery(Fields):
    include: Include = []
    stream: bool = Field(False, strict=False)       # True: the events of the response, once more
    starting_after: int = Field(-1, ge=0, strict=False)     # without those up to this number


# --------------------------------------------------------------------------------------------------
# Operations.

class Operation(NamedTuple):
    """name: the method that answers, of API or of sockets.Handler. answer: its JSON, or the type of
    another content. fields: those of the body, or for GET of the query. generates: its answer is
    the model's, and with `stream: true` it is a stream of events."""
    method: str
    path: str
    name: str
    answer: type[BaseModel] | str
    fields: type[Fields] = Fields       # it takes none
    generates: bool = False

    @property
    def needs_body(self) -> bool:
        return any(field.is_required() for field in self.fields.model_fields.values())


RESPONSE, CONVERSATION = "/v1/responses/{id}", "/v1/conversations/{id}"
ITEM = CONVERSATION + "/items/{item}"
OPERATIONS = [
    Operation("POST", "/v1/chat/completions", "create_chat_completion", answers.Chat, ChatBody,
              True),
    Operation("POST", "/v1/completions", "create_completion", answers.Completion, CompletionBody,
              True),
    Operation("POST", "/v1/responses", "create_response", answers.Response, ResponseBody, True),
    Operation("POST", "/v1/responses/input_tokens", "count_input_tokens", answers.InputTokens,
              ResponseBody),
    Operation("GET", RESPONSE, "retrieve_response", answers.Response, ResponseQuery, True),
    Operation("DELETE", RESPONSE, "delete_response", answers.Deleted),
    Operation("POST", RESPONSE + "/cancel", "cancel_response", answers.Response),
    Operation("GET", RESPONSE + "/input_items", "list_input_items", answers.Items, ItemsQuery),
    Operation("POST", "/v1/conversations", "create_conversation", answers.Conversation,
              ConversationBody),
    Operation("GET", CONVERSATION, "retrieve_conversation", answers.Conversation),
    Operation("POST", CONVERSATION, "update_conversation", answers.Conversation, MetadataBody),
    Operation("DELETE", CONVERSATION, "delete_conversation", answers.Deleted),
    Operation("POST", CONVERSATION + "/warm", "warm_conversation", answers.Warmed),
    Operation("GET", CONVERSATION + "/items", "list_items", answers.Items, ItemsQuery),
    Operation("POST", CONVERSATION + "/items", "create_items", answers.Items, ItemsBody),
    Operation("GET", ITEM, "retrieve_item", answers.AnyItem),
    Operation("DELETE", ITEM, "delete_item", answers.Conversation),
    Operation("GET", "/v1/models", "list_models", answers.Models),
    Operation("GET", "/v1/models/{id}", "retrieve_model", answers.Model),
    Operation("GET", "/health", "health", answers.Health),
    Operation("GET", "/metrics", "metrics", "text/plain"),
    Operation("GET", "/openapi.json", "openapi", "application/json"),
    Operation("GET", "/cache", "cache", answers.Cache),
    Operation("GET", "/cache/events", "cache_events", "text/event-stream"),
    Operation("GET", "/", "chat_page", "text/html"),
]


def find_operation(method: str, path: str) -> tuple[Operation, list[str]]:
    """The operation, and the names that the path has for {id} and {item}. APIError if there is
    none."""
    methods = []
    for operation in OPERATIONS:
        name = "([^/]+)"
        if operation.name == "retrieve_model":      # it may be owner/model, as on the Hub
            name = "(.+)"
        elif operation.path.startswith(RESPONSE):   # not responses/compact, which we do not have
            name = "(resp_[^/]+)"
        pattern = re.sub(r"\\{\w+\\}", name, re.escape(operation.path))
        if match := re.fullmatch(pattern, path):
            if operation.method == method:
                return operation, [unquote(name) for name in match.groups()]
            methods.append(operation.method)
    if methods:
        raise APIError(405, f"{path:.100} takes {' or '.join(methods)}, not {method}",
                       headers=dict(Allow=", ".join(methods)))
    raise APIError(404, f"there is no {path:.100} here: /openapi.json lists what there is")


def parse(operation: Operation, given: Any, ignored: set[str] | None = None) -> Fields:
    """The fields of a body or a query. APIError, which names the faults, if they are not valid.

    ignored: gets the names of the fields that we ignore, such as "Message.cache_control". None: we
    are strict, and refuse them."""
    try:
        return operation.fields.model_validate(given, context=ignored)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from error


# Steps of a fault's path that are no fields: pydantic's mark of a key, and our tags of items.
NOT_FIELDS = "[key]", "[message]", "[plain]", "[schema]", "[text]", "[ids]", *KINDS.values()
# OpenAI's words for some kinds of faults.
CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unsupported_parameter"}


def refusal(faults: list[ErrorDetails]) -> APIError:
    first = faults[0]
    sentences = [sentence(fault) for fault in faults[:MAX_FAULTS]]
    return APIError(400, "; ".join(sentences), place(first) or None, CODES.get(first["type"]))


def sentence(fault: ErrorDetails) -> str:
    """What is wrong, and how to mend it."""
    where = place(fault) or "the body"
    if fault["type"] == "missing":
        return f"{where} is missing or empty"
    if fault["type"] == "extra_forbidden":
        return f"{where} is not supported here: leave it out"
    if fault["type"] == "int_parsing_size":
        return f"{where} has too many digits"
    rule = fault["msg"].partition(" should ")[2]
    if fault["type"] == "model_type":
        rule = "be a JSON object"
    return f"{where} should {rule}, got {reprlib.repr(fault['input'])}"


def place(fault: ErrorDetails) -> str:
    """The path of the field at fault, such as messages[0].role."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step[:100]}" for step in fault["loc"]
             if step not in NOT_FIELDS]
    return "".join(steps).removeprefix(".")


@cache
def openapi() -> str:
    """All operations as an OpenAPI document, in JSON."""
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (operation.fields, "validation") for operation in OPERATIONS]
    models += [(operation.answer, "serialization") for operation in OPERATIONS
               if not isinstance(operation.answer, str)]
    references, definitions = models_json_schema(models,
                                                 ref_template="#/components/schemas/{model}")
    paths = {}
    for operation in OPERATIONS:
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                      for name in re.findall("{(.+?)}", operation.path)]
        entry = dict(operationId=operation.name, parameters=parameters, responses={
            "200": dict(description="OK", content=content_of(operation, references)),
            "default": dict(description="error.message says what is wrong")})
        if operation.method == "GET":
            query = operation.fields.model_json_schema()["properties"]
            parameters += [{"name": name, "in": "query", "schema": schema}
                           for name, schema in query.items()]
        elif operation.fields.model_fields:
            schema = references[operation.fields, "validation"]
            entry["requestBody"] = dict(required=operation.needs_body,
                                        content={"application/json": dict(schema=schema)})
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return json.dumps(dict(openapi="3.1.0", info=dict(title="nano-pensieve", version="1"),
                           paths=paths, components=dict(schemas=definitions["$defs"])))


def content_of(operation: Operation, references: dict) -> dict:
    """An answer as OpenAPI describes it: the schema of each content type."""
    if isinstance(operation.answer, str):
        return {operation.answer: {}}
    content = {"application/json": dict(schema=references[operation.answer, "serialization"])}
    return content | ({"text/event-stream": {}} if operation.generates else {})
