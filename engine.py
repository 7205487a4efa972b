"""The step loop: token ids in, token ids out (paper §4.1).

    submit -> inbox -> | step: schedule, launch, settle | -> outbox -> readers
                         the owner's thread                  any threads

One thread at a time is the *owner*: it alone steps, and it alone changes the books of the scheduler and the
cache. After `start()` the owner is a thread of the engine's own. Without `start()` the owner is whoever waits
for a handle or calls step(): the steps then run in the caller's thread, so that breakpoints and exceptions
work as one expects. Every other thread posts a function to the inbox, and the owner runs it between two
steps. (If nobody owns the engine, the caller of stats(), forget() or close() runs what it has posted.)

To the engine a conversation is a name and its token ids. serving/sessions.py adds text, and a history that
survives a restart.

Invariant: what is cached never changes a token. Any policy, CPU tier and interleaving of requests give the
tokens of a full recompute, up to rounding. (The size of the GPU tier limits how long a context may be.)

`python engine.py` plays two conversations under starved tiers, and prints the batch of each step.
"""
import atexit
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from checkpoint import find_checkpoint
from config import Config, require
from eviction import POLICIES, RecomputeCost
from kv_cache import Conversation
from parallel import Leader, open_worker
from sampling import Sampling
from scheduler import SOURCES, Batch, Request, Result, Scheduler, TooLong
from sharing import SharingCache

MAX_FAILURES = 3            # after so many failures of the worker in a row the engine stops


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]        # all generated tokens, a stop token included
    finish_reason: str          # "stop" | "length" | "cancelled"
    # prompt_tokens (of the whole context), completion_tokens, gpu, cpu, recomputed, new
    usage: dict
    logprobs: list | None       # see Handle.logprobs

    @property
    def sources(self) -> str:
        """Where the KV-tokens of the context came from: gpu 96 · cpu 64 · recomputed 32 · new 14"""
        return " · ".join(f"{source} {self.usage[source]}" for source in SOURCES)


class Engine:
    """A model and its two tiers. Close it when you are done."""

    def __init__(self, model: str | Path = "tiny_chat", *, worker=None, cost: RecomputeCost | None = None,
                 clock: Callable[[], float] = time.monotonic, debug: bool = False, **flags):
        """flags: the fields of config.Config; `policy` may also be a class of your own.

        worker, clock: those of a simulation. cost: a profile that was measured earlier; by default we measure
        it now. debug: check all books of the cache after every step. TypeError for unknown flags, ValueError
        for those that cannot be served.

        Under torchrun this returns on rank 0 only. The other processes take part in its steps until it is
        closed, and end."""
        if unknown := sorted(flags.keys() - Config.names()):
            raise TypeError(f"Engine has no flag {unknown[0]!r}; text, a history and a system prompt are the "
                            "business of serving.sessions.Sessions")
        self.config = config = Config(model=str(model), **flags)
        self.clock, self.debug = clock, debug
        self.directory = None if worker or config.random_weights else find_checkpoint(config.model)
        self.worker = worker = worker or open_worker(config, self.directory, profiles=cost is None)
        policy = POLICIES.get(config.policy, config.policy)(cost or worker.profile(), config.chunk_size)
        self.cache = SharingCache(worker.num_slots, worker.num_places, config.chunk_size, config.max_running,
                                  worker.max_context, policy)
        self.scheduler = Scheduler(self.cache, min(worker.max_context, worker.num_slots),
                                   config.max_batch_tokens, config.swap_threshold, config.reserve,
                                   config.stateless, config.separate_phases)
        self.forgets_cold = False           # forget idle conversations of which no KV is cached?
        # Functions that `step` calls with each new batch, even an empty one, before its launch. They must not
        # call the engine: that could end a turn of the batch.
        self.watchers: list[Callable[[Batch], None]] = []

        self.stepping = threading.RLock()   # held by the owner
        self.thread: threading.Thread | None = None
        self.inbox: deque[Callable[[], None]] = deque()
        self.posted = threading.Event()     # there may be something in the inbox
        # Held to post a turn and to set `failure`. So when the engine stops, a turn is in the inbox, and its
        # readers are told; or it is not, and submit raises.
        self.posting = threading.Lock()
        self.unfinished: set[Handle] = set()        # entered, but their readers have not been told the end
        # Of these, the ones whose request has ended. We tell their readers only after account(), because
        # on_end may call the scheduler and the cache again.
        self.ended: deque[Handle] = deque()
        # Batches that were launched and not settled, each with the function that waits for its result. While
        # a device computes a batch, we schedule the next one: after a step up to `depth` batches are
        # unsettled. A worker whose `depth` is 0 computes on the host, and needs no `launch`: when `execute`
        # returns, its work is done.
        self.unsettled: deque[tuple[Batch, Callable[[], Result]]] = deque()
        self.depth: int = getattr(worker, "depth", 0)
        self.worker_failures = 0            # in a row
        self.failure: Exception | None = None       # why the engine has stopped
        if isinstance(worker, Leader):
            atexit.register(self.close)             # for programs that do not: the other processes wait

    # ---- the loop

    def step(self) -> Batch:
        """One iteration: schedule, launch, settle. Everyone uses it, the simulation too.

        On a GPU the books run ahead of the device: while it computes this batch, we settle the one before it.
        On a CPU a step settles its own batch (see `_ahead`). An empty batch is launched to wait for a copy,
        once no launched batch can free what we wait for."""
        with self._owning():
            self.take_inbox()
            batch = self.scheduler.schedule(self.clock())
            for watcher in self.watchers:
                watcher(batch)
            if batch or self.cache.in_flight and not self.unsettled:
                self._launch(batch)
            while len(self.unsettled) > self._ahead(batch):
                self._settle(*self.unsettled.popleft())
            self._tell_ended()
            if self.forgets_cold:
                for conversation in self.cache.cold_conversations():
                    self.cache.forget(conversation)
            if self.debug:
                self.cache.check_integrity()
            return batch

    def _launch(self, batch: Batch):
        """Hand the batch to the worker, and book what it will have done."""
        try:
            if self.depth:
                wait = self.worker.launch(batch)
            else:
                result = self.worker.execute(batch)
                wait = lambda: result
        except Exception as error:
            self._recover(batch, error)
            return
        self.unsettled.append((batch, wait))
        self.scheduler.launched(batch)

    def _ahead(self, batch: Batch) -> int:
        """How many batches may stay unsettled after this step. With depth 1 that is this batch. 0 if it
        computes nothing, or if the host needs to know its tokens (see Sampling.looks_back) before it can
        launch the next one."""
        if self.depth and batch.spans and not any(span.request.sampling.looks_back for span in batch.spans):
            return self.depth
        return 0

    def _settle(self, batch: Batch, wait: Callable[[], Result]):
        """Wait for the result of the oldest unsettled batch, and book it."""
        try:
            result = wait()
        except Exception as error:
            self._recover(batch, error)
            return
        if batch.spans:
            self.worker_failures = 0
        self.scheduler.account(batch, result, self.clock())

    def _recover(self, batch: Batch, error: Exception):
        """Go on after the worker has failed with a batch.

        We trust nothing in the tiers any more, so all KV goes. The requests of this batch and of all
        unsettled ones fail. All other requests are recomputed, since we still have their tokens.

        If the device is lost for good, `_drain_copies` fails, too, and the engine stops at once. MAX_FAILURES
        stops an engine whose device recovers but whose batches keep failing."""
        self.worker_failures += 1
        if self.worker_failures == MAX_FAILURES:
            raise error
        traceback.print_exception(error)
        self._drain_copies()
        lost = [batch, *(unsettled for unsettled, _ in self.unsettled)]
        self.unsettled.clear()
        for request in {span.request for failed in lost for span in failed.spans}:
            self.scheduler.cancel(request, self.clock(), RuntimeError(f"the worker has failed: {error!r}"))
        for request in list(self.scheduler.running):
            self.scheduler.suspend(request, self.clock())
        self.cache.drop_everything()

    def _drain_copies(self):
        """Execute empty batches until no copy moves any more."""
        landed = True
        while landed:
            landed = self.worker.execute(Batch(self.scheduler.steps, budget=0)).landed

    def _tell_ended(self):
        while self.ended:
            self.ended.popleft().end()

    # ---- who steps

    def start(self) -> "Engine":
        """From now on a thread of the engine's own steps."""
        with self.stepping:
            if self.failure:
                raise self.failure
            if not self.thread:
                self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self.thread.start()
        return self

    def _run(self):
        batch = None
        while self.thread:
            # After the last reply we go on stepping until a step finds nothing to copy and no copy is in
            # flight: so chunks go to the CPU while nobody needs the device. Then we wait for a post.
            if not batch and not self.scheduler.busy:
                self.posted.wait()
            batch = self.step()

    def step_until(self, ready: Callable[[], bool]):
        """If the engine has no thread of its own, the caller steps until ready()."""
        while not (self.thread or self.failure or ready()):
            self.step()

    @contextmanager
    def _owning(self):
        """The caller waits until nobody else is the owner, and is the owner until the block ends. An error in
        the block stops the engine. So does Ctrl-C, which may come when the books are half written."""
        with self.stepping:
            try:
                yield
            except BaseException as error:
                self._stop(RuntimeError(f"the engine has stopped: {error!r}"))
                raise

    def _stop(self, failure: Exception):
        """Everyone who waits, and everyone who submits from now on, is told why."""
        with self.posting:
            self.failure, self.thread = self.failure or failure, None
        self.ended.clear()      # turns that ended in this step are unfinished, too: they get the error
        self.take_inbox()
        for handle in list(self.unfinished):
            with suppress(Exception):           # of its on_end: the others are told all the same
                handle.end(self.failure)

    def _post(self, function: Callable[[], None]):
        self.inbox.append(function)
        self.posted.set()

    def take_inbox(self):
        """The owner runs all functions that others have posted, in the order of their posts."""
        with self._owning():
            self.posted.clear()             # before we look: a later post sets it again
            while self.inbox:
                function = self.inbox.popleft()
                function()
                self._tell_ended()

    def call(self, function: Callable):
        """Let the owner run a function between two steps, and return its result.

        The thread of a started engine runs it. Without such a thread the caller becomes the owner and runs
        it. If the owner itself calls, from on_end, then it runs the function inside the current step. The
        caller gets the error of a function that fails; the engine goes on."""
        def run():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        future = Future()
        self._post(run)
        if self.thread in (None, threading.current_thread()):
            self.take_inbox()                           # nobody else would
        return future.result()

    # ---- turns

    def submit(self, prompt: list[int], conversation: str | None = None, *, context: Sequence[int] = (),
               parent: str | None = None, max_tokens: int | None = None, min_tokens: int | None = None,
               ignore_eos: bool = False, like: "Handle | None" = None,
               reached_stop: Callable[[int], bool] | None = None,
               on_end: Callable[["Handle"], None] | None = None, **sampling) -> "Handle":
        """Append token ids to a conversation and generate a reply. Returns a handle at once.

        prompt: at least one token id. conversation: its name; None for a one-off request, of which nothing is
        kept. max_tokens: by default as many as fit. min_tokens: no earlier stop token ends the reply.
        ignore_eos: a stop token does not end the reply. sampling: the fields of sampling.Sampling, None for
        the default.

        A caller who keeps token ids elsewhere has more to say. context: the token ids that the conversation
        had before, in case the engine does not hold it (any more). parent: a conversation that begins as the
        context does; what it has cached is shared. like: an earlier turn with the same prompt after the same
        context. While that one computes the prompt, this one waits; then it shares what is cached of it.
        reached_stop: the owner calls it with each token that does not end the reply as a stop token; True
        ends it. on_end: the owner calls it when the turn has ended. Neither may fail: that would stop the
        engine.

        ValueError for what cannot be served, RuntimeError if the engine has stopped."""
        sampling = Sampling(**{name: value for name, value in sampling.items() if value is not None})
        context = list(context)         # like the prompt: the caller may change it before the owner reads it
        self._check(prompt, context, conversation, max_tokens, min_tokens, sampling)
        self._check_length(prompt, conversation, context, max_tokens)
        handle = Handle(self, conversation, sampling, on_end)

        stop_ids = frozenset() if ignore_eos else self.worker.stop_ids
        # None: the owner will open the conversation.
        request = Request(None, list(prompt), max_tokens, min_tokens or 0, stop_ids, reached_stop, sampling,
                          outbox=handle)
        with self.posting:
            if self.failure:
                raise self.failure
            self._post(partial(self._enter, handle, request, context, parent, like))
        return handle

    def _enter(self, handle: "Handle", request: Request, context: Sequence[int], parent: str | None,
               like: "Handle | None"):
        """The owner hands a turn to the scheduler."""
        try:
            if self.failure:
                raise self.failure
            request.conversation = self._open(handle.conversation, context, parent)
            handle.request = request
            if like and like.request:
                self.cache.follow(request.conversation, like.request.conversation)
            self.unfinished.add(handle)
            self.scheduler.submit(request)
        except Exception as error:
            handle.end(error)

    def generate(self, prompt: list[int], conversation: str | None = None, **options) -> Reply:
        """Submit, and wait for the reply."""
        return self.submit(prompt, conversation, **options).result()

    def _check(self, prompt, context, conversation, max_tokens, min_tokens, sampling: Sampling):
        vocabulary = self.worker.vocab_size
        require(hasattr(prompt, "__len__") and len(prompt) > 0, "prompt", "a list of at least one token id",
                prompt)
        # A context may be long. If it holds nothing but ints, the smallest and the largest are enough.
        in_doubt = [min(context), max(context)] if {*map(type, context)} == {int} else context
        wrong = [token for token in [*prompt, *in_doubt, *sampling.logit_bias]
                 if type(token) is not int or not 0 <= token < vocabulary]
        require(not wrong, "a token id", f"an int from 0 to {vocabulary - 1}", wrong and wrong[0])
        require(conversation is None or isinstance(conversation, str), "conversation", "a string or None",
                conversation)
        require(max_tokens is None or type(max_tokens) is int and max_tokens >= 1, "max_tokens",
                "an int of at least 1", max_tokens)
        most = max_tokens or self.scheduler.limit
        require(min_tokens is None or type(min_tokens) is int and 0 <= min_tokens <= most, "min_tokens",
                f"an int from 0 to {most}, which is max_tokens or the limit", min_tokens)

    def _check_length(self, prompt, conversation, context, max_tokens):
        """TooLong if the context would exceed the limit. One that is still growing in a turn ahead of this
        one is checked again at admission."""
        held = self.cache.conversations.get(conversation)
        length, limit = len(held.tokens if held else context) + len(prompt), self.scheduler.limit
        if length + (max_tokens or 1) > limit:
            raise TooLong(f"the conversation has {length} tokens with this prompt and max_tokens is "
                          f"{max_tokens or 'not given'}: together they exceed the limit of {limit} tokens")

    def _open(self, name: str | None, context: Sequence[int], parent: str | None) -> Conversation:
        held = self.cache.conversations
        if parent in held and name not in held:
            return self.cache.fork(held[parent], name, context)
        return self.cache.open(name, context)

    # ---- conversations

    def forget(self, conversation: str | None):
        """Cancel the turns of a conversation, and free its tokens and its chunks in both tiers. A name that
        the engine does not know is no error."""
        def forget():
            if held := self.cache.conversations.get(conversation):
                for request in list(self.scheduler.unfinished.get(held.order, ())):
                    self.scheduler.cancel(request, self.clock())
                self.cache.forget(held)
        self.call(forget)

    def designate(self, tokens: list[int]):
        """From now on contexts that begin like these tokens share the full chunks that they have in common
        with them. No eviction takes these chunks. Call this before the first turn."""
        self.cache.designate(tokens)
        self.scheduler.limit = min(self.worker.max_context, self.worker.num_slots - len(self.cache.prefix))

    def stats(self) -> dict:
        """Counts since the start, and how full tiers and queue are now."""
        return self.call(self.read_stats)

    def read_stats(self) -> dict:
        cache, scheduler = self.cache, self.scheduler
        running, turns = len(scheduler.running), sum(map(len, scheduler.unfinished.values()))
        of_worker = getattr(self.worker, "stats", dict)()
        return dict(**scheduler.stats, **cache.stats, **of_worker, steps=scheduler.steps,
                    slots_total=cache.num_slots, slots_free=len(cache.free_slots),
                    cpu_chunks_total=cache.num_places, cpu_chunks_free=len(cache.free_places),
                    running=running, waiting=turns - running, conversations=len(cache.conversations))

    def close(self):
        """Cancel all turns, and stop the thread."""
        def close():
            with self.posting:
                self.failure = self.failure or RuntimeError("the engine is closed")
            for handle in self.unfinished:
                self.scheduler.cancel(handle.request, self.clock())
            self.thread = None
        thread = self.thread
        self.call(close)
        if thread not in (None, threading.current_thread()):        # on_end may close the engine
            thread.join()
        if isinstance(self.worker, Leader):
            self.worker.dismiss()


class Handle:
    """A submitted turn. Iterate it for tokens, or wait for its `result()`.

    Readers take nothing away: any number of threads may read a handle, any number of times."""

    def __init__(self, engine: Engine, conversation: str | None, sampling: Sampling,
                 on_end: Callable[["Handle"], None] | None):
        self.engine, self.conversation, self.sampling, self.on_end = engine, conversation, sampling, on_end
        self.submitted = engine.clock()
        self.tokens = Outbox(engine)
        self.request: Request | None = None         # None until the owner takes the turn from the inbox
        self.reply: Reply | None = None             # in the end either this
        self.error: Exception | None = None         # or this

    def __iter__(self) -> Iterator[int]:
        for new in self.tokens.news():
            yield from new
        self.result()                               # raises the error, if there is one

    def result(self) -> Reply:
        """Wait for the reply. Raises the error of a turn that has failed."""
        self.tokens.wait_closed()
        if self.error:
            raise self.error
        return self.reply

    def cancel(self):
        """End the turn early: the conversation's tokens become what they were before. The turn has ended when
        this returns; its finish_reason is "cancelled", unless it was complete already."""
        def cancel():
            if self.request and not self.tokens.closed.is_set():
                self.engine.scheduler.cancel(self.request, self.engine.clock())
        self.engine.call(cancel)
        self.tokens.wait_closed()

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self.tokens.items

    @property
    def logprobs(self) -> list | None:
        """For each of the tokens so far (its log probability, [(token id, log probability), ...] of the most
        likely tokens). None if they were not asked for."""
        if self.sampling.logprobs is None:
            return None
        return self.request.logprobs[:len(self.token_ids)] if self.request else []

    # ---- the owner's side

    def put(self, token: int | None):
        """To the scheduler, a handle is the request's outbox. It puts each token of the reply, then None."""
        if token is None:
            self.engine.ended.append(self)
            # Else the handle, the request and the caller would stay in memory until a garbage collection.
            self.request.outbox = self.request.reached_stop = None
        else:
            self.tokens.put(token)

    def end(self, error: Exception | None = None):
        """The turn is over: tell the readers."""
        request = self.request
        self.error = error or request.error
        if not self.error:
            sources = request.usage or dict.fromkeys(SOURCES, 0)        # zeros if it was never admitted
            usage = dict(prompt_tokens=sum(sources.values()), completion_tokens=len(self.token_ids)) | sources
            self.reply = Reply(self.token_ids, request.finish_reason, usage, self.logprobs)
        self.engine.unfinished.discard(self)
        self.tokens.close()
        if self.on_end:
            self.on_end(self)
            self.on_end = None      # like reached_stop, it may belong to one who keeps this handle


class Outbox:
    """A list that grows until it is closed. The owner writes it, any number of threads read it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.items: list = []
        self.closed = threading.Event()
        self.bells: list[threading.Lock] = []       # one for each reader that sleeps: it wakes on the release

    def put(self, item):
        self.items.append(item)
        self._ring()

    def close(self):
        self.closed.set()
        self._ring()

    def _ring(self):
        while self.bells:
            self.bells.pop().release()

    def wait_closed(self, seconds: float | None = None) -> bool:
        """Return when the outbox is closed, or after so many seconds. True if it is closed."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        self.engine.step_until(lambda: self.closed.is_set() or time.monotonic() >= end)
        return self.closed.wait(None if seconds is None else max(0.0, end - time.monotonic()))

    def wait_beyond(self, seen: int):
        """Return when there are more than `seen` items, or the outbox is closed."""
        def ready():
            return len(self.items) > seen or self.closed.is_set()
        self.engine.step_until(ready)
        while not ready():
            bell = threading.Lock()
            bell.acquire()
            self.bells.append(bell)
            # The writer adds an item, then rings. We hang up a bell, then look. So either we see the item,
            # or the writer sees the bell. (A lock wakes a thread faster than a Condition does.)
            if not ready():
                bell.acquire()

    def news(self) -> Iterator[list]:
        """Yield all items in order, each time as many as are new, until the outbox is closed."""
        seen = 0
        while True:
            self.wait_beyond(seen)
            new = self.items[seen:]
            if not new:
                return
            seen += len(new)
            yield new


def demo():
    """Two conversations, 32 GPU slots, 3 CPU places of 4 tokens, at most 16 tokens in a step. The clock is
    one second later at each look. The costs are invented seconds: the attention of a chunk costs 1 s at
    context 4 and 2 s at 32; all else costs 1 s."""
    engine = Engine("tiny_chat", gpu_cache_tokens=32, cpu_cache_tokens=12, chunk_size=4, max_batch_tokens=16,
                    debug=True, clock=count().__next__, cost=RecomputeCost({4: 1.0, 32: 2.0}, rest=1.0))
    for names in ("a", "b", "a", "b", "ab"):
        handles = [engine.submit(list(range(65, 72)), name, max_tokens=3, ignore_eos=True) for name in names]
        while not all(handle.reply for handle in handles):
            print(engine.step())
        for handle in handles:
            print(f"    {handle.conversation}: {handle.reply.sources}")
    engine.close()


if __name__ == "__main__":
    demo()
