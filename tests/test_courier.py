"""The thread that carries all streams: order, bells, and clients that are slow or gone. Each test plays a
stream's own thread."""
import contextlib
import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from handles import Outbox
from serving import courier as module
from serving.courier import Courier, Delivery

from clients import eventually

NOTHING = lambda: b"still here\n"


@pytest.fixture
def courier():
    courier = Courier()
    yield courier
    courier.close()


@pytest.fixture
def sockets():
    """(ours, the client's). Ours has a timeout, as those of the server do."""
    ours, client = socket.socketpair()
    ours.settimeout(30)
    client.settimeout(30)
    with ours, client:
        yield ours, client


def outbox():
    return Outbox(lambda condition: None)


def lines(box):
    """The pieces of a stream: a line for each item, then a last one."""
    for new in box.news(wait=False):
        if not new:
            yield box
        for item in new:
            yield b"%d\n" % item
    yield b"the end\n"


def read_all(client):
    return b"".join(iter(lambda: client.recv(2**16), b""))


@contextlib.contextmanager
def carrying(courier, connection, pieces, still_here=NOTHING):
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(courier.carry, connection, pieces, still_here)


def test_it_carries_what_comes_and_leaves_the_end_to_the_caller(courier, sockets):
    ours, client = sockets
    box = outbox()
    pieces = lines(box)
    box.put(0)
    with carrying(courier, ours, pieces) as carried:
        for n in range(1, 100):
            assert client.recv(100) == b"%d\n" % (n - 1)        # it sleeps, mostly, when the next one comes
            box.put(n)
        assert client.recv(100) == b"99\n" and not carried.done()
        box.close()
        assert carried.result(30) == b""
    assert [*pieces] == [b"the end\n"]


def test_all_items_come_in_order_however_they_are_written(courier, sockets):
    ours, client = sockets
    box = outbox()
    def write():                                                # as Handler.write
        for piece in (pieces := lines(box)):
            late = not isinstance(piece, bytes) and not piece.closed.is_set()
            piece = courier.carry(ours, pieces, NOTHING) if late else piece
            ours.sendall(piece if isinstance(piece, bytes) else b"")
        ours.shutdown(socket.SHUT_WR)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(write)
        got = pool.submit(read_all, client)
        for n in range(3000):
            box.put(n)
            if n % 7 == 0:
                time.sleep(1e-4)
        box.close()
    assert got.result() == b"".join(b"%d\n" % n for n in range(3000)) + b"the end\n"


def test_an_item_that_comes_just_before_the_bell_hangs(courier, sockets):
    ours, client = sockets
    box = outbox()

    class Late(list):
        def append(self, bell):
            if not box.items:
                box.items.append(7)                             # nobody rings for this one
            super().append(bell)
    box.bells = Late()
    with carrying(courier, ours, lines(box)) as carried:
        assert client.recv(100) == b"7\n"
        box.close()
        carried.result(30)


def test_a_stream_whose_client_takes_nothing_goes_back_to_its_thread(courier, sockets):
    """That thread gets the bytes that the client did not take. Until it comes again, nobody makes more."""
    ours, client = sockets
    box, made = outbox(), []

    def large():
        for piece in lines(box):
            if isinstance(piece, bytes):
                made.append(piece := piece * 50_000)
            yield piece
    pieces = large()
    with carrying(courier, ours, pieces) as carried:
        while not carried.done():                               # the system's buffers fill
            box.put(len(box.items))
            time.sleep(0.001)
        box.put(-1)                                             # the old bell may still hang there
        time.sleep(0.1)
        count, rest = len(made), carried.result()
    assert count < len(box.items) and made[-1].endswith(rest) and rest
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(read_all, client)
        ours.sendall(rest)
        box.close()
        ours.sendall(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
        ours.shutdown(socket.SHUT_WR)
        assert taken.result(60) == b"".join(made)
    assert made == [b"%d\n" % n * 50_000 for n in box.items] + [b"the end\n" * 50_000]


def test_a_stream_that_went_back_is_left_alone(sockets):
    """Its bell may still hang on its outbox, and a look may be due."""
    ours, client = sockets
    delivery = Delivery(ours, iter([b"one\n"]), NOTHING, SimpleQueue())
    delivery.over.set()
    delivery.last_sent = -math.inf
    delivery.go_on()
    delivery.check()
    client.settimeout(0)
    with pytest.raises(BlockingIOError):
        client.recv(100)
    assert [*delivery.pieces] == [b"one\n"]


def test_a_full_client_that_is_told_that_we_are_here(courier, sockets, monkeypatch):
    """The stream's own thread waits until the client has taken that."""
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.1)
    ours, client = sockets
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(ours.fileno(), b"x" * 1000)
    with carrying(courier, ours, lines(outbox())) as carried:
        assert carried.result(30) == NOTHING()


def test_a_client_that_takes_nothing_delays_no_other(courier, sockets):
    ours, client = sockets
    with contextlib.ExitStack() as stack:
        full, other = map(stack.enter_context, socket.socketpair())
        full.settimeout(30)
        stalled, box = outbox(), outbox()
        for _ in range(1000):
            stalled.put(10**1000)
        stalled.close()
        first = stack.enter_context(carrying(courier, full, lines(stalled)))
        second = stack.enter_context(carrying(courier, ours, lines(box)))
        begin = time.monotonic()
        for n in range(100):
            box.put(n)
            assert client.recv(100) == b"%d\n" % n
        assert time.monotonic() - begin < 10                    # far less than the timeout
        assert first.result(0)
        box.close()
        assert second.result(30) == b""


def test_an_error_is_the_callers_after_what_came_before(courier, sockets):
    ours, client = sockets
    box = outbox()

    def fails():
        yield b"one\n"
        yield box
        yield b"two\n"
        raise ValueError("a bug")
    with carrying(courier, ours, fails()) as carried, pytest.raises(ValueError, match="a bug"):
        carried.result(30)
    assert client.recv(100) == b"one\ntwo\n"


@pytest.mark.parametrize("silent", [False, True])
def test_a_client_that_is_gone(courier, sockets, monkeypatch, capsys, silent):
    """The next text tells it, or a piece that says nothing new."""
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0 if silent else 60)
    ours, client = sockets
    client.close()
    box = outbox()
    with carrying(courier, ours, lines(box)) as carried:
        if not silent:
            time.sleep(3 * module.POLL_SECONDS)
            assert not carried.done()
            box.put(1)
        with pytest.raises(ConnectionError):
            carried.result(30)
    assert not capsys.readouterr().err


def test_a_silent_stream_says_that_we_are_still_here(courier, sockets, monkeypatch):
    monkeypatch.setattr(module, "KEEPALIVE_SECONDS", 0.2)
    ours, client = sockets
    box = outbox()
    with carrying(courier, ours, lines(box)) as carried:
        begin = time.monotonic()
        assert client.recv(100) == client.recv(100) == NOTHING() and time.monotonic() - begin > 0.4
        box.put(5)
        assert client.recv(100) == b"5\n"
        box.close()
        carried.result(30)
        assert not courier.checks


def test_after_close_the_thread_ends_with_the_last_answer():
    threads = set(threading.enumerate())
    courier = Courier()
    thread, = set(threading.enumerate()) - threads
    look = lambda: None
    courier.checks.add(look)
    courier.close()
    time.sleep(3 * module.POLL_SECONDS)
    assert thread.is_alive()
    courier.checks.discard(look)
    eventually(lambda: not thread.is_alive())
