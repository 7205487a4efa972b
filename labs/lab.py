"""The six labs: starter code made from the repository's own files, and grading.

    python labs/lab.py list
    python labs/lab.py start 3 ../lab3          a copy of the project to work in
    cd ../lab3; python labs/lab.py check 3      points for each function, and the number of progress

A starter is the whole project; only the bodies of one lab's functions are missing. Each of them is
found by its qualified name and becomes one line; its signature and docstring stay as they are:

    raise NotImplementedError("lab 3: KVCache.admit")

`check 3 DIR` grades the code in DIR with the tests that lie beside this file. An instructor keeps
this file and the tests, so nothing that a student edits in DIR/labs or DIR/tests counts.

Invariant: nothing is kept by hand. Starters, and the results that the tests compare
with, come from the solved code.
"""
import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "labs" / "tests"
EXPECTED = Path("labs/expected.json")       # in a starter alone: what its tests compare with
KEPT_BACK = (".git", ".github", ".ci", "wrong_solutions", "test_labs.py")    # not for students
TIME_LIMIT = 120                            # seconds of a whole check; each test has its own
MESSAGE_LINES = 12                          # of a failed test


class Lab(NamedTuple):
    """A lab called "2_x" has its handout in labs/2_x.md and its tests in labs/tests/test_2_x.py."""
    name: str
    hours: int
    files: dict[str, list[str]]             # file -> the functions to write, by qualified name
    compares: bool = False                  # its tests compare with what the solved code does

    def functions(self) -> list[tuple[str, str]]:
        return [(file, name) for file, names in self.files.items() for name in names]


LABS = {
    1: Lab("1_attention", 2, {"attention_kernel.py": [
        "multi_token_attention_reference", "attend_many_queries", "attend_one_query"]}),
    2: Lab("2_spans_and_batches", 5, {"scheduler.py": [
        "Request.missing", "Batch.take", "Scheduler.compose", "Scheduler.give_way",
        "Scheduler.suspend"]},
        compares=True),
    3: Lab("3_two_tiers", 8, {"kv_cache.py": [
        "KVCache.admit", "KVCache.computed", "KVCache.plan_swap_out", "KVCache.complete",
        "KVCache.reclaim"]}, compares=True),
    4: Lab("4_eviction", 4, {"eviction.py": [
        "RecomputeCost.__call__", "RetentionValue.value", "cheapest_by_scanning"]}, compares=True),
    5: Lab("5_overlap", 6, {"experiments/simulator.py": ["SimulatedWorker.overlapped"],
                            "kv_pool.py": ["KVPool.swap_in", "KVPool.wait", "KVPool.swap_out"]}),
    6: Lab("6_triton", 9, {"attention_kernel.py": ["attend_range"]}),
}


# ---- starters

def find(source: str, name: str) -> ast.FunctionDef:
    """The function of that qualified name, such as "KVCache.admit".
    LookupError if there is none."""
    node = ast.parse(source)
    for part in name.split("."):
        named = [child for child in node.body if getattr(child, "name", None) == part]
        if not named:
            raise LookupError(f"no function {name}")
        node = named[0]
    return node


def blank(source: str, name: str, number: int) -> str:
    """The source without that function's body. Everything up to the end of its docstring stays."""
    function = find(source, name)
    docstring = function.body[0]
    if ast.get_docstring(function) is None:
        raise ValueError(f"{name} needs a docstring, from which a student can write it")
    lines = source.splitlines(keepends=True)
    indent = " " * docstring.col_offset
    lines[docstring.end_lineno:function.end_lineno] = [
        f'{indent}raise NotImplementedError("lab {number}: {name}")\n']
    return "".join(lines)


def start(number: int, directory: Path):
    """Write the starter of a lab. ValueError if the directory has files,
    or is a part of the project."""
    if directory.exists() and any(directory.iterdir()) or ROOT in [directory, *directory.parents]:
        raise ValueError(f"{directory} must be a new or empty directory outside of {ROOT}")
    if (ROOT / EXPECTED).exists():
        raise ValueError(f"{ROOT} is a starter itself: make a new one from the solved project")
    lab, expected = LABS[number], expected_results(number, seed=0)
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(*ignored, *KEPT_BACK),
                    dirs_exist_ok=True)
    for file, name in lab.functions():
        path = directory / file
        path.write_text(blank(path.read_text(encoding="utf-8"), name, number), encoding="utf-8")
    (directory / EXPECTED).write_text(json.dumps(expected) + "\n")
    shutil.copy(ROOT / "labs" / "AGENTS.md", directory)
    print(f"The starter of lab {number} is in {directory}. Read labs/{lab.name}.md there, "
          f"then run\n    python labs/lab.py check {number}")


def expected_results(number: int, seed: int):
    """What the solved code does with that seed. None if the lab's tests need no such thing. In a
    starter: what `start` has written there, for seed 0."""
    if (ROOT / EXPECTED).exists():
        return json.loads((ROOT / EXPECTED).read_text())
    if not LABS[number].compares:
        return None
    done = run_python([test_file(number), str(seed)], ROOT, check=True, timeout=TIME_LIMIT)
    return json.loads(done.stdout)


def test_file(number: int) -> str:
    return f"test_{LABS[number].name}.py"           # in TESTS


def run_python(arguments: list[str], code: Path, check=False, timeout=None, **environment):
    """Python in a process of its own, which imports the project from `code`, but tests
    and their helpers from here."""
    path = os.pathsep.join(map(str, (ROOT / "tests", code)))
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                   **environment}
    return subprocess.run([sys.executable, *arguments], cwd=TESTS, env=environment, check=check,
                          timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)


# ---- grading

class Graded(NamedTuple):
    # name, function, points, passed, message, progress: see labs/tests/conftest.py
    tests: list[dict]
    output: str             # pytest's
    seconds: float

    def score(self, function: str | None = None) -> tuple[int, int]:
        """(reached, of so many), of one function or of all."""
        tests = [test for test in self.tests if function in (None, test["function"])]
        reached = sum(test["points"] for test in tests if test["passed"])
        return reached, sum(test["points"] for test in tests)


def grade(number: int, code: Path, seed: int = 0, *pytest_flags: str) -> Graded:
    """Run the lab's tests on the code of a project's directory."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        results, expected = Path(scratch, "results"), Path(scratch, "expected.json")
        expected.write_text(json.dumps(expected_results(number, seed)))
        arguments = ["-m", "pytest", "-c", "check.ini", test_file(number)]
        try:
            output = run_python([*arguments, *pytest_flags], code, timeout=TIME_LIMIT,
                                LAB_SEED=str(seed), LAB_RESULTS=str(results),
                                LAB_EXPECTED=str(expected), TRITON_INTERPRET="1").stdout
        except subprocess.TimeoutExpired:
            output = f"The tests were stopped after {TIME_LIMIT} s.\n"
        lines = results.read_text().splitlines() if results.exists() else []
    # Each test comes twice, first as one that has not passed: so none is
    # lost if the check is stopped.
    tests = {test["name"]: test for test in map(json.loads, lines)}
    return Graded(list(tests.values()), output, time.monotonic() - begin)


def report(number: int, graded: Graded):
    print(f"lab {LABS[number].name}")
    if not graded.tests:
        print("The tests did not start:\n" + graded.output)
    for function in dict.fromkeys(test["function"] for test in graded.tests):
        print("  {:32} {:3} of {:3} points".format(function, *graded.score(function)))
        failed = [test for test in graded.tests
                  if test["function"] == function and not test["passed"]]
        if failed:
            message = failed[0]["message"].splitlines()[:MESSAGE_LINES]
            print("\n        ".join(["    " + failed[0]["name"], *message]))
    print("  {:32} {:3} of {:3} points, {:.0f} s".format("all", *graded.score(), graded.seconds))
    passed = sum(test["passed"] for test in graded.tests)
    told = [test["progress"] for test in graded.tests if test["progress"]]
    for text in told or [f"{passed} of {len(graded.tests)} cases are right"]:
        print(f"  progress: {text}")


def gradescope(graded: Graded) -> dict:
    """Gradescope's results.json."""
    tests = [dict(name=f"{test['function']}: {test['name']}", score=test["points"] * test["passed"],
                  max_score=test["points"],
                  output=f"{test['message']}\n{test['progress'] or ''}".strip())
             for test in graded.tests]
    return dict(score=graded.score()[0], execution_time=round(graded.seconds), tests=tests,
                output="" if tests else graded.output)


def check(number: int, code: Path, seed: int, file: str | None) -> int:
    """Print the points. 0 if all of them are reached, 1 if not: the exit status."""
    graded = grade(number, code, seed)
    report(number, graded)
    if file:
        Path(file).write_text(json.dumps(gradescope(graded), indent=1) + "\n")
    reached, points = graded.score()
    return 0 if graded.tests and reached == points else 1


# ---- the command line

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the labs and the functions to write")
    starting = commands.add_parser("start", help="write a lab's starter")
    checking = commands.add_parser("check",
                                   help="points, the first difference, the number of progress")
    for command in (starting, checking):
        command.add_argument("lab", type=int, choices=LABS)
    starting.add_argument("directory", type=Path)
    checking.add_argument("directory", type=Path, nargs="?", default=ROOT,
                          help="default: where lab.py lies")
    checking.add_argument("--json", metavar="FILE",
                          help="write Gradescope's results.json there, too")
    checking.add_argument("--seed", type=int, default=0, help="of the random loads (default: 0)")
    options = parser.parse_args()
    if options.command == "list":
        for number, lab in LABS.items():
            names = ", ".join(name for _, name in lab.functions())
            print(f"{lab.name:20} {lab.hours} hours: {names}")
        return 0
    try:
        if options.command == "check":
            return check(options.lab, options.directory.resolve(), options.seed, options.json)
        start(options.lab, options.directory.resolve())
        return 0
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
