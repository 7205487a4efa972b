"""How likely a model finds the tokens of a prompt: what evaluations ask for.

The hidden state at a position says which token comes next. Of a prompt we use the last one alone,
to sample the reply. A request with `prompt_logprobs` wants to know of every position how likely the
token was that really came next:

    prompt             a0    a1    a2    a3
    hidden at          0     1     2     3
    log probability    of a1 of a2 of a3 (the reply is sampled here)

So the first token of a context has none, and a token has one only if this request computes the
position before it: KV in the cache has left no logits.

Invariant: a batch in which nobody asks for them computes what it would without this file.
"""
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from arrays import upload
from model import Model
from sampling import log_probabilities
from scheduler import Request, Span

# Rows of logits at once: with a vocabulary of 128,256 these are 66 MB, and as many again for their
# log probabilities.
ROWS_AT_ONCE = 128


class Scored(NamedTuple):
    """A token of a prompt whose log probability is asked for."""
    request: Request
    nth: int            # in the prompt
    row: int            # among the batch's tokens: of the position before it
    token: int


def scored_tokens(spans: list[Span]) -> Iterator[Scored]:
    """Those whose position before is in one of the spans, which lie one behind another.

    A prompt at [100, 104) and the span [100, 102): the hidden states at 100 and 101 tell about the
    tokens at 101 and 102. The span that ended at 100 has told about the token at 100."""
    first = 0
    for request, start, end in spans:
        if request.sampling.prompt_logprobs is not None:
            before = request.tokens_before
            positions = range(max(start + 1, before), min(end + 1, before + len(request.prompt)))
            for position in positions:
                nth = position - before
                yield Scored(request, nth, first + position - 1 - start, request.prompt[nth])
        first += end - start


def score_prompts(model: Model, hidden: Tensor, spans: list[Span]) -> Callable[[], None] | None:
    """Let the device compute what the spans tell about the prompts; hidden [T, width]. Returns a
    function that notes it in the requests: to be called once the device is done. None if no prompt
    of the batch is scored.

    A report is (log probability, [(token id, log probability), ...] of the most likely tokens), as
    those of a reply's tokens. It is noted by the token's index in the prompt."""
    scored = list(scored_tokens(spans))
    if not scored:
        return None
    top = max(each.request.sampling.prompt_logprobs for each in scored)
    asked = [np.array([each.row for each in scored]), np.array([each.token for each in scored])]
    rows, tokens = upload(asked, hidden.device)                                 # [n] each
    pieces = [log_probabilities(model.logits(hidden[some]).log_softmax(-1), its_tokens.long(), top)
              for some, its_tokens in zip(rows.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE))]
    on_host = [torch.cat(parts).to("cpu", non_blocking=True) for parts in zip(*pieces)]

    def note():
        columns = (part.tolist() for part in on_host)
        for each, own, ids, values in zip(scored, *columns):
            most = each.request.sampling.prompt_logprobs
            each.request.prompt_logprobs[each.nth] = own, list(zip(ids[:most], values[:most]))
    return note
