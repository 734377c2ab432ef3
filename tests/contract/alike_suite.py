"""What pytest's documentation shows of fixtures, marks, capturing and logging, in our own words.

``test_rank_tests_alike.py`` runs all of it twice, without ranks and on one rank each, and compares what pytest reports.
"""

from __future__ import annotations

_CONFTEST = """
import json, os
import pytest

if "ON_RANKS" in os.environ:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items):
        for item in items:
            if isinstance(item, pytest.Function):
                item.add_marker(pytest.mark.ranks(1))

def pytest_runtest_logreport(report):
    found = {"name": report.nodeid, "when": report.when, "outcome": report.outcome, "text": report.longreprtext,
             "sections": report.sections, "reason": getattr(report, "wasxfail", None),
             "properties": report.user_properties}
    if isinstance(report.longrepr, tuple):
        found["text"] = str(report.longrepr)
    with open(os.path.join(os.path.dirname(__file__), "phases"), "a") as file:
        file.write(json.dumps(found, default=str) + "\\n")

def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true")
    parser.addini("who", "whom to greet", default="world")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long")
    config.addinivalue_line("markers", "data(value): for a fixture")

def pytest_runtest_setup(item):
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("needs --slow")

class Money:
    def __init__(self, amount): self.amount = amount
    def __eq__(self, other): return self.amount == other.amount
    def __repr__(self): return f"Money({self.amount})"

def pytest_assertrepr_compare(op, left, right):
    if isinstance(left, Money) and isinstance(right, Money) and op == "==":
        return ["amounts:", f"   {left.amount} != {right.amount}"]

@pytest.fixture
def name(): return "conftest"

@pytest.fixture(scope="session")
def session_list(): return []

@pytest.fixture
def order(): return []
"""

_FIXTURES = """
import os, sys
import pytest

class Fruit:
    def __init__(self, name): self.name = name
    def __eq__(self, other): return self.name == other.name
    def __repr__(self): return f"<{self.name}>"

@pytest.fixture
def apple(): return Fruit("apple")
@pytest.fixture
def bowl(apple): return [apple, Fruit("pear")]
def test_asks_for_values(apple, bowl): assert apple in bowl
def test_shows_values_that_fail(apple, bowl): assert apple not in bowl

@pytest.fixture
def first(): return "a"
@pytest.fixture
def letters(first): return [first]
def test_a_list_of_its_own(letters):
    letters.append("b")
    assert letters == ["a", "b"]
def test_another_list(letters):
    letters.append(2)
    assert letters == ["a", 2]
@pytest.fixture
def expected(): return ["a", "b", 3.0]
def test_several_fixtures(letters, expected):
    letters += ["b", 3.0]
    assert letters == expected

@pytest.fixture(autouse=True)
def always(order): order.append("always")
@pytest.fixture
def then(order): order.append("then")
def test_autouse_first(order, then): assert order == ["always", "then"]
@pytest.fixture
def add_first(order, first): return order.append(first)
def test_value_once_for_a_test(add_first, order, first): assert order == ["always", first]

@pytest.fixture(scope="module")
def connection():
    found = {"open": True}
    yield found
    print("connection closed")
    found["open"] = False
def test_module_scope(connection):
    assert connection["open"]
    connection["used"] = 1
def test_module_scope_is_shared(connection): assert connection["used"] == 1
def test_module_scope_fails(connection): assert not connection["open"]

@pytest.fixture(scope="class")
def counter(): return {"n": 0}
class TestScope:
    def test_counts(self, counter):
        counter["n"] += 1
        assert counter["n"] == 1
    def test_counts_on(self, counter):
        counter["n"] += 1
        assert counter["n"] == 2
class TestScopeOfOther:
    def test_counts_anew(self, counter): assert counter["n"] == 0

@pytest.fixture
def box():
    print("filled")
    yield ["thing"]
    print("emptied")
def test_yield(box):
    print("used")
    assert box == ["thing"]
def test_yield_fails(box): assert box == []

@pytest.fixture
def with_finalizer(request):
    request.addfinalizer(lambda: print("finalized"))
    return 1
def test_finalizer(with_finalizer): assert with_finalizer == 1
@pytest.fixture
def finalizer_fails(request):
    def fail(): raise ValueError("at the end")
    request.addfinalizer(fail)
def test_finalizer_fails(finalizer_fails): pass
@pytest.fixture
def setup_fails(): raise ValueError("at the beginning")
def test_setup_fails(setup_fails): pass
@pytest.fixture
def setup_skips(): pytest.skip("by a fixture")
def test_setup_skips(setup_skips): pass
@pytest.fixture
def ends_badly():
    yield
    assert 1 == 2
def test_ends_badly(ends_badly): pass
def test_no_such_fixture(nothing_of_this_name): pass

server = "example.org"
@pytest.fixture
def address(request): return getattr(request.module, "server", "none")
def test_request_module(address): assert address == "example.org"
@pytest.fixture
def marked(request):
    mark = request.node.get_closest_marker("data")
    return None if mark is None else mark.args[0]
@pytest.mark.data(42)
def test_data_of_a_mark(marked): assert marked == 42
def test_no_data_of_a_mark(marked): assert marked is None

@pytest.fixture
def make_record():
    made = []
    def make(name):
        made.append(name)
        return {"name": name}
    yield make
    print("made", len(made))
def test_factory(make_record): assert make_record("x")["name"] == "x"

@pytest.fixture(params=["red", "blue"])
def color(request): return request.param
def test_params(color): assert color in ("red", "blue")
def test_params_fail(color): assert color == "red"
@pytest.fixture(params=[0, 1], ids=["zero", "one"])
def number(request): return request.param
def test_ids(number): assert number < 2
@pytest.fixture(params=[0, 1], ids=lambda value: f"is{value}" if value else None)
def numbered(request): return request.param
def test_ids_by_function(numbered): assert numbered < 2
@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.skip)])
def skipped_param(request): return request.param
def test_marks_of_params(skipped_param): assert skipped_param == 0
def test_product(color, number): assert color != number
@pytest.fixture
def app(color): return {"color": color}
def test_params_below(app): assert app["color"]

@pytest.fixture
def clean_directory(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)
@pytest.mark.usefixtures("clean_directory")
class TestUseFixtures:
    def test_begins_empty(self):
        assert os.listdir(os.getcwd()) == []
        open("file", "w").close()
    def test_begins_empty_again(self): assert os.listdir(os.getcwd()) == []

def test_conftest(name): assert name == "conftest"
class TestOverride:
    @pytest.fixture
    def name(self, name): return f"class of {name}"
    def test_override(self, name): assert name == "class of conftest"
@pytest.mark.parametrize("name", ["direct"])
def test_override_by_a_parameter(name): assert name == "direct"
@pytest.fixture(name="renamed")
def _fixture_with_another_name(): return 5
def test_renamed(renamed): assert renamed == 5
def test_session_scope(session_list):
    session_list.append(1)
    assert session_list == [1]
@pytest.fixture(scope="session")
def session_name(session_list): return str(type(session_list))
def test_session_of_session(session_name): assert "list" in session_name
@pytest.fixture
def by_name(request): return request.getfixturevalue("first")
def test_getfixturevalue(by_name): assert by_name == "a"
def test_getfixturevalue_in_a_test(request): assert request.getfixturevalue("first") == "a"
def test_request_of_a_test(request):
    assert request.node.name == "test_request_of_a_test" and request.function is test_request_of_a_test
    assert request.module.__name__ == __name__ and request.cls is None and request.scope == "function"
def test_adds_a_finalizer(request): request.addfinalizer(lambda: print("finalized by the test"))
def test_config(pytestconfig, request):
    assert pytestconfig.getini("who") == "world" and not request.config.getoption("--slow")
def test_session_of_request(request): assert request.session.testsfailed >= 0
def test_properties(record_property): record_property("key", [1, 2])
def test_testsuite_property(record_testsuite_property): record_testsuite_property("key", "value")
def test_cache(cache): assert cache.get("none/of", 3) == 3
def test_tmp_path(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file.txt").write_text("content")
    assert (tmp_path / "sub" / "file.txt").read_text() == "content" and len(list(tmp_path.iterdir())) == 1
@pytest.fixture(scope="session")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "image"
    path.write_bytes(b"x")
    return path
def test_tmp_path_factory(image): assert image.read_bytes() == b"x"
def test_tmp_path_factory_itself(tmp_path_factory): assert tmp_path_factory.mktemp("a").is_dir()
def test_doctest_namespace(doctest_namespace): assert doctest_namespace == {}

@pytest.fixture(scope="class")
def on_class(request): request.cls.size = 3
@pytest.mark.usefixtures("on_class")
class TestOnClass:
    def test_size(self): assert self.size == 3
class TestSelf:
    @pytest.fixture(autouse=True)
    def prepare(self): self.prepared = "yes"
    def test_prepared(self): assert self.prepared == "yes"
"""

_MARKS = """
import sys
import pytest

@pytest.mark.parametrize(("text", "wanted"), [("3+5", 8), ("2+4", 6), ("6*9", 42)])
def test_eval(text, wanted): assert eval(text) == wanted
@pytest.mark.parametrize("value", [1, pytest.param(2, marks=pytest.mark.xfail), pytest.param(3, id="three")])
def test_param_marks(value): assert value != 2
@pytest.mark.parametrize("x", [0, 1])
@pytest.mark.parametrize("y", [2, 3])
def test_stacked(x, y): assert x < y
@pytest.mark.parametrize(("n", "wanted"), [(1, 2), (3, 4)])
class TestOfClass:
    def test_plus_one(self, n, wanted): assert n + 1 == wanted
    def test_weird(self, n, wanted): assert (n * 1) + 1 == wanted
@pytest.mark.parametrize("value", [])
def test_no_parameters(value): pass
@pytest.fixture
def tripled(request): return request.param * 3
@pytest.mark.parametrize("tripled", ["a", "b"], indirect=True)
def test_indirect(tripled): assert len(tripled) == 3
@pytest.mark.parametrize(("tripled", "plain"), [("a", "b")], indirect=["tripled"])
def test_partly_indirect(tripled, plain): assert (tripled, plain) == ("aaa", "b")
@pytest.mark.parametrize("value", [b"bytes", None, True, 1.5, int, "text"])
def test_ids(value): assert value != 7
def pytest_generate_tests(metafunc):
    if "generated" in metafunc.fixturenames:
        metafunc.parametrize("generated", [1, 2], ids=["a", "b"])
def test_generated(generated): assert generated == 1

@pytest.mark.skip(reason="not yet")
def test_skip(): pass
@pytest.mark.skip
def test_skip_without_a_reason(): pass
def test_skip_inside(): pytest.skip("inside")
@pytest.mark.skipif(sys.version_info < (4,), reason="needs 4")
def test_skipif(): pass
@pytest.mark.skipif(False, reason="never")
def test_skipif_not(): pass
minimum = pytest.mark.skipif("sys.version_info < (4,)", reason="by text")
@minimum
def test_skipif_text(): pass
@pytest.mark.skipif(True, reason="all of it")
class TestSkipped:
    def test_one(self): pass
    def test_two(self): pass
def test_importorskip(): pytest.importorskip("no_such_module_at_all")
def test_importorskip_there(): assert pytest.importorskip("json").dumps(1) == "1"
@pytest.mark.xfail
def test_xfail(): assert False
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_xpass_strict(): pass
@pytest.mark.xfail(reason="known")
def test_xfail_reason(): assert 1 == 2
@pytest.mark.xfail("hasattr(sys, 'version')")
def test_xfail_condition_text(): assert 0
@pytest.mark.xfail(sys.platform == "plan9", reason="there")
def test_xfail_condition_false(): pass
@pytest.mark.xfail(raises=IndexError)
def test_xfail_raises():
    [][1]
@pytest.mark.xfail(raises=KeyError)
def test_xfail_raises_other():
    [][1]
@pytest.mark.xfail(run=False)
def test_xfail_not_run(): raise SystemExit
def test_xfail_inside(): pytest.xfail("inside")
def test_fail_inside(): pytest.fail("in words", pytrace=False)
@pytest.fixture
def expects_failure(request): request.applymarker(pytest.mark.xfail(reason="by a fixture"))
def test_applymarker(expects_failure): assert 0
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.slow
class TestSlow:
    def test_one(self): pass
def test_marks_of_request(request):
    request.applymarker(pytest.mark.data(1))
@pytest.mark.data(1)
@pytest.mark.data(2)
def test_iter_markers(request): assert [mark.args for mark in request.node.iter_markers("data")] == [(2,), (1,)]
@pytest.mark.data(3)
class TestMarks:
    pytestmark_of = 1
    @pytest.mark.data(4)
    def test_nearest(self, request): assert request.node.get_closest_marker("data").args == (4,)
    def test_keywords(self, request): assert "data" in request.keywords and "slow" not in request.keywords
def test_not_raised():
    with pytest.raises(ValueError):
        pass
def test_raises_match():
    with pytest.raises(ValueError, match=r".* 12 .*"):
        raise ValueError("Exception 12 raised")
def test_raises_other():
    with pytest.raises(ValueError):
        {}["a"]
def test_excinfo():
    with pytest.raises(RuntimeError) as caught:
        def f(): f()
        f()
    assert "recursion" in str(caught.value)
def test_raises_group():
    group = getattr(pytest, "RaisesGroup", None) or pytest.skip("an older pytest")
    with group(ValueError):
        raise ExceptionGroup("", [ValueError()])
def test_raises_system_exit(): raise SystemExit(3)
def test_not_a_none(): return 5
"""

_ASSERT = """
import pytest
from conftest import Money

def f(): return 3
def test_call(): assert f() == 4
def test_attribute():
    class Foo: b = 1
    i = Foo()
    assert i.b == 2
def test_message(): assert f() % 2 == 0, "value was odd, should be even"
def test_sets(): assert set("1308") == set("8035")
def test_lists(): assert [0] * 100 + [1] == [0] * 100 + [2]
def test_dicts(): assert {"a": 0, "b": 1, "c": 0} == {"a": 0, "b": 2, "d": 0}
def test_text(): assert "foo 1 bar" == "foo 2 bar"
def test_lines(): assert "foo\\nspam\\nbar" == "foo\\neggs\\nbar"
def test_not_in(): assert "foo" not in "some text with foo inside"
def test_own(): assert Money(1) == Money(2)
def test_approx(): assert 0.1 + 0.2 == pytest.approx(0.3)
def test_approx_fails(): assert {"a": 0.1} == {"a": pytest.approx(0.2)}
def test_not(): assert not f()
def test_nested():
    def helper(x):
        if x: raise ValueError(x)
    for x in range(2): helper(x)
def test_cause():
    try:
        raise KeyError(1)
    except KeyError as error:
        raise RuntimeError("two") from error
def test_note():
    error = ValueError("a")
    if hasattr(error, "add_note"): error.add_note("noted")
    raise error
def test_unpacking(): a, b = [1]
def test_dataclasses():
    from dataclasses import dataclass
    @dataclass
    class Point:
        x: int
        y: int
    assert Point(1, 2) == Point(1, 3)
def test_hidden():
    def check(x):
        __tracebackhide__ = True
        if x: pytest.fail(f"not configured: {x}")
    check(42)
"""

_CAPTURE = """
import os, sys
import pytest

def setup_function(function): print("setting up", function.__name__)
def test_passes_with_output():
    print("is seen with -rP")
    assert True
def test_fails_with_output():
    print("out")
    print("err", file=sys.stderr)
    assert False
def test_output(capsys):
    print("hello")
    sys.stderr.write("world\\n")
    captured = capsys.readouterr()
    assert captured.out == "hello\\n" and captured.err == "world\\n"
    print("next")
    assert capsys.readouterr().out == "next\\n"
def test_output_left(capsys):
    print("left in capsys")
    assert capsys is None
def test_descriptors(capfd):
    os.system("echo by the shell")
    assert capfd.readouterr().out == "by the shell\\n"
def test_bytes(capfdbinary):
    os.write(1, b"\\xff")
    assert capfdbinary.readouterr().out == b"\\xff"
def test_sys_bytes(capsysbinary):
    print("a")
    assert capsysbinary.readouterr().out == b"a\\n"
def test_disabled(capsys):
    print("not here")
    with capsys.disabled():
        print("is shown at once")
    assert capsys.readouterr().out == "not here\\n"
def test_tee(capteesys):
    print("both")
    assert capteesys.readouterr().out == "both\\n"
def test_writes_without_an_end():
    sys.stdout.write("no end")
    assert False
def test_by_the_shell():
    os.system("echo by a shell that nobody captures")
    assert False
def test_stdin():
    with pytest.raises(OSError):
        input()
def test_two_of_them(capsys, capfd): pass
"""

_LOGGING = """
import logging
import pytest

log = logging.getLogger("of.a.module")

def test_caplog_level(caplog):
    caplog.set_level(logging.DEBUG)
    log.debug("detail")
    assert caplog.record_tuples == [("of.a.module", logging.DEBUG, "detail")]
def test_level_is_back(caplog):
    log.debug("unheard")
    assert caplog.records == []
def test_at_level(caplog):
    with caplog.at_level(logging.DEBUG, logger="of.a.module"):
        log.debug("inside")
    log.debug("outside")
    assert caplog.messages == ["inside"]
def test_text(caplog):
    log.warning("careful %d", 1)
    assert "careful 1" in caplog.text and [record.levelname for record in caplog.records] == ["WARNING"]
def test_clear(caplog):
    log.warning("one")
    caplog.clear()
    log.warning("two")
    assert caplog.messages == ["two"]
def test_fails_with_logs():
    log.warning("seen in the report")
    log.error("several\\nlines")
    assert 0
def test_passes_with_logs(): log.warning("seen, too")
def test_filtering(caplog):
    class No(logging.Filter):
        def filter(self, record): return False
    with caplog.filtering(No()):
        log.warning("filtered")
    assert caplog.messages == []
def test_get_records(caplog):
    log.warning("now")
    assert len(caplog.get_records("call")) == 1 and caplog.get_records("setup") == []
@pytest.fixture
def logs_in_setup():
    log.warning("in setup")
    yield
    log.warning("in teardown")
def test_phases(logs_in_setup, caplog): assert [one.message for one in caplog.get_records("setup")] == ["in setup"]
def test_phases_fail(logs_in_setup): assert 0
def test_exception(caplog):
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("divided")
    assert "ZeroDivisionError" in caplog.text
def test_info_by_the_file():
    log.info("level of the file")
    assert 0
"""

_AROUND = """
import functools, os, sys, unittest, warnings
import pytest

# monkeypatch

def test_setattr(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: "/abc")
    assert os.path.expanduser("~/.ssh") == "/abc"
def test_setattr_is_back(): assert os.path.expanduser("x") == "x"
def test_setattr_by_name(monkeypatch):
    monkeypatch.setattr("os.getcwd", lambda: "/there")
    assert os.getcwd() == "/there"
def test_setenv(monkeypatch):
    monkeypatch.setenv("WHO", "Tester")
    assert os.environ["WHO"] == "Tester"
def test_delenv(monkeypatch):
    monkeypatch.delenv("WHO", raising=False)
    with pytest.raises(KeyError): os.environ["WHO"]
SETTINGS = {"user": "u", "database": "d"}
def test_setitem(monkeypatch):
    monkeypatch.setitem(SETTINGS, "user", "other")
    monkeypatch.delitem(SETTINGS, "database")
    assert SETTINGS == {"user": "other"}
def test_items_are_back(): assert SETTINGS == {"user": "u", "database": "d"}
def test_syspath(monkeypatch, tmp_path):
    (tmp_path / "found_by_path.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    assert __import__("found_by_path").x == 1
def test_context(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(functools, "partial", 3)
        assert functools.partial == 3
    assert functools.partial != 3
@pytest.fixture
def user(monkeypatch): monkeypatch.setenv("USER_OF_TEST", "x")
def test_setenv_by_a_fixture(user): assert os.environ["USER_OF_TEST"] == "x"
def test_chdir(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)

# warnings

def api(): warnings.warn(UserWarning("api v1, should use functions from v2"))
def test_warns(): api()
def test_warns_caught():
    with pytest.warns(UserWarning, match="api v1"):
        api()
def test_warns_not():
    with pytest.warns(UserWarning):
        pass
@pytest.mark.filterwarnings("ignore:api v1")
def test_ignored(): api()
@pytest.mark.filterwarnings("error")
def test_warning_is_an_error(): api()
def test_recwarn(recwarn):
    api()
    assert len(recwarn) == 1 and recwarn.pop(UserWarning).category is UserWarning
def test_deprecated():
    with pytest.deprecated_call():
        warnings.warn("old", DeprecationWarning)
def test_deprecation_is_shown(): warnings.warn("old ways", DeprecationWarning)

# classes, as unittest and other frameworks have them

def setup_module(module): module.of_setup = 1
def teardown_module(module): print("module is torn down")
def test_setup_module(): assert of_setup == 1
class TestXunit:
    @classmethod
    def setup_class(cls): cls.made = ["class"]
    @classmethod
    def teardown_class(cls): print("class is torn down")
    def setup_method(self, method): self.method = method.__name__
    def teardown_method(self, method): print("method is torn down")
    def test_class(self): assert self.made == ["class"]
    def test_method(self): assert self.method == "test_method"
    def test_method_fails(self): assert self.method == "another"
class TestGroup:
    value = 0
    def test_one(self):
        self.value = 1
        assert self.value == 1
    def test_two(self): assert self.value == 0
    @staticmethod
    def test_static(): assert True
    @classmethod
    def test_of_class(cls): assert cls.value == 0
class Base:
    def test_inherited(self): assert self.number > 1
class TestLow(Base): number = 1
class TestHigh(Base): number = 2
class TestOuter:
    class TestInner:
        def test_inner(self): assert 1
class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.shared = 1
    def setUp(self): self.x = 2
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path, monkeypatch): self.path = tmp_path
    def test_passes(self): self.assertEqual((self.x, self.shared), (2, 1))
    def test_fails(self): self.assertEqual(self.x, 3)
    def test_errors(self): raise ValueError("in a case")
    def test_skips(self): self.skipTest("by the case")
    def test_path(self): self.assertTrue(self.path.is_dir())
    @unittest.skip("by a decorator")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail("as expected")
    @unittest.expectedFailure
    def test_unexpected(self): pass
    @pytest.mark.xfail
    def test_xfail(self): self.fail("known")
    def test_parts(self):
        for i in range(3):
            with self.subTest("part", i=i):
                self.assertNotEqual(i, 1)
    def test_cleanup_fails(self): self.addCleanup(lambda: 1 / 0)
def test_subtests(subtests):
    for i in range(3):
        with subtests.test("odd", i=i):
            print("printed in a part")
            assert i != 1
async def test_async(): pass
@pytest.mark.usefixtures()
def test_usefixtures_of_none(): pass
def test_local_exit():
    if False: pytest.exit("no")
"""

_BELOW_CONFTEST = """
import pytest

@pytest.fixture
def name(name): return f"below {name}"

@pytest.fixture(autouse=True, scope="package")
def of_package():
    yield
    print("package is torn down")
"""

_BELOW = """
import pytest

def test_name(name): assert name == "below conftest"
class TestName:
    @pytest.fixture
    def name(self): return "own"
    def test_own(self, name): assert name == "own"
def test_session_is_shared(session_list): assert session_list == [1]
"""

FILES = {
    "conftest.py": _CONFTEST,
    "test_fixtures.py": _FIXTURES,
    "test_marks.py": _MARKS,
    "test_assert.py": _ASSERT,
    "test_capture.py": _CAPTURE,
    "test_logging.py": _LOGGING,
    "test_around.py": _AROUND,
    "below/__init__.py": "",
    "below/conftest.py": _BELOW_CONFTEST,
    "below/test_below.py": _BELOW,
}
