"""What the options ``output``, ``log_dir`` and ``progress`` make of the output of a decorated function's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mlaunch.base.text import ranges
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output import files, rich
from mlaunch.caller.output.display import Area, area
from mlaunch.caller.output.output_plan import STREAMS, OutputPlan, Policy
from mlaunch.protocol import rich_output
from mlaunch.protocol.spec import LaunchSpec


def with_directory(options: Options, name: str) -> Options:
    """Returns the options with a directory of this call's own in ``log_dir``. OSError where there can be none."""
    if options.log_dir is None:
        return options
    try:
        return options.replaced({"log_dir": files.new_directory(options.log_dir, name)})
    except OSError as error:
        raise OSError(error.errno, f"log_dir={options.log_dir!r}: {error.strerror}") from None


def place_of(options: Options, *, blocks: bool = True) -> Area | None:
    """Returns where lines change, if the options want any that do; none below a debugger's prompt.

    ``blocks``: as of ``area``.
    """
    return area(blocks=blocks) if options.progress and not options.debug else None


def output_plan(options: Options, spec: LaunchSpec, place: Area | None = None, trial: str = "") -> OutputPlan:
    """Makes the plan; ``log_dir`` of the options is this call's own directory.

    ``place``: for lines that change, if there is one already. ``trial``: which one of a sweep it is.
    """
    output, policies = options.output, {}
    directory = None if options.log_dir is None else os.fspath(options.log_dir)
    for local_rank in range(spec.local_world_size if output != "raw" else 0):
        shown = output == "all" or (output == "rank0" and spec.rank(local_rank) == 0)
        for stream in STREAMS:
            policies[local_rank, stream] = Policy(shown=shown, kept=directory is not None)
    if policies and spec.rank_start == 0 and options.engine is None and rich.is_shown_here():
        policies[0, rich_output.STREAM] = Policy(shown=policies[0, 1].shown)
    name = spec.name.rpartition(".")[2].removesuffix("()")
    bars = place or place_of(options)
    prefix, remember = _prefix(spec, trial), output != "raw"
    return OutputPlan(policies, prefix, directory, area=bars, name=name, trial=trial, remember=remember)


def _prefix(spec: LaunchSpec, trial: str) -> Callable[[Sequence[int]], str]:
    host = f"{os.uname().nodename}:" if spec.world_size > spec.local_world_size else ""
    before = f"{trial} " if trial else host
    return lambda ranks: f"[{before}{ranges(ranks, ',')}] "
