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


# ---- (expected, found) -> (what differs, or None; the number of progress, or None)
#
# By lab, in COMPARE. `expected` is what the module's `reference` gives for a test, `found` is what
# the test gives to `compare`.

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


def shares(expected: dict, found: dict):
    """Seconds of recomputation by policy. Policies of one's own are measured, and earn nothing."""
    lru, oracle, right = (expected[name] for name in ("lru", "oracle", "retention"))

    def share(seconds):
        return f"{(lru - seconds) / (lru - oracle):.1%}"
    told = ", ".join(f"{name} {share(seconds)}" for name, seconds in found.items()) or "nothing yet"
    progress = (f"of the gap between LRU ({lru:.1f} s recomputed) and the oracle ({oracle:.1f} s) "
                f"we close: {told} (retention should close {share(right)})")
    own = found.get("retention", math.nan)
    if math.isclose(own, right, rel_tol=1e-6):
        return None, progress
    return ("the retention value does not evict what it should on the starved load\n"
            f"  reference {right:.3f} s are recomputed\n  yours     {own:.3f} s"), progress


FIGURES = ("first_token", "throughput", "recomputed")


def server(expected: dict, found: dict):
    """The figures of one's server, beside those of a stateless one, the solved one and the oracle.

    A server has closed a share of each figure's gap between the stateless one, 0%, and the oracle,
    100%. The mean of the three counts: who closes as much as the solved server has all points."""
    def closed(row):
        zero, top = expected["stateless"], expected["oracle"]
        parts = [(zero[name] - row[name]) / (zero[name] - top[name]) for name in FIGURES]
        return sum(parts) / len(parts)
    rows = {"stateless": expected["stateless"], "yours": found, **expected}
    lines = [f"{'':10} first token  throughput  recomputed   hit rate in turn"
             "   2  3-4  5-8   9-      gap"]
    for name, row in rows.items():
        hits = "".join(f"{hit:5.0%}" for hit in row["hits"])
        lines.append(f"{name:10} {row['first_token']:9.3f} s {row['throughput']:9.2f}/s "
                     f"{row['recomputed']:11,}  {'':16}{hits} {closed(row):8.1%}")
    mine, wanted = closed(found), closed(expected["solved"])
    share = min(max(mine / wanted, 0.0), 1.0)
    board = [dict(name="gap closed (%)", value=round(100 * mine, 1)),
             dict(name="first token, p95 (s)", value=round(found["first_token"], 3), order="asc"),
             dict(name="reply tokens per busy second", value=round(found["throughput"], 2)),
             dict(name="recomputed tokens", value=found["recomputed"], order="asc")]
    problem = (f"it closes {mine:.1%} of the gap between a stateless server and the oracle, "
               f"the solved one {wanted:.1%}")
    return problem if share < 1 else None, "\n  ".join(lines), dict(share=share, leaderboard=board)


COMPARE = {1: attention, 2: trace, 3: turns, 4: shares, 6: lambda *both: (attention(*both)[0], None),
           7: server}
