"""Who runs in the next step: one queue, first come first served, one running list (paper §4).

A *span* is a run of positions of one request to compute in this step. A decode is a span of length
1 at the end. A new prompt is a span at the end. Dropped tokens are a span before that (the paper's
sub-request). A part of a long prompt is a span that stops early. `Request.missing()` lists the runs
without KV, and a batch takes them left to right while its token budget lasts. In chunks of 4:

    a's context   | absent [0:4) | CPU [4:12) | GPU [12:16) | last reply token, new prompt [16:23) |
    a's spans       a[0:4]         copied in    is there      a[16:23]
    the batch     step 45  b[31:32] a[0:4] a[16:23] | in a[4:12] | out d[4:8]

Invariant: all that a span reads is cached, arriving, or computed in this batch or an earlier one.
"""
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

from kv_cache import Conversation, KVCache, Ticket

PLACEHOLDER = -1        # in a context: a token that the device samples, not yet learnt by the host
NOT_FINITE = -1         # in a result alone: no token, since its logits were NaN or infinite
NO_TOKEN = "no token is left: the logits are not finite, or the reply's grammar is too complex"
SOURCES = ("gpu", "cpu", "recomputed", "new")   # where the KV of a context comes from, at admission


@dataclass(eq=False)
class Request:
    """One turn being served: new prompt tokens in, generated tokens out."""
    conversation: Conversation | None               # None until Engine has opened it
    prompt: list[int]
    max_tokens: int | None = None                   # None: as many as fit
    min_tokens: int = 0                             # no earlier token of stop_ids ends the reply
    stop_ids: frozenset[int] = frozenset()
    # Called with each token that does not end the reply as a stop token. True: the reply ends here.
    reached_stop: Callable[[int], bool] | None = None
    sampling: Any = None                            # the worker's business

    # The scheduler writes all that follows.
    arrival: int = 0                                # its number in the order of submission
    tokens_before: int | None = None                # in the conversation, when the prompt joins it
    longest: int | None = None                      # its context with the longest reply, in tokens
    prefilling: bool = False                        # from admission to the first step that samples
    admitted: float | None = None                   # when it first was, in seconds
    generated: list[int] = field(default_factory=list)  # the reply so far; other threads read it
    finish_reason: str | None = None                # "stop" | "length" | "cancelled" | "failed"
    error: Exception | None = None
    # Second day:
    known_before: int = 0                           # how many of tokens_before have had KV
    usage: dict[str, int] | None = None             # by SOURCES, counted at first admission
    times: list[float] = field(default_factory=list)    # when the host learnt each of its tokens
    logprobs: list = field(default_factory=list)        # of each of its tokens, if asked for
    prompt_logprobs: dict = field(default_factory=dict)     # the worker writes it: see scoring.py
    luck: int = 0                                           # see guesses.py

    def __lt__(self, other: "Request") -> bool:
        return self.arrival < other.arrival

    @property
    def joined(self) -> bool:
        """Have the tokens of the prompt joined those of the conversation?"""
        return self.tokens_before is not None

    @property
    def total(self) -> int:
        """Positions of its context so far. The prompt has joined it."""
        return len(self.conversation.tokens)

    @property
    def last_token_pending(self) -> bool:
        """Is its last token a placeholder?"""
        return self.conversation.tokens[-1] == PLACEHOLDER

    def missing(self) -> list[tuple[int, int]]:
        """The maximal runs [start, end) of positions whose KV is neither cached nor arriving. No
        run is empty.

        The request is running, so its conversation has a chunk for every position. The first
        `filled` tokens of each chunk are cached or arriving. A request that prefills, with chunks
        of 4, filled = 0, 4, 2, 0, and 14 tokens in all, misses [(0, 4), (10, 14)]. A decode misses
        its last position alone."""
        total = len(self.conversation.tokens)
        if not self.prefilling:
            return [(total - 1, total)]
        size = self.conversation.chunk_size
        # The runs lie between the cached parts. In the example these are [4, 8) and [8, 10):
        cached = [(chunk.index * size, chunk.filled) for chunk in self.conversation.chunks
                  if chunk.filled]
        starts = [0] + [first + filled for first, filled in cached]             # 0, 8, 10
        ends = [first for first, _ in cached] + [total]                         # 4, 8, 14
        return [(start, end) for start, end in zip(starts, ends) if start < end]

    def ended_by(self, token: int) -> str | None:
        """The finish_reason, if this token, its latest one, ends the reply."""
        length = len(self.generated)
        if token in self.stop_ids and length >= self.min_tokens:
            return "stop"
        if self.reached_stop and self.reached_stop(token):
            return "stop"
        return "length" if length >= self.max_tokens else None


class Span(NamedTuple):
    """Positions [start, end) of one request to compute in this step."""
    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Is its last position the last of the context? Then the next token is sampled there. (Ask
        before `Scheduler.launched`, which makes the context longer.)"""
        return self.end == len(self.request.conversation.tokens)


class Batch:
    """The spans of one step, packed, with the copies that go with them. str(batch) is the trace."""

    def __init__(self, step: int, budget: int):
        self.step = step
        self.budget = budget                        # tokens that still fit
        self.spans: list[Span] = []
        # A Ticket (kv_cache.py) is the copy of one chunk.
        self.swap_in: list[Ticket] = []             # CPU -> GPU
        self.swap_out: list[Ticket] = []            # GPU -> CPU
        # The slot table has a row for each running request, with the slot of each position.
        self.table_updates: list[tuple] = []        # (row, start, slots): its changes
        # `launched` notes whose tokens it samples, and their positions in the contexts.
        self.placeholders: list[tuple[Request, int]] = []
        # Second day:
        self.slot_copies: dict[int, int] = {}       # target -> source; copied first: see sharing.py
        self.guesses: list = []                     # see guesses.py

    def __bool__(self) -> bool:
        return bool(self.spans or self.swap_in or self.swap_out)

    def take(self, request: Request):
        """Add a span for each missing run of the request, left to right, while the budget lasts; the
        last one may stop early. The budget is lowered by as many tokens. No span is empty.

        With a budget of 6, the runs (0, 4) and (10, 14) become [0:4) and [10:12)."""
        for start, end in request.missing():
            if end > start + self.budget:
                end = start + self.budget
            if end == start:
                return
            self.spans.append(as_span((request, start, end)))       # Span(request, start, end)
            self.budget -= end - start

    def __str__(self) -> str:
        spans = " ".join(f"{s.request.conversation.name}[{s.start}:{s.end}]" for s in self.spans)
        runs = {"guess": self.guesses, "in": self.swap_in, "out": self.swap_out}
        parts = [spans] + [f"{what} {_runs(some)}" for what, some in runs.items() if some]
        return f"step {self.step}  " + " | ".join(parts)


class Result(NamedTuple):
    """What the worker made of a batch."""
    # One for each of batch.placeholders, or NOT_FINITE. (Second day: then one behind each guess.)
    tokens: list[int]
    landed: list[Ticket]            # copies that have ended, of this step or an earlier one
    logprobs: list | None = None    # one for each token; None where nobody asked for it


def decodes_first(requests: list[Request]) -> list[Request]:
    """Decodes, then requests that prefill. Both keep their order."""
    return sorted(requests, key=attrgetter("prefilling"))


class Scheduler:
    """Decides each step's batch and accounts for its result.

    Every request is in `unfinished` until it ends. The first one of each conversation is also in
    `running` or in `queue`; the others wait behind it. After a1, b1, a2 and c1 have arrived, in
    this order, and a1 was admitted:

        unfinished    a: [a1, a2]   b: [b1]   c: [c1]
        running       [a1]
        queue         [b1, c1]                          when a1 has ended: [b1, a2, c1]
    """

    def __init__(self, cache: KVCache, limit: int, max_batch_tokens: int = 512,
                 swap_threshold: float = 0.25, reserve: float = 0.10, stateless: bool = False,
                 separate_phases: bool = False):
        """limit: the longest context in tokens, with its reply. For the others see Config."""
        assert limit <= cache.num_slots, "a request that runs alone must fit"
        self.cache, self.limit, self.max_batch_tokens = cache, limit, max_batch_tokens
        self.threshold_slots = int(swap_threshold * cache.num_slots)     # to keep available
        self.reserve_slots = int(reserve * cache.num_slots)     # for running requests to grow into
        self.stateless, self.separate_phases = stateless, separate_phases
        self.unfinished: dict[int, deque[Request]] = {}     # by conversation.order; each by arrival
        self.running: list[Request] = []                    # by arrival
        self.queue: list[Request] = []                      # by arrival; its first is the *head*
        self.ended: deque[Request] = deque()    # the engine takes them out and tells their readers
        self.arrivals = count()
        self.steps = 0
        self.stats = Counter(**{f"prompt_tokens_{source}": 0 for source in SOURCES},
                             generated_tokens=0, suspensions=0, finished=0, cancelled=0)

    # ---- in and out

    def submit(self, request: Request):
        """Put a request into the queue. The requests of one conversation run one after another.

        The caller has checked that the prompt has a token, and max_tokens is None or at least 1."""
        request.arrival = next(self.arrivals)
        requests = self.unfinished.setdefault(request.conversation.order, deque())
        requests.append(request)
        if len(requests) == 1:
            self._enqueue(request)

    @property
    def busy(self) -> bool:
        """Are there requests to serve, or copies to wait for?"""
        return bool(self.unfinished or self.cache.in_flight)

    # ---- one step

    def schedule(self, now: float) -> Batch:
        """The next batch. It is empty if there is nothing to do, or if all requests must wait for a
        copy in flight, or for tokens of a batch that is still being computed."""
        batch = self.compose(now)
        # Requests are unfinished, but the batch is empty, and nothing is on its way? Either `compose`
        # has just marked chunks, so slots are available: we compose again. Or no slot is, and all
        # running requests are starved: one gives way. (A starved request lacks a single slot: see
        # `grow`.) The loop ends: each round marks chunks, starts a copy, or makes `running` shorter.
        while self.unfinished and not batch and not self._awaited():
            if self.running and not self.cache.available:
                self.give_way(now)
            batch = self.compose(now)
        batch.table_updates = self.cache.take_table_updates()
        batch.slot_copies = self.cache.take_slot_copies()       # second day
        return batch

    def compose(self, now: float) -> Batch:
        """One try at a batch. It changes the books: slots, admissions, marks. In this order:

        1. Running requests have the first choice, decodes before those that prefill. So no prompt
           stalls a decode. Each gets slots for the tokens that it has grown by, even if no budget
           is left for its spans. If there are none, it is *starved*: it sits out this step, the
           others go on. One whose context has `longest` tokens gets neither slot nor span, and is
           not starved: its last token is on its way, and `account` will finish it.
        2. The queue has what they left, first come first served, while its head fits and budget is
           left. Whoever is admitted has slots for its whole context, and as much of the budget as
           it can use. With a budget of 16, a prompt of 20 tokens becomes a[0:16] in this step and
           a[16:20], which samples, in a later one. Nobody overtakes a head that is left, even if a
           later request would fit. Its prompt has joined its conversation, also when no budget is
           left, so that we know how many slots it lacks.
        3. Always, `plan_swap_out` begins copies out: for what the starved and this head lack, and
           to keep the threshold available.

        separate_phases (second day): if a span prefills, the decodes sit out this step, and their
        budget stays unused."""
        batch, starved = Batch(self.steps, self.max_batch_tokens), 0
        for request in decodes_first(self.running):
            if len(request.conversation.tokens) == request.longest:
                continue                    # its last token is on its way
            if self.cache.grow(request.conversation, now):
                batch.take(request)
            else:
                starved += 1
        head = self.prepare_head(now)
        while head and batch.budget > 0 and self.fits(head):
            batch.swap_in += self.admit(head, now)
            batch.take(head)
            head = self.prepare_head(now)
        if self.separate_phases:
            batch.spans = [span for span in batch.spans if span.request.prefilling] or batch.spans
        batch.swap_out = self.plan_swap_out(starved, head, now)
        return batch

    def launched(self, batch: Batch):
        """Count what a batch computes as done: on the device it will be, before any later batch
        begins.

        So the books run ahead of the device. A PLACEHOLDER stands for each token that the batch
        will sample. The next batch can be launched behind it before the host learns these tokens:

            launched(8)     a's tokens  17 42 PLACEHOLDER       step 8 samples position 2
            schedule(9)     a[2:3]                              on the device it is there by then
            launched(9)     a's tokens  17 42 PLACEHOLDER PLACEHOLDER
            account(8)      a's tokens  17 42 99 PLACEHOLDER    the host has step 8's result"""
        self.steps += 1
        for request, start, end in batch.spans:
            conversation = request.conversation
            self.cache.computed(conversation, start, end)
            if end == len(conversation.tokens):     # span.samples; the call costs 5% of a step
                conversation.tokens.append(PLACEHOLDER)
                request.prefilling = False
                batch.placeholders.append((request, end))

    def account(self, batch: Batch, result: Result, now: float) -> list[Request]:
        """Write the tokens of a batch into the contexts, and return the requests whose replies have
        grown.

        Batches are accounted for in the order of their launch. If a request has ended since the
        launch, we ignore its token."""
        for ticket in result.landed:
            self.cache.complete(ticket)
        grown, logprobs = [], result.logprobs or [None] * len(result.tokens)
        sampled = zip(batch.placeholders, result.tokens, logprobs, strict=True)
        for (request, position), token, logprob in sampled:
            if token == NOT_FINITE:         # cancel (second day): it ends as "failed", runs no more
                self.cancel(request, now, RuntimeError(NO_TOKEN))
            if request.finish_reason:
                continue
            request.conversation.tokens[position] = token
            request.times.append(now)
            if logprob is not None:
                request.logprobs.append(logprob)
            request.generated.append(token)     # last, since other threads may look at any moment
            grown.append(request)
            reason = request.ended_by(token)
            if reason and not request.finish_reason:    # reached_stop may have cancelled it
                self.finish(request, reason, now)
        self.stats["generated_tokens"] += len(grown)
        return grown

    # ---- the decisions

    def prepare_head(self, now: float) -> Request | None:
        """Let the prompt of the queue's head join its conversation, and return the head, which is
        then ready for admission. None if the queue is empty, or if the head must wait until another
        request has computed the same prompt (second day: sharing.py).

        A head whose context has outgrown the limit since it was submitted fails here. Then the next
        request is the head."""
        while self.queue:
            request, conversation = self.queue[0], self.queue[0].conversation
            if request.joined:
                return request
            before, known = len(conversation.tokens), conversation.known
            total = before + len(request.prompt)
            if total + (request.max_tokens or 1) > self.limit:
                self.cancel(request, now, too_long(total, request.max_tokens, self.limit))
                continue                    # `cancel` has taken it off the queue
            if not self.cache.extend(conversation, request.prompt):
                return None
            request.tokens_before, request.known_before = before, known
            request.max_tokens = request.max_tokens or self.limit - total
            request.longest = total + request.max_tokens
            return request
        return None

    def fits(self, request: Request) -> bool:
        """Are there a row, and slots for the whole context beside the reserve?"""
        shortfall = self.cache.shortfall(request.conversation, request.total, self._reserve())
        return bool(self.cache.free_rows) and shortfall <= 0

    def admit(self, request: Request, now: float) -> list[Ticket]:
        """Move the head of the queue, which fits, to the running list, with all its slots. Returns
        its swap-ins."""
        self.queue.remove(request)
        insort(self.running, request)
        request.prefilling = True
        first = request.admitted is None
        if first:
            request.admitted = now
            self.cache.policy.returned(request.conversation, now)   # for policies that learn
        swap_in = self.cache.admit(request.conversation, request.total, now)
        if first:
            self._count_sources(request, swap_in)
        return swap_in

    def plan_swap_out(self, starved: int, head: Request | None, now: float) -> list[Ticket]:
        """Swap-outs ahead of need: until the threshold is available (or a slot for each starved
        request, if that is more), then until the head of the queue fits."""
        cache, wanted = self.cache, max(self.threshold_slots, starved)
        tickets = cache.plan_swap_out(wanted - cache.available, now)
        if head:
            tickets += cache.plan_swap_out_for(head.conversation, head.total, self._reserve(), now)
        return tickets

    def finish(self, request: Request, reason: str, now: float):
        """The turn has ended: its conversation is idle, and its KV stays."""
        self._stop_running(request, now)
        if request.last_token_pending:      # a step launched meanwhile feeds its last token
            self._take_back(request)        # second day: that KV and the PLACEHOLDER go
        self.cache.policy.ended(request.conversation)           # for policies that learn
        self._end(request, reason)

    def give_way(self, now: float):
        """Suspend the latest arrival. The oldest request is never suspended, so it finishes: alone
        it always fits, since the limit is at most the number of slots. Then the next one is the
        oldest."""
        assert len(self.running) > 1, "a lone request fits, or it would not have been admitted"
        self.suspend(self.running[-1], now)

    def suspend(self, request: Request, now: float):
        """Take a running request out, back into the queue, by arrival. Its tokens stay. Its chunks
        may leave the GPU from now on, but late: its turn waits, so the policy counts it as hardly
        idle. The statistics count it in `suspensions`."""
        self._stop_running(request, now)
        self._enqueue(request)
        self.stats["suspensions"] += 1

    # ---- the small steps

    def _awaited(self) -> bool:
        """Is a copy on its way, or a token?"""
        return bool(self.cache.in_flight) or any(each.last_token_pending for each in self.running)

    def _reserve(self) -> int:
        """Slots that an admission must leave available: none if nothing runs."""
        return self.reserve_slots if self.running else 0

    def _stop_running(self, request: Request, now: float):
        self.running.remove(request)
        self.cache.release(request.conversation, now)

    def _enqueue(self, request: Request):
        self.cache.set_waiting(request.conversation, True)
        insort(self.queue, request)

    def _end(self, request: Request, reason: str):
        """Take the request off the books. The conversation's next turn, if there is one, joins the
        queue at its own arrival."""
        request.finish_reason = reason
        conversation = request.conversation
        if self.stateless and request.joined:       # (before it joins, an earlier turn may run)
            self.cache.drop_all(conversation)       # no memory: all its KV goes
        turns = self.unfinished[conversation.order]
        was_first = turns[0] is request             # the others wait behind it, in no queue
        turns.remove(request)
        if turns and was_first:
            self._enqueue(turns[0])
        if not turns:
            del self.unfinished[conversation.order]
            self.cache.set_waiting(conversation, False)
            if conversation.one_off or not conversation.tokens:
                self.cache.forget(conversation)
        self.stats["cancelled" if reason in ("cancelled", "failed") else "finished"] += 1
        self.ended.append(request)

    # ---- second day: cancel, take back, where KV came from, text

    def cancel(self, request: Request, now: float, error: Exception | None = None):
        """End a request early, wherever it is. The conversation's tokens become what they were
        before it. With an error the request has failed. A request that has ended stays as it is."""
        if request.finish_reason:
            return
        if request in self.running:
            self._stop_running(request, now)
        elif request in self.queue:
            self.queue.remove(request)
        if request.joined:
            self.cache.truncate(request.conversation, request.tokens_before, request.known_before)
        request.error = error
        self._end(request, "failed" if error else "cancelled")

    def _take_back(self, request: Request):
        """The host ran ahead: it had launched a step that feeds 99 before it learnt that 99 ends
        the reply. Drop the PLACEHOLDER and the KV of 99: 17 42 99 PLACEHOLDER, KV of 3 -> 17 42 99,
        KV of 2.

        The KV of 99 is right. It goes all the same, so that a turn leaves the same books whether or
        not the host runs ahead: the last token of a reply has no KV, and counts as new when the
        conversation returns."""
        self.cache.truncate(request.conversation, request.total - 1, request.total - 2)

    def _count_sources(self, request: Request, swap_in: list[Ticket]):
        """Count where the context's KV comes from, at first admission.

        The numbers below: a conversation of 100 tokens returns with a prompt of 20. It has had KV
        for 99 tokens, since the last one was sampled, but never fed. Of its chunks of 32, the first
        was dropped, the second is on the CPU, the other two are on the GPU.

        If other conversations have computed the beginning of this prompt (sharing.py), more is
        known: all before the last missing run."""
        total = request.total                                       # 100 + 20 = 120
        known = max(request.known_before, request.missing()[-1][0]) # 99
        cpu = sum(ticket.filled for ticket in swap_in)              # 32
        gpu = request.conversation.cached()[0] - cpu                # 35: of 67 in slots 32 arrive
        recomputed = known - gpu - cpu                              # 99 - 35 - 32 = 32
        new = total - known                                         # 120 - 99 = 21
        request.usage = dict(zip(SOURCES, (gpu, cpu, recomputed, new)))
        # Counter.update adds:
        self.stats.update({f"prompt_tokens_{source}": n for source, n in request.usage.items()})


# as_span((request, start, end)) is Span(request, start, end) in less time: a step needs hundreds.
as_span = partial(tuple.__new__, Span)


def _runs(tickets: list[Ticket]) -> str:
    """Tickets as name[start:end], neighbouring chunks as one run."""
    runs: list[tuple] = []
    for name, start, end in sorted((str(t.conversation.name), t.start, t.end) for t in tickets):
        if runs and runs[-1][0] == name and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((name, start, end))
    return " ".join(f"{name}[{start}:{end}]" for name, start, end in runs)


class TooLong(ValueError):
    """A context would exceed the limit. tokens: how many it has, if they were counted; max_tokens:
    how many were asked for."""

    def __init__(self, message: str, tokens: int | None = None, max_tokens: int | None = None):
        super().__init__(message)
        self.tokens, self.max_tokens = tokens, max_tokens


def too_long(tokens: int, max_tokens: int | None, limit: int) -> TooLong:
    return TooLong(f"the conversation has {tokens} tokens with this prompt and max_tokens is "
                   f"{max_tokens or 'not given'}: together they exceed the limit of {limit} tokens",
                   tokens, max_tokens)
