"""Text to token ids and back, and the chat template, for a server that remembers.

A stateless server renders and tokenises the whole conversation at every turn. Ours keeps the raw
ids of all earlier turns and tokenises only the new turn: the text of a reply, tokenised again, may
give other ids than the model sampled, and then its KV-tokens are lost. So `render` renders the
conversation with a sentinel in place of the last reply, and `tokenize` takes only the text after
the sentinel:

    <user> Hi <end> <assistant> SENTINEL <end> <user> More <end> <assistant>
                                         ------- only this is tokenised ----

The cached ids stand for what the template wrote at the turn before. Does it still write that? It
may show another date, or drop the thoughts of a reply. So Sessions keeps a digest of each
rendering, and `Rendering.expect` compares it at the next turn.

Text becomes ids in one of two ways. If the ids are in merge order, as GPT-2's are, we use tiktoken
on the checkpoint's own vocabulary; else we use the tokenizers library. Ids become text in one way:
every token is some bytes, and a text is the concatenation of these bytes, read as UTF-8.

Invariant: only the template writes special tokens. When a user writes the text of one, GUARD (a
character that no text contains) splits it, so nothing takes it for a special token. GUARD is
removed before that text is encoded.
"""
import codecs
import hashlib
import json
import math
import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiktoken
import tokenizers
from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

import gguf_file
from checkpoint import WORKING, read_json
from scheduler import TooLong
from serving import tools

# Unicode reserves it for internal use; we remove it from all text that we are given
GUARD = "\ufdd0"
ESCAPED = r"\ufdd0"      # a GUARD as repr and JSON in ASCII write it
SENTINEL = GUARD * 2     # guarded text never has two guards in a row
ROLES = ("system", "developer", "user", "assistant", "tool")
GPT2_SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
MOST_BEFORE = 100       # characters of a reply that we read with what follows it
MOST_BLANKS = 100_000
# It looks where a run of blanks begins, and nowhere else: one look at each character.
TOO_BLANK = re.compile(r"(?<!\s)\s{%d}" % MOST_BLANKS)
MOST_STEPS = 10**6          # of a chat template
MOST_WRITTEN = 2**26        # characters, by a chat template
PLAIN_TEMPLATE = (       # for checkpoints without a chat template
    "{{ bos_token if add_bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize }}:"
    "{{ '' if message.content.startswith(' ') else ' ' }}{{ message.content }}{{ '\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}")


def load_tokenizer(directory: Path, most_tokens: int | None = None) -> "Tokenizer | None":
    """The tokenizer of a checkpoint, or of a GGUF file. None if a checkpoint has no tokenizer
    files: then we serve token ids only. most_tokens: see Tokenizer. ValueError if they cannot be
    used."""
    if Path(directory).is_file():
        try:
            library, config = gguf_file.read_tokenizer(Path(directory))
            with TemporaryDirectory() as folder:
                made = Path(folder)
                library.save(str(made / "tokenizer.json"))
                (made / "tokenizer_config.json").write_text(json.dumps(config))
                return Tokenizer([made / "tokenizer.json"], read_config(made), most_tokens)
        except Exception as error:      # as below; and the metadata can be of any type
            why = " ".join(str(error).split())          # some errors of the library have four lines
            raise ValueError(f"{directory}: its tokenizer cannot be used: {why}") from error
    for names in (["tokenizer.json"], ["vocab.json", "merges.txt"]):
        files = [Path(directory, name) for name in names]
        if all(file.is_file() for file in files):
            try:
                return Tokenizer(files, read_config(Path(directory)), most_tokens)
            except Exception as error:          # tokenizers and jinja2 raise nothing more precise
                raise ValueError(f"{files[0]}, or the configuration beside it, cannot be used: "
                                 f"{error}; download it again or take "
                                 f"another model; {WORKING}") from error
    return None


class Tokenizer:
    """The tokenizer and the chat template of a checkpoint.

    special: text -> id of the special tokens.
    pieces: id -> bytes of every other token, and of those special ones that mark a call of a tool.
    tool_form: how the model writes such a call.
    drops_first_space: decoding removes the space that a text begins with.
    fingerprint: differs whenever the same text might get other ids, or the same ids another text.
    """

    def __init__(self, files: list[Path], config: dict, most_tokens: int | None = None):
        """files: tokenizer.json, or vocab.json and merges.txt. config: see read_config.
        most_tokens: of a text. If a text has more bytes than most_tokens times the longest token,
        we refuse it unread: for 100 tokens, the longest of 20 bytes, TooLong for 2,001 bytes. (If
        there is a normalizer, four times as many pass, since it may shorten a text.)

        ValueError if they cannot be used."""
        # Templates see bos_token, eos_token and the like; and add_bos_token, a bool.
        self._for_template = {key: value for key, value in config.items() if key.endswith("_token")}
        spec, beside = read_vocabulary(files, config)
        self.special = {token["content"]: token["id"] for token in spec["added_tokens"]
                        if token["special"]}
        self.pieces, self.drops_first_space = token_bytes(spec)
        self._library = LibraryBackend(spec)
        self._backend = (TiktokenBackend(self.special, self.pieces) if ids_in_merge_order(spec)
                         else self._library)
        self.pieces |= {self.special[mark]: mark.encode() for mark in tools.MARKS
                        if mark in self.special}
        longest = max(map(len, [b"", *self.pieces.values(), *map(str.encode, self.special)]))
        # NFC makes 3 bytes of 9, never 3 of 12; for any normalizer we take its factor.
        shrinks = 4 if spec["normalizer"] else 1
        self._limit, self._most_bytes = most_tokens, (most_tokens or math.inf) * longest * shrinks
        # For each character that some special token begins with: a pattern, and what replaces the
        # character where such a token begins. The pattern only looks at what follows, (?=...), so
        # it misses no overlap. With the tokens "qz" and "zj" (G: the guard), "qzj" becomes "qGzGj".
        self._guards = [
            (re.compile(f"{re.escape(first)}(?={any_of(text[1:] for text in group)})"),
             first.replace("\\", r"\\") + GUARD)
            for first, group in groupby(sorted({*self.special, ESCAPED}), key=itemgetter(0))]
        source = config["chat_template"] or PLAIN_TEMPLATE
        self._template = compile_template(source)
        self.tool_form = tools.LLAMA        # without `words`: _render shows messages as they are
        self.tool_form = tools.form_of(
            lambda messages, offer: self._render(messages, dict(tools=offer)))
        self._refuse_letters(special_tokens(config))
        hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        decisive = [hashes, sorted(self.special.items()), source, self._for_template]
        if len(files) > 1:                                          # tokenizer.json says it itself
            decisive += ["add_prefix_space"] if config.get("add_prefix_space") else []
            decisive += ["qwen2"] if is_qwen2(config) else []
        decisive += beside
        self.fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, none of them a special token's. ValueError for a lone surrogate."""
        return self._encode(self._guarded(text))

    def as_written(self, text: str) -> list[int]:
        """The ids of a text that stands for itself: no template will write anything around it. So it
        may have special tokens, and gets those that the checkpoint puts around any text."""
        self._expect_room(text)
        return self._library.encode(text.replace(GUARD, ""), whole=True)

    def spelled(self, token: int) -> bytes:
        """The bytes of any token. A special one has those of its name, an id that stands for nothing
        has none."""
        if token in self.pieces:
            return self.pieces[token]
        names = (name for name, id in self.special.items() if id == token)
        return next(names, "").encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, those in `pieces` alone. Broken UTF-8 becomes U+FFFD."""
        stream = TextStream(self)
        return "".join(map(stream.push, ids)) + stream.finish()

    def covered(self, ids: list[int], text: str) -> tuple[int, str]:
        """How many of a reply's ids stand for the beginning of its text, and the rest of the text.
        An id counts if the text up to its end is shown, and it does not end within a character.

        A stop string has cut the text: the ids of " Yes", "." and " No|" have the text " Yes. N" if
        "o|" is a stop string. Then the result is 2 and " N"."""
        stream, length, kept, end = TextStream(self), 0, 0, 0
        for number, token in enumerate(ids, 1):
            length += len(stream.push(token))
            if length > len(text):
                break
            if not stream.within_character:
                kept, end = number, length
        return kept, text[end:]

    def turn(self, before: list[dict], new: list[dict], last_token: int | None,
             template_options: dict | None = None) -> list[int]:
        """The ids to append to a conversation for its `new` messages, up to where the reply begins:
        `render` and `tokenize` in one."""
        return self.tokenize(self.render(before, new, template_options), last_token)

    def render(self, before: list[dict], new: list[dict],
               template_options: dict | None = None) -> "Rendering":
        """The conversation as the chat template shows it, up to where the next reply begins.

        before: the visible messages so far; none, or the last one is the assistant's.
        template_options: what the template sees besides, such as {"enable_thinking": False}; its
        "tools" are those of tools.offered. Messages are {"role", "content"}, and the content is a
        string; tools.py adds calls and results. ValueError if they are not, or if the template
        refuses them. Rewritten if it does not show the reply in one place."""
        if not new or (before and before[-1]["role"] != "assistant"):
            raise ValueError("a turn needs new messages, after a conversation that is empty or "
                             "ends with an assistant message")
        messages = self._guarded_messages(before + new)
        text = self._render(messages, template_options)
        if not before:
            return Rendering(text, "", "", rest=text)
        last = len(before) - 1
        reply, messages[last] = messages[last], {"role": "assistant", "content": SENTINEL}
        earlier, *rest = self._render(messages, template_options).split(SENTINEL)
        if len(rest) != 1:
            raise Rewritten("the chat template does not show the assistant's last message "
                            "exactly once, so this conversation cannot go on from its raw "
                            "tokens: send its messages as a new one")
        said = reply["content"]
        # Calls: what the template writes for them, "A <call>" of "<user> Hi <assistant> A <call>
        # <user> More". The model's ids stay.
        if "tool_calls" in reply:
            said = text.removeprefix(earlier.rstrip()).removesuffix(rest[0].lstrip())
        return Rendering(text, earlier, said, *rest)

    def tokenize(self, rendering: "Rendering", last_token: int | None,
                 tail: str = "") -> list[int]:
        """The ids that follow a reply's own ids: its tail, if it has one (see `covered`), and the
        rest.

        last_token: the reply's last id; None or -1 if there is none. Often the model has sampled
        the <end> that the template writes behind a reply. Then we leave that <end> out:

            ids "Hello" <end>   rest <end><user>More<end><assistant>
                                result    <user>More<end><assistant>

        Blanks before that <end> are left out with it: Llama 2's template writes " </s>"."""
        tail = self._guarded(tail)
        text = tail + rendering.rest
        if last_token in self.special.values():
            closed = self._encode(text.lstrip())
            if closed[:1] == [last_token]:
                return closed[1:]
        before = rendering.earlier[-MOST_BEFORE:] + rendering.reply.removesuffix(tail)
        return self._encode_behind(before[-MOST_BEFORE:], text)

    def _encode_behind(self, before: str, text: str) -> list[int]:
        """The ids of a text that stands behind another one. Many tokenizers put a space before a
        text: here it would stand in the middle. So we encode both, and cut off what is before:

            "Hello", "\\nUser: Hi"     ids of "Hello\\nUser: Hi" without those of "Hello"
        """
        # If "Hello" + text has a token across the border, its ids cannot be cut there. The text
        # before is only a stand-in, since the reply's ids exist already. So we try two others.
        for start in (before, "\n", "a") if before else ():
            ids, both = self._encode(start), self._encode(start + text)
            if both[:len(ids)] == ids:
                return both[len(ids):]
        return self._encode(text)

    def _refuse_letters(self, named: list[str]):
        """ValueError if the chat template writes one of these special tokens, and the vocabulary
        does not have it: the model would read letters in its place."""
        if not (unknown := {name for name in named if len(name) > 1} - self.special.keys()):
            return
        text = ""
        for roles in ["user"], ["system", "user"], ["user", "assistant", "user"]:
            with suppress(ValueError):      # perhaps it takes no system message
                text += self._render([dict(role=role, content="a") for role in roles], None)
        if written := [name for name in sorted(unknown) if name in text]:
            raise ValueError(f"its chat template writes {written[0]!r}, which is no token of the "
                             "vocabulary: the model would read it letter by letter")

    def _render(self, messages: list[dict], options: dict | None) -> str:
        """An option changes neither `messages` nor a name that tokenizer_config.json sets."""
        guarded = self._guarded_tree(options or {})
        offer = guarded.pop("tools", None) or None
        if role := self.tool_form.words:
            messages, offer = tools.in_words(messages, offer, role), None
        try:
            text = self._template.render(guarded | self._for_template, messages=messages,
                                         tools=offer, documents=None, add_generation_prompt=True)
            # A template's `string` and `tojson` may write a GUARD as six letters: we turn it back.
            # Those six letters from a user stay, since _guarded splits them:
            #   user "<s>"       guarded "<Gs>"        tojson "<\ufdd0s>"       here "<Gs>"
            #   user "\ufdd0"    guarded "\Gufdd0"    the template writes it      here "\Gufdd0"
            return text.replace(ESCAPED, GUARD)
        except Exception as error:      # the template is a stranger's code: it can fail in any way
            raise ValueError(f"the chat template failed: {error}") from error

    def _guarded_messages(self, messages: list[dict]) -> list[dict]:
        for message in messages:
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise ValueError(f"a message needs a role of {', '.join(ROLES)} and a string as "
                                 f"content, got {message!r:.200}")
        return self._guarded_tree([tools.visible(message) for message in messages])

    def _guarded_tree(self, value: Any) -> Any:
        """A JSON value with all of its strings guarded."""
        if isinstance(value, str):
            return self._guarded(value)
        if isinstance(value, list | tuple):
            return [self._guarded_tree(member) for member in value]
        if isinstance(value, dict):
            return {self._guarded(name): self._guarded_tree(member)
                    for name, member in value.items()}
        return value

    def _guarded(self, text: str) -> str:
        """The text with a GUARD after the first character of every special token in it, and of
        ESCAPED."""
        text = text.replace(GUARD, "")
        for special_start, guarded in self._guards:
            text = special_start.sub(guarded, text)
        return text

    def _encode(self, guarded: str) -> list[int]:
        self._expect_room(guarded)
        return self._backend.encode(guarded)

    def _expect_room(self, guarded: str):
        """TooLong for a text that can be refused unread."""
        # UnicodeEncodeError, a ValueError, for a lone surrogate
        size = len(guarded.encode()) - len(GUARD.encode()) * guarded.count(GUARD)
        if size > self._most_bytes:
            raise TooLong(f"the text has {size} bytes, more than any text whose tokens are "
                          f"within the limit of {self._limit}")


class Rewritten(ValueError):
    """The template does not show the conversation as before with the new messages behind it."""


@dataclass(frozen=True)
class Rendering:
    """What the chat template writes for a conversation, with guards, up to where the next reply
    begins:

        text        <user> Hi <end> <assistant> Hello <end> <user> More <end> <assistant>
                    -------- earlier ---------- reply --------------- rest --------------
    """
    text: str
    earlier: str        # the three parts if a sentinel stands in place of the last reply
    reply: str
    rest: str

    @property
    def digest(self) -> str:
        return digest(self.text)

    def expect(self, previous: str):
        """Rewritten unless the text goes on from the previous rendering, to which the reply was
        given: it must be `earlier`, the reply and `rest`, and `earlier` must be the previous text.
        Blanks around the reply do not count, since templates strip it, and the model said what it
        said.

        previous: the digest of that rendering."""
        text = self.text
        for part in self.earlier.rstrip(), self.reply.strip(), self.rest.lstrip():
            if not text.startswith(part):
                raise Rewritten("the chat template shows the last reply in other words")
            text = text[len(part):].lstrip()
        if text:
            raise Rewritten("the chat template writes more words when it shows the last reply")
        if digest(self.earlier) != previous:
            raise Rewritten("the chat template shows the earlier messages in another way now")


def digest(text: str) -> str:
    """Of all but the blanks at its end."""
    return hashlib.sha256(text.rstrip().encode("utf-8", "surrogatepass")).hexdigest()


class TextStream:
    """The text of one reply while its tokens arrive. It gives text out once no later token can
    change it.

    stop: the stop strings. stopped: one of them is complete. The text before it has been given out
    by then, and no other text follows. Among several stop strings the one that is complete first
    counts, so the text does not depend on the borders between tokens.

        stop "\\nUser:"     pushed "Hi", "\\n", "Us", "ual"     given out "Hi", "", "", "\\nUsual"
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), goes_on: bool = False):
        """goes_on: the text stands behind another one, so a space that it begins with stays."""
        if not all(stop):
            raise ValueError(f"a stop string must not be empty, got {list(stop)}")
        self._pieces, self.stop, self.stopped = tokenizer.pieces, stop, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space and not goes_on
        self._held = ""                 # an ending that may still become a stop string

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that is certain now: whole characters, and no beginning of a stop string at its
        end.

        may_stop: False: the token's text neither completes nor begins a stop string, and text that
        is held goes out."""
        piece = self._pieces.get(token, b"")
        if piece and self._drop_space:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._advance(self._utf8.decode(piece), self.stop if may_stop else ())

    @property
    def within_character(self) -> bool:
        """Have the tokens so far only a part of the bytes of a character?"""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """All text that was held back."""
        text = self._advance(self._utf8.decode(b"", final=True), self.stop)
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str, stops: Sequence[str]) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if found:
            self.stopped, self._held = True, ""
            _, start = min(found)       # the one that ends first
            return text[:start]
        certain = len(text) - undecided(text, stops)
        self._held = text[certain:]
        return text[:certain]


def undecided(text: str, stops: Sequence[str]) -> int:
    """The length of the longest ending of the text that is the beginning of a stop string."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


class TiktokenBackend:
    """GPT-2's byte-level BPE, where the id of a token is its rank."""

    def __init__(self, special: dict[str, int], pieces: dict[int, bytes]):
        ranks = {piece: token for token, piece in pieces.items()}
        self._bpe = tiktoken.Encoding("checkpoint", pat_str=GPT2_SPLIT, special_tokens=special,
                                      mergeable_ranks=ranks)
        self._special, self._split = special, re.compile(f"({any_of(special)})")

    def encode(self, guarded: str) -> list[int]:
        """The ids of a text; only special tokens without a guard count as such. ValueError for a
        text that tiktoken cannot take."""
        if TOO_BLANK.search(guarded):   # tiktoken would panic
            raise ValueError(f"the text has {MOST_BLANKS} blanks in a row: shorten them")
        ids = []
        for i, part in enumerate(self._split.split(guarded)):
            if i % 2:                   # ordinary text and special tokens take turns
                ids.append(self._special[part])
            else:
                ids += self._bpe.encode_ordinary(part.replace(GUARD, ""))
        return ids


class LibraryBackend:
    """Any tokenizer that tokenizer.json can describe.

    The library looks for special tokens first and normalises the text between them afterwards. So a
    normaliser of ours removes the guards."""

    def __init__(self, spec: dict):
        steps = [{"type": "Replace", "pattern": {"String": GUARD}, "content": ""}]
        steps += [spec["normalizer"]] if spec["normalizer"] else []
        spec = spec | {"normalizer": {"type": "Sequence", "normalizers": steps}}
        self._library = tokenizers.Tokenizer.from_str(json.dumps(spec))

    def encode(self, guarded: str, whole: bool = False) -> list[int]:
        """The ids of a text; only special tokens without a guard count as such. whole: with those
        that the checkpoint puts around any text."""
        # A batch, since for a single text the library would keep all other threads waiting.
        return self._library.encode_batch_fast([guarded], add_special_tokens=whole)[0].ids


def read_config(directory: Path) -> dict:
    """What the files beside the vocabulary say, with these keys among others:

        *_token                     a special token's text, such as bos_token
        additional_special_tokens   a list of texts
        chat_template               a text, or missing
        added_tokens                id -> AddedToken, by tokenizer_config.json or added_tokens.json
        tokenizer_class             or else the model_type of config.json

    special_tokens_map.json counts unless tokenizer_config.json describes the added tokens."""
    described, special, indices, model = [
        read_json(directory / name) if (directory / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                     "config.json")]
    decoder = described.pop("added_tokens_decoder", None)
    stated = described if decoder is not None else described | special
    config = {"tokenizer_class": model.get("model_type")}
    config |= {key: as_text(value) for key, value in stated.items() if value is not None}
    extra = config.pop("extra_special_tokens", [])
    if isinstance(extra, dict):         # the names by which templates know them -> the tokens
        config, extra = config | extra, extra.values()
    config["additional_special_tokens"] = [*config.get("additional_special_tokens", []), *extra]
    if decoder is not None:
        flags = "content", "lstrip", "normalized", "rstrip", "single_word", "special"
        config["added_tokens"] = {
            int(index): AddedToken(**{key: token[key] for key in flags if key in token})
            for index, token in decoder.items()}
    else:
        named = special_tokens(config)
        config["added_tokens"] = {
            index: AddedToken(text, special=text in named, normalized=text not in named)
            for text, index in indices.items()}
    config["chat_template"] = read_template(directory, config.get("chat_template"))
    return config


def as_text(entry):
    """Every token that is written as a dictionary becomes its "content"."""
    if isinstance(entry, list):
        return [as_text(token) for token in entry]
    return entry.get("content", entry) if isinstance(entry, dict) else entry


def special_tokens(config: dict) -> list[str]:
    """The texts of the special tokens that the configuration names."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    return [text for text in named if isinstance(text, str)] + config["additional_special_tokens"]


def read_template(directory: Path, configured) -> str | None:
    """The chat template of a checkpoint; None if it has none. `configured`: what
    tokenizer_config.json has: a text, or a list of templates with names.

    Of several templates we take "default". A file counts more than the configuration, and
    chat_template.json (of models that read images, too) less. ValueError, with the names, for
    several without "default"."""
    legacy = directory / "chat_template.json"
    found = named_templates(read_json(legacy).get("chat_template")) if legacy.is_file() else {}
    found |= named_templates(configured)
    files = {file.stem: file for file in directory.glob("additional_chat_templates/*.jinja")}
    if (file := directory / "chat_template.jinja").is_file():
        files["default"] = file
    found |= {name: file.read_text("utf-8") for name, file in files.items()}
    if len(found) > 1 and "default" not in found:
        raise ValueError(f"{directory} has the chat templates {', '.join(sorted(found))}, and none "
                         'of them is "default": put the one that you want into '
                         "chat_template.jinja")
    return found.get("default", next(iter(found.values()), None))


def named_templates(templates) -> dict[str, str]:
    """Name -> template, of a template or of a list as in tokenizer_config.json."""
    if not isinstance(templates, list):
        return {} if templates is None else {"default": templates}
    try:
        return {entry["name"]: entry["template"] for entry in templates}
    except (KeyError, TypeError) as error:
        raise ValueError("each entry of chat_template needs a name and a template, got "
                         f"{templates!r:.200}") from error


def read_vocabulary(files: list[Path], config: dict) -> tuple[dict, list[str]]:
    """The content of tokenizer.json, as a dictionary; and the texts of the tokens, none of them
    special, that only `config` adds to it. We make it in three steps:

    1. It has the tokens of tokenizer.json, or of vocab.json and merges.txt.
    2. We add the tokens that only `config` has. ValueError if one cannot have the id that `config`
       says.
    3. What `config` names as special becomes special, if there is such a token; see `is_special`.
    """
    # 1.
    library = (tokenizers.Tokenizer.from_file(str(files[0])) if len(files) == 1
               else from_merges(files, config))
    library.no_truncation()
    library.no_padding()

    def added() -> set[str]:
        return {token.content for token in library.get_added_tokens_decoder().values()}

    # 2.
    known = added()
    beside = {index: token for index, token in sorted(config["added_tokens"].items())
              if token.content not in known}
    library.add_tokens(list(beside.values()))
    for index, token in beside.items():
        if (given := library.token_to_id(token.content)) != index:
            raise ValueError(f"the added token {token.content!r} is said to be {index}, but in "
                             f"this vocabulary it would be {given}")

    # 3.
    named, known = special_tokens(config), added()
    library.add_special_tokens([
        AddedToken(name, normalized=False) for name in dict.fromkeys(named)
        if len(name) > 1 and name not in known and library.token_to_id(name) is not None])
    spec = json.loads(library.to_str())
    trained = vocabulary(spec | dict(added_tokens=[]))
    for token in spec["added_tokens"]:
        token["special"] = is_special(token, named, trained)
        if token["special"]:            # the library finds it while the guards are there
            token["normalized"] = False
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    return spec, [token.content for token in beside.values() if token.content not in special]


def is_special(token: dict, named: list[str], trained: dict[str, int]) -> bool:
    """Is an added token special? The vocabulary says so, or `named` has its text.

    No guard can split a token of one character. If the trained vocabulary has it as text, it stays
    text: some models have "!" for padding. Else ValueError."""
    text = token["content"]
    if not (token["special"] or text in named):
        return False
    # A byte-level vocabulary spells all that is not ASCII: its "§" is the byte 167, half a letter
    # (see byte_alphabet).
    if len(text) == 1 and not (text.isascii() and text in trained):
        raise ValueError(f"the special token {text!r} has one character: we could not tell it from "
                         "the users' text")
    return len(text) > 1


def from_merges(files: list[Path], config: dict) -> tokenizers.Tokenizer:
    """The byte-level BPE of vocab.json and merges.txt: Qwen2's if `config` says so, else GPT-2's.
    They differ in where they split a text: GPT-2's has "123", Qwen2's "1", "2", "3"."""
    library = tokenizers.Tokenizer(models.BPE.from_file(*map(str, files)))
    space = config.get("add_prefix_space", False)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    library.decoder = decoders.ByteLevel()
    if is_qwen2(config):
        library.normalizer = normalizers.NFC()
        library.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)])
    return library


def is_qwen2(config: dict) -> bool:
    return str(config["tokenizer_class"]).lower().startswith(("qwen2", "qwen3"))


def vocabulary(spec: dict) -> dict[str, int]:
    """Text -> id of all tokens, without those that were added to the trained ones."""
    words, added = spec["model"]["vocab"], {token["content"] for token in spec["added_tokens"]}
    # SentencePiece's: rows of (text, score), the id is the row's number
    if isinstance(words, list):
        words = {text: i for i, (text, _) in enumerate(words)}
    return {text: token for text, token in words.items() if text not in added}


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2's vocabulary: "A" is 65, "é" is 233, "Ġ" (256 + 32) is the
    space, 32.

    A byte b that can be seen is written as chr(b). The others are written as chr(256), chr(257),
    ..."""
    seen = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(unseen)}


def ids_in_merge_order(spec: dict) -> bool:
    """True if this is GPT-2's kind of BPE: an id for each of the 256 bytes, then one for each merge
    in order.

    Then BPE joins the adjacent pair with the lowest id first, and that is what tiktoken does."""
    model, split, words = spec["model"], spec["pre_tokenizer"] or {}, vocabulary(spec)
    extras = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    plain_bpe = model["type"] == "BPE" and not any(map(model.get, extras))
    gpt2_split = (split.get("type") == "ByteLevel" and split["use_regex"]
                  and not split["add_prefix_space"])
    plain_added = all(token["special"]
                      and not (token["lstrip"] or token["rstrip"] or token["single_word"])
                      for token in spec["added_tokens"])
    if spec["normalizer"] or not (plain_bpe and gpt2_split and plain_added):
        return False
    merged = [words.get("".join(pair), -1) for pair in model["merges"]]
    rising = merged == sorted(set(merged))
    return rising and len(words) == 256 + len(merged) and byte_alphabet().keys() <= words.keys()


def token_bytes(spec: dict) -> tuple[dict[int, bytes], bool]:
    """A Tokenizer's `pieces` and `drops_first_space`."""
    decoder = spec["decoder"] or {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    alphabet = byte_alphabet()

    def from_byte_level(text: str) -> bytes:
        return bytes(alphabet[c] for c in text) if alphabet.keys() >= set(text) else text.encode()

    def from_sentencepiece(text: str) -> bytes:
        byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()

    if not steps.keys() & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(f"tokenizer.json has the decoder {spec['decoder']}; only byte-level and "
                         "SentencePiece decoders are supported")
    to_bytes = from_byte_level if "ByteLevel" in steps else from_sentencepiece
    pieces = {token: to_bytes(text) for text, token in vocabulary(spec).items()}
    for token in spec["added_tokens"]:
        if not token["special"]:
            pieces[token["id"]] = token["content"].encode()
    prepends = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return pieces, "Strip" in steps or prepends


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the replies for those who train a model; it writes
    what is inside."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """A chat template is a stranger's code. It runs in a sandbox, takes MOST_STEPS steps at most (the
    rounds of its loops, and calls), writes MOST_WRITTEN characters, and multiplies factors below
    2**53; it has no powers. So an endless template fails. One that makes a single huge value, such
    as a text doubled 30 times, does not: do not take a checkpoint from an enemy."""
    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, *source):
        tree = super()._parse(*source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def call(self, context, function, *args, **options):
        tick(context)
        if isinstance(function, LoopContext):               # a recursive loop's next level
            args = counted(context, args[0]), *args[1:]
        return super().call(context, function, *args, **options)

    def call_binop(self, context, operator, left, right):
        small = all(isinstance(number, int | float) and abs(number) < 2**53
                    for number in (left, right))
        if operator == "**" or not small:
            raise TemplateError("only small numbers are multiplied here, and there are no powers")
        return super().call_binop(context, operator, left, right)


class BoundedTemplate(Template):
    """A template that counts its steps and what it writes."""

    def render(self, *dicts, **values) -> str:
        """TemplateError if it takes too many steps or writes too much."""
        pieces, size = [], 0
        for piece in self.generate(*dicts, **values, _ticks=count()):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_WRITTEN:
                raise TemplateError(f"it writes more than {MOST_WRITTEN} characters")
        return "".join(pieces)


Environment.template_class = BoundedTemplate


def tick(context: Context):
    if next(context["_ticks"]) > MOST_STEPS:
        raise TemplateError(f"it takes more than {MOST_STEPS} steps")


@pass_context
def counted(context: Context, values: Iterable) -> Iterator:
    for value in values:
        tick(context)
        yield value


def compile_template(source: str) -> Template:
    """A chat template, with the functions that transformers gives to templates. ValueError if it is
    not valid Jinja."""
    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = Environment(trim_blocks=True, lstrip_blocks=True,
                              extensions=["jinja2.ext.loopcontrols", Generation])
    environment.filters |= dict(tojson=tojson, counted=counted)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:          # Jinja raises a TypeError if the source is no text
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


def any_of(texts: Iterable[str]) -> str:
    r"""A regular expression for the longest of the texts that begins at a place; it matches nothing
    if there is none. Texts that begin alike share their beginning, so a search reads a place once,
    however many there are:

        "<|end|>", "<|user|>", "<s>"        <(?:s>|\|(?:end\|>|user\|>))"""
    if not (texts := sorted(set(texts))):
        return "(?!)"
    start = os.path.commonprefix(texts)
    rests = [text.removeprefix(start) for text in texts]
    ways = [any_of(group) for _, group in groupby(filter(None, rests), key=itemgetter(0))]
    if "" in rests:                 # as the last way: a longer text comes first
        ways.append("")
    return re.escape(start) + (ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})")
