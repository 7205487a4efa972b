"""Who runs in the next step: one FCFS queue, one running list, one kind of work (paper §4.2, §4.3).

    a's context    | absent [0:4) | CPU [4:12) | GPU [12:16) | new prompt [16:23) |    b generates its token
    32 its spans        a[0:4]         comes in     is there      a[16:23]                d is idle the
    batch      step 45  b[31:32] a[0:4] a[16:23] | in a[4:12] | out d[4:8]

A *span* is a run of positions of one request to compute in this step. A decode is a span of length 1 at the
end. A new prompt is a span at the end. Dropped tokens are a span at the front (the paper's sub-request).
Part of a long prefill is a span that stops early. `Request.missing()` yields the runs without KV, and a
batch takes them left to right while its token budget lasts. There are no phases.

Invariant: everything that a span reads is cached, arriving, or computed in this very batch.
"""
import heapq
import itertools
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from kv_cache import Conversation, KVCache, Ticket

SOURCES = ("gpu", "cpu", "recomputed", "new")      # where the KV-tokens of a prompt come from, at admission


@dataclass(eq=False)
class Request:
    """One turn being served: new prompt tokens in, generated tokens out."""
    conversation: Conversation
    prompt: list[int]
    max_tokens: int | None = None                  # None: as many as fit
    stop_ids: frozenset[int] = frozenset()
    reached_stop: Callable[[int], bool] | None = None       # asked with each token: does the reply end here?
    sampling: object = None                        # the worker's business
    outbox: SimpleQueue = field(default_factory=SimpleQueue)      # its tokens, then None
    arrival: int = 0                               # its number in the order of submission
    generated: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)        # when each of them was sampled
    logprobs: list = field(default_factory=list)   # what the worker reports of each of them, if asked to
    before: tuple[int, int] | None = None          # (tokens, known) before the prompt joined them
    usage: dict | None = None                      # by SOURCES, fixed at first admission
    admitted: float | None = None                  # when that was
    prefilling: bool = False                       # admitted, and no token sampled since
    finish_reason: str | None = None               # "stop" | "length" | "cancelled" | "failed"
    error: Exception | None = None

    @property
    def total(self) -> int:
        """Positions of its context so far, the prompt included."""
        return len(self.conversation.tokens) + (len(self.prompt) if self.before is None else 0)

    def missing(self) -> list[tuple[int, int]]:
        """The maximal runs [start, end) of positions that have no KV and none arriving, left to right.

        The request is running, so its conversation has a chunk for every position, and the first `filled`
        tokens of each chunk are cached or arriving. With chunks of 4, filled = 0, 4, 2, 0, and 14 tokens in
        all:

            missing() == [(0, 4), (10, 14)]
        """
        total = len(self.conversation.tokens)
        if not self.prefilling:                    # a decode: all but the last token has KV
            return [(total - 1, total)]
        runs, start, size = [], None, self.conversation.chunk_size
        for chunk in self.conversation.chunks:
            first = chunk.index * size
            if chunk.filled and start is not None:
                runs.append((start, first))
                start = None
            if start is None and first + chunk.filled < min(first + size, total):
                start = first + chunk.filled
        return runs if start is None else [*runs, (start, total)]


class Span(NamedTuple):
    """Positions [start, end) of one request to compute in this step."""
    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Is its last position the last of the context? Then the next token is sampled there."""
        return self.end == self.request.total


class Batch:
    """The spans of one step, packed, with the copies that go with them. str(batch) is the trace."""

    def __init__(self, step: int, budget: int):
        self.step = step
        self.budget = budget                       # tokens that still fit
        self.spans: list[Span] = []
        self.swap_in: list[Ticket] = []
        self.swap_out: list[Ticket] = []
        self.table_updates: list[tuple] = []       # (row, start, slots): what changed in the slot table

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
    for ticket in sorted(tickets, key=lambda ticket: (ticket.conversation.order, ticket.start)):
        if runs and runs[-1][0] is ticket.conversation and runs[-1][2] == ticket.start:
            runs[-1][2] = ticket.end
        else:
            runs.append([ticket.conversation, ticket.start, ticket.end])
    return " ".join(f"{conversation.name}[{start}:{end}]" for conversation, start, end in runs)


class Result(NamedTuple):
    """What the worker made of a batch."""
    tokens: list[int]                              # one for each span that samples, in order
    landed: list[Ticket]                           # copies that have ended, of this step or an earlier one
    logprobs: list | None = None                   # one for each token; None where nobody asked for it


class Scheduler:
    """Decides each step's batch and accounts for its result."""

    def __init__(self, cache: KVCache, limit: int, max_batch_tokens: int = 512, swap_threshold: float = 0.25,
                 reserve: float = 0.10, stateless: bool = False, separate_phases: bool = False):
        """limit: the longest context in tokens, prompt and reply together. swap_threshold, reserve: see
        Config."""
        self.cache, self.limit, self.max_batch_tokens = cache, limit, max_batch_tokens
        self.threshold_slots = int(swap_threshold * cache.num_slots)     # to keep available
        self.reserve_slots = int(reserve * cache.num_slots)              # that running requests may grow into
        self.stateless, self.separate_phases = stateless, separate_phases
        self.running: list[Request] = []                    # by arrival
        self.turns: dict[int, deque[Request]] = {}          # unfinished ones, by conversation.order
        self.queue: list[tuple[int, Request]] = []          # a heap by arrival: first turns that do not run
        self.arrivals = itertools.count()
        self.steps = 0
        self.stats = Counter(prompt_tokens_gpu=0, prompt_tokens_cpu=0, prompt_tokens_recomputed=0,
                             prompt_tokens_new=0, generated_tokens=0, suspensions=0, finished=0, cancelled=0)

    # ---- in and out

    def submit(self, request: Request):
        """The turns of one conversation run one after another, in order of submission."""
        request.arrival = next(self.arrivals)
        turns = self.turns.setdefault(request.conversation.order, deque())
        turns.append(request)
        if len(turns) == 1:
            self._enqueue(request)

    @property
    def busy(self) -> bool:
        """Are there turns to serve, or copies to wait for?"""
        return bool(self.turns or self.cache.in_flight)

    def cancel(self, request: Request, now: float, error: Exception | None = None):
        """End a request early, wherever it is. Its turn leaves no trace. With an error it has failed."""
        if request.finish_reason:
            return
        if request in self.running:
            self._leave(request, now)
        if request.before is not None:
            self.cache.truncate(request.conversation, *request.before)
        request.error = error
        self._end(request, "failed" if error else "cancelled")

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next batch. It is empty if there is nothing to do, or nothing but to wait for copies in
        flight."""
        while True:
            batch = self.compose(now)
            if batch or not self.turns or self.cache.in_flight:
                batch.table_updates = self.cache.take_table_updates()
                return batch
            # Nothing can run, and nothing is on its way. Either composing has made slots available, by
            # giving up chunks without a copy: then the next try finds them. Or there are none: then a
            # request must give way.
            if self.running and not self.cache.available:
                self.give_way(now)

    def compose(self, now: float) -> Batch:
        """One try at a batch.

        1. Running requests, decodes first. Each needs slots for the tokens that it has grown by. A request
           that finds none sits out this step; we call it starved.
        2. The queue, first come first served, while the budget, rows and slots last.
        3. Copies to the CPU ahead of need, so that starved requests and the head of the queue find slots
           later.
        """
        batch, starved = Batch(self.steps, self.max_batch_tokens), 0
        for request in decodes_first(self.running):
            if self.cache.grow(request.conversation, now):
                batch.take(request)
            else:
                starved += 1
        while batch.budget > 0 and (request := self.prepare_head(now)) and self.fits(request):
            batch.swap_in += self.admit(request, now)
            batch.take(request)
        if self.separate_phases:                   # a batch with any prefill keeps nothing else
            batch.spans = [span for span in batch.spans if span.request.prefilling] or batch.spans
        batch.swap_out = self.plan_swap_out(starved, now)
        return batch

    def account(self, batch: Batch, result: Result, now: float) -> Iterator[tuple[Request, int]]:
        """Book what a batch has done. Yields (request, token) for each sampled token. Must be exhausted."""
        self.steps += 1
        for ticket in result.landed:
            self.cache.complete(ticket)
        sampling = []
        for request, start, end in batch.spans:
            self.cache.computed(request.conversation, start, end)
            if end == len(request.conversation.tokens):
                sampling.append(request)
        self.stats["generated_tokens"] += len(sampling)
        for n, (request, token) in enumerate(zip(sampling, result.tokens, strict=True)):
            request.conversation.tokens.append(token)
            request.generated.append(token)
            request.times.append(now)
            if result.logprobs:
                request.logprobs.append(result.logprobs[n])
            request.prefilling = False
            yield request, token
            if reason := self.ended_by(request, token):
                self.finish(request, reason, now)

    # ---- the decisions

    def discard_unservable(self, now: float):
        """Take requests off the head of the queue that have ended, or whose context has outgrown the limit
        since they were submitted: these fail."""
        while self.queue:
            request = self.queue[0][1]
            if request.before is None and request.total + (request.max_tokens or 1) > self.limit:
                self.cancel(request, now, ValueError(
                    f"the conversation has {request.total} tokens with this prompt and max_tokens="
                    f"{request.max_tokens}: they do not fit the limit of {self.limit}"))
            if not request.finish_reason:
                return
            heapq.heappop(self.queue)

    def prepare_head(self, now: float) -> Request | None:
        """The head of the queue, its prompt joined to its conversation. None: the queue is empty, or the
        head waits for another request that computes the same prompt (see sharing.py)."""
        self.discard_unservable(now)
        head = self.head()
        return head if head and (head.before is not None or self.begin(head)) else None

    def head(self) -> Request | None:
        return self.queue[0][1] if self.queue else None

    def begin(self, request: Request) -> bool:
        """The prompt joins the conversation. False: not yet."""
        conversation = request.conversation
        before = len(conversation.tokens), conversation.known
        if not self.cache.extend(conversation, request.prompt):
            return False
        request.before = before
        if request.max_tokens is None:
            request.max_tokens = self.limit - request.total
        return True

    def fits(self, request: Request) -> bool:
        shortfall = self.cache.shortfall(request.conversation, request.total, self._reserve())
        return bool(self.cache.free_rows) and shortfall <= 0

    def admit(self, request: Request, now: float) -> list[Ticket]:
        """Move the head of the queue, which fits, to the running list, with all its slots. Returns its
        swap-ins."""
        heapq.heappop(self.queue)
        if request.admitted is None:
            request.admitted = now
            self._count_sources(request)
            self.cache.policy.returned(request.conversation, now)
        request.prefilling = True
        insort(self.running, request, key=lambda running: running.arrival)
        return self.cache.admit(request.conversation, request.total, now)

    def plan_swap_out(self, starved: int, now: float) -> list[Ticket]:
        """Copies ahead of need: until the threshold is available (or what starved requests lack, if that is
        more), then until the head of the queue fits."""
        tickets = self.cache.plan_swap_out(max(self.threshold_slots, starved) - self.cache.available, now)
        if request := self.prepare_head(now):
            conversation, total = request.conversation, request.total
            tickets += self.cache.plan_swap_out_for(conversation, total, self._reserve(), now)
        return tickets

    def give_way(self, now: float):
        """No slot is available, no idle chunk is left to copy or to drop, no copy is in flight. We suspend
        the latest arrival, never the oldest."""
        assert len(self.running) > 1, "a lone request fits, or it would not have been admitted"
        self.suspend(self.running[-1], now)

    def suspend(self, request: Request, now: float):
        """Take a running request out, back to its place in the queue. Nothing generated is lost. Its chunks
        may leave the GPU from now on. They are the most valuable of all, but no other chunk was left."""
        self._leave(request, now)
        self._enqueue(request)
        self.stats["suspensions"] += 1

    def ended_by(self, request: Request, token: int) -> str | None:
        """The finish_reason, if this token is the last of the reply."""
        if token in request.stop_ids or request.reached_stop and request.reached_stop(token):
            return "stop"
        return "length" if len(request.generated) == request.max_tokens else None

    def finish(self, request: Request, reason: str, now: float):
        """The turn has ended: its conversation is idle, and its KV stays."""
        self._leave(request, now)
        self.cache.policy.ended(request.conversation)
        if self.stateless:
            self.cache.drop_all(request.conversation)
        self._end(request, reason)

    # ---- the small steps

    def _count_sources(self, request: Request):
        """Fix where the context's KV comes from. It counts once, at first admission.

        A conversation of 100 tokens returns with a prompt of 20. It has had KV for 99 of them (the last one
        was sampled, but never fed to the model). Now 64 are on the GPU and 0 on the CPU:

            gpu 64, cpu 0, recomputed 99 - 64 = 35, new 120 - 99 = 21"""
        gpu, cpu = request.conversation.sources()
        # A conversation that shares a beginning with others finds KV that it has not computed itself.
        known = max(request.before[1], gpu + cpu)
        request.usage = dict(zip(SOURCES, (gpu, cpu, known - gpu - cpu, request.total - known)))
        self.stats.update({"prompt_tokens_" + source: n for source, n in request.usage.items()})

    def _reserve(self) -> int:
        return self.reserve_slots if self.running else 0

    def _leave(self, request: Request, now: float):
        self.running.remove(request)
        self.cache.release(request.conversation, now)

    def _enqueue(self, request: Request):
        self.cache.set_waiting(request.conversation, True)
        heapq.heappush(self.queue, (request.arrival, request))

    def _end(self, request: Request, reason: str):
        """Take the request off the books. The conversation's next turn, if there is one, joins the queue at
        its own arrival."""
        request.finish_reason = reason
        self.stats["cancelled" if reason in ("cancelled", "failed") else "finished"] += 1
        turns = self.turns[request.conversation.order]
        was_first = turns[0] is request
        turns.remove(request)
        if not turns:
            del self.turns[request.conversation.order]
            self.cache.set_waiting(request.conversation, False)
            if request.conversation.one_off:
                self.cache.forget(request.conversation)
        elif was_first:
            self._enqueue(turns[0])
        request.outbox.put(None)


def decodes_first(requests: list[Request]) -> list[Request]:
    """Decodes, then unfinished prefills, each by arrival as `requests` are."""
    return ([request for request in requests if not request.prefilling]
            + [request for request in requests if request.prefilling])
