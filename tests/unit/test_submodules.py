"""A function goes by value with the modules that it uses as attributes of packages: those that cloudpickle finds."""

from __future__ import annotations

import concurrent.futures
import io
import sys
import types
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

import cloudpickle.cloudpickle
import pytest

from mlaunch.protocol import pickling


def of_package() -> object:
    return concurrent.futures.ThreadPoolExecutor


def of_package_below() -> object:
    return xml.etree.ElementTree.fromstring


def of_both() -> object:
    return concurrent.futures, xml.etree.ElementTree


def of_none() -> object:
    return sys.path


def in_a_closure() -> Callable[[], object]:
    package = xml

    def use() -> object:
        return package.etree.ElementTree

    return use


@pytest.mark.parametrize("function", [of_package, of_package_below, of_both, of_none, in_a_closure()])
def test_they_are_those_that_cloudpickle_finds(function: Any) -> None:
    values = [value for value in function.__globals__.values() if isinstance(value, types.ModuleType)]
    values += [cell.cell_contents for cell in function.__closure__ or ()]
    found = pickling._submodules(function.__code__, values)
    theirs = cloudpickle.cloudpickle._find_imported_submodules(function.__code__, values)  # type: ignore[attr-defined]
    assert set(found) == set(theirs)


def test_they_go_with_the_function() -> None:
    stream = io.BytesIO()
    script: dict[str, Any] = {"xml": xml, "__name__": "__main__"}
    exec("def use(): return xml.etree.ElementTree.fromstring('<a/>').tag", script)
    pickling.pickle_by_value(stream, script["use"])
    assert b"xml.etree.ElementTree" in stream.getvalue()


def test_a_module_that_is_known_by_a_name_below_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``six.moves`` is, and some that are their own submodules."""
    monkeypatch.setitem(sys.modules, "xml.again", xml)

    def use() -> object:
        return xml.again.again  # type: ignore[attr-defined]

    assert pickling._submodules(use.__code__, [xml]) == [xml]
    assert pickling._submodules(compile("again.missing", "", "eval"), [xml, None, 3]) == [xml]


def test_a_cloudpickle_that_reduces_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cloudpickle.cloudpickle, "_function_getstate")
    assert pickling._quick_reduce() is cloudpickle.Pickler._dynamic_function_reduce  # type: ignore[attr-defined]
