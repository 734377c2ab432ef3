"""The settings of a caller's process that its forks would have, and which its ranks therefore take over.

Those of torch and numpy are only read if these are imported. Most settings are as they were when the process began, and
are not sent. Variables of the environment are sent by themselves; those that libraries read while they are loaded are
listed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import re
import resource
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MOST_FILTERS = 200  # of warnings
_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
_libc = ctypes.CDLL(None)

Settings = tuple[tuple[str, object], ...]  # in types that any process knows

_UMASK = re.compile(r"^Umask:\s+(\d+)$", re.MULTILINE)
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_SCORE = Path("/proc/self/oom_score_adj")
# Machines of an engine keep what their system gives to a process, and take over the rest.
_OF_THE_MACHINE = {"nice", "affinity", "limits", "score", "slack"}
_NUMPY = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
# The settings of torch by name, with their first values.
_TORCH: Mapping[str, object] = {
    "dtype": "float32",
    "deterministic": (False, False),
    "precision": "highest",
    "grad": True,
    "sharing": "file_descriptor",
    "device": "",
}
_FLAGS: Mapping[tuple[str, str], bool] = {
    ("cudnn", "enabled"): True,
    ("cudnn", "benchmark"): False,
    ("cudnn", "deterministic"): False,
    ("cudnn", "allow_tf32"): True,
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"): True,
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"): True,
}


def of_this_process() -> Settings:
    """Return the settings that a rank must ``apply``."""
    # All together, they take a tenth of a millisecond of each call.
    found = _of_the_system() | {"locale": locale.setlocale(locale.LC_ALL), "filters": _warning_filters()}
    if "numpy" in sys.modules:
        import numpy as np

        found["numpy"] = tuple(sorted(np.geterr().items()))
    if "torch" in sys.modules:
        found |= _of_torch()
    return tuple(found.items())


def of_the_program() -> Settings:
    """Return the settings that hold on any machine, without those that this machine's system gives to a process."""
    return without_the_machines(of_this_process())


def without_the_machines(settings: Settings) -> Settings:
    """Return those of these settings that hold on any machine."""
    return tuple(one for one in settings if one[0] not in _OF_THE_MACHINE)


def inherited() -> Settings:
    """Return the settings that any child of this process inherits from the system."""
    return tuple(_of_the_system().items())


def _of_the_system() -> dict[str, object]:
    return {
        "umask": _umask(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": tuple(sorted(os.sched_getaffinity(0))),
        "limits": tuple((number, *resource.getrlimit(number)) for number in _LIMITS),
        "score": _score(),
        "slack": _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0),  # nanoseconds by which timers of this thread may be late
    }


def apply(settings: Settings) -> None:
    """Take over the settings that differ here. Leave out what the system does not allow."""
    for name, value in settings:
        with contextlib.suppress(OSError, ValueError, locale.Error):
            _APPLY[name](value)


def _umask() -> int:
    """Return the umask as the kernel shows it: asking for it with ``umask`` changes it, for all threads."""
    with contextlib.suppress(OSError):
        found = _UMASK.search(Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"))
        if found:
            return int(found[1], 8)
    mask = os.umask(0o077)  # there is no /proc: for a moment, files of other threads are this user's only
    os.umask(mask)
    return mask


def _score() -> str:
    with contextlib.suppress(OSError):
        return _SCORE.read_text(encoding="utf-8").strip()  # not ASCII: each rank would import that
    return ""


def _set_score(value: str) -> None:
    if value and value != _score():
        _SCORE.write_text(value, encoding="utf-8")


def _set_nice(value: int) -> None:
    if value != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, value)


def _set_limits(value: tuple[tuple[int, int, int], ...]) -> None:
    for number, *limits in value:
        if tuple(limits) != resource.getrlimit(number):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (limits[0], limits[1]))


def _set_affinity(value: tuple[int, ...]) -> None:
    if set(value) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, value)


def _set_locale(value: str) -> None:
    if value != locale.setlocale(locale.LC_ALL):
        locale.setlocale(locale.LC_ALL, value)


# torch and numpy


def _of_torch() -> dict[str, object]:
    """Return torch's settings that differ from their first values."""
    import torch
    import torch.multiprocessing

    from mlaunch.torch_parts import lacking

    device = lacking.that_was_set()
    found: dict[str, object] = {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        "device": device.type if device is not None else "",  # the number is the caller's own
    }
    changed = {name: value for name, value in found.items() if value != _TORCH[name]}
    flags = [(*key, value) for key, value in ((key, _flag(*key)) for key in _FLAGS) if value != _FLAGS[key]]
    return changed | ({"flags": tuple(flags)} if flags else {})


def _backend(name: str) -> Any:
    import torch

    found: Any = torch.backends
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _flag(backend: str, name: str) -> object:
    try:
        value = getattr(_backend(backend), name)
    except (AttributeError, RuntimeError):  # this torch does not have it, or it was set in torch's other way
        return _FLAGS[backend, name]
    return value if isinstance(value, bool) else _FLAGS[backend, name]


def _set_flags(value: tuple[tuple[str, str, bool], ...]) -> None:
    for backend, name, wanted in value:
        setattr(_backend(backend), name, wanted)


def _set_sharing(value: str) -> None:
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy(value)  # type: ignore[no-untyped-call]


def _torch() -> types.ModuleType:
    import torch

    return torch


def _set_numpy(value: tuple[tuple[str, Any], ...]) -> None:
    if dict(value) != _NUMPY:
        import numpy as np

        np.seterr(**dict(value))


def _set_timer_slack(nanoseconds: int) -> None:
    _libc.prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


# Filters of warnings


def _warning_filters() -> tuple[tuple[object, ...], ...]:
    """Return the warning filters, without those for classes that are defined in the script."""
    return tuple(
        (action, _pattern(text), f"{kind.__module__}:{kind.__qualname__}", _pattern(module), line)
        for action, text, kind, module, line in warnings.filters[:_MOST_FILTERS]
        # When filters are set, the rank has not imported the script's __main__ yet.
        if isinstance(kind, type) and kind.__module__ != "__main__"
    )


def _pattern(found: re.Pattern[str] | str | None) -> tuple[str, int] | str | None:
    return (found.pattern, found.flags) if isinstance(found, re.Pattern) else found


def _set_warning_filters(value: tuple[tuple[Any, ...], ...]) -> None:
    """Take over the filters that differ here."""
    if value == _warning_filters():
        return
    found = []
    for action, text, kind, module, line in value:
        with contextlib.suppress(Exception):  # whatever a module may raise
            found.append((action, _compiled(text), _warning_class(kind), _compiled(module), line))
    warnings.filters[:] = [*found, *(one for one in warnings.filters if one not in found)]  # type: ignore[index]
    # The list was changed in place, which the C code's cache of answers does not notice.
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _compiled(found: tuple[str, int] | str | None) -> re.Pattern[str] | str | None:
    return re.compile(*found) if isinstance(found, tuple) else found


def _warning_class(name: str) -> object:
    module, _, qualname = name.partition(":")
    return _held_by(module, qualname) or _LaterWarning(
        qualname, (Warning,), {"__module__": module, "__qualname__": qualname}
    )


def _held_by(module: str, qualname: str) -> object:
    """Return the object with this name in a module that is imported, or None."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


class _LaterWarning(type):
    """A placeholder for a class of warnings whose module is not imported: IPython's import takes half a second."""

    def __subclasscheck__(cls, other: type) -> bool:
        found = _held_by(cls.__module__, cls.__qualname__)
        return isinstance(found, type) and issubclass(other, found)


_APPLY: Mapping[str, Callable[[Any], object]] = {
    "umask": os.umask,
    "limits": _set_limits,
    "nice": _set_nice,
    "affinity": _set_affinity,
    "score": _set_score,
    "slack": _set_timer_slack,
    "locale": _set_locale,
    "filters": _set_warning_filters,
    "numpy": _set_numpy,
    "dtype": lambda value: _torch().set_default_dtype(getattr(_torch(), value)),
    "deterministic": lambda value: _torch().use_deterministic_algorithms(value[0], warn_only=value[1]),
    "precision": lambda value: _torch().set_float32_matmul_precision(value),
    "grad": lambda value: _torch().set_grad_enabled(value),
    "sharing": _set_sharing,
    "device": lambda value: _torch().set_default_device(value),
    "flags": _set_flags,
}


# Variables that libraries read while they are loaded

# A fork server that loaded its libraries under other values does not fit the call. This lists the variables that C code
# reads, or Python code reads by a prefix; a test asks the loader for all of them. The warm server itself notes what
# Python code reads by name (warm/server/import_record.py).
_READ_AT_IMPORT = (
    "TORCH", "PYTORCH", "KINETO_", "USE_LIBUV", "FX_",
    "OMP_", "GOMP_", "KMP_", "ACC_", "GFORTRAN_",
    "MKL_", "INTEL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_",
    "CUBLAS_LOG", "CUBLASLT_LOG", "CUDNN_LOG", "NVIDIA_TF32_OVERRIDE", "OPENSSL_",
    "LD_", "PYTHON", "MALLOC_", "TQDM_",
)  # fmt: skip
_SET_PER_RANK = ("TORCHELASTIC_", "OMP_NUM_THREADS")


def import_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of the variables that libraries read while they are loaded."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_AT_IMPORT) and not name.startswith(_SET_PER_RANK)
    }


def with_import_variables_of(environ: Mapping[str, str], by: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables that libraries read while they are loaded taken from ``by``."""
    ours = import_variables(environ)
    return {name: value for name, value in environ.items() if name not in ours} | import_variables(by)
