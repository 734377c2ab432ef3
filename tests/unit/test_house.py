"""The layout's rules: what importing each module pulls in, and the size of things."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "mlaunch").rglob("*.py")
)
NEEDS_TORCH = {f"mlaunch.{name}" for name in ("comm", "exchange", "groups", "machines", "reduction")}
NEEDS_TORCH |= {f"mlaunch.rendezvous.{name}" for name in ("client", "hosted", "waiting")}
NEEDS_TORCH |= {f"mlaunch.runtime.{name}" for name in ("agent", "launching", "others")}


SURVEY = """
import json, os, sys
found = {}
for name in sys.argv[1:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        before = set(sys.modules)
        try:
            __import__(name)
            told = sorted(set(sys.modules) - before)
        except ModuleNotFoundError as error:
            told = error.name.partition(".")[0]
        with open(writer, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found[name] = json.load(pipe)
    os.wait()
print(json.dumps(found))
"""


def survey(beginning: str, modules: Iterable[str]) -> dict[str, Any]:
    """What importing each module, and no other, pulls in; or the package that it lacks."""
    command = [sys.executable, "-c", beginning + SURVEY, *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_who_needs_torch() -> None:
    found = survey("import sys; sys.modules['torch'] = None", MODULES)
    assert {module for module in MODULES if found[module] == "torch"} == NEEDS_TORCH
    assert [name for name in found["mlaunch"] if name.startswith("mlaunch")] == ["mlaunch", "mlaunch._version"]


def test_the_runtime_knows_nothing_of_the_decorator() -> None:
    below = [module for module in MODULES if module.startswith(("mlaunch.runtime", "mlaunch.rendezvous"))]
    found = survey("import torch, torch.distributed", below)
    assert not [module for module in below if "mlaunch.caller.launcher" in found[module]]


def functions_of(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            found.append((f"{path.name}:{node.name}", size))
    return found


def test_functions_fit_on_a_screen() -> None:
    sizes = [item for path in (ROOT / "mlaunch").rglob("*.py") for item in functions_of(path)]
    assert not [item for item in sizes if item[1] > 50]
    assert len([item for item in sizes if item[1] < 28]) >= 0.9 * len(sizes)


def test_no_assertion_guards_a_user() -> None:
    for path in (ROOT / "mlaunch").rglob("*.py"):
        assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)], path
