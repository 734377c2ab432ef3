"""Completion in cells on ranks: what is asked of a rank where the cursor is, and what a rank finds by looking alone."""

from __future__ import annotations

import types
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

import pytest

from mlaunch.cells import rank as rank_of_cells
from mlaunch.cells.caller import CellJob
from mlaunch.cells.kernel.magic_words import NoNames, RankNames, WordAtCursor, first_target, what_is_wanted
from mlaunch.cells.rank import find_names


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("model.", WordAtCursor("attributes", "model")),
        ("loss = step(model.layers[0].we", WordAtCursor("attributes", "model.layers[0]", "we")),
        ("print(x[-1].a['b c'].d", WordAtCursor("attributes", "x[-1].a['b c']", "d")),
        ("-größe.m", WordAtCursor("attributes", "größe", "m")),
        ("step(mo", WordAtCursor("names", "", "mo")),
        ("x = ", WordAtCursor("names")),
        ("", WordAtCursor("names")),
        ("print('a', mo", WordAtCursor("names", "", "mo")),
        ("cfg['lr", WordAtCursor("keys", "cfg", "lr", "'")),
        ('cfg["a"]["', WordAtCursor("keys", 'cfg["a"]', "", '"')),
        ("step(model).lo", WordAtCursor("")),
        ("x[i].lo", WordAtCursor("")),
        ("'text'.st", WordAtCursor("")),
        ("1.", WordAtCursor("")),
        ("3e", WordAtCursor("")),
        ("open('data/tr", WordAtCursor("file")),
        ("'a\\'b", WordAtCursor("file")),
        ("import tor", None),
        ("  from torch import n", None),
        ("!ls da", None),
        ("%tim", None),
        ("x = \\alph", None),
    ],
)
def test_words_at_the_cursor(before: str, wanted: WordAtCursor | None) -> None:
    assert what_is_wanted(before) == wanted


def test_the_first_target_answers() -> None:
    words = ("", "2,1", "--targets 3 --deadline 1", "--targets", "0-")
    assert list(map(first_target, words)) == [0, 1, 3, 0, 0]


class Cursor:
    """Completes at ``|`` in a cell, with a rank that knows ``lr`` and ``loss``."""

    def __init__(self, *, auto: bool = False) -> None:
        self.asked: list[tuple[str, str, str, int]] = []
        names = {"job": CellJob("job"), "data": 1, "_": 2}
        self.names = RankNames(self._ask, lambda _: auto, lambda: names)

    def _ask(self, *asked: Any) -> Sequence[str]:
        self.asked.append(asked)
        return [name for name in ("loss", "lr") if name.startswith(asked[2])]

    def at(self, cell: str) -> list[str] | None:
        """The names that are offered; None: IPython goes on as if there were no ranks."""
        before = cell.partition("|")[0]
        found = self.names.answer(cell.replace("|", ""), before.count("\n"), len(before.rpartition("\n")[2]))
        if found is None:
            return None
        assert found["suppress"]
        assert before.endswith(found["matched_fragment"])
        assert len(found["completions"]) > 0  # else IPython lets others answer, too
        return [one.text for one in found["completions"]]


@pytest.fixture
def cursor() -> Cursor:
    pytest.importorskip("IPython", reason="IPython is not installed (extra: test)")
    return Cursor()


@pytest.mark.parametrize(
    ("cell", "offered"),
    [
        ("%%ranks\nx = l|", ["loss", "lr"]),
        ("%%ranks\nx = y|", []),
        ("\n%%ranks 0\nx = 1\nlo|\nz", ["loss"]),
        ("%%ranks\nopen('l|", []),
        ("%%ranks --local\nx = l|", None),
        ("x = l|", None),
        ("%%ran|", None),
        ("%%ranks|", None),
        ("%%ranks --d|", ["--deadline"]),
        ("%%ranks --deadline 3 --|", ["--targets", "--rich", "--bg", "--local"]),
        ("%ranks --pu|", ["--pull", "--push"]),
        ("x = 1\ny = %ranks --pull |", ["loss", "lr"]),
        ("%ranks --pull lr l|", ["loss"]),
        ("%ranks --pull lr --t|", ["--targets"]),
        ("%ranks --push |", ["job", "data"]),
        ("%ranks --cancel |", ["job"]),
        ("%ranks 4 --backend gloo --no-pro|", ["--no-progress"]),
        ("%ranks --nothing|", []),
    ],
)
def test_offered_names(cursor: Cursor, cell: str, offered: list[str] | None) -> None:
    assert cursor.at(cell) == offered


def test_questions_to_the_rank(cursor: Cursor) -> None:
    assert cursor.at("%%ranks 2-3\ncfg['l|") == ["loss'", "lr'"]
    assert cursor.at("%%ranks 2-3\ncfg['l|']") == ["loss", "lr"]  # as an editor closes it
    assert cursor.at("%%ranks\nmodel.x.l|") == ["loss", "lr"]
    assert cursor.asked == [("keys", "cfg", "l", 2), ("keys", "cfg", "l", 2), ("attributes", "model.x", "l", 0)]
    assert Cursor(auto=True).at("lo|") == ["loss"]
    assert Cursor(auto=True).at("%%ranks --local\nlo|") is None


def test_nothing_that_looks_like_something() -> None:
    assert (len(NoNames()), list(NoNames())) == (1, [])


# What a rank finds


watched: list[bool] = []
Pair = namedtuple("Pair", "left right")


def never(*asked: object) -> Any:
    if watched:
        pytest.fail(f"code of the user's ran: {asked[1:]}")
    return type.__getattribute__(*asked)  # type: ignore[call-overload]  # of a class that is being made


def strange_classes() -> tuple[type, type[dict[str, Any]]]:
    """An object's class, and a dict's, of which nothing may be called."""

    class Meta(type):
        __eq__ = __hash__ = __instancecheck__ = __getattribute__ = __dir__ = never  # type: ignore[assignment]

    class Strange(metaclass=Meta):
        __slots__ = ("__dict__", "slot")
        __getattr__ = __getattribute__ = __dir__ = __getitem__ = __eq__ = __hash__ = __repr__ = never
        _ipython_key_completions_ = never
        costly = __class__ = property(never)  # type: ignore[assignment]
        number = 3

        def method(self) -> None: ...

    class Mapped(dict[str, Any]):
        __getitem__ = __missing__ = __iter__ = keys = __contains__ = get = never  # type: ignore[assignment]

    return Strange, Mapped


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The namespace of a rank's cells."""
    made = types.ModuleType("__main__")
    monkeypatch.setattr(rank_of_cells, "main", made)
    return vars(made)


def found(kind: str, source: str = "", prefix: str = "") -> list[str]:
    watched.append(True)
    try:
        told = find_names(kind, source, prefix, 0)
    finally:
        watched.clear()
    assert told is not None
    return told


def test_the_others_say_nothing() -> None:
    assert (rank_of_cells.rank(), find_names("names", "", "", 1)) == (0, None)


def test_names(names: dict[str, Any]) -> None:
    names.update(loss=1, log=types.ModuleType("log"), _low=1, In=[], open=open)
    assert found("names", "", "lo") == ["locals", "log", "loss"]
    assert "while" in found("names", "", "wh")
    assert found("names", "", "_lo") == ["_low"]
    assert "In" not in found("names", "", "I")
    assert found("values") == ["loss"]


def test_a_strange_object_is_looked_at_and_none_of_its_code_runs(names: dict[str, Any]) -> None:
    kind, mapping = strange_classes()
    strange = object.__new__(kind)
    object.__setattr__(strange, "own", {"deep": [Pair(1, {"a": 2})]})
    object.__setattr__(strange, "slot", OrderedDict(b=strange))
    names.update(strange=strange, mapped=mapping(a=strange), kind=kind)
    assert found("attributes", "strange") == ["costly", "method", "number", "own", "slot"]
    assert found("attributes", "strange.costly") == []
    assert found("attributes", "strange['x']") == []
    assert found("keys", "strange") == []
    assert found("keys", "strange.own") == ["deep"]
    assert found("attributes", "strange.own['deep'][0]", "le") == ["left"]
    assert found("keys", "strange.own['deep'][0][1]") == ["a"]
    assert found("keys", "strange.slot") == ["b"]
    assert found("keys", "mapped") == ["a"]
    assert found("attributes", "mapped['a'].slot['b']", "nu") == ["number"]
    assert found("attributes", "strange.method", "__na") == ["__name__"]
    assert found("attributes", "strange.number", "real") == ["real"]
    assert found("attributes", "kind", "cost") == ["costly"]
    wrong = ["strange.nothing", "nothing", "mapped['b']", "strange.own['deep'][9]", "strange.own[[]]", "(", "a b"]
    assert [source for source in wrong if found("attributes", source)] == []


def test_classes_and_modules(names: dict[str, Any]) -> None:
    import json

    names.update(json=json, Pair=Pair, mine=types.ModuleType("mine"))
    vars(names["mine"]).update(__file__="/home/ada/mine.py", __dir__=never, __getattr__=never, value=1)
    assert found("attributes", "json", "du") == ["dump", "dumps"]
    assert found("attributes", "json.decoder.JSONDecoder", "raw") == ["raw_decode"]
    assert found("attributes", "mine") == ["value"]
    assert found("attributes", "mine.nothing") == []
    assert "_replace" in found("attributes", "Pair", "_")


def test_a_lazy_module_of_a_library_says_what_is_in_it(names: dict[str, Any]) -> None:
    import mlaunch

    names["mlaunch"] = mlaunch
    assert "Ranks" in found("attributes", "mlaunch", "Ra")


def test_modules_and_tensors_of_torch(names: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        __dir__ = __getattr__ = never
        cost = property(never)

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
            self.parts = torch.nn.ModuleDict({"head": torch.nn.Sequential(torch.nn.ReLU())})

    names.update(net=Net(), x=torch.ones(1))
    assert found("attributes", "net", "la") == ["layers"]
    assert found("attributes", "net.layers[0]", "wei") == ["weight"]
    assert found("attributes", "net.layers[-1].weight", "requires") == ["requires_grad", "requires_grad_"]
    assert found("attributes", "net.parts['head'][0]", "inpl") == ["inplace"]
    assert not {"0", "head"} & {*found("attributes", "net.layers"), *found("attributes", "net.parts['head']")}
    assert found("attributes", "net.layers[5]") == found("attributes", "net.cost") == []
    assert found("attributes", "x.data", "is_le") == ["is_leaf"]
