"""Wrong options fail in the caller's frame, before anything starts, with name, value and what is allowed."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc
import re
import traceback
from dataclasses import fields
from datetime import timedelta
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist

from mlaunch import launcher
from mlaunch.caller.launch import plan as planning
from mlaunch.caller.launch.plan import Attempt, ThisMachine, plan
from mlaunch.caller.options import option_text, option_types
from mlaunch.caller.options.launch_options import Options, about
from mlaunch.forkserver import children
from mlaunch.protocol.server_messages import Ready
from mlaunch.rank import device, launcher_variables
from tests.conftest import ROOT

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n_gpus": 0}, ValueError, "n_gpus=0: allowed: whole numbers from 1, or None"),
    ({"n_gpus": -1}, ValueError, "n_gpus=-1: allowed: whole numbers from 1, or None"),
    ({"n_gpus": True}, TypeError, "n_gpus=True: allowed: whole numbers from 1, or None"),
    ({"n_gpus": "2"}, TypeError, "n_gpus='2': allowed: whole numbers from 1, or None"),
    ({"world_size": 0}, ValueError, "world_size=0: allowed: whole numbers from 1, or None"),
    ({"rank_start": -1}, ValueError, "rank_start=-1: allowed: whole numbers from 0"),
    ({"port": 65536}, ValueError, "port=65536: allowed: whole numbers from 0 to 65535"),
    ({"master_ip": ""}, ValueError, "master_ip='': allowed: a name"),
    ({"device_type": 3}, TypeError, "device_type=3: allowed: a string"),
    ({"backend": 3}, TypeError, "backend=3: allowed: a string"),
    (
        {"n_gpus": 4, "world_size": 6, "rank_start": 4, "port": 1},
        ValueError,
        "rank_start=4 with n_gpus=4 and world_size=6: allowed: rank_start + n_gpus up to world_size",
    ),
    ({"rank_start": 1, "world_size": 4}, ValueError, "rank_start=1 with port=0: a machine that joins others must"),
    ({"start_method": "thread"}, ValueError, "start_method='thread': allowed: 'forkserver', 'fork', 'spawn'"),
    ({"devices": [0, 0]}, ValueError, "devices=[0, 0]: allowed: at least one device, each once"),
    ({"lease": 1}, TypeError, "lease=1: allowed: True, False"),
    ({"concurrent": 0}, ValueError, "concurrent=0: allowed: whole numbers from 1, or None"),
    ({"devices": range(4), "n_gpus": 2, "world_size": 4, "port": 1}, ValueError, "world_size=4 with a lease (lease=F"),
    ({"devices": []}, ValueError, "devices=[]: allowed: at least one device, each once"),
    ({"devices": "01"}, TypeError, "devices='01': allowed: a list of device numbers"),
    ({"devices": [0], "n_gpus": 2}, ValueError, "n_gpus=2 with devices=[0]: allowed: n_gpus=1, fewer"),
    ({"max_preemptions": -1}, ValueError, "max_preemptions=-1: allowed: whole numbers from 0"),
    (
        {"max_preemptions": 1},
        ValueError,
        "max_preemptions=1 without engine=: only an engine starts a call again",
    ),
    ({"numa": 0}, ValueError, "numa=0: allowed: 'node', 'socket', 'exclusive', 'core-complex', None, or CPUs of each"),
    (
        {"numa": "near"},
        ValueError,
        "numa='near': allowed: 'node', 'socket', 'exclusive', 'core-complex', None, or CPUs",
    ),
    (
        {"numa": "0-3;"},
        ValueError,
        "numa='0-3;': allowed: 'node', 'socket', 'exclusive', 'core-complex', None, or CPUs",
    ),
    ({"numa": "3-0"}, ValueError, "numa='3-0': allowed: 'node', 'socket', 'exclusive', 'core-complex', None, or"),
    ({"numa_memory": "bind"}, ValueError, "numa_memory='bind' without numa=: memory goes with the CPUs that a rank"),
    ({"numa": "node", "numa_memory": "near"}, ValueError, "numa_memory='near': allowed: 'preferred', 'bind', None"),
    ({"events": 3}, TypeError, "events=3: allowed: a function, the path of a file, 'otel', or None"),
    ({"events": ""}, ValueError, "events='': allowed: a function, the path of a file, 'otel', or None"),
    ({"profile": 3}, TypeError, "profile=3: allowed: the path of a file, or None"),
    ({"profile": ""}, ValueError, "profile='': allowed: the path of a file, or None"),
    ({"profile_steps": (8, 5)}, ValueError, r"profile_steps=(8, 5): allowed: two numbers of steps, from 0: the first"),
    ({"profile_steps": 5}, TypeError, "profile_steps=5: allowed: two numbers of steps, from 0: the first one and the"),
    ({"profile_ranks": [1, 1]}, ValueError, "profile_ranks=[1, 1]: allowed: at least one rank, each once"),
    ({"profile_ranks": 1}, TypeError, "profile_ranks=1: allowed: a list of ranks, or None for all"),
    ({"profile": "x", "keep": 5.0}, ValueError, "profile='x' with keep=: these ranks stay; allowed: a call with ranks"),
    ({"timeout": 0}, ValueError, "timeout=0: allowed: seconds, more than 0, or None for no limit"),
    ({"timeout": "1"}, TypeError, "timeout='1': allowed: a number of seconds"),
    ({"timeout": timedelta(0)}, ValueError, "allowed: seconds, more than 0, or None for no limit"),
    ({"deadline": 0}, ValueError, "deadline=0: allowed: seconds, more than 0, or None for no limit"),
    ({"max_restarts": -1}, ValueError, "max_restarts=-1: allowed: whole numbers from 0"),
    ({"stop_on": 15}, TypeError, "stop_on=15: allowed: names of signals with commas between them, or None"),
    ({"stop_on": "KILL"}, ValueError, "stop_on='KILL': KILL cannot ask a run to stop: no process can handle it"),
    ({"stop_on": "TERM,INT"}, ValueError, "stop_on='TERM,INT': INT cannot ask a run to stop: Ctrl-C ends a call at"),
    ({"stop_on": "TRM"}, ValueError, "stop_on='TRM': 'TRM' is no signal; allowed: names with commas, such as 'TERM,"),
    ({"stop_grace": 0}, ValueError, "stop_grace=0: allowed: seconds, more than 0"),
    ({"stall": -1}, ValueError, 'stall=-1: allowed: seconds, more than 0, also as "60 stop", which ends the run; or '),
    ({"stall": "60 halt"}, ValueError, "stall='60 halt': allowed: seconds, more than 0, also as"),
    ({"stall": True}, TypeError, "stall=True: allowed: seconds, more than 0, also as"),
    ({"slow": "x"}, ValueError, "slow='x': allowed: a share of the time, more than 0% and less than 100%, such as"),
    ({"slow": 1.5}, ValueError, "slow=1.5: allowed: a share of the time, more than 0% and less than 100%, such as"),
    ({"slow": "-1%"}, ValueError, "slow='-1%': allowed: a share of the time, more than 0% and less than 100%, such"),
    ({"slow": "nan%"}, ValueError, "slow='nan%': allowed: a share of the time, more than 0% and less than 100%, such"),
    ({"slow": True}, TypeError, "slow=True: allowed: a share of the time, more than 0% and less than 100%, such as"),
    ({"slow": "10%", "inline": True}, ValueError, "slow='10%' with inline=True: allowed: None; nothing but the"),
    ({"grace_period": -1}, ValueError, "grace_period=-1: allowed: seconds, 0 or more"),
    ({"deadline": float("inf")}, ValueError, "deadline=inf: allowed: a finite number of seconds"),
    ({"grace_period": float("nan")}, ValueError, "grace_period=nan: allowed: a finite number of seconds"),
    ({"env": {"A": 1}}, TypeError, "env={'A': 1}: allowed: names and values that are strings"),
    ({"env": {"": "1"}}, ValueError, "env={'': ...}: allowed: names that are not empty and without '=', and names and"),
    ({"env": {"A=B": "1"}}, ValueError, "env={'A=B': ...}: allowed: names that are not empty and without '='"),
    ({"env": {"A": "x\0y"}}, ValueError, "env={'A': ...}: allowed: names that are not empty"),
    ({"env": {"A": "\ud800"}}, ValueError, "env={'A': ...}: allowed: names that are not empty"),
    ({"results": "rank1"}, ValueError, "results='rank1': allowed: 'all', 'rank0'"),
    ({"n_gpu": 1}, TypeError, "launcher has no option 'n_gpu'; did you mean 'n_gpus'?"),
    ({"gpus": 1}, TypeError, "launcher has no option 'gpus'; did you mean 'n_gpus'?"),
    ({"devices": 4}, TypeError, "devices=4: allowed: a list of device numbers; for 4 ranks: n_gpus=4"),
    ({"debug": 1}, TypeError, 'debug=1: allowed: True, False, "debugpy", or with ranks "debugpy:0,2"'),
    ({"debug": "ipdb"}, ValueError, "debug='ipdb': allowed: True, False"),
    (
        {"debug": True, "keep": 5.0},
        ValueError,
        "keep=5.0 with debug=True: allowed: None; a debugger serves one call on",
    ),
    ({"debug": True, "n_gpus": 1, "world_size": 2}, ValueError, "world_size=2 with debug=True: allowed: ranks on this"),
    ({"inline": True, "debug": True}, ValueError, "debug=True with inline=True: allowed: False; nothing but the func"),
    ({"colour": 1}, TypeError, "launcher has no option 'colour'; help(launcher) lists what there is"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[str(options) for options, _, _ in WRONG])
def test_wrong_options(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    for use in (launcher, lambda **given: launcher(lambda: None, **given), launcher(lambda: None).options):
        with pytest.raises(kind) as caught:
            use(**options)  # type: ignore[operator]
        assert message in str(caught.value)
        assert caught.value.__cause__ is None
        entries = [entry.f_code for entry, _ in traceback.walk_tb(caught.value.__traceback__)]
        ours = [code.co_name for code in entries if code.co_filename.startswith(str(ROOT / "mlaunch"))]
        assert ours in (["__new__", "_checked"], ["options", "_checked"])  # and no deeper


# Each option is stated once


HINTS = get_type_hints(Options, localns={"KW_ONLY": object})  # of Python 3.10's own, it says that it is no type
TYPES = {field.name: HINTS[field.name] for field in fields(Options)}


def overloads_of_new() -> list[ast.FunctionDef]:
    tree = ast.parse((ROOT / "mlaunch" / "caller" / "launcher.py").read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__new__"]
    return [node for node in found if node.decorator_list]


def test_type_checkers_see_the_same_options() -> None:
    assert get_type_hints(option_types.AllOptions) == TYPES
    positional = [(field.name, field.type) for field in fields(Options) if not field.kw_only]
    assert len(overloads_of_new()) == 2
    for node in overloads_of_new():
        given = [(one.arg, ast.unparse(one.annotation or one)) for one in node.args.args[2:]]
        assert given == positional
        assert node.args.kwarg is not None
        assert ast.unparse(node.args.kwarg.annotation or node) == "Unpack[KeywordOptions]"
    assert not {name for name, _ in positional} & get_type_hints(option_types.KeywordOptions).keys()


def test_signatures() -> None:
    taken = inspect.signature(launcher).parameters
    assert list(taken) == ["func", *(field.name for field in fields(Options))]
    assert all(taken[field.name].default == field.default for field in fields(Options))
    assert all(taken[name].annotation == kind for name, kind in TYPES.items())
    launcher(*(one.default for one in taken.values() if one.kind is one.POSITIONAL_OR_KEYWORD))
    train = launcher(lambda lr, steps=1: lr * steps)
    assert list(inspect.signature(train).parameters) == ["lr", "steps"]
    changes = inspect.signature(train.options).parameters
    assert list(changes) == list(taken)[1:]
    assert {one.kind for one in changes.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_every_option_is_in_help_and_on_the_page() -> None:
    said = " ".join(pydoc.plain(pydoc.render_doc(launcher)).replace("|", " ").split())
    page = " ".join("\n".join(option_text.definitions()).split())
    for field in fields(Options):
        meaning = " ".join(about(field.name).meaning.split())
        assert f"{field.name}: {meaning} Default: {field.default!r}.".replace("|", " ") in said
        meaning = re.sub(r'"([a-z0-9:-]+)"', r'``"\1"``', meaning)
        assert f"``{field.name}`` {meaning} Default ``{field.default!r}``; allowed: " in page
    assert "**options: The fields" not in said


def test_tab_completes_options() -> None:
    completer = pytest.importorskip("IPython.core.completer", reason="IPython is not installed")
    ours = completer.IPCompleter(
        namespace={"launcher": launcher, "train": launcher(lambda steps: steps)}, use_jedi=False
    )
    for text, meant in (("launcher(n_g", "n_gpus="), ("train.options(max_", "max_restarts="), ("train(st", "steps=")):
        with completer.provisionalcompleter():
            assert meant in [found.text for found in ours.completions(text, len(text))]


def test_a_notebook_shows_one_frame_of_ours() -> None:
    ultratb = pytest.importorskip("IPython.core.ultratb", reason="IPython is not installed")
    for use in (lambda: launcher(n_gpu=2), lambda: launcher(lambda: None).options(seed="x")):
        try:
            use()
        except (TypeError, ValueError) as error:
            text = ultratb.VerboseTB().text(type(error), error, error.__traceback__)
        files = re.findall(r"^File .*?(\w+\.py)", re.sub(r"\x1b\[[\d;]*m", "", text), flags=re.MULTILINE)
        assert files == ["test_options.py", "test_options.py", "launcher.py"]


def test_the_docstring_may_be_missing() -> None:
    assert option_text.with_options(None) is None


# What surrounds the function


@launcher(n_gpus=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestReturnNotNoneWarning")
@pytest.mark.parametrize("word", ["one", "two"])
def test_marks_below_the_decorator_count(word: str) -> None:
    assert word in {"one", "two"}


def test_attributes_of_the_function() -> None:
    def train() -> None: ...

    vars(train).update(colour="red", options="theirs", last="theirs", _function="theirs", __wrapped__="theirs")
    ours = launcher(train, 1)
    assert (ours.colour, ours._function, ours.__wrapped__) == ("red", train, train)  # type: ignore[attr-defined]
    assert ours.last is None
    assert ours.options(n_gpus=1).colour == "red"  # type: ignore[attr-defined]


def test_positional_order_is_megengines() -> None:
    train = launcher(lambda: None, 2, 2, 0, "localhost", 0, "cpu", "gloo")
    given = train._options
    assert (given.n_gpus, given.world_size, given.rank_start, given.master_ip) == (2, 2, 0, "localhost")
    assert (given.port, given.device_type, given.backend) == (0, "cpu", "gloo")
    with pytest.raises(TypeError, match="launcher got n_gpus by position and by name"):
        launcher(lambda: None, 2, n_gpus=2)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="launcher takes the function and 7 options by position"):
        launcher(lambda: None, 2, 2, 0, "localhost", 0, "cpu", "gloo", [0])  # type: ignore[call-overload]


def test_a_launcher_at_a_prompt() -> None:
    """Shows what the function takes, and what was chosen."""

    def train(lr: float, epochs: int = 5, *, names: list[str] = ["name" * 100] * 100) -> None: ...

    class Model:
        @launcher
        def fit(self, x: int) -> None: ...

    shown = repr(launcher(train, 2, token="a secret of sixteen"))
    assert shown.startswith(f"<launcher of {train.__qualname__}(lr, epochs=5, *, names=['")
    assert shown.endswith("): n_gpus=2>")
    assert len(shown) < 300
    assert repr(Model().fit) == f"<launcher of {Model.__qualname__}.fit(x)>"
    assert repr(launcher(dict.fromkeys)).startswith("<launcher of dict.fromkeys(")  # type: ignore[call-overload]


def test_the_number_of_ranks_in_the_place_of_the_function() -> None:
    with pytest.raises(TypeError, match=re.escape("decorates a function, not 2; for 2 ranks: @launcher(n_gpus=2)")):
        launcher(2)  # type: ignore[call-overload]


@pytest.mark.parametrize("thing", [3, classmethod(len), staticmethod(len)])
def test_only_functions_can_be_decorated(thing: Any) -> None:
    with pytest.raises(TypeError, match="launcher decorates a function, not"):
        launcher(thing)


# What this machine, or one with accelerators, has

CPU = Ready("2.13", None, ("gloo",))
CUDA = Ready("2.13", "cuda", ("gloo", "nccl"), "nccl", "cuda")
OTHER = Ready("2.13", "toy", ("gloo",), None, "toy")
FOUR = planning.Accelerator("cuda", "cuda", 4)


def test_devices_that_this_machine_lacks_are_refused() -> None:
    if device.offered().accelerator is not None:
        pytest.skip("torch was built for an accelerator, so these are not errors here")
    with pytest.raises(
        ValueError, match=r"device_type='cuda': torch .* is built for CPUs only; allowed: 'auto', 'cpu'"
    ):
        launcher(lambda: None, 1, device_type="cuda")()
    with pytest.raises(ValueError, match=r"backend='nccl': torch .* offers gloo"):
        launcher(lambda: None, 1, backend="nccl")()
    with pytest.raises(ValueError, match=r"devices=\[0\]: ranks on CPUs have no device numbers; give n_gpus=1"):
        launcher(lambda: None, devices=[0])()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"world_size": 4},
            r"world_size=4 with 2 rank\(s\) on this machine: .*; give port= \(1 to 65535\), master_ip= and",
        ),
        ({"world_size": 1}, r"rank_start=0 with n_gpus=2 and world_size=1: allowed"),
        ({"join_timeout": 0}, "join_timeout=0: allowed: seconds, more than 0"),
        ({"heartbeat_timeout": -1}, "heartbeat_timeout=-1: allowed: seconds, more than 0"),
    ],
)
def test_machines_that_cannot_come_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        launcher(lambda: None, 2, **options)()


def test_a_token_is_never_shown() -> None:
    with pytest.raises(TypeError, match="token: allowed: a string that is not empty") as caught:
        launcher(lambda: None, token=b"hush")  # type: ignore[call-overload]
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(launcher(lambda: None, token="hush"))


def test_device_types() -> None:
    assert planning.choose_type("auto", CPU) == "cpu"
    assert planning.choose_type("auto", CUDA) == "cuda"
    assert planning.choose_type("cpu", CUDA) == "cpu"
    with pytest.raises(ValueError, match="allowed: 'auto', 'cuda', 'cpu'"):
        planning.choose_type("xpu", CUDA)


def test_backends() -> None:
    assert device.choose_backend(None, "cpu", CPU) == "gloo"
    assert device.choose_backend(None, "cuda", CUDA) == "cpu:gloo,cuda:nccl"
    assert device.choose_backend(None, "cpu", CUDA) == "gloo"
    assert device.choose_backend(None, "toy", OTHER) == "cpu:gloo"
    assert device.choose_backend("cpu:gloo,cuda:NCCL", "cuda", CUDA) == "cpu:gloo,cuda:nccl"
    with pytest.raises(ValueError, match=r"backend='mpi': torch 2.13 offers gloo, nccl"):
        device.choose_backend("mpi", "cuda", CUDA)


@pytest.mark.parametrize(("kind", "own"), [(None, None), ("cuda", "gloo"), ("xpu", None), ("toy", None)])
def test_a_torch_without_the_backend_of_its_accelerator(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, own: str | None
) -> None:
    """As one for CUDA without NCCL. gloo takes CUDA's tensors, and no other accelerator's."""
    if dist.is_nccl_available():
        pytest.skip("this torch has NCCL")
    monkeypatch.setattr(device, "accelerator", lambda: kind)
    offered = device.offered()
    assert (offered.own_backend, offered.runtime) == (own, kind)


@pytest.mark.parametrize(
    ("n_gpus", "devices", "shown", "size", "visible"),
    [
        (None, None, "", 4, "0,1,2,3"),
        (2, None, "", 2, "0,1"),
        (None, [3, 1], "", 2, "3,1"),
        (None, [1], "5,7,2,0", 1, "7"),
        (2, None, "GPU-aa, GPU-bb,GPU-cc,GPU-dd", 2, "GPU-aa,GPU-bb"),
        (None, [1], "MIG-aa,MIG-bb/0/1", 1, "MIG-bb/0/1"),
    ],
)
def test_picked_devices_are_the_only_visible_ones(
    n_gpus: int | None, devices: list[int] | None, shown: str, size: int, visible: str
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": shown} if shown else {}
    placed = planning.place_on_accelerators(FOUR, n_gpus, devices, environ)
    assert placed == planning.DeviceChoice("cuda", size, visible)


@pytest.mark.parametrize(
    ("environ", "visible", "shown"),
    [
        ({}, "1", {"HIP_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "4,5"}, "5", {"HIP_VISIBLE_DEVICES": "5"}),
        ({"CUDA_VISIBLE_DEVICES": "6,7"}, "7", {"HIP_VISIBLE_DEVICES": "7", "CUDA_VISIBLE_DEVICES": "7"}),
        (
            {"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "6,7"},
            "5",
            {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"},
        ),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, "1", {"HIP_VISIBLE_DEVICES": "1"}),
        ({"ROCR_VISIBLE_DEVICES": "2,3,4", "HIP_VISIBLE_DEVICES": "0,2"}, "2", {"HIP_VISIBLE_DEVICES": "2"}),
        (
            {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"},
            "1",
            {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"},
        ),
    ],
)
def test_picked_devices_of_rocm(environ: dict[str, str], visible: str, shown: dict[str, str]) -> None:
    """HIP's variable wins over CUDA's, and counts what the one below it leaves; torch's own counting says so, too."""
    accelerator = planning.Accelerator("cuda", "rocm", 2)
    placed = planning.place_on_accelerators(accelerator, None, [1], environ)
    assert placed == planning.DeviceChoice("cuda", 1, visible)
    assert planning.shown(accelerator, [1], environ) == shown
    assert device.only(1, environ, "rocm") == shown


def test_ranks_on_rocm_see_their_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HIP_VISIBLE_DEVICES": "4,5"}
    ready = Ready("2.13", "cuda", ("gloo", "nccl"), "nccl", "rocm")
    spec = plan(Options(devices=[1]), ThisMachine(ready, lambda _environ: 2), "train()", environ, Attempt(0, None))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launcher_variables.of_rank(spec, 0, "127.0.0.1", 1)["HIP_VISIBLE_DEVICES"] == "5"
    assert "CUDA_VISIBLE_DEVICES" not in launcher_variables.of_rank(spec, 0, "127.0.0.1", 1)
    assert spec.device(0) == "cuda:5"
    assert device.runtime_of("cuda") == "rocm"


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match=r"n_gpus=5: only 4 cuda device\(s\) are visible here; allowed: 1 to 4, or"):
        planning.place_on_accelerators(FOUR, 5, None, {})
    with pytest.raises(ValueError, match=r"devices=\[0, 4\]: \[4\] do not exist; the 4 visible cuda device\(s\) are"):
        planning.place_on_accelerators(FOUR, None, [0, 4], {})


def test_each_rank_sees_its_own_mig_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process the first of those that it is given, so they are counted by their names."""
    instances = {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb,MIG-cc/1/0"}
    for name, value in instances.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    assert children._count() == 3
    assert children._names(3) == ("MIG-aa", "MIG-bb", "MIG-cc/1/0")
    ready = Ready("2.13", "cuda", ("gloo", "nccl"), "nccl", "cuda")
    spec = plan(Options(devices=[2, 0]), ThisMachine(ready, lambda _environ: 3), "train()", instances, Attempt(0, None))
    seen = [launcher_variables.of_rank(spec, rank, "127.0.0.1", 1)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)]
    assert seen == ["MIG-cc/1/0", "MIG-aa"]
    taken: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert [device.bind(spec, rank) for rank in (0, 1)] == [torch.device("cuda", 0)] * 2
    assert taken == [0, 0]
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert children._count() == 0


def test_a_token_that_is_no_utf_8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may hold any bytes."""
    machines: dict[str, Any] = {"n_gpus": 1, "world_size": 2, "port": 1, "master_ip": "127.0.0.1"}
    monkeypatch.setenv("MLAUNCH_TOKEN", os.fsdecode(b"hush\xff"))
    cases: list[tuple[dict[str, Any], str]] = [({}, "MLAUNCH_TOKEN"), ({"token": "hush\udcff"}, "token=")]
    for options, name in cases:
        with pytest.raises(ValueError, match=rf"^{name} is not valid UTF-8, so the machines of a") as caught:
            launcher(lambda: None, **machines, **options)()
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize("given", ["[::1]", "::1"])
def test_brackets_of_an_address_are_those_of_urls(given: str) -> None:
    ready, options = Ready("2.13.0", None, ("gloo",)), Options(n_gpus=1, world_size=2, port=29500, master_ip=given)
    spec = plan(options, ThisMachine(ready, lambda _environ: 0), "train()", {}, Attempt(0, None))
    assert spec.cluster is not None
    assert spec.cluster.master_ip == "::1"
