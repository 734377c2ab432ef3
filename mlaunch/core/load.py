"""Makes the parts of a launch's features, in each process, and holds them together."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlaunch.base.misuse import misuse
from mlaunch.features import FEATURES, asked_for

if TYPE_CHECKING:
    from mlaunch.caller.launch.settle import Ended
    from mlaunch.caller.options.launch_options import Options
    from mlaunch.caller.server.fork_server import ForkServer
    from mlaunch.caller.server.start_server import Interpreter
    from mlaunch.core.parts import CallerPart, Delay, Grant, MachinePart, RankPart, Spell, Tell
    from mlaunch.protocol.spec import LaunchSpec


def as_keyword(option: str, value: object) -> str:
    """Spell an option as Python does: ``profile='trace.json'``."""
    return f"{option}={list(value)}" if isinstance(value, tuple) else f"{option}={value!r}"


def as_flag(option: str, value: object) -> str:
    """Spell an option as ``mlaunch run`` does: ``--profile-ranks 0,1``."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{option.replace('_', '-')} {text}"


class CallerParts:
    """Those of one call, by feature; to be held around its attempts.

    Not a context manager of contextlib's, which would set attributes of what passes through it.
    """

    def __init__(self, options: object, spell: Spell = as_keyword) -> None:
        self._parts: dict[str, CallerPart] = {}
        try:
            for feature in asked_for(options):
                asked = spell(feature.options[0], getattr(options, feature.options[0]))
                self._parts[feature.name] = room(feature.name, "caller", asked).part(options, spell)
        except BaseException:
            self._close()
            raise
        self.sections = {name: part.section for name, part in self._parts.items() if part.section is not None}

    def __enter__(self) -> CallerParts:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def acquire(self, grant: Grant, server: ForkServer, name: str) -> Generator[Delay, None, Grant]:
        """Wait for what an attempt needs, one part after the other; to be closed by whoever stops waiting."""
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

    def settled(self, ended: Ended, tell: Tell) -> None:
        for part in reversed(self._parts.values()):
            part.settled(ended, tell)

    def _close(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, whatever one raises
            for part in self._parts.values():
                stack.callback(part.close)


def sections_of(options: Options, parts: CallerParts | None) -> Mapping[str, object]:
    """Return what a launch's other processes get. ``parts``: None: nobody holds any around the call."""
    if parts is not None or not options.features:
        return {} if parts is None else parts.sections
    with CallerParts(options) as own:
        return own.sections


def room(feature: str, process: str, asked: str) -> Any:
    """Return a feature's module for a process. ``asked``: what was asked for, for the error where there is none."""
    try:
        return _import(feature, process)
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


def _import(feature: str, process: str) -> Any:
    return importlib.import_module(f"mlaunch.{feature}.{process}")


class RankParts:
    """Those of one rank."""

    def __init__(self, spec: LaunchSpec, local_rank: int) -> None:
        rank = spec.rank(local_rank)
        self._parts: list[RankPart] = [_import(name, "rank").part(its, rank) for name, its in spec.sections.items()]

    @property
    def place(self) -> str:
        return ", ".join(part.place for part in self._parts if part.place)

    @property
    def decides(self) -> set[str]:
        return {name for part in self._parts for name in part.decides}

    def begin(self, spec: LaunchSpec, local_rank: int) -> LaunchSpec:
        """Have all act; return the launch with the variables that they have for this rank."""
        usual = {name: value for part in self._parts for name, value in part.begin(spec, local_rank).items()}
        if not usual:
            return spec
        return replace(spec, context=replace(spec.context, environ={**usual, **spec.context.environ}))

    def around_call(self) -> contextlib.ExitStack:
        """Return what the rank holds while it runs a function or a script."""
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.around_call())
            return stack.pop_all()


class MachineParts:
    """Those of a launch on one machine of an engine; to be held around it. ``spec``: with their sections in it."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._parts: dict[str, MachinePart] = {}
        try:
            for name, section in spec.sections.items():
                self._parts[name] = _import(name, "member").part(section)
        except BaseException:
            self.__exit__()
            raise
        self.spec = replace(spec, sections={name: part.section for name, part in self._parts.items()})

    def __enter__(self) -> MachineParts:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.callback(part.close)

    def last_words(self, spec: LaunchSpec) -> Iterator[tuple[str, object]]:
        """Yield what goes to the caller's parts, with the feature's name. ``spec``: as all machines agreed on it."""
        for name, part in self._parts.items():
            for news in part.last_words(spec):
                yield name, news


def command(feature: str) -> Any:
    """Return the module that has a feature's flags or commands; None if it is not there."""
    try:
        return _import(feature, "command")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"mlaunch.{feature}"):
            raise
    return None


def commands() -> Mapping[str, Any]:
    """Return the module that has a feature's flags, for each feature that is there and has some."""
    found = {feature.name: command(feature.name) for feature in FEATURES if feature.options}
    return {name: module for name, module in found.items() if module is not None}


def server_at_hand(environ: Mapping[str, str], like: Interpreter) -> ForkServer | None:
    """Return a fork server that some feature has; None: a fresh interpreter is to be started.

    ModuleNotFoundError: one is asked for by its variable, and is not there.
    """
    for feature in FEATURES:
        if feature.servers:
            asked = os.environ.get(feature.variable, "")
            try:
                found = room(feature.name, "caller", f"{feature.variable}={asked}")
            except ModuleNotFoundError as error:
                if asked not in {"", "0"} or error.name != f"mlaunch.{feature.name}":
                    raise
                continue
            server: ForkServer | None = found.server(environ, like)
            if server is not None:
                return server
    return None
