"""Every test is checked for what it leaves behind; every wait has a deadline."""

from __future__ import annotations

import compileall
import contextlib
import fnmatch
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlaunch
from tests import launches
from tests.cost import Cost
from tests.fresh import Watch, is_fresh
from tests.imported import IMPORTED, lend_forks
from tests.processes import alive, children, descendants, ours, session_of, wait_gone, wait_until
from tests.users import TURNED_OFF, users_environ

TORCH = importlib.util.find_spec("torch") is not None  # tests/matrix/run has Pythons without it
ROOT = Path(__file__).resolve().parent.parent
OURS = f"{Path(mlaunch.__file__).parent}{os.sep}"  # how a report would show a frame of ours
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # before any are left out
LONGEST_FIRST = (
    "test_matrix",
    "test_engines.py",
    "test_run.py",
    "test_machines",
    "integration/",
    "system/",
    "contract/",
    "unit/",
    "",
)
_REMOVAL_TIMEOUT = 10.0  # seconds
interpreters = Watch()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Loads the plugin where mlaunch is not installed (``tests/matrix/run``)."""
    parser.addoption("--nightly", action="store_true", help="run also the tests with the mark nightly")
    parser.addoption("--cost", action="store_true", help="show the CPU seconds of the tests, and the dearest files")
    if not pluginmanager.is_registered(launches.plugin()):
        pluginmanager.register(launches.plugin(), "mlaunch")


def pytest_configure(config: pytest.Config) -> None:
    """Compiles package and tests once, as pip does, for the hundreds of interpreters and ranks that import them."""
    sys.dont_write_bytecode = False  # pytest keeps the tests as it has rewritten them
    if config.option.cost:
        config.pluginmanager.register(Cost(config), "mlaunch's cost")
    config.option.loadscopereorder = False  # of xdist: the files with the most tests are not those that take longest
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "mlaunch", quiet=1, optimize=[0, 1, 2])
        compileall.compile_dir(ROOT / "tests", quiet=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is fresh. Files that take long come first, so that no process is left with one at the end."""
    config.stash[COLLECTED] = list(items)
    later = {item for item in items if _is_for_the_night(item)}
    if later and not config.option.nightly:
        config.hook.pytest_deselected(items=list(later))
        items[:] = [item for item in items if item not in later]
    items.sort(key=lambda item: LONGEST_FIRST.index(next(part for part in LONGEST_FIRST if part in item.nodeid)))
    for item in items:
        if is_fresh(item):
            item.add_marker("fresh")


def _is_for_the_night(item: pytest.Item) -> bool:
    """True if it has the mark; one with arguments (patterns of parameters' ids) is taken off the other parameters."""
    for mark in list(item.iter_markers("nightly")):
        if not mark.args or any(fnmatch.fnmatchcase(item.callspec.id, pattern) for pattern in mark.args):  # type: ignore[attr-defined]
            return True
        item.own_markers.remove(mark)
    return False


@pytest.fixture(scope="session")
def dispositions() -> Iterator[None]:
    """A shell's background job and ``nohup`` ignore these, and so would every process that tests start."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGCHLD: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    wanted |= {signal.SIGQUIT: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    unblocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The fork server is meant to stay, so it is there before anything is counted."""
    request.getfixturevalue("dispositions")
    launches.prepare_servers(["tests.preloaded"], lambda: interpreters.started.append("a warm fork server"))
    # On a busy machine any package takes long, and what is told would stand in a test's output.
    launches.be_patient(pytest.MonkeyPatch(), "slow import", 0)
    os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide what buffering does
    os.environ.pop("MLAUNCH_WARM", None)  # each process would leave one
    os.environ |= TURNED_OFF
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))  # no other launches of this user
    os.environ["MLAUNCH_LEASE_DIR"] = str(tmp_path_factory.mktemp("leases"))  # nor do others wait for the tests'
    if not TORCH:
        yield
        return
    with contextlib.contextmanager(lend_forks)():
        mlaunch.launcher(lambda: None, n_gpus=1)()
        yield


@pytest.fixture(scope="module", autouse=True)
def no_ranks_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of tests with the mark end with the file."""
    yield
    launches.end_ranks_of_tests(request.config)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    if not TORCH:
        yield
        return
    launches.fork_server().ready()
    launches.start_ranks_of_test(request.node)  # they stay, so they are there before anything is counted
    there = len(launches.ranks_of_tests(request.config))
    wait_until(lambda: len(launches.sockets()) >= there)
    before = _what_is_there(request.config)
    family = set(ours())
    yield
    try:
        left = _what_is_left(request.config, before)
        assert not left, "\n".join(left)
    except AssertionError:
        _kill_new(family, launches.server_pid())
        raise


def _what_is_left(config: pytest.Config, before: dict[str, object]) -> list[str]:
    after = _what_is_there(config)
    if after != before:
        mlaunch.launcher(lambda: None, n_gpus=1)()  # after it, the fork server has reaped what ended before it
        after = _what_is_there(config)
    if _differs(before["shared memory"], after["shared memory"]):
        after["shared memory"] = _wait_for_removal(before["shared memory"])
    return [f"{name}: {_difference(was, after[name])}" for name, was in before.items() if _differs(was, after[name])]


def _kill_new(family: set[int], server: int) -> None:
    """Kill what a failed test has left, for which the next ones would wait in vain; ``server`` stays."""
    for pid in {*ours()} - family - {server, *descendants(server)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # no child of this process, but its child's
            os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def marked_if_fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Holds ``tests/fresh.py`` to what happens: a test that it does not mark starts no interpreter."""
    before = len(interpreters.started)
    yield
    started = interpreters.started[before:]
    marked = request.node.get_closest_marker("fresh")
    assert marked or not started, f"tests/fresh.py does not see that it starts {started}"


def _differs(was: object, now: object) -> bool:
    """Whether it is not what was there; of a set, whether anything is new."""
    return bool(now - was) if isinstance(was, set) and isinstance(now, set) else now != was


def _difference(was: object, now: object) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        changed = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
        return "; ".join(f"{name}: {was.get(name)} -> {now.get(name)}" for name in sorted(changed))
    return f"{was} -> {now}"


def _what_is_there(config: pytest.Config) -> dict[str, object]:
    launches.wait_for_replaced_servers()
    servers = [pid for pid in ours() if session_of(pid) == pid and pid in children(os.getpid())]
    stay = _agents(config)
    # The last call's may still be exiting.
    _end([agent for server in servers for agent in children(server) if agent not in stay])
    return {
        "processes": len(_outside_sessions(ours())),
        "in the fork server's session": _in_sessions(servers),  # one of an earlier test's may end only during this one
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "fds": _open_files(),
        "environment": dict(os.environ) | {"PYTEST_CURRENT_TEST": ""},
        "cwd": os.getcwd(),
        "runtime files": [str(path) for path in launches.runtime_directory().glob("*")],
        "shared memory": _shared_memory(),
    }


def _end(leaving: list[int]) -> None:
    """Waits for agents that leave; kills one that a failed test has left, so that the next tests do not fail for it."""
    try:
        wait_gone(leaving)
    except AssertionError:
        for agent in leaving:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        raise


def _agents(config: pytest.Config) -> set[int]:
    """The agents of ranks that stay for tests with the mark."""
    return {ranks.run(os.getppid)[0] for ranks in launches.ranks_of_tests(config)}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if _is_left(name)}


def _wait_for_removal(before: object) -> set[str]:
    """Returns what stays. torch removes what ranks have left, here or in another session, after two seconds."""
    end = time.monotonic() + _REMOVAL_TIMEOUT
    while _differs(before, found := _shared_memory()) and time.monotonic() < end:
        signal.sigtimedwait([], 0.05)
    return found


def _is_left(name: str) -> bool:
    """torch names its segments after the process that made them, which may belong to another test session."""
    maker = re.match(r"torch_(\d+)_", name)
    if maker is None:
        return name.startswith(("torch_", "mlaunch"))
    pid = int(maker[1])
    return not alive(pid) or pid == os.getpid() or pid in descendants(os.getpid())


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(found)


def _outside_sessions(pids: list[int]) -> list[int]:
    """Those that no fork server among them has started; it may begin and end one while this looks."""
    leaders = [pid for pid in pids if session_of(pid) == pid]
    inside = {pid for leader in leaders for pid in descendants(leader)}
    return [pid for pid in pids if alive(pid) and pid not in inside]


def _in_sessions(servers: list[int]) -> set[int]:
    """Those of fork servers and of their ranks, less the servers."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    families = {pid for server in servers for pid in descendants(server)}
    left = {pid for pid in pids if session_of(pid) in {*servers, *families}} | families
    return {pid for pid in left if pid not in servers and alive(pid)}


@pytest.fixture
def run_script(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs a script as ``python`` does; returns its CompletedProcess. With flags, it is a fresh interpreter."""

    def run(text: str, *flags: str, fresh: bool = False, **options: object) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(text)
        environ = {**users_environ(), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable if flags or fresh else IMPORTED, *flags, str(path)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=environ,
            cwd=tmp_path,
            **options,  # type: ignore[call-overload]
        )

    return run
