"""What a decorated function does on real processes when all goes well."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle.cloudpickle
import pytest
import torch
import torch.distributed as dist

import mlaunch
from mlaunch import launcher
from tests import builds, launches
from tests.conftest import ROOT
from tests.contract import functions
from tests.launches import Phase, board_here
from tests.processes import wait_until
from tests.system.network import free_port

pytestmark = pytest.mark.usefixtures("as_users_have_it")

METHODS = ("forkserver", "fork", "spawn")


@pytest.mark.parametrize("start_method", METHODS)
def test_ranks_reduce_and_return(start_method: str) -> None:
    assert launcher(functions.total, 2, start_method=start_method)() == [2.0, 2.0]


@pytest.mark.slow
def test_ranks_that_return_at_once_do_not_break_the_group_of_slower_ones() -> None:
    train = launcher(lambda: None, 8)
    for _ in range(4):
        assert train() == [None] * 8


def test_no_function_begins_before_all_have_joined() -> None:
    """One that ended the process at once would break the group of those that still join."""

    def joined() -> int:
        store = dist.distributed_c10d._get_default_store().underlying_store
        key = "mlaunch/joined" if hasattr(dist.TCPStore, "barrier") else "mlaunch/joined/0/count"
        return int(store.add(key, 0))

    assert launcher(joined, 3)() == [3, 3, 3]


def test_a_rank_that_returned_stays_until_all_have() -> None:
    """Its end would break a group that others are still making."""

    def train() -> str:
        board = board_here()
        if dist.get_rank() == 1 or board is None:
            return ""
        wait_until(lambda: board[1] in {Phase.RETURNED, Phase.LEAVING})
        return board[1].value

    assert launcher(train, 2)() == ["waiting for the others to return", ""]


def test_a_rank_that_waits_for_the_others_has_let_go_of_value_and_arguments() -> None:
    def train(given: set[int]) -> set[int]:
        store = dist.distributed_c10d._get_default_store()
        value = {dist.get_rank()}
        if dist.get_rank() == 1:
            weakref.finalize(value, store.set, "value", "")
            weakref.finalize(given, store.set, "argument", "")
        else:
            store.wait(["value", "argument"], timedelta(seconds=60))
        return value

    assert launcher(train, 2)({7}) == [{0}, {1}]


def test_a_group_of_one() -> None:
    assert launcher(functions.total, 1)() == [1.0]


def test_default_is_one_rank_per_usable_cpu() -> None:
    assert len(launcher(lambda: None, device_type="cpu")()) == len(os.sched_getaffinity(0))


def test_a_group_is_initialised_as_torchrun_would() -> None:
    def probe() -> tuple[object, ...]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
        return dist.get_rank(), dist.get_world_size(), dist.get_backend(), *(os.environ[name] for name in names)

    first, second = launcher(probe, 2)()
    assert first == (0, 2, "gloo", "0", "0", "2", "2", "127.0.0.1", "lo")
    assert second == (1, 2, "gloo", "1", "1", "2", "2", "127.0.0.1", "lo")


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_the_interface_of_one_machine_is_loopback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has chosen another: for all, or for this launch."""
    monkeypatch.delenv(name, raising=False)
    ask = launcher(lambda: os.environ[name], 2, device_type="cpu")
    assert ask() == ["lo"] * 2
    with mlaunch.Ranks(n_gpus=2, device_type="cpu") as ranks:
        assert ranks.run(lambda: os.environ[name]) == ["lo"] * 2
    assert ask.options(env={name: "lo,lo"})() == ["lo,lo"] * 2
    monkeypatch.setenv(name, "lo,lo")
    assert ask() == ["lo,lo"] * 2


def test_the_store_listens_on_loopback_only() -> None:
    def listening() -> list[str]:
        dist.barrier()
        rows = []
        for table in ("tcp", "tcp6"):
            with open(f"/proc/self/net/{table}") as file:
                rows += [line.split()[1] for line in list(file)[1:] if line.split()[3] == "0A"]
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        found = [row for row in rows if row.endswith(port)]
        dist.barrier()
        return found

    for found in launcher(listening, 2)():
        assert [address.split(":")[0] for address in found] == ["0100007F"]


@pytest.mark.parametrize("inherited", [None, "True"])  # by a caller that a rank of torchrun's has started
def test_ranks_host_a_store_at_a_port_of_their_own(inherited: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under mp.spawn; and env:// meets at the launch's own."""
    if inherited is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", inherited)
    port = free_port()

    def meet() -> list[bytes]:
        rank, heard = dist.get_rank(), []
        here = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        for url in (f"tcp://127.0.0.1:{port}", "env://", f"tcp://{here}"):
            store = next(iter(dist.rendezvous(url, rank, 2, timeout=timedelta(seconds=60))))[0]
            store.set(f"{url} {rank}", str(rank))
            heard.append(store.get(f"{url} {1 - rank}"))
        return heard

    assert launcher(meet, n_gpus=2, deadline=60)() == [[b"1"] * 3, [b"0"] * 3]


@pytest.mark.parametrize("start_method", METHODS)
def test_surroundings_are_those_of_the_call(
    start_method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("MLAUNCH_TEST_LATE", "yes")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    monkeypatch.syspath_prepend(str(tmp_path))

    def probe() -> tuple[object, ...]:
        return os.environ.get("MLAUNCH_TEST_LATE"), "HOME" in os.environ, os.getcwd(), sys.argv, sys.path[0]

    expected = ("yes", False, str(tmp_path), ["prog", "--flag"], str(tmp_path))
    assert launcher(probe, 1, start_method=start_method)() == [expected]


@pytest.mark.parametrize(("name", "value"), [("MLAUNCH_TEST_EXTRA", "1"), ("GLOO_SOCKET_IFNAME", "lo,lo")])
def test_env_option_adds_to_the_ranks_alone(name: str, value: str) -> None:
    """Also where ranks have a default of ours."""
    assert launcher(lambda: os.environ[name], 1, env={name: value})() == [value]
    assert name not in os.environ


def test_ranks_do_not_have_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need none, and all that they start would have it."""
    monkeypatch.setenv("MLAUNCH_TOKEN", "hush")
    assert launcher(lambda: os.environ.get("MLAUNCH_TOKEN"), 1)() == [None]
    assert launcher(lambda: os.environ.get("MLAUNCH_TOKEN"), 1, env={"MLAUNCH_TOKEN": "hush"})() == [None]


def test_settings_that_torch_reads_at_import_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def level() -> str:
        return str(dist.get_debug_level())

    assert launcher(level, 1)() == ["DebugLevel.OFF"]
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert launcher(level, 1)() == ["DebugLevel.DETAIL"]


def test_cores_are_shared_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launcher(torch.get_num_threads, 2)() == [share, share]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    said = launcher(lambda: (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()), 1)
    assert said() == [("3", 3)]
    assert said.options(env={"OMP_NUM_THREADS": "5,2"})() == [("5,2", 5)]
    assert said.options(env={"OMP_NUM_THREADS": "many"})()[0][0] == "many"


def test_devices_are_counted_in_a_process_of_their_own() -> None:
    server = launches.fork_server()
    assert server.count_devices(os.environ) == torch.accelerator.device_count()
    if server.ready().accelerator == "cuda":
        assert server.count_devices({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == 0


# How functions travel


def test_an_importable_function_is_imported_not_copied() -> None:
    assert functions.decorated(5) == [(5, True), (6, True)]
    assert functions.launched(4) == [40, 41]
    assert functions.counter == [0]


def test_closures_lambdas_and_local_classes_travel() -> None:
    tensor = torch.arange(3)

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    @functools.cache
    def tripled(factor: int) -> int:
        return 3 * factor

    def make(factor: int) -> tuple[torch.Tensor, Local, int]:
        return tensor * factor, Local(factor), tripled(factor)

    [(value, local, other)] = launcher(make, 1)(2)
    assert (value.tolist(), other) == ([0, 2, 4], 6)
    assert isinstance(local, Local)
    assert local.value == 2


def test_a_module_that_is_registered_travels_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For code that only the caller's machine has, as cloudpickle's users know it."""
    (tmp_path / "mine.py").write_text("answer = 1\ndef ask(): return answer\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine")
    mine.answer = 2  # type: ignore[attr-defined]
    assert launcher(mine.ask, 1)() == [1]
    cloudpickle.register_pickle_by_value(mine)
    try:
        assert launcher(mine.ask, 1)() == [2]
    finally:
        cloudpickle.unregister_pickle_by_value(mine)
        del sys.modules["mine"]


MINE = "scale = {}\nclass Net: pass\ndef train(x): return x * scale\ndef make(): return Net()\n"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes by value, of this test alone."""
    monkeypatch.setattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", set())


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads a module from the path of its file, as configurations and plugins are."""

    def load(name: str, scale: int) -> Any:
        path = tmp_path / f"{name}_{scale}.py"
        path.write_text(MINE.format(scale))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.usefixtures("registry")
def test_a_module_that_was_loaded_from_a_path_travels_by_value(loaded: Callable[..., Any]) -> None:
    module = loaded("exp_of_mine", 3)
    module.scale = 5
    assert launcher(module.train, 1)(2) == [10]
    assert type(launcher(module.make, 1)()[0]) is module.Net
    assert launcher(lambda x: (module.train(x), module.scale), 1)(2) == [(10, 5)]


@pytest.mark.usefixtures("registry")
def test_a_module_that_an_import_finds_elsewhere_travels_by_value(
    loaded: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config_of_mine.py").write_text(MINE.format(100))
    monkeypatch.syspath_prepend(tmp_path)
    module = loaded("config_of_mine", 3)
    assert launcher(module.train, 1)(2) == [6]
    del sys.modules["config_of_mine"]
    assert launcher(importlib.import_module("config_of_mine").train, 1)(2) == [200]


@pytest.mark.usefixtures("registry")
def test_a_module_whose_directory_has_left_the_path_travels_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_of_mine.py").write_text(MINE.format(7))
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        module = importlib.import_module("left_of_mine")
    try:
        assert launcher(module.train, 1)(2) == [14]
    finally:
        del sys.modules["left_of_mine"]


def test_a_function_that_mentions_modules_of_classes_of_their_own() -> None:
    """``torch.backends.cudnn`` and ``torch.ops`` are no plain modules, and cannot be pickled."""

    def train() -> tuple[bool, float]:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        total = torch.ops.aten.add(torch.ones(1), 2)
        return torch.backends.cudnn.benchmark, total.item()

    assert launcher(train, 2)() == [(True, 3.0)] * 2
    assert not torch.backends.cudnn.benchmark  # it is the rank's own


@pytest.mark.slow
def test_methods_keep_their_instance() -> None:
    model = functions.Model(1)
    assert model.fit(2) == [7, 7]
    assert model.fit.options(n_gpus=1)(2, twice=True) == [14]
    assert functions.Model.fit(model, 2) == [7, 7]
    assert functions.Model.of_class() == ["Model"]
    assert functions.Model.static() == ["static"]


def test_the_decorator_looks_like_its_function() -> None:
    decorated = functions.decorated
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Adds the rank."
    assert list(inspect.signature(decorated).parameters) == ["x"]
    assert list(inspect.signature(functions.Model(1).fit).parameters) == ["x", "twice"]
    assert inspect.unwrap(decorated).__name__ == "decorated"
    assert "n_gpus=2" in repr(decorated)


def test_a_launcher_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(functions.decorated)) is functions.decorated


def test_options_gives_a_copy() -> None:
    wide = functions.decorated.options(n_gpus=3)
    assert [value for value, _ in wide(0)] == [0, 1, 2]
    assert len(functions.decorated(0)) == 2


SCRIPT = """
import torch, sys
from mlaunch import launcher
import torch.distributed as dist, io

class Net(torch.nn.Linear):
    pass

@launcher(n_gpus=2)
def train(lr):
    net = Net(1, 1)
    torch.save(net, io.BytesIO())           # plain pickle must find the class in __main__
    everyone = [None, None]
    dist.all_gather_object(everyone, Net)
    return net, lr * dist.get_rank()

(a, x), (b, y) = train(0.5)
assert type(a) is Net and (x, y) == (0.0, 0.5), (type(a), x, y)
print("fine", __name__)
"""


def test_an_unguarded_script_with_its_own_classes(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(SCRIPT)
    assert (done.stdout, done.returncode) == ("fine __main__\n", 0), done.stderr


@pytest.mark.nightly
def test_code_piped_to_python() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.stdout == "fine __main__\n", done.stderr


def test_output_keeps_its_order_and_place(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(
        "from mlaunch import launcher\nprint('before')\nlauncher(lambda: print('within'), 1)()\nprint('after')\n"
    )
    assert done.stdout.splitlines() == ["before", "[0] within", "after"]


# Callers that no fork could serve


@pytest.mark.slow
def test_a_caller_with_threads_and_a_busy_openmp_pool() -> None:
    torch.ones(5_000_000).sum()
    launches.forget_warnings()  # an earlier test may have been warned
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        assert launcher(lambda: torch.ones(5_000_000).sum().item(), 2)() == [5e6, 5e6]
        forking = launcher(lambda: torch.ones(5_000_000).sum().item(), 2, start_method="fork")
        with pytest.warns(RuntimeWarning, match=r"start_method='fork' in a process with \d+ other thread") as seen:
            values = [forking(), forking()]  # the second is not warned of again
        assert values == [[5e6, 5e6]] * 2
        assert [warning.filename for warning in seen] == [__file__]
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.nightly
def test_a_busy_openmp_pool_of_a_library_anywhere(run_script, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """In an environment below "My Documents", say, or in a directory whose name is not UTF-8."""
    path = next((path for path in launches.mapped_files() if "libgomp" in path), None)
    if path is None:
        pytest.skip("this torch has another OpenMP than libgomp")
    folder = os.path.join(os.fsencode(tmp_path), b"M\xfcller 2")
    os.mkdir(folder)
    copied = os.fsdecode(shutil.copy(os.fsencode(path), folder))
    done = run_script(
        f"import ctypes\nctypes.CDLL({copied!r})\n"  # which torch then takes for its own
        "import torch\nfrom mlaunch import launcher\ntorch.ones(5_000_000).sum()\n"
        "assert any('2/libgomp' in row for row in open('/proc/self/maps', errors='replace'))\n"
        "sum_up = launcher(lambda: torch.ones(5_000_000).sum().item(), 1, start_method='fork', deadline=60)\n"
        "print(sum_up())\n",
        fresh=True,
    )
    assert done.stdout == "[5000000.0]\n", done.stderr


@pytest.mark.slow
def test_two_threads_get_their_own_results() -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(functions.launched, number) for number in range(8)]
        assert [call.result(60) for call in calls] == [[10 * n, 10 * n + 1] for n in range(8)]


@pytest.mark.slow
def test_a_launch_inside_a_rank() -> None:
    def outer() -> list[int]:
        return functions.launched.options(join=False)(dist.get_rank())

    assert launcher(outer, 1)() == [[0, 1]]


def test_a_launch_inside_a_rank_that_was_not_meant() -> None:
    with pytest.raises(
        RuntimeError, match=r"plain\(\) is called inside rank [01] of .*<lambda>\(\), which is"
    ) as caught:
        launcher(lambda: functions.launched(1), 2)()
    assert "call plain.__wrapped__(...); to start new ranks from here" in str(caught.value)
    assert launcher(lambda: functions.launched.__wrapped__(1), 2)() == [10, 11]


@pytest.mark.nightly
@builds.silent
def test_a_process_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It inherits RANK and its like, but launches as any other."""
    script = tmp_path / "script.py"
    script.write_text("""
from mlaunch import launcher
def train(x):
    import torch.distributed as dist
    return 10 * x + dist.get_rank()
print(launcher(train, 2)(3))
""")

    def train() -> str:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environ, check=False)
        return done.stdout + done.stderr

    assert launcher(train, 2)() == ["[30, 31]\n"] * 2


@pytest.mark.slow
def test_a_fork_of_the_caller_has_a_server_of_its_own() -> None:
    functions.launched(1)
    reader, writer = os.pipe()
    held = launches.lock_of_the_server()
    held.acquire()  # as another thread may, which the fork does not have
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            os.write(writer, repr(functions.launched(2)).encode())
            launches.end_server()
        finally:
            os._exit(0)
    held.release()
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as file:
        assert file.read() == "[20, 21]"
    assert functions.launched(1) == [10, 11]


def test_no_warning_is_raised_by_a_good_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert functions.launched(1) == [10, 11]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_objects_of_a_manager(start_method: str) -> None:
    """They know the processes of the caller by its key, which ranks have, as its children would."""

    def train(shared: Any) -> None:
        shared[dist.get_rank()] = "was here"

    with multiprocessing.get_context("fork").Manager() as manager:
        shared = manager.dict()
        launcher(train, 2, start_method=start_method)(shared)
        assert dict(shared) == {0: "was here", 1: "was here"}
