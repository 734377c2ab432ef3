"""What is too dear for each commit: ``python -m tests.nightly``, once a night and before a release.

It runs the tests with the mark ``nightly``: the whole of the matrices of which each commit runs cells chosen pairwise,
real engines beyond a call, a failure, an interrupt and a death on each, and dear tests of what cheaper ones show in
part. It takes some 25 minutes on two cores. Arguments are pytest's.
"""

from __future__ import annotations

import sys

import pytest

ARGUMENTS = ("--nightly", "-m", "nightly", "-n", "2", "--dist", "loadfile", "--cost")

if __name__ == "__main__":
    sys.exit(pytest.main([*ARGUMENTS, *sys.argv[1:]]))
