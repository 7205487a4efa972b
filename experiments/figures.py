"""The paper's figures: which systems run under which loads (paper §6).

`sweep`, in curves.py, makes most of them. With --simulate the sizes are the paper's. Without it
they are small, for the embedded model. `PAPER`, at the end of this file, names all figures of
the evaluation but Figure 12: the attention kernel is only measured (more_figures.py).
"""
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Callable

import torch

from checkpoint import PRESETS
from eviction import POLICIES, RecomputeCost
from experiments.curves import (Figure, Found, adapted, quotient, ratio, share_of_the_gap,
                                sweep)
from experiments.policies import EXPERIMENTS
from experiments.run import HERE, STATELESS, Panel, System, at_scale, build, drive, longest_context
from experiments.simulator import SimulatedWorker
from experiments.workload import PlannedConversation, PlannedTurn
from recompute_cost import all_but_attention, device_seconds


def with_their_kernels(panels: list[Panel]) -> list[Panel]:
    """The panels; and those of models whose query heads share K and V once more, with attention as
    the papers' kernels probably were.

    PyTorch 2.0's kernel, from which Pensieve's was made, runs a program per query head, and vLLM
    0.2 did not group the heads either. A cache may serve some of the repeated reads, so the truth
    lies between the two panels."""
    sharing = [panel for panel in panels
               if PRESETS[panel.model].num_heads > PRESETS[panel.model].num_kv_heads]
    return panels + [panel._replace(per_query_head=True) for panel in sharing]


# On the paper's machines, simulated. The rates are wide enough that every system crosses at_ms.
SLOW = 0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0
FAST = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0, 16.0, 20.0, 24.0
ONE_GPU = with_their_kernels([
    Panel("opt-13b", "sharegpt", SLOW, at_ms=120, paper=1.36, paper_fused=1.14),
    Panel("llama2-13b-gqa", "sharegpt", FAST, at_ms=180, paper=1.70, paper_fused=1.58),
    Panel("opt-13b", "ultrachat", SLOW, at_ms=120, paper=1.17, paper_fused=1.14),
    Panel("llama2-13b-gqa", "ultrachat", FAST, at_ms=100, paper=1.58, paper_fused=1.47),
])
FOUR_GPUS = with_their_kernels([
    Panel("opt-66b", "sharegpt", SLOW, at_ms=200, paper=2.04, paper_fused=1.64, gpus=4),
    Panel("llama2-70b", "sharegpt", FAST, at_ms=400, paper=3.0, paper_fused=2.47, gpus=4),
])
# Figures 13 and 15 are of Llama 2-13B; the paper gives no ratio for them.
LLAMA = Panel("llama2-13b-gqa", "sharegpt", FAST, at_ms=180)
DRAFT = [
    Panel(model, dataset, rates, at_ms=120, paper=paper, think="reading",
          latency="p90_normalized_latency_ms")
    for model, dataset, rates, paper in (
        ("gpt3-6.7b", "sharegpt-draft", FAST, 1.51), ("gpt3-13b", "sharegpt-draft", FAST, 1.65),
        ("gpt3-6.7b", "lmsys-draft", (*FAST, 28.0, 32.0), 1.84),
        ("gpt3-13b", "lmsys-draft", FAST, 1.95),
        ("gpt3-13b", "sharegpt-draft-long", SLOW, None))        # its Figure 9: the gain decreases
]
BASELINES = "vllm then", "stateless", "stateless, fused", "gpu cache"


# ---- policies

CPU_GB = 110.0, 165.0, 220.0  # the paper does not say how much of the machine's 220 GB the tier has


def fig14(options) -> Found:
    """All policies under the same load, also those that no server has."""
    if options.at_ms:
        raise ValueError("this figure compares policies at equal rates: leave --at-ms out")
    panels = [Panel("opt-13b", "sharegpt", (2.0, 2.5), cpu_gb=size) for size in CPU_GB]
    rows, _ = sweep((*POLICIES, *EXPERIMENTS), panels, HERE, options)
    by_load = {}                                # (model, CPU tier, rate) -> policy -> row
    for row in rows:
        load = row["model"], row.get("cpu_gb"), row["request_rate"]
        by_load.setdefault(load, {})[row["policy"]] = row
    ratios = [policy_ratios(by_policy, options) for by_policy in by_load.values()]
    return Found(rows, list(chain(*ratios)))


def policy_ratios(by_policy: dict[str, dict], options) -> list[dict]:
    """The policies' rows of one load, by policy -> the paper's ratios, in tokens and hits, and all
    policies' seconds beside LRU's.

    The paper's policies do not know who waits. So its ratios appear twice: of "retention" and
    "lru", which know, and of "literal idleness" and "literal lru", which do not."""
    lru = by_policy["lru"]
    load = f"at {lru['request_rate']:g}/s" if lru["request_rate"] else lru["dataset"]
    if "cpu_gb" in lru:
        load += f", {lru['cpu_gb']:g} GB"
    published = (None, None) if options.trace or options.dataset else (0.854, 4.4)
    ratios = []
    for ours, partner in ("retention", "lru"), ("literal idleness", "literal lru"):
        one, other = by_policy[ours], by_policy[partner]
        recomputed = one["recomputed_tokens"] / max(other["recomputed_tokens"], 1)
        hits = 100 * (one["cpu_hit_rate"] - other["cpu_hit_rate"])
        ratios += [
            ratio(f"{load}: recomputed tokens, {ours} / {partner} (paper: at best)",
                  recomputed, options, published[0]),
            ratio(f"{load}: CPU hit rate, {ours} - {partner}, points (paper: at best)",
                  hits, options, published[1])]
    seconds = {policy: row["recomputed_seconds"] for policy, row in by_policy.items()}
    for policy, spent in seconds.items():
        if policy == "lru":
            continue
        ratios.append(ratio(f"{load}: seconds of recomputation, {policy} / lru",
                            quotient(spent, seconds["lru"]), options))
        ratios.append(ratio(f"{load}: share of the gap from lru to oracle that {policy} closes",
                            share_of_the_gap(seconds["lru"], seconds["oracle"], spent), options))
    return ratios


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
    """Serve `batch` requests at once -> seconds until all have their first
    token, seconds of the rest."""
    users = [PlannedConversation(str(n), [PlannedTurn(prompt, reply)]) for n in range(batch)]
    room = dict(gpu_cache_tokens=2 * batch * longest_context(users),
                max_batch_tokens=batch * prompt, max_running=batch)
    with closing(build(System(STATELESS | room), panel, users, options)) as engine:
        served = drive(engine, users, options.seed)
    prefilled = max(turn.first_token for turn in served)
    return prefilled, max(turn.ended for turn in served) - prefilled


def fig4(options) -> Found:
    """The seconds to recompute a chunk: attention rises with its
    context, all else stays the same.

    All else is what a chunk adds to a batch that runs anyway, as our policy counts; and, as the
    paper divides, what it takes alone, where its 32 tokens pay for reading all weights."""
    panel, = adapted([Panel("opt-13b" if at_scale(options) else "tiny_chat", "one chunk")], options)
    longest = [PlannedConversation("", [PlannedTurn(16_384, 1)])]
    with closing(build(System(), panel, longest, options)) as engine:
        cost, alone = engine.worker.profile(), rest_alone(engine.worker)
    rows, ratios = costs(cost, panel, options)
    rows += [dict(row, system="all else, alone", seconds=alone)
             for row in rows if row["system"] == "all else"]
    name = f"attention of a chunk at {cost.lengths[-1]} tokens / all else, alone"
    return Found(rows, [*ratios, ratio(name, cost.seconds[-1] / alone, options)])


@torch.inference_mode()
def rest_alone(worker) -> float:
    """Seconds of everything but attention for one chunk that is a batch of its own."""
    if isinstance(worker, SimulatedWorker):
        return worker.linear_seconds(worker.chunk_size, 0)
    run = partial(all_but_attention, worker.model, worker.pool, worker.pool.chunk_size)
    return min(device_seconds(worker.device, run) for _ in range(5))


def costs(cost: RecomputeCost, panel: Panel, options) -> Found:
    """A cost profile as rows, two for each profiled length."""
    rows = []
    for length, attention in zip(cost.lengths, cost.seconds):
        row = dict(model=panel.model, dataset=panel.dataset, context=length)
        rows.append(dict(system="attention", **row, seconds=attention))
        rows.append(dict(system="all else", **row, seconds=cost.rest))
    name = f"attention of a chunk at {cost.lengths[-1]} tokens / all else"
    return Found(rows, [ratio(name, cost.seconds[-1] / cost.rest, options)])


# ---- all of them, by name

def latency_figure(run: Callable, about: str, x: str = "throughput",
                   y: str = "normalized_latency_ms") -> Figure:
    return Figure(run, about, x, y, (
        "system", "request_rate", "throughput", "normalized_latency_ms",
        "p90_normalized_latency_ms",
        "mean_ttft_ms", "mean_tpot_ms", "recomputed_tokens", "recomputed_seconds", "gpu_hit_rate",
        "cpu_hit_rate", "hits_of_attainable", "turnovers"))


# Times are of two cores, without a GPU. A simulation takes less time with
# --rates, --seconds or --model.
PAPER = {
    "fig3": Figure(
        fig3, "seconds to prefill a history, and to generate the reply (10 s, simulated too)",
        "history", "seconds", ("system", "history", "seconds")),
    "fig4": Figure(
        fig4, "seconds to recompute a chunk, by the context before it (10 s, simulated too)",
        "context", "seconds", ("system", "context", "seconds")),
    "fig10": latency_figure(
        partial(sweep, BASELINES + ("pensieve",), ONE_GPU, HERE),
        "latency over throughput of five systems, one GPU (11 minutes; simulated: 15)"),
    "fig11": latency_figure(
        partial(sweep, BASELINES + ("pensieve",), FOUR_GPUS, HERE),
        "latency over throughput of larger models, four GPUs (11 minutes; simulated: 10)"),
    "fig13": latency_figure(
        partial(sweep, ("request level", "separate phases", "pensieve"),
                with_their_kernels([LLAMA]), HERE),
        "prefill and decode in one batch or in batches of their own; batches of whole requests "
        "(4 minutes; simulated: 15)"),
    "fig14": latency_figure(
        fig14, "eviction policies, also some that no server has (15 minutes; simulated: 44)",
        "request_rate", "recomputed_seconds")._replace(seeds=5),
    "fig15": latency_figure(
        partial(sweep, ("vllm then", "stateless", "pensieve"),
                with_their_kernels([LLAMA._replace(think=think)
                                    for think in (60.0, 120.0, 300.0, 600.0)]),
                [HERE[0]._replace(think=think) for think in (0.1, 0.4, 1.6)]),
        "both stateless systems and Pensieve, by the users' think time "
        "(19 minutes; simulated: 24)"),
    "draft": latency_figure(
        partial(sweep, ("vllm then", "stateless", "pensieve", "draft"), DRAFT, HERE),
        "the system of the paper's draft, on its datasets (8 minutes; simulated: 21)"),
}
