"""What goes to Gradescope, as two zips: a student's files, and the grader that takes them.

    python labs/lab.py submit 3         in a starter          lab3.zip: the lab's files
    python labs/lab.py autograder 3     in the solved one     autograder_3.zip: all of the project

    /autograder/source              autograder_3.zip, unpacked; setup.sh runs once
    /autograder/run_autograder      runs for each submission: lab.py check
    /autograder/submission          lab3.zip, unpacked
    /autograder/results             results.json
"""
import ast
import re
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path


def submission(code: Path, files: Iterable[str], archive: Path) -> list[str]:
    """Put these files of a project into a zip. Returns what in them is still to be written.

    OSError if a file is missing, SyntaxError if it does not parse: then there is no zip."""
    sources = {file: (code / file).read_text(encoding="utf-8") for file in files}
    for file, source in sources.items():
        ast.parse(source, file)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file in sources:
            zipped.write(code / file, file)
    return [name for source in sources.values()
            for name in re.findall(r'raise NotImplementedError\("lab \d: (.*)"\)', source)]


def autograder(project: Path, number: int, seed: int, archive: Path):
    """Turn `project`, a copy of the solved one, into Gradescope's grader of one lab, and zip it."""
    shutil.copytree(project / "labs" / "autograder", project, dirs_exist_ok=True)
    (project / "lab").write_text(f"{number} {seed}\n")
    shutil.make_archive(str(archive.with_suffix("")), "zip", project)
