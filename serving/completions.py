"""/v1/completions: a prompt that no template has written, continued. Nothing of it is remembered.

    text or ids --> ids --> LiveTurn, of which the history knows nothing --> text, log probabilities

Evaluations use it, such as lm-evaluation-harness: with `echo` and `logprobs` they read how likely
the tokens of the prompt itself are. The cache cannot tell that (scoring.py), so such a prompt is
computed as a whole. Every other prompt uses what earlier ones of the same client began with: in
a few-shot task the examples are computed once. For that the cache keeps the KV of the latest
prompts: see Sessions.keep_cached.

Invariant: the history has no trace of a completion.
"""
import codecs
import time
from collections.abc import Callable, Iterator
from functools import partial

from handles import Handle, Outbox
from scheduler import SOURCES
from serving.logprobs import LEAST, Report, Reports
from serving.operations import APIError, CompletionBody
from serving.sessions import Answer, LiveTurn, Plan, Sessions
from serving.tokenizer import TextStream


class Completions:
    """Begins the turns of completions."""

    def __init__(self, sessions: Sessions):
        self.sessions, self.engine = sessions, sessions.engine

    def begin(self, prefix: str, body: CompletionBody, options_of_each: list[dict]
              ) -> list[LiveTurn]:
        """The turns of all choices, those of the first prompt first. options_of_each: the engine's,
        for each choice of a prompt."""
        if (tokenizer := self.sessions.tokenizer) is None:
            raise APIError(400, "this model has no tokenizer, so it cannot answer with text")
        turns: list[LiveTurn] = []
        try:
            for index, prompt in enumerate(body.prompt):
                ids = tokenizer.as_written(prompt) if isinstance(prompt, str) else prompt
                if not ids:
                    raise APIError(400, f"prompt[{index}] should have at least one token", "prompt")
                if (largest := max(ids)) >= (tokens := self.engine.worker.vocab_size):
                    raise APIError(400, f"prompt[{index}] should have token ids below {tokens}, got "
                                        f"{largest}", "prompt")
                first = self._submit(prefix, body, ids, options_of_each[0])
                turns.append(first)
                turns += [self._submit(prefix, body, ids, options, like=first.handle)
                          for options in options_of_each[1:]]
        except Exception:                           # the client gets this error, and no choice
            for turn in turns:
                turn.cancel()
            raise
        return turns

    def _submit(self, prefix: str, body: CompletionBody, ids: list[int], options: dict,
                like: Handle | None = None) -> LiveTurn:
        """like: the first choice of this prompt. The others keep nothing, and ask for no log
        probabilities of the prompt.

        The engine samples a token in any case. If max_tokens is 0, we do not show it."""
        stop = options.get("stop") or []
        live = LiveTurn(self.sessions.new_id(), self.engine, self.sessions.tokenizer, stop)
        live.stream = TextStream(live.tokenizer, stop, goes_on=True)
        live.plan = Plan(prompt=ids, messages=[], after=None, carried=None,
                         note=dict(salt=body.cache_salt))
        live.min_tokens = options.get("min_tokens") or 0
        scores = body.logprobs if body.echo and not like else None
        # Without a name the cache forgets it at once. A scored prompt's other choices may need it.
        kept = not like and (scores is None or body.n > 1)
        name = f"{prefix}cmpl-{live.id}" if kept else None
        rest = {key: value for key, value in options.items() if key != "stop"}
        live.handle = self.engine.submit(
            ids, name, tenant=prefix + body.cache_salt, like=like, prompt_logprobs=scores,
            logprobs=body.logprobs, max_tokens=body.max_tokens or 1, reached_stop=live.add,
            on_end=partial(self._settle, live), **rest)
        return live

    def _settle(self, live: LiveTurn, handle: Handle):
        """The engine's owner calls this."""
        try:
            live.finish(handle.token_ids)
            live.completed_at = time.time()
            live.reply = Answer(**vars(handle.result()), text=live.text)
        except Exception as error:
            live.error = error
        live.texts.close()
        if handle.conversation and live.reply:
            self.sessions.keep_cached(handle.conversation)


class CompletionWriter:
    """Each choice is a turn: the n choices of the first prompt, then those of the second."""

    def __init__(self, turns: list[LiveTurn], model: str, body: CompletionBody):
        self.turns, self.body, self.stream = turns, body, body.stream
        self.index = 0          # of the choice that is being sent
        self.envelope = dict(id=f"cmpl-{turns[0].id}", object="text_completion",
                             created=int(time.time()), model=model)

    def whole(self, replies: list[Answer]) -> dict:
        choices = []
        for index, (turn, reply) in enumerate(zip(self.turns, replies)):
            sent = self._text_of(index)
            text = sent.begin() + sent.more(reply.text)
            choices.append(dict(index=index, text=text, finish_reason=finish_reason(reply),
                                logprobs=sent.last()))
        return dict(self.envelope, choices=choices, usage=self.usage())

    def events(self, finish: Callable[[LiveTurn], Answer]) -> Iterator[dict | str | Outbox]:
        """All choices are generated at once, but sent one after another."""
        for index, turn in enumerate(self.turns):
            self.index, sent = index, self._text_of(index)
            if self.body.echo:
                # At the first token the prompt is computed. (A stream's own thread begins each
                # turn: it may wait, and take its time with the prompt's log probabilities.)
                turn.handle.tokens.wait_beyond(0)
                yield self.chunk(index, sent.begin(), sent.logprobs())
            for text, _ in turn.progress(wait=False):
                if not text:
                    yield turn.texts
                elif text := sent.more(text):
                    yield self.chunk(index, text, sent.logprobs())
            reason = finish_reason(finish(turn))
            yield self.chunk(index, "", sent.last(), reason)
        if self.body.stream_options.include_usage:
            yield dict(self.envelope, choices=[], usage=self.usage())
        yield "[DONE]"

    def failure(self, error: APIError) -> dict:
        return error.body

    def still_here(self) -> dict:
        nothing = None if self.body.logprobs is None else dict(
            tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        return self.chunk(self.index, "", nothing)

    def chunk(self, index: int, text: str, logprobs: dict | None,
              finish_reason: str | None = None) -> dict:
        choice = dict(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        usage = dict(usage=None) if self.body.stream_options.include_usage else {}
        return dict(self.envelope, choices=[choice], **usage)

    def usage(self) -> dict:
        """Each prompt counts once, with the sources that its first choice had."""
        firsts = [turn.handle.request.usage for turn in self.turns[::self.body.n]]
        sources = {source: sum(usage[source] for usage in firsts) for source in SOURCES}
        prompt = sum(sources.values())
        generated = sum(len(turn.handle.token_ids) for turn in self.turns if self.body.max_tokens)
        return dict(prompt_tokens=prompt, completion_tokens=generated,
                    total_tokens=prompt + generated, prompt_tokens_details=prompt_details(sources))

    def _text_of(self, index: int) -> "ChoiceText":
        nth, n = index // self.body.n, self.body.n
        return ChoiceText(self.turns[index], self.turns[nth * n], self.body.prompt[nth], self.body)


class ChoiceText:
    """The text of one choice as it is sent, and the log probabilities of its tokens.

    Call begin() first, then more() for each piece of the reply, last() at the end. logprobs() gives
    those of the tokens in what was sent so far: it may follow begin() or more()."""

    def __init__(self, turn: LiveTurn, first: LiveTurn, prompt: str | list[int],
                 body: CompletionBody):
        """first: the first choice of the same prompt, which alone has the prompt's. prompt: as the
        client has sent it."""
        self.turn, self.first, self.prompt, self.body = turn, first, prompt, body
        self.tokenizer = turn.tokenizer
        self.reports = Reports(turn.tokenizer, turn.handle)
        self.reports.stream = TextStream(turn.tokenizer, goes_on=True)
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0                         # where in the text the next report's token begins
        self.characters = 0                     # of the reply that were sent
        self.unsent: list[tuple] = []           # the prompt's reports that were not sent

    def begin(self) -> str:
        """The prompt, if the client wants it back. Its first choice has computed it."""
        if not self.body.echo:
            return ""
        ids = self.turn.plan.prompt
        scores = self.first.handle.prompt_logprobs or [None] * len(ids)
        self.unsent = [(token, *(score or (None, []))) for token, score in zip(ids, scores)]
        spelled = b"".join(map(self.tokenizer.spelled, ids)).decode(errors="replace")
        if not isinstance(self.prompt, str):
            return spelled
        # Tokens that the tokenizer has put before the text stand at its beginning, all at 0.
        self.offset = len(self.prompt) - len(spelled)
        return self.prompt

    def more(self, text: str) -> str:
        """What is sent of a piece of the reply: all, unless no token was asked for."""
        text = text if self.body.max_tokens else ""
        self.characters += len(text)
        return text

    def logprobs(self) -> dict | None:
        """Of the tokens whose text begins in what was sent, and is not told yet."""
        return self._as_json(self.reports.before(self.characters))

    def last(self) -> dict | None:
        """Of all others."""
        rest = self.reports.last(self.turn.text, self.turn.stream.stopped)
        return self._as_json(rest if self.body.max_tokens else [])

    def _as_json(self, reports: list[Report]) -> dict | None:
        """In OpenAI's old form."""
        if self.body.logprobs is None:
            return None
        of_prompt, self.unsent = self.unsent, []
        offsets = [self._place(self.tokenizer.spelled(token)) for token, *_ in of_prompt]
        # the text of a reply has no special tokens
        offsets += [self._place(self.tokenizer.pieces.get(token, b"")) for token, *_ in reports]
        told = of_prompt + reports
        return dict(tokens=[self._name(token) for token, *_ in told],
                    token_logprobs=[logprob and max(LEAST, logprob) for _, logprob, _ in told],
                    top_logprobs=[self._most_likely(*report) for report in told],
                    text_offset=offsets)

    def _place(self, content: bytes) -> int:
        """Where the text of the next token begins."""
        start = self.offset
        self.offset += len(self.utf8.decode(content))
        return max(start, 0)

    def _most_likely(self, token: int, logprob: float | None, others: list) -> dict | None:
        """Text -> log probability of the most likely tokens, and of the token itself. Of two tokens
        with one text the likelier one counts."""
        if logprob is None:
            return None
        by_text: dict[str, float] = {}
        for one, value in [*others, (token, logprob)]:
            by_text.setdefault(self._name(one), max(LEAST, value))
        return by_text

    def _name(self, token: int) -> str:
        """Its text. Bytes that are no whole characters are written as OpenAI does: bytes:\\xf0."""
        content = self.tokenizer.spelled(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(rf"\x{byte:02x}" for byte in content)


def finish_reason(reply: Answer) -> str:
    """APIError for a turn that was cancelled: completions have no word for it."""
    if reply.finish_reason == "cancelled":
        raise APIError(409, "the turn was cancelled, or its conversation deleted", code="cancelled")
    return reply.finish_reason


def prompt_details(usage: dict) -> dict:
    """Where the prompt's tokens came from: gpu + cpu + recomputed + new is their number."""
    sources = {source: usage[source] for source in SOURCES}
    return dict(sources, cached_tokens=usage["gpu"] + usage["cpu"])
