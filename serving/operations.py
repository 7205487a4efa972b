"""What a client may ask for: every operation of the server, and the fields of its body or its
query.

pydantic does three things with the fields: it checks what a client sends, says what is wrong with
it, and describes it in /openapi.json. We refuse every field of a body that is not here by its name,
because a server that silently ignores an option gives a wrong answer:

    {"messages": [...], "temperature": 3}    400  temperature should be less than or equal to 2, ...
    {"messages": [...], "tools": [{...}]}    400  tools is not supported here: leave it out
    {"messages": [...], "tools": []}         200  an empty field asks for nothing

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
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import (BaseModel, BeforeValidator, ConfigDict, Discriminator, Field,
                      GetCoreSchemaHandler, Tag, ValidationError, model_validator)
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

from sampling import BIAS, LIMITS
from serving import answers

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
    """A JSON object. Unknown fields are refused, and nothing is converted: "5" is not a number. A
    field with a default may be left out."""
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _leave_out_empty = model_validator(mode="before")(without_empty)


class OrString(NamedTuple):
    """In an Annotated type: a client may send a string, too. It stands for wrap(string), such as
    `stop: "x"` for `stop: ["x"]`. kind: what else a client may send, for error messages."""
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


MOST_TOKENS = 2**20         # whose log probabilities a client gives back
Text = Annotated[str, Field(max_length=2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
StopString = Annotated[str, Field(min_length=1, max_length=100)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS[0], le=BIAS[1])]
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
OrText = OrString("a list of parts", lambda text: [dict(type="text", text=text)])
OrMessage = OrString("a list", lambda text: [dict(role="user", content=text)])
OrId = OrString("an object with an id", lambda id: dict(id=id))
TopK = Annotated[int, BeforeValidator(lambda given: 0 if given == -1 else given)]
Option = Annotated[bool | int | float | Value, BeforeValidator(simple)]
TemplateOptions = Annotated[dict[Key, Option], Field(max_length=16), BeforeValidator(without_empty)]
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


class Message(Fields):
    """A message of a chat."""
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart], members(1000), OrText]


class Item(Fields):
    """A message of a conversation."""
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ItemPart], members(1000), OrText]
    id: Name = None
    status: Text = None
    phase: Text = None          # of an agent's work; it changes nothing


class ItemReference(Fields):
    """Stands for a message of a turn that we have, or of the request's conversation. (A message
    that was added to a conversation before its turn is found only there: its id names no turn.)"""
    type: Literal["item_reference"]
    id: Name


def kind_of_item(given: Any) -> str:
    is_reference = isinstance(given, dict) and given.get("type") == "item_reference"
    return "[reference]" if is_reference else "[message]"


InputItem = Annotated[
    Annotated[Item, Tag("[message]")] | Annotated[ItemReference, Tag("[reference]")],
    Discriminator(kind_of_item)]


class TextFormat(Fields):
    type: Literal["text"]


class TextOptions(Fields):
    format: TextFormat = None


class StreamOptions(Fields):
    # padding that would hide the length of each piece
    include_obfuscation: Literal[False] = False


class ChatStreamOptions(StreamOptions):
    include_usage: bool = False
    continuous_usage_stats: bool = False        # the usage so far in every chunk


class ConversationId(Fields):
    id: Name


# --------------------------------------------------------------------------------------------------
# Bodies and queries.

class EngineOptions(Fields):
    """How the reply's tokens are chosen: the engine's keywords, under their own names."""
    temperature: float = Field(None, ge=0, le=2)
    top_k: TopK = limited("top_k")
    top_p: float = limited("top_p")
    min_p: float = limited("min_p")
    presence_penalty: float = limited("presence_penalty")
    frequency_penalty: float = limited("frequency_penalty")
    repetition_penalty: float = limited("repetition_penalty")
    seed: int = limited("seed")
    ignore_eos: bool = False
    min_tokens: int = Field(None, ge=0)
    stop: Annotated[list[StopString], members(4), OrString("a list", lambda text: [text])] = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024),
                          BeforeValidator(without_empty)] = None

    def engine_options(self) -> dict:
        """Those that the client has given."""
        options = self.model_dump(include=set(EngineOptions.model_fields), exclude_unset=True)
        if "logit_bias" in options:
            biases = options["logit_bias"].items()
            options["logit_bias"] = {int(token): bias for token, bias in biases}
        return options


class ReplyBody(EngineOptions):
    """What both ways to ask for a reply have in common."""
    model: Annotated[str, Field(min_length=1, max_length=1000)] = None
    stream: bool = False
    store: bool = True
    top_logprobs: int = Field(None, ge=0, le=20)

    # Other servers' names for the client's conversation. Only hints: we verify them.
    conversation_id: Name = None
    session_id: Name = None
    prompt_cache_key: Name = None

    # vLLM's. Who does not know it cannot learn from cached_tokens that somebody sent the same text.
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] = ""

    chat_template_kwargs: TemplateOptions = None    # vLLM's, such as {"enable_thinking": false}

    # These change no reply here, where nobody calls tools and all turns are served alike.
    user: Text = None
    metadata: Metadata = None
    safety_identifier: Text = None
    service_tier: Text = None
    prompt_cache_retention: Text = None
    tool_choice: Literal["auto", "none"] = None
    parallel_tool_calls: bool = None
    background: Literal[False] = False
    skip_special_tokens: Literal[True] = True

    def hint(self, prefix: str) -> str | None:
        """The full name of the conversation that the client may mean."""
        name = self.conversation_id or self.session_id or self.prompt_cache_key
        return name and prefix + name


class ChatBody(ReplyBody):
    messages: Annotated[list[Message], members(10_000, least=1)]
    max_tokens: int = Field(None, ge=1)
    max_completion_tokens: int = Field(None, ge=1)          # the newer name of max_tokens
    stream_options: ChatStreamOptions = ChatStreamOptions()
    n: int = Field(1, ge=1, le=16)
    logprobs: bool = False
    response_format: TextFormat = None
    modalities: Annotated[list[Literal["text"]], members(10)] = None


class ResponseBody(ReplyBody):
    input: Annotated[list[InputItem], members(10_000), OrMessage]
    instructions: Text = None
    previous_response_id: Name = None
    conversation: Annotated[ConversationId, OrId] = None
    max_output_tokens: int = Field(None, ge=1)
    truncation: Literal["disabled", "auto"] = "disabled"
    # What we do not have is never part of a response.
    include: Annotated[list[Text], members(100)] = []
    text: TextOptions = None
    stream_options: StreamOptions = None


class MetadataBody(Fields):
    metadata: Metadata = {}


class ConversationBody(MetadataBody):
    items: Annotated[list[Item], members(20)] = []


class ItemsBody(Fields):
    items: Annotated[list[Item], members(20, least=1)]


class ItemsQuery(Fields):
    limit: int = Field(20, ge=1, le=100, strict=False)      # the values of a query are strings
    order: Literal["asc", "desc"] = "desc"
    after: Name = None


# --------------------------------------------------------------------------------------------------
# Operations.

class Operation(NamedTuple):
    """name: the method that answers, of API or of sockets.Handler. answer: its JSON, or the type of
    another content. fields: those of the body, or for GET of the query. generates: its answer is
    the model's, and with `stream: true` it is a stream of events."""
    method: str
    path: str
    name: str
    answer: type[answers.Shape] | str
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
    Operation("POST", "/v1/responses", "create_response", answers.Response, ResponseBody, True),
    Operation("POST", "/v1/responses/input_tokens", "count_input_tokens", answers.InputTokens,
              ResponseBody),
    Operation("GET", RESPONSE, "retrieve_response", answers.Response),
    Operation("DELETE", RESPONSE, "delete_response", answers.Deleted),
    Operation("POST", RESPONSE + "/cancel", "cancel_response", answers.Response),
    Operation("GET", RESPONSE + "/input_items", "list_input_items", answers.Items, ItemsQuery),
    Operation("POST", "/v1/conversations", "create_conversation", answers.Conversation,
              ConversationBody),
    Operation("GET", CONVERSATION, "retrieve_conversation", answers.Conversation),
    Operation("POST", CONVERSATION, "update_conversation", answers.Conversation, MetadataBody),
    Operation("DELETE", CONVERSATION, "delete_conversation", answers.Deleted),
    Operation("GET", CONVERSATION + "/items", "list_items", answers.Items, ItemsQuery),
    Operation("POST", CONVERSATION + "/items", "create_items", answers.Items, ItemsBody),
    Operation("GET", ITEM, "retrieve_item", answers.Item),
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
        # A model's name may be owner/model, as on the Hub.
        name = "(.+)" if operation.name == "retrieve_model" else "([^/]+)"
        pattern = re.sub(r"\\{\w+\\}", name, re.escape(operation.path))
        if match := re.fullmatch(pattern, path):
            if operation.method == method:
                return operation, [unquote(name) for name in match.groups()]
            methods.append(operation.method)
    if methods:
        raise APIError(405, f"{path:.100} takes {' or '.join(methods)}, not {method}",
                       headers=dict(Allow=", ".join(methods)))
    raise APIError(404, f"there is no {path:.100} here: /openapi.json lists what there is")


def parse(operation: Operation, given: Any) -> Fields:
    """The fields of a body or a query. APIError, which names the faults, if they are not valid."""
    try:
        return operation.fields.model_validate(given)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from error


# Steps of a fault's path that are no fields: pydantic's mark of a key, and our tags of items.
MARKS = "[key]", "[message]", "[reference]"
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
        return f"{where} is missing"
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
             if step not in MARKS]
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
