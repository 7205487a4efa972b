"""What several labs' tests compare with."""
import os
import re
from pathlib import Path

import pytest

SEED = int(os.environ.get("LAB_SEED", "0"))     # of the random loads

LABS = Path(__file__).resolve().parents[1]


def block_of_the_handout(name: str, label: str) -> list[str]:
    """The lines of the code block that begins with ```label in a handout: predictions are checked, too."""
    found = re.search(rf"^```{label}\n(.*?)^```", (LABS / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip() for line in found[1].splitlines()]


def same_lines(expected: list[str], lines, progress=lambda text: None):
    """Fail at the first line that differs. lines: an iterable, which may fail. progress: is told how many
    lines match."""
    count, found = 0, "nothing more"
    try:
        for line in lines:
            if count == len(expected) or line != expected[count]:
                found = line
                break
            count += 1
    finally:
        progress(f"{count} of {len(expected)} lines match")
    wanted = expected[count] if count < len(expected) else "nothing more"
    if found != wanted:
        pytest.fail(f"line {count + 1} is the first that differs\n  expected  {wanted}\n  yours     {found}")
