"""Values between machines, through a pipe: bounded memory, and nothing unsigned."""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc

import pytest

from mlaunch.rendezvous import control_protocol, values

MIB = 1 << 20
SIZE = 64 * MIB


async def carry(fd: int, token: str) -> tuple[int, int | None, str]:
    """Through a pair of sockets, signed with "hush" and read with ``token``."""
    near, far = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=near)
    reader, back = await asyncio.open_connection(sock=far, limit=control_protocol.LINE_LIMIT)
    sending = asyncio.ensure_future(values.send(writer, 3, fd, values.Signature("hush", "launch", 3)))
    try:
        return await values.receive(reader, token, "launch", 4)
    finally:
        await sending
        writer.close()
        back.close()


@pytest.fixture
def value() -> int:
    fd = os.memfd_create("value")
    os.truncate(fd, SIZE)
    os.pwrite(fd, b"end", SIZE - 3)
    return fd


def test_a_value_passes_in_pieces(value: int) -> None:
    tracemalloc.start()
    try:
        rank, fd, _ = asyncio.run(carry(value, "hush"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        os.close(value)
    assert fd is not None
    assert (rank, os.fstat(fd).st_size, os.pread(fd, 3, SIZE - 3)) == (3, SIZE, b"end")
    os.close(fd)
    assert peak < 8 * MIB


def test_a_value_that_others_signed_is_refused(value: int) -> None:
    with pytest.raises(ConnectionError, match="the value of rank 3 has a wrong signature"):
        asyncio.run(carry(value, "guessed"))
    os.close(value)


def test_rank_and_launch_stand_in_the_signature() -> None:
    signed = {values.Signature("hush", launch, rank).hexdigest() for launch in ("a", "b") for rank in (1, 2)}
    assert len(signed) == 4
