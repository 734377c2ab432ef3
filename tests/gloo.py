"""What the gloo of this torch does that tests of output must know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist  # which loads gloo

LINE = b". Expected number of connected peers is: "
SWITCH = b"GLOO_LOG_LEVEL"


def talks() -> bool:
    """Tells whether it writes a line for each rank and group on stderr, and cannot be told not to.

    Debian's does, from 2025 on. It is a library of its own; that of torch's own builds is a part of torch, and silent.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgloo" in line}
    texts = [Path(path).read_bytes() for path in mapped if dist.is_gloo_available()]
    return any(LINE in text and SWITCH not in text for text in texts)


silent = pytest.mark.skipif(talks(), reason="the gloo of this torch writes to stderr, and has no switch for it")
