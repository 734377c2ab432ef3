"""The part of ``numa=`` on a machine of an engine, whose devices the caller does not know."""

from __future__ import annotations

from dataclasses import replace

from mlaunch.core.parts import MachinePart
from mlaunch.numa.caller import ROOT, devices_here
from mlaunch.numa.wire import NumaOrder


def part(section: NumaOrder) -> MachinePart:
    """Make a machine's part."""
    return MachinePart(replace(section, devices=devices_here(ROOT), allowed=(), root=ROOT))
