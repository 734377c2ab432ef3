"""What to do about errors that newcomers meet in their function: by what torch says."""

from __future__ import annotations

from mlaunch.base.errors import RankFailure

_HINTS = {
    "trying to initialize the default process group twice": "ranks are in a process group before the function begins: "
    "leave init_process_group out of it; a backend or timeout of your own is an option of launcher",
    "BdbQuit": "a debugger found nothing to read, since ranks have no terminal: call the function itself, as "
    "f.__wrapped__(...), or connect to one rank (the cookbook's page on debugging)",
}


def hints_of(failure: RankFailure) -> list[str]:
    """Says what to do about the failure, a line each; nothing if nothing is known."""
    return [hint for words, hint in _HINTS.items() if words in failure.what]
