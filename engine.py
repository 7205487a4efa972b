"""The in-process API, the configuration, and the one step loop (paper §4.1).

    submit -> inbox -> | step: schedule, execute, account | -> outbox -> handle -> history
                         the owner's thread                    the caller's thread

One owner steps; everyone else posts to the inbox and waits on an outbox. Without `start()` the owner is whoever waits for a
handle: the steps run in the caller's thread, so breakpoints and exceptions work as one expects. A turn that has ended is
committed to the history by its caller, and only then told to be done.

Invariant: the answer never depends on the cache. Any sizes, policy and interleaving give the tokens of a full recompute.

`python engine.py` plays two conversations under starved tiers and prints each step's batch."""
import argparse
import math
import random
import threading
import time
import uuid
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import count, takewhile
from pathlib import Path
from queue import Empty, SimpleQueue

from eviction import POLICIES, RecomputeCost
from history import History, StaleTurn, Turn
from kv_cache import KVCache
from model import find_checkpoint
from scheduler import SOURCES, Batch, Request, Scheduler
from tokenizer import TextStream, load_tokenizer
from worker import Sampling, load_worker


def require(ok: bool, name: str, what: str, value):
    if not ok:
        raise ValueError(f"{name} must be {what}, got {value!r}")


def flag(default, help: str, choices=None):
    return field(default=default, metadata=dict(help=help, choices=choices))


@dataclass(frozen=True)
class Config:
    """Every flag of server.py and bench.py, and every keyword of Engine, in one place."""
    model: str = flag("tiny_chat", "a checkpoint's directory, a hub name, or with --random-weights a preset")
    random_weights: bool = flag(False, "do not load the model's weights, make some up (for measuring)")
    device: str = flag("auto", "where model and first tier are", ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "of weights and cache; auto: bfloat16 on CUDA, float32 elsewhere", ("auto", "float32", "float16", "bfloat16"))
    gpu_cache_tokens: int = flag(None, "slots of the first tier; by default what memory allows")
    cpu_cache_tokens: int = flag(None, "size of the second tier, in whole chunks; 0: none (the paper's GPU cache variant)")
    chunk_size: int = flag(32, "tokens moved and evicted together")
    max_batch_tokens: int = flag(512, "tokens computed in one step")
    max_running: int = flag(64, "requests served at once")
    swap_threshold: float = flag(0.25, "share of the slots to keep available by copying ahead of time; 0: only on demand")
    reserve: float = flag(0.10, "share of the slots that admission leaves for the growth of running requests")
    policy: str = flag("retention", "what leaves first", tuple(POLICIES))
    stateless: bool = flag(False, "forget all KV at the end of each request, as other servers do")
    separate_phases: bool = flag(False, "never mix prefill and decode in a batch")
    no_pipeline: bool = flag(False, "wait for all of a swap-in before the model starts")
    history: str = flag(None, "file that keeps every conversation's turns; in-process default: memory only")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser):
        for entry in fields(cls):
            name, text = "--" + entry.name.replace("_", "-"), entry.metadata["help"]
            if entry.type is bool:
                parser.add_argument(name, action="store_true", help=text)
            else:
                shown = "" if entry.default is None else f" (default: {entry.default})"
                parser.add_argument(name, type=entry.type, default=entry.default, choices=entry.metadata["choices"], help=text + shown)

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> dict:
        """The keywords of Engine among parsed arguments."""
        return {entry.name: getattr(arguments, entry.name) for entry in fields(cls)}

    def __post_init__(self):
        for name, least in dict(gpu_cache_tokens=1, cpu_cache_tokens=0, chunk_size=1, max_batch_tokens=1, max_running=1).items():
            if (value := getattr(self, name)) is not None:
                require(type(value) is int and value >= least, name, f"an int of at least {least}", value)
        for name in ("swap_threshold", "reserve"):
            require(0 <= getattr(self, name) < 1, name, "a share of the slots, at least 0 and below 1", getattr(self, name))
        for entry in fields(self):
            if choices := entry.metadata["choices"]:
                require(getattr(self, entry.name) in choices, entry.name, f"one of {', '.join(choices)}", getattr(self, entry.name))


@dataclass(frozen=True)
class Reply:
    text: str                   # without special tokens and the stop string; empty where there is no tokenizer
    token_ids: list[int]        # everything sampled, a stop token included
    finish_reason: str          # "stop" | "length" | "cancelled"
    usage: dict                 # prompt_tokens, completion_tokens, gpu, cpu, recomputed, new

    @property
    def sources(self) -> str:
        """Where the context came from: gpu 96 · cpu 64 · recomputed 32 · new 14"""
        return " · ".join(f"{source} {self.usage[source]}" for source in SOURCES)


class Handle:
    """A submitted turn. Iterate it for tokens, `pieces()` for text, `result()` for the Reply; any number of times."""

    def __init__(self, engine: "Engine", conversation: str | None, base: Turn | None, prompt: list[int], messages: list[dict], options: dict):
        self.engine, self.conversation, self.base = engine, conversation, base
        self.prompt, self.messages, self.options = prompt, messages, options
        self.lock, self.outbox = threading.Lock(), SimpleQueue()
        self.request, self.failure = None, None              # one of them is set by the engine's owner
        self.stream = TextStream(engine.tokenizer, options["stop"]) if engine.tokenizer else None
        self.token_ids, self.text = [], ""
        self.reply, self.error = None, None
        self.submitted, self.first_token_seconds = time.monotonic(), None

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
                    self.first_token_seconds = self.first_token_seconds or time.monotonic() - self.submitted
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
            kept = request.finish_reason != "cancelled" and self.engine.commit(self)
            sources = request.usage or dict.fromkeys(SOURCES, 0)
            usage = dict(prompt_tokens=sum(sources.values()), completion_tokens=len(self.token_ids), **sources)
            self.reply = Reply(self.text, self.token_ids, request.finish_reason if kept else "cancelled", usage)
        except Exception as error:
            self.error = error
        finally:
            self.engine.settled(self)


class Engine:
    """A model, its two tiers, and every conversation that it was told. Close it when done."""

    def __init__(self, model: str | Path = "tiny_chat", *, worker=None, cost: RecomputeCost | None = None, clock=time.monotonic,
                 history: History | str | Path | None = None, debug: bool = False, **flags):
        """flags: the fields of Config. worker, clock: a simulation's. cost: a profile made earlier; by default it is measured now.
        debug: check_integrity() after every step."""
        file = None if history is None or isinstance(history, History) else str(history)
        self.config = config = Config(model=str(model), history=file, **flags)
        self.clock, self.debug = clock, debug
        directory = None if worker or config.random_weights else find_checkpoint(config.model)
        self.tokenizer = load_tokenizer(directory) if directory else None
        self.worker = worker = worker or load_worker(config, directory)
        policy = POLICIES[config.policy](cost or worker.profile(), config.chunk_size)
        self.cache = KVCache(worker.num_slots, worker.num_places, config.chunk_size, config.max_running, worker.max_context, policy)
        self.scheduler = Scheduler(self.cache, worker.max_context, config.max_batch_tokens, config.swap_threshold, config.reserve,
                                   config.stateless, config.separate_phases)
        fingerprint = self.tokenizer.fingerprint if self.tokenizer else f"raw token ids below {worker.vocab_size}"
        self.history = history if isinstance(history, History) else History(file or ":memory:", fingerprint)
        self.inbox = SimpleQueue()                          # functions, run by the owner between steps
        self.lock = threading.RLock()                       # guards `pending`, and what must not change while it is looked at
        self.pending: dict[str, list[Handle]] = {}          # by conversation: turns that are not in the history yet, in order
        self.stepping = threading.RLock()                   # held by the owner
        self.thread, self.failure = None, None

    # ---- the loop

    def step(self) -> Batch:
        """One iteration: schedule, execute, account. Everyone uses it, the simulation too."""
        with self.stepping, self._failing():
            self.take_inbox()
            batch = self.scheduler.schedule(self.clock())
            if batch or self.cache.in_flight:
                result = self.worker.execute(batch)
                for request, token in self.scheduler.account(batch, result, self.clock()):
                    request.outbox.put(token)
            self._let_go_of_the_cold()
            if self.debug:
                self.cache.check_integrity()
            return batch

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
        """A step that goes wrong is the last: what is in the tiers is not to be trusted. Everyone who waits, or will, is told why."""
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
        future = Future()
        def run():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        with self.lock:                                      # so that a failing engine either runs it or is seen to have failed
            self.inbox.put(run)
        if not self.thread:
            self.take_inbox()
        return future.result()

    # ---- turns

    def submit(self, prompt: list[int], conversation: str | None = None, *, max_tokens: int | None = None, temperature: float = 0.0,
               top_k: int | None = None, top_p: float | None = None, seed: int | None = None, stop: str | list[str] = (),
               ignore_eos: bool = False, messages: list[dict] = (), base: Turn | None = None) -> Handle:
        """Appends token ids to the conversation (None: a one-off, nothing is kept) and generates a reply; returns at once.
        A turn is kept when its handle is read to the end; until then later turns of its conversation are not kept either.
        max_tokens: by default as many as fit. temperature 0 is greedy; seed None is a new one. stop: a string or several.
        messages: the visible ones that the ids stand for. base: where a conversation that does not exist yet branches off.
        ValueError for what cannot be served."""
        sampling = Sampling(temperature or 0.0, top_k or 0, 1.0 if top_p is None else top_p,
                            random.getrandbits(32) if seed is None else seed)
        stop = [stop] if isinstance(stop, str) else stop or []
        self._check(prompt, conversation, max_tokens, sampling, stop)
        handle = Handle(self, conversation, base, list(prompt), list(messages),
                        dict(max_tokens=max_tokens, sampling=sampling, stop=stop, ignore_eos=ignore_eos))
        with self.lock:
            if self.failure:
                raise self.failure
            head = self._head(conversation, base)
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

    def chat(self, text: str, conversation: str | None = None, **options) -> Reply:
        """Text in, text out, through the chat template. Only the new message is tokenised."""
        handle = None
        while handle is None:
            with self.lock:
                earlier = [] if conversation is None else self._unsettled(conversation)
                if not earlier:
                    head = self._head(conversation)
                    before = self.history.messages(head.id) if head else []
                    handle = self._submit_turn(before, [dict(role="user", content=text)], head, conversation, options)
            self._wait_quietly(earlier)                      # what the template still owes depends on how their replies end
        return handle.result()

    def submit_chat(self, messages: list[dict], hint: str | None = None, **options) -> Handle:
        """A client resends the visible history and new messages. The longest part that is remembered is continued: in its
        conversation if that ends there and is idle, else in a new branch. hint: the name that the client gives to its
        conversation: it decides between equals and names a new conversation, it opens nothing."""
        with self.lock:
            turn, matched = self.history.match(messages, hint) or (None, 0)
            if turn and turn.conversation not in self.pending and self.history.head(turn.conversation) == turn:
                name = turn.conversation
            else:
                taken = hint is None or hint in self.pending or self.history.head(hint)
                name = f"conv_{uuid.uuid4().hex}" if taken else hint
            return self._submit_turn(messages[:matched], messages[matched:], turn, name, options)

    def _submit_turn(self, before, new, turn, name, options):
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer: it serves token ids only, use generate()")
        prompt = self.tokenizer.turn(before, new, turn.last_token if turn else None)
        return self.submit(prompt, name, messages=new, base=turn, **options)

    def _head(self, conversation, base=None) -> Turn | None:
        """The last committed turn of a conversation; of one that does not exist yet, the turn where it branches off."""
        return (None if conversation is None else self.history.head(conversation)) or base

    def _check(self, prompt, conversation, max_tokens, sampling, stop):
        vocabulary, (temperature, top_k, top_p, seed) = self.worker.vocab_size, sampling
        require(hasattr(prompt, "__len__") and len(prompt) > 0, "prompt", "a list of at least one token id", prompt)
        for token in prompt:
            require(type(token) is int and 0 <= token < vocabulary, "a token id", f"an int from 0 to {vocabulary - 1}", token)
        require(conversation is None or isinstance(conversation, str), "conversation", "a string or None", conversation)
        require(max_tokens is None or type(max_tokens) is int and max_tokens >= 1, "max_tokens", "an int of at least 1", max_tokens)
        require(type(temperature) in (int, float) and 0 <= temperature < math.inf, "temperature", "a number of at least 0", temperature)
        require(type(top_k) is int and top_k >= 0, "top_k", "an int of at least 0", top_k)
        require(type(top_p) in (int, float) and 0 < top_p <= 1, "top_p", "above 0 and at most 1", top_p)
        require(type(seed) is int, "seed", "an int", seed)
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
            conversation = self._open(handle.conversation, handle.base)
        except Exception as error:                           # its base is gone, or the history's file
            return self._refuse(handle, error)
        handle.request = Request(conversation, handle.prompt, options["max_tokens"],
                                 frozenset() if options["ignore_eos"] else self.worker.stop_ids, reached, options["sampling"], handle.outbox)
        self.scheduler.submit(handle.request)

    def _open(self, name, base):
        """A conversation that is cold lives in the history alone."""
        head = None if name in self.cache.conversations else self._head(name, base)
        return self.cache.open(name, self.history.tokens(head.id) if head else ())

    def _let_go_of_the_cold(self):
        for conversation in list(self.cache.cold.values()):
            if conversation.name not in self.pending:
                self.cache.forget(conversation)

    def cancel(self, handle: Handle):
        if handle.request:
            self.scheduler.cancel(handle.request, self.clock())

    def commit(self, handle: Handle) -> bool:
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
                if (head.length if head else 0) != handle.request.before[0]:
                    raise StaleTurn(f"conversation {handle.conversation!r} does not end where this turn began")
                self.history.commit(handle.conversation, head.id if head else None, handle.prompt, handle.token_ids, handle.messages,
                                    handle.text if handle.messages else None, exact)
            return True
        except Exception as error:
            # The cache must not remember what the history does not; turns that were built on it go, too.
            self.call(lambda: self._forget_kv(handle.conversation))
            if isinstance(error, StaleTurn):
                return False
            raise

    def settled(self, handle: Handle):
        with self.lock:
            handles = self.pending[handle.conversation]
            handles.remove(handle)
            if not handles:
                del self.pending[handle.conversation]

    def forget(self, conversation: str):
        """Cancels what runs, frees both tiers and the history of a conversation."""
        require(isinstance(conversation, str), "conversation", "a string", conversation)
        for handle in self._unsettled(conversation):
            handle.cancel()
        self.call(lambda: (self._forget_kv(conversation), self.history.forget(conversation)))

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
            for request in list(self.scheduler.turns.get(conversation.order, ())):
                self.scheduler.cancel(request, self.clock())
            self.cache.forget(conversation)

    # ---- what can be seen

    def stats(self) -> dict:
        def read():
            cache, scheduler = self.cache, self.scheduler
            return dict(**scheduler.stats, **cache.stats, steps=scheduler.steps, slots_total=cache.num_slots, slots_free=len(cache.free_slots),
                        cpu_chunks_total=cache.num_places, cpu_chunks_free=len(cache.free_places), running=len(scheduler.running),
                        waiting=sum(map(len, scheduler.turns.values())) - len(scheduler.running), conversations=len(cache.conversations))
        return self.call(read)

    def cached_conversations(self) -> list[dict]:
        """Every conversation that has KV: a letter per chunk, G for GPU, B for both tiers, C for CPU, . for absent."""
        letters = {"GPU": "G", "GPU_AND_CPU": "B", "CPU": "C"}
        def read():
            now = self.clock()
            return [dict(id=c.name, tokens=len(c.tokens), running=c.row is not None, waiting=c.waiting,
                         idle_seconds=round(now - c.last_active, 3), chunks="".join(letters[chunk.state] if chunk else "." for chunk in c.chunks))
                    for c in self.cache.conversations.values() if c.cached]
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
