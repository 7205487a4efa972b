"""Lab 6: the kernel in Triton's interpreter, on a CPU, against the definition in float64; and its
machine code for two GPUs, against the reference's.

By hand: TRITON_INTERPRET=1 python -m pytest labs/tests/test_6_triton.py -k masked_tail"""
import json
import os
import subprocess
import sys

import pytest
import torch

import builds
from arrays import upload
from attention_kernel import multi_token_attention
from attention_plan import FLOAT32, HOPPER, make_plan
from grading import SEED
from test_1_attention import expected
from test_attention_kernel import make_case

pytest.importorskip("triton", reason="Triton runs on Linux alone")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, which lab.py sets", allow_module_level=True)

FLOAT, HALF = torch.float32, torch.float16


def case(q_len, kv_len, group=1, kv_heads=1, D=16, dtype=FLOAT, shapes=FLOAT32, min_piece=9999):
    return dict(spans=(q_len, kv_len, group, kv_heads, D, dtype), shapes=shapes, min_piece=min_piece)


# Tiles of FLOAT32 have 16 query rows and strips of 32 positions. HOPPER's smallest: 16 rows, strips
# of 64.
CASES = {
    "one_strip": (5, case([1], [32])),
    "masked_tail": (6, case([1], [20])),
    "a_second_strip": (7, case([1], [64])),
    "three_strips_and_a_tail": (3, case([1], [109])),
    "causal": (7, case([9], [9])),
    "causal_over_a_history": (7, case([9], [60])),
    "the_first_column_that_row_0_must_not_see_is_the_last_of_its_strip": (10, case([3], [33])),
    "grouped_heads": (7, case([1, 5], [40, 70], group=3, kv_heads=2)),
    "several_spans": (3, case([1, 7, 20], [50, 7, 41])),
    "head_dim_that_is_no_power_of_two": (3, case([2], [40], D=24)),
    "half_precision": (4, case([1, 9], [100, 9], group=2, D=32, dtype=HALF, shapes=HOPPER)),
    "split_and_merged": (4, case([1], [200], group=2, min_piece=64)),
    "split_where_a_row_sees_nothing_of_a_piece": (4, case([12], [72], min_piece=64)),
}


def arguments(name, seed):
    *sizes, dtype = CASES[name][1]["spans"]
    return make_case(*sizes, dtype, seed=seed)


def with_plan(case, group, shapes, min_piece):
    """The case, cut into items for these shapes."""
    q, k, *_, spans = case
    plan = make_plan(spans.host, group, dict.fromkeys(shapes, 999), min_piece)
    uploaded = upload(plan.arrays(), torch.device("cpu"))
    spans.plans[group, k.shape[1], q.shape[2], q.dtype] = plan.with_arrays(uploaded)
    return case


@pytest.mark.seconds(10)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.points(number, "attend_range"), id=name)
    for name, (number, _) in CASES.items()])
def test(name, compare):
    _, sizes = CASES[name]
    case = with_plan(arguments(name, SEED), sizes["spans"][2], sizes["shapes"], sizes["min_piece"])
    out = torch.full_like(case[0], torch.nan)
    multi_token_attention(*case, out=out)
    compare(out.tolist())


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.points(10 if name == "exact_float32" else 4, "its builds"))
    for name in builds.BUILDS])
def test_build(name, compare):
    compare(built(name)[name])


def built(*names):
    """Figures by name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, builds.__file__, *names], env=environment,
                          capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.rstrip().splitlines() or [f"not done after {builds.SECONDS} s"]
        pytest.fail("\n".join(["it does not compile", *said[-4:]]), pytrace=False)
    return json.loads(done.stdout.splitlines()[-1])


def reference(seed):
    return {**{f"test[{name}]": expected(arguments(name, seed)) for name in CASES},
            **{f"test_build[{name}]": figures for name, figures in built(*builds.BUILDS).items()}}
