"""The JSON that we answer, as pydantic models. The table in operations.py names one for each
operation.

/openapi.json shows them to programs that write clients. The server builds its answers as plain
dictionaries, which is faster; a test asks for every operation once and holds the answer against its
model. A field without a default is in every answer, and no answer has other fields:

    {"id": "conv_1", "object": "conversation.deleted", "deleted": true}    a Deleted
    {"id": "conv_1", "object": "conversation.deleted"}                     not: `deleted` is missing
"""
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# ---- conversations and their messages

class Portrait(Shape):
    """Where a conversation's tokens are: `serving/live.py` explains the fields. gpu + cpu is less
    than tokens: the last token of a reply has no KV, and dropped chunks have none."""
    id: str | int               # a number: a one-off request, of which nothing is kept
    tokens: int
    gpu: int
    cpu: int
    running: bool
    waiting: bool
    idle_seconds: float
    chunks: str
    leaves_next: int | None


class Conversation(Shape):
    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]
    cache: Portrait


class Part(Shape):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list = None    # may be missing: of a reply alone, like the next one
    logprobs: list[dict] = None


class Item(Shape):
    id: str
    type: Literal["message"]
    role: str
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[Part]


class CalledFunction(Shape):
    name: str
    arguments: str              # JSON


class FunctionCall(CalledFunction):
    id: str
    type: Literal["function_call"]
    call_id: str
    status: Literal["in_progress", "completed", "incomplete"]


class FunctionOutput(Shape):
    id: str
    type: Literal["function_call_output"]
    call_id: str
    output: str
    status: Literal["completed"]


class Listing(Shape):
    object: Literal["list"]
    has_more: bool
    first_id: str | None
    last_id: str | None


class AnyItem(RootModel):
    root: Item | FunctionCall | FunctionOutput


class Items(Listing):
    data: list[AnyItem]


class Deleted(Shape):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: Literal[True]


class Warmed(Shape):
    """Tokens of a conversation that are on the GPU, and those that return to it before the turn.
    All are 0 if nothing is to happen."""
    id: str
    object: Literal["conversation.warmed"]
    gpu: int
    cpu: int
    recomputed: int


# ---- replies

class Sources(Shape):
    """How many of a prompt's tokens came from where."""
    gpu: int
    cpu: int
    recomputed: int
    new: int


class PromptDetails(Sources):
    cached_tokens: int          # gpu + cpu


class ChatUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    role: Literal["assistant"]
    content: str | None         # null beside calls, if the reply has no other text
    refusal: None
    tool_calls: list[ToolCall] = None       # only of a reply that calls


class Choice(Shape):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: dict | None


class Chat(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    conversation_id: str | None
    choices: list[Choice]
    usage: ChatUsage | None


class TokenLogprobs(Shape):
    """Of a completion's tokens, and with `echo` of its prompt's before them. The first token of a
    prompt has no log probability."""
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TokenLogprobs | None


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage


class InputDetails(PromptDetails):
    cache_write_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Response(Shape):
    """A turn. It repeats the settings of its request, which are not listed here."""
    model_config = ConfigDict(extra="allow")
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    incomplete_details: dict[str, str] | None
    error: dict[str, str] | None
    model: str
    conversation: dict[str, str] | None
    output: list[Item | FunctionCall]
    usage: ResponseUsage | None


class InputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


# ---- the server itself

class Model(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(Listing):
    data: list[Model]


class Health(Shape):
    status: Literal["ok"]


class DoneTurn(Sources):
    conversation: str | None    # null: a one-off
    response: str
    prompt_tokens: int
    completion_tokens: int
    first_token_ms: int
    finish_reason: Literal["stop", "length"]
    stateless: dict[str, Any] | None


class Cache(Shape):
    """The live picture, with the constants that it is drawn with, and the latest turns."""
    stats: dict[str, float]
    conversations: list[Portrait]
    chunk_size: int
    limit: int
    policy: str
    recompute_seconds: list[float]
    turns: list[DoneTurn]
    example: list[list[str]] | None
