"""From logits to tokens: every row of a batch as its own request wants it, in one pass of tensor operations.

    logits -> repetition penalty -> reply penalties -> bias -> temperature -> top_k -> top_p -> min_p -> noise -> argmax

Each stage is a function of the rows [n, vocab] that ask for it, and what nobody asks for costs nothing: a greedy batch is one argmax.
A draw is an argmax, too. If every token waits for an Exp(1) time E divided by its probability p, the first to arrive is a draw
from p: the one with the largest log p - log E (the Gumbel-max trick).

Invariant: E is a function of (seed, position, token id) alone, hashed in integers. So a seeded reply repeats whatever else is in
the batch, after a suspension, and on any device."""
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from attention_kernel import upload
from scheduler import Request

LIMITS = {                                     # of each value, both inclusive; where they are ints, so is the value
    "temperature": (0.0, 100.0), "top_k": (0, 2**31 - 1), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0), "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (0.01, 100.0), "seed": (-2**63, 2**63 - 1), "logprobs": (0, 20)}
BIAS = (-100.0, 100.0)


@dataclass(frozen=True)
class Sampling:
    """How a reply's tokens are chosen. ValueError for a value outside its limits."""
    temperature: float = 0.0                   # 0 is greedy
    top_k: int = 0                             # draw from the k most likely; 0: from all
    top_p: float = 1.0                         # draw from the fewest that hold this share of the probability
    min_p: float = 0.0                         # draw from those that have this share of the most likely one's probability
    presence_penalty: float = 0.0              # subtracted from the logit of each token that the reply contains
    frequency_penalty: float = 0.0             # the same, times how often the reply contains it
    repetition_penalty: float = 1.0            # of each token in the whole context: divides positive logits, multiplies negative ones
    seed: int = field(default_factory=lambda: random.getrandbits(32))
    logit_bias: dict[int, float] = field(default_factory=dict)      # by token id: added to its logit
    logprobs: int | None = None                # report each token's log probability, and those of the k most likely

    def __post_init__(self):
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not within(value, low, high) and (name, value) != ("logprobs", None):
                raise ValueError(f"{name} must be {'an int' if type(low) is int else 'a number'} from {low} to {high}, got {value!r}")
        bias = self.logit_bias
        if not isinstance(bias, dict) or not all(type(token) is int and within(value, *BIAS) for token, value in bias.items()):
            raise ValueError(f"logit_bias must be a dict of token ids to numbers from {BIAS[0]} to {BIAS[1]}, got {bias!r}")


def within(value, low, high) -> bool:
    return type(value) in (int, type(low)) and low <= value <= high         # a bool is no number here


def sample(logits: torch.Tensor, requests: list[Request]) -> tuple[list[int], list | None]:
    """A token from each row of logits [N, vocab] float32, which is used up; and, if anyone asks for log probabilities, for each
    row (the token's, [(token id, its), ...] of the most likely), or None. These are the model's own, before penalties, bias and
    temperature: they say what the model believes, whatever was asked of the draw."""
    asking = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    believed = logits[asking].log_softmax(-1) if asking else None           # [asking, vocab]
    for asks, change in STAGES:
        if rows := [i for i, request in enumerate(requests) if asks(request.sampling)]:
            logits[rows] = change(logits[rows], [requests[i] for i in rows])
    tokens = logits.argmax(-1)                                              # [N]
    if not asking:
        return tokens.tolist(), None
    reports = dict(zip(asking, report(believed, tokens[asking], [requests[i].sampling.logprobs for i in asking])))
    return tokens.tolist(), [reports.get(i) for i in range(len(requests))]


def report(logprobs: torch.Tensor, tokens: torch.Tensor, tops: list[int]) -> list[tuple]:
    """For each row of logprobs [n, vocab] its token's, and the `top` largest with their ids."""
    best = logprobs.topk(min(max(tops), logprobs.shape[1]))                 # [n, largest top]
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return [(mine, list(zip(ids[:top], values[:top]))) for mine, ids, values, top
            in zip(own, best.indices.tolist(), best.values.tolist(), tops)]


# ---- stages: (logits [n, vocab], their n requests) -> [n, vocab]; they may overwrite what they are given

def penalize_repetition(logits, requests):
    seen = places([request.conversation.tokens for request in requests], logits.device)
    values, penalty = logits[seen], column(requests, "repetition_penalty", logits)[seen[0], 0]          # [seen] each
    return logits.index_put_(seen, torch.where(values > 0, values / penalty, values * penalty))      # a place named twice gets one value


def penalize_reply(logits, requests):
    said = places([request.generated for request in requests], logits.device)
    presence, frequency = (column(requests, name, logits)[said[0], 0] for name in ("presence_penalty", "frequency_penalty"))
    return logits.index_put_(said, logits[said] - presence).index_put_(said, -frequency, accumulate=True)


def add_bias(logits, requests):
    biases = [request.sampling.logit_bias for request in requests]
    values = torch.tensor([value for bias in biases for value in bias.values()], dtype=logits.dtype, device=logits.device)
    return logits.index_put_(places([list(bias) for bias in biases], logits.device), values, accumulate=True)


def heat(logits, requests):
    return logits.div_(column(requests, "temperature", logits).clamp(min=1e-5))     # below that a draw is greedy, and floats overflow


def cut_to_top_k(logits, requests):
    """Ties with the last one kept are kept, too: in each of these cuts."""
    top_k = [min(request.sampling.top_k, logits.shape[1]) for request in requests]
    ranked = logits.topk(max(top_k)).values                                 # [n, largest k], descending
    last = torch.tensor(top_k, device=logits.device)[:, None] - 1           # [n, 1]
    return logits.masked_fill_(logits < ranked.gather(1, last), -torch.inf)


def cut_to_top_p(logits, requests):
    share = logits.softmax(1)                                               # [n, vocab]
    return logits.masked_fill_(share < least_share(share, column(requests, "top_p", logits)), -torch.inf)


def least_share(share, top_p, width: int = 64) -> torch.Tensor:
    """The smallest share of the probability, [n, 1], among the fewest tokens that together hold top_p [n, 1]. These are mostly few:
    only a row whose best `width` do not suffice looks at more, and hardly any is sorted whole."""
    best = share.topk(min(width, share.shape[1])).values                    # [n, width], descending
    before = best.cumsum(1) - best                                          # what the better ones hold together
    least = best.gather(1, (before < top_p).sum(1, keepdim=True) - 1)
    short = (before[:, -1] < top_p[:, 0]).nonzero()[:, 0]
    if width < share.shape[1] and len(short):
        least[short] = least_share(share[short], top_p[short], 16 * width)
    return least


def cut_to_min_p(logits, requests):
    floor = logits.amax(1, keepdim=True) + column(requests, "min_p", logits).log()      # [n, 1]
    return logits.masked_fill_(logits < floor, -torch.inf)


def add_noise(logits, requests):
    seeds, positions = [request.sampling.seed for request in requests], [request.total for request in requests]
    waiting = uniform(seeds, positions, logits.shape[1], logits.device).neg_().log1p_().neg_()      # [n, vocab], Exp(1)
    return logits.sub_(waiting.log_())


STAGES = (                                     # who asks for it, and what is done; a cut changes no argmax, so greedy rows need none
    (lambda s: s.repetition_penalty != 1, penalize_repetition),
    (lambda s: s.presence_penalty or s.frequency_penalty, penalize_reply),
    (lambda s: s.logit_bias, add_bias),
    (lambda s: s.temperature not in (0, 1), heat),
    (lambda s: s.temperature and s.top_k, cut_to_top_k),
    (lambda s: s.temperature and s.top_p < 1, cut_to_top_p),
    (lambda s: s.temperature and s.min_p, cut_to_min_p),
    (lambda s: s.temperature, add_noise))


# ---- what the stages are made of

def uniform(seeds: list[int], positions: list[int], vocab_size: int, device) -> torch.Tensor:
    """[N, vocab_size] numbers from (0, 1), float32, each a function of its seed (64 bits), position and token id. They keep their
    precision towards 0, where the winners of a race are."""
    words = torch.tensor([[seed >> 32, seed, position] for seed, position in zip(seeds, positions)], device=device)     # [N, 3] int64
    key = torch.ones(len(seeds), dtype=torch.int32, device=device)
    for word in words.to(torch.int32).unbind(1):                            # the lower 32 bits of each
        key = mix(key ^ word)
    token = mix(torch.arange(vocab_size, dtype=torch.int32, device=device))             # [vocab]
    bits = mix(token ^ mix(key)[:, None]) & 0x7FFFFFFF                      # [N, vocab]
    return bits.float().add_(0.5).mul_(2**-31 - 2**-55)                     # rounded, the largest is still below 1


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers after which nothing of their order is left (Wellons' lowbias32). int32 products wrap and
    its shifts keep the sign, which the masks remove: the same bits on any device."""
    x = x ^ (x >> 16 & 0xFFFF)
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= x >> 16 & 0xFFFF
    return x


def column(requests, name, like) -> torch.Tensor:
    """A sampling value of each request, [n, 1]."""
    return torch.tensor([getattr(request.sampling, name) for request in requests], dtype=like.dtype, device=like.device)[:, None]


def places(sequences, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column in [n, vocab] of every token of n sequences."""
    rows = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    rows, columns = upload([rows, np.concatenate(sequences)], device)
    return rows, columns
