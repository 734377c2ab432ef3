"""The options of a launch: names, defaults, and the checks that need no machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from mlaunch.base import seeding

OUTPUTS = ("all", "rank0", "none", "raw")
START_METHODS = ("forkserver", "fork", "spawn")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class Options:
    """What ``launcher`` takes besides the function; see there."""

    n_gpus: int | None = None
    world_size: int | None = None
    rank_start: int = 0
    master_ip: str = "localhost"
    port: int = 0
    device_type: str = "auto"
    backend: str | None = None
    devices: Sequence[int] | None = None
    timeout: float | timedelta | None = 1800.0
    grace_period: float = 5.0
    deadline: float | None = None
    max_restarts: int = 0
    start_method: str = "forkserver"
    env: Mapping[str, str] | None = None
    seed: int | str | None = None
    join: bool = True
    join_timeout: float = 300.0
    heartbeat_timeout: float = 15.0
    token: str | None = field(default=None, repr=False)
    gather: str = "local"
    output: str = "all"
    log_dir: str | os.PathLike[str] | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError that names the option, the value and what is allowed."""
        _check_integer("n_gpus", self.n_gpus, 1)
        _check_integer("world_size", self.world_size, 1)
        _check_integer("rank_start", self.rank_start, 0, optional=False)
        _check_integer("port", self.port, 0, _HIGHEST_PORT, optional=False)
        _check_integer("max_restarts", self.max_restarts, 0, optional=False)
        _check_text("master_ip", self.master_ip)
        _check_text("device_type", self.device_type)
        if self.backend is not None:
            _check_text("backend", self.backend)
        if self.start_method not in START_METHODS:
            allowed = ", ".join(map(repr, START_METHODS))
            raise ValueError(f"start_method={self.start_method!r}: allowed: {allowed}")
        if not isinstance(self.join, bool):
            raise TypeError(f"join={self.join!r}: allowed: True, False")
        if self.token is not None and (not isinstance(self.token, str) or not self.token):
            raise TypeError("token: allowed: a string that is not empty (its value is not shown), or None")
        if self.gather not in {"local", "all"}:
            raise ValueError(f"gather={self.gather!r}: allowed: 'local', 'all'")
        if self.output not in OUTPUTS:
            raise ValueError(f"output={self.output!r}: allowed: {', '.join(map(repr, OUTPUTS))}")
        if self.log_dir is not None and (not isinstance(self.log_dir, str | os.PathLike) or self.output == "raw"):
            raise ValueError(
                f"log_dir={self.log_dir!r} with output={self.output!r}: allowed: a path, unless output='raw' leaves "
                f"their streams to the ranks"
            )
        if not isinstance(self.progress, bool):
            raise TypeError(f"progress={self.progress!r}: allowed: True, False")
        seeding.check(self.seed)
        self._check_seconds()
        self._check_devices()
        self._check_ranks()
        self._check_env()

    def _check_seconds(self) -> None:
        _check_number("grace_period", self.grace_period)
        if self.grace_period < 0:
            raise ValueError(f"grace_period={self.grace_period!r}: allowed: seconds, 0 or more")
        for name in ("join_timeout", "heartbeat_timeout"):
            _check_number(name, getattr(self, name))
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed: seconds, more than 0")
        for name, seconds in (("timeout", self.timeout_seconds), ("deadline", self.deadline)):
            if seconds is not None:
                _check_number(name, seconds)
            if seconds is not None and seconds <= 0:
                value = getattr(self, name)
                raise ValueError(f"{name}={value!r}: allowed: seconds, more than 0, or None for no limit")

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if isinstance(self.devices, str) or not isinstance(self.devices, Sequence):
            raise TypeError(f"devices={self.devices!r}: allowed: a list of device numbers")
        for device in self.devices:
            _check_integer("devices", device, 0, optional=False)
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices={list(self.devices)}: allowed: at least one device, each once")
        if self.n_gpus not in {None, len(self.devices)}:
            raise ValueError(
                f"n_gpus={self.n_gpus} with devices={list(self.devices)}: allowed: n_gpus={len(self.devices)}, "
                f"or only one of the two"
            )

    def _check_ranks(self) -> None:
        size = len(self.devices) if self.devices is not None else self.n_gpus
        if self.rank_start > 0 and self.port == 0:
            raise ValueError(
                f"rank_start={self.rank_start} with port=0: a machine that joins others must know the port on which "
                f"rank 0's machine listens; allowed: 1 to {_HIGHEST_PORT}"
            )
        if self.world_size is not None and self.rank_start + (size or 1) > self.world_size:
            raise ValueError(
                f"rank_start={self.rank_start} with n_gpus={size or 'unset'} and world_size={self.world_size}: "
                f"allowed: rank_start + n_gpus up to world_size"
            )

    def _check_env(self) -> None:
        for name, value in (self.env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env={{{name!r}: {value!r}}}: allowed: names and values that are strings")

    @property
    def timeout_seconds(self) -> float | None:
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout

    def replaced(self, changes: Mapping[str, Any]) -> Options:
        """A checked copy. TypeError for a name that is no option."""
        names = {field.name for field in fields(self)}
        for name in changes:
            if name not in names:
                raise TypeError(f"launcher has no option {name!r}; it has: {', '.join(sorted(names))}")
        return Options(**{**{name: getattr(self, name) for name in names}, **changes})


def _check_integer(name: str, value: object, lowest: int, highest: int | None = None, *, optional: bool = True) -> None:
    allowed = f"whole numbers from {lowest}" + (f" to {highest}" if highest is not None else "")
    allowed += ", or None" if optional else ""
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: allowed: {allowed}")
    if value < lowest or (highest is not None and value > highest):
        raise ValueError(f"{name}={value!r}: allowed: {allowed}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: allowed: a number of seconds")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: allowed: a finite number of seconds")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: allowed: a string")
    if not value:
        raise ValueError(f"{name}='': allowed: a name")
