"""``lease="idle"``: what NVIDIA's library tells. A library that stands in for it is loaded; all else is real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mlaunch import launcher
from mlaunch.caller.options.launch_options import Options
from mlaunch.leases import caller
from mlaunch.protocol.server_messages import Ready
from tests import nvml
from tests.conftest import TORCH

SCRIPT = """
import ctypes, os, sys
ctypes.CDLL(os.environ["NVML"])  # now the loader knows the name by which the package asks for it
from pathlib import Path
from mlaunch.leases.caller import LeaseRequest
from mlaunch.caller.options.launch_options import Options
from mlaunch.leases.caller.acquisition import Wish

names = ["GPU-a", "GPU-b", "MIG-c", "GPU-d"]
os.environ["MLAUNCH_LEASE_DIR"] = os.environ["LEASES"]
wish = Wish(names, 2, "train()")
request = LeaseRequest(Options(lease="idle"), {}, wish, dict(zip(names, range(4))))
acquisition = request.begin()
lease = request.step(acquisition)
print(*lease.names, request.granted(lease).options.devices)
lease.close()
acquisition.close()
"""


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the library finds what it lists."""
    monkeypatch.setenv("NVML", str(nvml.build(tmp_path)))
    monkeypatch.setenv("NVML_LISTED", str(tmp_path))
    monkeypatch.setenv("LEASES", str(tmp_path / "leases"))
    return tmp_path


def test_devices_without_processes_are_taken_first(
    listed: Path, run_script: Callable[..., CompletedProcess[str]]
) -> None:
    assert run_script(SCRIPT).stdout == "GPU-a GPU-b [0, 1]\n"
    (listed / "compute").write_text("GPU-a 1 0\nMIG-c 1 0\n")
    assert run_script(SCRIPT).stdout == "GPU-b GPU-d [1, 3]\n"
    (listed / "graphics").write_text("GPU-d 1 0\n")  # then there are too few, and any will do
    assert run_script(SCRIPT).stdout == "GPU-b GPU-a [1, 0]\n"


def test_without_a_driver_that_can_be_asked_any_devices_are_taken(
    listed: Path, run_script: Callable[..., CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = "train() takes any devices that are free, idle or not: NVIDIA's library says: "
    with monkeypatch.context() as patch:
        patch.setenv("NO_DRIVER", "1")
        without = run_script(SCRIPT)
    nvml.build(listed, "-DOLD")
    old = run_script(SCRIPT)
    assert (without.stdout, old.stdout) == ("GPU-a GPU-b [0, 1]\n", "GPU-a GPU-b [0, 1]\n")
    assert taken + "Driver Not Loaded" in without.stderr
    assert taken + "Unversioned function called" in old.stderr


class OfOneKind:
    def __init__(self, runtime: str) -> None:
        self._runtime = runtime

    def ready(self) -> Ready:
        return Ready("2.13", "cuda", ("gloo",), None, self._runtime)

    def name_devices(self, _environ: object) -> tuple[str, ...]:
        return "GPU-a", "GPU-b"


def test_where_it_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "is_installed", lambda: False)
    options = Options(n_gpus=1, lease="idle")
    with pytest.raises(ModuleNotFoundError, match=r"by the package nvidia-ml-py, which is not installed here; install"):
        caller.request_of(options, OfOneKind("cuda"), {}, "train()")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lease='idle' on cuda devices: NVIDIA's library knows only NVIDIA devices"):
        caller.request_of(options, OfOneKind("rocm"), {}, "train()")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lease=2: allowed: True, False, 'idle'; for 2 devices: n_gpus=2, lease=True"):
        launcher(int, lease=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lease='Idle': allowed: True, False, 'idle'"):
        launcher(int, lease="Idle")
    if TORCH:
        assert launcher(int, n_gpus=1, lease="idle", device_type="cpu")() == [0]  # as lease=True
