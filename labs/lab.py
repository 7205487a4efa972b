"""The labs: starter code made from the repository's own files, and grading.

    python labs/lab.py list
    python labs/lab.py start 3 ../lab3          a copy of the project to work in
    cd ../lab3; python labs/lab.py check 3      points for each function, and the number of progress
    python labs/lab.py submit 3                 lab3.zip, to hand in

A starter is the whole project without the bodies of one lab's functions. Each of them is found by
its qualified name and becomes one line; its signature and docstring stay as they are:

    raise NotImplementedError("lab 3: KVCache.admit")

The bodies of later labs are not shown either, but they work (given.py). `check 3 DIR` takes the
lab's files of DIR alone, and grades them with the tests beside this file (grader.py): nothing else
that a student edits in DIR counts.

Invariant: nothing is kept by hand. Starters, and the results that the tests compare with, come from
the solved code.
"""
import argparse
import ast
import json
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import given
import grader
import hand_in

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "labs" / "tests"
sys.path.append(str(TESTS))
from grading import COMPARE  # noqa: E402

# Not for students. chapter_one.py is labs 1 to 4 in small.
KEPT_BACK = (".git", ".github", ".ci", "wrong_solutions", "test_labs.py", "chapter_one.py",
             "test_chapter_one.py", "INSTRUCTORS.md", "exam.md", "test_exam.py")
MESSAGE_LINES = 5                           # of a failed test
UNREADABLE = (SyntaxError, LookupError, OSError, ValueError)    # of a file that a student wrote
AT_ONCE = min(os.cpu_count(), 4)            # tests; a container may have less than the machine


class Lab(NamedTuple):
    """A lab called "2_x" has its handout in labs/2_x.md and its tests in labs/tests/test_2_x.py."""
    name: str
    hours: str
    # file -> the functions (or classes) to write, by qualified name
    files: dict[str, list[str]]
    leaks: dict[str, list[str]] = {}        # the same -> functions that are nearly the answers
    whole: bool = False                     # are its files graded as they are?

    def functions(self) -> list[tuple[str, str]]:
        return [(file, name) for file, names in self.files.items() for name in names]

    def hidden(self) -> list[tuple[str, str]]:
        """Its functions, and the leaks."""
        return self.functions() + [(file, name) for file, names in self.leaks.items()
                                   for name in names]


LABS = {
    1: Lab("1_attention", "1-2", {"attention_kernel.py": [
        "multi_token_attention_reference", "attend_many_queries", "attend_one_query"]},
        {"tests/test_attention_kernel.py": ["exact"], "experiments/rivals.py": ["torch_attention"]}),
    2: Lab("2_spans_and_batches", "3-4", {"scheduler.py": [
        "Request.missing", "Batch.take", "Scheduler.compose", "Scheduler.give_way",
        "Scheduler.suspend"]}),
    3: Lab("3_two_tiers", "4-5", {"kv_cache.py": [
        "KVCache.admit", "KVCache.computed", "KVCache.plan_swap_out", "KVCache.complete",
        "KVCache.reclaim"]}),
    4: Lab("4_eviction", "3-4", {
        "eviction.py": ["RecomputeCost.__call__", "RetentionValue.value", "cheapest_by_scanning"],
        "experiments/own_policy.py": ["OwnPolicy"]},
        {"experiments/policies.py": ["ExpectedCost.value"]}),
    5: Lab("5_overlap", "3-4", {"experiments/simulator.py": ["SimulatedWorker.overlapped"],
                                "kv_pool.py": ["KVPool.swap_in", "KVPool.wait", "KVPool.swap_out"]}),
    6: Lab("6_triton", "4-7", {"attention_kernel.py": ["attend_range"]},
           {"attention_kernel.py": ["merge_kernel"]}),
    7: Lab("7_your_server", "8-12", {"experiments/my_server.py": ["open_engine"], "scheduler.py": [],
                                     "kv_cache.py": [], "eviction.py": [],
                                     "experiments/policies.py": []}, whole=True),
}


# ---- functions in a source

def find(source: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The function of that qualified name, such as "KVCache.admit"; or the class.
    LookupError if there is none."""
    node = ast.parse(source)
    for part in name.split("."):
        named = [child for child in node.body if getattr(child, "name", None) == part]
        if not named:
            raise LookupError(f"no function {name}")
        node = named[0]
    return node


def lines_of(function: ast.FunctionDef) -> slice:
    """With its decorators."""
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return slice(first - 1, function.end_lineno)


def taken(source: str, name: str) -> str:
    """The function of that name, without indentation."""
    return textwrap.dedent("".join(source.splitlines(keepends=True)[lines_of(find(source, name))]))


def replaced(source: str, name: str, written: str) -> str:
    """The source with another function of that name. written: its lines without indentation."""
    function, lines = find(source, name), source.splitlines(keepends=True)
    lines[lines_of(function)] = [textwrap.indent(written, " " * function.col_offset)]
    return "".join(lines)


def blank(source: str, name: str, message: str) -> str:
    """The source without that function's body. Everything up to the end of its docstring stays. (A
    class gets a constructor that raises the error.)"""
    function = find(source, name)
    docstring = function.body[0]
    if ast.get_docstring(function) is None:
        raise ValueError(f"{name} needs a docstring, from which a student can write it")
    lines = source.splitlines(keepends=True)
    body = f'raise NotImplementedError("{message}")\n'
    if isinstance(function, ast.ClassDef):
        body = f"\ndef __init__(self, *arguments):\n    {body}"
    lines[docstring.end_lineno:function.end_lineno] = [
        textwrap.indent(body, " " * docstring.col_offset)]
    return "".join(lines)


def solved(file: str) -> str:
    """The source of a file in which nothing is missing."""
    return given.given().get(file) or (ROOT / file).read_text(encoding="utf-8")


def hidden_in(file: str, number: int = 1) -> list[str]:
    """The functions of that file that belong to lab `number` or a later one."""
    return [name for each, lab in LABS.items() if each >= number
            for its, name in lab.hidden() if its == file]


# ---- starters

def start(number: int, directory: Path):
    """Write the starter of a lab. ValueError if the directory has files,
    or is a part of the project."""
    if directory.exists() and any(directory.iterdir()) or ROOT in [directory, *directory.parents]:
        raise ValueError(f"{directory} must be a new or empty directory outside of {ROOT}")
    copy_project(directory)
    bodies = {}
    for file in {file for lab in LABS.values() for file, _ in lab.hidden()}:
        source = solved(file)
        bodies[file] = given.pack(source)
        bodies.update({name: given.pack(taken(source, name)) for name in hidden_in(file, number)})
        (directory / file).write_text(hidden_source(number, file), encoding="utf-8")
    (directory / "labs" / given.FILE.name).write_text(json.dumps(bodies, indent=1) + "\n")
    shutil.copy(ROOT / "labs" / "AGENTS.md", directory)
    readme = (directory / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"\[([^]]*)\]\(chapter_one\.py\)", r"\1 (which a starter lacks)", readme)
    (directory / "README.md").write_text(readme, encoding="utf-8")
    print(f"The starter of lab {number} is in {directory}. Read labs/{LABS[number].name}.md there, "
          f"then run\n    python labs/lab.py check {number}")


def copy_project(directory: Path):
    """Copy the solved project, but for what is not for students."""
    if given.FILE.exists():
        raise ValueError(f"{ROOT} is a starter itself: run this in the solved project")
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(*ignored, *KEPT_BACK),
                    dirs_exist_ok=True)


def hidden_source(number: int, file: str) -> str:
    """The file in a lab's starter: the lab's own functions are to be written, later ones are given.
    """
    source, own, later = solved(file), LABS[number].files.get(file, []), []
    for name in hidden_in(file, number):
        if name in own:
            source = blank(source, name, f"lab {number}: {name}")
        else:
            source = blank(source, name, "labs/given.py puts this function in place")
            later.append(name)
    if not later:
        return source
    names = "".join(f'    "{name}",\n' for name in later)
    return (f"{source}\n\n# These functions work, though their bodies are not shown here.\n"
            f"from labs.given import fill  # noqa: E402\n\nfill(\n    globals(),\n{names})\n")


# ---- grading

class Graded(NamedTuple):
    tests: list[dict]       # name, function, points, and what `judged` says
    notes: list[str]        # what whoever grades should know
    seconds: float

    def score(self, function: str | None = None) -> tuple[int, int]:
        """(reached, of so many), of one function or of all."""
        tests = [test for test in self.tests if function in (None, test["function"])]
        return sum(test["reached"] for test in tests), sum(test["points"] for test in tests)


@contextmanager
def solved_project() -> Iterator[Path]:
    """A directory, for as long as the block runs, with all sources, in which nothing is missing."""
    with tempfile.TemporaryDirectory() as scratch:
        for folder in ("", "experiments", "tests", "labs"):
            (Path(scratch) / "solved" / folder).mkdir(parents=True, exist_ok=True)
            for path in (ROOT / folder).glob("*.py"):
                file = path.relative_to(ROOT)
                (Path(scratch) / "solved" / file).write_text(solved(file.as_posix()), "utf-8")
        yield Path(scratch) / "solved"


def test_file(number: int) -> str:
    return f"test_{LABS[number].name}.py"           # in TESTS


def preload(number: int):
    torch = "import torch" in (TESTS / test_file(number)).read_text(encoding="utf-8")
    grader.preload(*["torch"] * torch)


def expected_results(number: int, seed: int) -> dict:
    """What the solved code does with that seed, by test."""
    preload(number)
    with solved_project() as project:
        return asked(grader.ask(grader.reference, project, test_file(number), seed))


def asked(answer: tuple):
    """The answer of the solved code."""
    result, failure = answer
    if failure:
        raise OSError(f"the solved code fails: {failure}")
    return result


def submitted(number: int, code: Path, file: str, functions: list[str]) -> str:
    """A student's file, as the tests of these functions take it: all other functions that belong to
    a lab are solved. A file with none of these functions is the solved one, whole.

    For `RecomputeCost.__call__`: the student's eviction.py with the other two solved, and the
    solved own_policy.py. (A lab that takes whole files takes them as they are.)"""
    source, right = (code / file).read_text(encoding="utf-8"), solved(file)
    ast.parse(source)
    if LABS[number].whole:
        return source
    for name in hidden_in(file):
        if name not in functions:
            source = replaced(source, name, taken(right, name))
    if not set(functions) & set(LABS[number].files[file]):
        return right
    # A solved function may need an import that the student has removed.
    removed = [line for line in imports(right) if line not in imports(source)]
    return "\n".join([source, *removed, ""])


def imports(source: str) -> list[str]:
    """The import statements of a module, but for `from __future__`, which must stand first."""
    return [ast.unparse(node) for node in ast.parse(source).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            and getattr(node, "module", None) != "__future__"]


def grade(number: int, code: Path, seed: int = 0) -> Graded:
    """Run the lab's tests on the lab's files in a project's directory."""
    begin, file = time.monotonic(), test_file(number)
    preload(number)
    with solved_project() as project, ThreadPoolExecutor(AT_ONCE) as pool:
        expected = pool.submit(grader.ask, grader.reference, project, file, seed)
        listed = asked(grader.ask(grader.list_tests, project, file))
        try:
            places = {function: project_for(function, number, code, project)
                      for function in {test["function"] for test in listed["tests"]}}
        except UNREADABLE as error:
            reports = [(None, f"{type(error).__name__}: {error}")] * len(listed["tests"])
        else:
            reports = list(pool.map(lambda test: grader.ask(
                grader.run_test, places[test["function"]], file, test["name"], seed),
                listed["tests"]))
        expected = asked(expected.result())
    tests = [{**test, **judged(number, report, test["points"], expected.get(test["name"]))}
             for test, report in zip(listed["tests"], reports)]
    notes = [listed["skipped"]] * bool(listed["skipped"]) + unusual(number, code)
    return Graded(tests, notes, time.monotonic() - begin)


def project_for(function: str, number: int, code: Path, project: Path) -> Path:
    """Where the tests of that function run: the solved project with it from a student's files.

    A test may name no function, as in @points(18, "a starved load"): then with all of the lab's."""
    names = [name for _, name in LABS[number].functions()]
    own = [function] if function in names else names
    place = project.with_name(function)
    shutil.copytree(project, place)
    for file in LABS[number].files:
        (place / file).write_text(submitted(number, code, file, own), encoding="utf-8")
    return place


def judged(number: int, answer: tuple, points: int, expected) -> dict:
    """reached, passed, message, progress of a test, and what else its comparison tells: a table, a
    leaderboard. expected: None if nothing is compared."""
    report, failure = answer
    if failure:
        return dict(reached=0, passed=False, message=failure, progress=None)
    problem, progress, more = None, report["progress"], {}
    if expected is not None and report["found"] is None:
        problem = "The test did not report what it found."
    elif expected is not None:
        try:
            problem, progress, *rest = COMPARE[number](expected, report["found"])
            more = dict(*rest)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"the result has another form than it should: {error!r}"
    ended_well = report["passed"] is True           # whoever has forged the report may say 50
    passed = ended_well and not problem
    message = "" if passed else report["message"] or problem or "The test failed."
    share = more.get("share", passed) if ended_well else 0      # of the points
    reached = int(points * min(max(share, 0), 1)) if math.isfinite(share) else 0
    return more | dict(reached=reached, passed=passed, message=message, progress=progress)


def unusual(number: int, code: Path) -> list[str]:
    """Which of a student's files may try to cheat the grader."""
    notes = []
    for file in LABS[number].files:
        try:
            uses = grader.new_imports((code / file).read_text(encoding="utf-8"), solved(file))
        except UNREADABLE:
            continue
        if uses:
            notes.append(f"look at {file}: it uses {', '.join(uses)}, which the solved one does not")
    return notes


def report(number: int, graded: Graded):
    print(f"lab {LABS[number].name}")
    print("".join(f"  {note}\n" for note in graded.notes), end="")
    for function in dict.fromkeys(test["function"] for test in graded.tests):
        print("  {:32} {:3} of {:3} points".format(function, *graded.score(function)))
        failed = [test for test in graded.tests
                  if test["function"] == function and not test["passed"]]
        if failed:
            message = failed[0]["message"].splitlines()[:MESSAGE_LINES]
            print("\n        ".join([f"    {message[0]}    ({failed[0]['name']})", *message[1:]]))
    print("  {:32} {:3} of {:3} points, {:.0f} s".format("all", *graded.score(), graded.seconds))
    passed = sum(test["passed"] for test in graded.tests)
    told = [test["progress"] for test in graded.tests if test["progress"]]
    print("  progress:", (told or [f"{passed} of {len(graded.tests)} cases are right"])[-1])


def gradescope(graded: Graded) -> dict:
    """Gradescope's results.json."""
    tests = [dict(name=f"{test['function']}: {test['name']}", score=test["reached"],
                  max_score=test["points"],
                  output="\n".join(filter(None, (test["message"], test["progress"], test.get("table")))))
             for test in graded.tests]
    leaderboard = [entry for test in graded.tests for entry in test.get("leaderboard", [])]
    return dict(score=graded.score()[0], execution_time=round(graded.seconds), tests=tests,
                output="\n".join(graded.notes), **dict(leaderboard=leaderboard) if leaderboard else {})


def check(number: int, code: Path, seed: int, file: str | None) -> int:
    """Print the points. 0 if all of them are reached, 1 if not: the exit status."""
    graded = grade(number, code, seed)
    report(number, graded)
    if file:
        Path(file).write_text(json.dumps(gradescope(graded), indent=1) + "\n")
    reached, points = graded.score()
    return 0 if graded.tests and reached == points else 1


# ---- handing in

def submit(number: int):
    """In a starter: what a student hands in."""
    archive, files = Path(f"lab{number}.zip"), list(LABS[number].files)
    unwritten = hand_in.submission(ROOT, files, archive)
    if unwritten:
        print("Still to be written:", ", ".join(unwritten))
    print(f"Hand in {archive}. It has {' and '.join(files)}.")


def autograder(number: int, seed: int):
    archive = Path(f"autograder_{number}.zip")
    with tempfile.TemporaryDirectory() as scratch:
        copy_project(Path(scratch))
        hand_in.autograder(Path(scratch), number, seed, archive)
    print(f"{archive} grades lab {number} with seed {seed}: it is Gradescope's autograder.")


# ---- the command line

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the labs: hours, files to hand in, functions to write")
    starting = commands.add_parser("start", help="write a lab's starter")
    checking = commands.add_parser("check",
                                   help="points, the first difference, the number of progress")
    submitting = commands.add_parser("submit", help="zip what you hand in (in a starter)")
    packing = commands.add_parser("autograder", help="zip Gradescope's grader of a lab")
    for command in (starting, checking, submitting, packing):
        command.add_argument("lab", type=int, choices=LABS)
    starting.add_argument("directory", type=Path)
    checking.add_argument("directory", type=Path, nargs="?", default=ROOT,
                          help="default: where lab.py lies")
    checking.add_argument("--json", metavar="FILE",
                          help="write Gradescope's results.json there, too")
    for command in (checking, packing):
        command.add_argument("--seed", type=int, default=0, help="of the random loads (default: 0)")
    options = parser.parse_args()
    try:
        match options.command:
            case "list":
                show_labs()
            case "start":
                start(options.lab, options.directory.resolve())
            case "check":
                return check(options.lab, options.directory.resolve(), options.seed, options.json)
            case "submit":
                submit(options.lab)
            case "autograder":
                autograder(options.lab, options.seed)
    except (ValueError, OSError, SyntaxError) as error:
        parser.error(str(error))
    return 0


def show_labs():
    for lab in LABS.values():
        print(f"{lab.name}: {lab.hours} hours. Hand in {' and '.join(lab.files)}")
        print("".join(f"    {name}\n" for _, name in lab.functions()), end="")


if __name__ == "__main__":
    sys.exit(main())
