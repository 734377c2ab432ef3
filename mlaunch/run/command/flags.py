"""The flags of ``mlaunch run``: torchrun's, in both spellings and from ``PET_*`` variables, and mlaunch's own.

Flags that only torchrun has are refused by name, with the reason.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mlaunch.caller.options.launch_options import Options, about
from mlaunch.caller.options.option_fields import ENDING, MEETING, OUTPUT, SIZES, Flag
from mlaunch.cli import PrintCompletion, PrintManPage, UsageError
from mlaunch.core import load
from mlaunch.run.command.ending import errors, note_error

STD_HELP = "0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:3,1:2"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
# Named, so that a command line for torchrun gets the reason.
_REFUSED = {
    "--start-method": "ranks are always forked from one fresh interpreter",
    "--event-log-handler": "it names a plug-in of torchrun's; --events writes a file, or spans of OpenTelemetry",
    "--logs-specs": "it names a plug-in of torchrun's; use --log-dir, --redirects, --tee and --local-ranks-filter",
    "--duplicate-stdout-filters": "search the files of --log-dir instead",
    "--duplicate-stderr-filters": "search the files of --log-dir instead",
    "--local-addr": "the interface that leads to the master is used; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose "
    "another one for the ranks",
}
_EXAMPLES = """\
examples:
  mlaunch run --nproc-per-node 4 train.py --lr 0.1     four ranks of a script
  mlaunch run --nproc-per-node gpu -m package.train    a rank per GPU, of a module
  mlaunch run --nproc-per-node 2 package.train:main    two ranks of a function
  mlaunch run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 8 train.py
                                                       the second of two machines
  mlaunch run --nproc-per-node 2 --tee 3 --log-dir logs train.py
                                                       lines with their rank in front, and in files
  mlaunch run --nproc-per-node 8 --dry-run train.py    what would be started

Each flag of torchrun's also works with underscores, and as a variable: PET_NPROC_PER_NODE=4.

exit status, of the first rank that failed:
  0      every rank ended with 0
  1      a rank raised an error, or the ranks could not be started
  2      the command line is wrong
  52     memory ran out
  75     the run stopped as it was asked to: start it again, and it continues
  93     it failed twice in the same way: do not start it again unchanged
  124    its time was up
  128+N  signal N ended a rank or this command (Ctrl-C: 130); 143 also for mlaunch stop
  N      a rank ended with exit code N
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows one spelling of each flag, and breaks no line at a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # as argparse does, only for help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Flags(argparse.ArgumentParser):
    """The parser. It checks values from the environment, too."""

    def __init__(self, environ: Mapping[str, str], **settings: Any) -> None:
        super().__init__(formatter_class=_Formatter, epilog=_EXAMPLES, usage=_usage(settings), **settings)
        self.environ = environ

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Read the flags before the script; all words after it are the script's."""
        # argparse compares all words with the flags, even those of REMAINDER: a script's --r=16 would be ambiguous.
        end = self._place_of_script(args) + 1
        errors.begin(_given("--error-file", args[:end]))  # an error in these words goes there, too
        found: argparse.Namespace = super().parse_args(args[:end], namespace)
        separated = args[end : end + 1] == ["--"]  # torchrun's script does not get it either
        found.training_script_args = list(args[end + separated :])
        return found

    def _place_of_script(self, args: Sequence[str]) -> int:
        """Return the index of the first word that is neither a flag nor the value of one."""
        index = 0
        while index < len(args) and args[index].startswith("-") and args[index] != "-":
            if args[index] == "--":
                return index + 1
            index += 2 if self._wants_next_word(args[index]) else 1
        return index

    def _wants_next_word(self, word: str) -> bool:
        if not word.startswith("--") and len(word) > 2:  # -r3, -mr
            first = self._option_string_actions.get(word[:2])
            return first is not None and first.nargs == 0 and self._wants_next_word(f"-{word[2:]}")
        known = self._option_string_actions.get(word)
        candidates = [known] if known else [candidate[0] for candidate in self._get_option_tuples(word)]
        return "=" not in word and len(candidates) == 1 and candidates[0].nargs is None

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command; note a wrong command line for its starter, too."""
        if status and message:
            note_error(message.strip(), status)
        super().exit(status, message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return the flags that begin so, each once: two spellings of one flag are not ambiguous."""
        found: dict[int, Any] = {}
        for candidate in super()._get_option_tuples(option_string):
            found.setdefault(id(candidate[0]), candidate)
        return list(found.values())

    def flag(self, group: Any, *names: str, default: Any = None, kind: Callable[[str], Any] = str, **more: Any) -> None:
        """Add a flag with a value, in both spellings."""
        variable = _variable(names)
        given = self.environ.get(variable)
        if given is not None:
            try:
                default = kind(given)
            except argparse.ArgumentTypeError as error:
                self.error(f"{variable} in the environment: {error}")
            except ValueError:
                self.error(f"{variable}={given!r} in the environment: not a valid value of {names[-1]}")
        group.add_argument(*_spellings(names), type=kind, default=default, **more)

    def switch(self, group: Any, *names: str, **more: Any) -> None:
        variable = _variable(names)
        given = self.environ.get(variable, "0")
        if not given.lstrip("-").isdecimal():
            self.error(f"{variable}={given!r} in the environment: allowed: 0 or 1")
        group.add_argument(*_spellings(names), action="store_true", default=bool(int(given)), **more)


def _given(name: str, words: Sequence[str]) -> str | None:
    """Return the value of a flag in words that are not parsed yet."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, has_value, value = word.replace("_", "-").partition("=")[0], "=" in word, word.partition("=")[2]
        if flag == name and (has_value or following):
            return value if has_value else following
    return None


def _usage(settings: Mapping[str, Any]) -> str:
    return f"{settings['prog']} [options] script.py|-m module|module:function [arguments of the script]"


def _variable(names: tuple[str, ...]) -> str:
    longest = next(name for name in names if name.startswith("--"))
    return f"PET_{longest.lstrip('-').replace('-', '_').upper()}"


def _spellings(names: tuple[str, ...]) -> list[str]:
    other = [name[:2] + name[2:].replace("-", "_") for name in names]
    return list(dict.fromkeys([*names, *other]))


def parser(prog: str, environ: Mapping[str, str] | None = None) -> Flags:
    flags = Flags(
        os.environ if environ is None else environ,
        prog=prog,
        description="Run a script once per device, as torchrun does, from one interpreter that imports torch once.",
    )
    _add_sizes(flags)
    _add_meeting(flags)
    _add_what(flags)
    _add_output(flags)
    _add_ending(flags)
    flags.add_argument("--print-completion", "--print_completion", action=PrintCompletion, metavar="SHELL",
                       help="print a completion script for a shell (bash, zsh, tcsh, fish); needs shtab")  # fmt: skip
    flags.add_argument("--print-man-page", action=PrintManPage, nargs=0,
                       help="print the page for man mlaunch; needs argparse-manpage")  # fmt: skip
    for name, reason in _REFUSED.items():
        flags.flag(flags, name, help=argparse.SUPPRESS, kind=_refuse(name, reason))
    flags.add_argument("training_script", metavar="SCRIPT", help=argparse.SUPPRESS)
    rest = flags.add_argument(
        "training_script_args", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    rest.required = False  # else the error for no script names both
    return flags


def _refuse(name: str, reason: str) -> Callable[[str], str]:
    def refuse(_value: str) -> str:
        raise argparse.ArgumentTypeError(f"{name} is not supported: {reason}")

    return refuse


def _group(flags: Flags, title: str) -> Any:
    """Add a group of flags, with those that set an option (of features that are there)."""
    group = flags.add_argument_group(title)
    for name, flag in FLAGS.items():
        if flag.group == title and load.is_there_for(name):
            _add(flags, group, flag, about(name).allowed.word)
    return group


def _add(flags: Flags, group: Any, flag: Flag, kind: type) -> None:
    said = flag.meaning.replace("%", "%%")
    if not flag.metavar:
        group.add_argument(*flag.names, action="store_true", default=None, help=said)
    elif flag.torchruns:
        flags.flag(group, *flag.names, kind=flag.kind or kind, metavar=flag.metavar, help=said)
    else:
        group.add_argument(*flag.names, type=flag.kind or kind, metavar=flag.metavar, help=said)


def _add_sizes(flags: Flags) -> None:
    group = _group(flags, SIZES)
    flags.switch(group, "--virtual-local-rank", help="each rank sees only its own device, as device 0; LOCAL_RANK is 0")


def _add_meeting(flags: Flags) -> None:
    group = _group(flags, MEETING)
    flags.flag(group, "--rdzv-endpoint", default="", metavar="HOST:PORT", help="--master-addr and --master-port in one")
    flags.flag(group, "--rdzv-backend", default="static", metavar="NAME", help="how a machine gets its number: static "
               "(default), by --node-rank; c10d: the machine at the endpoint's address is 0; with two machines, the "
               "other is 1; with more, give --node-rank")  # fmt: skip
    flags.flag(
        group, "--rdzv-id", default="none", metavar="ID", help="the name of the run: TORCHELASTIC_RUN_ID of the ranks"
    )
    flags.switch(group, "--standalone", help="one machine, a free port; --rdzv-* and --master-* have no effect")


def _add_what(flags: Flags) -> None:
    group = flags.add_argument_group("what is run")
    flags.switch(group, "-m", "--module", help="run a module, as python -m does")
    flags.switch(group, "--no-python", help="run a program that is not a Python script")
    flags.switch(group, "--run-path", help="accepted, but has no effect")
    flags.flag(group, "--role", default="default", help="ROLE_NAME of the ranks (default: default)")
    group.add_argument("--preload", metavar="A,B", help="modules to import once, before the ranks are forked")
    group.add_argument("--dry-run", action="store_true", help="print the plan: ranks, devices, addresses, environment")


def _add_output(flags: Flags) -> None:
    group = _group(flags, OUTPUT)
    flags.flag(
        group, "-r", "--redirects", default="0", metavar="STD", help=f"write to files, not to the terminal: {STD_HELP}"
    )
    flags.flag(
        group, "-t", "--tee", default="0", metavar="STD", help="write to files, and to the terminal with a prefix"
    )
    flags.flag(group, "--log-line-prefix-template", default="", metavar="TEMPLATE", help="the prefix, of "
               "${role_name}, ${rank}, ${local_rank}, ${hostname} (default: $TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE, or "
               "[${role_name}${local_rank}]:)")  # fmt: skip
    flags.flag(group, "--local-ranks-filter", default="", metavar="I,J", help="show only what these local ranks print")


def _add_ending(flags: Flags) -> None:
    group = _group(flags, ENDING)
    flags.flag(
        group,
        "--monitor-interval",
        kind=float,
        metavar="SECONDS",
        help="accepted, but has no effect: the end of a rank is noticed at once",
    )
    flags.flag(group, "--signals-to-handle", default=DEFAULT_SIGNALS, metavar="NAMES",
               help=f"signals to pass on to the ranks before ending (default: {DEFAULT_SIGNALS})")  # fmt: skip
    group.add_argument("--error-file", "--error_file", metavar="FILE", help="if the run fails, write the reason to "
               "FILE: JSON for programs, see docs/schema.json")  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that flags ask for, less those that the command reads with others. UsageError for misuse."""
    found: dict[str, Any] = {}
    for name, flag in FLAGS.items():
        given = getattr(args, dest_of(flag), None)
        if given is None or flag.apart:
            continue
        if flag.of_python and args.no_python:
            raise UsageError(f"{flag.names[0]} with --no-python: allowed: one of the two, since {flag.of_python}")
        try:
            found[name] = about(name).allowed.read(flag.names[0], given)
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name in found:
        needs, why = about(name).needs or (name, "")
        if needs not in found:
            own, other = FLAGS[name].names[0], FLAGS[needs].names[0]
            raise UsageError(f"{own} {found[name]} without {other}: {why}; allowed: with {other}")
    return found


def dest_of(flag: Flag) -> str:
    """Return the name under which argparse has the flag's value."""
    return flag.names[0].lstrip("-").replace("-", "_")


def as_flag(option: str, value: object) -> str:
    """Spell an option as ``mlaunch run`` does: ``--profile-ranks 0,1``."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f"{FLAGS[option].names[0] if option in FLAGS else option} {text}"


FLAGS = {name: flag for name in Options.__dataclass_fields__ if name != "_" and (flag := about(name).flag) is not None}
