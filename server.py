"""The server: sockets, streaming and limits around openai_api.py. It adds nothing to the idea, it lets any client use it.

Under each answer it prints where the context came from; GET /cache shows every chunk, and GET /cache/events what moves:

    gpu 96 · cpu 64 · recomputed 32 · new 14 · first token 9 ms

Each connection has a thread, which only waits for the engine's. The promises, and what keeps each:
- A client is told that its turn is done only when the history has it; one that hangs up, or does not read, cancels its turn.
- Nobody holds the server: a request, head and body, has one deadline; a body has one size limit; connections are counted, and those
  beyond the limit get a 503 at once; turns that run or wait are counted, and those beyond the limit get a 429.
- SIGTERM lets the turns at work finish, a second signal does not. An engine that has failed tells everyone, then the process exits
  with 1.
- With API keys, what belongs to one key does not exist for another."""
import argparse
import hashlib
import hmac
import json
import re
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from serving import live
from config import Config
from serving.history import StaleTurn
from serving.metrics import Metrics
from serving.openai_api import API, OPERATIONS, APIError, Operation, Writer, openapi, parse
from serving.sessions import Answer, LiveTurn, Sessions

MAX_BODY_BYTES = 2 * 2**20
REQUEST_SECONDS = 30        # for a request to arrive, head and body
WRITE_SECONDS = 30          # for a client to take what is written to it
DRAIN_SECONDS = 30          # after SIGTERM, for the turns at work
POLL_SECONDS = 0.1          # between two looks at whether a client has hung up
LINGER_SECONDS = 2          # for a client that is still sending when it was answered
PRUNE_SECONDS = 60          # between two looks at the history's age and size
TURNS_SHOWN = 100           # by /cache
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
GONE = ConnectionError, TimeoutError        # nobody is there to be answered


def as_api_error(error: Exception) -> APIError:
    """A ValueError of the engine is for the client to read; anything unforeseen is our fault, and is printed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, StaleTurn):                    # deleted since we looked
        return APIError(404, str(error))
    if isinstance(error, ValueError):
        return APIError(400, str(error))
    traceback.print_exception(error)
    return APIError(500, f"{type(error).__name__}: {error}")


class Drained(Exception):
    """Nothing is at work any more: the server may stop."""


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], sessions: Sessions, api_keys: list[str] = (), max_waiting: int = 256, max_connections: int = 800):
        """sessions: started. OSError if the address cannot be had."""
        self.sessions, self.engine = sessions, sessions.engine
        self.owners = [(key.encode(), f"{hashlib.sha256(key.encode()).hexdigest()[:16]}/") for key in api_keys]
        self.served = Path(self.engine.config.model).resolve().name, self.engine.config.model
        self.api, self.metrics, self.turns = API(sessions, self.served), Metrics(), deque(maxlen=TURNS_SHOWN)
        self.lock, self.at_work, self.most_turns = threading.Lock(), 0, self.engine.config.max_running + max_waiting
        self.connections = threading.BoundedSemaphore(max_connections)
        self.deadlines: dict[socket.socket, float] = {}     # of requests that are arriving
        self.stop_at = None                                 # once it drains
        super().__init__(address, Handler)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    # ---- limits

    def process_request(self, request, client_address):
        if self.connections.acquire(blocking=False):
            try:
                return super().process_request(request, client_address)
            except RuntimeError:                            # no thread is to be had
                self.connections.release()
        with suppress(OSError):
            request.setblocking(False)                      # whoever accepts must not wait
            request.send(FULL)
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.deadlines.pop(request, None)
            self.connections.release()

    @contextmanager
    def at_work_on(self, turns: int):
        with self.lock:
            if self.at_work + turns > self.most_turns:
                raise APIError(429, f"{self.at_work} turns run or wait already, of {self.most_turns} that may, and this would be {turns} more: "
                                    "try again in a moment", code="rate_limit_exceeded")
            self.at_work += turns
        try:
            yield
        finally:
            with self.lock:
                self.at_work -= turns

    def drain(self):
        self.stop_at = self.stop_at or time.monotonic() + DRAIN_SECONDS

    def service_actions(self):
        """Every half second: cuts off who is late, and stops when there is nothing left to wait for."""
        now = time.monotonic()
        for connection, deadline in list(self.deadlines.items()):
            if now > deadline and self.deadlines.pop(connection, None):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self.engine.failure:
            self.drain()
        if self.stop_at and (not self.at_work or now > self.stop_at):
            raise Drained

    def prune_history(self, max_age: float, max_bytes: float):
        """For ever, in a thread of its own. What fails is tried again."""
        while not self.engine.failure:
            try:
                self.sessions.prune(max_age, max_bytes)
            except Exception as error:
                traceback.print_exception(error)
            time.sleep(PRUNE_SECONDS)

    # ---- what can be seen

    def finish_turn(self, handle: LiveTurn) -> Answer:
        """Waits until the turn is in the history, and tells where its context came from."""
        reply = handle.result()
        if reply.finish_reason != "cancelled":
            self.metrics.count(handle, reply)
            milliseconds = round(1000 * (handle.request.times[0] - handle.submitted))
            self.turns.append(dict(conversation=handle.conversation, response=f"resp_{handle.id}", **reply.usage, first_token_ms=milliseconds,
                                   finish_reason=reply.finish_reason))
            print(f"{reply.sources} · first token {milliseconds} ms", flush=True)
        return reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = default_request_version = "HTTP/1.1"
    timeout, disable_nagle_algorithm = WRITE_SECONDS, True
    server: Server

    # ---- how it comes in

    def handle(self):
        with suppress(ConnectionError):
            super().handle()

    def handle_one_request(self):
        self.server.deadlines[self.connection] = time.monotonic() + REQUEST_SECONDS
        super().handle_one_request()

    def serve(self):
        """Any request. One that is refused ends its connection, since its body may be unread."""
        if self.command != "POST" and ("Content-Length" in self.headers or "Transfer-Encoding" in self.headers):
            self.close_connection = True                # nor do we read such a body
        path, _, query = self.path.partition("?")
        try:
            if self.server.stop_at:
                raise APIError(503, f"the server stops: {self.server.engine.failure or 'try again in a moment'}")
            owner = "" if path in ("/", "/health") else self.owner()
            operation, names = self.route(path)
            given = self.read_json(operation) if self.command == "POST" else dict(parse_qsl(query, keep_blank_values=True))
            self.server.deadlines.pop(self.connection, None)
            self.answer(owner, operation, names, given)
        except GONE:
            raise
        except Exception as error:
            error = as_api_error(error)
            self.send(error.status, error.body)

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = serve

    def answer(self, owner: str, operation: Operation, names: list[str], given: dict):
        """From the API, or of our own."""
        if not hasattr(API, operation.name):
            return getattr(self, operation.name)(owner)
        given = parse(operation, given)
        arguments = [owner, *names, given] if operation.fields else [owner, *names]
        with self.server.at_work_on(given.get("n", 1)) if "stream" in operation.fields else nullcontext():
            answer = getattr(self.server.api, operation.name)(*arguments)
            if isinstance(answer, Writer):
                self.write(answer)
            else:
                self.send(200, answer)

    def owner(self) -> str:
        """The prefix of all that this client may see. Every key is compared, in constant time."""
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        key = key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        owners = [owner for wanted, owner in self.server.owners if hmac.compare_digest(key, wanted)]
        if self.server.owners and not owners:
            raise APIError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")
        return owners[0] if owners else ""

    def route(self, path: str) -> tuple[Operation, list[str]]:
        """The operation, and the names that stand in the path."""
        parts, methods = path.split("/"), []
        for operation in OPERATIONS:
            wanted = operation.path.split("/")
            if len(wanted) == len(parts) and all(part and want[:1] == "{" or part == want for part, want in zip(parts, wanted)):
                if operation.method == self.command:
                    return operation, [unquote(part) for part, want in zip(parts, wanted) if want[:1] == "{"]
                methods.append(operation.method)
        if methods:
            raise APIError(405, f"{path:.100} takes {' or '.join(methods)}, not {self.command}")
        raise APIError(404, f"there is no {path:.100}; /openapi.json tells what there is")

    def read_json(self, operation: Operation) -> dict:
        length = self.headers.get("Content-Length")
        if "Transfer-Encoding" in self.headers or length is None and operation.required:
            raise APIError(411, "send the body with its Content-Length: bodies in pieces are not read")
        if not re.fullmatch("[0-9]{1,18}", length or "0"):
            raise APIError(400, f"Content-Length must be a number of bytes, got {length:.100}")
        if int(length or 0) > MAX_BODY_BYTES:
            raise APIError(413, f"the body has {length} bytes, more than the {MAX_BODY_BYTES} that are accepted")
        body = self.rfile.read(int(length or 0))
        if not body and not operation.required:
            return {}
        try:
            given = json.loads(body)
            json.dumps(given, ensure_ascii=False).encode()      # a lone surrogate is no text
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON: {error}") from error
        if operation.name == "create_chat_completion" and isinstance(given, dict) and given.get("conversation_id") is None:
            given["conversation_id"] = self.headers.get("X-Session-ID")
        return given

    # ---- what is our own

    def health(self, owner):
        self.send(200, dict(status="ok"))

    def metrics(self, owner):
        gpu = self.server.engine.worker.pool.gpu            # [layers, 2, slots, heads, head size]
        chunk_bytes = gpu[:, :, 0].nbytes * self.server.engine.config.chunk_size
        text = self.server.metrics.text(self.server.engine.stats(), chunk_bytes, self.server.served[0])
        self.send(200, text, "text/plain; version=0.0.4; charset=utf-8")

    def openapi(self, owner):
        self.send(200, openapi())

    def page(self, owner):
        file = Path(live.__file__).with_name("chat.html")
        if not file.exists():
            raise APIError(404, "there is no chat.html in serving/")
        self.send(200, file.read_text("utf-8"), "text/html; charset=utf-8")

    def cache(self, owner):
        engine = self.server.engine
        self.send(200, dict(live.picture(engine, owner), **live.scale(engine), turns=live.outside(owner, list(self.server.turns), "conversation")))

    def cache_events(self, owner):
        self.begin_stream()
        for event in live.follow(self.server.engine, owner, over=lambda: self.server.stop_at or has_hung_up(self.connection)):
            self.send_event(event)
        self.send_piece(b"")

    # ---- how it goes out

    def write(self, writer: Writer):
        """In one piece, or as events, the last ones after the turn is in the history. What goes wrong on the way is the last event."""
        with cancelled_if_gone(self.connection, writer.handles):
            if not writer.stream:
                return self.send(200, writer.whole(*map(self.server.finish_turn, writer.handles)))
            self.begin_stream()
            try:
                for event in writer.events(self.server.finish_turn):
                    self.send_event(event)
            except GONE:
                raise
            except Exception as error:
                self.send_event(writer.failure(as_api_error(error)))
            self.send_piece(b"")

    def send(self, status: int, content: dict | str, content_type: str = "application/json"):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if status >= 400:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def send_error(self, code, message=None, explain=None):
        """What http.server itself refuses."""
        self.send(code, APIError(code, message or "this is not a request that can be read").body)

    def begin_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        chunked = self.request_version == "HTTP/1.1"    # an older client sees the end when we close
        self.send_header(*("Transfer-Encoding", "chunked") if chunked else ("Connection", "close"))
        self.end_headers()

    def send_event(self, event: dict | str):
        kind = f"event: {event['type']}\n" if "type" in event else ""
        self.send_piece(f"{kind}data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

    def send_piece(self, data: bytes):
        """Of a stream; an empty one ends it."""
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if self.request_version == "HTTP/1.1" else data)

    def log_request(self, code="-", size="-"):
        if code != "-" and code >= 400:
            super().log_request(code, size)

    def finish(self):
        """Hears out a client that is still sending, for a moment: else it would be reset before it has read our answer."""
        deadline = time.monotonic() + LINGER_SECONDS
        with suppress(OSError):
            super().finish()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(LINGER_SECONDS)
            while self.connection.recv(2**16) and time.monotonic() < deadline:
                pass


@contextmanager
def cancelled_if_gone(connection: socket.socket, handles: list[LiveTurn]):
    """Cancels the turns when the client hangs up, even while nothing is written to it; in the end those that are not done, since writing
    or another of them has failed."""
    over = threading.Event()

    def cancel():
        for handle in handles:
            if not (handle.reply or handle.error):
                handle.cancel()

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
    """The end of what the client sends can be read. Early bytes of a next request are no end."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):                       # it was reset, or we have closed it
        return True


# ---------------------------------------------------------------------------------------------------------------------
# The command line.

def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """One flag for every field of Config, and the server's own. Exits with 2 and one line if they are wrong."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY",
                        help="what clients must send as Authorization: Bearer KEY; several: one for each owner of conversations (default: none)")
    parser.add_argument("--max-waiting", type=int, default=256, help="turns that wait for one of --max-running; beyond, 429 (default: 256)")
    parser.add_argument("--max-connections", type=int, default=800, help="beyond, 503 (default: 800)")
    parser.add_argument("--history-max-age-days", type=float, default=30, help="a conversation idle for longer is forgotten (default: 30)")
    parser.add_argument("--history-max-bytes", type=int, default=2**30, help="beyond, the longest idle are forgotten (default: 1 GiB)")
    parser.add_argument("--history", help="file that keeps every conversation's turns (default: one per model, beside this program)")
    parser.add_argument("--system-prompt", help="text, or a file of it, that a chat without a system message begins with; its KV is shared and never "
                        "evicted (default: none)")
    Config.add_flags(parser)
    flags = parser.parse_args(argv)
    flags.history = flags.history or str(default_history(flags.model))
    return flags


def default_history(model: str) -> Path:
    """Beside this file, one per model: token ids mean something to one tokenizer only."""
    slug = re.sub(r"[^\w.]+", "-", model).strip("-.")
    return Path(__file__).with_name("history.sqlite" if model == Config.model else f"history-{slug}.sqlite")


def banner(server: Server) -> str:
    worker, (name, root) = server.engine.worker, server.served
    gpu, cpu = worker.pool.gpu, worker.pool.cpu
    what = name if name == root else f"{name} ({root})"
    return (f"nano-pensieve serves {what} on {gpu.device}, {str(gpu.dtype).removeprefix('torch.')}\n"
            f"  GPU tier  {worker.num_slots:>12,} tokens  {gpu.nbytes / 2**20:>10,.1f} MiB\n"
            f"  CPU tier  {worker.num_places * worker.chunk_size:>12,} tokens  {cpu.nbytes / 2**20:>10,.1f} MiB\n"
            f"  {server.url}   (Ctrl-C stops)")


def open_server(flags: argparse.Namespace) -> Server:
    """ValueError, OSError, OverflowError for flags that cannot be served."""
    for name, least in dict(max_waiting=0, max_connections=1, history_max_age_days=0, history_max_bytes=0).items():
        if not getattr(flags, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(flags, name)}")
    keywords = Config.given(flags)
    sessions = Sessions(keywords.pop("model"), history=flags.history, system_prompt=flags.system_prompt, **keywords)
    server = Server((flags.host, flags.port), sessions.start(), flags.api_key, flags.max_waiting, flags.max_connections)
    limits = 86400 * flags.history_max_age_days, flags.history_max_bytes
    threading.Thread(target=server.prune_history, args=limits, daemon=True).start()
    return server


def serve(server: Server):
    """Until a signal, or until the engine fails: then SystemExit with 1."""
    def stop(*_):                                       # once gently
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.drain()
    signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever()
    except Drained:
        if failure := server.engine.failure:
            sys.exit(f"server.py: {failure}")           # with 1
    finally:
        server.server_close()
        server.sessions.close()


def main():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        flags = parse_flags()
        server = open_server(flags)
        print(banner(server), flush=True)
        serve(server)
        print("stopped")
    except (ValueError, OSError, OverflowError) as error:
        print(f"server.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
