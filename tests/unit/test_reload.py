"""Which modules count as the user's when ranks look for edits."""

from __future__ import annotations

import importlib
import os

from mlaunch.rank import rank_imports
from tests.contract.test_stale import Write, name, write

__all__ = ["name", "write"]  # fixtures


def test_a_module_that_the_fork_server_has_imported_for_the_user(name: str, write: Write) -> None:
    """Its own and torch's are libraries."""
    write("def answer(): return 1\n")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rank_imports.watch_files()
            importlib.import_module(name)
            write("def answer(): return 2\n")
            rank_imports.begin_watch()
            code = int(rank_imports.changed_modules() != [name])
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
