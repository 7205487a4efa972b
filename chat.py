"""From what a client says to a turn: which tokens are to be appended to which conversation.

A chat is visible messages; the engine knows token ids. What is already cached must never be tokenised again, since other ids for the
same text would be another prefix. So the messages that a client resends are matched with the history's, a client that sends only
what is new says after which turn, and only that is tokenised: it continues the turn's conversation if that ends there, else it
branches off. Instructions or a system prompt other than the turn's change what every token sees: then the context starts anew.

Invariant: the messages of a turn and those before it, rendered by the template, are the text of the tokens before its reply."""
import json
import os.path
from bisect import bisect_left
from pathlib import Path

from config import require
from serving.history import Turn, new_id


class Chat:
    """What Engine has of it; it uses the engine's submit, history, tokenizer, cache and pending turns."""

    def chat(self, text: str, conversation: str | None = None, **options):
        """Text in, a Reply out, through the chat template. Only the new message is tokenised."""
        return self.respond([dict(role="user", content=text)], conversation, **options).result()

    def submit_chat(self, messages: list[dict], hint: str | None = None, owner: str = "", **options):
        """A client resends the visible history and new messages. The longest part that is remembered is continued: in its
        conversation if that ends there and is idle, else in a new branch. hint: the name that the client gives to its
        conversation: it decides between equals and names a new conversation, it opens nothing. owner: the prefix of its names.
        Returns a Handle."""
        system = self._prompted(messages)
        messages = system + messages
        with self.lock:
            turn, matched = self.history.match(messages, hint, owner) or (None, 0)
            new = messages[matched:]
            prompt = self._tokenize(messages[:matched], new, turn and turn.last_token)
            return self.submit(prompt, self._place(turn, hint, owner), messages=new, base=turn,
                               carried=len(system) if system and not turn else None,
                               note=dict(system=system[0]["content"] if system else None), **options)

    def respond(self, new: list[dict], conversation: str | None = None, *, after: Turn | None = None, owner: str | None = None,
                instructions: str | None = None, truncate: bool = False, note: dict = {}, **options):
        """A client sends only what is new: to a conversation, which may be busy or not exist yet, or after any turn: two answers to the
        same turn are two branches. owner: the prefix of the name of a conversation made for it; None: none is made, nothing is kept.
        instructions, truncate: see _context. Returns a Handle."""
        while True:
            with self.lock:
                earlier = [] if conversation is None else self._unsettled(conversation)
                if not earlier:
                    record = self.history.record(conversation)
                    if record:
                        after, new = self.history.head(conversation), record.waiting + new
                    elif conversation is None and owner is not None:
                        conversation = self._place(after, None, owner)
                    room = (options.get("max_tokens") or self.scheduler.limit // 4) if truncate else None
                    prompt, messages, carried, system = self._context(after, new, instructions, room)
                    return self.submit(prompt, conversation, messages=messages, base=None if record else after,
                                       carried=carried, note=dict(note, system=system), **options)
            self._wait_quietly(earlier)                      # what the template still owes depends on how their replies end

    def _place(self, turn: Turn | None, hint: str | None, owner: str) -> str:
        """The conversation that goes on after a turn: its own if it ends there, is idle, and nobody has asked for it by name; else a
        new one."""
        record = turn and turn.conversation not in self.pending and self.history.record(turn.conversation)
        if record and record.head == turn.id and record.metadata is None:
            return record.name
        taken = hint is None or hint in self.pending or self.history.record(hint)
        return f"{owner}conv_{new_id()}" if taken else hint

    def _context(self, turn: Turn | None, new: list[dict], instructions: str | None, room: int | None):
        """(token ids to append, the messages they stand for, carried, the system message): `new` after a turn, under `instructions`, a
        first system message for this reply only, by default the system prompt. Where it is what the turn had, only `new` is tokenised
        and its KV goes on. Else every token would see another beginning: the visible messages so far start a context of their own, which
        is computed from nothing. So it is when less than `room` would be left for the reply (None: never): then as few messages as
        possible are dropped from the beginning, so that it is a user's."""
        limit, before = self.scheduler.limit, self.history.messages(turn.id) if turn else []
        had = json.loads(turn.note).get("system") if turn else None
        older = before[had is not None:]
        messages = older + new
        first = self._prompted(messages) if instructions is None else [dict(role="system", content=instructions)]
        system = first[0]["content"] if first else None
        if turn and had == system:
            prompt = self._tokenize(before, new, turn.last_token)
            if room is None or turn.length + len(prompt) + room <= limit:
                return prompt, new, None, system
        def anew(cut):
            return self._tokenize([], first + messages[cut:], None)
        def fits(cut):
            return room is None or len(anew(cut)) + room <= limit
        cuts = [0] + [i for i, message in enumerate(messages) if i and message["role"] == "user"]
        cut = cuts[min(bisect_left(cuts, True, key=fits), len(cuts) - 1)]       # where none fits, submit will say so
        return anew(cut), first + messages[cut:], len(first) + max(len(older) - cut, 0), system

    def _tokenize(self, before, new, last_token) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer: it serves token ids only, use generate()")
        return self.tokenizer.turn(before, new, last_token)

    # ---- the system prompt

    def _designate(self, prompt: str) -> list[dict]:
        """The system prompt as a message; what all contexts that begin with it have in common is designated in the cache."""
        system = [dict(role="system", content=Path(prompt).read_text("utf-8") if os.path.isfile(prompt) else prompt)]
        a, b = ([dict(role="user", content=text)] for text in "ab")
        try:
            contexts = [self._tokenize([], system + user, None) for user in (a, b)]
        except ValueError as error:
            raise ValueError(f"system_prompt cannot be used with {self.config.model}: {error}") from error
        require(contexts[0] != self._tokenize([], a, None), "system_prompt", "left out, since this model's chat template shows no system message", prompt)
        self.cache.designate(os.path.commonprefix(contexts))
        return system

    def _prompted(self, messages: list[dict]) -> list[dict]:
        """What goes before these messages: the system prompt, if they bring no system message of their own."""
        return self.system if messages and messages[0].get("role") != "system" else []
