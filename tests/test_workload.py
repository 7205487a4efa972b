"""Formats by hand, the published means by statistics, Mooncake's conversations by writing a trace and reading
it back."""
import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from checkpoint import find_checkpoint
from serving.tokenizer import load_tokenizer
from experiments.workload import (SHAPES, PlannedConversation, PlannedTurn, Shape, cut_to_context, lmsys,
                                  load, means_before_cut, mooncake, reading_think, sharegpt, synthetic,
                                  ultrachat, with_arrivals)

TRACE = Path(__file__).parents[2] / "shared" / "data" / "mooncake_synthetic_trace.jsonl"


def planned(name, *turns, arrival=0.0):
    return PlannedConversation(name, [PlannedTurn(*turn) for turn in turns], arrival)


def words(text):
    return len(text.split())


def contexts(turns):
    return list(accumulate(turn.input_tokens + turn.output_tokens for turn in turns))


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def request(timestamp, input_length, output_length, *hash_ids):
    return dict(timestamp=timestamp, input_length=input_length, output_length=output_length,
                hash_ids=list(hash_ids))


# --- cut ---

turn = st.builds(PlannedTurn, st.integers(1, 300), st.integers(1, 300))
turn_lists = st.lists(turn, min_size=1, max_size=8)


@given(turn_lists, st.integers(1, 3000))
def test_cut_keeps_the_longest_start_that_fits(turns, limit):
    cut = cut_to_context([PlannedConversation("c", turns, 1.5)], limit)
    kept = [conversation.turns for conversation in cut]
    fitting = sum(context <= limit for context in contexts(turns))
    assert kept == ([turns[:fitting]] if fitting else [])


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
    longest = max(contexts(conversation.turns)[-1] for conversation in conversations)
    assert lengths.min() >= 1 and longest <= shape.max_context
    inputs = lengths[:, 0]                  # they have a heavy tail
    assert np.percentile(inputs, 99) > 3.5 * means[1] and np.median(inputs) < 0.85 * means[1]


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
            means_before_cut(shape)


# --- datasets of text ---

def test_sharegpt(tmp_path):
    def said(*messages):
        return {"id": "x", "conversations": [{"from": side, "value": text} for side, text in messages]}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([
        said(("human", "a b c"), ("gpt", "d e"), ("human", "f"), ("gpt", "g h i j")),
        said(("gpt", "lost lost"), ("human", "a"), ("human", "b c"), ("gpt", "d"), ("gpt", "e"),
             ("human", "unanswered")),
        said(("gpt", "nobody asked")), said(),
        said(("system", "be kind"), ("human", "a"), ("gpt", ""), ("human", "b"), ("chatgpt", "c"))]))
    assert list(sharegpt(path, words)) == [
        planned("0", (3, 2), (1, 4)), planned("1", (3, 2)), planned("4", (4, 1))]


def test_ultrachat(tmp_path):
    path = write(tmp_path / "u.jsonl",
                 {"id": "0", "data": ["a b", "c", "d", "e f g"]}, {"id": "1", "data": ["a", "b", "c"]})
    assert list(ultrachat(path, words)) == [planned("0", (2, 1), (1, 3)), planned("1", (1, 1))]


def test_lmsys(tmp_path):
    said = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    path = write(tmp_path / "l.jsonl", {"conversation_id": "x", "conversation": said})
    path.write_text(path.read_text() + "\n\n")              # blank lines do not count
    assert list(lmsys(path, words)) == [planned("0", (2, 1))]


# --- Mooncake traces ---

def test_mooncake_rebuilds_conversations(tmp_path):
    path = write(tmp_path / "m.jsonl",
                 # a: two full pieces, and a part whose id never returns
                 request(0, 1300, 100, 0, 1, 2),
                 # b: another conversation
                 request(500, 700, 5, 90, 91),
                 # a goes on: 100 new tokens, still in the third piece
                 request(9_000, 1500, 50, 0, 1, 3),
                 # new: longer than a's first turn, but a has moved on
                 request(12_000, 1450, 60, 0, 1, 4),
                 # a goes on
                 request(15_000, 2100, 10, 0, 1, 5, 6, 7))
    assert mooncake(path) == [
        planned("0", (1300, 100), (100, 50, 9.0), (550, 10, 6.0)),
        planned("1", (700, 5), arrival=0.5),
        planned("2", (1450, 60), arrival=12.0)]


def test_mooncake_branches(tmp_path):
    """Two requests extend the same prefix: the first continues the conversation, the second begins a new one.
    Later requests can continue either."""
    path = write(tmp_path / "m.jsonl",
                 request(0, 1024, 10, 0, 1), request(1000, 1536, 10, 0, 1, 2),
                 request(2000, 1600, 20, 0, 1, 3, 6),
                 request(3000, 2048, 10, 0, 1, 3, 4), request(4000, 2048, 10, 0, 1, 2, 5))
    assert mooncake(path) == [planned("0", (1024, 10), (502, 10, 1.0), (502, 10, 3.0)),
                              planned("1", (1600, 20), (428, 10, 1.0), arrival=2.0)]


def test_mooncake_takes_the_longest_prefix(tmp_path):
    """The second request is no answer to the first one's long reply; the third could continue either."""
    path = write(tmp_path / "m.jsonl",
                 request(0, 600, 1000, 0, 9), request(1, 1100, 1, 0, 1, 8), request(2, 2000, 1, 0, 1, 2, 7))
    assert [len(conversation.turns) for conversation in mooncake(path)] == [1, 2]


def test_mooncake_questions_about_one_document_are_separate(tmp_path):
    """Another question about the same document has not seen the first reply. A shared system prompt does not
    make one conversation either."""
    path = write(tmp_path / "m.jsonl",
                 request(0, 1500, 100, 0, 1, 2), request(1, 1510, 100, 0, 1, 3),
                 request(2, 1500, 100, 0, 1, 2), request(3, 600, 10, 0, 4), request(4, 900, 10, 0, 5))
    assert [len(conversation.turns) for conversation in mooncake(path)] == [1, 1, 1, 1, 1]


def trace_of(conversations, system_prompt):
    """The requests that Mooncake would have recorded: an id for each 512 tokens, by content up to there."""
    ids = {}
    for owner, (_, turns, arrival) in enumerate(conversations):
        context, time = system_prompt, arrival
        for turn in turns:
            prompt, time = context + turn.input_tokens, time + turn.think_seconds
            ends = [*range(512, prompt + 1, 512), prompt] if prompt % 512 else range(512, prompt + 1, 512)
            contents = [end if end <= system_prompt else (owner, end) for end in ends]
            hash_ids = [ids.setdefault(content, len(ids)) for content in contents]
            yield request(round(1000 * time), prompt, turn.output_tokens, *hash_ids)
            context = prompt + turn.output_tokens


@settings(max_examples=30, deadline=None)
@given(st.lists(turn_lists, min_size=1, max_size=8), st.integers(0, 100), st.sampled_from([0, 512, 1024]))
def test_mooncake_round_trip(tmp_path_factory, sources, seed, system_prompt):
    """Interleaved conversations behind one system prompt come back as they were, if their first turns fill a
    piece of their own."""
    distinct = [PlannedConversation("", [PlannedTurn(512 + turns[0].input_tokens, 30), *turns[1:]])
                for turns in sources]
    original = with_arrivals(distinct, request_rate=1.0, seed=seed)
    records = sorted(trace_of(original, system_prompt), key=lambda record: record["timestamp"])
    again = mooncake(write(tmp_path_factory.mktemp("trace") / "m.jsonl", *records))
    assert len(again) == len(original)
    for before, after in zip(original, again):
        first, *later = before.turns
        expected = [(system_prompt + first[0], first[1]), *(turn[:2] for turn in later)]
        assert [turn[:2] for turn in after.turns] == expected
        assert after.arrival == pytest.approx(before.arrival, abs=2e-3)
        thinks = [[turn.think_seconds for turn in conversation.turns] for conversation in (before, after)]
        assert thinks[0] == pytest.approx(thinks[1], abs=2e-3)


@pytest.mark.skipif(not TRACE.exists(), reason="the published trace is not here")
def test_mooncake_published_trace():
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    conversations = mooncake(TRACE)
    prompts = [context - turn.output_tokens for conversation in conversations
               for turn, context in zip(conversation.turns, contexts(conversation.turns))]
    assert sorted(prompts) == sorted(record["input_length"] for record in records)
    times = []
    for conversation in conversations:
        thinks = (turn.think_seconds for turn in conversation.turns[1:])
        times += accumulate(thinks, initial=conversation.arrival)
    assert sorted(times) == pytest.approx(sorted(record["timestamp"] / 1000 for record in records))
    assert max(len(conversation.turns) for conversation in conversations) > 1


# --- bad files ---

@pytest.mark.parametrize("read", [
    mooncake, lambda path: list(sharegpt(path, words)), lambda path: list(lmsys(path, words))])
def test_missing_and_empty_files(tmp_path, read):
    with pytest.raises(ValueError, match="absent.json.*No such file"):
        read(tmp_path / "absent.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(ValueError, match="empty.json"):
        read(tmp_path / "empty.json")


@pytest.mark.parametrize("line", [
    '{"timestamp": 0,', "null", "{}",
    '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
    '{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": []}', "\xff"])
def test_a_broken_line_is_named(tmp_path, line):
    path = write(tmp_path / "m.jsonl", request(0, 100, 1, 0))
    path.write_bytes(path.read_bytes() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match="m.jsonl, line 3"):
        mooncake(path)


def test_a_broken_item_is_named(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('[{"conversations": []}, {"conversations": [{"from": "human"}]}]')
    with pytest.raises(ValueError, match="s.json, item 2.*'value'"):
        list(sharegpt(path, words))
    path.write_text('[{"conversations": []},\n\n!]')
    with pytest.raises(ValueError, match="s.json.*line 3"):
        list(sharegpt(path, words))


# ---- load: whichever of the kinds a file is

@pytest.mark.parametrize("record, conversation", [
    (dict(timestamp=2000, input_length=9, output_length=4, hash_ids=[1]), planned("0", (9, 4), arrival=2.0)),
    (dict(data=["Hi, I'm Ada.", "Hello."]), None),
    (dict(conversation=[dict(role="user", content="Hi"), dict(role="assistant", content="Yes?")]), None)])
def test_load_knows_json_lines_by_their_first_record(tmp_path, record, conversation):
    [loaded] = load(write(tmp_path / "lines.jsonl", record), "tiny_chat")
    assert loaded == conversation or conversation is None and min(loaded.turns[0][:2]) >= 1


def test_load_knows_sharegpt_and_counts_with_a_tokenizer(tmp_path):
    texts = ["Hi, I'm Ada.", "Hello Ada."]
    path = tmp_path / "sharegpt.json"
    said = [{"from": side, "value": text} for side, text in zip(("human", "gpt"), texts)]
    path.write_text(json.dumps([dict(conversations=said)]))
    tokenizer = load_tokenizer(find_checkpoint("tiny_chat"))
    prompt, reply = (len(tokenizer.encode(text)) for text in texts)
    assert load(path, "tiny_chat") == [planned("0", (prompt, reply))]


@pytest.mark.parametrize("content, message", [
    ("", "cannot read"), ("{}", "none of the fields"), ("nonsense", "cannot read"), ("[]", "empty")])
def test_load_says_what_is_wrong_with_a_file(tmp_path, content, message):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "file", "tiny_chat")
