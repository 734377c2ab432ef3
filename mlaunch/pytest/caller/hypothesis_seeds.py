"""The seed with which all ranks of a test with hypothesis draw; it is kept if the test fails.

Hypothesis has a generator of its own, which the system seeds, and a database, to which each failure is written: ranks
would draw apart, and a collective would meet another example's. So pytest's process draws the seed, and there is no
database on ranks: the seed of a test that failed is kept, and draws the same examples in the next run.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys

import pytest

from mlaunch.pytest.rank.hypothesis_draws import SETTINGS
from mlaunch.pytest.wire.rank_tests import Examples

_SEED = pytest.StashKey[int]()  # of this session
_CACHED = "mlaunch/hypothesis"  # seeds of tests that have failed, in pytest's cache


def examples_for(item: pytest.Function) -> Examples | None:
    """Return how the ranks of a test draw; None if it has no examples."""
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


def note(item: pytest.Function, examples: Examples, *, failed: bool) -> str:
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
