"""Launches that are prepared: their ranks are there before their call.

launcher -> fork server   Prepare                   (also asked for by a second socket beside StartLaunch)
launcher -> agent         BeginCall                 (over the prepared launch's own socket)
agent -> launcher         CallBegun                 (a launch that ends without it has run nothing of the call)
agent -> rank             RunCall                   (with the details)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field

from mlaunch.base.frozen_record import frozen_record
from mlaunch.protocol.settings import Settings
from mlaunch.protocol.spec import CallFacts, LaunchSpec


@frozen_record
class PrepareNext:
    """Asks for a launch like the last one, once none has run for a moment. Attached: its socket.

    If there are more descriptors, they are ``LikeFds``, for one that is like these instead. ``soon``: while others run,
    too: its call waits for what they have.
    """

    soon: bool = False


@frozen_record
class Details:
    """What of a launch may be known only with its call; see LaunchSpec."""

    call: CallFacts
    argv: tuple[str, ...]
    settings: Settings = ()
    source: str = ""
    given: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)  # more variables of its ranks
    held: int = 0  # descriptors that its processes are to hold


@frozen_record
class BeginCall:
    """Gives a prepared launch its call. Attached: the call's memfd, and what its processes are to hold."""

    details: Details


@frozen_record
class CallBegun:
    """The ranks of a prepared launch were there, and have been sent the call."""


def details_of(spec: LaunchSpec, held: int = 0) -> Details:
    """Returns a launch's details. ``held``: descriptors that its processes are to hold."""
    context = spec.context
    environ = {name: context.environ[name] for name in context.of_call}
    return Details(spec.call, context.argv, context.settings, context.source, context.given, environ, held)


def with_details(spec: LaunchSpec, details: Details) -> LaunchSpec:
    """Returns the launch with these details."""
    bare = {name: value for name, value in spec.context.environ.items() if name not in spec.context.of_call}
    own = {name: getattr(details, name) for name in ("argv", "settings", "source", "given")}
    environ, of_call = {**bare, **details.environ}, tuple(details.environ)
    context = dataclasses.replace(spec.context, environ=environ, of_call=of_call, **own)
    return dataclasses.replace(spec, call=details.call, context=context)


def shape_of(spec: LaunchSpec) -> LaunchSpec:
    """Returns the launch less its details and what is its own: of two that are equal then, one can serve the other."""
    bare = with_details(spec, Details(CallFacts("", None), ()))
    return dataclasses.replace(bare, launch_id="", secret="")
