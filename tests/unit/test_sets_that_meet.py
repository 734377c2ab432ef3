"""Which sets of ranks that stay want the same devices."""

from __future__ import annotations

from typing import Any

import pytest

from mlaunch.caller.options.launch_options import Options
from mlaunch.ranks.caller import keep


@pytest.mark.parametrize(
    ("wanted", "taken", "environ", "meet"),
    [
        ({"n_gpus": 2}, ["cpu"], {}, False),
        ({"n_gpus": 2, "device_type": "cpu"}, ["cuda:0"], {}, False),
        ({"n_gpus": 2, "device_type": "xpu"}, ["cuda:0"], {}, False),
        ({}, ["cuda:7"], {}, True),
        ({"n_gpus": 2}, ["cuda:2", "cuda:3"], {}, False),
        ({"n_gpus": 2}, ["cuda:1", "cuda:3"], {}, True),
        ({"devices": [2]}, ["cuda:2"], {}, True),
        ({"devices": [0]}, ["cuda:2"], {"CUDA_VISIBLE_DEVICES": "2,3"}, True),
        ({"devices": [1]}, ["cuda:2"], {"CUDA_VISIBLE_DEVICES": "2,3"}, False),
        ({"n_gpus": 1}, ["cuda:GPU-1a"], {"CUDA_VISIBLE_DEVICES": "GPU-1a"}, True),
        ({"n_gpus": 1}, ["cuda:GPU-1a"], {"CUDA_VISIBLE_DEVICES": "GPU-2b"}, False),
        ({"n_gpus": 1}, ["cuda:GPU-1a"], {}, True),  # nobody knows
        ({"devices": [2]}, ["cuda:2"], {"CUDA_VISIBLE_DEVICES": "2,3"}, False),  # which is refused
    ],
)
def test_which_sets_want_the_same_devices(
    wanted: dict[str, Any], taken: list[str], environ: dict[str, str], meet: bool
) -> None:
    assert keep.meet(Options().replaced(wanted), taken, environ) is meet
