"""How this torch was built, as far as tests must know."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch.distributed as dist  # which loads gloo

from tests import launches

LINE = b". Expected number of connected peers is: "
SWITCH = b"GLOO_LOG_LEVEL"


def gloo_talks() -> bool:
    """Tells whether gloo writes a line for each rank and group on stderr, and cannot be told not to.

    Debian's does, from 2025 on. It is a library of its own; that of torch's own builds is a part of torch, and silent.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgloo" in line}
    texts = [Path(path).read_bytes() for path in mapped if dist.is_gloo_available()]
    return any(LINE in text and SWITCH not in text for text in texts)


silent = pytest.mark.skipif(gloo_talks(), reason="the gloo of this torch writes to stderr, and has no switch for it")


@functools.cache
def lacks_libuv() -> bool:
    """Tells whether this torch was built without libuv. Its torchrun then starts nothing, whatever it is told."""
    return launches.lacks_libuv()


def without_gloo(text: str) -> str:
    """Returns a stream's text without those lines."""
    return "".join(line for line in text.splitlines(keepends=True) if LINE.decode() not in line)
