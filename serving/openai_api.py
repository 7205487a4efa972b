"""OpenAI's wire format over one engine: the operations, and the JSON that answers them. No sockets
here.

A client has three ways to talk:

    chat completions    It sends its whole history every time. We recognise the history by its text.
    responses           It sends only its new messages, and names what they follow: a response (by
                        previous_response_id), or a conversation. Or it sends its whole history
                        here, too.
    completions         It sends a prompt, and nothing of it is kept: see completions.py.

A response is a turn of the history: `resp_X` is turn X. The settings of its request and its usage
are kept as the turn's note. Two responses that follow the same response are two branches.
`instructions` hold for one response: as long as they stay the same, they are the cached beginning
of the context; when they change, the whole context is computed again.

A client may offer tools, see tools.py. A reply with calls is one message of the history; in a
response its text and each call is an item: msg_X, fc_0_msg_X, fc_1_msg_X.

Some things differ from OpenAI. The default temperature is 0, not 1, so that answers repeat. Chat
completions are stored, too, unless `store` is false: else we could not recognise them.
`cached_tokens` counts the tokens whose KV came from either tier.

All conversations of one API key share what they begin with. Without API keys all clients are one
tenant: then `cached_tokens` tells a client whether somebody else has sent the same first 32 tokens.
A client that sends a `cache_salt` shares only with those that send the same one. (The first turn of
a conversation decides; its later turns and its branches stay with that salt.)
"""
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import dropwhile
from typing import Any, Literal

from handles import Outbox
from sampling import LIMITS
from scheduler import TooLong
from serving import live, tools
from serving.completions import Completions, CompletionWriter, finish_reason, prompt_details
from serving.history import ConversationRecord, StaleTurn, Turn
from serving.logprobs import Report, Reports, entries
from serving.operations import (APIError, ChatBody, CompletionBody, ConversationBody,
                                EngineOptions, FunctionCall, FunctionOutput, Item, ItemPart,
                                ItemReference, ItemsBody, ItemsQuery, Message, MetadataBody,
                                ResponseBody, ResponseQuery, Thoughts)
from serving.schemas import Grammar, Grammars, Unusable
from serving.sessions import Answer, Busy, LiveTurn, Sessions

LOGPROBS = "message.output_text.logprobs"       # in `include`
MOST_CALLS = 8          # of a reply that must call: a weak model would not stop by itself


class API:
    """Every public method answers one operation: it returns JSON, or the writer of a reply that is
    still being generated.

    prefix: the names of all conversations of one API key begin with it. A client never sees its
    prefix: we put it before every name that the client sends. So the client reaches nothing that
    belongs to another key. id: the client's name for something, without the prefix."""

    def __init__(self, sessions: Sessions, names: tuple[str, str]):
        """names: those that a client may call our model by. We use the first."""
        self.sessions, self.engine, self.history = sessions, sessions.engine, sessions.history
        self.names, self.model = names, names[0]
        worker = sessions.engine.worker
        self.grammars = Grammars(sessions.tokenizer, worker.vocab_size, worker.stop_ids)
        self.created = int(time.time())
        self.completions = Completions(sessions)

    # ---- replies

    def create_chat_completion(self, prefix: str, body: ChatBody) -> "ChatWriter":
        self.retrieve_model(prefix, body.model)
        options = self._options(body)
        options["max_tokens"] = body.max_completion_tokens or body.max_tokens
        options["grammar"] = self._grammar(body, body.response_format.asked,
                                           "response_format")
        if body.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        elif body.top_logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        messages = [plain(message) for message in body.messages]
        first_options, *other_options = options_of_choices(options, body.n)
        first = self.sessions.respond(messages, hint=body.hint(prefix), prefix=prefix,
                                      salt=body.cache_salt, keep=body.store,
                                      template_options=template_options(body), note=note_of(body),
                                      **first_options)
        turns = [first]
        try:
            for options in other_options:
                turns.append(self.sessions.another(first, prefix, **options))
        except Exception:                           # the client gets this error, and no choice
            for turn in turns:
                turn.cancel()
            raise
        return ChatWriter(turns, prefix, self.model, body)

    def create_completion(self, prefix: str, body: CompletionBody) -> CompletionWriter:
        self.retrieve_model(prefix, body.model)
        options_of_each = options_of_choices(self._options(body), body.n)
        return CompletionWriter(self.completions.begin(prefix, body, options_of_each), self.model,
                                body)

    def create_response(self, prefix: str, body: ResponseBody,
                        gone: Callable[[], bool]) -> "ResponseWriter":
        """gone: has the client hung up?"""
        options = self._options(body)
        options["grammar"] = self._grammar(body, body.text.format.asked, "text.format")
        note = body.model_dump(include=set(ECHOED), exclude_unset=True, by_alias=True) | note_of(body)
        if LOGPROBS in body.include or body.top_logprobs:
            options["logprobs"] = body.top_logprobs or 0
            note["logprobs"] = None                 # to be kept, see Sessions._commit
        turn = self.sessions.respond(**self._question(prefix, body), keep=body.store,
                                     note=dict(note, created_at=int(time.time())),
                                     wait=False,    # the server waits, see Handler.when_free
                                     gone=gone, **options)
        return ResponseWriter(turn, prefix, self.model, body.stream)

    def count_input_tokens(self, prefix: str, body: ResponseBody,
                           gone: Callable[[], bool]) -> dict:
        """The number of tokens that the reply to this body would see. Nothing is generated, but it
        takes the place of a turn: the messages are rendered and tokenised as for one."""
        plan = self.sessions.plan(**self._question(prefix, body), gone=gone)
        tokens = plan.context_length + len(plan.prompt)
        return dict(object="response.input_tokens", input_tokens=tokens)

    def retrieve_response(self, prefix: str, id: str, query: ResponseQuery) -> "dict | Replay":
        if unfinished := self._unfinished(prefix, id):
            writer = ResponseWriter(unfinished, prefix, self.model)
            told, events = writer.told, writer.events(lambda turn: turn.result())
            found = told.response("in_progress")
        else:
            told, found = self._stored(prefix, id, LOGPROBS in query.include)
            events = told.all(found)
        return Replay(told, events, query.starting_after) if query.stream else found

    def _stored(self, prefix: str, id: str, with_logprobs: bool) -> "tuple[ResponseEvents, dict]":
        """A response that is in the history."""
        turn = self._finished(prefix, id)
        note = dict(created_at=int(turn.created)) | json.loads(turn.note)
        told = ResponseEvents(turn.id, self.model, turn.conversation.removeprefix(prefix), note)
        items = self.history.items_of(turn.id)              # none for a turn of raw token ids
        message = items[-1] if items else dict(role="assistant", content="")
        reports = note.get("logprobs") if with_logprobs else None
        return told, told.whole(note["finish_reason"], message, note["usage"], turn.created,
                                entries(self.sessions.tokenizer, reports or ()))

    def list_input_items(self, prefix: str, id: str, query: ItemsQuery) -> dict:
        """All messages before the reply, those of earlier responses included."""
        turn_id = self._finished(prefix, id).id
        return listed(self.history.input_items, turn_id, query)

    def delete_response(self, prefix: str, id: str) -> dict:
        turn = self._unfinished(prefix, id)
        if turn:
            turn.cancel()
        if not turn or self.history.turn(turn.id):    # it may have ended before it was cancelled
            self.sessions.delete(self._finished(prefix, id))
        return dict(id=id, object="response", deleted=True)

    def cancel_response(self, prefix: str, id: str) -> dict:
        turn = self._unfinished(prefix, id)
        if not turn:
            self._finished(prefix, id)
            raise APIError(400, f"the response {id!r:.100} is finished: there is nothing to cancel")
        turn.cancel()
        return ResponseWriter(turn, prefix, self.model).whole([turn.result()])

    # ---- conversations

    def create_conversation(self, prefix: str, body: ConversationBody) -> dict:
        id = f"conv_{self.sessions.new_id()}"
        self.sessions.create(prefix + id, body.metadata, self._identified(body.items))
        return self.retrieve_conversation(prefix, id)

    def retrieve_conversation(self, prefix: str, id: str) -> dict:
        found = self._conversation(prefix, id)
        return dict(id=id, object="conversation", created_at=int(found.created),
                    metadata=found.metadata or {}, cache=self._cache_of(prefix, found))

    def update_conversation(self, prefix: str, id: str, body: MetadataBody) -> dict:
        if not self.sessions.update(prefix + id, metadata=body.metadata):
            raise missing("conversation", id)
        return self.retrieve_conversation(prefix, id)

    def delete_conversation(self, prefix: str, id: str) -> dict:
        self.sessions.forget(self._conversation(prefix, id).name)
        return dict(id=id, object="conversation.deleted", deleted=True)

    def warm_conversation(self, prefix: str, id: str) -> dict:
        """The client expects to send a turn soon. What will happen: see Engine.warm."""
        name = self._conversation(prefix, id).name
        try:
            hint = self.sessions.warm(name, prefix)
        except KeyError:                            # deleted at this moment
            raise missing("conversation", id) from None
        return dict(id=id, object="conversation.warmed", **hint)

    def create_items(self, prefix: str, id: str, body: ItemsBody) -> dict:
        new = self._identified(body.items)
        if not self.sessions.update(prefix + id, new=new):
            raise missing("conversation", id)
        return listing([item for message in new for item in items_of(message)])

    def _identified(self, messages: list[Item]) -> list[dict]:
        return [dict(plain(message), id=f"msg_{self.sessions.new_id()}") for message in messages]

    def list_items(self, prefix: str, id: str, query: ItemsQuery) -> dict:
        return listed(self.history.items, self._conversation(prefix, id).name, query)

    def retrieve_item(self, prefix: str, id: str, item_id: str) -> dict:
        message = self.history.item(self._conversation(prefix, id).name, message_id(item_id))
        items = items_of(message) if message else []
        if not (found := next((item for item in items if item["id"] == item_id), None)):
            raise missing("item", item_id, "item")
        return found

    def delete_item(self, prefix: str, id: str, item_id: str) -> dict:
        """With an item goes its whole message: the text of a reply, and all its calls."""
        if not self.sessions.delete_item(prefix + id, message_id(item_id)):
            raise missing("item", item_id, "item")
        return self.retrieve_conversation(prefix, id)

    # ---- models

    def list_models(self, prefix: str) -> dict:
        return listing([self.retrieve_model(prefix, self.model)])

    def retrieve_model(self, prefix: str, id: str | None) -> dict:
        """The model that we serve. APIError for any other."""
        if id and id not in self.names:
            raise APIError(404, f"there is no model {id!r:.100} here: use {self.model!r}", "model",
                           "model_not_found")
        return dict(id=self.model, object="model", created=self.created, owned_by="nano-pensieve",
                    root=self.names[-1], max_model_len=self.engine.scheduler.limit)

    # ---- what the operations share

    def _options(self, body: EngineOptions) -> dict:
        """For the engine."""
        options, tokens = body.engine_options(), self.engine.worker.vocab_size
        if options.get("logit_bias") and (largest := max(options["logit_bias"])) >= tokens:
            raise APIError(400, f"logit_bias should have token ids below {tokens}, got {largest}",
                           "logit_bias")
        return options

    def _grammar(self, body: ChatBody | ResponseBody, schema: dict | None,
                 field: str) -> Grammar | None:
        """What the reply must be. None: it may be any text. schema: of JSON, from that field."""
        functions, must_call = callable_by(body), body.tool_choice.mode == "required"
        one = body.parallel_tool_calls is False or body.tool_choice.type == "function"
        if must_call:
            schema, field = None, "tool_choice"
        try:
            if must_call or schema is not None and functions:
                return self.grammars.of_calls(functions, 1 if one else MOST_CALLS, schema)
            return None if schema is None else self.grammars.of_schema(schema)
        except Unusable as error:
            raise APIError(400, f"{field} cannot be served: {error}", field) from error

    def _question(self, prefix: str, body: ResponseBody) -> dict:
        """The messages to answer, and the turn that they follow, as keywords of Sessions.plan."""
        self.retrieve_model(prefix, body.model)
        name, after = self._followed(prefix, body)
        return dict(messages=joined([self._message(prefix, index, entry, name)
                                     for index, entry in enumerate(body.input)
                                     if not isinstance(entry, Thoughts)]),
                    conversation=name and prefix + name,
                    exists=True,    # a client may delete it between this look and the turn's claim
                    after=after,
                    hint=body.hint(prefix),
                    prefix=prefix,
                    salt=body.cache_salt,
                    instructions=body.instructions,
                    truncate=body.truncation == "auto",
                    template_options=template_options(body),
                    max_tokens=body.max_output_tokens)

    def _followed(self, prefix: str, body: ResponseBody) -> tuple[str | None, Turn | None]:
        """What the messages follow: a conversation (its id), or a turn, or neither."""
        name = body.conversation.id if body.conversation else None
        previous, after = body.previous_response_id, None
        if name and (previous or not body.store):
            raise APIError(400, f"conversation {name!r:.100} cannot be combined with "
                                "previous_response_id or store: false: leave out one of the two",
                           "conversation")
        if name and not self.sessions.record(prefix + name):
            raise missing("conversation", name, "conversation", 400)
        if previous and not (after := self._turn(prefix, turn_id_of(previous))):
            raise missing("finished response", previous, "previous_response_id", 400)
        return name, after

    def _message(self, prefix: str, index: int,
                 entry: Item | ItemReference | FunctionCall | FunctionOutput,
                 conversation: str | None) -> dict:
        """The message input[index], or the one that is referred to: of a turn, or kept by that
        conversation."""
        if not isinstance(entry, ItemReference):
            return plain(entry)
        id = message_id(entry.id)
        turn = self._turn(prefix, id.removeprefix("msg_").partition("_")[0])
        candidates = self.history.items_of(turn.id) if turn else ()
        message = next((item for item in candidates if item["id"] == id), None)
        if conversation and not message:
            message = self.history.item(prefix + conversation, id)
        part = part_of(message, entry.id) if message else None
        if not part:
            raise missing("item", entry.id, f"input[{index}].id")
        return part

    def _turn(self, prefix: str, turn_id: str) -> Turn | None:
        turn = self.history.turn(turn_id)
        return turn if turn and turn.conversation.startswith(prefix) else None

    def _finished(self, prefix: str, id: str) -> Turn:
        """The turn of a response that is in the history."""
        turn = self._turn(prefix, turn_id_of(id))
        if not turn:
            raise missing("finished response", id)
        return turn

    def _unfinished(self, prefix: str, id: str) -> LiveTurn | None:
        """The turn of a response that is still being written. A response with store: false has no
        conversation, so nobody finds it here: it belongs to its connection alone."""
        turn = self.sessions.find(turn_id_of(id))
        return turn if turn and turn.conversation.startswith(prefix) else None

    def _conversation(self, prefix: str, id: str) -> ConversationRecord:
        found = self.sessions.record(prefix + id)
        if not found:
            raise missing("conversation", id)
        return found

    def _cache_of(self, prefix: str, found: ConversationRecord) -> dict:
        """Where the conversation's tokens are: an answers.Portrait, also if nothing is cached."""
        id = found.name.removeprefix(prefix)
        if portrait := self.engine.call(partial(live.portrait_of, self.engine, found.name)):
            return dict(portrait, id=id)
        head = self.history.head(found.name)
        return dict(id=id, tokens=head.length if head else 0, gpu=0, cpu=0, running=False,
                    waiting=self.sessions.answering(found.name) is not None,
                    idle_seconds=round(time.time() - found.active, 3), chunks="", leaves_next=None)


def as_api_error(error: Exception, limit: int, messages_in: str | None = None) -> APIError:
    """The error that the client is told. An error that we did not foresee is our fault: we print
    it. limit: of a context. messages_in: the field that has the messages."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, StaleTurn):    # somebody deleted the turn while we answered
        return APIError(409, f"{error}: send the request again", code="cancelled")
    if isinstance(error, Busy):
        return APIError(409, str(error), code="conversation_locked")
    if isinstance(error, TooLong):
        return APIError(400, overflow(error, limit), messages_in, "context_length_exceeded")
    if isinstance(error, ValueError):    # the engine refuses an argument, see config.require
        name = str(error).partition(" must ")[0]
        return APIError(400, str(error), name if name in EngineOptions.model_fields else None)
    traceback.print_exception(error)
    return APIError(500, f"{type(error).__name__}: {error}")


def overflow(error: TooLong, limit: int) -> str:
    """In OpenAI's words, since other programs look for them, and then shorten the messages."""
    problem, remedy = str(error), "messages"
    if error.tokens and error.max_tokens:
        problem = (f"you requested {error.tokens + error.max_tokens} tokens ({error.tokens} in the "
                   f"messages, {error.max_tokens} in the completion)")
        remedy = "messages or completion"
    elif error.tokens:
        problem = f"your messages resulted in {error.tokens} tokens"
    return (f"This model's maximum context length is {limit} tokens. However, {problem}. "
            f"Please reduce the length of the {remedy}.")


def missing(kind: str, id: str, field: str = "id", status: int = 404) -> APIError:
    """field: where the client has named it."""
    code = None if status == 404 else f"{field.removesuffix('_id')}_not_found"
    return APIError(status, f"there is no {kind} {id!r:.100} here: it was deleted, or it never "
                            "existed", field, code)


def turn_id_of(response_id: str) -> str:
    """resp_X -> X. The result is "", which names no turn, if it is not the id of a response."""
    return response_id.removeprefix("resp_") if response_id.startswith("resp_") else ""


def options_of_choices(options: dict, n: int) -> list[dict]:
    """The engine's options for each of n choices. With a seed, choice i draws with seed + i.
    Without one, every choice draws with a random seed of its own."""
    if "seed" not in options:
        return [options] * n            # one dict: nobody changes it
    seed, largest = options["seed"], LIMITS["seed"][1]
    if seed + n - 1 > largest:
        raise APIError(400, f"seed + n - 1 must be at most {largest}, got seed {seed} and n {n}",
                       "seed")
    return [dict(options, seed=seed + index) for index in range(n)]


def plain(message: Message | Item | FunctionCall | FunctionOutput) -> dict:
    """The message as the engine knows it: its parts joined into one text. "developer" is OpenAI's
    newer name for "system". Many chat templates do not know it: Qwen's would leave the message
    out."""
    if isinstance(message, FunctionCall):
        call = dict(id=message.call_id, name=message.name, arguments=message.arguments)
        return dict(role="assistant", content="", tool_calls=[call])
    if isinstance(message, FunctionOutput):
        return dict(role="tool", content=text_of(message.output), tool_call_id=message.call_id)
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = dict(role=role, content=text_of(message.content))
    if isinstance(message, Message):
        if role == "assistant" and message.tool_calls:
            found["tool_calls"] = [dict(id=call.id, **call.function.model_dump())
                                   for call in message.tool_calls]
        if role == "tool" and message.tool_call_id:
            found["tool_call_id"] = message.tool_call_id
    return found


def text_of(parts: Iterable[ItemPart]) -> str:
    return "".join(part.text for part in parts)


def joined(messages: list[dict]) -> list[dict]:
    """A response's input names the text and each call of a reply one after another: they are one
    message. So a call without a text, behind the assistant's message, is a part of it."""
    whole = []
    for message in messages:
        calls, before = message.get("tool_calls"), whole[-1] if whole else None
        if calls and not message["content"] and before and before["role"] == "assistant":
            whole[-1] = dict(before, tool_calls=before.get("tool_calls", []) + calls)
        else:
            whole.append(message)
    return whole


def template_options(body: ChatBody | ResponseBody) -> dict:
    return dict(body.chat_template_kwargs or {}, tools=body.offer)


def callable_by(body: ChatBody | ResponseBody) -> list[dict]:
    """The functions that the reply may call. APIError if it must call one that is not offered."""
    choice, functions = body.tool_choice, body.offer
    if choice.mode == "none":
        return []
    if choice.tools is not None:
        offered = {tool["function"]["name"]: tool for tool in functions}
        chosen = list(dict.fromkeys(function.name for function in choice.tools))
        if unknown := [name for name in chosen if name not in offered]:
            raise APIError(400, f"tool_choice names {unknown[0]!r}, which is not in tools",
                           "tool_choice")
        functions = [offered[name] for name in chosen]
    if choice.mode == "required" and not functions:
        raise APIError(400, "tool_choice is 'required', but there are no tools", "tool_choice")
    return functions


def note_of(body: ChatBody | ResponseBody) -> dict:
    """What a turn's note says of its tools: see Sessions.respond."""
    if not body.tools:
        return {}
    return dict(callable=[tool["function"]["name"] for tool in callable_by(body)],
                tool_choice=body.tool_choice.told(),
                parallel_tool_calls=body.parallel_tool_calls is not False)


# --------------------------------------------------------------------------------------------------
# The JSON of answers.

# The fields of a request that its response repeats, with their defaults.
ECHOED = dict(instructions=None, metadata={}, max_output_tokens=None, previous_response_id=None,
              temperature=0.0, top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0,
              top_logprobs=0, truncation="disabled", store=True, tool_choice="none",
              parallel_tool_calls=False, user=None, safety_identifier=None, prompt_cache_key=None,
              text=dict(format=dict(type="text")))
# The fields that are always the same, since there is nothing to choose.
FIXED = dict(background=False, tools=[], max_tool_calls=None, reasoning=None,
             service_tier="default")
ENDS = "response.completed", "response.incomplete"      # the last event of a stream
# finish_reason of a turn -> status of its response, and of the item that holds the reply
STATUS = dict(stop=("completed", "completed"), length=("incomplete", "incomplete"),
              cancelled=("cancelled", "incomplete"))


def items_of(message: dict, status: str = "completed", logprobs: Iterable[dict] = ()) -> list[dict]:
    """A message of the history, which has an id: its text and each of its calls are an item."""
    id, calls = message["id"], message.get("tool_calls", ())
    if message["role"] == "tool":
        return [dict(id=id, type="function_call_output", call_id=message.get("tool_call_id", ""),
                     output=message["content"], status=status)]
    texts = [text_item(message, status, logprobs)] if message["content"] or not calls else []
    return texts + [dict(id=f"fc_{index}_{id}", type="function_call", call_id=call["id"],
                         name=call["name"], arguments=call["arguments"], status=status)
                    for index, call in enumerate(calls)]


def message_id(item_id: str) -> str:
    """Of the message that an item belongs to: fc_0_msg_T -> msg_T."""
    return re.sub("^fc_[0-9]+_", "", item_id)


def part_of(message: dict, item_id: str) -> dict | None:
    """The part of a message that is this item: one of its calls, or all but its calls."""
    if item_id not in [item["id"] for item in items_of(message)]:
        return None
    if item_id != message["id"]:
        nth = int(item_id.split("_")[1])
        return dict(role="assistant", content="", tool_calls=[message["tool_calls"][nth]])
    return {name: message[name] for name in ("role", "content", "tool_call_id") if name in message}


def text_item(message: dict, status: str = "completed", logprobs: Iterable[dict] = ()) -> dict:
    part = dict(type="input_text", text=message["content"])
    if message["role"] == "assistant":
        part = dict(type="output_text", text=message["content"], annotations=[],
                    logprobs=list(logprobs))
    return dict(id=message["id"], type="message", role=message["role"], status=status,
                content=[part])


def listing(data: list[dict], has_more: bool = False) -> dict:
    first_id, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return dict(object="list", data=data, has_more=has_more, first_id=first_id, last_id=last_id)


def listed(read: Callable, name: str, query: ItemsQuery) -> dict:
    """The items of the messages that read(name, ...) finds, at most query.limit of them. We ask for
    two messages more: that of the item `after`, and one that tells us whether there are more."""
    newest_first = query.order == "desc"
    start = query.after and message_id(query.after)
    items = [item for message in read(name, start, newest_first, query.limit + 2)
             for item in items_of(message)[::-1 if newest_first else 1]]
    if query.after:
        items = list(dropwhile(lambda item: item["id"] != query.after, items))[1:]
    return listing(items[:query.limit], has_more=len(items) > query.limit)


def response_usage(usage: dict) -> dict:
    prompt, generated = usage["prompt_tokens"], usage["completion_tokens"]
    details = dict(prompt_details(usage), cache_write_tokens=usage["recomputed"] + usage["new"])
    return dict(input_tokens=prompt, input_tokens_details=details, output_tokens=generated,
                output_tokens_details=dict(reasoning_tokens=0), total_tokens=prompt + generated)


# A writer writes the answer of its `turns` while they are generated.
#
#     whole(replies)     the answer in one piece; replies: of the turns, in order
#     events(finish)     the answer as a stream. It yields an outbox when nothing is new until that
#                        one has news; and after the last news of a turn once more. Then comes
#                        finish(turn), which waits until the history has stored the turn, and
#                        returns its reply.
#     failure(error)     the last event of a stream in which something went wrong
#     still_here()       an event that says nothing new, for a stream that is silent for long


class ChatWriter:
    """Each choice is a turn. The first one goes on in the conversation, the others are branches
    beside it. Their common prompt is computed once. The client may send any of them back, we
    recognise them all."""

    def __init__(self, turns: list[LiveTurn], prefix: str, model: str, body: ChatBody):
        self.turns, self.stream, self.options = turns, body.stream, body.stream_options
        self.index = 0          # of the choice that is being sent
        self.envelope = dict(id=f"chatcmpl-{turns[0].id}", created=int(time.time()), model=model,
                             conversation_id=conversation_of(turns[0], prefix))

    def whole(self, replies: list[Answer]) -> dict:
        choices = [dict(index=index, message=chat_message(turn.message),
                        finish_reason=reason_of(reply, turn.message),
                        logprobs=self.logprobs(turn, reports_of(turn)))
                   for index, (turn, reply) in enumerate(zip(self.turns, replies))]
        return dict(self.envelope, object="chat.completion", usage=self.usage(), choices=choices)

    def events(self, finish: Callable[[LiveTurn], Answer]) -> Iterator[dict | str | Outbox]:
        """All choices are generated at once, but sent one after another."""
        for index, turn in enumerate(self.turns):
            self.index, before = index, text_before(turn)
            reports = Reports(turn.tokenizer, turn.handle)
            yield self.chunk(index, dict(role="assistant", content=""), [], 0)
            for text, end in turn.progress(wait=False):
                if not text:
                    yield turn.texts
                elif text := before.push(text):
                    new = reports.before(before.length)
                    yield self.chunk(index, dict(content=text), new, end)
            reply, message = finish(turn), turn.message
            reason = reason_of(reply, message)
            if text := message["content"][before.length:]:
                new = reports.before(before.length + len(text))
                yield self.chunk(index, dict(content=text), new, None)
            for number, call in enumerate(chat_calls(message)):
                yield self.chunk(index, dict(tool_calls=[dict(call, index=number)]), [], None)
            rest = reports.last(turn.text, turn.stream.stopped)
            yield (last := self.chunk(index, {}, rest, None, reason))
        if self.options.include_usage:
            yield dict(last, choices=[], usage=self.usage())
        yield "[DONE]"

    def failure(self, error: APIError) -> dict:
        return error.body

    def still_here(self) -> dict:
        return self.chunk(self.index, {}, [], None)

    def chunk(self, index: int, delta: dict, reports: list[Report], end: int | None,
              finish_reason: str | None = None) -> dict:
        """end: so many tokens are sent. None: all."""
        choice = dict(index=index, delta=delta, finish_reason=finish_reason,
                      logprobs=self.logprobs(self.turns[index], reports))
        so_far = self.usage(index, end) if self.options.continuous_usage_stats else None
        usage = dict(usage=so_far) if self.options.include_usage else {}
        return dict(self.envelope, object="chat.completion.chunk", choices=[choice], **usage)

    def logprobs(self, turn: LiveTurn, reports: list[Report]) -> dict | None:
        """None if the client has not asked for them."""
        if turn.handle.logprobs is None:
            return None
        return dict(content=entries(turn.tokenizer, reports), refusal=None)

    def usage(self, index: int | None = None, end: int | None = None) -> dict | None:
        """The usage of all that we have sent: the first `end` tokens of choice `index`, by default
        of the last choice, and all tokens of the choices before it. The prompt counts once, with
        the sources that the first choice had. None before the engine has admitted the first
        choice."""
        request = self.turns[0].handle.request
        if not (request and request.usage):
            return None
        prompt = sum(request.usage.values())
        *before, last = self.turns if index is None else self.turns[:index + 1]
        generated = sum(len(turn.handle.token_ids) for turn in before)
        generated += len(last.handle.token_ids[:end])
        return dict(prompt_tokens=prompt, completion_tokens=generated,
                    total_tokens=prompt + generated,
                    prompt_tokens_details=prompt_details(request.usage))


def conversation_of(turn: LiveTurn, prefix: str) -> str | None:
    """The client's name for the turn's conversation. None: nothing is kept of the turn."""
    return turn.conversation and turn.conversation.removeprefix(prefix)


def text_before(turn: LiveTurn) -> tools.TextBefore:
    """The turn's text as a stream may tell it."""
    return tools.TextBefore(turn.tokenizer.tool_form, turn.callable)


def chat_message(message: dict) -> dict:
    shown = dict(role="assistant", content=message["content"], refusal=None)
    if calls := chat_calls(message):
        shown |= dict(content=message["content"] or None, tool_calls=calls)
    return shown


def chat_calls(message: dict) -> list[dict]:
    return [dict(id=call["id"], type="function",
                 function=dict(name=call["name"], arguments=call["arguments"]))
            for call in message.get("tool_calls", ())]


def reason_of(reply: Answer, message: dict) -> str:
    """Why the reply ended. APIError as for completions."""
    reason = finish_reason(reply)
    return "tool_calls" if reason == "stop" and "tool_calls" in message else reason


def reports_of(turn: LiveTurn) -> list[Report]:
    """Of a turn that has settled."""
    return Reports(turn.tokenizer, turn.handle).last(turn.text, turn.stream.stopped)


class ResponseEvents:
    """The JSON of one response, and its events. They are numbered from 0 on. A delta has the number
    of its last character: so a character has the same number in every stream of this response,
    however its text is cut into deltas. The reply "Hello.", with two deltas and with one:

        created 0    in_progress 1    output_item.added 2    content_part.added 3
        "Hel" 6 "lo." 9      or      "Hello." 9
        output_text.done 10    content_part.done 11    output_item.done 12    completed 13
    """

    def __init__(self, turn_id: str, model: str, conversation: str | None, note: dict):
        """note: the turn's, which has the settings of the request."""
        self.turn_id, self.model, self.conversation, self.note = turn_id, model, conversation, note
        self.number = -1                    # of the last event
        self.message_id = f"msg_{turn_id}"
        self.opened = False                 # do the events have the reply's message?
        self.length = self.reported = 0     # how much of its text, and how many log probabilities

    def response(self, status: str, output: Sequence[dict] = (), usage: dict | None = None,
                 error: dict | None = None, ended: float | None = None) -> dict:
        """usage: the engine's. ended: the moment when the turn settled, in seconds since 1970."""
        incomplete = dict(reason="max_output_tokens") if status == "incomplete" else None
        return dict(
            FIXED, id=f"resp_{self.turn_id}", object="response", model=self.model, status=status,
            created_at=self.note["created_at"], incomplete_details=incomplete, error=error,
            completed_at=int(ended) if status == "completed" else None,
            output=list(output), usage=usage and response_usage(usage),
            conversation=self.conversation and dict(id=self.conversation),
            **{name: self.note.get(name, default) for name, default in ECHOED.items()})

    def whole(self, finish_reason: str, message: dict, usage: dict, ended: float,
              logprobs: Iterable[dict]) -> dict:
        """The response, once its turn has settled."""
        status, item_status = STATUS[finish_reason]
        output = items_of(dict(message, id=self.message_id), item_status, logprobs)
        return self.response(status, output, usage, ended=ended)

    def all(self, whole: dict) -> Iterator[dict]:
        yield from self.opening()
        yield from self.closing(whole)

    def opening(self) -> Iterator[dict]:
        yield self.event("created", response=self.response("in_progress"))
        yield self.event("in_progress", response=self.response("in_progress"))

    def text(self, text: str, logprobs: list[dict]) -> Iterator[dict]:
        """More text of the reply. Its message begins with the first text."""
        if not self.opened:
            item = text_item(dict(id=self.message_id, role="assistant", content=""), "in_progress")
            yield self.event("output_item.added", output_index=0, item=dict(item, content=[]))
            yield self.part_event("content_part.added", part=item["content"][0])
        self.opened, self.length = True, self.length + len(text)
        self.reported += len(logprobs)
        if text:
            self.number += len(text) - 1        # `event` adds one more: a number for each character
            yield self.part_event("output_text.delta", delta=text, logprobs=logprobs)

    def closing(self, whole: dict) -> Iterator[dict]:
        """What is left to tell."""
        for index, item in enumerate(whole["output"]):
            yield from (self.message_end(item) if item["type"] == "message"
                        else self.call(index, item))
            yield self.event("output_item.done", output_index=index, item=item)
        yield self.event("completed" if whole["status"] == "completed" else "incomplete",
                         response=whole)

    def message_end(self, item: dict) -> Iterator[dict]:
        part, = item["content"]
        rest = part["text"][self.length:]
        if rest or not self.opened:
            yield from self.text(rest, part["logprobs"][self.reported:])
        yield self.part_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self.part_event("content_part.done", part=part)

    def call(self, index: int, item: dict) -> Iterator[dict]:
        place = dict(item_id=item["id"], output_index=index)
        begun = dict(item, arguments="", status="in_progress")
        yield self.event("output_item.added", output_index=index, item=begun)
        yield self.event("function_call_arguments.delta", delta=item["arguments"], **place)
        yield self.event("function_call_arguments.done", name=item["name"],
                         arguments=item["arguments"], **place)

    def failure(self, error: APIError) -> dict:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        problem = dict(code=code, message=str(error))
        return self.event("failed", response=self.response("failed", error=problem))

    def still_here(self) -> dict:
        """The second event of `opening` once more, under the number of the latest event: a client
        that goes on from there misses nothing, and gets nothing twice."""
        return dict(type="response.in_progress", sequence_number=self.number,
                    response=self.response("in_progress"))

    def event(self, kind: str, **fields) -> dict:
        self.number += 1
        return dict(type=f"response.{kind}", sequence_number=self.number, **fields)

    def part_event(self, kind: str, **fields) -> dict:
        """An event of the message's only part. A message is the first item."""
        return self.event(kind, item_id=self.message_id, output_index=0, content_index=0,
                          **fields)


class ResponseWriter:
    """A response is one turn."""

    def __init__(self, turn: LiveTurn, prefix: str, model: str, stream: bool = False):
        self.turn, self.turns, self.stream = turn, [turn], stream
        note = dict(created_at=int(time.time())) | turn.plan.note
        self.told = ResponseEvents(turn.id, model, conversation_of(turn, prefix), note)
        self.failure, self.still_here = self.told.failure, self.told.still_here

    def whole(self, replies: list[Answer]) -> dict:
        reply, = replies
        logprobs = entries(self.turn.tokenizer, reports_of(self.turn))
        return self.told.whole(reply.finish_reason, self.turn.message, reply.usage,
                               self.turn.completed_at, logprobs)

    def events(self, finish: Callable[[LiveTurn], Answer]) -> Iterator[dict | Outbox]:
        reports, before = Reports(self.turn.tokenizer, self.turn.handle), text_before(self.turn)
        yield from self.told.opening()
        for text, _ in self.turn.progress(wait=False):
            if not text:
                yield self.turn.texts
            elif text := before.push(text):
                new = entries(self.turn.tokenizer, reports.before(before.length))
                yield from self.told.text(text, new)
        yield from self.told.closing(self.whole([finish(self.turn)]))


class Replay:
    """The events of a response once more. Whoever stops reading them ends nothing."""
    turns: tuple = ()
    stream: Literal[True] = True

    def __init__(self, told: ResponseEvents, events: Iterator[dict | Outbox], after: int):
        """after: the number of the last event that is left out. But the event that ends a response
        always comes."""
        self.failure, self.told = told.failure, told
        self.replayed, self.after = events, after

    def still_here(self) -> dict:
        return dict(self.told.still_here(), sequence_number=max(self.told.number, self.after))

    def events(self, finish: Callable[[LiveTurn], Answer]) -> Iterator[dict | Outbox]:
        for event in self.replayed:
            if isinstance(event, Outbox) or event["type"] in ENDS:
                yield event
            elif (new := event["sequence_number"] - self.after) > 0:
                # Of a text delta, which has a number for each character, the new ones alone. (Its
                # log probabilities come whole.)
                is_text = event["type"] == "response.output_text.delta"
                yield dict(event, delta=event["delta"][-new:]) if is_text else event


Writer = ChatWriter | CompletionWriter | ResponseWriter | Replay
