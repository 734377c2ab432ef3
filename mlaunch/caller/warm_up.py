"""Starting the fork server, and the first launch, before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.base.log import log
from mlaunch.base.misuse import misuse
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.warm import warm_server

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlaunch.caller.options.option_types import AllOptions


def warm_up(*, preload: Sequence[str] | None = None, **options: Unpack[AllOptions]) -> None:
    """Starts this process's fork server in the background and returns at once.

    The first launch of a process otherwise waits while the fork server imports torch. Called as a script's first
    statement, before its own ``import torch``, the two imports run at the same time. A server that is already there
    is kept, unless it is to import something else.

    Args:
        preload: Modules that the fork server imports besides torch, so that ranks need not, in this call and all that
            follow with the start method "forkserver", on this machine. For what each rank would import anew:
            "torch._dynamo", which the first optimizer or DistributedDataParallel imports in a second or more,
            "lightning". They must not touch a device or start threads, and ranks have them as they were then. None: as
            before.
        **options: Those of ``launcher``. With any, the first launch with these is prepared too, as those after a call
            are: its ranks join and wait.

    Raises:
        TypeError, ValueError: An option is wrong. What this machine does not have is told by the call, and so is a
            module that cannot be imported.
    """
    try:
        modules = warm_server.preload if preload is None else _modules(preload)
        wanted = Options().replaced(options)
    except (TypeError, ValueError) as error:
        raise misuse(error) from None
    warm_server.preload = modules
    server = warm_server.get({**os.environ, **(wanted.env or {})})
    if options:
        threading.Thread(target=_prepare, args=(server, wanted), name="mlaunch-warm-up", daemon=True).start()


def _modules(preload: Sequence[str]) -> tuple[str, ...]:
    known = not isinstance(preload, str) and all(isinstance(name, str) and name for name in preload)
    if not known:
        raise TypeError(f"preload={preload!r}: allowed: a list of names of modules")
    return tuple(preload)


def _prepare(server: ForkServer, options: Options) -> None:
    """Prepares a launch, as soon as the server has imported torch."""
    try:
        from mlaunch.caller import ahead

        ahead.prepare(server, options)
    except Exception as error:  # the call itself will tell
        log.debug("nothing was prepared: %s", error)
