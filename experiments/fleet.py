"""Several servers behind one router, simulated. Should a conversation
always come to the same server?

                      +-> engine 1, clock 1
    turns -> router --+-> engine 2, clock 2        each engine is the real one on a simulated worker
                      +-> engine 3, clock 3

Three routers choose a server for a turn:

    consistent hashing    the server that owns the hash of the conversation's name: always the same
    random                any server
    least loaded          the server with the fewest unfinished turns

A conversation that comes to a server for the first time brings its whole history as a new prompt.
If the conversation was there before, its new prompt is all that has been said since. In both cases
the server computes what it has no KV for. deploy/haproxy.cfg routes by consistent hashing.

Each engine has a clock of its own. We always advance the one that is furthest behind, so no
engine sees a turn before it is due.
"""
import argparse
import bisect
import hashlib
import heapq
from collections.abc import Callable

import numpy as np

from engine import Engine
from experiments.run import Panel, Served, System, build, outcome, planned, window
from experiments.workload import PlannedConversation, within_context
from handles import Handle

POINTS = 1600        # of each server on the ring: HAProxy makes 16 for each unit of its weight, 100

# (conversation, unfinished turns of each server) -> server
Router = Callable[[str, list[int]], int]


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def consistent_hashing(servers: int, rng: np.random.Generator) -> Router:
    """A conversation belongs to the next point on a ring, and so to that point's server."""
    ring = sorted((hashed(f"{server}/{point}"), server)
                  for server in range(servers) for point in range(POINTS))

    def route(name: str, unfinished: list[int]) -> int:
        return ring[bisect.bisect(ring, (hashed(name),)) % len(ring)][1]
    return route


def random_server(servers: int, rng: np.random.Generator) -> Router:
    return lambda name, unfinished: int(rng.integers(servers))


def least_loaded(servers: int, rng: np.random.Generator) -> Router:
    """The server with the fewest unfinished turns; of several, any of them."""
    def route(name: str, unfinished: list[int]) -> int:
        fewest = min(unfinished)
        return int(rng.choice([server for server, turns in enumerate(unfinished)
                               if turns == fewest]))
    return route


ROUTERS = {"consistent hashing": consistent_hashing, "random": random_server,
           "least loaded": least_loaded}


class Fleet:
    """Plays conversations on several engines."""

    def __init__(self, engines: list[Engine], router: Router,
                 conversations: list[PlannedConversation]):
        """engines: new ones, with VirtualClocks. Conversations need arrival times."""
        self.engines, self.router, self.conversations = engines, router, conversations
        self.unfinished = [0] * len(engines)        # turns of each server
        self.computing = [0.0] * len(engines)       # seconds that each server has stepped
        self.spoken = [0] * len(conversations)      # tokens of each conversation so far
        self.heard = {}                             # (server, conversation) -> those it knows
        self.served: list[tuple[Served, int]] = []  # ended turns, tokens said before
        self.due = [(one.arrival, number, 0) for number, one in enumerate(conversations)]
        heapq.heapify(self.due)                     # of (time, conversation, turn)

    def play(self, until: float):
        """Play until that many seconds have passed, or all turns have ended."""
        while True:
            busy = [server for server, engine in enumerate(self.engines) if engine.scheduler.busy]
            behind = min(busy, key=self._time, default=None)
            if self.due and (behind is None or self.due[0][0] <= self._time(behind)):
                when, number, index = heapq.heappop(self.due)
                if when >= until:
                    return
                self._submit(when, number, index)
            elif behind is None or self._time(behind) >= until:
                return
            else:
                self._step(behind)

    def _time(self, server: int) -> float:
        return self.engines[server].clock()

    def _step(self, server: int):
        begin = self._time(server)
        self.engines[server].step()
        self.computing[server] += self._time(server) - begin

    def _submit(self, when: float, number: int, index: int):
        name, turns = self.conversations[number][:2]
        turn, said = turns[index], self.spoken[number]
        server = self.router(name, self.unfinished)
        engine = self.engines[server]
        if engine.clock() < when:                   # it was idle
            engine.clock.sleep(when - engine.clock())
        unheard = said - self.heard.get((server, number), 0)

        def ended(handle: Handle):
            now = engine.clock()
            served = Served(when, handle.request.times[0], now, turn.output_tokens,
                            handle.reply.usage, turn=index + 1)
            self.served.append((served, said))
            self.unfinished[server] -= 1
            if index + 1 < len(turns):
                heapq.heappush(self.due, (now + turns[index + 1].think_seconds, number, index + 1))

        engine.submit([0] * (unheard + turn.input_tokens), name, max_tokens=turn.output_tokens,
                      ignore_eos=True, on_end=ended)
        engine.owner.take_inbox()
        self.unfinished[server] += 1
        self.spoken[number] = self.heard[server, number] = said + turn.tokens


def play_fleet(task: tuple[Panel, int, str, argparse.Namespace]) -> dict:
    """One row: that many servers behind one router. The panel's rate is that of each server.

    ValueError: the load has its own times, so it cannot grow with the servers; or its turns
    rewind, and no router here knows branches."""
    panel, servers, name, options = task
    if panel.rates[0] is None:
        raise ValueError("this trace has its own times, but a fleet's load must grow with it: "
                         "add --rates")
    rate = panel.rates[0] * servers
    conversations = planned(panel, rate, options)
    if any(turn.keep is not None for one in conversations for turn in one.turns):
        raise ValueError("the turns of this trace rewind, which a fleet does not play: "
                         "name another figure, such as fig14")
    engines = [build(System(), panel, conversations, options) for _ in range(servers)]
    conversations = within_context(conversations, engines[0].scheduler.limit)
    router = ROUTERS[name](servers, np.random.default_rng([options.seed, 3]))
    fleet = Fleet(engines, router, conversations)
    begin, until = window(panel, rate, options)
    fleet.play(until)

    counted = [(turn, said) for turn, said in fleet.served if turn.ended > begin]
    cached = sum(turn.usage["gpu"] + turn.usage["cpu"] for turn, _ in counted)
    busiest = max(fleet.computing) / (sum(fleet.computing) / servers)
    row = dict(system=name, servers=servers, model=panel.model, dataset=panel.dataset,
               think=panel.think, cpu_gb=panel.cpu_gb, request_rate=rate, busiest_server=busiest,
               hit_rate=cached / max(1, sum(said for _, said in counted)))
    return row | outcome(engines[0], [turn for turn, _ in fleet.served], begin, until)
