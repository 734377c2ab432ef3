"""Start the fork server while pytest collects, with all imports that ranks of tests need."""

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
# For the configuration that each rank makes. These imports took more than half of a new rank's time.
_PYTESTS = tuple(f"_pytest.{name}" for name in default_plugins)
_SEEDED = "numpy.random"  # which is seeded before each test; numpy itself imports it late
_RECORDER = "coverage"  # ranks import it if this process has imported it


def prepare() -> None:
    """Set what the fork server imports. A running one stays as it is."""
    if not warm_server.started:
        numpy = (_SEEDED,) if importlib.util.find_spec("numpy") is not None else ()
        wanted = (*PRELOADED, *_PYTESTS, *numpy, *((_RECORDER,) if _RECORDER in sys.modules else ()))
        warm_server.preload = (*warm_server.preload, *(name for name in wanted if name not in warm_server.preload))


def start() -> None:
    """Start the fork server; do not wait for it."""
    prepare()
    warm_server.get(os.environ)
