"""Multi-token attention against float64: the reference, and the Triton kernels in the interpreter
(in a process of its own), and on a GPU where there is one."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_kernel as kernel
import interpreter  # noqa: F401
from arrays import upload
from attention_kernel import (PIECES_AT_ONCE, SpanTensors, attend_many_queries, attend_one_query,
                              multi_token_attention, multi_token_attention_reference, plan_of)
from attention_plan import AMPERE, FLOAT32, HOPPER, ITEM, MERGE, NO_ITEMS, make_plan, largest_plan

HALF, FLOAT = torch.float16, torch.float32
GPU = torch.cuda.is_available()


def make_case(q_len, kv_len, group, kv_heads, D, dtype=FLOAT, device="cpu", seed=0):
    """Arguments with shuffled slots and rows; unused table entries are out of range and unused
    slots hold NaN."""
    random = torch.Generator().manual_seed(seed)
    rows, used = list(range(len(q_len), 0, -1)), sum(kv_len)
    slots = torch.randperm(used + 9, generator=random).int()
    table = torch.full((len(q_len) + 1, max(kv_len, default=0) + 3), -1, dtype=torch.int32)
    table[0], table[:, -1] = 2 ** 31 - 1, -2 ** 31
    for row, part in zip(rows, slots[:used].split(kv_len)):
        table[row, :len(part)] = part
    q, k, v = (torch.randn(n, heads, D, generator=random).to(dtype)
               for n, heads in ((sum(q_len), group * kv_heads), (used + 9, kv_heads), (used + 9, kv_heads)))
    k[slots[used:].long()] = v[slots[used:].long()] = torch.nan
    return *(x.to(device) for x in (q, k, v, table)), SpanTensors.build(rows, q_len, kv_len, device)


def exact(q, k_cache, v_cache, slot_table, spans, scale=None):
    """The definition, in float64: one span at a time, a dense matrix of scores in which the future
    is masked."""
    q, k_cache, v_cache, slot_table = (x.cpu() for x in (q, k_cache, v_cache, slot_table))
    group, scale = q.shape[1] // k_cache.shape[1], scale or q.shape[2] ** -0.5
    out, rest = [q[:0].double()], q.double()
    for row, q_len, kv_len in spans.host.T.tolist():
        queries, rest = rest[:q_len].transpose(0, 1), rest[q_len:]                  # [H, q_len, D]
        slots = slot_table[row, :kv_len].long()
        k, v = (cache[slots].double().repeat_interleave(group, dim=1).transpose(0, 1)
                for cache in (k_cache, v_cache))                                    # [H, kv_len, D]
        scores = queries @ k.transpose(1, 2) * scale                            # [H, q_len, kv_len]
        position = torch.arange(kv_len - q_len, kv_len)
        scores.masked_fill_(torch.arange(kv_len) > position[:, None], -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


def assert_close(actual, case, **kwargs):
    tolerance = {torch.bfloat16: 2e-2, HALF: 2e-3, FLOAT: 2e-6}[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), exact(*case, **kwargs), rtol=tolerance, atol=tolerance)


spans_of_a_batch = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), max_size=5)


# ---- the reference

@settings(max_examples=60, deadline=None)
@given(spans_of_a_batch, st.sampled_from([1, 2, 3, 8]), st.integers(1, 3),
       st.sampled_from([16, 40, 64, 80, 128]), st.integers(0, 999))
def test_reference_is_exact(spans, group, kv_heads, D, seed):
    case = make_case([q for q, _ in spans], [q + history for q, history in spans], group, kv_heads, D,
                     seed=seed)
    assert_close(multi_token_attention_reference(*case), case)


@pytest.mark.parametrize("heads", [2, 6])
def test_one_query_is_computed_as_one_of_many_would_be(heads):
    case = torch.randn(1, heads, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16), 0.3
    torch.testing.assert_close(attend_one_query(*case), attend_many_queries(*case))


def test_scale_and_out():
    case = make_case([1, 4], [6, 9], 2, 2, 16)
    wide = torch.zeros(5, 4, 48)
    out = wide[:, :, 16:32]
    assert multi_token_attention(*case, scale=0.7, out=out) is out
    assert_close(out, case, scale=0.7)
    assert not wide[:, :, :16].any() and not wide[:, :, 32:].any()


def test_bad_arguments():
    q, k, v, table, spans = make_case([1, 4], [6, 9], 2, 2, 16)
    strided = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k, v)]
    for message, bad in {
        "3 query heads are no multiple of 2": (q[:, :3], k, v, table, spans),
        r"need \[T, H, D\]": (q[:, :, :8], k, v, table, spans),
        "differ in shape or strides": (q, k, v[1:], table, spans),
        "not contiguous": (q, *strided, table, spans),
        "differ: torch.float32, torch.float16": (q, k.half(), v, table, spans),
        "torch.int64, not int32": (q, k, v, table.long(), spans),
        "q holds 4 tokens, the spans 5": (q[1:], k, v, table, spans),
        "no row 2 of 9 positions": (q, k, v, table[:2], spans),
    }.items():
        with pytest.raises(ValueError, match=message):
            multi_token_attention(*bad)
    with pytest.raises(ValueError, match="out must be"):
        multi_token_attention(q, k, v, table, spans, out=q[1:])
    with pytest.raises(ValueError, match="scale 0 is not positive"):
        multi_token_attention(q, k, v, table, spans, scale=0)
    with pytest.raises(ValueError, match="q_len 3, kv_len 2"):
        SpanTensors.build(row=[0], q_len=[3], kv_len=[2])
    with pytest.raises(ValueError, match="row -1"):
        SpanTensors.build(row=[0, -1], q_len=[1, 1], kv_len=[2, 2])


def test_without_triton():
    code = ("import sys; sys.modules['triton'] = None; import test_attention_kernel as t; "
            "c = t.make_case([2], [5], 2, 1, 16); t.assert_close(t.multi_token_attention(*c), c)")
    run_python("-c", code)


def run_python(*args, **environment):
    """In a process of its own, where triton can be absent or interpreted from the first import
    on."""
    path = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(kernel.__file__)])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---- the plan

@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 900)), max_size=6),
       st.sampled_from([1, 3, 4, 71]), st.integers(1, 60), st.sampled_from([64, 256]),
       st.sampled_from([HOPPER, AMPERE, FLOAT32]))
def test_plan_covers_every_query_row_once(spans, group, wanted, min_piece, shapes):
    q_len, kv_len = [q for q, _ in spans], [q + history for q, history in spans]
    host = np.array([range(len(spans)), q_len, kv_len], dtype=np.int64)
    plan = make_plan(host, group, dict.fromkeys(shapes, wanted), min_piece)
    span_of = np.repeat(np.arange(len(spans)), np.array(q_len, dtype=int) * group)
    seen = np.zeros((len(span_of), max(kv_len, default=0)), dtype=int)
    partial_of = {}                                            # partial row -> query row
    for shape, items in plan.launches:
        items = columns(items, ITEM)
        lengths = (items["kv_end"] - items["kv_start"]).tolist()
        assert lengths == sorted(lengths, reverse=True) and lengths[-1] > 0
        # So there can be room for any plan of a size in a captured graph.
        assert len(items) <= wanted + len(set(items["first_query_row"].tolist()))
        pieces = items["first_query_row"][items["first_partial"] >= 0]
        assert len(pieces) <= wanted and len(set(pieces.tolist())) <= wanted // 2
        for first, end, partial, row, shift, kv_start, kv_end, _ in items.tolist():
            assert 0 < end - first <= shape.rows and (span_of[first:end] == row).all()
            last_sees = (end - 1) // group + shift + 1
            assert kv_end <= last_sees                  # nothing beyond what the last token sees
            assert shift == kv_len[row] - sum(q_len[:row + 1])
            seen[first:end, kv_start:kv_end] += 1
            if partial >= 0:
                partial_of |= {partial + i: first + i for i in range(end - first)}
            else:
                assert (kv_start, kv_end) == (0, last_sees)
    for row, counts in enumerate(seen):
        position = kv_len[span_of[row]] - sum(q_len[:span_of[row] + 1]) + row // group
        assert (counts[:position + 1] == 1).all() and (counts <= 1).all()
    merged = []
    for row, partial, stride, pieces in columns(plan.merges, MERGE).tolist():
        assert pieces > 1
        merged += [(partial + piece * stride, row) for piece in range(pieces)]
    assert sorted(merged) == sorted(partial_of.items()) and len(partial_of) == plan.partial_rows


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.integers(1, 200), st.integers(0, 5000)), max_size=40),
       st.integers(1, 9), st.sampled_from([1, 4, 16, 37, 71]), st.integers(1, 99),
       st.sampled_from([HOPPER, FLOAT32]))
def test_any_batch_fits_into_the_room_of_its_size(decodes, spans, fewer, group, wanted, shapes):
    """Were it too small, `padded` would fail. One position each is what a graph is captured
    with."""
    spans = [(1 if decodes else tokens, history) for tokens, history in spans]
    wanted, size = dict.fromkeys(shapes, wanted), sum(tokens for tokens, _ in spans) + fewer

    def padded(spans):
        spans = spans + [(1, 0)] * (size - sum(tokens for tokens, _ in spans))
        q_len, history = np.array(spans).T
        plan = make_plan(np.array([range(len(spans)), q_len, history + q_len]), group, wanted)
        room = plan.padded(largest_plan(size, 1 if decodes else size, group, wanted))
        assert plan.partial_rows <= room.partial_rows
        planned = dict(plan.launches)
        pairs = [(planned.pop(shape, NO_ITEMS), items) for shape, items in room.launches]
        assert not planned                                      # no shape is left out
        for rows, longer in [*pairs, (plan.merges, room.merges)]:
            assert (longer[:len(rows)] == rows).all() and not longer[len(rows):].any()
        return [rows.shape for rows in room.arrays()], room.partial_rows
    assert padded(spans) == padded([])


def test_room_of_decodes():
    """The example of largest_plan."""
    wanted = dict.fromkeys(HOPPER, 10)
    plan = make_plan(np.array([range(64), [1] * 64, [1] * 64]), 4, wanted)
    room = plan.padded(largest_plan(64, 1, 4, wanted))
    assert [len(rows) for rows in room.arrays()] == [74, 20] and room.partial_rows == 40


def columns(rows, names):
    """Rows of a plan, [n, columns], by the names of their columns."""
    return rows.view(names)[:, 0]


def test_long_histories_are_split_to_fill_the_gpu():
    def items(q_len, kv_len):
        plan = make_plan(np.array([range(len(q_len)), q_len, kv_len]), 4, dict.fromkeys(HOPPER, 50))
        return [len(items) for _, items in plan.launches]
    assert 40 <= items([1], [16384])[0] <= 50                          # one decode
    assert 40 <= items([20], [16384])[0] <= 50                         # one short prompt
    assert items([1], [512]) == [2]                                 # not below the shortest piece
    assert items([1] * 300, [1000] * 300) == [300]                     # there are enough without
    # Not one item more than fit: 9 would run after 45 others.
    assert items([1] * 9, [9000] * 9) == [45]
    # Each kind of tile must fill the GPU by itself.
    assert all(n >= 30 for n in items([1, 12, 64], [9000, 9000, 9000]))
    assert 80 <= items([1] * 50 + [1], [100] * 50 + [20000])[0] <= 100   # one long context among short ones


def test_plan_is_made_once():
    spans = SpanTensors.build(row=[3, 1], q_len=[1, 5], kv_len=[7, 5])
    assert plan_of(spans, 4, 2, 64, HALF) is plan_of(spans, 4, 2, 64, HALF)
    assert spans.host.tolist() == [[3, 1], [1, 5], [7, 5]]
    assert (spans.num_tokens, spans.max_row, spans.max_kv_len) == (6, 3, 7)
    assert {array.dtype for array in plan_of(spans, 4, 2, 64, HALF).arrays()} == {torch.int32}


# ---- the Triton kernels, run

CASES = [  # q_len, kv_len, group, kv_heads, D
    ([], [], 2, 2, 16),
    ([1, 1, 1], [1, 64, 300], 1, 2, 32),
    ([1, 3, 40], [200, 3, 90], 1, 1, 16),
    ([2, 6, 30], [131, 30, 150], 3, 1, 32),
    ([1, 5, 20], [70, 260, 20], 4, 2, 16),
    ([1, 9], [129, 200], 8, 1, 80),
    ([1, 2], [130, 65], 37, 1, 16),
    ([1], [64 * PIECES_AT_ONCE + 65], 2, 1, 16),
    # The first row stands at 126: the last column of its strip, whatever the strip's width, is the
    # first that it must not see.
    ([3, 40, 100], [129, 166, 226], 1, 1, 16),
]


def tile_tables(dtype, device):
    """Those that can run there; in the interpreter their like in rows is enough."""
    if dtype == FLOAT:
        return [FLOAT32]
    if device == "cpu":
        return [HOPPER]
    return [AMPERE, HOPPER] if torch.cuda.get_device_capability()[0] == 9 else [AMPERE]


def triton_checks(device, dtypes):
    """(name, function, arguments): every case in every dtype with every table of shapes against
    float64, contexts cut as finely as may be; a plan padded with rows of zeros; slots whose offsets
    overflow int32."""
    for dtype in dtypes:
        for n, shapes in enumerate(tile_tables(dtype, device)):
            for case in CASES:
                yield f"{dtype}, table {n}: {case}", check_case, (case, shapes, dtype, device)
    yield "padding", check_padding, (device,)
    yield "far slots", check_far_slots, (device,)


def check_case(case, shapes, dtype, device):
    q_len, kv_len, group, kv_heads, D = case
    arguments = make_case(q_len, kv_len, group, kv_heads, D, dtype, device)
    spans = arguments[-1]
    plan = finest_plan(spans, group, shapes)
    arrays = upload(plan.arrays(), torch.device(device))
    spans.plans[group, kv_heads, D, dtype] = plan.with_arrays(arrays)
    out = torch.full_like(arguments[0], torch.nan)
    assert multi_token_attention(*arguments, out=out) is out
    assert_close(out, arguments)


def finest_plan(spans, group, shapes):
    return make_plan(spans.host, group, dict.fromkeys(shapes, 999), min_piece=64)


@pytest.mark.parametrize("shapes", [HOPPER, AMPERE, FLOAT32])
def test_the_cases_have_tiles_of_every_shape_whole_and_split(shapes):
    kinds, whole, split = set(), 0, 0
    for q_len, kv_len, group, _, _ in CASES:
        plan = finest_plan(SpanTensors.build(range(len(q_len)), q_len, kv_len), group, shapes)
        kinds |= {shape for shape, _ in plan.launches}
        whole += sum((columns(items, ITEM)["first_partial"] < 0).sum() for _, items in plan.launches)
        split += len(plan.merges)
    assert kinds == set(shapes) and whole and split


def check_padding(device):
    case = make_case([1, 3], [700, 30], 2, 1, 16, device=device)
    plan = plan_of(case[-1], 2, 1, 16, FLOAT)
    padded = [F.pad(rows, (0, 0, 0, 3)) for rows in plan.arrays()]
    case[-1].plans[2, 1, 16, FLOAT] = plan.with_arrays(padded)
    assert_close(multi_token_attention(*case), case)


def check_far_slots(device):
    q, k, v, table, spans = make_case([1, 3], [40, 30], 2, 4, 16, dtype=HALF, device=device)
    rows = 2 ** 31 // k[0].numel() + len(k)
    far = torch.empty(rows, *k.shape[1:], dtype=HALF, device=device)  # only its end is ever touched
    shift = len(far) - len(k)
    far[shift:] = k
    shifted = torch.where((table >= 0) & (table < len(k)), table + shift, table)
    assert torch.equal(multi_token_attention(q, far, far, shifted, spans),
                       multi_token_attention(q, k, k, shifted - shift, spans))


INTERPRETED = FLOAT, HALF            # bfloat16 is silently wrong in the interpreter


@pytest.fixture(scope="module")
def in_the_interpreter():
    """What is wrong with each check, in a process where triton is interpreted from the first import
    on."""
    pytest.importorskip("triton")
    return json.loads(run_python("-W", "ignore", __file__, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", [name for name, *_ in triton_checks("cpu", INTERPRETED)])
def test_triton_in_the_interpreter(name, in_the_interpreter):
    assert in_the_interpreter[name] is None


def wrongs(checks):
    """name -> the error, or None."""
    found = {}
    for name, check, arguments in checks:
        try:
            found[name] = check(*arguments)
        except Exception as error:
            found[name] = repr(error)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_triton_on_the_gpu():
    for _, check, arguments in triton_checks("cuda", [FLOAT, HALF, torch.bfloat16]):
        check(*arguments)
    case = make_case([1, 100, 700, 1], [3000, 5000, 700, 40], 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    assert_close(multi_token_attention(*case), case)


if __name__ == "__main__":
    print(json.dumps(wrongs(triton_checks("cpu", INTERPRETED))))
