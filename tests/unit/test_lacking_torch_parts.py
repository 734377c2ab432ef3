"""What holds where a torch lacks what mlaunch takes of it beyond its documentation: that is told, the rest goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="its names are taken away from torch")

# Each case in a fork of one process: it takes names away from torch. There is a default group, and another one.
CASES = """
import contextlib, io, json, os, sys, traceback
from datetime import timedelta
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from mlaunch.comm.rank import exchange
from mlaunch.rank import in_step
from mlaunch.rendezvous import tcp_store
from mlaunch.torch_parts import lacking, operations, process_groups

ONE = torch.ones(1)

class Without:
    "A module without some names."
    def __init__(self, module, *names):
        self.module, self.names = module, names
    def __getattr__(self, name):
        if name in self.names:
            raise AttributeError(name)
        return getattr(self.module, name)

def the_registry():
    process_groups._c10d.cache_clear(), process_groups._world.cache_clear()
    torch.distributed.distributed_c10d = Without(dist.distributed_c10d, "_world", "_get_default_store")
    assert [*process_groups.by_name().values()] == [dist.group.WORLD]
    assert not process_groups.is_apart()
    in_step.begin_call(1)
    assert in_step.since_the_call()[in_step.GROUPS][1] is None  # which no rank is in step with
    assert len(in_step.entered().groups) == 1
    assert exchange._describe_group(dist.group.WORLD)
    process_groups.default_store().set("key", "value")
    told = lacking.everything()
    assert len(told) == 1 and "has no torch.distributed.distributed_c10d._world, so groups other than" in told[0], told
    assert torch.__version__ in told[0] and "2.6 to 2.15" in told[0]

def the_backends():
    kind = c10d.ProcessGroup
    del kind._device_types
    assert in_step.since_the_call()["0"][1] is None
    assert in_step.entered().groups == ()
    assert "ProcessGroup._device_types" in lacking.everything()[0]

def the_numbers():
    del c10d.ProcessGroup._get_sequence_number_for_group, c10d.Backend._get_sequence_number_for_group
    operations.watch()
    dist.all_reduce(ONE)
    assert in_step.since_the_call()["0 cpu"][1] is None
    assert [group.number for group in in_step.entered().groups if group.name == "0 cpu"] == [1]  # ours

def the_methods():
    del c10d.ProcessGroup.send, c10d.Work.wait
    told = lacking.everything()
    assert len(told) == 1 and "ProcessGroup.send, Work.wait, so nobody knows which operation" in told[0], told
    operations.watch()
    in_step.begin_call(1)
    assert in_step.since_the_call()[in_step.MESSAGES][1] is None
    assert in_step.entered().groups[0].number == 0 and in_step.entered().waits == ()

def the_limit_of_old_backends():
    "As NCCL's new backend: set_timeout alone."
    backend = process_groups.backends(OTHER)[0][0]
    if hasattr(backend, "set_timeout"):
        del c10d.ProcessGroupGloo._set_default_timeout
    held = process_groups.HeldLimits()
    held.hold(timedelta(days=9))
    assert backend.options._timeout == timedelta(days=9)
    held.give_back()
    assert backend.options._timeout == timedelta(seconds=7)

def any_limit():
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    process_groups.backends = lambda group: [(backend, ["cpu"])]
    held, said = process_groups.HeldLimits(), io.StringIO()
    with contextlib.redirect_stderr(said):
        held.hold(timedelta(days=9))
        held.give_back()
    words = "so groups that exist keep their time limits while somebody debugs"
    assert said.getvalue().count(words) == 1, said.getvalue()
    assert backend.options._timeout == timedelta(seconds=7)

def the_default_device():
    assert lacking.that_was_set() is None
    torch.set_default_device("meta")
    torch.utils._device = SimpleNamespace()
    assert lacking.that_was_set().type == "meta"
    torch.set_default_device("cpu")
    assert lacking.that_was_set() is None
    assert "CURRENT_DEVICE" in lacking.everything()[0]

def the_hosting_of_a_store():
    torchs = sys.modules["torch.distributed.rendezvous"]
    del torchs._create_c10d_store, torchs.TCPStore
    tcp_store.host_all_but("127.0.0.1", 1)
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # torch's own word for it
    tcp_store._do_without()

def the_recorder():
    "What torch has really recorded, as if a device had not done the last two."
    for _ in range(4):
        dist.all_reduce(ONE)
    real = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))
    for entry in real["entries"][-2:]:
        entry["retired"] = False
    backend = SimpleNamespace(_get_backend_name=lambda: "nccl2", _get_sequence_number_for_group=lambda: 4)
    process_groups.backends = lambda group: [(backend, ["cuda"])] if group is dist.group.WORLD else []
    process_groups.devices_of = lambda group: [torch.device("cuda")]
    c10d._dump_fr_trace_json = lambda **options: json.dumps(real) if options["backend"] == "nccl2" else 1 / 0
    [row] = in_step.entered().groups
    assert (row.name, row.number, row.completed) == ("0 cuda", 4, 2), row
    c10d._dump_fr_trace_json = lambda includeCollectives=True, onlyActive=False: 1 / 0  # as before torch 2.15
    assert in_step.entered().groups[0].completed is None
    backend._get_backend_name = lambda: "nccl"
    c10d._dump_nccl_trace_json = lambda **options: json.dumps(real)
    assert in_step.entered().groups[0].completed == 2
    real["entries"] = []
    assert in_step.entered().groups[0].completed == 4
    del c10d._dump_fr_trace_json, c10d._dump_nccl_trace_json
    assert in_step.entered().groups[0].completed is None
    assert "_dump_fr_trace_json, so mlaunch why does not say which device" in lacking.everything()[0]

def nothing():
    assert lacking.everything() == []

for case in (the_registry, the_backends, the_numbers, the_methods, the_limit_of_old_backends, any_limit,
             the_default_device, the_hosting_of_a_store, the_recorder, nothing):
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:  # each with its own group, whose threads no fork has
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            OTHER = dist.new_group([0], timeout=timedelta(seconds=7))
            in_step.begin_call(0)
            case()
            print(case.__name__, "ok", flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
os._exit(0)
"""


def test_each_part_does_without_what_it_takes_of_torch(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(CASES)
    names = re.findall(r"^def (\w+)\(\):$", CASES, re.MULTILINE)
    assert done.stdout.splitlines() == [f"{name} ok" for name in names], done.stderr


RANKS = """
import os
import mlaunch
from mlaunch import Ranks

def fail():
    raise ValueError("for once")

mlaunch.warm_up(preload=["taker"])
with Ranks(n_gpus=2, device_type="cpu") as ranks:
    before = ranks.run(os.getpid)
    try:
        ranks.run(fail)
    except ValueError:
        print("raised")
    print(bool(set(before) & set(ranks.run(os.getpid))))
"""


@pytest.mark.slow
def test_the_caller_is_warned_once_and_ranks_that_nobody_can_compare_are_not_kept(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "taker.py").write_text("from torch._C import _distributed_c10d as c10d\ndel c10d.ProcessGroup.recv\n")
    done = run_script(RANKS)
    assert done.stdout.split() == ["raised", "False"], done.stderr
    assert done.stderr.count("has no ProcessGroup.recv, so nobody knows which operation a rank waits for") == 1
