"""Runs one part: ``python -m tests.gpu.one NAME``. What it prints is in the text; an exception is a failure."""

from __future__ import annotations

import sys

from tests.gpu import figures, parts

if __name__ == "__main__":
    {**parts.ALL, "figures": figures.run}[sys.argv[1]]()
