"""Replies that have a form: JSON, JSON of a schema, or any language that a grammar describes.

Before each token of such a reply, a *mask* says which tokens may come next. sampling.py gives all
others a logit of -inf, and draws as always. The model never sees the schema, so a client tells it
in words what to write.

    schema          {"properties": {"age": {"type": "integer"}}, "additionalProperties": false}
    reply so far    {"age": 4
    may come next   0 1 ... 9 } and blanks          the end token: only behind }

`llguidance` compiles schemas and computes masks. It is optional: the server runs without it, and
refuses these requests.

Invariant: a mask is a function of the grammar and the reply so far. So a reply that ends as "stop"
has the form, whatever happened meanwhile: suspension, other requests, a host that runs ahead.
(A reply that max_tokens or a stop string has cut is only the beginning of one.)
"""
import json
import math
import re
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from serving import tools
from serving.tokenizer import Tokenizer

MOST_CHARACTERS = 2**16     # of a schema; it mostly compiles within a second
MOST_REMAINDERS = 10_000    # the product of all `multipleOf`: a parser has a state for each remainder
MOST_GRAMMARS = 32          # that we keep compiled, or refused: agents send the same ones again
FIRST_TOKENS = 3            # that we try: a grammar that is too complex mostly fails here
# In JSON; a client's `x-guidance` cannot change it. With unbounded blanks a weak model never ends.
OPTIONS = dict(whitespace_pattern=r" ?|\n {0,16}", lenient=False, coerce_one_of=False)


class Unusable(ValueError):
    """The schema or grammar cannot be used; the message says why."""


class Constraint:
    """What one reply may be. It follows the reply, token by token."""

    def __init__(self, matcher):
        self.matcher, self.read = matcher, 0    # tokens of the reply

    def mask(self, reply: list[int]) -> np.ndarray:
        """Which tokens may follow the reply: bit i of word w, for token 32 w + i. After the end
        token only this one may follow. Nothing may if the grammar has become too complex.

        int32 [words], 32 * words >= vocab. Each call's reply begins with that of the call before."""
        if not self.matcher.is_stopped():       # it takes no token after the end token
            self.matcher.consume_tokens(reply[self.read:])
        self.read = len(reply)
        words = np.frombuffer(self.matcher.compute_bitmask(), np.int32)
        return np.zeros_like(words) if self.matcher.is_error() else words


class Grammar:
    """A compiled grammar. Any number of replies may have it, at the same time."""

    def __init__(self, matcher):
        self.matcher = matcher      # at its beginning

    def constraint(self) -> Constraint:
        """For one new reply."""
        return Constraint(self.matcher.deep_copy())


class Grammars:
    """Compiles grammars for one model. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: frozenset[int]):
        """vocab_size, stop_ids: the model's."""
        self.tokenizer, self.vocab_size, self.stop_ids = tokenizer, vocab_size, stop_ids
        self._compiled = lru_cache(MOST_GRAMMARS)(self._compile_anew)

    def of_schema(self, schema: dict) -> Grammar:
        """JSON that a JSON schema describes; members come in its order. Unusable if it cannot be
        served as it stands. (A name that a reply repeats counts twice for minProperties.)"""
        matcher, text = self._library.LLMatcher, written(schema)
        refuse_large(text)
        try:
            grammar = matcher.grammar_from_json_schema(text, overrides=OPTIONS)
        except ValueError as error:
            raise Unusable(str(error)) from error
        return self._compile(grammar)

    def of_lark(self, text: str) -> Grammar:
        """A language that a grammar in llguidance's form of Lark describes. Unusable if it is not
        valid, or too large."""
        refuse_large(text)
        return self._compile(self._library.LLMatcher.grammar_from_lark(text))

    def of_calls(self, functions: list[dict], most: int, answer: dict | None = None) -> Grammar:
        """One to `most` calls of functions, which are as in tools.offered; or else JSON that the
        schema `answer` describes, unless it is None. Unusable if it cannot be served as it stands.
        """
        tokenizer = self._text_tokenizer()
        calls = tools.language(tokenizer.tool_form, functions, most, tokenizer.special, inline)
        either = "calls" if answer is None else f"calls | {inline(answer)}"
        return self.of_lark(f"start: {either}\n{calls}")

    def _compile(self, text: str) -> Grammar:
        compiled = self._compiled(text)
        if isinstance(compiled, str):
            raise Unusable(compiled)
        return compiled

    def _compile_anew(self, text: str) -> Grammar | str:
        """A text says why it cannot be used."""
        limits = self._library.LLParserLimits(verbose_errors=False)     # else they show the schema
        matcher = self._library.LLMatcher(self._tokens, text, log_level=0, limits=limits)
        grammar, reply = Grammar(matcher), []
        trial = grammar.constraint()
        for _ in range(FIRST_TOKENS):
            mask: Any = trial.mask(reply)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            if not allowed.any():
                return cause(trial.matcher.get_error())
            reply.append(int(allowed.argmax()))
        return grammar

    def _text_tokenizer(self) -> Tokenizer:
        if not (self.tokenizer and self.stop_ids):
            raise Unusable("this model has no tokenizer or no end token, so its replies cannot be "
                           "constrained")
        return self.tokenizer

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise Unusable("this server cannot constrain a reply: it needs the package llguidance "
                           "(pip install llguidance)") from error
        return llguidance

    @cached_property
    def _tokens(self):
        """Our vocabulary, as the library knows it. It wants one end token as the main one.
        (json_slices: masks of the inside of JSON's strings, which it computes ahead.)"""
        tokens = Vocabulary(self._text_tokenizer(), self.vocab_size, min(self.stop_ids))
        make, wrapped = self._library.LLTokenizer, self._library.TokenizerWrapper(tokens)
        return make(wrapped, self.vocab_size, sorted(self.stop_ids), make.json_slices())


def inline(schema: dict) -> str:
    """The Lark of what a JSON schema describes."""
    return f"%json {written(schema | {'x-guidance': OPTIONS})}"


def written(schema: dict) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise Unusable("it is nested too deeply") from error


def cause(error: str) -> str:
    """What the library says, without the text of the grammar and the state of its stack."""
    said = re.split(r"\n +\d+ \||\n<backtrace>|<non-verbose/>", error)[0]
    return re.sub("^at .*: failed to compile JSON schema: ", "", said).strip()


def refuse_large(schema: str):
    """Unusable if it might take seconds to compile. schema: as json.dumps writes it, so a quote
    within a string has a backslash. (No limit of the library's counts remainders: a `multipleOf` of
    1,000,000 would take 20 seconds.)"""
    if len(schema) > MOST_CHARACTERS:
        raise Unusable(f"it has {len(schema)} characters, and the limit is {MOST_CHARACTERS}")
    multiples = set(re.findall(r'"multipleOf": ([\d.e+-]+)', schema))
    if math.prod(max(remainders(number), 1) for number in multiples) > MOST_REMAINDERS:
        raise Unusable(f"the product of its multipleOf is more than {MOST_REMAINDERS}")


def remainders(number: str) -> int:
    """Without the decimal point: "0.25" -> 25, "1e+2" -> 100."""
    parts = Decimal(number).normalize().as_tuple()
    return int("".join(map(str, parts.digits))) * 10**max(int(parts.exponent), 0)


class Vocabulary:
    """What llguidance's TokenizerWrapper asks for, under its names."""
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end: int):
        self.encode, self.eos_token_id = tokenizer.encode, end
        # Special tokens have no bytes, so they are no part of any text. (Marks of calls have.)
        self.tokens = [tokenizer.pieces.get(token, b"") for token in range(size)]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)
