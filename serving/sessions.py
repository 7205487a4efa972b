"""Conversations as clients know them: text, names, and turns that survive a crash.

    client's thread     claim the conversation, read its history, tokenise, submit -> ... read the text
    engine's thread                       turn each token of the reply into text  -> ... end
    writing thread                                              commit the turn, tell the client

`Sessions` has an engine, which knows token ids; a history, which keeps turns; and a tokenizer. From
the messages of a client it makes a turn: which token ids to append to which conversation. Tokens
that are cached must never be tokenised again, since other ids for the same text would be another
prefix. So we tokenise only new messages. A client that resends its whole history is recognised by
the text; a client that sends only new messages says after which turn. The turn goes on in the
conversation that ends there, or branches off.

A turn *claims* its conversation, so a conversation has at most one live turn. If the client names
the conversation, the turn claims it before it reads the history; else afterwards, when it knows
which turn it follows. In the end the turn *settles*: it is committed (or cancelled, or failed). It
frees the conversation and then tells its readers, so a reader who is told can start the next turn
at once.

Commits are made in a thread of their own. While another process holds the history's file, only that
thread waits: all streams go on, and new turns begin. Without `start()` there is no such thread, and
whoever steps the engine commits, too.

One turn is four objects. A LiveTurn has a Handle, which has a Request. They end in this order:

    Request     scheduler.py    ends: no more tokens are computed
    Handle      handles.py      closes: the readers of token ids are told
    LiveTurn    here            settles: it is committed, then the readers of text are told
    Turn        history.py      is what the commit has stored

Invariants:
- A turn is committed before its readers are told that it is done, and before the next turn of its
  conversation starts.
- A turn that fails, is cancelled, or cannot be committed leaves no trace in the history, and none
  of its tokens in the cache. (If it restarted the context, the next turn computes the old context
  again.)
- The context of a turn is what the template shows of its messages and of those before it:

      user "Hi", assistant "Hello.", user "More"
      <user>Hi<end><assistant>Hello.<end><user>More<end><assistant>

  The context may differ in blanks around a reply, in special tokens that the model sampled within
  a reply, and in all that a turn of raw token ids has appended. If the template shows earlier
  messages in another way now (a new date, a reply without its thoughts), the context starts anew;
  then it has no raw token ids of earlier turns.
- If a stop string has cut a reply, the context keeps what the client was shown. With the stop
  string "o|", the tokens " Yes", "." and " No|" show " Yes. N". The context keeps the first two,
  and the next turn begins with " N", the *tail*. (A turn of raw token ids does not: it appends its
  own ids alone. And its own reply keeps all tokens that were sampled.)
"""
import json
import os.path
import re
import threading
import time
import traceback
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from config import require
from engine import Engine
from handles import Handle, Outbox, Reply
from kv_file import KVFile
from scheduler import TooLong
from serving.history import ConversationRecord, History, StaleTurn, Turn, new_id
from serving import tools
from serving.logprobs import Reports
from serving.tokenizer import Rendering, Rewritten, TextStream, Tokenizer, load_tokenizer
from sharing import common_length
from warm import nothing_to_do

MOST_PRUNED = 1000      # conversations, at once
MOST_HINTS = 32         # that hold at a time, for the conversations of one API key
MOST_UNSTORED = 64      # contexts in the cache that the history does not know


@dataclass(frozen=True)
class Answer(Reply):
    text: str           # without special tokens and the stop string; empty if there is no tokenizer


class Busy(Exception):
    """The conversation is being answered."""


class Answering(Busy):
    """Another turn has the conversation. The caller of respond(wait=False) may wait for that
    turn."""

    def __init__(self, turn: "LiveTurn"):
        super().__init__(f"conversation {turn.conversation!r} is being answered")
        self.turn = turn


@dataclass(frozen=True)
class Plan:
    """The token ids that a turn appends, and the turn that they follow."""
    prompt: list[int]
    messages: list[dict]        # the visible messages that `prompt` stands for
    after: Turn | None          # the turn before this one, if there is one
    # If the prompt is a whole context that the template has written: the first `carried` of
    # `messages` are not new. Else None.
    #     the turn                           messages               carried
    #     goes on behind [sys, u1, a1]       [u2]                   None
    #     restarts with another sys'         [sys', u1, a1, u2]     3
    #     is a first one                     [sys, u1]              1
    #     has raw token ids                  []                     None
    carried: int | None
    note: dict                  # is kept with the turn

    @property
    def context_length(self) -> int:
        """Tokens before the prompt."""
        return self.after.length if self.after and self.carried is None else 0

    @property
    def salt(self) -> str:
        """See Sessions.respond."""
        return self.note["salt"]

    @property
    def restarts(self) -> bool:
        """Is there a turn before this one, whose context the prompt does not continue?"""
        return self.after is not None and self.carried is not None


class LiveTurn:
    """A turn as its readers see it, also after it has settled. Read it as it grows with
    `progress()`, or whole with `result()`.

    Any number of threads may read it, any number of times. Nobody has to: it is committed all the
    same."""

    def __init__(self, id: str, engine: Engine, tokenizer: Tokenizer | None,
                 stop: Sequence[str] = ()):
        self.id = id                                # of the turn in the history, too
        self.begun = time.time()
        self.conversation: str | None = None        # the name of the one that it has claimed
        self.unstored: str | None = None            # its name in the cache, if it has claimed none
        self.plan: Plan | None = None
        self.branches = False                       # is it the first turn of a new branch?
        self.handle: Handle | None = None           # since it was submitted to the engine
        self.cancelled = False
        self.tokenizer = tokenizer
        self.stream = TextStream(tokenizer, stop) if tokenizer else None
        # One item for each token: the text that it made certain ("" if none). After the end one
        # more: the text that was held back. With the stop string "\nUser:" and the tokens "Hi",
        # "\n", "Us": "Hi", "", "", "\nUs".
        self.texts = Outbox(engine.step_until)
        self.min_tokens = 0                         # a stop string counts from this token on
        self.completed_at: float | None = None      # its reply, in seconds since 1970
        self.reply: Answer | None = None            # in the end either this
        self.error: BaseException | None = None     # or this

    def progress(self, wait: bool = True) -> Iterator[tuple[str, int]]:
        """The text as it grows: (new text, number of tokens that all text so far stands for).
        wait=False: yields "" when nothing is new, and for tokens without text; and once more after
        the last text, when `texts` is closed. Then its reader knows that all that follows may wait
        for the history."""
        tokens = 0
        for new in self.texts.news(wait):
            tokens += len(new)
            if (text := "".join(new)) or not wait:
                yield text, min(tokens, len(self.handle.token_ids))     # the last text has no token
        self.result()                               # raises the error, if there is one

    def result(self) -> Answer:
        """Wait until the turn is committed. Raises the error of a turn that has failed."""
        self.texts.wait_closed()
        if self.error:
            raise self.error
        return self.reply

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the turn has settled, however it ends, but no longer than so many seconds.
        True if it has settled."""
        return self.texts.wait_closed(seconds)

    def cancel(self):
        """End the turn early, so that it leaves no trace. It has settled when this returns; its
        finish_reason is "cancelled", unless it was complete already."""
        self.cancelled = True                       # in case that it is not submitted yet
        if self.handle:
            self.handle.cancel()
        self.wait()

    @property
    def text(self) -> str:
        """So far."""
        return "".join(self.texts.items)

    @property
    def callable(self) -> list[str]:
        """The names of the functions that the reply may call."""
        return self.plan.note.get("callable", [])

    @property
    def message(self) -> dict:
        """The complete reply as the history keeps it, its calls apart from its text."""
        if self.tokenizer is None:
            return dict(role="assistant", content="")
        most = 1 if self.plan.note.get("parallel_tool_calls") is False else None
        return tools.read(self.tokenizer.tool_form, self.text, self.callable, self.id, most)

    def add(self, token: int) -> bool:
        """The engine calls this with each token but a stop token. True if a stop string is
        complete."""
        if self.stream is None:
            return False
        may_stop = len(self.texts.items) + 1 >= self.min_tokens
        self.texts.put(self.stream.push(token, may_stop))
        return self.stream.stopped

    def finish(self, token_ids: list[int]):
        """The reply is complete, with these tokens."""
        if self.stream:
            for token in token_ids[len(self.texts.items):]:
                self.add(token)    # a stop token, which the engine did not pass to `add`
            self.texts.put(self.stream.finish())


class Sessions:
    """Any thread may call any method."""

    def __init__(self, engine: Engine | str | Path = "tiny_chat", *,
                 history: History | str | Path | None = None, system_prompt: str | None = None,
                 name: str = "", kv_file: str | Path | None = None, **flags):
        """engine: an engine to which nobody else submits. Or the model of a new engine, and in
        `flags` the other keywords of Engine. history: a file; by default memory. system_prompt: a
        text, or a file with one, that every chat without a system message begins with. name: of
        this one among several servers, small letters and digits; all new ids begin with it.
        kv_file: keeps the KV from `close` to the next start; see kv_file.py.
        ValueError for what cannot be served."""
        require(re.fullmatch("[a-z0-9]*", name), "name", "small letters and digits", name)
        self.name = name
        if isinstance(engine, Engine):
            require(not flags, "flags", "left out, since the engine has its own", flags)
            self.engine = engine
        else:
            self.engine = Engine(engine, **flags)
        try:
            where = history.path if isinstance(history, History) else str(history or ":memory:")
            self.kv_file = (KVFile(kv_file, self.engine, where, self._settled_tokens)
                            if kv_file else None)
            self._open(history, system_prompt)
        except BaseException:
            if self.engine is not engine:           # nobody else could close it
                self.engine.close()
            raise
        self.turns: dict[str, LiveTurn] = {}    # by the conversation that each of them has claimed
        self.claiming = threading.Lock()
        self.unstored: deque[str] = deque()     # see `keep_cached`; the engine's owner changes it
        self.writer: ThreadPoolExecutor | None = None       # the writing thread
        self.engine.forgets_cold = True             # since the history has the tokens
        self.clock_offset = time.time() - time.monotonic()  # at the start; later the clock may jump
        if self.kv_file:
            self.kv_file.load()

    def _open(self, history: History | str | Path | None, system_prompt: str | None):
        """The tokenizer, the system prompt and the history. The history last: a prompt that cannot
        be used must not leave the history's file locked."""
        engine, self.tokenizer = self.engine, None
        if engine.directory:
            self.tokenizer = load_tokenizer(engine.directory, engine.scheduler.limit)
        self.system = self._designate(system_prompt) if system_prompt else []
        if not isinstance(history, History):
            raw = f"raw token ids below {engine.worker.vocab_size}"
            fingerprint = self.tokenizer.fingerprint if self.tokenizer else raw
            thinks = bool(self.tokenizer and self.tokenizer.tool_form.thinks)
            history = History(str(history or ":memory:"), fingerprint, engine.worker.vocab_size,
                              thinks)
        self.history = history

    def _settled_tokens(self, conversation: str) -> array | None:
        """Its tokens in the history; an empty array if it is not there. None if a turn has it:
        its commit may be on its way."""
        if conversation in self.turns:
            return None
        with suppress(StaleTurn):                   # deleted at this moment
            if head := self.history.head(conversation):
                return self.history.tokens(head.id)
        return array("i")

    def start(self) -> "Sessions":
        """From now on one thread steps the engine, and another one writes the history."""
        if not self.writer:
            writer = ThreadPoolExecutor(1, "history")
            writer.submit(int).result()     # its thread begins now: later there may be none for it
            self.writer = writer
        self.engine.start()
        return self

    def close(self):
        """Cancel all turns, close engine and history. Every turn that was told to be done is
        kept."""
        self.engine.close()
        if self.writer:
            self.writer.shutdown()
        if self.kv_file:
            self.kv_file.close()
        self.history.close()

    def new_id(self) -> str:
        """For a new turn or a new conversation. On a server with the name s1 it begins with
        "s1-"."""
        return f"{self.name}-{new_id()}" if self.name else new_id()

    # ---- from messages to turns

    def chat(self, text: str, conversation: str | None = None, **options) -> Answer:
        """Send one message and wait for the answer. conversation: None: nothing is kept. options:
        see `respond`."""
        messages = [dict(role="user", content=text)]
        return self.respond(messages, conversation, keep=conversation is not None,
                            **options).result()

    def another(self, turn: LiveTurn, prefix: str = "", stop: str | Sequence[str] = (),
                **options) -> LiveTurn:
        """One more answer to the prompt of a live turn, in a branch of its own. The prompt is
        computed once for both."""
        with self._beginning(stop) as live:
            if turn.conversation is not None:
                self._claim(live, self._new_name(None, prefix))
            return self._submit(live, turn.plan, like=turn.handle,
                                tenant=prefix + turn.plan.salt, **options)

    def respond(self, messages: list[dict], conversation: str | None = None, *,
                exists: bool = False, after: Turn | None = None, hint: str | None = None,
                prefix: str = "", salt: str = "", keep: bool = True,
                instructions: str | None = None,
                truncate: bool = False, gone: Callable[[], bool] = lambda: False,
                note: dict | None = None, wait: bool = True,
                stop: str | Sequence[str] = (), max_tokens: int | None = None,
                template_options: dict | None = None, **options) -> LiveTurn:
        """Begin a turn that answers messages. A client says in one of three ways what comes before
        them:

            neither         `messages` are all that the client shows. The longest part that we
                            remember is recognised by its text.
            after           `messages` are new. Two answers to the same turn are two branches.
            conversation    `messages` are new. The conversation may be busy, or not exist yet.

        Without `conversation`, the turn goes on in the conversation that ends with the turn before
        it, if that is idle and no client has created or edited it; else in a new one.

        exists: True: StaleTurn if `conversation` does not exist.
        hint: the client's name for its conversation. Among equal matches, one in this conversation
            is taken; a new conversation gets this name, if it is free.
        prefix: the names of this client's conversations begin with it; we see no others.
        salt: a new conversation shares nothing with those that began with another salt.
        keep: False: the history keeps nothing of this turn, though the turn may go on from what is
            kept. Only without `conversation`. With a hint its KV stays in the cache: the client
            will come back (see `keep_cached`).
        instructions: the system message of this turn alone; by default the system prompt.
        truncate: True: drop the oldest messages until max_tokens (by default a quarter of the
            limit) are left for the reply.
        gone: True: nobody waits for the answer. `truncate` asks before each look at how many must
            be dropped; then we raise ConnectionError.
        note: is kept with the turn, for the caller. Its "callable" names the functions that the
            reply may call; template_options["tools"] has them whole (see tools.py).
        wait: False: raise Answering if `conversation` is busy, instead of waiting.
        max_tokens: of the reply, at most; by default as many as fit.
        template_options: see Tokenizer.render.
        stop, options: see `submit`."""
        with self._beginning(stop) as live:
            if conversation is not None:
                self._claim(live, conversation, wait)    # now we see how the reply before has ended
            plan = self.plan(messages, conversation, exists=exists, after=after, hint=hint,
                             prefix=prefix, salt=salt, note=note, instructions=instructions,
                             truncate=truncate, gone=gone, max_tokens=max_tokens,
                             template_options=template_options)
            if hint and not keep:
                live.unstored = f"{prefix}unstored_{live.id}"
            elif conversation is None and keep:
                self._claim_after(live, plan.after, hint, prefix)
            return self._submit(live, plan, max_tokens=max_tokens,
                                tenant=prefix + plan.salt, **options)

    def submit(self, prompt: list[int], conversation: str | None = None, *,
               base: Turn | None = None, stop: str | Sequence[str] = (), **options) -> LiveTurn:
        """Append token ids to a conversation (None: a one-off, nothing is kept) and generate a
        reply. If the conversation is busy, wait until its turn has settled.

        base: where a one-off, or a conversation that does not exist yet, branches off. stop: a
        string, or several, that end the reply. options: max_tokens, ignore_eos and the fields of
        Sampling, see Engine.submit. ValueError for what cannot be served."""
        with self._beginning(stop) as live:
            after = base
            if conversation is not None:
                self._claim(live, conversation)
                after = self.history.head(conversation) or base
            note_before = json.loads(after.note) if after else {}
            # the context still begins so
            note = dict(system=note_before.get("system"), salt=note_before.get("salt", ""))
            return self._submit(live, Plan(prompt, [], after, None, note), **options)

    def generate(self, prompt: list[int], conversation: str | None = None, **options) -> Answer:
        """Submit, and wait for the answer."""
        return self.submit(prompt, conversation, **options).result()

    def plan(self, messages: list[dict], conversation: str | None = None, *, exists: bool = False,
             after: Turn | None = None, hint: str | None = None, prefix: str = "", salt: str = "",
             instructions: str | None = None, truncate: bool = False,
             gone: Callable[[], bool] = lambda: False, max_tokens: int | None = None,
             note: dict | None = None, template_options: dict | None = None) -> Plan:
        """The turn that `respond` would begin now, with the same arguments.

        Every token sees the system message. If it is the one that the turn before had, and there is
        room, the cached context goes on, and only the new messages are tokenised. In all other
        cases the context starts anew, with the visible messages so far."""
        if conversation is not None:
            # The head first: if it is deleted before we read the record, StaleTurn comes of it
            # below.
            after, record = self.history.head(conversation), self.history.record(conversation)
            if record:
                messages = record.waiting + messages
            elif exists:
                raise StaleTurn("the conversation was deleted meanwhile")
        # What the model will read: system | earlier | new.
        #     system      the system message, or nothing; `cached_system` is that of the turn before
        #     earlier     the other messages of the context so far, as the model said its replies: a
        #                 client may resend them without their thoughts
        #     new         the messages that the context does not have yet
        shows_all = conversation is None and after is None    # the client shows all of its messages
        recognised = 0
        if shows_all:
            system = self._system(messages, instructions)
            if found := self.history.match(system + messages, hint, prefix, salt):
                after, recognised = found[0], found[1] - len(system)
        note_before = json.loads(after.note) if after else {}
        cached_system = system if shows_all else as_messages(note_before.get("system"))
        earlier = self.history.messages(after.id)[len(cached_system):] if after else []
        new = messages[recognised:]
        if not shows_all:
            system = self._system(earlier + messages, instructions)
        note = dict(note or {}, system=system[0]["content"] if system else None,
                    salt=note_before.get("salt", "") if after else salt)
        room = (max_tokens or self.engine.scheduler.limit // 4) if truncate else None
        if after and system == cached_system:
            with suppress(TooLong, Rewritten):      # of these: then the context starts anew
                prompt, rendered = self._continue(system + earlier, new, after, template_options)
                if self._fits(after.length + len(prompt), room):
                    return Plan(prompt, new, after, None, note | rendered)
        droppable = len(earlier + new) if shows_all else len(earlier)
        return self._plan_anew(after, system, earlier, new, droppable, room, gone, note,
                               template_options)

    def _plan_anew(self, after: Turn | None, system: list[dict], earlier: list[dict],
                   new: list[dict], droppable: int, room: int | None,
                   gone: Callable[[], bool], note: dict, template_options: dict | None) -> Plan:
        """A context of its own: the system message, then as many messages as leave `room` (None:
        all). We cut only before a user's message, and only among the first `droppable`: the history
        has them, or the client has. If even the shortest prompt is too long, the engine will say
        so."""
        messages, tokenizer = earlier + new, self._text_tokenizer()

        def rendering(start: int) -> Rendering:
            return tokenizer.render([], system + messages[start:], template_options)

        def fits(start: int) -> bool:
            if gone():
                raise ConnectionError("the client has hung up")
            try:
                return self._fits(len(tokenizer.tokenize(rendering(start), None)), room)
            except TooLong:
                return False
        start = 0
        if room is not None and not fits(0):
            cuts = [i for i in range(1, len(messages)) if messages[i]["role"] == "user"
                    and i <= droppable]
            # A later cut leaves a shorter prompt. So we bisect for the first cut that fits. If none
            # does, we take the last one, and the engine refuses the prompt.
            first = bisect_left(cuts[:-1], True, key=fits)
            start = cuts[first] if cuts else 0
        carried, chosen = len(system) + max(len(earlier) - start, 0), rendering(start)
        return Plan(tokenizer.tokenize(chosen, None), system + messages[start:], after, carried,
                    note | dict(rendered=chosen.digest))

    def _continue(self, before: list[dict], new: list[dict], after: Turn,
                  template_options: dict | None) -> tuple[list[int], dict]:
        """The prompt that continues the cached context, and what its note says of the rendering.
        Rewritten if the template shows this context in another way now. For example, Mistral's puts
        the system message into the last user's message, so the earlier ones lose it."""
        tokenizer = self._text_tokenizer()
        rendering, note = tokenizer.render(before, new, template_options), json.loads(after.note)
        if "rendered" in note:      # a turn of raw ids was not
            rendering.expect(note["rendered"])
        prompt = tokenizer.tokenize(rendering, after.last_token, note.get("tail", ""))
        return prompt, dict(rendered=rendering.digest)

    def _fits(self, length: int, room: int | None) -> bool:
        return room is None or length + room <= self.engine.scheduler.limit

    def _tokenize(self, messages: list[dict], template_options: dict | None = None) -> list[int]:
        return self._text_tokenizer().turn([], messages, None, template_options)

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.config.model} has no tokenizer: it serves token ids "
                             "only, use generate()")
        return self.tokenizer

    def _designate(self, prompt: str) -> list[dict]:
        """The system prompt as a message. The tokens that all contexts under it begin with are
        computed once, and never evicted."""
        content = Path(prompt).read_text("utf-8") if os.path.isfile(prompt) else prompt
        system = as_messages(content)
        # Two chats that differ from the first letter of the user's message on: what their contexts
        # have in common belongs to the system prompt.
        a, b = ([dict(role="user", content=text)] for text in "ab")
        try:
            contexts = [self._tokenize(system + user) for user in (a, b)]
        except ValueError as error:
            model = self.engine.config.model
            raise ValueError(f"system_prompt cannot be used with {model}: {error}") from error
        require(contexts[0] != self._tokenize(a), "system_prompt",
                "left out, since this model's chat template shows no system message", prompt)
        # commonprefix() compares any lists: here, of ids.
        self.engine.designate(list(os.path.commonprefix(contexts)))
        return system

    def _system(self, messages: list[dict], instructions: str | None) -> list[dict]:
        """The instructions as a message. By default the system prompt, unless the messages bring a
        system message of their own."""
        if instructions is not None:
            return as_messages(instructions)
        return self.system if messages and messages[0].get("role") != "system" else []

    # ---- the life of a turn: claim, submit, commit, tell

    @contextmanager
    def _beginning(self, stop: str | Sequence[str]) -> Iterator[LiveTurn]:
        """A new live turn. If it fails before it is submitted, its conversation is free again."""
        stop = [stop] if isinstance(stop, str) else stop or []
        require(isinstance(stop, (list, tuple)) and all(isinstance(text, str) for text in stop),
                "stop", "a string or a list of strings", stop)
        require(not stop or self.tokenizer is not None, "stop",
                "left out, since this checkpoint has no tokenizer", stop)
        live = LiveTurn(self.new_id(), self.engine, self.tokenizer, stop)
        try:
            yield live
        except BaseException as error:
            if live.plan and live.plan.restarts:        # it may have been shortened
                self.engine.forget(live.conversation)
            self._release(live, error=error)
            raise

    def _claim(self, live: LiveTurn, name: str, wait: bool = True):
        """Give the conversation to this turn alone. If another turn has it, wait until that turn
        has settled. If several turns wait, any of them may be next."""
        require(isinstance(name, str), "conversation", "a string or None", name)
        while (claimant := self._claim_if_free(live, name)) is not live:
            if not wait:
                raise Answering(claimant)
            claimant.wait()

    def _claim_if_free(self, live: LiveTurn, name: str) -> LiveTurn:
        """The turn that has the conversation now: `live`, if it was free."""
        with self.claiming:
            claimant = self.turns.setdefault(name, live)
        if claimant is live:
            live.conversation = name
        return claimant

    def _claim_after(self, live: LiveTurn, turn: Turn | None, hint: str | None, prefix: str):
        """Claim the conversation in which a turn goes on: its own if that is possible, else a new
        one."""
        with self.claiming:                         # so that an idle conversation stays idle
            live.conversation = self._idle_home(turn) or self._new_name(hint, prefix)
            self.turns[live.conversation] = live

    def _idle_home(self, turn: Turn | None) -> str | None:
        """The conversation that ends with the turn, if it is idle and no client has created or
        edited it."""
        if turn is None or turn.conversation in self.turns:
            return None
        record = self.history.record(turn.conversation)
        # Those that a client has created or edited have metadata, and be it {}.
        goes_on = record and record.head == turn.id and record.metadata is None
        return record.name if goes_on else None

    def _new_name(self, hint: str | None, prefix: str) -> str:
        """`hint` if that name is free, else a name that nobody has."""
        taken = hint is None or hint in self.turns or self.history.record(hint)
        return f"{prefix}conv_{self.new_id()}" if taken else hint

    def _release(self, live: LiveTurn, answer: Answer | None = None,
                 error: BaseException | None = None):
        """The conversation is free again, and readers are told how the turn has ended."""
        if self.turns.get(live.conversation) is live:
            del self.turns[live.conversation]
        live.reply, live.error = answer, error
        live.texts.close()

    def _submit(self, live: LiveTurn, plan: Plan, like: Handle | None = None,
                **options) -> LiveTurn:
        """Submit the turn to the engine, behind the context of the turn before it."""
        context: Sequence[int] = ()
        parent, prompt = None, plan.prompt
        if plan.after:
            context, parent = self.history.tokens(plan.after.id), plan.after.conversation
        # Not earlier: from here on a deletion of `after` cancels this turn, and waits for it.
        live.plan, live.min_tokens = plan, options.get("min_tokens") or 0
        if plan.restarts:
            kept = self._shorten_to_common(live.conversation, context, prompt)
            context, prompt = prompt[:kept], prompt[kept:]
        begins = live.conversation is not None and self.history.head(live.conversation) is None
        live.branches = begins and plan.after is not None
        live.handle = self.engine.submit(
            prompt, live.conversation or live.unstored, context=context, parent=parent, like=like,
            reached_stop=live.add, on_end=partial(self._ended, live), **options)
        if live.cancelled:
            live.handle.cancel()
        return live

    def _shorten_to_common(self, conversation: str | None, old: Sequence[int],
                           new: list[int]) -> int:
        """The engine keeps the full chunks that the old and the new context have in common; returns
        their length. At least the last token is computed, where the reply is sampled. With chunks
        of 32 tokens and 70 tokens in common, 64 stay."""
        common = common_length(old, new[:-1])
        common -= common % self.engine.config.chunk_size
        self.engine.shorten(conversation, common)
        return common

    def _ended(self, live: LiveTurn, handle: Handle):
        """Whoever steps the engine calls this. The writing thread settles a turn that is to be
        committed, since a commit may have to wait for the history's file. All other turns
        (cancelled, failed, one-off) write nothing, so they settle here and now."""
        complete = handle.reply is not None and handle.reply.finish_reason != "cancelled"
        commits = complete and live.conversation is not None
        if commits and self.writer:
            with suppress(RuntimeError):            # the process ends, and that thread has ended
                self.writer.submit(self._settle, live, handle, commits)
                return
        self._settle(live, handle, commits)

    def _settle(self, live: LiveTurn, handle: Handle, commits: bool):
        """The one place where turns are committed, and where their readers are told."""
        answer, error = None, None
        agree = False       # are the conversation's tokens in the engine those in the history?
        try:
            live.finish(handle.token_ids)
            live.completed_at = time.time()
            answer = Answer(**vars(handle.result()), text=live.text)
            agree = self._commit(live, handle, answer) if commits else self._continues(live)
        except StaleTurn:                           # the turn before it was deleted
            answer = replace(answer, finish_reason="cancelled")
        except BaseException as failure:    # Ctrl-C, too: nobody may wait for this turn for ever
            answer, error = None, failure
        try:
            # The scheduler takes a cancelled turn out of the cache. What it cannot take out: a
            # complete turn that the history refused, and a context that the conversation does not
            # have. (After a failure we forget the conversation's KV as well.)
            if not (agree or self.engine.failure):
                self.engine.forget(live.conversation)
            if live.unstored:
                self.keep_cached(live.unstored)
        finally:
            self._release(live, answer, error)
        if error and not isinstance(error, Exception):
            raise error

    def keep_cached(self, name: str):
        """For the engine's owner. The cache keeps this context, which the history does not know,
        as long as there is room and no more than MOST_UNSTORED come after it. Other turns of its
        tenant that begin alike use it: an agent that has nothing stored resends all it has said."""
        if name in self.engine.cache.conversations:     # not if the turn was cancelled
            self.unstored.append(name)
        while len(self.unstored) > MOST_UNSTORED:
            self.engine.forget(self.unstored.popleft())

    def _continues(self, live: LiveTurn) -> bool:
        """Does the turn continue the context that its conversation has in the history? Not if it
        restarts, if it begins a branch, or if the turn before it was deleted meanwhile. A one-off
        has no conversation to differ from."""
        if live.conversation is None:
            return True
        head, after = self.history.head(live.conversation), live.plan.after
        return not live.plan.restarts and (head and head.id) == (after and after.id)

    def _commit(self, live: LiveTurn, handle: Handle, answer: Answer) -> bool:
        """Store the turn. If a stop string has cut the reply, the context keeps the ids of what the
        client was shown; a part of a token is kept as text, the next turn's tail.

        False if the turn is stored, but the engine still has the ids that were cut off. StaleTurn
        if the turn has another context in the engine than in the history."""
        name, plan, after = live.conversation, live.plan, live.plan.after
        context_end = handle.request.tokens_before + len(handle.request.prompt)
        if context_end != plan.context_length + len(plan.prompt):
            raise StaleTurn(f"conversation {name!r} had other tokens in the cache than in the "
                            "history")
        note = dict(plan.note, usage=answer.usage, finish_reason=answer.finish_reason)
        if "logprobs" in note:                          # its caller wants to read them again
            reports = Reports(self.tokenizer, handle)
            note["logprobs"] = reports.last(answer.text, live.stream.stopped)
        kept = answer.token_ids
        if plan.messages and live.stream.stopped:
            covered, note["tail"] = self.tokenizer.covered(kept, answer.text)
            kept = kept[:covered]
        said = live.message
        turn = self.history.commit(
            name, after and after.id, plan.prompt, kept, plan.messages,
            text=said["content"] if plan.messages else None,
            calls=said.get("tool_calls", ()), carried=plan.carried,
            note=note, id=live.id, branches=live.branches, salt=plan.salt)
        live.completed_at = turn.created
        try:
            if len(kept) < len(answer.token_ids):
                self.engine.shorten(name, turn.length)
        except Exception as error:          # a bug; the turn is stored all the same
            traceback.print_exception(error)
            return False
        return True

    # ---- conversations

    def answering(self, conversation: str) -> LiveTurn | None:
        """The live turn of a conversation."""
        return self.turns.get(conversation)

    def record(self, conversation: str) -> ConversationRecord | None:
        """What is stored of a conversation. A conversation exists from the moment that its first
        turn is accepted, though the history has it only when that turn is committed: until then it
        has no head, no metadata and no messages. None if it does not exist."""
        live = self.answering(conversation)         # first: afterwards it may be in the history
        stored = self.history.record(conversation)
        if stored or live is None or live.handle is None:
            return stored
        return ConversationRecord(conversation, None, None, [], live.begun, live.begun)

    def warm(self, conversation: str, prefix: str = "") -> dict[str, int]:
        """A turn of this conversation is likely soon, see Engine.warm: bring its KV back. Nothing
        happens while it is being answered, or if MOST_HINTS hold for conversations with this
        prefix (see `respond`). We do not refuse such a hint: no turn depends on it, and a client
        would only send it again.

        KeyError if there is no such conversation."""
        if self.record(conversation) is None:
            raise KeyError(conversation)
        head = self.history.head(conversation)
        if head is None:                            # it has no turn yet
            return nothing_to_do()
        try:
            context = self.history.tokens(head.id)
        except StaleTurn:                           # deleted at this moment
            raise KeyError(conversation) from None
        tenant = prefix + json.loads(head.note).get("salt", "")

        def warm() -> dict[str, int]:
            # Whoever changes the history then calls engine.forget. So either we see the change
            # here, or that call undoes what we do.
            changed = conversation in self.turns or self.history.head(conversation) != head
            holding = self.engine.hints.holding(self.engine.clock())
            hinted = [str(one.name) for one in holding]
            if changed or sum(name.startswith(prefix) for name in hinted) >= MOST_HINTS:
                return nothing_to_do()
            return self.engine.warm(conversation, context, tenant)
        return self.engine.call(warm)

    def find(self, turn_id: str) -> LiveTurn | None:
        """The live turn of that id."""
        turns = list(self.turns.values())
        return next((live for live in turns if live.id == turn_id and live.handle), None)

    def forget(self, conversation: str):
        """Cancel the conversation's turn; free both tiers and the history of the conversation."""
        require(isinstance(conversation, str), "conversation", "a string", conversation)
        while not self._erase(conversation):
            if live := self.answering(conversation):
                live.cancel()

    def _erase(self, conversation: str, due: Callable[[], bool] = lambda: True) -> bool:
        """Free both tiers and the history of an idle conversation. False if it is being answered.

        due: we ask it first, while no turn can begin; if it says no, nothing is freed. (The caller
        found the conversation too old, but a turn may have ended since.)"""
        def change():
            if due():
                self.history.forget(conversation)
                self._forget_kv(conversation)
        try:
            self._write(partial(self._alone, conversation, change))
        except Busy:
            return False
        self._cancel_orphans()
        return True

    def _forget_kv(self, conversation: str):
        """The history has let go of it, or of some turns of it."""
        self.engine.forget(conversation)
        if self.kv_file:
            self.kv_file.erase(conversation)

    def _cancel_orphans(self):
        """Cancel every turn of a conversation that goes on from a turn that is gone now: it cannot
        be committed any more. (One-offs go on: nothing is committed of them.)"""
        for live in list(self.turns.values()):
            after = live.plan and live.plan.after
            if after and not self.history.turn(after.id):
                live.cancel()

    def delete(self, turn: Turn):
        """Free both tiers and the history of a turn; cancel every turn that goes on from it. If
        later turns build on it, it is only hidden, and goes with the last of them. A turn that
        begins at this very moment in a conversation that becomes shorter may be cancelled, too."""
        self._write(lambda: [self._forget_kv(name) for name in self.history.delete(turn.id)])
        self._cancel_orphans()

    def prune(self, max_age: float, max_bytes: float, prefix: str = ""):
        """Forget idle conversations (see History.oldest), the least recently active first, until
        none is older (seconds) and the history is small enough, but at most MOST_PRUNED. Those that
        are being answered stay, and so do those from which a new branch is being answered.

        If the clock jumps ahead, everything would be too old at once. So we do not let it run ahead
        of time.monotonic()."""
        before = min(time.time(), self.clock_offset + time.monotonic()) - max_age
        plans = [live.plan for live in list(self.turns.values()) if live.plan]
        busy = [plan.after.conversation for plan in plans if plan.after]
        for _ in range(MOST_PRUNED):
            name = self.history.oldest(before, max_bytes, prefix, busy)
            if name is None:
                return
            def still_due() -> bool:
                return self.history.oldest(before, max_bytes, prefix, busy) == name
            if not self._erase(name, still_due):
                busy.append(name)

    def create(self, conversation: str, metadata: dict, messages: Sequence[dict] = ()):
        """A conversation without a turn. Its first turn will begin with the messages. TooLong if no
        turn could have room for them, ValueError if it exists."""
        self._expect_room(messages)
        self._write(partial(self.history.create, conversation, metadata, messages))

    def update(self, conversation: str, metadata: dict | None = None,
               new: Sequence[dict] = ()) -> bool:
        """Set the metadata, or add messages that the next turn will begin with. False if there is
        no such conversation. Busy if messages come while it is being answered, TooLong if no turn
        could have room for all that wait then."""
        def change() -> bool:
            stored = self.history.record(conversation) if new else None
            if stored:
                self._expect_room(stored.waiting + list(new))
            if self.history.update(conversation, metadata, new):
                return True
            # It may exist all the same: its first turn is not committed yet.
            exists = self.record(conversation) is not None
            if exists:
                self.history.create(conversation, metadata or {})
            return exists
        if not new:
            return self._write(change)
        return self._write(partial(self._alone, conversation, change))

    def _expect_room(self, waiting: Sequence[dict]):
        """TooLong for messages that fit into no context. A message counts for one token more than
        its text has, since the template marks where it begins."""
        encode = self.tokenizer.encode if self.tokenizer else str.encode
        limit = self.engine.scheduler.limit
        tokens = sum(1 + len(encode(message["content"])) for message in waiting)
        if tokens >= limit:
            raise TooLong("the messages that would wait for the conversation's next turn have "
                          f"{tokens} tokens, and the limit is {limit} tokens")

    def delete_item(self, conversation: str, item_id: str) -> bool:
        """Delete one message of a conversation, see History.delete_item. If turns went with it, the
        context starts anew, since every later token has seen the message. False if there is no such
        message. Busy if the conversation is being answered."""
        def change() -> bool:
            before = self.history.head(conversation)
            deleted = self.history.delete_item(conversation, item_id)
            if self.history.head(conversation) != before:
                self._forget_kv(conversation)
            return deleted
        deleted = self._write(partial(self._alone, conversation, change))
        self._cancel_orphans()
        return deleted

    def _alone(self, conversation: str, change: Callable):
        """Make a change while no turn of the conversation can begin. Such a turn might see only a
        part of the change, and its commit would undo the change. For example, it would clear the
        messages that we add, or bring back a conversation that we forget."""
        # Not a turn: it only holds the claim. Others may wait for it or cancel it, as they do with
        # a turn.
        claim = LiveTurn(new_id(), self.engine, None)
        if self._claim_if_free(claim, conversation) is not claim:
            raise Busy("a response is being written in this conversation: change its items when "
                       "that is done")
        try:
            return change()
        finally:
            self._release(claim)

    def _write(self, change: Callable):
        """Run a change of the history in the writing thread, or between two steps; return its
        result."""
        if self.writer:
            return self.writer.submit(change).result()
        return self.engine.call(change)


def as_messages(instructions: str | None) -> list[dict]:
    """Instructions as a list with one system message, or with none."""
    return [] if instructions is None else [dict(role="system", content=instructions)]
