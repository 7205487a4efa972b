"""What Prometheus is told: the engine's counts, and how long tokens took. Under vLLM's names where these mean the same, all under
our own. Prompt tokens are counted once, at a request's first admission, by where their KV came from: gpu + cpu + recomputed + new."""
import json
import threading
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from serving.sessions import Answer, LiveTurn

GAUGES = ("running", "waiting", "conversations", "slots_total", "slots_free", "cpu_chunks_total", "cpu_chunks_free", "swap_hidden_share")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)      # the buckets' upper ends


class Histogram:
    """How many values were at most so large, in Prometheus' shape."""

    def __init__(self, ends=SECONDS):
        self.ends, self.counts, self.sum = ends, [0] * (len(ends) + 1), 0.0

    def observe(self, value: float):
        self.counts[bisect_left(self.ends, value)] += 1
        self.sum += value

    def samples(self):
        """(suffix, labels, value) of each line."""
        totals = list(accumulate(self.counts))
        yield from (("_bucket", dict(le=str(end)), total) for end, total in zip((*self.ends, "+Inf"), totals))
        yield from (("_sum", {}, self.sum), ("_count", {}, totals[-1]))


class Metrics:
    """Counts what the engine does not: answers, and the seconds until their tokens were sampled."""

    def __init__(self):
        self.lock, self.answers = threading.Lock(), Counter(stop=0, length=0)
        self.queued, self.first_token, self.inter_token, self.end_to_end = (Histogram() for _ in range(4))

    def count(self, handle: LiveTurn, reply: Answer):
        """A turn that is done."""
        times = handle.request.times
        with self.lock:
            self.answers[reply.finish_reason] += 1
            self.queued.observe(handle.request.admitted - handle.submitted)
            self.first_token.observe(times[0] - handle.submitted)
            self.end_to_end.observe(times[-1] - handle.submitted)
            for earlier, later in zip(times, times[1:]):
                self.inter_token.observe(later - earlier)

    def text(self, stats: dict, chunk_bytes: int, model: str) -> str:
        """Everything, as /metrics shows it. stats: the engine's."""
        gpu, cpu, recomputed, new = (stats[f"prompt_tokens_{source}"] for source in ("gpu", "cpu", "recomputed", "new"))
        prompt, hits = gpu + cpu + recomputed + new, gpu + cpu
        label = json.dumps(model, ensure_ascii=False)
        lines = []

        def add(name, kind, *samples):
            lines.append(f"# TYPE {name} {kind}\n")
            for suffix, labels, value in samples:
                labels = "".join(f',{key}="{content}"' for key, content in labels.items())
                lines.append(f"{name}{suffix}{{model_name={label}{labels}}} {value}\n")

        for name, value in {"running": stats["running"], "waiting": stats["waiting"]}.items():
            add(f"vllm:num_requests_{name}", "gauge", ("", {}, value))
        add("vllm:kv_cache_usage_perc", "gauge", ("", {}, 1 - stats["slots_free"] / stats["slots_total"]))
        for name, value in dict(prefix_cache_queries=prompt, prefix_cache_hits=hits, prompt_tokens=prompt, num_preemptions=stats["suspensions"],
                                generation_tokens=stats["generated_tokens"]).items():
            add(f"vllm:{name}_total", "counter", ("", {}, value))
        by_source = dict(local_cache_hit=gpu, external_kv_transfer=cpu, local_compute=recomputed + new)
        add("vllm:prompt_tokens_by_source_total", "counter", *(("", dict(source=source), value) for source, value in by_source.items()))
        with self.lock:
            add("vllm:request_success_total", "counter", *(("", dict(finished_reason=reason), value) for reason, value in self.answers.items()))
            for name, histogram in (("request_queue_time", self.queued), ("time_to_first_token", self.first_token),
                                    ("inter_token_latency", self.inter_token), ("e2e_request_latency", self.end_to_end)):
                add(f"vllm:{name}_seconds", "histogram", *histogram.samples())
        stats = dict(stats, **{f"bytes_swapped_{way}": stats[f"chunks_swapped_{way}"] * chunk_bytes for way in ("in", "out")})
        for name, value in stats.items():
            kind = "gauge" if name in GAUGES else "counter"
            add("nano_pensieve:" + (name.removesuffix("_total") if kind == "gauge" else f"{name}_total"), kind, ("", {}, value))
        return "".join(lines)
