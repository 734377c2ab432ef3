"""Texts made from the fields of ``Options``: signatures, a docstring's section, a page of the documentation."""

from __future__ import annotations

import inspect
import re
import reprlib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from mlaunch.caller.options.launch_options import Options, about

_WIDTH = 112  # of a docstring's lines
_WORD = re.compile(r'"([\w:-]+)"')  # a value, which the page shows as a literal
_MARK = "**options:"


def positional() -> list[str]:
    """Return the names of the options that may be given by position, in their order."""
    return [option.name for option in fields(Options) if not option.kw_only]


def signature_of_launcher() -> Signature:
    """Return ``launcher(func=None, n_gpus=None, ...)``."""
    func = Parameter("func", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Callable[..., Any] | None)
    return Signature([func, *_parameters()])


def signature_of_changes() -> Signature:
    """Return ``options(self, *, n_gpus=None, ...)``, by name only."""
    first = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    return Signature([first, *(given.replace(kind=Parameter.KEYWORD_ONLY) for given in _parameters())])


class SignatureOfClass:
    """The arguments of the class for ``inspect``; an instance takes those of its function."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature

    def __get__(self, instance: object, owner: type | None = None) -> Signature:
        if instance is None:
            return self._signature
        raise AttributeError("__signature__")


def _parameters() -> Iterator[Parameter]:
    types = get_type_hints(Options, localns={"KW_ONLY": object})  # the one of Python 3.10 says that it is no type
    for option in fields(Options):
        kind = Parameter.KEYWORD_ONLY if option.kw_only else Parameter.POSITIONAL_OR_KEYWORD
        yield Parameter(option.name, kind, default=option.default, annotation=types[option.name])


def with_options(docstring: str | None) -> str | None:
    """Return the docstring with the options in place of its line "**options: ..."; None (``python -OO``) stays."""
    if docstring is None:
        return None
    lines = []
    for line in inspect.cleandoc(docstring).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith(_MARK):
            lines += [entry for option in fields(Options) for entry in _argument(option, indent)]
        else:
            lines.append(line)
    return "\n".join(lines)


def _argument(option: Field[Any], indent: str) -> list[str]:
    text = f"{option.name}: {about(option.name).meaning} Default: {option.default!r}."
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + " " * 4)


def representation(name: str, function: Callable[..., Any], options: Options) -> str:
    """Return "<launcher of train(lr, epochs=5): n_gpus=2>", with the options that differ from their defaults."""
    shown = [option for option in fields(options) if option.repr and getattr(options, option.name) != option.default]
    given = ", ".join(f"{option.name}={getattr(options, option.name)!r}" for option in shown)
    return f"<launcher of {name}{_taken(function)}{': ' if given else ''}{given}>"


def _taken(function: Callable[..., Any]) -> str:
    """Return a function's parameters, without annotations, and with only the beginning of long defaults."""
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return "(...)"
    return str(Signature([one.replace(annotation=Parameter.empty, default=_Short.of(one.default)) for one in taken]))


class _Short:
    """A default value that is shown in short."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    @classmethod
    def of(cls, default: object) -> object:
        return default if default is Parameter.empty else cls(reprlib.repr(default))


def definitions() -> list[str]:
    """Return the options as a definition list of reStructuredText, by lines."""
    lines = []
    for option in fields(Options):
        said = about(option.name)
        facts = [f"Default ``{option.default!r}``", f"allowed: {said.allowed}"]
        facts += [f"flag of ``mlaunch run``: ``{said.flag.names[0]}``"] if said.flag else []
        facts += [f"variable: ``{said.variable}``"] if said.variable else []
        meaning = _WORD.sub(r'``"\1"``', said.meaning)
        lines += [f"``{option.name}``", f"    {meaning}", "", f"    {'; '.join(facts)}.", ""]
    return lines
