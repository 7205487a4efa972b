"""Sessions: text, names, branches, commits, threads. On the embedded model."""
import json
import random
import sqlite3
import threading
import time
import weakref
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from engine import Engine
from eviction import RecomputeCost
from scheduler import TooLong
from serving.history import History, StaleTurn
from serving.sessions import Answering, Busy, Sessions
from serving.tokenizer import TextStream, Tokenizer, load_tokenizer

ROOT = Path(__file__).parent.parent
COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=160, cpu_cache_tokens=64, chunk_size=8, max_batch_tokens=32,
            debug=True)
ROOMY = dict(TINY, gpu_cache_tokens=512, cpu_cache_tokens=256)


@pytest.fixture
def sessions():
    sessions = Sessions("tiny_chat", **TINY)
    yield sessions
    sessions.close()


@pytest.fixture(params=[False, True], ids=["inline", "started"])
def started(request):
    return request.param


def opened(started, **options):
    sessions = Sessions("tiny_chat", **options)
    return sessions.start() if started else sessions


def test_closed_sessions_leave_memory_at_once(started):
    """Else the model and its tiers would stay until a garbage collection."""
    sessions = opened(started, **TINY)
    sessions.chat("Hi", conversation="c", max_tokens=3)
    sessions.close()
    kept = weakref.ref(sessions.engine.worker)
    del sessions
    assert kept() is None


def talkative(sessions, tokens):
    """Options of a reply of so many tokens that all have text."""
    special = sessions.tokenizer.special.values()
    return dict(max_tokens=tokens, ignore_eos=True, logit_bias=dict.fromkeys(special, -100))


def user(text):
    return dict(role="user", content=text)


def ids(n, seed=0):
    return [(17 * i + 31 * seed) % 250 for i in range(n)]


def script(turns=3):
    """The turns of one conversation, as (prompt, max_tokens)."""
    return [(ids(6 + turn, seed=99 + turn), 5) for turn in range(turns)]


def alone(turns=3):
    """What each turn of the script gives with nobody else there."""
    engine = Engine("tiny_chat", cost=COST)
    replies = [engine.generate(prompt, "c", max_tokens=n, ignore_eos=True).token_ids
               for prompt, n in script(turns)]
    engine.close()
    return replies


def join(threads, seconds=60):
    for thread in threads:
        thread.join(timeout=seconds)
    assert not any(thread.is_alive() for thread in threads)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


# ---- text and conversations

def test_chat_continues_a_conversation(sessions):
    first = sessions.chat("Hi, I'm Ada.", conversation="c", max_tokens=12)
    second = sessions.chat("What is my name?", conversation="c", max_tokens=12)
    assert first.usage["new"] == first.usage["prompt_tokens"]
    history = first.usage["prompt_tokens"] + len(first.token_ids)
    cached = second.usage["gpu"] + second.usage["cpu"] + second.usage["recomputed"]
    assert cached == history - 1                            # the last token was sampled, never fed
    tokens, tokenizer = sessions.engine.cache.conversations["c"].tokens.tolist(), sessions.tokenizer
    special = tokenizer.special
    question = tokenizer.encode("What is my name?")
    turn = [special["<|user|>"], *question, special["<|end|>"], special["<|assistant|>"]]
    owed = [] if first.token_ids[-1] == special["<|end|>"] else [special["<|end|>"]]
    assert tokens[history:] == owed + turn + second.token_ids


def test_sessions_take_an_engine_or_make_one(tmp_path):
    own = Sessions(Engine("tiny_chat", **TINY))
    made = Sessions("tiny_chat", history=tmp_path / "history", **TINY)
    assert own.chat("Hi!", "c", max_tokens=6) == made.chat("Hi!", "c", max_tokens=6)
    with pytest.raises(ValueError, match="flags .* the engine has its own"):
        Sessions(own.engine, gpu_cache_tokens=5)
    own.close()
    made.close()


def test_turns_of_a_conversation_run_in_order_of_submission(started):
    sessions = opened(started, **TINY)
    turns = [sessions.submit(prompt, "c", max_tokens=n, ignore_eos=True) for prompt, n in script()]
    assert turns[2].result().token_ids == alone()[2]
    assert [turn.result().token_ids for turn in turns] == alone()
    head = sessions.history.head("c")
    assert sessions.history.tokens(head.id) == sessions.engine.cache.conversations["c"].tokens
    sessions.close()


def test_a_turn_can_be_read_again_and_as_text(sessions):
    turn = sessions.submit(ids(5), max_tokens=9, ignore_eos=True)
    streamed = "".join(text for text, _ in turn.progress())
    assert list(turn.handle) == turn.result().token_ids and len(list(turn.handle)) == 9
    assert streamed == "".join(text for text, _ in turn.progress()) == turn.result().text
    assert streamed == sessions.tokenizer.decode(turn.result().token_ids)


def test_progress_tells_the_tokens_of_a_text(started):
    """However far the engine is ahead of the reader."""
    sessions, seen, before = opened(started, **TINY), [], 0
    turn = sessions.respond([user("What can you do?")], "c", **talkative(sessions, 40))
    for text, tokens in turn.progress():
        assert tokens <= len(turn.handle.token_ids)
        seen.append(text)
        assert sessions.tokenizer.decode(turn.handle.token_ids[before:tokens]) == text
        before = tokens
    assert "".join(seen) == turn.result().text and len(seen) > 1
    sessions.close()


def test_a_cancelled_turn_leaves_no_trace(sessions):
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    before = sessions.history.head("c")
    turn = sessions.submit(ids(20, seed=3), "c", max_tokens=50, ignore_eos=True)
    assert next(iter(turn.handle)) is not None
    turn.cancel()
    assert turn.result().finish_reason == "cancelled"
    assert sessions.history.head("c") == before
    assert len(sessions.engine.cache.conversations["c"].tokens) == before.length
    untouched = Sessions("tiny_chat", **TINY)
    untouched.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    assert sessions.generate(ids(7), "c", max_tokens=6) == untouched.generate(ids(7), "c", max_tokens=6)


def test_a_restart_goes_on_from_the_history(tmp_path):
    replies = []
    for prompt, n in script():
        sessions = Sessions("tiny_chat", history=tmp_path / "history.sqlite", **TINY)
        reply = sessions.generate(prompt, "c", max_tokens=n, ignore_eos=True)
        assert reply.usage["recomputed"] == max(0, sum(len(p) + m for p, m in script()[:len(replies)]) - 1)
        replies.append(reply.token_ids)
        sessions.close()
    assert replies == alone()


def test_a_cold_conversation_lives_in_the_history_alone(sessions):
    prompt, n = script()[0]
    sessions.generate(prompt, "c", max_tokens=n, ignore_eos=True)
    for i in range(12):
        sessions.generate(ids(40, seed=i), f"other{i}", max_tokens=8, ignore_eos=True)
    assert "c" not in sessions.engine.cache.conversations
    prompt, n = script()[1]
    reply = sessions.generate(prompt, "c", max_tokens=n, ignore_eos=True)
    assert reply.token_ids == alone()[1]
    assert reply.usage["recomputed"] > 0 == reply.usage["gpu"] + reply.usage["cpu"]


def test_forget_frees_both_tiers_and_the_history(sessions):
    sessions.generate(ids(30), "c", max_tokens=4, ignore_eos=True)
    running = sessions.submit(ids(5), "c", max_tokens=50, ignore_eos=True)
    next(iter(running.handle))
    sessions.forget("c")
    assert running.result().finish_reason == "cancelled"
    assert sessions.history.head("c") is None and "c" not in sessions.engine.cache.conversations
    stats = sessions.engine.stats()
    assert stats["slots_free"] == 160 and stats["cpu_chunks_free"] == 8
    assert sessions.generate(ids(3), "c", max_tokens=2).usage["prompt_tokens"] == 3
    sessions.forget("never heard of")


def test_one_offs_keep_nothing(sessions):
    sessions.generate(ids(30), max_tokens=4, ignore_eos=True)
    stats = sessions.engine.stats()
    assert stats["slots_free"] == 160 and stats["conversations"] == 0 and not sessions.history.conversations()


def test_the_end_of_a_one_off_asks_the_history_for_nothing(sessions, monkeypatch):
    """The engine's thread would wait for a client that reads a long one."""
    turn = sessions.submit(ids(5), max_tokens=3)
    monkeypatch.setattr(sessions, "history", None)
    assert turn.result().token_ids
    monkeypatch.undo()


def test_a_resent_history_is_recognised_and_an_edited_one_branches(sessions):
    first = sessions.respond([user("Hello")], hint="mine", max_tokens=6)
    said = dict(role="assistant", content=first.result().text)
    second = sessions.respond([user("Hello"), said, user("And now?")], max_tokens=6)
    assert second.conversation == "mine" and second.result().usage["gpu"] > 0
    # "mine" has gone on: its first turn gets a second child, which shares the full chunks
    # and copies the rest, with the tokens that begin both new messages.
    branch = sessions.respond([user("Hello"), said, user("Or else?")], hint="mine", max_tokens=6)
    assert branch.conversation != "mine"
    known = first.result().usage["prompt_tokens"] + len(first.handle.token_ids) - 1
    usage = branch.result().usage
    assert usage["gpu"] >= known and usage["recomputed"] == 0
    fresh = sessions.respond([user("Howdy"), said, user("And now?")], hint="mine", max_tokens=6)
    assert fresh.conversation not in ("mine", branch.conversation)
    assert fresh.result().usage["new"] == fresh.result().usage["prompt_tokens"]


# ---- the system prompt

SYSTEM = "You are a pilot. " * 3


def scripted(model, position, tokens):
    """From this position on the model says these tokens, whatever it reads."""
    for layer in model.layers:
        layer.attn.out.weight.zero_()
        layer.mlp.down.weight.zero_()
    model.norm.weight.fill_(1)
    embedding = model.tokens.weight.normal_(generator=torch.Generator().manual_seed(0))
    first_row = position + model.config.position_offset
    model.positions.weight[first_row:first_row + len(tokens)] = 100 * embedding[tokens]


@pytest.mark.parametrize("begin", ["<think>", ""])      # "": the template writes it
def test_a_reply_resent_without_its_thoughts_comes_from_the_cache(checkpoint, monkeypatch, begin):
    def load(directory, most):
        tokenizer = load_tokenizer(directory, most)
        tokenizer.tool_form = tokenizer.tool_form._replace(thinks=not begin)
        return tokenizer
    monkeypatch.setattr("serving.sessions.load_tokenizer", load)
    with closing(Sessions(checkpoint, gpu_cache_tokens=512, cpu_cache_tokens=512)) as sessions:
        question, reply = [user("2 + 2?")], sessions.tokenizer.encode(f"{begin}2 and 2</think> 4")
        prompt = sessions.tokenizer.turn([], question, None)
        scripted(sessions.engine.worker.model, len(prompt) - 1, reply)
        thought = sessions.respond(question, max_tokens=len(reply)).result()
        assert thought.text == f"{begin}2 and 2</think> 4"
        answer = dict(role="assistant", content="4")
        usage = sessions.respond([*question, answer, user("and 3?")], max_tokens=1).result().usage
        assert usage["gpu"] == len(prompt) + len(reply) - 1     # the last token was never fed


def prompted(**flags):
    return Sessions("tiny_chat", **dict(TINY, system_prompt=SYSTEM) | flags)


def test_the_system_prompt_is_what_a_first_system_message_would_be_and_is_computed_once():
    plain, sessions = Sessions("tiny_chat", **TINY), prompted()
    engine, system = sessions.engine, dict(role="system", content=SYSTEM)
    expected = plain.respond([system, user("Hi!")], max_tokens=6).result()
    prefix = len(engine.cache.designated.tokens)
    assert prefix > 16 and engine.scheduler.limit == 160 - prefix
    first = sessions.chat("Hi!", "a", max_tokens=6)
    assert first.token_ids == expected.token_ids and first.usage["new"] == expected.usage["new"]
    for again in (sessions.chat("Hi!", "b", prefix="b/", max_tokens=6),     # of other owners
                  sessions.respond([user("Hi!")], hint="c", prefix="c/", max_tokens=6).result(),
                  sessions.respond([system, user("Hi!")], hint="d", prefix="d/", max_tokens=6).result(),
                  sessions.chat("Hi!", prefix="e/", max_tokens=6)):
        assert again.token_ids == expected.token_ids
        assert again.usage == dict(expected.usage, gpu=prefix, new=expected.usage["new"] - prefix)
    again = sessions.chat("Hi!", max_tokens=6)          # of the first one's tenant: all but the last token
    total = expected.usage["prompt_tokens"]
    assert again.token_ids == expected.token_ids and again.usage == dict(expected.usage, gpu=total - 1, new=1)
    for name in "abcd":
        sessions.forget(name)
    assert engine.stats()["slots_free"] == 160 - prefix          # it stays
    assert sessions.chat("Bye!", "a", max_tokens=2).usage["gpu"] == prefix


def test_conversations_go_on_under_the_system_prompt_and_do_not_show_it():
    sessions = prompted()
    first = sessions.respond([user("Hi!")], hint="mine", max_tokens=6)
    said = dict(role="assistant", content=first.result().text)
    second = sessions.respond([user("Hi!"), said, user("And?")], max_tokens=6)
    assert second.conversation == "mine" and second.result().usage["recomputed"] == 0
    third = sessions.respond([user("And?")], "mine", max_tokens=6).result()
    assert third.usage["new"] < second.result().usage["prompt_tokens"] and third.usage["recomputed"] == 0
    assert [item["role"] for item in sessions.history.items("mine")] == ["user", "assistant"] * 3
    other = sessions.respond([user("And?")], "mine", instructions="Be brief.", max_tokens=6)
    assert other.result().usage["gpu"] == 0                 # another beginning
    roles = [message["role"] for message in sessions.history.messages(other.id)]
    assert roles == ["system"] + ["user", "assistant"] * 4
    brief = partial(sessions.respond, [dict(role="system", content="Be brief."), user("Hi!")], max_tokens=6)
    assert brief(prefix="other/").result().usage["gpu"] == 0
    own = brief(hint="own")
    assert own.result().usage["gpu"] > 0                    # "mine" begins so, too
    assert [item["role"] for item in sessions.history.items("own")] == ["system", "user", "assistant"]


def test_a_system_prompt_in_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Be kind.")
    sessions = prompted(system_prompt=str(tmp_path / "prompt.txt"))
    assert sessions.system == [dict(role="system", content="Be kind.")]


def test_a_system_prompt_that_cannot_be_used(monkeypatch):
    with pytest.raises(ValueError, match="more than half of 160 slots"):
        prompted(system_prompt="word " * 100)
    render = Tokenizer._render
    def strict(self, messages, options):
        if messages[0]["role"] == "system":
            raise ValueError("the chat template failed: no system role")
        return render(self, messages, options)
    monkeypatch.setattr(Tokenizer, "_render", strict)
    with pytest.raises(ValueError, match="system_prompt cannot be used with tiny_chat: .* no system role"):
        prompted()
    def silent(self, messages, options):
        return render(self, [message for message in messages if message["role"] != "system"], options)
    monkeypatch.setattr(Tokenizer, "_render", silent)
    with pytest.raises(ValueError, match="shows no system message"):
        prompted()


def test_a_system_prompt_that_cannot_be_used_leaves_the_history_free(tmp_path):
    with pytest.raises(ValueError, match="more than half of 160 slots"):
        prompted(history=tmp_path / "h", system_prompt="word " * 100)
    prompted(history=tmp_path / "h").close()


def test_a_failed_worker_takes_the_shared_prefix_with_it():
    sessions = prompted()
    reply, worker = sessions.chat("Hi!", "a", max_tokens=6), sessions.engine.worker
    execute = worker.execute
    def fail_once(batch):
        worker.execute = execute
        raise RuntimeError("lost")
    worker.execute = fail_once
    with pytest.raises(RuntimeError, match="lost"):
        sessions.chat("Hi!", "b", max_tokens=6)
    worker.pool.gpu.zero_()
    again = sessions.chat("Hi!", "b", max_tokens=6)
    assert again.token_ids == reply.token_ids and again.usage["gpu"] == 0


def test_a_history_that_cannot_be_used_leaves_no_engine(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine))
    (tmp_path / "file").write_text("no history")
    with pytest.raises(ValueError, match="cannot be used as a history"):
        Sessions("tiny_chat", history=tmp_path / "file", **TINY)
    assert len(closed) == 1
    engine = Engine("tiny_chat", **TINY)
    with pytest.raises(ValueError, match="cannot be used as a history"):
        Sessions(engine, history=tmp_path / "file")
    assert len(closed) == 1                     # its owner will close it


# ---- the end of a reply

def test_a_stop_string_ends_the_reply(sessions):
    prompt = sessions.tokenizer.turn([], [user("What can you do?")], None)
    whole = sessions.generate(prompt, max_tokens=30, ignore_eos=True)
    stop = whole.text[6:9]
    reply = sessions.generate(prompt, max_tokens=30, ignore_eos=True, stop=[stop])
    assert reply.finish_reason == "stop" and reply.text == whole.text[:whole.text.index(stop)]
    assert reply.token_ids == whole.token_ids[:len(reply.token_ids)]


@pytest.mark.parametrize("named", [False, True])
def test_after_a_stop_string_the_context_is_the_text_that_was_shown(named, started):
    """Even if the cut goes through a token. A client that resends its history is recognised."""
    sessions = opened(started, **ROOMY)
    told, name, turns, tails = [], "c" if named else None, [], []
    for n in range(4):
        told.append(user(f"Tell me {n}"))
        stop = sessions.respond(told, keep=False, **talkative(sessions, 8)).result().text[5:7]
        new = told[-1:] if named else told
        turns.append(sessions.respond(new, name, stop=stop, **talkative(sessions, 8)))
        answer = turns[-1].result()
        assert len(answer.text) <= 5 and (n == 0 or answer.usage["new"] < 20)
        assert answer.usage["recomputed"] == 0
        told.append(dict(role="assistant", content=answer.text))
        turn = sessions.history.turn(turns[-1].id)
        tails.append(json.loads(turn.note).get("tail"))
        held = sessions.engine.cache.conversations[turn.conversation].tokens
        assert held == sessions.history.tokens(turn.id)
    assert len({turn.conversation for turn in turns}) == 1 and any(tails)
    context = sessions.history.tokens(turns[2].id).tolist() + turns[3].plan.prompt
    assert sessions.tokenizer.decode(context) == "".join(message["content"] for message in told[:-1])
    lone = Engine("tiny_chat", cost=COST)
    reply = turns[3].handle.token_ids
    assert lone.generate(context, **talkative(sessions, len(reply))).token_ids == reply
    sessions.close()


@pytest.mark.parametrize("stop", [(), "xyz"])
def test_a_turn_has_one_stream_of_text(sessions, monkeypatch, stop):
    """Each token is decoded once, with stop strings or without."""
    push, pushed = TextStream.push, []
    monkeypatch.setattr(TextStream, "push", lambda stream, token, *may_stop:
                        pushed.append(token) or push(stream, token, *may_stop))
    turn = sessions.respond([user("Hi")], "c", max_tokens=20, stop=stop)
    assert "".join(text for text, _ in turn.progress()) == turn.result().text
    assert pushed == turn.handle.token_ids


@pytest.mark.parametrize("options, message", [
    (dict(stop=[""]), "stop"), (dict(stop=[5]), "stop"), (dict(stop=5), "stop"),
    (dict(conversation=5), "conversation"), (dict(max_tokens=160), "limit of 160"), (dict(top_p=0), "top_p")])
def test_bad_input_is_refused_by_name(sessions, options, message):
    with pytest.raises(ValueError, match=message):
        sessions.submit([1], **(dict(conversation="c") | options))
    assert not sessions.turns
    assert sessions.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ROOT / "tiny_chat" / name).read_bytes())
    sessions = Sessions(tmp_path, **TINY)
    reply = sessions.generate(ids(4), "c", max_tokens=3, ignore_eos=True)
    assert len(reply.token_ids) == 3 and reply.text == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        sessions.chat("Hi", "c")
    with pytest.raises(ValueError, match="no tokenizer"):
        sessions.generate(ids(4), stop=["x"])
    sessions.close()


def test_without_its_cached_kv_the_embedded_model_forgets(sessions):
    """The control: all that the model knows of the conversation comes from the cache."""
    def ask(sabotage):
        sessions.chat("Hi, I'm Zorbella.", "c")
        if sabotage:
            sessions.engine.worker.pool.gpu.zero_()
        answer = sessions.chat("What is my name?", "c", max_tokens=16).text
        sessions.forget("c")
        return answer
    assert "Zorbella" in ask(sabotage=False)
    assert "Zorbella" not in ask(sabotage=True)


# ---- commits

def disk_full(*arguments, **options):
    raise OSError("disk full")


def test_a_turn_that_cannot_be_committed_fails_and_is_forgotten(started, monkeypatch):
    sessions = opened(started, **TINY)
    first = sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(History, "commit", disk_full)
        with pytest.raises(OSError, match="disk full"):
            sessions.generate(ids(5), "c", max_tokens=4)
    reply = sessions.generate(ids(5), "c", max_tokens=4)
    assert reply.usage["prompt_tokens"] == 9 + len(first.token_ids) + 5
    sessions.close()


def test_a_turn_is_told_as_it_was_stored_though_the_cache_cannot_be_shortened(sessions, monkeypatch):
    """A stop string has cut its reply. The cache may be lost, the turn is not."""
    stop = sessions.respond([user("Hi")], keep=False, **talkative(sessions, 8)).result().text[5:7]

    def fail(engine, conversation, length):
        raise RuntimeError("no more")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "shorten", fail)
        turn = sessions.respond([user("Hi")], "c", stop=stop, **talkative(sessions, 8))
        assert turn.result().text == sessions.history.messages(turn.id)[-1]["content"]
    coherent(sessions)
    assert sessions.chat("More", "c", max_tokens=3).usage["gpu"] == 0
    sessions.close()


def test_nobody_waits_for_a_turn_whose_commit_was_interrupted(sessions, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt                             # Ctrl-C, in a program that calls no start()

    monkeypatch.setattr(History, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sessions.chat("Hi", "c", max_tokens=2)
    with pytest.raises(RuntimeError, match="has stopped"):
        sessions.respond([user("Hi")], "c", wait=False)


def test_a_branch_that_cannot_be_committed_leaves_no_name(sessions, monkeypatch):
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    head = sessions.history.head("c")
    with monkeypatch.context() as patch:
        patch.setattr(History, "commit", disk_full)
        with pytest.raises(OSError, match="disk full"):
            sessions.generate(ids(5), "side", base=head, max_tokens=4)
    assert sessions.history.conversations() == ["c"]


def test_a_conversation_that_was_created_without_a_turn_can_branch_off(sessions):
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    head = sessions.history.head("c")
    sessions.history.create("side", {"kind": "branch"})
    sessions.generate(ids(5), "side", base=head, max_tokens=4)
    assert sessions.history.head("side").parent == head.id and sessions.history.head("c") == head
    assert sessions.history.record("side").metadata == {"kind": "branch"}


def test_a_conversation_forgotten_at_the_wrong_moment_stays_coherent(started, monkeypatch):
    """A turn has ended but is not committed yet when its conversation goes from the history."""
    sessions = opened(started, **TINY)
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    commit = History.commit
    def forgotten_first(history, *arguments, **options):
        history.forget("c")
        return commit(history, *arguments, **options)
    with monkeypatch.context() as patch:
        patch.setattr(History, "commit", forgotten_first)
        turn = sessions.submit(ids(5), "c", max_tokens=4, ignore_eos=True)
        assert turn.result().finish_reason == "cancelled"
    assert sessions.history.head("c") is None
    assert sessions.generate(ids(3), "c", max_tokens=2, ignore_eos=True).usage["prompt_tokens"] == 3
    sessions.close()


def test_a_conversation_that_went_on_without_us_is_read_again(tmp_path):
    """The turn that finds out is cancelled; the next one knows."""
    sessions = Sessions("tiny_chat", history=tmp_path / "history", **TINY)
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    head = sessions.history.head("c")
    sessions.history.commit("c", head.id, [1, 2], [3])
    assert sessions.generate(ids(5), "c", max_tokens=4, ignore_eos=True).finish_reason == "cancelled"
    assert sessions.generate(ids(5), "c", max_tokens=4, ignore_eos=True).usage["prompt_tokens"] == 13 + 3 + 5
    sessions.close()


def test_a_name_that_was_forgotten_can_name_a_branch(sessions):
    """Also of a turn that was committed under that very name, and lives on in a branch."""
    said = sessions.respond([user("Hello")], hint="x", max_tokens=4).result().text
    resent = [user("Hello"), dict(role="assistant", content=said)]
    sessions.respond([*resent, user("One")], max_tokens=4).result()
    branch = sessions.respond([*resent, user("Two")], max_tokens=4)
    assert branch.conversation != "x" and branch.result().finish_reason != "cancelled"
    sessions.forget("x")
    again = sessions.respond([*resent, user("Three")], hint="x", max_tokens=4)
    assert again.conversation == "x" and again.result().finish_reason != "cancelled"
    assert len(sessions.history.items("x")) == 4


def test_what_fails_in_a_change_of_the_history_is_told_to_the_caller(started, monkeypatch):
    sessions = opened(started, **TINY)
    with monkeypatch.context() as patch:
        patch.setattr(History, "forget", disk_full)
        with pytest.raises(OSError, match="disk full"):
            sessions.forget("c")
    assert sessions.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"
    sessions.close()


def test_turns_are_stored_though_the_system_has_no_more_threads(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")
    with closing(opened(True, **TINY)) as sessions:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        turn = sessions.respond([user("Hi")], "c", max_tokens=3)
        assert turn.wait(20) and turn.result() and sessions.history.head("c").id == turn.id
        assert not sessions.engine.failure


def test_a_turn_settles_though_the_writing_thread_has_ended():
    with closing(opened(True, **TINY)) as sessions:
        sessions.writer.shutdown()
        assert sessions.respond([user("Hi")], "c", max_tokens=3).wait(20)
        assert sessions.history.head("c") and not sessions.engine.failure


def test_a_cancelled_turn_need_not_be_read(sessions):
    said = sessions.respond([user("Hello")], hint="mine", max_tokens=4).result().text
    sessions.submit(ids(3), "mine", max_tokens=20).cancel()
    sessions.submit(ids(3), max_tokens=20).cancel()
    assert not sessions.turns
    again = [user("Hello"), dict(role="assistant", content=said), user("Bye")]
    assert sessions.respond(again, max_tokens=4).conversation == "mine"


def test_pruning_forgets_the_longest_idle(sessions):
    for name in "abc":
        sessions.generate(ids(9), name, max_tokens=4, ignore_eos=True)
    sessions.history._db.execute("UPDATE conversation SET active = active - 100 WHERE name IN ('a', 'c')")
    running = sessions.submit(ids(5), "c", max_tokens=4, ignore_eos=True)
    sessions.prune(max_age=50, max_bytes=2**30)     # the oldest is being answered: it stays
    assert sessions.history.conversations() == ["b", "c"] and "a" not in sessions.engine.cache.conversations
    running.result()
    sessions.prune(max_age=50, max_bytes=0)
    assert sessions.history.conversations() == [] and sessions.engine.stats()["slots_free"] == 160


def test_a_clock_that_jumps_ahead(sessions, monkeypatch):
    for name in "ab":
        sessions.generate(ids(9), name, max_tokens=4, ignore_eos=True)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e9)
    sessions.prune(max_age=3600, max_bytes=2**30)
    assert sessions.history.conversations() == ["a", "b"]
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)      # is stored as active in the far future
    monkeypatch.undo()
    sessions.prune(max_age=3600, max_bytes=0)                          # and goes all the same
    assert sessions.history.conversations() == []


def test_pruning_ends_while_new_conversations_come(sessions, monkeypatch):
    """As many as it forgets."""
    forget = History.forget

    def replaced(history, name):
        history.commit(f"{name}+", None, [1], [2])
        return forget(history, name)
    monkeypatch.setattr(History, "forget", replaced)
    monkeypatch.setattr("serving.sessions.MOST_PRUNED", 10)
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    sessions.prune(max_age=50, max_bytes=0)
    assert sessions.history.conversations() == ["c" + 10 * "+"]


# ---- deletions between two steps of a turn

def coherent(sessions):
    """The engine holds of each conversation what the history has of it, and no turn is live."""
    engine, history = sessions.engine, sessions.history
    engine.call(engine.cache.check_integrity)
    assert not sessions.turns and not engine.owner.handles
    for name, conversation in engine.cache.conversations.items():
        head = history.head(name)
        assert conversation.tokens == (history.tokens(head.id) if head else conversation.tokens[:0]), name


def test_a_forgotten_conversation_stays_forgotten(started, monkeypatch):
    """A turn reads its context while the conversation is being forgotten, and is submitted afterwards. The
    context is still in the history, since a branch needs it."""
    sessions, outcome, threads = opened(started, **ROOMY), [], []
    first = sessions.chat("Hi", "c", max_tokens=4)
    sessions.generate(ids(3), "branch", base=sessions.history.head("c"), max_tokens=2)
    forget, tokens = History.forget, History.tokens
    is_at_it, is_forgotten = threading.Event(), threading.Event()

    def turn():
        try:
            outcome.append(sessions.respond([user("And?")], "c", wait=False, max_tokens=4).result())
        except Answering as error:
            outcome.append(error)
        is_at_it.set()

    def read_and_wait(history, turn_id):
        context = tokens(history, turn_id)
        is_at_it.set()
        assert is_forgotten.wait(30)
        return context

    def forget_meanwhile(history, name):
        threads.append(in_thread(turn))
        assert is_at_it.wait(30)
        return forget(history, name)

    with monkeypatch.context() as patch:
        patch.setattr(History, "tokens", read_and_wait)
        patch.setattr(History, "forget", forget_meanwhile)
        sessions.forget("c")
        is_forgotten.set()
        join(threads)
    assert outcome and sessions.history.conversations() == ["branch"]
    coherent(sessions)
    assert sessions.chat("Hi", "c", max_tokens=4).token_ids == first.token_ids
    sessions.close()


@pytest.mark.parametrize("way", ["forget", "prune"])
def test_no_turn_begins_while_its_conversation_is_being_forgotten(started, way, monkeypatch):
    """Such a turn would take over messages that are forgotten, or it would be cancelled without a reason."""
    sessions, outcome, forget = opened(started, **ROOMY), [], History.forget
    sessions.history.create("c", {}, [dict(user("a secret"), id="msg_1")])

    def forget_meanwhile(history, name):
        try:
            outcome.append(sessions.respond([user("Hi")], "c", wait=False, max_tokens=4))
            outcome[0].handle.result()              # complete, but not committed yet
        except Answering as error:
            outcome.append(error.turn)
        return forget(history, name)

    with monkeypatch.context() as patch:
        patch.setattr(History, "forget", forget_meanwhile)
        sessions.forget("c") if way == "forget" else sessions.prune(1e9, 0)
    assert outcome[0].wait(30) and sessions.history.conversations() == []
    coherent(sessions)
    sessions.chat("Hi", "c", max_tokens=4)          # it can be used again
    assert [item["content"] for item in sessions.history.items("c")][:-1] == ["Hi"]
    sessions.close()


@pytest.mark.parametrize("moment", ["read", "before", "between"])
def test_a_turn_beside_the_deletion_of_the_turn_before_it(started, moment, monkeypatch):
    """All of the third turn happens before the history deletes the second one, or between that and the
    deletion from the engine. Or all of the deletion happens after the third turn has read its context."""
    sessions, outcome = opened(started, **ROOMY), []
    delete, tokens = History.delete, History.tokens
    for text in ("one", "two"):
        sessions.chat(text, "c", max_tokens=4)
    second = sessions.history.head("c")

    def take_third_turn():
        outcome.append(sessions.respond([user("three")], "c", max_tokens=4))
        outcome[0].handle.result()                  # complete, but perhaps not committed yet

    def delete_meanwhile(history, turn_id):
        if moment == "before":
            take_third_turn()
        shorter = delete(history, turn_id)
        if moment == "between":
            take_third_turn()
        return shorter

    def read_then_delete(history, turn_id):
        context = tokens(history, turn_id)
        sessions.delete(second)
        return context

    with monkeypatch.context() as patch:
        if moment == "read":
            patch.setattr(History, "tokens", read_then_delete)
            take_third_turn()
        else:
            patch.setattr(History, "delete", delete_meanwhile)
            sessions.delete(second)
    third = outcome[0].result()
    said = [item["content"] for item in sessions.history.items("c") if item["role"] == "user"]
    # Without a writing thread, a turn that is complete is committed, too: so it comes before the deletion.
    assert said == (["one"] if third.finish_reason == "cancelled" else ["one", "three"])
    assert third.finish_reason == "cancelled" or (moment == "before" and not started)
    coherent(sessions)
    sessions.chat("four", "c", max_tokens=4)
    coherent(sessions)
    sessions.close()


def delete_when_read(sessions, turn, patch):
    """From now on, who reads a context deletes the turn as soon as it has read."""
    tokens = History.tokens

    def read_then_delete(history, turn_id):
        context = tokens(history, turn_id)
        sessions.delete(turn)
        return context

    patch.setattr(History, "tokens", read_then_delete)


def test_a_turn_that_is_cancelled_after_the_deletion_of_the_turn_before_it(started, monkeypatch):
    """It reads its context before the deletion, and submits it afterwards. The cancellation takes back the
    tokens of the turn, but the conversation does not have that context any more."""
    sessions = opened(started, **ROOMY)
    for text in ("one", "two"):
        sessions.chat(text, "c", max_tokens=4)
    with monkeypatch.context() as patch:
        delete_when_read(sessions, sessions.history.head("c"), patch)
        third = sessions.respond([user("three")], "c", max_tokens=200, ignore_eos=True)
    next(iter(third.handle))
    third.cancel()
    coherent(sessions)
    assert sessions.chat("four", "c", max_tokens=4).finish_reason != "cancelled"
    sessions.close()


def test_a_cancelled_branch_leaves_no_trace(sessions):
    """Not even the context that it shares with others: nobody knows the name of the branch."""
    for text in ("one", "two"):
        sessions.chat(text, "c", max_tokens=4)
    first = sessions.history.turn(sessions.history.head("c").parent)
    free = sessions.engine.stats()["slots_free"]
    branch = sessions.respond([user("three")], after=first, max_tokens=20)
    next(iter(branch.handle))
    branch.cancel()
    assert branch.branches and list(sessions.engine.cache.conversations) == ["c"]
    assert sessions.engine.stats()["slots_free"] == free
    coherent(sessions)


@pytest.mark.parametrize("way", ["forget", "delete", "delete an item"])
def test_a_branch_is_cancelled_as_soon_as_the_turn_before_it_is_gone(sessions, way):
    """It could not be committed, so its client need not wait for the end of its reply."""
    for text in ("one", "two"):
        sessions.chat(text, "c", max_tokens=4)
    first = sessions.history.turn(sessions.history.head("c").parent)
    branch = sessions.respond([user("three")], after=first, max_tokens=20)
    dict(forget=lambda: sessions.forget("c"),
         delete=lambda: sessions.delete(first),
         **{"delete an item": lambda: sessions.delete_item("c", f"msg_{first.id}")})[way]()
    assert branch.reply and branch.reply.finish_reason == "cancelled"
    assert sessions.history.conversations() == (["c"] if way.startswith("delete") else [])
    coherent(sessions)


def test_pruning_spares_a_conversation_from_which_a_branch_is_being_answered(sessions):
    for text in ("one", "two"):
        sessions.chat(text, "c", max_tokens=4)
    first = sessions.history.turn(sessions.history.head("c").parent)
    branch = sessions.respond([user("three")], after=first, max_tokens=4)
    sessions.prune(max_age=1e9, max_bytes=0)
    assert branch.result().finish_reason != "cancelled"
    assert sessions.history.conversations() == sorted(["c", branch.conversation])
    coherent(sessions)


def test_deleting_a_message_that_waits_keeps_the_cache(sessions):
    sessions.chat("one", "c", max_tokens=4)
    sessions.update("c", new=[dict(user("two"), id="msg_two")])
    assert sessions.delete_item("c", "msg_two") and not sessions.delete_item("c", "msg_two")
    assert sessions.chat("three", "c", max_tokens=4).usage["recomputed"] == 0
    coherent(sessions)


@pytest.mark.parametrize("way", ["after", "conversation"])
def test_what_a_turn_follows_is_hidden_at_that_moment(sessions, way, monkeypatch):
    """The turn before stays, since a branch builds on it; but nothing more may build on it."""
    sessions.chat("one", "c", max_tokens=4)
    first = sessions.history.head("c")
    sessions.generate(ids(3), "branch", base=first, max_tokens=2)
    with monkeypatch.context() as patch:
        delete_when_read(sessions, first, patch)
        follows = {way: dict(after=first, conversation="c")[way]}
        turn = sessions.respond([user("two")], max_tokens=4, **follows)
    assert turn.result().finish_reason == "cancelled" and sessions.history.conversations() == ["branch"]
    coherent(sessions)


def test_pruning_spares_a_conversation_that_was_answered_at_that_moment(sessions, monkeypatch):
    sessions.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    sessions.history._db.execute("UPDATE conversation SET active = active - 100")
    turn, oldest = sessions.submit(ids(5), "c", max_tokens=4, ignore_eos=True), History.oldest

    def then_the_reply_ends(*arguments):
        name = oldest(*arguments)
        turn.result()
        return name

    monkeypatch.setattr(History, "oldest", then_the_reply_ends)
    sessions.prune(max_age=50, max_bytes=2**30)
    assert sessions.history.conversations() == ["c"]


@pytest.mark.parametrize("moment", ["before", "committing"])
def test_close_settles_everything(started, moment, monkeypatch):
    """Turns in the queue, and one that is being committed."""
    sessions, commit, committing = opened(started, **TINY), History.commit, threading.Event()
    if moment == "committing" and started:
        def slow(*arguments, **options):
            committing.set()
            time.sleep(0.2)
            return commit(*arguments, **options)
        monkeypatch.setattr(History, "commit", slow)
        first = sessions.submit(ids(3), "first", max_tokens=1, ignore_eos=True)
        committing.wait(30)
    turns = [sessions.submit(ids(5), f"c{i}", ignore_eos=True) for i in range(20)]
    join([in_thread(sessions.close)])
    assert {turn.result().finish_reason for turn in turns} <= {"cancelled", "length"} and not sessions.turns
    if committing.is_set():
        assert first.result().finish_reason == "length"
    with pytest.raises(Exception):
        sessions.submit(ids(3))


# ---- threads

def test_a_turn_starts_after_the_one_before_is_committed(monkeypatch, started):
    """Even where a commit takes long. Its reader is told later still."""
    sessions, log, commit = opened(started, **TINY), [], History.commit
    def slow(*arguments, **options):
        log.append("commits")
        time.sleep(0.02)
        turn = commit(*arguments, **options)
        log.append("committed")
        return turn
    monkeypatch.setattr(History, "commit", slow)
    sessions.engine.watchers.append(lambda batch: log.extend("runs" for _ in batch.spans))
    first, second = (sessions.submit(ids(5, i), "c", max_tokens=4, ignore_eos=True) for i in range(2))
    first.result()
    assert "committed" in log
    second.result()
    assert [kind for kind, _ in groupby(log)] == ["runs", "commits", "committed"] * 2
    sessions.close()


def test_waiting_for_a_turn_takes_nothing_from_its_reader():
    sessions = Sessions("tiny_chat", **ROOMY).start()
    execute = sessions.engine.worker.execute
    def unhurried(batch):                                   # so that a reader keeps pace
        time.sleep(0.01)
        return execute(batch)
    sessions.engine.worker.execute = unhurried
    first, second = sessions.respond([user("Hi")], "c", **talkative(sessions, 60)), []
    waiting = in_thread(lambda: second.append(sessions.chat("And?", "c", max_tokens=4)))
    texts = [text for text, _ in first.progress()]
    assert len(texts) > 40 and "".join(texts) == first.result().text
    join([waiting])
    assert [item["role"] for item in sessions.history.items("c")] == ["user", "assistant"] * 2
    sessions.close()


def test_commits_do_not_wait_for_readers_nor_for_one_another():
    """Nobody reads the first turn; the second one is committed all the same."""
    sessions = Sessions("tiny_chat", **ROOMY).start()
    sessions.submit(ids(5), "c", max_tokens=4, ignore_eos=True)
    assert sessions.submit(ids(6), "c", max_tokens=4, ignore_eos=True).result().finish_reason == "length"
    assert sessions.history.head("c").length == 5 + 4 + 6 + 4
    sessions.close()


def test_while_another_process_holds_the_history_all_streams_go_on(tmp_path, monkeypatch):
    """Only the turns that must be committed wait."""
    monkeypatch.setattr("serving.history.BUSY_SECONDS", 60)
    sessions = Sessions("tiny_chat", history=tmp_path / "history", **ROOMY).start()
    sessions.chat("Hello", "cold", max_tokens=4)
    sessions.engine.forget("cold")
    running = sessions.respond([user("Hi")], "running", **talkative(sessions, 400))
    stream = running.progress()
    next(stream)
    with closing(sqlite3.connect(tmp_path / "history", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begin = time.monotonic()
        two, behind = dict(max_tokens=2, ignore_eos=True), []
        short = sessions.submit(ids(3), "short", **two)
        waiting = in_thread(lambda: behind.append(sessions.generate(ids(3), "short", **two)))
        while not short.handle.reply:
            time.sleep(0.01)                                # it is complete, and waits to be committed
        for _ in range(20):
            next(stream)                                    # a running turn goes on,
        fresh = sessions.respond([user("Hey")], "fresh", max_tokens=20, ignore_eos=True)
        assert next(fresh.progress())                         # a new one begins,
        back = sessions.respond([user("And?")], "cold", max_tokens=20, ignore_eos=True)
        assert next(back.progress()) and len(sessions.history.messages(back.plan.after.id)) == 2
        assert sessions.generate(ids(3), **two).finish_reason == "length"       # a one-off ends,
        assert len(sessions.history.conversations()) == 1   # and the history can be read
        assert time.monotonic() - begin < 30
        assert not (short.reply or short.error or behind)
        other.execute("COMMIT")
    assert {turn.result().finish_reason for turn in (short, fresh, back)} == {"length"}
    join([waiting])
    assert behind[0].usage["prompt_tokens"] == 3 + 2 + 3
    running.cancel()
    sessions.close()


def test_a_history_that_is_held_too_long_fails_the_turn(tmp_path, monkeypatch, started):
    monkeypatch.setattr("serving.history.BUSY_SECONDS", 0.1)
    sessions = opened(started, history=tmp_path / "history", **TINY)
    with closing(sqlite3.connect(tmp_path / "history", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sessions.generate(ids(5), "c", max_tokens=4)
        other.execute("COMMIT")
    assert sessions.generate(ids(3), "c", max_tokens=2, ignore_eos=True).usage["prompt_tokens"] == 3
    sessions.close()


def test_items_come_between_turns_and_none_is_lost(started):
    sessions = opened(started, **ROOMY)
    sessions.chat("Hi", "c", max_tokens=4)
    running = sessions.submit(ids(3), "c", max_tokens=20, ignore_eos=True)
    with pytest.raises(Busy):
        sessions.update("c", new=[user("by the way")])
    assert sessions.update("c", metadata=dict(topic="x"))           # this may come at any time
    running.cancel()
    def add(n):
        sessions.update("c", new=[dict(user(str(n)), id=f"msg_{n}")])
    join([in_thread(partial(add, n)) for n in range(8)])
    record = sessions.history.record("c")
    assert sorted(message["content"] for message in record.waiting) == sorted("01234567")
    assert record.metadata == dict(topic="x") and not sessions.update("nobody", {})
    sessions.chat("Well?", "c", max_tokens=4)
    assert [item["content"] for item in sessions.history.items("c")][2:11] == [
        *(message["content"] for message in record.waiting), "Well?"]
    sessions.close()


def test_a_conversation_is_created_while_its_metadata_change(started, monkeypatch):
    """The change sees it before or after, never in its middle."""
    sessions, update, threads, errors = opened(started, **TINY), History.update, [], []

    def create():
        try:
            sessions.create("c", dict(made="by create"))
        except ValueError as error:
            errors.append(str(error))

    def update_meanwhile(history, *args):
        found = update(history, *args)
        threads.append(in_thread(create))
        threads[0].join(0.3)
        return found

    turn = sessions.respond([user("Hi")], "c", max_tokens=100, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(History, "update", update_meanwhile)
        assert sessions.update("c", dict(made="by update"))
    turn.cancel()
    join(threads)
    assert sessions.history.record("c").metadata == dict(made="by update")
    assert "exists already" in errors[0]
    sessions.close()


def test_messages_from_two_clients_must_fit_together(started, monkeypatch):
    """The second client's come while we count the first one's."""
    sessions = opened(started, **TINY)
    sessions.create("c", {})
    half = user("x" * (sessions.engine.scheduler.limit // 2 + 9))
    assert len(sessions.tokenizer.encode(half["content"])) * 2 > sessions.engine.scheduler.limit
    encode, refused, threads = Tokenizer.encode, [], []

    def add():
        try:
            while True:
                with suppress(Busy):
                    return sessions.update("c", new=[half])
        except TooLong as error:
            refused.append(error)

    def encode_meanwhile(tokenizer, text):
        if not threads:
            threads.append(in_thread(add))
            threads[0].join(0.3)
        return encode(tokenizer, text)

    monkeypatch.setattr(Tokenizer, "encode", encode_meanwhile)
    add()
    join(threads)
    assert len(refused) == 1 and sessions.history.record("c").waiting == [half]
    sessions.close()


def test_messages_that_wait_for_a_turn_must_fit_into_it(started):
    """What no turn can take is refused at once, however little a message costs by itself."""
    sessions = opened(started, **ROOMY)
    sessions.create("c", {}, [user("one"), user("two")])
    for content in ("word " * 600, "x" * 2**20):
        with pytest.raises(TooLong, match="limit"):
            sessions.create("d", {}, [user(content)])
        with pytest.raises(TooLong, match="limit"):
            sessions.update("c", new=[user(content)])
    with pytest.raises(TooLong, match="limit of 512|limit is 512"):
        for n in range(1000):
            sessions.update("c", new=[user("")] * 20)
    assert 400 < len(sessions.history.record("c").waiting) < 512
    assert sessions.history.record("d") is None
    sessions.close()


def test_the_oldest_messages_are_dropped_after_a_few_looks(sessions, monkeypatch):
    """As many as must be, and no more. We tokenise the messages a few times, however many there are."""
    turn, render, seen = sessions.tokenizer.turn, sessions.tokenizer.render, []
    monkeypatch.setattr(sessions.tokenizer, "render", lambda before, new, *more: seen.append(len(new))
                        or render(before, new, *more))
    messages, limit = [user(str(n)) for n in range(1000)], sessions.engine.scheduler.limit
    plan = sessions.plan(messages, truncate=True, max_tokens=20)
    assert len(seen) < 15 and sum(seen) < 5 * len(messages)
    kept = len(plan.messages)
    assert plan.messages == messages[-kept:]
    lengths = [len(turn([], messages[-n:], None)) for n in (kept, kept + 1)]
    assert lengths[0] + 20 <= limit < lengths[1] + 20

    seen.clear()
    with pytest.raises(ConnectionError):        # nobody waits for the answer any more
        sessions.respond(messages, truncate=True, gone=lambda: len(seen) == 3)
    assert len(seen) == 3 and not sessions.turns


@pytest.mark.parametrize("seed, deletes", [
    (1, 1), *(pytest.param(seed, seed % 2, marks=pytest.mark.slow) for seed in (0, *range(2, 8)))])
def test_everything_at_once(seed, deletes, tmp_path, monkeypatch):
    """Turns, chats, branches, cancels, deletions, prunes, items, a worker and a disk that fail. Nobody hangs;
    each turn that was told to be done is in the history (unless it was deleted); and the engine holds of a
    conversation what the history has of it."""
    flags = dict(TINY, gpu_cache_tokens=256, max_running=3)
    sessions = Sessions("tiny_chat", history=tmp_path / "history", **flags)
    engine, history, names = sessions.engine, sessions.history, [f"c{i}" for i in range(4)]
    execute, commit, chance = engine.worker.execute, History.commit, random.Random(seed)
    def flaky(batch):
        if batch.spans and chance.random() < 0.01 and not engine.worker_failures:
            raise RuntimeError("a cosmic ray")
        return execute(batch)
    def full(*arguments, **options):
        if chance.random() < 0.05:
            raise OSError("disk full")
        return commit(*arguments, **options)
    engine.worker.execute = flaky
    monkeypatch.setattr(History, "commit", full)
    sessions.start()
    told, wrong = {}, []

    def turns_of(kind, name, chance):
        options = dict(max_tokens=chance.randint(1, 12), ignore_eos=True)
        hi = [user("x" * chance.randrange(1, 9))]
        match kind:
            case "respond":
                return [sessions.respond(hi, name, truncate=True, **options)]
            case "instruct":
                instructions = "Be " + chance.choice("ab")
                return [sessions.respond(hi, name, truncate=True, instructions=instructions, **options)]
            case "raw":
                return [sessions.submit(ids(chance.randint(1, 20)), name, **options)]
            case "chat":
                head = history.head(name)
                before = history.messages(head.id) if head else []
                return [sessions.respond(before + hi, hint=chance.choice([None, name]), **options)]
            case "many":
                first = sessions.respond(hi, None, **options)
                return [first, sessions.another(first, **options), sessions.another(first, **options)]
            case "branch":
                return [sessions.respond(hi, after=history.head(name), prefix="", truncate=True, **options)]
            case "forget":
                sessions.forget(name)
            case "delete":
                if head := history.head(name):
                    sessions.delete(head)
            case "prune":
                sessions.prune(3600, 2**18)
            case "items":
                sessions.update(name, {}, [user("by the way")])
        return []

    def act(chance):
        kinds = dict(respond=8, raw=6, chat=6, branch=4, instruct=3, forget=deletes, delete=2 * deletes,
                     prune=deletes, items=2, many=2)
        kind, errors = chance.choices(list(kinds), kinds.values())[0], []
        for turn in turns_of(kind, chance.choice(names), chance):
            if chance.random() < 0.15:
                turn.cancel()
                assert turn.reply or turn.error
            try:
                if turn.result().finish_reason != "cancelled":
                    told[turn.id] = turn
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def client(seed):
        chance = random.Random(seed)
        expected = ["limit", "needs new messages", "cosmic", "disk full"]
        for _ in range(35):
            try:
                act(chance)
            except (StaleTurn, Busy):
                pass
            except Exception as error:
                if not any(part in str(error) for part in expected):
                    wrong.append(repr(error))

    join([in_thread(partial(client, 10 * seed + n)) for n in range(6)], seconds=100)
    assert not wrong and not engine.failure
    coherent(sessions)
    lone, checked = Engine("tiny_chat", cost=COST), 0
    for turn in random.Random(seed).sample(list(told.values()), len(told)):
        if turn.conversation is None or not history.turn(turn.id):
            assert deletes
            continue
        tokens, reply = history.tokens(turn.id).tolist(), turn.handle.token_ids
        assert tokens[-len(reply):] == reply
        if checked < 40 and len(tokens) < 250:              # an engine of its own gives the same answer
            checked += 1
            context = tokens[:-len(reply)]
            assert lone.generate(context, max_tokens=len(reply), ignore_eos=True).token_ids == reply
    assert checked
    for name in history.conversations():
        sessions.forget(name)
    stats = engine.stats()
    assert stats["slots_free"] == stats["slots_total"]
    assert stats["cpu_chunks_free"] == stats["cpu_chunks_total"]
    sessions.close()
