"""The options for type checkers: keywords, each with its type, none required.

A type checker only reads types that are written out, so they are repeated here; ``tests/unit/test_options.py`` compares
them with ``Options``. The seven that may be given by position are parameters of ``launcher.__new__``, and keywords only
of ``options``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from mlaunch.caller.options.option_values import PlacesRanks, TakesCalls


class KeywordOptions(TypedDict, total=False):
    """The options that are given by name only."""

    devices: Sequence[int] | None
    lease: bool | str
    concurrent: int | None
    numa: str | None
    numa_memory: str | None
    oversubscribe: bool
    timeout: float | timedelta | None
    grace_period: float
    deadline: float | None
    stop_on: str | None
    stop_grace: float
    stall: float | str | None
    slow: float | str | None
    debug: bool | str
    inline: bool
    max_restarts: int
    max_preemptions: int
    start_method: str
    env: Mapping[str, str] | None
    seed: int | str | None
    join: bool
    join_timeout: float
    heartbeat_timeout: float
    token: str | None
    results: str
    output: str
    log_dir: str | os.PathLike[str] | None
    events: str | os.PathLike[str] | Callable[[dict[str, Any]], object] | None
    profile: str | os.PathLike[str] | None
    profile_steps: Sequence[int]
    profile_ranks: Sequence[int] | None
    keep: float | None
    ranks: TakesCalls | None
    engine: PlacesRanks | None
    machines: int | None
    progress: bool


class AllOptions(KeywordOptions, total=False):
    """All options."""

    n_gpus: int | None
    world_size: int | None
    rank_start: int
    master_ip: str
    port: int
    device_type: str
    backend: str | None
