"""What goes to the ranks of the ``request`` of a test, or of one of its fixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlaunch.pytest.wire.rank_tests import RequestFacts


def facts_of(request: Any, marks: Sequence[pytest.Mark], *, of_test: bool) -> RequestFacts:
    """Return what travels of a request, of a test or of one of its fixtures."""
    node = request.node
    param = (request.param,) if hasattr(request, "param") else ()
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
        param,
        None if callspec is None else dict(callspec.params),
    )
