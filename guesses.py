"""Several tokens of a reply in one step: guesses, read off the conversation itself, then verified.

Replies often copy. A decode reads all weights to compute one position, and a few more positions
cost little. So a decode takes guesses along, as a longer span:

    a's context    The old pier is shut . ... The old pier          these 3 tokens stood there
    the span       a[31:34]  pier  is    shut                       a decode with two guesses
    sampled                  is    open  !                          for positions 32, 33, 34
    a's context    The old pier is shut . ... The old pier is open

The guess `is` was right, so `open` was sampled behind the true context. The guess `shut` was wrong,
so `!` means nothing. The books know nothing of a guess that has not proved right: its KV is behind
what counts as filled, in a slot that the conversation has anyway. The next step overwrites it.

Invariant: guesses never change a token, greedy or drawn (noise depends on seed and position alone),
but for rounding: a longer span may sum in another order.
"""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kv_cache import Conversation
from scheduler import PLACEHOLDER, Batch, Request, Result, Scheduler

WINDOW = 8192           # we look for copies among so many tokens, the last ones of the context

# A request begins with a luck of 0. Each guess takes 1 of it. Below 0 it may guess less. With at
# most 4 guesses, of which only the first one of step 1 and that of step 31 are right:
#
#     step    the reply     may guess          luck behind the step
#     1        1 token      4                  0 - 4 + GAIN = -2
#     2        3 tokens     4 - 2 = 2          -2 - 2 = -4
#     3        4 tokens     4 - 4 = 0          -4
#     31      32 tokens     4 - 4 + 1 = 1      -4 - 1 + GAIN = -3      (32 // PATIENCE is 1)
#     32      34 tokens     4 - 3 + 1 = 2      ...
GAIN = 2                # a right guess gives so much
PATIENCE = 32           # so many tokens of its reply allow one guess more
MOST_LUCK = 32          # it never has more: else a reply that has copied a thousand tokens could
                        # then guess wrong a thousand times


def copied(tokens: Sequence[int], most: int) -> list[int]:
    """At most `most` tokens that may come next: those that followed where the last tokens of the
    context stood before. Of several such places we take the one with most tokens in common (we
    compare no more than most + 1), of equal ones the latest. The longer the reply has copied, the
    more we guess: one token less than are in common.

        1 2 3 4 5 6 1 2 3       3 tokens stood before: 4 5
        5 1 2 1 2 1 2           goes round, 4 tokens stood before: 1 2 1"""
    context = np.array(tokens[-WINDOW:], np.int32)
    # ends: where the last `common + 1` tokens stood before. Each round looks one token further. In
    # the second example:     ends      [2, 4]   [2, 4]   [4]   [4]   []
    #                         common    0        1        2     3     4       and end = 4
    ends, end, common = np.flatnonzero(context[:-1] == context[-1]), 0, 0
    while len(ends) and common <= most:
        end, common = ends[-1], common + 1
        ends = ends[ends >= common]
        ends = ends[context[ends - common] == context[-1 - common]]
    following = context[end + 1:end + 1 + most].tolist()
    return (following * most)[:max(0, common - 1)]      # (if it ends too soon, it goes round)


class Guess(NamedTuple):
    """Tokens that may follow the context of a request: at the positions from `start` on."""
    request: Request
    start: int
    tokens: list[int]

    # As a Ticket has them, for str(batch):
    @property
    def conversation(self) -> Conversation:
        return self.request.conversation

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Behind(NamedTuple):
    """Stands for a request in sampling.py, with only what is read there. The token at
    position `total` is sampled, behind a guess."""
    sampling: object
    total: int


class GuessingScheduler(Scheduler):
    """A Scheduler whose decodes take guesses along."""

    def __init__(self, guesses: int, *arguments, **switches):
        """guesses: at most so many for each decode. The others are a Scheduler's."""
        super().__init__(*arguments, **switches)
        self.guesses = guesses
        self.stats.update(guesses=0, right_guesses=0)

    def schedule(self, now: float) -> Batch:
        """The next batch, with guesses for the decodes of requests that seem to copy. These decodes
        come last.

        Guesses take what is left: tokens of the budget, and slots that `KVCache.grow` has handed
        out ahead. None goes beyond the longest reply. A request whose guesses are wrong soon makes
        very few: PATIENCE.

        One step ahead the host does not know the last token, so it cannot guess what follows. If
        the context before that token seems to copy, a Guess without tokens makes the engine settle
        this batch at once (Engine._ahead), and the next one may guess."""
        batch = super().schedule(now)
        for request, _, end in batch.spans:
            if request.prefilling or request.sampling.looks_back:
                continue
            pending, tokens = request.last_token_pending, request.conversation.tokens
            patience = len(request.generated) // PATIENCE
            request.luck = min(request.luck, MOST_LUCK - patience)
            most = min(self.guesses, self.guesses + request.luck + patience, batch.budget)
            guess = copied(tokens[:-1] if pending else tokens, most)
            if guess:
                room = min(request.conversation.room, request.longest - 1) - end
                guess = [] if pending else guess[:room]     # []: settle this batch at once
                batch.guesses.append(Guess(request, end, guess))
                batch.budget -= len(guess)
        guessing = {guess.request for guess in batch.guesses}
        # (take_along lengthens the last ones. The sort keeps their order.)
        batch.spans.sort(key=lambda span: span.request in guessing)
        return batch

    def account(self, batch: Batch, result: Result, now: float) -> list[Request]:
        """As Scheduler.account. Then each right guess counts as if a step of its own had computed
        it, and had sampled the token behind it."""
        decoded = len(batch.placeholders)
        logprobs = result.logprobs or [None] * len(result.tokens)
        grown = super().account(
            batch, Result(result.tokens[:decoded], result.landed, logprobs[:decoded]), now)
        guessed = []
        for request, start, tokens in batch.guesses:
            request.luck -= len(tokens)
            guessed += [(request, position, token) for position, token in enumerate(tokens, start)]
        behind = zip(guessed, result.tokens[decoded:], logprobs[decoded:], strict=True)
        for (request, position, guess), token, logprob in behind:
            # (Behind a wrong guess the context ends before `position`: [] != [guess].)
            tokens = request.conversation.tokens
            if request.finish_reason or tokens[position:].tolist() != [guess]:
                continue
            self.cache.computed(request.conversation, position, position + 1)
            tokens.append(PLACEHOLDER)
            step = Batch(batch.step, budget=0)
            step.placeholders.append((request, position + 1))
            grown += super().account(step, Result([token], [], [logprob]), now)
            request.luck += GAIN
            self.stats["right_guesses"] += 1
        self.stats["guesses"] += len(guessed)
        return grown


def take_along(packed, guesses: list[Guess]):
    """Lengthen the last spans of a worker.Packed, the decodes of these guesses. A token is sampled
    behind each guess, too. These tokens come after those of all spans:

        tokens       a0 a1 | b7 | c9         a0 a1 | b7 guess guess | c9 guess
        sample_at    1, 2, 3                 1, 2, 5, 3, 4, 6"""
    count, behind = len(guesses), []
    decodes = packed.tokens[-count:]
    del packed.tokens[-count:], packed.sample_at[-count:]
    for nth, (guess, decode) in enumerate(zip(guesses, decodes), start=-count):     # from the end
        at = len(packed.tokens)
        packed.tokens.extend([decode, *guess.tokens])
        packed.end[nth] = guess.end
        packed.sample_at.append(at)
        behind += range(at + 1, len(packed.tokens))
        packed.sampling_requests.extend(Behind(guess.request.sampling, position + 1)
                                        for position in range(guess.start, guess.end))
    packed.sample_at.extend(behind)
