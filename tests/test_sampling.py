"""Every row as its request wants it: the distributions drawn from, the noise, penalties, log
probabilities. Oracles: transformers, float64."""
import random
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import (AutoModelForCausalLM, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
                          TemperatureLogitsWarper, TopKLogitsWarper,
                          TopPLogitsWarper)

import sampling
from engine import Engine
from eviction import RecomputeCost
from sampling import Sampling, noise_keys, read, sample, uniform, upload_groups
from streams import OperatorWatcher

TINY_CHAT = Path(__file__).parent.parent / "tiny_chat"
COST = RecomputeCost({8: 1e-3, 1024: 4e-3}, rest=1e-3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def row(position=3, context=(1, 2, 3), generated=(), **values):
    """What sampling sees of a request."""
    return SimpleNamespace(sampling=Sampling(**values), total=position, generated=list(generated),
                           conversation=SimpleNamespace(tokens=array("i", [*context, *generated])))


def sampled(logits, rows):
    return read(rows, *sample(logits, rows))


def changed(stage, logits, rows):
    (told,) = upload_groups([stage.tell(rows)], logits.device)
    return stage.change(logits, *told)


def noise(seeds, positions, vocab, device="cpu"):
    return uniform(torch.tensor(noise_keys(seeds, positions), device=device), vocab)


def some_logits(rows, vocab, seed=0, spread=2.0):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def p_value(observed, expected):
    """Pearson's chi-square test; categories of small expectation are taken together."""
    rare = expected < 8
    observed, expected = (torch.cat([x[~rare], x[rare].sum()[None]]).double() for x in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    half = torch.tensor([(len(observed) - 1) / 2]).double()
    return torch.special.gammaincc(half, ((observed - expected) ** 2 / expected).sum() / 2).item()


def by_transformers(logits, temperature, top_k=40, top_p=1.0, min_p=0.0):
    """The distribution that transformers would draw from, [n, 40]."""
    for warper in (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p),
                   MinPLogitsWarper(min_p)):
        logits = warper(None, logits)
    return logits.softmax(-1)


@pytest.fixture(scope="module")
def engine():
    engine = Engine("tiny_chat", cost=COST)
    yield engine
    engine.close()


# ---- what is drawn

SHAPES = [dict(temperature=1.0), dict(temperature=0.6), dict(temperature=2.5),
          dict(temperature=1.0, top_k=5), dict(temperature=1.3, top_p=0.7),
          dict(temperature=1.0, min_p=0.2), dict(temperature=0.9, top_k=12, top_p=0.8, min_p=0.05)]


@pytest.mark.parametrize("values", SHAPES)
@pytest.mark.parametrize("keyed_by", ["seed", "position"])
def test_draws_follow_the_distribution_that_transformers_gives(values, keyed_by):
    draws, logits = 8000, some_logits(1, 40)
    requests = [row(i, seed=5, **values) if keyed_by == "position" else row(seed=i, **values)
                for i in range(draws)]
    tokens, _ = sampled(logits.repeat(draws, 1), requests)
    observed = torch.bincount(torch.tensor(tokens), minlength=40)
    expected = draws * by_transformers(logits, **values)[0]
    assert not observed[expected == 0].any() and p_value(observed, expected) > 1e-3


# The second is peaked: its best 64 hold top_p.
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("name, choices, warper", [
    ("top_k", [1, 2, 50, 1999, 2000, 10**6], TopKLogitsWarper),
    ("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999], TopPLogitsWarper),
    ("min_p", [1e-4, 0.01, 0.3, 0.5, 0.9, 1.0], MinPLogitsWarper)])
def test_cuts_keep_what_transformers_keeps(name, choices, warper, spread):
    """Each row by a value of its own."""
    cut, = (stage for stage in sampling.STAGES if stage.change.__name__ == f"keep_{name}")
    logits = some_logits(len(choices), 2000, spread=spread)
    ours = changed(cut, logits.clone(), [row(temperature=1.0, **{name: choice}) for choice in choices])
    theirs = [warper(choice)(None, logits[i:i + 1]) for i, choice in enumerate(choices)]
    assert torch.equal(ours, torch.cat(theirs))


def test_greedy_rows_take_the_best_whatever_they_would_draw_from():
    logits = some_logits(4, 50)
    rows = [row(), row(top_k=3, top_p=0.5, min_p=0.9, seed=7), row(temperature=1.0, top_k=1),
            row(temperature=1e-9)]
    assert sampled(logits.clone(), rows)[0] == logits.argmax(-1).tolist()


def test_huge_logits_and_extreme_values_give_tokens_of_the_vocabulary():
    logits = some_logits(6, 50, spread=1e4)
    rows = [row(temperature=t, top_p=p, min_p=m, logit_bias={0: -100.0}) for t, p, m in
            [(1e-300, 1, 0), (100, 1e-6, 1), (1e-5, 0.5, 0.5), (1, 1 - 1e-12, 0), (100, 1, 0), (0.01, 1, 1)]]
    assert all(0 <= token < 50 for token in sampled(logits.clone(), rows)[0])
    # All tied: all kept.
    assert sampled(torch.zeros(1, 50), [row(temperature=1.0, top_p=0.5)])[0][0] in range(50)


# ---- the noise

def mix(x):
    """lowbias32, in Python's unbounded integers."""
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("device", DEVICES)
def test_noise_is_the_same_everywhere(device):
    seeds, positions = [0, 1, 2**32, -1, 2**63 - 1, -2**63, 12345], [1, 2, 3, 100_000, 7, 0, 2**31 - 1]
    ours = noise(seeds, positions, 60_000, device)
    assert torch.equal(ours.cpu(), noise(seeds, positions, 60_000))
    for i, (seed, position) in enumerate(zip(seeds, positions)):
        key = mix(mix(mix(1 ^ seed >> 32 & 0xFFFFFFFF) ^ seed & 0xFFFFFFFF) ^ position)
        for token in (0, 1, 17, 59_999):
            bits = mix(mix(token) ^ mix(key)) & 0x7FFFFFFF
            assert ours[i, token].item() == pytest.approx((bits + 0.5) / 2**31, rel=1e-6)


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds", "far seeds"])
def test_noise_is_uniform_and_neighbours_are_independent(along):
    """Along each of its coordinates: values, their lower bits, and pairs of neighbours near and
    far."""
    n = 200_000
    ways = {"tokens": lambda: noise([3], [9], n),
            "positions": lambda: noise([3] * n, range(n), 2).T,
            "seeds": lambda: noise(range(n), [9] * n, 2).T,
            "far seeds": lambda: noise([i << 32 for i in range(n)], [9] * n, 2).T}
    for u in ways[along]().double():
        flat = torch.full((1024,), n / 1024)
        assert u.min() > 0 and u.max() < 1
        for part in (u, u * 1024 % 1, u[:-1] // (1 / 32) / 32 + u[1:] / 32,
                     u[:-1024] // (1 / 32) / 32 + u[1024:] / 32):
            counts = torch.bincount((part * 1024).long(), minlength=1024)
            assert p_value(counts, flat * len(part) / n) > 1e-4


def test_noise_is_precise_where_races_are_won():
    # [40, 8], around 1 / 60,000.
    least = noise(range(40), range(40), 60_000).sort(-1).values[:, :8]
    assert least.unique().numel() == least.numel()
    # Of a Poisson process: Exp(1).
    gaps = (60_000 * torch.diff(least, prepend=torch.zeros(40, 1))).flatten()
    edges = -torch.log1p(-torch.linspace(0, 1, 9)[1:-1])
    assert p_value(torch.bincount(torch.bucketize(gaps, edges), minlength=8), torch.full((8,), 40.0)) > 1e-3


# ---- rows of one batch

CROWD = [dict(), dict(temperature=1.0, seed=1), dict(temperature=0.7, top_k=40, seed=2),
         dict(temperature=1.0, top_p=0.9, seed=3),
         dict(temperature=1.5, min_p=0.1, seed=4),
         dict(temperature=1.0, top_k=300, top_p=0.95, min_p=0.01, seed=5),
         dict(repetition_penalty=1.3), dict(presence_penalty=1.5, frequency_penalty=0.5),
         dict(logit_bias={7: 5.0, 9: -100.0}, logprobs=0),
         dict(logprobs=3), dict(temperature=1.0, seed=6, logprobs=20, repetition_penalty=0.8,
                                frequency_penalty=-1.0)]


def test_a_row_does_not_depend_on_the_others():
    logits, chance = some_logits(len(CROWD), 3000, spread=1.5), random.Random(0)
    rows = [row(chance.randrange(1, 999), chance.choices(range(3000), k=30),
                chance.choices(range(20), k=chance.randrange(30)), **values)
            for values in CROWD]
    alone = [sampled(logits[i:i + 1].clone(), [rows[i]]) for i in range(len(rows))]
    for _ in range(5):
        order = chance.sample(range(len(rows)), k=chance.randrange(2, len(rows) + 1))
        tokens, logprobs = sampled(logits[order].clone(), [rows[i] for i in order])
        for i, token, logprob in zip(order, tokens, logprobs or [None] * len(order)):
            assert ([token], logprob) == (alone[i][0], alone[i][1] and alone[i][1][0])


# ---- without waiting for the device

class Calls(OperatorWatcher):
    """Counts the operators that run on the device, and what is uploaded for them."""
    operators = uploads = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        view = any(argument.alias_info and not argument.alias_info.is_write
                   for argument in operator._schema.arguments)
        if any(tensor.is_meta for tensor in tree_leaves(result)):
            self.operators += not view
            self.uploads += any(not tensor.is_meta for tensor in tensors)
        return result


@pytest.mark.parametrize("rows, most, uploads", [
    ([dict()] * 3, 5, 0),                                   # greedy: the argmax, and is it finite?
    ([dict(temperature=0.7, top_p=0.9)] * 3, 54, 1), (CROWD, 104, 1)])
def test_the_host_uploads_once_and_never_waits(rows, most, uploads):
    """On the device "meta", where tensors have no content: to look at a result is an error
    there."""
    logits = torch.empty(len(rows), 3000, device="meta")
    with pytest.raises(Exception, match="[Mm]eta"):
        logits[logits > 0]
    with Calls() as calls:
        results = sample(logits, [row(**values, generated=[5]) for values in rows])
    assert all(result.is_meta for result in results)
    assert calls.operators <= most and calls.uploads == uploads


# ---- penalties and bias

def shaped(logits, request):
    """What a greedy row takes the argmax of."""
    for stage in sampling.STAGES:
        if stage.is_asked_for(request.sampling):
            logits = changed(stage, logits, [request])
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits, context, reply = some_logits(1, 60), [3, 3, 8, 40], [8, 11, 59, 11]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([context + reply]), logits.clone())
    ours = shaped(logits.clone(), row(context=context, generated=reply, repetition_penalty=penalty))
    assert torch.allclose(ours, expected)


@pytest.mark.parametrize("reply", [[], [5], [5, 5, 5, 9, 0, 59, 9]])
def test_presence_and_frequency_count_the_reply_alone(reply):
    """As OpenAI writes it: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    logits = some_logits(1, 60)
    bias = {9: 1.5, 4: -2.0}
    ours = shaped(logits.clone(), row(context=[5, 7, 9], generated=reply, presence_penalty=0.7,
                                      frequency_penalty=-0.3, logit_bias=bias))
    expected = [mu - reply.count(j) * -0.3 - (j in reply) * 0.7 + bias.get(j, 0.0)
                for j, mu in enumerate(logits[0].double().tolist())]
    assert torch.allclose(ours[0].double(), torch.tensor(expected).double(), atol=1e-5)


def test_bias_forces_and_bans():
    logits = some_logits(2, 60)
    best = logits.argmax(-1).tolist()
    tokens, _ = sampled(logits.clone(), [row(logit_bias={13: 100}), row(logit_bias={best[1]: -100})])
    assert tokens == [13, logits[1].topk(2).indices[1].item()]


# ---- log probabilities

def test_logprobs_are_the_models_own():
    """Whatever penalties, bias and temperature do to the draw."""
    logits = some_logits(4, 60)
    rows = [row(logprobs=2), row(), row(logprobs=0, temperature=5.0, seed=1, top_k=3),
            row(logprobs=20, logit_bias={13: 100}, temperature=0.5)]
    tokens, reports = sampled(logits.clone(), rows)
    own = logits.double().log_softmax(-1)
    assert reports[1] is None and tokens[3] == 13 and [len(reports[i][1]) for i in (0, 2, 3)] == [2, 0, 20]
    for i in (0, 2, 3):
        logprob, top = reports[i]
        assert logprob == pytest.approx(own[i, tokens[i]].item(), abs=1e-5)
        assert [token for token, _ in top] == own[i].argsort(descending=True)[:len(top)].tolist()
        largest = own[i].sort(descending=True).values[:len(top)].tolist()
        assert [value for _, value in top] == pytest.approx(largest, abs=1e-5)
    assert sampled(logits, [row()] * 4)[1] is None


# ---- through the engine

def test_a_reply_repeats_in_a_crowd_and_after_suspensions():
    options = dict(max_tokens=24, ignore_eos=True, temperature=1.1, top_k=200, top_p=0.98, min_p=0.001,
                   presence_penalty=0.4,
                   frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={65: 1.0}, seed=7, logprobs=2)
    alone = Engine("tiny_chat", cost=COST)
    engine = Engine("tiny_chat", cost=COST, gpu_cache_tokens=64, cpu_cache_tokens=64, chunk_size=8,
                    max_batch_tokens=16, reserve=0.0,
                    debug=True)
    handles = [engine.submit([i] * 9, f"c{i}", **options | dict(seed=i)) for i in range(4)]
    for i, handle in enumerate(handles):
        ours, expected = handle.result(), alone.generate([i] * 9, f"c{i}", **options | dict(seed=i))
        assert ours.token_ids == expected.token_ids
        logprobs = [value for value, _ in expected.logprobs]
        assert [value for value, _ in ours.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert engine.stats()["suspensions"] > 0
    assert alone.generate([1] * 9, **options | dict(seed=99)).token_ids != handles[1].result().token_ids
    engine.close(), alone.close()


def test_logprobs_travel_with_the_tokens():
    engine, prompt = Engine("tiny_chat", cost=COST), list(range(60, 90))
    handle, plain = (engine.submit(prompt, max_tokens=8, ignore_eos=True, logprobs=k) for k in (5, None))
    for seen, token in enumerate(handle, 1):
        # Greedy: the most likely.
        assert len(handle.logprobs) == seen and handle.logprobs[-1][1][0][0] == token
    reply = handle.result()
    model = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32)
    with torch.no_grad():
        # [8, vocab].
        own = model(torch.tensor([prompt + reply.token_ids])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    expected = [own[i, token].item() for i, token in enumerate(reply.token_ids)]
    assert [value for value, _ in reply.logprobs] == pytest.approx(expected, abs=1e-3)
    assert plain.result().logprobs is None and plain.logprobs is None
    assert plain.result().token_ids == reply.token_ids
    engine.close()


@pytest.mark.parametrize("values, message", [
    (dict(temperature=-1), "temperature must be a number from 0.0 to 100.0, got -1"),
    (dict(temperature=float("nan")), "nan"),
    (dict(temperature=True), "True"), (dict(top_k=-1), "top_k must be an int"), (dict(top_k=1.5), "1.5"),
    (dict(top_p=0), "top_p"),
    (dict(top_p="1"), "'1'"), (dict(min_p=1.1), "min_p"),
    (dict(presence_penalty=2.1), "presence_penalty"), (dict(frequency_penalty=-3), "frequency_penalty"),
    (dict(repetition_penalty=0), "repetition_penalty"), (dict(seed=2**63), "seed"),
    (dict(logprobs=True), "True"),
    (dict(logprobs=-1), "logprobs must be an int from 0 to 2147483647, got -1"),
    (dict(logit_bias=[1]), "logit_bias"), (dict(logit_bias={1: 101}), "from -100.0 to 100.0"),
    (dict(logit_bias={"1": 1}), "logit_bias"), (dict(logit_bias={10**6: 1.0}), "1000000")])
def test_bad_values_are_refused_by_name(engine, values, message):
    with pytest.raises(ValueError, match=message):
        engine.submit([1], **values)


def test_none_is_the_default_and_an_unknown_keyword_an_error(engine):
    names = [*sampling.LIMITS, "logit_bias"]
    assert engine.generate([1], max_tokens=3, **dict.fromkeys(names)) == engine.generate([1], max_tokens=3)
    with pytest.raises(TypeError, match="temprature"):
        engine.submit([1], temprature=1.0)


# ---- logits that are no numbers

@pytest.mark.parametrize("values", [
    {}, dict(logprobs=2), dict(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0,
                               repetition_penalty=1.2, logit_bias={3: 1.0}, logprobs=2, seed=1)])
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_keep_theirs(values):
    logits, requests = some_logits(4, 40), [row(generated=(4, 5), **values) for _ in range(4)]
    expected, _ = sampled(logits.clone(), requests)
    logits[0, 7], logits[2, 39], logits[3] = torch.nan, torch.inf, -torch.inf
    assert sampled(logits, requests)[0] == [-1, expected[1], -1, -1]


def test_a_request_whose_logits_are_not_finite_fails_alone(checkpoint):
    engine = Engine(checkpoint, device="cpu", gpu_cache_tokens=256, cpu_cache_tokens=64, cost=COST,
                    debug=True)
    expected = engine.generate([5, 6, 7], max_tokens=8, ignore_eos=True).token_ids
    engine.worker.model.positions.weight[40] = torch.nan    # where only the longer context comes
    long = engine.submit([1] * 38, "long", max_tokens=8, ignore_eos=True)
    short = engine.submit([5, 6, 7], "short", max_tokens=8, ignore_eos=True)
    with pytest.raises(RuntimeError, match="not finite"):
        long.result()
    assert short.result().token_ids == expected
    assert engine.generate([5, 6, 7], "long", max_tokens=8, ignore_eos=True).token_ids == expected
    engine.close()
