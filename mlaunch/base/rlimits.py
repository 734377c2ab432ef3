"""The limits of a process that a launch may hit, named in the errors that they cause."""

from __future__ import annotations

import contextlib
import errno
import resource

_LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "ulimit -n", "open files"),
    errno.EFBIG: (resource.RLIMIT_FSIZE, "ulimit -f", "bytes in a file, memory files among them"),
}


def is_limit(error: BaseException) -> bool:
    """True if a limit of this process has caused the error."""
    return isinstance(error, OSError) and error.errno in _LIMITS


def name_limit(error: BaseException) -> None:
    """Add the limit to the error's message, if one has caused it."""
    if not isinstance(error, OSError) or error.errno not in _LIMITS or "ulimit" in str(error):
        return
    limit, command, what = _LIMITS[error.errno]
    soft, hard = resource.getrlimit(limit)
    most = "" if hard in {soft, resource.RLIM_INFINITY} else f", up to {hard}"
    error.strerror = f"{error.strerror}: the limit is {soft} {what}; raise it with {command}{most}"
    error.args = (error.errno, error.strerror)  # from which it is unpickled


def files_of_agent(ranks: int) -> int:
    """Return how many descriptors the agent of so many ranks of this machine needs, more than any other process.

    Measured by launches under falling limits, with torch 2.13: 2 ranks fail at 32, 4 at 44, 8 at 80.
    """
    return max(22 + 6 * ranks, 15 + 9 * ranks)


def too_few_files(ranks: int) -> str:
    """Return a message if this process's limit is too low for so many ranks; "" if it may be enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_of_agent(ranks)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return ""
    most = "" if hard == resource.RLIM_INFINITY else f", up to {hard}"
    if most and needed > hard:
        most = f", beyond its hard limit of {hard}, which root can raise"
    return f"{ranks} ranks need about {needed} open files, and this process may have {soft}: raise ulimit -n{most}"


def allow_files() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
