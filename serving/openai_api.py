"""OpenAI's wire format over one engine: what may be asked, in one table, and what is answered. No sockets here.

Two ways to talk. *Chat completions*: the client resends its whole history, which is recognised by its text. *Responses*: the client
sends only what is new, after a response or in a conversation. A response is a turn of the history: `resp_X` is turn X, and what
cannot be read off the turn (the request's settings, its usage) is the turn's note. Two answers to one response are two branches.

`instructions` count for one response only. The same ones at every turn cost nothing, they are the beginning that is cached. Others
than those of the previous response (none after some included) change what every token sees: that turn's context is computed from
nothing, from the visible messages. So it is when `truncation: auto` drops messages.

What is not supported is refused by name, never ignored: an option that is silently dropped is a wrong answer. The default
temperature is 0, not OpenAI's 1, so that answers repeat. `cached_tokens` are those whose KV came from either tier.

Owners: all that a client names, conversations, responses and items, is looked for behind its key's prefix alone; so what belongs
to another key does not exist."""
import json
import re
import reprlib
import time
from itertools import count
from typing import NamedTuple

from serving import live
from serving.history import ConversationRecord, Turn, new_id
from serving.sessions import Answer, Busy, LiveTurn, Sessions
from sampling import BIAS, LIMITS


class APIError(Exception):
    """Is answered in OpenAI's shape. param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.body = status, dict(error=dict(message=message, type=kind, param=param, code=code))


# ---------------------------------------------------------------------------------------------------------------------
# The table: of every operation its fields, as JSON Schema, whose descriptions complete "x must be ...".

BOOLEAN = dict(type="boolean", description="true or false")


def whole(low: int, high: int = 2**63 - 1) -> dict:
    return dict(type="integer", minimum=low, maximum=high, description=f"an integer from {low} to {high}")


def number(low: float, high: float) -> dict:
    return dict(type="number", minimum=low, maximum=high, description=f"a number from {low} to {high}")


def text(longest: int, shortest: int = 1) -> dict:
    return dict(type="string", minLength=shortest, maxLength=longest, description=f"a string of {shortest} to {longest} characters")


def one_of(*values: str) -> dict:
    return dict(type="string", enum=list(values), description=" or ".join(map(repr, values)))


def listed(items: dict, least: int, most: int) -> dict:
    return dict(type="array", items=items, minItems=least, maxItems=most, description=f"a list of {least} to {most}")


def record(description: str, required=(), **properties) -> dict:
    return dict(type="object", properties=properties, required=list(required), additionalProperties=False, description=description)


def either(description: str, *schemas: dict) -> dict:
    return dict(anyOf=list(schemas), description=description)


TEXT = text(2**20, 0)
METADATA = dict(type="object", properties={}, maxProperties=16, propertyNames=dict(pattern=r"^[\s\S]{0,64}$"), additionalProperties=text(512, 0),
                description="an object of at most 16 strings of at most 512 characters")


def message(roles: tuple, parts: tuple, **more) -> dict:
    part = record(f"a part with a type ({' or '.join(parts)}) and a text; nothing else is supported", ("type", "text"), type=one_of(*parts),
                  text=TEXT, annotations=listed({}, 0, 0), logprobs=listed({}, 0, 2**20))
    content = either("a string or a list of parts", TEXT, listed(part, 0, 1000))
    return record("a message with a role and a content", ("role", "content"), role=one_of(*roles), content=content, **more)


ROLES = ("system", "developer", "user", "assistant")
MESSAGES = listed(message((*ROLES, "tool"), ("text",)), 1, 10_000)
ITEM = message(ROLES, ("input_text", "output_text", "text"), type=one_of("message"), id=text(200), status=text(20))
NAME, METADATA_FIELD = text(200), dict(metadata=METADATA)
SETTINGS = {                            # of both APIs, and the engine's keywords
    "temperature": number(0, 2), **{name: number(*LIMITS[name]) for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")},
    "top_k": whole(*LIMITS["top_k"]), "seed": whole(*LIMITS["seed"]), "ignore_eos": BOOLEAN,
    "stop": either("a string of 1 to 100 characters, or a list of at most 4", text(100), listed(text(100), 0, 4)),
    "logit_bias": dict(type="object", properties={}, maxProperties=1024, additionalProperties=number(*BIAS),
                       propertyNames=dict(pattern="^[0-9]{1,9}$"), description="an object of token ids and numbers")}
CHAT = dict(
    SETTINGS, model=text(1000), messages=MESSAGES, max_tokens=whole(1), max_completion_tokens=whole(1), stream=BOOLEAN,
    stream_options=record("an object with include_usage, true or false, and nothing else", include_usage=BOOLEAN),
    conversation_id=NAME, n=whole(1, 16), logprobs=BOOLEAN, top_logprobs=whole(*LIMITS["logprobs"]),
    response_format=record("of type text", ("type",), type=one_of("text")), user=TEXT, metadata=METADATA, store=BOOLEAN)
RESPONSE = dict(
    SETTINGS, model=text(1000), input=either("a string or a list of messages", TEXT, listed(ITEM, 1, 10_000)), instructions=TEXT,
    previous_response_id=NAME, conversation=either("an id, or an object with one", NAME, record("an object with an id", ("id",), id=NAME)),
    store=BOOLEAN, max_output_tokens=whole(1), truncation=one_of("disabled", "auto"), metadata=METADATA, stream=BOOLEAN,
    include=listed(one_of("message.output_text.logprobs"), 0, 1), top_logprobs=whole(*LIMITS["logprobs"]), user=TEXT,
    text=record("an object with the format text", format=record("of type text", ("type",), type=one_of("text"))))


class Operation(NamedTuple):
    """name: the method that answers. fields: of its body, or, where the method is GET, of its query."""
    method: str
    path: str
    name: str
    fields: dict = {}
    required: tuple = ()


OPERATIONS = [
    Operation("POST", "/v1/chat/completions", "create_chat_completion", CHAT, ("messages",)),
    Operation("POST", "/v1/responses", "create_response", RESPONSE, ("input",)),
    Operation("GET", "/v1/responses/{id}", "retrieve_response"),
    Operation("DELETE", "/v1/responses/{id}", "delete_response"),
    Operation("POST", "/v1/responses/{id}/cancel", "cancel_response"),
    Operation("POST", "/v1/conversations", "create_conversation", dict(METADATA_FIELD, items=listed(ITEM, 0, 20))),
    Operation("GET", "/v1/conversations/{id}", "retrieve_conversation"),
    Operation("POST", "/v1/conversations/{id}", "update_conversation", METADATA_FIELD, ("metadata",)),
    Operation("DELETE", "/v1/conversations/{id}", "delete_conversation"),
    Operation("GET", "/v1/conversations/{id}/items", "list_items", dict(limit=whole(1, 100), order=one_of("asc", "desc"), after=NAME)),
    Operation("POST", "/v1/conversations/{id}/items", "create_items", dict(items=listed(ITEM, 1, 20)), ("items",)),
    Operation("GET", "/v1/conversations/{id}/items/{item}", "retrieve_item"),
    Operation("GET", "/v1/models", "list_models"),
    Operation("GET", "/health", "health"), Operation("GET", "/metrics", "metrics"), Operation("GET", "/openapi.json", "openapi"),
    Operation("GET", "/cache", "cache"), Operation("GET", "/cache/events", "cache_events"), Operation("GET", "/", "page")]
TYPES = dict(string=str, integer=int, number=(int, float), boolean=bool, array=list, object=dict)
BOUNDS = dict(string=("minLength", "maxLength"), array=("minItems", "maxItems"), object=("minProperties", "maxProperties"),
              integer=("minimum", "maximum"), number=("minimum", "maximum"), boolean=("minimum", "maximum"))


def checked(schema: dict, value, path: str = ""):
    """The value, with members that are null left out, if it is what the schema describes; else APIError, which names the place.
    The schema uses the few words of JSON Schema that the table does."""
    if not schema:                                      # anything
        return value
    def is_of(kind):                                    # a bool is no number here
        return isinstance(value, TYPES[kind["type"]]) and isinstance(value, bool) == (kind["type"] == "boolean")
    kind = next(filter(is_of, schema.get("anyOf", [schema])), None)
    if kind:
        low, high = (kind.get(bound, ends) for bound, ends in zip(BOUNDS[kind["type"]], (float("-inf"), float("inf"))))
        size = value if isinstance(value, (int, float)) else len(value)
    if not kind or not low <= size <= high or value not in kind.get("enum", [value]):
        raise APIError(400, f"{path or 'the body'} must be {(kind or schema)['description']}, got {reprlib.repr(value)}", path or None)
    if kind["type"] == "array":
        return [checked(kind["items"], item, f"{path}[{i}]") for i, item in enumerate(value)]
    return checked_members(kind, value, path and path + ".") if kind["type"] == "object" else value


def checked_members(schema: dict, value: dict, path: str) -> dict:
    known, others = schema["properties"], schema["additionalProperties"]
    value = {name: member for name, member in value.items() if member is not None}
    if unknown := [path + name[:100] for name in value if name not in known and not others]:
        raise APIError(400, f"{', '.join(unknown[:5])}: not supported here, leave it out", unknown[0], "unsupported_parameter")
    if missing := [path + name for name in schema.get("required", ()) if name not in value]:
        raise APIError(400, f"{missing[0]} is missing", missing[0], "missing_required_parameter")
    pattern = schema.get("propertyNames", {}).get("pattern", "")
    if wrong := [name for name in value if not re.search(pattern, name)]:
        raise APIError(400, f"{path}{wrong[0]!r:.100} is not a name that matches {pattern}", path)
    return {name: checked(known.get(name, others), member, path + name) for name, member in value.items()}


def parse(operation: Operation, given: dict) -> dict:
    """The fields of a body, or of a query, whose values are strings."""
    if operation.method == "GET":
        given = {name: int(value) if operation.fields.get(name, {}).get("type") == "integer" and value.isdecimal() else value
                 for name, value in given.items()}
    return checked(record("a JSON object", operation.required, **operation.fields), given)


def openapi() -> dict:
    """The table as an OpenAPI document."""
    paths = {}
    for operation in OPERATIONS:
        parameters = [dict(name=part[1:-1], required=True, schema=NAME, **{"in": "path"}) for part in operation.path.split("/") if part[:1] == "{"]
        entry = dict(operationId=operation.name, responses={"200": dict(description="OK"), "default": dict(description="error.message tells why")})
        if operation.method == "GET":
            parameters += [dict(name=name, schema=schema, **{"in": "query"}) for name, schema in operation.fields.items()]
        elif operation.fields:
            body = record("a JSON object", operation.required, **operation.fields)
            entry["requestBody"] = dict(required=True, content={"application/json": dict(schema=body)})
        paths.setdefault(operation.path, {})[operation.method.lower()] = dict(entry, parameters=parameters)
    return dict(openapi="3.1.0", info=dict(title="nano-pensieve", version="1"), paths=paths)


# ---------------------------------------------------------------------------------------------------------------------
# What the operations do. Each returns the answer's JSON, or a turn that is still to be written.

class API:
    """owner: what precedes, inside, the names of all conversations that the client may see; outside, names have no owner."""

    def __init__(self, sessions: Sessions, names: tuple[str, str]):
        """names: what `model` may be; the first is the one that we say."""
        self.sessions, self.engine, self.history = sessions, sessions.engine, sessions.history
        self.names, self.created = names, int(time.time())

    def create_chat_completion(self, owner: str, given: dict) -> "ChatWriter":
        options = self._options(given)
        options["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens"))      # the newer name of the same
        if given.get("logprobs"):
            options["logprobs"] = given.get("top_logprobs", 0)
        elif "top_logprobs" in given:
            raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        hint = given.get("conversation_id")
        messages, hint = [plain(message) for message in given["messages"]], hint and owner + hint
        first, *others = seeded(options, given.get("n", 1))
        handle = self.sessions.submit_chat(messages, hint, owner, **first)
        others = [self.sessions.another(handle, owner, **each) for each in others]
        return ChatWriter([handle, *others], owner, self.names[0], given)

    def create_response(self, owner: str, given: dict) -> "ResponseWriter":
        options, previous, conversation = self._options(given), given.get("previous_response_id"), given.get("conversation")
        name = conversation["id"] if isinstance(conversation, dict) else conversation
        if name and (previous or not given.get("store", True)):
            raise APIError(400, "conversation cannot be combined with previous_response_id or with store: false", "conversation")
        if given.get("include") or "top_logprobs" in given:
            options["logprobs"] = given.get("top_logprobs", 0)
        items = [dict(role="user", content=given["input"])] if isinstance(given["input"], str) else list(map(plain, given["input"]))
        handle = self.sessions.respond(
            items, name and self._conversation(owner, name).name, after=previous and self._turn(owner, previous),
            prefix=owner if given.get("store", True) else None, instructions=given.get("instructions"), max_tokens=given.get("max_output_tokens"),
            truncate=given.get("truncation") == "auto", note=dict({name: given[name] for name in ECHOED if name in given}, created_at=int(time.time())),
            **options)
        return ResponseWriter(handle, owner, self.names[0], given.get("stream", False))

    def retrieve_response(self, owner: str, id: str) -> dict:
        if handle := self._unfinished(owner, id):
            return ResponseWriter(handle, owner, self.names[0]).response("in_progress")
        turn = self._turn(owner, id)
        note, messages = json.loads(turn.note), self.history.messages(turn.id)
        status = STATUS[note["finish_reason"]]
        reply = item(dict(messages[-1] if messages else dict(role="assistant", content=""), id=f"msg_{turn.id}"), "completed" if status == "completed" else "incomplete")
        return response(turn.id, self.names[0], turn.created, turn.conversation.removeprefix(owner), note, status, [reply], note["usage"])

    def delete_response(self, owner: str, id: str) -> dict:
        if handle := self._unfinished(owner, id):
            handle.cancel()
        if not handle or self.history.turn(handle.id):               # it may have been complete already
            self.sessions.delete(self._turn(owner, id))
        return dict(id=id, object="response", deleted=True)

    def cancel_response(self, owner: str, id: str) -> dict:
        if handle := self._unfinished(owner, id):
            handle.cancel()
            return ResponseWriter(handle, owner, self.names[0]).whole(handle.result())
        return self.retrieve_response(owner, id)

    def create_conversation(self, owner: str, given: dict) -> dict:
        name = f"{owner}conv_{new_id()}"
        self.history.create(name, given.get("metadata", {}), map(identified, given.get("items", ())))
        return self.retrieve_conversation(owner, name.removeprefix(owner))

    def retrieve_conversation(self, owner: str, id: str) -> dict:
        found = self._conversation(owner, id)
        head = self.history.head(found.name)
        cold = dict(id=id, tokens=head.length if head else 0, gpu=0, cpu=0, running=False, waiting=False, chunks="",
                    idle_seconds=round(time.time() - found.active, 3))
        cache = next((entry for entry in live.picture(self.engine, owner)["conversations"] if entry["id"] == id), cold)
        return dict(id=id, object="conversation", created_at=int(found.created), metadata=found.metadata or {}, cache=cache)

    def update_conversation(self, owner: str, id: str, given: dict) -> dict:
        self._update(owner, id, metadata=given["metadata"])
        return self.retrieve_conversation(owner, id)

    def delete_conversation(self, owner: str, id: str) -> dict:
        if not self.sessions.answering(owner + id):           # its first turn may still run
            self._conversation(owner, id)
        self.sessions.forget(owner + id)
        return dict(id=id, object="conversation.deleted", deleted=True)

    def create_items(self, owner: str, id: str, given: dict) -> dict:
        new = list(map(identified, given["items"]))
        try:
            self._update(owner, id, new=new)
        except Busy as busy:
            raise APIError(409, f"a response is being written in conversation {id}: add items when it is done", code="conversation_locked") from busy
        return page(list(map(item, new)), False)

    def list_items(self, owner: str, id: str, given: dict) -> dict:
        items = list(map(item, self.history.items(self._conversation(owner, id).name)))
        if given.get("order", "desc") == "desc":
            items.reverse()
        if after := given.get("after"):
            items = items[next((i + 1 for i, entry in enumerate(items) if entry["id"] == after), len(items)):]
        limit = given.get("limit", 20)
        return page(items[:limit], len(items) > limit)

    def retrieve_item(self, owner: str, id: str, item_id: str) -> dict:
        for message in self.history.items(self._conversation(owner, id).name):
            if message["id"] == item_id:
                return item(message)
        raise missing("item", item_id)

    def list_models(self, owner: str) -> dict:
        name, root = self.names
        return page([dict(id=name, object="model", created=self.created, owned_by="nano-pensieve", root=root,
                          max_model_len=self.engine.scheduler.limit)], False)

    def _options(self, given) -> dict:
        """The engine's keywords. APIError for a model that is not ours."""
        if given.get("model", self.names[0]) not in self.names:
            raise APIError(404, f"there is no model {given['model']!r} here: use {self.names[0]!r}", "model", "model_not_found")
        options = {name: given[name] for name in SETTINGS if name in given}
        if "logit_bias" in given:
            options["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        return options

    def _turn(self, owner, id) -> Turn:
        turn = self.history.turn(id.removeprefix("resp_")) if id.startswith("resp_") else None
        if not turn or not turn.conversation.startswith(owner):
            raise missing("finished response", id)
        return turn

    def _unfinished(self, owner, id) -> LiveTurn | None:
        """One that is not stored is nobody's but its connection's."""
        handle = self.sessions.find(id.removeprefix("resp_")) if id.startswith("resp_") else None
        return handle if handle and handle.conversation is not None and handle.conversation.startswith(owner) else None

    def _update(self, owner, id, **changes):
        if not self.sessions.update(owner + id, **changes):
            raise missing("conversation", id)

    def _conversation(self, owner, id) -> ConversationRecord:
        if not (found := self.history.record(owner + id)):
            raise missing("conversation", id)
        return found


def missing(what: str, id: str) -> APIError:
    return APIError(404, f"there is no {what} {id!r:.100} here", "id")


def seeded(options: dict, n: int) -> list[dict]:
    """The engine's keywords for each of n choices: with a seed, choice i draws with seed + i; without, each with one of its own."""
    if "seed" not in options:
        return [options] * n
    if options["seed"] + n - 1 > LIMITS["seed"][1]:
        raise APIError(400, f"seed + n - 1 must be at most {LIMITS['seed'][1]}, got seed {options['seed']} and n {n}", "seed")
    return [dict(options, seed=options["seed"] + index) for index in range(n)]


def plain(message: dict) -> dict:
    """A message whose content is one string: parts are joined."""
    content = message["content"]
    return dict(role=message["role"], content=content if isinstance(content, str) else "".join(part["text"] for part in content))


def identified(message: dict) -> dict:
    return dict(plain(message), id=f"msg_{new_id()}")


# ---------------------------------------------------------------------------------------------------------------------
# What is answered.

ECHOED = dict(instructions=None, metadata={}, max_output_tokens=None, previous_response_id=None, temperature=0.0, top_p=1.0, truncation="disabled", store=True)
STATUS = dict(stop="completed", length="incomplete", cancelled="cancelled")      # of a response, by its turn's finish_reason


def item(message: dict, status: str = "completed", logprobs: list = []) -> dict:
    part = dict(text=message["content"])
    part |= dict(type="output_text", annotations=[], logprobs=logprobs) if message["role"] == "assistant" else dict(type="input_text")
    return dict(id=message["id"], type="message", role=message["role"], status=status, content=[part])


def page(data: list[dict], has_more: bool) -> dict:
    ends = dict(first_id=data[0]["id"], last_id=data[-1]["id"]) if data else dict(first_id=None, last_id=None)
    return dict(object="list", data=data, has_more=has_more, **ends)


def sources(usage: dict) -> dict:
    """gpu + cpu + recomputed + new == the prompt's tokens."""
    return dict(cached_tokens=usage["gpu"] + usage["cpu"], **{name: usage[name] for name in ("gpu", "cpu", "recomputed", "new")})


def response(turn_id: str, model: str, created: float, conversation: str | None, note: dict, status: str, output: list, usage: dict | None,
             error: dict | None = None) -> dict:
    if usage:
        prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
        details = dict(sources(usage), cache_write_tokens=usage["recomputed"] + usage["new"])
        usage = dict(input_tokens=prompt, input_tokens_details=details, output_tokens=generated, total_tokens=prompt + generated,
                     output_tokens_details=dict(reasoning_tokens=0))
    return dict(id=f"resp_{turn_id}", object="response", created_at=note.get("created_at", int(created)), model=model, status=status, error=error,
                incomplete_details=dict(reason="max_output_tokens") if status == "incomplete" else None, output=output, usage=usage,
                conversation=conversation and dict(id=conversation), background=False, parallel_tool_calls=False, tool_choice="none", tools=[],
                text=dict(format=dict(type="text")), **{name: note.get(name, default) for name, default in ECHOED.items()})


def logprobs_of(handle: LiveTurn, first: int, last: int | None = None) -> list[dict]:
    """Of the tokens from number `first` on, up to number `last`, that have text, if they were asked for."""
    def entry(token, value):
        piece = pieces[token]
        return dict(token=piece.decode(errors="replace"), logprob=max(value, -9999.0), bytes=list(piece))
    pieces = handle.tokenizer.pieces
    return [dict(entry(token, value), top_logprobs=[entry(*other) for other in top if other[0] in pieces])
            for token, (value, top) in zip(handle.token_ids[first:last], (handle.logprobs or [])[first:last]) if token in pieces]


class Writer:
    """An answer that is being generated, by one turn or several: `whole(*replies)` in one piece, or `events(finish)` of a stream, of which
    `failure` is the last if one occurs. finish: waits until a turn is in the history, and returns its reply."""
    handles: list[LiveTurn]
    stream: bool


class ChatWriter(Writer):
    """Each choice is a turn of its own: the first goes on in the conversation, the others are branches of the same turn, and whichever
    the client resends is recognised. Their prompt is computed once, but for the part of a chunk at its end."""

    def __init__(self, handles: list[LiveTurn], owner: str, model: str, given: dict):
        self.handles, self.stream = handles, given.get("stream", False)
        self.told = [0] * len(handles)                       # of each the log probabilities of so many tokens
        self.conversation = handles[0].conversation.removeprefix(owner)
        self.include_usage = given.get("stream_options", {}).get("include_usage", False)
        self.envelope = dict(id=f"chatcmpl-{handles[0].id}", created=int(time.time()), model=model, conversation_id=self.conversation)

    def events(self, finish):
        """All choices are generated at once, and told one after another."""
        replies = []
        for index, handle in enumerate(self.handles):
            yield self.event(index, dict(role="assistant", content=""), 0)
            for text, told in handle.progress():
                yield self.event(index, dict(content=text), told)
            replies.append(finish(handle))
            yield (last := self.event(index, {}, finish_reason=self.reason(replies[-1])))
        if self.include_usage:
            yield dict(last, choices=[], usage=self.usage(*replies))
        yield "[DONE]"

    def event(self, index: int, delta: dict, told: int | None = None, finish_reason: str | None = None) -> dict:
        """told: the tokens that have been told with this one; None: all."""
        handle = self.handles[index]
        logprobs, self.told[index] = self.logprobs(handle, self.told[index], told), told
        usage = dict(usage=None) if self.include_usage else {}
        choice = dict(index=index, delta=delta, finish_reason=finish_reason, logprobs=logprobs)
        return dict(self.envelope, object="chat.completion.chunk", choices=[choice], **usage)

    def failure(self, error: APIError) -> dict:
        return error.body

    def whole(self, *replies: Answer) -> dict:
        choices = [dict(index=index, message=dict(role="assistant", content=reply.text, refusal=None), finish_reason=self.reason(reply),
                        logprobs=self.logprobs(handle, 0)) for index, (handle, reply) in enumerate(zip(self.handles, replies))]
        return dict(self.envelope, object="chat.completion", usage=self.usage(*replies), choices=choices)

    def reason(self, reply: Answer) -> str:
        if reply.finish_reason == "cancelled":              # the format has no word for it
            raise APIError(409, "the turn was cancelled, or its conversation deleted", code="cancelled")
        return reply.finish_reason

    def logprobs(self, handle: LiveTurn, first: int, last: int | None = None) -> dict | None:
        return dict(content=logprobs_of(handle, first, last), refusal=None) if handle.logprobs is not None else None

    def usage(self, first: Answer, *others: Answer) -> dict:
        """The prompt counts once, as the first choice found it."""
        prompt, generated = first.usage["prompt_tokens"], sum(reply.usage["completion_tokens"] for reply in (first, *others))
        return dict(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated, prompt_tokens_details=sources(first.usage))


class ResponseWriter(Writer):
    """Its events are numbered."""

    def __init__(self, handle: LiveTurn, owner: str, model: str, stream: bool = False):
        self.handle, self.handles, self.model, self.stream, self.told = handle, [handle], model, stream, 0
        self.conversation = handle.conversation and handle.conversation.removeprefix(owner)
        self.created, self.numbers, self.item_id = time.time(), count(), f"msg_{handle.id}"

    def event(self, kind: str, **fields) -> dict:
        return dict(type=f"response.{kind}", sequence_number=next(self.numbers), **fields)

    def of_part(self, kind: str, **fields) -> dict:
        return self.event(kind, item_id=self.item_id, output_index=0, content_index=0, **fields)

    def item(self, text: str, status: str) -> dict:
        return item(dict(id=self.item_id, role="assistant", content=text), status, logprobs_of(self.handle, 0))

    def response(self, status: str, output: list = [], usage: dict | None = None, error: dict | None = None) -> dict:
        return response(self.handle.id, self.model, self.created, self.conversation, self.handle.note, status, output, usage, error)

    def events(self, finish):
        yield from self.opening()
        for text, told in self.handle.progress():
            yield self.piece(text, told)
        yield from self.closing(finish(self.handle))

    def opening(self) -> list:
        begun = self.item("", "in_progress")
        return [self.event("created", response=self.response("in_progress")), self.event("in_progress", response=self.response("in_progress")),
                self.event("output_item.added", output_index=0, item=dict(begun, content=[])),
                self.of_part("content_part.added", part=begun["content"][0])]

    def piece(self, text: str, told: int) -> dict:
        logprobs, self.told = logprobs_of(self.handle, self.told, told), told
        return self.of_part("output_text.delta", delta=text, logprobs=logprobs)

    def closing(self, reply: Answer) -> list:
        whole = self.whole(reply)
        done, = whole["output"]
        part, = done["content"]
        return [self.of_part("output_text.done", text=reply.text, logprobs=part["logprobs"]), self.of_part("content_part.done", part=part),
                self.event("output_item.done", output_index=0, item=done),
                self.event("completed" if whole["status"] == "completed" else "incomplete", response=whole)]

    def failure(self, error: APIError) -> dict:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        return self.event("failed", response=self.response("failed", error=dict(code=code, message=str(error))))

    def whole(self, reply: Answer) -> dict:
        status = STATUS[reply.finish_reason]
        return self.response(status, [self.item(reply.text, "completed" if status == "completed" else "incomplete")], reply.usage)
