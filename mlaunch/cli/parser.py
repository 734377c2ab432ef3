"""The command line of ``mlaunch``, without the flags of ``mlaunch run``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from mlaunch._version import __version__
from mlaunch.cli import doctor, launch_commands
from mlaunch.cli.checks import OF_FEATURES, PRINT_COMPLETION
from mlaunch.core import load

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


def mlaunch_parser(run: argparse.ArgumentParser | None = None) -> argparse.ArgumentParser:
    """Make the parser of the whole command. ``run``: the flags of ``mlaunch run``; None: it parses them itself."""
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


def _add_commands_of(feature: str, commands: launch_commands.Commands) -> None:
    """Add a feature's commands. ``cli.main`` reports a feature that is missing."""
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
