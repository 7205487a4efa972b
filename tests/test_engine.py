"""The in-process API: turns, threads, cancellation, restart, errors. On the embedded model."""
import itertools
import threading
from pathlib import Path

import pytest

from engine import Engine
from eviction import RecomputeCost
from serving.history import History
from serving.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=160, cpu_cache_tokens=64, chunk_size=8, max_batch_tokens=32, debug=True)


@pytest.fixture
def engine():
    engine = Engine("tiny_chat", **TINY)
    yield engine
    engine.close()


def ids(n, seed=0):
    return [(17 * i + 31 * seed) % 250 for i in range(n)]


def script(name, turns=3):
    """The turns of one conversation, as (prompt, max_tokens)."""
    return [(ids(6 + turn, seed=ord(name[-1]) + turn), 5) for turn in range(turns)]


def alone(name, turns=3):
    """What each turn of the script gives with nobody else there."""
    engine = Engine("tiny_chat", cost=COST)
    replies = [engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids for prompt, n in script(name, turns)]
    engine.close()
    return replies


def test_chat_continues_a_conversation(engine):
    first = engine.chat("Hi, I'm Ada.", conversation="c", max_tokens=12)
    second = engine.chat("What is my name?", conversation="c", max_tokens=12)
    assert first.usage["new"] == first.usage["prompt_tokens"]
    history = first.usage["prompt_tokens"] + len(first.token_ids)
    assert second.usage["gpu"] + second.usage["cpu"] + second.usage["recomputed"] == history - 1      # the last token was sampled, never fed
    tokens, special = engine.cache.conversations["c"].tokens.tolist(), engine.tokenizer.special
    turn = [special["<|user|>"], *engine.tokenizer.encode("What is my name?"), special["<|end|>"], special["<|assistant|>"]]
    owed = [] if first.token_ids[-1] == special["<|end|>"] else [special["<|end|>"]]
    assert tokens[history:] == owed + turn + second.token_ids


def test_threads_share_a_started_engine():
    engine = Engine("tiny_chat", **TINY).start()
    names, replies = [f"c{i}" for i in range(6)], {}

    def client(name):
        replies[name] = [engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids for prompt, n in script(name)]

    threads = [threading.Thread(target=client, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert replies == {name: alone(name) for name in names}
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
    engine.close()


def test_turns_of_a_conversation_run_in_order_of_submission(engine):
    handles = [engine.submit(prompt, "c", max_tokens=n, ignore_eos=True) for prompt, n in script("c")]
    assert handles[2].result().token_ids == alone("c")[2]      # waited for first: the earlier ones are committed before it
    assert [handle.result().token_ids for handle in handles] == alone("c")
    assert engine.history.tokens(engine.history.head("c").id) == engine.cache.conversations["c"].tokens


def test_a_handle_can_be_read_again_and_as_text(engine):
    handle = engine.submit(ids(5), max_tokens=9, ignore_eos=True)
    streamed = "".join(handle.pieces())
    assert list(handle) == list(handle) == handle.result().token_ids and len(list(handle)) == 9
    assert streamed == handle.result().text == engine.tokenizer.decode(handle.result().token_ids)


def test_a_cancelled_turn_leaves_no_trace(engine):
    engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    before = engine.history.head("c")
    handle = engine.submit(ids(20, seed=3), "c", max_tokens=50, ignore_eos=True)
    assert next(iter(handle)) is not None
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    assert engine.history.head("c") == before
    assert len(engine.cache.conversations["c"].tokens) == before.length
    untouched = Engine("tiny_chat", **TINY)
    untouched.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    assert engine.generate(ids(7), "c", max_tokens=6) == untouched.generate(ids(7), "c", max_tokens=6)


def test_a_restart_goes_on_from_the_history(tmp_path):
    path = tmp_path / "history.sqlite"
    replies = []
    for prompt, n in script("c"):
        engine = Engine("tiny_chat", history=path, **TINY)
        reply = engine.generate(prompt, "c", max_tokens=n, ignore_eos=True)
        assert reply.usage["recomputed"] == max(0, sum(len(p) + m for p, m in script("c")[:len(replies)]) - 1)
        replies.append(reply.token_ids)
        engine.close()
    assert replies == alone("c")


def test_a_cold_conversation_lives_in_the_history_alone(engine):
    first = alone("c")
    prompt, n = script("c")[0]
    engine.generate(prompt, "c", max_tokens=n, ignore_eos=True)
    for i in range(12):
        engine.generate(ids(40, seed=i), f"other{i}", max_tokens=8, ignore_eos=True)
    assert "c" not in engine.cache.conversations
    prompt, n = script("c")[1]
    reply = engine.generate(prompt, "c", max_tokens=n, ignore_eos=True)
    assert reply.token_ids == first[1] and reply.usage["recomputed"] > 0 == reply.usage["gpu"] + reply.usage["cpu"]


def test_forget_frees_both_tiers_and_the_history(engine):
    engine.generate(ids(30), "c", max_tokens=4, ignore_eos=True)
    running = engine.submit(ids(5), "c", max_tokens=50, ignore_eos=True)
    next(iter(running))
    engine.forget("c")
    assert running.result().finish_reason == "cancelled"
    assert engine.history.head("c") is None and "c" not in engine.cache.conversations
    assert engine.stats()["slots_free"] == 160 and engine.stats()["cpu_chunks_free"] == 8
    assert engine.generate(ids(3), "c", max_tokens=2).usage["prompt_tokens"] == 3
    engine.forget("never heard of")


def test_one_offs_keep_nothing(engine):
    engine.generate(ids(30), max_tokens=4, ignore_eos=True)
    assert engine.stats()["slots_free"] == 160 and engine.stats()["conversations"] == 0 and not engine.history.conversations()


def test_a_resent_history_is_recognised_and_an_edited_one_branches(engine):
    hello, again = dict(role="user", content="Hello"), dict(role="user", content="And now?")
    first = engine.submit_chat([hello], "mine", max_tokens=6)
    said = dict(role="assistant", content=first.result().text)
    second = engine.submit_chat([hello, said, again], max_tokens=6)
    assert second.conversation == "mine" and second.result().usage["gpu"] > 0
    branch = engine.submit_chat([hello, said, dict(role="user", content="Or else?")], "mine", max_tokens=6)
    assert branch.conversation != "mine"                          # "mine" has gone on: its first turn has a second child
    known = first.result().usage["prompt_tokens"] + len(first.token_ids) - 1
    assert branch.result().usage["gpu"] == known // 8 * 8 and branch.result().usage["recomputed"] == known % 8        # full chunks are shared
    fresh = engine.submit_chat([dict(role="user", content="Howdy"), said, again], "mine", max_tokens=6)
    assert fresh.conversation not in ("mine", branch.conversation) and fresh.result().usage["new"] == fresh.result().usage["prompt_tokens"]


# ---- the system prompt

SYSTEM = "You are a pilot. " * 3


def prompted(**flags):
    return Engine("tiny_chat", **dict(TINY, system_prompt=SYSTEM) | flags)


def test_the_system_prompt_is_what_a_first_system_message_would_be_and_is_computed_once():
    plain, engine = Engine("tiny_chat", **TINY), prompted()
    system, hi = dict(role="system", content=SYSTEM), dict(role="user", content="Hi!")
    expected = plain.submit_chat([system, hi], max_tokens=6).result()
    prefix = len(engine.cache.prefix)
    assert prefix > 16 and engine.scheduler.limit == 160 - prefix
    first = engine.chat("Hi!", "a", max_tokens=6)
    assert first.token_ids == expected.token_ids and first.usage["new"] == expected.usage["new"]
    for again in (engine.chat("Hi!", "b", max_tokens=6), engine.submit_chat([hi], "c", max_tokens=6).result(),
                  engine.submit_chat([system, hi], "d", max_tokens=6).result(), engine.chat("Hi!", max_tokens=6)):
        assert again.token_ids == expected.token_ids
        assert again.usage == dict(expected.usage, gpu=prefix, new=expected.usage["new"] - prefix)
    for name in "abcd":
        engine.forget(name)
    assert engine.stats()["slots_free"] == 160 - prefix          # it stays
    assert engine.chat("Bye!", "a", max_tokens=2).usage["gpu"] == prefix


def test_conversations_go_on_under_the_system_prompt_and_do_not_show_it():
    engine, hi = prompted(), dict(role="user", content="Hi!")
    first = engine.submit_chat([hi], "mine", max_tokens=6)
    said, again = dict(role="assistant", content=first.result().text), dict(role="user", content="And?")
    second = engine.submit_chat([hi, said, again], max_tokens=6)
    assert second.conversation == "mine" and second.result().usage["recomputed"] == 0
    third = engine.respond([again], "mine", max_tokens=6).result()
    assert third.usage["new"] < second.result().usage["prompt_tokens"] and third.usage["recomputed"] == 0
    assert [item["role"] for item in engine.history.items("mine")] == ["user", "assistant"] * 3
    other = engine.respond([again], "mine", instructions="Be brief.", max_tokens=6)       # another beginning
    assert other.result().usage["gpu"] == 0
    assert [message["role"] for message in engine.history.messages(other.id)] == ["system"] + ["user", "assistant"] * 4
    own = engine.submit_chat([dict(role="system", content="Be brief."), hi], "own", max_tokens=6)
    assert own.result().usage["gpu"] == 0 and [item["role"] for item in engine.history.items("own")] == ["system", "user", "assistant"]


def test_a_system_prompt_in_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Be kind.")
    assert prompted(system_prompt=str(tmp_path / "prompt.txt")).system == [dict(role="system", content="Be kind.")]


def test_a_system_prompt_that_cannot_be_used(monkeypatch):
    with pytest.raises(ValueError, match="more than half of 160 slots"):
        prompted(system_prompt="word " * 100)
    render = Tokenizer._render
    def strict(self, messages):
        if messages[0]["role"] == "system":
            raise ValueError("the chat template failed: no system role")
        return render(self, messages)
    monkeypatch.setattr(Tokenizer, "_render", strict)
    with pytest.raises(ValueError, match="system_prompt cannot be used with tiny_chat: .* no system role"):
        prompted()
    monkeypatch.setattr(Tokenizer, "_render", lambda self, messages: render(self, [m for m in messages if m["role"] != "system"]))
    with pytest.raises(ValueError, match="shows no system message"):
        prompted()


def test_a_failed_worker_takes_the_shared_prefix_with_it():
    engine = prompted()
    reply, execute = engine.chat("Hi!", "a", max_tokens=6), engine.worker.execute
    def fail_once(batch):
        engine.worker.execute = execute
        raise RuntimeError("lost")
    engine.worker.execute = fail_once
    with pytest.raises(RuntimeError, match="lost"):
        engine.chat("Hi!", "b", max_tokens=6)
    engine.worker.pool.gpu.zero_()
    again = engine.chat("Hi!", "b", max_tokens=6)
    assert again.token_ids == reply.token_ids and again.usage["gpu"] == 0


def test_a_stop_string_ends_the_reply(engine):
    prompt = engine.tokenizer.turn([], [dict(role="user", content="What can you do?")], None)
    whole = engine.generate(prompt, max_tokens=30, ignore_eos=True)
    stop = whole.text[6:9]
    reply = engine.generate(prompt, max_tokens=30, ignore_eos=True, stop=[stop])
    assert reply.finish_reason == "stop" and reply.text == whole.text[:whole.text.index(stop)]
    assert reply.token_ids == whole.token_ids[:len(reply.token_ids)]


@pytest.mark.parametrize("prompt, options, message", [
    ([], {}, "at least one token id"), (5, {}, "got 5"), ([10**6], {}, "1000000"), (["a"], {}, "'a'"), ([1], dict(max_tokens=0), "max_tokens .* got 0"),
    ([1], dict(max_tokens=2.5), "2.5"), ([1], dict(max_tokens=160), "limit of 160"), (ids(160), {}, "limit of 160"),
    ([1], dict(temperature=-1), "temperature"), ([1], dict(temperature=float("nan")), "nan"), ([1], dict(temperature="1"), "temperature"),
    ([1], dict(top_p=0), "top_p"), ([1], dict(top_k=-1), "top_k"), ([1], dict(seed="x"), "seed"), ([1], dict(seed=1.5), "seed"),
    ([1], dict(stop=[""]), "stop"), ([1], dict(stop=[5]), "stop"), ([1], dict(stop=5), "stop"), ([1], dict(conversation=5), "conversation")])
def test_bad_input_is_refused_by_name(engine, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, **(dict(conversation="c") | options))
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("flags, message", [
    (dict(policy="fifo"), "fifo"), (dict(gpu_cache_tokens=0), "gpu_cache_tokens"), (dict(cpu_cache_tokens=-1), "cpu_cache_tokens"),
    (dict(reserve=1.0), "reserve"), (dict(chunk_size=1.5), "chunk_size"), (dict(gpu_cache_tokens=10**15), "smaller ones"), (dict(dtype="int8"), "int8"), (dict(model="no/such/dir/at all"), "no/such/dir"), (dict(device="abacus"), "abacus")])
def test_bad_flags_are_refused_by_name(flags, message):
    with pytest.raises(ValueError, match=message):
        Engine(**flags)


def test_a_turn_that_cannot_be_committed_fails_and_is_forgotten(engine, monkeypatch):
    first = engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    def disk_full(*arguments):
        raise OSError("disk full")
    with monkeypatch.context() as patch:
        patch.setattr(History, "commit", disk_full)
        with pytest.raises(OSError, match="disk full"):
            engine.generate(ids(5), "c", max_tokens=4)
    reply = engine.generate(ids(5), "c", max_tokens=4)
    assert reply.usage["prompt_tokens"] == 9 + len(first.token_ids) + 5


def test_a_conversation_forgotten_at_the_wrong_moment_stays_coherent(engine, monkeypatch):
    """A turn has ended but is not committed yet when its conversation is forgotten by someone else."""
    engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    handle, commit = engine.submit(ids(5), "c", max_tokens=4, ignore_eos=True), engine.commit
    def forgotten_first(*late):
        monkeypatch.setattr(engine, "commit", commit)
        engine.call(lambda: (engine._forget_kv("c"), engine.history.forget("c")))
        return commit(*late)
    monkeypatch.setattr(engine, "commit", forgotten_first)
    assert handle.result().finish_reason == "cancelled"
    assert engine.history.head("c") is None
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).usage["prompt_tokens"] == 3


@pytest.mark.parametrize("started", [False, True])
def test_what_fails_on_the_owners_side_is_told_to_the_caller(started, monkeypatch):
    engine = Engine("tiny_chat", **TINY)
    if started:
        engine.start()
    def disk_full(*arguments):
        raise OSError("disk full")
    with monkeypatch.context() as patch:
        patch.setattr(History, "forget", disk_full)
        with pytest.raises(OSError, match="disk full"):
            engine.forget("c")
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"
    engine.close()


def test_a_cancelled_handle_need_not_be_read(engine):
    first = engine.submit_chat([dict(role="user", content="Hello")], "mine", max_tokens=4)
    said = first.result().text
    engine.submit(ids(3), "mine", max_tokens=20).cancel()
    engine.submit(ids(3), max_tokens=20).cancel()
    assert not engine.pending
    again = [dict(role="user", content="Hello"), dict(role="assistant", content=said), dict(role="user", content="Bye")]
    assert engine.submit_chat(again, max_tokens=4).conversation == "mine"


def test_many_readers_of_one_handle_see_every_token():
    engine = Engine("tiny_chat", **TINY).start()
    handle, seen = engine.submit(ids(5), max_tokens=60, ignore_eos=True), []
    threads = [threading.Thread(target=lambda: seen.append(list(handle))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [handle.result().token_ids] * 4 and len(handle.result().token_ids) == 60
    engine.close()


def test_start_twice_and_close_while_turns_wait():
    engine = Engine("tiny_chat", **TINY).start().start()
    handles = [engine.submit(ids(5), f"c{i}", ignore_eos=True) for i in range(20)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(timeout=30)
    assert not closing.is_alive()
    assert {handle.result().finish_reason for handle in handles} <= {"cancelled", "length"}
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(ids(3))


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ROOT / "tiny_chat" / name).read_bytes())
    engine = Engine(tmp_path, **TINY)
    assert len(engine.generate(ids(4), "c", max_tokens=3, ignore_eos=True).token_ids) == 3
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.chat("Hi", "c")
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.generate(ids(4), stop=["x"])
    engine.close()


def test_without_its_cached_kv_the_embedded_model_forgets(engine):
    """The control: what it knows of the conversation, it knows from the cache."""
    def ask(sabotage):
        engine.chat("Hi, I'm Zorbella.", "c")
        if sabotage:
            engine.worker.pool.gpu.zero_()
        answer = engine.chat("What is my name?", "c", max_tokens=16).text
        engine.forget("c")
        return answer
    assert "Zorbella" in ask(sabotage=False)
    assert "Zorbella" not in ask(sabotage=True)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_fails_tells_everyone(started):
    engine = Engine("tiny_chat", **TINY)
    def broken(batch):
        raise ZeroDivisionError("boom")
    engine.worker.execute = broken
    if started:
        engine.start()
    handle = engine.submit(ids(3), "c")
    with pytest.raises((ZeroDivisionError, RuntimeError), match="boom"):
        handle.result()
    with pytest.raises(RuntimeError, match="boom"):
        engine.submit(ids(3), "d").result()
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join()
    engine.close()


def sabotaged(execute, fails, pool):
    """A worker that fails whenever `fails(batch)`, before or after its work, and leaves rubbish in both tiers."""
    def run(batch):
        moment = fails(batch)
        if moment == "after":
            execute(batch)
        if moment:
            pool.gpu.fill_(float("nan")), pool.cpu.fill_(float("nan"))
            raise RuntimeError("a cosmic ray")
        return execute(batch)
    return run


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failing_worker_costs_only_its_batch(moment):
    """Every ninth batch fails and leaves rubbish in both tiers. Whoever was in it is told and may try again; nobody's answers change."""
    engine, batches, failures = Engine("tiny_chat", max_running=3, **TINY), itertools.count(1), []
    engine.worker.execute = sabotaged(engine.worker.execute, lambda batch: batch.spans and next(batches) % 9 == 0 and moment, engine.worker.pool)
    engine.start()
    replies = {f"c{i}": [] for i in range(6)}
    def client(name):
        for prompt, n in script(name):
            while True:
                try:
                    replies[name].append(engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids)
                    break
                except RuntimeError as error:
                    assert "cosmic ray" in str(error)
                    failures.append(name)
    threads = [threading.Thread(target=client, args=(name,)) for name in replies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures and replies == {name: alone(name) for name in replies}
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0 and not engine.failure
    engine.close()


def test_a_worker_that_only_fails_ends_the_engine(engine):
    def fails(batch):
        return batch.spans and "before"
    engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    engine.worker.execute = sabotaged(engine.worker.execute, fails, engine.worker.pool)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cosmic ray"):
            engine.generate(ids(5), "c", max_tokens=4)
        assert not engine.failure
    with pytest.raises(RuntimeError, match="cosmic ray"):
        engine.generate(ids(5), "c", max_tokens=4)
    assert "cosmic ray" in str(engine.failure)


def test_pruning_forgets_the_longest_idle(engine):
    for name in "abc":
        engine.generate(ids(9), name, max_tokens=4, ignore_eos=True)
    engine.history._db.execute("UPDATE conversation SET active = active - 100 WHERE name IN ('a', 'c')")
    running = engine.submit(ids(5), "c", max_tokens=4, ignore_eos=True)
    engine.prune(max_age=50, max_bytes=2**30)
    assert engine.history.conversations() == ["b", "c"] and "a" not in engine.cache.conversations
    running.result()
    engine.prune(max_age=50, max_bytes=0)
    assert engine.history.conversations() == [] and engine.stats()["slots_free"] == 160
