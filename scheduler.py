"""Who runs in the next step: one queue, first come first served, one running list (paper §4.2, §4.3).

    a's context    | absent [0:4) | CPU [4:12) | GPU [12:16) | last reply token + new prompt [16:23) |
    a's spans        a[0:4]         copied in    is there      a[16:23]
    the batch      step 45  b[31:32] a[0:4] a[16:23] | in a[4:12] | out d[4:8]

Here a returns with a new prompt. b decodes: it feeds position 31 and samples the next token. d is idle, so
the step copies its chunk [4:8) to the CPU ahead of need.

A *span* is a run of positions of one request to compute in this step. A decode is a span of length 1 at the
end. A new prompt is a span at the end. Dropped tokens are a span before that, mostly at the front (the
paper's sub-request). Part of a long prefill is a span that stops early. `Request.missing()` lists the runs
without KV, and a batch takes them left to right while its token budget lasts. One batch mixes all of them,
decodes first; only the ablation `separate_phases` keeps them apart.

The books run ahead of the device: they follow the order of launches, as the device will. Right after the
launch of a batch, `launched` books the KV that it will compute, and a PLACEHOLDER for each token that it will
sample. So the next batch can be composed, and launched behind the first one, before the host knows these
tokens. `account` fills them in later and ends requests.

    a's tokens     ... 17 42 PLACEHOLDER        step 8 is launched: it samples the token at position 34
    schedule       step 9  a[34:35]             on the device the token is there when step 9 begins
    account        ... 17 42 99 PLACEHOLDER     step 8 has sampled 99; step 9 is under way

Invariant: everything that a span reads is cached, arriving, or computed in this batch or an earlier one.
"""
import heapq
import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from kv_cache import Conversation, KVCache, Ticket

PLACEHOLDER = -1        # in place of a token that the device samples, while the host does not know it
SOURCES = ("gpu", "cpu", "recomputed", "new")      # where the KV of a context comes from, at admission


class TooLong(ValueError):
    """A context exceeds the limit."""


@dataclass(eq=False)
class Request:
    """One turn being served: new prompt tokens in, generated tokens out."""
    conversation: Conversation
    prompt: list[int]
    max_tokens: int | None = None                  # None: as many as fit
    min_tokens: int = 0                            # no earlier token of stop_ids ends the reply
    stop_ids: frozenset[int] = frozenset()
    # Asked after each token that is no such stop: does the reply end here?
    reached_stop: Callable[[int], bool] | None = None
    sampling: object = None                        # the worker's business
    outbox: SimpleQueue = field(default_factory=SimpleQueue)      # its tokens, then None
    arrival: int = 0                               # its number in the order of submission
    generated: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)        # when the host learnt each of them
    logprobs: list = field(default_factory=list)   # what the worker reports of each of them, if asked to
    before: tuple[int, int] | None = None          # the conversation's length and `known` before this turn
    longest: int | None = None                     # how long its context may become, prompt and reply
    usage: dict | None = None                      # by SOURCES, fixed at first admission
    admitted: float | None = None                  # when that was
    prefilling: bool = False                       # admitted, and no step launched since that samples
    finish_reason: str | None = None               # "stop" | "length" | "cancelled" | "failed"
    error: Exception | None = None

    def __lt__(self, other: "Request") -> bool:
        return self.arrival < other.arrival

    @property
    def joined(self) -> bool:
        """Have the tokens of the prompt joined those of the conversation?"""
        return self.before is not None

    @property
    def total(self) -> int:
        """Positions of its context so far, the prompt included."""
        return len(self.conversation.tokens) + (0 if self.joined else len(self.prompt))

    @property
    def unsettled(self) -> bool:
        """Is its last token a placeholder?"""
        return self.conversation.tokens[-1] == PLACEHOLDER

    def missing(self) -> list[tuple[int, int]]:
        """The maximal runs [start, end) of positions that have no KV and none arriving, left to right.

        The request is running, so its conversation has a chunk for every position. The first `filled` tokens
        of each chunk are cached or arriving. A request that prefills, with chunks of 4, filled = 0, 4, 2, 0,
        and 14 tokens in all, misses [(0, 4), (10, 14)]. A decode misses nothing but its last position."""
        total = len(self.conversation.tokens)
        if not self.prefilling:
            return [(total - 1, total)]
        runs, start = [], 0
        for chunk in self.conversation.chunks:
            if chunk.filled:            # a run ends where its KV begins, and the next one begins behind it
                end = chunk.index * self.conversation.chunk_size
                if start < end:
                    runs.append((start, end))
                start = end + chunk.filled
        return runs + [(start, total)] if start < total else runs


class Span(NamedTuple):
    """Positions [start, end) of one request to compute in this step."""
    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Is its last position the last of the context? Then the next token is sampled there. Ask before the
        launch: it adds a placeholder to the context."""
        return self.end == len(self.request.conversation.tokens)


class Batch:
    """The spans of one step, packed, with the copies that go with them. str(batch) is the trace."""

    def __init__(self, step: int, budget: int):
        self.step = step
        self.budget = budget                       # tokens that still fit
        self.spans: list[Span] = []
        self.sampling_spans: list[Span] = []       # since its launch: those behind which a token is sampled
        self.swap_in: list[Ticket] = []            # copies CPU -> GPU; a ticket is the copy of one chunk
        self.swap_out: list[Ticket] = []           # copies GPU -> CPU
        self.table_updates: list[tuple] = []       # (row, start, slots): what changed in the slot table
        self.slot_copies: dict[int, int] = {}      # target -> source: KV to copy before all else

    def __bool__(self) -> bool:
        return bool(self.spans or self.swap_in or self.swap_out)

    def take(self, request: Request):
        """Add the request's missing runs as spans, left to right, while the budget lasts.

        The last one may stop early: with a budget of 6, the runs (0, 4) and (10, 14) become [0:4) and
        [10:12)."""
        for start, end in request.missing():
            end = min(end, start + self.budget)
            if end == start:
                return
            self.spans.append(Span(request, start, end))
            self.budget -= end - start

    def __str__(self) -> str:
        spans = " ".join(f"{s.request.conversation.name}[{s.start}:{s.end}]" for s in self.spans)
        copies = {"in": self.swap_in, "out": self.swap_out}
        parts = [spans] + [f"{way} {_runs(tickets)}" for way, tickets in copies.items() if tickets]
        return f"step {self.step}  " + " | ".join(parts)


def _runs(tickets: list[Ticket]) -> str:
    """Tickets as name[start:end], neighbouring chunks as one run."""
    runs = []
    for ticket in sorted(tickets, key=lambda ticket: (str(ticket.conversation.name), ticket.start)):
        name = ticket.conversation.name
        if runs and runs[-1][0] == name and runs[-1][2] == ticket.start:
            runs[-1][2] = ticket.end
        else:
            runs.append([name, ticket.start, ticket.end])
    return " ".join(f"{name}[{start}:{end}]" for name, start, end in runs)


class Result(NamedTuple):
    """What the worker made of a batch."""
    tokens: list[int]                              # one for each of sampling_spans; -1: logits not finite
    landed: list[Ticket]                           # copies that have ended, of this step or an earlier one
    logprobs: list | None = None                   # one for each token; None where nobody asked for it


class Scheduler:
    """Decides each step's batch and accounts for its result."""

    def __init__(self, cache: KVCache, limit: int, max_batch_tokens: int = 512, swap_threshold: float = 0.25,
                 reserve: float = 0.10, stateless: bool = False, separate_phases: bool = False):
        """limit: the longest context in tokens, prompt and reply together. swap_threshold, reserve: see
        Config."""
        assert limit <= cache.num_slots, "a request that runs alone must fit"
        self.cache, self.limit, self.max_batch_tokens = cache, limit, max_batch_tokens
        self.threshold_slots = int(swap_threshold * cache.num_slots)     # to keep available
        self.reserve_slots = int(reserve * cache.num_slots)              # that running requests may grow into
        self.stateless, self.separate_phases = stateless, separate_phases
        self.running: list[Request] = []                    # by arrival
        self.unfinished: dict[int, deque[Request]] = {}     # by conversation.order: its requests, by arrival
        self.queue: list[Request] = []      # a heap by arrival: of each conversation the oldest unfinished
                                            # request, unless it runs (and some that have been cancelled)
        self.arrivals = itertools.count()
        self.steps = 0
        self.stats = Counter(prompt_tokens_gpu=0, prompt_tokens_cpu=0, prompt_tokens_recomputed=0,
                             prompt_tokens_new=0, generated_tokens=0, suspensions=0, finished=0, cancelled=0)

    # ---- in and out

    def submit(self, request: Request):
        """Put a request into the queue. The requests of one conversation run one after another.

        The caller has checked that the prompt has a token, and that max_tokens is None or at least 1."""
        request.arrival = next(self.arrivals)
        requests = self.unfinished.setdefault(request.conversation.order, deque())
        requests.append(request)
        if len(requests) == 1:
            self._enqueue(request)

    @property
    def busy(self) -> bool:
        """Are there requests to serve, or copies to wait for?"""
        return bool(self.unfinished or self.cache.in_flight)

    def cancel(self, request: Request, now: float, error: Exception | None = None):
        """End a request early, wherever it is. The conversation's tokens become what they were before. With
        an error the request has failed."""
        if request.finish_reason:
            return
        if request in self.running:
            self._leave(request, now)
        if request.joined:
            self.cache.truncate(request.conversation, *request.before)
        request.error = error
        self._end(request, "failed" if error else "cancelled")

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next batch. It is empty if there is nothing to do, or if all requests must wait for copies or
        tokens that are on their way."""
        while True:
            batch = self.compose(now)
            if batch or not self.unfinished or self._waits():
                batch.table_updates = self.cache.take_table_updates()
                batch.slot_copies = self.cache.take_slot_copies()
                return batch
            # Nothing can run, and nothing is on its way. Either composing has made slots available, by
            # giving up chunks without a copy: then the next try finds them. Or there are none: then a
            # request must give way, which happens at most once for each running request.
            if self.running and not self.cache.available:
                self.give_way(now)

    def compose(self, now: float) -> Batch:
        """One try at a batch.

        1. Running requests, decodes first. Each needs slots for the tokens that it has grown by. A request
           that finds none sits out this step: it is starved. A request whose context is as long as it may
           become has nothing left to compute.
        2. The queue, first come first served, while the budget, the rows of the slot table (one for each
           running request) and the slots last. Nobody overtakes the head, even if a later request would fit.
        3. Copies to the CPU ahead of need, so that starved requests and the head of the queue find slots
           later. How many slots the head needs is known when its prompt has joined its conversation. So
           `prepare_head` comes first, even if no budget is left.

        A prompt may be longer than the budget. At admission the request gets the slots of its whole
        context, but only a part of it is computed. Later steps take the next parts, after the decodes. With
        a budget of 16, a prompt of 20 tokens becomes a[0:16] in one step and a[16:20] in the next, which
        samples.

        With separate_phases, a batch that has any span of a prefilling request keeps those spans alone; the
        others come in a later step."""
        batch, starved = Batch(self.steps, self.max_batch_tokens), 0
        for request in decodes_first(self.running):
            if len(request.conversation.tokens) == request.longest:
                continue
            if self.cache.grow(request.conversation, now):
                batch.take(request)
            else:
                starved += 1
        self.prepare_head(now)
        while batch.budget > 0 and (request := self.head()) and self.fits(request):
            batch.swap_in += self.admit(request, now)
            batch.take(request)
            self.prepare_head(now)
        if self.separate_phases:
            batch.spans = [span for span in batch.spans if span.request.prefilling] or batch.spans
        batch.swap_out = self.plan_swap_out(starved, now)
        return batch

    def launched(self, batch: Batch):
        """Book what a batch will have done before any batch that is launched after it."""
        self.steps += 1
        for span in batch.spans:
            request, start, end = span
            self.cache.computed(request.conversation, start, end)
            if span.samples:
                request.conversation.tokens.append(PLACEHOLDER)
                request.prefilling = False
                batch.sampling_spans.append(span)

    def account(self, batch: Batch, result: Result, now: float):
        """Book the result of a batch; batches are accounted for in the order of their launch. Each sampled
        token goes into its request's outbox; None follows the last one. If a request has ended since the
        launch, we ignore its token."""
        for ticket in result.landed:
            self.cache.complete(ticket)
        told, logprobs = 0, result.logprobs or [None] * len(result.tokens)
        sampled = zip(batch.sampling_spans, result.tokens, logprobs, strict=True)
        for (request, _, position), token, logprob in sampled:
            if request.finish_reason:
                continue
            if token < 0:
                self.cancel(request, now, RuntimeError("the model's logits are not finite (NaN or infinity)"))
                continue
            told += 1
            request.conversation.tokens[position] = token
            request.generated.append(token)
            request.logprobs.append(logprob)
            request.times.append(now)
            request.outbox.put(token)
            reason = self.ended_by(request, token)
            if reason and not request.finish_reason:        # reached_stop may have cancelled it
                self.finish(request, reason, now)
        self.stats["generated_tokens"] += told

    # ---- the decisions

    def prepare_head(self, now: float):
        """Make the head of the queue ready for admission: its prompt joins its conversation. Before that,
        take requests off the queue that have been cancelled, and fail those whose context has outgrown the
        limit since they were submitted."""
        self.discard_unservable(now)
        if not self.queue or self.queue[0].joined:
            return
        request = self.queue[0]
        before = len(request.conversation.tokens), request.conversation.known
        if self.cache.extend(request.conversation, request.prompt):
            request.before = before
            if request.max_tokens is None:
                request.max_tokens = self.limit - request.total
            request.longest = request.total + request.max_tokens

    def head(self) -> Request | None:
        """The request to admit next. None: the queue is empty, or its first request waits for another one
        that computes the same prompt just now (see sharing.py)."""
        return self.queue[0] if self.queue and self.queue[0].joined else None

    def discard_unservable(self, now: float):
        while self.queue:
            request = self.queue[0]
            if not request.joined and request.total + (request.max_tokens or 1) > self.limit:
                self.cancel(request, now, TooLong(
                    f"the conversation has {request.total} tokens with this prompt and max_tokens="
                    f"{request.max_tokens}: they do not fit the limit of {self.limit}"))
            if not request.finish_reason:
                return
            heapq.heappop(self.queue)

    def fits(self, request: Request) -> bool:
        shortfall = self.cache.shortfall(request.conversation, request.total, self._reserve())
        return bool(self.cache.free_rows) and shortfall <= 0

    def admit(self, request: Request, now: float) -> list[Ticket]:
        """Move the head of the queue, which fits, to the running list, with all its slots. Returns its
        swap-ins."""
        heapq.heappop(self.queue)
        if request.admitted is None:
            request.admitted = now
            self.cache.policy.returned(request.conversation, now)
        request.prefilling = True
        insort(self.running, request)
        swap_in = self.cache.admit(request.conversation, request.total, now)
        if request.usage is None:
            self._count_sources(request, swap_in)
        return swap_in

    def plan_swap_out(self, starved: int, now: float) -> list[Ticket]:
        """Copies ahead of need: until the threshold is available (or a slot for each starved request, if that
        is more), then until the head of the queue fits."""
        tickets = self.cache.plan_swap_out(max(self.threshold_slots, starved) - self.cache.available, now)
        if request := self.head():
            conversation, total = request.conversation, request.total
            tickets += self.cache.plan_swap_out_for(conversation, total, self._reserve(), now)
        return tickets

    def give_way(self, now: float):
        """Suspend the latest arrival: every running request is starved, no slot is available, no idle chunk
        is left to copy or to drop, and neither a copy nor a token is on its way.

        The loop in `schedule` ends: each call makes `running` one shorter, and a request that is alone always
        fits, because the limit is at most the number of slots (without those of a designated prefix, see
        sharing.py). The oldest request is never suspended, so it finishes; then the next one is the
        oldest."""
        assert len(self.running) > 1, "a lone request fits, or it would not have been admitted"
        self.suspend(self.running[-1], now)

    def suspend(self, request: Request, now: float):
        """Take a running request out, back to its place in the queue. Nothing generated is lost. Its chunks
        may leave the GPU from now on, but late: its turn waits, so the policy counts it as hardly idle. The
        statistics count it in `suspensions`."""
        self._leave(request, now)
        self._enqueue(request)
        self.stats["suspensions"] += 1

    def ended_by(self, request: Request, token: int) -> str | None:
        """The finish_reason, if this token is the last of the reply."""
        may_stop = len(request.generated) >= request.min_tokens
        if (may_stop and token in request.stop_ids) or (request.reached_stop and request.reached_stop(token)):
            return "stop"
        return "length" if len(request.generated) >= request.max_tokens else None

    def finish(self, request: Request, reason: str, now: float):
        """The turn has ended: its conversation is idle, and its KV stays."""
        self._leave(request, now)
        if request.unsettled:
            # A step was launched that feeds the last token of the reply. We take back the placeholder of that
            # step, and the KV of the last token.
            length = len(request.conversation.tokens) - 1
            self.cache.truncate(request.conversation, length, length - 1)
        self.cache.policy.ended(request.conversation)
        self._end(request, reason)

    # ---- the small steps

    def _count_sources(self, request: Request, swap_in: list[Ticket]):
        """Fix where the context's KV comes from. It counts once, at first admission.

        A conversation of 100 tokens returns with a prompt of 20. It has had KV for 99 of them (the last one
        was sampled, but never fed to the model). Now 64 are on the GPU and 0 on the CPU:

            gpu 64, cpu 0, recomputed 99 - 64 = 35, new 120 - 99 = 21        120 in all"""
        cpu = sum(ticket.filled for ticket in swap_in)
        gpu = request.conversation.sources()[0] - cpu           # what comes from the CPU has slots now, too
        # A conversation that shares a beginning with others finds KV that it has not computed itself. Then
        # everything before its last missing run has been computed before, by it or by another one.
        known = max(request.before[1], request.missing()[-1][0])
        request.usage = dict(zip(SOURCES, (gpu, cpu, known - gpu - cpu, request.total - known)))
        self.stats.update({"prompt_tokens_" + source: n for source, n in request.usage.items()})

    def _waits(self) -> bool:
        """Is a copy on its way, or a token?"""
        return bool(self.cache.in_flight) or any(request.unsettled for request in self.running)

    def _reserve(self) -> int:
        """Slots that an admission must leave available. If nothing runs, a request may need them all."""
        return self.reserve_slots if self.running else 0

    def _leave(self, request: Request, now: float):
        self.running.remove(request)
        self.cache.release(request.conversation, now)

    def _enqueue(self, request: Request):
        self.cache.set_waiting(request.conversation, True)
        heapq.heappush(self.queue, request)

    def _end(self, request: Request, reason: str):
        """Take the request off the books. The conversation's next turn, if there is one, joins the queue at
        its own arrival."""
        request.finish_reason = reason
        if self.stateless and request.joined:           # else an earlier turn may be running
            self.cache.drop_all(request.conversation)
        self.stats["cancelled" if reason in ("cancelled", "failed") else "finished"] += 1
        requests = self.unfinished[request.conversation.order]
        was_first = requests[0] is request
        requests.remove(request)
        if not requests:
            del self.unfinished[request.conversation.order]
            self.cache.set_waiting(request.conversation, False)
            if request.conversation.one_off or not request.conversation.tokens:
                self.cache.forget(request.conversation)
        elif was_first:
            self._enqueue(requests[0])
        request.outbox.put(None)


def decodes_first(requests: list[Request]) -> list[Request]:
    """Decodes, then unfinished prefills. Both stay in the order that they have in `requests`."""
    return sorted(requests, key=lambda request: request.prefilling)
