"""Runs one part: ``python -m tests.gpu.one NAME``. What it prints is in the text; an exception is a failure."""

from __future__ import annotations

import sys

from tests.gpu import figures, hangs, memory, parts, surroundings

if __name__ == "__main__":
    {**parts.ALL, **memory.ALL, **hangs.ALL, **surroundings.ALL, "figures": figures.run}[sys.argv[1]]()
