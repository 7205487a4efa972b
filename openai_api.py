"""OpenAI's wire format: what may be asked of the chat, in one table, and what is answered. No sockets here.

What is not supported is refused by name, never ignored: an option that is silently dropped is a wrong answer. The default
temperature is 0, not OpenAI's 1, so that answers repeat. `cached_tokens` are those whose KV came from either tier."""
import json
import reprlib
from typing import NamedTuple

from engine import Handle, Reply

GAUGES = ("running", "waiting", "conversations", "slots_total", "slots_free", "cpu_chunks_total", "cpu_chunks_free")


class APIError(Exception):
    """Is answered in OpenAI's shape. param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.body = status, dict(error=dict(message=message, type=kind, param=param, code=code))


def whole(low: int, high: int = 2**63 - 1):
    return lambda value: type(value) is int and low <= value <= high        # a bool is no number here


def number(low: float, high: float):
    return lambda value: type(value) in (int, float) and low <= value <= high


def text(longest: int):
    return lambda value: isinstance(value, str) and 0 < len(value) <= longest


def boolean(value) -> bool:
    return isinstance(value, bool)


def stop_strings(value) -> bool:
    return text(100)(value) or isinstance(value, list) and len(value) <= 4 and all(map(text(100), value))


def stream_options(value) -> bool:
    return isinstance(value, dict) and value.keys() <= {"include_usage"} and all(map(boolean, value.values()))


FIELDS = {                  # name: (what accepts it, what it must be); null means absent
    "model": (text(1000), "a model's name"),
    "messages": (lambda value: isinstance(value, list) and value, "a list of at least one message"),
    "max_tokens": (whole(1), "an integer of at least 1"),
    "max_completion_tokens": (whole(1), "an integer of at least 1"),
    "temperature": (number(0, 2), "a number from 0 to 2"),
    "top_p": (number(1e-6, 1), "a number above 0, at most 1"),
    "top_k": (whole(0), "an integer of at least 0"),
    "seed": (whole(-2**63), "an integer of 64 bits"),
    "stop": (stop_strings, "a string of 1 to 100 characters, or a list of at most 4"),
    "ignore_eos": (boolean, "true or false"),
    "stream": (boolean, "true or false"),
    "stream_options": (stream_options, "an object with include_usage, true or false, and nothing else"),
    "conversation_id": (text(200), "a string of 1 to 200 characters"),
    "n": (whole(1, 1), "1"),
    "frequency_penalty": (number(0, 0), "0"),
    "presence_penalty": (number(0, 0), "0"),
    "logprobs": (lambda value: value is False, "false"),
    "response_format": (lambda value: value == {"type": "text"}, "of type text"),
    **dict.fromkeys(("user", "metadata", "store"), (lambda value: True, "anything"))}       # these change no answer
OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")     # the engine's keywords


class ChatRequest(NamedTuple):
    messages: list[dict]        # {"role", "content"}, content a string
    hint: str | None
    stream: bool
    include_usage: bool
    options: dict


def parse_chat(body: dict, served: tuple[str, str]) -> ChatRequest:
    """served: the names that `model` may have. APIError for what is wrong, missing or not supported."""
    given = present(body, FIELDS)
    for name, value in given.items():
        accepts, what = FIELDS[name]
        if not accepts(value):
            raise APIError(400, f"{name} must be {what}, got {reprlib.repr(value)}", name)
    if "messages" not in given:
        raise APIError(400, "messages is missing: give a list of at least one message", "messages")
    if given.get("model", served[0]) not in served:
        raise APIError(404, f"there is no model {given['model']!r} here: use {served[0]!r}", "model", "model_not_found")
    if "max_completion_tokens" in given:                # the newer name of max_tokens
        given["max_tokens"] = given["max_completion_tokens"]
    messages = [parse_message(message, f"messages[{i}]") for i, message in enumerate(given["messages"])]
    return ChatRequest(messages, given.get("conversation_id"), given.get("stream", False),
                       given.get("stream_options", {}).get("include_usage", False),
                       {name: given[name] for name in OPTIONS if name in given})


def present(given: dict, known, where: str = "") -> dict:
    """The fields that are not null; all must be known."""
    given = {name: value for name, value in given.items() if value is not None}
    if unknown := [where + name[:100] for name in given if name not in known]:
        raise APIError(400, f"{', '.join(unknown[:5])}: not supported here, leave it out", unknown[0], "unsupported_parameter")
    return given


def parse_message(message, where: str) -> dict:
    """A role, and a content that is one string: parts of text are joined."""
    if not isinstance(message, dict):
        raise APIError(400, f"{where} must be an object with role and content, got {reprlib.repr(message)}", where)
    message = present(message, ("role", "content"), where + ".")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = "".join(map(parse_part, content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise APIError(400, f"{where} needs a role and a content, strings both, got {reprlib.repr(message)}", where)
    return dict(role=role, content=content)


def parse_part(part) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise APIError(400, f"a part of a content must be of type text and have a text, got {reprlib.repr(part)}", "messages")
    return part["text"]


def completion(envelope: dict, handle: Handle, reply: Reply) -> dict:
    """The answer in one piece. envelope: id, created, model."""
    message = dict(role="assistant", content=reply.text, refusal=None)
    return dict(**envelope, object="chat.completion", usage=usage(reply), conversation_id=handle.conversation,
                choices=[dict(index=0, message=message, finish_reason=reply.finish_reason, logprobs=None)])


def event(envelope: dict, delta: dict, finish_reason: str | None = None) -> dict:
    """One event of a streamed answer."""
    choice = dict(index=0, delta=delta, finish_reason=finish_reason, logprobs=None)
    return dict(**envelope, object="chat.completion.chunk", choices=[choice])


def usage(reply: Reply) -> dict:
    prompt, generated = reply.usage["prompt_tokens"], reply.usage["completion_tokens"]
    return dict(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated,
                prompt_tokens_details=dict(cached_tokens=reply.usage["gpu"] + reply.usage["cpu"]))


def prometheus(stats: dict, model: str) -> str:
    """The engine's stats: under vLLM's names where these mean the same, all under our own."""
    cached = stats["prompt_tokens_gpu"] + stats["prompt_tokens_cpu"]
    prompt = cached + stats["prompt_tokens_recomputed"] + stats["prompt_tokens_new"]
    gauges = {"vllm:num_requests_running": stats["running"], "vllm:num_requests_waiting": stats["waiting"],
              "vllm:kv_cache_usage_perc": 1 - stats["slots_free"] / stats["slots_total"]}
    counters = {"vllm:prefix_cache_queries_total": prompt, "vllm:prefix_cache_hits_total": cached, "vllm:prompt_tokens_total": prompt,
                "vllm:generation_tokens_total": stats["generated_tokens"], "vllm:num_preemptions_total": stats["suspensions"],
                "vllm:request_success_total": stats["finished"]}
    gauges |= {f"nano_pensieve:{name.removesuffix('_total')}": stats[name] for name in GAUGES}
    counters |= {f"nano_pensieve:{name}_total": value for name, value in stats.items() if name not in GAUGES}
    label = json.dumps(model, ensure_ascii=False)
    return "".join(f"# TYPE {name} {kind}\n{name}{{model_name={label}}} {value}\n"
                   for kind, values in (("gauge", gauges), ("counter", counters)) for name, value in values.items())
