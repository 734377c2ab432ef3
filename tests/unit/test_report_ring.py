"""The ring in which a rank's reports wait to be read."""

from __future__ import annotations

from mlaunch.protocol.board import REPORTS_KEPT, Board


def test_a_ring_that_is_read_too_late() -> None:
    board = Board.create(2)
    for number in range(REPORTS_KEPT + 5):
        board.ring(1).add(b"%d" % number)
    found, count = board.ring(1).read(0)
    assert [int(data) for data in found] == list(range(5, REPORTS_KEPT + 5))
    board.ring(1).add(b"x" * 500)
    assert board.ring(1).read(count) == ([b"x" * 500], count + 1)
    assert board.ring(0).read(0) == ([], 0)
    board.note_done(0, 3)
    board.note_done(1, 3)
    assert board.all_done(3)
    board.close()
