"""Callers in unusual states, and what of theirs must not be lost or changed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from mlaunch import LaunchError, Ranks, launcher
from tests import launches
from tests.conftest import ROOT
from tests.imported import IMPORTED
from tests.processes import soon
from tests.users import users_environ


@pytest.mark.nightly
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    """Their numbers are not taken for others' channels, into which ranks would print."""
    out = tmp_path / "out"
    code = f"""
from mlaunch import launcher
values = []
for method in ("forkserver", "fork", "spawn"):
    values += launcher(lambda: print("hello") or 7, 2, output="raw", start_method=method)()
open({str(out)!r}, "w").write(str(values))
"""
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, check=True, timeout=120)
    assert out.read_text() == "[7, 7, 7, 7, 7, 7]"


def test_a_wakeup_descriptor_is_the_callers_alone() -> None:
    """Else a rank would tell the caller's event loop of the rank's signals."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        assert launcher(lambda: signal.set_wakeup_fd(-1), 1, start_method="fork")() == [-1]
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


def test_the_fork_server_keeps_no_directory_busy() -> None:
    assert os.readlink(f"/proc/{launches.server_pid()}/cwd") == "/"


def test_a_caller_that_blocks_signals() -> None:
    """A rank could not be asked to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        blocked = launcher(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), 1, start_method="fork")()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert blocked == [set()]


@pytest.mark.nightly
def test_a_caller_that_ignores_sigchld(run_script: Any) -> None:
    done = run_script(
        "import signal\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from mlaunch import launcher\n"
        "for method in ('forkserver', 'fork', 'spawn'):\n"
        "    print(launcher(lambda: 1, 2, start_method=method)())\n"
    )
    assert done.stdout == "[1, 1]\n" * 3, done.stderr


def test_an_interrupt_while_the_first_call_imports(run_script: Any) -> None:
    """Before Python 3.12, one that is raised while a dataclass is made becomes a RuntimeError."""
    done = run_script(
        "import dataclasses, os, signal\n"
        "from mlaunch import launcher\n"
        "train = launcher(lambda: 1, 1)\n"
        "def interrupted(*_):\n"
        "    del dataclasses.Field.__set_name__\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "dataclasses.Field.__set_name__ = interrupted\n"
        "try:\n"
        "    train()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', train())\n",
        fresh=True,
    )
    assert done.stdout == "interrupted [1]\n", done.stderr


def test_a_launch_from_a_signal_handler_during_the_first_is_refused(run_script: Any) -> None:
    done = run_script(
        "import os, signal, threading\n"
        "from mlaunch import launcher\n"
        "from mlaunch.caller import interrupts\n"
        "train = launcher(lambda: 1, 1)\n"
        "wait = interrupts.wait_readable\n"
        "def interrupted(*given):\n"
        "    interrupts.wait_readable = wait\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    return wait(*given)\n"
        "interrupts.wait_readable = interrupted\n"
        "signal.signal(signal.SIGUSR1, lambda *_: train())\n"
        "train()\n"
    )
    assert "RuntimeError: a launch from a signal handler, while the same thread waits for the fork" in done.stderr


def test_a_daemon_threads_launch_ends_with_the_interpreter(run_script: Any) -> None:
    done = run_script(
        "import os, signal, threading\n"
        "from mlaunch import launcher\n"
        "reader, writer = os.pipe()\n"
        "def train():\n"
        "    os.write(os.open(f'/proc/{caller}/fd/{writer}', os.O_WRONLY), b'x')\n"
        "    signal.pause()\n"
        "caller = os.getpid()\n"
        "threading.Thread(target=launcher(train, 1, grace_period=1000), daemon=True).start()\n"
        "os.read(reader, 1)\n"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


PREPARED = """
import os, signal, threading
from mlaunch import launcher
from mlaunch.caller.running_launches import ask
from mlaunch.protocol.registry import STATUS

reader, writer = os.pipe()
caller = os.getpid()

def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])

def train(stays):
    server = parent(os.getppid())
    def end(*_):
        with open("end", "w") as file:
            file.write(f"fork server is there: {parent(os.getppid()) == server}")
        os._exit(0)
    if stays:
        signal.signal(signal.SIGTERM, end)
        os.write(os.open(f"/proc/{caller}/fd/{writer}", os.O_WRONLY), b"%8d" % os.getpid())
        while True:
            signal.pause()  # it returns after each signal, such as that which asks for stacks

def states():
    own = [launch for launch in ask(STATUS) if launch["caller"] == caller]
    return [(rank["state"], rank["pid"]) for launch in own for rank in launch["ranks"]]

call = launcher(train, 1, grace_period=1000)
call(False)
while [state for state, _ in states()] != ["waiting for a call"]:
    signal.sigtimedwait([], 0.01)
pid = states()[0][1]
threading.Thread(target=call, args=(True,), daemon=True).start()
print(int(os.read(reader, 8)) == pid)
"""


def test_a_daemon_threads_call_on_what_was_prepared_is_cancelled_as_the_interpreter_ends(
    run_script: Any, tmp_path: Path
) -> None:
    """By a word to its agent: the fork server need not be killed, which would wait for that agent in vain."""
    done = run_script(PREPARED, fresh=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert soon((tmp_path / "end").exists)
    assert (tmp_path / "end").read_text() == "fork server is there: True"


def test_a_caller_without_torch_stays_without(run_script: Any) -> None:
    code = "import sys\nfrom mlaunch import launcher\nprint(launcher(lambda: 1, 2)(), 'torch' in sys.modules)\n"
    done = run_script(code, fresh=True)
    assert done.stdout == "[1, 1] False\n"


def test_a_caller_without_file_descriptors(run_script: Any) -> None:
    done = run_script(
        "import os, resource\n"
        "from mlaunch import launcher\n"
        "train = launcher(lambda: 1, 8)\n"
        "train()\n"
        "for free in (3, 8):\n"
        "    used = len(os.listdir('/proc/self/fd')) - 1\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, 10_000))\n"
        "    try:\n"
        "        train()\n"
        "    except OSError as error:\n"
        "        print(error)\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 10_000))\n"
        "print(train())\n"
    )
    first, second, after = done.stdout.splitlines()
    assert "Too many open files: the limit is " in first
    assert first.endswith("raise it with ulimit -n, up to 10000")
    assert "no file descriptor is left to receive a rank's answer with (see ulimit -n)" in second
    assert after == str([1] * 8)


def test_a_limit_on_the_size_of_files(run_script: Any) -> None:
    """It holds for memory files, too. What meets it can be pickled: it has no room."""
    done = run_script(
        "import resource\n"
        "from mlaunch import launcher\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 21))\n"
        "for call in (launcher(lambda: bytes(1 << 21), 1), lambda: launcher(len, 1)(bytes(1 << 21))):\n"
        "    try:\n"
        "        call()\n"
        "    except OSError as error:\n"
        "        print(error.strerror)\n"
    )
    words = "File too large: the limit is 1048576 bytes in a file, memory files among them; raise it with ulimit -f"
    assert done.stdout.splitlines() == [f"{words}, up to 2097152"] * 2, done.stderr


def test_a_deleted_working_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="the working directory of this process no longer exists"):
        launcher(lambda: 1, 1)()
    os.chdir(ROOT)


def test_random_numbers_are_fresh_in_every_rank_and_call() -> None:
    draw = launcher(lambda: torch.rand(1).item(), 2)
    assert len({*draw(), *draw()}) == 4


MAIN = """
import functools, io, torch
from mlaunch import launcher

class Model:
    device = "none"

@functools.lru_cache(maxsize=None)
def table(n):
    return list(range(n))

def train(model):
    type(model).device = "of the rank"
    torch.save(model, io.BytesIO())
    return model, sum(table(4))

[(model, total)] = launcher(train, 1)(Model())
print(type(model) is Model, Model.device, total, launcher(table, 1)(2))
"""


def test_classes_and_cached_functions_of_a_script(run_script: Any) -> None:
    done = run_script(MAIN)
    assert done.stdout == "True none 6 [[0, 1]]\n", done.stderr


def test_multiprocessing_in_a_rank_of_a_package_run_with_m(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("value = 5\n")
    (package / "main.py").write_text(
        "import multiprocessing\n"
        "from mlaunch import launcher\n"
        "from . import helper\n"
        "def put(queue):\n"
        "    queue.put(helper.value)\n"
        "def train():\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=put, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    return process.exitcode, queue.get(timeout=30) if process.exitcode == 0 else None\n"
        "if __name__ == '__main__':\n"
        "    print(launcher(train, 1)())\n"
    )
    environ = {**users_environ(), "PYTHONPATH": str(ROOT)}
    command = [IMPORTED, "-m", "pkg.main"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[(0, 5)]\n", done.stderr


class DataMissingError(FileNotFoundError):
    def __init__(self, path: str, shard: int) -> None:
        super().__init__(2, "no shard", path)
        self.shard = shard


def test_an_oserror_of_ones_own_keeps_what_it_knows() -> None:
    def train() -> None:
        raise DataMissingError("data", 5)

    with pytest.raises(DataMissingError, match=re.escape("[Errno 2] no shard: 'data'")) as caught:
        launcher(train, 1)()
    assert (caught.value.errno, caught.value.filename, caught.value.shard) == (2, "data", 5)


def test_a_deep_stack_is_told_where_it_was() -> None:
    import threading

    import torch.distributed as dist

    def is_waiting(frame: FrameType) -> bool:
        """In the event's own wait, not in that of ``Thread.start``."""
        above = frame.f_back.f_back if frame.f_back is not None else None
        return frame.f_code.co_name == "wait" and above is not None and above.f_code.co_name == "dive"

    def tell_once_it_waits(thread: int) -> None:
        while not is_waiting(sys._current_frames()[thread]):
            threading.Event().wait(0.01)
        dist.distributed_c10d._get_default_store().set("deep", "1")

    def dive(depth: int) -> None:
        if depth:
            dive(depth - 1)
        threading.Thread(target=tell_once_it_waits, args=[threading.get_ident()], daemon=True).start()
        threading.Event().wait()

    def train() -> None:
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().get("deep")
            raise ValueError("enough")
        dive(300)

    with pytest.raises(ValueError, match="enough") as caught:
        launcher(train, 2)()
    assert isinstance(caught.value.__cause__, LaunchError)
    assert "rank 0 was in wait at test_callers.py:" in str(caught.value.__cause__)


def test_a_coroutine_function_is_refused() -> None:
    async def train() -> None:
        await asyncio.sleep(0)

    async def steps() -> AsyncIterator[int]:
        yield 1

    class Trainer:
        async def __call__(self) -> None: ...

    for function in (train, functools.partial(train), Trainer()):
        with pytest.raises(TypeError, match="not the coroutine function"):
            launcher(function)
    with pytest.raises(TypeError, match="not the async generator function"):
        launcher(steps)
    with Ranks(n_gpus=1) as ranks, pytest.raises(TypeError, match=r"steps\(\) is a coroutine function or an async gen"):
        ranks.run(steps)


def weigh(self: int, func: int, *, function: int, cls: int, args: int, kwargs: int) -> list[int]:
    return [self, func, function, cls, args, kwargs]


def test_parameters_may_have_any_name() -> None:
    given = {name: number for number, name in enumerate(inspect.signature(weigh).parameters)}
    call = launcher(weigh, 1)
    wanted = [0, 1, 2, 3, 4, 5]
    assert call(**given) == call.submit(**given).result(60) == [wanted]
    if launches.leaves_no_descriptors():  # an older torch keeps descriptors of a group that is left
        assert call.options(inline=True)(**given) == [wanted]
    assert [run.result(60) for run in call.grid(**{name: [value] for name, value in given.items()})] == [[wanted]]
    with Ranks(n_gpus=1) as ranks:
        assert ranks.run(weigh, **given) == ranks.submit(weigh, **given).result(60) == [wanted]


POOL = """
import cloudpickle, multiprocessing, pickle
from mlaunch import launcher

@launcher(n_gpus=1, device_type="cpu")
def double(x): return 2 * x

class Trainer:
    step = 3
    @launcher(n_gpus=1, device_type="cpu")
    def fit(self, x): return self.step * x

if __name__ == "__main__":
    by_value = cloudpickle.dumps(double)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(double, [1, 2]), pool.map(Trainer().fit, [1]), pool.map(double.options(port=0), [4]))
    # Processes of those that pickle by cloudpickle have another __main__.
    del double
    assert pickle.loads(by_value)(3) == [6]
"""


@pytest.mark.nightly
def test_decorated_functions_of_a_script_go_to_a_process_pool(run_script: Any) -> None:
    """As their names, methods as those of their instance; to others they go by value."""
    done = run_script(POOL)
    assert done.stdout == "[[2], [4]] [[3]] [[8]]\n", done.stderr
