"""Names of other launchers that ``mlaunch`` lacks, with what to use instead."""

from __future__ import annotations

import opcode
from types import FrameType

# Those of ``megengine.distributed`` (1.13.0), which "import mlaunch as dist" replaces, and of ColossalAI (0.5.0).
_INSTEAD = {
    "MegEngine": {
        "helper": "for get_device_count_by_fork() call torch.accelerator.device_count(); bcast_list_, "
        "make_allreduce_cb and synchronized are names of mlaunch itself; DistributedDataParallel packs gradients",
        "get_device_count_by_fork": "call torch.accelerator.device_count(); you may use a device before the call",
        "functional": "use torch.distributed: all_reduce, broadcast, all_gather, reduce_scatter_tensor, gather, "
        "scatter, all_to_all, send, recv",
        "get_mm_server_addr": "call get_py_server_addr(); the ranks have one store",
        "backend": "read get_backend(); choose it by @launcher(backend=...) or override_backend()",
        "group": "its names are names of mlaunch itself, as in mlaunch.new_group",
        "server": "its names are mlaunch.Server and mlaunch.Client",
    },
    "ColossalAI": {
        "launch_from_torch": "call join_from_torch(), with the same arguments",
        "launch_from_slurm": "call join_from_slurm(), with the same arguments",
        "launch_from_openmpi": "call join_from_openmpi(), with the same arguments",
        "DistCoordinator": "use mlaunch.comm: is_main_process(), get_rank(), synchronize(), main_process_first()",
        "get_dist_logger": "use logging inside of the function, with mlaunch.RankZeroFilter on its handler",
        "get_accelerator": "mlaunch.device() is the rank's device; torch.accelerator has the rest",
    },
}


def missing(name: str, where: FrameType) -> Exception:
    """Return the error for a name that ``mlaunch`` lacks, with what to use in place of another launcher's.

    ``where``: the code that looks for it. ``from mlaunch import name`` would replace an AttributeError and its text by
    one of its own, so it gets an ImportError.
    """
    text = f"module 'mlaunch' has no attribute {name!r}{advice(name)}"
    imports = where.f_code.co_code[where.f_lasti] == opcode.opmap["IMPORT_FROM"]
    return ImportError(text, name="mlaunch") if imports else AttributeError(text)


def advice(name: str) -> str:
    """Return what to use in place of another launcher's name, as the end of an error; "" if there is no such name."""
    for library, names in _INSTEAD.items():
        if name in names:
            return f"; coming from {library}: {names[name]}"
    return ""
