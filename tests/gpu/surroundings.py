"""What surrounds a launch on devices: imports that wake a driver, names of devices, one GPU for two ranks."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mlaunch import Ranks, launcher
from tests import launches
from tests.contract.preparing import pids_of, prepared, preparing
from tests.gpu.figures import FEW, MARK, seconds
from tests.gpu.parts import holds_device, where
from tests.gpu.place import check, count, needs_tensors, place

WAKES = "import torch; torch.get_device_module().set_device(0); torch.accelerator.synchronize()\n"


def optimise() -> bool:
    """Does what makes a rank import torch._dynamo; returns whether it was there before."""
    there = "torch._dynamo" in sys.modules
    model = torch.nn.Linear(8, 8).to(place())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return there


def late() -> None:
    """Imports that ranks had to make, which the fork server makes after the call, wake no driver there."""
    with preparing():
        call = launcher(optimise)
        for number in range(3):
            print(
                f"call {number}: {seconds(lambda: print(call(), end=' '), pause=3.0):.2f} s, torch._dynamo there or not"
            )
        check(all(call()), "the fork server has imported what ranks had to")
        server = launches.server_pid()
        for who, pids in (("the fork server", [server]), ("prepared ranks", pids_of(prepared()))):
            check(not any(map(holds_device, pids)), f"no device is open in {who}")
        check(len(launcher(where)()) == count(), "the next ranks use their devices")


def preloaded() -> None:
    """A module whose import wakes the driver, preloaded: refused in words, and the next call runs."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wakes_a_driver.py").write_text(WAKES, encoding="utf-8")
        Path(folder, "script.py").write_text("print('ran')\n", encoding="utf-8")
        environ = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "mlaunch", "run", "--preload", "wakes_a_driver", f"{folder}/script.py"]
        done = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", timeout=60, check=False)
        print(done.stdout + done.stderr)
        check(done.returncode and "wakes_a_driver" in done.stderr, "mlaunch run --preload refuses it by name")
        code = "import mlaunch; mlaunch.warm_up(preload=['wakes_a_driver']); print(mlaunch.launcher(int, 1)())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, encoding="utf-8", timeout=60, check=False
        )
        print(done.stdout + done.stderr)
        check("wakes_a_driver" in done.stderr, "warm_up names it")


def nothing() -> None:
    """Makes no collective."""


def eager() -> None:
    """What a call costs that uses no device and makes no collective, by backend."""
    for what, options in (
        ("as it is", {}),
        ("backend='gloo'", {"backend": "gloo"}),
        ("on CPUs", {"device_type": "cpu"}),
    ):
        call = launcher(nothing, count(), **options)  # type: ignore[call-overload]
        call()
        taken = sorted(seconds(call, pause=0.5) for _ in range(FEW))[FEW // 2]
        print(f"{MARK}{f'a call without a collective, {what}':<44} {taken * 1000:10.1f} ms")
    check(True, "measured")


def second_backend() -> float:
    """Makes a group with NCCL beside gloo's."""
    value = torch.ones(1, device=place())
    dist.all_reduce(value, group=dist.new_group(backend="nccl"))
    return float(value.item())


def beside() -> None:
    """A group with NCCL in a function whose ranks met by gloo."""
    needs_tensors()
    check(launcher(second_backend, backend="gloo")() == [float(count())] * count(), "both work side by side")


def awake() -> None:
    """A caller whose CUDA and NVML are awake."""
    needs_tensors()
    torch.ones(1, device=place())
    with contextlib.suppress(ImportError):
        importlib.import_module("pynvml").nvmlInit()
        print("NVML is awake, too")
    check(len(launcher(where)()) == count(), "a call runs")
    with Ranks() as ranks:
        check(len(ranks.run(where)) == count(), "ranks that stay run")


SHOWS = "from mlaunch import launcher\nfrom tests.gpu.surroundings import uuid\nprint(*launcher(uuid, 1, lease={})())\n"
HOLDS = """
from mlaunch import launcher
from tests.gpu.surroundings import until_closed
print(launcher(until_closed, 1, lease=True)())
"""


def uuid() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)


def until_closed() -> None:
    """Holds its device until the file is there."""
    print("it holds its device", flush=True)
    while not Path(os.environ["GPU_TEST_RELEASE"]).exists():
        time.sleep(0.01)


def names() -> None:
    """UUIDs, whole and short, in CUDA_VISIBLE_DEVICES; one lease, however the device is named."""
    needs_tensors()
    [whole] = launcher(uuid, 1)()
    for spelling in (f"GPU-{whole}", f"GPU-{whole[:8]}", "0"):
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": spelling}
        done = subprocess.run(
            [sys.executable, "-c", SHOWS.format(False)], env=environ, capture_output=True, encoding="utf-8", check=False
        )
        check(done.stdout.strip() == whole, f"CUDA_VISIBLE_DEVICES={spelling} is that device {done.stderr[-500:]}")
    with tempfile.TemporaryDirectory() as folder:
        release = Path(folder, "release")
        environ = {**os.environ, "GPU_TEST_RELEASE": str(release)}
        holder = subprocess.Popen([sys.executable, "-c", HOLDS], env=environ, stdout=subprocess.PIPE, encoding="utf-8")
        assert holder.stdout is not None
        print(holder.stdout.readline().rstrip())
        waiter = subprocess.Popen(
            [sys.executable, "-c", SHOWS.format(True)],
            env={**environ, "CUDA_VISIBLE_DEVICES": f"GPU-{whole[:8]}"},
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "mlaunch", "ps"]
        until, said = time.monotonic() + 30, ""
        while "wait" not in said and time.monotonic() < until:
            said = subprocess.run(command, capture_output=True, encoding="utf-8", check=False).stdout
        print(said)
        check("wait" in said, "the same device under another name is waited for")
        release.touch()
        check(waiter.wait(60) == 0 and holder.wait(60) == 0, "both launches end")


SHARED = """
import sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group(sys.argv[1])
value = torch.ones(1, device="cuda")
dist.all_reduce(value)
print(int(value.item()), flush=True)
dist.destroy_process_group()
"""


def shared() -> None:
    """Two ranks on one GPU: what NCCL says, and gloo."""
    needs_tensors()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "shared.py")
        script.write_text(SHARED, encoding="utf-8")
        for backend in ("gloo", "nccl"):
            command = [sys.executable, "-m", "mlaunch", "run", "--nproc-per-node", "2", str(script), backend]
            done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, check=False)
            print(f"-- {backend}: exit status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}")
            if backend == "gloo":
                check(done.stdout.count("2") == 2, "two ranks share a device with gloo")
            else:
                check(done.returncode and "Duplicate GPU" in done.stdout + done.stderr, "NCCL's refusal is shown")
                check("backend='gloo'" in done.stderr, "and gloo advised")


def compiled() -> float:
    function = torch.compile(lambda x: (x * 2 + 1).sum())
    return float(function(torch.ones(1000, device=place())).item())


def compiling() -> None:
    """torch.compile in ranks: no worker is left, and a second call finds the caches."""
    needs_tensors()
    with tempfile.TemporaryDirectory() as folder:
        call = launcher(compiled, env={"TORCHINDUCTOR_CACHE_DIR": folder})
        for what in ("the first call", "a second call"):
            print(f"{MARK}{f'torch.compile, {what}':<44} {seconds(call):10.1f} s")
        check(set(call()) == {3000.0}, "the values are right")
    left = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, encoding="utf-8", check=True).stdout
    workers = [line for line in left.splitlines() if "compile_worker" in line]
    check(not workers, f"no compile worker is left {workers}")


def near_and_far() -> None:
    """Copies from pinned memory of each NUMA node."""
    needs_tensors()
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    print(f"{MARK}NUMA nodes: {len(nodes)}")
    for node in nodes if len(nodes) > 1 else ():
        text = Path("/sys/devices/system/node", node, "cpulist").read_text(encoding="ascii").strip()
        print(f"{MARK}{f'pinned copies from {node}, CPUs {text}':<44} {launcher(copies, 1)(text)[0]:10.1f} GB/s")
    check(True, "looked")


def copies(cpus: str) -> float:
    """Returns the GB/s of copies to the device from memory that these CPUs have touched first."""
    ends = [part.split("-") for part in cpus.split(",") if part]
    os.sched_setaffinity(0, {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)})
    source = torch.ones(2**30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**30, dtype=torch.uint8, device=place())
    target.copy_(source)
    torch.accelerator.synchronize()
    begun = time.perf_counter()
    target.copy_(source)
    torch.accelerator.synchronize()
    return 2**30 / (time.perf_counter() - begun) / 1e9


def illegal() -> str:
    """Queues a copy from an address that is nobody's, and returns before the device has looked."""
    kernel = 'extern "C" __global__ void wrong(int *x) { *(volatile int *)8 = 1; }'
    torch.cuda._compile_kernel(kernel, "wrong")(grid=(1, 1, 1), block=(1, 1, 1), args=[torch.ones(1, device=place())])
    return "returned"


def asserts_at_once() -> None:
    torch.zeros(1, device=place())[torch.full((1,), 10**6, device=place())].item()


def faults() -> None:
    """An assertion of a kernel that the function waits for; an illegal access that it does not wait for."""
    needs_tensors()
    for function, words in ((asserts_at_once, "device-side assert"), (illegal, "illegal memory access")):
        try:
            launcher(function, 1)()
        except Exception as error:
            text = str(error.__cause__ or error)
            print(text.partition("\n\n")[0])
            check(words in text, f"{function.__name__}() fails with its own error")
        else:
            check(False, f"{function.__name__}() fails")
        check(len(launcher(where)()) == count(), "the next call runs")


ALL = {
    "late": late,
    "preloaded": preloaded,
    "eager": eager,
    "awake": awake,
    "beside": beside,
    "names": names,
    "shared": shared,
    "compiling": compiling,
    "numa": near_and_far,
    "faults": faults,
}
