"""What a client may ask for: every operation of the server, and the fields of its body or its query.

pydantic does three things with the fields: it checks what a client sends, says what is wrong with it, and
describes it in /openapi.json. We refuse every field that is not here by its name, because a server that
silently ignores an option gives a wrong answer:

    {"messages": [...], "temperature": 3}     400  temperature should be less than or equal to 2, got 3
    {"messages": [...], "tools": [...]}       400  tools is not supported here: leave it out

openai_api.py answers the operations; server.py answers those that are its own (health, metrics, cache ...).
"""
import re
import reprlib
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import models_json_schema
from pydantic_core import PydanticCustomError

from sampling import BIAS, LIMITS

MAX_FAULTS = 5      # told of one request


class APIError(Exception):
    """Is answered in OpenAI's shape. param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        if status == 429:
            kind = "rate_limit_error"
        self.status = status
        self.body = dict(error=dict(message=message, type=kind, param=param, code=code))


# ---------------------------------------------------------------------------------------------------------
# Kinds of fields.

def without_nulls(value: Any) -> Any:
    """A member that is null counts as left out."""
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if member is not None}


class Fields(BaseModel):
    """A JSON object. Unknown fields are refused, and nothing is converted: "5" is not a number. A field with
    a default may be left out."""
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    _leave_out_nulls = model_validator(mode="before")(without_nulls)


def string_or(kind: type, name: str, wrap: Callable[[str], Any]) -> type:
    """The type of a field for which a client sends either a `kind` or a string. A string stands for
    wrap(string): `stop: "x"` for `stop: ["x"]`. name: the kind's in error messages."""
    def validate(value):
        if isinstance(value, str):
            return wrap(value)
        if not isinstance(value, (list, dict)):
            raise PydanticCustomError("string_or", f"Input should be a string or {name}")
        return value
    return Annotated[kind, BeforeValidator(validate, json_schema_input_type=str | kind)]


def limited(name: str):
    """An optional number, within the limits that sampling.py sets for `name`."""
    least, most = LIMITS[name]
    return Field(None, ge=least, le=most)


def text_part(text: str) -> list[dict]:
    return [dict(type="text", text=text)]


def user_message(text: str) -> list[dict]:
    return [dict(role="user", content=text)]


Text = Annotated[str, Field(max_length=2**20)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
StopString = Annotated[str, Field(min_length=1, max_length=100)]
TokenId = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS[0], le=BIAS[1])]
Key, Value = Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
TemplateOptions = Annotated[dict[Key, bool | int | float | Value], Field(max_length=16),
                            BeforeValidator(without_nulls)]
Metadata = Annotated[dict[Key, Value], Field(max_length=16), BeforeValidator(without_nulls)]


class TextPart(Fields):
    """Part of a message's content. A client that gives our own parts back sends the last two fields."""
    type: Literal["text"]
    text: Text
    annotations: list = Field([], max_length=0)
    logprobs: list = []


class ItemPart(TextPart):
    type: Literal["input_text", "output_text", "text"]


class Message(Fields):
    """A message of a chat."""
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: string_or(Annotated[list[TextPart], Field(max_length=1000)], "a list of parts", text_part)


class Item(Fields):
    """A message of a conversation."""
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: string_or(Annotated[list[ItemPart], Field(max_length=1000)], "a list of parts", text_part)
    id: Name = None
    status: Text = None


class TextFormat(Fields):
    type: Literal["text"]


class TextOptions(Fields):
    format: TextFormat = None


class StreamOptions(Fields):
    include_usage: bool = False


class ConversationId(Fields):
    id: Name


# ---------------------------------------------------------------------------------------------------------
# Bodies and queries.

class EngineOptions(Fields):
    """How the reply's tokens are chosen: the engine's keywords, under their own names."""
    temperature: float = Field(None, ge=0, le=2)
    top_k: int = limited("top_k")
    top_p: float = limited("top_p")
    min_p: float = limited("min_p")
    presence_penalty: float = limited("presence_penalty")
    frequency_penalty: float = limited("frequency_penalty")
    repetition_penalty: float = limited("repetition_penalty")
    seed: int = limited("seed")
    ignore_eos: bool = False
    stop: string_or(Annotated[list[StopString], Field(max_length=4)], "a list", lambda text: [text]) = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024), BeforeValidator(without_nulls)] = None

    def engine_options(self) -> dict:
        """Those that the client has given."""
        options = self.model_dump(include=set(EngineOptions.model_fields), exclude_unset=True)
        if "logit_bias" in options:
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        return options


class ReplyBody(EngineOptions):
    """What both ways to ask for a reply have in common. user and metadata change nothing."""
    model: Annotated[str, Field(min_length=1, max_length=1000)] = None
    stream: bool = False
    store: bool = True
    top_logprobs: int = limited("logprobs")
    user: Text = None
    metadata: Metadata = None


class ChatBody(ReplyBody):
    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_tokens: int = Field(None, ge=1)
    max_completion_tokens: int = Field(None, ge=1)          # the newer name of max_tokens
    stream_options: StreamOptions = StreamOptions()
    chat_template_kwargs: TemplateOptions = None            # vLLM's, such as {"enable_thinking": false}
    conversation_id: Name = None
    n: int = Field(1, ge=1, le=16)
    logprobs: bool = False
    response_format: TextFormat = None


class ResponseBody(ReplyBody):
    input: string_or(Annotated[list[Item], Field(min_length=1, max_length=10_000)], "a list", user_message)
    instructions: Text = None
    previous_response_id: Name = None
    conversation: string_or(ConversationId, "an object with an id", lambda id: dict(id=id)) = None
    max_output_tokens: int = Field(None, ge=1)
    truncation: Literal["disabled", "auto"] = "disabled"
    include: list[Literal["message.output_text.logprobs"]] = Field([], max_length=1)
    text: TextOptions = None


class ConversationBody(Fields):
    items: list[Item] = Field([], max_length=20)
    metadata: Metadata = {}


class MetadataBody(Fields):
    metadata: Metadata


class ItemsBody(Fields):
    items: list[Item] = Field(min_length=1, max_length=20)


class ItemsQuery(Fields):
    limit: int = Field(20, ge=1, le=100, strict=False)      # the values of a query are strings
    order: Literal["asc", "desc"] = "desc"
    after: Name = None


# ---------------------------------------------------------------------------------------------------------
# Operations.

class Operation(NamedTuple):
    """name: the method that answers, of API or of the server. fields: those of the body, or for GET of the
    query."""
    method: str
    path: str
    name: str
    fields: type[Fields] = Fields       # none

    @property
    def needs_body(self) -> bool:
        return any(field.is_required() for field in self.fields.model_fields.values())


OPERATIONS = [
    Operation("POST", "/v1/chat/completions", "create_chat_completion", ChatBody),
    Operation("POST", "/v1/responses", "create_response", ResponseBody),
    Operation("GET", "/v1/responses/{id}", "retrieve_response"),
    Operation("DELETE", "/v1/responses/{id}", "delete_response"),
    Operation("POST", "/v1/responses/{id}/cancel", "cancel_response"),
    Operation("POST", "/v1/conversations", "create_conversation", ConversationBody),
    Operation("GET", "/v1/conversations/{id}", "retrieve_conversation"),
    Operation("POST", "/v1/conversations/{id}", "update_conversation", MetadataBody),
    Operation("DELETE", "/v1/conversations/{id}", "delete_conversation"),
    Operation("GET", "/v1/conversations/{id}/items", "list_items", ItemsQuery),
    Operation("POST", "/v1/conversations/{id}/items", "create_items", ItemsBody),
    Operation("GET", "/v1/conversations/{id}/items/{item}", "retrieve_item"),
    Operation("GET", "/v1/models", "list_models"),
    Operation("GET", "/health", "health"),
    Operation("GET", "/metrics", "metrics"),
    Operation("GET", "/openapi.json", "openapi"),
    Operation("GET", "/cache", "cache"),
    Operation("GET", "/cache/events", "cache_events"),
    Operation("GET", "/", "chat_page"),
]


def find_operation(method: str, path: str) -> tuple[Operation, list[str]]:
    """The operation, and the names that the path has for {id} and {item}. APIError if there is none."""
    methods = []
    for operation in OPERATIONS:
        pattern = re.sub(r"\\{\w+\\}", "([^/]+)", re.escape(operation.path))
        if match := re.fullmatch(pattern, path):
            if operation.method == method:
                return operation, [unquote(name) for name in match.groups()]
            methods.append(operation.method)
    if methods:
        raise APIError(405, f"{path:.100} takes {' or '.join(methods)}, not {method}")
    raise APIError(404, f"there is no {path:.100} here: /openapi.json lists what there is")


def parse(operation: Operation, given: Any) -> Fields:
    """given: a body, or a query. APIError if it is not as it should be."""
    try:
        return operation.fields.model_validate(given)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False)) from error


CODES = {"missing": "missing_required_parameter", "extra_forbidden": "unsupported_parameter"}     # OpenAI's


def refusal(faults: list[dict]) -> APIError:
    """faults: pydantic's."""
    first = faults[0]
    sentences = [sentence(fault) for fault in faults[:MAX_FAULTS]]
    return APIError(400, "; ".join(sentences), place(first) or None, CODES.get(first["type"]))


def sentence(fault: dict) -> str:
    """What is wrong, and how to mend it."""
    where = place(fault) or "the body"
    if fault["type"] == "missing":
        return f"{where} is missing"
    if fault["type"] == "extra_forbidden":
        return f"{where} is not supported here: leave it out"
    rule = "be a JSON object" if fault["type"] == "model_type" else fault["msg"].partition(" should ")[2]
    return f"{where} should {rule}, got {reprlib.repr(fault['input'])}"


def place(fault: dict) -> str:
    """Of the field at fault: messages[0].role"""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step[:100]}"
             for step in fault["loc"] if step != "[key]"]           # so pydantic marks the key of a dict
    return "".join(steps).removeprefix(".")


def openapi() -> dict:
    """All operations as an OpenAPI document."""
    bodies = [(operation.fields, "validation") for operation in OPERATIONS]
    references, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    paths = {}
    for operation in OPERATIONS:
        steps = operation.path.split("/")
        parameters = [{"name": step[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
                      for step in steps if step.startswith("{")]
        entry = dict(operationId=operation.name, parameters=parameters, responses={
            "200": dict(description="OK"), "default": dict(description="error.message says what is wrong")})
        if operation.method == "GET":
            query = operation.fields.model_json_schema()["properties"]
            parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
        elif operation.fields.model_fields:
            schema = references[operation.fields, "validation"]
            entry["requestBody"] = dict(required=True, content={"application/json": dict(schema=schema)})
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return dict(openapi="3.1.0", info=dict(title="nano-pensieve", version="1"), paths=paths,
                components=dict(schemas=definitions["$defs"]))
