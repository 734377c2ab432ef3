"""Texts made from the flags: completion for shells (``--print-completion``), and the page of ``man mlaunch``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from mlaunch._version import __version__
from mlaunch.cli.checks import PRINT_COMPLETION
from mlaunch.core import load


class _Print(argparse.Action):
    """A flag that prints a text and ends, as ``--help`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Print what ``values`` asks for."""
        print(self._text(parser, option_string or "", values))
        parser.exit()

    def _text(self, parser: argparse.ArgumentParser, flag: str, wanted: object) -> str:
        raise NotImplementedError


def parser() -> argparse.ArgumentParser:
    """Make the parser of ``mlaunch --print-completion``."""
    found = argparse.ArgumentParser(prog="mlaunch", usage=f"mlaunch {PRINT_COMPLETION} SHELL")
    found.add_argument(PRINT_COMPLETION, action=PrintCompletion)
    return found


class PrintCompletion(_Print):
    """A flag that prints the completion script for a shell; shtab makes it."""

    def _text(self, parser: argparse.ArgumentParser, flag: str, wanted: object) -> str:
        shtab = _imported(parser, flag, "shtab", "shtab")
        if wanted not in shtab.SUPPORTED_SHELLS:
            parser.error(f"{flag} {wanted}: allowed: {', '.join(shtab.SUPPORTED_SHELLS)}")
        return str(shtab.complete(_whole(), shell=wanted))


class PrintManPage(_Print):
    """A flag that prints the manual page in roff; argparse-manpage makes it."""

    def _text(self, parser: argparse.ArgumentParser, flag: str, wanted: object) -> str:
        del wanted
        manpage = _imported(parser, flag, "argparse_manpage.manpage", "argparse-manpage")
        about = {"project_name": "mlaunch", "version": __version__, "manual_title": "mlaunch"}
        about["description"] = "run functions and scripts of PyTorch once per device"
        return str(manpage.Manpage(_whole(), about, format="single-commands-section")).rstrip()


def _imported(parser: argparse.ArgumentParser, flag: str, module: str, package: str) -> Any:
    """Import the module that makes the text; name its package if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        parser.error(f"{flag} needs the package {package}: pip install 'mlaunch[completion]'")


def _whole() -> argparse.ArgumentParser:
    """Make the parser of the whole command, with the flags of ``mlaunch run`` if that is installed."""
    from mlaunch.cli.parser import mlaunch_parser

    run = load.at_hand("run", "command")
    return mlaunch_parser(None if run is None else run.parser("mlaunch run"))
