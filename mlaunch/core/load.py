"""The loader of features: it makes the parts of a launch's features, in each process, and holds them together."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlaunch.base.exceptions import misuse
from mlaunch.features import FEATURES, Feature, asked_for, with_hook

if TYPE_CHECKING:
    from mlaunch.caller.fork_server import ForkServer, Interpreter
    from mlaunch.caller.launch.handle import LaunchHandle, WatchedCall
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.core.parts import CallerPart, MachinePart, RankPart, Spell, Tell, Watcher
    from mlaunch.core.records import Grant, Need
    from mlaunch.protocol.messages import RankStacks
    from mlaunch.protocol.spec import LaunchSpec


_NOT_SAID = "which rank the others waited for is not known: this installation of mlaunch lacks mlaunch/{}"


def as_keyword(option: str, value: object) -> str:
    """Spell an option as Python does: ``profile='trace.json'``."""
    return f"{option}={list(value)}" if isinstance(value, tuple) else f"{option}={value!r}"


class CallerParts:
    """The caller's parts of one call, by feature; to be held around its attempts.

    Not a context manager of contextlib's, which would set attributes of exceptions that pass through it.
    """

    def __init__(self, options: object, spell: Spell = as_keyword, features: Sequence[Feature] | None = None) -> None:
        self._parts: dict[str, CallerPart] = {}
        try:
            for feature in asked_for(options) if features is None else features:
                asked = spell(*_asked(feature, options))
                self._parts[feature.name] = room(feature.name, "caller", asked).part(options, spell)
        except BaseException:
            self.close()
            raise
        self.sections = {name: part.section for name, part in self._parts.items() if part.section is not None}

    def __enter__(self) -> CallerParts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_last(self) -> bool:
        """True if no attempt follows the present one."""
        return any(part.is_last for part in self._parts.values())

    def around(self) -> contextlib.ExitStack:
        """Return what to hold around a call that this thread waits for."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.around())
            return stack.pop_all()

    def attach(self, tell: Callable[[str, object], None]) -> None:
        """Receive the way to the agent of a new attempt; ``tell`` takes a feature's name and its word."""
        for name, part in self._parts.items():
            part.attach(functools.partial(tell, name))

    def acquire(self, grant: Grant, server: ForkServer, name: str) -> Generator[Need, None, Grant]:
        """Wait for what an attempt needs, one part after the other; a caller that stops waiting must close it."""
        for part in self._parts.values():
            try:
                more = yield from part.acquire(grant, server, name)
            except BaseException:
                grant.give_back()
                raise
            grant = more
        return grant

    def planned(self, spec: LaunchSpec) -> None:
        for part in self._parts.values():
            part.planned(spec)

    def heard(self, feature: str, news: object) -> None:
        self._parts[feature].heard(news)

    def noticed(self, word: object) -> None:
        for part in self._parts.values():
            part.noticed(word)

    def settled(self, ended: Ended, tell: Tell) -> None:
        for part in reversed(self._parts.values()):
            part.settled(ended, tell)

    def close(self) -> None:
        """Release what the parts hold, for use without a ``with`` block."""
        with contextlib.ExitStack() as stack:  # all of them, even if one raises
            for part in self._parts.values():
                stack.callback(part.close)


def adapted(options: Options) -> Options:
    """Return the options of a waiting call, with the changes that the features it asks for make to other options."""
    for feature in options.features:
        if "caller.adapt" in feature.hooks:
            options = room(feature.name, "caller", as_keyword(*_asked(feature, options))).adapt(options)
    return options


def sections_of(options: Options, parts: CallerParts | None) -> Mapping[str, object]:
    """Return the sections for a launch's other processes. ``parts`` is None if nobody holds any around the call."""
    if parts is not None or not options.features:
        return {} if parts is None else parts.sections
    with CallerParts(options) as own:
        return own.sections


def handle_of(sections: Mapping[str, object], usual: type[LaunchHandle]) -> type[LaunchHandle]:
    """Return the class that drives a launch in its caller: a feature's, or the usual one."""
    for feature in with_hook("caller.handle"):
        if feature.name in sections:
            usual = module_of(feature.name, "caller").handle(sections, usual)
    return usual


def _asked(feature: Feature, options: object) -> tuple[str, object]:
    """Return the option that asks for a feature, with its value; for a feature of each launch, its name."""
    for name in feature.options:
        if getattr(options, name) != getattr(type(options), name, None):
            return name, getattr(options, name)
    return feature.name, True


def _with_part(sections: Mapping[str, object], process: str) -> Iterator[tuple[str, object]]:
    """Yield the sections for which this process makes a part, with their features' names."""
    wanted = {feature.name for feature in with_hook(f"{process}.part")}
    return ((name, section) for name, section in sections.items() if name in wanted)


def room(feature: str, process: str, asked: str) -> Any:
    """Return a feature's module for a process. ``asked``: the request, for the error if there is no such module."""
    try:
        return module_of(feature, process)
    except ModuleNotFoundError as error:
        if error.name != f"mlaunch.{feature}":
            raise
        raise misuse(
            ModuleNotFoundError(
                f"{asked}: this installation of mlaunch lacks mlaunch/{feature}, which does it; install mlaunch "
                f"again, or do without",
                name=error.name,
            )
        ) from None


def at_hand(feature: str, process: str) -> Any:
    """Return a feature's module for a process; None if there is none."""
    try:
        return module_of(feature, process)
    except ModuleNotFoundError as error:
        if error.name not in {f"mlaunch.{feature}", f"mlaunch.{feature}.{process}"}:
            raise
    return None


def module_of(feature: str, process: str) -> Any:
    """Return a feature's module for a process, while the feature is already in use."""
    return importlib.import_module(f"mlaunch.{feature}.{process}")


def is_there_for(option: str) -> bool:
    """True if the folder of the feature that has an option is there, or no feature has it."""
    return all(is_there(feature.name) for feature in FEATURES if option in feature.options)


def is_there(feature: str) -> bool:
    """True if a feature's folder is there."""
    try:
        importlib.import_module(f"mlaunch.{feature}")
    except ModuleNotFoundError:
        return False
    return True


def turns_here() -> int:
    """Return how many steps this rank's function has made, as features count them."""
    found: list[Any] = [sys.modules.get(f"mlaunch.{feature.name}.rank") for feature in FEATURES]
    return sum(module.turns() for module in found if hasattr(module, "turns"))


class RankParts:
    """The features' parts of one rank."""

    def __init__(self, spec: LaunchSpec, local_rank: int, pipes: Mapping[int, int]) -> None:
        rank = spec.rank(local_rank)
        wanted = _with_part(spec.sections, "rank")
        self._parts: list[RankPart] = [module_of(name, "rank").part(its, rank) for name, its in wanted]
        for part in self._parts:
            part.pipes = pipes

    @property
    def place(self) -> str:
        return ", ".join(part.place for part in self._parts if part.place)

    @property
    def decides(self) -> set[str]:
        return {name for part in self._parts for name in part.decides}

    def begin(self, spec: LaunchSpec, local_rank: int) -> LaunchSpec:
        """Call ``begin`` of all parts; return the launch with the variables that they set for this rank."""
        usual = {name: value for part in self._parts for name, value in part.begin(spec, local_rank).items()}
        if not usual:
            return spec
        return replace(spec, context=replace(spec.context, environ={**usual, **spec.context.environ}))

    def before_join(self) -> None:
        for part in self._parts:
            part.before_join()

    def around_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the rank calls in place of a function."""
        for part in self._parts:
            function = part.around_function(function)
        return function

    def around_call(self) -> contextlib.ExitStack:
        """Return what the rank holds while it runs a function or a script."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.around_call())
            return stack.pop_all()


class MachineParts:
    """The features' parts of a launch on one machine of an engine. ``spec``: the launch with their sections.

    To be held around the launch.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self._parts: dict[str, MachinePart] = {}
        try:
            for name, section in _with_part(spec.sections, "member"):
                self._parts[name] = module_of(name, "member").part(section)
        except BaseException:
            self.__exit__()
            raise
        own = {name: part.section for name, part in self._parts.items()}
        self.spec = replace(spec, sections={**spec.sections, **own})

    def __enter__(self) -> MachineParts:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(part.close)

    def last_words(self, spec: LaunchSpec) -> Iterator[tuple[str, object]]:
        """Yield the last words to the caller's parts, with the feature's name.

        ``spec``: as all machines agreed on it.
        """
        for name, part in self._parts.items():
            for news in part.last_words(spec):
                yield name, news


def watchers_of(call: WatchedCall) -> list[Watcher]:
    """Return the features' watchers of a call that takes longer than a moment."""
    rooms = [at_hand(feature.name, "caller") for feature in with_hook("caller.watch")]
    made = [room.watch(call) for room in rooms if room is not None]
    return [watcher for watcher in made if watcher is not None]


def of_deadline(stacks: Sequence[RankStacks], returned: Collection[int]) -> tuple[list[str], list[int]]:
    """Return a feature's lines on ranks that a deadline has ended, and the ranks that hold up the others."""
    for feature in with_hook("caller.of_deadline"):
        module = at_hand(feature.name, "caller")
        if module is None:
            return [_NOT_SAID.format(feature.name)], []
        found: tuple[list[str], list[int]] = module.of_deadline(stacks, returned)
        return found
    return [], []


def at_breakpoint(who: str, pid: int) -> Callable[..., Any]:
    """Return the hook for ``breakpoint()`` in a rank or its child: a feature's, or else Python's own."""
    for feature in with_hook("rank.at_breakpoint"):
        with contextlib.suppress(ModuleNotFoundError):
            found: Callable[..., Any] = module_of(feature.name, "rank").at_breakpoint(who, pid)
            return found
    return sys.__breakpointhook__


def findings() -> Iterator[tuple[str, bool, str]]:
    """Yield the findings of the features that are there for ``mlaunch doctor``: name, whether all is well, sentence."""
    for feature in with_hook("command.findings"):
        if (module := at_hand(feature.name, "command")) is not None:
            yield from ((feature.name, is_well, text) for is_well, text in module.findings())


def server_at_hand(environ: Mapping[str, str], like: Interpreter) -> ForkServer | None:
    """Return the fork server of a feature; None if a new interpreter must be started.

    ModuleNotFoundError if ``MLAUNCH_WARM`` asks for a feature that is not there; the value "0" is as good as none.
    """
    for feature in with_hook("caller.server"):
        variable = f"MLAUNCH_{feature.name.upper()}"
        asked = os.environ.get(variable, "")
        try:
            found = room(feature.name, "caller", f"{variable}={asked}")
        except ModuleNotFoundError as error:
            if asked not in {"", "0"} or error.name != f"mlaunch.{feature.name}":
                raise
            continue
        server: ForkServer | None = found.server(environ, like)
        if server is not None:
            return server
    return None
