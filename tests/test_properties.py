"""Property tests of cache and scheduler: whatever comes in whatever order, nothing is lost and nothing
stale is believed."""
from hypothesis import HealthCheck, given, settings, strategies as st

from eviction import POLICIES
from fakes import World, answer
from scheduler import PLACEHOLDER

NAMES, BRANCHES = "abc", "xyz"
names = st.sampled_from(NAMES + BRANCHES)
actions = st.lists(min_size=20, max_size=150, elements=st.one_of(
    st.tuples(st.just("submit"), names, st.integers(1, 20), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("one-off"), st.integers(1, 12), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("fork"), names, st.sampled_from(BRANCHES), st.integers(0, 30), st.integers(0, 9),
              st.integers(1, 9)),
    st.tuples(st.just("again"), st.integers(0, 30), st.sampled_from(BRANCHES)),
    st.tuples(st.just("step"), st.integers(1, 6), st.sampled_from([0.0, 0.001, 1.0, 1000.0])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("forget"), names),
))
worlds = st.fixed_dictionaries(dict(
    slots=st.integers(20, 70), places=st.sampled_from([0, 1, 2, 5, 12, 40]),
    chunk=st.sampled_from([1, 3, 4, 8]), rows=st.integers(1, 4),
    policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 9),
    swap_threshold=st.sampled_from([0.0, 0.25, 0.6]),
    prefix=st.sampled_from([0, 0, 6, 10]).map(range), reserve=st.sampled_from([0.0, 0.1]),
    depth=st.sampled_from([0, 1]), stop_ids=st.sampled_from([(), range(0, 50, 6)]),
    stateless=st.booleans(), separate_phases=st.booleans(), max_batch_tokens=st.sampled_from([4, 16])))


def act(world, requests, action):
    known, (kind, *arguments) = world.cache.conversations, action
    if kind in ("submit", "one-off"):
        name, prompt, max_tokens, prefixed = arguments if kind == "submit" else (None, *arguments)
        requests.append(world.submit(name, world.prefix + [3] * prompt if prefixed else prompt, max_tokens))
    elif kind == "fork" and arguments[0] in known and arguments[1] not in known:
        parent, name, length, more, prompt = arguments
        child = world.fork(parent, name, length, [9] * more)
        child.base = child.tokens[:]
        requests.append(world.submit(name, prompt, 3))
    elif kind == "again" and requests and arguments[1] not in known:
        like = requests[arguments[0] % len(requests)]
        context = [token for token in like.conversation.tokens if token != PLACEHOLDER]
        requests.append(world.submit(arguments[1], [*context, *like.prompt], 3, like))
    elif kind == "step":
        for _ in range(arguments[0]):
            world.step(arguments[1])
    elif kind == "cancel" and requests:
        world.scheduler.cancel(requests[arguments[0] % len(requests)], world.now)
    elif kind == "forget" and (conversation := known.get(arguments[0])):
        for request in list(world.scheduler.unfinished.get(conversation.order, ())):
            world.scheduler.cancel(request, world.now)
        world.cache.forget(conversation)
    world.cache.check_integrity()


def land_some(random):
    return lambda tickets: [ticket for ticket in tickets if random.random() < 0.4]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds, actions, st.randoms(use_true_random=False))
def test_anything_in_any_order(parameters, todo, random):
    """FakeWorker checks that everything a span reads is in its slot; here: no deadlock, order kept, every
    request ends, answers exact."""
    world, requests = World(land=land_some(random), **parameters), []
    for action in todo:
        act(world, requests, action)
    world.run(steps=5000)
    answered = {request.conversation for request in requests if request.finish_reason in ("length", "stop")}
    for conversation in world.cache.conversations.values():
        # The last token of a reply has no KV. A fork without a reply keeps tokens that all have had KV.
        most = len(conversation.tokens) - (conversation in answered)
        assert conversation.known <= most
    for request in requests:
        assert request.finish_reason in ("length", "stop", "cancelled", "failed")
        if request.finish_reason in ("length", "stop"):
            *before, last = request.generated
            assert not world.stop_ids.intersection(before)
            assert (request.finish_reason == "stop") == (last in world.stop_ids)
            assert len(before) + 1 == request.max_tokens or request.finish_reason == "stop"
        assert (request.finish_reason == "failed") == (request.error is not None)
        if request.usage and request.finish_reason in ("length", "stop"):
            assert sum(request.usage.values()) == request.tokens_before + len(request.prompt)
            assert min(request.usage.values()) >= 0
    for conversation in world.cache.conversations.values():
        tokens = conversation.tokens
        finished = [request for request in requests if request.conversation is conversation
                    and request.finish_reason in ("length", "stop")]
        expected = list(getattr(conversation, "base", ()))
        for request in finished:                       # what a run of these turns alone would have given
            expected += request.prompt
            for _ in request.generated:
                expected.append(answer(tokens[:len(expected)]))
        assert tokens.tolist() == expected
        assert [r.arrival for r in finished] == sorted(r.arrival for r in finished)
    everyone = [world.cache.designated, *world.cache.conversations.values()]
    chunks = {chunk for conversation in everyone for chunk in conversation.chunks}
    kept = sum(len(chunk.slots) for chunk in chunks if chunk.next_move == "swap_out" or chunk.pinned)
    assert world.cache.available == world.cache.num_slots - kept
