"""What all labs' tests have in common: points, a time limit for each test, and what is compared.

    @points(5, "KVCache.admit")
    def test_...

grader.py runs each test in a process of its own; by hand pytest runs them as it always does.
"""
import os
import signal
import sys
from pathlib import Path

import pytest

from grading import COMPARE, SEED

SECONDS = 2             # of CPU time, for a test; @pytest.mark.seconds(9) gives it more


def pytest_configure(config):
    config.addinivalue_line("markers",
                            "points(number, function): so many points, for that function")
    config.addinivalue_line("markers", "seconds(number): the test's time limit")


def pytest_assertrepr_compare(op, left, right):
    """What a failed `assert yours == reference` tells."""
    if op == "==":
        return ["they differ", f"yours     {words(left)}", f"reference {words(right)}"]


def words(value) -> str:
    """A list of tickets as in_a[0:4], all else as Python prints it."""
    if isinstance(value, list):
        return f"[{', '.join(map(words, value))}]"
    if hasattr(value, "direction"):
        return f"{value.direction} {value.conversation.name}[{value.start}:{value.end}]"
    return getattr(value, "name", None) or repr(value)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A wrong loop may never end. (CPU time, so that a busy machine changes nothing. Windows has no
    such alarm; there the grader stops the process.)"""
    marker = item.get_closest_marker("seconds")
    seconds = marker.args[0] if marker else SECONDS
    if not hasattr(signal, "SIGPROF"):
        yield
        return

    def stop(number, frame):
        raise TimeoutError(f"not done after {seconds} s: does a loop never end?")
    signal.signal(signal.SIGPROF, stop)
    # Again and again: the loop may catch exceptions.
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.fixture
def compare(request, record_property):
    """Call it once, with what must be as the solved code has it (`reference` of the test's module,
    under the test's name). In a process of the grader that only reports it."""
    def told(found):
        record_property("found", found)
        if "LAB_SEED" in os.environ:
            return
        sys.path.append(str(Path(__file__).parents[1]))
        import lab
        number = int(request.module.__name__.split("_")[1])
        expected = lab.expected_results(number, SEED)[request.node.name]
        problem, progress, *_ = COMPARE[number](expected, found)
        print(progress)
        if problem:
            pytest.fail(problem, pytrace=False)
    return told


@pytest.fixture
def progress(record_property):
    """Call it with the lab's number of progress, a text. The last call counts."""
    return lambda text: record_property("progress", text)
