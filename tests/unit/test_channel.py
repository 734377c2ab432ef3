"""Records between processes."""

from __future__ import annotations

import pytest

from mlaunch.protocol.channel import Channel


def test_what_was_said_before_the_end_is_heard() -> None:
    """Also where the other end went without reading what we had said to it."""
    ours, theirs = Channel.pair()
    theirs.send("first")
    theirs.send("last")
    ours.send("unread")
    theirs.close()
    assert [ours.receive()[0], ours.receive()[0]] == ["first", "last"]
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()
