"""Which CPUs ``numa=`` chooses, on machines that exist as files alone: by device, and never others than may be used."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlaunch.base import own_process
from mlaunch.numa import caller as numa_caller
from mlaunch.numa import command, member
from mlaunch.numa.caller import devices_of
from mlaunch.numa.rank import Binding, Topology, bindings, seats_of, threads_of, unbound_lines
from mlaunch.numa.wire import MODES, NumaOrder, PciDevice
from mlaunch.run.command.flags import as_flag


@dataclass
class Machine:
    """``nodes``: the CPUs of each, of whose first half the second are sibling threads. ``devices``: their nodes."""

    nodes: Sequence[str]
    sockets: Sequence[int]  # of each node that has CPUs
    devices: Sequence[int] = ()
    threads: int = 2
    complexes: int = 2  # in each node
    memory: str = ""  # the nodes that have some; "": all
    runtime: str = "cuda"
    models: Mapping[int, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        """Make its /sys, /proc and /dev."""
        if not self.nodes:
            return root
        nodes = root / "sys/devices/system/node"
        put(nodes / "online", f"0-{len(self.nodes) - 1}")
        put(nodes / "possible", f"0-{len(self.nodes) - 1}")
        put(nodes / "has_memory", self.memory or f"0-{len(self.nodes) - 1}")
        for node, text in enumerate(self.nodes):
            put(nodes / f"node{node}/cpulist", text)
            self._write_cpus(root / "sys/devices/system/cpu", node, sorted(own_process.cpus_of_list(text)))
        for number, node in enumerate(self.devices):
            self._write_device(root, number, node)
        return root

    def _write_cpus(self, cpus: Path, node: int, numbers: Sequence[int]) -> None:
        each = len(numbers) // self.threads  # cores
        for place, cpu in enumerate(numbers):
            core = place % each
            siblings = [numbers[core + each * thread] for thread in range(self.threads)]
            among = max(1, each // self.complexes)
            cached = [number for other, number in enumerate(numbers) if other % each // among == core // among]
            put(cpus / f"cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, siblings)))
            put(cpus / f"cpu{cpu}/topology/physical_package_id", str(self.sockets[node]))
            for index, (level, kind, shared) in enumerate(
                [(1, "Data", siblings), (1, "Instruction", siblings), (3, "Unified", cached)]
            ):
                cache = cpus / f"cpu{cpu}/cache/index{index}"
                put(cache / "level", str(level))
                put(cache / "type", kind)
                put(cache / "shared_cpu_list", ",".join(map(str, shared)))

    def _write_device(self, root: Path, number: int, node: int) -> None:
        put(root / f"sys/bus/pci/devices/{address(number)}/numa_node", str(node))
        if self.runtime == "cuda":
            put(root / f"dev/nvidia{number}", "")
            told = f"Model: \t\t {self.models.get(number, 'H100')}\nGPU UUID:\t GPU-{number}a{number}\n"
            put(root / f"proc/driver/nvidia/gpus/{address(number)}/information", f"{told}Device Minor: \t {number}")
            return
        put(root / f"dev/dri/renderD{128 + number}", "")
        kfd = root / "sys/class/kfd/kfd/topology/nodes"
        put(kfd / "0/properties", "simd_count 0\nlocation_id 0")
        told = f"simd_count 304\nlocation_id {(number + 1) << 12}\ndomain 0\ndrm_render_minor {128 + number}\n"
        put(kfd / f"{number + 1}/properties", f"{told}unique_id {160 + number}")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def address(number: int) -> str:
    return f"0000:{(number + 1) << 4:02x}:00.0"


TWO_SOCKETS = Machine(["0-7,16-23", "8-15,24-31"], [0, 1], devices=[0] * 4 + [1] * 4)
CROSSED = Machine(["0-7,16-23", "8-15,24-31"], [0, 1], devices=[1, 0, 1, 0, 0, 1, 0, 1])
FOUR_NODES = Machine(["0-3", "4-7", "8-11", "12-15"], [0, 0, 1, 1], devices=[0, 1, 2, 3], threads=1)
AMD = Machine(["0-3", "4-7", "8-11", "12-15"], [0, 0, 1, 1], devices=[3, 2, 1, 0], threads=1, runtime="rocm")
GRACE = Machine(["0-3", "4-7", "", "", "", ""], [0, 1, 0, 0, 0, 0], devices=[0, 0, 1, 1], threads=1, memory="0-2,4")
ONE_NODE = Machine(["0-7"], [0], devices=[-1, -1])
UNKNOWN = Machine(["0-3", "4-7"], [0, 1], devices=[-1, 1], threads=1)
MIXED = Machine(["0-3", "4-7"], [0, 1], devices=[0, 1], threads=1, models={1: "A2"})
CPUS = Machine(["0-3", "4-7", "8-11"], [0, 0, 1], threads=1)
BARE = Machine([], [])
NEAR, FAR = "0-7,16-23", "8-15,24-31"

# machine, mode, what is asked: ranks, and what shows devices (own="1,0": the launch's; None: a command's)
ROWS: list[tuple[str, Machine, str, dict[str, Any], list[str]]] = [
    ("near its device", TWO_SOCKETS, "node", {"own": "0,1,2,3,4,5,6,7"}, [NEAR] * 4 + [FAR] * 4),
    ("the devices' nodes alternate", CROSSED, "node", {"own": "0,1,2,3"}, [FAR, NEAR, FAR, NEAR]),
    ("picked", TWO_SOCKETS, "node", {"own": "7,0"}, [FAR, NEAR]),
    ("permuted", TWO_SOCKETS, "node", {"shown": "3,6,5,4,0,7,1,2", "own": None, "ranks": 8},
     [NEAR, FAR, FAR, FAR, NEAR, FAR, NEAR, NEAR]),
    ("cut", TWO_SOCKETS, "node", {"shown": "5,1", "own": None, "ranks": 2}, [FAR, NEAR]),
    ("cut, more ranks", TWO_SOCKETS, "node", {"shown": "5", "own": None, "ranks": 2},
     [FAR, "is not among the 1 that are visible"]),
    ("a command picks none", TWO_SOCKETS, "node", {"own": None, "ranks": 8}, [NEAR] * 4 + [FAR] * 4),
    ("behind an end", TWO_SOCKETS, "node", {"shown": "4,-1,0", "own": None, "ranks": 1}, [FAR]),
    ("by UUID", TWO_SOCKETS, "node", {"own": "GPU-6a6,GPU-1a1"}, [FAR, NEAR]),
    ("by a short UUID", TWO_SOCKETS, "node", {"own": "GPU-6"}, [FAR]),
    ("an unknown UUID", TWO_SOCKETS, "node", {"own": "GPU-x"}, ["is not among the"]),
    ("an older name of an instance", TWO_SOCKETS, "node", {"own": "MIG-GPU-6a6/1/0"}, [FAR]),
    ("its share", TWO_SOCKETS, "exclusive", {"own": "0,1,2,3"}, ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"]),
    ("the others' share is theirs", TWO_SOCKETS, "exclusive", {"own": "6"}, ["12-13,28-29"]),
    ("a share among three", TWO_SOCKETS, "exclusive", {"shown": "0,1,2,4", "own": None, "ranks": 4},
     ["0-2,16-18", "3-5,19-21", "6-7,22-23", FAR]),
    ("a share of a cpuset", TWO_SOCKETS, "exclusive", {"own": "0,1,2,3", "allowed": "0-4,16"},
     ["0-1,16", "2", "3", "4"]),
    ("too few cores", TWO_SOCKETS, "exclusive", {"own": "0", "allowed": "0-2"},
     ["node 0 has 3 core(s) for the 4 that share it"]),
    ("too few cores of a cpuset", FOUR_NODES, "exclusive", {"own": "0,0", "allowed": "1"}, ["1", "1"]),
    ("a cache each", TWO_SOCKETS, "core-complex", {"own": "0,1,2"}, ["0-3,16-19", "4-7,20-23", "0-3,16-19"]),
    ("the cache with more CPUs", TWO_SOCKETS, "core-complex", {"own": "0,1", "allowed": "3-7"}, ["4-7", "3"]),
    ("a cpuset", TWO_SOCKETS, "node", {"own": "0,4", "allowed": "2-5"},
     ["2-5", "node 1, where its device is, has no CPU that this process may use"]),
    ("nodes of a socket", FOUR_NODES, "socket", {"own": "0,1,2,3"}, ["0-7", "0-7", "8-15", "8-15"]),
    ("one node of a socket", FOUR_NODES, "node", {"own": "0,1,2,3"}, ["0-3", "4-7", "8-11", "12-15"]),
    ("AMD's", AMD, "node", {"own": "0,1,2,3", "runtime": "rocm"}, ["12-15", "8-11", "4-7", "0-3"]),
    ("AMD's, shown twice", AMD, "node",
     {"shown": "1", "environ": {"ROCR_VISIBLE_DEVICES": "3,2"}, "own": None, "ranks": 1, "runtime": "rocm"}, ["4-7"]),
    ("Grace", GRACE, "node", {"own": "0,1,2,3"}, ["0-3", "0-3", "4-7", "4-7"]),
    ("Grace, a socket", GRACE, "socket", {"own": "0,2"}, ["0-3", "4-7"]),
    ("firmware says nothing, one node", ONE_NODE, "exclusive", {"own": "0,1"}, ["0-1,4-5", "2-3,6-7"]),
    ("firmware says nothing, two nodes", UNKNOWN, "node", {"own": "0,1"},
     ["this system does not say on which node 0000:10:00.0 is", "4-7"]),
    ("two models", MIXED, "node", {"own": "0,1"}, ["which CUDA numbers by speed; set CUDA_DEVICE_ORDER"] * 2),
    ("two models in order", MIXED, "node", {"own": "0,1", "environ": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}},
     ["0-3", "4-7"]),
    ("no /sys", BARE, "node", {"runtime": "cpu", "ranks": 2}, ["this system does not say which CPUs are near"] * 2),
    ("no devices known", CPUS, "node", {"own": "0"}, ["this system does not say where its cuda devices are"]),
    ("another accelerator", CPUS, "node", {"own": "0", "runtime": "xpu"}, ["this system does not say where its xpu"]),
    ("on CPUs, fewer ranks", CPUS, "node", {"runtime": "cpu", "ranks": 2}, ["0-3", "4-11"]),
    ("on CPUs, one rank", CPUS, "node", {"runtime": "cpu", "ranks": 1}, ["0-11"]),
    ("on CPUs, more ranks", CPUS, "node", {"runtime": "cpu", "ranks": 4}, ["0-3", "0-3", "4-7", "8-11"]),
    ("on CPUs, exclusive", CPUS, "exclusive", {"runtime": "cpu", "ranks": 6},
     ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"]),
    ("on CPUs, a socket", CPUS, "socket", {"runtime": "cpu", "ranks": 3}, ["0-7", "0-7", "8-11"]),
    ("on CPUs of a cpuset", CPUS, "node", {"runtime": "cpu", "ranks": 2, "allowed": "2-3,9"}, ["2-3", "9"]),
    ("a command without devices", CPUS, "node", {"own": None, "ranks": 3}, ["0-3", "4-7", "8-11"]),
    ("a command that is shown none", TWO_SOCKETS, "node", {"shown": "", "own": None, "ranks": 2}, [NEAR, FAR]),
    ("lists", CPUS, "8;0,4-5;1", {"runtime": "cpu", "ranks": 2}, ["8", "0,4-5"]),
]  # fmt: skip


class Written:
    """Where the files of a machine are. They are many, so each machine is written once."""

    def __init__(self, root: Path) -> None:
        self._root, self._there = root, dict[int, Path]()

    def __call__(self, machine: Machine) -> Path:
        if id(machine) not in self._there:
            self._there[id(machine)] = machine.write(self._root / str(len(self._there)))
        return self._there[id(machine)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("machines"))


def chosen(root: Path, mode: str, asked: Mapping[str, Any]) -> list[Binding]:
    runtime, own = asked.get("runtime", "cuda"), asked.get("own")
    shows = "HIP_VISIBLE_DEVICES" if runtime == "rocm" else "CUDA_VISIBLE_DEVICES"
    environ = {**asked.get("environ", {}), **({shows: asked["shown"]} if "shown" in asked else {})}
    seats = seats_of(asked.get("ranks", len((own or "").split(","))), devices_of(str(root)), runtime, environ, own)
    topology = Topology(str(root), own_process.cpus_of_list(asked.get("allowed", "0-31")))
    return bindings(NumaOrder(mode, None, "numa"), seats, topology)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_which_cpus(row: tuple[str, Machine, str, dict[str, Any], list[str]], written: Written) -> None:
    _, machine, mode, asked, expected = row
    found = chosen(written(machine), mode, asked)
    assert len(found) == len(expected)
    for binding, wanted in zip(found, expected, strict=True):
        if wanted[:1].isdecimal():
            assert (binding.cpus, binding.why_not) == (own_process.cpus_of_list(wanted), "")
        else:
            assert wanted in binding.why_not
            assert not binding.cpus


@pytest.mark.parametrize("allowed", ["0-31", "0-4,9-12,16-20,30"])
@pytest.mark.parametrize("machine", [TWO_SOCKETS, CROSSED, FOUR_NODES], ids=["two sockets", "crossed", "four nodes"])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_as_torchs(
    mode: str, machine: Machine, allowed: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun's --numa-binding does on these files."""
    torchs: Any = pytest.importorskip("torch.numa.binding", reason="torch 2.9 has it")
    root = written(machine)
    mask, shown = own_process.cpus_of_list(allowed), [number for number in range(len(machine.devices)) if number != 2]
    found = chosen(root, mode, {"own": None, "ranks": len(shown), "allowed": allowed,
                                             "shown": ",".join(map(str, shown))})  # fmt: skip
    inside = SimpleNamespace(
        listdir=lambda path: os.listdir(f"{root}{path}"), path=os.path, sched_getaffinity=lambda _: set(mask)
    )
    cuda = SimpleNamespace(
        device_count=lambda: len(shown),
        get_device_properties=lambda index: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=(shown[index] + 1) << 4, pci_device_id=0
        ),
    )
    monkeypatch.setattr(torchs, "os", inside)
    monkeypatch.setattr(torchs, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torchs, "open", lambda path: io.StringIO((root / path[1:]).read_text()), raising=False)
    options = torchs.NumaOptions(affinity_mode=torchs.AffinityMode(mode))
    for index, binding in enumerate(found):
        try:
            theirs = torchs._get_logical_cpus_to_bind_to(gpu_index=index, numa_options=options)
        except (RuntimeError, ValueError, ZeroDivisionError):  # too few cores, or none of a node
            theirs = set()
        assert binding.cpus == theirs


def test_what_is_said_of_ranks_that_are_not_bound(written: Written) -> None:
    """Once, by the first of them."""
    found = chosen(written(UNKNOWN), "node", {"own": "0,1,0"})
    told = unbound_lines(NumaOrder("node", None, "numa='node'"), found, first_rank=8)
    assert told == {0: "numa='node': ranks 8, 10 are not bound: this system does not say on which node 0000:10:00.0 is"}


def test_how_a_place_is_said(written: Written) -> None:
    """In ``mlaunch ps``; without nodes where the system does not say which there are."""
    assert str(chosen(written(FOUR_NODES), "socket", {"own": "2"})[0]) == "nodes 2-3, CPUs 8-15"
    assert str(chosen(written(BARE), "3", {"runtime": "cpu", "ranks": 1})[0]) == "CPU 3"


def test_threads_are_those_of_the_cpus_that_it_shares() -> None:
    four, eight = Binding(frozenset(range(4))), Binding(frozenset(range(8)))
    assert [threads_of(rank, [four, eight, eight]) for rank in range(3)] == [1, 3, 3]
    assert threads_of(0, [Binding(frozenset({0}))] * 5) == 1


def test_nodes_without_memory(tmp_path: Path) -> None:
    topology = Topology(str(GRACE.write(tmp_path)), range(8))
    assert topology.with_memory([3, 1, 0]) == [1, 0]
    put(tmp_path / "proc/self/status", "Name:\tx\nMems_allowed_list:\t0,2-5")
    assert topology.with_memory([1, 0]) == [0]


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-1", "1;2", "0x1", "1--2"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: a number, or a range"):
        own_process.cpus_of_list(text)


# Where devices are


class FakeNvml:
    """NVIDIA's library, of a machine with two devices; the second has two instances."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, works: bool = True) -> None:
        self.open = 0
        self._works = works

    def nvmlInit(self) -> None:
        if not self._works:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        of = {
            "nvmlDeviceGetCount": lambda: 3,
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetPciInfo": lambda index: SimpleNamespace(domain=0, bus=(2 - index) << 4, device=0),
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}".encode() if isinstance(index, int) else index,
            "nvmlDeviceGetName": lambda _: "H100",
            "nvmlDeviceGetMaxMigDeviceCount": lambda index: 7 * index,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._instance,
        }
        return of[name]

    def _handle(self, index: int) -> int:
        if index == 2:
            raise self.NVMLError("no permission")
        return index

    def _instance(self, _handle: int, index: int) -> str:
        if index > 1:
            raise self.NVMLError("not found")
        return f"MIG-{index}"


def test_instances_are_known_by_nvidias_library(tmp_path: Path) -> None:
    put(tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi2/access", "")
    nvml = FakeNvml()
    found = devices_of(str(TWO_SOCKETS.write(tmp_path)), lambda _: nvml)
    assert nvml.open == 0
    assert found == (
        PciDevice("cuda", "0000:10:00.0", ("GPU-1", "MIG-0", "MIG-1"), "H100"),
        PciDevice("cuda", "0000:20:00.0", ("GPU-0",), "H100"),
    )
    # Each instance shares its device's node with the others, also where a share is its own.
    seats = seats_of(2, found, "cuda", {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1"}, "MIG-1,MIG-0")
    halves = bindings(NumaOrder("exclusive", None, ""), seats, Topology(str(tmp_path), range(32)))
    assert [binding.cpus for binding in halves] == [
        own_process.cpus_of_list("4-7,20-23"),
        own_process.cpus_of_list("0-3,16-19"),
    ]


def test_devices_without_nvidias_library(tmp_path: Path) -> None:
    def lack(_name: str) -> Any:
        raise ImportError

    root = str(tmp_path)
    assert devices_of(root, lack) == ()
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        for name, value in {"vendor": vendor, "class": kind, "device": "0x2330"}.items():
            put(tmp_path / f"sys/bus/pci/devices/{address(number)}/{name}", value)
    for load in (lack, lambda _: FakeNvml(works=False)):
        assert devices_of(root, load) == (PciDevice("cuda", address(0), (), "0x2330"),)
    TWO_SOCKETS.write(tmp_path)
    (tmp_path / "dev/nvidia0").unlink()  # of a container that has seven of eight, whose numbers begin at 0
    assert [device.address for device in devices_of(root, lack)] == [address(number) for number in range(1, 8)]
    AMD.write(tmp_path / "amd")
    assert [(one.runtime, one.address, one.names) for one in devices_of(str(tmp_path / "amd"), lack)][1] == (
        "rocm", address(1), ("GPU-00000000000000a1",)
    )  # fmt: skip


def test_a_machine_of_an_engine_looks_for_its_own(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "ROOT", str(written(GRACE)))
    theirs = NumaOrder("node", "bind", "numa='node'", (PciDevice("cuda", "0000:01:00.0"),), (0, 1))
    own = member.part(theirs).section
    assert isinstance(own, NumaOrder)
    assert (own.mode, own.memory, own.allowed, len(own.devices)) == ("node", "bind", (), 4)


def test_lists_are_checked_where_the_ranks_will_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The caller of an engine has another machine's number of ranks, and no environment of theirs."""
    monkeypatch.setattr(numa_caller, "ROOT", str(tmp_path))
    cpu = min(os.sched_getaffinity(0))
    made = numa_caller.part(SimpleNamespace(numa=f"{cpu}", numa_memory=None), as_flag)
    there: Any = SimpleNamespace(local_world_size=2, context=SimpleNamespace(environ={}))
    here: Any = SimpleNamespace(local_world_size=2, context=SimpleNamespace(environ={"HOME": "/"}))
    made.planned(there)
    with pytest.raises(ValueError, match=f"--numa-binding {cpu}: 1 list.* of CPUs for 2 ranks on this machine"):
        made.planned(here)


def test_what_the_doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    said = {name: list(command.findings(str(machine.write(tmp_path / name)))) for name, machine in
            {"bare": BARE, "one": ONE_NODE, "unknown": UNKNOWN, "cpus": CPUS}.items()}  # fmt: skip
    assert said == {
        "bare": [(False, "this system does not say which CPUs are near which device, so numa= binds nothing")],
        "one": [(True, "one node with CPUs 0-7: every CPU is near every device")],
        "unknown": [
            (True, "node 0 has CPUs 0-3; node 1 has CPUs 4-7"),
            (False, "numa='node' would not bind the rank of cuda:0: this system does not say on which node "
                    "0000:10:00.0 is"),
            (True, "numa='node' would bind the rank of cuda:1 to node 1, CPUs 4-7"),
        ],
        "cpus": [
            (True, "node 0 has CPUs 0-3; node 1 has CPUs 4-7"),
            (True, "numa='node' would divide these nodes among ranks on CPUs"),
        ],
    }  # fmt: skip
