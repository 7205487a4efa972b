"""The engine in one process: turns of token ids, threads, cancellation, failures. On the embedded model."""
import itertools
import threading
from pathlib import Path

import pytest

from engine import Engine, Outbox
from eviction import RecomputeCost

ROOT = Path(__file__).parent.parent
COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=160, cpu_cache_tokens=64, chunk_size=8, max_batch_tokens=32,
            debug=True)


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
    replies = [engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids
               for prompt, n in script(name, turns)]
    engine.close()
    return replies


# ---- turns

def test_threads_share_a_started_engine():
    engine = Engine("tiny_chat", **TINY).start()
    names, replies = [f"c{i}" for i in range(6)], {}

    def client(name):
        replies[name] = [engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids
                         for prompt, n in script(name)]

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
    assert handles[2].result().token_ids == alone("c")[2]           # whichever we wait for first
    assert [handle.result().token_ids for handle in handles] == alone("c")
    tokens = [token for (prompt, _), reply in zip(script("c"), alone("c")) for token in prompt + reply]
    assert engine.cache.conversations["c"].tokens.tolist() == tokens


def test_a_handle_can_be_read_again(engine):
    handle = engine.submit(ids(5), max_tokens=9, ignore_eos=True)
    assert list(handle) == list(handle) == handle.result().token_ids and len(list(handle)) == 9


def test_a_cancelled_turn_leaves_no_trace(engine):
    before = len(engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True).token_ids) + 9
    handle = engine.submit(ids(20, seed=3), "c", max_tokens=50, ignore_eos=True)
    assert next(iter(handle)) is not None
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    assert len(engine.cache.conversations["c"].tokens) == before
    untouched = Engine("tiny_chat", **TINY)
    untouched.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    assert engine.generate(ids(7), "c", max_tokens=6) == untouched.generate(ids(7), "c", max_tokens=6)


def test_forget_frees_both_tiers(engine):
    engine.generate(ids(30), "c", max_tokens=4, ignore_eos=True)
    running = engine.submit(ids(5), "c", max_tokens=50, ignore_eos=True)
    next(iter(running))
    engine.forget("c")
    assert running.result().finish_reason == "cancelled" and "c" not in engine.cache.conversations
    assert engine.stats()["slots_free"] == 160 and engine.stats()["cpu_chunks_free"] == 8
    assert engine.generate(ids(3), "c", max_tokens=2).usage["prompt_tokens"] == 3
    engine.forget("never heard of")


def test_one_offs_keep_nothing(engine):
    engine.generate(ids(30), max_tokens=4, ignore_eos=True)
    assert engine.stats()["slots_free"] == 160 and engine.stats()["conversations"] == 0


def test_a_conversation_that_was_let_go_of_goes_on_from_its_context(engine):
    """The context counts only then: else the engine has the tokens, and their KV."""
    first = engine.generate(ids(12), "c", max_tokens=4, ignore_eos=True)
    context = ids(12) + first.token_ids
    engine.forget("c")
    second = engine.generate(ids(3), "c", context=context, max_tokens=4, ignore_eos=True)
    assert second.usage["recomputed"] == 15 and second.usage["prompt_tokens"] == 19
    third = engine.generate(ids(3), "c", context=[1, 2, 3], max_tokens=4, ignore_eos=True)
    assert third.usage["gpu"] == 19 + 4 - 1
    branch = engine.generate(ids(3), "branch", context=context, parent="c", max_tokens=4, ignore_eos=True)
    assert branch.token_ids == second.token_ids and branch.usage["gpu"] == 8        # full chunks are shared


def test_reached_stop_ends_a_reply(engine):
    whole, seen = engine.generate(ids(9), max_tokens=9, ignore_eos=True).token_ids, []
    reply = engine.generate(ids(9), max_tokens=9, ignore_eos=True,
                            reached_stop=lambda token: seen.append(token) or len(seen) == 4)
    assert reply.token_ids == seen == whole[:4] and reply.finish_reason == "stop"


@pytest.mark.parametrize("prompt, options, message", [
    ([], {}, "at least one token id"), (5, {}, "got 5"), ([10**6], {}, "1000000"), (["a"], {}, "'a'"),
    ([1], dict(max_tokens=0), "max_tokens .* got 0"), ([1], dict(max_tokens=2.5), "2.5"),
    ([1], dict(max_tokens=160), "limit of 160"), (ids(160), {}, "limit of 160"),
    ([1], dict(temperature=-1), "temperature"), ([1], dict(temperature=float("nan")), "nan"),
    ([1], dict(temperature="1"), "temperature"), ([1], dict(top_p=0), "top_p"),
    ([1], dict(top_k=-1), "top_k"), ([1], dict(seed="x"), "seed"), ([1], dict(seed=1.5), "seed"),
    ([1], dict(conversation=5), "conversation")])
def test_bad_input_is_refused_by_name(engine, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, **(dict(conversation="c") | options))
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_what_does_not_fit_is_refused_with_both_numbers(engine):
    engine.generate(ids(100), "c", max_tokens=20, ignore_eos=True)
    with pytest.raises(ValueError, match="130 tokens .* max_tokens is 40.* limit of 160"):
        engine.submit(ids(10), "c", max_tokens=40)
    with pytest.raises(ValueError, match="160 tokens .* not given.* limit of 160"):
        engine.submit(ids(40), "c")
    with pytest.raises(ValueError, match="130 tokens .* max_tokens is 40.* limit of 160"):
        engine.submit(ids(10), "d", context=ids(120), max_tokens=40)
    assert engine.generate(ids(10), "c", max_tokens=30, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("flags, message", [
    (dict(policy="fifo"), "fifo"), (dict(gpu_cache_tokens=0), "gpu_cache_tokens"),
    (dict(cpu_cache_tokens=-1), "cpu_cache_tokens"), (dict(reserve=1.0), "reserve"),
    (dict(chunk_size=1.5), "chunk_size"), (dict(gpu_cache_tokens=10**15), "smaller ones"),
    (dict(dtype="int8"), "int8"), (dict(model="no/such/dir/at all"), "no/such/dir"),
    (dict(device="abacus"), "abacus")])
def test_bad_flags_are_refused_by_name(flags, message):
    with pytest.raises(ValueError, match=message):
        Engine(**flags)


@pytest.mark.parametrize("name", ["history", "system_prompt", "port"])
def test_a_flag_of_somebody_else_is_refused_by_name(name):
    with pytest.raises(TypeError, match=f"no flag '{name}'.*Sessions"):
        Engine("tiny_chat", **{name: "x"})


def test_without_a_tokenizer_token_ids_are_served(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((ROOT / "tiny_chat" / name).read_bytes())
    engine = Engine(tmp_path, **TINY)
    assert len(engine.generate(ids(4), "c", max_tokens=3, ignore_eos=True).token_ids) == 3
    engine.close()


def test_posts_run_in_their_order_whoever_takes_them(engine):
    """Without start(), two threads take from the inbox. A turn must enter before its cancel."""
    order = []
    with engine.stepping:
        other = threading.Thread(target=engine.call, args=(lambda: order.append("enter"),))
        other.start()
        threading.Event().wait(0.05)                    # it has posted, and waits to be the owner
        engine.call(lambda: order.append("cancel"))
    other.join(timeout=60)
    assert order == ["enter", "cancel"]


# ---- readers

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


def test_an_outbox_wakes_whoever_waits():
    """A writer and eight readers, who now wait, now lag behind: each reads every item once."""
    engine = Engine("tiny_chat", **TINY).start()
    outbox, read = Outbox(engine), []
    def reader():
        read.append([item for new in outbox.news() for item in new])
    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for item in range(3000):
        outbox.put(item)
        if item % 7 == 0:
            threading.Event().wait(1e-5)
    outbox.close()
    for thread in threads:
        thread.join(timeout=60)
    assert read == [list(range(3000))] * 8 and outbox.asleep == 0
    engine.close()


def test_a_token_that_nobody_waits_for_wakes_nobody(engine, monkeypatch):
    """Handing out a token is on the path of every step."""
    woken = []
    monkeypatch.setattr(Outbox, "_wake", lambda outbox: woken.append(outbox))
    handle = engine.submit(ids(5), max_tokens=9, ignore_eos=True)
    while not handle.reply:
        engine.step()
    assert woken == [handle.tokens] and len(handle.token_ids) == 9        # once, at the end


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
    with pytest.raises(RuntimeError, match="closed"):
        engine.start()


# ---- failures

@pytest.mark.parametrize("started", [False, True])
def test_what_fails_on_the_owners_side_is_told_to_the_caller(started, monkeypatch):
    engine = Engine("tiny_chat", **TINY)
    if started:
        engine.start()
    def out_of_order():
        raise OSError("out of order")
    with pytest.raises(OSError, match="out of order"):
        engine.call(out_of_order)
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "open", lambda *_: out_of_order())
        with pytest.raises(OSError, match="out of order"):
            engine.generate(ids(3), "c")
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"
    engine.close()


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
    """A worker that fails whenever `fails(batch)`, before or after its work, and spoils both tiers."""
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
    """Every ninth batch fails and leaves rubbish in both tiers. Whoever was in that batch is told, and may
    try again. Nobody's answers change."""
    engine, batches, failures = Engine("tiny_chat", max_running=3, **TINY), itertools.count(1), []
    def fails(batch):
        return batch.spans and next(batches) % 9 == 0 and moment
    engine.worker.execute = sabotaged(engine.worker.execute, fails, engine.worker.pool)
    engine.start()
    replies = {f"c{i}": [] for i in range(6)}
    def client(name):
        for prompt, n in script(name):
            while True:
                try:
                    reply = engine.generate(prompt, name, max_tokens=n, ignore_eos=True)
                    replies[name].append(reply.token_ids)
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
