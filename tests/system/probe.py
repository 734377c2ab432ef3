"""Run by the differential test as the script of ``mlaunch run`` and of torchrun: prints what it sees, as JSON."""

import faulthandler
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings

_STREAM = ("encoding", "errors", "line_buffering", "write_through", "mode", "name", "newlines")


def stream(name):  # type: ignore[no-untyped-def]
    found = getattr(sys, name)
    seen = {attribute: getattr(found, attribute) for attribute in _STREAM}
    tty, fd = found.isatty(), found.fileno()
    return {**seen, "isatty": tty, "fileno": fd, "kept": found is getattr(sys, f"__{name}__"),
            "buffer": type(found.buffer).__name__}  # fmt: skip


names = sorted(globals())
process = multiprocessing.current_process()
seen = {
    "main": {
        "__file__": __file__, "__name__": __name__, "__spec__": repr(__spec__), "__package__": __package__,
        "__loader__": type(__loader__).__name__, "__builtins__": type(__builtins__).__name__,
        "__cached__": globals()["__cached__"], "is sys.modules": sys.modules["__main__"].__dict__ is globals(),
        "names": names,
    },
    "sys": {
        "argv": sys.argv, "path": sys.path, "flags": repr(sys.flags), "executable": sys.executable,
        "prefix": sys.prefix, "recursion limit": sys.getrecursionlimit(), "switch interval": sys.getswitchinterval(),
        "excepthook": sys.excepthook is sys.__excepthook__, "dont_write_bytecode": sys.dont_write_bytecode,
        "orig_argv": sys.orig_argv, "meta_path": len(sys.meta_path), "path_hooks": len(sys.path_hooks),
    },
    "environ": dict(os.environ),
    "streams": {name: stream(name) for name in ("stdin", "stdout", "stderr")},
    "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": [thread.name for thread in threading.enumerate()],
    "process": {
        "name": process.name, "daemon": process.daemon, "parent": multiprocessing.parent_process() is None,
        "start method": multiprocessing.get_start_method(allow_none=True), "cwd": os.getcwd(),
        "leads a group": os.getpgrp() == os.getpid(), "leads a session": os.getsid(0) == os.getpid(),
        "nice": os.nice(0), "cpus": len(os.sched_getaffinity(0)), "umask": os.umask(0o22),
        "open files": sorted(map(int, os.listdir("/proc/self/fd"))),
        "limits": [resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    },
    "logging": [logging.root.level, [str(handler) for handler in logging.root.handlers]],
    "locale": locale.setlocale(locale.LC_ALL),
    "faulthandler": faulthandler.is_enabled(),
    "frames": len(inspect.stack()),
    "gc": {"enabled": gc.isenabled(), "threshold": gc.get_threshold(), "frozen": gc.get_freeze_count() > 0},
    "hash": hash("mlaunch"),
    "modules": sorted(sys.modules),
    "warnings": [str(entry) for entry in warnings.filters],
}  # fmt: skip

import numpy  # noqa: E402 - what follows is after the imports that a script begins with
import torch  # noqa: E402

seen["torch"] = {
    "threads": torch.get_num_threads(), "dtype": str(torch.get_default_dtype()), "grad": torch.is_grad_enabled(),
    "sharing": torch.multiprocessing.get_sharing_strategy(), "elastic": torch.distributed.is_torchelastic_launched(),
    "debug": str(torch.distributed.get_debug_level()), "initialised": torch.distributed.is_initialized(),
}  # fmt: skip
seen["warnings after the imports"] = sorted(str(entry) for entry in warnings.filters)
seen["random"] = [random.random(), numpy.random.rand(), torch.rand(1).item()]
os.write(1, (json.dumps(seen) + "\n").encode())
