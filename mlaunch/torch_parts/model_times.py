"""The times that DistributedDataParallel measures in C++: how long its collectives and its computing have taken.

A reducer measures every Nth step, and a logger returns the latest. torch reads them for its own log, every hundredth
step. On a device they are measured by its events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_GROUP = 3  # the index of the process group among a reducer's arguments
_NEEDS = (
    ("Reducer", "_set_ddp_runtime_logging_sample_rate"), ("Reducer", "set_logger"),
    ("Logger", "_get_ddp_logging_data"), ("Logger", "set_runtime_stats_and_log"),
)  # fmt: skip

Noted = Callable[[Any, tuple[Any, ...]], object]  # called with the object whose method was called, and the arguments


def lacks() -> str:
    """Return what this torch lacks, and the consequence; "" if it lacks nothing."""
    from torch._C import _distributed_c10d as c10d

    gone = [f"{kind}.{name}" for kind, name in _NEEDS if not hasattr(getattr(c10d, kind, None), name)]
    return f"{', '.join(gone)}: slow= does not see what a rank waits for in DistributedDataParallel" if gone else ""


def places(made: Noted, given: Noted, step: Noted) -> list[tuple[Any, str, Noted]]:
    """Return the methods after which to call each: a reducer is made, gets its logger, or begins a step."""
    from torch._C import _distributed_c10d as c10d

    if lacks():
        return []
    return [(c10d.Reducer, "__init__", made), (c10d.Reducer, "set_logger", given),
            (c10d.Logger, "set_runtime_stats_and_log", step)]  # fmt: skip


def group_of(arguments: tuple[Any, ...]) -> Any:
    """Return the process group of a reducer that was made with these arguments."""
    return arguments[_GROUP]


def measure(reducer: Any, every: int) -> None:
    """Make a reducer measure every ``every``-th step, and the first ten."""
    reducer._set_ddp_runtime_logging_sample_rate(every)


def latest(logger: Any) -> tuple[int, float] | None:
    """Return the last measured step and the seconds that it waited for others' gradients; None if none was measured.

    The wait begins when the rank has computed its own gradients.
    """
    told = logger._get_ddp_logging_data().ints_map
    spent, hidden = told.get("backward_comm_time", 0), told.get("backward_compute_comm_overlap_time", 0)
    return (told.get("iteration", 0), (spent - hidden) / 1e9) if spent >= hidden > 0 else None


def buffers_sender() -> tuple[Any, str]:
    """Return the module and the name of the function by which a model sends its buffers."""
    import torch.distributed as dist

    return dist, "_broadcast_coalesced"
