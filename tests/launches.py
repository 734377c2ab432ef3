"""What tests must see of launches, and users cannot: phases, fork servers, sockets, ranks that stay, patience.

Outside ``tests/unit`` this is the one place that knows where mlaunch has them. So whoever moves a module changes this
file and the unit tests, and no other; ``tests/unit/test_seam.py`` counts who still looks for himself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlaunch.base import linux
from mlaunch.base.frames import STACK_SIGNAL
from mlaunch.caller import running_launches
from mlaunch.caller.warm_server import preparation, warm_server
from mlaunch.protocol import registry
from mlaunch.protocol.board import REPORTS_KEPT
from mlaunch.protocol.messages import Phase
from mlaunch.rank import for_users

if TYPE_CHECKING:
    import pytest

    from mlaunch import Held, Ranks, Sweep
    from mlaunch.caller.fork_server import ForkServer
    from mlaunch.engines.wire.frame_stream import FrameStream
    from mlaunch.protocol.board import Board
    from mlaunch.protocol.settings import Settings
    from mlaunch.warm.wire.zygote_messages import ZygoteState

__all__ = ["REPORTS_KEPT", "STACK_SIGNAL", "FrameStream", "Phase"]

THREAD_OF_RUNS = "mlaunch-runs"  # drives what was submitted

# How long mlaunch waits for others, by the word that tests have for it.
_PATIENCE = {
    "reaction": "caller.launch.watchdog.times.reaction",  # of an agent, beyond what it may take
    "step": "caller.launch.watchdog.times.step",  # between the agent's killing and the fork server's
    "import": "caller.fork_server._IMPORT_TIMEOUT",
    "count of devices": "caller.fork_server.COUNT_TIMEOUT",
    "queue": "caller.running_launches._QUEUE_TIMEOUT",  # for a launch to take a visitor
    "answer": "caller.running_launches._ANSWER_TIMEOUT",  # and to answer it
    "places": "insight.agent._PLACES_TIMEOUT",  # for ranks to say where they are
    "stacks": "agent.stopping.STACKS_TIMEOUT",  # for ranks that are stopped to say where they were
    "leaving": "agent.stopping._LEAVING_TIMEOUT",  # for released ranks to end
    "first look": "display.caller.areas._FIRST_DRAWN",  # before a line of progress
    "word of a wait": "caller.output.console.SILENCE",
    "merging": "caller.output.lines.WINDOW",  # for other ranks to say the same
    "end of an allocation": "engines.caller.slurm._END_TIMEOUT",
    "machines' answers": "engines.caller.machines_requests._PATIENCE",
    "slow import": "caller.launch.call._TOLD_AT",  # after which users hear of it
}


def be_patient(patch: pytest.MonkeyPatch, what: str, seconds: float) -> None:
    """Replace the seconds that mlaunch gives to something (see ``_PATIENCE``)."""
    path, _, name = f"mlaunch.{_PATIENCE[what]}".rpartition(".")
    try:
        owner = import_module(path)
    except ModuleNotFoundError:  # settings that a module has in an object
        module, _, attribute = path.rpartition(".")
        owner = getattr(import_module(module), attribute)
    patch.setattr(owner, name, seconds)


def become_impatient(patch: pytest.MonkeyPatch) -> None:
    """Agents and fork servers that a test stops need not be waited for as long as a busy machine may take."""
    be_patient(patch, "reaction", 0.5)
    be_patient(patch, "step", 0.3)


# The warm fork server of this process


def fork_server() -> ForkServer:
    """Return the server for calls with today's environment, which is started if there is none."""
    return warm_server.get(os.environ)


def server_pid() -> int:
    return fork_server().pid


def start_server() -> ForkServer:
    """Start one that is nobody's."""
    return import_module("mlaunch.caller.fork_server").start_interpreter(os.environ)


def lock_of_the_server() -> threading.Lock:
    """What a thread holds that asks for the server."""
    return warm_server._lock


def preloaded() -> tuple[str, ...]:
    """What the next server imports besides torch."""
    return warm_server.preload


def end_server() -> None:
    """End it with whatever runs there; the next call starts another."""
    warm_server.close()


def wait_for_replaced_servers() -> None:
    """Have those ended that today's server has replaced."""
    for replaced in warm_server._retired:
        replaced._wait(30)
    fork_server()  # forgets them


def prepare_servers(preload: Sequence[str], note: Callable[[], object]) -> None:
    """Have warm fork servers import these modules besides; ``note`` is called as one is started."""
    warm = import_module("mlaunch.caller.warm_server")
    start = warm.start_interpreter

    def start_prepared(environ: Mapping[str, str], like: Any) -> ForkServer:
        note()
        return start(environ, dataclasses.replace(like, preload=(*preload, *like.preload)))

    warm.start_interpreter = start_prepared


def prepared_launch() -> Any:
    """The launch that waits for its call, as its caller has it."""
    return preparation._next


def prepares_before_it_ends(server: ForkServer) -> bool:
    """Wait until the fork server has prepared a launch, or has ended; True for the first."""
    if preparation._next is None:
        return False
    channel = preparation._next.channel
    ended = os.pidfd_open(server.pid)
    try:
        assert linux.wait_readable([ended, channel.fileno()], 60.0)
        channel.peek()
    except EOFError:
        return False
    finally:
        os.close(ended)
    return True


def drop_prepared() -> None:
    """Give up the launch that waits for its call, if there is one."""
    preparation.drop()


# Sockets of running launches, and what who comes there hears


def runtime_directory() -> Path:
    """Where launches of this user listen, and what else they share lies."""
    return registry.home(os.environ)


def sockets() -> list[Path]:
    """The sockets of launches, also of those that were killed."""
    return [*runtime_directory().glob("*.sock")]


def look_for_launches() -> None:
    """Connect to all that run. The sockets of those that were killed go."""
    for _, connection in registry.connections(os.environ):
        connection.close()


@contextlib.contextmanager
def listening_as(launch: str) -> Iterator[socket.socket]:
    """Have a launch of this name that listens, and does nothing else."""
    with registry.listen(os.environ, launch) as listener:
        yield listener
    registry.remove(os.environ, launch)


def hide_other_launches(patch: pytest.MonkeyPatch, *directories: Path) -> None:
    """Have launches looked for in these directories alone; without any, only where this process has its own."""
    usual = registry.candidates
    patch.setattr(registry, "candidates", lambda environ: [*directories] or usual(environ)[:1])


def ask(word: str, launch: str = "", *, patient: bool = False) -> list[dict[str, Any]]:
    """Return what running launches answer whose ID has this start.

    ``word``: "status", "stacks", "why", "watch"; "stop" and "end" end them. ``patient``: wait as long as it takes.
    """
    said = import_module("mlaunch.agreed_stop.wire").STOP if word == "stop" else word.encode()
    return running_launches.ask(said, launch, patient=patient)


def ids_of(function: str) -> list[str]:
    """The IDs of launches of this process, or sets of ranks, that run calls of the function of this name."""
    return running_launches.launches_of(function)


def why(launch: str) -> str:
    """Return whom the ranks of a launch wait for, in words."""
    return str(import_module("mlaunch.insight.caller").why_launch(launch))


def watched_rows() -> list[str]:
    """The lines of ``mlaunch ps --watch``, where the devices' use is unknown."""
    rows = import_module("mlaunch.insight.caller.watching")
    return list(rows.RankTable(lambda _device: None, "here").lines(ask("watch")))


def title_of(status: dict[str, Any]) -> str:
    """The first line of a launch in ``mlaunch ps``."""
    return running_launches.title_of(status)


def signs_of_stalls() -> ModuleType:
    """What judges by two looks whether ranks work."""
    return import_module("mlaunch.insight.caller.answers")


def own_statuses() -> list[dict[str, Any]]:
    """The statuses of launches of this process."""
    return [launch for launch in ask("status") if launch["caller"] == os.getpid()]


# Ranks


def phase_of(rank: int) -> Phase | None:
    """In a rank: how far a rank of its launch is. None: this process is no rank."""
    board = board_here()
    return None if board is None else board[rank]


def board_here() -> Board | None:
    """In a rank: the memory in which the ranks of its launch say how far they are."""
    return None if for_users.slot is None else for_users.slot.board


def loop_here() -> Any:
    """In a rank: how far its outermost loop over ``mlaunch.progress`` is."""
    assert for_users.slot is not None
    return for_users.slot.board.loop(for_users.slot.local_rank)


def be_no_rank() -> None:
    """In a rank: forget that it is one of mlaunch's, as in a process that another launcher has started."""
    import_module("mlaunch.protocol.this_rank").this_rank = None


def recognised() -> Any:
    """In a process that some launcher has started: what its environment says of it."""
    return import_module("mlaunch.rank.launcher_variables").recognise(os.environ)


def once_it_joins(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do this in place of the first step of ``mlaunch.join``."""
    patch.setattr("mlaunch.rank.become_rank._complete_environment", lambda _: act())


def secret_here() -> str:
    """In a rank: what it signs with."""
    here = import_module("mlaunch.protocol.this_rank").this_rank
    assert here is not None
    return here.secret


def settings_here() -> Settings:
    """What a rank would take over of this process."""
    return import_module("mlaunch.protocol.settings").of_this_process()


def apply_settings(settings: Settings) -> None:
    import_module("mlaunch.protocol.settings").apply(settings)


def set_timer_slack(nanoseconds: int) -> None:
    import_module("mlaunch.protocol.settings")._set_timer_slack(nanoseconds)


def is_ready_for_cells() -> bool:
    """In a rank: whether it has imported what runs cells."""
    return "mlaunch.cells.rank.shell" in sys.modules


def make_groups_by(make: Callable[..., Any]) -> None:
    """In a rank that stays: how it makes the default group anew from now on."""
    import_module("mlaunch.rank.group").join_world = make


def interrupt_again_after(seconds: float) -> None:
    """In a rank that stays: when it raises an interrupt again that Python has dropped."""
    import_module("mlaunch.ranks.rank.kept")._AGAIN = seconds


def held_numbers() -> list[int]:
    """In a rank that stays: the numbers of the objects that it holds for its caller."""
    return sorted(import_module("mlaunch.ranks.rank.held_objects").table.objects)


# Ranks that stay, as their caller has them


def descriptors_of(ranks: Ranks) -> dict[str, int]:
    """The descriptors by which the caller of these ranks speaks to them."""
    session = ranks._set.launch
    handle, driver = session.handle, session._driver
    agent = handle._limits.agent
    assert agent is not None
    return {
        "wakes": driver._wake.fd,
        "ends": driver._end.fd,
        "thread": driver._kept.fd,
        "relay": handle.relay.fileno(),
        "channel": handle.agent.fileno(),
        "agent": agent.fd,
        "way": handle._direct.ranks[0].fileno(),
        "answers": handle._direct._kept[0].fd,
        "all there": handle._direct.fd,
        "output": next(iter(handle.relay._pipes)),
    }


def session_of(ranks: Ranks) -> Any:
    """What drives them."""
    return ranks._set.launch


@contextlib.contextmanager
def locks_of(ranks: Ranks) -> Iterator[None]:
    """All that its threads hold at moments."""
    session = session_of(ranks)
    with session.lock, session._driver._closing, ranks._set._opening:
        yield


def is_closing(ranks: Ranks) -> bool:
    return ranks._set.closed


def abandon(ranks: Ranks) -> None:
    """Leave them as the garbage collector does."""
    ranks._set.abandon()


def idle_since(ranks: Ranks) -> float:
    """Since when, by the monotonic clock, no call runs there."""
    return ranks._set.launch._idle_since


def number_of(held: Held) -> int:
    """The number under which the ranks have the object."""
    return held._number


def feature_names() -> set[str]:
    """The features that the package has."""
    return {one.name for one in import_module("mlaunch.features").FEATURES}


def reports_of(calls: Any) -> Any:
    """The reports that ranks that stay, or a decorated function, keep for their ``history``."""
    return calls._set.reports if hasattr(calls, "_set") else calls._calls.reports


def board_of(ranks: Ranks) -> Board | None:
    return ranks._set.launch.handle.history.board


def status_lines(ranks: Ranks) -> list[str]:
    """The lines that show how far their present call is."""
    handle = ranks._set.launch.handle
    return import_module("mlaunch.display.caller").status_lines(handle.outcome, handle.history, "")


def driving_thread(ranks: Ranks) -> int | None:
    """The thread that waits for a call, and drives the ranks meanwhile."""
    return ranks._set.launch._driver._leader


def idle_timeout(ranks: Ranks) -> float | None:
    return ranks._set.launch.rules.idle_timeout


def evict(ranks: Ranks) -> None:
    """End them as idle ones end."""
    ranks._set.launch.close(wait=True, evicted=True)


def once_calls_are_queued(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something as each call on ranks that stay is in their queue."""
    session = import_module("mlaunch.ranks.caller.ranks_launch").RanksLaunch
    queue = session.submit

    def submit(launch: Any, call: Any) -> None:
        queue(launch, call)
        act()

    patch.setattr(session, "submit", submit)


# Ranks that stay for decorated functions (``keep=``)


def sets_that_stay() -> dict[str, Ranks]:
    """Those of this process, by a key of the options that they are for."""
    return {key: found.ranks for key, found in import_module("mlaunch.ranks.caller.keep")._sets.items()}


def sets_that_leave() -> list[Any]:
    """Those that somebody ends."""
    return import_module("mlaunch.ranks.caller.keep")._leaving


def sets_being_made() -> list[str]:
    return [*import_module("mlaunch.ranks.caller.keep")._locks.of_making]


def lock_of_sets() -> threading.Lock:
    """What a thread holds that looks for a set."""
    return import_module("mlaunch.ranks.caller.keep")._locks.of_sets


def end_sets_that_stay(*, at_once: bool = False) -> None:
    """``at_once``: also with a call that runs there."""
    for ranks in sets_that_stay().values():
        ranks.terminate() if at_once else ranks.close()
    import_module("mlaunch.ranks.caller.keep")._sets.clear()


# Ranks that stay for tests with the mark ``ranks``


def plugin() -> ModuleType:
    """mlaunch's plugin of pytest."""
    return import_module("mlaunch.pytest.plugin")


def start_ranks_of_test(item: pytest.Item) -> None:
    """If the test has the mark, start its ranks, which stay."""
    mark = import_module("mlaunch.pytest.caller.mark")
    if (wanted := item.stash.get(mark.WANTED, None)) is not None:
        item.config.stash[mark.POOL].of(wanted.shape)


def ranks_of_tests(config: pytest.Config) -> list[Ranks]:
    pool = config.stash.get(import_module("mlaunch.pytest.caller.mark").POOL, None)
    return [shared.ranks for shared in (pool.sets.values() if pool else ()) if not shared.gone]


def end_ranks_of_tests(config: pytest.Config) -> None:
    if (runner := config.pluginmanager.get_plugin(plugin().RUNNER)) is not None:
        runner.pool.close()


# Leases


def lease_directory() -> Path:
    return Path(import_module("mlaunch.leases.caller.lease_directory").place(os.environ))


def leases() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what is held of this user's devices, and who waits."""
    standing = import_module("mlaunch.leases.caller.acquisition").standing
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = standing(lease_directory())
    return found


@contextlib.contextmanager
def lease_site(directory: Path) -> Iterator[Any]:
    """A directory of leases, as those who take some have it open."""
    opened = import_module("mlaunch.leases.caller.lease_directory").opened
    with opened(directory) as there, there:
        yield there


def once_devices_are_chosen(patch: pytest.MonkeyPatch, act: Callable[[ForkServer], object]) -> None:
    """Do something between the command's choice of devices and its launch."""
    run = import_module("mlaunch.run.command.run_job")
    choose = run._on_devices

    def choose_and_act(job: Any, server: ForkServer, environ: Any) -> Any:
        found = choose(job, server, environ)
        act(server)
        return found

    patch.setattr(run, "_on_devices", choose_and_act)


# Servers that ``mlaunch warm`` keeps


def kept_servers() -> list[ZygoteState]:
    return import_module("mlaunch.warm.caller.zygotes").states(os.environ)


def keep_a_server(seconds: float, preload: Sequence[str] = ()) -> None:
    import_module("mlaunch.warm.caller.zygotes").begin(os.environ, seconds, tuple(preload))


def end_kept_servers() -> None:
    import_module("mlaunch.warm.caller.zygotes").end_all(os.environ)


# What users see


def show_progress_at(patch: pytest.MonkeyPatch, place: type) -> None:
    """Have calls show how far they are here, at once. ``place``: a class with ``show``, ``hide`` and ``close``."""
    area = import_module("mlaunch.display.caller.areas").Area
    patch.setattr("mlaunch.caller.output.output_plan.live_place", type("Shown", (place, area), {}))
    be_patient(patch, "first look", 0.0)


def show_sweeps_at(patch: pytest.MonkeyPatch, place: Callable[..., Any]) -> None:
    """The same, for sweeps."""
    patch.setattr("mlaunch.sweeps.caller.sweep.live_place", place)


def display_area(*, blocks: bool = True) -> Any:
    """The place of lines that change, where this process has one. ``blocks``: of a call that is waited for."""
    return import_module("mlaunch.caller.output.console").live_place(blocks=blocks)


def source_of_calls() -> str:
    """The script, or notebook, of this process as ``mlaunch ps`` names it."""
    return import_module("mlaunch.caller.report.notebook").source()


def deferred_interrupts() -> list[Any]:
    """What of this process keeps Ctrl-C for later."""
    return import_module("mlaunch.caller.interrupts")._deferrals


def report_of(error: BaseException) -> Any:
    """The report of the launch that raised it."""
    return import_module("mlaunch.base.exceptions").report_of(error)


def content_of(error: BaseException) -> dict[str, Any]:
    """The attributes with which an exception travels."""
    return import_module("mlaunch.protocol.explain")._content(error)[1]


def read_trials(path: Path) -> None:
    """Read the file of ``resume=``."""
    import_module("mlaunch.sweeps.caller.trial_file").TrialFile(path, "train()", len).look_up([])


def table_text(sweep: Sweep[Any], most: int) -> str:
    """A sweep's table of at most so many rows."""
    return import_module("mlaunch.sweeps.caller.sweep")._text([*sweep], most)


def ask_anywhere(patch: pytest.MonkeyPatch) -> None:
    """Have the debugger ask for lines where no terminal is."""
    patch.setattr("mlaunch.debug.caller.asking.check_place", bool)


def read_cells_by(patch: pytest.MonkeyPatch, read: Callable[..., Any]) -> None:
    patch.setattr("mlaunch.cells.kernel.cell_source", read)


def forget_warnings() -> None:
    """Have said again what is said once."""
    import_module("mlaunch.leases.caller")._warn_of_cpus.cache_clear()
    import_module("mlaunch.caller.fork_server")._warn_of_threads.cache_clear()


# This machine as mlaunch finds it


def have_cpus(patch: pytest.MonkeyPatch, count: int) -> None:
    patch.setattr("mlaunch.rank.device.usable_cpus", lambda: count)


def check_share(ranks: int, cpus: int) -> None:
    """ValueError if these are more ranks than anybody means on so many CPUs."""
    import_module("mlaunch.caller.launch.plan").check_share(ranks, cpus)


def let_ranks_need(patch: pytest.MonkeyPatch, size: int) -> None:
    """Have agents believe that a rank takes so many bytes of memory."""
    patch.setattr("mlaunch.agent.machine_limits._LEAST_MEMORY", size)


def fork_at_once(patch: pytest.MonkeyPatch, most: int) -> None:
    """Have agents fork no more ranks than these in one go."""
    patch.setattr("mlaunch.agent.fork_ranks._AT_ONCE", most)


def mapped_files() -> list[str]:
    """What this process has mapped."""
    return [mapping.path for mapping in import_module("mlaunch.base.own_process").memory_mappings()]


def is_stopped(pid: int) -> bool:
    """True if somebody has stopped (SIGSTOP) the process."""
    return import_module("mlaunch.base.linux").is_stopped(pid)


# Stores, and machines of an engine


def channels() -> tuple[Any, Any]:
    """The two ends of a channel between processes of a launch."""
    return import_module("mlaunch.protocol.channel").Channel.pair()


def is_taken(port: int) -> bool:
    """True if somebody on this machine listens there."""
    return import_module("mlaunch.rendezvous.address").is_taken(port)


def tokens() -> ModuleType:
    """What draws the secrets of launches (``draw``)."""
    return import_module("mlaunch.protocol.token")


def give_back_after(cluster: Any, seconds: float) -> None:
    """Have machines that are held be given back after so long without a call, from now on."""
    cluster._idle_timeout = seconds
    cluster._start_timer()


def secret_of_launches(patch: pytest.MonkeyPatch) -> str:
    """The secret of all launches from now on."""
    secret: str = tokens().draw()
    patch.setattr(tokens(), "draw", lambda: secret)
    return secret


def marks() -> tuple[bytes, bytes]:
    """The beginnings of the lines in which an engine's first process, and each member, say who they are."""
    first, member = "mlaunch.engines.wire.first_process", "mlaunch.engines.wire"
    return import_module(first).MARK, import_module(member).MARK


def secrets_in(said: bytes) -> set[str]:
    """The secrets in what first processes of an engine have said."""
    where = import_module("mlaunch.engines.wire.first_process").ProcessAddress
    mark, _ = marks()
    return {where.of_line(line.removeprefix(mark)).secret for line in said.splitlines() if line.startswith(mark)}


def connect_to_store(port: int) -> Any:
    """Connect to a store on this machine as a stranger does, with torch's client."""
    return import_module("mlaunch.rendezvous.tcp_store").connect("127.0.0.1", port, timedelta(seconds=60))


def longest_value() -> int:
    """The bytes that a store takes as one value."""
    return import_module("mlaunch.compat.rank.megengine")._LONGEST


def serve_as_member(stream: FrameStream, host: str) -> None:
    """Serve a caller as one machine of its engine."""
    import_module("mlaunch.engines.member.member").serve(stream, host)


def parts_of_a_launch() -> set[type]:
    """What its caller has in memory while it runs, and no longer."""
    names = {
        "caller.launch.handle": "LaunchHandle",
        "caller.launch.outcome": "Outcome",
        "caller.output.relay": "Relay",
        "caller.report.launch_report": "History",
        "protocol.channel": "Channel",
        "protocol.spec": "LaunchSpec",
    }
    return {getattr(import_module(f"mlaunch.{module}"), name) for module, name in names.items()}


# Values on their way


def write_value(fd: int, value: object, *, to_caller: bool = True) -> None:
    import_module("mlaunch.protocol.payload").write(fd, value, to_caller=to_caller)


def read_value(fd: int) -> Any:
    return import_module("mlaunch.protocol.payload").read(fd)


def pickled(value: object, *, by_value: bool = False) -> Any:
    """Pickle it as it travels; return what is told beside it."""
    pickling = import_module("mlaunch.protocol.pickling")
    return (pickling.pickle_by_value if by_value else pickling.pickle_by_name)(io.BytesIO(), value)


# Without a launch


def command(*words: str) -> int:
    """Run the command ``mlaunch`` in this process; returns its status."""
    return import_module("mlaunch.cli").main([*words])


def torch_version() -> tuple[int, int]:
    return import_module("mlaunch.rank.device").version()


def lacks_libuv() -> bool:
    """True if this torch was built without libuv, as a process of its own finds out."""
    _, status = os.waitpid(import_module("mlaunch.rendezvous.tcp_store").ask_for_libuv(), 0)
    return os.waitstatus_to_exitcode(status) != 0


def leaves_no_descriptors() -> bool:
    """False with an older torch, which keeps descriptors of a group that was left."""
    return torch_version() >= import_module("mlaunch.rank.group").DESTRUCTIBLE


def hurry_slow(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have ``slow=`` compare the ranks over so many seconds, not 30, and look as often in them."""
    module = import_module("mlaunch.slow.caller")
    patch.setattr(module, "EVERY", module.EVERY * seconds / module.SECONDS)
    patch.setattr(module, "SECONDS", seconds)


def be_on_machine(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Have ``numa=`` read /sys, /proc and /dev below this directory."""
    patch.setattr(import_module("mlaunch.numa.caller"), "ROOT", str(root))
