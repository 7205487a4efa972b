"""Who runs in the next step: one FCFS queue, one running list, one kind of work (paper §4.2, §4.3).

    a's context    | absent [0:4) | CPU [4:12) | GPU [12:16) | new prompt [16:23) |      b generates its token 32, d is idle
    its spans        a[0:4]         comes in     is there      a[16:23]
    the batch      step 45  b[31:32] a[0:4] a[16:23] | in a[4:12] | out d[4:8]

A *span* is a run of positions of one request to compute in this step. A decode is a span of length 1 at the end, a new prompt a
span at the end, dropped tokens a span at the front (the paper's sub-request), a part of a long prefill a span that stops early.
`Request.missing()` yields the runs without KV; a batch takes them left to right while its token budget lasts. There are no phases.

Invariant: everything a span reads is cached, arriving, or computed in this very batch."""
import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Callable, NamedTuple

from kv_cache import Conversation, KVCache, Ticket

SOURCES = ("gpu", "cpu", "recomputed", "new")      # of a prompt's KV-tokens, at first admission


@dataclass(eq=False)
class Request:
    """One turn being served: new prompt tokens in, generated tokens out."""
    conversation: Conversation
    prompt: list[int]
    max_tokens: int | None = None                  # None: as many as fit
    stop_ids: frozenset[int] = frozenset()
    reached_stop: Callable[[int], bool] | None = None       # called with each token: has the text reached a stop string?
    sampling: object = None                        # the worker's business
    like: "Request | None" = None                  # another with this prompt after the same tokens, which need not be computed twice
    outbox: SimpleQueue = field(default_factory=SimpleQueue)      # its tokens, then None
    arrival: int = 0
    generated: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)       # when each of them was sampled
    logprobs: list = field(default_factory=list)   # of each generated token what the worker reports
    usage: dict | None = None                      # fixed at first admission
    admitted: float | None = None                  # when that was
    before: tuple[int, int] = (0, 0)               # the conversation's tokens, and of these known ones, before this turn
    prefilling: bool = False                       # admitted, and no token sampled since
    front: int = 0                                 # chunks before this one are full
    finish_reason: str | None = None               # "stop" | "length" | "cancelled" | "failed"
    error: Exception | None = None

    @property
    def total(self) -> int:
        """Positions of its context so far."""
        return len(self.conversation.tokens) + (0 if self.usage else len(self.prompt))

    def missing(self):
        """Yields the maximal runs [start, end) of positions that have no KV and none arriving, left to right.
        The request is admitted: its conversation has a chunk for every position, with the first `filled` tokens of each cached or
        arriving. Moves `front` past the full chunks at the beginning, so that a decode does not look at them again."""
        chunks, size, total = self.conversation.chunks, self.conversation.chunk_size, self.total
        while self.front < len(chunks) - 1 and chunks[self.front].filled == size:
            self.front += 1
        start = None
        for chunk in chunks[self.front:]:
            first = chunk.index * size
            if chunk.filled and start is not None:
                yield start, first
                start = None
            if start is None and first + chunk.filled < min(first + size, total):
                start = first + chunk.filled
        if start is not None:
            yield start, total


class Span(NamedTuple):
    """Positions [start, end) of one request to compute in this step."""
    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Its last position is the last of the context: the next token is sampled there."""
        return self.end == self.request.total


class Batch:
    """The spans of one step, packed, with the transfers that go with them. str(batch) is the trace."""

    def __init__(self, step: int, budget: int):
        self.step, self.budget = step, budget      # budget: tokens that still fit
        self.spans: list[Span] = []
        self.swap_in: list[Ticket] = []
        self.swap_out: list[Ticket] = []
        self.table_updates: list[tuple] = []       # (row, start, slots): what changed in the slot table

    def __bool__(self):
        return bool(self.spans or self.swap_in or self.swap_out)

    def has_room(self) -> bool:
        return self.budget > 0

    def take(self, request: Request):
        """Adds the request's missing runs as spans, left to right, while the token budget lasts; the last may stop early."""
        for start, end in request.missing():
            if not self.has_room():
                return
            end = min(end, start + self.budget)
            self.spans.append(Span(request, start, end))
            self.budget -= end - start

    def __str__(self):
        parts = [" ".join(f"{s.request.conversation.name}[{s.start}:{s.end}]" for s in self.spans)]
        parts += [f"{way} {_runs(tickets)}" for way, tickets in (("in", self.swap_in), ("out", self.swap_out)) if tickets]
        return f"step {self.step}  " + " | ".join(parts)


def _runs(tickets):
    """Tickets as name[start:end], neighbouring chunks as one."""
    runs = []
    for ticket in sorted(tickets, key=lambda t: (t.conversation.order, t.start)):
        if runs and runs[-1][0] is ticket.conversation and runs[-1][2] == ticket.start:
            runs[-1][2] = ticket.end
        else:
            runs.append([ticket.conversation, ticket.start, ticket.end])
    return " ".join(f"{conversation.name}[{start}:{end}]" for conversation, start, end in runs)


class Result(NamedTuple):
    """What came of a batch."""
    tokens: list[int]                              # one for each span that samples, in order
    landed: list[Ticket]                           # copies that have ended, of this step or an earlier one
    logprobs: list | None = None                   # of each token, None where they were not asked for; None: nowhere


class Scheduler:
    """Decides each step's batch and accounts for its result. `limit`: the longest context, prompt and reply together."""

    def __init__(self, cache: KVCache, limit: int, max_batch_tokens: int = 512, swap_threshold: float = 0.25, reserve: float = 0.10,
                 stateless: bool = False, separate_phases: bool = False):
        self.cache, self.limit, self.max_batch_tokens = cache, limit, max_batch_tokens
        self.threshold_slots = int(swap_threshold * cache.num_slots)     # to keep available
        self.reserve_slots = int(reserve * cache.num_slots)              # that admission leaves for the growth of running requests
        self.stateless, self.separate_phases = stateless, separate_phases
        self.running: list[Request] = []
        self.queue: list[tuple[int, Request]] = []                       # a heap by arrival: the first turn of each conversation that does not run
        self.turns: dict[int, deque[Request]] = {}                       # by conversation.order: its unfinished turns, in order of submission
        self.arrivals = itertools.count()
        self.steps = 0
        self.stats = Counter(prompt_tokens_gpu=0, prompt_tokens_cpu=0, prompt_tokens_recomputed=0, prompt_tokens_new=0,
                             generated_tokens=0, suspensions=0, finished=0, cancelled=0)

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
        """There are turns to serve, or copies to wait for."""
        return bool(self.turns or self.cache.in_flight)

    def cancel(self, request: Request, now: float, error: Exception | None = None):
        """Ends a request early, wherever it is, and leaves no trace of its turn; with an error it has failed."""
        if request.finish_reason:
            return
        if request in self.running:
            self._leave(request, now)
        if request.usage:
            self.cache.truncate(request.conversation, *request.before)
        request.error = error
        self._end(request, "failed" if error else "cancelled")

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next batch. It is empty only if there is nothing to do, or if all that is left is to wait for copies in flight.
        An empty one may have condemned chunks, which makes room without a copy: so it is composed once more."""
        while not (batch := self.compose(now)) and self.busy and not self.cache.in_flight:
            if self.running and not self.cache.available:
                self.give_way(now)
        batch.table_updates = self.cache.take_table_updates()
        return batch

    def compose(self, now: float) -> Batch:
        """Running requests first, decodes before prefills, each with slots for what it has grown by: one that finds none sits out
        this step. Then the queue while tokens, rows and slots last. Then, ahead of time, what should leave the GPU, the missing
        slots included. With separate phases a batch that has any prefill keeps nothing else."""
        batch, starved = Batch(self.steps, self.max_batch_tokens), 0
        for request in decodes_first(self.running):
            if self.cache.grow(request.conversation, now):
                batch.take(request)
            else:
                starved += 1
        while batch.has_room() and (request := self.next_eligible(now)) and self.fits(request):
            batch.swap_in += self.admit(request, now)
            batch.take(request)
        if self.separate_phases:
            batch.spans = [span for span in batch.spans if span.request.prefilling] or batch.spans
        batch.swap_out = self.plan_swap_out(starved, now)
        return batch

    def account(self, batch: Batch, result: Result, now: float):
        """Books what a batch has done; yields (request, token) for each sampled token, and must be exhausted."""
        self.steps += 1
        for ticket in result.landed:
            self.cache.complete(ticket)
        for span in batch.spans:
            self.cache.computed(span.request.conversation, span.start, span.end)
        sampling = [span.request for span in batch.spans if span.samples]
        logprobs = result.logprobs or [None] * len(sampling)
        for request, token, logprob in zip(sampling, result.tokens, logprobs, strict=True):
            request.conversation.tokens.append(token)
            request.generated.append(token)
            request.times.append(now)
            request.logprobs.append(logprob)
            request.prefilling = False
            self.stats["generated_tokens"] += 1
            yield request, token
            if reason := self.ended_by(request, token):
                self.finish(request, reason, now)

    # ---- the decisions

    def next_eligible(self, now: float) -> Request | None:
        """The first in the queue; None: it is empty, or the first waits for the one that computes its prompt. One whose context has
        outgrown the limit since its submission fails here."""
        while self.queue:
            request = self.queue[0][1]
            if request.finish_reason:
                heapq.heappop(self.queue)
            elif not request.usage and request.total + (request.max_tokens or 1) > self.limit:
                self.cancel(request, now, ValueError(f"the conversation has {request.total} tokens with this prompt and "
                    f"max_tokens={request.max_tokens}: they do not fit the limit of {self.limit}"))
            elif request.like and request.like.prefilling and not request.like.finish_reason:
                return None
            else:
                if request.like and not request.usage:
                    self._begin(request)                   # already now: what it shares counts as its own when it asks for slots
                return request

    def fits(self, request: Request) -> bool:
        return bool(self.cache.free_rows) and self.cache.shortfall(request.conversation, request.total, self._reserve()) <= 0

    def admit(self, request: Request, now: float) -> list[Ticket]:
        """Moves the head of the queue, which fits, to the running list and takes all its slots; returns its swap-ins."""
        heapq.heappop(self.queue)
        if not request.usage:
            self._begin(request)
        if request.admitted is None:
            request.admitted = now
            self.cache.policy.returned(request.conversation, now)
        request.prefilling, request.front = True, 0
        self.running.append(request)
        return self.cache.admit(request.conversation, request.total, now)

    def plan_swap_out(self, starved: int, now: float) -> list[Ticket]:
        """Ahead-of-time copies until the threshold is available, or what decodes lack now; then for the head of the queue."""
        tickets = self.cache.plan_swap_out(max(self.threshold_slots, starved) - self.cache.available, now)
        if head := self.next_eligible(now):
            tickets += self.cache.plan_swap_out_for(head.conversation, head.total, self._reserve(), now)
        return tickets

    def give_way(self, now: float):
        """No slot is to be had, nothing idle is left to copy out or to drop, no copy is in flight: the latest arrival, never the
        oldest, is suspended."""
        assert len(self.running) > 1, "a lone request fits, or it would not have been admitted"
        self.suspend(max(self.running, key=lambda request: request.arrival), now)

    def suspend(self, request: Request, now: float):
        """Takes a running request out, back to its place in the queue. Nothing generated is lost. Its chunks may leave the GPU from
        now on: they are the most valuable of all, but nothing else was left."""
        self._leave(request, now)
        self._enqueue(request)
        self.stats["suspensions"] += 1

    def ended_by(self, request: Request, token: int) -> str | None:
        """The finish_reason if this token is the reply's last."""
        if token in request.stop_ids or request.reached_stop and request.reached_stop(token):
            return "stop"
        return "length" if len(request.generated) == request.max_tokens else None

    def finish(self, request: Request, reason: str, now: float):
        """The end of a turn: its conversation is idle, its KV stays."""
        self._leave(request, now)
        self.cache.policy.ended(request.conversation)
        if self.stateless:
            self.cache.drop_all(request.conversation)
        self._end(request, reason)

    # ---- the small steps

    def _begin(self, request):
        """At the first admission the prompt joins the conversation's tokens, and usage, before and max_tokens are fixed for good."""
        conversation = request.conversation
        request.before = len(conversation.tokens), conversation.known
        if request.like:                                       # all but the last token, behind which the reply begins
            self.cache.share(conversation, [*conversation.tokens, *request.prompt][:-1], request.like.conversation)
        gpu, cpu = conversation.sources()
        known = max(conversation.known, gpu + cpu)             # others may have computed the beginning of its first prompt
        request.usage = dict(zip(SOURCES, (gpu, cpu, known - gpu - cpu, request.total - known)))
        self.stats.update({"prompt_tokens_" + source: n for source, n in request.usage.items()})
        conversation.tokens.extend(request.prompt)
        if request.max_tokens is None:
            request.max_tokens = self.limit - len(conversation.tokens)

    def _reserve(self):
        return self.reserve_slots if self.running else 0

    def _leave(self, request, now):
        self.running.remove(request)
        self.cache.release(request.conversation, now)

    def _enqueue(self, request):
        if not request.conversation.tokens:
            self.cache.share_prefix(request.conversation, request.prompt)
        self.cache.set_waiting(request.conversation, True)
        heapq.heappush(self.queue, (request.arrival, request))

    def _end(self, request, reason):
        """Off the books; the conversation's next turn, if there is one, joins the queue at its own arrival."""
        request.finish_reason = reason
        self.stats["cancelled" if reason in ("cancelled", "failed") else "finished"] += 1
        turns = self.turns[request.conversation.order]
        first = turns[0] is request
        turns.remove(request)
        if not turns:
            del self.turns[request.conversation.order]
            self.cache.set_waiting(request.conversation, False)
            if request.conversation.one_off:
                self.cache.forget(request.conversation)
        elif first:
            self._enqueue(turns[0])
        request.outbox.put(None)


def decodes_first(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: (request.prefilling, request.arrival))
