"""Who steps an engine, and how all other threads reach it.

    any thread    post(function) --> | inbox | --> the owner runs it between two steps
                  call(function)     the same, and waits for its result

One thread at a time is the *owner*: it alone steps, and it alone changes the books of scheduler and
cache. After `start` the owner is a thread of the engine's own. Without it the owner is whoever
steps, waits for a handle, or calls. Then all happens in the caller's thread, so that breakpoints
and exceptions work as one expects.

Invariant: every function that was posted runs once, in the order of the posts, also when the engine
stops.
"""
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from handles import Handle
from scheduler import Request


class Closed(RuntimeError):
    """The engine was whole when it was closed."""


def stopped_by(error: BaseException) -> RuntimeError:
    """What all others are told when an error, or Ctrl-C, stops the engine."""
    return RuntimeError(f"the engine has stopped: {error!r}")


class Owner:
    """The right to step; the inbox of all other threads; the turns whose end they await."""

    def __init__(self, ended: deque[Request]):
        """ended: requests whose readers have not been told that they have ended."""
        self.ended = ended
        self.handles: dict[Request, Handle] = {}        # of the turns whose end has not been told
        self.lock = threading.RLock()                   # whoever holds it is the owner
        self.thread: threading.Thread | None = None     # the engine's own, while it is started
        self.failure: Exception | None = None           # why the engine has stopped
        self.inbox: deque[Callable[[], None]] = deque()
        self.taken = 0                                  # functions taken out of the inbox so far
        self.posted = threading.Event()                 # there may be something in the inbox
        # Held to post, and to set `failure`. So either the post comes first, and `stop` finds it in
        # the inbox; or it comes too late, and its caller gets the failure. (`call` does without: it
        # works behind a stop, too.)
        self.posting = threading.Lock()

    def post(self, function: Callable[[], None]):
        """Let the owner run a function between two steps. Raises `failure` after `stop`."""
        with self.posting:
            if self.failure:
                raise self.failure
            self._put(function)

    def call(self, function: Callable):
        """Let the owner run a function between two steps, and return its result.

        The thread of a started engine runs it. Without such a thread the caller becomes the owner
        and runs it, also when the engine has stopped. If the owner itself calls, it runs the
        function inside the current step. The caller gets the error of a function that fails; the
        engine goes on."""
        def run():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:      # Ctrl-C in the owner's thread: the engine stops
                future.set_exception(stopped_by(error))
                raise
        future = Future()
        self._put(run)
        if self.thread in (None, threading.current_thread()):
            self.take_inbox()                           # nobody else would
        return future.result()

    def _put(self, function: Callable[[], None]):
        self.inbox.append(function)
        self.posted.set()

    def take_inbox(self):
        """Run what was posted before this call, in the order of the posts. Later posts wait for the
        next call: however fast others post, the owner goes on with its step."""
        with self.owning():
            self.posted.clear()         # first: a later post sets it again
            last = self.taken + len(self.inbox)
            while self.taken < last:    # not `for`: a function may itself call take_inbox
                self.taken += 1
                self.inbox.popleft()()
                self.tell_ended()

    def tell_ended(self):
        """Tell the readers of all turns that have ended. The books must be whole: an on_end may
        call the engine."""
        while self.ended:
            if handle := self.handles.pop(self.ended.popleft(), None):  # None: `stop` has told it
                handle.end()

    @contextmanager
    def owning(self):
        """The caller waits until nobody else is the owner, and is the owner until the block ends.
        An error in the block stops the engine. So does Ctrl-C, which may come when the books are
        half written."""
        with self.lock:
            try:
                yield
            except BaseException as error:
                self.stop(stopped_by(error))
                raise

    def start(self, run: Callable[[], None]):
        """From now on a thread of the engine's own is the owner. It calls run(), which returns when
        `thread` has become None."""
        with self.lock:
            if self.failure:
                raise self.failure
            if not self.thread:
                self.thread = threading.Thread(target=run, name="engine", daemon=True)
                self.thread.start()

    def close(self, cancel_all: Callable[[], None]):
        """Let the owner cancel all turns, then stop."""
        def close():
            cancel_all()
            self.tell_ended()
            self.stop(Closed("the engine is closed"))
        thread = self.thread
        self.call(close)
        if thread not in (None, threading.current_thread()):        # an on_end may close the engine
            thread.join()

    def stop(self, failure: Exception):
        """The owner calls this: every turn that has not been told its end fails, and nobody can
        post any more."""
        with self.posting:          # first: from here on no on_end can post
            self.failure, self.thread = self.failure or failure, None
        self.ended.clear()          # what ended in the step that failed, fails as well
        while self.handles:
            _, handle = self.handles.popitem()
            with suppress(Exception):   # of its on_end: the others are told all the same
                handle.end(self.failure)
        self.take_inbox()           # for those who posted while there was a thread, and rely on it
