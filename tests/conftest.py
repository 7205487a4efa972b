import pytest
import torch

torch.set_num_threads(1)      # the tests' tensors are small: threads would only wait for one another


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a small random model, see clients.make_checkpoint."""
    from clients import make_checkpoint                   # here, since its imports take seconds
    directory = tmp_path_factory.mktemp("models") / "ascii"
    make_checkpoint(directory)
    return directory


@pytest.fixture
def client(server):
    """An openai client of the module's own `server`."""
    from clients import connect
    with connect(server.url) as client:
        yield client


@pytest.fixture(scope="session")
def zygote():
    """Starts servers in processes of their own, quickly."""
    from clients import Zygote
    zygote = Zygote()
    yield zygote
    zygote.close()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
