"""Starting the fork server while pytest still collects, with all that ranks of tests import: they have it then."""

from __future__ import annotations

import importlib.util
import os
import sys

from _pytest.config import default_plugins

from mlaunch.caller.server.warm import warm_server

PRELOADED = (
    "pytest",
    "mlaunch.pytest.rank.run_test",
    "mlaunch.pytest.caller.rank_fixtures",  # modules of tests import it
    "mlaunch.comm.rank.exchange",
    "mlaunch.comm.rank.local_group",
)
# Each rank makes a configuration of pytest's; the imports for that took more than half of a new rank's time.
_PYTESTS = tuple(f"_pytest.{name}" for name in default_plugins)  # which each rank's configuration has
_SEEDED = "numpy.random"  # before each test, where it is installed; numpy itself imports it late
_RECORDER = "coverage"  # ranks import it if this process has


def prepare() -> None:
    """Says what the fork server is to import; one that is there already stays as it is."""
    if not warm_server.started:
        numpy = (_SEEDED,) if importlib.util.find_spec("numpy") is not None else ()
        wanted = (*PRELOADED, *_PYTESTS, *numpy, *((_RECORDER,) if _RECORDER in sys.modules else ()))
        warm_server.preload = (*warm_server.preload, *(name for name in wanted if name not in warm_server.preload))


def start() -> None:
    """Starts the fork server; does not wait for it."""
    prepare()
    warm_server.get(os.environ)
