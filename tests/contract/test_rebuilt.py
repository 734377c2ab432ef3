"""What goes by value behaves as its importable twin does: classes, enums, decorated functions, closures."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import packaging.requirements
import pytest
from packaging.version import Version

from mlaunch import Ranks, launcher
from tests.conftest import ROOT
from tests.users import users_environ

TWIN = """
import abc, dataclasses, enum, functools, typing, weakref

T = typing.TypeVar("T")

def refused(do, *args):
    try:
        return do(*args)
    except (AttributeError, TypeError, ValueError) as error:
        return type(error).__name__

class Slots:
    __slots__ = ("x", "__hidden")
    def __init__(self): self.x, self.__hidden = 1, 2
    def get(self): return self.x, self.__hidden
class Below(Slots):
    __slots__ = "y"
class Open(Slots):
    pass
class UsedUp:
    __slots__ = iter(["x"])
@dataclasses.dataclass(slots=True)
class Result:
    loss: float = 0.5
    steps: list = dataclasses.field(default_factory=list)
def slots():
    kinds = Slots, Below, Open, UsedUp, Result
    names = Slots.__slots__, Below.__slots__, Result.__slots__
    return [refused(setattr, kind(), "z", 1) for kind in kinds], Below().get(), Result(0.25), names

class Base:
    table = {}
    def __init_subclass__(cls, *, name, **others):
        super().__init_subclass__(**others)
        Base.table[name] = cls
        cls.tag = name
class Net(Base, name="net"):
    pass
class Deep(Net, name="deep"):
    __slots__ = ("q",)
class Box(typing.Generic[T]):
    seen = []
    def __init_subclass__(cls, **others):
        super().__init_subclass__(**others)
        Box.seen.append(cls.__name__)
class IntBox(Box[int]):
    pass
class Failed(Exception):
    codes = []
    def __init_subclass__(cls, code): Failed.codes.append(code)
class NotFound(Failed, code=404):
    pass
def hooks():
    return sorted(Base.table), Net.tag, Deep.tag, Deep.__mro__[1:] == (Net, Base, object), Base.table["net"] is Net, \\
        Box.seen, IntBox.__orig_bases__ == (Box[int],), Failed.codes, refused(type, "New", (Base,), {})

class Meta(abc.ABCMeta):
    seen = []
    def __new__(meta, name, bases, body, *, tag=None):
        Meta.seen.append((name, tag))
        return super().__new__(meta, name, bases, body)
    def __init__(cls, name, bases, body, *, tag=None):
        super().__init__(name, bases, body)
        cls.tag = tag
class Abstract(metaclass=Meta, tag="a"):
    @abc.abstractmethod
    def go(self): ...
class Concrete(Abstract, tag="c"):
    def go(self): return 1
Abstract.register(int)
def metaclasses():
    return Meta.seen, Abstract.tag, Concrete.tag, refused(Abstract), Concrete().go(), isinstance(3, Abstract)

class A: v, w = 1, None
class B(A): v, w = 1, None
class C(A): pass
class D(C, B): v = 1
def overrides():
    A.v = A.w = 2
    return B.v, B.w, C.v, D.v, D.w

class Color(enum.Enum):
    RED = 1
    ROUGE = 1
class Permission(enum.IntFlag):
    R = 4
    W = 2
    RW = 6
    NONE = 0
class Planet(enum.Enum):
    EARTH = 5.9, 6.3
    def __init__(self, mass, radius): self.mass = mass
class Labelled(int, enum.Enum):
    ONE = 1, "one"
    def __new__(cls, value, label):
        made = int.__new__(cls, value)
        made._value_, made.number = label, value
        return made
class Pair(tuple, enum.Enum):
    LOW = 1, 2
class Raised(enum.Enum):
    def __init__(self, value): self.more = value + 1
class Two(Raised):
    TWO = 2
def enums():
    return list(Color.__members__), Color["ROUGE"] is Color.RED, list(Permission.__members__), \\
        Permission.R | Permission.W is Permission.RW, Permission(0).name, Planet.EARTH.mass, Labelled.ONE + 1, \\
        Labelled("one").number, list(Pair.LOW), Pair((1, 2)) is Pair.LOW, Two.TWO.more, Raised("New", {"X": 5}).X.more

class Cached:
    count = 0
    @functools.cached_property
    def size(self):
        "Doc."
        Cached.count += 1
        return Cached.count
class Property(functools.cached_property):
    def __init__(self, function):
        super().__init__(function)
        self.more = 1
class Kept:
    @Property
    def size(self): return 3
@functools.singledispatch
def show(x): return "any"
@show.register
def _(x: int): return "int"
@show.register
def _(x: list): return [show(each) for each in x]
show.extra = 5
class Visitor:
    @functools.singledispatchmethod
    def visit(self, x): return "any"
    @visit.register
    def _(self, x: list): return [self.visit(each) for each in x]
by_class = weakref.WeakKeyDictionary({Net: 1})
by_name = weakref.WeakValueDictionary({"net": Net})
def decorators():
    cached = Cached()
    return cached.size, cached.size, Cached.size.__doc__, show([1, "a", [2]]), show.extra, show.__name__, \\
        Visitor().visit([1]), Kept().size, Kept.size.more, by_class[Net], by_name["net"] is Net, len(by_class)

class Point(typing.NamedTuple):
    x: int = 3
class Options(typing.TypedDict, total=False):
    lr: float
class Outer:
    class Inner: pass
@dataclasses.dataclass
class Step:
    size: int
    _: dataclasses.KW_ONLY
    kind: str = "a"
def names():
    required = [field.default is dataclasses.MISSING for field in dataclasses.fields(Step)]
    longer = dataclasses.dataclass(type("Longer", (Step,), {"__annotations__": {"more": int}, "more": 1}))
    return (required, longer(3, 4), refused(longer), Point(), Point._fields, Options.__total__, Options(lr=1),
        Outer.Inner.__qualname__, Outer.Inner.__name__)

def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step, lambda: n
step, count = counter()
view, table = memoryview(b"abc"), memoryview(bytearray(8)).cast("i", (2, 1))
def closures():
    table[0, 0] = 5
    return step(), step(), count(), view.readonly, bytes(view), table.tolist(), table.format

CASES = slots, hooks, metaclasses, overrides, enums, decorators, names, closures
def ask():
    return {case.__name__: repr(case()) for case in CASES}
"""


def script(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<a script>", "exec", dont_inherit=True), names)  # without this file's __future__
    return names


def importable(name: str, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (directory / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(directory)
    spec: Any = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the same text, which ranks import."""
    return importable("its_twin", TWIN, tmp_path, monkeypatch)


def test_what_goes_by_value_behaves_as_if_the_rank_had_imported_it(twin: Any) -> None:
    """Also when it goes to ranks that had it before: nothing is told twice that a class has come."""
    with Ranks(n_gpus=1) as ranks:
        [wanted] = ranks.run(twin.ask)
        ask = script(TWIN)["ask"]
        [first], [again] = ranks.run(ask), ranks.run(ask)
    assert first == wanted
    assert again == wanted


def test_values_of_such_classes_come_back_as_the_callers_own() -> None:
    names = script(TWIN)
    text = (
        "def make(): return Below(), Result(1.0), Open(), Color.ROUGE, Permission.RW, Planet.EARTH, Point(), NotFound()"
    )
    exec(text, names)
    wanted = ["Below", "Result", "Open", "Color", "Permission", "Planet", "Point", "NotFound"]
    [(below, result, _, *members)] = [found] = launcher(names["make"], 1)()
    assert [type(one) for one in found] == [names[kind] for kind in wanted]
    assert (below.get(), result) == ((1, 2), names["Result"](1.0))
    assert [members[0] is names["Color"].RED, members[2] is names["Planet"].EARTH] == [True, True]


def test_functions_that_share_a_variable_share_it_as_arguments_too() -> None:
    first, second = script(TWIN)["counter"](), script(TWIN)["counter"]()
    take = launcher(lambda pairs: [(step(), step(), count()) for step, count in pairs], 1)
    assert take([first, second]) == [[(1, 2, 2), (1, 2, 2)]]
    assert first[1]() == 0


def test_plain_pickle_finds_a_class_inside_of_another_one() -> None:
    names = script("import pickle\nclass Outer:\n    class Inner: pass\ndef again(given): return pickle.dumps(given)")
    inner = names["Outer"].Inner
    [pickled] = launcher(names["again"], 1)(inner())
    assert b"Outer.Inner" in pickled


HOOKS = """
class Plugin:
    def __init_subclass__(cls, key): pass
class Meta(type):
    def __new__(meta, name, bases, body, *, key): return super().__new__(meta, name, bases, body)
    def __init__(cls, name, bases, body, *, key): super().__init__(name, bases, body)
"""


@pytest.mark.parametrize(
    ("statement", "hook"),
    [("Mine(Plugin, key=1)", r"Plugin\.__init_subclass__"), ("Mine(metaclass=Meta, key=1)", "metaclass Meta")],
)
def test_keywords_that_a_rank_cannot_know_are_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, hook: str
) -> None:
    importable("its_hooks", HOOKS, tmp_path, monkeypatch)
    names = script(f"from its_hooks import *\nclass {statement}: pass\ndef use(): return Mine.__name__")
    use = launcher(names["use"], 1)
    with pytest.raises(TypeError, match=rf"class Mine was defined with key= for {hook}, which a class does not keep"):
        use()
    assert use.last is None


# With another cloudpickle

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")  # not what is installed: the tests of tests/matrix/run run where it is not
REQUIRED = map(packaging.requirements.Requirement, SETUP["options"]["install_requires"].strip().splitlines())
OLDEST = str(
    max(
        Version(specifier.version)
        for one in REQUIRED
        if one.name == "cloudpickle" and (one.marker is None or one.marker.evaluate())
        for specifier in one.specifier
    )
)
ASK = """
import inspect, json, linecache, cloudpickle
from mlaunch import launcher

def where():
    ask.__code__, fail.__code__
    return inspect.getsource(fail), fail.__code__.co_filename, fail.__code__.co_firstlineno

def fail():
    raise ValueError("on line 16")

[asked] = launcher(ask, 1)()
[(source, file, line)] = launcher(where, 1)()
try:
    launcher(fail, 1)()
except ValueError as error:
    told = str(error.__cause__)
print(json.dumps([cloudpickle.__version__, asked, source, file == __file__, line, told]))
"""


@pytest.fixture(scope="session", params=["newest", "oldest"])
def other_cloudpickle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the newest, or the oldest allowed, cloudpickle, as pip finds it."""
    wanted = "cloudpickle" if request.param == "newest" else f"cloudpickle=={OLDEST}"
    place = tmp_path_factory.mktemp(request.param)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=1", "--timeout=30", "--no-deps", "--upgrade"]
    pip += ["--target", str(place), wanted]
    got = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=300)
    if got.returncode:
        pytest.skip(f"pip could not get {wanted}: {(got.stderr.strip() or 'no word').splitlines()[-1]}")
    return place


@pytest.mark.nightly
@pytest.mark.slow
def test_newest_and_oldest_cloudpickle(other_cloudpickle: Path, twin: Any, tmp_path: Path) -> None:
    """Names of files, lines and sources are known in ranks, and all is rebuilt as with the one that is installed."""
    script = tmp_path / "script.py"
    script.write_text(TWIN + ASK)
    environ = {**users_environ(), "PYTHONPATH": f"{other_cloudpickle}:{os.getcwd()}"}
    ran = [sys.executable, str(script)]
    done = subprocess.run(ran, check=False, capture_output=True, text=True, timeout=300, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, asked, source, is_file, line, told = json.loads(done.stdout)
    first = 1 + (TWIN + ASK).splitlines().index("def fail():")
    assert (other_cloudpickle / f"cloudpickle-{version}.dist-info").exists()
    assert asked == twin.ask()
    assert (source, is_file, line) == ('def fail():\n    raise ValueError("on line 16")\n', True, first)
    assert f'File "{script}", line {first + 1}, in fail' in told
