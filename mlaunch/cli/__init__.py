"""The command ``mlaunch``. Its parts import what they need when they are chosen: ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mlaunch._version import __version__
from mlaunch.cli import doctor, inspect

_EXAMPLES = """\
examples:
  mlaunch run --nproc-per-node 4 train.py
                           a script on four ranks (mlaunch run --help tells more)
  mlaunch ps               what is running, and what each rank is doing
  mlaunch stacks 3f2a      where the ranks of the launch 3f2a... are in their code
  mlaunch doctor           what this machine offers, and what would go wrong

exit status: 0, 1 for an error that is told, 2 for a wrong command line; of run: see mlaunch run --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:  # whose script's arguments are not ours to read
            from mlaunch.cli import run

            return run.main(arguments[1:])
        args = _parser().parse_args(arguments)
        return int(args.run(args))
    except BrokenPipeError:  # of a reader such as head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (OSError, LookupError) as error:
        print(f"mlaunch: {error.args[0] if isinstance(error, LookupError) else error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlaunch",
        description="Starts scripts on every device, looks at launches on this machine, and at the machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mlaunch {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("run", help="run a script once per device, as torchrun does", add_help=False)
    inspect.add_commands(commands)
    doctor.add_command(commands)
    return parser
