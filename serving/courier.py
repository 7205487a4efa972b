"""One thread carries the new text of all streams to their clients, and looks after all answers.

    engine --> Outbox --rings--> `ready` --> the courier --> sockets
                                                |
                 the end, a slow client, an error: back to the stream's own thread

A connection's own thread begins and ends a stream. While the turn is live, that thread sleeps, and
the courier sends what is new. (256 threads that wake for each token keep Python's lock for longer
than a step of 5 ms takes.)

Invariant: the courier never waits for a client. If a client does not take a piece at once, its
stream goes back to its own thread, which may wait. So a slow client delays nobody, and we hold no
more of its answer than this piece.
"""
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from handles import Outbox

POLL_SECONDS = 0.1          # between two looks at what no event tells us, as a hang-up
KEEPALIVE_SECONDS = 15      # of silence in a stream


class Courier:
    """The thread."""

    def __init__(self):
        self.ready: SimpleQueue[Delivery] = SimpleQueue()   # there is news for these
        # Called again and again. A check must not wait for anything, and only the courier calls it.
        self.checks: set[Callable[[], None]] = set()
        self.closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, connection: socket.socket, pieces: Iterator[bytes | Outbox],
              still_here: Callable[[], bytes]) -> bytes:
        """Sends the pieces of a stream until the caller must go on: it may have to wait, for the
        client or for the end of the turn. Returns bytes that it must send first. Raises what went
        wrong.

        pieces: yields an outbox when nothing is new until that one rings. still_here: makes a piece
        to send when the stream has been silent for long: else a proxy or the client might close it.
        (Coding agents do so after four or five minutes, and count events only, no comments.)"""
        delivery = Delivery(connection, pieces, still_here, self.ready)
        self.checks.add(delivery.check)
        self.ready.put(delivery)
        delivery.over.wait()
        self.checks.discard(delivery.check)
        if delivery.error:
            raise delivery.error
        return delivery.unsent

    def close(self):
        """The thread ends after the answers that are at work."""
        self.closed.set()

    def _run(self):
        next_check = 0.0
        while self.checks or not self.closed.is_set():
            with suppress(Empty):
                self.ready.get(timeout=POLL_SECONDS).go_on()
            if time.monotonic() > next_check:
                self._check_all()
                next_check = time.monotonic() + POLL_SECONDS

    def _check_all(self):
        for check in list(self.checks):
            try:
                check()
            except RuntimeError:            # the system gives us no more threads: try again
                pass
            except Exception:               # we look after the other answers all the same
                self.checks.discard(check)
                traceback.print_exc()


class Delivery:
    """A stream while the courier has it. It is also the bell that hangs on the stream's outbox:
    like a lock on which a reader sleeps, it is released when there is news."""

    def __init__(self, connection: socket.socket, pieces: Iterator[bytes | Outbox],
                 still_here: Callable[[], bytes], ready: "SimpleQueue[Delivery]"):
        """See Courier.carry."""
        self.connection, self.pieces, self.still_here = connection, pieces, still_here
        self.ready = ready
        self.over = threading.Event()           # the stream is its own thread's again
        self.unsent = b""
        self.error: Exception | None = None
        self.last_sent = time.monotonic()

    def release(self):
        """The outbox rings."""
        self.ready.put(self)

    def go_on(self):
        """Sends what is new. If the pieces are "Hi", box, box, it sends "Hi", hangs its bell on the
        box, looks once more, and returns: the stream stays the courier's. But a closed box, or a
        client that does not take all, makes it `over`."""
        if self.over.is_set():                  # a bell that rang late: its own thread has it again
            return
        outbox = None
        try:
            for piece in self.pieces:
                if isinstance(piece, bytes):
                    if not self._send(piece):
                        break
                elif piece.closed.is_set():
                    break
                elif piece is outbox:           # nothing came before our bell hung there
                    return
                else:
                    outbox = piece
                    outbox.bells.append(self)   # then we look once more
        except Exception as error:
            self.error = error
        self.over.set()

    def check(self):
        if time.monotonic() > self.last_sent + KEEPALIVE_SECONDS and not self.over.is_set():
            try:
                if self._send(self.still_here()):
                    return
            except OSError as error:            # the client is gone
                self.error = error
            self.over.set()

    def _send(self, piece: bytes) -> bool:
        """True if the client takes the whole piece at once."""
        with suppress(BlockingIOError):
            piece = piece[os.write(self.connection.fileno(), piece):]
        self.unsent, self.last_sent = piece, time.monotonic()
        return not piece
