"""``mlaunch.warm_up``: start the fork server, and prepare the first launch, before they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlaunch.base.exceptions import misuse
from mlaunch.base.log import log
from mlaunch.caller.fork_server import ForkServer
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.warm_server import warm_server

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mlaunch.caller.options.option_types import AllOptions


def warm_up(*, preload: Sequence[str] | None = None, **options: Unpack[AllOptions]) -> None:
    """Start this process's fork server in the background and return at once.

    Without it, the first launch of a process waits while the fork server imports torch. Called as a script's first
    statement, before its own ``import torch``, the two imports run at the same time. A server that is already there
    is kept, unless it is to import something else.

    Args:
        preload: Modules that the fork server imports in addition to torch, so that ranks need not, in all later calls
            with the start method "forkserver" on this machine. For modules that each rank would import by itself:
            "lightning", or "torch._dynamo", which the first optimizer or DistributedDataParallel imports in a second or
            more. They must not touch a device or start threads, and ranks have them as they were then. None: as before.
        **options: Those of ``launcher``. With any, the first launch with these is prepared, too, as it is after a call:
            its ranks join and wait.

    Raises:
        TypeError, ValueError: An option is wrong. The call raises an error for devices that this machine lacks, and for
            a module that cannot be imported.
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
    """Prepare a launch, as soon as the server has imported torch."""
    try:
        _ask_for_launch(server, options)
    except Exception as error:  # the call itself will raise it
        log.debug("nothing was prepared: %s", error)


def _ask_for_launch(server: ForkServer, options: Options) -> None:
    """Wait for the server, and ask it for a launch with these options. Raise what their call would."""
    # What makes calls: this thread imports it, while the main thread continues.
    from mlaunch.caller.launch.call import planned
    from mlaunch.caller.launch.plan import Attempt, ThisMachine
    from mlaunch.caller.launch.start import with_pipes
    from mlaunch.caller.output.output_plan import output_plan
    from mlaunch.caller.warm_server import preparation
    from mlaunch.core.records import Grant

    environ = {**os.environ, **(options.env or {})}
    machine = ThisMachine(server.ready(), server.count_devices)
    spec = planned(Grant(options, environ), machine, "", Attempt(0, options.deadline))
    spec = with_pipes(spec, output_plan(options, spec))
    following = preparation.expect(server, spec)
    if following is not None:
        try:
            server.prepare(following, like=spec)
        finally:
            following.close()
