"""What comes back, and what goes there: any value, whole, once."""

from __future__ import annotations

import functools
import gc
import inspect
import linecache
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy
import pytest
import torch
import torch.distributed as dist

from mlaunch import LaunchError, Ranks, comm, launcher
from tests import launches
from tests.contract import functions

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def round_trip(value: Any, *, to_caller: bool = True) -> Any:
    import os

    fd = os.memfd_create("test")
    try:
        launches.write_value(fd, value, to_caller=to_caller)
        return launches.read_value(fd)
    finally:
        os.close(fd)


def test_an_object_that_cannot_go_by_name_leaves_nothing_of_the_attempt() -> None:
    """By value it begins anew: what was written by name would be read as well, and shift what is told once."""
    words = [f"word {number}" for number in range(20_000)]
    first, second, function = round_trip([words, words, lambda: 7])
    assert first == words
    assert second is first
    assert function() == 7


@pytest.mark.parametrize("size", [0, 3, 50_000])
def test_dense_tensors_of_every_dtype(size: int) -> None:
    tensors = [torch.arange(size).remainder(2).to(dtype) for dtype in DTYPES]
    for back, tensor in zip(round_trip(tensors), tensors, strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8)), tensor.dtype


@pytest.mark.parametrize("size", [4, 50_000])
def test_views_keep_sharing_their_storage(size: int) -> None:
    base = torch.zeros(size)
    first, whole, second = round_trip((base[:2], base, base[1:3]))
    first.fill_(5)
    assert whole[:3].tolist() == [5, 5, 0]
    assert second[0] == 5


def test_strides_parameters_modules_and_state() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    module = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    module[0].weight.requires_grad_(False)
    state = module.state_dict()
    back, parameter, loaded, states = round_trip((transposed, module[0].bias, module, state))
    assert back.stride() == transposed.stride()
    assert torch.equal(back, transposed)
    assert isinstance(parameter, torch.nn.Parameter)
    assert not loaded[0].weight.requires_grad
    assert loaded[0].bias is parameter
    assert all(torch.equal(states[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        torch.empty(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["coo", "csr", "quantized", "meta", "conjugate", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_other_layouts_round_trip(tensor: torch.Tensor) -> None:
    back = round_trip(tensor)
    assert (back.layout, back.dtype, back.device) == (tensor.layout, tensor.dtype, tensor.device)


def test_a_mapped_value_can_be_written_and_outlives_the_fd() -> None:
    array, tensor = round_trip((numpy.zeros(100_000), torch.zeros(100_000)))
    array[:] = 1
    tensor.fill_(2)
    assert (array.sum(), tensor.sum()) == (100_000, 200_000)


def test_large_buffers_stay_out_of_the_stream_and_are_mapped() -> None:
    back = round_trip(numpy.zeros(1_000_000))
    assert not back.flags.owndata


class Drawn:
    """Makes what it is pickled as, and keeps nothing of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        array = numpy.zeros(100_000)
        self.array = weakref.ref(array)
        return torch.clone, (torch.from_numpy(array),)


@pytest.mark.slow
def test_a_value_that_nobody_else_holds_lives_until_it_is_written() -> None:
    value = Drawn()
    parts = launches.pickled(value)
    gc.collect()
    assert value.array() is not None
    del parts
    gc.collect()
    assert value.array() is None


@pytest.mark.parametrize(
    "value",
    [None, ValueError("as a value"), list(range(100_000)), {"a": (1, {2})}, b"x" * 10_000_000],
    ids=["nothing", "error", "list", "dict", "bytes"],
)
def test_values_of_a_rank(value: Any) -> None:
    [back] = launcher(lambda: value, 1)()
    assert (type(back), repr(back)) == (type(value), repr(value))


def test_tensors_with_history_come_back() -> None:
    def loss() -> torch.Tensor:
        return (torch.ones(2, requires_grad=True) * 3).sum()

    assert launcher(loss, 2)()[1].item() == 6


@pytest.mark.nightly
@pytest.mark.slow
def test_two_gib_come_back_whole() -> None:
    size = 2**31 + 12345

    def make() -> tuple[torch.Tensor, bytes]:
        tensor = torch.zeros(size, dtype=torch.uint8)
        tensor[-1] = 7
        return tensor, bytes(size)

    [(tensor, data)] = launcher(make, 1)()
    # torch's own sum would make eight bytes of each.
    assert (len(tensor), int(tensor[-1]), numpy.count_nonzero(tensor.numpy()), len(data)) == (size, 7, 1, size)


def test_ranks_share_one_copy_of_a_large_argument() -> None:
    def shared(array: numpy.ndarray[Any, Any]) -> tuple[float, int]:
        total = float(array.sum())
        mine = 0
        # A page of the shared file counts as private as long as one rank alone has touched it,
        # so both read first, and both stay until the other has looked.
        torch.distributed.barrier()
        with open("/proc/self/smaps") as file:
            ours = False
            for line in file:
                if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                    ours = "mlaunch-call" in line
                elif ours and line.startswith(("Private_Dirty", "Anonymous")):
                    mine += int(line.split()[1])
        torch.distributed.barrier()
        return total, mine

    for total, private_kib in launcher(shared, 2)(numpy.ones(2_000_000)):
        assert total == 2_000_000
        assert private_kib < 100


def test_a_rank_may_write_into_its_argument() -> None:
    def write(array: numpy.ndarray[Any, Any], tensor: torch.Tensor) -> float:
        array += 1
        tensor += 1
        return float(array.sum() + tensor.sum())

    array, tensor = numpy.zeros(50_000), torch.zeros(50_000)
    assert launcher(write, 2)(array, tensor) == [100_000.0, 100_000.0]
    assert array.sum() == 0
    assert tensor.sum() == 0


# Classes and functions that went by value

SCRIPT = """
class Result:
    version = {version}

    def __init__(self, value):
        self.value = value

def helper(value):
    return Result(value)
"""


def defined(version: int) -> dict[str, Any]:
    """What a script or a cell defines, in a namespace that is not this process's ``__main__`` (as with cProfile)."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT.format(version=version), names)
    return names


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_class_that_has_no_name_in_the_caller_comes_back(start_method: str) -> None:
    names = defined(1)
    [made] = launcher(names["helper"], 1, start_method=start_method)(7)
    assert type(made) is names["Result"]
    assert made.value == 7


def test_a_function_comes_back_as_itself() -> None:
    helper = defined(1)["helper"]
    assert launcher(lambda value: {"step": value}, 1)(helper) == [{"step": helper}]


def test_classes_of_one_name_stay_apart() -> None:
    old, new = defined(1), defined(2)
    newer = new[
        "Result"
    ]  # alone: the names around it are Python's own, too, in which torch 2.6 leaves what cannot travel
    [back] = launcher(lambda *got: (*got, newer), 1)(old["Result"](3), newer(4))
    assert [type(one) for one in back[:2]] == [old["Result"], new["Result"]]
    assert back[2] is new["Result"]
    assert (old["Result"].version, new["Result"].version) == (1, 2)


def test_plain_pickle_finds_the_object_that_the_function_means() -> None:
    old, new = defined(1), defined(2)
    exec("import pickle\ndef load(old): return pickle.loads(pickle.dumps(Result(0))).version", new)
    assert launcher(new["load"], 1)(old["Result"](3)) == [2]


T = TypeVar("T")


def test_a_generic_class_that_a_function_made_comes_back() -> None:
    class Box(Generic[T]):
        pass

    kind: Any = Box[int]
    [back] = launcher(lambda got: got, 1)(kind())
    assert type(back) is Box
    assert back.__orig_class__ == kind


def test_a_type_variable_of_the_script_is_no_class() -> None:
    """cloudpickle keeps it beside classes that it has seen, and it has no ``__qualname__``; a fork has them all."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = "T = typing.TypeVar('T')\nclass Box(typing.Generic[T]): pass\ndef make(): return Box[T](), T.__name__"
    exec(f"import typing\n{code}", names)
    for method in ("forkserver", "fork"):
        with Ranks(n_gpus=1, start_method=method) as ranks:
            [(box, name)] = ranks.submit(names["make"]).result(60)
        assert (type(box), name) == (names["Box"], "T")


def test_a_class_lives_as_long_as_it_may_come_back() -> None:
    with Ranks(n_gpus=1) as ranks:
        names = defined(1)
        kind = weakref.ref(names["Result"])
        future = ranks.submit(names["helper"], 5)
        names.clear()
        gc.collect()
        [made] = future.result(60)
        assert type(made) is kind()


def test_a_class_of_an_earlier_call_comes_back_by_value() -> None:
    """Its caller may have let go of it, and given its name to another."""
    with Ranks(n_gpus=1) as ranks:
        held = ranks.hold(defined(1)["helper"], 5)
        gc.collect()
        [made] = held.fetch()
        assert (type(made).version, made.value) == (1, 5)


def test_ranks_give_each_other_classes_of_the_call() -> None:
    old, new = defined(1), defined(2)

    def exchange(one: Any, other: Any) -> list[int]:
        mine = [one, other][dist.get_rank()]
        return [type(each).version for each in comm.all_gather(mine)]

    assert launcher(exchange, 2)(old["Result"](0), new["Result"](0)) == [[1, 2]] * 2


def compiled_as(file: str, text: str) -> dict[str, Any]:
    """What a cell defines, whose lines only ``linecache`` has, as IPython sees to."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(compile(text, file, "exec"), names)
    return names


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    monkeypatch.setattr(linecache, "cache", {**linecache.cache})
    return compiled_as


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_the_source_of_a_cell_is_known_in_ranks(cells: Any, start_method: str) -> None:
    names = cells("/nowhere/3.py", "def fn(x):\n    return x * 2 + 1\n")

    def use(fn: Any) -> tuple[str, float]:
        return inspect.getsource(fn), torch.jit.script(fn)(torch.ones(1)).item()

    assert launcher(use, 1, start_method=start_method)(names["fn"]) == [("def fn(x):\n    return x * 2 + 1\n", 3.0)]


def test_the_source_of_a_cells_class_travels_with_it(cells: Any) -> None:
    """Once for all its functions, and anew with each call: ranks that stay see the cell as it is now."""
    first = cells("/nowhere/4.py", "class Net:\n    def go(self): return 1\n    def come(self): return 1\n")
    with Ranks(n_gpus=1) as ranks:
        assert ranks.run(lambda net: inspect.getsource(net.go), first["Net"]()) == ["    def go(self): return 1\n"]
        second = cells("/nowhere/4.py", "class Net:\n    def go(self): return 2\n")
        assert ranks.run(lambda net: inspect.getsource(net.go), second["Net"]()) == ["    def go(self): return 2\n"]
    parts = launches.pickled([first["Net"], second["Net"]], by_value=True)
    assert parts.told == {"/nowhere/4.py"}


# What stands at the top of scripts

TOP = """
import functools, torch, typing
P = typing.ParamSpec("P")
UserId = typing.NewType("UserId", int)

class Missing:
    def __reduce__(self): return "MISSING"

MISSING = Missing()

class Color:
    def __init__(self, name): self.name = name
    def __reduce__(self): return f"Color.{self.name}"

Color.RED = Color("RED")

def same(function: typing.Callable[P, int]) -> typing.Callable[P, int]:
    return functools.wraps(function)(lambda *args: function(*args))

@same
def plus_one(x): return x + 1

"""


@pytest.fixture
def top(cells: Any) -> dict[str, Any]:
    found: dict[str, Any] = cells("/nowhere/1.py", TOP)
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("UserId(3)", 3),
        ("MISSING is given", True),
        ("Color.RED.name", "RED"),
        ("plus_one(1)", 2),
        ("scripted(torch.zeros(1)).item()", 1.0),
        ("traced(torch.zeros(2)).tolist()", [2.0, 2.0]),
    ],
)
def test_objects_at_the_top_of_scripts_travel(top: dict[str, Any], text: str, wanted: object) -> None:
    top["scripted"] = torch.jit.script(plain_plus_one)
    top["traced"] = torch.jit.trace(lambda x: x + 2, torch.ones(2))  # type: ignore[no-untyped-call]
    exec(f"def ask(given): return {text}", top)
    assert launcher(top["ask"], 1)(top["MISSING"]) == [wanted]


def plain_plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_an_object_known_by_name_comes_back_as_itself(top: dict[str, Any]) -> None:
    known = [top[name] for name in ("MISSING", "UserId")] + [top["Color"].RED]
    with Ranks(n_gpus=1) as ranks:
        [back] = ranks.run(lambda *got: got, *known)
        assert [one is other for one, other in zip(back, known, strict=True)] == [True, True, True]
        held = ranks.hold(lambda got: got, top["MISSING"])
        assert ranks.run(lambda one, other: one is other, held, top["MISSING"]) == [True]


COMPILED = """
import torch
from mlaunch import launcher
from mlaunch.protocol import reducers

@torch.compile(backend="eager", fullgraph=True)
def strict(x): return x + 1

@torch.compile(mode="reduce-overhead", dynamic=True)
def tuned(x): return x + 1

def options(function): return reducers.of_function(function)[1][1]

@torch.compiler.disable
def plain(x): return strict(x)

[(one, other, value, back)] = launcher(lambda: (options(strict), options(tuned), plain(torch.zeros(1)), strict), 1)()
assert (one, other, value) == (options(strict), options(tuned), 1.0)
assert one["fullgraph"] and other["dynamic"] and not other["fullgraph"], (one, other)
assert other["options"]["triton.cudagraphs"], other
assert back is strict
"""


@pytest.mark.nightly
def test_a_compiled_function_keeps_its_options(run_script) -> None:  # type: ignore[no-untyped-def]
    done = run_script(COMPILED)
    assert done.returncode == 0, done.stderr


# What cannot travel


def test_a_value_that_cannot_be_pickled() -> None:
    def lock() -> object:
        return {"state": [1, threading.Lock()]}

    with pytest.raises(LaunchError, match=r"rank \d of .*lock\(\) returned a value that cannot be pickled") as caught:
        launcher(lock, 2)()
    assert "value['state'][1] is a _thread.lock" in str(caught.value)


def test_a_generator_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"value is a generator: return a list of its items\n"):
        launcher(lambda: (x for x in ()), 1)()


class FailsHere:
    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("not again")


class Knot:
    """Holds itself, before what cannot be pickled."""

    def __init__(self) -> None:
        self.me = self
        self.lock = threading.Lock()


def test_a_value_that_cannot_be_unpickled_names_its_rank() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of .* cannot be unpickled here: RuntimeError: not again"):
        launcher(FailsHere, 1)()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (([threading.Lock()],), {}, r"argument 0 of .*\[0\] is a _thread.lock, which cannot be pickled"),
        ((), {"x": threading.Lock()}, r"argument 'x' of .* is a _thread.lock, which cannot be pickled"),
        ((Knot(),), {}, r"argument 0 of \S+\(\)\.lock is a _thread.lock, which cannot be pickled"),
    ],
)
def test_an_argument_that_cannot_be_pickled(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        launcher(lambda x: x, 1)(*args, **kwargs)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        (lambda: (x for x in ()), "a generator, which .*: pass a list of its items, or create it in the function"),
        (functools.partial(open, __file__), "_io.TextIOWrapper, which .*: pass its path, and open it in the function"),
        (functools.partial(open, __file__, "rb"), "an _io.BufferedReader, which .*: pass its path"),
        (threading.Lock, "a _thread.lock, which .*: create it in the function"),
    ],
)  # fmt: skip
def test_errors_say_what_to_pass_instead(argument: Callable[[], Any], advice: str) -> None:
    unfit = argument()
    take = launcher(lambda x: x, 1)
    with pytest.raises(TypeError, match=advice):
        take({"x": [unfit]})
    getattr(unfit, "close", lambda: None)()
    assert take.last is None  # no rank was started


def test_a_standard_stream_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert round_trip(stream, to_caller=False) is stream


def test_a_closure_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"<lambda>\(\) uses the variable 'lock', a _thread.lock, which cannot be pickled"
    ):
        launcher(lambda: lock, 1)()


def test_a_global_of_a_global_that_cannot_be_pickled() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "lock": Stream()}
    names["lock"].file = threading.Lock()
    exec("def cp(): return lock\ndef loss(): return cp()\ndef train(): return loss()", names)
    path = "the global 'loss', which uses the global 'cp', which uses the global 'lock'.file, a _thread.lock"
    with pytest.raises(TypeError, match=rf"^train\(\) uses {re.escape(path)}, which cannot be pickled"):
        launcher(names["train"], 1)()


def test_names_in_the_body_of_a_class_in_a_function_travel() -> None:
    """By instructions that cloudpickle does not look at: a default, a decorator, in a class inside of another one."""
    names: dict[str, Any] = {"__name__": "__main__"}
    text = """\
import functools
SIZE, STEP = 3, 4
def train():
    class Net:
        size = SIZE
        class Inner:
            @functools.cached_property
            def step(self):
                return STEP
    return Net.size, Net.Inner().step, Net.__module__
"""
    exec(text, names)
    assert launcher(names["train"], 1)() == [(3, 4, "__main__")]


def test_an_argument_that_cannot_be_unpickled_is_the_ranks_error() -> None:
    with pytest.raises(RuntimeError, match="not again") as caught:
        launcher(lambda x: x, 1)(FailsHere())
    assert isinstance(caught.value.__cause__, LaunchError)
    assert "receiving the function and its arguments" in str(caught.value.__cause__)


class Wrapper:
    """Goes for ever for an attribute that it has not got yet, as a bar of tqdm does."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.inner == other.inner)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


class Stream:
    def __init__(self) -> None:
        self.file = Wrapper(3)


def notes_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    error = functions.caught(lambda: launcher(function, 1)(*args, **kwargs))
    assert isinstance(error.__cause__, LaunchError)
    return " ".join(error.__notes__)


@pytest.mark.slow
def test_an_object_that_a_rank_cannot_unpickle_is_named(top: dict[str, Any]) -> None:
    exec("def train(): return bar.inner", top)
    top["bar"] = Stream()
    what = "the rank could not unpickle a tests.contract.test_values.Wrapper"
    assert f"{what} at 'bar.file', which the call sends: create such an object" in notes_of(top["train"])
    assert f"{what} at 'deep'" in notes_of(id, [1, {"deep": Wrapper(3)}])
    assert f"{what} at 'model'" in notes_of(dict, first=1, model=Wrapper(3), last=numpy.zeros(10_000))
    assert f"{what}, which the call sends: create" in notes_of(id, Wrapper(3))
    with Ranks(n_gpus=1) as ranks, pytest.raises(RecursionError) as caught:
        ranks.run(id, {"deep": Wrapper(3)})
    assert f"{what} at 'deep'" in " ".join(caught.value.__notes__)


def test_a_module_that_a_rank_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("only_here")
    exec("class Net: pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    told = notes_of(id, module.Net())
    assert "the rank could not import only_here.Net, which the call uses: put its directory on sys.path" in told
    assert "ranks look for modules" not in told or sys.version_info < (3, 11)  # once is enough
