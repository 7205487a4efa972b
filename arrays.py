"""Arrays: numpy's on the host, torch's on the device, and Triton's kernels where there is Triton.

The host describes a step in small arrays of integers. To start a copy takes longer than to copy a
few numbers. So it joins the arrays, copies them once, and takes the copy apart again:

    [7, 5], [9]  -- join -->  [7, 5, 9]  -- one copy -->  [7, 5, 9]  -- split_like -->  [7, 5], [9]

Files with kernels take `triton`, `tl` and `jit` from here. Without Triton (on macOS and Windows)
the kernels are defined all the same, but never run: `runs_triton` says where they do.
"""
import os

import numpy as np
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:
    triton = tl = None

    def jit(function=None, **options):
        return function or jit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"     # Triton asks when a kernel is defined


def runs_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run there. If not, their references in torch do."""
    return triton is not None and (device.type == "cuda" or INTERPRETED) and dtype != torch.float64


def enumerate_each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number `counts[i]` things of each owner i.
    [2, 3] -> owners [0, 0, 1, 1, 1] and numbers [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - first[owner]


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays -> int32 tensors on the device, in one copy for which the host does not wait.
    The tensors lie one behind another, and the first of them is aligned."""
    flat = torch.from_numpy(join(arrays))
    flat = flat.pin_memory() if device.type == "cuda" else flat
    return split_like(flat.to(device, non_blocking=True), arrays)


def join(arrays: list[np.ndarray]) -> np.ndarray:
    """All elements, one array behind another: [sum of sizes] int32."""
    return np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="same_kind")


def split_like(flat: Tensor, arrays: list[np.ndarray]) -> list[Tensor]:
    """The tensors that join(arrays) has put into `flat`, in the shapes of the arrays."""
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays)]
