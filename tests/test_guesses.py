"""Guesses change how many steps a reply takes, and nothing else."""
import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import test_properties
from checkpoint import PRESETS, gpt
from engine import Engine
from eviction import RecomputeCost
from fakes import World, answer
from guesses import copied
from scheduler import Scheduler

COST = RecomputeCost({4: 1e-3, 64: 3e-3}, rest=1e-3)


@pytest.mark.parametrize("tokens, most, expected", [
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 8, [4, 5]),               # one less than are in common
    ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 8, [5, 6, 1]),
    ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 2, [5, 6]),
    ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 0, []),
    ([1, 2, 3, 4, 2], 4, []),                               # one in common is too few
    ([1, 2, 7, 1, 2, 8, 1, 2], 4, [8]),                     # the latest place
    ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 4, [7, 9]),         # but rather more in common
    ([5, 1, 2, 1, 2, 1, 2], 8, [1, 2, 1]),                  # goes round and round
    ([7], 4, []), ([7, 7], 4, []), ([7, 7, 7, 7], 4, [7, 7]), ([*range(5)] * 2000, 3, [0, 1, 2])])
def test_copied(tokens, most, expected):
    assert copied(tokens, most) == expected


# ---- a fake model, whose next tokens we know

def right(tokens, count):
    """The fake model's next tokens."""
    context = tokens[:]
    for _ in range(count):
        context.append(answer(context))
    return context[len(tokens):].tolist()


@pytest.fixture
def guessing(monkeypatch):
    """guessing(function): from now on copied(tokens, most) is function(tokens)[:most]."""
    def guess(function):
        monkeypatch.setattr("guesses.copied", lambda tokens, most: function(tokens)[:most])
    return guess


def turn(prompt=5, max_tokens=20, **world):
    """A world in which a request has its first token."""
    world = World(**dict(slots=64, chunk=16, guesses=8) | world)
    request = world.submit("a", prompt, max_tokens)
    world.step()
    return world, request


def expected(request):
    start = request.tokens_before + len(request.prompt)
    return right(request.conversation.tokens[:start], request.max_tokens)


def test_right_guesses_save_steps_and_their_kv_counts(guessing):
    guessing(lambda tokens: right(tokens, 3))
    world, request = turn(max_tokens=6)
    assert str(world.step()) == "step 1  a[5:6] | guess a[6:9]"
    assert len(request.generated) == 5 and request.conversation.known == 9
    assert str(world.step()) == "step 2  a[9:10] | guess a[10:10]" and request.finish_reason == "length"
    assert request.generated == expected(request)
    stats = world.scheduler.stats
    assert stats["guesses"] == stats["right_guesses"] == 3 and stats["generated_tokens"] == 6


def test_the_books_know_nothing_of_a_wrong_guess(guessing):
    guessing(lambda tokens: right(tokens, 1) + [99, *right(tokens, 3)[2:]])
    world, request = turn()
    assert str(world.step()) == "step 1  a[5:6] | guess a[6:9]"
    assert len(request.generated) == 3 and request.conversation.known == 7
    world.run()
    assert request.generated == expected(request)


@pytest.mark.parametrize("nth", [2, 3, 4, 5])
def test_a_stop_token_ends_the_reply_inside_a_guess(nth, guessing):
    """The KV of the stop token itself, and what the step has computed behind it, does not count."""
    guessing(lambda tokens: right(tokens, 4))
    world, request = turn()
    stop = right(request.conversation.tokens[:5], nth)[-1]
    request.stop_ids = frozenset([stop])
    world.step()
    assert request.finish_reason == "stop" and len(request.generated) == nth
    assert request.conversation.known == len(request.conversation.tokens) - 1 == 5 + nth - 1
    assert len(world.cache.free_slots) == 64 - request.conversation.known
    assert world.turn("a", 3)[0].usage == dict(gpu=5 + nth - 1, cpu=0, recomputed=0, new=4)


def test_min_tokens_and_a_reached_stop_count_inside_a_guess(guessing):
    guessing(lambda tokens: right(tokens, 8))
    world, request = turn()
    tokens = right(request.conversation.tokens[:5], 9)
    request.stop_ids, request.min_tokens = frozenset(tokens[1:3]), 3
    world.step()
    assert request.generated == tokens[:3] and request.finish_reason == "stop"
    world, request = turn()
    seen = []
    request.reached_stop = lambda token: seen.append(token) or len(seen) == 4
    world.step()
    assert seen == request.generated[1:] and request.finish_reason == "stop"


def test_a_turn_that_is_cancelled_inside_its_guess_leaves_nothing(guessing):
    guessing(lambda tokens: right(tokens, 8))
    world, request = turn()
    request.reached_stop = lambda token: world.scheduler.cancel(request, world.now)
    world.step()
    assert request.finish_reason == "cancelled" and len(request.generated) == 2
    assert not world.cache.conversations and len(world.cache.free_slots) == 64


def test_guesses_take_only_what_is_left(guessing):
    guessing(lambda tokens: right(tokens, 8))
    # All that max_tokens allows is one token behind the last guess.
    world, request = turn(max_tokens=4)
    assert str(world.step()) == "step 1  a[5:6] | guess a[6:8]" and request.finish_reason == "length"
    # The budget that prompts leave.
    world, request = turn(max_batch_tokens=12)
    world.submit("b", 9)
    assert str(world.step()) == "step 1  b[0:9] a[5:6] | guess a[6:8]"
    # The budget that an earlier request leaves.
    world, request = turn(max_batch_tokens=12)
    world.submit("b", 3, 20)
    assert str(world.step()) == "step 1  b[0:3] a[5:6] | guess a[6:14]"
    assert str(world.step()) == "step 2  a[14:15] b[3:4] | guess a[15:16] b[4:12]"
    # The slots of its last chunk. (When slots are rare, grow gives one at a time.)
    world, request = turn(prompt=12)
    assert str(world.step()) == "step 1  a[12:13] | guess a[13:16]"
    world, request = turn(slots=32)
    world.submit("b", 16)
    world.step()
    assert str(world.step()) == "step 2  a[15:16] b[16:17]"


def test_one_step_ahead_the_host_settles_before_it_guesses(guessing):
    guessing(lambda tokens: right(tokens, 2))
    world, request = turn(max_tokens=9, depth=1)
    assert world.unsettled
    assert world.run() == ["step 1  a[5:6] | guess a[6:6]", "step 2  a[6:7] | guess a[7:9]",
                           "step 3  a[9:10] | guess a[10:12]", "step 4  a[12:13] | guess a[13:13]"]
    assert request.generated == expected(request)


def test_penalties_do_not_guess(guessing):
    guessing(lambda tokens: right(tokens, 2))
    world, request = turn()
    request.sampling = SimpleNamespace(looks_back=True)
    assert str(world.step()) == "step 1  a[5:6]"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(test_properties.worlds, test_properties.actions, st.sampled_from([1, 3, 8]),
       st.randoms(use_true_random=False))
def test_anything_in_any_order(world, actions, guesses, chance):
    """The property test of the scheduler, with guesses of which most are right."""
    def guess(tokens, most):
        tokens = tokens[:]
        start = len(tokens)
        for _ in range(chance.randrange(most + 1)):
            tokens.append(answer(tokens) if chance.random() < 0.8 else chance.randrange(50))
        return tokens[start:].tolist()
    with patch("guesses.copied", guess):
        test_properties.test_anything_in_any_order.hypothesis.inner_test(
            dict(world, guesses=guesses), actions, chance)


# ---- a real model, one that repeats itself

SWITCHES = [dict(), dict(gpu_cache_tokens=70, cpu_cache_tokens=32, reserve=0.0),
            dict(max_batch_tokens=5), dict(separate_phases=True), dict(chunk_size=16)]
SAMPLINGS = [dict(), dict(temperature=0.7, top_p=0.95), dict(logprobs=2), dict(presence_penalty=0.5),
             dict(logit_bias={3: 1.0})]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_replies_are_the_same(switches, depth, monkeypatch):
    """Turns of several conversations, some cancelled, with all kinds of sampling."""
    monkeypatch.setitem(PRESETS, "tiny", gpt(layers=2, heads=4, width=32, context=256))
    outcomes = []
    for guesses in (0, 6):
        engine = Engine("tiny", random_weights=True, device="cpu", cost=COST, debug=True, guesses=guesses,
                        **dict(gpu_cache_tokens=256, cpu_cache_tokens=64, chunk_size=4,
                               max_batch_tokens=32) | switches)
        engine.depth = depth
        engine.worker.model.tokens.weight.mul_(20)
        chance, replies = random.Random(1), []
        for _ in range(2):
            handles = []
            for seed, sampling in enumerate(SAMPLINGS):
                prompt = [chance.randrange(99) for _ in range(9)]
                handles.append(engine.submit(prompt, str(seed), max_tokens=18, ignore_eos=True, seed=seed,
                                             **sampling))
            next(iter(handles[1]))
            handles[1].cancel()
            replies += [handle.result() for handle in handles if handle is not handles[1]]
        outcomes.append([(reply.token_ids, reply.finish_reason, reply.usage) for reply in replies])
        logprobs = [[own for own, _ in reply.logprobs] for reply in replies if reply.logprobs]
        outcomes.append(logprobs)
        right = engine.stats().get("right_guesses", 0)
        engine.close()
    assert outcomes[0] == outcomes[2]
    for some, others in zip(outcomes[1], outcomes[3], strict=True):
        assert others == pytest.approx(some, abs=1e-4)
    assert right > 20, right


def test_without_guesses_nothing_of_them_runs():
    engine = Engine("tiny_chat", cost=COST, gpu_cache_tokens=64, cpu_cache_tokens=0)
    assert type(engine.scheduler) is Scheduler and "guesses" not in engine.stats()
    engine.close()
