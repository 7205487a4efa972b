"""One run: one system under one load gives one row of a table (paper §6.1).

    planned conversations --> drive --> served turns --> summary --> a row
                                |
                              engine: real, or on a simulated worker, or a server elsewhere

`drive` is the experiment loop. A turn is due when its user has thought about the last reply. The
loop submits every turn that is due, and steps the engine as long as the engine has work. Prompts
are random tokens. Replies have the planned length, because EOS is ignored.

Latencies count from the time at which a turn is due, so waiting is included. The paper's measure is
the normalized latency, the seconds per token of the reply:

    due at 10 s, first token at 12 s, 100th and last token at 22 s:
    ttft 2 s, normalized latency 0.12 s

`options`, here and in all figures, are what bench.py's parse_flags returns: its flags, and `given`.

Invariant: the same seed gives the same simulation, to the last digit.
"""
import heapq
import json
import math
import time
from array import array
from contextlib import closing
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
from tqdm import tqdm

from checkpoint import PRESETS, find_checkpoint, read_config
from config import Config
from engine import Engine
from eviction import POLICIES, RecomputeCost
from experiments.policies import EXPERIMENTS, Oracle
from experiments.simulator import (HARDWARE, OPERATORS, Hardware, Operators, SimulatedWorker,
                                   VirtualClock, kv_token_bytes)
from experiments.workload import (SHAPES, PlannedConversation, PlannedTurn, exponential_think,
                                  many_turns, reading_think, synthetic, under_way,
                                  with_arrivals, within_context)
from scheduler import SOURCES
from warm import WarmUp


# ---- the experiment loop

class Served(NamedTuple):
    """A turn that has ended. Times are in seconds since the start of the run."""
    due: float
    first_token: float
    ended: float
    output_tokens: int
    usage: dict
    recomputed_seconds: float = 0.0     # see watch_recomputation
    turn: int = 1                       # its number in its conversation


NO_TURN = PlannedTurn(0, 0, math.inf)       # follows the last one: its user thinks for ever


class Users:
    """The users submit turns to an engine, and think about the replies. A turn is (due time, number
    of its conversation, its index in that conversation).

    A turn that rewinds begins a branch, with a name of its own: "a@3" for the turn with index 3 of
    the conversation "a". From then on that is where the conversation goes on."""

    def __init__(self, engine, conversations: list[PlannedConversation], seed: int,
                 foresee: Callable | None, leave: Callable | None, warm: float):
        self.engine, self.conversations, self.seed = engine, conversations, seed
        self.foresee, self.leave, self.warm = foresee, leave, warm
        check_names(conversations)
        self.hints: list[tuple[float, str]] = []        # a heap: when a hint is due, and for whom
        self.rng = np.random.default_rng([seed, 2])     # the load draws from other streams
        # What the engine calls each conversation now.
        self.names = [conversation.name for conversation in conversations]
        # The tokens so far, only of conversations that rewind: there we submit them again.
        self.contexts = {number: array("i") for number, conversation in enumerate(conversations)
                         if any(turn.keep is not None for turn in conversation.turns)}
        self.left: list[str] = []                       # branches to which nobody returns
        # If conversations begin alike, all have one tenant, so the engine finds what they share.
        begins_alike = any(conversation.begins for conversation in conversations)
        self.options = dict(tenant="users") if begins_alike else {}
        self.due = [(conversation.arrival, number, 0)
                    for number, conversation in enumerate(conversations)]
        heapq.heapify(self.due)                         # turns that nobody has submitted yet
        self.serving: dict[object, tuple] = {}          # handle -> the turn that is served
        self.ended: list = []                           # of these, those that are complete

    @property
    def next_due(self) -> float:
        """When the next turn or hint is due."""
        return min(heap[0][0] for heap in (self.due, self.hints) if heap)

    def submit_due(self, now: float) -> bool:
        """Submit the turns that are due, and give the hints. True if there was a hint: then the
        engine has something to do."""
        hinted = False
        while self.hints and self.hints[0][0] <= now:
            hinted = True
            self.engine.warm(heapq.heappop(self.hints)[1])
        while self.due and self.due[0][0] <= now:
            _, number, index = turn = heapq.heappop(self.due)
            self.serving[self._submit(number, index)] = turn
        return hinted

    def _submit(self, number: int, index: int):
        """Submit a turn now. Returns its handle."""
        turns = self.conversations[number].turns
        turn, options = turns[index], self.options
        if turn.keep is not None and index:             # a first turn has nothing to rewind
            options = options | self._branch(number, index, turn.keep)
        name = self.names[number]
        if self.foresee:
            following = turns[index + 1] if index + 1 < len(turns) else NO_TURN
            self.foresee(name, following.think_seconds, following.keep)
        prompt = self._prompt(number, index)
        if number in self.contexts:
            self.contexts[number].extend(prompt)
        return self.engine.submit(prompt, name, max_tokens=turn.output_tokens, ignore_eos=True,
                                  on_end=self.ended.append, **options)

    def _prompt(self, number: int, index: int) -> list[int]:
        """Random tokens, but the same ones for each Piece with which conversations begin."""
        conversation, vocabulary = self.conversations[number], self.engine.worker.vocab_size
        prompt = []
        for piece in conversation.begins if index == 0 else ():
            rng = np.random.default_rng([self.seed, 4, piece.id])
            prompt += rng.integers(vocabulary, size=piece.tokens).tolist()
        size = conversation.turns[index].input_tokens - len(prompt)
        return prompt + self.rng.integers(vocabulary, size=size).tolist()

    def _branch(self, number: int, index: int, keep: int) -> dict:
        """Begin a branch with the first `keep` tokens. Returns what `submit` needs for that.

        Nobody returns to the old branch, but no server can know that: its chunks stay until they
        are evicted. When all are, the engine forgets its name at the next rewind."""
        context, parent = self.contexts[number], self.names[number]
        del context[keep:]
        self.names[number] = f"{self.conversations[number].name}@{index}"
        if self.leave:
            self.leave(parent, keep)
            # It does not wait. But this makes the cache ask the policy again what its chunks are
            # worth: the policy may just have heard that nobody returns.
            held = self.engine.cache.conversations[parent]
            self.engine.cache.set_waiting(held, False)
        self.left = forget_left(self.engine, self.left) + [parent]
        return dict(context=context.tolist(), parent=parent)

    def read_replies(self, now: float) -> Iterator[tuple[str, int, float, object]]:
        """Yield (conversation, number of the turn, due time, handle) of each reply that is
        complete. Its user begins to think about the next turn."""
        while self.ended:
            handle = self.ended.pop(0)
            due, number, index = self.serving.pop(handle)
            name, turns = self.names[number], self.conversations[number].turns
            if number in self.contexts:
                self.contexts[number].extend(handle.token_ids)
            if index + 1 < len(turns):
                think = turns[index + 1].think_seconds
                heapq.heappush(self.due, (now + think, number, index + 1))
                if self.warm and turns[index + 1].keep is None:     # who rewinds gives no hint
                    heapq.heappush(self.hints, (now + max(think - self.warm, 0.0), name))
            yield name, index + 1, due, handle


def check_names(conversations: list[PlannedConversation]):
    """ValueError: the engine would take two conversations, or their branches, for one."""
    seen = set()
    for name, turns, *_ in conversations:
        branches = [f"{name}@{index}" for index, turn in enumerate(turns) if turn.keep is not None]
        for one in (name, *branches):
            if one in seen:
                raise ValueError(f"two conversations have the name {one!r}: rename one of them")
            seen.add(one)


def forget_left(engine, names: list[str]) -> list[str]:
    """Let the engine forget those of these conversations that cache nothing for themselves alone,
    and return the others. No KV leaves a tier: what they share stays with those who share it.

        "a" has the chunks [shared with "a@3"] [its own]     it stays
        the same, when its own chunk has been evicted        it is forgotten

    (A RemoteEngine keeps nothing of a branch that was left.)"""
    if not isinstance(engine, Engine):
        return []
    held = engine.cache.conversations
    for name in names:
        left = held[name]
        if not any(chunk.state and chunk.users == left.alone for chunk in left.chunks):
            engine.forget(name)
    return [name for name in names if name in held]


def drive(engine, conversations: list[PlannedConversation], seed: int, sleep: Callable = time.sleep,
          until: float = math.inf, foresee: Callable | None = None, warm: float = 0.0,
          leave: Callable | None = None) -> list[Served]:
    """Play every turn of every conversation at its time. Returns the turns that ended, in that
    order.

    Steps the engine in this thread. Ends when all turns have ended, or `until` seconds after the
    start. engine: an Engine or a RemoteEngine. sleep(seconds): how to wait for the next turn.
    foresee(name, seconds, keep): is told, with every turn, how long its user will think about the
    reply (inf: for ever), and how many tokens the next turn keeps (None: all).
    warm: so many seconds before a turn its user gives a hint (Engine.warm); 0: no user does.
    leave(name, keep): is told when a turn rewinds that nobody returns to this conversation: only
    its first `keep` tokens go on, in a branch.
    ValueError: two conversations have one name.
    """
    users, served = Users(engine, conversations, seed, foresee, leave, warm), []
    recomputed = watch_recomputation(engine) if isinstance(engine, Engine) else {}
    begin, now, batch = engine.clock(), 0.0, None
    with progress_bar(conversations, until) as progress:
        while (users.due or users.serving) and now < until:
            hinted = users.submit_due(now)
            # as in Engine._run: copies begin after the last reply, too
            if users.serving or batch or hinted:
                batch = engine.step()
            else:
                sleep(min(users.next_due, until) - now)
            now = engine.clock() - begin
            for name, turn, due, handle in users.read_replies(now):
                reply, first_token = handle.result(), handle.request.times[0] - begin
                served.append(Served(due, first_token, now, len(reply.token_ids), reply.usage,
                                     recomputed.pop(name, 0.0), turn))
            done = len(served) if until == math.inf else int(min(now, until))
            progress.update(done - progress.n)
    return served


def watch_recomputation(engine: Engine) -> dict[str, float]:
    """Conversation -> the seconds that its present turn's recomputed tokens have cost. It grows as
    the engine steps. The retention value keeps the sum of all these low.

    Of each span the positions count that had KV in an earlier turn. If the conversation had KV for
    64 tokens, the span [48, 70) recomputes 48 to 63. A decode recomputes nothing."""
    policy, seconds = engine.cache.policy, {}
    size, limit = policy.chunk_size, engine.scheduler.limit
    ends = [0, *range(size, limit + size, size)]                    # of chunks
    # The seconds to compute the positions up to each end. Within a chunk we interpolate.
    cost_up_to = np.cumsum([0.0, *map(policy.cost, ends[1:])])

    def count(batch):
        # The engine calls this before it launches the batch, so `prefilling` is still true.
        for request, start, end in batch.spans:
            if not request.prefilling:
                continue
            if isinstance(request, WarmUp):
                seen = request.end
            else:
                seen = sum(request.usage[source] for source in ("gpu", "cpu", "recomputed"))
            if start < seen:
                before, after = np.interp([start, min(end, seen)], ends, cost_up_to)
                name = request.conversation.name
                seconds[name] = seconds.get(name, 0.0) + float(after - before)
    engine.watchers.append(count)
    return seconds


def progress_bar(conversations: list[PlannedConversation], until: float) -> tqdm:
    """It counts the seconds of a run (of a simulation: simulated ones), or the turns if `until` is
    inf. In a terminal only (None), and not in the processes of parallel simulations."""
    if until == math.inf:
        unit, total = "turn", sum(len(conversation.turns) for conversation in conversations)
    else:
        unit, total = "second", math.ceil(until)
    return tqdm(desc=f"{unit}s of a run", total=total, unit=unit, leave=False,
                disable=True if parent_process() else None)


def summary(served: list[Served], begin: float = 0.0) -> dict:
    """The row of the turns that ended after `begin` seconds, under serving benchmarks' usual names.

    ttft: time to first token; tpot: time per output token after the first; e2el: end-to-end
    latency. ValueError: no turn ended after `begin`."""
    if served and served[-1].ended <= begin:
        raise ValueError(f"all turns ended within the first {begin:g} s, which do not count: "
                         "give --seconds a smaller number, or a lower rate")
    served = [turn for turn in served if turn.ended > begin]
    if not served:
        raise ValueError("no turn has ended in time: give --seconds a larger number, "
                         "or a lower rate")
    seconds = max(turn.ended for turn in served) - begin
    outputs = sum(turn.output_tokens for turn in served)
    prompts = sum(turn.usage["prompt_tokens"] for turn in served)
    times = dict(
        ttft=[turn.first_token - turn.due for turn in served],
        tpot=[(turn.ended - turn.first_token) / max(turn.output_tokens - 1, 1) for turn in served],
        e2el=[turn.ended - turn.due for turn in served],
        normalized_latency=[(turn.ended - turn.due) / max(turn.output_tokens, 1)
                            for turn in served])
    row = dict(throughput=len(served) / seconds, output_throughput=outputs / seconds,
               total_token_throughput=(outputs + prompts) / seconds,
               normalized_latency_ms=1e3 * float(np.mean(times["normalized_latency"])))
    for name, values in times.items():
        row[f"mean_{name}_ms"] = 1e3 * float(np.mean(values))
        for p in (50, 90, 99):
            row[f"p{p}_{name}_ms"] = 1e3 * float(np.percentile(values, p))

    tokens = {source: sum(turn.usage[source] for turn in served) for source in SOURCES}
    seen_before = max(1, tokens["gpu"] + tokens["cpu"] + tokens["recomputed"])
    for source, count in tokens.items():
        row[f"prompt_tokens_{source}"] = count
    row["recomputed_tokens"] = tokens["recomputed"]
    row["recomputed_seconds"] = sum(turn.recomputed_seconds for turn in served)
    # The next three rates are shares of `seen_before`: an infinite cache would hit all of these
    # tokens. (A prefix that conversations of a trace have in common counts if the replay shares it:
    # see PlannedConversation.begins.)
    row["gpu_hit_rate"] = tokens["gpu"] / seen_before
    row["cpu_hit_rate"] = tokens["cpu"] / seen_before
    row["hits_of_attainable"] = row["gpu_hit_rate"] + row["cpu_hit_rate"]
    row["attainable_hit_rate"] = seen_before / max(1, prompts)          # share of all prompt tokens
    row["turns"] = len(served)
    row["computed_tokens"] = tokens["recomputed"] + tokens["new"] + outputs
    return row


def by_turn(served: list[Served], begin: float = 0.0) -> list[dict]:
    """The cliff: what the turns that ended after `begin` seconds found, by their number in the
    conversation (1, 2, 3, 4, 5-8, 9-16, ...). A server that remembers has a hit rate that rises
    with the turns; where its cache ends, the rate falls and the first token is late.

    hit_rate: cached tokens, of all tokens of the prompts. (summary's rates leave out new tokens.)
    recomputed_tokens: of a turn, on average.
    """
    groups: dict[int, list[Served]] = {}                # by the last turn of the group
    for turn in served:
        if turn.ended > begin:
            last = turn.turn if turn.turn <= 4 else 1 << (turn.turn - 1).bit_length()
            groups.setdefault(last, []).append(turn)
    rows = []
    for last, turns in sorted(groups.items()):
        tokens = {source: sum(turn.usage[source] for turn in turns) for source in SOURCES}
        seconds = [turn.first_token - turn.due for turn in turns]
        rows.append(dict(
            turn=str(last) if last <= 4 else f"{last // 2 + 1}-{last}", turns=len(turns),
            hit_rate=(tokens["gpu"] + tokens["cpu"]) / max(1, sum(tokens.values())),
            median_ttft_ms=1e3 * float(np.median(seconds)),
            p95_ttft_ms=1e3 * float(np.percentile(seconds, 95)),
            recomputed_tokens=tokens["recomputed"] / len(turns)))
    return rows


# ---- systems and loads

class System(NamedTuple):
    flags: dict = {}                # of Engine
    operators: str = "eager"        # of a simulation: a key of OPERATORS
    hinted: bool = False            # do its users give hints, --warm seconds before their turns?
    whole_batches: bool = False     # see batch_by_request


STATELESS = dict(stateless=True, cpu_cache_tokens=0)
SYSTEMS = {
    # vLLM at the time of the paper: forgets every request, computes prompts apart from decodes, and
    # keeps 1% free.
    "vllm then": System(STATELESS | dict(separate_phases=True, reserve=0.01)),
    "stateless": System(STATELESS),                     # our engine without its memory
    "stateless, fused": System(STATELESS, "fused"),     # stands for TensorRT-LLM
    "gpu cache": System(dict(cpu_cache_tokens=0)),      # no CPU tier: evicted chunks are recomputed
    "pensieve": System(),
    "pensieve, hinted": System(hinted=True),
    "separate phases": System(dict(separate_phases=True)),
    "request level": System(whole_batches=True),        # batches as they were before Orca
    # evicts as an earlier version of the paper did (arXiv 2312.05516)
    "draft": System(dict(policy="trailing-half", swap_threshold=0.5)),
}
SYSTEMS |= {name: System(dict(policy=name)) for name in POLICIES}
SYSTEMS |= {name: System(dict(policy=policy)) for name, policy in EXPERIMENTS.items()}


class Panel(NamedTuple):
    """One diagram of a figure: a model under one kind of load, at several request rates."""
    model: str
    dataset: str
    rates: tuple = (None,)          # turns per second; None: a trace's own times
    at_ms: float | None = None      # the normalized latency at which throughputs are compared
    paper: float | None = None      # the paper's ratio there, of the figure's last system to vLLM
    paper_fused: float | None = None    # and to TensorRT-LLM
    gpus: int = 1
    hardware: str = "a100"          # a key of HARDWARE, or a file of `bench.py profile`
    cpu_gb: float = 220.0           # CPU tier of each GPU; the paper's machine has 220 GB
    latency: str = "normalized_latency_ms"  # what is compared; for the draft its p90
    think: float | str = 60.0       # mean seconds from reply to next turn; or a key of THINKING
    per_query_head: bool = False    # in a simulation, how attention reads: see Operators

    def __str__(self):
        return panel_title(self.model, self.dataset, self.think, self.cpu_gb, self.per_query_head)


THINKING = {"reading": "think while reading", "own": "think as in the trace"}


def panel_title(model: str, dataset: str, think: float | str | None = None,
                cpu_gb: float = 220.0, per_query_head: bool = False) -> str:
    """opt-13b, sharegpt, think 60 s, 110 GB of CPU tier"""
    names = [model, dataset]
    if think is not None:
        names.append(THINKING.get(think) or f"think {think:g} s")
    if cpu_gb != 220:
        names.append(f"{cpu_gb:g} GB of CPU tier")
    if per_query_head:
        names.append("their kernels")
    return ", ".join(names)


GPU_BYTES = 40e9        # of the GPU tier, per GPU (paper, §6.1)
# Flags of Engine at the paper's scale: vLLM's limits of a batch.
SIMULATED = dict(max_running=256, max_batch_tokens=2048)
# And for the embedded model. The conversations of "many turns" need 16,000 to 20,000 tokens
# together.
MEASURED = dict(gpu_cache_tokens=3840, cpu_cache_tokens=15360)
HERE = [Panel("tiny_chat", "many turns", (5.0, 10.0, 60.0), think=0.1)]  # the last one saturates


def at_scale(options) -> bool:
    """True for a simulation of the paper's machines; False for this machine, measured or
    simulated."""
    return options.simulate and options.hardware in (None, *HARDWARE)


def has_tier_in_gb(options) -> bool:
    """True if a panel's cpu_gb is the size of the CPU tier; False if this machine or a flag gives
    tokens."""
    return at_scale(options) and "cpu_cache_tokens" not in options.given


# A run begins this many mean think times after the first arrival: by then the mean context grows no
# more.
PAST = 100


def planned(panel: Panel, rate: float | None, options) -> list[PlannedConversation]:
    """The panel's conversations with their arrival times. rate: None keeps the times of the
    trace."""
    if panel.think in THINKING:
        think = reading_think if panel.think == "reading" else None
    else:
        think = partial(exponential_think, mean=panel.think)
    if options.trace:
        trace = options.conversations
        return trace if rate is None else with_arrivals(trace, rate, options.seed, think)
    if panel.dataset == "many turns":
        return many_turns(3500, rate, think, options.seed)
    # As many as arrive during the run and in a long time before it, and some more: arrivals are
    # random. (think is "own" only for a trace.)
    past = PAST * (60.0 if panel.think == "reading" else panel.think)
    count = rate * (past + options.seconds) / SHAPES[panel.dataset].turns
    conversations = synthetic(panel.dataset, math.ceil(count + 4 * math.sqrt(count)) + 1,
                              options.seed)
    return list(under_way(with_arrivals(conversations, rate, options.seed, think), past))


def window(panel: Panel, rate: float | None, options) -> tuple[float, float]:
    """The part of a run in which turns count, in seconds (begin, end): all but the first third.

    The first third only fills the caches. "Many turns", and a trace with its own times, end by
    themselves; there everything counts."""
    if rate is None or panel.dataset == "many turns":
        return 0.0, math.inf
    return options.seconds / 3, options.seconds


# ---- one run

def play(name: str, panel: Panel, rate: float | None, options) -> dict:
    """Run one system in one panel at one rate -> its row. ValueError: no conversation fits."""
    conversations = planned(panel, rate, options)
    begin, until = window(panel, rate, options)
    with closing(build(SYSTEMS[name], panel, conversations, options)) as engine:
        conversations = that_fit(conversations, engine.scheduler.limit)
        sleep = engine.clock.sleep if options.simulate else time.sleep
        policy, foresee, leave = engine.cache.policy, None, None
        if isinstance(policy, Oracle):
            foresee, leave = policy.foresee, policy.leave
        warm = options.warm if SYSTEMS[name].hinted else 0.0
        served = drive(engine, conversations, options.seed, sleep, until, foresee, warm, leave)
        results, stats = outcome(engine, served, begin, until), engine.stats()

    row = dict(system=name, policy=name if name in EXPERIMENTS else engine.config.policy,
               model=panel.model, dataset=panel.dataset, think=panel.think, request_rate=rate)
    if has_tier_in_gb(options):
        row |= dict(cpu_gb=panel.cpu_gb)
    if at_scale(options):
        row |= dict(per_query_head=panel.per_query_head)
    row |= results
    if places := stats["cpu_chunks_total"]:
        row["turnovers"] = stats["chunks_dropped"] / places             # of the CPU tier
    for counter, value in stats.items():        # of the whole run, so the fields of the summary win
        row.setdefault(counter, value)
    if options.trace or panel.dataset == "many turns":      # who is met under way has begun before
        row["by_turn"] = by_turn(served, begin)
    return row


def that_fit(conversations: list[PlannedConversation], limit: int) -> list[PlannedConversation]:
    """Without those whose context grows above `limit` tokens. ValueError: none is left."""
    fitting = within_context(conversations, limit)
    if not fitting:
        raise ValueError(f"no conversation fits {limit} tokens: "
                         "give --gpu-cache-tokens a larger number")
    return fitting


def outcome(engine: Engine, served: list[Served], begin: float, until: float) -> dict:
    """The summary of a run; if the run was too short to tell, also why, as `too_short`."""
    reason = too_short(engine, served, begin, until)
    return summary(served, begin) | (dict(too_short=reason) if reason else {})


STEADY = 0.02           # hit rates that differ by less are the same
GROWTH = 1.2            # contexts that have grown by less are the same


def too_short(engine: Engine, served: list[Served], begin: float, until: float) -> str | None:
    """Why the run was too short to tell, if it was.

    "GPU" or "CPU": no chunk had to leave this tier. "hits" and "load" compare the first and the
    second half of the turns that count. "hits": the tiers still fill, because the hit rates differ
    by more than 2 points; or a half has no turn. "load": the mean context still grows, by a fifth
    or more, because the first long conversations are not over yet; this holds for stateless
    systems, too. A run that ends by itself (until is inf) is all there is of its load: it may leave
    the CPU tier partly empty."""
    stats, stateful = engine.stats(), not engine.config.stateless
    if stateful and not stats["chunks_dropped"] and not stats["chunks_swapped_out"]:
        return "GPU"
    if until == math.inf:
        return None
    if stateful and not stats["chunks_dropped"]:
        return "CPU"
    middle = (begin + until) / 2
    halves = [[turn for turn in served if begin < turn.ended <= middle],
              [turn for turn in served if turn.ended > middle]]
    if not all(halves):
        return "hits"
    first, second = (summary(half)["hits_of_attainable"] for half in halves)
    if abs(second - first) > STEADY:
        return "hits"
    first, second = (np.mean([turn.usage["prompt_tokens"] for turn in half]) for half in halves)
    return "load" if second > GROWTH * first else None


def build(system: System, panel: Panel, conversations: list[PlannedConversation],
          options) -> Engine:
    """The engine of one run: on this machine, or the same engine on a simulated worker."""
    if options.simulate:
        engine = simulated_engine(system, panel, conversations, options)
    else:
        cost = load_profile(options.profile) if options.profile else None
        engine = Engine(panel.model, cost=cost, **(MEASURED | options.given | system.flags))
    if system.whole_batches:
        batch_by_request(engine.scheduler)
    return engine


def batch_by_request(scheduler):
    """Make it batch whole requests (paper §2.2): nobody joins a batch before all its replies are
    complete. The next batch has the requests that wait then, as many as fit.

    (Replies that end early are given at once, and nothing is padded: real systems did worse.)"""
    fits = scheduler.fits
    last_of_batch = None        # the arrival number of its last request; None: nobody may join

    def fits_batch(request) -> bool:
        """The scheduler asks this of the head of its queue alone."""
        nonlocal last_of_batch
        if not scheduler.running:                       # the next batch begins
            last_of_batch = scheduler.queue[-1].arrival
        if last_of_batch is None:
            return False
        if request.arrival > last_of_batch or not fits(request):
            last_of_batch = None
            return False
        return True
    scheduler.fits = fits_batch


def simulated_engine(system: System, panel: Panel, conversations: list[PlannedConversation], options
                     ) -> Engine:
    if at_scale(options):
        hardware = HARDWARE[panel.hardware]
        operators = OPERATORS[system.operators]._replace(per_query_head=panel.per_query_head)
        limits = SIMULATED
    else:
        hardware, operators = load_machine(panel.hardware)
        limits = MEASURED
    flags = limits | options.given | system.flags
    if panel.model in PRESETS:
        shape = PRESETS[panel.model]
    else:
        shape = read_config(find_checkpoint(panel.model))[1]

    token_bytes = kv_token_bytes(shape, hardware.element_size)
    chunk_size = flags.get("chunk_size", Config.chunk_size)
    num_slots = flags.get("gpu_cache_tokens", int(GPU_BYTES * panel.gpus / token_bytes))
    cpu_tokens = flags.get("cpu_cache_tokens", int(1e9 * panel.cpu_gb * panel.gpus / token_bytes))
    num_places = cpu_tokens // chunk_size
    max_context = min(num_slots, longest_context(conversations))
    clock = VirtualClock()
    worker = SimulatedWorker(shape, hardware, operators, clock, num_slots, num_places, max_context,
                             chunk_size, panel.gpus, pipeline=not flags.get("no_pipeline"))
    return Engine(panel.model, worker=worker, clock=clock, **flags)


def longest_context(conversations: list[PlannedConversation]) -> int:
    return max(conversation.tokens for conversation in conversations)


# ---- what `bench.py profile` has saved

def load_profile(path: str) -> RecomputeCost:
    """The measured cost of recomputing a chunk. ValueError: the file is no profile."""
    def cost(rows):
        attention = {row["context"]: row["seconds"] for row in rows if row["system"] == "attention"}
        rest = [row["seconds"] for row in rows if row["system"] == "all else"]
        return RecomputeCost(attention, rest[0])
    return parse_profile(path, cost)


def load_machine(path: str) -> tuple[Hardware, Operators]:
    """The measured rates of a machine, to simulate it. ValueError: the file is no profile."""
    def fields(rows, kind):
        return kind(**{row["name"]: row["value"] for row in rows if row["system"] == kind.__name__})
    return parse_profile(path, lambda rows: (fields(rows, Hardware), fields(rows, Operators)))


def parse_profile(path: str, parse: Callable):
    """parse(rows of the file)."""
    try:
        return parse(json.loads(Path(path).read_text())["rows"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is no profile ({error!r}): "
                         f"make one with python bench.py profile --json {path}") from error
