"""What several labs' tests use, and how the grader compares with the solved code. It imports nothing
of the project: the grader runs it, too."""
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

SEED = int(os.environ.get("LAB_SEED", "0"))     # of the random loads
TOLERANCE = {"float32": 1e-5, "float16": 5e-3}
SOURCES = ("gpu", "cpu", "recomputed", "new")

LABS = Path(__file__).resolve().parents[1]


def block_of_the_handout(name: str, label: str) -> list[str]:
    """The lines of the code block that begins with ```label in a handout: predictions are checked,
    too."""
    text = (LABS / f"{name}.md").read_text()
    found = re.search(rf"^```{label}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()]


def matching(expected: list[str], found: list[str]) -> int:
    """How many leading lines are the same."""
    pairs = zip(expected, found)
    return next((n for n, (one, other) in enumerate(pairs) if one != other),
                min(len(expected), len(found)))


def first_difference(expected: list[str], found: list[str]) -> str | None:
    if expected == found:
        return None
    count = matching(expected, found)
    wanted, its = ((lines[count:] + ["nothing more"])[0] for lines in (expected, found))
    before = f"\n  before it {expected[count - 1]}" if count else ""
    return (f"line {count + 1} of the trace is the first that differs{before}\n"
            f"  reference {wanted}\n  yours     {its}")


def same_lines(expected: list[str], found: list[str]):
    """Fail at the first line that differs."""
    if difference := first_difference(expected, found):
        pytest.fail(difference, pytrace=False)


# ---- a comparison, for each lab in COMPARE
#
# compare(expected, found) -> (problem, progress) or (problem, progress, more)
#
#     expected    what the module's `reference` gives for a test
#     found       what the test has given to `compare`, from the process of a student's code
#     problem     what differs; None if nothing does: then the test has passed
#     progress    the number of progress, or None
#     more        share: of the test's points, from 0 to 1; without it, all or none
#                 table, leaderboard: for Gradescope
#
# lab.py, `judged`, turns this into points.

def attention(expected: dict, found: list) -> tuple[str | None, str | None]:
    """expected: out [T, H, D] in float64; spans, of q_len and kv_len; what some mistakes give."""
    out, found = np.array(expected["out"]), np.array(found, dtype=float)
    if out.shape != found.shape:
        return f"the result's shape is {list(found.shape)}, the reference's {list(out.shape)}", None
    errors = np.nan_to_num(np.abs(found - out), nan=math.inf)
    largest, tolerance = errors.max(initial=0.0), TOLERANCE[expected["dtype"]]
    progress = f"largest error against float64: {largest:.1e}"
    if largest < tolerance:
        return None, progress
    token, head, dim = map(int, np.argwhere(errors >= tolerance)[0])
    wrong = (errors >= tolerance).any(axis=(1, 2))                              # [T]
    first = 0
    for number, (q_len, kv_len) in enumerate(expected["spans"]):
        if token < first + q_len:
            where = (f"span {number} (q_len {q_len}, kv_len {kv_len}), query {token - first} "
                     f"(position {kv_len - q_len + token - first}), head {head}, dimension {dim}")
            break
        first += q_len
    cause = next((name for name, its in expected["mistakes"].items()
                  if np.allclose(found[wrong], np.array(its)[wrong], rtol=0, atol=tolerance)),
                 "NaN: a slot was read that the query does not see" if np.isnan(found).any()
                 else "attention differs from float64")
    return (f"{cause}\n  in {where}\n  reference {out[token, head, dim]:.6f}\n"
            f"  yours     {found[token, head, dim]:.6f}\n"
            f"  {wrong.sum()} of {len(out)} queries are wrong, the largest error is {largest:.1e}"), progress


def trace(expected: list[str], found: list[str]):
    progress = f"{matching(expected, found)} of {len(expected)} lines match"
    return first_difference(expected, found), f"{progress} in the trace of a random load"


def turns(expected: dict, found: dict):
    """traces, the sources of each turn, and the statistics."""
    def totals(turns):
        return " / ".join(str(sum(turn[source] for turn in turns)) for source in SOURCES)
    wanted, its = expected["turns"], found["turns"]
    right = sum(one == other for one, other in zip(wanted, its))
    progress = (f"gpu / cpu / recomputed / new are right in {right} of {len(wanted)} turns: "
                f"{totals(its)} tokens in all, expected {totals(wanted)}")
    counted = [f"{name} is {found['stats'].get(name)}, the reference's {count}"
               for name, count in expected["stats"].items() if found["stats"].get(name) != count]
    difference = first_difference(expected["traces"], found["traces"])
    return difference or "\n".join(["the statistics differ", *counted] * bool(counted)), progress


def share_of_the_gap(load: dict, seconds: float) -> float:
    """load: seconds of recomputation by policy. 0: as LRU; 1: as the oracle."""
    return (load["lru"] - seconds) / (load["lru"] - load["oracle"])


def starved(load: dict, found: list):
    """Seconds of recomputation. found: of the retention value; nothing if it has failed."""
    own, right = sum(found) if found else math.nan, load["retention"]
    progress = (f"of the gap between LRU ({load['lru']:.1f} s recomputed) and the oracle "
                f"({load['oracle']:.1f} s) we close {share_of_the_gap(load, own):.1%}")
    if math.isclose(own, right, rel_tol=1e-6):
        return None, progress
    return ("the retention value does not evict what it should on the starved load\n"
            f"  reference {right:.3f} s are recomputed\n  yours     {own:.3f} s"), progress


# Figures of machine code: 1 if more of it is better, -1 if less is; the cause if it is worse than the
# reference's. The first of these is told.
OF_A_BUILD = [
    ("spilled", -1, "registers are spilled: more numbers are kept than a thread has registers for"),
    ("TF32", -1, 'float32 is rounded to TF32: give each tl.dot input_precision="ieee"'),
    ("tensor cores", 1, "a product misses the tensor cores: both factors need the cache's type"),
    ("smaller copies", -1, "copies of less than 16 bytes: slots are loaded in the strip that uses them"),
    ("16-byte copies", 1, "fewer 16-byte copies: K and V are not copied ahead, as in a `for` over strips"),
    ("programs", 1, "fewer programs fit a processor: too many registers, or too much shared memory"),
]


def build(expected: dict, found: dict):
    """The figures of builds.py."""
    def row(label, cells):
        return "  ".join([f"  {label:9}", *(f"{cell:>{len(name)}}" for name, cell in zip(expected, cells))])
    table = "\n".join([row("", expected), row("reference", expected.values()),
                       row("yours", [found[name] for name in expected])])
    cause = next((cause for name, sign, cause in OF_A_BUILD
                  if sign * found[name] < sign * expected[name]), None)
    return (f"{cause}\n{table}", None) if cause else (None, None, dict(table=table))


def kernel(expected: dict, found):
    """A case in the interpreter, or a build."""
    return (attention(expected, found)[0], None) if "out" in expected else build(expected, found)


def own_policy(loads: list[dict], found: list):
    """The same on many loads; `ours` is OwnPolicy of the solved project. The share of the points
    grows with the mean share of the gap: 0 for the retention value's, 1 for ours."""
    if len(found) < len(loads):
        return f"the policy has played {len(found)} of {len(loads)} loads", None
    mean = np.mean([[share_of_the_gap(load, seconds) for seconds in (
        load["retention"], load["ours"], its)] for load, its in zip(loads, found)], axis=0)
    retention, ours, own = mean
    reached = max(0.0, float((own - retention) / (ours - retention)))
    told = (f"your policy closes {own:.1%} of the gap between LRU and the oracle, on average over "
            f"{len(loads)} loads;\n  no points for {retention:.1%}, which the retention value closes; "
            f"all for {ours:.1%}")
    if own > 0.99:
        return f"nobody but the oracle closes {own:.1%} of the gap: somebody must look at it", None
    return (None if reached >= 1 else told, told.replace("\n ", ""), dict(share=min(reached, 1.0)))


def of_lab_4(expected, found):
    return (own_policy if isinstance(expected, list) else starved)(expected, found)


FIGURES = ("first_token", "throughput", "recomputed")
BEYOND = 1.25               # of a figure's gap: no server closes more by right


def server(expected: dict, found: dict):
    """The figures of one's server, beside those of a stateless one, the plain one, the solved one and
    the oracle.

    A server has closed a share of each figure's gap between the stateless one, 0%, and the oracle,
    100%. The mean of the three counts: no points for the plain one's, all for the solved one's."""
    def parts(row):
        zero, top = expected["stateless"], expected["oracle"]
        return {name: (zero[name] - row[name]) / (zero[name] - top[name]) for name in FIGURES}

    def closed(row):
        return sum(min(part, BEYOND) for part in parts(row).values()) / len(FIGURES)
    plain, wanted, mine = closed(expected["plain"]), closed(expected["solved"]), closed(found)
    share = min(max(0.0, (mine - plain) / (wanted - plain)), 1.0)       # of NaN: none
    lines = [f"of the gap between a stateless server and the oracle it closes {mine:.1%}",
             f"{'':10} first token  throughput  recomputed   hit rate in turn"
             "   2  3-4  5-8   9-      gap"]
    for name, row in (expected | dict(yours=found)).items():
        hits = "".join(f"{hit:5.0%}" for hit in row["hits"])
        lines.append(f"{name:10} {row['first_token']:9.3f} s {row['throughput']:9.2f}/s "
                     f"{row['recomputed']:11,.0f}  {'':16}{hits} {closed(row):8.1%}")
    if surprising := [name for name, part in parts(found).items() if part > BEYOND]:
        lines.append(f"look at this server: it is far better than the oracle in {', '.join(surprising)}")
    board = [dict(name="gap closed (%)", value=round(100 * mine, 1)),
             dict(name="first token, p95 (s)", value=round(found["first_token"], 3), order="asc"),
             dict(name="reply tokens per busy second", value=round(found["throughput"], 2)),
             dict(name="recomputed tokens", value=round(found["recomputed"]), order="asc")]
    problem = (f"it closes {mine:.1%} of the gap between a stateless server and the oracle, "
               f"the plain one {plain:.1%}, the solved one {wanted:.1%}")
    return problem if share < 1 else None, "\n  ".join(lines), dict(share=share, leaderboard=board)


COMPARE = {1: attention, 2: trace, 3: turns, 4: of_lab_4, 6: kernel, 7: server}
