"""The figures: which systems run under which loads, and how they are compared (paper §6).

    FIGURES     at the end of this file: every figure by its name
    sweep       most figures: each system in each panel, at rising request rates

A panel is one diagram of a figure: a model, a dataset and request rates. A system's rows in a panel are
its curve, latency over throughput. A ratio compares two curves, beside the ratio that the paper reports:

    latency       stateless        pensieve
                      |                |
    at_ms ............|................|....        the ratio is that of the throughputs at at_ms:
                     /                /
            ________/________________/              pensieve / stateless = 2.7 / 2.1 = 1.29
                   2.1              2.7 turns/s

Every figure is a function of the parsed flags of bench.py (`options`). It returns rows, one for each
run, and ratios. With --simulate the sizes are the paper's; without it they are small, for the embedded
model.
"""
import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from tqdm import tqdm

from eviction import POLICIES, RecomputeCost
from experiments import memory, microbench
from experiments.fleet import ROUTERS, play_fleet
from experiments.policies import EXPERIMENTS
from experiments.remote import RemoteEngine
from experiments.run import (STATELESS, Panel, System, at_scale, build, drive, longest_context, planned, play,
                             summary, window)
from experiments.workload import PlannedConversation, PlannedTurn, cut_to_context

# On the paper's machines, simulated. The rates are wide enough that every system crosses at_ms.
ONE_GPU = [
    Panel("opt-13b", "sharegpt", (2.0, 3.0, 3.5, 4.0, 4.5, 5.0), at_ms=120, paper=1.36),
    Panel("llama2-13b-gqa", "sharegpt", (3.0, 6.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0),
          at_ms=180, paper=1.70),
    Panel("opt-13b", "ultrachat", (2.0, 3.0, 3.5, 4.0, 4.5), at_ms=120, paper=1.17),
    Panel("llama2-13b-gqa", "ultrachat", (3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0),
          at_ms=100, paper=1.58),
]
FOUR_GPUS = [
    Panel("opt-66b", "sharegpt", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), at_ms=200, paper=2.04, gpus=4),
    Panel("llama2-70b", "sharegpt", (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 24.0),
          at_ms=400, paper=3.0, gpus=4),
]
DRAFT = [
    Panel(model, dataset, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0), at_ms=120, think="reading")
    for dataset in ("sharegpt-draft", "lmsys-draft") for model in ("gpt3-6.7b", "gpt3-13b")
]
# On this machine, with the embedded model.
HERE = [Panel("tiny_chat", "many turns", (20.0, 40.0, 60.0, 80.0), think=0.1)]


class Found(NamedTuple):
    """What a figure returns."""
    rows: list[dict]
    ratios: list[dict]


def ratio(name: str, ours: float, options, paper: float | None = None) -> dict:
    return dict(name=name, paper=paper, ours=ours, how="simulated" if options.simulate else "measured")


# ---- curves: most figures

def sweep(systems: tuple[str, ...], simulated: list[Panel], measured: list[Panel], options) -> Found:
    """Run every system in every panel. Ratios compare the last system with each of the others.

    simulated, measured: the panels at the paper's scale, and those of this machine.
    ValueError: the figure has no panels at the scale that the flags ask for."""
    panels = simulated if at_scale(options) else measured
    if not panels:
        raise ValueError("this figure is of one machine: leave --simulate out, add --hardware with its "
                         "profile, or name one of the paper's figures, such as fig10")
    panels = adapted(panels, options)
    curves = play_curves(systems, panels, options)
    *others, last = systems
    ratios = []
    for panel in panels:
        for other in others:
            paper = panel.paper if other == others[0] else None         # the paper's ratio is to the first
            ratios.append(compared(panel, curves[panel, other], curves[panel, last], paper, options))
    return Found(list(chain(*curves.values())), ratios)


def adapted(panels: list[Panel], options) -> list[Panel]:
    """The panels as the flags change them: --model, --dataset, --rates, --think, --at-ms, --gpus,
    --hardware.

    A --trace replaces all panels by one, for a long-context model on H100 GPUs."""
    if options.trace:
        has_times = any(conversation.arrival for conversation in options.conversations)
        rates = (None,) if has_times else panels[0].rates
        gpus = 4 if at_scale(options) else 1
        panels = [Panel("llama2-13b-gqa", Path(options.trace).stem, rates, gpus=gpus, hardware="h100")]
    changes = {}
    for field in Panel._fields:
        value = getattr(options, field, None)
        if value is not None:
            changes[field] = value
    if changes:
        panels = [panel._replace(paper=None, **changes) for panel in panels]    # no longer the paper's panel
    return list(dict.fromkeys(panels))          # --model and --dataset together make several panels one


def play_curves(systems: tuple[str, ...], panels: list[Panel], options) -> dict[tuple, list[dict]]:
    """(panel, system) -> its curve."""
    tasks = [(panel, system, options) for panel in panels for system in systems]
    curves = mapped(play_curve, tasks, options)
    return {(panel, system): curve for (panel, system, _), curve in zip(tasks, curves)}


def mapped(function: Callable, tasks: list, options) -> list:
    """function(task) for each task. Simulations run on all cores at once, measured runs one by one."""
    progress = partial(tqdm, total=len(tasks), unit="run", leave=False, disable=None)
    jobs = min(options.jobs, len(tasks)) if options.simulate else 1
    if jobs == 1:
        return list(progress(map(function, tasks)))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(progress(pool.map(function, tasks)))


def play_curve(task: tuple[Panel, str, argparse.Namespace]) -> list[dict]:
    """The rows of one system in one panel at rising rates, until its latency is above twice at_ms."""
    panel, system, options = task
    rows = []
    for rate in panel.rates:
        row = play(system, panel, rate, options)
        rows.append(row)
        if panel.at_ms and row["normalized_latency_ms"] > 2 * panel.at_ms:
            break
    return rows


def compared(panel: Panel, other: list[dict], last: list[dict], paper: float | None, options) -> dict:
    """The ratio of two curves: of their throughputs at the panel's at_ms.

    If the panel has no at_ms, we compare the latencies at the highest rate."""
    systems = f"{last[0]['system']} / {other[0]['system']}"
    if panel.at_ms is None:
        ours = last[-1]["normalized_latency_ms"] / other[-1]["normalized_latency_ms"]
        return ratio(f"{panel}: latency at the highest rate, {systems}", ours, options)

    name = f"{panel}: throughput at {panel.at_ms:g} ms per token, {systems}"
    if last[-1]["normalized_latency_ms"] <= panel.at_ms:
        name += ", at least"                            # at a higher rate it might have served more
    if max(other[0]["normalized_latency_ms"], last[0]["normalized_latency_ms"]) > panel.at_ms:
        name += ", extrapolated: try lower rates"
    ours = throughput_at(last, panel.at_ms) / throughput_at(other, panel.at_ms)
    return ratio(name, ours, options, paper)


def throughput_at(rows: list[dict], latency_ms: float) -> float:
    """Turns per second at which a system's curve first crosses a normalized latency.

    Between two rates the curve is a straight line: 2.0 turns/s at 30 ms and 2.5 turns/s at 130 ms give
    2.25 at 80 ms. If the lowest rate is already too slow, the line begins at 0 turns/s and 0 ms. If no
    rate is too slow, the result is the throughput at the highest rate."""
    first = rows[0]
    if first["normalized_latency_ms"] > latency_ms:
        return first["throughput"] * latency_ms / first["normalized_latency_ms"]
    for below, above in pairwise(rows):
        if above["normalized_latency_ms"] > latency_ms:
            rise = above["normalized_latency_ms"] - below["normalized_latency_ms"]
            share = (latency_ms - below["normalized_latency_ms"]) / rise
            return below["throughput"] + share * (above["throughput"] - below["throughput"])
    return rows[-1]["throughput"]


def everyday(options) -> Found:
    """Stateful against stateless on this machine, under a load that the stateless system cannot carry."""
    if options.rates and len(options.rates) > 1:
        raise ValueError(f"this figure compares systems under one load: give --rates one number instead of "
                         f"{len(options.rates)}, or name another figure, such as fig10")
    systems = "stateless", "gpu cache", "pensieve"
    rows, _ = sweep(systems, [], [HERE[0]._replace(rates=(60.0,))], options)
    stateless, pensieve = rows[0], rows[-1]
    gain = pensieve["throughput"] / stateless["throughput"]
    ratios = [ratio("throughput, pensieve / stateless", gain, options)]
    # The last ratio is the gain that we could expect if every computed token cost the same.
    for name in ("mean_normalized_latency_ms", "mean_ttft_ms", "computed_tokens"):
        ratios.append(ratio(f"{name}, stateless / pensieve", stateless[name] / pensieve[name], options))
    return Found(rows, ratios)


def fig14(options) -> Found:
    """All policies under the same load, also those that no server has."""
    panels = [Panel("opt-13b", "sharegpt", (3.0, 3.5, 4.0, 4.5))]
    rows, _ = sweep((*POLICIES, *EXPERIMENTS), panels, HERE, options)
    by_load = {}                                # (model, rate) -> policy -> row
    for row in rows:
        by_load.setdefault((row["model"], row["request_rate"]), {})[row["policy"]] = row
    ratios = [policy_ratios(by_policy, options) for by_policy in by_load.values()]
    return Found(rows, list(chain(*ratios)))


def policy_ratios(by_policy: dict[str, dict], options) -> list[dict]:
    """The policies' rows of one load, by policy -> ratios to the retention value."""
    retention, lru = by_policy["retention"], by_policy["lru"]
    rate = retention["request_rate"]
    load = f"at {rate:g}/s" if rate else retention["dataset"]
    recomputed = retention["recomputed_tokens"] / max(lru["recomputed_tokens"], 1)
    hits = 100 * (retention["cpu_hit_rate"] - lru["cpu_hit_rate"])
    ratios = [
        ratio(f"{load}: recomputed tokens, retention / lru (paper: at best)", recomputed, options, 0.854),
        ratio(f"{load}: CPU hit rate, retention - lru, points (paper: at best)", hits, options, 4.4)]
    for policy, row in by_policy.items():
        if policy not in ("retention", "lru"):
            ours = row["recomputed_tokens"] / max(retention["recomputed_tokens"], 1)
            ratios.append(ratio(f"{load}: recomputed tokens, {policy} / retention", ours, options))
    return ratios


def fleet(options) -> Found:
    """Servers behind a router, each under the same load. Ratios compare the routers with one server."""
    if not at_scale(options):
        raise ValueError("a fleet is simulated, not measured: add --simulate, and no profile of this machine")
    panel, = adapted([Panel("opt-13b", "sharegpt", (2.0,))], options)
    alone = play_fleet((panel, 1, "consistent hashing", options))
    tasks = [(panel, servers, router, options) for servers in (4, 16, 64) for router in ROUTERS]
    rows = [alone | dict(system="one server"), *mapped(play_fleet, tasks, options)]
    ratios = []
    for row in rows[1:]:
        slower = row["normalized_latency_ms"] / alone["normalized_latency_ms"]
        name = f"{row['servers']} servers, {row['system']}: normalized latency / one server"
        ratios.append(ratio(name, slower, options))
    return Found(rows, ratios)


# ---- single costs

def fig3(options) -> Found:
    """Seconds to prefill histories and a short prompt, against seconds to generate the replies."""
    if at_scale(options):
        model, batch, reply, histories = "opt-13b", 32, 200, (128, 256, 512, 1024, 2048, 4096)
    else:
        model, batch, reply, histories = "tiny_chat", 8, 50, (50, 100, 200, 400, 800)
    panel, = adapted([Panel(model, "one turn")], options)
    rows = []
    for history in histories:
        prefill, generation = prefill_and_generation(panel, batch, history + 32, reply, options)
        row = dict(model=panel.model, dataset=panel.dataset, history=history)
        rows.append(dict(system="prefill", **row, seconds=prefill))
        rows.append(dict(system=f"generation of {reply} tokens", **row, seconds=generation))
    name = f"{histories[-1]} tokens of history: prefill / generation"
    return Found(rows, [ratio(name, prefill / generation, options)])


def prefill_and_generation(panel: Panel, batch: int, prompt: int, reply: int, options
                           ) -> tuple[float, float]:
    """Serve `batch` requests at once -> seconds until all have their first token, seconds of the rest."""
    users = [PlannedConversation(str(n), [PlannedTurn(prompt, reply)]) for n in range(batch)]
    room = dict(gpu_cache_tokens=2 * batch * longest_context(users), max_batch_tokens=batch * prompt,
                max_running=batch)
    engine = build(System(STATELESS | room), panel, users, options)
    served = drive(engine, users, options.seed)
    engine.close()
    prefilled = max(turn.first_token for turn in served)
    return prefilled, max(turn.ended for turn in served) - prefilled


def fig4(options) -> Found:
    """The seconds to recompute a chunk: attention rises with its context, all else stays the same."""
    panel, = adapted([Panel("opt-13b" if at_scale(options) else "tiny_chat", "one chunk")], options)
    longest = [PlannedConversation("", [PlannedTurn(16_384, 1)])]
    return costs(build(System(), panel, longest, options).worker.profile(), panel, options)


def costs(cost: RecomputeCost, panel: Panel, options) -> Found:
    """A cost profile as rows, two for each profiled length."""
    rows = []
    for length, attention in zip(cost.lengths, cost.seconds):
        row = dict(model=panel.model, dataset=panel.dataset, context=length)
        rows.append(dict(system="attention", **row, seconds=attention))
        rows.append(dict(system="all else", **row, seconds=cost.rest))
    name = f"attention of a chunk at {cost.lengths[-1]} tokens / all else"
    return Found(rows, [ratio(name, cost.seconds[-1] / cost.rest, options)])


def of_memory(count: Callable, options) -> Found:
    """A figure of memory.py: it counts slots, and needs neither a device nor a model."""
    return Found(*count(options.seed))


# ---- measured only

def only_measured(options):
    if options.simulate:
        raise ValueError(f"{options.figure} is measured, not simulated: leave --simulate out")


def on_device(measure: Callable, options) -> Found:
    """A figure of microbench, on --device, or on CUDA if there is one."""
    only_measured(options)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Found(*measure(device, options.seed))


def profile(options) -> Found:
    """The cost of recomputing a chunk (for --profile) and the rates of this machine (for --hardware)."""
    only_measured(options)
    panel = adapted(HERE, options)[0]
    engine = build(System(), panel, [], options)
    cost = engine.worker.profile()
    rows, ratios = costs(cost, panel, options)
    for part in microbench.machine(engine, cost, options.seed):
        rows += [dict(system=type(part).__name__, name=name, value=value)
                 for name, value in part._asdict().items()]
    engine.close()
    return Found(rows, ratios)


def serve(options) -> Found:
    """A running server, under clients that resend their history, and under stateful ones if it can."""
    panel = adapted(HERE, options)[0]
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
    engine = RemoteEngine(options.url, options.server_key, options.model, stateful=system == "stateful")
    limit = engine.limit // 2               # the server's chat template adds tokens of its own
    users = list(cut_to_context(planned(panel, rate, options), limit))
    if not users:
        raise ValueError(f"no conversation of {panel.dataset} fits half of {engine.limit} tokens")
    begin, until = window(panel, rate, options)
    row = summary(drive(engine, users, options.seed, until=until), begin)
    row = {name.replace("p50", "median"): value for name, value in row.items()}
    return dict(system=system, model=engine.model, dataset=panel.dataset, request_rate=rate,
                request_throughput=row["throughput"], **row)


# ---- all figures by name

class Figure(NamedTuple):
    run: Callable[[argparse.Namespace], Found]
    about: str                      # a line for --help
    x: str                          # of its plot: a field of its rows
    y: str
    columns: tuple = ()             # of its table: fields of its rows; none: a line for each field
    bars: tuple = ()                # fields to draw as bars, a bar for each row, instead of y over x


def latency_figure(run: Callable, about: str, x: str = "throughput", y: str = "normalized_latency_ms"
                   ) -> Figure:
    return Figure(run, about, x, y, (
        "system", "request_rate", "throughput", "normalized_latency_ms", "p90_normalized_latency_ms",
        "mean_ttft_ms", "mean_tpot_ms", "recomputed_tokens", "gpu_hit_rate", "cpu_hit_rate"))


def microbenchmark(measure: Callable, about: str, *more: str) -> Figure:
    columns = "system", "model", "dataset", "context", "seconds"
    return Figure(partial(on_device, measure), about, "context", "seconds", columns + more)


# share: the time that the device's own rates would allow, divided by the time taken
RATES = "share", "gbytes_per_second", "tflops"

# Times are of two cores, without a GPU. A simulation takes less time with --rates, --seconds or --model.
FIGURES = {
    "default": Figure(
        everyday, "three systems on the embedded model, measured here (1 minute)",
        "request_rate", "normalized_latency_ms",
        bars=("mean_ttft_ms", "normalized_latency_ms", "throughput", "computed_tokens")),
    "fig3": Figure(
        fig3, "seconds to prefill a history, and to generate the reply (10 s, simulated too)",
        "history", "seconds", ("system", "history", "seconds")),
    "fig4": Figure(
        fig4, "seconds to recompute a chunk, by the context before it (10 s, simulated too)",
        "context", "seconds", ("system", "context", "seconds")),
    "fig10": latency_figure(
        partial(sweep, ("stateless", "stateless, fused", "gpu cache", "pensieve"), ONE_GPU, HERE),
        "latency over throughput of four systems, one GPU (4 minutes; simulated: hours)"),
    "fig11": latency_figure(
        partial(sweep, ("stateless", "gpu cache", "pensieve"), FOUR_GPUS, HERE),
        "latency over throughput of larger models, four GPUs (3 minutes; simulated: hours)"),
    "fig12": microbenchmark(
        microbench.kernel, "attention over scattered slots, as kernel, which is the same (15 s)", *RATES),
    "fig13": latency_figure(
        partial(sweep, ("separate phases", "pensieve"), [ONE_GPU[0]._replace(paper=None)], HERE),
        "prefill and decode in one batch or in batches of their own (2 minutes; simulated: 10)"),
    "fig14": latency_figure(
        fig14, "eviction policies, also some that no server has (8 minutes; simulated: 30)",
        "request_rate", "recomputed_tokens"),
    "fig15": latency_figure(
        partial(sweep, ("stateless", "pensieve"),
                [ONE_GPU[0]._replace(think=think, paper=None) for think in (60.0, 120.0, 300.0, 600.0)],
                [HERE[0]._replace(think=think) for think in (0.1, 0.4, 1.6)]),
        "stateless and Pensieve, by the users' think time (6 minutes; simulated: 40)"),
    "fleet": Figure(
        fleet, "1, 4, 16 and 64 servers behind three kinds of routers (simulated only: half an hour)",
        "servers", "normalized_latency_ms",
        ("system", "servers", "hit_rate", "busiest_server", "throughput", "normalized_latency_ms",
         "p99_ttft_ms", "mean_ttft_ms")),
    "draft": latency_figure(
        partial(sweep, ("stateless", "pensieve", "draft"), DRAFT, HERE),
        "the system of the paper's draft, on its datasets (3 minutes; simulated: hours)"),
    "waste": Figure(
        partial(of_memory, memory.waste), "how many slots of a cache hold KV, by who gives them (1 minute)",
        "running", "tokens_per_second", ("system", "dataset", "kv_share", "running", "tokens_per_second")),
    "sharing": Figure(
        partial(of_memory, memory.sharing), "slots that several replies to a prompt save together (20 s)",
        "replies", "saved", ("system", "dataset", "chunk", "replies", "saved")),
    "serve": Figure(
        serve, "a running server (--url), for clients that resend their history or need not (1 minute)",
        "request_rate", "mean_ttft_ms"),
    "profile": Figure(
        profile, "the rates of this machine, to be saved for --hardware and --profile (10 s)",
        "context", "seconds", ("system", "context", "seconds", "name", "value")),
    "kernel": microbenchmark(
        microbench.kernel, "attention over scattered slots, against other ways to compute it (15 s)", *RATES),
    "swap": microbenchmark(
        microbench.swap, "copies between the tiers, alone and behind a step (1 minute)", *RATES),
    "step": microbenchmark(
        microbench.step, "decodes and prompts through the engine, and in transformers (40 s)", *RATES),
    "scheduling": microbenchmark(
        microbench.scheduling, "the host's work for a step, beside 100,000 idle conversations (2 minutes)"),
}
