"""The text of a failed launch: why it failed, what its ranks were doing, and advice."""

from __future__ import annotations

import linecache
import os
import re
import signal
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlaunch.base.exceptions import RankFailure
from mlaunch.base.frames import (
    STATES,
    innermost_users,
    is_import,
    is_ours,
    is_prompt,
    is_ranks_own,
    is_whole_stack,
    main_frames,
    module_of,
)
from mlaunch.base.text import name_some_ranks
from mlaunch.caller.report import notebook
from mlaunch.protocol.messages import Phase, RankStacks

_SHORTENED = 150  # characters of a consequence's message
_CONSEQUENCES_SHOWN = 8
_IN_USER_CODE = {Phase.RUNNING, Phase.COMMANDED}
_WRAPPERS = {
    "wrapper", "inner", "_wrapped", "_fn", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl",
    "compile_wrapper",
}  # fmt: skip
_MODULE = "<module>"
_COLLECTIVES = os.path.join("torch", "distributed", "")
# torch wraps its collectives in a function that writes their exceptions to a log.
_ERROR_LOGGER, _LOGGING = f"{os.sep}c10d_logger.py", os.path.join("logging", "__init__.py")


@dataclass
class FailureText:
    """The text of a failed launch: the cause whole, its consequences shortened."""

    name: str  # "train()", or a command, "train.py"
    failures: Sequence[RankFailure]
    meanwhile: Sequence[str] = ()  # what the others were doing

    def __str__(self) -> str:
        cause, *others = self.failures
        lines = [f"{cause.who} of {self.name} {cause.what}", *([f"  {cause.place}"] if cause.place else [])]
        lines += [f"  {hint}" for hint in cause.hints]
        if cause.traceback:
            lines += ["", textwrap.indent(cause.traceback.rstrip(), "  ")]
        if others:
            lines += ["", "after which:", *(f"  {line}" for line in _consequences(others))]
        return "\n".join([*lines, *meanwhile(self.meanwhile)])


def _consequences(others: Sequence[RankFailure]) -> list[str]:
    """Return a line for each failure; equal failures of several ranks share one."""
    alike: dict[tuple[str, str], list[RankFailure]] = {}
    for other in others:
        is_rank = other.rank is not None and not other.subject
        alike.setdefault(("" if is_rank else other.who, _shortened(other.what)), []).append(other)
    shown = list(alike.items())[:_CONSEQUENCES_SHOWN]
    lines = [
        f"{who} {what}" if who else _of_ranks([other.rank or 0 for other in those], what)
        for (who, what), those in shown
    ]
    left = len(others) - sum(len(those) for _, those in shown)
    return [*lines, f"and {left} more (see .failures)"] if left else lines


def _of_ranks(ranks: Sequence[int], what: str) -> str:
    verb, _, rest = what.partition(" ")
    verb = "were" if verb == "was" and len(ranks) > 1 else verb
    return f"{name_some_ranks(ranks)} {verb} {rest}".rstrip()


def meanwhile(lines: Sequence[str]) -> list[str]:
    """Return the section of a report about what ranks were doing; none without lines."""
    return ["", "meanwhile:", *(f"  {line}" for line in lines)] if lines else []


def in_order(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the failures with the cause first: the earliest that does not look like a consequence.

    If all do, a process that serves ranks is nearer to the cause than a rank that has lost it.
    """
    return sorted(
        failures,
        key=lambda failure: (failure.consequence, failure.consequence and failure.rank is not None, failure.at),
    )


def _shortened(text: str) -> str:
    first, _, rest = text.partition("\n")
    first = " ".join(first.split())
    if len(first) > _SHORTENED:
        first = textwrap.shorten(first, _SHORTENED, placeholder=" ...")
    return first + (" ..." if rest else "")


def summarise(dumps: Iterable[RankStacks]) -> list[str]:
    """Return a line for each group of ranks at the same place: "ranks 0-2, 4 were in barrier at train.py:8"."""
    groups: dict[str, list[int]] = {}
    for dump in dumps:
        groups.setdefault(doing_of(dump), []).append(dump.rank)
    ordered = sorted(groups.items(), key=lambda group: min(group[1]))
    return [f"{name_some_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {words}" for words, ranks in ordered]


def doing_of(dump: RankStacks) -> str:
    """Return where a rank was: "in all_reduce at train.py:23", "joining the process group"."""
    frames = main_frames(dump.text)
    if dump.phase not in _IN_USER_CODE:
        return in_phase(dump.phase.value, frames)
    # Or it ends, or raises through our frames.
    begins = is_ranks_own(frames[-1][0]) if frames else is_whole_stack(dump.text)
    if begins and users_place(frames) is None:
        return f"{dump.phase.value}, before its first line or after its last"
    if not frames:
        return f"{dump.phase.value} and did not show its stack" + (
            f" ({STATES[dump.state]})" if dump.state in STATES else ""
        )
    return in_words(frames) or str(dump.phase.value)


def in_phase(phase: str, frames: Sequence[tuple[str, str, str]]) -> str:
    """Return where a rank is outside of the function: "shutting down, in close at train.py:7"."""
    if users_place(frames) is not None:  # in a __setstate__, an exit handler
        return f"{phase}, {in_words(frames)}"
    if not frames or not phase.startswith(Phase.LEAVING.value):
        return phase
    file, line, name = frames[-1]  # the function that is called as the rank ends
    if module_of(file) == "threading":
        return f"{phase}, waiting for threads of its own that are no daemons"
    return f"{phase}, in {name} at {notebook.short_name(file)}:{line}"


def in_words(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return where a stack, innermost frame first, is in user code: "in all_reduce at train.py:88", "at In[3]:8".

    Without user code, where it is in a library; "" if all frames are this package's.
    """
    found = users_place(frames)
    place = _outermost_of_others(frames) if found is None else found
    if place is None:
        return ""
    file, line, name = frames[place]
    inner, outer = frames[:place], frames[place + 1 :]
    if any(is_prompt(file) for file, _, _ in inner):
        doing = "in the debugger"
    elif inner and is_import(inner[-1][0]):
        doing = f"importing {_imported(inner) or _named_in(file, line) or 'a module'}"
    elif name == _MODULE and outer and is_import(outer[0][0]):
        doing = f"importing {module_of(file)}" + (f", in {called}," if (called := _called(inner)) else "")
    elif module := _imported_within(inner):
        doing = f"importing {module}, in {_called(inner)},"
    else:
        doing = f"in {_called(inner) or name}"
    return f"{doing} at {notebook.short_name(file)}:{line}"


def _outermost_of_others(frames: Sequence[tuple[str, str, str]]) -> int | None:
    """Return the index of the outermost frame that is not ours; None if a rank's own calls are below it."""
    if not frames or is_ranks_own(frames[-1][0]):
        return None
    return next((i for i in range(len(frames) - 1, -1, -1) if not is_ours(frames[i][0])), None)


def users_place(frames: Sequence[tuple[str, ...]]) -> int | None:
    """Return the index of the innermost frame of the user's (innermost frame first); None if there is none."""
    return innermost_users([file for file, *_ in frames])


def without_import(frames: Sequence[tuple[str, str, str]]) -> Sequence[tuple[str, str, str]]:
    """Return a stack, innermost frame first, without the frames of an import inside a library."""
    place = users_place(frames)
    return frames[place:] if place is not None and _imported_within(frames[:place]) else frames


def operation_of(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the collective that a stack, innermost frame first, is in; "" if it is in none, or it has no name."""
    inner = frames[: users_place(frames)]
    if _imported_within(inner) or not any(_COLLECTIVES in file for file, _, _ in inner):
        return ""
    return "" if (called := _called(inner)) == "__init__" else called  # of DistributedDataParallel


def _imported_within(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the module that a library imports meanwhile; "" if it imports none."""
    outermost = max((i for i, (file, _, _) in enumerate(frames) if is_import(file)), default=-1)
    return _imported(frames[:outermost]) or "a module" if outermost >= 0 else ""


def _imported(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the outermost module whose code runs in these frames; "" if none does yet."""
    return next((module_of(file) for file, _, name in reversed(frames) if name == _MODULE), "")


def _named_in(file: str, line: str) -> str:
    """Return the module that a line of source imports; "" if that cannot be read."""
    words = linecache.getline(file, int(line)).split() if line.isdigit() else []
    return words[1].rstrip(",") if words[:1] in (["import"], ["from"]) and len(words) > 1 else ""


def _called(frames: Sequence[tuple[str, str, str]]) -> str:
    """Return the function that user code had called, given the frames below it; "" if there are none."""
    within = ""  # the file of the wrapper
    for file, _, name in reversed(frames):
        if name in _WRAPPERS:
            within = file
        elif within.endswith(_ERROR_LOGGER) and file.endswith((_ERROR_LOGGER, _LOGGING)):
            return "a failed call of torch.distributed"
        else:
            return name
    return ""


# Advice on errors that newcomers meet in their function, chosen by torch's messages

_NO_MODULE = "raised ModuleNotFoundError"
_OF_THE_CALL = "the rank could not import"  # a note on the call itself gives the same advice
_TIMEOUT = (
    "a collective took longer than timeout=, an option of launcher in seconds: another rank does not take part in it "
    "(the report says what each was doing), or needs more time"
)
_ABORTED = (
    "it was in a collective: gloo aborts a process whose tensor has another shape or dtype than another rank's. "
    "With TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment (env=), torch compares the tensors and names both sides"
)
_STARTING = (
    'it was about to start the threads of a process group. C++ ends a process there ("terminate called") mostly '
    "because no more threads can be started: raise the pids limit (pids.max of a container's cgroup), or ulimit -u"
)
_NO_THREADS = (
    "no more threads or processes can be started here: raise the pids limit (pids.max of a container's cgroup), or "
    "ulimit -u"
)
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_MAKES_GROUPS = re.compile(
    r'distributed_c10d\.py", line \d+ in (\w*process_group\w*|new_group|_new_group\w*|split_group)\n'
)
_HINTS = {
    _NO_MODULE: "ranks look for modules on the sys.path that the caller has when they start, with the caller's "
    "interpreter: put the module's directory on sys.path before the call, or install the module into this environment "
    "(on other machines, there)",
    "trying to initialize the default process group twice": "mlaunch puts each rank into a process "
    "group before it calls the function: remove the call of init_process_group, and give backend= or timeout= to "
    "launcher for others than the defaults",
    "raised RuntimeError: can't start new thread": _NO_THREADS,
    "raised RuntimeError: Resource temporarily unavailable": _NO_THREADS,  # of C++, by pybind
    "raised BlockingIOError: [Errno 11] Resource temporarily unavailable": _NO_THREADS,
    "ms for send operation to complete": _TIMEOUT,
    "ms for recv operation to complete": _TIMEOUT,
    "Watchdog caught collective operation timeout": _TIMEOUT,
    "Duplicate GPU detected": "NCCL needs a GPU for each rank, and two ranks have the same one: bind each to its own "
    "(torch.cuda.set_device with LOCAL_RANK), or give backend='gloo', with which ranks can share one",
    "BdbQuit: its input was at its end": "a debugger found nothing to read, since ranks have no terminal: with "
    "debug=True, an option of launcher, its prompt opens where the call was made",
}


def hints_of(failure: RankFailure) -> list[str]:
    """Return advice on the failure, a line each; an empty list if none is known."""
    if failure.exitcode == -signal.SIGABRT and _C10D in failure.traceback and not failure.hints:
        return [_STARTING if _MAKES_GROUPS.search(failure.traceback) else _ABORTED]
    known = _NO_MODULE if _OF_THE_CALL in failure.traceback else ""
    return [hint for words, hint in _HINTS.items() if words in failure.what and words != known]


def of_value(error: BaseException) -> str:
    """Return advice on what to return instead of a value that cannot be made here, if there is any."""
    if "process group has not been initialized" not in str(error):
        return ""
    return (
        "; it needs a process group, which this process does not have: for a model in DistributedDataParallel, return "
        "model.module or its state_dict()"
    )
