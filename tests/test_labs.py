"""The labs stay true: for each of them the starter fails, the solved code passes, and three solutions that
are wrong but plausible get less than all points. Every command of a handout runs."""
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
WRONG = sorted((ROOT / "tests" / "wrong_solutions").glob("*.txt"))


def load(root):
    """A project's labs/lab.py."""
    spec = importlib.util.spec_from_file_location("lab", root / "labs" / "lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab = load(ROOT)
find, parsing = lab.find, Lock()


def find_alone(source, name):
    """lab.find, one thread at a time: CPython 3.11 may fail if two threads parse (python/cpython#106905)."""
    with parsing:
        return find(source, name)


lab.find = find_alone
every_lab = pytest.mark.parametrize("number", lab.LABS)


def run(*command, cwd):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)


def with_function(source, name, written):
    """The source with another function of that name. written: the lines of a `def` without indentation."""
    function, lines = lab.find(source, name), source.splitlines(keepends=True)
    indent = " " * function.col_offset
    lines[function.lineno - 1:function.end_lineno] = [
        indent + line if line.strip() else line for line in written.splitlines(keepends=True)]
    return "".join(lines)


def apply(wrong, directory):
    """Put a wrong solution (its docstring names file and function) into a solved project."""
    _, file, name = re.match(r'("""(\S+\.py): (\S+)\n)', wrong.read_text()).groups()
    written = wrong.read_text().split("\n\n\n", 1)[1]
    (directory / file).write_text(with_function((ROOT / file).read_text(), name, written))


# ---- processes that need not import torch first: 36 of them would take two minutes

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["hypothesis", "numpy", "pytest", "torch"])


def run_in_fork(arguments, code, timeout=None, **environment):
    """lab.run_python, for pytest."""
    output = Path(environment["LAB_RESULTS"] + ".output")
    fork(arguments, ROOT / "labs" / "tests", [ROOT / "tests", code], environment, output, timeout)
    return SimpleNamespace(stdout=output.read_text())


def fork(arguments, directory, paths, environment, output, timeout=None):
    """`python arguments` in that directory, with those paths to import from. Returns the exit status."""
    process = FORKS.Process(target=be_python, args=(arguments, directory, paths, environment, output))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise subprocess.TimeoutExpired("python", timeout)
    return process.exitcode


def ours(path):
    """Is it in this project? (An environment may lie in the project's folder, too.)"""
    return Path(path).is_relative_to(ROOT) and "site-packages" not in path


def be_python(arguments, directory, paths, environment, output):
    """In the new process: forget this project's modules, since those in `paths` are tested."""
    for name, module in list(sys.modules.items()):
        if ours(str(getattr(module, "__file__", None))):
            del sys.modules[name]
    os.chdir(directory)
    os.environ.update(environment, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.path[:] = [*map(str, paths), *(path for path in sys.path if not ours(path))]
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    match arguments:
        case ["-m", "pytest", *rest]:
            sys.exit(pytest.main(rest))
        case [file, *rest]:
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")


# ---- starters

def test_blank_keeps_every_byte_of_signature_and_docstring():
    source = '''class A:
    @property       # a comment
    def f(self,
          x: "é" = {"(": 1}) -> int:  # another
        """Says "é".

        More."""
        # a hint
        def inner():
            return 1
        return inner()     # a trailing hint

    def g(self):
        return 2
'''
    assert lab.blank(source, "A.f", 9) == source.split("        # a hint")[0] + '''\
        raise NotImplementedError("lab 9: A.f")

    def g(self):
        return 2
'''
    with pytest.raises(LookupError, match="no function A.h"):
        lab.blank(source, "A.h", 9)
    with pytest.raises(ValueError, match="A.g needs a docstring"):
        lab.blank(source, "A.g", 9)


@every_lab
def test_a_starter_differs_in_the_bodies_of_its_functions_alone(number, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "expected_results", lambda number, seed: None)
    lab.start(number, tmp_path / "starter")
    for file in {file for each in lab.LABS.values() for file in each.files}:
        source = (ROOT / file).read_text()
        for name in lab.LABS[number].files.get(file, []):
            source = lab.blank(source, name, number)
        assert (tmp_path / "starter" / file).read_text() == source
    kept_back = [path for path in (tmp_path / "starter").rglob("*")
                 if path.name in ("test_labs.py", "wrong_solutions", ".git", ".github")]
    assert not kept_back and (tmp_path / "starter" / "AGENTS.md").exists()


def test_start_writes_into_no_directory_that_is_in_use(tmp_path):
    (tmp_path / "notes").touch()
    for directory in (tmp_path, ROOT, ROOT / "labs" / "mine"):
        done = run("labs/lab.py", "start", "1", str(directory), cwd=ROOT)
        assert done.returncode == 2 and "new or empty directory outside of" in done.stderr
    assert not (ROOT / "labs" / "mine").exists()


def test_list_names_every_function():
    done = run("labs/lab.py", "list", cwd=ROOT)
    assert done.returncode == 0
    assert all(name in done.stdout for each in lab.LABS.values() for _, name in each.functions())


# ---- handouts

def commands():
    """All commands of the handouts but those of lab.py itself, which other tests run."""
    for handout in sorted((ROOT / "labs").glob("[1-6]_*.md")):
        text = handout.read_text().replace("\\\n", "")         # a command on two lines is one
        for command in re.findall(r"(?:^|`)((?:\w+=1 )?python [^`\n]+)", text, re.MULTILINE):
            if not command.startswith("python labs/lab.py"):
                marks = pytest.mark.slow if "bench.py" in command else ()
                yield pytest.param(command, marks=marks, id=f"{handout.stem}: {command}")


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_of_a_handout_runs(command, tmp_path):
    *settings, rest = re.split(r" ?(?=python )", command, maxsplit=1)
    environment, output = dict(setting.split("=") for setting in settings if setting), tmp_path / "output"
    assert fork(rest.split()[1:], ROOT, [ROOT], environment, output) == 0, output.read_text()


# ---- grading

@pytest.fixture(scope="module")
def starters(tmp_path_factory):
    """The directory of each lab's starter."""
    base = tmp_path_factory.mktemp("labs")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda number: lab.start(number, base / f"lab{number}"), lab.LABS))
    return {number: base / f"lab{number}" for number in lab.LABS}


def test_check_is_a_command(starters):
    """As a student runs it."""
    done = run("labs/lab.py", "check", "4", "--json", "results.json", cwd=starters[4])
    assert done.returncode == 1 and "  0 of 100 points" in done.stdout, done.stdout + done.stderr
    assert json.loads((starters[4] / "results.json").read_text())["score"] == 0


@pytest.mark.parametrize("number", [
    number if number == 4 else pytest.param(number, marks=pytest.mark.slow) for number in lab.LABS])
def test_points(number, starters, tmp_path, capsys):
    """Of the starter, of the solved code, and of each wrong solution."""
    starter = starters[number]
    graded_by = load(starter)           # it knows the expected results, and need not compute them again
    graded_by.run_python = run_in_fork
    wrong = [path for path in WRONG if path.name.startswith(f"{number}_")]

    def solved(name):
        directory = tmp_path / name
        shutil.copytree(starter, directory, ignore=shutil.ignore_patterns("results", "*.safetensors"))
        for file in lab.LABS[number].files:
            shutil.copy(ROOT / file, directory / file)
        return directory

    def grade(path):
        directory = solved(path.stem)
        apply(path, directory)
        return graded_by.grade(number, directory, 0, "-x")      # one failure is enough

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        of_starter = pool.submit(graded_by.check, number, starter, 0, tmp_path / "results.json")
        of_solved = pool.submit(graded_by.grade, number, solved("solved"))
        of_wrong = list(pool.map(grade, wrong))
    assert of_starter.result() == 1 and "  0 of 100 points" in capsys.readouterr().out
    check_starter(number, json.loads((tmp_path / "results.json").read_text()))
    right = of_solved.result()
    assert right.score() == (100, 100), graded_by.report(number, right)
    assert len(wrong) == 3
    for path, graded in zip(wrong, of_wrong):
        assert graded.tests, graded.output
        assert graded.score()[0] < 100, f"{path.stem} gets all points"


def check_starter(number, results):
    """It has no points, and the only reason is that lab's own NotImplementedError. The handout says how many
    tests fail, and what to run."""
    handout = (ROOT / "labs" / f"{lab.LABS[number].name}.md").read_text()
    assert f"all {len(results['tests'])} tests fail" in handout
    assert f"python labs/lab.py check {number}\n" in handout
    assert results["score"] == 0 and sum(test["max_score"] for test in results["tests"]) == 100
    for test in results["tests"]:
        assert re.search(rf"NotImplementedError.*lab {number}: ", test["output"]), test
