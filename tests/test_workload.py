"""Loads: the published means by statistics, arrivals by their distribution."""
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, strategies as st

from experiments.workload import (SHAPES, PlannedConversation, PlannedTurn, Shape, cut_to_context, draw,
                                  means_of_all, reading_think, synthetic, under_way, with_arrivals,
                                  within_context)



def planned(name, *turns, arrival=0.0):
    return PlannedConversation(name, [PlannedTurn(*turn) for turn in turns], arrival)


def contexts(turns):
    """The length of the context after each turn, token by token."""
    context, lengths = [], []
    for turn in turns:
        context = context[:turn.keep] + ["new"] * (turn.input_tokens + turn.output_tokens)
        lengths.append(len(context))
    return lengths


# --- cut ---

turn = st.builds(PlannedTurn, st.integers(1, 300), st.integers(1, 300),
                 keep=st.none() | st.integers(0, 900))
turn_lists = st.lists(turn, min_size=1, max_size=8)


@given(turn_lists, st.integers(1, 3000))
def test_cut_keeps_the_longest_start_that_fits(turns, limit):
    cut = cut_to_context([PlannedConversation("c", turns, 1.5)], limit)
    kept = [conversation.turns for conversation in cut]
    fitting = len([*takewhile(lambda context: context <= limit, contexts(turns))])
    assert kept == ([turns[:fitting]] if fitting else [])


@given(turn_lists)
def test_a_conversation_is_as_long_as_its_longest_context(turns):
    conversation = PlannedConversation("c", turns)
    assert conversation.contexts == contexts(turns) and conversation.tokens == max(contexts(turns))


# --- arrivals ---

def test_poisson_arrivals_at_the_request_rate():
    conversations = with_arrivals(synthetic("sharegpt", 20_000, seed=3), request_rate=4.0, seed=3)
    gaps = np.diff([0.0] + [conversation.arrival for conversation in conversations])
    requests = sum(len(conversation.turns) for conversation in conversations)
    assert (gaps >= 0).all()
    assert requests / conversations[-1].arrival == pytest.approx(4.0, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)           # exponential
    assert np.mean(gaps > gaps.mean()) == pytest.approx(np.exp(-1), rel=0.03)
    turns = [len(conversation.turns) for conversation in conversations]
    assert abs(np.corrcoef(gaps, turns)[0, 1]) < 0.03                   # though the seed is the same


def test_think_times():
    source = synthetic("sharegpt", 5_000, seed=0)
    conversations = with_arrivals(source, 1.0, seed=0)
    later = [turn for conversation in conversations for turn in conversation.turns[1:]]
    think = np.array([turn.think_seconds for turn in later])
    assert all(conversation.turns[0].think_seconds == 0 for conversation in conversations)
    assert think.mean() == pytest.approx(60, rel=0.03) and think.std() == pytest.approx(60, rel=0.05)
    lengths = [[turn[:2] for turn in conversation.turns] for conversation in conversations]
    assert lengths == [[turn[:2] for turn in conversation.turns] for conversation in source]


def test_reading_takes_100_ms_per_token_and_at_least_5_seconds():
    source = [planned("c", (1, 20), (1, 200), (1, 1))]
    (conversation,) = with_arrivals(source, 1.0, seed=0, think=reading_think)
    assert [turn.think_seconds for turn in conversation.turns] == [0, 5.0, 20.0]


def test_the_think_rule_does_not_move_the_arrivals():
    source = synthetic("sharegpt", 50, seed=0)
    exponential = with_arrivals(source, 1.0, seed=0)
    reading = with_arrivals(source, 1.0, seed=0, think=reading_think)
    for first, second in zip(exponential, reading, strict=True):
        assert first.arrival == second.arrival


@pytest.mark.parametrize("conversations, rate", [
    ([], 1.0), ([planned("c", (1, 1))], 0.0), ([planned("c", (1, 1))], float("nan"))])
def test_arrivals_refuse_nonsense(conversations, rate):
    with pytest.raises(ValueError, match="request rate"):
        with_arrivals(conversations, rate, seed=0)


# --- synthetic conversations ---

@pytest.mark.parametrize("dataset", SHAPES)
def test_published_means_and_limits(dataset):
    shape, conversations = SHAPES[dataset], synthetic(dataset, 20_000, seed=7)
    lengths = np.array([turn[:2] for conversation in conversations for turn in conversation.turns])
    means = [len(lengths) / len(conversations), *lengths.mean(axis=0)]
    names = {conversation.name for conversation in conversations}
    assert len(conversations) == len(names) == 20_000
    assert means == pytest.approx(shape[:3], rel=0.03)
    longest = max(conversation.tokens for conversation in conversations)
    assert lengths.min() >= 1 and longest <= shape.max_context
    inputs = lengths[:, 0]                  # they have a heavy tail
    assert np.percentile(inputs, 99) > 3.5 * means[1] and np.median(inputs) < 0.85 * means[1]


def test_as_many_conversations_are_too_long_as_the_paper_says():
    """0.57% of ShareGPT's; 0.54% and 0.46% of ours in samples of different sizes."""
    shape = SHAPES["sharegpt"]
    turns, lengths = draw(shape._replace(max_context=10**9), np.array(shape[:3]), 100_000,
                          np.random.default_rng(1))
    context = np.add.reduceat(lengths.sum(axis=1), np.cumsum(turns) - turns)
    assert (context > 16_384).mean() == pytest.approx(0.0052, abs=0.001)


def test_the_drafts_conversations_have_five_turns():
    assert min(len(conversation.turns) for conversation in synthetic("lmsys-draft", 500, seed=0)) == 5


def test_as_many_conversations_as_asked():
    """Many drawn ones have too few turns for the draft's shape."""
    assert all(len(synthetic("sharegpt-draft", 1, seed)) == 1 for seed in range(5))


def test_a_load_is_met_under_way_after_a_rewind():
    """Of 10 tokens at 0 s the second turn keeps 4: at 60 s the context has 14, the prompt is 17."""
    users = [PlannedConversation("a", [PlannedTurn(5, 5), PlannedTurn(3, 7, 50.0, keep=4),
                                       PlannedTurn(3, 8, 40.0)])]
    assert list(under_way(users, 60.0)) == [planned("a", (17, 8), arrival=30.0)]


def test_a_load_is_met_under_way():
    users = [planned("a", (5, 5), (3, 7, 50.0), (2, 8, 40.0)), planned("b", (1, 1), arrival=60.0),
             planned("c", (1, 1), arrival=59.0)]
    assert list(under_way(users, 60.0)) == [planned("a", (22, 8), arrival=30.0), planned("b", (1, 1))]


def test_contexts_do_not_grow_while_a_load_is_under_way():
    load = under_way(with_arrivals(synthetic("sharegpt", 4_000, seed=1), 4.0, seed=1), 4000.0)
    contexts_at = []
    for _, turns, arrival, _ in load:
        context, now = 0, arrival
        for turn in turns:
            now, context = now + turn.think_seconds, context + turn.tokens
            contexts_at.append((now, context))
    early, late = (np.mean([context for now, context in contexts_at if begin <= now < begin + 500])
                   for begin in (0, 1000))
    assert late == pytest.approx(early, rel=0.15)


def test_conversations_over_the_limit_are_left_out():
    users = [planned("a", (60, 5), (30, 5)), planned("b", (60, 5), (30, 6)), planned("c", (101, 1))]
    assert within_context(users, 100) == users[:1]


def test_published_shapes():
    assert SHAPES["sharegpt"][:4] == (5.56, 37.77, 204.58, 16_384)
    assert SHAPES["ultrachat"][:3] == (3.86, 51.78, 257.81)
    assert SHAPES["sharegpt-draft"][:4] == (7.58, 31.26, 180.44, 2_048)
    assert SHAPES["lmsys-draft"][:4] == (7.73, 22.49, 100.67, 2_048)


def test_same_seed_same_workload():
    def workload(seed):
        return with_arrivals(synthetic("ultrachat", 100, seed), 1.0, seed)
    assert workload(1) == workload(1) != workload(2)


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="sharegpt, ultrachat.*'chat'"):
        synthetic("chat", 10, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        synthetic("sharegpt", 0, seed=0)
    for means in ((20, 30, 100), (1, 30, 300), (2, 0.5, 30)):
        shape = Shape(*means, max_context=400)
        with pytest.raises(ValueError, match="at most 400 tokens.*raise max_context"):
            means_of_all(shape)
