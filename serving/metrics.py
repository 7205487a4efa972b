"""The numbers that Prometheus reads at /metrics.

    the engine's counts     read from `engine.stats()` at the moment when Prometheus asks
    answers and seconds     counted here when a turn is done, since the engine keeps no histogram;
                            and so are the tokens of each API key

A server with several API keys counts for each key separately, and shows a key no counts of the
engine: they would tell how long the others' turns are. `--metrics-key` shows the counts of the
engine and of all keys.

A number that means the same as one of vLLM's has vLLM's name, so that dashboards and routers made
for vLLM work. All numbers of the engine have a name of our own as well, `nano_pensieve:...`. One
pair is easily confused. Slots that only remember can be taken at once, so vLLM does not count them:

    vllm:kv_cache_usage_perc          share of the slots that running requests hold
    nano_pensieve:slots_used_share    share of the slots that hold anything

The engine counts the tokens of a context once, when its request is first admitted, by where their
KV was. vLLM would call our CPU tier external. Of a context of 206 tokens:

    gpu 96 + cpu 64 + recomputed 32 + new 14    prefix_cache_hits             += 96
                                                prefix_cache_queries          += 206
                                                external_prefix_cache_hits    += 64
                                                external_prefix_cache_queries += 206 - 96
"""
from collections.abc import Callable
from itertools import pairwise

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (CounterMetricFamily as Counter, GaugeMetricFamily as Gauge,
                                    Metric)
from prometheus_client.registry import Collector

from engine import Engine
from scheduler import SOURCES
from serving.sessions import Answer, LiveTurn

# Seconds; the upper ends of the histograms' buckets.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
GAUGES = {
    "running": "Requests that have slots and are being computed.",
    "waiting": "Requests that wait for admission.",
    "conversations": "Conversations whose tokens the engine holds.",
    "slots_total": "Slots of the GPU tier. A slot holds one KV-token.",
    "slots_free": "Slots that hold nothing.",
    "slots_running": "Slots that running requests hold.",
    "slots_used_share": "Share of the slots that hold anything, from 0 to 1.",
    "cpu_chunks_total": "Places for chunks in the CPU tier.",
    "cpu_chunks_free": "Places that hold nothing.",
    "swap_hidden_share": "Share of the seconds of copies in which neither did the model wait for "
                         "a copy, nor was the host busy with copies.",
}
COUNTERS = {
    "prompt_tokens_gpu": "Prompt tokens whose KV was on the GPU.",
    "prompt_tokens_cpu": "Prompt tokens whose KV was copied from the CPU.",
    "prompt_tokens_recomputed": "Prompt tokens whose KV had been dropped and was computed again.",
    "prompt_tokens_new": "Prompt tokens that were computed for the first time.",
    "hints": "Hints that a turn is likely soon.",
    "warmed_tokens_cpu": "Tokens whose KV was copied from the CPU for a hint, before the turn.",
    "warmed_tokens_recomputed": "Tokens whose KV was computed again for a hint, before the turn.",
    "generated_tokens": "Tokens sampled.",
    "guesses": "Tokens that were guessed ahead and computed.",
    "right_guesses": "Of these, those that proved right.",
    "suspensions": "Times that a running request was taken out, because slots ran short.",
    "finished": 'Turns that ended with "stop" or "length".',
    "cancelled": "Turns that were cancelled or failed.",
    "chunks_swapped_in": "Chunks copied from the CPU to the GPU.",
    "chunks_swapped_out": "Chunks copied from the GPU to the CPU.",
    "chunks_dropped": "Chunks that left both tiers.",
    "swap_in_bytes": "Bytes that were copied from the CPU to the GPU.",
    "swap_out_bytes": "Bytes that were copied from the GPU to the CPU.",
    "swap_in_seconds": "Time that copies from the CPU to the GPU took.",
    "swap_out_seconds": "Time that copies from the GPU to the CPU took.",
    "steps": "Iterations of the engine.",
}


def stats_of(engine: Engine) -> dict:
    """The engine's stats, and how full its slots are."""
    stats, running = engine.read_stats(), engine.cache.running.values()
    chunks = {chunk for conversation in running for chunk in conversation.chunks}
    return dict(stats, slots_running=sum(len(chunk.slots) for chunk in chunks),
                slots_used_share=1 - stats["slots_free"] / stats["slots_total"])


class StatsCollector(Collector):
    """Makes metrics of the engine's stats, or of one key's part of them, each time that Prometheus
    asks."""

    def __init__(self, read_stats: Callable[[], dict], model: str):
        self.read_stats, self.model = read_stats, model

    def collect(self):
        stats = self.read_stats()
        yield from self.vllm_tokens(stats)
        if "slots_total" in stats:                              # these are the engine's
            yield from self.vllm_engine(stats)
        for name, value in stats.items():
            if name in GAUGES:
                yield self.metric(Gauge, "nano_pensieve:" + name.removesuffix("_total"),
                                  GAUGES[name], value)
            else:
                yield self.metric(Counter, "nano_pensieve:" + name, COUNTERS[name], value)

    def vllm_engine(self, stats: dict):
        used = stats["slots_running"] / stats["slots_total"]
        yield self.metric(Gauge, "vllm:num_requests_running", GAUGES["running"], stats["running"])
        yield self.metric(Gauge, "vllm:num_requests_waiting", GAUGES["waiting"], stats["waiting"])
        yield self.metric(Gauge, "vllm:kv_cache_usage_perc",
                          "Share of the slots that running requests hold, from 0 to 1.", used)
        yield self.metric(Counter, "vllm:num_preemptions", COUNTERS["suspensions"],
                          stats["suspensions"])

    def vllm_tokens(self, stats: dict):
        gpu, cpu = stats["prompt_tokens_gpu"], stats["prompt_tokens_cpu"]
        computed = stats["prompt_tokens_recomputed"] + stats["prompt_tokens_new"]
        prompt = gpu + cpu + computed
        by_source = dict(local_cache_hit=gpu, external_kv_transfer=cpu, local_compute=computed)
        yield self.metric(Counter, "vllm:generation_tokens", COUNTERS["generated_tokens"],
                          stats["generated_tokens"])
        yield self.metric(Counter, "vllm:prompt_tokens", "Prompt tokens.", prompt)
        yield self.metric(Counter, "vllm:prefix_cache_queries",
                          "Prompt tokens looked up on the GPU.", prompt)
        yield self.metric(Counter, "vllm:prefix_cache_hits", "Prompt tokens found on the GPU.", gpu)
        yield self.metric(Counter, "vllm:external_prefix_cache_queries",
                          "Prompt tokens looked up on the CPU.", prompt - gpu)
        yield self.metric(Counter, "vllm:external_prefix_cache_hits",
                          "Prompt tokens found on the CPU.", cpu)
        metric = Counter("vllm:prompt_tokens_by_source", "Prompt tokens, by where their KV was.",
                         labels=["model_name", "source"])
        for source, value in by_source.items():
            metric.add_metric([self.model, source], value)
        yield metric

    def metric(self, kind: type, name: str, help: str, value: float) -> Metric:
        """kind: Gauge or Counter. Prometheus shows a counter as `name` + "_total"."""
        metric = kind(name, help, labels=["model_name"])
        metric.add_metric([self.model], value)
        return metric


class Metrics:
    """The metrics of one server, or of one of its keys, in a registry of their own."""

    def __init__(self, read_stats: Callable[[], dict] | None, model: str):
        """read_stats: the engine's; None: without the counts of the engine. model: the name that
        all metrics bear."""
        self.own = dict.fromkeys([*(f"prompt_tokens_{source}" for source in SOURCES),
                                  "generated_tokens"], 0)
        self.registry = CollectorRegistry()
        self.registry.register(StatsCollector(read_stats or self.own.copy, model))
        answers = prometheus_client.Counter("vllm:request_success",
                                            "Turns answered, by how they ended.",
                                            ["model_name", "finished_reason"],
                                            registry=self.registry)
        self.answers = {reason: answers.labels(model, reason) for reason in ("stop", "length")}

        def seconds(name: str, help: str) -> Histogram:
            histogram = Histogram(name, help, ["model_name"], registry=self.registry,
                                  buckets=BUCKETS)
            return histogram.labels(model)
        self.queued = seconds("vllm:request_queue_time_seconds",
                              "From submission to first admission.")
        self.first_token = seconds("vllm:time_to_first_token_seconds",
                                   "From submission to the first token.")
        self.inter_token = seconds("vllm:inter_token_latency_seconds",
                                   "Between two tokens of one reply.")
        self.end_to_end = seconds("vllm:e2e_request_latency_seconds",
                                  "From submission to the last token.")

    def count(self, turn: LiveTurn, reply: Answer):
        """Counts a turn that has ended with "stop" or "length"."""
        submitted, request = turn.handle.submitted, turn.handle.request
        for source in SOURCES:
            self.own[f"prompt_tokens_{source}"] += reply.usage[source]
        self.own["generated_tokens"] += reply.usage["completion_tokens"]
        self.answers[reply.finish_reason].inc()
        self.queued.observe(request.admitted - submitted)
        self.first_token.observe(request.times[0] - submitted)
        self.end_to_end.observe(request.times[-1] - submitted)
        for earlier, later in pairwise(request.times):
            self.inter_token.observe(later - earlier)

    def text(self) -> str:
        """The answer to GET /metrics."""
        return generate_latest(self.registry).decode()
