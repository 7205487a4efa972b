"""Reasoning models: a reply begins with thoughts, which the next turn does not resend.

The KV of the visible reply depends on the thoughts before it. So a server has three ways to go on:

    in the cache after a reply    | history | prompt | thoughts | visible |
    keep                          the next turn follows, though the client has not resent thoughts
    take back                     | history | prompt | visible, next prompt    computed with it
    take back at once             | history | prompt | visible     computed while the user reads

"keep" computes least. But thoughts that no client sees fill the tiers, lengthen every attention,
and are in the model's context, which some models were not trained for. The last way is a request of
its own behind each reply, also behind the last one.

The load is ShareGPT's (workload.py). Thoughts are three times as long as the visible reply on
average, lognormal. (In ServeGen's published load of DeepSeek-R1, arXiv 2505.09999, they are 73% of
a reply: 2.7 times the rest. The spread is our choice.) Users whom a run meets under way have a
history without thoughts, in each way: so "keep" begins with shorter contexts than it would have.
"""
import argparse
import math
from collections import deque
from collections.abc import Callable
from contextlib import closing

import numpy as np

from engine import Engine
from experiments.curves import Found, adapted, mapped, ratio
from experiments.run import Panel, System, build, drive, outcome, planned, that_fit, window
from experiments.workload import PlannedConversation, PlannedTurn

TIMES, SIGMA = 3.0, 0.8         # thoughts are so many times as long as the visible reply
RATES = 1.0, 1.5                # turns per second
LIMIT = 16_384                  # tokens of the longest context, thoughts included
WAYS = "keep", "take back", "take back at once"
COMPARED = {"mean TTFT": "mean_ttft_ms", "normalized latency": "normalized_latency_ms"}


def turns_of(way: str, turns: list[PlannedTurn], thoughts: list[int]) -> list[PlannedTurn]:
    """The turns that the server sees. thoughts: how many tokens each turn thinks."""
    if way == "keep":
        return [turn._replace(output_tokens=thought + turn.output_tokens)
                for turn, thought in zip(turns, thoughts)]
    seen: list[PlannedTurn] = []
    context = 0         # tokens that the next turn keeps: all before the last thoughts
    visible = 0         # tokens of the last visible reply, if the next prompt must begin with them
    for turn, thought in zip(turns, thoughts):
        prompt = visible + turn.input_tokens
        seen.append(PlannedTurn(prompt, thought + turn.output_tokens, turn.think_seconds,
                                keep=context or None))
        context, visible = context + prompt, turn.output_tokens
        if way == "take back at once":
            seen.append(PlannedTurn(visible, 1, keep=context))
            context, visible = context + visible, 0
    return seen


def reasoning(options) -> Found:
    """The three ways under one load. Ratios compare them with "keep".

    ValueError: without --simulate, or with a --trace."""
    if not options.simulate:
        raise ValueError("reasoning is simulated, not measured: add --simulate")
    if options.trace:
        raise ValueError("reasoning has a load of its own, with thoughts: leave --trace out")
    panels = adapted([Panel("llama2-13b-gqa", "sharegpt", RATES, cpu_gb=20.0)], options)
    tasks = [(panel._replace(rates=(rate,)), way, options)
             for panel in panels for rate in panel.rates for way in WAYS]
    rows = mapped(play_reasoning, tasks, "run", options)
    ratios = []
    for first in range(0, len(rows), len(WAYS)):
        kept, *others = rows[first:first + len(WAYS)]
        ratios += [ratio(f"at {row['request_rate']:g}/s: {name}, {row['system']} / keep",
                         row[field] / kept[field], options)
                   for row in others for name, field in COMPARED.items()]
    return Found(rows, ratios)


def play_reasoning(task: tuple[Panel, str, argparse.Namespace]) -> dict:
    """The row of one way at one rate. Only users' turns count."""
    panel, way, options = task
    rate, = panel.rates
    begin, until = window(panel, rate, options)
    limit = min(LIMIT, options.given.get("gpu_cache_tokens", LIMIT))
    users = load(way, planned(panel, rate, options), options.seed, limit)
    with closing(build(System(), panel, users, options)) as engine:
        foresee, leave = dropping(engine)
        served = drive(engine, users, options.seed, engine.clock.sleep, until, foresee, leave=leave)
        row = outcome(engine, [turn for turn in served if turn.output_tokens > 1], begin, until)
    return dict(system=way, model=panel.model, dataset=panel.dataset, cpu_gb=panel.cpu_gb,
                request_rate=rate) | row


def dropping(engine: Engine) -> tuple[Callable, Callable]:
    """The listeners `foresee` and `leave` for `drive`: what is taken back leaves the tiers.

    Not at once: the engine opens the branch from it in its next step. So it leaves when somebody
    submits a turn at a later time."""
    left = deque()              # (when it was left, conversation, tokens that go on in a branch)

    def foresee(*turn):
        while left and left[0][0] < engine.clock():
            engine.shorten(*left.popleft()[1:])

    def leave(name: str, keep: int):
        foresee()
        left.append((engine.clock(), name, keep))
    return foresee, leave


def load(way: str, users: list[PlannedConversation], seed: int,
         limit: int) -> list[PlannedConversation]:
    """The users' conversations with thoughts, as the server sees them: the same users each way,
    namely those whom "keep" gives no more than `limit` tokens. ValueError: there are none."""
    rng = np.random.default_rng([seed, 5])
    seen = []
    for user in users:
        thoughts = [math.ceil(turn.output_tokens * TIMES * rng.lognormal(-SIGMA**2 / 2, SIGMA))
                    for turn in user.turns]
        if user._replace(turns=turns_of("keep", user.turns, thoughts)).tokens <= limit:
            seen.append(user._replace(turns=turns_of(way, user.turns, thoughts)))
    return that_fit(seen, limit)
