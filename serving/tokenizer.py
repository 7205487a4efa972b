"""Text to token ids and back, and the chat template, for a server that remembers.

A stateless server renders and tokenises the whole conversation at every turn. Ours keeps the raw ids of all earlier turns and
tokenises *only the new turn*: re-tokenising a reply may give other ids than the model sampled, and then its KV-tokens are lost.
So `turn` renders the conversation with a sentinel in place of the last reply and keeps what follows it: what the template
still owes that reply (its end token) and the new messages.

Two ways to make ids: tiktoken, on the checkpoint's own vocabulary, where ids are in merge order (GPT-2); else the tokenizers
library. One way back: every token is some bytes, a text is their concatenation read as UTF-8, whole or as it arrives.

Invariant: only the template writes special tokens. In text that users wrote they are ordinary text, since a noncharacter,
GUARD, splits them until the special tokens have been found, and is removed before the rest is encoded."""
import codecs
import hashlib
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Iterable, Sequence

import tiktoken
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers

GUARD = "\ufdd0"         # for internal use says Unicode, so never part of a text: it is dropped from whatever we are given
SENTINEL = GUARD * 2     # guarded text has no two in a row
ROLES = ("system", "developer", "user", "assistant", "tool")
GPT2_SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
PLAIN_TEMPLATE = (       # for checkpoints that have none
    "{{ bos_token if add_bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize }}:{{ '' if message.content.startswith(' ') else ' ' }}{{ message.content }}{{ '\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}")


def load_tokenizer(directory: Path) -> "Tokenizer | None":
    """The tokenizer of a checkpoint; None if it has no tokenizer files: such a checkpoint serves token ids only."""
    for names in (["tokenizer.json"], ["vocab.json", "merges.txt"]):
        files = [Path(directory, name) for name in names]
        if all(file.is_file() for file in files):
            return Tokenizer(files, read_config(Path(directory)))
    return None


class Tokenizer:
    """special: the ids of the special tokens by their text; bos_text, eos_text: "" where the checkpoint names none.
    fingerprint: changes with whatever decides ids and text; ids kept under another fingerprint mean nothing here.
    pieces: the bytes of every token that is not special; drops_first_space: a text loses the space that it begins with."""

    def __init__(self, files: list[Path], config: dict):
        """files: tokenizer.json, or vocab.json and merges.txt; config: see read_config. ValueError if they cannot be used."""
        self._named = {key: value for key, value in config.items() if key.endswith("_token")}   # what templates see; add_bos_token too
        names = [name for name in self._named.values() if isinstance(name, str)] + config.get("additional_special_tokens", [])
        spec = read_vocabulary(files, names, config.get("add_prefix_space", False))
        self.special = {token["content"]: token["id"] for token in spec["added_tokens"] if token["special"]}
        self.bos_text, self.eos_text = config.get("bos_token", ""), config.get("eos_token", "")
        self.pieces, self.drops_first_space = token_bytes(spec)
        self._backend = TiktokenBackend(self.special, self.pieces) if ids_in_merge_order(spec) else LibraryBackend(spec)
        self._special_starts = re.compile(f"(?=({either(self.special)}))(.)", re.DOTALL)
        source = config.get("chat_template") or PLAIN_TEMPLATE
        self._template = compile_template(source)
        decides = [[hashlib.sha256(file.read_bytes()).hexdigest() for file in files], sorted(self.special.items()), source, self._named]
        self.fingerprint = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: strings of special tokens in it are ordinary text. ValueError for a lone surrogate."""
        return self._encode(self._guarded(text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens; broken UTF-8 becomes U+FFFD, an id without a token nothing."""
        stream = TextStream(self)
        return "".join(map(stream.push, ids)) + stream.finish()

    def turn(self, before: list[dict], new: list[dict], last_token: int | None) -> list[int]:
        """The ids to append to a conversation for its `new` messages, up to where the reply begins.

        before: the visible messages so far: none, or ending with the assistant's reply, of which last_token was sampled last.
        Messages are {"role", "content"}, content a string. ValueError if they are not, or if the template refuses them."""
        if not new or (before and before[-1]["role"] != "assistant"):
            raise ValueError("a turn needs new messages, after a conversation that is empty or ends with an assistant message")
        reply = [{"role": "assistant", "content": SENTINEL}] if before else []
        text = self._render(self._guarded_messages(before[:-1]) + reply + self._guarded_messages(new))
        if before:
            if text.count(SENTINEL) != 1:
                raise ValueError("the chat template does not show the assistant's last message exactly once, so this conversation "
                                 "cannot go on from its raw tokens: send its messages as a new one")
            text = text.partition(SENTINEL)[2]
        if last_token in self.special.values():
            closed = self._encode(text.lstrip())        # Llama 2's template puts a space before the end of a reply
            if closed[:1] == [last_token]:              # the model closed its reply itself
                return closed[1:]
        return self._encode(text)

    def _render(self, messages: list[dict]) -> str:
        try:
            return self._template.render(self._named, messages=messages, tools=None, documents=None, add_generation_prompt=True)
        except Exception as error:      # the checkpoint's code, not ours: it can fail in any way
            raise ValueError(f"the chat template failed: {error}") from error

    def _guarded_messages(self, messages: list[dict]) -> list[dict]:
        for message in messages:
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise ValueError(f"a message needs a role of {', '.join(ROLES)} and a string as content, got {message!r:.200}")
        return [{"role": message["role"], "content": self._guarded(message["content"])} for message in messages]

    def _guarded(self, text: str) -> str:
        """The text with a GUARD in every occurrence of a special token, overlapping ones included."""
        return self._special_starts.sub(rf"\2{GUARD}", text.replace(GUARD, ""))

    def _encode(self, guarded: str) -> list[int]:
        guarded.encode()                # a lone surrogate is no text: UnicodeEncodeError, a ValueError
        return self._backend.encode(guarded)


class TextStream:
    """The text of one reply while its tokens arrive: only what no later token can change or cut off is given out.

    stopped: a stop string was completed. All text before it has been given out by then, and nothing else ever will be.
    Of several stop strings the one completed first counts, so the text does not depend on where the token borders are."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        if not all(stop):
            raise ValueError(f"a stop string must not be empty, got {list(stop)}")
        self._tokenizer, self._stop, self.stopped = tokenizer, stop, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space
        self._held = ""

    def push(self, token: int) -> str:
        """The text that has become certain: whole characters, and no ending that may still become a stop string."""
        piece = self._tokenizer.pieces.get(token, b"")
        if piece and self._drop_space:
            piece, self._drop_space = piece.removeprefix(b" "), False
        return self._advance(self._utf8.decode(piece))

    def finish(self) -> str:
        """What was held back."""
        text = self._advance(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _advance(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        self.stopped = bool(ends)
        certain = min(ends)[1] if ends else len(text) - self._undecided(text)
        self._held = "" if ends else text[certain:]
        return text[:certain]

    def _undecided(self, text: str) -> int:
        """The length of the longest ending of text that begins a stop string."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


class TiktokenBackend:
    """GPT-2's byte-level BPE, where the id of a token is its rank."""

    def __init__(self, special: dict[str, int], pieces: dict[int, bytes]):
        self._bpe = tiktoken.Encoding("checkpoint", pat_str=GPT2_SPLIT, special_tokens=special,
                                      mergeable_ranks={piece: token for token, piece in pieces.items()})
        self._special, self._split = special, re.compile(f"({either(special)})")

    def encode(self, guarded: str) -> list[int]:
        """The ids of text in which only special tokens that stand unguarded count as such."""
        ids = []
        for i, part in enumerate(self._split.split(guarded)):      # ordinary text and special tokens take turns
            ids += [self._special[part]] if i % 2 else self._bpe.encode_ordinary(part.replace(GUARD, ""))
        return ids


class LibraryBackend:
    """Whatever else tokenizer.json can describe. The library finds special tokens first and normalises the rest after, so the
    guards are removed by a normaliser."""

    def __init__(self, spec: dict):
        unguard = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
        steps = [unguard] + ([spec["normalizer"]] if spec["normalizer"] else [])
        self._library = tokenizers.Tokenizer.from_str(json.dumps(spec | {"normalizer": {"type": "Sequence", "normalizers": steps}}))

    def encode(self, guarded: str) -> list[int]:
        """The ids of text in which only special tokens that stand unguarded count as such."""
        return self._library.encode(guarded, add_special_tokens=False).ids


def read_config(directory: Path) -> dict:
    """tokenizer_config.json over special_tokens_map.json, tokens as plain strings, `chat_template` a string if there is one."""
    config = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():        # a token is a string, or a dictionary with the string as its content
            config |= json.loads((directory / name).read_text("utf-8"), object_hook=lambda entry: entry.get("content", entry))
    if isinstance(templates := config.get("chat_template"), list):
        config["chat_template"] = {entry["name"]: entry["template"] for entry in templates}.get("default")
    if (directory / "chat_template.jinja").is_file():
        config["chat_template"] = (directory / "chat_template.jinja").read_text("utf-8")
    return {key: value for key, value in config.items() if value is not None}


def read_vocabulary(files: list[Path], named: list[str], add_prefix_space: bool) -> dict:
    """What tokenizer.json says, or would say, with every token of `named` that is in the vocabulary made a special token."""
    try:
        if len(files) == 1:
            library = tokenizers.Tokenizer.from_file(str(files[0]))
        else:
            library = tokenizers.Tokenizer(models.BPE.from_file(*map(str, files)))
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
            library.decoder = decoders.ByteLevel()
    except Exception as error:          # the library raises nothing more precise
        raise ValueError(f"{files[0]} is not a tokenizer: {error}") from error
    library.no_truncation()
    library.no_padding()
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    library.add_special_tokens([AddedToken(name, normalized=False) for name in dict.fromkeys(named)
                                if name not in added and library.token_to_id(name) is not None])
    spec = json.loads(library.to_str())
    for token in spec["added_tokens"]:
        token["special"] |= token["content"] in named
        token["normalized"] &= not token["special"]     # found before the guards are removed
    return spec


def vocabulary(spec: dict) -> dict[str, int]:
    """The ids of all tokens that are not added ones."""
    model, added = spec["model"], {token["content"] for token in spec["added_tokens"]}
    entries = model["vocab"].items() if isinstance(model["vocab"], dict) else ((row[0], i) for i, row in enumerate(model["vocab"]))
    return {text: token for text, token in entries if text not in added}


def byte_alphabet() -> dict[str, int]:
    """GPT-2 writes byte b as chr(b) if that can be seen, the others as the characters from 256 on."""
    seen = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    unseen = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(unseen)}


def ids_in_merge_order(spec: dict) -> bool:
    """Whether this is GPT-2's kind of BPE with ids in merge order: the 256 bytes, one token per merge, later merges higher.
    For a vocabulary that was learnt by merging, joining the adjacent pair with the lowest id is then the same as BPE."""
    model, split, words = spec["model"], spec["pre_tokenizer"] or {}, vocabulary(spec)
    plain_bpe = model["type"] == "BPE" and not any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix")))
    gpt2_split = split.get("type") == "ByteLevel" and split["use_regex"] and not split["add_prefix_space"]
    plain_added = all(token["special"] and not any(map(token.get, ("lstrip", "rstrip", "single_word")))
                      for token in spec["added_tokens"])
    if spec["normalizer"] or not (plain_bpe and gpt2_split and plain_added):
        return False
    merged = [words.get("".join(pair), -1) for pair in model["merges"]]
    return merged == sorted(set(merged)) and len(words) == 256 + len(merged) and byte_alphabet().keys() <= words.keys()


def token_bytes(spec: dict) -> tuple[dict[int, bytes], bool]:
    """A Tokenizer's `pieces` and `drops_first_space`."""
    decoder = spec["decoder"] or {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    alphabet = byte_alphabet()

    def from_byte_level(text):
        return bytes(alphabet[c] for c in text) if alphabet.keys() >= set(text) else text.encode()

    def from_sentencepiece(text):
        byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
        return bytes.fromhex(byte[1]) if byte else text.replace("▁", " ").encode()

    if not steps.keys() & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise ValueError(f"tokenizer.json has the decoder {spec['decoder']}; only byte-level and SentencePiece ones are supported")
    to_bytes = from_byte_level if "ByteLevel" in steps else from_sentencepiece
    pieces = {token: to_bytes(text) for text, token in vocabulary(spec).items()}
    pieces |= {token["id"]: token["content"].encode() for token in spec["added_tokens"] if not token["special"]}
    drops_first_space = "Strip" in steps or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return pieces, drops_first_space


def compile_template(source: str) -> Template:
    """A chat template, in the environment that transformers promises it. It is a stranger's code: it runs in a sandbox."""
    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


def either(texts: Iterable[str]) -> str:
    """A pattern for any of the texts, the longest first; nothing matches where there are none."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"
