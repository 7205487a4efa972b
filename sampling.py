"""From logits to tokens: every row of a batch as its request wants it, by tensor operations.

    logits -> mask -> repetition penalty -> reply penalties -> bias -> temperature
           -> top_k -> top_p -> min_p -> noise -> argmax

Each stage changes the rows [n, vocab] whose requests ask for it. A stage that nobody asks for costs
nothing: a greedy batch is little more than an argmax. All that the stages must know is uploaded in
one copy, and on a GPU the host never looks at a result to decide what to do next. So the host waits
once for the device: after sample() and before read().

A random draw is an argmax, too. Let every token with probability p wait for a time E / p, where E
is drawn from Exp(1). The token that arrives first is a draw from p: it is the one with the largest
log p - log E (the Gumbel-max trick).

Invariant: E is a function of (seed, position of the drawn token, token id) alone, hashed in
integers. So a reply with a seed repeats, up to the rounding of its logits and of the stages,
whatever else is in the batch, after a suspension, and on any device.
"""
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from arrays import upload
from scheduler import Request

Numbers = TypeVar("Numbers", Tensor, np.ndarray)

LIMITS = {      # of each value, both inclusive; where the limits are ints, so must the value be
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (-2**63, 2**63 - 1),
    "logprobs": (0, 2**31 - 1),
    "prompt_logprobs": (0, 2**31 - 1),
}
BIAS = (-100.0, 100.0)


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a reply are chosen. ValueError for a value outside its limits."""
    temperature: float = 0.0            # 0 is greedy
    top_k: int = 0                      # draw from the k most likely tokens; 0: from all
    top_p: float = 1.0                  # draw from the fewest tokens that together are this likely
    min_p: float = 0.0          # draw from tokens at least this times as likely as the most likely
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the reply contains
    frequency_penalty: float = 0.0      # the same, times how often the reply contains it
    repetition_penalty: float = 1.0     # divides logits > 0 of the context's tokens, multiplies < 0
    seed: int = field(default_factory=lambda: random.getrandbits(32))
    logit_bias: dict[int, float] = field(default_factory=dict)      # token id -> added to its logit
    logprobs: int | None = None         # k: report the token's log probability, and the k largest
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, see scoring.py
    # Of serving/schemas.py: which tokens may follow. It has a state for each reply, so two requests
    # must not share a Sampling that has a grammar.
    grammar: Any = None

    @cached_property
    def looks_back(self) -> bool:
        """Must the host know all earlier tokens before it can ask for the next one?"""
        return (self.repetition_penalty != 1 or self.grammar is not None
                or bool(self.presence_penalty or self.frequency_penalty))

    @cached_property        # (written into __dict__ once, though the dataclass is frozen)
    def constraint(self):
        """constraint.mask(reply) says which tokens may follow this request's reply so far."""
        return self.grammar.constraint()

    def __post_init__(self):
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            left_out = value is None and name.endswith("logprobs")
            if not (left_out or within(value, low, high)):
                kind = "an int" if type(low) is int else "a number"
                raise ValueError(f"{name} must be {kind} from {low} to {high}, got {value!r:.100}")
        bias = self.logit_bias
        if not isinstance(bias, dict) or not all(
                type(token) is int and within(value, *BIAS) for token, value in bias.items()):
            raise ValueError("logit_bias must be a dict of token ids to numbers "
                             f"from {BIAS[0]} to {BIAS[1]}, got {bias!r:.100}")


def within(value, low, high) -> bool:
    """Whether value is a number between the limits, an int if they are. (True is no number.)"""
    return type(value) in (int, type(low)) and low <= value <= high


def sample(logits: Tensor, requests: list[Request]) -> list[Tensor]:
    """A token from each row of logits [N, vocab] float32, for its request; -1 where the largest of
    a row, after all stages, is NaN or infinite. The logits are used up.

    The results stay on the device: the tokens [N], and, if requests ask for log probabilities, the
    log_probabilities() of their rows. They are those before mask, penalties, bias and temperature:
    they say what the model believes, not what the draw was asked for."""
    # For two requests, the first greedy, the second with temperature 0.7 and logprobs 3:
    #     reported    [1]
    #     asked       (temperature, [1])       (noise, [1])
    #     told        [1] and [0.7]            [1] and [its key]      on the device
    reported = rows_to_report(requests)
    asked = [(stage, rows) for stage in STAGES if (rows := rows_that(requests, stage.is_asked_for))]
    groups = [[np.array(rows), *stage.tell([requests[i] for i in rows])] for stage, rows in asked]
    told = []
    if asked or reported:
        (reported_rows,), *told = upload_groups([[np.array(reported, int)], *groups], logits.device)
    if reported:
        believed = logits[reported_rows].log_softmax(-1)                        # [reported, vocab]
    for (stage, rows), (rows_on_device, *columns) in zip(asked, told, strict=True):
        if len(rows) == len(requests):
            logits = stage.change(logits, *columns)
        else:
            logits[rows_on_device] = stage.change(logits[rows_on_device], *columns)
    largest, tokens = logits.max(-1)                # [N] twice; NaN is the largest, if there is one
    sampled = tokens.where(largest.abs() < torch.inf, -1)
    if not reported:
        return [sampled]
    top = max(requests[i].sampling.logprobs for i in reported)
    return [sampled, *log_probabilities(believed, tokens[reported_rows], top)]


def rows_that(requests: list[Request], ask: Callable) -> list[int]:
    """The rows of the requests whose sampling asks for something."""
    return [i for i, request in enumerate(requests) if ask(request.sampling)]


def rows_to_report(requests: list[Request]) -> list[int]:
    """The rows of the requests that ask for log probabilities."""
    return rows_that(requests, lambda sampling: sampling.logprobs is not None)


def log_probabilities(logprobs: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """logprobs [n, vocab], tokens [n] -> the log probability of each row's token, [n]; the token
    ids and the log probabilities of its `top` most likely tokens (at most vocab), [n, top] each."""
    best = logprobs.topk(min(top, logprobs.shape[1]))                           # [n, top]
    return logprobs.gather(1, tokens[:, None])[:, 0], best.indices, best.values


def read(requests: list[Request], tokens: Tensor,
         *logprobs: Tensor) -> tuple[list[int], list | None]:
    """The results of sample(), once they are on the host, as numbers: the tokens, and a report for
    each request.

    A request with logprobs=2 gets the report (log probability of its token, [(token id, log
    probability), (token id, log probability)]: the two most likely), and one with logprobs=None
    gets None. If that is so for all, the list of reports is None, too."""
    if not logprobs:
        return tokens.tolist(), None
    reports: list = [None] * len(requests)
    columns = (part.tolist() for part in logprobs)
    for row, own, ids, values in zip(rows_to_report(requests), *columns):
        top = requests[row].sampling.logprobs
        reports[row] = own, list(zip(ids[:top], values[:top]))
    return tokens.tolist(), reports


# ---- stages: they may overwrite the logits [n, vocab] that they change

class Stage(NamedTuple):
    """A change to the logits of the n requests that ask for it."""
    is_asked_for: Callable[[Sampling], object]      # true or false
    tell: Callable[[list[Request]], list]   # what the change must know of them: arrays, and ints
    change: Callable[..., Tensor]                   # (their logits [n, vocab], *told) -> [n, vocab]


def tell_values(*names: str) -> Callable[[list[Request]], list]:
    """A stage's `tell`: the sampling values of these names."""
    return lambda requests: [column(requests, name) for name in names]


def tell_masks(requests: list[Request]) -> list:
    return [np.stack([request.sampling.constraint.mask(request.generated) for request in requests])]


def keep_allowed(logits: Tensor, masks: Tensor) -> Tensor:
    """masks: int32 [n, words], 32 * words >= vocab. If token 32 w + i may come, bit i of word w is 1."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    allowed = bits.flatten(1)[:, :logits.shape[1]].bool()                       # [n, vocab]
    return logits.masked_fill_(~allowed, -torch.inf)


def tell_context(requests: list[Request]) -> list:
    return [*entries([request.conversation.tokens for request in requests]),
            column(requests, "repetition_penalty")]


def penalize_repetition(logits: Tensor, rows: Tensor, tokens: Tensor, penalty: Tensor) -> Tensor:
    """By the tokens of the whole context. A token that occurs twice is penalized once."""
    values, penalty = logits[rows, tokens], penalty[rows]
    penalized = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_put_((rows, tokens), penalized)


def tell_reply(requests: list[Request]) -> list:
    return [*entries([request.generated for request in requests]),
            column(requests, "presence_penalty"), column(requests, "frequency_penalty")]


def penalize_reply(logits: Tensor, rows: Tensor, tokens: Tensor, presence: Tensor,
                   frequency: Tensor) -> Tensor:
    """By the tokens of the reply: one that occurs n times loses presence + n * frequency."""
    logits.index_put_((rows, tokens), logits[rows, tokens] - presence[rows])
    return logits.index_put_((rows, tokens), -frequency[rows], accumulate=True)


def tell_bias(requests: list[Request]) -> list:
    biases = [request.sampling.logit_bias for request in requests]
    values = [value for bias in biases for value in bias.values()]
    return [*entries([list(bias) for bias in biases]), np.array(values, np.float32)]


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    return logits.index_put_((rows, tokens), values, accumulate=True)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """A temperature below 1e-5 counts as 1e-5: almost greedy, and no division overflows."""
    return logits.div_(temperature[:, None].clamp(min=1e-5))


def tell_top_k(requests: list[Request]) -> list:
    top_k = column(requests, "top_k", np.int32)
    return [top_k, int(top_k.max())]


def keep_top_k(logits: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """In this and the next two stages, tokens that tie with the last one kept are kept, too."""
    ranked = logits.topk(min(largest_k, logits.shape[1])).values        # [n, largest_k], descending
    last = top_k[:, None].long().clamp_(max=ranked.shape[1]) - 1                # [n, 1]
    return logits.masked_fill_(logits < ranked.gather(1, last), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    share = logits.softmax(1)                                                   # [n, vocab]
    width = 64 if logits.device.type == "cpu" else logits.shape[1]
    return logits.masked_fill_(share < least_share(share, top_p[:, None], width), -torch.inf)


def least_share(share: Tensor, top_p: Tensor, width: int) -> Tensor:
    """The smallest share of the probability, [n, 1], among the fewest tokens that together hold
    top_p [n, 1]; share [n, vocab].

        shares 0.5, 0.3, 0.1, 0.1 and top_p 0.7    the first two hold 0.8 -> 0.3
        before   0, 0.5, 0.8, 0.9                  two of these are below 0.7: 2 tokens are needed

    These tokens are mostly few, and to rank few is cheaper. So we rank only the best `width` of
    each row. The rows of which more may be needed are ranked again, 16 times as wide. On a GPU the
    host would have to wait to know these rows: there `width` is that of the vocabulary."""
    best = share.topk(min(width, share.shape[1])).values                    # [n, width], descending
    before = best.cumsum(1) - best                                      # held by the better tokens
    needed = (before < top_p).sum(1, keepdim=True).clamp(min=1)     # [n, 1]; of NaN none is less
    least = best.gather(1, needed - 1)                                          # [n, 1]
    if width < share.shape[1]:
        short = (before[:, -1] < top_p[:, 0]).nonzero()[:, 0]                   # rows
        if len(short):
            least[short] = least_share(share[short], top_p[short], 16 * width)
    return least


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    floor = logits.amax(1, keepdim=True) + min_p[:, None].log()                 # [n, 1]
    return logits.masked_fill_(logits < floor, -torch.inf)


def tell_noise(requests: list[Request]) -> list:
    return [noise_keys([request.sampling.seed for request in requests],
                       [request.total for request in requests])]


def add_noise(logits: Tensor, keys: Tensor) -> Tensor:
    """log p - log E, up to a constant per row."""
    waiting = uniform(keys, logits.shape[1]).neg_().log1p_().neg_()         # [n, vocab] from Exp(1)
    return logits.sub_(waiting.log_())


# Greedy rows need no top_k, top_p or min_p: these do not change the argmax.
STAGES = (
    Stage(lambda sampling: sampling.grammar, tell_masks, keep_allowed),
    Stage(lambda sampling: sampling.repetition_penalty != 1, tell_context, penalize_repetition),
    Stage(lambda sampling: sampling.presence_penalty or sampling.frequency_penalty, tell_reply,
          penalize_reply),
    Stage(lambda sampling: sampling.logit_bias, tell_bias, add_bias),
    Stage(lambda sampling: sampling.temperature not in (0, 1), tell_values("temperature"),
          apply_temperature),
    Stage(lambda sampling: sampling.temperature and sampling.top_k, tell_top_k, keep_top_k),
    Stage(lambda sampling: sampling.temperature and sampling.top_p < 1, tell_values("top_p"),
          keep_top_p),
    Stage(lambda sampling: sampling.temperature and sampling.min_p, tell_values("min_p"),
          keep_min_p),
    Stage(lambda sampling: sampling.temperature, tell_noise, add_noise))


# ---- what the stages are made of

def noise_keys(seeds: list[int], positions: list[int]) -> np.ndarray:
    """int32, a function of the seed (64 bits) and the position: [n]."""
    seed: np.ndarray = np.array(seeds)
    key: np.ndarray = np.ones(len(seeds), np.int32)
    for word in (seed >> 32, seed, np.array(positions)):
        key = mix(key ^ word.astype(np.int32))                              # of its lower 32 bits
    return mix(key)


def uniform(keys: Tensor, vocab_size: int) -> Tensor:
    """Numbers [n, vocab_size] from (0, 1) in float32, each a function of its key, keys [n], and its
    token id. They are most precise near 0, where the tokens that win a race are."""
    token = mix(torch.arange(vocab_size, dtype=torch.int32, device=keys.device))        # [vocab]
    bits = mix(token ^ keys[:, None]) & 0x7FFFFFFF                              # [n, vocab]
    # 2**-31 would make 1 of the largest; the next smaller float32 makes 1 - 2**-24 of it.
    return bits.float().add_(0.5).mul_(2**-31 - 2**-55)


def mix(x: Numbers) -> Numbers:
    """A bijection of 32-bit integers that leaves nothing of their order (Wellons' lowbias32).

    It gives the same bits on any device: products of int32 wrap, and the masks remove the signs
    that its shifts keep."""
    x = x ^ (x >> 16 & 0xFFFF)
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32             # as an int32
    x ^= x >> 16 & 0xFFFF
    return x


def column(requests: list[Request], name: str, dtype=np.float32) -> np.ndarray:
    """The sampling value of that name of each request: [n]."""
    return np.array([getattr(request.sampling, name) for request in requests], dtype)


def entries(sequences: list) -> tuple[np.ndarray, np.ndarray]:
    """Row and token id, in [n, vocab], of every token of n sequences.
    [[7, 5], [9]] -> [0, 0, 1] and [7, 5, 9]."""
    rows = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    return rows, np.concatenate(sequences).astype(np.int32)     # of empty lists numpy makes floats


def upload_groups(groups: list[list], device: torch.device) -> list[list]:
    """The groups with a tensor on the device for each array: int32 for integers, or float32. All
    arrays are uploaded in one copy. Numbers stay numbers."""
    arrays = [member for group in groups for member in group if isinstance(member, np.ndarray)]
    bits = [array.view(np.int32) if array.dtype == np.float32 else array for array in arrays]
    tensors = iter([tensor.view(torch.float32) if array.dtype == np.float32 else tensor
                    for array, tensor in zip(arrays, upload(bits, device))])
    return [[next(tensors) if isinstance(member, np.ndarray) else member for member in group]
            for group in groups]
