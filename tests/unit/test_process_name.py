"""What the kernel shows of a process's name, which it cuts."""

from __future__ import annotations

import pytest

from mlaunch import launcher
from mlaunch.base.own_process import name_process
from tests.contract.test_process_names import shown

pytest.importorskip("torch", reason="its ranks need torch")


@pytest.mark.parametrize(
    ("role", "short"),
    [
        ("rank 12", "mlaunch:rank 12"),
        ("rank 12345", "mlaunch: rank"),
        ("fork server", "mlaunch: fork"),
        ("unpronounceable", "mlaunch"),
    ],
)
def test_no_number_is_cut(role: str, short: str) -> None:
    """Half a rank's number would be another rank's."""

    def named() -> tuple[str, str]:
        name_process(role, "f()" * 10_000)
        return shown()

    ((line, name),) = launcher(named, 1)()
    assert name == short
    assert line.startswith(f"mlaunch: {role} of f()f()")
