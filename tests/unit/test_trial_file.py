"""The file of a sweep that can be resumed."""

from __future__ import annotations

import enum
import functools
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlaunch import launcher
from mlaunch.sweeps.caller import trial_file
from mlaunch.sweeps.caller.trial_file import TrialFile, TrialKey, canonical, identity_of, keys_of


def train(lr: float) -> float:
    return lr


class Size(enum.Enum):
    BIG = 1


class Scaled:
    def __init__(self, scale: object) -> None:
        self.scale = scale

    def __call__(self, _: float) -> object:
        return self.scale

    def method(self, _: float) -> object:
        return self.scale


def closure(scale: object) -> Callable[[float], object]:
    def inner(_: float) -> object:
        return scale

    return inner


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: float) -> object:
        return function(x)

    return wrapper


MAKERS: list[Callable[[object], Callable[..., Any]]] = [
    lambda scale: functools.partial(train, lr=scale),
    lambda scale: functools.partial(functools.partial(train), scale),
    Scaled,
    lambda scale: Scaled(scale).method,
    closure,
    lambda scale: closure([launcher(closure(scale))]),
    lambda scale: closure({"of": lambda _, by=scale: by}),
    lambda scale: decorated(closure(scale)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_function_is_known_by_what_it_holds(tmp_path: Path, make: Callable[[object], Callable[..., Any]]) -> None:
    key = TrialKey(canonical({"x": 1}))
    for scale, found, told in ((10, None, 0), (1000, None, 1), (10, ([10], None), 0), (1000, ([1000], None), 0)):
        file = TrialFile(tmp_path / "sweep", "function", make(scale))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert file.look_up([key]) == [found]
        assert len(warned) == told
        if found is None:
            file.add(key, [scale], None)
        file.close()
    for scale in (threading.Lock(), torch.ones(1)):
        with pytest.raises(TypeError, match=r"resume= with function\(\), which holds .*, an? .*, which has no form"):
            identity_of(make(scale), "function")


def test_a_lambda_is_known_by_its_code_and_a_function_by_its_module() -> None:
    one, same, other = (lambda x: x + 1), (lambda x: x + 1), (lambda x: x + 2)
    assert identity_of(one, "") != identity_of(other, "")
    assert identity_of(one, "").holds == identity_of(same, "").holds
    assert identity_of(train, "").function == "tests.unit.test_trial_file.train"
    assert identity_of(max, "").function == "builtins.max"

    def recursive(x: int) -> int:
        return recursive(x - 1)

    assert "again" in identity_of(recursive, "").holds


def test_repeats_of_the_same_arguments_have_each_their_own_values(tmp_path: Path) -> None:
    file = TrialFile(tmp_path / "sweep", "train", train)
    first, second, third = keys_of(["1", "1", "1"])
    file.look_up([])
    file.add(second, ["second"], None)  # which ended first
    file.add(first, ["first"], None)
    file.close()
    assert file.look_up([first, second, third]) == [(["first"], None), (["second"], None), None]
    file.close()


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        TrialKey(canonical({"lr": lr})): [lr, kept] for lr, kept in ((0.1, "text"), (0.2, (1, 2)), (0.3, {1: {2}}))
    }
    file = TrialFile(tmp_path / "sweep", "train", train)
    file.look_up([])
    for key, kept in values.items():
        file.add(key, kept, 1.5)
    with pytest.raises(ValueError, match="another sweep has it"):
        TrialFile(tmp_path / "sweep", "train", train).look_up([])
    file.close()
    assert (tmp_path / "sweep").stat().st_mode & 0o777 == 0o600
    with open(tmp_path / "sweep", "ab") as torn:
        torn.write(b'{"arguments": "1')
    for _ in range(2):
        assert file.look_up([*values, TrialKey("others")]) == [*((kept, 1.5) for kept in values.values()), None]
        file.close()
    assert b'"1' not in (tmp_path / "sweep").read_bytes()


def test_the_same_arguments_have_the_same_form() -> None:
    assert canonical({"a": 1, "b": {"x": 1, "y": (2, None)}}) == canonical({"b": {"y": (2, None), "x": 1}, "a": 1})
    kinds = [1, 1.0, True, "1", [1], (1,), {1: 1}, {"1": 1}, None, Path("1")]
    assert len({canonical({"a": value}) for value in kinds}) == len(kinds)
    numbers = [np.int64(1), np.float64(1), np.float32(1), np.dtype("i8"), torch.int64, torch.device("cpu"), Size.BIG]
    assert len({canonical({"a": value}) for value in [*kinds, *numbers]}) == len(kinds + numbers)
    for value in (object(), {1}, canonical):
        with pytest.raises(TypeError, match=r"resume= with a=, an? .*, which has no form"):
            canonical({"a": [value]})


HEAD = b'{"kind": "mlaunch sweep", "function": "tests.unit.test_trial_file.train", "source": ""}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"my notes", "it is not a sweep's file"),
        (b"my\nnotes\n", "line 1 was not written by a sweep"),
        (
            b'{"kind": "mlaunch sweep", "function": "a.train", "source": ""}\n',
            "it belongs to a.train, not to tests",
        ),
        (
            HEAD + b'{"argu\n{}\n',
            "line 2 was not written by a sweep",
        ),
        (
            HEAD + b'{"arguments": "1"}\n',
            "line 2 was not written by a",
        ),
    ],
)
def test_another_file_is_left_as_it_is(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "sweep").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        TrialFile(tmp_path / "sweep", "train", train).look_up([])
    assert (tmp_path / "sweep").read_bytes() == text
    (tmp_path / "sweep").chmod(0o666)
    with pytest.raises(PermissionError, match="allowed: a file of your own"):
        TrialFile(tmp_path / "sweep", "train", train).look_up([])
    with pytest.raises(
        FileNotFoundError, match=r"cannot be opened for writing: No such file or directory; nothing was"
    ):
        TrialFile(tmp_path / "none" / "sweep", "train", train).look_up([])
    with pytest.raises(ValueError, match="it is not a regular file"):
        TrialFile("/dev/null", "train", train).look_up([])


def test_a_function_that_has_changed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for torn in (b"", b'{"kind": "mlau'):
        (tmp_path / "sweep").write_bytes(torn)
        for source, told in (("0", 0), ("0", 0), ("1", 1)):
            monkeypatch.setattr(trial_file, "_source", lambda _, source=source: source)
            file = TrialFile(tmp_path / "sweep", "train", train)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                file.look_up([])
            file.close()
            assert len(found) == told


def test_a_full_disk_leaves_no_torn_line(tmp_path: Path) -> None:
    file = TrialFile(tmp_path / "sweep", "train", train)
    file.look_up([])
    before = (tmp_path / "sweep").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.add(TrialKey(canonical({"lr": 0.1})), [1], 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "sweep").read_bytes() == before
    file.close()
