"""What a rank has from its caller, its interpreter and its libraries: more than 150 things, to be compared.

A rank of a fork server that is kept (``mlaunch warm``) is to have what it would have without. ``PROBE`` is a script
that writes down all of it; ``differences`` compares two such notes. ``CHANGES`` are what a caller may have otherwise
than what is kept, and a fork cannot take over: then a fresh interpreter starts. By hand, for the list:
``python -m tests.warm_differences``.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

# What differs, and is said in docs/warm.rst.
DOCUMENTED = {
    "interpreter hash of a text": "the seed of Python's hashes is that of what is kept",
    "process environ file": "what is kept has started with what counts at an import, and nothing else",
    "process command line": "what is kept was started with one of its own",
    "interpreter orig_argv": "what is kept was started with one of its own",
}
PROBE = r"""
import ctypes, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, platform, random, re, resource
import signal, site, sys, sysconfig, tempfile, threading, time, tracemalloc, warnings
found = {}
def note(kind, values):
    found.update({f"{kind} {name}": value for name, value in values.items()})
def text(name):
    try:
        with open(f"/proc/self/{name}", errors="replace") as file:
            return file.read()
    except OSError as error:
        return error.strerror
def tried(call):
    try:
        return str(call())
    except Exception as error:
        return repr(error)
libc = ctypes.CDLL(None)
rank, out = os.environ["RANK"], os.environ["OUT"]

# The kernel's
its_own = "Vm|Rss|FDSize|SigQ|P?Pid|Tgid|NS|.*volunt|Hugetlb"
rows = dict(line.split(":", 1) for line in text("status").splitlines())
note("status", {name: value.strip() for name, value in rows.items() if not re.match(its_own, name)})
stat = text("stat").rpartition(")")[2].split()
note("stat", {f"field {i}": stat[i] for i in (4, 5, 15, 16, 17, 35, 37, 38)})
note("limit", {line[:26].strip(): line[26:].split() for line in text("limits").splitlines()[1:]})
note("process", {name: text(name) for name in ("cgroup", "cpuset", "personality", "oom_score_adj", "timerslack_ns",
    "coredump_filter", "loginuid", "sessionid", "attr/current", "uid_map", "gid_map", "setgroups", "mountinfo",
    "cpu_resctrl_groups")})
note("process", {"autogroup": re.sub("-[0-9]+", "", text("autogroup"))})
note("process", {"environ file": text("environ"), "command line": text("cmdline"),
    "program": os.readlink("/proc/self/exe"), "root": os.readlink("/proc/self/root"), "directory": os.getcwd(),
    "groups": sorted(os.getgroups()),
    "leads": os.getpgrp() == os.getpid() == os.getsid(0), "terminal": tried(lambda: os.open("/dev/tty", os.O_RDWR)),
    "affinity": sorted(os.sched_getaffinity(0)), "policy": os.sched_getscheduler(0), "nice": os.nice(0),
    "scheduling": os.sched_getparam(0).sched_priority, "CPUs": os.cpu_count(), "alarm": signal.getitimer(0)})
note("namespace", {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))})
asked = {"dumpable": 3, "keep capabilities": 7, "huge pages": 42, "secure bits": 27, "machine checks": 34, "TSC": 25,
    "I/O flusher": 58, "no writable code": 66, "merged memory": 68, "no new rights": 39, "seccomp": 21,
    "timer slack": 30}
note("prctl", {name: libc.prctl(number, 0, 0, 0, 0) for name, number in asked.items()})
note("speculation", {str(number): libc.prctl(52, number, 0, 0, 0) for number in range(3)})
calls = {"x86_64": (252, 239, 250), "aarch64": (31, 236, 219)}.get(os.uname().machine)
if calls:
    mode, nodes = ctypes.c_int(), ctypes.create_string_buffer(128)
    libc.syscall(calls[1], ctypes.byref(mode), nodes, 1024, 0, 0)
    note("process", {"I/O priority": libc.syscall(calls[0], 1, 0), "memory policy": [mode.value, nodes.raw.hex()],
        "session keyring": libc.syscall(calls[2], 0, -3, 0)})
def stack_of_threads():
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    return size.value
note("C library", {"stack of a thread": stack_of_threads(), "threads": len(os.listdir("/proc/self/task")),
    "locale": str(libc.setlocale(6, None) != 0), "time zone": time.tzname})
for number in sorted(signal.valid_signals()):
    if number < 32 or number in (signal.SIGRTMIN, signal.SIGRTMAX):
        found[f"signal {int(number)}"] = str(signal.getsignal(number))
numbered = lambda fd: re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))
note("stream", {str(fd): numbered(fd) for fd in range(3)})
note("stream", {"open": sorted(numbered(fd) for fd in map(int, os.listdir("/proc/self/fd"))
    if os.path.exists(f"/proc/self/fd/{fd}"))})
note("stream", {stream.name: [stream.encoding, stream.errors, stream.line_buffering, stream.isatty()]
    for stream in (sys.stdin, sys.stdout, sys.stderr)})
own = {"MASTER_PORT", "MLAUNCH_RANK_PID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MLAUNCH_WARM", "OUT"}
note("variable", {name: value for name, value in os.environ.items() if name not in own})
note("process", {"variables": sorted(os.environ.keys() - own)})

# The interpreter's
kind = lambda one: (one if isinstance(one, type) else type(one)).__qualname__
note("interpreter", {name: str(getattr(sys, name)) for name in ("argv", "base_prefix", "byteorder",
    "dont_write_bytecode",
    "exec_prefix", "executable", "flags", "maxsize", "orig_argv", "path", "platlibdir", "prefix", "pycache_prefix",
    "version", "warnoptions", "_xoptions", "hash_info")})
note("interpreter", {"finders": list(map(kind, sys.meta_path)),
    "path hooks": [one.__qualname__ for one in sys.path_hooks],
    "recursion limit": sys.getrecursionlimit(), "switch interval": sys.getswitchinterval(),
    "tracer": str(sys.gettrace()),
    "profiler": str(sys.getprofile()), "digits": sys.get_int_max_str_digits() if sys.version_info >= (3, 11) else 0,
    "hash of a text": hash("a text"), "collector": [gc.isenabled(), gc.get_threshold()],
    "crash handler": faulthandler.is_enabled(),
    "memory tracer": tracemalloc.is_tracing(), "display hook": str(sys.displayhook == sys.__displayhook__),
    "exception hook": str(sys.excepthook == sys.__excepthook__), "audit": platform.python_build()[0],
    "site packages": site.getsitepackages(), "user's packages": [site.ENABLE_USER_SITE, site.USER_SITE],
    "paths": sysconfig.get_paths(), "main": sys.modules["__main__"].__name__})
note("interpreter", {"modules": sorted({name.partition(".")[0] for name in sys.modules} - {"mlaunch",
    "__mp_main__"})})
note("locale", {name: tried(lambda name=name: locale.setlocale(getattr(locale, name)))
    for name in dir(locale) if name.startswith("LC_")})
note("locale", {"encoding": locale.getpreferredencoding(False), "files": sys.getfilesystemencoding()})
note("library", {"filters": list(map(str, warnings.filters)), "temporary directory": tempfile.gettempdir(),
    "decimal": str(decimal.getcontext()), "threads": [one.daemon for one in threading.enumerate()],
    "stack of a thread": threading.stack_size(), "start method": multiprocessing.get_start_method(allow_none=True),
    "spawns": str(multiprocessing.spawn.get_executable()) if "multiprocessing.spawn" in sys.modules else "",
    "key": len(multiprocessing.current_process().authkey), "name": multiprocessing.current_process().name,
    "log level": logging.getLogger().level, "log handlers": list(map(kind, logging.getLogger().handlers)),
    "loggers": sorted(f"{name} {one.level} {len(one.handlers)}"
    for name, one in logging.Logger.manager.loggerDict.items()
        if isinstance(one, logging.Logger) and not name.startswith("mlaunch") and (one.level or one.handlers))})

# numpy's and torch's
try:
    import numpy
    note("numpy", {"errors": numpy.geterr(), "print": str(numpy.get_printoptions()), "version": numpy.__version__,
        "CPU": {name: value for name, value in numpy._core._multiarray_umath.__cpu_features__.items()}})
except ImportError:
    pass
import torch
note("torch", {"threads": torch.get_num_threads(), "interop threads": torch.get_num_interop_threads(),
    "dtype": str(torch.get_default_dtype()), "deterministic": torch.are_deterministic_algorithms_enabled(),
    "precision": torch.get_float32_matmul_precision(), "grad": torch.is_grad_enabled(),
    "config": torch.__config__.show(), "parallel": torch.__config__.parallel_info(),
    "device": str(torch.tensor(0).device), "sharing": torch.multiprocessing.get_sharing_strategy(),
    "anomaly": torch.is_anomaly_enabled(), "flush": torch.set_flush_denormal(False),
    "print": str(torch._tensor_str.PRINT_OPTS),
    "oneDNN": [torch.backends.mkldnn.enabled, torch.backends.mkldnn.is_available()],
    "accelerator": tried(torch.cuda.is_available),
    "vectors": torch.backends.cpu.get_cpu_capability(), "hub": torch.hub.get_dir(),
    "sum": (torch.arange(9e4).reshape(300, 300).sin() @ torch.arange(9e4).reshape(300, 300).cos()).sum().item(),
    "conv": torch.nn.functional.conv2d(torch.ones(1, 8, 9, 9), torch.ones(8, 8, 3, 3) / 3).sum().item()})
try:
    import threadpoolctl
    note("pool", {one["prefix"]: [one["num_threads"], one.get("architecture")]
    for one in threadpoolctl.threadpool_info()})
except ImportError:
    pass
with open(f"{out}-{rank}", "w") as file:
    json.dump(found, file)
"""


def differences(warm: Mapping[str, object], cold: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Return what differs, and is not documented."""
    names = [name for name in warm.keys() | cold.keys() if warm.get(name) != cold.get(name)]
    return {name: (warm.get(name), cold.get(name)) for name in sorted(names) if name not in DOCUMENTED}


_libc = ctypes.CDLL(None, use_errno=True)
_X86 = os.uname().machine == "x86_64"


def _call(number: int, *arguments: object) -> None:
    if not _X86 or _libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, *arguments: int) -> None:
    if _libc.prctl(option, *[ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _lower(number: int, *, hard: bool) -> None:
    soft, most = resource.getrlimit(number)
    lowered = 4 << 20 if most == resource.RLIM_INFINITY else most - 1
    resource.setrlimit(number, (min(soft, lowered) if soft >= 0 else lowered, lowered if hard else most))


def _stack() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def _policy() -> None:
    prefers, node = 1, ctypes.c_ulong(1)
    _call(238, prefers, ctypes.byref(node), 64)


# What survives exec, of this process, and which fact says it. One that the system refuses here raises OSError.
CHANGES: Mapping[str, tuple[str, Callable[[], object]]] = {
    "ulimit -s": ("stack limit", _stack),
    "ulimit -H": ("hard limits", lambda: _lower(resource.RLIMIT_CORE, hard=True)),
    "ionice": ("I/O priority", lambda: _call(251, 1, 0, 3 << 13)),
    "numactl": ("memory policy", _policy),
    "no huge pages": ("huge pages", lambda: _prctl(41, 1)),
    "coredump_filter": ("core dump filter", lambda: Path("/proc/self/coredump_filter").write_text("0x7f")),
    "keyctl session": ("session keyring", lambda: _call(250, 1, None)),
    "setarch -R": ("personality", lambda: _libc.personality(0x0040000)),
    "nice": ("priority", lambda: os.nice(5)),
    "chrt --batch": ("priority", lambda: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))),
    "choom": ("priority", lambda: Path("/proc/self/oom_score_adj").write_text("500")),
    "taskset": ("status Cpus_allowed_list", lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])),
    "setpriv --no-new-privs": ("status NoNewPrivs", lambda: _prctl(38, 1)),
    "setpriv --securebits": ("secure bits", lambda: _prctl(28, 1 << 4)),
    "setpriv --groups": ("status Groups", lambda: os.setgroups([*os.getgroups(), 54321])),
    "setpriv --bounding-set": ("status CapBnd", lambda: _prctl(24, 25)),
    "machine checks": ("machine checks", lambda: _prctl(33, 1, 1)),
    "no speculation": ("speculation", lambda: _prctl(53, 0, 4)),
    "no writable code": ("no writable code", lambda: _prctl(65, 1)),
    "merged memory": ("merged memory", lambda: _prctl(67, 1)),
    "core scheduling": ("core scheduling", lambda: _prctl(62, 1)),
    "I/O flusher": ("I/O flusher", lambda: _prctl(57, 1)),
}


def main() -> None:
    from tests.system.commands import FRESH, run

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "probe.py").write_text(PROBE)
        own = {"XDG_RUNTIME_DIR": folder}
        run(here, command=[sys.executable, "-m", "mlaunch", "warm"], **own)
        notes = []
        for warm in ("", "0"):
            done = run(
                here, "probe.py", command=FRESH, MLAUNCH_WARM=warm, OUT=f"{here}/{warm}", MLAUNCH_DEBUG="1", **own
            )
            print(done.stderr)
            notes.append(json.loads((here / f"{warm}-0").read_text()))
        run(here, "--stop", command=[sys.executable, "-m", "mlaunch", "warm"], **own)
        print(f"{len(notes[1])} properties, of which these differ:")
        for name, (warm_value, cold_value) in differences(*notes).items():
            print(f"{name}:\n  kept  {str(warm_value)[:300]}\n  alone {str(cold_value)[:300]}")


if __name__ == "__main__":
    main()
