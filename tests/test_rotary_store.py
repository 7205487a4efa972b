"""The kernel that rotates q and k and stores K and V, against plain torch: in the interpreter (in a
process of its own), and on a GPU where there is one. test_model.py checks plain torch against
transformers."""
import json

import pytest
import torch
from test_attention_kernel import GPU, run_python, wrongs

from rotary_store import rotate_and_store, rotate_and_store_reference

CASES = [  # tokens, heads, KV heads, D, rotated?
    (1, 4, 2, 16, True),
    (5, 40, 40, 128, True),         # several tiles of heads
    (3, 9, 3, 64, True),
    (4, 71, 1, 80, True),
    (2, 3, 3, 10, True),
    (2, 4, 4, 10, False),
    (3, 5, 5, 7, False),            # an odd head size cannot be rotated
    (3, 12, 12, 64, False),
]


def checks(device, dtypes):
    """(name, function, arguments) for `wrongs`."""
    for dtype in dtypes:
        for case in CASES:
            yield f"{dtype}: {case}", check_case, (case, dtype, device)
    yield "far slots", check_far_slots, (device,)


def make_case(tokens, heads, kv_heads, D, rotated, dtype, device):
    """q, k, v as views into one projection, two caches, shuffled slots, and the rotation."""
    random = torch.Generator().manual_seed(0)
    projection = torch.randn(tokens, heads + 2 * kv_heads, D, generator=random).to(device, dtype)
    caches = torch.full((2, tokens + 5, kv_heads, D), torch.nan, device=device, dtype=dtype)
    slots = torch.randperm(tokens + 5, generator=random)[:tokens].to(device)
    angles = 9 * torch.rand(tokens, D // 2, generator=random).to(device)
    rotation = (angles.cos(), angles.sin()) if rotated else None
    return *projection.split([heads, kv_heads, kv_heads], dim=1), *caches, slots, rotation


def check_case(case, dtype, device):
    """The kernel may differ from torch by one rounding: a GPU fuses multiplying with adding."""
    tolerance = dict(rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True) if device == "cuda" \
        else dict(rtol=0, atol=0, equal_nan=True)
    ours, theirs = (make_case(*case, dtype, device) for _ in range(2))
    rotated, expected = rotate_and_store(*ours), rotate_and_store_reference(*theirs)
    assert rotated.shape == ours[0].shape
    for actual, right in [(rotated, expected), *zip(ours[:5], theirs[:5])]:     # inputs stay as they were
        torch.testing.assert_close(actual, right, **tolerance)


def check_far_slots(device):
    """Their offsets overflow int32."""
    q, _, v, _, _, slots, _ = make_case(2, 4, 4, 128, False, torch.float16, device)
    far = torch.empty(2**31 // v[0].numel() + 7, 4, 128, dtype=torch.float16, device=device)
    slots = slots + len(far) - 7
    rotate_and_store(q, v, v, far, far, slots, None)
    assert torch.equal(far[slots], v)


def test_rotated_vectors():
    """The example of the module's docstring."""
    x, slots = torch.tensor([[[1.0, 2, 3, 4]]]), torch.tensor([2])
    angles = torch.tensor([[torch.pi / 2, 0]])
    k_cache, v_cache = torch.zeros(2, 3, 1, 4)
    q = rotate_and_store(x, x, x, k_cache, v_cache, slots, (angles.cos(), angles.sin()))
    turned = torch.tensor([-3.0, 2, 1, 4])
    for actual, expected in (q[0, 0], turned), (k_cache[2, 0], turned), (v_cache[2, 0], x[0, 0]):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def in_the_interpreter():
    pytest.importorskip("triton")
    return json.loads(run_python("-W", "ignore", __file__, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", [name for name, *_ in checks("cpu", [torch.float32, torch.float16])])
def test_in_the_interpreter(name, in_the_interpreter):
    assert in_the_interpreter[name] is None


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_on_the_gpu():
    for _, check, arguments in checks("cuda", [torch.float32, torch.float16, torch.bfloat16]):
        check(*arguments)


if __name__ == "__main__":
    print(json.dumps(wrongs(checks("cpu", [torch.float32, torch.float16]))))
