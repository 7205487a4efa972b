"""What a hint is worth to the user who gives it, and what it costs all others (warm.py).

A long conversation has lost all of its KV, and its next turn comes. Then eight others decode, and
somebody gives a hint for it:

    cold          | recompute 3,300 tokens, the prompt | first token
    hinted        | the prompt | first token                        the user was still typing
    never lost    | the prompt | first token

All times are CPU time of this process, so that the machine may have something else to do.
"""
from contextlib import closing
from itertools import product
from statistics import median
from time import process_time

import numpy as np

from engine import Engine
from experiments.curves import Found, adapted, ratio
from experiments.run import HERE, System, build
from warm import SHARE

HISTORY, PROMPT = 3300, 20      # tokens
ROUNDS = 5                      # each row is a median of so many
DECODES, STEPS = 8, 60          # STEPS is enough for the hint
TURNS = "never lost", "hinted", "cold"
# Of the budget of a step warm-ups get one part of so many. None: there is no hint.
SHARES = {"no hint": None, "a hint": SHARE, "a hint, the whole budget": 1}


def play(options) -> Found:
    """The first token of the conversation; the 95th percentile of the others' steps."""
    panel, = adapted(HERE[:1], options)
    first: dict[str, list] = {name: [] for name in TURNS}
    steps: dict[str, list] = {name: [] for name in SHARES}
    with closing(build(System(dict(gpu_cache_tokens=8192)), panel, [], options)) as engine:
        rng = np.random.default_rng(options.seed)
        tokens = rng.integers(engine.worker.vocab_size, size=HISTORY + PROMPT).tolist()
        engine.generate(tokens[:HISTORY], "user", max_tokens=1)
        for _, name in product(range(ROUNDS), TURNS):
            first[name].append(first_token(engine, tokens[HISTORY:], name))
        for _, name in product(range(ROUNDS), SHARES):
            steps[name].append(p95_of_a_step(engine, tokens[:PROMPT], SHARES[name]))
    rows, ratios = [], []
    for field, times in (("ttft_ms", first), ("p95_step_ms", steps)):
        base, *others = ((name, 1e3 * median(each)) for name, each in times.items())
        rows += [dict(system=name, **{field: ms}) for name, ms in (base, *others)]
        ratios += [ratio(f"{field}, {name} / {base[0]}", ms / base[1], options)
                   for name, ms in others]
    return Found(rows, ratios)


def lose_everything(engine: Engine):
    engine.cache.drop_all(engine.cache.conversations["user"])


def first_token(engine: Engine, prompt: list[int], name: str) -> float:
    """Seconds until the first token of a turn of the long conversation."""
    engine.shorten("user", HISTORY)
    if name != "never lost":
        lose_everything(engine)
    if name == "hinted":
        engine.warm("user")
        while engine.step():
            pass
    begin = process_time()
    engine.generate(prompt, "user", max_tokens=1)
    return process_time() - begin


def p95_of_a_step(engine: Engine, prompt: list[int], share: int | None) -> float:
    """Seconds of a step of the others."""
    lose_everything(engine)
    handles = [engine.submit(prompt, max_tokens=STEPS + 10, ignore_eos=True)
               for _ in range(DECODES)]
    for _ in range(3):                              # they are admitted, and decode
        engine.step()
    if share:
        engine.hints.share = share
        engine.warm("user")
    times = []
    for _ in range(STEPS):
        begin = process_time()
        engine.step()
        times.append(process_time() - begin)
    engine.hints.give_up()                          # else the next one would not count
    for handle in handles:
        handle.cancel()
    return float(np.percentile(times, 95))
