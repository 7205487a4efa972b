"""Anyone's chat server, driven like an engine: what `python bench.py serve` measures.

    resend      POST /v1/chat/completions with the whole visible history, as every chat client does
    stateful    POST /v1/responses with the new message and previous_response_id, where the server has it

`RemoteEngine` has of Engine what bench.drive needs: submit, step, clock. A turn is a thread that reads a stream. A prompt of n tokens
is made of as many short words as the server's tokenizer makes about n tokens of, which one request tells at the start. What a server
does not tell (where a context came from, beyond OpenAI's cached_tokens) is counted as new."""
import json
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

from scheduler import SOURCES

WORDS = "time year people way day man thing woman life child world school state family student group country problem hand part".split()
PROBE = 50      # words


class RemoteTurn:
    """Stands for a Handle and for its Request."""

    def __init__(self):
        self.request, self.generated, self.finish_reason = self, [], None       # generated: when each piece of text came
        self.text, self.id, self.token_ids, self.usage, self.error = "", None, (), {}, None

    def result(self) -> "RemoteTurn":
        if self.error:
            raise self.error
        return self


class RemoteEngine:
    def __init__(self, url: str, key: str | None = None, model: str | None = None, stateful: bool = False, timeout: float = 600.0):
        """url: the server's, without /v1. model: by default the first that it serves. ValueError if it does not answer as it should."""
        self.url, self.key, self.stateful, self.timeout = url.rstrip("/").removesuffix("/v1"), key, stateful, timeout
        self.clock, self.worker = time.monotonic, SimpleNamespace(vocab_size=len(WORDS))
        with self.open("/v1/models") as answer:
            served = json.load(answer)["data"][0]
        self.model, self.limit = model or served["id"], served.get("max_model_len") or 4096
        self.histories: dict[str, list[dict]] = {}          # by conversation: its visible messages
        self.latest: dict[str, str] = {}                    # by conversation: its last response's id
        probe, self.tokens_per_word = RemoteTurn(), 1.0
        self.resend(probe, self.message([0] * PROBE), "", {}, 1)
        self.tokens_per_word = probe.usage["prompt_tokens"] / PROBE

    def message(self, prompt: list[int]) -> dict:
        words = [WORDS[token] for token in prompt[:max(1, round(len(prompt) / self.tokens_per_word))]]
        return dict(role="user", content=" ".join(words))

    def submit(self, prompt: list[int], conversation: str, max_tokens: int, ignore_eos: bool) -> RemoteTurn:
        turn, work = RemoteTurn(), self.respond if self.stateful else self.resend
        arguments = turn, work, self.message(prompt), conversation, dict(ignore_eos=ignore_eos), max_tokens
        threading.Thread(target=self.run, args=arguments, daemon=True).start()
        return turn

    def step(self):
        time.sleep(1e-3)

    # ---- one turn, in its thread

    def run(self, turn, work, message, conversation, extra, max_tokens):
        try:
            work(turn, message, conversation, extra, max_tokens)
            turn.generated = turn.generated or [self.clock()]               # a reply without text
            turn.token_ids = range(turn.usage["completion_tokens"])
        except Exception as error:
            turn.error = error if isinstance(error, ValueError) else ValueError(f"{self.url} did not answer as it should: {error!r}")
            turn.generated = [self.clock()]
        turn.finish_reason = "length"                                       # last: now the turn has ended

    def resend(self, turn, message, conversation, extra, max_tokens):
        history = self.histories.setdefault(conversation, [])
        history.append(message)
        body = dict(extra, messages=history, max_tokens=max_tokens, stream_options=dict(include_usage=True))
        for event in self.events("/v1/chat/completions", body):
            if event.get("usage"):
                turn.usage = usage(event["usage"], event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"], "prompt_tokens_details")
            for choice in event["choices"]:
                self.grow(turn, choice["delta"].get("content"))
        history.append(dict(role="assistant", content=turn.text))

    def respond(self, turn, message, conversation, extra, max_tokens):
        body = dict(extra, input=message["content"], max_output_tokens=max_tokens, previous_response_id=self.latest.get(conversation))
        for event in self.events("/v1/responses", body):
            if event["type"] == "response.output_text.delta":
                self.grow(turn, event["delta"])
            elif event["type"] in ("response.completed", "response.incomplete"):
                told = event["response"]["usage"]
                turn.usage = usage(told, told["input_tokens"], told["output_tokens"], "input_tokens_details")
                self.latest[conversation] = event["response"]["id"]

    def grow(self, turn, piece: str | None):
        if piece:
            turn.text += piece
            turn.generated.append(self.clock())

    # ---- the wire

    def events(self, path: str, body: dict):
        """The JSON events of a stream."""
        with self.open(path, dict(body, model=self.model, stream=True)) as answer:
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    event = json.loads(line[6:])
                    if event.get("error") or event.get("type") == "response.failed":
                        raise ValueError(f"{self.url}{path}: {line[6:500].decode()}")
                    yield event

    def open(self, path: str, body: dict | None = None):
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            request = urllib.request.Request(self.url + path, body and json.dumps(body).encode(), headers)
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            raise ValueError(f"{self.url}{path} answers {error.code}: {error.read(500).decode(errors='replace')}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url} cannot be reached ({error}): give --url a running server") from error


def usage(told: dict, prompt: int, completion: int, details: str) -> dict:
    """As Reply.usage: our own server tells every source, others what was cached at all."""
    details = told.get(details) or {}
    sources = {source: details.get(source, 0) for source in SOURCES}
    if not sum(sources.values()):
        sources |= dict(gpu=details.get("cached_tokens") or 0, new=prompt - (details.get("cached_tokens") or 0))
    return dict(prompt_tokens=prompt, completion_tokens=completion, **sources)
