"""Where buffers lie in a value's memory file."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from mlaunch.base.fds import memory_file
from mlaunch.protocol import payload


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4097])
def test_buffers_are_aligned(size: int) -> None:
    """To 64 bytes, which vector instructions want, whatever stands before them."""
    given = [b"x" * size, np.arange(5000.0), np.ones(16_385, np.uint8), np.arange(5000.0), torch.arange(5000.0)]
    memfd = memory_file("test")
    try:
        payload.write(memfd, given)
        read = payload.read(memfd)
    finally:
        os.close(memfd)
    addresses = [array.__array_interface__["data"][0] for array in read[1:4]] + [read[4].data_ptr()]
    assert [address % 64 for address in addresses] == [0] * 4
    assert np.array_equal(read[3], given[3])
