"""What remembering is worth: the same conversations through three systems on this machine (paper §6, in small).

    stateless     forgets all KV at the end of each request, as other servers do
    gpu cache     the first tier alone: what leaves the GPU is recomputed
    pensieve      both tiers

`python bench.py` takes about a minute on the embedded model. One loop drives them all: a turn is due when its user has thought
about the last reply; the engine steps whenever it has work. Latencies count from when a turn is due, waiting included.
Normalized latency is a turn's latency per token of its reply, the measure of the paper's figures. Replies have the workload's
length (EOS is ignored). Compare columns of one run: machines are noisy."""
import argparse
import heapq
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from engine import Config, Engine
from scheduler import SOURCES
from workload import Conversation, Turn, cut, with_arrivals

SYSTEMS = {"stateless": dict(stateless=True, cpu_cache_tokens=0), "gpu cache": dict(cpu_cache_tokens=0), "pensieve": dict()}
TIERS = dict(gpu_cache_tokens=3072, cpu_cache_tokens=12288)      # of the embedded model: the conversations below need some 12,000


class Served(NamedTuple):
    """One turn, times in seconds since the start of the run."""
    due: float
    first_token: float
    ended: float
    output_tokens: int
    usage: dict


def many_turns(limit: int, seed: int) -> list[Conversation]:
    """24 users who come within a few seconds and stay for about 16 short turns; contexts up to some 800 tokens."""
    rng = np.random.default_rng(seed)
    conversations = [Conversation(str(n), [Turn(*lengths) for lengths in rng.integers((8, 12), (40, 36), (rng.integers(8, 25), 2)).tolist()])
                     for n in range(24)]
    return with_arrivals(cut(conversations, limit), request_rate=60.0, seed=seed, think=lambda rng, reply: rng.exponential(0.1))


def drive(engine: Engine, conversations: list[Conversation], seed: int, progress=lambda turns: None) -> list[Served]:
    """Every turn of every conversation, at its time; the prompts are random tokens. Steps the engine in this thread."""
    rng, begin = random.Random(seed), engine.clock()
    due = [(conversation.arrival, n, 0) for n, conversation in enumerate(conversations)]       # when, whose, which turn
    heapq.heapify(due)
    running, first, served = {}, {}, []                                                        # by handle
    while due or running:
        now = engine.clock() - begin
        while due and due[0][0] <= now:
            when, n, index = heapq.heappop(due)
            turn = conversations[n].turns[index]
            prompt = [rng.randrange(engine.worker.vocab_size) for _ in range(turn.input_tokens)]
            running[engine.submit(prompt, conversations[n].name, max_tokens=turn.output_tokens, ignore_eos=True)] = when, n, index
        if not running:
            time.sleep(due[0][0] - now)
            continue
        engine.step()
        now = engine.clock() - begin
        for handle in [handle for handle in running if handle.request.generated]:
            first.setdefault(handle, now)
            if handle.request.finish_reason:
                when, n, index = running.pop(handle)
                reply = handle.result()
                served.append(Served(when, first.pop(handle), now, len(reply.token_ids), reply.usage))
                progress(1)
                if index + 1 < len(conversations[n].turns):
                    heapq.heappush(due, (now + conversations[n].turns[index + 1].think_seconds, n, index + 1))
    return served


def summary(served: list[Served]) -> dict:
    """The figures of one run, under the names that serving benchmarks use."""
    seconds, outputs = max(turn.ended for turn in served), sum(turn.output_tokens for turn in served)
    row = dict(request_throughput=len(served) / seconds, output_throughput=outputs / seconds)
    times = dict(ttft=[turn.first_token - turn.due for turn in served],
                 tpot=[(turn.ended - turn.first_token) / max(turn.output_tokens - 1, 1) for turn in served],
                 normalized_latency=[(turn.ended - turn.due) / turn.output_tokens for turn in served])
    for name, values in times.items():
        row[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
        row |= {f"p{p}_{name}_ms": 1e3 * float(np.percentile(values, p)) for p in (50, 90, 99)}
    prompt = {source: sum(turn.usage[source] for turn in served) for source in SOURCES}
    seen_before = max(1, prompt["gpu"] + prompt["cpu"] + prompt["recomputed"])
    row |= {f"prompt_tokens_{source}": n for source, n in prompt.items()}
    row |= dict(gpu_hit_rate=prompt["gpu"] / seen_before, cpu_hit_rate=prompt["cpu"] / seen_before)
    return row | dict(computed_tokens=prompt["recomputed"] + prompt["new"] + outputs)


def report(rows: dict[str, dict]):
    """A column for each system."""
    print(f"{'':28}" + "".join(f"{system:>14}" for system in rows))
    for name in next(iter(rows.values())):
        print(f"{name:28}" + "".join(f"{row[name]:>14,.{0 if isinstance(row[name], int) else 3}f}" for row in rows.values()))


def ratios(rows: dict[str, dict]) -> list[dict]:
    """Stateful over stateless. The last is what the count of computed tokens alone would predict, were all tokens equally dear."""
    first, last = rows["stateless"], rows["pensieve"]
    found = {"throughput, pensieve / stateless": last["output_throughput"] / first["output_throughput"],
             "mean normalized latency, stateless / pensieve": first["mean_normalized_latency_ms"] / last["mean_normalized_latency_ms"],
             "mean time to first token, stateless / pensieve": first["mean_ttft_ms"] / last["mean_ttft_ms"],
             "computed tokens, stateless / pensieve": first["computed_tokens"] / last["computed_tokens"]}
    return [dict(name=name, paper=None, ours=value, how="measured") for name, value in found.items()]


def commit() -> str:
    """Of this code; a "+" behind it: changed since."""
    git = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--seed", type=int, default=0, help="of workload and prompts (default: 0)")
    Config.add_flags(parser)
    flags, rows = parser.parse_args(), {}
    try:
        given = {name: value for name, value in Config.given(flags).items() if value is not None}
        for system, switches in SYSTEMS.items():
            engine = Engine(**(TIERS | given | switches))
            conversations = many_turns(engine.scheduler.limit, flags.seed)
            with tqdm(total=sum(len(c.turns) for c in conversations), desc=f"{system:>10}", unit="turn", leave=False) as bar:
                rows[system] = summary(drive(engine, conversations, flags.seed, bar.update))
            engine.close()
        found = ratios(rows)
        report(rows)
        print("\n" + "\n".join(f"{ratio['ours']:8.2f}  {ratio['name']}" for ratio in found))
        if flags.json:
            common = dict(model=flags.model, dataset="many turns", request_rate=60.0)
            figures = [dict(system=system, throughput=row["request_throughput"], normalized_latency_ms=row["mean_normalized_latency_ms"],
                            **common, **row) for system, row in rows.items()]
            machine = f"{platform.machine()}, {os.cpu_count()} cores, on {engine.worker.device}, torch {torch.__version__}"
            Path(flags.json).write_text(json.dumps(dict(figure="default", command="python " + " ".join(sys.argv), commit=commit(),
                                                        machine=machine, seed=flags.seed, rows=figures, ratios=found), indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
