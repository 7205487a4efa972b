"""The labs stay true: for each of them the starter fails and shows no answer, the solved code passes, and
solutions that are wrong but plausible lose points, for a reason that is named. Every command of a handout
runs. Who cheats the grader in an easy way gets nothing."""
import functools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRONG = sorted((ROOT / "tests" / "wrong_solutions").glob("*.txt"))


sys.path.append(str(ROOT / "labs"))
import grader  # noqa: E402
import lab  # noqa: E402
import grading  # noqa: E402  (lab.py says where it is)

grader.preload("torch")         # before any process starts: all labs share what is preloaded
every_lab = pytest.mark.parametrize("number", lab.LABS)
ask = grader.ask


@functools.cache
def reference(file, seed):
    with lab.solved_project() as project:
        return ask(grader.reference, project, file, seed)


@pytest.fixture(autouse=True)
def one_reference_for_all(monkeypatch):
    """The solved code takes nine seconds for lab 4, half a minute for lab 7: here once, not in each test."""
    monkeypatch.setattr(grader, "ask", lambda task, *arguments: (
        reference(*arguments[1:]) if task is grader.reference else ask(task, *arguments)))


@pytest.fixture
def without_reference(monkeypatch):
    """For what fails before it is compared with the solved code."""
    monkeypatch.setattr(grader, "ask", lambda task, *arguments: (
        ({}, None) if task is grader.reference else ask(task, *arguments)))


def run(*command, cwd):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)


def parts(wrong):
    """A wrong solution as file, function, the words by which it must be told, and its lines. (Its docstring
    begins with file and function, and ends with the words.)"""
    head, written = wrong.read_text().split("\n\n\n", 1)
    file, name, words = re.match(r'"""(\S+\.py): (\S+)\n.*\nTold as: (.*)"""$', head, re.DOTALL).groups()
    return file, name, words, written


def solved_files(number, directory):
    """The lab's files as in the solved project."""
    for file in lab.LABS[number].files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, directory / file)
    return directory


# ---- processes that need not import torch first

def fork(arguments, directory, paths, environment, output, timeout=None):
    """`python arguments` in that directory, with those paths to import from. Returns the exit status."""
    process = grader.FORKS.Process(target=be_python, args=(arguments, directory, paths, environment, output))
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
    assert lab.blank(source, "A.f", "lab 9: A.f") == source.split("        # a hint")[0] + '''\
        raise NotImplementedError("lab 9: A.f")

    def g(self):
        return 2
'''
    assert lab.blank('class B(A):\n    """Says b."""\n    b = 1\n', "B", "lab 9: B") == (
        'class B(A):\n    """Says b."""\n\n    def __init__(self, *arguments):\n'
        '        raise NotImplementedError("lab 9: B")\n')
    with pytest.raises(LookupError, match="no function A.h"):
        lab.blank(source, "A.h", "")
    with pytest.raises(ValueError, match="A.g needs a docstring"):
        lab.blank(source, "A.g", "")


@pytest.fixture(scope="module")
def starters(tmp_path_factory):
    """The directory of each lab's starter."""
    base = tmp_path_factory.mktemp("labs")
    for number in lab.LABS:
        lab.start(number, base / f"lab{number}")
    return {number: base / f"lab{number}" for number in lab.LABS}


@every_lab
def test_a_starter_differs_in_bodies_alone(number, starters):
    for file in {file for each in lab.LABS.values() for file, _ in each.hidden()}:
        source, later = (ROOT / file).read_text(), []
        for name in lab.hidden_in(file, number):
            own = name in lab.LABS[number].files.get(file, [])
            source = lab.blank(source, name, f"lab {number}: {name}" if own else
                               "labs/given.py puts this function in place")
            later += [] if own else [name]
        shown, _, rest = (starters[number] / file).read_text().partition("\n\n# These functions work")
        assert shown == source and re.findall(r'"(.*)"', rest) == later
    kept_back = [path for path in starters[number].rglob("*")
                 if path.name in ("test_labs.py", "wrong_solutions", ".git", ".github", "chapter_one.py",
                                  "INSTRUCTORS.md", "exam.md", "test_exam.py")]
    assert not kept_back and (starters[number] / "AGENTS.md").exists()
    assert "](chapter_one.py)" not in (starters[number] / "README.md").read_text()


@every_lab
def test_a_starter_shows_no_body_of_this_lab_or_a_later_one(number, starters):
    """Whoever greps it for the longest line that only the body has finds nothing."""
    everything = "\n".join(path.read_text(errors="ignore") for path in starters[number].rglob("*")
                           if path.suffix in (".py", ".md", ".json", ".txt", ".html"))
    for file, name in [each for later in lab.LABS for each in lab.LABS[later].hidden() if later >= number]:
        source = (ROOT / file).read_text()
        function = lab.find(source, name)
        lines = source.splitlines()[function.body[0].end_lineno:function.end_lineno]
        lines = [line.partition("  #")[0].strip() for line in lines]
        longest = max((line for line in lines if source.count(line) == 1), key=len)
        assert longest not in everything, f"{name}: {longest}"


def test_given_functions_work_in_every_version_of_python(starters):
    """eviction.py imports nothing but the standard library."""
    program = ("from eviction import RecomputeCost, RetentionValue, cheapest_by_scanning as cheapest\n"
               "print(RetentionValue(RecomputeCost({1: 2.0}, 1.0), 4).value(0, 2.0), cheapest(None, [], 0))")
    found = {Path(sys.executable)}
    found |= {Path(path) for version in (10, 11, 12, 13) if (path := shutil.which(f"python3.{version}"))}
    found |= {*Path(os.environ.get("PYENV_ROOT", "/root/.pyenv")).glob("versions/3.1[0-3]*/bin/python")}
    for python in found:
        done = subprocess.run([python, "-c", program], cwd=starters[1], capture_output=True, text=True)
        missing = done.returncode == 127            # a name for a Python that is not installed
        assert missing or done.stdout == "1.5 None\n", (python, done.stderr)


def test_a_given_kernel_works(starters, tmp_path):
    """Triton reads the source of what it interprets. (The case is split, and merged by the given kernel.)"""
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text("from test_attention_kernel import *\n"
                       "check_case(([1], [200], 2, 1, 16), FLOAT32, FLOAT, 'cpu')\nprint('right')")
    paths = [starters[1], starters[1] / "tests"]
    fork([str(program)], starters[1], paths, dict(TRITON_INTERPRET="1"), output)
    assert output.read_text() == "right\n", output.read_text()


def test_start_writes_into_no_directory_that_is_in_use(tmp_path):
    (tmp_path / "notes").touch()
    for directory in (tmp_path, ROOT, ROOT / "labs" / "mine"):
        done = run("labs/lab.py", "start", "1", str(directory), cwd=ROOT)
        assert done.returncode == 2 and "new or empty directory outside of" in done.stderr
    assert not (ROOT / "labs" / "mine").exists()


def test_list_names_every_function_and_file_and_the_hours():
    done = run("labs/lab.py", "list", cwd=ROOT)
    assert done.returncode == 0
    heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    for each, head in zip(lab.LABS.values(), heads, strict=True):
        assert head.startswith(f"{each.name}: {each.hours} hours. Hand in ")
        assert all(file in head for file in each.files)
        assert all(f"    {name}\n" in done.stdout for _, name in each.functions())


# ---- handouts

def commands():
    """All commands of the handouts but those of lab.py and server.py, which other tests run."""
    for handout in sorted((ROOT / "labs").glob("[1-7]_*.md")):
        text = handout.read_text().replace("\\\n", "")         # a command on two lines is one
        for command in re.findall(r"(?:^|`)((?:\w+=1 )?python [^`\n]+)", text, re.MULTILINE):
            if not command.startswith(("python labs/lab.py", "python server.py")):
                marks = pytest.mark.slow if "bench.py" in command or "sm_90" in command else ()
                yield pytest.param(command, marks=marks, id=f"{handout.stem}: {command}")


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_of_a_handout_runs(command, tmp_path):
    *settings, rest = re.split(r" ?(?=python )", command, maxsplit=1)
    environment, output = dict(setting.split("=") for setting in settings if setting), tmp_path / "output"
    assert fork(rest.split()[1:], ROOT, [ROOT], environment, output) == 0, output.read_text()


# ---- grading

def test_check_is_a_command(starters):
    """With another seed than that of `test_points_of_the_starter`."""
    done = run("labs/lab.py", "check", "2", "--seed", "1", "--json", "results.json", cwd=starters[2])
    assert done.returncode == 1 and "  0 of 100 points" in done.stdout, done.stdout + done.stderr
    check_starter(2, json.loads((starters[2] / "results.json").read_text()))


def test_the_solved_code_has_all_points_with_another_seed_by_the_command():
    done = run("labs/lab.py", "check", "3", "--seed", "1", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


slow_but_2 = [number if number == 2 else pytest.param(number, marks=pytest.mark.slow) for number in lab.LABS]


@pytest.mark.slow
@every_lab
def test_points_of_the_starter(number, starters):
    done = run("labs/lab.py", "check", str(number), "--json", "results.json", cwd=starters[number])
    assert done.returncode == 1 and "  0 of 100 points" in done.stdout, done.stdout + done.stderr
    check_starter(number, json.loads((starters[number] / "results.json").read_text()))


@pytest.mark.parametrize("number", slow_but_2)
def test_points_of_the_solved_code(number, tmp_path, capsys):
    graded = lab.grade(number, solved_files(number, tmp_path), seed=1)
    lab.report(number, graded)
    assert graded.score() == (100, 100) and not graded.notes, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG, ids=lambda path: path.stem)
def test_points_of_a_wrong_solution(wrong, tmp_path, capsys):
    """It loses ten or more, and the first line of the first message is about the cause."""
    file, name, words, written = parts(wrong)
    number = int(wrong.name[0])
    directory = solved_files(number, tmp_path)
    (directory / file).write_text(lab.replaced((ROOT / file).read_text(), name, written))
    graded = lab.grade(number, directory)
    lab.report(number, graded)
    output = capsys.readouterr().out
    failed = [test for test in graded.tests if not test["passed"]]
    assert graded.score()[0] <= 90, output
    assert re.search(words, failed[0]["message"].splitlines()[0]), output
    assert all(len(test["message"].splitlines()) <= 5 for test in failed), output
    assert max(map(len, output.splitlines())) < 300
    # The functions that are right keep their points.
    right = {each for _, each in lab.LABS[number].functions()} - {name}
    assert all(graded.score(each)[0] == graded.score(each)[1] for each in right), output


def check_starter(number, results):
    """It has no points, and the only reason is that lab's own NotImplementedError. The handout says how many
    tests fail, and what to run."""
    handout = (ROOT / "labs" / f"{lab.LABS[number].name}.md").read_text()
    assert f"all {len(results['tests'])} tests fail" in handout
    assert f"python labs/lab.py check {number}\n" in handout
    assert results["score"] == 0 and sum(test["max_score"] for test in results["tests"]) == 100
    for test in results["tests"]:
        assert re.search(rf"NotImplementedError.*lab {number}: ", test["output"]), test


def test_a_build_is_compared_in_every_figure():
    """Each figure alone, worse by one; more registers or shared memory alone cost nothing."""
    signs = {name: sign for name, sign, _ in grading.OF_A_BUILD}
    expected = dict.fromkeys([*signs, "registers", "shared KB"], 5)
    for name, sign, cause in grading.OF_A_BUILD:
        worse, better = expected | {name: 5 - sign}, expected | {name: 5 + sign}
        assert grading.kernel(expected, worse)[0].splitlines()[0] == cause
        assert grading.kernel(expected, better)[0] is None
    problem, _, more = grading.kernel(expected, expected | {"registers": 9, "shared KB": 9})
    table = more["table"].splitlines()
    assert problem is None and [line.split()[0] for line in table[1:]] == ["reference", "yours"]


def test_a_submission_is_graded_as_gradescope_does_it(starters, tmp_path):
    """Its folder and ours differ in one thing: there is no new virtual environment."""
    starter = shutil.copytree(starters[5], tmp_path / "starter")
    done = run("labs/lab.py", "submit", "5", cwd=starter)
    assert "Still to be written: SimulatedWorker.overlapped, KVPool.wait" in done.stdout
    for file, name in lab.LABS[5].functions():
        if name != "SimulatedWorker.overlapped":
            written = lab.taken((ROOT / file).read_text(), name)
            (starter / file).write_text(lab.replaced((starter / file).read_text(), name, written))
    done = run("labs/lab.py", "submit", "5", cwd=starter)
    assert done.stdout == ("Still to be written: SimulatedWorker.overlapped\n"
                           "Hand in lab5.zip. It has experiments/simulator.py and kv_pool.py.\n")
    done = run(ROOT / "labs" / "lab.py", "autograder", "5", "--seed", "7", cwd=tmp_path)
    assert done.stdout.startswith("autograder_5.zip grades lab 5 with seed 7"), done.stderr

    place = tmp_path / "autograder"
    shutil.unpack_archive(tmp_path / "autograder_5.zip", place / "source")
    shutil.unpack_archive(starter / "lab5.zip", place / "submission")
    shutil.copy(place / "source" / "run_autograder", place)
    (place / "run_autograder").chmod(0o755)         # unpack_archive forgets it
    (place / "venv").symlink_to(sys.prefix)
    assert subprocess.run(["bash", "-n", place / "source" / "setup.sh"]).returncode == 0
    done = subprocess.run(place / "run_autograder", cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    results = json.loads((place / "results" / "results.json").read_text())
    tests = results["tests"]
    assert sum(test["max_score"] for test in tests) == 100
    assert 0 < results["score"] == sum(test["score"] for test in tests) < 100
    wrong = [test for test in tests if test["score"] < test["max_score"]]
    assert all("lab 5: SimulatedWorker.overlapped" in test["output"] for test in wrong)


def test_only_files_that_python_can_read_are_handed_in(starters, tmp_path):
    starter = shutil.copytree(starters[4], tmp_path / "starter")
    (starter / "eviction.py").write_text("def value(:")
    done = run("labs/lab.py", "submit", "4", cwd=starter)
    assert done.returncode == 2 and "(eviction.py, line 1)" in done.stderr
    (starter / "eviction.py").unlink()
    done = run("labs/lab.py", "submit", "4", cwd=starter)
    assert done.returncode == 2 and "eviction.py" in done.stderr
    assert not (starter / "lab4.zip").exists()


@pytest.mark.usefixtures("without_reference")
@pytest.mark.parametrize("content", [None, "def value(:", "", "\0", b"\xff"])
def test_a_file_that_cannot_be_graded_has_no_points_and_says_why(content, tmp_path):
    directory = solved_files(4, tmp_path)
    if content is None:
        (directory / "eviction.py").unlink()
    else:
        (directory / "eviction.py").write_bytes(content if isinstance(content, bytes) else content.encode())
    graded = lab.grade(4, directory)
    assert graded.score() == (0, 100)
    assert re.match(r"[A-Za-z]+Error: .", graded.tests[0]["message"])


CHEATS = {
    "at_exit": """
import atexit, json, os
@atexit.register
def cheat():
    for name in os.environ.get("LAB_RESULTS", "results"), "expected.json":
        with open(name, "a") as file:
            file.write(json.dumps(dict(passed=True, points=100)))
""",
    "exits_early": "import os\nos._exit(0)\n",
    "writes_to_every_pipe": """
import os
for number in range(3, 64):
    try:
        os.write(number, b'\\0\\0\\0\\x1f["", {"passed": true, "found": 1}]')
    except OSError:
        pass
""",
}


@pytest.mark.usefixtures("without_reference")
@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_earns_nothing(cheat, starters, tmp_path):
    for file in lab.LABS[4].files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(starters[4] / file, tmp_path / file)
    (tmp_path / "eviction.py").write_text((tmp_path / "eviction.py").read_text() + CHEATS[cheat])
    (tmp_path / "pytest.py").write_text("raise SystemExit(0)")         # files that are no lab's do not count
    graded = lab.grade(4, tmp_path)
    assert graded.score() == (0, 100), graded.tests
    assert "look at eviction.py: it uses " in graded.notes[0]


@pytest.mark.parametrize("seconds, points", [(8.0, 0), (7.0, 0), (6.5, 10), (5.1, 38), (5.0, 40), (4.0, 40),
                                             (0.5, 40), (0.0, 0), (-8.0, 0)])
def test_a_policy_of_ones_own_earns_a_part_of_the_points(seconds, points):
    """LRU recomputes for 8 s, the retention value for 7, ours for 5, and the oracle for 0."""
    loads = [dict(lru=8.0, retention=7.0, ours=5.0, oracle=0.0)] * 10
    told = dict(passed=True, message="", progress=None, found=[seconds] * 10)
    assert lab.judged(4, (told, None), 40, loads)["reached"] == points
    told |= dict(passed=False, message="the value rises")
    assert lab.judged(4, (told, None), 40, loads)["reached"] == 0


@pytest.mark.parametrize("forged", [
    dict(found=[math.nan] * 10), dict(found=[-1e9] * 10), dict(found=3), dict(found=["1"] * 10),
    dict(passed=50, found=[5.0] * 10), dict(passed=False, message=""), dict(found=None)])
def test_a_forged_report_earns_nothing_and_stops_nothing(forged):
    loads = [dict(lru=8.0, retention=7.0, ours=5.0, oracle=0.0)] * 10
    told = dict(passed=True, message="", progress=None, found=None) | forged
    judged = lab.judged(4, (told, None), 40, loads)
    assert judged["reached"] == 0 and judged["passed"] is False and judged["message"]


@pytest.mark.parametrize("share, points", [(math.nan, 0), (math.inf, 0), (-1.0, 0), (0.5, 20),
                                           (2.0, 40)])
def test_no_comparison_gives_more_than_all_points_or_less_than_none(share, points, monkeypatch):
    said = "differs", None, dict(share=share)
    monkeypatch.setitem(lab.COMPARE, 4, lambda expected, found: said)
    told = dict(passed=True, message="", progress=None, found=[])
    assert lab.judged(4, (told, None), 40, [])["reached"] == points


@pytest.mark.parametrize("written, told", [
    ("from statistics import NormalDist", []), ("import statistics", ["statistics"]),
    ("import math, sys", ["math", "sys"]), ("from statistics import sys", ["statistics.sys"]),
    ("from labs.given import fill", []), ("from labs.given import given", ["labs.given.given"]),
    ("numbers.sys.modules", ["modules"]), ("Policy.value.__globals__", ["__globals__"]),
    ("__builtins__", ["__builtins__"]), ("open(0)", ["open"]), ("f.open", ["open"])])
def test_what_deserves_a_look_is_named(written, told):
    assert grader.new_imports(written, "from statistics import NormalDist") == told


def passes(directory, function, name):
    """Does that test of lab 4 pass with the files of a student?"""
    lab.preload(4)
    with lab.solved_project() as project:
        place = lab.project_for(function, 4, directory, project)
        told, failure = grader.ask(grader.run_test, place, lab.test_file(4), name, 0)
    return not failure and told["passed"]


def test_the_other_functions_do_not_need_what_a_student_imports(tmp_path):
    """OwnPolicy builds on another policy; eviction.py has lost what only solved functions need."""
    directory = solved_files(4, tmp_path)
    (directory / "experiments" / "own_policy.py").write_text(
        "from eviction import RetentionValue\n\n\n"
        'class OwnPolicy(RetentionValue):\n    """Mine."""\n')
    source = (directory / "eviction.py").read_text()
    assert source.count("from bisect import bisect_right\n") == 1
    (directory / "eviction.py").write_text(source.replace("from bisect import bisect_right\n", ""))
    assert passes(directory, "RetentionValue.value", "test_the_numbers_of_the_module")
    assert passes(directory, "cheapest_by_scanning", "test_nobody")


def test_a_policy_that_cannot_be_imported_costs_its_own_points_alone(tmp_path):
    directory = solved_files(4, tmp_path)
    (directory / "experiments" / "own_policy.py").write_text(
        'import nothing_of_that_name\n\n\nclass OwnPolicy:\n    """Mine."""\n')
    assert passes(directory, "RetentionValue.value", "test_the_numbers_of_the_module")
    assert passes(directory, "a starved load", "test_the_gap_between_lru_and_the_oracle")


@pytest.mark.usefixtures("without_reference")
def test_a_crash_costs_one_test(tmp_path):
    directory = solved_files(4, tmp_path)
    source = (ROOT / "eviction.py").read_text()
    written = ('def value(self, key, idle):\n'
               '    """V."""\n'
               '    import ctypes\n'
               '    crash = ctypes.string_at(0) if key == 15 else None\n'
               '    return self.cost((key + 1) * self.chunk_size) / idle\n')
    (directory / "eviction.py").write_text(lab.replaced(source, "RetentionValue.value", written))
    graded = lab.grade(4, directory)
    failed = [test for test in graded.tests if not test["passed"]]
    assert failed[0]["name"] == "test_the_numbers_of_the_module"
    assert failed[0]["message"].startswith("The process crashed (SIGSEGV).")
    assert graded.score("RetentionValue.value") == (3, 10)
