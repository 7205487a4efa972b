"""Any common beginning is found: by the ids of full chunks, among the conversations of one tenant."""
import random
from contextlib import closing
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import sharing
from engine import Engine
from eviction import RecomputeCost
from experiments.beginnings import KINDS, Client, retries
from fakes import World, answer
from scheduler import PLACEHOLDER
from serving.sessions import Sessions
from test_kv_cache import copy, grow_to
from test_sharing import make


def owned(cache, name, tenant, tokens):
    """A conversation whose prompt has joined. It does not run yet."""
    conversation = cache.open(name)
    cache.own(conversation, tenant)
    assert cache.extend(conversation, tokens)
    return conversation


def run_to_end(cache, conversation, now=0.0):
    """-> how many tokens were cached before."""
    total = len(conversation.tokens)
    cache.admit(conversation, total, now)
    cached = sum(conversation.cached())
    for chunk in conversation.chunks:
        if chunk.filled < min(4, total - 4 * chunk.index):
            end = min(4 * chunk.index + 4, total)
            cache.computed(conversation, 4 * chunk.index + chunk.filled, end)
    cache.release(conversation, now)
    cache.check_integrity()
    return cached


# ---- the index

def test_full_chunks_of_one_tenant_are_found_by_their_ids():
    cache = make(slots=64)
    a = owned(cache, "a", "ada/", range(14))
    run_to_end(cache, a)
    b = owned(cache, "b", "ada/", [*range(10), 99])
    assert b.chunks == a.chunks[:2]
    assert not owned(cache, "c", "bob/", range(14)).chunks      # another tenant's are never used
    d = cache.open("d")
    assert cache.extend(d, range(14)) and not d.chunks          # nobody's
    assert not owned(cache, "e", "ada/", [99, *range(1, 14)]).chunks
    run_to_end(cache, b)
    cache.forget(a)
    assert owned(cache, "f", "ada/", range(9)).chunks == b.chunks[:2]       # b has them still
    for name in "bdef":
        cache.forget(cache.open(name))
    assert not owned(cache, "g", "ada/", range(14)).chunks
    for name in "cg":
        cache.forget(cache.open(name))
    assert not (cache.beginnings.chunks or cache.beginnings.keys or cache.beginnings.roots)
    assert len(cache.free_slots) == 64


def test_the_tail_is_copied_from_whoever_goes_on_most_alike():
    cache = make(slots=64)
    for name, own in dict(a=[8, 9, 77], b=[8, 9, 10], c=[8, 66, 66]).items():
        run_to_end(cache, owned(cache, name, "", [*range(8), *own]))
    d = owned(cache, "d", "", [*range(11), 99])
    assert run_to_end(cache, d) == 11 and len(cache.take_slot_copies()) == 2 + 1 + 3


def test_a_reply_is_found_too():
    cache = make(slots=64)
    a = owned(cache, "a", "", range(6))
    cache.admit(a, 6, 0.0)
    cache.computed(a, 0, 6)
    a.tokens.extend([50, 51, 52])
    assert cache.grow(a, 0.0)
    cache.computed(a, 6, 8)
    cache.release(a, 0.0)
    assert owned(cache, "b", "", [*range(6), 50, 51, 99]).chunks == a.chunks[:2]


def test_a_beginning_that_is_being_computed_is_waited_for_and_no_more():
    cache = make(slots=64)
    a = owned(cache, "a", "", range(20))
    cache.admit(a, 20, 0.0)
    b = cache.open("b")
    cache.own(b, "")
    assert not cache.extend(b, [*range(9), 99]) and not b.tokens
    cache.computed(a, 0, 7)
    assert not cache.extend(b, [*range(9), 99])
    cache.computed(a, 7, 8)                                     # a has 12 tokens left to compute
    assert cache.extend(b, [*range(9), 99]) and b.chunks == a.chunks[:2]


def test_nobody_waits_for_a_conversation_that_was_suspended():
    cache = make(slots=64)
    a = owned(cache, "a", "", range(20))
    cache.admit(a, 20, 0.0)
    cache.computed(a, 0, 6)
    cache.release(a, 1.0)
    assert owned(cache, "b", "", range(20)).chunks == a.chunks[:1]
    cache.check_integrity()


def test_what_was_evicted_in_front_is_shared_and_computed_once():
    """Pensieve evicts the leading end first. Behind it the chunks are found all the same."""
    cache = make(slots=24, places=0)
    a = owned(cache, "a", "", range(14))
    run_to_end(cache, a)
    copy(cache, 12)
    grow_to(cache, cache.open("other"), 14, 11.0)
    assert [chunk.filled for chunk in a.chunks] == [0, 4, 4, 2]
    cache.forget(cache.open("other"))
    b = owned(cache, "b", "", [*range(12), 99])
    assert b.chunks == a.chunks[:3] and run_to_end(cache, b) == 8
    assert [chunk.filled for chunk in a.chunks] == [4, 4, 4, 2]


def test_a_conversation_whose_beginning_was_evicted_takes_what_another_has_computed_since():
    cache = make(slots=32, places=0)
    a = cache.open("a")                         # without a tenant: nobody finds its chunks
    cache.extend(a, range(14))
    run_to_end(cache, a)
    copy(cache, 22)
    grow_to(cache, cache.open("other"), 22, 11.0)
    assert [chunk.filled for chunk in a.chunks] == [0, 4, 4, 2]
    cache.forget(cache.open("other"))
    b = owned(cache, "b", "", range(9))
    run_to_end(cache, b)
    cache.own(a, "")
    assert cache.extend(a, [99, 98]) and a.chunks[0] is b.chunks[0]
    assert a.chunks[1] is not b.chunks[1]       # it had this one
    assert run_to_end(cache, a) == 14


def test_a_chunk_that_is_cut_is_found_no_more():
    cache = make(slots=64)
    a = owned(cache, "a", "", range(14))
    run_to_end(cache, a)
    cache.truncate(a, 7, 6)
    cache.extend(a, [77, 78])
    assert len(owned(cache, "b", "", range(14)).chunks) == 1
    cache.check_integrity()
    run_to_end(cache, a)
    assert len(owned(cache, "c", "", [*range(7), 77, 78]).chunks) == 2


def test_the_designated_prefix_and_the_index_together():
    cache = make(slots=64)
    cache.designate(range(9))
    a, b = owned(cache, "a", "ada/", range(18)), cache.open("b")
    cache.admit(a, 18, 0.0)
    cache.own(b, "bob/")
    assert cache.extend(b, range(18)) and b.chunks == cache.designated.chunks   # bob waits for nobody
    cache.computed(a, 0, 18)
    cache.release(a, 1.0)
    c = owned(cache, "c", "ada/", range(18))
    assert c.chunks == a.chunks[:4] and a.chunks[0].users == (cache.designated,)
    cache.check_integrity()


def test_a_turn_that_waits_shares_nothing_yet():
    """c's first turn waits for a, and is cancelled. Its second one begins otherwise."""
    world = World(slots=96, prefix=range(8))
    world.submit("a", [*world.prefix, *range(10, 40)], tenant="x")
    world.step()                                                # 16 tokens of 38
    waits = world.submit("c", [*world.prefix, *range(10, 42)], tenant="x")
    other = world.submit("c", range(20, 49), tenant="x")
    world.step()
    assert waits.admitted is None and not waits.conversation.chunks
    world.scheduler.cancel(waits, world.now)
    world.run()
    assert other.conversation.tokens[:29].tolist() == [*range(20, 49)] and other.usage["gpu"] == 0
    assert other.generated[0] == answer(other.conversation.tokens[:29])


@pytest.mark.parametrize("order", ["like", "the fork's tenant first", "the origin's tenant later"])
def test_conversations_of_two_tenants_share_nothing(order):
    cache = make(slots=64)
    a = cache.open("a")
    if order == "like":
        cache.own(a, "ada/")
    cache.extend(a, range(14))
    run_to_end(cache, a)
    if order == "like":
        b = cache.open("b")
        cache.own(b, "bob/")
        cache.follow(b, a)
        assert cache.extend(b, range(14)) and not b.chunks
        assert run_to_end(cache, b) == 0 and not cache.take_slot_copies()
    else:
        b = cache.fork(a, "b", a.tokens[:9])                    # nobody's, as a is
        cache.own(*((b, "bob/") if order == "the fork's tenant first" else (a, "ada/")))
        assert cache.extend(b, [77]) and b.chunks == a.chunks[:2]
        run_to_end(cache, b)
        assert not owned(cache, "c", "bob/", range(14)).chunks
        assert not owned(cache, "d", "ada/", range(14)).chunks
    check_tenants(cache)
    cache.check_integrity()


def test_a_fork_may_have_a_tenant_of_its_own_before_it_shares_anything():
    cache = make(slots=64)
    a = cache.open("a")
    cache.extend(a, range(14))
    run_to_end(cache, a)
    b = cache.fork(a, "b", a.tokens[:3])
    cache.own(b, "bob/")
    assert cache.extend(b, [*range(3, 14), 77]) and not b.chunks
    assert run_to_end(cache, b) == 0 and not cache.take_slot_copies()
    assert owned(cache, "c", "bob/", range(14)).chunks == b.chunks[:3]


def test_of_two_chunks_with_the_same_tokens_the_one_with_kv_is_found():
    """a and b give the same reply. a's is evicted; b, which has it still, returns."""
    cache = make(slots=64, places=0)
    a, b = (owned(cache, name, "", range(5)) for name in "ab")
    for one in (a, b):
        cache.admit(one, 5, 0.0)
        cache.computed(one, 4 * (one is b), 5)
        one.tokens.extend(range(5, 14))
        assert cache.grow(one, 0.0)
        cache.computed(one, 5, 13)
        cache.release(one, 0.0)
    assert a.chunks[1] is not b.chunks[1]
    cache.reclaim(a.chunks[1])
    assert cache.extend(b, [99])
    run_to_end(cache, b)
    cache.check_integrity()
    assert owned(cache, "c", "", range(10)).chunks[1] is b.chunks[1]


def test_a_chunk_whose_recomputation_was_suspended_is_found():
    cache = make(slots=16, places=0)
    a = owned(cache, "a", "", range(9))
    run_to_end(cache, a)
    copy(cache, 9)
    grow_to(cache, cache.open("other"), 16, 11.0)
    cache.forget(cache.open("other"))
    cache.extend(a, [9])
    cache.admit(a, 10, 12.0)
    cache.computed(a, 0, 2)
    cache.release(a, 13.0)
    assert [chunk.filled for chunk in a.chunks] == [2, 0, 0]
    b = owned(cache, "b", "", [*range(8), 99])
    assert b.chunks == a.chunks[:2] and run_to_end(cache, b) == 2 and a.cached() == (8, 0)


# ---- many users of one chunk

def test_thousands_begin_alike():
    """A chunk has MOST_USERS. Others leave it, the most idle ones first. They are forgotten when nothing else
    of them is cached, and they find the beginning again when they return."""
    cache, most = make(slots=600, places=0, chunk=4), sharing.MOST_USERS
    everyone = []
    for n in range(100):
        everyone.append(owned(cache, str(n), "", [*range(8), 100 + n]))
        run_to_end(cache, everyone[n], now=float(n))
    last = everyone[-1]
    assert [len(chunk.users) for chunk in last.chunks] == [most, most, 1]
    assert len(cache.free_slots) == 600 - 8 - 100 and not cache.cold_conversations()
    assert everyone[1].chunks[0].state is None and everyone[1].chunks[2].state == "GPU"
    assert cache.extend(everyone[1], [7]) and everyone[1].chunks[0] is last.chunks[0]
    assert run_to_end(cache, everyone[1], 200.0) == 9
    for conversation in everyone[2:]:
        cache.reclaim(conversation.chunks[2])                   # its own
    cold = cache.cold_conversations()
    assert len(cold) >= 100 - 1 - most and not {everyone[1], last} & {*cold}
    cache.check_integrity()


@pytest.mark.parametrize("why", ["runs", "waits", "tenant"])
def test_who_does_not_leave_a_chunk(why, monkeypatch):
    monkeypatch.setattr(sharing, "MOST_USERS", 2)
    cache = make(slots=64)
    a = owned(cache, "a", "", range(9))
    run_to_end(cache, a)
    if why == "tenant":
        b = cache.fork(a, "b", a.tokens)
        del cache.beginnings.roots[a], cache.beginnings.roots[b]
    else:
        b = owned(cache, "b", "", range(9))
        for user in (a, b):
            cache.set_waiting(user, True)
            if why == "runs":
                cache.admit(user, len(user.tokens), 1.0)
    c = owned(cache, "c", "", range(9))
    assert a.chunks[0].users == (a, b, c)
    cache.check_integrity()


def test_a_fork_of_a_conversation_that_left_a_chunk_finds_the_chunk(monkeypatch):
    monkeypatch.setattr(sharing, "MOST_USERS", 2)
    cache = make(slots=64)
    a, _, c = (cache.open(name) for name in "abc")
    for now, name in enumerate("abc"):
        run_to_end(cache, owned(cache, name, "", range(9)), float(now))     # c comes: a leaves
    fork = cache.fork(a, "fork", a.tokens)
    assert fork.chunks[0] is a.chunks[0] and not a.chunks[0].filled
    assert cache.extend(fork, [9, 10]) and fork.chunks[0] is c.chunks[0] and a.chunks[0].users == (a,)
    cache.check_integrity()


# ---- anything in any order

steps = st.lists(min_size=20, max_size=120, elements=st.one_of(
    st.tuples(st.just("turn"), st.sampled_from(["ada/", "bob/", None]), st.integers(0, 9),
              st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 8)),
    st.tuples(st.just("step"), st.integers(1, 6), st.sampled_from([0.0, 1.0, 1000.0])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("forget"), st.integers(0, 30)),
    st.tuples(st.just("cold")),
))
worlds = st.fixed_dictionaries(dict(
    slots=st.integers(40, 80), places=st.sampled_from([0, 2, 5, 12]), chunk=st.sampled_from([1, 3, 4]),
    rows=st.integers(1, 4), policy=st.sampled_from(["retention", "lru", "trailing", "trailing-half"]),
    prefix=st.sampled_from([0, 0, 6]).map(range), depth=st.sampled_from([0, 1]),
    stop_ids=st.sampled_from([(), range(0, 50, 6)]), seed=st.integers(0, 9),
    swap_threshold=st.sampled_from([0.0, 0.25, 0.6]), max_batch_tokens=st.sampled_from([4, 16])))


def prompt_of(pieces):
    """Few different ones, so that many begin alike: piece n is n tokens."""
    return [7 * n % 50 for piece in pieces for n in range(piece)]


def check_tenants(cache):
    """No chunk has users of two tenants, nor of two names' prefixes (a one-off has no name)."""
    for conversation in cache.conversations.values():
        for chunk in conversation.chunks:
            users = [user for user in chunk.users if user is not cache.designated]
            assert len({cache.beginnings.roots.get(user) for user in users}) <= 1
            assert len({str(user.name)[:-1].rpartition("/")[0] for user in users if not user.one_off}) <= 1


patient = settings(deadline=None, suppress_health_check=list(HealthCheck))
by_chance = given(worlds, steps, st.randoms(use_true_random=False), st.sampled_from([2, 16]))


@settings(patient, max_examples=150)
@by_chance
def test_whoever_begins_alike(parameters, todo, chance, most_users):
    """FakeWorker checks that all that a span reads is in its slot. Here: each reply is that of a lone run
    over the same tokens, no chunk has users of two tenants, nobody waits for ever, and nothing is lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "MOST_USERS", most_users)
        world = World(land=lambda tickets: [one for one in tickets if chance.random() < 0.4], **parameters)
        requests, cache = [], world.cache
        for kind, *arguments in todo:
            if kind == "turn":
                tenant, n, pieces, max_tokens = arguments
                prompt = world.prefix + prompt_of(pieces)
                requests.append(world.submit(f"{tenant or ''}{n}", prompt, max_tokens, tenant=tenant))
            elif kind == "step":
                for _ in range(arguments[0]):
                    world.step(arguments[1])
            elif kind == "cancel" and requests:
                world.scheduler.cancel(requests[arguments[0] % len(requests)], world.now)
            elif kind == "forget" and requests:
                conversation = requests[arguments[0] % len(requests)].conversation
                for request in list(world.scheduler.unfinished.get(conversation.order, ())):
                    world.scheduler.cancel(request, world.now)
                cache.forget(conversation)
            elif kind == "cold":
                for conversation in cache.cold_conversations():
                    cache.forget(conversation)
            cache.check_integrity()
            check_tenants(cache)
        world.run(steps=5000)
        for request in requests:
            tokens, reply = request.conversation.tokens, request.generated
            if request.finish_reason in ("length", "stop") and len(tokens):
                begin = request.tokens_before + len(request.prompt)
                assert PLACEHOLDER not in tokens
                if tokens[begin:begin + len(reply)].tolist() == reply:      # it was not forgotten since
                    for i, token in enumerate(reply):
                        assert token == answer(tokens[:begin + i])
            assert request.finish_reason
        for conversation in list(cache.conversations.values()):
            cache.forget(conversation)
        world.run()
        in_prefix = sum(len(chunk.slots) for chunk in cache.designated.chunks)
        places = sum(chunk.place is not None for chunk in cache.designated.chunks)
        assert len(cache.free_slots) == cache.num_slots - in_prefix
        assert len(cache.free_places) == cache.num_places - places
        assert not cache.beginnings.keys and not cache.beginnings.roots


test_very_many_begin_alike = pytest.mark.slow(settings(patient, max_examples=1000)(
    by_chance(test_whoever_begins_alike.hypothesis.inner_test)))


# ---- through Sessions

ROOMY = dict(cost=RecomputeCost({32: 1e-3, 1024: 4e-3}, rest=1e-3), gpu_cache_tokens=512,
             cpu_cache_tokens=256, chunk_size=8, max_batch_tokens=32, debug=True)
SYSTEM = dict(role="system", content="Be brief, and kind to all who ask you for anything.")


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


def cached(turn):
    return turn.result().usage["gpu"] + turn.result().usage["cpu"]


@pytest.fixture
def sessions():
    with closing(Sessions("tiny_chat", **ROOMY)) as sessions:
        yield sessions


def test_any_common_beginning_of_one_tenant_is_found(sessions):
    ask = partial(sessions.respond, max_tokens=6)
    first = ask([SYSTEM, user("Hi, I'm Zorbella.")])
    again = ask([SYSTEM, user("Hi, I'm Zorbella.")], keep=False)            # the first answer once more
    assert cached(first) == 0 and again.result().token_ids == first.result().token_ids
    assert again.result().usage["new"] == 1
    other = ask([SYSTEM, user("Bye!")])                                     # another chat
    assert cached(other) > 20 and other.result().usage["new"] < 20
    altered = [SYSTEM, user("Hi, I'm Ada."), assistant(first.result().text), user("So?")]
    assert cached(ask(altered)) > 20
    assert cached(ask([SYSTEM, user("Bye!")], prefix="key/")) == 0          # another key
    assert cached(ask([SYSTEM, user("Bye!")], prefix="key/")) > 20


def test_a_salt_separates(sessions):
    ask = partial(sessions.respond, max_tokens=6)
    first = ask([SYSTEM, user("Hi")], salt="x")
    told = [SYSTEM, user("Hi"), assistant(first.result().text), user("And?")]
    for salt in ("", "y"):
        assert cached(ask([SYSTEM, user("Hi")], salt=salt)) == 0
        assert cached(ask([SYSTEM, user("Hi")], salt=salt)) > 20
    second = ask(told, salt="x")
    assert second.conversation == first.conversation and cached(second) > cached(ask(told, salt="z")) == 0
    sessions.engine.forget(first.conversation)                  # it lives in the history alone
    third = ask([user("More")], first.conversation)             # the first turn's salt counts
    assert third.plan.salt == "x" and third.result().usage["recomputed"] > 0
    told += [assistant(second.result().text), user("More")]
    assert cached(ask(told)) < second.result().usage["prompt_tokens"] <= cached(ask(told, salt="x"))


def test_a_choice_of_a_salted_answer_is_salted(sessions):
    first = sessions.respond([SYSTEM, user("Hi")], salt="x", max_tokens=6)
    other = sessions.another(first, max_tokens=6)
    assert other.result().token_ids == first.result().token_ids
    sessions.forget(first.conversation)
    assert cached(sessions.respond([SYSTEM, user("Hi")], max_tokens=6)) == 0
    assert cached(sessions.respond([SYSTEM, user("Hi")], salt="x", max_tokens=6)) > 20


def test_the_stateless_engine_shares_nothing():
    with closing(Sessions("tiny_chat", stateless=True, **ROOMY)) as sessions:
        turns = [sessions.respond([SYSTEM, user("Hi")], max_tokens=6) for _ in range(3)]
        assert [cached(turn) for turn in turns] == [0, 0, 0]


@pytest.mark.parametrize("depth, rounds", [(0, 40), (1, 40),
                                           *(pytest.param(depth, 400, marks=pytest.mark.slow)
                                             for depth in (0, 1))])
def test_clients_that_resend_in_another_form_get_the_right_replies(depth, rounds, checkpoint):
    """Starved tiers, two keys, several turns at once, some are cancelled. Each reply is that of an engine
    with nobody else there, over the same token ids; no chunk has users of two keys."""
    chance = random.Random(depth)
    flags = dict(cost=ROOMY["cost"], device="cpu", dtype="float32", chunk_size=8)
    sessions = Sessions(checkpoint, gpu_cache_tokens=192, cpu_cache_tokens=96, max_batch_tokens=48,
                        max_running=3, debug=True, **flags)
    lone, cache = Engine(checkpoint, gpu_cache_tokens=256, cpu_cache_tokens=0, **flags), sessions.engine.cache
    sessions.engine.depth = depth
    sessions.engine.watchers.append(lambda batch: check_tenants(cache))
    told, found = {"ada/": [[SYSTEM]], "bob/": [[SYSTEM]]}, 0
    for _ in range(rounds):
        turns = []
        for prefix in chance.choices(["ada/", "bob/"], k=chance.randint(1, 3)):
            messages = [*chance.choice(told[prefix][-6:])]
            if len(messages) > 5:
                messages = messages[:chance.choice([1, 3, 5])]
            if chance.random() < 0.2:           # an earlier reply in other words
                messages[-1] = dict(messages[-1], content=messages[-1]["content"] + "!")
            messages.append(user(chance.choice(["Hi", "So?", "Go on, please", "Hi"])))
            options = dict(max_tokens=chance.randint(1, 10), ignore_eos=True, prefix=prefix,
                           stop=chance.choice([(), "a", "e t"]), salt=chance.choice(["", "", "x"]),
                           keep=chance.random() < 0.8)
            turn = sessions.respond(messages, **options)
            after = turn.plan.after if turn.plan.context_length else None
            context = sessions.history.tokens(after.id).tolist() if after else []
            turns.append((messages, prefix, turn, context + turn.plan.prompt))
        for _, _, turn, _ in turns:
            if chance.random() < 0.15:
                turn.cancel()
        for messages, prefix, turn, context in turns:
            reply = turn.result()
            if reply.finish_reason != "cancelled":
                found += cached(turn) > turn.plan.context_length
                expected = lone.generate(context, max_tokens=len(reply.token_ids), ignore_eos=True)
                assert reply.token_ids == expected.token_ids
                text = chance.choice([str, str.strip])(reply.text)
                told[prefix].append([*messages, assistant(text)])
    stats = sessions.engine.stats()
    assert found > rounds / 4
    assert min(stats["prompt_tokens_" + source] for source in ("gpu", "cpu", "recomputed")) > 0
    for name in sessions.history.conversations():
        sessions.forget(name)
    assert sessions.engine.stats()["slots_free"] == 192
    sessions.close()


@pytest.mark.slow
@pytest.mark.parametrize("play", [play for play in KINDS.values() if play is not retries])
def test_no_less_is_cached_than_by_the_rule_of_vllm(play):
    """The table of BENCHMARKS.md, with fewer turns. (A turn that was cancelled leaves nothing.)"""
    client = Client()
    play(client, 3)
    assert client.prompt > client.cached >= client.vllm > 0
    client.sessions.close()
