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
ALL = [1, 5, 3, 4, 3, 1, 4, 6], [7, 5, 9, 4, 12, 11, 9, 6], 4, 2, 16       # for all together
SPANS = [(5, 5, 1), (3, 9, 1), (4, 11, 4)]      # q_len, kv_len, query heads per KV head


def expected(case, **scale) -> dict:
    """For `attention` in grading.py: the result, and what some mistakes give instead."""
    return dict(out=exact(*case, **scale).tolist(), spans=case[-1].host[1:].T.tolist(),
                dtype=str(case[0].dtype).removeprefix("torch."), mistakes=mistakes(case, **scale))


def mistakes(case, **scale) -> dict:
    """Each query as a span of its own, which sees so many positions."""
    rows, q_lens, kv_lens = case[-1].host.tolist()
    queries = [(row, q_len, kv_len, i) for row, q_len, kv_len in zip(rows, q_lens, kv_lens)
               for i in range(q_len)]
    seen = {
        "no position is masked": [n for _, _, n, _ in queries],
        "the mask is aligned to the upper left: query i sees the positions 0 ... i":
            [i + 1 for *_, i in queries],
        "each query sees one position too many": [min(n, n - q + i + 2) for _, q, n, i in queries],
        "each query does not see its own position": [max(1, n - q + i) for _, q, n, i in queries],
    }
    ones, table_rows = [1] * len(queries), [row for row, *_ in queries]
    found = {name: exact(*case[:-1], SpanTensors.build(table_rows, ones, counts), **scale)
             for name, counts in seen.items()}
    if scale:
        found["the scale is not used"] = exact(*case)
    return {name: out.tolist() for name, out in found.items()}


@points(4, "multi_token_attention_reference")
@pytest.mark.parametrize("name", CASES)
def test_reference(name, compare):
    compare(multi_token_attention_reference(*make_case(*CASES[name], seed=SEED)).tolist())


@points(4, "multi_token_attention_reference")
def test_scale_and_out(compare):
    case = make_case(*CASES["grouped_heads"], seed=SEED)
    out = torch.empty_like(case[0])
    result = multi_token_attention_reference(*case, scale=0.7, out=out)
    compare(out.tolist())
    check(result is out, "the result is not the tensor `out`")


def check(right, message):
    if not right:
        pytest.fail(message, pytrace=False)


@points(3, "multi_token_attention_reference")
def test_arguments_that_do_not_fit():
    q, k, v, table, spans = make_case([2], [5], 2, 2, 16)
    with pytest.raises(ValueError):
        multi_token_attention_reference(q[:, :3], k, v, table, spans)


def one_span(q_len, kv_len, group, kv_heads=2, D=16, seed=SEED):
    """Queries, K and V of one span, and the arguments that `exact` takes."""
    random = torch.Generator().manual_seed(seed)
    queries, k, v = (torch.randn(*shape, generator=random) for shape in (
        (q_len, group * kv_heads, D), (kv_len, kv_heads, D), (kv_len, kv_heads, D)))
    table = torch.arange(kv_len, dtype=torch.int32)[None]
    return (queries, k, v), (queries, k, v, table, SpanTensors.build([0], [q_len], [kv_len]))


@points(4, "attend_many_queries")
@pytest.mark.parametrize("q_len, kv_len, group", SPANS)
def test_many_queries(q_len, kv_len, group, compare):
    arguments, _ = one_span(q_len, kv_len, group)
    compare(attend_many_queries(*arguments, None).tolist())


@points(3, "attend_many_queries")
def test_many_queries_with_a_scale(compare):
    arguments, _ = one_span(3, 9, 2)
    compare(attend_many_queries(*arguments, 0.3).tolist())


@points(5, "attend_one_query")
@pytest.mark.parametrize("group", [1, 4])
def test_one_query(group, compare):
    arguments, _ = one_span(1, 9, group)
    compare(attend_one_query(*arguments, None).tolist())


class Work(OperatorWatcher):
    """Counts operators, the elements of K and V that products read, and those of the largest tensor
    that is made."""
    PRODUCTS = "mm", "bmm", "mv", "addmm", "baddbmm", "dot"

    def __init__(self):
        super().__init__()
        self.operators = self.read = self.largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator._schema.name.removeprefix("aten::")
        self.operators += 1
        if "attention" in name:                 # each query head reads its K and its V
            q, k = args[:2]
            self.read += 2 * math.prod(q.shape[:-2]) * math.prod(k.shape[-2:])
        elif name in self.PRODUCTS:
            self.read += sum(each.numel() for each in args if isinstance(each, torch.Tensor))
        elif isinstance(result, torch.Tensor) and operator._schema.returns[0].alias_info is None:
            self.largest = max(self.largest, result.numel())
        return result


def work(function, *arguments) -> Work:
    with Work() as found:
        function(*arguments)
    return found


def check_operators(short: Work, long: Work):
    check(long.operators <= short.operators + 5,
          f"a Python loop over positions: {short.operators} operators for a short span, "
          f"{long.operators} for a long one.\nA few operators on whole tensors do the same in one go.")


@points(10, "attend_many_queries")
def test_many_queries_need_no_loop():
    check_operators(*(work(attend_many_queries, *one_span(q_len, 90, 2)[0], None)
                      for q_len in (10, 80)))


@points(10, "attend_one_query")
def test_one_query_reads_k_and_v_once():
    """Eight query heads share a KV head. K and V must be neither copied nor read eight times."""
    short, long = (one_span(1, kv_len, group=8, D=64)[0] for kv_len in (10, 50))
    found, size = work(attend_one_query, *long, None), long[1].numel() + long[2].numel()
    times = max(found.read / size, 2 * found.largest / size)
    check(times < 2.5, f"K and V are repeated for each query head: {times:.0f} times their size is "
                       "read or copied.\nA decode is bound by memory, so it takes as many times as "
                       "long. (enable_gqa reads them once for each query head, too.)")
    check_operators(work(attend_one_query, *short, None), found)


@points(10, "multi_token_attention_reference")
def test_the_reference_needs_no_loop_over_positions():
    check_operators(*(work(multi_token_attention_reference, *make_case(
        [1, length // 3], [length, length], 2, 2, 16, seed=SEED)) for length in (30, 90)))


@points(10, "all together")
def test_largest_error(compare):
    compare(multi_token_attention_reference(*make_case(*ALL, seed=SEED + 1)).tolist())


def reference(seed):
    def case(name, seed=seed):
        return make_case(*CASES[name], seed=seed)

    def span(q_len, kv_len, group):
        return one_span(q_len, kv_len, group, seed=seed)[1]
    found = {f"test_reference[{name}]": expected(case(name)) for name in CASES}
    found["test_scale_and_out"] = expected(case("grouped_heads"), scale=0.7)
    found |= {f"test_many_queries[{q_len}-{kv_len}-{group}]": expected(span(q_len, kv_len, group))
              for q_len, kv_len, group in SPANS}
    found["test_many_queries_with_a_scale"] = expected(span(3, 9, 2), scale=0.3)
    found |= {f"test_one_query[{group}]": expected(span(1, 9, group)) for group in (1, 4)}
    found["test_largest_error"] = expected(make_case(*ALL, seed=seed + 1))
    return found
