"""Prepares a launch before the first call."""

from __future__ import annotations

import os

from mlaunch.caller.launch.call import planned
from mlaunch.caller.launch.plan import Attempt, ThisMachine
from mlaunch.caller.launch.start import with_pipes
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.output_plan import output_plan
from mlaunch.caller.server.fork_server import ForkServer
from mlaunch.caller.server.prepared_launch import preparation
from mlaunch.core.grants import Grant


def prepare(server: ForkServer, options: Options) -> None:
    """Waits for the server, and asks it for a launch with these options. Raises what their call would."""
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
