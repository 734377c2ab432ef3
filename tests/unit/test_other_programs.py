"""``lease="idle"``: what NVIDIA's library tells. A library that stands in for it is loaded; all else is real."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mlaunch import launcher
from mlaunch.caller.options.launch_options import Options
from mlaunch.leases.caller import other_programs, requests
from mlaunch.protocol.messages.launch_messages import Ready
from tests.conftest import TORCH
from tests.integration.libraries import needs

NVML = """
#include <stdlib.h>
#include <string.h>
static int begin(void) { return getenv("NO_DRIVER") ? 9 : 0; }
int nvmlInit_v2(void) { return begin(); }
int nvmlInitWithFlags(unsigned flags) { return begin(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = strdup(uuid); return 0; }
static int processes(const char *variable, const char *uuid, unsigned *count, void *infos) {
    const char *busy = getenv(variable);
    unsigned there = busy && strstr(busy, uuid), room = *count;
    *count = there;
    if (there > room) return 7;
    if (there) memset(infos, 0, 24);
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, void *i) { return processes("COMPUTES", d, n, i); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *n, void *i) { return processes("DRAWS", d, n, i); }
"""
SCRIPT = """
import ctypes, os, sys
ctypes.CDLL(os.environ["NVML"])  # now the loader knows the name by which the package asks for it
from pathlib import Path
from mlaunch.leases.caller.requests import LeaseRequest
from mlaunch.caller.options.launch_options import Options
from mlaunch.leases.caller.acquisition import Wish

names = ["GPU-a", "GPU-b", "MIG-c", "GPU-d"]
os.environ["MLAUNCH_LEASE_DIR"] = os.environ["LEASES"]
wish = Wish(names, 2, "train()")
request = LeaseRequest(Options(lease="idle"), {}, wish, dict(zip(names, range(4))))
acquisition = request.begin()
lease = request.look(acquisition)
print(*lease.names, request.granted(lease).options.devices)
lease.close()
acquisition.close()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("pynvml")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = tmp_path / "nvml.so"
    build = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libnvidia-ml.so.1", "-x", "c", "-", "-o", str(path)]
    subprocess.run(build, input=NVML.encode(), check=True)
    monkeypatch.setenv("NVML", str(path))
    monkeypatch.setenv("LEASES", str(tmp_path / "leases"))


@pytest.mark.usefixtures("library")
def test_devices_without_processes_are_taken_first(
    run_script: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_script(SCRIPT).stdout == "GPU-a GPU-b [0, 1]\n"
    monkeypatch.setenv("COMPUTES", "GPU-a MIG-c")
    assert run_script(SCRIPT).stdout == "GPU-b GPU-d [1, 3]\n"
    monkeypatch.setenv("DRAWS", "GPU-d")  # then there are too few, and any will do
    assert run_script(SCRIPT).stdout == "GPU-b GPU-a [1, 0]\n"


@pytest.mark.usefixtures("library")
def test_without_a_driver_any_devices_are_taken(
    run_script: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_DRIVER", "1")
    done = run_script(SCRIPT)
    assert done.stdout == "GPU-a GPU-b [0, 1]\n"
    assert (
        "train() takes any devices that are free, idle or not: NVIDIA's library says: Driver Not Loaded" in done.stderr
    )


class OfOneKind:
    def __init__(self, runtime: str) -> None:
        self._runtime = runtime

    def ready(self) -> Ready:
        return Ready("2.13", "cuda", ("gloo",), None, self._runtime)

    def name_devices(self, _environ: object) -> tuple[str, ...]:
        return "GPU-a", "GPU-b"


def test_where_it_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_programs, "is_installed", lambda: False)
    options = Options(n_gpus=1, lease="idle")
    with pytest.raises(ModuleNotFoundError, match=r"by the package nvidia-ml-py, which is not installed here; install"):
        requests.request_of(options, OfOneKind("cuda"), {}, "train()")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lease='idle' on cuda devices: NVIDIA's library tells of its own alone"):
        requests.request_of(options, OfOneKind("rocm"), {}, "train()")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lease=2: allowed: True, False, 'idle'; for 2 devices: n_gpus=2, lease=True"):
        launcher(int, lease=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lease='Idle': allowed: True, False, 'idle'"):
        launcher(int, lease="Idle")
    if TORCH:
        assert launcher(int, n_gpus=1, lease="idle", device_type="cpu")() == [0]  # as lease=True
