"""The other figures: of this machine and its parts, of a running server, of many servers, of
memory.

    default, turns, hints, profile, check           the embedded model on this machine
    fig12, kernel, swap, step, scheduling           parts of the engine (microbench.py)
    serve, chats                                    a server that runs already
    agents, reasoning, fleet                        only simulated
    waste, sharing, together                        simulated, or only counted

`MORE`, at the end of this file, names them all. curves.py says what a figure is.
"""
import argparse
import json
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Callable

import numpy as np
import torch

from engine import Engine
from experiments import agents, chats, hints, memory, microbench, reasoning
from experiments.curves import Figure, Found, adapted, mapped, ratio, sweep
from experiments.figures import costs
from experiments.fleet import ROUTERS, play_fleet
from experiments.remote import RemoteEngine
from experiments.run import (
    HERE, SYSTEMS, Panel, System, at_scale, build, by_turn, drive, planned, play, summary, window)
from experiments.workload import cut_to_context


def under_one_load(options):
    if options.rates and len(options.rates) > 1:
        raise ValueError(f"this figure has one load: give --rates one number instead of "
                         f"{len(options.rates)}, or name another figure, such as fig10")


def default(options) -> Found:
    """Stateful against stateless on this machine, under a load that the
    stateless system cannot carry."""
    under_one_load(options)
    systems = "stateless", "gpu cache", "pensieve"
    rows, _ = sweep(systems, [], [HERE[0]._replace(rates=(60.0,))], options)
    stateless, pensieve = rows[0], rows[-1]
    gain = pensieve["throughput"] / stateless["throughput"]
    ratios = [ratio("throughput, pensieve / stateless", gain, options)]
    # The last ratio is the gain that we could expect if every computed token cost the same.
    for name in ("mean_normalized_latency_ms", "mean_ttft_ms", "computed_tokens"):
        ratios.append(ratio(f"{name}, stateless / pensieve", stateless[name] / pensieve[name],
                            options))
    return Found(rows, ratios)


def fleet(options) -> Found:
    """Servers behind a router, each under the same load. Ratios compare
    the routers with one server."""
    if not at_scale(options):
        raise ValueError("a fleet is simulated, not measured: add --simulate, and no profile of "
                         "this machine")
    under_one_load(options)
    panel, = adapted([Panel("opt-13b", "sharegpt", (2.0,))], options)
    alone = play_fleet((panel, 1, "consistent hashing", options))
    tasks = [(panel, servers, router, options) for servers in (4, 16, 64) for router in ROUTERS]
    rows = [alone | dict(system="one server"), *mapped(play_fleet, tasks, "run", options)]
    ratios = []
    for row in rows[1:]:
        slower = row["normalized_latency_ms"] / alone["normalized_latency_ms"]
        name = f"{row['servers']} servers, {row['system']}: normalized latency / one server"
        ratios.append(ratio(name, slower, options))
    return Found(rows, ratios)


def of_memory(count: Callable, options) -> Found:
    """A figure of memory.py. It counts slots and takes seconds from a cost model:
    --simulate changes nothing."""
    return Found(*count(options.seed))


# ---- measured only

def only_measured(options):
    if options.simulate:
        raise ValueError(f"{options.figure} is measured, not simulated: leave --simulate out")


def on_device(measure: Callable, options) -> Found:
    """A figure of microbench, on --device, or on CUDA if there is one."""
    only_measured(options)
    device = options.device
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return measure(device, options.seed)


def turns(options) -> Found:
    """How long a single user waits for the first token, turn by turn.

    Each turn brings 92 new tokens and generates 8, so the prompt of turn 35 ends at 3,492 tokens.
    Both engines serve each turn, one right after the other: a slow moment of the machine strikes
    both. A row has the median of five conversations."""
    only_measured(options)
    panel = adapted(HERE, options)[0]
    rng = np.random.default_rng(options.seed)
    engines = {name: build(SYSTEMS[name], panel, [], options) for name in ("stateless", "pensieve")}
    limit = min(3500, *(engine.scheduler.limit for engine in engines.values()))
    seconds = {(name, turn): [] for name in engines for turn in range(1, limit // 100 + 1)}
    for _ in range(5):
        for turn in range(1, limit // 100 + 1):
            prompt = rng.integers(engines["pensieve"].worker.vocab_size, size=92).tolist()
            for name, engine in engines.items():
                seconds[name, turn].append(first_token_seconds(engine, prompt))
        for engine in engines.values():
            engine.forget("user")
    for engine in engines.values():
        engine.close()
    rows = [dict(system=name, model=panel.model, dataset="one user", turn=turn,
                 context=100 * turn - 8,
                 ttft_ms=1e3 * median(times)) for (name, turn), times in seconds.items()]
    stateless, pensieve = rows[len(rows) // 2 - 1], rows[-1]
    name = f"first token at {pensieve['context']:,} tokens, stateless / pensieve"
    return Found(rows, [ratio(name, stateless["ttft_ms"] / pensieve["ttft_ms"], options)])


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    """Serve one turn of the conversation "user" -> the seconds until its first token."""
    begin = engine.clock()
    handle = engine.submit(prompt, "user", max_tokens=8, ignore_eos=True)
    next(iter(handle))
    seconds = engine.clock() - begin
    handle.result()
    return seconds


def hinted(options) -> Found:
    only_measured(options)
    return hints.play(options)


def profile(options) -> Found:
    """The cost of recomputing a chunk (for --profile) and the rates of
    this machine (for --hardware)."""
    only_measured(options)
    panel = adapted(HERE, options)[0]
    with closing(build(System(), panel, [], options)) as engine:
        rows, ratios = costs(engine.worker.profile(), panel, options)
        for part in microbench.machine(engine, options.seed):
            rows += [dict(system=type(part).__name__, name=name, value=value)
                     for name, value in part._asdict().items()]
    return Found(rows, ratios)


CHECKED = "throughput", "mean_ttft_ms", "normalized_latency_ms"


def check(options) -> Found:
    """The simulator's error: the same loads and systems, measured on
    this machine and simulated for it.

    `profile` measures the machine's rates again before each load, because a shared machine changes.
    A point's error is |simulated - measured| / measured."""
    idle_to_saturated = (2.0, 5.0, 10.0, 60.0)
    panel = adapted([HERE[0]._replace(rates=idle_to_saturated)], options)[0]
    rows = []
    with TemporaryDirectory() as directory:
        machine = Path(directory) / "machine.json"
        simulation = argparse.Namespace(**vars(options) | dict(simulate=True,
                                                               hardware=str(machine)))
        for rate in panel.rates:
            machine.write_text(json.dumps(dict(rows=profile(options).rows)))
            for system in ("stateless", "gpu cache", "pensieve"):
                measured = play(system, panel, rate, options)
                simulated = play(system, panel._replace(hardware=str(machine)), rate, simulation)
                rows += [measured | dict(how="measured"), simulated | dict(how="simulated")]
    points, ratios = list(zip(rows[::2], rows[1::2])), []
    for name in CHECKED:
        error = mean(abs(simulated[name] / measured[name] - 1) for measured, simulated in points)
        ratios.append(ratio(f"{name}: mean absolute error of {len(points)} points, %", 100 * error,
                            options))
    return Found(rows, ratios)


def serve(options) -> Found:
    """A running server, under clients that resend their history, and
    under stateful ones if it can."""
    only_measured(options)
    under_one_load(options)
    panel = adapted([HERE[0]._replace(rates=(20.0,))], options)[0]
    rows = [drive_server("resend", panel, options)]
    try:
        rows.append(drive_server("stateful", panel, options))
    except ValueError as error:
        print(f"no stateful clients: {error}", file=sys.stderr)
        return Found(rows, [])
    resend, stateful = rows
    ratios = [ratio(f"{name}, resend / stateful", resend[name] / stateful[name], options)
              for name in ("mean_ttft_ms", "mean_e2el_ms")]
    return Found(rows, ratios)


def drive_server(system: str, panel: Panel, options) -> dict:
    """The row of one kind of clients, under the names that `vllm bench serve` uses."""
    rate = panel.rates[0]
    engine = RemoteEngine(options.url, options.server_key, options.model,
                          stateful=system == "stateful")
    limit = engine.limit // 2               # the server's chat template adds tokens of its own
    users = list(cut_to_context(planned(panel, rate, options), limit))
    if not users:
        raise ValueError(f"no conversation of {panel.dataset} fits half of {engine.limit} tokens")
    begin, until = window(panel, rate, options)
    served = drive(engine, users, options.seed, until=until)
    engine.close()
    row = summary(served, begin)
    row = {name.replace("p50", "median"): value for name, value in row.items()}
    return dict(system=system, model=engine.model, dataset=panel.dataset, request_rate=rate,
                request_throughput=row["throughput"], **row, by_turn=by_turn(served, begin))


# ---- all of them, by name

def microbenchmark(measure: Callable, about: str, *more: str, x: str = "context") -> Figure:
    columns = "system", "model", "dataset", x, "seconds"
    return Figure(partial(on_device, measure), about, x, "seconds", columns + more)


# share: the time that the device's own rates would allow, divided by the time taken
RATES = "share", "gbytes_per_second", "tflops"

# Times are of two cores, without a GPU.
MORE = {
    "default": Figure(
        default, "three systems on the embedded model, measured here (a minute)",
        "request_rate", "normalized_latency_ms",
        bars=("mean_ttft_ms", "normalized_latency_ms", "throughput", "computed_tokens")),
    "turns": Figure(
        turns, "the first token of a single user, turn by turn, measured here (2 minutes)",
        "turn", "ttft_ms", ("system", "turn", "context", "ttft_ms"), linear=True),
    "fleet": Figure(
        fleet,
        "1, 4, 16 and 64 servers behind three kinds of routers (simulated only: half an hour)",
        "servers", "normalized_latency_ms",
        ("system", "servers", "hit_rate", "busiest_server", "throughput", "normalized_latency_ms",
         "p99_ttft_ms", "mean_ttft_ms")),
    "agents": Figure(
        agents.agents,
        "policies under agents, whose pauses are mostly tool calls, and what hints are worth "
        "(simulated only: 6 minutes a seed)", "request_rate", "recomputed_seconds",
        ("system", "request_rate", "cpu_gb", "throughput", "mean_ttft_ms", "p99_ttft_ms",
         "recomputed_seconds", "gpu_hit_rate", "hits_of_attainable"))._replace(seeds=3),
    "reasoning": Figure(
        reasoning.reasoning,
        "thoughts that the next turn does not resend: kept, or taken back "
        "(simulated only: 4 minutes a seed)", "request_rate", "mean_ttft_ms",
        ("system", "request_rate", "throughput", "mean_ttft_ms", "p99_ttft_ms",
         "normalized_latency_ms", "hits_of_attainable", "recomputed_tokens",
         "prompt_tokens_new"))._replace(seeds=3),
    "waste": Figure(
        partial(of_memory, memory.waste),
        "how many slots of a cache hold KV, by who gives them (1 minute)",
        "running", "tokens_per_second",
        ("system", "dataset", "kv_share", "running", "tokens_per_second")),
    "sharing": Figure(
        partial(of_memory, memory.sharing),
        "slots that several replies to a prompt save together (20 s)",
        "replies", "saved", ("system", "dataset", "chunk", "replies", "saved")),
    "together": Figure(
        partial(of_memory, memory.together),
        "throughput if several replies share a prompt, or all requests a prefix (15 s)",
        "running", "tokens_per_second",
        ("system", "replies", "prefix", "running", "tokens_per_second")),
    "hints": Figure(
        hinted,
        "a first token behind evicted KV, with and without a hint, measured here (1 minute)",
        "ttft_ms", "ttft_ms", ("system", "ttft_ms", "p95_step_ms"), bars=("ttft_ms",)),
    "serve": Figure(
        serve,
        "a running server (--url), for clients that resend their history or need not (1 minute)",
        "request_rate", "mean_ttft_ms"),
    "chats": Figure(
        chats.play,
        "a running server (--url), turn by turn: one chat, and eight interleaved (2 minutes)",
        "turn", "ttft_ms",
        ("system", "turn", "context", "cached", "ttft_ms", "cpu_ms", "tokens_per_second",
         "cpu_ms_per_token", "memory_mb", "peak_mb"), linear=True),
    "profile": Figure(
        profile, "the rates of this machine, to be saved for --hardware and --profile (15 s)",
        "context", "seconds", ("system", "context", "seconds", "name", "value")),
    "check": Figure(
        check,
        "the simulator's error on this machine: twelve points, measured and simulated (13 minutes)",
        "request_rate", "normalized_latency_ms", ("system", "how", "request_rate", *CHECKED)),
    "fig12": microbenchmark(
        microbench.kernel, "another name of kernel (15 s)", *RATES),
    "kernel": microbenchmark(
        microbench.kernel,
        "attention over scattered slots, against other ways to compute it (15 s)", *RATES),
    "swap": microbenchmark(
        microbench.swap, "copies between the tiers, alone and behind a step (1 minute)", *RATES),
    "step": microbenchmark(
        microbench.step, "decodes and prompts through the engine, and in transformers (40 s)",
        *RATES),
    "scheduling": microbenchmark(
        microbench.scheduling,
        "the host's work for a step, beside 100 to 1,000,000 idle conversations (2 minutes)",
        x="idle"),
}
