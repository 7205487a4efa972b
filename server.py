"""The entry point: python server.py [flags], or --help.

    flags -> Sessions (engine, history, tokenizer) -> Server (sockets) -> banner -> requests

- A signal while we start ends the process at once.
- After SIGTERM the turns at work have 30 seconds to finish, then the server stops. After a second
  signal it stops at once. Ctrl-C stops it at once, too. (With --kv-file it then writes that file,
  unless one more signal comes: that leaves the file as it was.)
- If the engine fails, every client is told, and the process exits with 1. If the server cannot
  start, it prints one line and exits with 2.
"""
import os
import signal


def leave(number: int, frame: object):
    """For a signal while we start: no turn is at work, so the process may end at once."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    # If stderr is closed, the next file that we open would take its place, and what is meant for
    # stderr would land in that file: in the history. So we fill the places 0 to 2 first.
    while os.open(os.devnull, os.O_RDWR) < 3:
        pass
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)            # first of all, since the imports below take seconds
    # Torch's threads on a CPU sleep while they wait for one another. By default they spin, and on a
    # busy machine they then keep each other from the cores. OpenMP reads this when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import atexit
import gc
import re
import resource
import sys
import threading
import time
import traceback
import webbrowser
from contextlib import ExitStack, suppress
from pathlib import Path

from checkpoint import find_checkpoint
from config import Config, require
from engine import Engine
from serving.example import example_for
from serving.output import PatientStream
from serving.sessions import Sessions
from serving.sockets import Drained, Server, listen
from serving.tokenizer import load_tokenizer

KEYS_VARIABLE = "NANO_PENSIEVE_API_KEYS"    # in the environment; blanks stand between the keys
DAY = 86400                 # seconds
PRUNE_SECONDS = 60          # between two checks of the history's age
FIRST_PRUNE_SECONDS = 3600  # before the first of these checks, at most
ABOUT = """A chat server that remembers: after an answer, the KV-tokens of the conversation stay in
two tiers. The first (GPU) tier is the memory of the GPU, the second (CPU) tier is ordinary memory.
On a machine without a GPU the first tier lies in ordinary memory, too; everything works the same
there, only slower."""
TOKENIZER_NEEDED = (
    "a checkpoint with tokenizer.json, or with vocab.json and merges.txt, since clients send text "
    "(transformers makes tokenizer.json from other files: "
    "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY))")


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The server's own flags, and one for every field of Config. Prints one line and
    exits with 2 if a flag is wrong."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False, description=ABOUT)

    def flag(name: str, default: str | int | float, help: str):
        parser.add_argument(name, type=type(default), default=default,
                            help=f"{help} (default: {default})")
    flag("--host", "127.0.0.1", "the address to listen on")
    flag("--port", 8000, "the port to listen on; 0: any that is free")
    parser.add_argument("--api-key", action="extend", metavar="KEY",
                        type=lambda given: content_of(given).split("\n"),
                        default=os.environ.get(KEYS_VARIABLE, "").split(),
                        help="a key that clients must send, or @FILE with a key in each line; "
                             "repeat the flag for more keys, each with conversations of its own; "
                             f"the variable {KEYS_VARIABLE} may hold keys, too (default: no key "
                             "is needed)")
    parser.add_argument("--metrics-key", metavar="KEY", type=content_of,
                        help="a key that opens /metrics and nothing else, and shows there the "
                             "counts of all API keys (default: none; each API key sees its "
                             "own counts)")
    parser.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN",
                        help="a site whose pages may use this server, such as "
                             "https://chat.example; *: all sites; may be repeated "
                             "(default: only the server's own page)")
    parser.add_argument("--name", default="", metavar="NAME",
                        help="this server's name among several behind a router, for example s1: "
                             "the ids that it makes contain the name (default: no name)")
    flag("--max-waiting", 256,
         "turns that may wait while --max-running others run; one more gets a 429")
    flag("--max-connections", 800, "connections that may be open; one more gets a 503")
    flag("--history-max-age-days", 30.0, "a conversation that is idle for longer is forgotten")
    flag("--history-max-bytes", 2**30,
         "while the history is larger, the conversation that is idle for longest is forgotten; "
         "several API keys have equal shares of it")
    parser.add_argument("--strict", action="store_true",
                        help="refuse a request with a field that this server does not know, "
                             "instead of ignoring the field")
    parser.add_argument("--history", metavar="FILE",
                        help="the file that keeps all conversations (default: one for each model, "
                             "beside server.py)")
    parser.add_argument("--kv-file", metavar="PATH",
                        help="a file that keeps the KV-tokens while the server is stopped, at most "
                             "as large as the CPU tier (default: none; they are recomputed)")
    parser.add_argument("--system-prompt", metavar="TEXT",
                        help="a text, or a file with a text, that chats without a system message "
                             "begin with; its KV-tokens are shared and never evicted "
                             "(default: none)")
    parser.add_argument("--demo", action="store_true",
                        help="tiers that hold three short chats, a history in memory, a stateless "
                             "engine to compare with, and a browser in which the chat page plays "
                             "its example")
    Config.add_flags(parser)
    flags = parser.parse_args(argv)
    if flags.demo:      # other defaults; we parse again, since flags that are given still count
        parser.set_defaults(**for_demo(flags.model, flags.chunk_size))
        flags = parser.parse_args(argv)
    flags.history = flags.history or str(default_history(flags.model))
    return flags


def content_of(given: str) -> str:
    """The file that a flag names after an @, else what is given. Others on the machine can read
    the flags of a process."""
    return Path(given[1:]).read_text().rstrip("\n") if given.startswith("@") else given


def default_history(model: str) -> Path:
    """A file beside this one. Each model has its own, since token ids belong to one tokenizer."""
    slug = re.sub(r"[^\w.]+", "-", model).strip("-.")
    name = "history.sqlite" if model == Config.model else f"history-{slug}.sqlite"
    return Path(__file__).with_name(name)


def for_demo(model: str, chunk_size: int) -> dict:
    """The defaults of other flags with --demo: tiers that fit the example, and nothing is kept.
    ValueError for a model that cannot read the example."""
    directory = find_checkpoint(model)
    tokenizer = load_tokenizer(directory)
    require(tokenizer is not None, "model", TOKENIZER_NEEDED, model)
    gpu, cpu = example_for(directory).tiers(tokenizer, chunk_size)
    return dict(gpu_cache_tokens=gpu, cpu_cache_tokens=cpu, history=":memory:")


def banner(server: Server) -> str:
    """The model, the device, the size of both tiers, and the address."""
    worker, (name, path) = server.engine.worker, server.model_names
    gpu, cpu = worker.pool.gpu, worker.pool.cpu
    tiers = [("GPU tier", worker.num_slots, gpu),
             ("CPU tier", worker.num_places * worker.chunk_size, cpu)]
    model = name if name == path else f"{name} ({path})"
    dtype = str(gpu.dtype).removeprefix("torch.")
    lines = [f"nano-pensieve serves {model} on {gpu.device}, {dtype}"]
    for tier, tokens, tensor in tiers:
        lines.append(f"  {tier}  {tokens:>12,} tokens  {tensor.nbytes / 2**20:>10,.1f} MiB")
    if gpu.device.type == "cpu":
        lines.append("  There is no GPU here: "
                     "the GPU tier lies in ordinary memory, like the CPU tier.")
    return "\n".join([*lines, f"  {server.url}   (Ctrl-C stops)"])


def open_server(flags: argparse.Namespace) -> Server:
    """A server that listens, with its engine started. ValueError, OSError or OverflowError for
    flags that cannot be served."""
    limits = dict(max_waiting=0, max_connections=1, history_max_age_days=0, history_max_bytes=0)
    for name, least in limits.items():
        require(getattr(flags, name) >= least, name, f"at least {least}", getattr(flags, name))
    options = Config.given(flags)
    with ExitStack() as opened:                     # closes these if anything below fails
        listener = opened.enter_context(listen(flags.host, flags.port))    # before the model loads
        sessions = Sessions(options.pop("model"), history=flags.history,
                            system_prompt=flags.system_prompt, name=flags.name,
                            kv_file=flags.kv_file, **options)
        opened.callback(sessions.close)
        require(sessions.tokenizer is not None, "model", TOKENIZER_NEEDED, flags.model)
        server = Server(listener, sessions.start(), flags.api_key, flags.max_waiting,
                        flags.max_connections, flags.allow_origin, flags.history_max_bytes,
                        flags.metrics_key, flags.strict)
        if flags.demo:
            begin_demo(server)
        opened.pop_all()
    max_age = DAY * flags.history_max_age_days
    threading.Thread(target=prune_by_age, args=(sessions, max_age), daemon=True).start()
    return server


def prune_by_age(sessions: Sessions, max_age: float):
    """Forgets conversations that are idle for longer than max_age seconds. Runs in a thread of its
    own, until the engine fails. In the first hour (or max_age, if that is less) nothing is too old:
    if the clock was ahead at the start, somebody has time to set it right."""
    time.sleep(min(max_age, FIRST_PRUNE_SECONDS))
    while not sessions.engine.failure:
        try:
            sessions.prune(max_age, float("inf"))
        except Exception as error:                      # the next round tries again
            traceback.print_exception(error)
        time.sleep(PRUNE_SECONDS)


def begin_demo(server: Server):
    """Starts a stateless engine, which answers every turn, too: it only reads the history. The chat
    page gets its example, if the tiers have its sizes. ValueError or OSError if that engine cannot
    start."""
    config, example = server.engine.config, example_for(server.engine.directory)
    tiers = example.tiers(server.sessions.tokenizer, config.chunk_size)
    if (config.gpu_cache_tokens, config.cpu_cache_tokens) == tiers:
        server.example = example.said
    options = vars(config) | dict(stateless=True, cpu_cache_tokens=0)
    server.stateless = Sessions(Engine(**options).start(), history=server.sessions.history)


def open_browser(url: str):
    """Some browsers come back only when they are closed, so call this in a thread of its own."""
    if not webbrowser.open(url):
        print(f"There is no browser here. Open {url} in yours.", flush=True)


def serve_until_stopped(server: Server):
    """Returns after SIGTERM, when the turns at work are done. KeyboardInterrupt after SIGINT or a
    second SIGTERM, SystemExit with 1 if the engine fails."""
    def stop(*_):
        signal.signal(signal.SIGTERM, signal.default_int_handler)       # for a second SIGTERM
        server.drain()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever()
    except Drained:
        if failure := server.engine.failure:
            sys.exit(f"server.py: {failure}")
    finally:
        server.server_close()
        server.sessions.close()
        if server.stateless:
            server.stateless.engine.close()


def settle_in():
    """Prepares the process to serve, once all is loaded. Every connection needs a descriptor, so we
    take as many as the system gives us. The objects that exist now will stay, so the garbage
    collector need not look at them again. From now on printing never waits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):              # "no limit" may be more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)              # or Triton takes these objects for leaks, and says so
    sys.stdout, sys.stderr = PatientStream(sys.stdout), PatientStream(sys.stderr)


def main():
    with suppress(KeyboardInterrupt):
        try:
            flags = parse_flags()
            server = open_server(flags)
        except (ValueError, OSError, OverflowError) as error:
            print(f"server.py: {error}", file=sys.stderr)
            sys.exit(2)
        settle_in()
        print(banner(server))
        if not (server.guard.is_local or server.guard.keys):
            print(f"warning: whoever reaches {flags.host} may use this server without a key: "
                  "--api-key sets one", file=sys.stderr)
        if flags.demo:
            play = f"{server.url}/#play"
            threading.Thread(target=open_browser, args=[play], daemon=True).start()
        serve_until_stopped(server)
    print("stopped")


if __name__ == "__main__":
    main()
