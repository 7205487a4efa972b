"""Systems x workloads: the paper's evaluation (§6), measured on this machine or simulated at the paper's scale.

    python bench.py                      three systems on the embedded model, measured, about a minute
    python bench.py fig10 --simulate     a figure of the paper: the same engine on a SimulatedWorker and a virtual clock
    python bench.py fig10                the same figure in small, measured with the real worker on this machine

A figure is a row of FIGURES: systems (flags of Engine) x panels (model, workload, request rates). One loop, `drive`, feeds them
all: a turn is due when its user has thought about the last reply; the engine steps whenever it has work. Latencies count from
when a turn is due, waiting included. Normalized latency is a turn's latency per token of its reply, the paper's measure. Replies
have the workload's length (EOS is ignored). Compare measured columns of one run only: machines are noisy; simulations repeat."""
import argparse
import heapq
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from experiments import microbench
from config import Config
from engine import Engine
from eviction import POLICIES, RecomputeCost
from experiments.policies import EXPERIMENTS, Oracle
from checkpoint import PRESETS, find_checkpoint, read_config
from experiments.remote import RemoteEngine
from scheduler import SOURCES
from experiments.simulator import HARDWARE, OPERATORS, Hardware, Operators, SimulatedWorker, VirtualClock, kv_token_bytes
from experiments.workload import SHAPES, Conversation, Turn, cut, exponential_think, load, many_turns, reading_think, synthetic, with_arrivals

# ---- what is compared


class System(NamedTuple):
    flags: dict = {}                # of Engine
    operators: str = "eager"        # of a simulation


STATELESS = dict(stateless=True, cpu_cache_tokens=0)
SYSTEMS = {
    "stateless": System(STATELESS),                             # forgets all KV at the end of each request, as vLLM did
    "stateless, fused": System(STATELESS, "fused"),             # stands for TensorRT-LLM (see OPERATORS)
    "gpu cache": System(dict(cpu_cache_tokens=0)),              # the first tier alone: what leaves the GPU is recomputed
    "pensieve": System(),
    "separate phases": System(dict(separate_phases=True)),
    "draft": System(dict(policy="trailing-half", swap_threshold=0.5)),      # as the paper's draft evicts
    **{name: System(dict(policy=policy)) for name, policy in {**dict(zip(POLICIES, POLICIES)), **EXPERIMENTS}.items()},
}


class Panel(NamedTuple):
    """One diagram. rates: in requests per second; none: a trace's own times. at_ms: throughputs are compared at this normalized
    latency; paper: the paper's ratio of the last system to the first there."""
    model: str
    dataset: str
    rates: tuple = (None,)
    at_ms: float | None = None
    paper: float | None = None
    gpus: int = 1
    hardware: str = "a100"
    think: float | str = 60.0       # mean seconds between a reply and the next turn, or "reading": it depends on the reply

    def __str__(self):
        return f"{self.model}, {self.dataset}, {thinking(self.think)}"


def thinking(think: float | str) -> str:
    return "think while reading" if think == "reading" else f"think {think:g} s"


GPU_BYTES, CPU_BYTES = 40e9, 220e9                                       # of KV per GPU (paper, §6.1)
SIMULATED = dict(max_running=256, max_batch_tokens=2048)                 # vLLM's limits
MEASURED = dict(gpu_cache_tokens=3072, cpu_cache_tokens=12288)           # of the embedded model, where "many turns" needs some 12,000


# ---- one run

class Served(NamedTuple):
    """One turn, times in seconds since the start of the run."""
    due: float
    first_token: float
    ended: float
    output_tokens: int
    usage: dict


def drive(engine, conversations: list[Conversation], seed: int, sleep=time.sleep, until: float = math.inf,
          foresee=lambda name, seconds: None) -> list[Served]:
    """Every turn of every conversation, at its time; stops `until` seconds after the start. The prompts are random tokens.
    Steps the engine in this thread. foresee: is told, with every turn, how long its user will think about the reply."""
    rng, begin = np.random.default_rng([seed, 2]), engine.clock()
    due = [(conversation.arrival, n, 0) for n, conversation in enumerate(conversations)]       # when, whose, which turn
    heapq.heapify(due)
    running, first, served, now = {}, {}, [], 0.0                                              # by handle
    while (due or running) and now < until:
        while due and due[0][0] <= now:
            when, n, index = heapq.heappop(due)
            turn, later = conversations[n].turns[index], conversations[n].turns[index + 1:]
            foresee(conversations[n].name, later[0].think_seconds if later else math.inf)
            prompt = rng.integers(engine.worker.vocab_size, size=turn.input_tokens).tolist()
            handle = engine.submit(prompt, conversations[n].name, max_tokens=turn.output_tokens, ignore_eos=True)
            running[handle] = when, n, index
        if running:
            engine.step()
        else:
            sleep(due[0][0] - now)
        now = engine.clock() - begin
        for handle in [handle for handle in running if handle.request and handle.request.generated]:
            first.setdefault(handle, now)
            if handle.request.finish_reason:
                when, n, index = running.pop(handle)
                reply = handle.result()
                served.append(Served(when, first.pop(handle), now, len(reply.token_ids), reply.usage))
                if index + 1 < len(conversations[n].turns):
                    heapq.heappush(due, (now + conversations[n].turns[index + 1].think_seconds, n, index + 1))
    return served


def summary(served: list[Served], begin: float = 0.0) -> dict:
    """The figures of the turns that ended after `begin` seconds, under the names that serving benchmarks use."""
    served = [turn for turn in served if turn.ended > begin]
    if not served:
        raise ValueError("no turn has ended in time: give --seconds a larger number, or the system a lower rate")
    seconds, outputs = max(turn.ended for turn in served) - begin, sum(turn.output_tokens for turn in served)
    row = dict(throughput=len(served) / seconds, output_throughput=outputs / seconds,
               total_token_throughput=(outputs + sum(turn.usage["prompt_tokens"] for turn in served)) / seconds)
    times = dict(ttft=[turn.first_token - turn.due for turn in served],
                 tpot=[(turn.ended - turn.first_token) / max(turn.output_tokens - 1, 1) for turn in served],
                 e2el=[turn.ended - turn.due for turn in served],
                 normalized_latency=[(turn.ended - turn.due) / max(turn.output_tokens, 1) for turn in served])
    row["normalized_latency_ms"] = 1e3 * float(np.mean(times["normalized_latency"]))
    for name, values in times.items():
        row[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
        row |= {f"p{p}_{name}_ms": 1e3 * float(np.percentile(values, p)) for p in (50, 90, 99)}
    prompt = {source: sum(turn.usage[source] for turn in served) for source in SOURCES}
    seen_before = max(1, prompt["gpu"] + prompt["cpu"] + prompt["recomputed"])
    row |= {f"prompt_tokens_{source}": n for source, n in prompt.items()}
    row |= dict(recomputed_tokens=prompt["recomputed"], gpu_hit_rate=prompt["gpu"] / seen_before, cpu_hit_rate=prompt["cpu"] / seen_before)
    return row | dict(turns=len(served), computed_tokens=prompt["recomputed"] + prompt["new"] + outputs)


def build(system: System, panel: Panel, conversations: list[Conversation], options) -> Engine:
    """The engine of one run: a real one, or the same on a simulated worker and a virtual clock."""
    if not options.simulate:
        return Engine(panel.model, cost=options.profile and load_profile(options.profile), **(MEASURED | options.given | system.flags))
    flags = (SIMULATED if at_scale(options) else MEASURED) | options.given | system.flags
    hardware, operators = (HARDWARE[panel.hardware], OPERATORS[system.operators]) if at_scale(options) else load_machine(panel.hardware)
    shape, clock = PRESETS.get(panel.model) or read_config(find_checkpoint(panel.model))[1], VirtualClock()
    token, chunk = kv_token_bytes(shape, hardware.element_size), flags.get("chunk_size", Config.chunk_size)
    slots = flags.get("gpu_cache_tokens", int(GPU_BYTES * panel.gpus / token))
    places = flags.get("cpu_cache_tokens", int(CPU_BYTES * panel.gpus / token)) // chunk
    worker = SimulatedWorker(shape, hardware, operators, clock, slots, places,
                             min(slots, longest_context(conversations)), chunk, panel.gpus, not flags.get("no_pipeline"))
    return Engine(panel.model, worker=worker, clock=clock, **flags)


def at_scale(options) -> bool:
    """A simulation of the paper's machines, not of this one."""
    return options.simulate and options.hardware in (None, *HARDWARE)


def longest_context(conversations: list[Conversation]) -> int:
    return max(sum(turn.input_tokens + turn.output_tokens for turn in conversation.turns) for conversation in conversations)


def workload(panel: Panel, rate: float | None, options) -> list[Conversation]:
    """The panel's conversations with their arrivals."""
    think = reading_think if panel.think == "reading" else partial(exponential_think, mean=panel.think)
    if options.trace and not rate:
        return options.conversations
    if not options.trace and panel.dataset == "many turns":
        return many_turns(800, rate, think, options.seed)
    conversations = options.conversations if options.trace else \
        synthetic(panel.dataset, math.ceil(rate * options.seconds / SHAPES[panel.dataset].turns) + 1, options.seed)
    return with_arrivals(conversations, rate, options.seed, think)


def window(panel: Panel, rate: float | None, options) -> tuple[float, float]:
    """The seconds of a run that count: the first third only fills the caches. "Many turns", and a trace with times, end by themselves."""
    return (options.seconds / 3, options.seconds) if rate and panel.dataset != "many turns" else (0.0, math.inf)


def play(name: str, panel: Panel, rate: float | None, options) -> dict:
    """One row: a system, a panel, a rate."""
    conversations = workload(panel, rate, options)
    engine = build(SYSTEMS[name], panel, conversations, options)
    conversations = list(cut(conversations, engine.scheduler.limit))
    if not conversations:
        raise ValueError(f"no conversation of {panel.dataset} fits {engine.scheduler.limit} tokens: give --gpu-cache-tokens a larger number")
    policy, (filled, until) = engine.cache.policy, window(panel, rate, options)
    served = drive(engine, conversations, options.seed, engine.clock.sleep if options.simulate else time.sleep, until,
                   policy.foresee if isinstance(policy, Oracle) else lambda name, seconds: None)
    row, stats = summary(served, filled), engine.stats()
    policy = name if name in EXPERIMENTS else engine.config.policy
    engine.close()
    return dict(system=name, policy=policy, model=panel.model, dataset=panel.dataset, think=panel.think, request_rate=rate) | {**row, **stats, **row}


# ---- figures

class Found(NamedTuple):
    rows: list[dict]
    ratios: list[dict]


def ratio(name: str, ours: float, paper: float | None, options) -> dict:
    return dict(name=name, paper=paper, ours=ours, how="simulated" if options.simulate else "measured")


def curve(task: tuple) -> list[dict]:
    """One system in one panel at rising rates, until it is more than twice too slow."""
    name, panel, options = task
    rows = []
    for rate in panel.rates:
        rows.append(play(name, panel, rate, options))
        if panel.at_ms and rows[-1]["normalized_latency_ms"] > 2 * panel.at_ms:
            break
    return rows


def in_parallel(function: Callable, tasks: list, options) -> list:
    """function of each task, in order. Simulations use all cores; what is measured has the machine for itself."""
    jobs = min(options.jobs, len(tasks)) if options.simulate else 1
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        return list(tqdm((pool.map if pool else map)(function, tasks), total=len(tasks), unit="run", leave=False, disable=None))


def sweep(systems: tuple, simulated: list[Panel], measured: list[Panel], options) -> Found:
    """Every system in every panel. Ratios compare the last system with each other one, at a panel's latency."""
    panels = simulated if at_scale(options) else measured
    if not panels:
        raise ValueError("this figure is of one machine: leave --simulate out, add --hardware with its profile, or name one of the paper's, such as fig10")
    panels = adapted(panels, options)
    tasks = [(name, panel, options) for panel in panels for name in systems]
    curves = in_parallel(curve, tasks, options)
    ratios = []
    for n, panel in enumerate(panels):
        *others, last = curves[n * len(systems):(n + 1) * len(systems)]
        ratios += [compared(panel, other, last, panel.paper if other is others[0] else None, options) for other in others]
    return Found(list(chain(*curves)), ratios)


def compared(panel: Panel, other: list[dict], last: list[dict], paper: float | None, options) -> dict:
    """Two curves: throughput at the panel's latency; where it names none, latency at the highest rate."""
    names = f"{last[0]['system']} / {other[0]['system']}"
    if panel.at_ms:
        least = "" if last[-1]["normalized_latency_ms"] > panel.at_ms else ", at least"         # it could have carried more
        doubt = "" if max(other[0]["normalized_latency_ms"], last[0]["normalized_latency_ms"]) <= panel.at_ms else ", extrapolated: try lower rates"
        return ratio(f"{panel}: throughput at {panel.at_ms:g} ms per token, {names}{least}{doubt}",
                     throughput_at(last, panel.at_ms) / throughput_at(other, panel.at_ms), paper, options)
    return ratio(f"{panel}: latency at the highest rate, {names}", last[-1]["normalized_latency_ms"] / other[-1]["normalized_latency_ms"], None, options)


def adapted(panels: list[Panel], options) -> list[Panel]:
    """The panels as the command line has changed them: another model, other rates or think times, a file's conversations."""
    if options.trace:
        timed = any(conversation.arrival for conversation in options.conversations)
        panels = [Panel("llama2-13b-gqa", Path(options.trace).stem, (None,) if timed else panels[0].rates, gpus=4 if at_scale(options) else 1, hardware="h100")]
    changes = {field: value for field in Panel._fields if (value := getattr(options, field, None)) is not None}
    return list(dict.fromkeys(panel._replace(paper=None, **changes) if changes else panel for panel in panels))


def throughput_at(rows: list[dict], latency_ms: float) -> float:
    """Turns per second where the curve of a system first crosses a normalized latency: between two rates, straight; where all are
    faster, that of the last."""
    before = None
    for row in rows:
        if row["normalized_latency_ms"] > latency_ms:
            if before is None:
                return row["throughput"] * latency_ms / row["normalized_latency_ms"]
            share = (latency_ms - before["normalized_latency_ms"]) / (row["normalized_latency_ms"] - before["normalized_latency_ms"])
            return before["throughput"] + share * (row["throughput"] - before["throughput"])
        before = row
    return before["throughput"]


PAPER = [Panel("opt-13b", "sharegpt", (2.0, 3.0, 3.5, 4.0, 4.5, 5.0), 120, 1.36),
         Panel("llama2-13b-gqa", "sharegpt", (3.0, 6.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0), 180, 1.70),
         Panel("opt-13b", "ultrachat", (2.0, 3.0, 3.5, 4.0, 4.5), 120, 1.17),
         Panel("llama2-13b-gqa", "ultrachat", (3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0), 100, 1.58)]
FOUR_GPUS = [Panel("opt-66b", "sharegpt", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 200, 2.04, gpus=4),
             Panel("llama2-70b", "sharegpt", (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 24.0), 400, 3.0, gpus=4)]
DRAFT = [Panel(model, dataset, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0), 120, think="reading")
         for dataset in ("sharegpt-draft", "lmsys-draft") for model in ("gpt3-6.7b", "gpt3-13b")]
HERE = [Panel("tiny_chat", "many turns", (20.0, 40.0, 60.0, 80.0), think=0.1)]


def fig3(options) -> Found:
    """Seconds to prefill a batch of histories with a short prompt behind each, against seconds to generate its replies."""
    batch, reply, histories = (32, 200, (128, 256, 512, 1024, 2048, 4096)) if at_scale(options) else (8, 50, (50, 100, 200, 400, 800))
    panel, rows = adapted([Panel("opt-13b" if at_scale(options) else "tiny_chat", "one turn")], options)[0], []
    for history in histories:
        users = [Conversation(str(n), [Turn(history + 32, reply)]) for n in range(batch)]
        room = dict(gpu_cache_tokens=2 * batch * longest_context(users), max_batch_tokens=batch * (history + 32), max_running=batch)
        engine = build(System(STATELESS | room), panel, users, options)
        served = drive(engine, users, options.seed)
        prefilled, ended = max(turn.first_token for turn in served), max(turn.ended for turn in served)
        rows += [dict(system=phase, model=panel.model, dataset=panel.dataset, history=history, seconds=seconds)
                 for phase, seconds in (("prefill", prefilled), (f"generation of {reply} tokens", ended - prefilled))]
        engine.close()
    return Found(rows, [ratio(f"{histories[-1]} tokens of history: prefill / generation", rows[-2]["seconds"] / rows[-1]["seconds"], None, options)])


def fig4(options) -> Found:
    """The profile of a chunk's recomputation: attention rises with its context, all else is the same."""
    panel = adapted([Panel("opt-13b" if at_scale(options) else "tiny_chat", "one chunk")], options)[0]
    return costs(build(System(), panel, [Conversation("", [Turn(16_384, 1)])], options).worker.profile(), panel, options)


def costs(cost: RecomputeCost, panel: Panel, options) -> Found:
    rows = [dict(system=part, model=panel.model, dataset=panel.dataset, context=length, seconds=seconds)
            for length, attention in zip(cost.lengths, cost.seconds) for part, seconds in (("attention", attention), ("all else", cost.rest))]
    return Found(rows, [ratio(f"attention of a chunk at {cost.lengths[-1]} tokens / all else", cost.seconds[-1] / cost.rest, None, options)])


def fig14(options) -> Found:
    """Policies under the same load, among them two that no server can have: see eviction.EXPERIMENTS."""
    rates = (3.0, 3.5, 4.0, 4.5)
    rows, _ = sweep((*POLICIES, *EXPERIMENTS), [Panel("opt-13b", "sharegpt", rates)], HERE, options)
    ratios = []
    for paper in (row for row in rows if row["policy"] == "retention"):
        others = {row["policy"]: row for row in rows if (row["model"], row["request_rate"]) == (paper["model"], paper["request_rate"])}
        load, lru = f"at {paper['request_rate']:g}/s" if paper["request_rate"] else paper["dataset"], others["lru"]
        ratios += [ratio(f"{load}: recomputed tokens, retention / lru (paper: at best)", paper["recomputed_tokens"] / max(lru["recomputed_tokens"], 1), 0.854, options),
                   ratio(f"{load}: CPU hit rate, retention - lru, points (paper: at best)", 100 * (paper["cpu_hit_rate"] - lru["cpu_hit_rate"]), 4.4, options)]
        ratios += [ratio(f"{load}: recomputed tokens, {name} / retention", row["recomputed_tokens"] / max(paper["recomputed_tokens"], 1), None, options)
                   for name, row in others.items() if name not in ("retention", "lru")]
    return Found(rows, ratios)


def everyday(options) -> Found:
    """Stateful against stateless on this machine, under a load that the stateless system cannot carry."""
    rows, _ = sweep(("stateless", "gpu cache", "pensieve"), [], [HERE[0]._replace(rates=(60.0,))], options)
    first, last = rows[0], rows[-1]
    return Found(rows, [
        ratio("throughput, pensieve / stateless", last["throughput"] / first["throughput"], None, options),
        *(ratio(f"{name}, stateless / pensieve", first[name] / last[name], None, options)
          for name in ("mean_normalized_latency_ms", "mean_ttft_ms", "computed_tokens"))])      # the last: were all tokens equally dear


def only_measured(options):
    if options.simulate:
        raise ValueError(f"{options.figure} is measured, not simulated: leave --simulate out")


def on_device(measure: Callable, options) -> Found:
    """A microbenchmark, on CUDA if there is one."""
    only_measured(options)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return Found(*measure(device, options.seed))


def serve(options) -> Found:
    """Anyone's running server under the names that `vllm bench serve` uses; clients that resend their history, and such that need not."""
    panel, rows = adapted(HERE, options)[0], []
    for name, stateful in (("resend", False), ("stateful", True)):
        engine = RemoteEngine(options.url, options.server_key, options.model, stateful)
        users = list(cut(workload(panel, panel.rates[0], options), engine.limit // 2))      # a template adds tokens of its own
        if not users:
            raise ValueError(f"no conversation of {panel.dataset} fits half of {engine.limit} tokens")
        try:
            filled, until = window(panel, panel.rates[0], options)
            row = summary(drive(engine, users, options.seed, until=until), filled)
        except ValueError as error:
            if not stateful:
                raise
            print(f"no stateful clients: {error}", file=sys.stderr)
            break
        rows.append(dict(system=name, model=engine.model, dataset=panel.dataset, request_rate=panel.rates[0], request_throughput=row["throughput"])
                    | {name.replace("p50", "median"): value for name, value in row.items()})
    return Found(rows, [ratio(f"{what}, resend / stateful", rows[0][what] / rows[1][what], None, options)
                        for what in ("mean_ttft_ms", "mean_e2el_ms") if len(rows) > 1])


def profile(options) -> Found:
    """What --profile and --hardware take: the cost of recomputing a chunk, and the rates of this machine."""
    only_measured(options)
    panel = adapted(HERE, options)[0]
    engine = build(System(), panel, [], options)
    cost = engine.worker.profile()
    rows, ratios = costs(cost, panel, options)
    rows += [dict(system=type(kind).__name__, name=name, value=value)
             for kind in microbench.machine(engine, cost, options.seed) for name, value in kind._asdict().items()]
    engine.close()
    return Found(rows, ratios)


def read_profile(path: str, parse: Callable):
    """parse(rows) of what `python bench.py profile --json FILE` has saved. ValueError if it is none."""
    try:
        return parse(json.loads(Path(path).read_text())["rows"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no profile ({error!r}): make one with python bench.py profile --json {path}") from error


def load_profile(path: str) -> RecomputeCost:
    return read_profile(path, lambda rows: RecomputeCost(
        {row["context"]: row["seconds"] for row in rows if row["system"] == "attention"}, rows[1]["seconds"]))


def load_machine(path: str) -> list:
    """Its Hardware and Operators."""
    return read_profile(path, lambda rows: [
        kind(**{row["name"]: row["value"] for row in rows if row["system"] == kind.__name__}) for kind in (Hardware, Operators)])


LATENCY = ("system", "request_rate", "throughput", "normalized_latency_ms", "p90_normalized_latency_ms", "mean_ttft_ms", "mean_tpot_ms",
           "recomputed_tokens", "gpu_hit_rate", "cpu_hit_rate")


RATES = "share", "gbytes_per_second", "tflops"         # share: of what the device's measured bandwidth or flops would allow


class Figure(NamedTuple):
    run: Callable[[argparse.Namespace], Found]
    x: str                          # of its plot
    y: str
    columns: tuple = ()             # of its table; none: all rows side by side


FIGURES = {
    "default": Figure(everyday, "request_rate", "normalized_latency_ms"),
    "fig3": Figure(fig3, "history", "seconds", ("system", "history", "seconds")),
    "fig4": Figure(fig4, "context", "seconds", ("system", "context", "seconds")),
    "fig10": Figure(partial(sweep, ("stateless", "stateless, fused", "gpu cache", "pensieve"), PAPER, HERE),
                    "throughput", "normalized_latency_ms", LATENCY),
    "fig11": Figure(partial(sweep, ("stateless", "gpu cache", "pensieve"), FOUR_GPUS, HERE), "throughput", "normalized_latency_ms", LATENCY),
    "fig13": Figure(partial(sweep, ("separate phases", "pensieve"), [PAPER[0]._replace(paper=None)], HERE), "throughput", "normalized_latency_ms", LATENCY),
    "fig14": Figure(fig14, "request_rate", "recomputed_tokens", LATENCY),
    "fig15": Figure(partial(sweep, ("stateless", "pensieve"), [PAPER[0]._replace(think=think, paper=None) for think in (60.0, 120.0, 300.0, 600.0)],
                            [HERE[0]._replace(think=think) for think in (0.1, 0.4, 1.6)]), "throughput", "normalized_latency_ms", LATENCY),
    "draft": Figure(partial(sweep, ("stateless", "pensieve", "draft"), DRAFT, HERE), "throughput", "normalized_latency_ms", LATENCY),
    "serve": Figure(serve, "request_rate", "mean_ttft_ms"),
    "profile": Figure(profile, "context", "seconds", ("system", "context", "seconds", "name", "value")),
    **{name: Figure(partial(on_device, measure), "context", "seconds", ("system", "model", "dataset", "context", "seconds", *more))
       for name, measure, *more in (("fig12", microbench.kernel, *RATES), ("kernel", microbench.kernel, *RATES), ("swap", microbench.swap, *RATES),
                                    ("step", microbench.step, *RATES), ("scheduling", microbench.scheduling))},
}


# ---- what is shown

def table(rows: list[dict], columns: tuple):
    """A line for each row; without columns, a column for each row."""
    cell = lambda value: "" if value is None else str(value) if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else \
        f"{value:,.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
    lines = [columns, *([row.get(name) for name in columns] for row in rows)] if columns else \
        [[name, *(row.get(name) for row in rows)] for name in dict.fromkeys(chain(*rows))]
    lines = [[cell(value) for value in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for first, *rest in lines:
        print("  ".join([first.ljust(widths[0])] + [value.rjust(width) for value, width in zip(rest, widths[1:])]))


def plot(figure: Figure, rows: list[dict], path: str):
    """A diagram for each panel, a line for each system."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    rows = [row for row in rows if figure.x in row]
    panels, systems = {}, list(dict.fromkeys(row["system"] for row in rows))
    for row in rows:
        panels.setdefault((row["model"], row["dataset"], row.get("think")), []).append(row)
    axes = (canvas := Canvas((5 * len(panels), 4), layout="constrained")).subplots(1, len(panels), squeeze=False)[0]
    for ax, ((model, dataset, think), rows) in zip(axes, panels.items()):
        for system in systems:
            points = sorted((row[figure.x], row[figure.y]) for row in rows if row["system"] == system)
            ax.plot(*zip(*points), marker="o", label=system)
        ax.set(title=f"{model}, {dataset}" + (f", {thinking(think)}" if think else ""), xlabel=figure.x, ylabel=figure.y, yscale="log")
    axes[0].legend()
    canvas.savefig(path, dpi=100)


def commit() -> str:
    """Of this code; a "+" behind it: changed since."""
    git = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def think(text: str) -> float | str:
    return text if text == "reading" else positive(text)


def rates(text: str) -> tuple:
    return tuple(sorted(map(positive, text.split(","))))


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """Every field of Config is a flag, too; `given` holds those that differ from their default."""
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="python bench.py [FIGURE] [flags]", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("figure", nargs="?", default="default", choices=FIGURES, metavar="FIGURE", help="one of " + ", ".join(FIGURES))
    add("--simulate", action="store_true", help="on a cost model of the paper's machines instead of this one")
    add("--json", metavar="FILE", help="write the figure there, too")
    add("--plot", metavar="FILE", help="draw it, as PNG")
    add("--seed", type=int, default=0, help="of workload and prompts (default: 0)")
    add("--trace", metavar="FILE", help="conversations from a Mooncake trace, ShareGPT JSON, or UltraChat or LMSYS-Chat-1M JSON lines")
    add("--tokenizer", metavar="MODEL", default="gpt2", help="counts the tokens of a file of texts (default: gpt2)")
    add("--dataset", choices=SHAPES, help="synthetic conversations, instead of a panel's own")
    add("--rates", type=rates, metavar="R,R,...", help="requests per second, instead of a panel's own")
    add("--think", type=think, metavar="SECONDS",
        help='mean think time, instead of a panel\'s own, or "reading": 100 ms per token of the reply, at least 5 s')
    add("--seconds", type=positive, default=1500.0, help="length of a run, of which a third is for filling caches; without --dataset "
        "and --trace a run on this machine ends by itself (default: 1500)")
    add("--at-ms", type=positive, metavar="MS", help="compare throughputs at this normalized latency, instead of a panel's own")
    add("--hardware", metavar="NAME", help=f"of a simulation: {', '.join(HARDWARE)} (default: a100, for traces h100), or what "
        "`python bench.py profile --json FILE` has measured, to simulate what else would be measured there")
    add("--gpus", type=int, choices=range(1, 9), metavar="N", help="of a simulation, instead of a panel's own")
    add("--jobs", type=int, default=os.cpu_count(), help="simulations at once (default: the number of cores)")
    add("--url", default="http://127.0.0.1:8000", help="of the server that `serve` drives (default: http://127.0.0.1:8000)")
    add("--server-key", metavar="KEY", help="its API key")
    add("--profile", metavar="FILE", help="what `python bench.py profile --json FILE` has measured, instead of measuring it at each start")
    Config.add_flags(parser)
    options = parser.parse_args(argv)
    if options.hardware and not options.simulate:
        parser.error("--hardware is of a simulation: add --simulate")
    options.given = {name: value for name, value in Config.given(options).items() if value != getattr(Config, name) and name != "model"}
    options.model = None if options.model == Config.model else options.model
    return options


def main():
    try:
        options = parse_flags()
        options.conversations = load(options.trace, options.tokenizer) if options.trace else None      # once, for all runs
        figure = FIGURES[options.figure]
        found = figure.run(options)
        table(found.rows, figure.columns)
        print()
        table(found.ratios, ("name", "paper", "ours", "how", *(["must"] if any("must" in ratio for ratio in found.ratios) else [])))
        if options.json:
            gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
            machine = f"{platform.machine()}, {os.cpu_count()} cores{gpu}, python {platform.python_version()}, torch {torch.__version__}"
            Path(options.json).write_text(json.dumps(dict(figure=options.figure, command="python " + " ".join(sys.argv), commit=commit(), machine=machine,
                                                          seed=options.seed, rows=found.rows, ratios=found.ratios), indent=1) + "\n")
        if options.plot:
            plot(figure, found.rows, options.plot)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
