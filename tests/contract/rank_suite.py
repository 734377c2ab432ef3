"""A suite of tests on ranks, as somebody might write it; ``test_rank_tests.py`` runs it and looks at the reports."""

from __future__ import annotations

CONFTEST = """
import json

class Odd:
    def __init__(self, value):
        self.value = value
    def __eq__(self, other):
        return self.value == other.value

def pytest_assertrepr_compare(op, left, right):
    if isinstance(left, Odd):
        return ["two odd ones:", f"   {left.value} {op} {right.value}"]

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        found = {"name": report.nodeid.rpartition("/")[2].partition("::")[2], "outcome": report.outcome,
                 "text": report.longreprtext, "sections": report.sections, "xfail": hasattr(report, "wasxfail"),
                 "properties": dict(report.user_properties), "where": report.nodeid.partition("/")[0]}
        if report.skipped and isinstance(report.longrepr, tuple):
            found["text"] = report.longrepr[2]
        with open("reports", "a") as file:
            file.write(json.dumps(found) + "\\n")
"""

MARKED = "pytestmark = pytest.mark.ranks(2)"

ASSERTIONS = """
import pytest
from conftest import Odd

{mark}

class Broken:
    def __repr__(self):
        raise ValueError("no")

def check(value):
    inner = [value, 2]
    assert inner == [1, 3], "with a message"

def test_dict(): assert {{"x": 1, "y": [1, 2]}} == {{"x": 1, "y": [1, 3]}}
def test_long(): assert list(range(100)) == list(range(1, 101))
def test_text(): assert "one\\ntwo\\n%s" == "one\\nzwei\\n%s"
def test_where(): assert len([1, 2]) == int("3") + 1
def test_in(): assert 4 in {{1, 2, 3}}
def test_helper(): check(1)
def test_raises():
    with pytest.raises(ValueError, match="x"):
        int("y")
def test_not_raised():
    with pytest.raises(ValueError):
        pass
def test_approx(): assert [1.0, 2.0] == pytest.approx([1.0, 2.1])
def test_own(): assert Odd(1) == Odd(2)
def test_fail(): pytest.fail("in words")
def test_repr(): assert not Broken()
def test_chain():
    try:
        {{}}["a"]
    except KeyError as error:
        raise RuntimeError("two") from error
def test_type(): "a" + 1
def test_argument(tmp_path): assert tmp_path is None
def test_bytes(): assert b"abc" == b"abd"
def test_set(): assert {{1, 2}} == {{2, 3}}
"""

SHARING = """
import os, pytest, torch, torch.distributed as dist

world = []

@pytest.mark.ranks(2)
def test_first(record_property):
    world.append(dist.group.WORLD)
    record_property("pid", os.getpid())

@pytest.mark.ranks(2)
def test_second(record_property):
    x = torch.ones(3) * dist.get_rank()
    dist.all_reduce(x)
    assert x[0] == 1 and dist.group.WORLD is world[0]
    record_property("pid", os.getpid())

@pytest.mark.ranks(2, fresh="group")
def test_group(record_property):
    dist.barrier()
    assert dist.group.WORLD is not world[0]
    record_property("pid", os.getpid())

@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("a", [5])
def test_sizes(a, record_property):
    record_property("size", dist.get_world_size() + a)

class TestMethods:
    def setup_method(self):
        self.value = 3

    @pytest.mark.ranks(2)
    def test_method(self):
        assert self.value == 3

    @pytest.mark.ranks(2)
    async def test_coroutine(self):
        assert dist.get_world_size() == 2

@pytest.mark.ranks(2, fresh="group")
@pytest.mark.parametrize("turn", range(4))
def test_groups_leave_no_descriptors(turn):
    dist.barrier()
    found.append(len(os.listdir("/proc/self/fd")))
    assert keeps_objects or found[1:] == [found[-1]] * turn

found, keeps_objects = [], tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

def test_without(): assert not dist.is_initialized()

@pytest.mark.ranks(512, device_type="cuda")
def test_too_few_devices(): pass

@pytest.mark.ranks(2, fresh=True)
def test_fresh(record_property):
    record_property("pid", os.getpid())
"""

OUTCOMES = """
import os, signal, warnings, pytest, torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

def test_skip(): pytest.skip("not today")
def test_some_skip():
    if dist.get_rank() == 1: pytest.skip("not today")
def test_skip_and_wait():
    if dist.get_rank() == 1: pytest.skip("not now")
    dist.barrier()
def test_import(): pytest.importorskip("no_such_module")
def test_xfail(): pytest.xfail("known")
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expected(): raise ValueError("known")
@pytest.mark.xfail(raises=KeyError)
def test_unexpected(): raise ValueError("other")
def test_one():
    if dist.get_rank() == 1: raise ValueError("boom")
    dist.barrier()
def test_different():
    print("said by", dist.get_rank())
    assert dist.get_rank() == 5
def test_warns(): warnings.warn("careful, both")
@pytest.mark.filterwarnings("error")
def test_error(): warnings.warn("is an error")
@pytest.mark.ranks(2, deadline=2)
def test_hang():
    while dist.get_rank() == 0: signal.pause()
    dist.barrier()
@pytest.mark.timeout(2)
def test_hang_of_timeout():
    while True: signal.pause()
def test_after_hang(): dist.barrier()
def test_killed():
    if dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
def test_next(): dist.barrier()
"""

LEAKS = """
import logging, os, random, signal, sys, threading, warnings
import mlaunch, pytest, torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2)
held = threading.Event()

def handle(): logging.getLogger().addHandler(logging.NullHandler())
def start_thread(): threading.Thread(target=held.wait, name="leaked", daemon=True).start()
def patch(monkeypatch): monkeypatch.setattr(os, "leaked", 1, raising=False)

LEAKS = {
    "variable": lambda: os.environ.__setitem__("LEAKED", "1"),
    "variable gone": lambda: os.environ.pop("PATH"),
    "patch": None,
    "path": lambda: sys.path.insert(0, "/leaked"),
    "directory": lambda: os.chdir("/"),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "grad": lambda: torch.set_grad_enabled(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "random": lambda: (random.random(), torch.rand(3)),
    "warnings": lambda: warnings.simplefilter("error"),
    "level": lambda: logging.getLogger().setLevel(1),
    "handler": handle,
    "signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "group": lambda: dist.new_group([0, 1]),
    "group of one": lambda: dist.get_rank() and dist.new_group([1], use_local_synchronization=True),
    "key": lambda: dist.distributed_c10d._get_default_store().set(f"leaked {dist.get_rank()}", ""),
    "umask": lambda: os.umask(0),
    "streams": lambda: setattr(sys, "stdout", None),
    "recursion": lambda: sys.setrecursionlimit(9999),
    "thread": start_thread,
    "nothing": lambda: None,
}
ORDER_COUNT = int(os.environ["ORDERS"])
ORDERS = [(seed, name) for seed in range(ORDER_COUNT) for name in random.Random(seed).sample(sorted(LEAKS), len(LEAKS))]

@pytest.mark.parametrize(("seed", "name"), ORDERS)
def test_leak(seed, name, record_property, monkeypatch):
    record_property("random", [random.random(), torch.rand(1).item(), os.getcwd(), os.environ["PATH"], sys.path])
    assert "LEAKED" not in os.environ and not hasattr(os, "leaked") and "/leaked" not in sys.path
    assert torch.get_default_dtype() is torch.float32 and torch.ones(1).device.type == "cpu"
    assert torch.is_grad_enabled() and not torch.is_anomaly_enabled() and torch.get_num_threads() == START[0]
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_float32_matmul_precision() == "highest"
    warnings.warn("is no error")
    assert logging.getLogger().level != 1 and sys.getrecursionlimit() != 9999
    assert not [one for one in logging.getLogger().handlers if type(one) is logging.NullHandler]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and sys.stdout is not None
    assert len(dist.distributed_c10d._world.pg_map) == 1 and START[1] == os.umask(0o22)
    assert not dist.distributed_c10d._get_default_store().check([f"leaked {dist.get_rank()}"])
    patch(monkeypatch) if name == "patch" else LEAKS[name]()

START = torch.get_num_threads(), os.umask(0o22)

def test_destroys(): dist.destroy_process_group()
def test_after_it(): dist.barrier()

@pytest.mark.parametrize("again", [1, 2, 3])
def test_groups_of_some_ranks(again):
    # named by their ranks, they would find what the test before has left under this name
    store = dist.distributed_c10d._get_default_store()
    assert not store.check([f"mine {dist.get_rank()}"])
    store.set(f"mine {dist.get_rank()}", "")
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    assert x.item() == 2 and mlaunch.comm.all_gather(dist.get_rank()) == [0, 1]
    mlaunch.comm.create_local_process_group()
    mlaunch.comm.synchronize(timeout=60)
    assert mlaunch.comm.all_gather(1, mlaunch.comm.get_local_process_group()) == [1, 1]
    if dist.get_rank() == 1: dist.new_group([1], use_local_synchronization=True)

@pytest.mark.xfail(strict=True, raises=ValueError)
def test_fails_before_a_group_on_one_rank():
    if dist.get_rank() == 1: raise ValueError("early")
    dist.new_group([0])
def test_a_group_after_it(): dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
def test_enters_alone():
    if dist.get_rank() == 1: dist.all_reduce(torch.ones(1), async_op=True)
def test_enters_next(): assert mlaunch.comm.all_gather(dist.get_rank()) == [0, 1]
"""

MEMORY = """
import os, pytest, torch

pytestmark = pytest.mark.ranks(2)
kept = []

def test_first(record_property): record_property("pid", os.getpid())
def test_collects(record_property):
    torch.ones(2**25)  # 128 MiB, and let go
    record_property("pid", os.getpid())
def test_keeps(record_property):
    kept.append(torch.ones(2**25))
    record_property("pid", os.getpid())
def test_next(record_property):
    record_property("pid", os.getpid())
    assert not kept
"""

FIXTURES = """
import logging, os, threading, warnings
import pytest, torch, torch.distributed as dist
from mlaunch.pytest import rank_fixture

torn = []

@pytest.fixture(scope="module")
def table(): return {"changed": 0, "large": torch.ones(10_000)}

@pytest.fixture
def lock(): return threading.Lock()

@pytest.fixture
def outside(monkeypatch):
    monkeypatch.setenv("OUTSIDE", "1")

@rank_fixture(scope="module", params=["a", "b"])
def group(request, table):
    yield [request.param, dist.get_rank(), table]
    torn.append(request.param)

@rank_fixture(ranks=1)
def saved(tmp_path):
    (tmp_path / "saved").write_text(str(dist.get_world_size()))
    return tmp_path / "saved"

@pytest.mark.ranks(2)
class TestOnRanks:
    def test_twins(self, monkeypatch, capfd, caplog, recwarn, request, record_property, outside):
        monkeypatch.setenv("INSIDE", "1")
        print("printed")
        assert capfd.readouterr().out == "printed\\n"
        logging.getLogger("x").warning("logged")
        assert "logged" in caplog.text
        warnings.warn("warned")
        assert len(recwarn) == 1
        assert request.node.name == "test_twins" and request.config.getoption("verbose") == 0
        assert os.environ["OUTSIDE"] == "1" and torn == []
        assert not request.config.get_terminal_writer().hasmarkup
        record_property("answer", 42)

    @pytest.mark.parametrize("turn", [0, 1])
    def test_held(self, table, turn):
        assert table["changed"] == turn and "INSIDE" not in os.environ and "OUTSIDE" not in os.environ
        table["changed"] += 1

    def test_rank_fixture(self, group, table):
        assert group[1] == dist.get_rank() and group[2] is table
        assert torn == ([] if group[0] == "a" else ["a"])

    def test_torn_down(self): assert torn == ["a"]
    def test_of_another_size(self, saved): assert saved.read_text() == "1" and dist.get_world_size() == 2
    def test_lock(self, lock): pass
    def test_factory(self, tmp_path_factory): pass
"""

COVERED = {
    "branches": """
def classify(value):
    if value > 0:
        return "positive"
    elif value < 0:
        return "negative"
    return "nothing"
""",
    "classes": """
class Model:
    scale = 2

    def forward(self, x):
        return x * self.scale

    def backward(self):
        raise NotImplementedError
""",
    "threads": """
import threading

def work(found):
    found.append(1)

def start():
    found = []
    thread = threading.Thread(target=work, args=(found,))
    thread.start()
    thread.join()
    return found
""",
    "errors": """
def load(path):
    try:
        return open(path).read()
    except FileNotFoundError:
        return None
    finally:
        path = None
""",
    "generators": """
def batches(items, size):
    while items:
        yield items[:size]
        items = items[size:]

def unused():
    return 1
""",
}

COVERING = """
import pytest
from covered import branches, classes, errors, generators, threads

{mark}

def test_branches(): assert branches.classify(1) == "positive"
def test_classes(): assert classes.Model().forward(2) == 4
def test_threads(): assert threads.start() == [1]
def test_errors(): assert errors.load("missing") is None
def test_generators(): assert list(generators.batches([1, 2, 3], 2)) == [[1, 2], [3]]
"""

CASES = """
import os, unittest, pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
class TestCases(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.pid, cls.group = os.getpid(), dist.new_group([0, 1])
    @classmethod
    def tearDownClass(cls):
        torn.append(dist.get_rank())
    def setUp(self):
        self.x = torch.ones(1)
    @pytest.fixture(autouse=True)
    def given(self, tmp_path):
        self.directory = tmp_path
    def test_all_reduce(self):
        dist.all_reduce(self.x, group=self.group)
        self.assertEqual(self.x.item(), 2)
    def test_in_class(self):
        self.assertEqual((self.pid, self.directory.exists()), (os.getpid(), True))
        dist.barrier(group=self.group)
    def test_fails(self): self.assertEqual([1, 2], [1, 3])
    def test_subtests(self):
        for i in range(3):
            with self.subTest(i=i): assert i != 1
    def test_skips(self): self.skipTest("not today")
    @unittest.skip("never")
    def test_never(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass

torn = []

class TestOther(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_torn_down(self): assert torn == [dist.get_rank()]
    def test_without(self): assert not dist.is_initialized()

@pytest.mark.ranks(2)
class TestAsync(unittest.IsolatedAsyncioTestCase):
    @classmethod
    def tearDownClass(cls):  # of the last class: no test of another one follows
        open(f"torn-{dist.get_rank()}", "w").close()
    async def test_coroutine(self): self.assertTrue(dist.is_initialized())
"""

LEASES = """
import os, signal
from pathlib import Path
import pytest
from mlaunch.pytest.caller import new_ranks

new_ranks._TERM = 0.0  # devices are given back as soon as another worker waits for them

def alone(folder):
    names = os.environ["MLAUNCH_LEASED"].split(",")
    if os.environ["RANK"] == "0":
        for name in names:
            os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
        signal.sigtimedwait([], 0.05)
        for name in names:
            os.unlink(folder / name)
    return names

@pytest.mark.parametrize("turn", range(3))
@pytest.mark.ranks(1, 2, device_type="toy", backend="gloo")
def test_has_devices_alone(turn, request, record_property):
    record_property("devices", alone(Path(request.config.rootpath)))

@pytest.mark.ranks(3, device_type="toy", backend="gloo")
def test_too_few_devices(): pass

@pytest.mark.ranks(2)
def test_on_cpus(): assert "MLAUNCH_LEASED" not in os.environ
"""

GIVEN_BACK = """
import os, signal, time
from pathlib import Path
import pytest
from mlaunch.leases.caller.acquisition import standing
from mlaunch.leases.caller.lease_directory import place
from mlaunch.pytest.caller import new_ranks

new_ranks._TERM = 0.0

def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

@pytest.fixture
def there(request): return lambda name: (Path(request.config.rootpath) / name).exists()

class TestKeeps:
    @pytest.mark.ranks(1, device_type="toy", backend="gloo")
    def test_takes(self, request): (Path(request.config.rootpath) / "taken").touch()
    def test_others_wait(self): wait_until(lambda: standing(place(os.environ))[1])
    def test_others_have_it(self, there): wait_until(lambda: there("had"))

class TestWaits:
    def test_it_is_taken(self, there): wait_until(lambda: there("taken"))
    @pytest.mark.ranks(2, device_type="toy", backend="gloo")
    def test_wants_all(self, request): (Path(request.config.rootpath) / "had").touch()
"""

ENDED_BY_ITS_DEADLINE = """
import pytest, torch.distributed as dist
from covered import waiting

@pytest.mark.ranks(2, deadline=1)
def test_waits():
    if dist.get_rank() == 0: waiting.wait()
    dist.barrier()
"""

WAITING = """
import atexit, signal, threading

def wait():
    atexit.register(threading.Event().wait)  # as of a library that waits for its peers: the rank will be killed
    waits = True
    while waits:
        signal.pause()
"""

TORCH_CASES = """
import os, pytest, torch, torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

Continuous = getattr(common_distributed, "MultiProcContinuousTest", None) or common_distributed.MultiProcContinousTest

@pytest.mark.ranks(2)
class TestProcesses(MultiProcessTestCase):
    @property
    def world_size(self): return 4  # the mark has another one
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def tearDown(self):
        super().tearDown()
        os.remove(self.file_name)
    def begin(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        x = torch.tensor([float(self.rank)])
        dist.all_reduce(x)
        self.assertEqual(x, torch.ones(1))
    def test_all_reduce(self): self.begin()
    def test_destroys(self):
        self.begin()
        dist.destroy_process_group()
    def test_fails_here(self):
        self.begin()
        if self.rank == 1: raise ValueError("boom")
        dist.barrier()
    def test_following(self): self.begin()
    def test_without_a_group(self): self.assertFalse(dist.is_initialized())
    def test_tensors(self): self.assertEqual(torch.ones(2), torch.zeros(2))
    @skip_if_lt_x_gpu(2)
    def test_gpus(self): pass

@pytest.mark.ranks(2)
class TestOwnProcess(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    @classmethod
    def _run(cls, rank, name, file, pipe, **options):
        self = cls(name)
        self.rank, self.file_name = rank, file
        store = dist.FileStore(file, self.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world_size)
        self.run_test(name, pipe)
        dist.barrier()
    def test_group_is_there(self): self.assertEqual((dist.get_rank(), dist.get_world_size()), (self.rank, 2))
    def test_fails_in_the_group(self): self.fail("really")

@pytest.mark.ranks(2)
class TestContinuous(Continuous):
    world_size, device_type = 2, "cpu"
    @classmethod
    def backend_str(cls): return "gloo"
    def test_1_group(self):
        x = torch.tensor([float(self.rank)])
        dist.all_reduce(x)
        self.assertEqual((x.item(), self.world_size), (1.0, 2))
    def test_2_fails(self): raise ValueError("bang")
    def test_3_next(self): dist.barrier()

@pytest.mark.ranks(2)
class TestThreads(common_distributed.MultiThreadedTestCase):
    def test_threads(self): pass

@pytest.mark.ranks(2)
def test_ranks_have_their_group(): dist.barrier()
"""

ASYNC = """
import asyncio, pytest, pytest_asyncio, torch.distributed as dist

pytestmark = [pytest.mark.ranks(2), pytest.mark.asyncio]

async def size():
    await asyncio.sleep(0)
    return dist.get_world_size()

@pytest_asyncio.fixture
async def given():
    await asyncio.sleep(0)
    yield 5

async def test_coroutine(given): assert (given, await size()) == (5, 2)
async def test_fails_awaiting(): assert await size() == 3

@pytest.mark.parametrize("wanted", [2])
class TestMethods:
    async def test_method(self, given, wanted): assert await size() == wanted
"""
