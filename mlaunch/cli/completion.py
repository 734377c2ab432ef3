"""``mlaunch run --print-completion``: a script by which a shell completes this command, made by shtab."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from mlaunch.cli.parser import mlaunch_parser


class PrintCompletion(argparse.Action):
    """Prints the script and ends, as ``--help`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        _option_string: str | None = None,
    ) -> None:
        """Prints it for the shell that ``values`` names."""
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            parser.error("--print-completion needs the package shtab: pip install 'mlaunch[completion]'")
        if values not in shtab.SUPPORTED_SHELLS:
            parser.error(f"--print-completion {values}: allowed: {', '.join(shtab.SUPPORTED_SHELLS)}")
        print(shtab.complete(mlaunch_parser(parser), shell=values))
        parser.exit()
