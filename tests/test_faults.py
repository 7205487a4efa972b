"""A server that keeps its promises: full queues, slow, silent and vanishing clients, signals, kill -9, full
disks, and nonsense."""
import contextlib
import fcntl
import gc
import http.client
import json
import os
import random
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from eviction import POLICIES, RecomputeCost
from server import prune_by_age
from serving import live, sockets
from serving.operations import OPERATIONS, ChatBody, ReplyBody, ResponseBody
from serving.output import MOST_PIECES, PatientStream
from serving.sessions import Sessions
from serving.sockets import Handler
from sharing import SharingCache

from clients import CONTEXT, ROOT, ask, connect, eventually, fetch, posting, serving, user

openai = pytest.importorskip("openai", reason="needs openai (requirements-dev.txt)")

# a chat that goes on for as long as the context allows
LONG = dict(messages=[user("long")], stream=True, ignore_eos=True)


@pytest.fixture(scope="module")
def server(checkpoint):
    sessions = Sessions(checkpoint, gpu_cache_tokens=2 * CONTEXT, cpu_cache_tokens=CONTEXT, max_running=2,
                        debug=True)
    with serving(sessions, max_waiting=2, max_connections=40) as server:
        yield server


@contextlib.contextmanager
def streaming(server, count=1):
    """Connections on each of which a long answer has begun or waits."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.server_address, timeout=30))
                       for _ in range(count)]
        for connection in connections:
            connection.sendall(posting(LONG))
        yield connections


def idle(server):
    stats = server.engine.stats()
    return stats["running"] == stats["waiting"] == len(server.at_work) == 0


# ---- limits

def test_a_full_queue(server):
    with streaming(server, count=4), connect(server.url) as client:                # 2 run, 2 wait
        eventually(lambda: len(server.at_work) == 4)
        with pytest.raises(openai.RateLimitError) as error:
            ask(client, [user("Hi")])
        assert error.value.response.headers["Retry-After"] == "1" and error.value.type == "rate_limit_error"
        assert client.models.list().data
    eventually(lambda: idle(server))
    with connect(server.url) as client:
        assert ask(client, [user("Hi")])[0]


def test_too_many_connections(server):
    """Those beyond the limit are refused at once, before they have said anything; the others wait to
    be asked."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.server_address, timeout=30))
                       for _ in range(60)]
        eventually(lambda: len(select.select(connections, [], [], 0)[0]) == 20)
        assert all(connection.recv(1000).startswith(b"HTTP/1.1 503")
                   for connection in select.select(connections, [], [], 0)[0])
    eventually(lambda: fetch(server, "GET", "/health")[0] == 200)


def test_a_connection_too_many_hears_of_it_though_it_still_sends(server, monkeypatch):
    """If we closed at once, its system would throw our answer away. So we close a moment later."""
    monkeypatch.setattr(sockets, "LINGER_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "MOST_REFUSED", 5)
    with contextlib.ExitStack() as stack:
        def one_more():
            return stack.enter_context(socket.create_connection(server.server_address, timeout=30))
        for _ in range(40):
            one_more()
        late = one_more()
        for byte in posting(LONG)[:5]:
            late.sendall(bytes([byte]))
            time.sleep(0.05)
        assert late.recv(1000).startswith(b"HTTP/1.1 503") and late.recv(1) == b""
        eventually(lambda: not server.refused)
        monkeypatch.setattr(sockets, "LINGER_SECONDS", 60)
        for _ in range(9):                                  # so many descriptors we do not hold
            late = one_more()
        assert late.recv(12) == b"HTTP/1.1 503"
        eventually(lambda: len(server.refused) == 5)
    eventually(lambda: fetch(server, "GET", "/health")[0] == 200)


def test_one_deadline_for_a_whole_request(server, monkeypatch):
    """A byte now and then does not prolong it."""
    monkeypatch.setattr(sockets, "REQUEST_SECONDS", 0.4)
    for request in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 50, posting(LONG)):
        with socket.create_connection(server.server_address, timeout=30) as connection:
            begin = time.monotonic()
            with pytest.raises(OSError):
                for byte in request:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.02)
            assert 0.3 < time.monotonic() - begin < 3
    eventually(lambda: idle(server))


def test_a_whole_request_has_met_its_deadline(server, monkeypatch):
    """Though it waits then, because another large body is being read."""
    monkeypatch.setattr(sockets, "REQUEST_SECONDS", 0.4)
    with ThreadPoolExecutor(1) as pool:
        with server.reading:
            large = dict(messages=[user("Hi")], max_tokens=2, user="x" * 2 * sockets.LARGE_BYTES)
            answer = pool.submit(fetch, server, "POST", "/v1/chat/completions", large)
            time.sleep(1.2)
        assert answer.result(30)[0] in (200, 400)


def test_a_large_body_waits_for_no_history_that_is_shortened(server):
    """Which may take many rests."""
    large = dict(input="Hi", x=[1] * sockets.LARGE_BYTES)
    with ThreadPoolExecutor(1) as pool:
        with server.shortening:
            shortened = pool.submit(fetch, server, "POST", "/v1/responses/input_tokens",
                                    dict(input="Hi", truncation="auto"))
            time.sleep(0.5)
            assert fetch(server, "POST", "/v1/responses/input_tokens", large)[0] == 200
            assert not shortened.done()
        assert shortened.result(30)[0] == 200


def test_who_reads_one_large_body_does_not_rest_itself(server, monkeypatch):
    monkeypatch.setattr(sockets, "RESTS", 1e5)
    with server.unhurried(b"x" * 2 * sockets.LARGE_BYTES):
        sum(range(100_000))
    assert server.next_reading > time.monotonic() + 10
    server.next_reading = 0.0


def test_of_a_request_we_keep_its_fields_alone(server, monkeypatch):
    """While its turn runs or waits, the JSON of its body is gone, with all that we ignore in it."""
    class Given(dict):
        pass
    given, loads = [], json.loads

    def load(body):
        made = Given(loads(body))
        given.append(weakref.ref(made))
        return made
    monkeypatch.setattr(sockets.json, "loads", load)
    with streaming(server):
        eventually(lambda: server.unsettled.total() == 1)
        gc.collect()
        assert len(given) == 1 and given[0]() is None
    monkeypatch.undo()
    eventually(lambda: idle(server))


def test_a_large_body_is_checked_while_no_other_one_is_read(server, monkeypatch):
    """To check its fields takes longer than to read its JSON."""
    parse, alone = sockets.parse, []

    def watched(*arguments):
        alone.append(server.reading.locked())
        return parse(*arguments)
    monkeypatch.setattr(sockets, "parse", watched)
    for size in 1, 2 * sockets.LARGE_BYTES:
        fetch(server, "POST", "/v1/responses/input_tokens", dict(input="Hi", x=" " * size))
    assert alone == [False, True]


def test_the_deadline_of_a_request_begins_with_the_request(server, monkeypatch):
    """Not with the rest of its connection before it."""
    monkeypatch.setattr(sockets, "REQUEST_SECONDS", 1)
    body = json.dumps(dict(messages=[user("Hi")], max_tokens=2)).encode()

    def slowly():
        yield body[:-5]
        time.sleep(0.7)
        yield body[-5:]
    with contextlib.closing(http.client.HTTPConnection(*server.server_address, timeout=30)) as connection:
        for pieces in body, slowly():
            connection.request("POST", "/v1/chat/completions", pieces, {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read()
            time.sleep(0.7)


def test_who_does_not_read_is_cut_off(server, monkeypatch):
    setup = Handler.setup
    def with_small_buffer(handler):
        setup(handler)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(Handler, "setup", with_small_buffer)
    monkeypatch.setattr(Handler, "timeout", 0.3)
    before = server.engine.stats()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.server_address)
        connection.sendall(posting(LONG))
        eventually(lambda: len(server.at_work) == 1)
        eventually(lambda: idle(server))
    eventually(lambda: server.engine.stats()["slots_free"] >= before["slots_free"])


def test_who_does_not_read_delays_no_other_stream(server, client, monkeypatch):
    """And gets the whole answer in order, once it reads."""
    setup = Handler.setup
    def with_small_buffer(handler):
        setup(handler)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(Handler, "setup", with_small_buffer)
    with socket.socket() as slow:
        slow.settimeout(30)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(server.server_address)
        slow.sendall(posting(LONG | dict(max_tokens=600)))
        eventually(lambda: len(server.at_work) == 1 and not server.unsettled.total())
        begin = time.monotonic()
        for n in range(5):
            assert ask(client, [user(f"number {n}")], stream=True)[0]
        assert time.monotonic() - begin < 10                    # a client has 30 s to read
        eventually(lambda: len(server.at_work) == 1)
        answer = b""
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += slow.recv(2**16)
    deltas = [json.loads(line) for line in re.findall(rb"data: ({.*})", answer)]
    text = "".join(delta["choices"][0]["delta"].get("content", "") for delta in deltas)
    whole = LONG | dict(max_tokens=600, stream=False)
    assert text == fetch(server, "POST", "/v1/chat/completions", whole)[1]["choices"][0]["message"]["content"]


def test_slow_and_silent_connections_do_not_disturb(server):
    """30 of the 40 connections say nothing or little; a normal client is served."""
    with contextlib.ExitStack() as stack, connect(server.url) as client:
        for n in range(30):
            connection = stack.enter_context(socket.create_connection(server.server_address, timeout=30))
            connection.sendall(posting(LONG)[:n])
        for n in range(5):
            assert ask(client, [user(f"number {n}")])[0]
    eventually(lambda: idle(server))


@pytest.mark.soak
def test_500_slow_and_silent_connections_beside_a_normal_client(checkpoint):
    def p99(client):
        def seconds():
            begin = time.monotonic()
            ask(client, [user("Hi")], extra_body=dict(ignore_eos=True))
            return time.monotonic() - begin
        return quantiles([seconds() for _ in range(300)], n=100)[98]
    sessions = Sessions(checkpoint, gpu_cache_tokens=2 * CONTEXT, cpu_cache_tokens=CONTEXT)
    with serving(sessions) as server, connect(server.url) as client, contextlib.ExitStack() as stack:
        quiet = p99(client)
        connections = [stack.enter_context(socket.create_connection(server.server_address, timeout=30))
                       for _ in range(500)]
        def drip():
            while connections:
                for n, connection in enumerate(list(connections)):
                    with contextlib.suppress(OSError):
                        connection.sendall(posting(LONG)[n % 50:n % 50 + n % 2])
                time.sleep(0.5)
        dripping = threading.Thread(target=drip)
        dripping.start()
        disturbed = p99(client)
        connections.clear()
        dripping.join()
    print(f"p99 {1000 * quiet:.1f} ms alone, {1000 * disturbed:.1f} ms beside the others")
    assert disturbed < 2 * quiet, (quiet, disturbed)


@pytest.mark.parametrize("clients", [40, 200])
def test_clients_that_vanish_in_mid_stream(server, clients):
    """All slots come back, and nobody's turn is kept."""
    engine, history, chance = server.engine, server.sessions.history, random.Random(clients)
    before, conversations = engine.stats(), history.conversations()
    def vanish(n):
        with socket.create_connection(server.server_address, timeout=30) as connection:
            connection.sendall(posting(LONG | dict(messages=[user(str(n))])))
            connection.recv(chance.choice([1, 1000, 10_000]))
            if n % 2:                                       # not a farewell, a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(vanish, range(clients)))
    eventually(lambda: idle(server))
    after = engine.stats()
    free_before = before["slots_free"], before["cpu_chunks_free"]
    assert (after["slots_free"], after["cpu_chunks_free"]) >= free_before
    assert history.conversations() == conversations


def test_who_hangs_up_while_its_earlier_turn_is_answered(server, client):
    """That turn goes on; the one that waits for it never begins."""
    name = client.conversations.create().id
    first = client.responses.create(model="ascii", input="long", conversation=name, stream=True,
                                    max_output_tokens=600, extra_body=dict(ignore_eos=True))
    events = iter(first)
    next(events)
    with socket.create_connection(server.server_address, timeout=30) as connection:
        connection.sendall(posting(dict(input="More", conversation=name), "/v1/responses"))
        eventually(lambda: len(server.at_work) == 2)
    eventually(lambda: len(server.at_work) == 1)
    assert [event.type for event in events][-1] == "response.incomplete"
    eventually(lambda: idle(server))
    assert len(client.conversations.items.list(name).data) == 2


def test_out_of_descriptors_is_no_hang_up(zygote, checkpoint, tmp_path):
    """Turns that run go on, and the server comes back."""
    pid, url = zygote.start(checkpoint, tmp_path / "history")
    with connect(url) as client, contextlib.ExitStack() as stack:
        stream = client.responses.create(model="ascii", input="Hi", max_output_tokens=300, stream=True,
                                         extra_body=dict(ignore_eos=True))
        events = iter(stream)
        next(events)
        used = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, used + 2))
        address = re.search(r"//([\d.]+):(\d+)", url).groups()
        for _ in range(10):                                 # 8 of them find no descriptor
            stack.enter_context(socket.create_connection(address, timeout=30))
        assert [event.type for event in events][-1] == "response.incomplete"
        begin = processor_seconds(pid)
        time.sleep(1)
        assert processor_seconds(pid) - begin < 0.5         # it does not try again and again at once
    with connect(url) as client:
        assert ask(client, [user("Hi")])[0]
    os.kill(pid, signal.SIGTERM)
    assert zygote.exit_code() == 0


def test_a_connection_with_a_high_number_is_no_hang_up():
    """As the connections of a busy server have: select.select would take none beyond 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1024)) as high:
            assert not sockets.has_hung_up(high)
            theirs.close()
            assert sockets.has_hung_up(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_hang_up_is_seen_where_the_system_has_no_word_for_half_of_one(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(select, "POLLRDHUP")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not sockets.has_hung_up(ours)
        theirs.close()
        assert sockets.has_hung_up(ours)


@pytest.mark.slow
def test_a_server_that_has_settled_in():
    """It may open as many files as the system allows, and the collector skips what was there at the start."""
    program = ("import gc, resource, sys, server; server.settle_in()\n"
               "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
               "sys.exit(soft != hard or gc.get_freeze_count() < 10_000)")
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_in_the_first_hour_nothing_is_too_old(monkeypatch):
    """So that somebody can set a clock right that was wrong at the start."""
    engine, done = SimpleNamespace(failure=None), []

    def prune(max_age, max_bytes):
        done.append("prune")
        engine.failure = "this ends the loop"
    monkeypatch.setattr("server.time", SimpleNamespace(sleep=done.append))
    prune_by_age(SimpleNamespace(engine=engine, prune=prune), 30 * 86400)
    assert done == [3600, "prune", 60]


def processor_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- many watchers

def watch(server):
    connection = socket.create_connection(server.server_address, timeout=30)
    connection.sendall(b"GET /cache/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def test_one_picture_for_all_watchers(server, client, monkeypatch):
    """Ten watchers see what one sees, for the price of one."""
    pictures = []
    draw = live.picture
    monkeypatch.setattr(live, "picture", 
                        lambda *given: pictures.append(time.monotonic()) or draw(*given))
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(watch(server)) for _ in range(10)]
        files = [stack.enter_context(connection.makefile("rb")) for connection in connections]
        for file in files:
            assert file.readline().startswith(b"HTTP/1.1 200")
        for n in range(5):
            ask(client, [user(f"watch {n}")])
        conversation = ask(client, [user("the last")])[3]

        def last_seen(file):
            """The strip of that conversation in the first event that has it."""
            for line in file:
                if line.startswith(b"data: ") and conversation.encode() in line:
                    entries = json.loads(line[6:])["conversations"]
                    return next(entry["tokens"] for entry in entries if entry["id"] == conversation)
        assert len(set(map(last_seen, files))) == 1
    assert all(later - earlier > 0.09 for earlier, later in pairwise(pictures))
    eventually(lambda: not server.engine.watchers and not server.broadcast.drawing)


def test_the_picture_comes_back_after_a_thread_that_could_not_start(server, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", no_thread)
        next(server.broadcast.follow("", lambda: False))
    assert not server.engine.watchers and not server.broadcast.queues
    end = time.monotonic() + 10
    events = server.broadcast.follow("", lambda: time.monotonic() > end)
    assert json.loads(next(events))["stats"]
    events.close()


def test_a_new_watcher_hears_of_no_old_move(server):
    move = dict(step=1, kind="drop", conversation="of yesterday", start=0, end=16)
    server.broadcast.recent.append(move)        # as when the last watcher leaves before it is told
    events = server.broadcast.follow("", lambda: False)
    assert json.loads(next(events))["transfers"] == []
    events.close()


def test_a_late_watcher_gets_the_latest_picture_alone(server, client):
    events = server.broadcast.follow("", lambda: False)
    first = json.loads(next(events))["stats"]["finished"]
    for n in range(5):
        ask(client, [user(f"late {n}")], max_tokens=2)
        time.sleep(0.3)                                     # a picture, at least
    queue, = server.broadcast.queues
    eventually(lambda: queue.full() and json.loads(queue.queue[0])["stats"]["finished"] == first + 5)
    assert queue.qsize() == 1
    events.close()


def test_one_conversation_is_drawn_alone(server, client, monkeypatch):
    names, drawn, portrait = [ask(client, [user(text)])[3] for text in "abc"], [], live.portrait

    def count(conversation, *arguments):
        drawn.append(conversation.name)
        return portrait(conversation, *arguments)

    monkeypatch.setattr(live, "portrait", count)
    assert client.conversations.retrieve(names[1]).cache["gpu"] and drawn == [names[1]]


def test_a_picture_of_ten_thousand_conversations_is_drawn_between_many_steps():
    """Each step waits for a piece of it, not for all of it; the median, since the machine may be busy."""
    cache = SharingCache(64 * 10_000, 0, 4, 1, 64, POLICIES["retention"](RecomputeCost({4: 1.0}, 1.0), 4))
    for n in range(10_000):
        conversation = cache.open(f"c{n}", [1] * 64)
        cache.admit(conversation, 64, n)
        cache.computed(conversation, 0, 64)
        cache.release(conversation, n)
    cache.refile()
    engine, pieces = SimpleNamespace(cache=cache, clock=lambda: 10_000.0, read_stats=dict), []

    def call(function):
        begin = time.thread_time()
        try:
            return function()
        finally:
            pieces.append(time.thread_time() - begin)

    drawn = live.picture(engine, call)["conversations"]
    assert [entry["chunks"] for entry in drawn] == ["G" * 16] * 10_000
    assert [entry["id"] for entry in drawn if entry["leaves_next"] is not None] == ["c0"]
    assert median(pieces) < 0.001
    cache.forget(cache.conversations["c7"])                 # between two pieces
    half = iter([call, call, lambda function: cache.forget(cache.conversations["c9999"]) or function()])
    drawn = live.picture(engine, lambda function: next(half, call)(function))["conversations"]
    assert len(drawn) == 9998


def test_a_picture_whose_thread_cannot_start(server, monkeypatch):
    """The next watcher gets one."""
    def fails(thread):
        raise RuntimeError("can't start new thread")
    broadcast = live.Broadcast(server.engine)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", fails)
        next(broadcast.follow("", lambda: False))
    deadline = time.monotonic() + 10
    events = broadcast.follow("", lambda: time.monotonic() > deadline)
    assert json.loads(next(events))["stats"]
    events.close()
    assert broadcast._remember not in server.engine.watchers


def test_too_many_watchers(server, monkeypatch):
    monkeypatch.setattr(server, "watchers", threading.BoundedSemaphore(2))
    with watch(server) as one, watch(server) as two:
        assert one.recv(12) == two.recv(12) == b"HTTP/1.1 200"
        with watch(server) as three:
            assert three.recv(12) == b"HTTP/1.1 503"

    def another():
        with watch(server) as connection:
            return connection.recv(12) == b"HTTP/1.1 200"
    eventually(another)


# ---- the end

def test_draining(zygote, checkpoint, tmp_path):
    """SIGTERM: the turn at work is finished and kept, who comes now is sent away, and then the
    process ends with 0."""
    pid, url = zygote.start(checkpoint, tmp_path / "history")
    with connect(url) as client:
        stream = client.responses.create(model="ascii", input="Hi", max_output_tokens=400, stream=True,
                                         extra_body=dict(ignore_eos=True))
        for event, _ in zip(stream, range(10)):
            pass
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(openai.InternalServerError) as error:
            ask(client, [user("Hi")])
        assert error.value.status_code == 503 and "Retry-After" in error.value.response.headers
        *_, last = stream
        assert last.type == "response.incomplete" and last.response.usage.output_tokens == 400
    assert zygote.exit_code() == 0
    pid, url = zygote.start(checkpoint, tmp_path / "history")
    with connect(url) as client:
        assert client.responses.retrieve(last.response.id).output_text == last.response.output_text
        stream = client.responses.create(model="ascii", input="Hi", stream=True,
                                         extra_body=dict(ignore_eos=True))
        next(iter(stream))
        for _ in range(2):                                  # the second does not wait
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.1)
        assert zygote.exit_code() == 0
        with pytest.raises(Exception):
            assert list(stream)[-1].type == "response.completed"


@pytest.fixture
def stopping(checkpoint):
    """A server with an API key, that has begun to stop while half of a request had come, and the client that
    has sent this half. The other half."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=0)
    request = posting(LONG).replace(b"Host", b"Authorization: Bearer k\r\nHost")
    with (serving(sessions, api_keys=["k"]) as server,
          socket.create_connection(server.server_address, timeout=30) as connection):
        connection.sendall(request[:-5])
        eventually(lambda: server.at_work)
        server.drain()
        assert not server.drained.wait(0.3)
        yield server, connection, request[-5:]


def test_a_request_that_has_come_in_part_is_refused_before_the_server_stops(stopping):
    server, connection, rest = stopping
    connection.sendall(rest)
    assert connection.recv(12) == b"HTTP/1.1 503"
    assert not server.drained.wait(0.3)                     # the client may still read
    connection.close()
    assert server.drained.wait(10)


def test_only_who_has_a_key_hears_of_what_the_engine_has_died(stopping, monkeypatch):
    server, *_ = stopping
    monkeypatch.setattr(server.engine.owner, "failure", RuntimeError("what a user said"))
    heard = fetch(server, "GET", "/v1/models", headers={"Authorization": "Bearer k"})
    assert heard[0] == 503 and "what a user said" in heard[1]["error"]["message"]
    for path, status in ("/health", 503), ("/v1/models", 401):
        heard = fetch(server, "GET", path)
        assert heard[0] == status and "what a user said" not in heard[1]["error"]["message"]


def test_a_worker_that_dies_ends_the_process(zygote, checkpoint, tmp_path):
    broken = "import worker; worker.Worker.compute_logits = lambda *_: 1 / 0"
    _, url = zygote.start(checkpoint, tmp_path / "history", before=broken)
    with connect(url) as client:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="division by zero"):
                ask(client, [user("Hi")])
    assert zygote.exit_code() == 1


def test_exit_after_half_a_line(zygote, checkpoint, tmp_path):
    """Our helper hears that a server has been killed, even if this left half a line of its output."""
    # It sleeps first, so that nothing else is printed between the half line and its end.
    half_a_line = "import time; time.sleep(0.2); print('http://127.0.0.1:1', end='', flush=True)"
    zygote.start(checkpoint, tmp_path / "history", before=f"{half_a_line}; os.kill(os.getpid(), 9)")
    assert zygote.exit_code() == -signal.SIGKILL


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.soak)])
def test_kill_9_under_load(zygote, checkpoint, tmp_path, kills):
    """No turn that was told to be done is lost, none is torn, and every conversation goes on exactly."""
    chance, names, told = random.Random(kills), [], {}
    flags = ("--gpu-cache-tokens", str(CONTEXT), "--cpu-cache-tokens", "256")

    def count():
        return sum(map(len, told.values()))

    def say(client, name, text):
        return client.responses.create(model="ascii", input=text, conversation=name, max_output_tokens=8,
                                       extra_body=dict(ignore_eos=True)).output_text

    def talk(url, name):
        with contextlib.suppress(openai.APIConnectionError), connect(url) as client:
            while True:
                text = f"message {len(told[name])} of {names.index(name)}"
                told[name].append((text, say(client, name, text)))

    for _ in range(kills):
        pid, url = zygote.start(checkpoint, tmp_path / "history", *flags)
        with connect(url) as client:
            if len(names) < 12:
                names += [client.conversations.create().id for _ in range(3)]
            for name in names:
                listed = client.conversations.items.list(name, order="asc", limit=100)
                said = [item.content[0].text for item in listed]
                turns = list(zip(said[::2], said[1::2], strict=True))
                assert turns[:len(told.get(name, []))] == told.get(name, [])
                assert len(turns) <= len(told.get(name, [])) + 1
                told[name] = turns
        threads = [threading.Thread(target=talk, args=(url, name)) for name in names if len(told[name]) < 40]
        before = count()
        for thread in threads:
            thread.start()
        eventually(lambda: count() > before or not threads)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(pid, signal.SIGKILL)
        assert zygote.exit_code() == -signal.SIGKILL
        for thread in threads:
            thread.join()
    assert count() >= kills
    uninterrupted = Sessions(checkpoint, gpu_cache_tokens=2 * CONTEXT, cpu_cache_tokens=CONTEXT)
    with serving(uninterrupted) as server, connect(server.url) as client:
        for turns in told.values():
            name = client.conversations.create().id
            assert [say(client, name, text) for text, _ in turns] == [reply for _, reply in turns]


def test_a_full_disk(checkpoint, tmp_path):
    """SQLite's own error: the client is told, nothing of the turn remains, and with space again all
    goes on."""
    sessions = Sessions(checkpoint, gpu_cache_tokens=CONTEXT, cpu_cache_tokens=256, debug=True,
                        history=tmp_path / "history")
    with serving(sessions) as server, connect(server.url) as client:
        def say(text, **more):
            return client.responses.create(model="ascii", input=text, conversation=name, max_output_tokens=8,
                                           extra_body=dict(ignore_eos=True), **more)
        name = client.conversations.create().id
        first = say("one")
        pages = sessions.history._db.execute("PRAGMA page_count").fetchone()[0]
        sessions.history._db.execute(f"PRAGMA max_page_count = {pages}")
        long = "two " * 400
        with pytest.raises(openai.InternalServerError, match="full"):
            say(long)
        last = list(say(long, stream=True))[-1]
        assert last.type == "response.failed" and "full" in last.response.error.message
        with pytest.raises(openai.APIError, match="full"):
            list(client.chat.completions.create(model="ascii", messages=[user(long)], max_tokens=4,
                                                stream=True))
        sessions.history._db.execute("PRAGMA max_page_count = 1000000")
        second = say("two")
        assert second.usage.input_tokens < first.usage.total_tokens + 10
        assert len(client.conversations.items.list(name).data) == 4 and idle(server)


# ---- nobody reads what we print

def full_pipe():
    """Its two ends. Nobody reads, so that one more byte would block."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    return reading, writing


@pytest.mark.parametrize("output", ["no reader", "full disk", "stopped reader"])
def test_what_cannot_be_printed_is_lost(output):
    reading, writing = full_pipe() if output == "stopped reader" else os.pipe()
    if output == "no reader":
        os.close(reading)
    stream = PatientStream(open("/dev/full" if output == "full disk" else writing, "w"))
    begin = time.monotonic()
    for n in range(3 * MOST_PIECES):
        print("gpu 96 · cpu 64", file=stream, flush=True)
    assert time.monotonic() - begin < 10


def test_after_a_failure_printing_goes_on():
    (reading, writing), file = os.pipe(), open("/dev/full", "w")
    stream = PatientStream(file)
    print("lost", file=stream)
    eventually(lambda: not stream._waiting.unfinished_tasks)
    os.dup2(writing, file.fileno())             # as if the disk had space again
    print("kept", file=stream)
    assert os.fdopen(reading, "rb").readline() == b"kept\n"


def test_what_can_be_printed_is_printed():
    reading, writing = os.pipe()
    stream = PatientStream(open(writing, "w", encoding="ascii"))
    print("gpu 96 · cpu 64", file=stream)
    assert os.fdopen(reading, "rb").readline() == b"gpu 96 \\xb7 cpu 64\n"


@pytest.mark.slow
def test_a_server_whose_output_nobody_takes(checkpoint, tmp_path):
    """Its stdout has a reader that has stopped, its stderr is closed. What is written to descriptor 2 all the
    same, by a library or by our own handler of signals, must not land in the history."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, ROOT / "server.py", "--model", checkpoint, "--port", port,
               "--history", tmp_path / "history", "--gpu-cache-tokens", str(CONTEXT)]
    with (subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=full_pipe()[1],
                           preexec_fn=lambda: os.close(2)) as process,
          connect(f"http://127.0.0.1:{port}") as client):
        def listens():
            with contextlib.suppress(openai.APIConnectionError):
                return client.models.list()
        try:
            eventually(listens, 60)
            assert {os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (0, 2)} == {os.devnull}
            for stream in (False, True):
                assert ask(client, [user("Hi")], stream, max_tokens=2)[2]
            with pytest.raises(openai.BadRequestError):     # a line of http.server's
                ask(client, [])
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


# ---- nonsense

def values(schema, schemas):
    """Whatever the schema allows; schemas: those that it may refer to."""
    def of(schema):
        return values(schema, schemas)

    def least_and_most(kind):
        return schema.get(f"min{kind}", 0), min(schema.get(f"max{kind}", 20), 20)
    if schema is True:
        return st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)))
    if "$ref" in schema:
        return of(schemas[schema["$ref"].rpartition("/")[2]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of(*map(of, schema["anyOf"]))
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"))
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"])
        case "string":
            least, most = least_and_most("Length")
            return st.text(min_size=least, max_size=most)
        case "array":
            least, most = least_and_most("Items")
            return st.lists(of(schema["items"]), min_size=least, max_size=min(most, 3))
        case "object" if "properties" in schema:
            required = {name: of(schema["properties"][name]) for name in schema.get("required", ())}
            optional = {name: of(member) for name, member in schema["properties"].items()
                        if name not in required}
            return st.fixed_dictionaries(required, optional=optional)
        case "object" if "patternProperties" in schema:
            (pattern, member), = schema["patternProperties"].items()
            return st.dictionaries(st.from_regex(pattern), of(member), max_size=3)
        case "object":
            return st.dictionaries(st.text(max_size=20), of(schema["additionalProperties"]), max_size=3)
    return st.none()


def questions(operation, documented):
    """A body, or a query: right by the document, but for what chance spoils."""
    nonsense = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
                         st.lists(st.none(), max_size=2), st.just({}))
    fields = documented["paths"][operation.path][operation.method.lower()]
    schemas = documented["components"]["schemas"]
    if body := fields.get("requestBody"):
        right = values(body["content"]["application/json"]["schema"], schemas)
    else:
        right = st.fixed_dictionaries({}, optional={parameter["name"]: values(parameter["schema"], schemas)
                                                    for parameter in fields["parameters"]
                                                    if parameter["in"] == "query"})
    names = st.sampled_from([*operation.fields.model_fields, "tools"])
    spoilt = st.tuples(right, names, nonsense).map(lambda drawn: drawn[0] | {drawn[1]: drawn[2]})
    return st.one_of(right, right, spoilt, nonsense)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.path not in ("/cache/events", "/")],
                         ids=lambda operation: operation.name)
def test_nonsense(server, operation):
    """Whatever comes: an answer in OpenAI's shape, no 5xx, and the server goes on."""
    names = ["conv", "resp_x", "a b/ü%", "\0"]
    limits = {ChatBody: "max_tokens", ResponseBody: "max_output_tokens"}
    with connect(server.url) as client:
        client.post("/conversations", body={}, cast_to=object)
        response = client.responses.create(model="ascii", input="Hi", max_output_tokens=2)
        names += [response.id, response.conversation.id, response.output[0].id]

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), questions(operation, fetch(server, "GET", "/openapi.json")[1]))
    def ask_anything(data, question):
        path = operation.path
        while "{" in path:
            name = quote(data.draw(st.sampled_from(names)), safe="")
            path = path[:path.index("{")] + name + path[path.index("}") + 1:]
        if operation.method == "POST":
            if isinstance(question, dict) and issubclass(operation.fields, ReplyBody):
                question[limits[operation.fields]] = 2      # else as long as the context allows
            status, content = fetch(server, "POST", path, json.dumps(question).encode())
        else:
            pairs = question.items() if isinstance(question, dict) else []
            query = "&".join(f"{quote(name)}={quote(str(value))}" for name, value in pairs) or "%zz"
            status, content = fetch(server, operation.method, f"{path}?{query}")
        assert status < 500
        if status >= 400:
            assert set(content["error"]) == {"message", "type", "param", "code"}
            assert content["error"]["message"]
    ask_anything()
    assert fetch(server, "GET", "/health")[0] == 200
    eventually(lambda: idle(server))


@pytest.mark.soak
def test_thousands_of_requests_made_from_the_document(server):
    schemathesis = pytest.importorskip("schemathesis")
    statuses, resident = Counter(), []
    for operation in schemathesis.openapi.from_url(server.url + "/openapi.json").get_all_operations():
        operation = operation.ok()

        @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy())
        def call(case):
            # else as long as the context allows
            if isinstance(case.body, dict) and {"messages", "input"} & case.body.keys():
                case.body["max_tokens" if "messages" in case.body else "max_output_tokens"] = 2
            status = case.call(timeout=30).status_code
            statuses[operation.label, status] += 1
            assert status < 500
        if operation.path != "/cache/events":               # it never ends
            call()
            resident.append(resident_bytes())
    print(statuses, "MiB", [size >> 20 for size in resident])
    # of the server and, in the same process, of schemathesis
    assert resident[-1] - resident[1] < 128 * 2**20
    eventually(lambda: idle(server))


def resident_bytes() -> int:
    """Memory that this process occupies."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.soak
def test_mixed_traffic(checkpoint, tmp_path):
    """Ten minutes (SOAK_SECONDS) of everything at once in tiers that are far too small, with a worker
    that fails now and then: integrity is checked at every step; throughput is steady; memory,
    threads, file descriptors and the history do not grow."""
    seconds, slots, samples = float(os.environ.get("SOAK_SECONDS", 600)), 3 * CONTEXT // 8, []
    sessions = Sessions(checkpoint, gpu_cache_tokens=slots, cpu_cache_tokens=slots, max_running=6,
                        debug=True, history=tmp_path / "history")
    engine = sessions.engine
    execute, chance = engine.worker.execute, random.Random(0)
    def flaky(batch):
        if batch.spans and chance.random() < 1e-4:
            raise RuntimeError("a cosmic ray")
        return execute(batch)
    engine.worker.execute = flaky

    def chat(client, chance, said):
        said += [user("x" * chance.randrange(1, 60))]
        said += [dict(role="assistant", content=ask(client, said, stream=chance.random() < 0.5)[0])]
        # a beginning that is dropped makes it a new conversation
        return said if chance.random() < 0.9 else said[-4:]

    def respond(client, chance, previous):
        stream = client.responses.create(model="ascii", input="x" * chance.randrange(1, 60),
                                         previous_response_id=previous, truncation="auto",
                                         max_output_tokens=20, extra_body=dict(ignore_eos=True), stream=True)
        for event in stream:
            if chance.random() < 0.01:
                return stream.close()                       # it vanishes
        if chance.random() < 0.1:
            return client.responses.delete(event.response.id)
        return chance.choice([previous, event.response.id])       # a branch now and then

    def talk(seed):
        chance, state = random.Random(seed), None
        with connect(server.url) as client:
            while time.monotonic() < end:
                try:
                    state = chat(client, chance, state or []) if seed % 2 else respond(client, chance, state)
                except (openai.NotFoundError, openai.BadRequestError):      # pruned, or too long
                    state = None
                except openai.APIError as error:                 # as a status, or in mid-stream
                    assert "cosmic ray" in str(error)

    def measure():
        history = sum(file.stat().st_size for file in tmp_path.iterdir())
        samples.append((engine.stats()["generated_tokens"], resident_bytes(), threading.active_count(),
                        len(os.listdir("/proc/self/fd")), history))

    with serving(sessions) as server, ThreadPoolExecutor(10) as pool:
        end = time.monotonic() + seconds
        talking = pool.map(talk, range(10))
        for n in range(20):
            time.sleep(max(end - seconds * (19 - n) / 20 - time.monotonic(), 0))
            sessions.prune(max_age=3600, max_bytes=2**20)
            measure()
        list(talking)                                       # raises what went wrong
        eventually(lambda: idle(server), 30)
        engine.call(engine.cache.check_integrity)
        assert not engine.failure
    speed = [later[0] - earlier[0] for earlier, later in zip(samples, samples[1:])]
    resident, running, files, history = zip(*(sample[1:] for sample in samples[5:]))
    print("tokens", speed, "MiB", [size >> 20 for size in resident], "threads", running, "files", files,
          "history KiB", [size >> 10 for size in history])
    assert sum(speed[-5:]) > 0.7 * sum(speed[4:9])
    assert resident[-1] - resident[0] < 64 * 2**20 and history[-1] < 8 * 2**20
    assert max(running[-5:]) <= max(running[:5]) + 10 and max(files[-5:]) <= max(files[:5]) + 10
