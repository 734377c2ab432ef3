"""The layout's rules: what importing each module pulls in, and the size of things."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "mlaunch").rglob("*.py")
)
NEEDS_TORCH = {f"mlaunch.{name}" for name in ("comm", "exchange", "groups", "machines", "reduction")}
NEEDS_TORCH |= {f"mlaunch.rendezvous.{name}" for name in ("client", "hosted", "waiting")}
NEEDS_TORCH |= {f"mlaunch.runtime.{name}" for name in ("agent", "launching", "others")}


def pulled_in(module: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_each_module_alone(module: str) -> None:
    modules = pulled_in(module)
    assert ("torch" in modules) == (module in NEEDS_TORCH)
    if module.startswith(("mlaunch.runtime", "mlaunch.rendezvous")):
        assert "mlaunch.decorator" not in modules
    if module == "mlaunch":
        assert {name for name in modules if name.startswith("mlaunch")} == {"mlaunch", "mlaunch._version"}


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
