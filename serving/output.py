"""Lines that nobody waits for: a log must never cost an answer.

A terminal may know only ASCII, a disk may be full, and the reader of a pipe may have gone or
stopped reading. In a server that prints as usual, such a line fails or blocks the turn that it
tells of. So the server prints into a queue (one for stdout, one for stderr), and a thread writes
what is in it. A line that cannot be written is lost.
"""
import atexit
import io
import os
import queue
import threading
import time
from contextlib import suppress
from typing import TextIO

MOST_PIECES = 10_000        # may wait to be written; more are lost
LAST_SECONDS = 1            # for the pieces that still wait when the process ends


class PatientStream(io.TextIOBase):
    """In place of sys.stdout or sys.stderr: write() never waits and never fails."""

    def __init__(self, stream: TextIO | None):
        """stream: None if the process was started without it."""
        self._stream = stream or open(os.devnull, "w")
        self._stream.flush()
        self._waiting = queue.Queue(MOST_PIECES)
        threading.Thread(target=self._write_all, daemon=True).start()
        atexit.register(self._wait_for_the_last)

    def write(self, text: str) -> int:
        with suppress(queue.Full):
            self._waiting.put_nowait(text.encode(self._stream.encoding, "backslashreplace"))
        return len(text)

    def _write_all(self):
        while True:
            data = self._waiting.get()
            with suppress(OSError):
                while data:
                    data = data[os.write(self._stream.fileno(), data):]
            self._waiting.task_done()

    def _wait_for_the_last(self):
        deadline = time.monotonic() + LAST_SECONDS
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
