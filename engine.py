"""The step loop: token ids in, token ids out (paper §4.1).

    submit --> | inbox | --> step: schedule, launch, settle --> | outbox | --> readers
                             the owner's thread                                any threads

A client's thread *posts* functions into the inbox. The *owner*, the one thread that steps, runs
them at the start of its next step (owner.py). To *settle* a batch is to wait for its result, to let
the scheduler `account` for its tokens and its copies, and to wake the readers of these tokens.

Invariant: what is cached never changes a token. Any policy, CPU tier and interleaving of requests
give the tokens of a full recompute, up to rounding.

`python engine.py` plays three conversations under starved tiers, and prints the batch of each step.
"""
import atexit
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from checkpoint import find_checkpoint
from config import Config, require
from eviction import POLICIES, RecomputeCost
from guesses import GuessingScheduler
from handles import Handle, Reply
from kv_cache import Conversation
from owner import Owner
from parallel import Leader, open_worker
from sampling import Sampling
from scheduler import Batch, Request, Result, Scheduler, too_long
from sharing import SharingCache
from warm import Hints, nothing_to_do

MAX_FAILURES = 3            # failures of the worker in a row, then the engine stops


class Engine:
    """A model and its two tiers. Close it when you are done."""

    def __init__(self, model: str | Path = "tiny_chat", *, worker=None,
                 cost: RecomputeCost | None = None, clock: Callable[[], float] = time.monotonic,
                 debug: bool = False, **flags):
        """flags: the fields of config.Config; `policy` may also be a class of your own.

        worker, clock: those of a simulation. cost: a profile that was measured earlier; by default
        we measure it now. debug: check all books of the cache after every step. TypeError for
        unknown flags, ValueError for those that cannot be served.

        (Under torchrun this returns on rank 0 only: see parallel.py.)"""
        if unknown := sorted(flags.keys() - Config.names()):
            raise TypeError(f"Engine has no flag {unknown[0]!r} (for text and history: Sessions)")
        self.config = config = Config(model=str(model), **flags)
        self.clock, self.debug = clock, debug
        self.directory = None if worker or config.random_weights else find_checkpoint(config.model)
        self.worker = worker = worker or open_worker(config, self.directory, profiles=cost is None)
        policy_class: Any = POLICIES.get(config.policy, config.policy)      # a name, or a class
        policy = policy_class(cost or worker.profile(), config.chunk_size)
        # (A KVCache. Second day: its conversations may share chunks.)
        self.cache = SharingCache(worker.num_slots, worker.num_places, config.chunk_size,
                                  config.max_running, worker.max_context, policy)
        arguments = (self.cache, min(worker.max_context, worker.num_slots),
                     config.max_batch_tokens, config.swap_threshold, config.reserve,
                     config.stateless, config.separate_phases)
        self.scheduler = Scheduler(*arguments)
        if config.guesses:                              # second day
            self.scheduler = GuessingScheduler(config.guesses, *arguments)
        self.owner = Owner(self.scheduler.ended)
        # How many batches the host runs ahead of the device: 1 on a GPU. (A simulated worker does
        # not say, and the host waits for it.)
        self.depth: int = getattr(worker, "depth", 0)
        # Launched and not settled: each batch, and a function that waits for its result.
        self.unsettled: deque[tuple[Batch, Callable[[], Result]]] = deque()
        # Second day. The first three: see `_before_launch`.
        self.hints = Hints(self.scheduler)
        self.watchers: list[Callable[[Batch], None]] = []
        self.forgets_cold = False
        self.worker_failures = 0                        # in a row
        if isinstance(worker, Leader):
            atexit.register(self.close)                 # else the other processes wait for ever

    # ---- the loop

    def step(self) -> Batch:
        """Schedule a batch, launch it, settle what is due.

        With depth 0 a step settles its own batch. With depth 1 it settles the batch before, so the
        host schedules batch 8 while the device computes batch 7:

            host      schedule 8, launch 8, settle 7 | schedule 9, launch 9, settle 8 |
            device    7 ---------------------------- | 8 ---------------------------- | 9 -----"""
        with self.owner.owning():                       # a lock
            self.owner.take_inbox()                     # runs what was posted
            batch = self.scheduler.schedule(self.clock())
            self._before_launch(batch)                  # second day: hints, watchers
            # An empty batch makes the worker wait for a copy. It gets one only if there is nothing
            # else to wait for.
            waits_for_copy = self.cache.in_flight and not self.unsettled
            if batch or waits_for_copy:
                self._launch(batch)
            ahead = self._ahead(batch)                  # 0 for a batch without spans: settle all
            while len(self.unsettled) > ahead:
                self._settle(*self.unsettled.popleft())
            self.owner.tell_ended()                     # closes the handles of ended requests
            if self.forgets_cold:                       # second day
                self._forget_cold()
            if self.debug:
                self.cache.check_integrity()
            return batch

    def _launch(self, batch: Batch):
        """Hand the batch to the worker, and count what it computes as done."""
        try:
            if self.depth:
                wait = self.worker.launch(batch)
            else:
                result = self.worker.execute(batch)
                wait = lambda: result
        except Exception as error:
            # Second day. The requests of this batch and of all unsettled ones fail. All KV goes, so
            # all others are recomputed.
            self._recover(batch, error)
            return
        self.unsettled.append((batch, wait))
        self.scheduler.launched(batch)
        self.hints.release()                            # second day

    def _ahead(self, batch: Batch) -> int:
        """How many batches may stay unsettled after this step: `depth`. But 0 if the batch computes
        nothing, or if the host must learn its tokens before the next launch (for example, penalties
        count earlier tokens, and guesses go on from them)."""
        if not self.depth or not batch.spans or batch.guesses:
            return 0
        looks_back = any(span.request.sampling.looks_back for span in batch.spans)
        return 0 if looks_back else self.depth

    def _settle(self, batch: Batch, wait: Callable[[], Result]):
        """Wait for the result of a batch, account for it, and wake the readers of its tokens."""
        try:
            result = wait()
        except Exception as error:
            self._recover(batch, error)                 # second day
            return
        if batch.spans:
            self.worker_failures = 0                    # second day
        handles = self.owner.handles
        for request in self.scheduler.account(batch, result, self.clock()):
            handle = handles.get(request)       # None: reached_stop has cancelled it
            # Mostly no reader sleeps, so no bell hangs here: to ask first saves 2% of a step.
            if handle and handle.tokens.bells:
                handle.tokens.ring()

    # ---- turns

    def submit(self, prompt: list[int], conversation: str | None = None, *,
               context: Sequence[int] = (), parent: str | None = None, like: Handle | None = None,
               tenant: str | None = None, max_tokens: int | None = None,
               min_tokens: int | None = None, ignore_eos: bool = False,
               reached_stop: Callable[[int], bool] | None = None,
               on_end: Callable[[Handle], None] | None = None, **sampling) -> Handle:
        """Append token ids to a conversation and generate a reply. Returns a handle at once.

        prompt: at least one token id. conversation: its name; None for a one-off request, of which
        nothing is kept. max_tokens: by default as many as fit. min_tokens: no earlier stop token
        ends the reply. ignore_eos: a stop token does not end the reply. sampling: the fields of
        sampling.Sampling, None for the default. context, parent, like, tenant: second day, see
        `_open`.

        Whoever steps the engine calls reached_stop with each token that does not end the reply as a
        stop token (True ends the reply), and on_end when the turn has ended. Neither may fail: that
        would stop the engine.

        ValueError for what cannot be served, RuntimeError if the engine has stopped."""
        given = {name: value for name, value in sampling.items() if value is not None}
        options, context = Sampling(**given), list(context)
        self._check(prompt, context, conversation, max_tokens, min_tokens, options)
        self._check_length(prompt, conversation, context, max_tokens)
        # The owner will open the conversation. We copy prompt and context: the caller may change
        # its own before the owner reads them.
        request = Request(conversation=None, prompt=list(prompt), max_tokens=max_tokens,
                          min_tokens=min_tokens or 0, reached_stop=reached_stop, sampling=options,
                          stop_ids=frozenset() if ignore_eos else self.worker.stop_ids)
        handle = Handle(request, conversation, submitted=self.clock(), step_until=self.step_until,
                        cancel=partial(self._cancel, request), on_end=on_end)
        # _open (second day). Without these four options and without scores of the prompt:
        # self.cache.open(conversation).
        open_conversation = partial(self._open, handle, context, parent, like, tenant)
        self.owner.post(partial(self._enter, handle, open_conversation))
        return handle

    def _enter(self, handle: Handle, open_conversation: Callable[[], Conversation]):
        """The owner hands a turn to the scheduler."""
        request = handle.request
        try:
            if self.failure:
                raise self.failure
            request.conversation = open_conversation()
            self.scheduler.submit(request)
            self.owner.handles[request] = handle
        except Exception as error:
            handle.end(error)

    def generate(self, prompt: list[int], conversation: str | None = None, **options) -> Reply:
        """Submit, and wait for the reply."""
        return self.submit(prompt, conversation, **options).result()    # waits with step_until

    # ---- who steps

    def step_until(self, ready: Callable[[], bool]):
        """Until `start` (second day) gives the engine a thread, whoever waits for a handle is the
        owner, and steps until ready()."""
        while not (self.owner.thread or self.failure or ready()):
            self.step()

    def call(self, function: Callable):
        """Let the owner run a function between two steps, and return its result."""
        return self.owner.call(function)

    @property
    def failure(self) -> Exception | None:
        """Why the engine has stopped."""
        return self.owner.failure

    # ---- second day: watchers, sharing, warm, checks, a thread, forget, stats, close, failures

    def _before_launch(self, batch: Batch):
        """The owner calls this with each new batch, even an empty one.

        Hints add warm-ups to the batch (warm.py). `watchers` look at it: they must not call the
        engine, since that could end a turn of the batch."""
        if self.hints:
            self.hints.fill(batch, self.clock())
        for watcher in self.watchers:
            watcher(batch)

    def _forget_cold(self):
        """Forget idle conversations without KV: somebody else keeps their tokens."""
        for conversation in self.cache.cold_conversations():
            if conversation not in self.hints.warm_ups:
                self.cache.forget(conversation)

    def _open(self, handle: Handle, context: Sequence[int], parent: str | None,
              like: Handle | None, tenant: str | None) -> Conversation:
        """The conversation of a turn, and with whom it shares KV. For `submit`:

            context     token ids that the caller keeps; the conversation begins with them if the
                        engine does not hold it (any more)
            parent      a conversation that begins as the context does (sharing.py: fork)
            like        an earlier turn with the same prompt after the same context; this turn waits
                        while that one computes it (sharing.py: follow)
            tenant      a text; the turn uses what any conversation of the same tenant has cached of
                        its context (None: it neither uses nor offers anything; a fork has its
                        parent's tenant). With prompt_logprobs it uses nothing: what others have
                        computed has left no logits"""
        cache, name = self.cache, handle.conversation
        if parent in cache.conversations and name not in cache.conversations:
            conversation = cache.fork(cache.conversations[parent], name, context)
        else:
            conversation = cache.open(name, context)
        if handle.request.sampling.prompt_logprobs is not None:
            cache.keep_apart(conversation)
        if tenant is not None and not self.config.stateless:
            cache.own(conversation, tenant)
        if like and like.request.conversation:
            cache.follow(conversation, like.request.conversation)
        return conversation

    def warm(self, conversation: str, context: Sequence[int] = (),
             tenant: str | None = None) -> dict[str, int]:
        """A turn of this conversation is likely soon: bring back what its KV has lost, as far as
        nobody else wants the device or the slots. No reply depends on it. (Without `start`,
        somebody must step.) context, tenant: see `_open`.

        Returns at once what is to happen: see Hints.give. KeyError if the engine does not hold the
        conversation and gets no context."""
        require(isinstance(conversation, str), "conversation", "a string", conversation)
        context = list(context)
        self._check([0], context, conversation, None, None, Sampling())

        def warm() -> dict[str, int]:
            if not context and conversation not in self.cache.conversations:
                raise KeyError(conversation)
            if self.config.stateless:
                return nothing_to_do()
            held = self.cache.open(conversation, context)
            if tenant is not None:
                self.cache.own(held, tenant)
            return self.hints.give(held, self.clock())
        return self.call(warm)

    def _check(self, prompt, context, conversation, max_tokens, min_tokens, sampling: Sampling):
        vocabulary = self.worker.vocab_size
        require(hasattr(prompt, "__len__") and len(prompt) > 0, "prompt",
                "a list of at least one token id", prompt)
        # A context may be long. If it holds nothing but ints, we look at two of them.
        if set(map(type, context)) == {int}:
            context = [min(context), max(context)]
        ids = f"an int from 0 to {vocabulary - 1}"
        for token in [*prompt, *context, *sampling.logit_bias]:
            require(type(token) is int and 0 <= token < vocabulary, "a token id", ids, token)
        require(conversation is None or isinstance(conversation, str), "conversation",
                "a string or None", conversation)
        require(max_tokens is None or type(max_tokens) is int and max_tokens >= 1, "max_tokens",
                "an int of at least 1", max_tokens)
        most = max_tokens or self.scheduler.limit
        require(min_tokens is None or type(min_tokens) is int and 0 <= min_tokens <= most,
                "min_tokens", f"an int from 0 to {most}, max_tokens or the limit", min_tokens)

    def _check_length(self, prompt, conversation, context, max_tokens):
        """TooLong if the context would exceed the limit. One that is still growing in a turn ahead
        of this one is checked again at admission."""
        held = self.cache.conversations.get(conversation)
        total = len(held.tokens if held else context) + len(prompt)
        if total + (max_tokens or 1) > self.scheduler.limit:
            raise too_long(total, max_tokens, self.scheduler.limit)

    def _cancel(self, request: Request):
        def cancel():
            if request in self.owner.handles:
                self.scheduler.cancel(request, self.clock())
        self.call(cancel)

    def start(self) -> "Engine":
        """From now on a thread of the engine's own steps."""
        self.owner.start(self._run)
        return self

    def _run(self):
        batch, was_busy = None, False
        while self.owner.thread:
            # After the last reply chunks go to the CPU while nobody needs the device. So we step on
            # if the last batch was not empty: there may be more to copy out. And if there was a
            # request or a copy before the last step (was_busy): it may have ended in that step, and
            # a hint may have waited for it. Else we wait.
            if not (batch or was_busy or self.scheduler.busy):
                self.owner.posted.wait()
            was_busy = self.scheduler.busy
            batch = self.step()

    def forget(self, conversation: str | None):
        """Cancel the turns of a conversation, and free its tokens and its chunks in both tiers. It
        does nothing for an unknown name."""
        def forget():
            if held := self.cache.conversations.get(conversation):
                for request in list(self.scheduler.unfinished.get(held.order, ())):
                    self.scheduler.cancel(request, self.clock())
                self.cache.forget(held)
        self.call(forget)

    def shorten(self, conversation: str | None, length: int):
        """Keep no more than the first `length` tokens of an idle conversation, and what is cached of
        them. It does nothing for an unknown name."""
        def shorten():
            if held := self.cache.conversations.get(conversation):
                self.cache.truncate(held, length, length)
        self.call(shorten)

    def designate(self, tokens: list[int]):
        """These tokens are the operator's system prompt. Contexts that begin like them share the
        full chunks of what they have in common, and no eviction takes these chunks. Call this
        before the first turn."""
        self.cache.designate(tokens)
        left = self.worker.num_slots - len(self.cache.designated.tokens)
        self.scheduler.limit = min(self.worker.max_context, left)

    def stats(self) -> dict:
        """Counts since the start, and how full tiers and queue are now."""
        return self.call(self.read_stats)

    def read_stats(self) -> dict:
        cache, scheduler = self.cache, self.scheduler
        running, turns = len(scheduler.running), sum(map(len, scheduler.unfinished.values()))
        of_worker = getattr(self.worker, "stats", dict)()       # a simulated worker has none
        return dict(**scheduler.stats, **cache.stats, **self.hints.stats, **of_worker,
                    steps=scheduler.steps,
                    slots_total=cache.num_slots, slots_free=len(cache.free_slots),
                    cpu_chunks_total=cache.num_places, cpu_chunks_free=len(cache.free_places),
                    running=running, waiting=turns - running,
                    conversations=len(cache.conversations))

    def close(self):
        """Cancel all turns, and stop the thread."""
        def cancel_all():
            for request in self.owner.handles:
                self.scheduler.cancel(request, self.clock())
        self.owner.close(cancel_all)
        if isinstance(self.worker, Leader):
            self.worker.dismiss()

    def _recover(self, batch: Batch, error: Exception):
        """Go on after the worker has failed with a batch.

        We trust nothing in the tiers any more, so all KV goes. The requests of this batch and of
        all unsettled ones fail. All other requests are recomputed, since we still have their
        tokens. If the device is lost for good, `_drain_copies` fails, too, and the engine stops.
        It also stops after MAX_FAILURES batches have failed one after another."""
        self.worker_failures += 1
        if self.worker_failures == MAX_FAILURES:
            raise error                                 # `owning` stops the engine
        traceback.print_exception(error)
        self._drain_copies()
        self.hints.give_up()
        lost = [batch, *(unsettled for unsettled, _ in self.unsettled)]
        self.unsettled.clear()
        why = f"the worker has failed: {error!r}"
        for request in {span.request for failed in lost for span in failed.spans}:
            self.scheduler.cancel(request, self.clock(), RuntimeError(why))
        for request in list(self.scheduler.running):
            self.scheduler.suspend(request, self.clock())
        self.cache.drop_everything()

    def _drain_copies(self):
        """Execute empty batches until no copy moves any more."""
        while self.worker.execute(Batch(self.scheduler.steps, budget=0)).landed:
            pass


def demo():
    """Three conversations, 32 GPU slots, 4 CPU places of 4 tokens, at most 16 tokens in a step. The
    clock is one second later at each look. The costs are invented seconds: the attention of a chunk
    costs 1 s at context 4 and 8 s at 32; all else costs 1 s. chapter_one.py does the same."""
    engine = Engine("tiny_chat", gpu_cache_tokens=32, cpu_cache_tokens=16, chunk_size=4,
                    max_batch_tokens=16, debug=True, clock=count().__next__,
                    cost=RecomputeCost({4: 1.0, 32: 8.0}, rest=1.0))
    for turns in ({"a": 11, "b": 11}, {"c": 11}, {"a": 4}):
        handles = [engine.submit(list(range(65, 65 + length)), name, max_tokens=3, ignore_eos=True)
                   for name, length in turns.items()]
        while not all(handle.reply for handle in handles):
            print(engine.step())
        for handle in handles:
            print(f"    {handle.conversation}: {handle.reply.sources}")
    engine.close()


if __name__ == "__main__":
    demo()
