"""The file of a sweep that can be resumed."""

from __future__ import annotations

import resource
import signal
import warnings
from pathlib import Path

import pytest

from mlaunch.caller.many.trial_file import TrialFile, canonical


def train(lr: float) -> float:
    return lr


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {canonical({"lr": lr}): [lr, kept] for lr, kept in ((0.1, "text"), (0.2, (1, 2)), (0.3, {1: {2}}))}
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
        assert file.look_up([*values, "others"]) == [*((kept, 1.5) for kept in values.values()), None]
        file.close()
    assert b'"1' not in (tmp_path / "sweep").read_bytes()


def test_the_same_arguments_have_the_same_form() -> None:
    assert canonical({"a": 1, "b": {"x": 1, "y": (2, None)}}) == canonical({"b": {"y": (2, None), "x": 1}, "a": 1})
    kinds = [1, 1.0, True, "1", [1], (1,), {1: 1}, {"1": 1}, None, Path("1")]
    assert len({canonical({"a": value}) for value in kinds}) == len(kinds)
    for value in (object(), {1}, canonical):
        with pytest.raises(TypeError, match=r"resume= with a=, an? .*, which has no form"):
            canonical({"a": [value]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"my notes", "it is no file of a sweep"),
        (b"my\nnotes\n", "line 1 is none of a sweep's"),
        (b'{"kind": "mlaunch sweep", "function": "other", "source": ""}\n', "it is of other, not of train"),
        (b'{"kind": "mlaunch sweep", "function": "train", "source": ""}\n{"argu\n{}\n', "line 2 is none of a sweep's"),
        (b'{"kind": "mlaunch sweep", "function": "train", "source": ""}\n{"arguments": "1"}\n', "line 2 is none of a"),
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
    with pytest.raises(ValueError, match="it is no file"):
        TrialFile("/dev/null", "train", train).look_up([])


def test_a_function_that_has_changed_is_told_of(tmp_path: Path) -> None:
    for torn in (b"", b'{"kind": "mlau'):
        (tmp_path / "sweep").write_bytes(torn)
        for function, told in ((train, 0), (train, 0), (canonical, 1)):
            file = TrialFile(tmp_path / "sweep", "train", function)
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
            file.add(canonical({"lr": 0.1}), [1], 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "sweep").read_bytes() == before
    file.close()
