"""A running server, turn by turn: `python bench.py chats --url URL`.

    one chat        turn 1, turn 2, ...                     nobody else talks meanwhile
    8 chats         turn 1 of each, turn 2 of each, ...     its first tier should hold three of them

The client resends the whole history, as all chat clients do, and waits for each reply. A turn has
about 75 tokens, and SmolLM2's template adds a system message of 20. So the prompt of turn 8 has
some 620, and 1,920 tokens of KV hold three chats. With the same seed every server gets as many
tokens, in other words (see remote.py): so a table can compare servers that ran one after the other.
Rivals are `transformers_server.py` and llama.cpp's, such as

    llama-server -m FILE.gguf -c 1920 -np 8 --kv-unified [--cache-ram 0]

With `--server-pid` we also measure CPU time and memory of a server on this machine (Linux). On a
busy machine CPU time tells more than seconds.

A figure is a median, beside the lowest and the highest value: of three chats that are alone, of
eight that are not, of three rounds of replies.
"""
import os
from pathlib import Path
from statistics import median

import numpy as np

from experiments.curves import Found
from experiments.remote import RemoteEngine

TURNS, PROMPT, REPLY = 8, 60, 4         # of a chat; tokens of a turn, without the template's
DECODES = 24                            # tokens of each reply whose speed we measure
# Chats of one group are interleaved, one group follows the other: a1 ... a8, b1 ... b8, c1 ... c8;
# then d1 e1 ... k1, d2 e2 ...
LOADS = {"one chat": [["a"], ["b"], ["c"]], "8 chats": [["d", "e", "f", "g", "h", "i", "j", "k"]]}
ROUNDS = 3


def play(options) -> Found:
    """Of a running server: first tokens by turn, tokens per second, and memory."""
    if options.simulate:
        raise ValueError("chats is measured, not simulated: leave --simulate out")
    engine, pid = RemoteEngine(options.url, options.server_key, options.model), options.server_pid
    rng = np.random.default_rng(options.seed)
    rows = []
    for load, groups in LOADS.items():
        costs: list[list[dict]] = [[] for _ in range(TURNS)]
        for group in groups:
            for of_turn in costs:           # turn by turn
                for name in group:
                    prompt = rng.integers(engine.worker.vocab_size, size=PROMPT).tolist()
                    of_turn.append(first_token(engine, f"{options.seed} {name}", prompt, pid))
        rows += [dict(system=load, turn=turn) | summary(of_turn)
                 for turn, of_turn in enumerate(costs, 1)]
    for load, count in (("one reply", 1), ("8 replies at once", 8)):
        costs = [decoding(engine, f"{options.seed} {load} {number}", count, pid)
                 for number in range(ROUNDS)]
        rows.append(dict(system=load) | summary(costs) | memory(pid))
    return Found(rows, [])


def summary(costs: list[dict]) -> dict:
    """Of each field the median, the lowest and the highest value."""
    row = {}
    for name in costs[0]:
        values = [cost[name] for cost in costs]
        row |= {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}
    return row


def first_token(engine: RemoteEngine, name: str, prompt: list[int], pid: int | None) -> dict:
    """Play a turn of the conversation `name` -> the context, and what its first token takes."""
    before = cpu_ms(pid)
    begin = engine.clock()
    turn = engine.submit(prompt, name, REPLY, False, lambda turn: None)
    while not turn.times and not turn.error:
        engine.step()
    cost = {field: value - before[field] for field, value in cpu_ms(pid).items()}
    engine.close()
    ttft_ms = 1e3 * (turn.result().times[0] - begin)
    cached = turn.usage["gpu"] + turn.usage["cpu"]
    return dict(context=turn.usage["prompt_tokens"], cached=cached, ttft_ms=ttft_ms) | cost


def decoding(engine: RemoteEngine, name: str, count: int, pid: int | None) -> dict:
    """Short questions in `count` new conversations at once -> how fast the replies come."""
    before, ends = cpu_ms(pid), []
    turns = [engine.submit([number], f"{name} {number}", DECODES, True,
                           lambda turn: ends.append(engine.clock())) for number in range(count)]
    engine.close()
    seconds = max(ends) - min(turn.result().times[0] for turn in turns)
    cost = {f"{field}_per_token": (value - before[field]) / (count * DECODES)
            for field, value in cpu_ms(pid).items()}
    return dict(tokens_per_second=count * (DECODES - 1) / seconds) | cost


def cpu_ms(pid: int | None) -> dict:
    """The CPU time of a process until now, of all its threads; nothing without a pid."""
    if pid is None:
        return {}
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])                           # user and system
    return dict(cpu_ms=1e3 * ticks / os.sysconf("SC_CLK_TCK"))


def memory(pid: int | None) -> dict:
    """Resident memory of a process, now and at its peak; nothing without a pid."""
    if pid is None:
        return {}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[field].removesuffix("kB")) * 1024 / 1e6
            for name, field in (("memory_mb", "VmRSS"), ("peak_mb", "VmHWM"))}
