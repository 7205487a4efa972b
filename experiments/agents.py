"""Agents: most turns answer a tool call. What is it worth if clients tell how long a pause will be?

    request   | turn |tool| turn |tool| turn |      user thinks      | turn |tool| ...
    pauses             0.8 s       0.8 s              84 s

A client that calls a tool knows which one, and how long such a call mostly takes. So it can give a
hint with each turn: the median pause behind turns of this kind, with noise. `Told` uses it. It is
never told the pause itself, nor that a session is over or a branch left: only `Oracle` knows that.

The load is synthetic. Medians and spreads are TraceLab's (arXiv 2606.30560: 4,265 sessions with
Claude Code and Codex; the tables of its repository); all lengths are lognormal, which is our choice.
Its contexts have a median of 120,000 tokens; ours have a quarter of the tokens per turn and end at
16,384, so that a run takes seconds.
"""
import argparse
import math
from collections.abc import Iterable
from contextlib import closing
from itertools import product
from typing import NamedTuple

import numpy as np

from eviction import POLICIES, Policy
from experiments.curves import Found, adapted, mapped, quotient, ratio, share_of_the_gap
from experiments.policies import EXPERIMENTS, Oracle, Told
from experiments.run import (Panel, System, build, drive, has_tier_in_gb, outcome, planned,
                             that_fit, window)
from experiments.workload import (PlannedConversation, PlannedTurn, cut_to_context, numbered,
                                  under_way, with_arrivals)


class Spread(NamedTuple):
    """A lognormal distribution."""
    median: float
    sigma: float        # the standard deviation of the logarithm

    def draw(self, rng: np.random.Generator, count: int | None = None):
        return rng.lognormal(math.log(self.median), self.sigma, count)


# Seconds. TraceLab: shell commands have a median of 0.85 s and a 99th percentile of 235 s; reading,
# searching and editing files 0.04 to 0.1 s, and a mean of 1.2 s; subagents and the web 0.18 and
# 600 s; users 84 s, and a 90th percentile of 20.6 minutes.
SHELL, FILES, TASK, USER = Spread(0.85, 2.4), Spread(0.06, 2.4), Spread(0.18, 3.5), Spread(84, 2.1)
TOOLS, CALLS = (SHELL, FILES, TASK), (0.76, 0.20, 0.04)         # TraceLab: shares of all calls
# TraceLab: requests of a session: median 1, 90th percentile 18; turns that answer a tool in a
# request: 1 and 20 (our draws are rounded down: 1 and 17). At most MOST turns a session: ours.
REQUESTS, TOOL_TURNS, MOST = Spread(1.0, 2.25), Spread(1.5, 1.9), 200
# Tokens. TraceLab: 1,200 new ones per turn on average, and 520 generated with a median of 220. We
# take a quarter. A session begins with instructions and tools: ours.
INPUT, OUTPUT, INSTRUCTIONS, LIMIT = Spread(210, 0.9), Spread(55, 1.3), 2000, 16_384
NOISE = 0.5             # sigma of the logarithm of a hint: off by a factor of 1.65. Ours
PAST = 3600.0           # seconds of the load before a run begins

# A planned pause -> the pause that the client expects, both in seconds. `drive` tells the planned
# one, so we look up the hint by it: equal pauses get one hint. (Told sees the hint alone.) The end
# of a session is no pause: there the client expects its user, after USER.median exactly.
Expected = dict[float, float]


def sessions(count: int, seed: int) -> tuple[list[PlannedConversation], Expected]:
    """So many random sessions of agents, without arrival times."""
    rng, expected = np.random.default_rng([seed, 4]), {}

    def session() -> list[PlannedTurn]:
        # Of the pause behind each turn, so the turn with index 1 comes after a pause of kinds[0].
        kinds = []
        for _ in range(min(MOST, math.ceil(REQUESTS.draw(rng)))):
            calls = min(MOST, int(TOOL_TURNS.draw(rng)))
            kinds += [TOOLS[number] for number in rng.choice(len(TOOLS), calls, p=CALLS)] + [USER]
        kinds = kinds[:MOST]
        pauses = [0.0] + [kind.draw(rng) for kind in kinds[:-1]]
        expected.update(zip(pauses[1:], (kind.median * noise(rng) for kind in kinds)))
        inputs, outputs = (np.ceil(spread.draw(rng, len(kinds))).astype(int).tolist()
                           for spread in (INPUT, OUTPUT))
        inputs[0] += INSTRUCTIONS
        return [PlannedTurn(*turn) for turn in zip(inputs, outputs, pauses)]

    users = numbered(session() for _ in range(count))
    return list(cut_to_context(users, LIMIT)), expected


def noise(rng: np.random.Generator) -> float:
    return math.exp(rng.normal(0, NOISE))


# A trace does not say whose pauses are: we take shorter ones for tools'. (TraceLab's are all
# tools': there the long ones are slow tools, not users.)
TOOL_SECONDS = 30.0
WRONG = 0.1             # of these hints so many are of the wrong kind. Both are ours


def hints_of_a_trace(conversations: Iterable[PlannedConversation], seed: int) -> Expected:
    """The medians of this trace's short and long pauses, with noise: one of ten is the median of
    the other kind."""
    rng = np.random.default_rng([seed, 4])
    pauses = sorted({turn.think_seconds for one in conversations for turn in one.turns[1:]})
    short = [pause for pause in pauses if pause < TOOL_SECONDS]
    long = pauses[len(short):]
    median_short, median_long = (np.median(kind) if kind else USER.median for kind in (short, long))

    def expected(pause: float) -> float:
        is_short, is_wrong = pause < TOOL_SECONDS, rng.random() < WRONG
        return (median_short if is_short != is_wrong else median_long) * noise(rng)
    return {pause: expected(pause) for pause in pauses}


# ---- the figure

RATE, CPU_GB = 2.5, (10.0, 30.0)        # turns per second; the CPU tier, beside 40 GB of GPU tier
SYSTEMS = {"lru": POLICIES["lru"], "retention": POLICIES["retention"],
           "expected cost": EXPERIMENTS["expected cost"], "told": Told, "oracle": Oracle}


def agents(options) -> Found:
    """Policies under one load of agents. Ratios compare all with LRU.

    ValueError: without --simulate."""
    if not options.simulate:
        raise ValueError("agents are simulated, not measured: add --simulate")
    panels = adapted([Panel("llama2-13b-gqa", "agents", (RATE,), cpu_gb=size) for size in CPU_GB],
                     options)
    tasks = [(panel._replace(rates=(rate,)), name, options)
             for panel in panels for rate in panel.rates for name in SYSTEMS]
    rows = mapped(play_agents, tasks, "run", options)
    ratios = []
    for first in range(0, len(rows), len(SYSTEMS)):
        ratios += ratios_to_lru(rows[first:first + len(SYSTEMS)], options)
    return Found(rows, ratios)


def ratios_to_lru(rows: list[dict], options) -> list[dict]:
    """rows: of all SYSTEMS under one load, LRU first, the oracle last."""
    lru, *others = rows
    load = lru["dataset"] if lru["request_rate"] is None else f"at {lru['request_rate']:g}/s"
    load += f", {lru['cpu_gb']:g} GB" if "cpu_gb" in lru else ""
    ratios = []
    for row, (name, field) in product(others, MEASURES.items()):
        ratios.append(ratio(f"{load}: {name}, {row['system']} / lru",
                            quotient(row[field], lru[field]), options))
    told, oracle = (next(row for row in rows if row["system"] == name)["recomputed_seconds"]
                    for name in ("told", "oracle"))
    ratios.append(ratio(f"{load}: share of the gap from lru to oracle that told closes",
                        share_of_the_gap(lru["recomputed_seconds"], oracle, told), options))
    return ratios


MEASURES = {"seconds of recomputation": "recomputed_seconds", "mean TTFT": "mean_ttft_ms"}


def play_agents(task: tuple[Panel, str, argparse.Namespace]) -> dict:
    """The row of one policy."""
    panel, name, options = task
    rate, = panel.rates
    if options.trace:
        conversations = planned(panel, rate, options)
        expected = hints_of_a_trace(conversations, options.seed)
    else:
        conversations, expected = load(rate, options)
    begin, until = window(panel, rate, options)
    system = System(dict(policy=SYSTEMS[name]))
    with closing(build(system, panel, conversations, options)) as engine:
        conversations = that_fit(conversations, engine.scheduler.limit)
        policy = engine.cache.policy
        served = drive(engine, conversations, options.seed, engine.clock.sleep, until,
                       listener(policy, expected), leave=getattr(policy, "leave", None))
        row = outcome(engine, served, begin, until)
    size = dict(cpu_gb=panel.cpu_gb) if has_tier_in_gb(options) else {}
    return dict(system=name, policy=name, model=panel.model, dataset=panel.dataset,
                request_rate=rate) | size | row


def load(rate: float, options) -> tuple[list[PlannedConversation], Expected]:
    """Sessions that have come at this rate for a long time, and what their clients expect."""
    # (A session has some 14 turns.)
    users, expected = sessions(math.ceil(rate * (PAST + options.seconds) / 10) + 20, options.seed)
    return list(under_way(with_arrivals(users, rate, options.seed, None), PAST)), expected


def listener(policy: Policy, expected: Expected):
    """What `drive` tells the policy with each turn, if anything."""
    if isinstance(policy, Oracle):
        return policy.foresee
    if not isinstance(policy, Told):
        return None

    def hint(name: str, pause: float, keep: int | None):
        policy.expect(name, expected.get(pause, USER.median))
    return hint
