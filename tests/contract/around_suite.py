"""A suite of tests on ranks that use what is around a test; ``test_rank_tests_around.py`` runs it."""

from __future__ import annotations

from tests.contract import rank_suite

_CONFTEST = (
    rank_suite.CONFTEST
    + """
pytest_plugins = ["helping"]

def pytest_addoption(parser):
    parser.addoption("--mine", type=int)
"""
)

# A plugin of somebody's, which ranks do not load.
_MARKING = """
import pytest

def pytest_addoption(parser):
    parser.addini("set_by_file", "of a plugin")
    parser.addoption("--of-a-plugin", default="given")

def pytest_collection_modifyitems(items):
    for item in items:
        if "hooked" in item.name:
            item.add_marker(pytest.mark.ranks(2))
"""

_HELPING = """
def check(value):
    assert value == 1
"""

_BASE = """
import pytest, torch.distributed as dist

class Suite:
    @pytest.mark.ranks(2)
    def test_of_alias(self): assert dist.get_world_size() == 2

def make(number):
    class Made:
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("given", [number])
        def test_of_made(self, given): assert given == number
    return Made
"""

_TESTS = """
import logging, os, subprocess, sys, threading, unittest, warnings
import pytest, torch.distributed as dist
from mlaunch.pytest import rank_fixture
from base import Suite as TestSuite, make
import helping

TestOne, TestTwo = make(1), make(2)
on_ranks = pytest.mark.ranks(2)
seen = []

# Marks

def test_hooked(): assert dist.get_world_size() == 2
@pytest.mark.ranks(1)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=on_ranks)])
def test_param(size): assert dist.get_world_size() == size

@pytest.fixture
def marks(request): request.applymarker(on_ranks)
def test_marked_by_a_fixture(marks): assert dist.get_world_size() == 2

# Classes

class TestSetUp:
    @classmethod
    def setup_class(cls):
        cls.size, cls.lock, cls.found = 3, threading.Lock(), []
    @on_ranks
    def test_class_attribute(self):
        assert self.size == 3
        self.found.append(1)
    @on_ranks
    def test_stays(self): assert self.found == [1]
    @on_ranks
    def test_lock_of_class(self): assert self.lock

@pytest.fixture(scope="class")
def data(request):
    request.cls.data = 4
    yield
    del request.cls.data

@pytest.mark.usefixtures("data")
class TestData(unittest.TestCase):
    @on_ranks
    def test_request_cls(self): self.assertEqual(self.data, 4)

@on_ranks
class TestSelf:
    def setup_method(self): self.lock = threading.Lock()
    def test_lock_of_self(self): pass

# Fixtures on ranks

@rank_fixture(autouse=True)
def clean(request):
    seen.append(request.node.name)
    yield
    seen.remove(request.node.name)
@rank_fixture
def named(monkeypatch):
    monkeypatch.setenv("NAMED", "yes")
    yield
@on_ranks
@pytest.mark.usefixtures("named")
def test_without_names(request): assert seen == [request.node.name] and os.environ["NAMED"] == "yes"
@on_ranks
def test_torn_down(): assert "NAMED" not in os.environ and seen == ["test_torn_down"]

@rank_fixture
def library(): return pytest.importorskip("no_such_library")
@on_ranks
def test_skips_by_fixture(library): pass
@rank_fixture
def broken():
    assert dist.get_rank() == 5
@on_ranks
def test_setup_fails(broken): pass
@rank_fixture
def two():
    yield 1
    yield 2
@on_ranks
def test_two_yields(two): assert two == 1

@rank_fixture(scope="module")
def setting():
    os.environ["SETTING"] = "1"
    yield
    del os.environ["SETTING"]
@on_ranks
def test_setting(setting): assert os.environ["SETTING"] == "1"
@on_ranks
def test_setting_stays(setting): assert os.environ["SETTING"] == "1"

@rank_fixture
def file(tmp_path):
    yield
    (tmp_path.parent / f"ended-{dist.get_rank()}").touch()
@pytest.mark.ranks(2, fresh=True)
def test_fresh(file): pass
def test_ended_on_fresh_ranks(tmp_path): assert {f"ended-{rank}" for rank in (0, 1)} <= set(os.listdir(tmp_path.parent))

@on_ranks
class TestOwn:
    @rank_fixture
    def model(self):
        self.kept = [dist.get_rank()]
        return self
    def test_fixture_of_class(self, model): assert model is self and self.kept == [dist.get_rank()]
    @rank_fixture(scope="class")
    def wide(self, request):
        assert request.cls.__name__ == "TestOwn"
        return {}
    def test_wide_fixture(self, wide): wide["a"] = 1
    def test_wide_fixture_stays(self, wide): assert wide == {"a": 1}

# Values that another fixture changes

@pytest.fixture(scope="session")
def database(): return []
@pytest.fixture
def row(database, request): database.append(request.node.name)
@on_ranks
def test_database(database): database.append("here")
@on_ranks
def test_row(database, row): assert database == ["test_row"]
@on_ranks
def test_other_row(database, row): assert database == ["test_row", "test_other_row"]

# What pytest gives

@on_ranks
@pytest.mark.parametrize("a", [1])
def test_request(request, a):
    assert request.module is sys.modules[__name__] and request.function is test_request and request.cls is None
    assert request.fixturenames[-1] == "a" and request.scope == "function" and request.node.callspec.params == {"a": 1}
    assert "ranks" in request.keywords and request.path.name == "test_it.py" and request.getfixturevalue("a") == 1
    assert not hasattr(request, "param")
@on_ranks
def test_session(request): request.session
@on_ranks
def test_options(request, pytestconfig):
    assert pytestconfig.getoption("--mine") == 7 and request.config.getoption("--of-a-plugin") == "given"
    assert pytestconfig.getini("set_by_file") == "there"
@on_ranks
def test_mocker(mocker):
    mocker.patch("os.getcwd", return_value="/x")
    assert os.getcwd() == "/x"
@on_ranks
def test_class_mocker(class_mocker): pass
@on_ranks
def test_rewritten_helper(): helping.check(2)
@on_ranks
def test_subtests(subtests):
    for i in range(3):
        with subtests.test("odd", i=i):
            assert i % 2 == 0

# Outcomes, and what is told beside them

@on_ranks
class TestUnittest(unittest.TestCase):
    def test_skip_of_unittest(self): self.skipTest("not today")
@pytest.mark.ranks(512, device_type="cuda")
def test_many_devices(): pass
@on_ranks
def test_skip_raised(): raise unittest.SkipTest("nor tomorrow")

class Slow(UserWarning):
    def __init__(self, what, seconds):
        super().__init__(f"{what} took {seconds} s")
        self.seconds = seconds
    def __reduce__(self): raise TypeError("not so")
@on_ranks
def test_warns(): warnings.warn(Slow("x", 3))
@on_ranks
def test_leaves():
    for _ in range(2):
        subprocess.Popen(["sleep", "5"])
@on_ranks
def test_logs(caplog):
    logging.getLogger("a").info("informed")
    logging.getLogger("a").debug("not wanted")
    assert caplog.messages == ["informed"]
@on_ranks
def test_not_captured(capsys):
    print("captured")
    with capsys.disabled():
        print("not captured")
    print("again")
    assert capsys.readouterr().out == "captured\\nagain\\n"
"""

_EXAMPLES = """
import pytest, torch, torch.distributed as dist
pytest.importorskip("hypothesis")
from hypothesis import given, settings, strategies as st

pytestmark = pytest.mark.ranks(2)

@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_examples(x):
    t = torch.tensor([x])
    dist.all_reduce(t)
    assert int(t) == 2 * x

@given(x=st.integers())
def test_examples_fail(x):
    assert x < 10

@given(x=st.integers(0, 100))
def test_example_fails_here(x):
    assert x < 10 or dist.get_rank() == 0
    dist.barrier()
def test_next(): dist.barrier()
"""

FILES = {
    "conftest.py": _CONFTEST,
    "marking.py": _MARKING,
    "helping.py": _HELPING,
    "base.py": _BASE,
    "test_it.py": _TESTS,
    "test_examples.py": _EXAMPLES,
}
WITH_EXAMPLES = {"test_examples_fail", "test_example_fails_here"}
SKIP = {"test_skips_by_fixture", "test_skip_of_unittest", "test_many_devices", "test_skip_raised"}
FAIL = {
    "test_lock_of_class": r"TestSetUp.lock is a _thread.lock, which cannot be sent to the ranks .*rank_fixture",
    "test_lock_of_self": r"self.lock is a _thread.lock, which cannot be sent to the ranks .*rank_fixture",
    "test_setup_fails": r"assert 0 == 5",
    "test_two_yields": r"fixture function has more than one 'yield'",
    "test_session": r"request.session does not exist on a rank",
    "test_class_mocker": r"the fixture 'class_mocker' works only in pytest's process",
    "test_rewritten_helper": r"assert 2 == 1",
    "test_subtests": r"",
    "test_examples_fail": r"assert \d+ < 10",
    "test_example_fails_here": r"",
}
