"""Starts ranks that stay."""

from __future__ import annotations

import dataclasses
import os
import time

from mlaunch.base.misuse import misuse
from mlaunch.caller import interrupts, nesting
from mlaunch.caller.launch.call import planned, server_for
from mlaunch.caller.launch.plan import Attempt, ThisMachine
from mlaunch.caller.launch.start import send_launch, with_pipes
from mlaunch.caller.options.launch_options import Options
from mlaunch.caller.output.live import StartingLine
from mlaunch.caller.output.output_plan import output_plan, place_of
from mlaunch.caller.output.relay import Relay
from mlaunch.caller.ranks.kept_handle import KeptHandle
from mlaunch.caller.ranks.session import RanksLaunch
from mlaunch.caller.ranks.stay_rules import StayRules
from mlaunch.caller.report.history import History
from mlaunch.caller.server.warm import warm_server
from mlaunch.core.grants import Grant
from mlaunch.protocol.calls import Call
from mlaunch.protocol.spec import Context

_INSTEAD = {
    "max_restarts": "it starts fresh ranks when they are lost; see restart=",
    "max_preemptions": "the next call starts fresh ranks",
    "keep": "see idle_timeout=",
    "inline": "its ranks are processes",
    "debug": "a decorated function does, for a call on ranks of its own",
    "ranks": "it makes them",
}


def open_session(options: Options, rules: StayRules, surroundings: Context | None = None) -> RanksLaunch:
    """Starts ranks with these options; does not wait for them. ``surroundings``: None for those of this moment."""
    _check(options)
    if options.engine is not None:
        session: RanksLaunch = options.engine.open_session(options, rules)
        return session
    with interrupts.deferred():
        history = History()
        environ = surroundings.environ if surroundings is not None else {**os.environ, **(options.env or {})}
        server = server_for(options, Call(int, (), {}), environ)
        owned = options.start_method != "forkserver"
        try:
            place = place_of(options)
            with StartingLine("Ranks", place) as line:
                machine = ThisMachine(server.ready(None, line.show), server.count_devices)
            spec = planned(Grant(options, environ), machine, "Ranks", Attempt(0, None))
            spec = dataclasses.replace(spec.called(name=f"Ranks ({spec.world_size})", deadline=None), stays=True)
            spec = dataclasses.replace(spec, context=surroundings or spec.context)
            history.ready = time.monotonic()
            plan = output_plan(options.replaced({"log_dir": None}), spec, place)
            spec = with_pipes(spec, plan)
            agent = send_launch(server, spec, None)
            handle = KeptHandle(spec, server, agent, Relay(plan, spec.local_world_size, 0), history)
        except BaseException:
            if owned:
                server.close()
            raise
        return RanksLaunch(handle, rules, own_server=owned)


def check_session(options: Options) -> None:
    """Raises what ``open_session`` would, of options with which no ranks can be started here; starts none.

    An engine checks its own, as it asks for machines.
    """
    _check(options)
    if options.engine is not None:
        return
    with interrupts.deferred():
        environ = {**os.environ, **(options.env or {})}
        server = warm_server.get(environ)  # whatever the start method, this machine has the same
        machine = ThisMachine(server.ready(None, lambda: None), server.count_devices)
        planned(Grant(options, environ), machine, "Ranks", Attempt(0, None))


def _check(options: Options) -> None:
    """Refuses what ranks that stay cannot do."""
    rank = nesting.rank_of_process() if options.join else ""
    if rank:
        raise misuse(
            RuntimeError(
                f"Ranks() is called in {rank}; to start ranks of its own there, give join=False. Otherwise make "
                f"them in the process that starts the others"
            )
        )
    wrong = [f"{name} ({instead})" for name, instead in _INSTEAD.items() if getattr(options, name)]
    wrong += [f"{one.options[0]} ({one.one_call})" for one in options.features if one.one_call]
    if wrong:
        raise misuse(ValueError(f"Ranks does not take {', '.join(wrong)}"))
    size = len(options.devices) if options.devices is not None else options.n_gpus
    if options.rank_start > 0 or (options.world_size is not None and options.world_size != (size or 1)):
        raise misuse(
            ValueError(
                f"world_size={options.world_size}, rank_start={options.rank_start}: ranks that stay are called by "
                f"one process, which starts them; allowed: world_size=None, rank_start=0. For several machines give "
                f"engine="
            )
        )
