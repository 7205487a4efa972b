"""Anyone's chat server, driven like an engine, over HTTP: `python bench.py serve`.

    resend      POST /v1/chat/completions with the whole visible history, as every chat client does
    stateful    POST /v1/responses with the new message and previous_response_id, where it exists

`RemoteEngine` offers what `experiments.run.drive` needs of an engine: submit, step and clock. Each
turn reads its stream in a thread of its own.

The experiment plans prompts in tokens, but we do not know the server's tokenizer. So a
prompt consists of short English words, and two requests at the start tell how many
tokens the server makes of a word. Each RemoteEngine puts the words into an order of its own, so no
server has cached the beginning of a conversation from an earlier run.

A token counts from the moment at which it comes, also if it belongs to the model's thoughts. The
client does not resend thoughts.

Servers do not say where a context came from, beyond OpenAI's `cached_tokens`. Those count as "gpu"
here, and the other tokens as "new". (Our own server names every source.)

A turn of the workload may rewind its conversation, and go on from the first tokens of it. Here it
goes on from the messages of these tokens, of which the last may be cut. (With previous_response_id
it goes back to a whole reply, and resends what it keeps behind.)
"""
import io
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

from scheduler import SOURCES

WORDS = ("time year people way day man thing woman life child world school "
         "state family student group country problem hand part").split()
# Words of the longer of the two requests that measure tokens per word: all words twice, and one more.
PROBE = 2 * len(WORDS) + 1
SILENCE_SECONDS = 600       # without a byte of an answer: then the server is lost


class Said(NamedTuple):
    """A visible message of a conversation."""
    message: dict
    tokens: int                     # planned, or those of the reply, with its thoughts
    response: str | None = None     # the id of a response that ends with it


class RemoteTurn:
    """A turn under way. `experiments.run.drive` asks a handle for its request: this is both."""

    def __init__(self):
        self.request = self
        self.times: list[float] = []                # when each piece of text came, thoughts too
        self.text = ""                              # without thoughts
        self.response: str | None = None            # its id, in responses
        self.token_ids = ()                         # only its length is known
        self.usage: dict = {}
        self.error: ValueError | None = None

    def result(self) -> "RemoteTurn":
        """ValueError: the server refused the turn, or did not answer as it should."""
        if self.error:
            raise self.error
        return self


class RemoteEngine:
    """A running server. ValueError: it does not answer as it should."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None,
                 stateful: bool = False):
        """url: the server's, with or without /v1. key: its API key. model: None
        takes the first that it serves."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key, self.stateful = key, stateful
        self.clock = time.monotonic
        self.words = random.SystemRandom().sample(WORDS, len(WORDS))
        self.worker = SimpleNamespace(vocab_size=len(WORDS))  # `drive` draws prompts from this many
        self.threads: list[threading.Thread] = []       # one for each turn
        self.histories: dict[str, list[Said]] = {}      # by conversation
        self.tokens_per_word = 1.0
        with self.sense_expected():
            with self.open("/v1/models") as answer:
                models = json.load(answer)["data"]
            served = next((one for one in models if one["id"] == model), models[0])
            self.model = model or served["id"]
            self.limit = served.get("max_model_len") or 4096         # tokens of the longest context
            # The chat template adds as many tokens to a long message as to a short one.
            one, many = self.probe(1), self.probe(PROBE)
            if many <= one:
                raise ValueError(f"{self.url} counts {many} prompt tokens in {PROBE} words, and "
                                 f"{one} in one: so we cannot make prompts of a given length")
            self.tokens_per_word = (many - one) / (PROBE - 1)

    @contextmanager
    def sense_expected(self):
        """Whatever in the server's answer breaks the block, the error is a ValueError."""
        try:
            yield
        except Exception as error:
            if type(error) is ValueError:               # ours: it says already what is wrong
                raise
            raise ValueError(f"{self.url} did not answer as it should: {error!r}") from error

    def probe(self, words: int) -> int:
        """The prompt tokens of a message of so many words."""
        turn = RemoteTurn()
        numbers = [number % len(WORDS) for number in range(words)]
        history = [Said(self.message(numbers), words)]
        self.run(turn, history, {}, max_tokens=1, on_end=lambda turn: None)
        return turn.result().usage["prompt_tokens"]

    def message(self, prompt: list[int]) -> dict:
        """A user's message of about len(prompt) tokens. Each number
        below len(WORDS) names one of our words."""
        count = max(1, round(len(prompt) / self.tokens_per_word))
        return dict(role="user", content=" ".join(self.words[number] for number in prompt[:count]))

    def submit(self, prompt: list[int], conversation: str, max_tokens: int, ignore_eos: bool,
               on_end: Callable[[RemoteTurn], None], context: Sequence[int] = (),
               parent: str | None = None, tenant: str | None = None) -> RemoteTurn:
        """parent: the turn begins a new conversation with the first len(context) tokens of this
        one, to which nobody returns. tenant: ignored; a server knows its users by their keys."""
        if parent:
            self.histories[conversation] = beginning(self.histories.pop(parent), len(context))
        history = self.histories.setdefault(conversation, [])
        said = Said(self.message(prompt), len(prompt))
        if history and history[-1].message["role"] == "user":       # the beginning of one
            said = joined(history.pop(), said)
        history.append(said)
        turn, extra = RemoteTurn(), dict(ignore_eos=ignore_eos, temperature=0)
        arguments = turn, history, extra, max_tokens, on_end
        thread = threading.Thread(target=self.run, args=arguments, daemon=True)
        self.threads.append(thread)
        thread.start()
        return turn

    def close(self):
        """Wait until the server has answered all turns: they must not slow down what comes next."""
        for thread in self.threads:
            thread.join()

    def step(self):
        """The server steps by itself; wait a millisecond."""
        time.sleep(1e-3)

    # ---- one turn, in its thread

    def run(self, turn: RemoteTurn, history: list[Said], extra: dict, max_tokens: int,
            on_end: Callable[[RemoteTurn], None]):
        """Post the last message of the history; the reply joins it."""
        post = self.respond if self.stateful else self.resend
        try:
            with self.sense_expected():
                post(turn, history, extra, max_tokens)
                if not turn.usage:
                    raise ValueError(f"{self.url} sends no usage at the end of a stream: so we "
                                     "cannot count its tokens")
                turn.times = turn.times or [self.clock()]           # a reply without text
                turn.token_ids = range(turn.usage["completion_tokens"])
                reply = dict(role="assistant", content=turn.text)
                history.append(Said(reply, len(turn.token_ids), turn.response))
        except ValueError as error:
            turn.error = error
        on_end(turn)

    def resend(self, turn, history, extra, max_tokens):
        """A turn through chat completions."""
        body = dict(extra, messages=[said.message for said in history], max_tokens=max_tokens,
                    stream_options=dict(include_usage=True))
        for event in self.events("/v1/chat/completions", body):
            if told := event.get("usage"):
                turn.usage = usage(told["prompt_tokens"], told["completion_tokens"],
                                   told.get("prompt_tokens_details"))
            for choice in event["choices"]:
                pieces = {name: text for name, text in choice["delta"].items()
                          if name != "role" and isinstance(text, str) and text}
                if pieces:
                    turn.times.append(self.clock())
                turn.text += pieces.get("content", "")

    def respond(self, turn, history, extra, max_tokens):
        """A turn through responses."""
        start = max((n + 1 for n, said in enumerate(history) if said.response), default=0)
        new = [said.message for said in history[start:]]
        body = dict(extra, input=new if len(new) > 1 else new[0]["content"],
                    max_output_tokens=max_tokens,
                    previous_response_id=history[start - 1].response if start else None)
        for event in self.events("/v1/responses", body):
            if event["type"].endswith(".delta") and event["delta"]:
                turn.times.append(self.clock())
            if event["type"] == "response.output_text.delta":
                turn.text += event["delta"]
            elif event["type"] in ("response.completed", "response.incomplete"):
                if told := event["response"].get("usage"):
                    turn.usage = usage(told["input_tokens"], told["output_tokens"],
                                       told.get("input_tokens_details"))
                turn.response = event["response"]["id"]

    # ---- the wire

    def events(self, path: str, body: dict):
        """POST the body; yield the JSON events of the stream.
        ValueError: one of them is an error."""
        with self.open(path, dict(body, model=self.model, stream=True)) as answer:
            for data in event_data(io.TextIOWrapper(answer, "utf-8-sig")):
                if data.strip() == "[DONE]":
                    continue
                event = json.loads(data)
                if event.get("error") or event.get("type") == "response.failed":
                    raise ValueError(f"{self.url}{path}: {data[:500]}")
                yield event

    def open(self, path: str, body: dict | None = None):
        """The server's answer, to be read: to a POST of the body as
        JSON, or to a GET without one."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = json.dumps(body).encode() if body else None
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            return urllib.request.urlopen(request, timeout=SILENCE_SECONDS)
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            raise ValueError(f"{self.url}{path} answers {error.code}: {reason}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url} cannot be reached ({error}): start a server, "
                             "or name one with --url") from error


def beginning(history: list[Said], keep: int) -> list[Said]:
    """The messages of the first `keep` tokens. If the last one has 100 tokens and 30 of them are
    kept, so are 30% of its text."""
    kept = []
    for said in history:
        if said.tokens > keep > 0:
            text = said.message["content"]
            part = text[:round(len(text) * keep / said.tokens)]
            said = Said(dict(said.message, content=part), keep)
        if said.tokens > keep:              # nothing is left to keep
            break
        kept.append(said)
        keep -= said.tokens
    return kept


def joined(first: Said, second: Said) -> Said:
    """One message of both."""
    text = f"{first.message['content']} {second.message['content']}"
    return Said(dict(first.message, content=text), first.tokens + second.tokens)


def event_data(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event in a stream of server-sent events.

    An event ends at an empty line; what stands behind the last one is no whole event, and is left
    out. Its data may take several lines, each after "data:"; each keeps its end of line."""
    data = ""
    for line in lines:
        if line.startswith("data:"):
            data += line.removeprefix("data:")
        elif line == "\n" and data:
            yield data
            data = ""


def usage(prompt_tokens: int, completion_tokens: int, details: dict | None) -> dict:
    """The same fields as Reply.usage. details: where the server says the prompt's tokens came from."""
    details = details or {}
    sources = {source: details.get(source, 0) for source in SOURCES}
    if not any(sources.values()):                           # a server other than ours
        cached = details.get("cached_tokens") or 0
        sources |= dict(gpu=cached, new=prompt_tokens - cached)
    return dict(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, **sources)
