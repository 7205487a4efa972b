"""Hints: what a conversation has lost is back before its turn, and nobody else waits for that."""
import random
import threading
import time
from itertools import count

import pytest
from fakes import World
from test_exactness import CONTEXT, SWITCHES, VOCAB, assert_exact, checkpoint  # noqa: F401

from engine import Engine
from eviction import RecomputeCost
from scheduler import PLACEHOLDER
from serving import sessions as sessions_file
from serving.sessions import Sessions
from warm import SECONDS, Hints

COST = RecomputeCost({4: 1.0, 32: 8.0}, rest=1.0)
NOTHING = dict(gpu=0, cpu=0, recomputed=0)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


def small(clock=None, **flags):
    """32 slots and 4 CPU places of 4 tokens, as in `python engine.py`."""
    tiers = dict(gpu_cache_tokens=32, cpu_cache_tokens=16, chunk_size=4, max_batch_tokens=16, reserve=0.0)
    return Engine("tiny_chat", debug=True, cost=COST, clock=clock or Clock(), **tiers | flags)


def ids(length, first=65):
    return list(range(first, first + length))


def turns(engine, **lengths):
    """A turn of each of these conversations, side by side -> their replies."""
    handles = {name: engine.submit(ids(length), name, max_tokens=3, ignore_eos=True)
               for name, length in lengths.items()}
    return {name: handle.result() for name, handle in handles.items()}


def settle(engine):
    """Step until a hint has done its work; returns the batches that did something."""
    batches = []
    for _ in range(40):
        if (batch := engine.step()):
            batches.append(str(batch).partition("  ")[2])
    return batches


def a_has_lost(engine):
    """Of a's 13 tokens with KV, 5 are on the GPU, 4 on the CPU, and 4 are dropped."""
    turns(engine, a=11, b=11)
    turns(engine, c=11)
    return engine


# ---- what a hint does

@pytest.mark.parametrize("depth", [0, 1])
def test_what_was_lost_is_on_the_gpu_when_the_turn_comes(depth):
    expected = turns(a_has_lost(small()), a=4)["a"]
    engine = a_has_lost(small())
    engine.depth = depth
    assert engine.warm("a") == dict(gpu=5, cpu=4, recomputed=4)
    assert settle(engine)[0].startswith("a[0:4] | in a[4:8]")
    reply = turns(engine, a=4)["a"]
    assert reply.token_ids == expected.token_ids
    assert expected.sources == "gpu 5 · cpu 4 · recomputed 4 · new 5"
    assert reply.sources == "gpu 13 · cpu 0 · recomputed 0 · new 5"
    stats = engine.stats()
    assert [stats[name] for name in ("hints", "warmed_tokens_cpu", "warmed_tokens_recomputed")] == [1, 4, 4]


def test_a_hint_computes_no_more_than_there_was():
    """A reply's last token has had no KV, unless the conversation was shortened just behind it. Then its KV
    may be kept, but is not computed again: a step that computes it would sample."""
    for length, known in ((14, 13), (12, 12), (10, 10)):
        engine = small(cpu_cache_tokens=0)
        turns(engine, a=11)
        engine.shorten("a", length)
        a = engine.cache.conversations["a"]
        assert (len(a.tokens), a.known) == (length, known)
        engine.cache.drop_all(a)
        engine.warm("a")
        settle(engine)
        assert a.cached() == (min(known, length - 1), 0) and len(a.tokens) == length


def test_beside_running_requests_a_hint_gets_an_eighth_of_the_budget():
    engine = a_has_lost(small(gpu_cache_tokens=48, cpu_cache_tokens=0, max_batch_tokens=16))
    engine.forget("b"), engine.forget("c")
    engine.cache.drop_all(engine.cache.conversations["a"])
    d = engine.submit(ids(4), "d", max_tokens=9, ignore_eos=True)
    engine.step()
    engine.warm("a")
    spans = [str(engine.step()).partition("  ")[2] for _ in range(3)]
    assert spans == ["d[4:5] a[0:2]", "d[5:6] a[2:4]", "d[6:7] a[4:6]"]
    d.result()
    assert settle(engine) == ["a[12:13]"] or engine.cache.conversations["a"].cached() == (13, 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_warm_up_beside_a_decode_with_guesses(depth):
    """The warm-up's spans come first, since guesses lengthen the last ones."""
    def play(guesses, hint):
        engine = small(gpu_cache_tokens=256, cpu_cache_tokens=0, max_batch_tokens=64, guesses=guesses)
        engine.depth = depth
        engine.generate(ids(37), "a", max_tokens=3, ignore_eos=True)
        engine.cache.drop_all(engine.cache.conversations["a"])
        prompt = list(b"one two three, one two three, one two")
        b = engine.submit(prompt, "b", max_tokens=20, ignore_eos=True)
        engine.step(), engine.step()
        if hint:
            engine.warm("a")
        batches = [str(engine.step()) for _ in range(4)]
        return [b.result().token_ids, turns(engine, a=4)["a"].token_ids], batches
    plain, _ = play(0, hint=False)
    replies, batches = play(6, hint=True)
    assert replies == plain and any(" a[" in batch and "guess b[" in batch for batch in batches)


def test_a_hint_waits_while_somebody_waits():
    """For the queue, and for those who are starved."""
    engine = a_has_lost(small(cpu_cache_tokens=0))
    first = engine.submit(ids(20), "d", max_tokens=9, ignore_eos=True)
    second = engine.submit(ids(20), "e", max_tokens=3, ignore_eos=True)       # does not fit beside d
    engine.step()
    engine.warm("a")
    while not first.reply:
        assert " a[" not in str(engine.step())
    second.result()


def test_a_hint_leaves_the_reserve():
    engine = a_has_lost(small(gpu_cache_tokens=40, cpu_cache_tokens=0, reserve=0.5))
    a = engine.cache.conversations["a"]
    engine.cache.drop_all(a), engine.forget("b")
    d = engine.submit(ids(10), "d", max_tokens=9, ignore_eos=True)
    engine.step()
    before = engine.cache.conversations["c"].cached()
    engine.warm("a")
    assert settle_until(engine, d) == [] and engine.cache.conversations["c"].cached() == before
    settle(engine)                                          # 13 tokens and 20 slots of reserve: alone it fits
    assert a.cached() == (13, 0)


def test_chats_that_share_a_prefix_are_counted_once():
    """All share 100 tokens. Two running chats and the hint need 144 slots of 200, not 344."""
    engine = small(gpu_cache_tokens=200, cpu_cache_tokens=0, max_batch_tokens=64)
    prefix = ids(100)
    for name, end in (("x", [1, 2]), ("a", [*range(1, 11)])):
        engine.generate(prefix + end, name, max_tokens=3, ignore_eos=True, tenant="o")
    a = engine.cache.conversations["a"]
    engine.cache.drop_all(a)
    running = [engine.submit(prefix + [20 + i], max_tokens=40, ignore_eos=True, tenant="o") for i in range(2)]
    for _ in range(3):
        engine.step()
    engine.warm("a", tenant="o")
    for _ in range(10):
        engine.step()
    assert a.cached() == (112, 0) and not any(handle.reply for handle in running)


def test_who_awaits_only_its_last_token_is_not_starved():
    """21 tokens in chunks of 4: the last one gets no slot, since it is never fed."""
    engine = small(gpu_cache_tokens=256, cpu_cache_tokens=0)
    engine.depth = 1
    turns(engine, a=11)
    engine.cache.drop_all(engine.cache.conversations["a"])
    b = engine.submit(ids(10), "b", max_tokens=11, ignore_eos=True)
    while len(b.request.generated) < 10:
        engine.step()
    engine.warm("a")
    assert "a[" in str(engine.step())


@pytest.mark.parametrize("depth", [0, 1])
def test_a_hint_that_had_to_wait_is_served_before_the_engine_sleeps(depth):
    """b has the only row. The step that settles b's last token computes nothing, and comes too early."""
    engine = small(max_running=1, gpu_cache_tokens=256, cpu_cache_tokens=0)
    engine.depth = depth
    turns(engine, a=11)
    a = engine.cache.conversations["a"]
    engine.cache.drop_all(a)
    engine.start()
    b = engine.submit(ids(10), "b", max_tokens=200, ignore_eos=True)
    while not b.request.generated:
        time.sleep(0.001)
    assert engine.warm("a") != NOTHING
    b.result()
    deadline = time.monotonic() + 2
    while a.cached() != (13, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = a.cached()
    engine.close()
    assert found == (13, 0)


def settle_until(engine, handle):
    """Traces of a, as long as the other turn runs."""
    found = []
    while not handle.reply:
        found += [part for part in str(engine.step()).split() if part.startswith("a[")]
    return found


def test_behind_a_hint_others_have_their_copies_ahead_of_need():
    """A half of the slots is to be available, without those of the hint: else the next turn would take the
    slots of the hint, and not of those who are worth less."""
    engine = a_has_lost(small(gpu_cache_tokens=48, cpu_cache_tokens=48, swap_threshold=0.5))
    a = engine.cache.conversations["a"]
    engine.cache.drop_all(a)
    engine.warm("a")
    settle(engine)
    assert engine.cache.available - sum(chunk.reclaimable for chunk in a.chunks) >= 24


def test_separate_phases_keep_hints_apart_from_decodes():
    engine = a_has_lost(small(gpu_cache_tokens=48, separate_phases=True))
    engine.cache.drop_all(engine.cache.conversations["a"])
    d = engine.submit(ids(4), "d", max_tokens=5, ignore_eos=True)
    engine.step()
    engine.warm("a")
    assert settle_until(engine, d) == []
    settle(engine)
    assert engine.cache.conversations["a"].cached() == (13, 0)


# ---- how long it holds

def test_for_30_seconds_the_conversation_leaves_last():
    """Then it begins to be idle."""
    def next_to_leave(seconds):
        clock = Clock()
        engine = small(clock, gpu_cache_tokens=64, cpu_cache_tokens=0)
        turns(engine, a=11)
        clock.now += 100
        turns(engine, b=11)
        clock.now += 1
        engine.warm("a")
        clock.now += seconds
        if seconds > SECONDS:
            turns(engine, b=1)
        clock.now += 100 * (seconds > SECONDS)
        return engine.cache.next_to_leave(clock()).users[0].name
    assert [next_to_leave(seconds) for seconds in (0, SECONDS - 1, SECONDS + 1)] == ["b", "b", "a"]


def test_nothing_is_pinned_and_the_next_turn_takes_the_slots():
    """Of everybody's slots: right behind the hint a turn of another conversation needs all of them."""
    engine = a_has_lost(small(cpu_cache_tokens=0))
    engine.warm("a")
    engine.step()
    assert turns(engine, d=28)["d"].finish_reason == "length"
    assert turns(engine, a=4)["a"].usage["recomputed"] > 0


def test_a_hint_whose_time_is_over_does_nothing():
    clock = Clock()
    engine = a_has_lost(small(clock))
    engine.warm("a")
    clock.now += SECONDS
    assert settle(engine) == [] and not engine.hints


def test_a_hint_is_served_once():
    """A second one, while the first holds, changes nothing: nor does a conversation that loses it again get
    it back (two that do not fit side by side would take turns for 30 seconds)."""
    engine = a_has_lost(small())
    engine.warm("a")
    assert settle(engine) and engine.warm("a") == NOTHING
    engine.cache.drop_all(engine.cache.conversations["a"])
    assert settle(engine) == [] and engine.stats()["hints"] == 1


def test_the_turn_takes_over_at_once():
    expected = turns(a_has_lost(small()), a=4)["a"].token_ids
    for steps in range(3):
        engine = a_has_lost(small())
        engine.warm("a")
        for _ in range(steps):
            engine.step()
        assert turns(engine, a=4)["a"].token_ids == expected
        assert not engine.hints


def test_no_hint_for_a_turn_that_is_here():
    engine = a_has_lost(small())
    running = engine.submit(ids(4), "a", max_tokens=3, ignore_eos=True)
    assert engine.warm("a") == NOTHING                      # it has just come
    engine.step()
    assert engine.warm("a") == NOTHING and not engine.hints
    running.result()
    with pytest.raises(KeyError):
        engine.warm("never heard of")
    with pytest.raises(ValueError, match="conversation must be a string"):
        engine.warm(None, [1, 2, 3])                        # nobody would ever forget it
    assert len(engine.cache.conversations) == 3
    assert small(stateless=True).warm("x", [1, 2, 3]) == NOTHING


def test_no_hint_for_what_can_never_fit():
    """31 tokens of 32: no prompt fits behind them with a reply. And with a reserve of half of the slots a
    conversation of 20 never gets in ahead of its turn: nobody has to make room for it."""
    engine = small()
    engine.generate(ids(28), "a", max_tokens=3, ignore_eos=True)
    assert engine.warm("a") == NOTHING
    engine = small(reserve=0.5, cpu_cache_tokens=0)
    engine.generate(ids(17), "a", max_tokens=3, ignore_eos=True)
    engine.cache.drop_all(engine.cache.conversations["a"])
    turns(engine, b=5)
    engine.warm("a")
    assert settle(engine) == [] and engine.cache.conversations["b"].cached() == (7, 0)


def test_forgotten_and_shortened_while_the_hint_is_served():
    for change in (lambda engine: engine.forget("a"), lambda engine: engine.shorten("a", 6)):
        engine = a_has_lost(small(max_batch_tokens=2, cpu_cache_tokens=0))
        engine.depth = 1
        engine.warm("a")
        engine.step()
        change(engine)
        settle(engine)
    assert engine.cache.conversations["a"].cached() == (5, 0)


def test_a_worker_that_fails_takes_the_hints_with_it():
    """Else the hint would make it fail again, until the engine stops."""
    engine = a_has_lost(small())
    launch, failures = engine.worker.execute, []

    def fails(batch):
        if any(span.request.finish_reason == "warmed" for span in batch.spans):
            failures.append(str(batch))
            raise RuntimeError("out of memory")
        return launch(batch)
    engine.worker.execute = fails
    engine.warm("a")
    settle(engine)
    assert len(failures) == 1 and not engine.hints
    assert turns(engine, a=4)["a"].usage["recomputed"] == 13


# ---- nobody waits for a hint

class Typing(World):
    """A World whose users send hints."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.hints = Hints(self.scheduler)
        schedule, launched = self.scheduler.schedule, self.scheduler.launched
        self.available = []                         # (before the warm-ups of a step, behind its launch)

        def schedule_and_fill(now):
            batch, before = schedule(now), self.cache.available
            # (Who is as long as it may become awaits its last token, and needs no slot.)
            starved = [request for request in self.scheduler.running
                       if request.conversation.room < request.total != request.longest]
            self.hints.fill(batch, now)
            self.warmed = before if self.hints.in_batch else None
            if self.hints.in_batch:
                assert not (self.scheduler.queue or starved)
                assert self.cache.available >= self.scheduler.reserve_slots
            return batch

        def launched_and_released(batch):
            launched(batch)
            self.hints.release()
            if self.warmed is not None:
                arriving = sum(ticket.filled for ticket in batch.swap_in)
                self.available.append((self.warmed, self.cache.available + arriving))
        self.scheduler.schedule, self.scheduler.launched = schedule_and_fill, launched_and_released


@pytest.mark.parametrize("places", [0, 4, 16])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_hint_takes_no_slot_from_the_next_step(depth, places, seed):
    """Behind each step with a warm-up as many slots are available as before it. (Those to which KV is copied
    count: they are available when the copy has ended.) The fake worker checks what every span reads."""
    world = Typing(slots=48, places=places, chunk=4, depth=depth, seed=seed, rows=6, reserve=0.2)
    rng = random.Random(seed)
    names = "abcdef"
    for step in range(400):
        name = rng.choice(names)
        conversation = world.cache.open(name)
        busy = step // 40 % 2                       # now there is little to do, now too much
        if rng.random() < (0.4 if busy else 0.1) and conversation.order not in world.scheduler.unfinished:
            if len(conversation.tokens) > 30:
                world.cache.forget(conversation)
            else:
                world.submit(name, rng.randint(1, 8), max_tokens=rng.randint(1, 16))
        elif rng.random() < 0.3 and PLACEHOLDER not in conversation.tokens:
            world.hints.give(conversation, world.now)
        world.step()
    assert len(world.available) > 4 and world.hints.stats["warmed_tokens_recomputed"] > 0
    assert all(after >= before for before, after in world.available)


def test_a_chunk_that_another_user_computes_is_not_marked():
    """y is a fork of x. A turn of x recomputes what they share, and so does y's hint beside it."""
    engine = small(gpu_cache_tokens=64, cpu_cache_tokens=0)
    x = engine.generate(ids(10), "x", max_tokens=3, ignore_eos=True)
    engine.generate(ids(2), "y", context=ids(10) + x.token_ids, parent="x", max_tokens=1, ignore_eos=True)
    x, y = (engine.cache.conversations[name] for name in "xy")
    for chunk in x.chunks:
        engine.cache.reclaim(chunk)
    turn = engine.submit(ids(1), "x", max_tokens=3, ignore_eos=True)
    engine.warm("y")
    assert str(engine.step()).endswith("x[0:14] y[0:2]") and x.chunks[0] is y.chunks[0]
    assert not any(chunk.evictable_without_copy for chunk in x.chunks)
    turn.result()


@pytest.mark.parametrize("places", [0, 64])
def test_a_chunk_that_a_warm_up_fills_further_can_be_taken_back(places):
    """A turn was stopped when it had recomputed 4 tokens of a chunk of 32. Later the chunk was copied."""
    engine = small(gpu_cache_tokens=128, cpu_cache_tokens=places * 32, chunk_size=32, max_batch_tokens=2,
                   swap_threshold=0.99 if places else 0.0)
    engine.generate(ids(40), "a", max_tokens=3, ignore_eos=True)
    a = engine.cache.conversations["a"]
    engine.cache.drop_all(a)
    turn = engine.submit(ids(2), "a", max_tokens=3)
    engine.step(), engine.step()
    turn.cancel()
    settle(engine)
    assert [(chunk.state, chunk.filled) for chunk in a.chunks][:1] == [
        ("GPU_AND_CPU" if places else "GPU", 4)]
    before = engine.cache.available
    engine.warm("a")
    for _ in range(14):
        engine.step()
        assert engine.cache.available >= before
    assert a.chunks[0].filled == 32


# ---- answers never depend on it

@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_answers_are_exact(checkpoint, switches):  # noqa: F811
    directory, model = checkpoint
    flags = dict(gpu_cache_tokens=256, cpu_cache_tokens=160, chunk_size=8, max_batch_tokens=48, max_running=4)
    engine = Engine(directory, cost=COST, debug=True, clock=count().__next__, **flags | switches)
    rng, histories = random.Random(1), {name: [] for name in "abcde"}
    for number in range(8):
        engine.depth = number % 2
        chosen, handles = rng.sample("abcde", 4), {}
        for name in chosen:
            if histories[name]:
                engine.warm(name)
            for _ in range(rng.randrange(4)):
                engine.step()
            prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 24))]
            handle = engine.submit(prompt, name, max_tokens=rng.randint(1, 9), ignore_eos=True)
            handles[name] = histories[name] + prompt, handle
        for name, (context, handle) in handles.items():
            reply = handle.result()
            assert_exact(model, context, reply.token_ids)
            histories[name] = context + reply.token_ids
        assert max(map(len, histories.values())) < CONTEXT
    assert switches.get("stateless") or engine.stats()["hints"] > 10
    engine.close()


# ---- sessions

@pytest.fixture
def sessions():
    sessions = Sessions("tiny_chat", cost=COST, debug=True, gpu_cache_tokens=512, cpu_cache_tokens=512)
    yield sessions
    sessions.close()


def test_a_conversation_that_the_engine_has_forgotten_is_warmed_from_the_history(sessions):
    first = sessions.chat("My lucky number is 4711.", "c", max_tokens=8)
    sessions.engine.forget("c")
    assert "c" not in sessions.engine.cache.conversations
    length = first.usage["prompt_tokens"] + len(first.token_ids)
    assert sessions.warm("c") == dict(gpu=0, cpu=0, recomputed=length - 1)
    settle(sessions.engine)
    usage = sessions.chat("What is it?", "c", max_tokens=8).usage
    assert (usage["gpu"], usage["recomputed"]) == (length - 1, 0)
    with pytest.raises(KeyError):
        sessions.warm("d")
    sessions.create("d", {})
    assert sessions.warm("d") == NOTHING


def test_a_hint_sees_no_change_of_the_history_by_halves(sessions, monkeypatch):
    """While somebody has claimed the conversation, or if it is deleted while we read its tokens."""
    sessions.chat("My lucky number is 4711.", "c", max_tokens=8)
    sessions.engine.forget("c")
    assert sessions._alone("c", lambda: sessions.warm("c")) == NOTHING
    read = sessions.history.tokens

    def read_and_delete(turn_id):
        tokens = read(turn_id)
        sessions.forget("c")
        return tokens
    monkeypatch.setattr(sessions.history, "tokens", read_and_delete)
    assert sessions.warm("c") == NOTHING and "c" not in sessions.engine.cache.conversations


def test_a_cold_conversation_is_held_while_its_hint_waits(sessions):
    """Somebody is in the queue, so nothing of the hint happens in its first steps."""
    sessions.chat("My lucky number is 4711.", "c", max_tokens=8)
    engine = sessions.engine
    engine.forget("c")
    long = engine.submit(ids(300, 2), max_tokens=30, ignore_eos=True)
    queued = engine.submit(ids(200, 2), max_tokens=3, ignore_eos=True)
    engine.step()
    sessions.warm("c")
    engine.step()
    assert "c" in engine.cache.conversations
    long.result(), queued.result()
    settle(engine)
    assert engine.cache.conversations["c"].cached()[0] > 20


def test_a_hint_shares_what_others_of_its_tenant_have(sessions):
    """Two chats that begin alike: the second one's hint recomputes only what is its own."""
    text = "My favourite food is ramen, and I say so at some length, so that it fills chunks."
    for name, end in (("c", "Yes."), ("d", "No.")):
        sessions.chat(text + end, name, max_tokens=8)
    sessions.engine.forget("d")
    sessions.warm("d")
    settle(sessions.engine)
    c, d = (sessions.engine.cache.conversations[name] for name in "cd")
    assert d.chunks[0] is c.chunks[0]
    assert sessions.engine.stats()["warmed_tokens_recomputed"] < len(d.tokens) - 32


def test_only_so_many_hints_hold_for_one_key(sessions, monkeypatch):
    """The others are ignored. A turn frees the place of its hint."""
    monkeypatch.setattr(sessions_file, "MOST_HINTS", 2)
    for name in ("k1-a", "k1-b", "k1-c", "k2-a"):
        sessions.chat("Hi.", name, max_tokens=4)
    assert [sessions.warm(name, name[:3]) == NOTHING for name in ("k1-a", "k1-b", "k1-c", "k2-a")] == [
        False, False, True, False]
    sessions.chat("Hi.", "k1-a", max_tokens=4)
    assert sessions.warm("k1-c", "k1-") != NOTHING


def test_hints_that_are_over_do_not_count(sessions, monkeypatch):
    """Nobody steps meanwhile."""
    monkeypatch.setattr(sessions_file, "MOST_HINTS", 2)
    sessions.engine.clock = clock = Clock()
    for name in "abc":
        sessions.chat("Hi.", name, max_tokens=4)
    assert sessions.warm("a") != NOTHING and sessions.warm("b") != NOTHING
    assert sessions.warm("c") == NOTHING
    clock.now += SECONDS
    assert sessions.warm("c") != NOTHING


def test_hints_turns_and_deletions_from_many_threads(sessions):
    sessions.start()
    names, failures = [f"c{i}" for i in range(6)], []

    def client(number):
        rng = random.Random(number)
        for _ in range(20):
            name = rng.choice(names)
            try:
                action = rng.choice(["chat", "warm", "warm", "forget"])
                if action == "chat":
                    sessions.chat("Hi, how are you?", name, max_tokens=6)
                elif action == "warm":
                    sessions.warm(name)
                elif rng.random() < 0.3:
                    sessions.forget(name)
            except KeyError:
                pass
            except Exception as error:
                failures.append(error)
    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == [] and not sessions.engine.failure
