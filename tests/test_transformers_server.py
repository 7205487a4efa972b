"""A server around transformers: what it remembers, it need not compute, and it says the same."""
import contextlib
import threading

import pytest

from clients import make_checkpoint
from experiments.remote import WORDS, RemoteEngine
from experiments.transformers_server import Transformers, transformers_server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory)
    return directory


@contextlib.contextmanager
def rival(checkpoint, keep):
    with transformers_server(0, str(checkpoint), keep) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            engine = RemoteEngine(f"http://127.0.0.1:{server.server_address[1]}")
            engine.words = WORDS                        # the same ones for each server
            yield engine
        finally:
            server.shutdown()
            thread.join()


def replies(engine, chats):
    """(text, cached tokens) of a turn in each of these chats, one after the other."""
    for number, name in enumerate(chats):
        turn = engine.submit([number] * 30, name, 8, True, lambda turn: None)
        engine.close()
        yield turn.result().text, turn.usage["gpu"]


def test_transformers_keeps_the_chats_used_last(checkpoint):
    chats = ["a", "b", "a", "b", "c", "a"]
    cached = {}
    for keep in (0, 1, 2):
        with rival(checkpoint, keep) as engine:
            texts, cached[keep] = zip(*replies(engine, chats))
        assert texts == cached.setdefault("texts", texts)
    assert cached[0] == cached[1] == (0,) * 6
    assert [tokens > 30 for tokens in cached[2]] == [False, False, True, True, False, False]


def test_transformers_stops_behind_an_end_token_unless_told_to_go_on(checkpoint):
    model, pieces = Transformers(str(checkpoint), keep=1), []
    body = dict(messages=[dict(role="user", content="Hi")], max_tokens=6)
    assert model.reply(body, pieces.append)["completion_tokens"] == 6
    model.end, = model.tokenizer.encode(pieces[2])
    assert model.reply(body, pieces.append)["completion_tokens"] == 1 + pieces.index(pieces[2])
    assert model.reply(body | dict(ignore_eos=True), pieces.append)["completion_tokens"] == 6
