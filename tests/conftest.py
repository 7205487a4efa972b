import pytest
import torch

torch.set_num_threads(1)      # the tests' tensors are small: threads would only wait for one another


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
