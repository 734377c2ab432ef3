"""The command ``mlaunch``. Its parts are imported when chosen: each would cost ``run`` a tenth of its start."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from mlaunch.cli.parser import OF_FEATURES, PRINT_COMPLETION, completion_parser, mlaunch_parser, refuse_script
from mlaunch.core import load


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
