"""Lab 1: attention of spans over scattered slots, against the definition in float64."""
import math

import pytest
import torch

from attention_kernel import (SpanTensors, attend_many_queries, attend_one_query,
                              multi_token_attention_reference)
from grading import SEED
from streams import OperatorWatcher
from test_attention_kernel import exact, make_case

points = pytest.mark.points
TOLERANCE = 1e-5

CASES = {       # q_len, kv_len, query heads per KV head, KV heads, head_dim
    "one_decode": ([1], [7], 1, 2, 16),
    "a_new_prompt": ([5], [5], 1, 2, 16),
    "a_prompt_over_a_history": ([3], [9], 1, 2, 16),
    "dropped_tokens_at_the_front_and_a_prompt": ([4, 3], [4, 12], 1, 2, 16),
    "grouped_heads": ([1, 4, 6], [11, 9, 6], 4, 2, 16),
    "many_spans": ([1, 1, 5, 1, 8, 2], [3, 40, 5, 1, 31, 17], 3, 2, 24),
    "nothing": ([], [], 2, 2, 16),
}


def error(result, case, **scale) -> float:
    """The largest difference from float64; inf if there is a NaN, which unused slots and slots
    beyond the context contain."""
    largest = (result.double() - exact(*case, **scale)).abs().max().item() if result.numel() else 0.0
    return math.inf if math.isnan(largest) else largest


@points(5, "multi_token_attention_reference")
@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    case = make_case(*CASES[name], seed=SEED)
    assert error(multi_token_attention_reference(*case), case) < TOLERANCE


@points(5, "multi_token_attention_reference")
def test_scale_and_out():
    case = make_case(*CASES["grouped_heads"], seed=SEED)
    out = torch.empty_like(case[0])
    assert multi_token_attention_reference(*case, scale=0.7, out=out) is out
    assert error(out, case, scale=0.7) < TOLERANCE


@points(5, "multi_token_attention_reference")
def test_arguments_that_do_not_fit():
    q, k, v, table, spans = make_case([2], [5], 2, 2, 16)
    with pytest.raises(ValueError):
        multi_token_attention_reference(q[:, :3], k, v, table, spans)


def one_span(q_len, kv_len, group, kv_heads=2, D=16):
    """Queries, K and V of one span, and the arguments that `exact` takes."""
    random = torch.Generator().manual_seed(SEED)
    queries, k, v = (torch.randn(*shape, generator=random) for shape in (
        (q_len, group * kv_heads, D), (kv_len, kv_heads, D), (kv_len, kv_heads, D)))
    table = torch.arange(kv_len, dtype=torch.int32)[None]
    return (queries, k, v), (queries, k, v, table, SpanTensors.build([0], [q_len], [kv_len]))


@points(7, "attend_many_queries")
@pytest.mark.parametrize("q_len, kv_len, group", [(5, 5, 1), (3, 9, 1), (4, 11, 4)])
def test_many_queries(q_len, kv_len, group):
    arguments, case = one_span(q_len, kv_len, group)
    assert error(attend_many_queries(*arguments, None), case) < TOLERANCE


@points(4, "attend_many_queries")
def test_many_queries_with_a_scale():
    arguments, case = one_span(3, 9, 2)
    assert error(attend_many_queries(*arguments, 0.3), case, scale=0.3) < TOLERANCE


@points(6, "attend_one_query")
@pytest.mark.parametrize("group", [1, 4])
def test_one_query(group):
    arguments, case = one_span(1, 9, group)
    assert error(attend_one_query(*arguments, None), case) < TOLERANCE


class Sizes(OperatorWatcher):
    """Notes the size of the largest tensor that is made."""
    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        copies = all(returned.alias_info is None for returned in operator._schema.returns)
        if copies and isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@points(8, "attend_one_query")
def test_one_query_repeats_neither_k_nor_v():
    """Eight query heads share a KV head. No tensor may have the size of K eight times over."""
    arguments, case = one_span(1, 50, group=8, D=64)
    with Sizes() as sizes:
        result = attend_one_query(*arguments, None)
    assert error(result, case) < TOLERANCE
    repeated = sizes.largest / arguments[1].numel()
    assert repeated < 4, f"a tensor is {repeated:.0f} times as large as K"


@points(10, "all together")
def test_largest_error(progress):
    largest = None
    try:
        for shape in CASES.values():
            case = make_case(*shape, seed=SEED + 1)
            largest = max(largest or 0.0, error(multi_token_attention_reference(*case), case))
    finally:
        progress(f"largest error against float64: {'no result yet' if largest is None else f'{largest:.1e}'}")
    assert largest < TOLERANCE
