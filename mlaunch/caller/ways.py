"""The places where a call can run: on ranks of its own, on ranks that stay, on machines of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlaunch.caller import interrupts
from mlaunch.caller.options.launch_options import Options

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended


def make_call(options: Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ended:
    """Runs the function where the options say; returns how the call ended."""
    # What makes calls is imported by the first one, so that importing the decorator stays cheap. Before Python 3.12 a
    # KeyboardInterrupt while a dataclass is made is raised as a RuntimeError, so the import is not interrupted.
    with interrupts.deferred():
        if options.engine is not None and options.keep is None:
            call: Callable[..., Ended] = options.engine.call
        elif options.ranks is not None or options.keep is not None:
            from mlaunch.caller.ranks.keep import call_on_kept as call
        else:
            from mlaunch.caller.launch.call import call_on_ranks as call
    return call(options, function, args, kwargs)
