"""Runs a lab's tests, each in a process of its own, and decides which have passed.

    the grader                                          a process for each test
    copies the solved project, puts the function  ->    imports that copy, runs one test,
    that is tested into it, from the student's file     reports over a pipe, and ends at once
    compares with what the solved code does       <-

So a crash costs one test. Each function is tested among solved ones. And no student's code runs
where points are given: a pipe and a key of its own lead from each test to the grader, which imports
nothing of a student's and reads nothing but JSON. Where tests compare with the solved code, the
grader compares, and the test's process does not have the expected result.

What remains possible: in the process of a test, a student's code may search the interpreter's
frames for the pipe and the key, or change pytest, and so report that a test passed. (Where the
grader compares, it must report the right numbers, for a seed that it does not know; but where less
is better, as in labs 4 and 7, any low number will do.) That takes code of which no solution has
any; `new_imports` says where to look, and a policy that is as good as the oracle gets nothing.
"""
import ast
import importlib
import json
import multiprocessing
import os
import re
import secrets
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from _pytest.config import default_plugins

TESTS = Path(__file__).resolve().parent / "tests"
TIME_LIMIT = 60             # seconds of a test's process; conftest.py limits its CPU time
LARGEST_REPORT = 10 ** 8    # bytes
FLAGS = "-c", "check.ini", "-p", "no:unraisableexception"      # that plugin takes half of the time
LINES, COLUMNS = 4, 160     # of a message, after its first line
# Names by which code could reach the test or the grader.
TO_LOOK_AT = {"__import__", "eval", "exec", "open", "compile", "getattr", "setattr", "modules",
              "_getframe", "f_back", "gi_frame", "tb_frame", "__globals__", "__builtins__",
              "__dict__", "__wrapped__", "__subclasses__"}
FORKS = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")


def preload(*modules: str):
    """Import these once, before the first process, for all of them."""
    FORKS.set_forkserver_preload(["numpy", "hypothesis", "pytest", "_pytest.python_api", *modules,
                                  *(f"_pytest.{name}" for name in default_plugins)])


# ---- in the grader

def ask(task, code: Path, *arguments) -> tuple:
    """(task(*arguments), None) from a process of its own that imports the project from `code`, or
    (None, why it failed). The task must return what JSON can hold."""
    ours, theirs = FORKS.Pipe(duplex=False)
    key = secrets.token_hex()
    process = FORKS.Process(target=answer, args=(theirs, key, task, code, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIME_LIMIT if task is run_test else None):     # the rest is ours
            return None, f"It was stopped after {TIME_LIMIT} s: does a loop never end?"
        told, result = json.loads(ours.recv_bytes(LARGEST_REPORT))
        return (result, None) if told == key else (None, "Something else than the test reported.")
    except (EOFError, OSError, ValueError, TypeError):
        process.join(TIME_LIMIT)
        return None, how_it_ended(process.exitcode)
    finally:
        process.kill()
        process.join()


def how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        return (f"The process crashed ({name})." + (
            "\nIt touched memory outside of an array. A load may only read the table's row up to "
            "kv_end - 1,\nand slots that exist: mask the load, or clamp its index."
            if name == "SIGSEGV" else ""))
    return f"The process ended (exit status {exitcode}) before the test had."


def new_imports(submitted: str, solved: str) -> list[str]:
    """What a submitted file imports or names, and the solved one does not, that deserves a look.

    `import statistics` is more than `from statistics import NormalDist`: through the module one
    reaches statistics.sys."""
    def uses(source):
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Import():
                    yield from (each.name for each in node.names)
                case ast.ImportFrom():
                    yield from (f"{node.module}.{each.name}" for each in node.names)
                case ast.Name(id=name) | ast.Attribute(attr=name) if name in TO_LOOK_AT:
                    yield name
    return sorted({*uses(submitted)} - {*uses(solved), "labs.given.fill"})


# ---- in the process of a test

def answer(pipe: Connection, key: str, task, code: Path, arguments: tuple):
    os.closerange(3, pipe.fileno())         # all but the pipe, and 0 to 2:
    os.closerange(pipe.fileno() + 1, 4096)  # else a student's code could reach the fork server
    os.chdir(TESTS)
    project = str(TESTS.parents[1])
    others = [path for path in sys.path if "site-packages" in path or not path.startswith(project)]
    sys.path[:] = [str(code / "tests"), str(code), str(TESTS), *others]
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TRITON_INTERPRET="1")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    pipe.send_bytes(json.dumps([key, task(*arguments)]).encode())
    os._exit(0)                 # what a student's code has left for the end does not run


def list_tests(file: str) -> dict:
    """The tests of a file. If there are none, `skipped` says why."""
    listing = Listing()
    pytest.main([*FLAGS, "--collect-only", file], plugins=[listing])
    return dict(tests=listing.tests, skipped=listing.skipped)


def reference(file: str, seed: int) -> dict:
    """What the code does with that seed, by test; see compare in labs/tests/conftest.py."""
    module = importlib.import_module(Path(file).stem)
    return module.reference(seed) if hasattr(module, "reference") else {}


def run_test(file: str, name: str, seed: int) -> dict:
    """passed, message, progress, and `found`, which the grader has to compare."""
    os.environ["LAB_SEED"] = str(seed)
    sys.modules.pop("grading", None)        # lab.py has imported it, and it reads the seed then
    outcome = Outcome()
    pytest.main([*FLAGS, f"{file}::{name}"], plugins=[outcome])
    return outcome.report


class Listing:
    def __init__(self):
        self.tests, self.skipped = [], ""

    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self.skipped += f"{report.longrepr}\n"

    def pytest_collection_finish(self, session):
        for item in session.items:
            points, function = item.get_closest_marker("points").args
            self.tests.append(dict(name=item.name, function=function, points=points))


class Outcome:
    def __init__(self):
        self.report = dict(passed=False, message="The test did not start.", progress=None, found=None)

    def pytest_collectreport(self, report):
        if report.failed:
            errors = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self.report["message"] = "\n".join(errors[-LINES:])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if call.excinfo:
            self.report.update(passed=False, message=explain(item, call.excinfo))
        elif call.when == "call":
            self.report.update(passed=True, message="")
        self.report.update(item.user_properties)


def explain(item, excinfo) -> str:
    """What a failed test promises, what differs, and where if that is not in the test itself. The
    test may say all of it (pytest.fail)."""
    if excinfo.errisinstance(pytest.fail.Exception):
        return str(excinfo.value)
    promise = item.name.removeprefix("test_").replace("_", " ")
    # Nothing stays of "AssertionError: assert (they differ", and "a slot is lost" of
    # "AssertionError: a slot is lost".
    told = re.sub(r"^AssertionError(: (assert \(*they differ)?|$)", "", excinfo.exconly())
    lines = [line.strip() for line in told.splitlines() if line.strip()] or ["the books are wrong"]
    last = excinfo.traceback[-1]
    if Path(str(last.path)).parent != TESTS and not excinfo.errisinstance(NotImplementedError):
        lines[1:1] = [f"in {Path(str(last.path)).name}, {last.name}: {str(last.statement).strip()}"]
    return "\n".join([promise, *(line[:COLUMNS] for line in lines[:LINES])])
