"""OpenAI's chat API over one engine. It adds nothing to the idea, it lets any chat client use it.

A client resends its whole history with every message. It is recognised by its text (engine.submit_chat), so only what is new is
tokenised and the rest comes from the cache; an edited history starts a branch. `conversation_id` in the body, or the header
X-Session-ID, decides between conversations of equal text: a hint, never trusted. Under each answer the server prints where the
context came from, and GET /cache tells it:

    gpu 96 · cpu 64 · recomputed 32 · new 14 · first token 9 ms

Each connection has a thread, which only waits for the engine's. Invariants: a client is told that its turn is done only when the
history has it; a client that hangs up cancels its turn, also while the turn still waits and nothing is written."""
import argparse
import hmac
import json
import re
import reprlib
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine import Config, Engine, Handle, Reply
from openai_api import APIError, completion, event, parse_chat, prometheus, usage

MAX_BODY_BYTES = 2 * 2**20
SOCKET_SECONDS = 30         # of silence, then a client that sends or reads too slowly is cut off
POLL_SECONDS = 0.1          # between two looks at whether a client has hung up
LINGER_SECONDS = 2          # for a client that is still sending when it was answered
TURNS_SHOWN = 100           # by /cache


def as_api_error(error: Exception) -> APIError:
    """A ValueError of the engine is for the client to read; anything unforeseen is our fault, and is printed."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, ValueError):
        return APIError(400, str(error))
    traceback.print_exception(error)
    return APIError(500, f"{type(error).__name__}: {error}")


class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def __init__(self, address: tuple[str, int], engine: Engine, api_key: str | None = None):
        """engine: started. OSError if the address cannot be had."""
        self.engine, self.api_key = engine, api_key
        self.served = Path(engine.config.model).resolve().name, engine.config.model
        self.turns, self.started = deque(maxlen=TURNS_SHOWN), int(time.time())
        super().__init__(address, Handler)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    def finish_turn(self, handle: Handle) -> Reply:
        """Waits until the turn is in the history, and tells where its context came from."""
        reply = handle.result()
        if reply.finish_reason == "cancelled":
            raise ConnectionAbortedError("the client has hung up, or the server stops")
        milliseconds = round(1000 * handle.first_token_seconds)
        self.turns.append(dict(conversation=handle.conversation, **reply.usage, first_token_ms=milliseconds,
                               finish_reason=reply.finish_reason))
        print(f"{reply.sources} · first token {milliseconds} ms", flush=True)
        return reply


class Handler(BaseHTTPRequestHandler):
    protocol_version = default_request_version = "HTTP/1.1"
    timeout, disable_nagle_algorithm = SOCKET_SECONDS, True
    server: Server

    # ---- what can be asked

    def chat(self):
        body = self.read_json()
        if body.get("conversation_id") is None:
            body["conversation_id"] = self.headers.get("X-Session-ID")
        request = parse_chat(body, self.server.served)
        handle = self.server.engine.submit_chat(request.messages, request.hint, **request.options)
        envelope = dict(id=f"chatcmpl-{uuid.uuid4().hex}", created=int(time.time()), model=self.server.served[0])
        with cancelled_if_gone(self.connection, handle):
            if request.stream:
                self.stream(envelope, handle, request.include_usage)
            else:
                self.send(200, completion(envelope, handle, self.server.finish_turn(handle)))

    def stream(self, envelope: dict, handle: Handle, include_usage: bool):
        """Events; the last ones after the turn is in the history. What goes wrong on the way is the last event."""
        envelope = dict(envelope, usage=None) if include_usage else envelope
        self.begin_stream()
        try:
            self.send_event(dict(event(envelope, dict(role="assistant", content="")), conversation_id=handle.conversation))
            for piece in handle.pieces():
                self.send_event(event(envelope, dict(content=piece)))
            reply = self.server.finish_turn(handle)
            self.send_event(event(envelope, {}, reply.finish_reason))
            if include_usage:
                self.send_event(dict(event(envelope, {}), choices=[], usage=usage(reply)))
            self.send_event("[DONE]")
        except OSError:
            raise
        except Exception as error:
            self.send_event(as_api_error(error).body)
        self.send_piece(b"")

    def models(self):
        name, root = self.server.served
        model = dict(id=name, object="model", created=self.server.started, owned_by="nano-pensieve", root=root,
                     max_model_len=self.server.engine.scheduler.limit)
        self.send(200, dict(object="list", data=[model]))

    def health(self):
        if failure := self.server.engine.failure:
            raise APIError(503, str(failure))
        self.send(200, dict(status="ok"))

    def metrics(self):
        self.send(200, prometheus(self.server.engine.stats(), self.server.served[0]), "text/plain; version=0.0.4; charset=utf-8")

    def cache(self):
        engine = self.server.engine
        self.send(200, dict(stats=engine.stats(), conversations=engine.cached_conversations(), turns=list(self.server.turns)))

    ROUTES = {"/v1/chat/completions": ("POST", chat), "/v1/models": ("GET", models), "/health": ("GET", health),
              "/metrics": ("GET", metrics), "/cache": ("GET", cache)}

    # ---- how it comes in

    def handle(self):
        with suppress(ConnectionError):                 # nobody is there to be answered
            super().handle()

    def serve(self):
        """Any request. One that is refused ends its connection, since its body may be unread."""
        path = self.path.partition("?")[0]
        method, answer = self.ROUTES.get(path, (None, None))
        if self.command != "POST" and ("Content-Length" in self.headers or "Transfer-Encoding" in self.headers):
            self.close_connection = True                # nor do we read such a body
        try:
            if path != "/health":
                self.check_key()
            if method is None:
                raise APIError(404, f"there is no {path:.100}; there are {', '.join(self.ROUTES)}")
            if method != self.command:
                raise APIError(405, f"{path} wants {method}, got {self.command}")
            answer(self)
        except OSError:
            raise
        except Exception as error:
            error = as_api_error(error)
            self.send(error.status, error.body)

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = serve

    def check_key(self):
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        wanted = self.server.api_key
        if wanted and not (scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), wanted.encode())):
            raise APIError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")

    def read_json(self) -> dict:
        length = self.headers.get("Content-Length")
        if length is None or "Transfer-Encoding" in self.headers:
            raise APIError(411, "send the body with its Content-Length: bodies in pieces are not read")
        if not re.fullmatch("[0-9]{1,18}", length):
            raise APIError(400, f"Content-Length must be a number of bytes, got {length:.100}")
        if int(length) > MAX_BODY_BYTES:
            raise APIError(413, f"the body has {length} bytes, more than the {MAX_BODY_BYTES} that are accepted")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise APIError(400, f"the body must be a JSON object, got {reprlib.repr(body)}")
        return body

    # ---- how it goes out

    def send(self, status: int, content: dict | str, content_type: str = "application/json"):
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
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
        self.send_piece(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

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
def cancelled_if_gone(connection: socket.socket, handle: Handle):
    """Cancels the turn when the client hangs up, even while nothing is written to it, or when writing fails."""
    over = threading.Event()

    def watch():
        while not over.wait(POLL_SECONDS):
            if has_hung_up(connection):
                return handle.cancel()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except OSError:
        handle.cancel()
        with suppress(Exception):
            handle.result()
        raise
    finally:
        over.set()


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
    parser.add_argument("--api-key", help="what clients must send as Authorization: Bearer KEY; default: nothing")
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
    engine = Engine(**Config.given(flags))
    return Server((flags.host, flags.port), engine.start(), flags.api_key)


def main():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        flags = parse_flags()
        server = open_server(flags)
        print(banner(server), flush=True)
        try:
            server.serve_forever()
        finally:
            server.server_close()
            server.engine.close()
    except (ValueError, OSError, OverflowError) as error:
        print(f"server.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
