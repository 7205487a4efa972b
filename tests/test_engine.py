"""The engine in one process: turns of token ids, threads, cancellation, failures. On the embedded model."""
import functools
import gc
import itertools
import threading
import time
import weakref
from pathlib import Path
from statistics import median

import pytest

from engine import Engine
from eviction import RecomputeCost
from handles import Outbox
from scheduler import Result

ROOT = Path(__file__).parent.parent
COST = RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3)
TINY = dict(cost=COST, gpu_cache_tokens=160, cpu_cache_tokens=64, chunk_size=8, max_batch_tokens=32,
            debug=True)


@pytest.fixture(params=[0, 1], ids=["in step", "a step ahead"])
def depth(request):
    """1: a worker on a CPU, whose results the engine asks for one step late, as it does those of a GPU."""
    return request.param


@pytest.fixture
def engine(depth):
    engine = make(depth)
    yield engine
    engine.close()


def make(depth, **flags):
    engine = Engine("tiny_chat", **TINY, **flags)
    engine.depth = depth
    return engine


def ids(n, seed=0):
    return [(17 * i + 31 * seed) % 250 for i in range(n)]


def script(name, turns=3):
    """The turns of one conversation, as (prompt, max_tokens)."""
    return [(ids(6 + turn, seed=ord(name[-1]) + turn), 5) for turn in range(turns)]


@functools.cache
def alone(name, turns=3):
    """What each turn of the script gives with nobody else there."""
    engine = Engine("tiny_chat", cost=COST)
    replies = [engine.generate(prompt, name, max_tokens=n, ignore_eos=True).token_ids
               for prompt, n in script(name, turns)]
    engine.close()
    return replies


# ---- turns

def test_who_steps_the_engine_waits_no_longer_than_asked(engine):
    handle = engine.submit(ids(6), max_tokens=50, ignore_eos=True)
    assert not handle.tokens.wait_closed(0.0)
    assert handle.tokens.wait_closed() and len(handle.token_ids) == 50


def test_threads_share_a_started_engine(depth):
    engine = make(depth).start()
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


def test_a_cancelled_first_turn_leaves_no_empty_conversation(engine):
    """It would hide the context that the next turn brings."""
    engine.submit(ids(5), "c", max_tokens=50).cancel()
    assert engine.stats()["conversations"] == 0
    assert engine.generate(ids(3), "c", context=ids(12), max_tokens=1).usage["prompt_tokens"] == 15


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
    # It has the same prompt, too: full chunks are shared, the rest is copied, but for the last token.
    assert branch.token_ids == second.token_ids and branch.usage["gpu"] == 19 - 1


def test_what_is_forgotten_is_not_kept_in_memory(engine):
    engine.generate(ids(9), max_tokens=2)
    engine.generate(ids(9), "c", max_tokens=2)
    kept = weakref.ref(engine.cache.conversations["c"])
    engine.forget("c")
    gc.collect()
    assert kept() is None


def test_the_caller_may_change_what_it_has_submitted(engine):
    prompt, context = ids(5), ids(20)
    expected = engine.generate(prompt, "a", context=context, max_tokens=4, ignore_eos=True)
    handle = engine.submit(prompt, "b", context=context, max_tokens=4, ignore_eos=True)
    prompt.append(1), context.append(1)
    assert handle.result().token_ids == expected.token_ids


def test_reached_stop_ends_a_reply(engine):
    whole, seen = engine.generate(ids(9), max_tokens=9, ignore_eos=True).token_ids, []
    reply = engine.generate(ids(9), max_tokens=9, ignore_eos=True,
                            reached_stop=lambda token: seen.append(token) or len(seen) == 4)
    assert reply.token_ids == seen == whole[:4] and reply.finish_reason == "stop"


def test_reached_stop_may_cancel(engine):
    handle = engine.submit(ids(9), "c", max_tokens=9, ignore_eos=True,
                           reached_stop=lambda token: handle.cancel() or True)
    assert handle.result().finish_reason == "cancelled"
    assert engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("prompt, options, message", [
    ([], {}, "at least one token id"), (5, {}, "got 5"), ([10**6], {}, "1000000"), (["a"], {}, "'a'"),
    ([1], dict(max_tokens=0), "max_tokens .* got 0"), ([1], dict(max_tokens=2.5), "2.5"),
    ([1], dict(max_tokens=160), "limit of 160"), (ids(160), {}, "limit of 160"),
    ([1], dict(temperature=-1), "temperature"), ([1], dict(temperature=float("nan")), "nan"),
    ([1], dict(temperature="1"), "temperature"), ([1], dict(top_p=0), "top_p"),
    ([1], dict(top_k=-1), "top_k"), ([1], dict(seed="x"), "seed"), ([1], dict(seed=1.5), "seed"),
    ([1], dict(conversation=5), "conversation"), ([1], dict(context=[5, 10**6]), "1000000"),
    ([1], dict(context=[-1, 5]), "-1"), ([1], dict(context=[5, 2.5, 3]), "2.5"),
    ([1], dict(context=[5, "a"]), "'a'")])
@pytest.mark.parametrize("depth", [0])
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
    (dict(max_context=64), "random_weights"), (dict(random_weights=True, max_context=0), "max_context"),
    (dict(chunk_size=1.5), "chunk_size"), (dict(max_batch_tokens=None), "max_batch_tokens"),
    (dict(gpu_cache_tokens=2**31 - 1), "smaller gpu_cache_tokens or cpu_cache_tokens"),
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
    with engine.owner.lock:
        other = threading.Thread(target=engine.call, args=(lambda: order.append("enter"),))
        other.start()
        threading.Event().wait(0.05)                    # it has posted, and waits to be the owner
        engine.call(lambda: order.append("cancel"))
    other.join(timeout=60)
    assert order == ["enter", "cancel"]


def test_who_posts_again_and_again_does_not_keep_a_step_from_scheduling(engine):
    """Each look into the inbox runs only what was posted before it began."""
    handle, ran = engine.submit(ids(5), max_tokens=4, ignore_eos=True), []
    def post_again():
        ran.append(engine.scheduler.steps)
        if handle.reply is None and len(ran) < 1000:
            engine.owner.post(post_again)
    engine.owner.post(post_again)
    assert len(handle.result().token_ids) == 4
    assert ran == list(range(len(ran))) and 4 <= len(ran) <= 5
    engine.owner.take_inbox()


def test_a_look_runs_only_what_was_posted_before_even_if_a_function_looks_itself(engine):
    order = []
    def first():
        engine.owner.post(lambda: order.append("posted meanwhile"))
        engine.call(lambda: order.append("called"))
        engine.owner.post(lambda: order.append("too late"))
    engine.owner.post(first)
    engine.owner.post(lambda: order.append("second"))
    engine.owner.take_inbox()
    assert order == ["second", "posted meanwhile", "called"]
    engine.owner.take_inbox()
    assert order[3:] == ["too late"]


@pytest.mark.parametrize("way", ["close", "failure"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_posts_while_the_owner_stops_the_engine_is_answered(way):
    """A call and a turn are posted just before. Their clients rely on the engine's thread."""
    engine, handles, answers, begun = Engine("tiny_chat", **TINY).start(), [], [], threading.Event()
    caller = threading.Thread(target=lambda: answers.append(engine.call(lambda: 7)), daemon=True)
    own = engine.owner.thread
    def last():
        handles.append(engine.submit(ids(3), max_tokens=1))
        caller.start()
        while len(engine.owner.inbox) < 2:
            time.sleep(0.001)
        begun.set()
        time.sleep(0.05)                            # now the caller waits for its answer
        if way == "failure":
            raise OSError("out of order")
    if way == "close":
        engine.submit(ids(3), max_tokens=150, ignore_eos=True, on_end=lambda handle: last())
        engine.close()
    else:
        engine.owner.post(last)
    assert begun.wait(10)
    caller.join(timeout=10)
    own.join(timeout=10)
    assert answers == [7] and not own.is_alive() and handles[0].tokens.closed.is_set()
    assert dict(close="is closed", failure="has stopped")[way] in str(handles[0].error)


@pytest.mark.parametrize("way", ["close", "failure"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_posts_while_the_engine_stops_is_answered(way):
    """Clients post all the time, some of them during the last look into the inbox."""
    engine, answered = Engine("tiny_chat", **TINY).start(), []
    def client():
        for _ in range(10_000):
            assert engine.call(lambda: 7) == 7
            try:
                handle = engine.submit(ids(3), max_tokens=1)
            except RuntimeError:
                break
            handle.tokens.wait_closed()
            assert handle.reply or handle.error
        assert engine.call(lambda: 8) == 8
        answered.append(True)
    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    own = engine.owner.thread
    if way == "failure":
        engine.worker.execute = engine.worker.launch = None        # a step fails in _drain_copies
        own.join(timeout=30)
    engine.close()
    for thread in threads:
        thread.join(timeout=30)
    assert len(answered) == 8 and not engine.owner.handles and not engine.owner.inbox


# ---- one step ahead

def test_the_books_run_one_step_ahead_and_readers_hear_one_step_later():
    engine = make(depth=1)
    handle = engine.submit(ids(5), "c", max_tokens=3, ignore_eos=True)
    seen = []
    while not handle.reply:
        batch = engine.step()
        seen.append((str(batch).split("  ")[1], engine.cache.conversations["c"].known, len(handle.token_ids)))
    assert seen == [("c[0:5]", 5, 0), ("c[5:6]", 6, 1), ("c[6:7]", 7, 2), ("", 7, 3)]
    engine.close()


def test_a_stop_that_is_heard_of_late_shows_nowhere(depth):
    """Neither in the reply nor in the usage of the next turn."""
    whole = alone("c", turns=1)[0]
    engine, prompt = make(depth), script("c")[0][0]
    batches = []
    engine.watchers.append(batches.append)
    reply = engine.generate(prompt, "c", max_tokens=5, reached_stop=lambda token: token == whole[2])
    length = whole.index(whole[2]) + 1
    assert reply.token_ids == whole[:length] and reply.finish_reason == "stop"
    assert reply.usage["completion_tokens"] == length
    assert sum(bool(batch) for batch in batches) == length + depth
    again = engine.generate(ids(3), "c", max_tokens=2, ignore_eos=True)
    known = len(prompt) + length - 1
    assert again.usage == dict(prompt_tokens=known + 4, completion_tokens=2, gpu=known, cpu=0,
                               recomputed=0, new=4)
    assert engine.stats()["generated_tokens"] == length + 2
    engine.close()


def test_who_looks_back_at_its_tokens_is_never_ahead_of_them():
    """Beside one who does not."""
    options = dict(max_tokens=12, ignore_eos=True)
    looking_back = [dict(repetition_penalty=1.8), dict(presence_penalty=1.5), dict(frequency_penalty=1.5)]
    def replies(depth):
        engine = make(depth)
        plain = engine.submit(ids(5), "plain", **options)
        penalized = [engine.submit(ids(5), f"c{i}", **more, **options) for i, more in enumerate(looking_back)]
        tokens = [handle.result().token_ids for handle in (*penalized, plain)]
        engine.close()
        return tokens
    assert replies(1) == replies(0)


@pytest.mark.parametrize("way", ["cancel", "forget", "close"])
def test_a_turn_that_goes_away_while_it_is_in_the_air(way):
    engine = make(depth=1)
    other = engine.submit(ids(9, seed=1), "other", max_tokens=20, ignore_eos=True)
    handle = engine.submit(ids(9), "c", max_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert engine.unsettled and handle.request.last_token_pending
    if way == "close":
        engine.close()
        assert handle.result().finish_reason == other.result().finish_reason == "cancelled"
        return
    handle.cancel() if way == "cancel" else engine.forget("c")
    assert handle.result().finish_reason == "cancelled" and len(handle.token_ids) == 3
    again = engine.generate(ids(9, seed=1), max_tokens=20, ignore_eos=True)
    assert other.result().token_ids == again.token_ids
    assert engine.generate(ids(9), "c", max_tokens=3, ignore_eos=True).usage["new"] == 9
    engine.close()


def test_with_tokens_on_their_way_no_step_waits_for_a_copy(monkeypatch):
    """An empty batch would: so none is launched, though copies to the CPU never end."""
    engine = make(depth=1)
    engine.generate(ids(100), "old", max_tokens=2, ignore_eos=True)
    monkeypatch.setattr(engine.worker.pool, "landed", lambda wait: [])
    handle = engine.submit(ids(30), "c", max_tokens=3, ignore_eos=True)
    launched, launch = [], engine.worker.launch
    monkeypatch.setattr(engine.worker, "launch", lambda batch: launched.append(batch) or launch(batch))
    handle.result()
    assert engine.cache.in_flight and launched and all(launched)


class FakeDevice:
    """A device that takes 5 ms for each batch, one after another, without Python's lock."""
    stop_ids, vocab_size, max_context, num_slots, num_places = frozenset(), 250, 1024, 256 * 1024, 0
    ends = 0.0

    def __init__(self, depth):
        self.depth = depth

    def execute(self, batch):
        return self.launch(batch)()

    def launch(self, batch):
        self.ends = ends = max(self.ends, time.perf_counter()) + 0.005
        tokens = [7] * sum(span.samples for span in batch.spans)
        def wait():
            time.sleep(max(0.0, ends - time.perf_counter()))
            return Result(tokens, [])
        return wait


@pytest.mark.soak
def test_a_device_of_5_ms_never_waits_for_the_host_one_step_ahead():
    """256 decodes, each read by a thread of its own. Needs a quiet machine."""
    def median_step(depth, count=256, steps=400):
        engine = Engine(worker=FakeDevice(depth), cost=COST, max_running=count, max_batch_tokens=4096)
        times = []
        handles = [engine.submit(ids(5), max_tokens=steps) for _ in range(count)]
        readers = [threading.Thread(target=list, args=(handle,)) for handle in handles]
        engine.watchers.append(lambda batch: times.append(time.perf_counter()))
        engine.start()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        engine.close()
        return median(later - earlier for earlier, later in zip(times[steps // 4:], times[steps // 4 + 1:]))
    in_step, ahead = median_step(0), median_step(1)
    print(f"median step: {1e3 * in_step:.2f} ms in step, {1e3 * ahead:.2f} ms one step ahead")
    assert ahead <= 0.0053 and ahead < in_step


# ---- readers

def test_many_readers_of_one_handle_see_every_token(depth):
    engine = make(depth).start()
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
    outbox, read = Outbox(engine.step_until), []
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
    assert read == [list(range(3000))] * 8
    engine.close()


def test_start_twice_and_close_while_turns_wait(depth):
    engine = make(depth).start().start()
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
    own = engine.owner.thread
    handle = engine.submit(ids(3), "c")
    with pytest.raises((ZeroDivisionError, RuntimeError), match="boom"):
        handle.result()
    with pytest.raises(RuntimeError, match="boom"):
        engine.submit(ids(3), "d").result()
    if started:
        own.join()                          # else its last words would disturb a later test
    engine.close()


def test_ctrl_c_in_the_middle_of_a_step_stops_the_engine(engine):
    """The books are half written: a later answer would be wrong."""
    def interrupted(batch):
        raise KeyboardInterrupt
    handle, launch = engine.submit(ids(9), "c"), engine.worker.launch
    engine.worker.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    engine.worker.launch = launch
    for later in (handle.result, lambda: engine.submit(ids(3), "c")):
        with pytest.raises(RuntimeError, match="stopped: KeyboardInterrupt"):
            later()


def test_ctrl_c_in_a_function_of_another_thread_wakes_that_thread(engine):
    """The engine has no thread of its own: whoever owns it runs the functions of all others."""
    errors = []
    def interrupted():
        raise KeyboardInterrupt
    def caller():
        with pytest.raises(RuntimeError, match="stopped: KeyboardInterrupt") as error:
            engine.call(interrupted)
        errors.append(error)
    thread = threading.Thread(target=caller, daemon=True)
    with pytest.raises(KeyboardInterrupt), engine.owner.owning():
        thread.start()
        assert engine.owner.posted.wait(30)
        engine.owner.take_inbox()
    thread.join(timeout=30)
    assert errors and "KeyboardInterrupt" in str(engine.failure)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_keeps_nobody_waiting(depth):
    engine = make(depth).start()
    thread = engine.owner.thread
    def fails(handle):
        raise OSError("out of order")
    for handle in [engine.submit(ids(3, n), max_tokens=4, on_end=fails) for n in range(4)]:
        assert handle.tokens.wait_closed(30)
    thread.join()                           # else its last words would disturb a later test
    engine.close()


def test_a_callback_may_close_the_engine(depth):
    engine, closed = make(depth).start(), threading.Event()
    def close(handle):
        engine.close()
        closed.set()
    assert engine.submit(ids(3), max_tokens=4, ignore_eos=True, on_end=close).result().token_ids
    assert closed.wait(30)


def sabotage(engine, fails):
    """The worker fails whenever `fails(batch)`, before or after its work, or when it is asked for the result,
    and spoils both tiers."""
    launch, pool = engine.worker.launch, engine.worker.pool
    def spoil():
        pool.gpu.fill_(float("nan")), pool.cpu.fill_(float("nan"))
        raise RuntimeError("a cosmic ray")
    def run(batch):
        moment = fails(batch)
        if moment == "before":
            spoil()
        wait = launch(batch)
        if moment == "after":
            spoil()
        return spoil if moment == "late" else wait
    engine.worker.launch = run


@pytest.mark.parametrize("moment", ["before", "after", "late"])
def test_a_failing_worker_costs_only_what_it_works_on(moment, depth):
    """Every ninth batch fails and leaves rubbish in both tiers. Whoever was in that batch, or in one that was
    launched and not settled, is told, and may try again. Nobody's answers change."""
    engine, batches, failures = make(depth, max_running=3), itertools.count(1), []
    sabotage(engine, lambda batch: batch.spans and next(batches) % 9 == 0 and moment)
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
    engine.generate(ids(9), "c", max_tokens=4, ignore_eos=True)
    sabotage(engine, lambda batch: batch.spans and "before")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cosmic ray"):
            engine.generate(ids(5), "c", max_tokens=4)
        assert not engine.failure
    with pytest.raises(RuntimeError, match="cosmic ray"):
        engine.generate(ids(5), "c", max_tokens=4)
    assert "cosmic ray" in str(engine.failure)
