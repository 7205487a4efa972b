"""From logits to tokens: every row of a batch as its own request wants it, in one pass of tensor
operations.

    logits -> repetition penalty -> reply penalties -> bias -> temperature -> top_k -> top_p -> min_p
           -> noise -> argmax

Each stage is a function of the rows [n, vocab] whose requests ask for it. A stage that nobody asks
for costs nothing: a greedy batch is one argmax.

A random draw is an argmax, too. Let every token with probability p wait for a time E / p, where E
is drawn from Exp(1). The token that arrives first is a draw from p: it is the one with the largest
log p - log E (the Gumbel-max trick).

Invariant: E is a function of (seed, position, token id) alone, hashed in integers. So a reply with
a seed repeats whatever else is in the batch, after a suspension, and on any device.
"""
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attention_kernel import upload
from scheduler import Request

LIMITS = {      # of each value, both inclusive; where the limits are ints, so must the value be
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (-2**63, 2**63 - 1),
    "logprobs": (0, 20),
}
BIAS = (-100.0, 100.0)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a reply are chosen. ValueError for a value outside its limits."""
    temperature: float = 0.0            # 0 is greedy
    top_k: int = 0                      # draw from the k most likely tokens; 0: from all
    top_p: float = 1.0                  # draw from the fewest tokens that together are this likely
    min_p: float = 0.0                  # draw from tokens that are this share as likely as the most likely
    presence_penalty: float = 0.0       # subtracted from the logit of each token that the reply contains
    frequency_penalty: float = 0.0      # the same, times how often the reply contains it
    repetition_penalty: float = 1.0     # divides positive logits of the context's tokens, multiplies negative
    seed: int = field(default_factory=lambda: random.getrandbits(32))
    logit_bias: dict[int, float] = field(default_factory=dict)      # token id -> added to its logit
    logprobs: int | None = None         # report log probabilities: the token's, and the k largest

    def __post_init__(self):
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not within(value, low, high) and (name, value) != ("logprobs", None):
                kind = "an int" if type(low) is int else "a number"
                raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r}")
        bias = self.logit_bias
        if not isinstance(bias, dict) or not all(
                type(token) is int and within(value, *BIAS) for token, value in bias.items()):
            raise ValueError("logit_bias must be a dict of token ids to numbers "
                             f"from {BIAS[0]} to {BIAS[1]}, got {bias!r}")


def within(value, low, high) -> bool:
    """Whether value is a number between the limits, of their type; True and False are no numbers."""
    return type(value) in (int, type(low)) and low <= value <= high


def sample(logits: Tensor, requests: list[Request]) -> tuple[list[int], list | None]:
    """A token from each row of logits [N, vocab] float32, for its request; -1 from a row with NaN or
    infinity. The logits are used up.

    The second result is None, unless a request asks for log probabilities: then there is an entry
    for each row, None or (the token's, [(token id, its log probability), ...] of the most likely).
    Log probabilities are those before penalties, bias and temperature: they say what the model
    believes, not what the draw was asked for."""
    finite = logits.sum(-1).isfinite()                  # [N]; one NaN or infinity makes the sum one
    logits.masked_fill_(~finite[:, None], 0)            # the stages and the report need numbers
    asking = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    believed = logits[asking].log_softmax(-1) if asking else None               # [asking, vocab]
    for is_asked_for, apply in STAGES:
        rows = [i for i, request in enumerate(requests) if is_asked_for(request.sampling)]
        if rows:
            logits[rows] = apply(logits[rows], [requests[i] for i in rows])
    tokens = logits.argmax(-1)                                                  # [N]
    sampled = tokens.where(finite, -1)
    if not asking:
        return sampled.tolist(), None
    reports = [None] * len(requests)
    tops = [requests[i].sampling.logprobs for i in asking]
    for i, one in zip(asking, report(believed, tokens[asking], tops)):
        reports[i] = one
    return sampled.tolist(), reports


def report(logprobs: Tensor, tokens: Tensor, tops: list[int]) -> list[tuple]:
    """For each row of logprobs [n, vocab]: that of its token, tokens [n], and (token id, value) of
    as many of the largest as tops[row] says."""
    best = logprobs.topk(min(max(tops), logprobs.shape[1]))                     # [n, largest top]
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    rows = zip(own, best.indices.tolist(), best.values.tolist(), tops)
    return [(value, list(zip(ids[:top], values[:top]))) for value, ids, values, top in rows]


# ---- stages: (logits [n, vocab], their n requests) -> [n, vocab]; they may overwrite the logits

def penalize_repetition(logits: Tensor, requests: list[Request]) -> Tensor:
    """By the tokens of the whole context. A token that occurs twice is penalized once."""
    rows, tokens = entries([request.conversation.tokens for request in requests], logits.device)
    values, penalty = logits[rows, tokens], column(requests, "repetition_penalty", logits)[rows, 0]
    penalized = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_put_((rows, tokens), penalized)


def penalize_reply(logits: Tensor, requests: list[Request]) -> Tensor:
    """By the tokens of the reply: once for each token, and once more for each of its occurrences."""
    rows, tokens = entries([request.generated for request in requests], logits.device)
    presence = column(requests, "presence_penalty", logits)[rows, 0]
    frequency = column(requests, "frequency_penalty", logits)[rows, 0]
    logits.index_put_((rows, tokens), logits[rows, tokens] - presence)
    return logits.index_put_((rows, tokens), -frequency, accumulate=True)


def add_bias(logits: Tensor, requests: list[Request]) -> Tensor:
    biases = [request.sampling.logit_bias for request in requests]
    values = [value for bias in biases for value in bias.values()]
    values = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    rows_and_tokens = entries([list(bias) for bias in biases], logits.device)
    return logits.index_put_(rows_and_tokens, values, accumulate=True)


def apply_temperature(logits: Tensor, requests: list[Request]) -> Tensor:
    """Below 1e-5 a draw is greedy anyway, and floats would overflow."""
    return logits.div_(column(requests, "temperature", logits).clamp(min=1e-5))


def keep_top_k(logits: Tensor, requests: list[Request]) -> Tensor:
    """In this and the next two stages, tokens that tie with the last one kept are kept, too."""
    top_k = [min(request.sampling.top_k, logits.shape[1]) for request in requests]
    ranked = logits.topk(max(top_k)).values                                     # [n, largest k], descending
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1               # [n, 1]
    return logits.masked_fill_(logits < ranked.gather(1, last), -torch.inf)


def keep_top_p(logits: Tensor, requests: list[Request]) -> Tensor:
    share = logits.softmax(1)                                                   # [n, vocab]
    least = least_share(share, column(requests, "top_p", logits))               # [n, 1]
    return logits.masked_fill_(share < least, -torch.inf)


def least_share(share: Tensor, top_p: Tensor, width: int = 64) -> Tensor:
    """The smallest share of the probability, [n, 1], among the fewest tokens that together hold
    top_p [n, 1]; share [n, vocab].

    These tokens are mostly few. So we rank only the best `width` of each row, and do it again with
    16 times as many for the rows where these do not suffice.

        shares 0.5, 0.3, 0.1, 0.1 and top_p 0.7:  the first two hold 0.8 -> 0.3
    """
    best = share.topk(min(width, share.shape[1])).values                        # [n, width], descending
    before = best.cumsum(1) - best                                              # held by the better tokens
    least = best.gather(1, (before < top_p).sum(1, keepdim=True) - 1)           # [n, 1]
    short = (before[:, -1] < top_p[:, 0]).nonzero()[:, 0]                       # rows
    if width < share.shape[1] and len(short):
        least[short] = least_share(share[short], top_p[short], 16 * width)
    return least


def keep_min_p(logits: Tensor, requests: list[Request]) -> Tensor:
    floor = logits.amax(1, keepdim=True) + column(requests, "min_p", logits).log()      # [n, 1]
    return logits.masked_fill_(logits < floor, -torch.inf)


def add_noise(logits: Tensor, requests: list[Request]) -> Tensor:
    """log p - log E, up to a constant per row."""
    seeds = [request.sampling.seed for request in requests]
    positions = [request.total for request in requests]
    noise = uniform(seeds, positions, logits.shape[1], logits.device)           # [n, vocab]
    waiting = noise.neg_().log1p_().neg_()                                      # [n, vocab] from Exp(1)
    return logits.sub_(waiting.log_())


# (who asks for it, the stage). Greedy rows need no top_k, top_p or min_p: these do not change the argmax.
STAGES = (
    (lambda sampling: sampling.repetition_penalty != 1, penalize_repetition),
    (lambda sampling: sampling.presence_penalty or sampling.frequency_penalty, penalize_reply),
    (lambda sampling: sampling.logit_bias, add_bias),
    (lambda sampling: sampling.temperature not in (0, 1), apply_temperature),
    (lambda sampling: sampling.temperature and sampling.top_k, keep_top_k),
    (lambda sampling: sampling.temperature and sampling.top_p < 1, keep_top_p),
    (lambda sampling: sampling.temperature and sampling.min_p, keep_min_p),
    (lambda sampling: sampling.temperature, add_noise))


# ---- what the stages are made of

def uniform(seeds: list[int], positions: list[int], vocab_size: int, device: torch.device) -> Tensor:
    """Numbers [N, vocab_size] from (0, 1) in float32, each a function of its seed (64 bits), its
    position and its token id. They are most precise near 0, where the tokens that win a race are."""
    words = [[seed >> 32, seed, position] for seed, position in zip(seeds, positions)]
    words = torch.tensor(words, device=device).to(torch.int32)                  # [N, 3], the lower 32 bits
    key = torch.ones(len(seeds), dtype=torch.int32, device=device)              # [N]
    for word in words.unbind(1):
        key = mix(key ^ word)
    token = mix(torch.arange(vocab_size, dtype=torch.int32, device=device))     # [vocab]
    bits = mix(token ^ mix(key)[:, None]) & 0x7FFFFFFF                          # [N, vocab]
    return bits.float().add_(0.5).mul_(2**-31 - 2**-55)                         # rounded, still below 1


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that leaves nothing of their order (Wellons' lowbias32).

    It gives the same bits on any device: products of int32 wrap, and the masks remove the signs
    that its shifts keep."""
    x = x ^ (x >> 16 & 0xFFFF)
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= x >> 16 & 0xFFFF
    return x


def column(requests: list[Request], name: str, like: Tensor) -> Tensor:
    """The sampling value of that name of each request: [n, 1], of the type and on the device of
    `like`."""
    values = [getattr(request.sampling, name) for request in requests]
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def entries(sequences: list, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column in [n, vocab] of every token of n sequences.
    [[7, 5], [9]] -> [0, 0, 1] and [7, 5, 9]."""
    rows = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    columns = np.concatenate(sequences).astype(np.int32)        # of empty lists numpy makes floats
    rows, columns = upload([rows, columns], device)
    return rows, columns
