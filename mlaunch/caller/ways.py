"""Where a call's options have it run: on ranks of its own, on ranks that stay, on machines of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlaunch.caller.options.launch_options import Options

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended


def way_of(options: Options) -> Callable[..., Ended]:
    """Returns what takes options, function, arguments and keywords, and says how the call ended. It imports much."""
    if options.engine is not None and options.keep is None:
        call: Callable[..., Ended] = options.engine.call
    elif options.ranks is not None or options.keep is not None:
        from mlaunch.caller.ranks.keep import call_on_kept as call
    else:
        from mlaunch.caller.launch.call import call_on_ranks as call
    return call
