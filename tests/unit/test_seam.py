"""Who looks inside mlaunch: outside this folder, ``tests/launches.py`` for all, and few others.

So modules can move without an edit of the tests that hold what users are promised.
"""

from __future__ import annotations

import re

from tests.conftest import ROOT

MOST = 16  # files; it only goes down
SLIPS = {"tests/slips.py", "tests/slip_list.py"}  # whose matter the package's lines are
PUBLIC = {"comm", "engines", "errors", "launch", "run", "pytest"}
MODULES = {path.stem for path in (ROOT / "mlaunch").iterdir() if not path.name.startswith("_")} - PUBLIC
# In code, in the text of a script, and in the name of what a test replaces.
LOOKS_INSIDE = re.compile(rf"\b(?:mlaunch\.(?:{'|'.join(MODULES)}|(?:engines|pytest)\.[a-z]+\w*\b(?<!rank_fixture)))\b")


REACHES_IN = re.compile(r"\.(?:_set|_calls)\b")  # of what users have: ranks, decorated functions


def files_with(pattern: re.Pattern[str]) -> list[str]:
    """The files outside this folder in which it occurs."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "unit"]
    return [str(path.relative_to(ROOT)) for path in paths if pattern.search(path.read_text(encoding="utf-8"))]


def test_few_files_look_inside() -> None:
    found = [file for file in files_with(LOOKS_INSIDE) if file not in SLIPS]
    assert "tests/launches.py" in found
    assert len(found) <= MOST, "\n".join(found)


def test_none_reaches_into_what_users_have() -> None:
    assert files_with(REACHES_IN) == ["tests/launches.py"]
