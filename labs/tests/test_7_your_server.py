"""Lab 7: an engine of one's own under a load of users. All of a student's files count, as they are.

What is measured comes from the worker and its clock, and from what the users see."""
import heapq
import math
import random
from typing import NamedTuple

import pytest
import torch  # noqa: F401      engine.py needs it: so the grader imports it once, for all tests

from checking_worker import VOCABULARY, CheckingWorker, full_recompute
from engine import Engine
from experiments.my_server import open_engine
from experiments.policies import Oracle
from grading import SEED

points = pytest.mark.points
QUIET = 1000            # so many steps in a row without a span: nothing will ever happen


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


def small_users(rng: random.Random, count: int, limit: int, long: float) -> list[User]:
    """They hardly think. Prompts are short and replies long, so those who run grow; but this share of
    first prompts takes most of the limit. At the end somebody comes whose prompt needs every slot."""
    for _ in range(count):
        turns, context = [], 0
        for number in range(rng.randint(2, 8)):
            most = limit * 3 // 4 if not number and rng.random() < long else 16
            prompt, reply = some_tokens(rng, rng.randint(most // 2, most)), rng.randint(1, limit // 4)
            context += len(prompt) + reply
            if context > limit:
                break
            turns.append(Turn(prompt, reply, rng.choice([0.0, 0.1, 2.0, 5.0])))
        yield User(rng.uniform(0, 1), turns)
    yield User(1e6, [Turn(some_tokens(rng, limit - 1), 1, 0.0)])


# ---- serving them

class Play:
    """Users who submit their turns to an engine, and check every reply."""

    def __init__(self, engine, worker: CheckingWorker, load: list[User], oracle: Oracle | None = None):
        """oracle: is told how long each user will think."""
        self.engine, self.worker, self.load, self.oracle = engine, worker, load, oracle
        self.clock = worker.clock
        self.due = [(user.arrival, number, 0) for number, user in enumerate(load) if user.turns]
        heapq.heapify(self.due)                         # (when, user, turn)
        self.serving = {}                               # handle -> the same, tokens computed before
        self.contexts = [[] for _ in load]              # by user
        self.first_tokens = {}                          # handle -> seconds since the turn was due
        self.hits = {first: [0, 0] for first in (2, 3, 5, 9)}       # turns 2, 3-4, 5-8, 9-: see check

    def run(self, cancelled: float = 0.0):
        """cancelled: the chance, in each step, that somebody stops a reply, and asks again."""
        rng, quiet, batch = random.Random(0), 0, None
        while self.due or self.serving:
            self.submit_due()
            if self.serving or batch:
                try:
                    batch = self.engine.step()
                except TimeoutError:                    # conftest.py gives a test so much time
                    self.stalled()
                quiet = 0 if batch.spans else quiet + 1
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
        turns = [f"turn {index + 1} of user {number}" for _, number, index, _ in self.serving.values()]
        fail(f"nothing is computed any more, and turns wait\n  {', '.join(turns):.150}")

    def submit_due(self):
        while self.due and self.due[0][0] <= self.clock():
            at, number, index = heapq.heappop(self.due)
            turns, name = self.load[number].turns, str(number)
            if self.oracle:
                is_last = index + 1 == len(turns)
                self.oracle.foresee(name, math.inf if is_last else turns[index].think)
            handle = self.engine.submit(turns[index].prompt, name, max_tokens=turns[index].reply)
            self.serving[handle] = at, number, index, self.worker.computed[name]

    def look_at(self, handle):
        """It has its first token, or has ended."""
        at, number, index, _ = self.serving[handle]
        self.first_tokens.setdefault(handle, self.clock() - at)
        if not handle.tokens.closed.is_set():
            return
        if handle.error:
            fail(f"turn {index + 1} of user {number} failed\n  {handle.error!r}")
        elif handle.reply.finish_reason == "cancelled":
            self.first_tokens.pop(handle)
            heapq.heappush(self.due, (self.clock(), number, index))
        else:
            self.check(handle)
            if index + 1 < len(self.load[number].turns):
                think = self.load[number].turns[index].think
                heapq.heappush(self.due, (self.clock() + think, number, index + 1))
        del self.serving[handle]

    def check(self, handle):
        """The reply is that of a full recompute. Count what was computed again for it."""
        _, number, index, before = self.serving[handle]
        turn, context = self.load[number].turns[index], self.contexts[number]
        known = len(context) - 1                        # the last token of a reply is never fed
        context += turn.prompt
        right, found = full_recompute(context, turn.reply), handle.reply.token_ids
        if found != right:
            nth = next((nth for nth, pair in enumerate(zip(right, found)) if pair[0] != pair[1]),
                       min(len(right), len(found)))
            fail(f"a reply is not that of a full recompute: turn {index + 1} of user {number}\n"
                 f"  full recompute ... {right[nth:nth + 4]}\n  yours          ... {found[nth:nth + 4]}\n"
                 f"  {self.worker.first_misread or 'some KV was computed from KV that was wrong'}")
        context += found
        again = self.worker.computed[str(number)] - before - len(turn.prompt) - turn.reply
        for first in reversed(self.hits):
            if index + 1 >= first:
                self.hits[first][0] += known - max(again, 0)
                self.hits[first][1] += known
                break

    def figures(self) -> dict:
        waits, worker = sorted(self.first_tokens.values()), self.worker
        replies = sum(turn.reply for user in self.load for turn in user.turns)
        return dict(first_token=waits[math.ceil(0.95 * len(waits)) - 1],
                    throughput=replies / worker.busy_seconds, recomputed=worker.recomputed,
                    hits=[hit / max(known, 1) for hit, known in self.hits.values()])


def fail(message: str):
    pytest.fail(message, pytrace=False)


def play(open_it, worker: CheckingWorker, load: list[User], cancelled: float = 0.0) -> Play:
    """open_it(worker, clock): an engine."""
    engine = open_it(worker, worker.clock)
    played = Play(engine, worker, load, engine.cache.policy if open_it is oracle else None)
    played.run(cancelled)
    return played


def stateless(worker, clock) -> Engine:
    return Engine(worker=worker, clock=clock, stateless=True)


def oracle(worker, clock) -> Engine:
    """The solved engine, with a policy that knows when each user returns."""
    engine = open_engine(worker, clock)
    return type(engine)(worker=worker, clock=clock, policy=Oracle)


# ---- the tests

@points(22, "exact replies")
@pytest.mark.seconds(15)
def test_every_reply_is_that_of_a_full_recompute():
    load = list(users(random.Random(f"exact {SEED}"), 20, 30.0, 2900))
    play(open_engine, CheckingWorker(4000, 150, 3000), load)


# slots, places, limit, slow_link; the share of users with a long prompt; the chance of a cancellation
# in a step
CASES = {
    "long_prompts": ((1000, 40, 1000, 1), 0.5, 0.0),
    "slow_copies": ((500, 20, 200, 100), 0.05, 0.0),
    "cancelled_turns": ((500, 20, 200, 20), 0.1, 0.1),
    "tiny_tiers": ((200, 4, 200, 1), 0.2, 0.02),
}


@points(7, "hard cases")
@pytest.mark.seconds(8)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost(name):
    machine, long, cancelled = CASES[name]
    load = list(small_users(random.Random(f"{name} {SEED}"), 25, machine[2], long))
    play(open_engine, CheckingWorker(*machine), load, cancelled)


def measured(open_it, seed: int) -> dict:
    load = list(users(random.Random(f"load {seed}"), 60, 100.0, 4000))
    return play(open_it, CheckingWorker(8000, 400, 4096), load).figures()


@points(50, "the load")
@pytest.mark.seconds(20)
def test_the_load(compare):
    compare(measured(open_engine, SEED))


def reference(seed):
    systems = dict(stateless=stateless, solved=open_engine, oracle=oracle)
    return dict(test_the_load={name: measured(open_it, seed) for name, open_it in systems.items()})
