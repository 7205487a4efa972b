"""Guesses change how many steps a reply takes, and nothing else."""
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import test_properties
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
    # 5 in common in front of 7 8, later 3 in front of 9 9. No more than most + 1 tokens are compared.
    ([1, 2, 3, 4, 5, 7, 8, 0, 3, 4, 5, 9, 9, 1, 2, 3, 4, 5], 2, [9, 9]),
    ([1, 2, 3, 4, 5, 7, 8, 0, 3, 4, 5, 9, 9, 1, 2, 3, 4, 5], 3, [7, 8, 0]),
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
    world, request = turn(max_batch_tokens=8)
    world.submit("b", 3, 20)
    assert str(world.step()) == "step 1  b[0:3] a[5:6] | guess a[6:10]"
    assert str(world.step()) == "step 2  a[10:11] b[3:4] | guess a[11:16] b[4:5]"
    # The slots of its last chunk. (When slots are rare, grow gives one at a time.)
    world, request = turn(prompt=12)
    assert str(world.step()) == "step 1  a[12:13] | guess a[13:16]"
    world, request = turn(prompt=12, max_tokens=6, slots=24, chunk=8)
    world.submit("b", 5)
    assert str(world.step()) == "step 1  b[0:5] a[12:13] | guess a[13:16]"
    assert str(world.step()) == "step 2  a[16:17] b[5:6] | guess a[17:17] b[6:6]"


def test_wrong_guesses_soon_end_and_right_ones_allow_more(guessing):
    guessing(lambda tokens: [99] * 8 if len(tokens) < 30 else right(tokens, 8))
    world, request = turn(max_tokens=31)
    world.run()
    assert world.scheduler.stats["guesses"] == 8 and request.generated == expected(request)
    world, request = turn(max_tokens=50)
    world.run()                     # the reply's token 32 allows one guess, this one two, these two four
    assert world.scheduler.stats["right_guesses"] > 7 and request.generated == expected(request)


def test_luck_does_not_pile_up(guessing):
    """395 tokens whose guesses are right, then 600 that never copy: these alone would allow 26 wrong ones."""
    guessing(lambda tokens: right(tokens, 8) if len(tokens) < 400 else [99] * 8)
    world, _ = turn(max_tokens=1000, slots=2048, chunk=64, limit=2000)
    world.run()
    stats = world.scheduler.stats
    assert stats["right_guesses"] > 300 and 8 < stats["guesses"] - stats["right_guesses"] < 75


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


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
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


# ---- a real model

STARVED = dict(gpu_cache_tokens=150, cpu_cache_tokens=32)
CASES = [(dict(), 0), (dict(), 1), (STARVED, 0), (STARVED, 1), (dict(max_batch_tokens=8), 0),
         (dict(separate_phases=True), 1), (dict(chunk_size=32, stateless=True), 1)]
SAMPLINGS = [dict(), dict(temperature=0.8, top_p=0.95), dict(logprobs=2), dict(presence_penalty=0.5),
             dict(temperature=0.4, logit_bias={3: 1.0}), dict()]


def converse(depth=0, **flags):
    """Two turns of several conversations, the last of which is cancelled. Returns what must not depend on
    guesses, log probabilities, which may differ by rounding, and the engine's stats."""
    engine = Engine("tiny_chat", cost=COST, debug=True,
                    **dict(gpu_cache_tokens=1024, cpu_cache_tokens=64, chunk_size=8) | flags)
    engine.depth, replies = depth, []
    for line in ("one two three, one two three, one two", " three, one two three. Say it again: one"):
        handles = [engine.submit(list(line.encode()), str(seed), max_tokens=30, ignore_eos=True, seed=seed,
                                 **sampling) for seed, sampling in enumerate(SAMPLINGS)]
        next(iter(handles[-1]))
        handles.pop().cancel()
        replies += [handle.result() for handle in handles]
    stats = engine.stats()
    engine.close()
    return ([(reply.token_ids, reply.finish_reason, reply.usage["prompt_tokens"]) for reply in replies],
            [own for reply in replies for own, _ in reply.logprobs or ()], stats)


@pytest.fixture(scope="module")
def without_guesses():
    return converse()


@pytest.mark.parametrize("switches, depth", CASES, ids=str)
def test_replies_are_the_same(switches, depth, without_guesses):
    replies, logprobs, stats = converse(depth, guesses=6, **switches)
    assert replies == without_guesses[0] and logprobs == pytest.approx(without_guesses[1], abs=1e-4)
    assert 20 < stats["right_guesses"] < stats["guesses"], stats
    assert (stats["suspensions"] > 0) == (switches == STARVED), stats


@pytest.mark.parametrize("guesses", [0, 4])
def test_without_guesses_nothing_of_them_runs(guesses):
    """A step is then what it would be if guesses.py were not there."""
    engine = Engine("tiny_chat", cost=COST, gpu_cache_tokens=64, cpu_cache_tokens=0, guesses=guesses)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(Path(frame.f_code.co_filename).name == "guesses.py"))
    engine.generate([65, 66, 65, 66, 65], max_tokens=8, ignore_eos=True)
    sys.setprofile(None)
    assert any(calls) == bool(guesses) and (type(engine.scheduler) is Scheduler) == (not guesses)
    assert ("right_guesses" in engine.stats()) == bool(guesses)
    engine.close()
