"""An error that a limit of the process caused names the limit."""

from __future__ import annotations

import errno
import os
import resource

from mlaunch.base import rlimits


def test_a_limit_that_was_met_is_named() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    rlimits.name_limit(error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"Too many open files: the limit is {soft} open files; raise it with ulimit -n" in str(error)
    named = str(error)
    rlimits.name_limit(error)  # on its way through another process
    assert str(error) == named


def test_other_errors_keep_their_words() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    rlimits.name_limit(error)
    assert str(error) == "[Errno 28] No space left on device"
