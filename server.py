"""The server: sockets, streams and limits around serving/openai_api.py.

    client -> Handler (a thread for each connection) -> API -> engine (one thread) -> Writer -> client

After each answer the server prints where the tokens of its context came from:

    gpu 96 · cpu 64 · recomputed 32 · new 14 · first token 9 ms

The server promises:
- A client hears that its turn is done only after the history has stored the turn. If the client hangs up, or
  does not read its answer, the server cancels the turn.
- No client can hold the server up. A request must arrive within one deadline and have a body of limited size.
  A connection too many gets a 503 at once; a turn too many gets a 429.
- After SIGTERM the server finishes the turns at work, then it stops. After a second signal it stops at once.
  If the engine fails, every client is told, and the process exits with 1.
- Nothing that belongs to one API key exists for another.
"""
import os
import signal


def leave(number, frame):
    """A signal while we start: no turn is at work, so we go at once."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)                    # first of all, since the imports below take seconds

import argparse
import gc
import json
import re
import resource
import select
import socket
import sys
import threading
import time
import traceback
import webbrowser
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from config import Config, require
from engine import Engine
from serving import live
from serving.guard import Guard, page_policy
from serving.history import StaleTurn
from serving.metrics import Metrics
from serving.openai_api import API, Writer, as_api_error
from serving.operations import APIError, Operation, ReplyBody, find_operation, openapi, parse
from serving.output import PatientStream
from serving.sessions import Answer, Answering, LiveTurn, Sessions

MAX_BODY_BYTES = 2 * 2**20
REQUEST_SECONDS = 30        # for a whole request to arrive
WRITE_SECONDS = 30          # for a client to take what we write
DRAIN_SECONDS = 30          # after SIGTERM, for the turns at work
POLL_SECONDS = 0.1          # between two checks whether a client has hung up
LINGER_SECONDS = 2          # for a client that still sends when we have answered
PRUNE_SECONDS = 60          # between two checks of the history's age
FIRST_PRUNE_SECONDS = 3600  # before the first one
TURNS_SHOWN = 100           # at /cache
MAX_WATCHERS = 32           # of the live picture
SESSION_HEADERS = "X-Session-ID", "X-Session-Affinity", "session_id"     # vLLM's, routers', agents'
# The example of chat.html needs these sizes. Its conversations are not kept.
DEMO = dict(gpu_cache_tokens=384, cpu_cache_tokens=768, history=":memory:")
TOO_MANY_CONNECTIONS = (b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n"
                        b"Connection: close\r\n\r\n")
HUNG_UP = ConnectionError, TimeoutError     # there is no client left to answer


class Drained(Exception):
    """No turn is at work any more, so the server may stop."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], sessions: Sessions, api_keys: Sequence[str] = (),
                 max_waiting: int = 256, max_connections: int = 800, allow_origins: Sequence[str] = (),
                 history_max_bytes: float = float("inf")):
        """sessions: started. api_keys, allow_origins: see Guard. ValueError for a key or an origin that
        cannot be used, OSError if we cannot listen at the address."""
        self.sessions, self.engine = sessions, sessions.engine
        config = sessions.engine.config
        self.guard = Guard(address[0], api_keys, allow_origins)
        self.model_names = Path(config.model).resolve().name, config.model
        self.api = API(sessions, self.model_names)
        self.private = len(self.guard.keys) > 1             # then no key learns about another's turns
        self.history_share = history_max_bytes / len(self.guard.prefixes)       # of each key
        self.metrics = {prefix: Metrics(self.engine, self.model_names[0], self.private)
                        for prefix in self.guard.prefixes}
        self.broadcast = live.Broadcast(self.engine, self.private)
        self.watchers = threading.BoundedSemaphore(MAX_WATCHERS)
        self.recent_turns = deque(maxlen=TURNS_SHOWN)       # that are done, for /cache
        self.lock = threading.Lock()                        # guards at_work
        self.at_work = 0                                    # turns that run or wait
        self.most_turns = config.max_running + max_waiting
        self.connections = threading.BoundedSemaphore(max_connections)
        self.deadlines: dict[socket.socket, float] = {}     # of the requests that are arriving
        self.stop_at: float | None = None                   # once it drains
        self.rival: Engine | None = None                    # a stateless engine to compare with: --demo
        try:
            super().__init__(address, Handler)
        except OSError as error:
            place = "{}:{}".format(*address)
            raise OSError(f"we cannot listen at {place}: {error.strerror}; use another --port") from error

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    # ---- limits, and the end

    def get_request(self):
        try:
            return super().get_request()
        except OSError:                                     # perhaps the system gives us no more descriptors
            time.sleep(POLL_SECONDS)                        # or we would try again without a pause
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
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.deadlines.pop(request, None)
            self.connections.release()

    @contextmanager
    def counted(self, turns: int):
        """Counts turns as being at work. APIError if these would be too many."""
        with self.lock:
            if self.at_work + turns > self.most_turns:
                raise APIError(429, f"{self.at_work} turns run or wait, and {turns} more would exceed the "
                                    f"limit of {self.most_turns}: try again in a moment",
                               code="rate_limit_exceeded")
            self.at_work += turns
        try:
            yield
        finally:
            with self.lock:
                self.at_work -= turns

    def drain(self):
        """Lets the turns at work finish, for DRAIN_SECONDS at most, and answers nothing else."""
        self.stop_at = self.stop_at or time.monotonic() + DRAIN_SECONDS

    def service_actions(self):
        """Every half second: cuts off requests that are late; raises Drained when the server may stop."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline and self.deadlines.pop(connection, None):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self.engine.failure:
            self.drain()
        if self.stop_at and (not self.at_work or now > self.stop_at):
            raise Drained

    def prune_history(self, max_age: float):
        """Until the engine fails, in a thread of its own. A failed attempt is repeated. In the first hour
        nothing is too old: if the clock was wrong at the start, there is time to set it right."""
        time.sleep(min(max_age, FIRST_PRUNE_SECONDS))
        while not self.engine.failure:
            try:
                self.sessions.prune(max_age, float("inf"))
            except Exception as error:
                traceback.print_exception(error)
            time.sleep(PRUNE_SECONDS)

    # ---- turns

    def finish_turn(self, prefix: str, turn: LiveTurn) -> Answer:
        """Waits until the turn is in the history, and shows where its context came from. prefix: its key's,
        see Guard."""
        reply = turn.result()
        if reply.finish_reason == "cancelled":
            return reply
        self.metrics[prefix].count(turn, reply)
        milliseconds = round(1000 * (turn.request.times[0] - turn.submitted))
        self.recent_turns.append(dict(
            conversation=turn.conversation, response=f"resp_{turn.id}", **reply.usage,
            first_token_ms=milliseconds, finish_reason=reply.finish_reason,
            without_memory_ms=self.rival and self.without_memory(turn, reply)))
        print(f"{reply.sources} · first token {milliseconds} ms")
        return reply

    def without_memory(self, turn: LiveTurn, reply: Answer) -> int | None:
        """Milliseconds to the first token if nothing is cached: a stateless engine computes the same context.
        None if the history has no such turn."""
        with suppress(StaleTurn):
            context = self.sessions.history.tokens(turn.id)[:reply.usage["prompt_tokens"]]
            begin = time.perf_counter()
            self.rival.generate(context.tolist(), max_tokens=1)
            return round(1000 * (time.perf_counter() - begin))


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""
    protocol_version = default_request_version = "HTTP/1.1"
    timeout = WRITE_SECONDS
    disable_nagle_algorithm = True
    server: Server

    # ---- a request comes in

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def handle_one_request(self):
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_SECONDS
        super().handle_one_request()

    def answer_request(self):
        """Any request. If we refuse it, we close the connection, since the body may be unread."""
        has_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if has_body and self.command != "POST":
            self.close_connection = True                # we do not read this body
        try:
            path, query = self.read_target()
            if self.server.stop_at:
                reason = self.server.engine.failure or "try again in a moment"
                raise APIError(503, f"the server is stopping: {reason}")
            self.server.guard.check_site(self.headers)
            if self.command == "OPTIONS" and "Access-Control-Request-Method" in self.headers:
                return self.send_preflight()
            prefix = "" if path in ("/", "/health") else self.server.guard.prefix(self.headers)
            operation, names = find_operation("GET" if self.command == "HEAD" else self.command, path)
            if self.command == "POST":
                given = self.read_json(operation)
            else:
                given = dict(parse_qsl(query, keep_blank_values=True))
            self.server.deadlines.pop(self.connection, None)
            self.perform(prefix, operation, names, given)
        except HUNG_UP:
            raise
        except Exception as error:
            error = as_api_error(error)
            self.send(error.status, error.body, headers=error.headers)

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer_request

    def perform(self, prefix: str, operation: Operation, names: list[str], given: dict):
        """names: those in the path. given: the body, or the query."""
        if hasattr(Handler, operation.name):            # it is our own, and takes no fields
            return getattr(self, operation.name)(prefix)
        fields = parse(operation, given)
        if operation.method == "POST":                  # it may write: nobody gets more than its share
            self.server.sessions.prune(float("inf"), self.server.history_share, prefix)
        arguments = [prefix, *names, fields] if operation.fields.model_fields else [prefix, *names]
        turns = getattr(fields, "n", 1) if isinstance(fields, ReplyBody) else 0
        with self.server.counted(turns):
            answer = self.when_free(getattr(self.server.api, operation.name), *arguments)
            if isinstance(answer, Writer):
                self.write(prefix, answer)
            else:
                self.send(200, answer)

    def when_free(self, answer: Callable, *arguments) -> dict | Writer:
        """Waits while the conversation is being answered. ConnectionError if the client hangs up."""
        while True:
            try:
                return answer(*arguments)
            except Answering as error:
                while not error.turn.wait(POLL_SECONDS):
                    if has_hung_up(self.connection):
                        raise ConnectionError("the client has hung up")

    def read_json(self, operation: Operation) -> Any:
        """The body. The client's name for its conversation may stand in a header."""
        body = self.read_body(operation)
        if not body and not operation.needs_body:
            return {}
        try:
            given = json.loads(body)
            json.dumps(given, ensure_ascii=False).encode()      # ValueError for half of a surrogate pair
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON: {error}") from error
        if issubclass(operation.fields, ReplyBody) and isinstance(given, dict):
            names = [given.get("session_id"), *map(self.headers.get, SESSION_HEADERS)]
            given["session_id"] = next((name for name in names if name is not None), None)
        return given

    def read_body(self, operation: Operation) -> bytes:
        """APIError unless all of the body has come, and its length is beyond doubt."""
        lengths = self.headers.get_all("Content-Length", [] if operation.needs_body else ["0"])
        if "Transfer-Encoding" in self.headers or not lengths:
            raise APIError(411, "send the whole body with its Content-Length: we do not read chunked bodies")
        given = ", ".join(lengths)
        if not re.fullmatch("[0-9]{1,18}", given):
            raise APIError(400, f"Content-Length must be one number of bytes, got {given:.100}")
        length = int(given)
        if length > MAX_BODY_BYTES:
            raise APIError(413, f"the body has {length} bytes; we accept at most {MAX_BODY_BYTES}")
        body = self.rfile.read(length)
        if len(body) < length:
            raise APIError(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def read_target(self) -> tuple[str, str]:
        """The path and the query. A client that takes us for a proxy sends http://HOST/path: HOST counts."""
        target = urlsplit(self.path)
        if target.netloc:
            del self.headers["Host"]
            self.headers["Host"] = target.netloc
        return target.path or "/", target.query

    # ---- operations that are the server's own

    def health(self, prefix):
        self.send(200, dict(status="ok"))

    def metrics(self, prefix):
        self.send(200, self.server.metrics[prefix].text(), "text/plain; version=0.0.4; charset=utf-8")

    def openapi(self, prefix):
        self.send(200, openapi())

    def chat_page(self, prefix):
        file = Path(live.__file__).with_name("chat.html")
        if not file.exists():
            raise APIError(404, "there is no chat.html in serving/")
        page = file.read_text("utf-8")
        self.send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": page_policy(page)})

    def cache(self, prefix):
        engine = self.server.engine
        turns = live.outside(prefix, list(self.server.recent_turns), "conversation")
        picture = live.part_for(prefix, live.picture(engine), self.server.private)
        self.send(200, dict(picture, **live.scale(engine), turns=turns))

    def cache_events(self, prefix):
        def over() -> bool:
            return bool(self.server.stop_at) or has_hung_up(self.connection)
        if not self.server.watchers.acquire(blocking=False):
            raise APIError(503, f"{MAX_WATCHERS} others watch already: try again later")
        try:
            self.begin_stream()
            for event in self.server.broadcast.follow(prefix, over) if self.command == "GET" else ():
                self.send_piece(f"data: {event}\n\n".encode())
            self.send_piece(b"")
        finally:
            self.server.watchers.release()

    # ---- an answer goes out

    def write(self, prefix: str, writer: Writer):
        """In one piece, or as a stream, whose last events are sent after the history has stored the turns. If
        something goes wrong on the way, the last event says so."""
        finish = partial(self.server.finish_turn, prefix)
        with cancelled_if_gone(self.connection, writer.turns):
            if not writer.stream:
                return self.send(200, writer.whole(*map(finish, writer.turns)))
            self.begin_stream()
            try:
                for event in writer.events(finish):
                    self.send_event(event)
            except HUNG_UP:
                raise
            except Exception as error:
                self.send_event(writer.failure(as_api_error(error)))
            self.send_piece(b"")

    def send(self, status: int, content: dict | str, content_type: str = "application/json",
             headers: dict[str, str] | None = None):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if status >= 400:
            self.send_header("Connection", "close")
            self.log_message('"%s" %d %s', self.requestline, status, content["error"]["message"])
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def send_error(self, code, message=None, explain=None):
        """For a request that http.server itself refuses."""
        self.send(code, APIError(code, message or "we cannot read this request").body)

    def send_preflight(self):
        """A browser asks whether the page of another site may send its request."""
        self.send_response(204)
        self.end_headers()

    def end_headers(self):
        if hasattr(self, "headers"):                    # http.server refuses some requests before it has them
            for name, value in self.server.guard.cors(self.headers).items():
                self.send_header(name, value)
        super().end_headers()

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        if self.request_version == "HTTP/1.1":
            self.send_header("Transfer-Encoding", "chunked")
        else:                                           # an older client sees the end when we close
            self.send_header("Connection", "close")
        self.end_headers()

    def send_event(self, event: dict | str):
        kind = f"event: {event['type']}\n" if "type" in event else ""
        data = event if isinstance(event, str) else json.dumps(event)
        self.send_piece(f"{kind}data: {data}\n\n".encode())

    def send_piece(self, data: bytes):
        """A piece of a stream; an empty one ends the stream."""
        if self.request_version == "HTTP/1.1":
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_request(self, code="-", size="-"):
        """Nothing: a turn prints its own line, and an error is logged with its reason."""

    def finish(self):
        """Reads for a moment what the client still sends. If we closed at once, the client's system would
        throw our answer away before the client has read it."""
        deadline = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            while self.connection.recv(2**16) and time.monotonic() < deadline:
                pass


@contextmanager
def cancelled_if_gone(connection: socket.socket, turns: list[LiveTurn]):
    """Cancels the turns as soon as the client hangs up, even while we write nothing to it. At the end,
    cancels those that are not done: then writing, or another of the turns, has failed."""
    over = threading.Event()

    def cancel():
        for turn in turns:
            if not (turn.reply or turn.error):
                turn.cancel()

    def watch():
        while not over.wait(POLL_SECONDS):
            if has_hung_up(connection):
                return cancel()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        cancel()


def has_hung_up(connection: socket.socket) -> bool:
    """Has the client closed its end? Early bytes of its next request do not count as closing."""
    try:
        poll = select.poll()                            # needs no descriptor of its own, epoll would
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):                       # it was reset, or we have closed it
        return True


# ---------------------------------------------------------------------------------------------------------
# The command line.

ABOUT = """A chat server that remembers: after an answer, the KV-tokens of the conversation stay in two tiers.
The first (GPU) tier is the memory of the GPU, the second (CPU) tier is ordinary memory. On a machine without
a GPU the first tier lies in ordinary memory, too; everything works the same there, only slower."""


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The server's own flags, and one for every field of Config. A wrong flag prints one line and exits with
    2."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False, description=ABOUT)

    def flag(name: str, default, help: str):
        parser.add_argument(name, type=type(default), default=default, help=f"{help} (default: {default})")
    flag("--host", "127.0.0.1", "the address to listen on")
    flag("--port", 8000, "the port to listen on; 0: any that is free")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="a key that clients must send; of several, each has conversations of its own "
                             "(default: no key is needed)")
    parser.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN",
                        help="a site whose pages may use this server, such as https://chat.example; *: all "
                             "sites (default: only the server's own page)")
    parser.add_argument("--name", default="", metavar="NAME",
                        help="of this one among several servers behind a router, for example s1: the ids "
                             "that it makes begin with the name (default: no name)")
    flag("--max-waiting", 256, "turns that may wait while --max-running others run; one more gets a 429")
    flag("--max-connections", 800, "connections that may be open; one more gets a 503")
    flag("--history-max-age-days", 30.0, "a conversation that is idle for longer is forgotten")
    flag("--history-max-bytes", 2**30, "while the history is larger, the longest idle is forgotten; of "
         "several keys each has an equal share")
    parser.add_argument("--history", metavar="FILE",
                        help="the file that keeps all conversations (default: one for each model, beside "
                             "server.py)")
    parser.add_argument("--system-prompt", metavar="TEXT",
                        help="a text, or a file with a text, that chats without a system message begin with; "
                             "its KV-tokens are shared and never evicted (default: none)")
    parser.add_argument("--demo", action="store_true",
                        help="tiny tiers, a history in memory, a stateless engine to compare with, and a "
                             "browser in which the chat page plays its example")
    Config.add_flags(parser)
    flags = parser.parse_args(argv)
    if flags.demo:
        parser.set_defaults(**DEMO)                     # flags that are given still count
        flags = parser.parse_args(argv)
    flags.history = flags.history or str(default_history(flags.model))
    return flags


def default_history(model: str) -> Path:
    """Beside this file, one for each model, since token ids belong to one tokenizer."""
    slug = re.sub(r"[^\w.]+", "-", model).strip("-.")
    name = "history.sqlite" if model == Config.model else f"history-{slug}.sqlite"
    return Path(__file__).with_name(name)


def banner(server: Server) -> str:
    worker, (name, path) = server.engine.worker, server.model_names
    gpu, cpu = worker.pool.gpu, worker.pool.cpu
    tiers = [("GPU tier", worker.num_slots, gpu), ("CPU tier", worker.num_places * worker.chunk_size, cpu)]
    model = name if name == path else f"{name} ({path})"
    lines = [f"nano-pensieve serves {model} on {gpu.device}, {str(gpu.dtype).removeprefix('torch.')}"]
    for tier, tokens, tensor in tiers:
        lines.append(f"  {tier}  {tokens:>12,} tokens  {tensor.nbytes / 2**20:>10,.1f} MiB")
    if gpu.device.type == "cpu":
        lines.append("  There is no GPU here: the GPU tier lies in ordinary memory, like the CPU tier.")
    return "\n".join([*lines, f"  {server.url}   (Ctrl-C stops)"])


def open_server(flags: argparse.Namespace) -> Server:
    """ValueError, OSError, OverflowError for flags that cannot be served."""
    limits = dict(max_waiting=0, max_connections=1, history_max_age_days=0, history_max_bytes=0)
    for name, least in limits.items():
        require(getattr(flags, name) >= least, name, f"at least {least}", getattr(flags, name))
    options = Config.given(flags)
    sessions = Sessions(options.pop("model"), history=flags.history, system_prompt=flags.system_prompt,
                        name=flags.name, **options)
    server = Server((flags.host, flags.port), sessions.start(), flags.api_key, flags.max_waiting,
                    flags.max_connections, flags.allow_origin, flags.history_max_bytes)
    max_age = 86400 * flags.history_max_age_days
    threading.Thread(target=server.prune_history, args=(max_age,), daemon=True).start()
    return server


def begin_demo(server: Server):
    """A stateless engine computes every turn again, and a browser opens the page, which plays its example."""
    server.rival = Engine(**(vars(server.engine.config) | dict(stateless=True, cpu_cache_tokens=0))).start()
    url = f"{server.url}/#play"

    def open_page():                                    # some browsers come back only when they are closed
        if not webbrowser.open(url):
            print(f"There is no browser here. Open {url} in yours.", flush=True)
    threading.Thread(target=open_page, daemon=True).start()


def serve_until_stopped(server: Server):
    """Until a signal comes. SystemExit with 1 if the engine fails."""
    def stop(*_):                                       # the first SIGTERM; a second one interrupts
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.drain()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever()
    except Drained:
        if failure := server.engine.failure:
            sys.exit(f"server.py: {failure}")           # exits with 1
    finally:
        server.server_close()
        server.sessions.close()
        if server.rival:
            server.rival.close()


def settle_in():
    """Once all is loaded. Every connection needs a descriptor, so we take as many as the system gives us. The
    garbage collector need not look at what is there now: it stays."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):                 # "no limit" may be more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    sys.stdout, sys.stderr = PatientStream(sys.stdout), PatientStream(sys.stderr)


def main():
    try:
        flags = parse_flags()
        server = open_server(flags)
        settle_in()
        print(banner(server))
        if flags.demo:
            begin_demo(server)
        serve_until_stopped(server)
        print("stopped")
    except (ValueError, OSError, OverflowError) as error:
        print(f"server.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
