"""Formats by hand, Mooncake's conversations by writing a trace and reading it back."""
import json
import math
import random
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from checkpoint import PRESETS, find_checkpoint
from engine import Engine
from experiments.run import drive, summary
from experiments.simulator import HARDWARE, OPERATORS, SimulatedWorker, VirtualClock
from experiments.traces import (bailian, lmsys, load, mooncake, sessions, sharegpt, tracelab,
                                ultrachat, weka)
from experiments.workload import Piece, PlannedConversation, PlannedTurn, with_arrivals
from serving.tokenizer import load_tokenizer

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


turn = st.builds(PlannedTurn, st.integers(1, 300), st.integers(1, 300), keep=st.none())
turn_lists = st.lists(turn, min_size=1, max_size=8)


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
    for owner, (_, turns, arrival, _) in enumerate(conversations):
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


# --- other traces ---

def chat(chat_id, parent, seconds, prompt, reply, *hash_ids):
    return dict(chat_id=chat_id, parent_chat_id=parent, timestamp=seconds, input_length=prompt,
                output_length=reply, type="text", turn=1, hash_ids=list(hash_ids))


def test_bailian_has_seconds_and_links(tmp_path):
    path = write(tmp_path / "b.jsonl",
                 chat(7, -1, 1.5, 40, 10, 1, 2, 3), chat(8, 7, 61.5, 70, 5, 1, 2, 4, 5, 6),
                 chat(9, 7, 70.0, 90, 5, 1, 2, 4, 5, 6, 9),         # 8 has continued 7 before
                 chat(10, 8, 80.0, 60, 5, 1, 2, 4, 5),              # shorter than what it answers
                 chat(11, 10, 90.0, 70, 5, 1, 2, 99, 98, 97))       # another history than that of 10
    assert load(path, "none") == bailian(path) == [
        planned("0", (40, 10), (20, 5, 60.0), arrival=1.5), planned("1", (90, 5), arrival=70.0),
        planned("2", (60, 5), arrival=80.0), planned("3", (70, 5), arrival=90.0)]


def test_an_edited_history_does_not_end_the_conversation_that_it_begins_with(tmp_path):
    path = write(tmp_path / "b.jsonl", chat(7, -1, 1.0, 40, 10, 1, 2, 3),
                 chat(8, 7, 20.0, 70, 5, 99, 98, 97, 96, 95), chat(9, 7, 31.0, 70, 5, 1, 2, 4, 5, 6))
    assert bailian(path) == [planned("0", (40, 10), (20, 5, 30.0), arrival=1.0),
                             planned("1", (70, 5), arrival=20.0)]


def in_session(session, prompt, reply, **fields):
    return dict(session_id=session, input_length=prompt, output_length=reply, **fields)


def test_sessions_have_new_tokens_and_delays(tmp_path):
    path = write(tmp_path / "s.jsonl", in_session("a", 300, 40, timestamp=2000, hash_ids=[1]),
                 in_session("b", 50, 5), in_session("a", 150, 20, delay=3000),
                 in_session("b", 60, 5, timestamp=4000), in_session("b", 70, 5, timestamp=5500))
    assert load(path, "none") == sessions(path) == [
        planned("a", (300, 40), (150, 20, 3.0), arrival=2.0),
        planned("b", (50, 5), (60, 5, 4.0), (70, 5, 1.5))]


def asked(seconds, prompt, reply, *hash_ids):
    return {"t": seconds, "type": "n", "in": prompt, "out": reply, "hash_ids": list(hash_ids)}


def test_a_timestamp_counts_from_the_previous_turn_even_if_that_one_had_a_delay(tmp_path):
    path = write(tmp_path / "s.jsonl", in_session("a", 300, 40, timestamp=2000),
                 in_session("a", 150, 20, timestamp=6000, delay=3000), in_session("a", 50, 5, timestamp=8000))
    assert sessions(path) == [planned("a", (300, 40), (150, 20, 3.0), (50, 5, 2.0), arrival=2.0)]


def test_sessions_share_the_full_pieces_with_which_they_begin(tmp_path):
    """a and b share 1,024 tokens, c and d 512. The last piece of e is not full; f tells nothing."""
    path = write(tmp_path / "s.jsonl", *(
        in_session(name, prompt, 9, timestamp=0, hash_ids=ids) for name, prompt, ids in (
            ("a", 1600, [5, 6, 7, 8]), ("b", 1100, [5, 6, 9]), ("c", 600, [3, 4]), ("d", 512, [3]),
            ("e", 1023, [5, 6]))), in_session("f", 600, 9), in_session("a", 600, 9, delay=0, hash_ids=[3]))
    begins = {one.name: one.begins for one in sessions(path)}
    one, two, three = begins["a"][:1], begins["a"][1:], begins["c"]
    assert begins == dict(a=one + two, b=one + two, c=three, d=three, e=one, f=())
    assert len({*one, *two, *three}) == 3 and {piece.tokens for piece in one + two + three} == {512}


# --- TraceLab ---

COLUMNS = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"


def csv_of(path, *lines, columns=COLUMNS):
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def test_tracelab(tmp_path):
    path = csv_of(tmp_path / "t.csv", "b,2000,0,0,40,5,0", "a,,1,160,20,10,1500", "a,500,0,100,50,10,250",
                  "", "a,,2,155,9,10,", "a,,3,900,9,10,0", columns=COLUMNS.replace("t_len", "t_len "))
    with pytest.raises(ValueError, match="t.csv, line 6: the field 'tool_wait_after_ms' is missing"):
        tracelab(path)
    path.write_text("\ufeff" + path.read_text().replace("155,9,10,", "155,9,10,0.0"), "utf-8")
    assert load(path, "none") == tracelab(path) == [
        planned("b", (40, 5), arrival=2.0),
        planned("a", (150, 10), (20, 10, 0.25), (9, 10, 1.5, 155), (900 - 174 + 9, 10), arrival=0.5)]


def test_tracelab_without_arrivals(tmp_path):
    path = csv_of(tmp_path / "t.csv", *(f"{name},0,0,9,1,5" for name in range(50)),
                  columns=COLUMNS.replace("arrival_time,", ""))
    assert load(path, "none") == [planned(str(name), (9, 1)) for name in range(50)]


@pytest.mark.parametrize("line, message", [
    ("a,0,x,0,9,1,5", "round_idx must be a whole number of at least 0, got 'x'"),
    ("a,0,1,-3,9,1,5", "prefix_len must be a whole number of at least 0, got '-3'"),
    ("a,0,1,2.5,9,1,5", "prefix_len must be a whole number of at least 0, got '2.5'"),
    ("a,0,1,0,inf,1,5", "input_len must be"), ("a,0,1,0,nan,1,5", "input_len must be"),
    ("a,0,1,0,9,0,5", "output_len must be a whole number of at least 1, got '0'"),
    ("a,0,1,0,9,1,-5", "tool_wait_after_ms must be"), ("a,-1,1,0,9,1,5", "arrival_time must be"),
    ("a,0,0,0,9,1,5", "session a has two rounds with the round_idx 0: number its rounds"),
    ("a,0,1,0,0,1,5", "both 0: leave it out"), ("a,0,1,0,1,000,1,5", "8 values, but the first line has 7"),
    (",0,1,0,9,1,5", "the field 'session_id' is missing"), ("a,0,1,0", "the field 'input_len' is missing"),
    ("a,0,1,0,9,1,5" + "x" * 200_000, "field larger than field limit")])
def test_a_bad_line_of_a_csv_file_is_named(tmp_path, line, message):
    path = csv_of(tmp_path / "t.csv", "a,0,0,0,9,1,5", line)
    with pytest.raises(ValueError, match=message) as caught:
        load(path, "none")
    assert "t.csv" in str(caught.value) and ("line 3" in str(caught.value) or "larger" in message)


def test_tracelab_as_its_exporter_writes_it(tmp_path):
    """The session is in the column `id`, and times are floats."""
    path = csv_of(tmp_path / "t.csv", "0,150,10,0.000000,0,812.500000,0", "0,20,10,0.000000,1,0.000000,160",
                  "1,99,7,1234.567891,0,0.000000,0",
                  columns="id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len")
    assert load(path, "none") == [planned("0", (150, 10), (20, 10, 0.8125)),
                                  planned("1", (99, 7), arrival=1.234567891)]


@pytest.mark.parametrize("text, message", [
    ("", "cannot read .*t.csv: it is empty"), ("\n \n", "it is empty"),
    (COLUMNS, "t.csv is empty behind its first line"),
    (COLUMNS.replace(",", ";"), "its first line is neither JSON nor names with commas between"),
    (COLUMNS.replace(",", "\t"), "neither JSON nor names with commas"),
    (COLUMNS + ",input_len\na,0,0,0,9,1,5,7\n", "its first line names input_len twice"),
    (COLUMNS + "\na\xff,0,0,0,9,1,5\n", "t.csv: 'utf-8' codec can't decode byte 0xff in position 86"),
    (COLUMNS + "\na,0,0,0,9,0,5\n", "line 2: output_len must"),
    (COLUMNS + "\na,1.7e12,0,0,9,1,5\n", "after 19,676 days: .*subtract the earliest")])
def test_a_bad_csv_file_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "t.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "t.csv", "none")


def test_a_csv_file_may_have_spaces_and_blank_lines(tmp_path):
    path = csv_of(tmp_path / "t.csv", "a , 0, 0, 0, 9, 1, 5", "", "a,0,1,10,8,1,5", "a,0,1,10,8,1,5",
                  columns="\n" + COLUMNS)
    with pytest.raises(ValueError, match="line 6: session a has two rounds with the round_idx 1"):
        load(path, "none")


def test_an_empty_csv_file(tmp_path):
    with pytest.raises(ValueError, match="t.csv is empty"):
        load(csv_of(tmp_path / "t.csv"), "none")


# --- two traces of agents, counted from the file and replayed ---

def counted_in_weka(path):
    """(conversations, turns, rewinds, attainable hits, prompt tokens), if sessions have one
    conversation each."""
    turns = rewinds = attainable = prompts = 0
    lines = path.read_text().splitlines()
    for line in lines:
        asked = json.loads(line)["requests"]
        turns, prompts = turns + len(asked), prompts + sum(one["in"] for one in asked)
        for old, new in pairwise(asked):
            common = sum(a == b for a, b in zip(old["hash_ids"], new["hash_ids"][:new["in"] // 64]))
            extends = common >= old["in"] // 64 and new["in"] > old["in"] + old["out"]
            rewinds += not extends
            attainable += old["in"] + old["out"] - 1 if extends else min(64 * common, new["in"] - 1)
    return len(lines), turns, rewinds, attainable, prompts


def counted_in_tracelab(path):
    turns = rewinds = attainable = prompts = 0
    contexts = {}                                           # the file has its rounds in order
    for line in path.read_text().splitlines()[1:]:
        session, _, _, prefix, new, reply, _ = map(int, line.split(","))
        context = contexts.get(session, 0)
        turns, prompts, rewinds = turns + 1, prompts + prefix + new, rewinds + (prefix < context)
        attainable += min(prefix, max(context - 1, 0))      # the last token was never fed
        contexts[session] = prefix + new + reply
    return len(contexts), turns, rewinds, attainable, prompts


def agents(rng):
    """Sessions of (tokens kept, new tokens, reply): four of ten later turns rewind."""
    for _ in range(12):
        context, turns = 0, []
        for _ in range(rng.randint(1, 9)):
            kept = context if rng.random() < 0.6 else rng.randint(min(context, 70), context)
            turns.append((kept, rng.randint(70, 300), rng.randint(1, 150)))
            context = sum(turns[-1])
        yield turns


def agents_in_weka(path, rng):
    """An id stands for the context up to the end of its piece."""
    ids, sessions = {}, []
    for turns in agents(rng):
        context, asked = [], []
        for number, (kept, new, reply) in enumerate(turns):
            context = context[:kept] + [object() for _ in range(new)]
            ends = [*range(64, len(context), 64), len(context)]
            hash_ids = [ids.setdefault(tuple(map(id, context[:end])), len(ids)) for end in ends]
            asked.append({"t": float(number), "type": "n", "in": len(context), "out": reply,
                          "hash_ids": hash_ids})
            context += [object() for _ in range(reply)]
            sessions.append(context)                        # keeps the objects, and so their ids
        sessions.append(dict(id="x", block_size=64, requests=asked))
    return write(path, *(one for one in sessions if isinstance(one, dict)))


def agents_in_tracelab(path, rng):
    return csv_of(path, *(f"{session},0,{number},{kept},{new},{reply},5"
                          for session, turns in enumerate(agents(rng))
                          for number, (kept, new, reply) in enumerate(turns)))


def simulated(num_slots):
    """An engine whose GPU tier holds everything."""
    clock = VirtualClock()
    worker = SimulatedWorker(PRESETS["opt-125m"], HARDWARE["a100"], OPERATORS["eager"], clock, num_slots, 0,
                             max_context=3000)
    return Engine(worker=worker, clock=clock)


@pytest.mark.parametrize("make, count", [(agents_in_weka, counted_in_weka),
                                         (agents_in_tracelab, counted_in_tracelab)])
@pytest.mark.parametrize("seed", range(2))
def test_a_replay_of_agents_attains_what_the_file_allows(tmp_path, make, count, seed):
    path = make(tmp_path / "trace", random.Random(seed))
    sessions, turns, rewinds, attainable, prompts = count(path)
    conversations = load(path, "none")
    later = [turn for one in conversations for turn in one.turns[1:]]
    assert (len(conversations), len(later) + sessions) == (sessions, turns)
    assert sum(turn.keep is not None for turn in later) == rewinds > 5
    with closing(simulated(num_slots=60_000)) as engine:
        row = summary(drive(engine, conversations, seed=0, sleep=engine.clock.sleep))
    assert row["attainable_hit_rate"] == attainable / prompts and row["hits_of_attainable"] == 1


def test_sessions_compute_a_system_prompt_once(tmp_path):
    """b and c share 1,024 tokens with a. The last token of c's prompt is computed all the same."""
    path = write(tmp_path / "s.jsonl", in_session("a", 1600, 9, timestamp=0, hash_ids=[5, 6, 7, 8]),
                 in_session("b", 1100, 9, timestamp=1000, hash_ids=[5, 6, 9]),
                 in_session("c", 1024, 9, timestamp=2000, hash_ids=[5, 6]))
    with closing(simulated(num_slots=9_000)) as engine:
        served = drive(engine, load(path, "none"), seed=0, sleep=engine.clock.sleep)
    assert [turn.usage["gpu"] for turn in served] == [0, 1024, 1023]


def test_sessions_without_any_timestamp(tmp_path):
    """All of them begin at 0; that says nothing about the unit of their times."""
    turns = [in_session(name, 9, 1) for name in range(200)] + [in_session(0, 9, 1, delay=1000)]
    first, *others = sessions(write(tmp_path / "s.jsonl", *turns))
    assert first == planned("0", (9, 1), (9, 1, 1.0)) and len(others) == 199


def test_weka_finds_the_conversations_of_a_session(tmp_path):
    subagent = dict(t=3.0, type="subagent", requests=[asked(0.5, 64, 1, 70)])
    path = write(tmp_path / "w.jsonl",
                 dict(id="one", block_size=64, requests=[
                     asked(0.0, 130, 10, 1, 2, 3), subagent, asked(4.5, 200, 5, 1, 2, 4, 5),
                     asked(5.0, 64, 5, 8)]),
                 dict(id="two", requests=[asked(1.0, 640, 1, *range(1, 11))]))
    assert load(path, "none") == weka(path) == [
        planned("0", (130, 10), (60, 5, 4.5)), planned("1", (64, 5), arrival=5.0),
        planned("2", (640, 1), arrival=1.0)]


def test_a_request_of_a_session_rewinds(tmp_path):
    """Pieces of 64. 2 drops a part of the reply, 3 goes back, 4 repeats 3, and 5 is longer again."""
    path = write(tmp_path / "w.jsonl", dict(id="one", requests=[
        asked(0, 200, 100, 1, 2, 3, 4), asked(1, 270, 10, 1, 2, 3, 5, 6), asked(2, 130, 10, 1, 2, 7),
        asked(3, 128, 10, 1, 2), asked(4, 150, 10, 1, 2, 8)]))
    assert weka(path) == [planned("0", (200, 100), (78, 10, 1, 192), (2, 10, 1, 128), (1, 10, 1, 127),
                                  (12, 10, 1))]


def test_conversations_beside_each_other_begin_alike(tmp_path):
    """The example of `conversations_of_session`: 3 has a conversation beside that of 1, and 4 rewinds it.
    Another session has other texts."""
    requests = [asked(0, 200, 10, 1, 2, 3), asked(1, 300, 10, 1, 2, 3, 4), asked(2, 195, 10, 1, 2, 5),
                asked(3, 210, 10, 1, 2, 6), asked(4, 400, 10, 1, 2, 3, 4, 7, 8)]
    path = write(tmp_path / "w.jsonl", dict(id="one", requests=requests),
                 dict(id="two", requests=requests[:1]))
    first, beside, other = weka(path)
    assert first[:3] == planned("0", (200, 10), (90, 10, 1), (90, 10, 3))[:3]
    assert beside[:3] == planned("1", (195, 10), (82, 10, 1, 128), arrival=2.0)[:3]
    assert first.begins == beside.begins == (Piece(0, 64), Piece(1, 64)) and other.begins == ()


def test_requests_of_a_session_need_not_be_in_order(tmp_path):
    late, early = asked(4.5, 200, 5, 1, 2, 3), asked(0.5, 130, 10, 1, 2)
    path = write(tmp_path / "w.jsonl", dict(id="one", requests=[late, early]))
    assert weka(path) == [planned("0", (130, 10), (60, 5, 4.0), arrival=0.5)]


def test_a_first_record_may_be_long(tmp_path):
    """A session of one day can have more than a megabyte."""
    long = asked(0.0, 64 * 200_000, 10, *range(200_000))
    path = write(tmp_path / "w.jsonl", dict(id="one", requests=[long]), dict(id="two", requests=[long]))
    assert path.stat().st_size > 2 * 2**20 and len(load(path, "none")) == 2


HOUR = range(0, 3_600_001, 30_000)       # ms


def without_each(record, *fields):
    return [{key: value for key, value in record.items() if key != field} for field in fields]


ASKED = {"t": 0, "type": "n", "in": 9, "out": 1, "hash_ids": [1]}


@pytest.mark.parametrize("records, message", [
    ([chat(1, -1, 0, 9, 1), chat(2, 5, 1, 20, 1)], "parent_chat_id 5 of chat_id 2 is in no line"),
    ([chat(1, 3, 0, 9, 1), chat(2, 1, 1, 20, 1), chat(3, 2, 2, 30, 1)], "parents of chat_id 1 form a loop"),
    ([chat(1, 1, 0, 9, 1)], "parents of chat_id 1 form a loop"),
    ([chat(1, -1, 0, 9, 1), chat(1, -1, 1, 20, 1)], "two lines have the chat_id 1"),
    ([chat(n, -1, ms, 9, 1) for n, ms in enumerate(HOUR)], "cover 42 days.*divide them by 1,000"),
    ([request(3 * n, 9, 1, n) for n in range(1200)], "1,200 requests come in 3.6 s.*multiply them"),
    ([dict(session_id=1, input_length=9, output_length=1, timestamp=3 * n) for n in range(1200)], "multiply"),
    ([chat(1, -1, math.nan, 9, 1)], "times at least 0"),
    ([{"requests": [ASKED | {"t": ms} for ms in HOUR]}], "cover 42 days"),
    ([dict(session_id=1, input_length=9, output_length=1)] * 2, "line 2: the field 'timestamp' is missing"),
    ([dict(session_id=1, input_length=9, output_length=1, context_mode="message_array_with_responses")],
     "input_length must count new tokens"),
    ([dict(session_id=1, input_length=9, output_length=1), dict(session_id=1, input_length=9,
                                                                output_length=1, delay=-5)], "line 2.*waits"),
    ([dict(timestamp=1, input_length=9, output_length=1)], "no kind that we know .ShareGPT has"),
    *[([record], "line 1: the field '.*' is missing") for record in (
        *without_each(chat(1, -1, 0, 9, 1), "chat_id", "parent_chat_id", "timestamp", "input_length",
                      "output_length", "hash_ids"),
        *without_each(dict(session_id=1, input_length=9, output_length=1, delay=5, hash_ids=[1]),
                      "session_id", "input_length", "output_length"),
        *without_each(request(0, 9, 1, 1), "timestamp", "input_length", "output_length"),
        *({"requests": [asked]} for asked in without_each(ASKED, *ASKED)))]])
def test_a_bad_trace_is_one_clear_line(tmp_path, records, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(write(tmp_path / "trace.jsonl", *records), "none")
    assert "trace.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("records, nulls", [
    ([request(0, 600, 50, 7), request(1000, 700, 20, 8)], ["session_id", "delay", "chat_id", "requests"]),
    ([in_session("a", 5, 5, timestamp=0), in_session("a", 6, 5, delay=100)], ["delay", "context_mode"]),
    ([in_session("a", 5, 5), in_session("a", 6, 5, delay=100)], ["delay", "timestamp", "conversations"]),
    ([dict(requests=[asked(0.0, 130, 10, 1, 2, 3)])], ["block_size", "data", "conversation"])])
def test_null_means_left_out(tmp_path, records, nulls):
    expected = load(write(tmp_path / "t.jsonl", *records), "none")
    filled = [dict.fromkeys(nulls) | record for record in records]
    assert load(write(tmp_path / "n.jsonl", *filled), "none") == expected


def test_a_required_field_that_is_null_is_missing(tmp_path):
    with pytest.raises(ValueError, match="line 1: the field 'input_length' is missing"):
        load(write(tmp_path / "t.jsonl", request(0, 600, 50, 7) | dict(input_length=None)), "none")


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


SAID = [{"id": str(n), "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]}
        for n in range(3)]


@pytest.mark.parametrize("text", [
    json.dumps(SAID), json.dumps(SAID, indent=1), "\n".join(map(json.dumps, SAID)), json.dumps(SAID[0]),
    "\n\n" + "\r\n".join(map(json.dumps, SAID)) + "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_sharegpt_is_an_array_or_lines_and_may_have_a_byte_order_mark(tmp_path, text, mark):
    path = tmp_path / "sharegpt.json"
    path.write_text(mark + text, "utf-8")
    assert len(load(path, "tiny_chat")) == text.count("human")
    assert list(sharegpt(path, words))[0] == planned("0", (2, 1))


def test_other_files_may_have_a_byte_order_mark(tmp_path):
    path = write(tmp_path / "m.jsonl", request(0, 600, 50, 7), request(1000, 700, 20, 8))
    expected = load(path, "none")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load(path, "none") == expected


def test_load_knows_sharegpt_and_counts_with_a_tokenizer(tmp_path):
    texts = ["Hi, I'm Ada.", "Hello Ada."]
    path = tmp_path / "sharegpt.json"
    said = [{"from": side, "value": text} for side, text in zip(("human", "gpt"), texts)]
    path.write_text(json.dumps([dict(conversations=said)]))
    tokenizer = load_tokenizer(find_checkpoint("tiny_chat"))
    prompt, reply = (len(tokenizer.encode(text)) for text in texts)
    assert load(path, "tiny_chat") == [planned("0", (prompt, reply))]


@pytest.mark.parametrize("content, message", [
    ("", "cannot read"), ("{}", "no kind that we know"), ("nonsense", "cannot read"), ("[]", "empty")])
def test_load_says_what_is_wrong_with_a_file(tmp_path, content, message):
    (tmp_path / "file").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "file", "tiny_chat")
