"""Lab 7: an engine of one's own under a load of users. All of a student's files count, as they are.

What is measured comes from the worker and its clock, and from what the users see."""
import heapq
import math
import random
import statistics
from typing import NamedTuple

import pytest
import torch  # noqa: F401      engine.py needs it: so the grader imports it once, for all tests

from checking_worker import VOCABULARY, CheckingWorker, full_recompute
from engine import Engine
from experiments.my_server import open_engine
from grading import SEED

points = pytest.mark.points
QUIET = 1000            # so many steps in a row without a span: nothing will ever happen
PAUSE = 0.01            # seconds of a step that does nothing: an engine may wait for the clock
LOADS = 3
COUNTED = ("busy_seconds", "sampled", "out_ends")       # what a worker changes as it runs


class Turn(NamedTuple):
    prompt: list[int]
    reply: int                          # tokens
    think: float                        # seconds from this reply to the next turn


class User(NamedTuple):
    arrival: float
    turns: list[Turn]


# ---- loads

def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return 1 + min(int(median * rng.lognormvariate(0, sigma)), most)


def users(rng: random.Random, count: int, seconds: float, limit: int) -> list[User]:
    """They come within so many seconds. A conversation begins with one of four instructions, some
    of which are more popular. 40% talk fast and long, 30% slowly, 30% ask once or twice."""
    instructions = [some_tokens(rng, rng.randint(200, 400)) for _ in range(4)]
    for _ in range(count):
        turns, context, prompt = [], 0, instructions[min(int(rng.expovariate(1)), 3)]
        number, think = rng.choices([(rng.randint(6, 16), 8.0), (rng.randint(3, 8), 60.0),
                                     (rng.randint(1, 2), 60.0)], [4, 3, 3])[0]
        for _ in range(number):
            prompt = prompt + some_tokens(rng, length(rng, 65, 1.0, 1000))
            reply = length(rng, 55, 0.7, 400)
            context += len(prompt) + reply
            if context > limit:
                break
            turns.append(Turn(prompt, reply, think * rng.lognormvariate(-0.3, 0.8)))
            prompt = []
        yield User(rng.uniform(0, seconds), turns)


class Habits(NamedTuple):
    count: int                          # users
    turns: tuple[int, int]
    replies: int                        # the limit of a context divided by the longest reply
    thinks: list[float]


# They hardly think, and replies are long: those who run grow. Patient ones have time to lose chunks.
HASTY = Habits(25, (2, 8), 4, [0.0, 0.1, 2.0, 5.0])
PATIENT = Habits(16, (6, 12), 8, [1.0, 3.0, 10.0])


def small_users(rng: random.Random, habits: Habits, limit: int, long: float) -> list[User]:
    """Prompts are short, but this share of first prompts takes most of the limit. At the end somebody
    comes whose prompt needs every slot."""
    for _ in range(habits.count):
        turns, context = [], 0
        for number in range(rng.randint(*habits.turns)):
            most = limit * 3 // 4 if not number and rng.random() < long else 16
            prompt = some_tokens(rng, rng.randint(most // 2, most))
            reply = rng.randint(1, limit // habits.replies)
            context += len(prompt) + reply
            if context > limit:
                break
            turns.append(Turn(prompt, reply, rng.choice(habits.thinks)))
        yield User(rng.uniform(0, 1), turns)
    yield User(1e6, [Turn(some_tokens(rng, limit - 1), 1, 0.0)])


# ---- serving them

class Serving(NamedTuple):
    """A turn that was submitted."""
    due: float
    number: int                         # of the user
    index: int                          # of the turn: 0 is the first
    before: int                         # tokens that the worker had computed for this user
    right: list[int]                    # the reply of a full recompute
    kvs: list[int]                      # KV of context, prompt and reply


class Play:
    """Users who submit their turns to an engine, and check every reply."""

    def __init__(self, engine, worker: CheckingWorker, load: list[User], oracle=None):
        """oracle: a policy that is told how long each user will think."""
        self.engine, self.worker, self.load, self.oracle = engine, worker, load, oracle
        self.clock = worker.clock
        self.due = [(user.arrival, number, 0) for number, user in enumerate(load) if user.turns]
        heapq.heapify(self.due)                         # (when, user, turn)
        self.serving = {}                               # handle -> Serving
        self.served = 0                                 # turns
        self.contexts = [[] for _ in load]              # by user
        self.first_tokens = {}                          # handle -> seconds since the turn was due
        # Turns 2, 3-4, 5-8, 9-: tokens that were still cached, and those that had been computed.
        self.hits = {first: [0, 0] for first in (2, 3, 5, 9)}

    def run(self, cancelled: float = 0.0):
        """cancelled: the chance, in each step, that somebody stops a reply, and asks again."""
        rng, quiet, batch = random.Random(0), 0, None
        while self.due or self.serving:
            self.submit_due()
            if self.serving or batch:                   # copies may be left when all are served
                begin = self.clock()
                batch = self.engine.step()
                quiet = 0 if batch.spans else quiet + 1
                if not batch.spans and self.clock() == begin:
                    self.clock.sleep(PAUSE)
            else:
                self.clock.sleep(self.due[0][0] - self.clock())
            if quiet == QUIET:
                self.stalled()
            for handle in list(self.serving):
                if handle.token_ids or handle.tokens.closed.is_set():
                    self.look_at(handle)
            if self.serving and rng.random() < cancelled:
                rng.choice(list(self.serving)).cancel()

    def stalled(self):
        turns = [f"turn {its.index + 1} of user {its.number}" for its in self.serving.values()]
        fail(f"nothing is computed any more, and turns wait\n  {', '.join(turns):.150}")

    def submit_due(self):
        while self.due and self.due[0][0] <= self.clock():
            at, number, index = heapq.heappop(self.due)
            turns, name = self.load[number].turns, str(number)
            if self.oracle:
                is_last = index + 1 == len(turns)
                self.oracle.foresee(name, math.inf if is_last else turns[index].think)
            prompt, reply, _ = turns[index]
            right, kvs = full_recompute(self.contexts[number] + prompt, reply)
            handle = self.engine.submit(prompt, name, max_tokens=reply)
            self.serving[handle] = Serving(at, number, index, self.worker.computed[name], right, kvs)

    def look_at(self, handle):
        """It shows tokens, or has ended. A first token counts once the worker has computed the KV from
        which it comes: that of the prompt's last token."""
        due, number, index, _, right, kvs = self.serving[handle]
        if kvs[-len(right)] in self.worker.different:
            self.first_tokens.setdefault(handle, self.clock() - due)
        if not handle.tokens.closed.is_set():
            return
        if handle.error:
            fail(f"turn {index + 1} of user {number} failed\n  {handle.error!r}")
        elif handle.reply.finish_reason == "cancelled":
            self.first_tokens.pop(handle, None)         # who asks again waits anew
            heapq.heappush(self.due, (self.clock(), number, index))
        else:
            self.check(handle)
            self.served += 1
            if index + 1 < len(self.load[number].turns):
                think = self.load[number].turns[index].think
                heapq.heappush(self.due, (self.clock() + think, number, index + 1))
        del self.serving[handle]

    def check(self, handle):
        """The reply is that of a full recompute, and the worker has computed it."""
        _, number, index, before, right, kvs = self.serving[handle]
        found = handle.reply.token_ids
        if found != right:
            nth = next((nth for nth, pair in enumerate(zip(right, found)) if pair[0] != pair[1]),
                       min(len(right), len(found)))
            fail(f"a reply is not that of a full recompute: turn {index + 1} of user {number}\n"
                 f"  full recompute ... {right[nth:nth + 4]}\n  yours          ... {found[nth:nth + 4]}\n"
                 f"  {self.worker.first_misread or 'some KV was computed from KV that was wrong'}")
        if not self.worker.different.issuperset(kvs):
            fail(f"the worker has not computed this reply: turn {index + 1} of user {number}")
        self.count_hits(number, index, self.worker.computed[str(number)] - before)
        self.contexts[number] += self.load[number].turns[index].prompt + found

    def count_hits(self, number: int, index: int, computed: int):
        """The last token of a reply is fed with the next prompt. So behind a context of 300 tokens 299
        are known, and a turn of 40 and 60 computes 100 if all of them are cached, 399 if none is."""
        turn, known = self.load[number].turns[index], len(self.contexts[number]) - 1
        again = computed - len(turn.prompt) - turn.reply
        group = max((first for first in self.hits if index + 1 >= first), default=None)
        if group:
            self.hits[group][0] += known - max(again, 0)
            self.hits[group][1] += known

    def figures(self) -> dict:
        waits, worker = sorted(self.first_tokens.values()), self.worker
        replies = sum(turn.reply for user in self.load for turn in user.turns)
        return dict(first_token=waits[math.ceil(0.95 * len(waits)) - 1],
                    throughput=min(replies, worker.sampled) / worker.busy_seconds,
                    recomputed=worker.recomputed,
                    hits=[hit / max(known, 1) for hit, known in self.hits.values()])


def fail(message: str):
    pytest.fail(message, pytrace=False)


def play(open_it, worker: CheckingWorker, load: list[User], cancelled: float = 0.0) -> Play:
    """open_it(worker, clock): an engine."""
    before = machine(worker)
    engine = open_it(worker, worker.clock)
    played = Play(engine, worker, load, engine.cache.policy if open_it is oracle else None)
    try:
        played.run(cancelled)
    except TimeoutError as error:                       # conftest.py gives a test so much time
        turns = sum(len(user.turns) for user in load)
        fail(f"{error}\n  {played.served} of {turns} turns were served: is the engine slow?")
    if machine(worker) != before:
        fail("the worker is not the one that open_engine was given")
    return played


def machine(worker: CheckingWorker) -> dict:
    """Its sizes and rates."""
    return {name: value for name, value in vars(worker).items()
            if isinstance(value, int | float | tuple) and name not in COUNTED}


def stateless(worker, clock) -> Engine:
    return Engine(worker=worker, clock=clock, stateless=True)


def plain(worker, clock) -> Engine:
    return Engine(worker=worker, clock=clock)


def oracle(worker, clock) -> Engine:
    """The solved server, with a policy that knows when each user returns."""
    from experiments.policies import Oracle             # only here: a student's file may lack it
    engine = open_engine(worker, clock)
    return type(engine)(worker=worker, clock=clock, **vars(engine.config) | dict(policy=Oracle))


# ---- the tests

@points(20, "exact replies")
@pytest.mark.seconds(15)
def test_every_reply_is_that_of_a_full_recompute():
    load = list(users(random.Random(f"exact {SEED}"), 20, 30.0, 2900))
    play(open_engine, CheckingWorker(4000, 150, 3000), load)


# Arguments of CheckingWorker; the users; the share of them with a long prompt; the chance of a
# cancellation in a step
CASES = {
    "long_prompts": ((1000, 40, 1000, 1), HASTY, 0.5, 0.0),
    "slow_copies": ((1000, 80, 400, 300), PATIENT, 0.05, 0.0),
    "cancelled_turns": ((500, 20, 200, 20), HASTY, 0.1, 0.1),
    "tiny_tiers": ((200, 4, 200, 1), HASTY, 0.2, 0.02),
}


@points(10, "hard cases")
@pytest.mark.seconds(8)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost(name):
    sizes, habits, long, cancelled = CASES[name]
    rng = random.Random(f"{name} {SEED}")
    for _ in range(LOADS):
        load = list(small_users(rng, habits, sizes[2], long))
        play(open_engine, CheckingWorker(*sizes), load, cancelled)


def measured(open_it, seed: int) -> dict:
    """The mean figures of some loads."""
    rng, found = random.Random(f"load {seed}"), []
    for _ in range(LOADS):
        load = list(users(rng, 60, 100.0, 4000))
        found.append(play(open_it, CheckingWorker(8000, 400, 4096), load).figures())
    hits = [statistics.mean(column) for column in zip(*(each.pop("hits") for each in found))]
    return {name: statistics.mean(each[name] for each in found) for name in found[0]} | dict(hits=hits)


@points(40, "the load")
@pytest.mark.seconds(40)
def test_the_load(compare):
    compare(measured(open_engine, SEED))


def reference(seed):
    systems = dict(stateless=stateless, plain=plain, solved=open_engine, oracle=oracle)
    return dict(test_the_load={name: measured(open_it, seed) for name, open_it in systems.items()})
