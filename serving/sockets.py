"""HTTP over serving/openai_api.py: connections, requests, answers, and the limits of all of them.

    client -> Handler (a thread per connection) -> API -> engine (one thread) -> Writer -> client

While a turn is live, one thread sends the new text of all streams: see courier.py.

After each answer the server prints where the tokens of its context came from:

    gpu 96 · cpu 64 · recomputed 32 · new 14 · first token 9 ms

The server promises:
- A client hears that its turn is done only after the history has stored the turn. If the client
  hangs up, or does not read its answer, the server cancels the turn.
- No client can hold the server up. A request must arrive within one deadline and have a body of
  limited size. A connection too many gets a 503 at once; a turn too many gets a 429.
- Nothing that belongs to one API key exists for another.
"""
import dataclasses
import json
import re
import secrets
import select
import socket
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.message import Message as Headers
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from handles import Outbox
from scheduler import TooLong
from serving import live
from serving.courier import POLL_SECONDS, Courier
from serving.guard import ALL_KEYS, Guard, page_policy
from serving.history import StaleTurn
from serving.metrics import Metrics, stats_of
from serving.openai_api import API, Writer, as_api_error
from serving.operations import (APIError, Fields, GeneratingBody, Operation, ReplyBody,
                                ResponseBody, find_operation, openapi, parse)
from serving.sessions import Answer, Answering, LiveTurn, Sessions

MAX_BODY_BYTES = 2 * 2**20
MAX_HEAD_BYTES = 2**16      # of all header lines
LARGE_BYTES = 2**17         # of a body: its JSON takes milliseconds to read
RESTS = 3                   # seconds of rest for each second of reading, or shortening a history
HEADER_LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r?\n")
SURROGATE = re.compile(rb"(?i)\\ud[89a-f]")          # in JSON
DECODERS = dict(gzip=31, deflate=15)        # Content-Encoding -> zlib's name for it
REQUEST_SECONDS = 30        # for a request to begin, and then as many for its rest to arrive
WRITE_SECONDS = 30          # for a client to take a piece of our answer, or to send us more bytes
PIECE_BYTES = 2**16         # of an answer
STUCK_SECONDS = 10          # without a step, though there is something to do
DRAIN_SECONDS = 30          # for the requests at work to be answered, once the server is to stop
LINGER_SECONDS = 2          # for a client that still sends when we have answered
MOST_REFUSED = 100          # connections, for which we linger at the same time
TURNS_SHOWN = 100           # at /cache
MAX_WATCHERS = 32           # of the live picture
MAX_IGNORED = 1000          # names of fields, that the log has named
REQUEST_ID = re.compile("[!-~]{1,200}")             # that we send back
SESSION_HEADERS = "X-Session-ID", "X-Session-Affinity", "session_id"     # vLLM's, routers', agents'
TOO_MANY_CONNECTIONS = (b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                        b"Content-Length: 0\r\nConnection: close\r\n\r\n")
# Handler answers these, and API all others.
SERVER_OPERATIONS = {"health", "metrics", "openapi", "chat_page", "cache", "cache_events"}
HUNG_UP = ConnectionError, TimeoutError     # there is no client left to answer


class Drained(Exception):
    """The server has stopped answering, and may leave serve_forever()."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. A client that connects before a Server accepts waits until then.
    OSError if we cannot listen at that address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"we cannot listen at {host}:{port}: {error.strerror}; "
                      "use another --host or --port") from error
    return listener


class Server(ThreadingHTTPServer):
    """Accepts connections, within limits, and counts the turns that run or wait."""
    daemon_threads = True

    def __init__(self, listener: socket.socket, sessions: Sessions, api_keys: Sequence[str] = (),
                 max_waiting: int = 256, max_connections: int = 800,
                 allow_origins: Sequence[str] = (), history_max_bytes: float = float("inf"),
                 metrics_key: str | None = None, strict: bool = False):
        """listener: see listen. sessions: started. max_waiting: turns that may wait while
        max_running others run. api_keys, allow_origins, metrics_key: see Guard. strict: refuse
        fields that we do not know, instead of ignoring them. ValueError for a key or an origin that
        cannot be used."""
        self.sessions, self.engine = sessions, sessions.engine
        config = self.engine.config
        address = listener.getsockname()
        self.guard = Guard(address[0], api_keys, allow_origins, metrics_key)
        self.model_names = Path(config.model).resolve().name, config.model
        self.api = API(sessions, self.model_names)
        self.private = len(self.guard.keys) > 1             # no key may learn about another's turns
        self.bytes_of_each_key = history_max_bytes / len(self.guard.prefixes)   # in the history
        whole = Metrics(partial(self.between_steps, partial(stats_of, self.engine)),
                        self.model_names[0])
        self.metrics = {prefix: Metrics(None, self.model_names[0]) if self.private else whole
                        for prefix in self.guard.prefixes} | {ALL_KEYS: whole}
        self.broadcast = live.Broadcast(self.engine, self.private)
        self.watchers = threading.BoundedSemaphore(MAX_WATCHERS)
        self.recent_turns = deque(maxlen=TURNS_SHOWN)       # these are done; /cache shows them
        self.reading = threading.Lock()                     # held to read a large body; guards
        self.next_reading = 0.0                             # when the next one may be read
        self.shortening = threading.Lock()                  # held to rest from shortening a history
        self.strict = strict
        self.lock = threading.Lock()                        # guards the next two
        self.ignored: set[str] = set()                      # fields that the log has named
        self.unsettled = Counter()                          # turns that run or wait, by prefix
        self.most_turns = config.max_running + max_waiting
        self.connections = threading.BoundedSemaphore(max_connections)
        self.deadlines: dict[socket.socket, float] = {}     # of the requests that are arriving
        self.at_work: set[socket.socket] = set()            # their requests are not answered yet
        self.refused: deque[tuple[float, socket.socket]] = deque()  # when to close which connection
        self.stop_at: float | None = None                   # set when the server begins to drain
        self.steps, self.last_step = 0, time.monotonic()    # of the engine; when we saw the last
        self.courier = Courier()
        self.stateless: Sessions | None = None    # --demo: it answers our turns without memory
        self.example: list[list[str]] | None = None     # --demo: see example.py
        super().__init__(address, Handler, bind_and_activate=False)
        self.socket.close()                                 # http.server has made one
        self.socket = listener

    @property
    def url(self) -> str:
        host, port, *_ = map(str, self.server_address)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # ---- limits, and the end

    def get_request(self):
        try:
            return super().get_request()
        except OSError:    # perhaps the system gives us no more descriptors
            time.sleep(POLL_SECONDS)                        # http.server tries again at once
            raise

    def process_request(self, request, client_address):
        if self.connections.acquire(blocking=False):
            try:
                return super().process_request(request, client_address)
            except RuntimeError:                            # the system gives us no more threads
                self.connections.release()
        with suppress(OSError):
            request.setblocking(False)                      # the thread that accepts must not wait
            request.send(TOO_MANY_CONNECTIONS)
            request.shutdown(socket.SHUT_WR)
        self.refused.append((time.monotonic() + LINGER_SECONDS, request))

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.deadlines.pop(request, None)
            self.at_work.discard(request)
            self.connections.release()

    @contextmanager
    def counted(self, prefix: str, turns: int) -> Iterator[Callable[[], None]]:
        """Counts so many turns as unsettled. Yields a function that frees the place of one of
        them: a turn that has settled needs none, though a slow client still takes its answer.

        APIError if that would be too many. If there are several API keys, a key may have no more
        places than it leaves free: of 10 places it gets 5, and the other 5 are for the others.
        Without keys one client may have all 10."""
        with self.lock:
            if turns > self.most_turns:                     # it would never have places
                raise APIError(400, f"a request may ask for {self.most_turns} replies at most, got "
                                    f"{turns}", "n")
            free = self.most_turns - self.unsettled.total()
            if turns and turns + (self.unsettled[prefix] if self.private else 0) > free:
                raise APIError(429, f"at most {self.most_turns} turns may run or wait: try again "
                                    "in a moment", code="rate_limit_exceeded")
            self.unsettled[prefix] += turns
        places = [prefix] * turns

        def free_one():
            with self.lock, suppress(IndexError):
                self.unsettled[places.pop()] -= 1
        try:
            yield free_one
        finally:
            for _ in range(turns):
                free_one()

    def first_ignored(self, names: set[str]) -> list[str]:
        """Those of the names that we ignore for the first time."""
        with self.lock:
            new = sorted(names - self.ignored)[:MAX_IGNORED - len(self.ignored)]
            self.ignored.update(new)
        return new

    @contextmanager
    def unhurried(self, body: bytes):
        """To read a large body keeps the interpreter (its lock, the GIL) from all other threads. So
        we read one at a time, and rest between two of them: after a body that took 0.1 s, the next
        one waits for 0.3 s (RESTS = 3). However many come, the others have most of the time."""
        if len(body) <= LARGE_BYTES:
            yield
            return
        with self.reading:
            time.sleep(max(0, self.next_reading - time.monotonic()))    # nobody else may read now
            begin = time.thread_time()
            try:
                yield
            finally:
                self.next_reading = time.monotonic() + RESTS * (time.thread_time() - begin)

    def drain(self):
        """From now on the server refuses every request. It stops when those at work are answered,
        after DRAIN_SECONDS at the latest."""
        self.stop_at = self.stop_at or time.monotonic() + DRAIN_SECONDS

    def service_actions(self):
        """http.server calls this every half second, and after each new connection. Cuts off
        requests that are late. Raises Drained when the server may stop."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline and self.deadlines.pop(connection, None):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        while self.refused and (now > self.refused[0][0] or len(self.refused) > MOST_REFUSED):
            self.refused.popleft()[1].close()
        if self.engine.failure:
            self.drain()
        if self.steps != self.engine.scheduler.steps or not self.engine.scheduler.busy:
            self.steps, self.last_step = self.engine.scheduler.steps, now
        if self.stop_at and (not self.at_work or now > self.stop_at):
            raise Drained

    def server_close(self):
        self.courier.close()
        for _, connection in self.refused:
            connection.close()
        super().server_close()

    @property
    def stuck(self) -> float | None:
        """The seconds for which the engine has taken no step, though there is something to do, if
        these are too many: its worker hangs."""
        seconds = time.monotonic() - self.last_step
        return seconds if seconds > STUCK_SECONDS else None

    def between_steps(self, function: Callable) -> Any:
        """function(), run between two steps. If the engine is stuck, we run it at once: most likely
        its worker hangs, and its books are at rest. (If a step was only long, and ends just then,
        the function may fail or see half of its changes. The next call is right again.)"""
        return function() if self.stuck else self.engine.call(function)

    # ---- turns

    def finish_turn(self, prefix: str, turn: LiveTurn) -> Answer:
        """Waits until the history has stored the turn. Then counts the turn, and prints where its
        context came from. (With --demo it also waits for the stateless engine.) prefix: that of the
        client's key, see Guard."""
        reply = turn.result()
        if reply.finish_reason == "cancelled":
            return reply
        # A set, since both may be the same object.
        for metrics in {self.metrics[prefix], self.metrics[ALL_KEYS]}:
            metrics.count(turn, reply)
        milliseconds = first_token_ms(turn)
        self.recent_turns.append(dict(
            conversation=turn.conversation, response=f"resp_{turn.id}", **reply.usage,
            first_token_ms=milliseconds, finish_reason=reply.finish_reason,
            stateless=self.answer_without_memory(turn, reply)))
        # One write, and not a second one for the end: else lines of two threads may mix.
        print(f"{reply.sources} · first token {milliseconds} ms\n", end="")
        return reply

    def answer_without_memory(self, turn: LiveTurn, reply: Answer) -> dict | None:
        """The same turn, answered by the stateless engine: the text, and what it cost. None if
        there is no such engine (any more), or if the turn before this one was deleted."""
        if not self.stateless:
            return None
        plan = turn.plan
        base = None if plan.restarts else plan.after
        most = reply.usage["completion_tokens"]     # the length is known: ignore stop tokens
        sampling = turn.handle.request.sampling
        options = {field.name: getattr(sampling, field.name)
                   for field in dataclasses.fields(sampling)}
        try:
            again = self.stateless.submit(
                plan.prompt, base=base, stop=turn.stream.stop, max_tokens=most, ignore_eos=True,
                min_tokens=min(turn.min_tokens, most), **options)
            answer = again.result()
        except (StaleTurn, RuntimeError):    # RuntimeError: its engine has failed, or is closed
            return None
        return dict(answer.usage, text=answer.text, first_token_ms=first_token_ms(again))


def first_token_ms(turn: LiveTurn) -> int:
    """From the turn's submission to the engine until the engine had its first token."""
    return round(1000 * (turn.handle.request.times[0] - turn.handle.submitted))


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""
    protocol_version = default_request_version = "HTTP/1.1"
    timeout = WRITE_SECONDS
    disable_nagle_algorithm = True
    headers: Headers = None     # until we have read them
    rfile: Any                  # the client's bytes; while we read a head, a HeadReader of them
    server: Server

    # ---- a request comes in

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def handle_one_request(self):
        self.server.at_work.discard(self.connection)
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_SECONDS
        self.headers, self.request_id = None, f"req_{secrets.token_hex(16)}"
        super().handle_one_request()

    def parse_request(self) -> bool:
        """http.server reads the head through a HeadReader. False if we have refused it."""
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_SECONDS
        file, self.rfile = self.rfile, HeadReader(self.rfile)
        try:
            parsed = super().parse_request()
            if parsed and self.request_version == "HTTP/1.1" and "Host" not in self.headers:
                raise APIError(400, "a request of HTTP/1.1 needs the header Host")
            return parsed
        except APIError as error:
            self.refuse(error)
            return False
        finally:
            self.rfile = file

    def answer_request(self):
        """Answers a request of any method."""
        self.server.at_work.add(self.connection)        # until we wait for the next one, or close
        has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if has_body and self.command != "POST":
            self.close_connection = True                # since we read the body of a POST alone
        try:
            path, query = self.read_target()
            self.server.guard.check_site(self.headers)
            if self.command == "OPTIONS" and "Access-Control-Request-Method" in self.headers:
                # A browser asks whether the page of another site may send its request. The headers
                # say so, see end_headers.
                return self.send_head(204, {})
            prefix = self.server.guard.prefix(self.headers, path)
            self.expect_open(prefix)
            method = "GET" if self.command == "HEAD" else self.command
            operation, names = find_operation(method, path)
            if operation.name in SERVER_OPERATIONS:     # they take no fields
                self.server.deadlines.pop(self.connection, None)
                return getattr(self, operation.name)(prefix)
            fields = self.read_fields(operation, query)
            self.expect_open(prefix)                    # a body may have taken long
            self.perform(prefix, operation, names, fields)
        except HUNG_UP:
            raise
        except Exception as error:
            self.refuse(self.told(error))

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer_request

    def expect_open(self, prefix: str):
        """APIError if the server is stopping. Only a client with a key hears why."""
        if self.server.stop_at:
            failure = self.server.engine.failure if prefix in self.server.guard.prefixes else None
            raise APIError(503, f"the server is stopping: {failure or 'try again in a moment'}")

    def perform(self, prefix: str, operation: Operation, names: list[str], fields: Fields):
        """Answers an operation of API. names: those in the path."""
        if operation.method == "POST":    # it may write: first make room in this key's share
            self.server.sessions.prune(float("inf"), self.server.bytes_of_each_key, prefix)
        arguments: list[Any] = [prefix, *names]
        if operation.fields.model_fields:
            arguments.append(fields)
        if isinstance(fields, ResponseBody):    # to shorten its history (truncation) takes long
            arguments.append(self.resting())
        turns = fields.turns if isinstance(fields, GeneratingBody) else 0
        with self.server.counted(prefix, turns) as free_one:
            try:
                answer = self.when_free(getattr(self.server.api, operation.name), *arguments)
                if isinstance(answer, Writer):
                    return self.write(prefix, answer, free_one)
            except TooLong as error:
                raise self.told(error, fields.messages_in) from error
            self.send(200, answer)

    def told(self, error: Exception, messages_in: str | None = None) -> APIError:
        return as_api_error(error, self.server.engine.scheduler.limit, messages_in)

    def resting(self) -> Callable[[], bool]:
        """A function to call between two pieces of long work. It rests RESTS times as long as the
        piece took this thread, while no other thread may rest; then it tells whether the client has
        hung up. (A lock of its own: who reads a large body must not wait for all these rests.)"""
        begin = time.thread_time()

        def gone() -> bool:
            nonlocal begin
            with self.server.shortening:
                time.sleep(RESTS * (time.thread_time() - begin))
            begin = time.thread_time()
            return has_hung_up(self.connection)
        return gone

    def when_free(self, answer: Callable, *arguments) -> dict | Writer:
        """Returns answer(*arguments). If another turn has the conversation, waits for that turn
        first. ConnectionError if the client hangs up meanwhile."""
        while True:
            try:
                return answer(*arguments)
            except Answering as error:
                while not error.turn.wait(POLL_SECONDS):
                    if has_hung_up(self.connection):
                        raise ConnectionError("the client has hung up")

    def read_fields(self, operation: Operation, query: str) -> Fields:
        """Those of the body of a POST, else of the query. The JSON that they come in may take far
        more memory: when we return, it is gone. If a body has no session_id, one of SESSION_HEADERS
        may have it."""
        body = self.read_body(operation) if self.command == "POST" else None
        self.server.deadlines.pop(self.connection, None)    # the request has arrived whole
        if body is None:
            return self.checked(operation, read_query(query))
        body = self.decoded(body)
        with self.server.unhurried(body):
            if len(body) > LARGE_BYTES and has_hung_up(self.connection):
                raise ConnectionError("the client has hung up")         # while others were read
            given = read_json(body) if body or operation.needs_body else {}
            a_reply = issubclass(operation.fields, ReplyBody) and isinstance(given, dict)
            if a_reply and given.get("session_id") is None:
                sent = map(self.headers.get, SESSION_HEADERS)
                given["session_id"] = next(filter(None, sent), None)
            return self.checked(operation, given)

    def checked(self, operation: Operation, given: Any) -> Fields:
        """The fields. The log names those that we ignore."""
        ignored = None if self.server.strict else set()
        fields = parse(operation, given, ignored)
        if ignored and (new := self.server.first_ignored(ignored)):
            self.log_message("ignored, and not told again: %s", ", ".join(new))
        return fields

    def read_body(self, operation: Operation) -> bytes:
        """The whole body. APIError if its length is unclear, or if the client has sent less."""
        coding = ", ".join(self.headers.get_all("Transfer-Encoding", [])).strip().lower()
        lengths = self.headers.get_all("Content-Length", [])
        if coding == "chunked" and not lengths:
            return self.read_chunks()
        if not (coding or lengths or operation.needs_body):
            self.close_connection = True                # if there is a body, it is no request
            return b""
        if coding or not lengths:
            raise APIError(411, "send the body either with its Content-Length, or in chunks")
        given = ", ".join(lengths).strip(" \t")
        if not re.fullmatch("[0-9]{1,18}", given):
            raise APIError(400, f"Content-Length must be one number of bytes, got {given:.100}")
        return self.read_bytes(int(given))

    def read_chunks(self) -> bytes:
        """A body whose client did not know its length: "2\\r\\nHi\\r\\n0\\r\\n\\r\\n" is "Hi"."""
        body, size = bytearray(), None
        while size != 0:
            head = self.rfile.readline(1000)
            if not (match := re.fullmatch(rb"([0-9a-fA-F]{1,8})[ \t]*(;.*)?\r\n", head)):
                raise APIError(400, "a chunk of the body must begin with its size, "
                                    f"got {head!r:.100}")
            size = int(match[1], 16)
            body += self.read_bytes(size, len(body))
            if size and self.read_bytes(2) != b"\r\n":
                raise APIError(400, "a chunk of the body has not the size that it names, "
                                    f"{size} bytes")
        trailer = HeadReader(self.rfile)
        while trailer.readline() not in (b"\r\n", b"\n"):
            pass
        return bytes(body)

    def decoded(self, body: bytes) -> bytes:
        """The body without its Content-Encoding."""
        coding = ", ".join(self.headers.get_all("Content-Encoding", [])).strip().lower()
        if coding in ("", "identity"):
            return body
        if coding not in (*DECODERS, "zstd"):
            raise APIError(415, f"Content-Encoding: we read {', '.join(DECODERS)} and zstd, "
                                f"not {coding!r:.100}")
        decoder = zstd_decoder() if coding == "zstd" else zlib.decompressobj(DECODERS[coding])
        try:
            body = decoder.decompress(body, MAX_BODY_BYTES + 1)
        except Exception as error:      # zlib.error, ZstdError; nothing else can happen
            raise APIError(400, f"Content-Encoding: the body is not {coding}: {error}") from error
        if len(body) > MAX_BODY_BYTES:
            raise APIError(413, f"the body has more than {MAX_BODY_BYTES} bytes when it is decoded")
        if not decoder.eof:
            raise APIError(400, f"Content-Encoding: the body ends too early for {coding}")
        if decoder.unused_data:
            raise APIError(400, f"Content-Encoding: the body goes on after the end of its {coding}")
        return body

    def read_bytes(self, length: int, before: int = 0) -> bytes:
        """So many bytes of a body, of which we have read `before` bytes."""
        if before + length > MAX_BODY_BYTES:
            raise APIError(413, f"the body has {before + length} bytes; we accept at most "
                                f"{MAX_BODY_BYTES}")
        data = self.rfile.read(length)
        if len(data) < length:
            raise APIError(400, f"the body ended after {before + len(data)} of {before + length} "
                                "bytes")
        return data

    def read_target(self) -> tuple[str, str]:
        """The path and the query. A client that takes us for a proxy asks for http://NAME/path:
        then NAME takes the place of the Host header."""
        target = urlsplit(self.path)
        if target.netloc:
            del self.headers["Host"]
            self.headers["Host"] = target.netloc
        return target.path or "/", target.query

    # ---- operations about the server itself

    def health(self, prefix):
        if seconds := self.server.stuck:
            raise APIError(503, f"the engine has taken no step for {seconds:.0f} s")
        self.send(200, dict(status="ok"))

    def metrics(self, prefix):
        self.send(200, self.server.metrics[prefix].text(),
                  "text/plain; version=0.0.4; charset=utf-8")

    def openapi(self, prefix):
        self.send(200, openapi())

    def chat_page(self, prefix):
        page = Path(__file__).with_name("chat.html").read_text("utf-8")
        self.send(200, page, "text/html; charset=utf-8",
                  {"Content-Security-Policy": page_policy(page)})

    def cache(self, prefix):
        engine = self.server.engine
        turns = live.outside(prefix, list(self.server.recent_turns), "conversation")
        whole = live.picture(engine, self.server.between_steps)
        picture = live.part_for(prefix, whole, self.server.private)
        self.send(200, dict(picture, **live.scale(engine), turns=turns,
                            example=self.server.example))

    def cache_events(self, prefix):
        def over() -> bool:
            return bool(self.server.stop_at) or has_hung_up(self.connection)
        if not self.server.watchers.acquire(blocking=False):
            raise APIError(503, f"{MAX_WATCHERS} others watch already: try again later")
        try:
            self.begin_stream()
            if self.command == "GET":
                for event in self.server.broadcast.follow(prefix, over):
                    self.wfile.write(self.framed(event))
            self.wfile.write(self.framed(None))
        finally:
            self.server.watchers.release()

    # ---- an answer goes out

    def write(self, prefix: str, writer: Writer, free_one: Callable[[], None]):
        """Sends the answer in one piece, or as a stream. The last events of a stream wait until the
        history has stored the turns. If a stream fails on its way, its last event says why."""
        finish = partial(self.server.finish_turn, prefix)
        with self.watched(writer, free_one):
            if not writer.stream:
                return self.send(200, writer.whole(list(map(finish, writer.turns))))
            self.begin_stream()
            pieces = (event if isinstance(event, Outbox) else self.framed(event)
                      for event in writer.events(finish))
            try:
                for piece in pieces:
                    if isinstance(piece, bytes):
                        self.wfile.write(piece)
                    elif not piece.closed.is_set():     # else the next piece may wait: it is ours
                        # The courier takes pieces from the same iterator. Then we go on.
                        self.wfile.write(self.server.courier.carry(
                            self.connection, pieces, lambda: self.framed(writer.still_here())))
            except HUNG_UP:
                raise
            except Exception as error:
                self.wfile.write(self.framed(writer.failure(self.told(error))))
            self.wfile.write(self.framed(None))

    @contextmanager
    def watched(self, writer: Writer, free_one: Callable[[], None]):
        """While the block writes, or waits for something to write, the courier looks after it every
        0.1 s. It cancels the turns as soon as the client hangs up, and frees the places (see
        `counted`) of those that have settled. At the end some turns may not be done, because
        writing or another of the turns has failed: these are cancelled, too."""
        checks, unsettled = self.server.courier.checks, list(writer.turns)

        def settled(turn: LiveTurn) -> bool:
            return bool(turn.reply or turn.error)

        def check():
            if has_hung_up(self.connection):
                threading.Thread(target=cancel, daemon=True).start()
                return checks.discard(check)
            for turn in filter(settled, list(unsettled)):
                unsettled.remove(turn)
                free_one()

        def cancel():
            for turn in writer.turns:
                if not settled(turn):
                    turn.cancel()
        try:
            checks.add(check)
            yield
        finally:
            checks.discard(check)
            cancel()

    def refuse(self, error: APIError):
        """Sends the error and closes the connection, since we may not have read the body."""
        self.close_connection = True
        self.log_message('"%s" %d %s', self.requestline, error.status, error)
        again = {"Retry-After": "1"} if error.status in (429, 503) else {}
        self.send(error.status, error.body, headers=error.headers | again)

    def send(self, status: int, content: dict | str, content_type: str = "application/json",
             headers: dict[str, str] | None = None):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_head(status, {"Content-Type": content_type, "Content-Length": str(len(body))}
                       | (headers or {}))
        if self.command != "HEAD":
            for start in range(0, len(body), PIECE_BYTES):      # each in time, not all of them
                self.wfile.write(body[start:start + PIECE_BYTES])

    def send_error(self, code, message=None, explain=None):
        """http.server calls this for a request that it refuses itself."""
        self.refuse(APIError(code, message or "we cannot read this request"))

    def send_head(self, status: int, headers: dict[str, str]):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self):
        """http.server calls this, too."""
        headers = self.headers or Headers()
        for name, value in self.server.guard.cors(headers).items():
            self.send_header(name, value)
        sent = headers.get("X-Request-Id", "")
        self.send_header("X-Request-Id", sent if REQUEST_ID.fullmatch(sent) else self.request_id)
        if self.close_connection:
            self.send_header("Connection", "close")
        super().end_headers()

    def begin_stream(self):
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache",
                   "X-Accel-Buffering": "no"}           # nginx would hold the events back
        if self.request_version == "HTTP/1.1":          # an older client sees the end when we close
            headers["Transfer-Encoding"] = "chunked"
        else:
            self.close_connection = True
        self.send_head(200, headers)

    def framed(self, event: dict | str | None) -> bytes:
        """The bytes of an event of a stream: an object, or a string as it is. None ends the
        stream."""
        if self.command == "HEAD":
            return b""
        kind = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        text = event if isinstance(event, str) else json.dumps(event)
        data = b"" if event is None else f"{kind}data: {text}\n\n".encode()
        chunked = self.request_version == "HTTP/1.1"
        return b"%x\r\n%b\r\n" % (len(data), data) if chunked else data

    def version_string(self):
        return "nano-pensieve"

    def log_request(self, code="-", size="-"):
        """Logs nothing: finish_turn prints a line for each turn, and `refuse` logs each error."""

    def log_error(self, format, *args):
        """Logs nothing: http.server calls this when a connection has rested for `timeout`
        seconds."""

    def finish(self):
        """Reads for a moment what the client still sends. If we closed at once, the client's system
        would throw our answer away before the client has read it."""
        deadline = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            while self.connection.recv(2**16) and time.monotonic() < deadline:
                pass


def read_json(body: bytes) -> Any:
    try:
        given = json.loads(body)
        if SURROGATE.search(body):
            json.dumps(given, ensure_ascii=False).encode()  # ValueError for half of a pair
        return given
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from error


def read_query(query: str) -> dict[str, str | list[str]]:
    """ "limit=5&include[]=a&include[]=b" -> {"limit": "5", "include": ["a", "b"]}."""
    given = parse_qs(query, keep_blank_values=True)
    return {name.removesuffix("[]"): values if name.endswith("[]") else values[-1]
            for name, values in given.items()}


def zstd_decoder() -> Any:
    """Some agents compress their bodies so. APIError if this Python cannot read them."""
    try:
        if sys.version_info < (3, 14):
            from backports import zstd
        else:
            from compression import zstd
    except ImportError as error:
        raise APIError(415, "Content-Encoding: to read zstd, this server needs Python 3.14 or the "
                            "package backports.zstd (pip install backports.zstd)") from error
    window: Any = {zstd.DecompressionParameter.window_log_max: 23}   # 8 MiB, as RFC 9659 asks for
    return zstd.ZstdDecompressor(options=window)


def has_hung_up(connection: socket.socket) -> bool:
    """Has the client closed its end? Bytes of its next request may have come before."""
    try:
        poll = select.poll()    # needs no descriptor of its own, epoll would
        poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))    # as macOS has it
        return bool(poll.poll(0))
    except (OSError, ValueError):                       # it was reset, or we have closed it
        return True


class HeadReader:
    """Reads the header lines of a request, or the trailer after its chunks, up to the empty line.
    APIError for a line that another program might read as something else, and for too many bytes.
    ConnectionError if the client hangs up before the empty line."""

    def __init__(self, file: BinaryIO):
        self.file, self.left = file, MAX_HEAD_BYTES

    def readline(self, limit: int = MAX_HEAD_BYTES) -> bytes:
        line = self.file.readline(min(limit, self.left + 1))
        self.left -= len(line)
        if self.left < 0:
            raise APIError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes")
        if not line:
            raise ConnectionError("the client has hung up")
        if line not in (b"\r\n", b"\n") and not HEADER_LINE.fullmatch(line):
            raise APIError(400, f"a header must be a line NAME: VALUE, got {line!r:.100}")
        return line
