r"""The log probabilities of a reply's tokens, as a client reads them.

The engine reports each token that it samples: the log probability of the token, and the k most
likely tokens with theirs. A client gets an entry for each of `completion_tokens`, special ones
too, each with k alternatives. If a stop string has cut the reply, a token gets an entry if its text
begins within the text that the client sees: "!\n" does, "User" does not:

    stop "\nUser:"      tokens "Hi" "!\n" "User" ":"        entries of "Hi" and "!\n"

In a stream, an entry goes out with the text that its token begins, or with the last chunk.
"""
from collections.abc import Iterable

from handles import Handle
from serving.tokenizer import TextStream, Tokenizer

LEAST = -9999.0         # JSON has no infinity, and no NaN: max(LEAST, nan) is LEAST
# (token id, its log probability, [(token id, log probability), ...] of the most likely tokens)
Report = tuple[int, float, list]


class Reports:
    """Those of one turn, in order, each read once. None at all if nobody has asked for them."""

    def __init__(self, tokenizer: Tokenizer, handle: Handle):
        self.handle, self.stream = handle, TextStream(tokenizer)
        self.read = 0               # tokens
        self.characters = 0         # of their text

    def before(self, characters: int) -> list[Report]:
        """The reports not read yet of the tokens whose text begins before this character of the
        reply."""
        if not self.handle.request.logprobs:
            return []
        start, tokens = self.read, self.handle.token_ids
        while self.read < len(tokens) and self.characters < characters:
            self.characters += len(self.stream.push(tokens[self.read]))
            self.read += 1
        return self._reports(start)

    def last(self, text: str, cut: bool) -> list[Report]:
        """The reports not read yet, once the reply is complete. text: of the reply. cut: a stop
        string has ended it."""
        if cut:
            return self.before(len(text))
        start, self.read = self.read, len(self.handle.token_ids)
        return self._reports(start)

    def _reports(self, start: int) -> list[Report]:
        """Of the tokens [start, self.read)."""
        tokens = self.handle.token_ids[start:self.read]
        reports = self.handle.request.logprobs[start:self.read]     # handle.logprobs is a copy
        return [(token, *report) for token, report in zip(tokens, reports)]


def entries(tokenizer: Tokenizer, reports: Iterable[Report]) -> list[dict]:
    """In OpenAI's form."""
    def entry(token: int, logprob: float) -> dict:
        text = tokenizer.spelled(token)
        return dict(token=text.decode(errors="replace"), logprob=max(LEAST, logprob),
                    bytes=list(text))
    return [dict(entry(token, logprob), top_logprobs=[entry(*other) for other in most_likely])
            for token, logprob, most_likely in reports]
