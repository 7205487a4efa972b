"""What a client holds of a submitted turn: it reads the tokens, waits for the reply, or cancels.

    the owner                       any threads
    append an item, ring  -->  |        |  -->  wake, read the new items
    close                 -->  | Outbox |  -->  wake, see that it is closed

Readers take nothing away: any number of threads may read a handle or an outbox, any number of
times. They hold no lock, since a list of Python can be read while one thread appends to it.

Invariant: whoever waits is woken, by the next item or by the end.
"""
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from scheduler import SOURCES, Request

StepUntil = Callable[[Callable[[], bool]], None]    # see Engine.step_until


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]        # all generated tokens, a stop token included
    finish_reason: str          # "stop" | "length" | "cancelled"
    # prompt_tokens (of the whole context), completion_tokens, gpu, cpu, recomputed, new
    usage: dict[str, int]
    logprobs: list | None       # see Handle.logprobs

    @property
    def sources(self) -> str:
        """Where the context's KV-tokens came from: gpu 96 · cpu 64 · recomputed 32 · new 14"""
        return " · ".join(f"{source} {self.usage[source]}" for source in SOURCES)


class Bell(Protocol):
    def release(self) -> None:
        """It rings, once."""


class Outbox:
    """A list that grows until it is closed. The owner writes it, any number of threads read it."""

    def __init__(self, step_until: StepUntil, items: list | None = None):
        """step_until: the engine's. items: a list to which the owner appends, before it rings."""
        self.step_until = step_until
        self.items = [] if items is None else items
        self.closed = threading.Event()
        # One bell for each sleeping reader. For most it is a lock that the reader waits for: to
        # release it is the fastest way to wake a thread; a Condition takes longer.
        self.bells: list[Bell] = []

    def put(self, item):
        self.items.append(item)
        self.ring()

    def close(self):
        self.closed.set()
        self.ring()

    def ring(self):
        """Wake all sleeping readers."""
        while self.bells:
            self.bells.pop().release()

    def wait_closed(self, seconds: float | None = None) -> bool:
        """Return when the outbox is closed, or after so many seconds. True if it is closed."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        self.step_until(lambda: self.closed.is_set() or time.monotonic() >= end)
        return self.closed.wait(None if seconds is None else max(0.0, end - time.monotonic()))

    def wait_beyond(self, seen: int):
        """Return when there are more than `seen` items, or the outbox is closed."""
        def ready():
            return len(self.items) > seen or self.closed.is_set()
        self.step_until(ready)
        while not ready():
            bell = threading.Lock()
            bell.acquire()
            self.bells.append(bell)
            # The owner appends, then rings. The reader hangs up its bell, then looks once more. If
            # it does not see the new item, the owner sees the bell.
            if not ready():
                bell.acquire()                      # sleep until the owner releases it

    def news(self, wait: bool = True) -> Iterator[list]:
        """Yield all items in order, each time as many as are new, until the outbox is closed.
        wait=False: yield an empty list when nothing is new, and one after the last item, when the
        outbox is closed."""
        seen = 0
        while True:
            if wait:
                self.wait_beyond(seen)
            closed, new = self.closed.is_set(), self.items[seen:]
            if new or not wait:
                yield new
            if closed and not new:
                return
            seen += len(new)


class Handle:
    """A submitted turn. Iterate it for tokens, or wait for its `result()`."""

    def __init__(self, request: Request, conversation: str | None, submitted: float,
                 step_until: StepUntil, cancel: Callable[[], None],
                 on_end: Callable[["Handle"], None] | None):
        self.request, self.conversation, self.submitted = request, conversation, submitted
        self._cancel, self.on_end = cancel, on_end
        self.tokens = Outbox(step_until, request.generated)
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
        """End the turn early: the conversation's tokens become what they were before. It has ended
        when this returns. Its finish_reason is "cancelled", unless it was complete already."""
        self._cancel()
        self.tokens.wait_closed()

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far."""
        return self.request.generated

    @property
    def logprobs(self) -> list | None:
        """For each of the tokens so far (its log probability, [(token id, log probability), ...] of
        the most likely tokens). None if they were not asked for."""
        if self.request.sampling.logprobs is None:
            return None
        return self.request.logprobs[:len(self.token_ids)]

    @property
    def prompt_logprobs(self) -> list | None:
        """The same for each token of the prompt, once it is computed; None for a token of which
        nothing is known, such as the first. None if they were not asked for."""
        request = self.request
        if request.sampling.prompt_logprobs is None:
            return None
        return [request.prompt_logprobs.get(index) for index in range(len(request.prompt))]

    def end(self, error: Exception | None = None):
        """The owner calls this when the turn is over: the readers are told."""
        request = self.request
        self.error = error or request.error
        if not self.error:
            sources = request.usage or dict.fromkeys(SOURCES, 0)    # zeros: it was never admitted
            usage = dict(prompt_tokens=sum(sources.values()), completion_tokens=len(self.token_ids),
                         **sources)
            self.reply = Reply(self.token_ids, request.finish_reason, usage, self.logprobs)
        self.tokens.close()
        if self.on_end:
            self.on_end(self)
        # Both may belong to an object that keeps this handle. Such a circle would stay in memory
        # until a garbage collection.
        self.on_end = request.reached_stop = None
