"""A test as its ranks get it: arguments, instance, class, marks, where they find it, and hypothesis' seed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pickle
import random
import sys
import unittest
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlaunch.base.text import with_article
from mlaunch.protocol import explain, payload
from mlaunch.pytest.rank import fixtures_of_rank
from mlaunch.pytest.rank.hypothesis_draws import SETTINGS
from mlaunch.pytest.rank.unittest_cases import FILE, FOR_A_METHOD, bases_of
from mlaunch.pytest.wire import ClassChanges, Definition, Examples, RankTest, RequestFacts, Surroundings

_PYTESTS = ("_pytest", "pytest_mock")  # the packages whose fixtures belong to pytest's process
_SENT = {"tmpdir", "testpath"}  # those of them that ranks get
_SHOWN = 100  # characters of another error
_THREADED = {"MultiThreadedTestCase"}
_NONE: object = object()


def sent_test(item: pytest.Function, values: dict[str, Any], made: tuple[str, ...], drawn: Examples | None) -> RankTest:
    """Return a test for ranks that have run no other; ranks that have get it with what they lack.

    ``values``, ``made``: as ``split`` has them; ``drawn``: how hypothesis draws.
    """
    asks = "request" in made
    marks = tuple(_picklable(item.iter_markers())) if asks else tuple(item.iter_markers("filterwarnings"))
    return RankTest(
        1,
        item.nodeid,
        item.name,
        _definition_of(item),
        Surroundings({}, None, None),
        _state_of(item),
        values,
        made,
        tuple(mark for mark in marks if mark.name == "filterwarnings"),
        facts_of(item._request, marks, of_test=True) if asks else None,
        examples=drawn,
        rewritten=_rewritten(frozenset(getattr(item.config.pluginmanager.rewrite_hook, "_must_rewrite", ()))),
    )


# Arguments


def split(item: pytest.Function) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values of a test's arguments that are sent, and the names of those that are made on the ranks.

    Raises:
        pytest.fail.Exception: One of them works only in pytest's process.
    """
    found = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    return split_values(found, "this test", fixtures_of_rank.NAMES)


def split_values(
    found: Mapping[str, Any], asker: str, on_ranks: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Do the same for the arguments of a test or a rank_fixture.

    ``asker``: "this test"; ``on_ranks``: those of pytest's fixtures that it has there.
    """
    values, made = {}, []
    for name, value in found.items():
        if str(getattr(value, "__module__", "")).split(".")[0] not in _PYTESTS or name in _SENT:
            values[name] = value
        elif name in on_ranks:
            made.append(name)
        else:
            raise pytest.fail.Exception(
                f"the fixture {name!r} works only in pytest's process, and {asker} runs on ranks; "
                f"use it in a fixture of your own, and give the test what that returns",
                pytrace=False,
            )
    return values, tuple(made)


def why_not_sent(test: RankTest, values: Mapping[str, Any]) -> str:
    """Return why the first argument, or attribute of the instance, cannot be sent; "" if all can."""
    found = (_argument_that_cannot(name, value) for name, value in values.items())
    if told := next(filter(None, found), ""):
        return told
    found = (_attribute_that_cannot(f"self.{name}", value) for name, value in (test.state or {}).items())
    return next(filter(None, found), "")


def _argument_that_cannot(name: str, value: object) -> str:
    try:
        payload.pack(value, "value", most=0).close()
    except Exception as error:  # whatever a __reduce__ may raise
        return (
            f"the fixture {name!r} gives {with_article(type(value).__qualname__)}, which cannot be sent to the ranks "
            f"({type(error).__name__}: {str(error)[:_SHOWN]}); make it there: @mlaunch.pytest.rank_fixture"
        )
    return ""


def _attribute_that_cannot(where: str, value: object) -> str:
    """Return why an attribute cannot be sent, and what to do; "" if it can. ``where``: such as "self.lock"."""
    try:
        payload.check(value)
    except Exception as error:  # whatever a __reduce__ may raise
        return (
            f"{explain.unpicklable(value, where)}, which cannot be sent to the ranks "
            f"({type(error).__name__}: {str(error)[:_SHOWN]}); "
            f"make it in the test, or there: @mlaunch.pytest.rank_fixture"
        )
    return ""


def facts_of(request: Any, marks: Sequence[pytest.Mark], *, of_test: bool) -> RequestFacts:
    """Return the facts of a ``request`` that ranks get: that of a test, or of one of its fixtures."""
    node = request.node
    callspec = getattr(node, "callspec", None) if of_test else None
    return RequestFacts(
        request.scope,
        request.fixturename,
        tuple(request.fixturenames),
        node.name,
        node.nodeid,
        getattr(node, "originalname", None),
        str(node.path),
        tuple(node.keywords),
        tuple(marks),
        (request.param,) if hasattr(request, "param") else (),
        None if callspec is None else dict(callspec.params),
    )


def _picklable(marks: Iterable[pytest.Mark]) -> Iterable[pytest.Mark]:
    for mark in marks:
        try:
            pickle.dumps(mark)
        except Exception:  # whatever a __reduce__ may raise
            continue
        yield mark


# Where ranks find a test


def _definition_of(item: pytest.Function) -> Definition:
    # By the names under which pytest has found it: a class may have another one of its own (an alias, one that a
    # function has made).
    owners = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    name = item.originalname or item.name.partition("[")[0]
    return found_at(item.config, item.module, ".".join([*owners, name]))


def found_at(config: pytest.Config, module: Any, qualname: str) -> Definition:
    """Return where ranks find what a module defines."""
    file = getattr(module, "__file__", None)
    if file is None:
        told = f"the module {module.__name__!r} has no file, and ranks import the module of a test: write it to one"
        raise pytest.fail.Exception(told, pytrace=False)
    return Definition(module.__name__, file, qualname, _conftests(config.pluginmanager, os.path.dirname(file)))


@functools.lru_cache(None)
def _conftests(manager: pytest.PytestPluginManager, directory: str) -> tuple[tuple[str, str], ...]:
    found = []
    for plugin in manager.get_plugins():
        file = getattr(plugin, "__file__", None) or ""
        if Path(file).name == "conftest.py" and Path(directory).is_relative_to(Path(file).parent):
            found.append((str(plugin.__name__), file))
    return tuple(sorted(found, key=lambda named: len(named[1])))


@functools.lru_cache(4)
def _rewritten(names: frozenset[str]) -> tuple[str, ...]:
    """Return the modules that explain their assertions on ranks: all but installed plugins."""
    installed = {file.parts[0].removesuffix(".py") for file in _files_of_plugins()}
    return tuple(sorted(name for name in names if name.partition(".")[0] not in installed))


@functools.lru_cache(1)
def _files_of_plugins() -> list[Path]:
    found = importlib.metadata.distributions()
    plugins = (one for one in found if any(point.group == "pytest11" for point in one.entry_points))
    return [Path(str(file)) for one in plugins for file in one.files or ()]


# Instances and classes


def is_case(item: pytest.Item) -> bool:
    """True if a test is a method of a ``unittest.TestCase``."""
    owner = getattr(item, "cls", None)
    return owner is not None and issubclass(owner, unittest.TestCase)


def _state_of(item: pytest.Function) -> dict[str, Any] | None:
    """Return the attributes that fixtures have set on the test's instance; None if it has no instance."""
    if item.cls is None:
        return None
    given = dict(vars(item.instance))
    if not is_case(item):
        return given
    # Each instance has unittest's own attributes, also the rank's.
    return {name: given[name] for name in given.keys() - vars(item.cls(item.name)).keys()} | _file_for(item)


def _file_for(item: pytest.Function) -> dict[str, str]:
    """Return the attribute that tests of torch's MultiProcessTestCase have on ranks; nothing for other classes.

    Raises:
        pytest.fail.Exception: The class starts threads in place of processes.
    """
    bases = bases_of(item.cls)
    if bases & _THREADED:
        told = "a MultiThreadedTestCase has threads in place of ranks; leave out the mark ranks"
        raise pytest.fail.Exception(f"{item.name}: {told}", pytrace=False)
    if not bases & FOR_A_METHOD:
        return {}
    return {FILE: str(item._request.getfixturevalue("tmp_path") / "store")}


_at_first: dict[type, dict[str, Any]] = {}  # what classes had when pytest found their tests


def note_class(owner: type | None) -> None:
    """Note the attributes of a test's class before any fixture is set up."""
    if owner is not None and owner not in _at_first:
        _at_first[owner] = dict(vars(owner))


class GivenAttributes:
    """Attributes that ``setup_class`` or ``request.cls`` set on classes of tests, as one set of ranks has them."""

    def __init__(self) -> None:
        self._given: dict[type, dict[str, Any]] = {}

    def changes(self, owner: type | None) -> ClassChanges | None:
        """Return the changes that these ranks do not have yet; None if there are none."""
        if owner is None:
            return None
        first, now = _at_first.get(owner, vars(owner)), vars(owner)
        wanted = {name: value for name, value in now.items() if first.get(name, _NONE) is not value}
        wanted = {name: value for name, value in wanted.items() if not name.startswith(("__", "_unittest", "_xunit"))}
        given = self._given.get(owner, {})
        new = {name: value for name, value in wanted.items() if given.get(name, _NONE) is not value}
        gone = tuple(given.keys() - wanted.keys())
        if not new and not gone:
            return None
        self._given[owner] = wanted  # with the values, or another one might have the place of one that is gone
        said = {name: _attribute_that_cannot(f"{owner.__name__}.{name}", value) for name, value in new.items()}
        told = {name: words for name, words in said.items() if words}
        return ClassChanges({name: value for name, value in new.items() if name not in told}, gone, told)


# Tests with hypothesis
#
# Hypothesis has a generator of its own, which the system seeds, and a database, to which each failure is written: ranks
# would draw different examples, and a collective of one would meet another's. So pytest's process draws the seed, and
# there is no database on ranks: the seed of a test that failed is kept, and draws the same examples in the next run.

_SEED = pytest.StashKey[int]()  # of this session
_CACHED = "mlaunch/hypothesis"  # seeds of tests that have failed, in pytest's cache


def examples_for(item: pytest.Function) -> Examples | None:
    """Return how the ranks of a test draw its examples; None if it has none."""
    if "hypothesis" not in sys.modules or not getattr(item.obj, "is_hypothesis_test", False):
        return None
    from hypothesis import settings

    own = settings(getattr(item.obj, SETTINGS, settings()), database=None, deadline=None)
    pickled = None
    with contextlib.suppress(Exception):  # the ranks then have what they find themselves
        pickled = pickle.dumps(own)
    return Examples(_seed_of(item), pickled)


def _seed_of(item: pytest.Function) -> int | str:
    config = item.config
    given = config.getoption("hypothesis_seed", None)
    if given is not None:
        return int(given) if str(given).isdigit() else str(given)
    failed = None if (cache := getattr(config, "cache", None)) is None else cache.get(_CACHED, {}).get(item.nodeid)
    if failed is not None:
        return int(failed)
    return config.stash.setdefault(_SEED, random.SystemRandom().getrandbits(64))


def keep_seed(item: pytest.Function, examples: Examples, *, failed: bool) -> str:
    """Keep the seed of a test that failed for the next run. Return a line about it for the report; "" if it passed."""
    cache = getattr(item.config, "cache", None)
    if cache is not None:
        seeds = dict(cache.get(_CACHED, {}))
        if failed:
            seeds[item.nodeid] = examples.seed
        if failed or seeds.pop(item.nodeid, None) is not None:
            cache.set(_CACHED, seeds)
    again = " and the next run of this test" if cache is not None else ""
    return f"--hypothesis-seed={examples.seed}{again} draws these examples again" if failed else ""
