import os
import threading

import pytest
import torch

torch.set_num_threads(1)      # the tests' tensors are small, so threads would mostly wait


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a small random model; see clients.make_checkpoint."""
    from clients import make_checkpoint                   # imported here, because it takes seconds
    directory = tmp_path_factory.mktemp("models") / "ascii"
    make_checkpoint(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def engines():
    """A module's tests close every engine that they start: it would step beside all later tests."""
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "engine"] == []


@pytest.fixture
def client(server):
    """An openai client of the server that the test's module starts. When the test is over, the server's books
    are checked: after each step that would take two thirds of all its time."""
    from clients import connect
    with connect(server.url) as client:
        yield client
    server.engine.call(server.engine.cache.check_integrity)


@pytest.fixture(scope="session")
def zygote():
    """Starts servers quickly, each in its own process."""
    from clients import Zygote
    zygote = Zygote()
    yield zygote
    zygote.close()


def pytest_configure(config):
    """Hide a GPU, unless tests marked `gpu` are asked for: an engine that is told no device would take it, in
    bfloat16. Called before anything asks CUDA. The processes that tests start inherit this."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
