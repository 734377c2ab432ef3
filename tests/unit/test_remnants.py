"""Memory that a device's former launch has left: what is waited for, how long, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import nvml

SCRIPT = """
import ctypes, os, signal, sys
ctypes.CDLL(os.environ["NVML"])
from pathlib import Path
from mlaunch.caller import interrupts
from mlaunch.caller.launch.call import acquired
from mlaunch.caller.options.launch_options import Options
from mlaunch.core.load import CallerParts
from mlaunch.core.records import Grant
from mlaunch.leases import caller as leases
from mlaunch.leases.caller.acquisition import standing
from mlaunch.protocol.server_messages import Ready

LEASES = Path(os.environ["MLAUNCH_LEASE_DIR"])


class Server:
    runtime = "cuda"

    def ready(self):
        return Ready("2.13", "cuda", ("gloo",), None, self.runtime)

    def name_devices(self, environ):
        return "GPU-a", "GPU-b"


def listed(*pids):
    new = LEASES.parent / "new"
    new.write_text("".join(f"GPU-a {pid} {2**30}\\n" for pid in pids))
    new.rename(LEASES.parent / "compute")


def lease(name, tell=lambda text: print("told", text), **options):
    options = Options(n_gpus=1, lease=True, **{"devices": [0], **options})
    with CallerParts(options) as parts, interrupts.deferred():
        acquired(parts, Grant(options, {}), Server(), name, tell).give_back()
    print(name, "starts", flush=True)


def dead():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


zombie, gone, stuck = dead(), dead(), dead()
os.waitpid(gone, 0)
listed(zombie)
lease("first()")  # nobody has had it: what is left there is no launch's
listed(os.getpid(), 1)
lease("second()")  # who lives has its memory on purpose, and so has another user's process
listed(zombie)
lease("third()", lambda text: (print(text.replace(str(zombie), "Z").replace(str(os.getpid()), "P")), listed()))
listed(gone, zombie)
try:
    lease("interrupted()", lambda text: os.kill(os.getpid(), signal.SIGINT))
except KeyboardInterrupt:
    assert standing(LEASES) == ([], [])  # or what follows would wait for it
    print("interrupted")
for Server.runtime, options in ("rocm", {}), ("cuda", {"devices": None, "device_type": "cpu"}):
    lease("elsewhere()", **options)
os.environ["NO_DRIVER"] = "1"
ctypes.CDLL(None).setenv(b"NO_DRIVER", b"1", 1)
lease("driverless()")
ctypes.CDLL(None).unsetenv(b"NO_DRIVER")
installed, sys.modules["pynvml"] = sys.modules["pynvml"], None
lease("alone()")
sys.modules["pynvml"] = installed
listed(zombie, gone)
leases.PATIENCE = 0.0
lease("patient()")
lease("patient()")  # has waited for these
listed(stuck, zombie)
lease("last()")
print(f"{min(zombie, gone)}, {max(zombie, gone)}", stuck)
"""


@pytest.fixture
def _library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVML", str(nvml.build(tmp_path)))
    monkeypatch.setenv("NVML_LISTED", str(tmp_path))
    monkeypatch.setenv("MLAUNCH_LEASE_DIR", str(tmp_path / "leases"))


@pytest.mark.usefixtures("_library")
def test_memory_of_what_has_ended_is_waited_for(run_script: Callable[..., CompletedProcess[str]]) -> None:
    done = run_script(SCRIPT)
    *lines, pids = done.stdout.splitlines()
    assert lines == [
        "first() starts",
        "second() starts",
        "third() waits for memory of device 0: process Z, which has ended, still has some (before: second() of pid P)",
        "third() starts",
        "interrupted",
        "elsewhere() starts",
        "elsewhere() starts",
        "driverless() starts",
        "alone() starts",
        "patient() starts",
        "patient() starts",
        "last() starts",
    ], done.stderr
    first, last = done.stderr.splitlines()
    both, _, stuck = pids.rpartition(" ")
    assert (
        f"patient() starts, though memory of device 0 is not free after 0 s: processes {both}, which have ended, still "
        f"have 2.0 GiB (before: alone() of pid " in first
    )
    assert f"last() starts, though memory of device 0 is not free after 0 s: process {stuck}, which has " in last
    assert "still has 1.0 GiB (before: patient() of pid" in last
