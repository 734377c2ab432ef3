"""The command ``mlaunch``: its parser without the flags of ``mlaunch run``, and completion.

Its parts are imported when chosen: each would cost ``run`` a tenth of its start.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import io
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mlaunch._version import __version__
from mlaunch.core import load

if TYPE_CHECKING:
    from mlaunch.cli.launch_commands import Commands

PRINT_COMPLETION = "--print-completion"
# Commands of features: each exists if its feature does.
OF_FEATURES = {"debug": "debug", "run": "run", "stacks": "insight", "why": "insight", "warm": "warm"}
_EXAMPLES = """\
examples:
  mlaunch run --nproc-per-node 4 train.py
                           a script on four ranks (for more: mlaunch run --help)
  mlaunch ps               what is running, and what each rank is doing
  mlaunch stacks 3f2a      where the ranks of the launch 3f2a... are in their code
  mlaunch why 3f2a         which rank the others wait for
  mlaunch stop 3f2a        end that launch
  mlaunch debug 3f2a 1     a debugger's prompt in its rank 1
  mlaunch warm             keep torch imported, so that commands start at once
  mlaunch doctor           what this machine offers, and what would go wrong
  mlaunch doctor --report  the same with versions and limits, for a bug report

exit status: 0 if all went well; 1 after an error, which is printed; 2 for a wrong command line. See mlaunch run --help
for that of mlaunch run.
"""


def command() -> NoReturn:
    """Run the command line, and end this process.

    It ends as an interpreter does, except for clearing three hundred modules, which takes a tenth of a command.
    """
    status = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # a full disk: the interpreter's own end says so
        sys.exit(status)
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr, for names that the locale cannot show
    try:
        if arguments and arguments[0] in OF_FEATURES:
            module = load.room(OF_FEATURES[arguments[0]], "command", f"mlaunch {arguments[0]}")
            if arguments[0] == "run":  # it parses its own flags, before a script's arguments
                return int(module.main(arguments[1:]))
        if arguments[:1] and arguments[0].partition("=")[0] == PRINT_COMPLETION:
            completion_parser().parse_args(arguments)
        parser = mlaunch_parser()
        refuse_script(parser, arguments)
        args = parser.parse_args(arguments)
        return int(args.run(args) or 0)
    except BrokenPipeError:  # the reader, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, LookupError) as error:
        print(f"mlaunch: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("mlaunch."):
            raise
        print(f"mlaunch: {error}", file=sys.stderr)  # names the missing part of mlaunch
        return 1


def mlaunch_parser(run: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Make the parser of the whole command. ``run``: the flags of ``mlaunch run``; None: it parses them itself."""
    from mlaunch.cli import doctor, launch_commands  # which mlaunch run does not need

    parser = argparse.ArgumentParser(
        prog="mlaunch",
        description="Start scripts on every device, look at running launches, and check this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mlaunch {__version__}")
    parser.add_argument(PRINT_COMPLETION, metavar="SHELL", help="print a completion script for mlaunch: bash, zsh, "
                        "tcsh, fish; needs shtab")  # fmt: skip
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")
    parents = [] if run is None else [run]
    about = "run a script once per device, as torchrun does" if load.is_there("run") else "not installed"
    commands.add_parser("run", help=about, add_help=False, parents=parents)
    launch_commands.add_ps(commands)
    _add_commands_of("insight", commands)
    launch_commands.add_stop(commands)
    _add_commands_of("debug", commands)
    doctor.add_command(commands)
    _add_commands_of("warm", commands)
    return parser


def _add_commands_of(feature: str, commands: Commands) -> None:
    """Add a feature's commands. ``main`` reports a feature that is missing."""
    if (module := load.at_hand(feature, "command")) is not None:
        module.add_command(commands)
        return
    for name, known in OF_FEATURES.items():
        if known == feature:
            commands.add_parser(name, help="not installed")


def refuse_script(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Exit with the intended command, if there is a script or a flag of ``mlaunch run`` in place of a command."""
    first = arguments[0] if arguments else ""
    is_script = first.endswith(".py") or (first.startswith("-") and any(word.endswith(".py") for word in arguments))
    if is_script:
        parser.error(f"{first}: no command of mlaunch; to run a script: mlaunch run {shlex.join(arguments)}")


class UsageError(ValueError):
    """A wrong command line; the text is for its author."""


def at_least(lowest: int, name: str, value: int) -> int:
    if value < lowest:
        raise UsageError(f"{name} {value}: allowed: {lowest} or more")
    return value


# Texts made from the flags: completion for shells (``--print-completion``), and the page of ``man mlaunch``


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


def completion_parser() -> argparse.ArgumentParser:
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
    run = load.at_hand("run", "command")
    return mlaunch_parser(None if run is None else run.parser("mlaunch run"))
