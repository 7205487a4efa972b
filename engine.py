"""The in-process API and the one step loop (paper §4.1).

    submit -> inbox -> | step: schedule, execute, account | -> outbox -> handle -> history
                         the owner's thread                    the caller's thread

One owner steps; everyone else posts to the inbox and waits on an outbox. Without `start()` the owner is whoever waits for a
handle: the steps run in the caller's thread, so breakpoints and exceptions work as one expects. A turn that has ended is
committed to the history by its caller, and only then told to be done.

Invariant: the answer never depends on the cache. Any sizes, policy and interleaving give the tokens of a full recompute.

`python engine.py` plays two conversations under starved tiers and prints each step's batch."""
import threading
import time
import traceback
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from queue import Empty, SimpleQueue

from chat import Chat
from config import Config, require
from eviction import POLICIES, RecomputeCost
from serving.history import History, StaleTurn, Turn, new_id
from checkpoint import find_checkpoint
from sampling import Sampling
from scheduler import SOURCES, Batch, Request, Result, Scheduler
from sharing import SharingCache
from serving.tokenizer import TextStream, load_tokenizer
from worker import load_worker

MAX_FAILURES = 3            # steps in a row that the worker may fail


@dataclass(frozen=True)
class Reply:
    text: str                   # without special tokens and the stop string; empty where there is no tokenizer
    token_ids: list[int]        # everything sampled, a stop token included
    finish_reason: str          # "stop" | "length" | "cancelled"
    usage: dict                 # prompt_tokens, completion_tokens, gpu, cpu, recomputed, new
    logprobs: list | None = None      # if asked for, of each token (its log probability, [(token id, its), ...] of the most likely)

    @property
    def sources(self) -> str:
        """Where the context came from: gpu 96 · cpu 64 · recomputed 32 · new 14"""
        return " · ".join(f"{source} {self.usage[source]}" for source in SOURCES)


class Handle:
    """A submitted turn. Iterate it for tokens, `pieces()` for text, `result()` for the Reply; any number of times."""

    def __init__(self, engine: "Engine", conversation: str | None, base: Turn | None, prompt: list[int], messages: list[dict],
                 carried: int | None, note: dict, options: dict):
        self.engine, self.conversation, self.base, self.id = engine, conversation, base, new_id()      # the id is the turn's
        self.prompt, self.messages, self.carried, self.note, self.options = prompt, messages, carried, note, options
        self.lock, self.outbox = threading.Lock(), SimpleQueue()
        self.request, self.failure = None, None              # one of them is set by the engine's owner
        self.stream = TextStream(engine.tokenizer, options["stop"]) if engine.tokenizer else None
        self.token_ids, self.text = [], ""
        self.reply, self.error = None, None
        self.submitted = engine.clock()

    def __iter__(self):
        seen = 0
        while self._pull() or seen < len(self.token_ids):
            yield from self.token_ids[seen:(seen := len(self.token_ids))]

    def pieces(self):
        """The text as it grows."""
        sent = 0
        while self._pull() or sent < len(self.text):
            if sent < len(self.text):
                yield self.text[sent:(sent := len(self.text))]

    def result(self) -> Reply:
        while self._pull():
            pass
        return self.reply

    @property
    def logprobs(self) -> list | None:
        """Those of `token_ids`, as in Reply."""
        if self.options["sampling"].logprobs is None:
            return None
        return self.request.logprobs[:len(self.token_ids)] if self.request else []

    def cancel(self):
        """Ends the turn early; it leaves no trace. Its reply's finish_reason is "cancelled", unless it was complete already."""
        self.engine.call(lambda: self.engine.cancel(self))
        with suppress(Exception):                            # an error is for whoever asks for the result
            self.result()

    def _pull(self) -> bool:
        """Waits for the next token, or for the end; False when there is no more."""
        with self.lock:
            if not self.reply and not self.error:
                token = self.engine.wait_for(self.outbox)
                if token is None:
                    self._settle()
                else:
                    self.token_ids.append(token)
                    self.text += self.stream.push(token) if self.stream else ""
            if self.error:
                raise self.error
            return not self.reply

    def _settle(self):
        """The turn has ended: commits it, unless it was cancelled or has failed."""
        self.text += self.stream.finish() if self.stream else ""
        request = self.request
        try:
            if error := self.failure or request.error:
                raise error
            sources = request.usage or dict.fromkeys(SOURCES, 0)
            usage = dict(prompt_tokens=sum(sources.values()), completion_tokens=len(self.token_ids), **sources)
            reply = Reply(self.text, self.token_ids, request.finish_reason, usage, self.logprobs)
            kept = reply.finish_reason != "cancelled" and self.engine.commit(self, reply)
            self.reply = reply if kept else replace(reply, finish_reason="cancelled")
        except Exception as error:
            self.error = error
        finally:
            self.engine.settled(self)


class Engine(Chat):
    """A model, its two tiers, and every conversation that it was told. Close it when done."""

    def __init__(self, model: str | Path = "tiny_chat", *, worker=None, cost: RecomputeCost | None = None, clock=time.monotonic,
                 history: History | str | Path | None = None, debug: bool = False, **flags):
        """flags: the fields of Config; policy may be a class of your own, too. worker, clock: a simulation's. cost: a profile made earlier; by default it is measured now.
        debug: check_integrity() after every step."""
        file = None if history is None or isinstance(history, History) else str(history)
        self.config = config = Config(model=str(model), history=file, **flags)
        self.clock, self.debug = clock, debug
        directory = None if worker or config.random_weights else find_checkpoint(config.model)
        self.tokenizer = load_tokenizer(directory) if directory else None
        self.worker = worker = worker or load_worker(config, directory)
        policy = POLICIES.get(config.policy, config.policy)(cost or worker.profile(), config.chunk_size)
        self.cache = SharingCache(worker.num_slots, worker.num_places, config.chunk_size, config.max_running, worker.max_context, policy)
        self.system = self._designate(config.system_prompt) if config.system_prompt else []
        limit = min(worker.max_context, worker.num_slots - len(self.cache.prefix))
        self.scheduler = Scheduler(self.cache, limit, config.max_batch_tokens, config.swap_threshold, config.reserve,
                                   config.stateless, config.separate_phases)
        fingerprint = self.tokenizer.fingerprint if self.tokenizer else f"raw token ids below {worker.vocab_size}"
        self.history = history if isinstance(history, History) else History(file or ":memory:", fingerprint)
        self.inbox = SimpleQueue()                          # functions, run by the owner between steps
        self.lock = threading.RLock()                       # guards `pending`, and what must not change while it is looked at
        self.pending: dict[str, list[Handle]] = {}          # by conversation: turns that are not in the history yet, in order
        self.stepping = threading.RLock()                   # held by the owner
        self.thread, self.failure = None, None
        self.failures = 0                                   # of the worker, in a row
        self.watchers = []                                  # functions that the owner shows each batch before it is executed

    # ---- the loop

    def step(self) -> Batch:
        """One iteration: schedule, execute, account. Everyone uses it, the simulation too."""
        with self.stepping, self._failing():
            self.take_inbox()
            batch = self.scheduler.schedule(self.clock())
            for watcher in self.watchers:
                watcher(batch)
            if batch or self.cache.in_flight:
                if result := self._execute(batch):
                    self.scheduler.account(batch, result, self.clock())
            self._let_go_of_the_cold()
            if self.debug:
                self.cache.check_integrity()
            return batch

    def _execute(self, batch: Batch) -> Result | None:
        """None if the worker has failed."""
        try:
            result = self.worker.execute(batch)
            self.failures = 0 if batch.spans else self.failures
            return result
        except Exception as error:
            self.failures += 1
            if self.failures == MAX_FAILURES:
                raise
            self._recover(batch, error)

    def _recover(self, batch: Batch, error: Exception):
        """After a failure of the worker nothing in the tiers is to be trusted, so all KV goes. The requests of that batch fail, the
        others are recomputed: their tokens are safe. A device that is lost fails again at once, and the engine stops."""
        traceback.print_exception(error)
        while self.worker.execute(Batch(batch.step, 0)).landed:
            pass                                             # until no copy moves any more
        for request in {span.request for span in batch.spans}:
            self.scheduler.cancel(request, self.clock(), RuntimeError(f"the worker has failed: {error!r}"))
        for request in list(self.scheduler.running):
            self.scheduler.suspend(request, self.clock())
        self.cache.drop_everything()

    def take_inbox(self, wait: bool = False):
        """Runs what others have posted: the only door for other threads."""
        try:
            while True:
                function, wait = self.inbox.get(wait), False
                with self.stepping:
                    function()
        except Empty:
            pass

    def start(self) -> "Engine":
        """Steps in a thread of its own from now on."""
        with self.stepping:
            if not self.thread:
                self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self.thread.start()
        return self

    def _run(self):
        batch = None
        while self.thread:
            self.take_inbox(wait=not (batch or self.scheduler.busy))
            batch = self.step()                              # one more when all is done: room is made while nobody waits

    @contextmanager
    def _failing(self):
        """A step that goes wrong in our own books, or beyond recovery, is the last. Everyone who waits, or will, is told why."""
        try:
            yield
        except Exception as error:
            with self.lock:
                self.failure, self.thread = RuntimeError(f"the engine has stopped: {error!r}"), None
                self.take_inbox()
                for handle in self._unsettled():
                    self._refuse(handle, self.failure)
            raise

    def _refuse(self, handle, error):
        handle.failure = error
        handle.outbox.put(None)

    def wait_for(self, outbox: SimpleQueue):
        """The next item; without a thread of the engine's own it steps until there is one."""
        while not self.thread and outbox.empty():
            if self.failure:
                raise self.failure
            self.step()
        return outbox.get()

    def call(self, function):
        """Runs a function as the owner does, between steps, and returns its result."""
        return self._outcome(self._post(function))

    def _post(self, function) -> Future:
        """The function will be run by the owner, before whatever is posted later."""
        future = Future()
        def run():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        with self.lock:                                      # so that a failing engine either runs it or is seen to have failed
            self.inbox.put(run)
        return future

    def _outcome(self, future: Future):
        if not self.thread:
            self.take_inbox()
        return future.result()

    # ---- turns

    def submit(self, prompt: list[int], conversation: str | None = None, *, max_tokens: int | None = None,
               stop: str | list[str] = (), ignore_eos: bool = False, messages: list[dict] = (), base: Turn | None = None,
               carried: int | None = None, note: dict = {}, like: Handle | None = None, **sampling) -> Handle:
        """Appends token ids to the conversation (None: a one-off, nothing is kept) and generates a reply; returns at once.
        A turn is kept when its handle is read to the end; until then later turns of its conversation are not kept either.
        max_tokens: by default as many as fit. stop: a string or several. sampling: the fields of Sampling, None for the default.
        messages: the visible ones that the ids stand for. base: where a conversation that does not exist yet branches off.
        carried: the ids are a context of their own, nothing goes on; so many of the messages are older. note: kept with the turn.
        like: a turn with the same prompt after the same tokens, which is computed once for both.
        ValueError for what cannot be served."""
        sampling = Sampling(**{name: value for name, value in sampling.items() if value is not None})
        stop = [stop] if isinstance(stop, str) else stop or []
        self._check(prompt, conversation, max_tokens, sampling, stop)
        handle = Handle(self, conversation, base, list(prompt), list(messages), carried, note,
                        dict(max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos, like=like))
        with self.lock:
            if self.failure:
                raise self.failure
            head = self._head(conversation, base) if carried is None else None
            length = (head.length if head else 0) + len(prompt)
            if length + (max_tokens or 1) > self.scheduler.limit:
                raise ValueError(f"the conversation has {length} tokens with this prompt and max_tokens is {max_tokens or 'not given'}: "
                                 f"together they exceed the limit of {self.scheduler.limit} tokens")
            self.pending.setdefault(conversation, []).append(handle)
            self.inbox.put(lambda: self._enter(handle))
        return handle

    def generate(self, prompt: list[int], conversation: str | None = None, **options) -> Reply:
        """submit and wait."""
        return self.submit(prompt, conversation, **options).result()

    def _head(self, conversation, base=None) -> Turn | None:
        """The last committed turn of a conversation; of one that does not exist yet, the turn where it branches off."""
        return (None if conversation is None else self.history.head(conversation)) or base

    def _check(self, prompt, conversation, max_tokens, sampling, stop):
        vocabulary = self.worker.vocab_size
        require(hasattr(prompt, "__len__") and len(prompt) > 0, "prompt", "a list of at least one token id", prompt)
        wrong = [token for token in [*prompt, *sampling.logit_bias] if type(token) is not int or not 0 <= token < vocabulary]
        require(not wrong, "a token id", f"an int from 0 to {vocabulary - 1}", wrong and wrong[0])
        require(conversation is None or isinstance(conversation, str), "conversation", "a string or None", conversation)
        require(max_tokens is None or type(max_tokens) is int and max_tokens >= 1, "max_tokens", "an int of at least 1", max_tokens)
        require(isinstance(stop, (list, tuple)) and all(isinstance(text, str) for text in stop), "stop", "a string or a list of strings", stop)
        require(not stop or self.tokenizer is not None, "stop", "left out, since this checkpoint has no tokenizer", stop)

    def _enter(self, handle: Handle):
        """The owner takes a handle from the inbox."""
        options, reached = handle.options, None
        if options["stop"]:
            stream = TextStream(self.tokenizer, options["stop"])
            def reached(token):
                stream.push(token)
                return stream.stopped
        try:
            conversation = self._open(handle)
        except Exception as error:                           # its base is gone, or the history's file
            return self._refuse(handle, error)
        handle.request = Request(conversation, handle.prompt, options["max_tokens"],
                                 frozenset() if options["ignore_eos"] else self.worker.stop_ids, reached, options["sampling"],
                                 handle.outbox)
        if options["like"]:
            self.cache.follow(conversation, options["like"].request.conversation)
        self.scheduler.submit(handle.request)

    def _open(self, handle):
        """A conversation that is cold lives in the history alone; one whose context starts anew, nowhere. A new branch shares what the
        conversation that it branches off has cached."""
        name = handle.conversation
        if handle.carried is not None:
            self._forget_kv(name)
            return self.cache.open(name)
        head = None if name in self.cache.conversations else self._head(name, handle.base)
        tokens = self.history.tokens(head.id) if head else ()
        parent = head and self.cache.conversations.get(head.conversation)
        return self.cache.fork(parent, name, tokens) if parent else self.cache.open(name, tokens)

    def _let_go_of_the_cold(self):
        for conversation in self.cache.cold_conversations():
            if conversation.name not in self.pending:
                self.cache.forget(conversation)

    def cancel(self, handle: Handle):
        if handle.request:
            self.scheduler.cancel(handle.request, self.clock())

    def commit(self, handle: Handle, reply: Reply) -> bool:
        """In the caller's thread, when a turn has ended. Earlier turns of the conversation first, whoever waits for them.
        False if the conversation was forgotten meanwhile."""
        if handle.conversation is None:
            return True
        self._wait_quietly(takewhile(lambda other: other is not handle, self._unsettled(handle.conversation)))
        exact = self.tokenizer is not None and self.tokenizer.decode(handle.token_ids) == handle.text
        try:
            with self.lock:
                head = self.history.head(handle.conversation)
                if handle.base and not head:
                    head = self.history.branch(handle.base.id, handle.conversation)
                if (head.length if head and handle.carried is None else 0) != handle.request.before[0]:
                    raise StaleTurn(f"conversation {handle.conversation!r} does not end where this turn began")
                self.history.commit(handle.conversation, head.id if head else None, handle.prompt, handle.token_ids, handle.messages,
                                    handle.text if handle.messages else None, exact, handle.carried,
                                    dict(handle.note, usage=reply.usage, finish_reason=reply.finish_reason), handle.id)
            return True
        except Exception as error:
            # The cache must not remember what the history does not; turns that were built on it go, too.
            self.call(lambda: self._forget_kv(handle.conversation))
            if isinstance(error, StaleTurn):
                return False
            raise

    def settled(self, handle: Handle):
        with self.lock:
            if handle.carried is not None and (not handle.reply or handle.reply.finish_reason == "cancelled"):
                self._post(lambda: self._forget_kv(handle.conversation))     # the old context, which is still the true one, is cold
            handles = self.pending[handle.conversation]
            handles.remove(handle)
            if not handles:
                del self.pending[handle.conversation]

    def forget(self, conversation: str):
        """Cancels what runs, frees both tiers and the history of a conversation."""
        require(isinstance(conversation, str), "conversation", "a string", conversation)
        self._drop(lambda handle: handle.conversation == conversation, lambda: [conversation, *self.history.forget(conversation)])

    def delete(self, turn: Turn):
        """Cancels what goes on from a turn, and frees both tiers and the history of it. If later turns build on it, it is hidden only,
        and goes with the last of them."""
        def goes_on_from_it(handle):
            head = self._head(handle.conversation, handle.base)
            return head and head.id == turn.id
        self._drop(goes_on_from_it, lambda: self.history.delete(turn.id))

    def _drop(self, concerned, drop):
        """drop: changes the history, and returns the conversations whose KV is void then; called when no turn is `concerned`."""
        while True:
            with self.lock:
                handles = list(filter(concerned, self._unsettled()))
                if not handles:
                    void = drop()
                    freed = self._post(lambda: [self._forget_kv(name) for name in void])
                    break
            for handle in handles:
                handle.cancel()
        self._outcome(freed)

    def prune(self, max_age: float, max_bytes: float):
        """Forgets idle conversations, the least recently active first, until none is older (seconds) and the history is small enough."""
        while (name := self.history.oldest(time.time() - max_age, max_bytes)) and name not in self.pending:
            self.forget(name)

    def find(self, turn_id: str) -> Handle | None:
        """The turn of that id, if it is not in the history yet."""
        return next((handle for handle in self._unsettled() if handle.id == turn_id), None)

    def _unsettled(self, *conversations) -> list[Handle]:
        """Turns that are not in the history yet, in order: of these conversations, or of all."""
        with self.lock:
            return [handle for name in conversations or list(self.pending) for handle in self.pending.get(name, ())]

    def _wait_quietly(self, handles):
        for handle in handles:
            with suppress(Exception):                        # whoever waits for that handle is told
                handle.result()

    def _forget_kv(self, name):
        if conversation := self.cache.conversations.get(name):
            for request in list(self.scheduler.unfinished.get(conversation.order, ())):
                self.scheduler.cancel(request, self.clock())
            self.cache.forget(conversation)

    # ---- what can be seen

    def stats(self) -> dict:
        def read():
            cache, scheduler = self.cache, self.scheduler
            return dict(**scheduler.stats, **cache.stats, **getattr(self.worker, "stats", dict)(), steps=scheduler.steps, slots_total=cache.num_slots, slots_free=len(cache.free_slots),
                        cpu_chunks_total=cache.num_places, cpu_chunks_free=len(cache.free_places), running=len(scheduler.running),
                        waiting=sum(map(len, scheduler.unfinished.values())) - len(scheduler.running), conversations=len(cache.conversations))
        return self.call(read)

    def close(self):
        """Cancels what runs, stops the thread, closes the history. Everything that was told to be done is kept."""
        with self.lock:
            self.failure = self.failure or RuntimeError("the engine is closed")
        for handle in self._unsettled():
            handle.cancel()
        if thread := self.thread:
            self.inbox.put(lambda: setattr(self, "thread", None))        # by the owner: until then nobody else takes the inbox
            thread.join()
        self.history.close()


def demo():
    """Two conversations, 32 slots, 3 CPU places of 4 tokens, 16 tokens a step; every look at the clock finds it a second later."""
    engine = Engine("tiny_chat", gpu_cache_tokens=32, cpu_cache_tokens=12, chunk_size=4, max_batch_tokens=16, debug=True,
                    clock=count().__next__, cost=RecomputeCost({4: 1.0, 32: 2.0}, rest=1.0))
    for turn in ("a", "b", "a", "b", "ab"):
        handles = [engine.submit(list(range(65, 72)), name, max_tokens=3, ignore_eos=True) for name in turn]
        while any(handle.request is None or not handle.request.finish_reason for handle in handles):
            print(engine.step())
        for handle in handles:
            print(f"    {handle.conversation}: {handle.result().sources}")
    engine.close()


if __name__ == "__main__":
    demo()
