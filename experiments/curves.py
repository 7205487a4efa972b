"""Curves: systems under rising load, and how two of them are compared (paper §6).

A panel is one diagram of a figure: a model, a dataset and request rates. `sweep` runs each system
in each panel. A system's rows in a panel are its curve, latency over throughput. A ratio compares
two curves, beside the ratio that the paper reports:

    latency       stateless        pensieve
                      |                |
    at_ms ............|................|....        the ratio is that of the throughputs at at_ms:
                     /                /
            ________/________________/              pensieve / stateless = 2.7 / 2.1 = 1.29
                   2.1              2.7 turns/s

The figures themselves are in figures.py (those of the paper) and more_figures.py (all
others). Every figure is a function of the parsed flags of bench.py (`options`). It returns
rows, one for each run, and ratios.
"""
import argparse
import gc
from bisect import bisect_left
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Callable, NamedTuple

from tqdm import tqdm

from experiments.run import Panel, at_scale, play


class Found(NamedTuple):
    """What a figure returns."""
    rows: list[dict]
    ratios: list[dict]


def ratio(name: str, ours: float, options, paper: float | None = None) -> dict:
    return dict(name=name, paper=paper, ours=ours,
                how="simulated" if options.simulate else "measured")


def quotient(ours: float, other: float) -> float:
    """ours / other, and 1 if both are 0."""
    return 1.0 if ours == other else ours / max(other, 1e-9)


def share_of_the_gap(lru: float, oracle: float, ours: float) -> float:
    """How much of the gap from LRU to the oracle a policy closes: of 10 s and 2 s, 6 s close half.
    0 if there is no gap."""
    return (lru - ours) / (lru - oracle) if lru > oracle else 0.0


class Figure(NamedTuple):
    run: Callable[[argparse.Namespace], Found]
    about: str                  # a line for --help
    x: str                      # of its plot: a field of its rows
    y: str
    columns: tuple = ()         # of its table: fields of its rows; none: a line for each field
    linear: bool = False        # a linear y axis: few lines, each named at its last point
    bars: tuple = ()            # fields to draw as bars instead of y over x
    seeds: int = 1              # over so many loads it is repeated, to know the spread


def sweep(systems: tuple[str, ...], simulated: list[Panel], measured: list[Panel],
          options) -> Found:
    """Run every system in every panel. Ratios compare the last system with each of the others.

    With --warm the systems are Pensieve without and with hints; then all rates are played.
    simulated, measured: the panels at the paper's scale, and those of this machine.
    ValueError: the figure has no panels at the scale that the flags ask for."""
    panels = simulated if at_scale(options) else measured
    if not panels:
        raise ValueError("this figure is of one machine: leave --simulate out, add --hardware with "
                         "its profile, or name one of the paper's figures, such as fig10")
    panels = adapted(panels, options)
    if options.warm:                    # Pensieve beside itself, at every rate
        systems = "pensieve", "pensieve, hinted"
        panels = [panel._replace(at_ms=None, latency="mean_ttft_ms") for panel in panels]
    tasks = [(panel, system, options) for panel in panels for system in systems]
    curves = {task[:2]: curve
              for task, curve in zip(tasks, mapped(play_curve, tasks, "curve", options))}
    *others, last = systems
    ratios = []
    for panel in panels:
        for other in others:
            paper = {"vllm then": panel.paper, "stateless, fused": panel.paper_fused}.get(other)
            ratios.append(compared(panel, curves[panel, other], curves[panel, last], paper,
                                   options))
    return Found(list(chain(*curves.values())), ratios)


def adapted(panels: list[Panel], options) -> list[Panel]:
    """The panels as the flags change them: --model, --dataset, --rates, --think, --at-ms, --gpus,
    --hardware, --cpu-gb.

    A --trace replaces all panels by one, at the paper's scale for a long-context model on H100
    GPUs. ValueError: the flags contradict each other."""
    if options.trace:
        has_times = any(conversation.arrival
                        or any(turn.think_seconds for turn in conversation.turns)
                        for conversation in options.conversations)
        rates, think = ((None,), "own") if has_times else (panels[0].rates, panels[0].think)
        if has_times and options.think:
            raise ValueError("this trace has its own times: leave --think out")
        model, gpus = ("llama2-13b-gqa", 4) if at_scale(options) else (panels[0].model, 1)
        panels = [Panel(model, Path(options.trace).stem, rates, gpus=gpus, hardware="h100",
                        think=think)]
    if options.cpu_gb and not at_scale(options):
        raise ValueError("--cpu-gb is for the paper's machines: give --cpu-cache-tokens instead")
    changes = {field: value for field in Panel._fields
               if (value := getattr(options, field, None)) is not None}
    if options.model:
        changes["per_query_head"] = False       # "their kernels" is for the paper's models
    if changes:
        # No longer the paper's panels.
        panels = [panel._replace(paper=None, paper_fused=None, **changes) for panel in panels]
    return list(dict.fromkeys(panels))      # --model and --dataset together make several panels one


def mapped(function: Callable, tasks: list, unit: str, options) -> list:
    """function(task) for each task. Simulations run on all cores at once, measured runs one by one.

    A progress bar counts the tasks that are done. unit: what one of them is, such as "run"."""
    progress = partial(tqdm, desc=f"{unit}s of {options.figure}", total=len(tasks), unit=unit,
                       leave=False, disable=None)
    jobs = min(options.jobs, len(tasks)) if options.simulate else 1
    if jobs == 1:
        return list(progress(map(function, tasks)))
    # A simulation makes millions of objects and hardly a cycle: by default a fifth of its time
    # goes into the search for cycles.
    with ProcessPoolExecutor(jobs, get_context("spawn"), gc.set_threshold, (100_000,)) as pool:
        return list(progress(pool.map(function, tasks)))


def play_curve(task: tuple[Panel, str, argparse.Namespace]) -> list[dict]:
    """The rows of one system in one panel, by rising rates.

    If systems are compared at a latency, only two neighbouring rates count: those between which the
    system crosses it. We play the lowest rate, and look for these two by halving. For the rates 1,
    2, ..., 14 and a system that crosses at 5.5, we play 1, 8, 5, 7, 6."""
    panel, system, options = task
    rows = {}

    def latency(rate: float | None) -> float:
        """Play this rate, and keep its row."""
        rows[rate] = play(system, panel, rate, options)
        return rows[rate][panel.latency]

    lowest, *higher = sorted(panel.rates)
    if panel.at_ms is None:
        for rate in panel.rates:
            latency(rate)
    elif latency(lowest) <= panel.at_ms:
        bisect_left(higher, panel.at_ms, key=latency)       # it plays the rates that it looks at
    return [rows[rate] for rate in sorted(rows)]


def compared(panel: Panel, other: list[dict], last: list[dict], paper: float | None,
             options) -> dict:
    """The ratio of two curves: of their throughputs at the panel's at_ms.

    If the panel has no at_ms, we compare the latencies at the highest rate."""
    systems = f"{last[0]['system']} / {other[0]['system']}"
    if panel.at_ms is None:
        ours = last[-1][panel.latency] / other[-1][panel.latency]
        return ratio(f"{panel}: latency at the highest rate, {systems}", ours, options)

    percentile = "p90 " if panel.latency.startswith("p90") else ""
    name = f"{panel}: throughput at {percentile}{panel.at_ms:g} ms per token, {systems}"
    curves = [[(row["throughput"], row[panel.latency]) for row in rows] for rows in (last, other)]
    last_is_fast, other_is_fast = (rows[-1][panel.latency] <= panel.at_ms for rows in (last, other))
    if last_is_fast and other_is_fast:
        name += ", at their highest rates: try higher ones"
    elif last_is_fast or other_is_fast:                 # at a higher rate it might have served more
        name += ", at least" if last_is_fast else ", at most"
    if max(other[0][panel.latency], last[0][panel.latency]) > panel.at_ms:
        name += ", extrapolated: try lower rates"
    ours, theirs = (throughput_at(curve, panel.at_ms) for curve in curves)
    return ratio(name, ours / theirs, options, paper)


def throughput_at(curve: list[tuple[float, float]], at_ms: float) -> float:
    """Turns per second at which a curve of (turns per second, latency) first crosses a latency.

    Between two rates the curve is a straight line: 2.0 turns/s at 30 ms and 2.5 turns/s at 130 ms
    give 2.25 at 80 ms. If the lowest rate is already too slow, the line begins at 0 turns/s and 0
    ms. If no rate is too slow, the result is the throughput at the highest rate."""
    throughput, latency = curve[0]
    if latency > at_ms:
        return throughput * at_ms / latency
    for (below, low), (above, high) in pairwise(curve):
        if high > at_ms:
            return below + (at_ms - low) / (high - low) * (above - below)
    return curve[-1][0]


def over_seeds(run: Callable, seeds: int, options) -> Found:
    """The figure for `seeds` loads. A row tells its seed; a ratio is the mean, with the
    standard deviation as its spread."""
    each = [run(argparse.Namespace(**vars(options) | dict(seed=options.seed + n)))
            for n in range(seeds)]
    if seeds == 1:
        return each[0]
    rows = [row | dict(seed=options.seed + n) for n, found in enumerate(each) for row in found.rows]
    ratios = []
    for same in zip(*(found.ratios for found in each), strict=True):
        values = [one["ours"] for one in same]
        # If any seed has added a doubt to the name, such as "at least", its name is the longest.
        name = max((one["name"] for one in same), key=len)
        ratios.append(same[0] | dict(name=name, ours=mean(values), spread=stdev(values)))
    return Found(rows, ratios)
