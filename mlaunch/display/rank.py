"""In a rank of a notebook: what it displays goes to the notebook, and ``tqdm.notebook`` draws text bars."""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mlaunch.base import linux
from mlaunch.base.fds import KeptFd
from mlaunch.core.parts import RankPart
from mlaunch.display import wire
from mlaunch.display.wire import STREAM
from mlaunch.protocol.spec import LaunchSpec


class DisplayingRank(RankPart):
    """A rank of a notebook's launch; the first rank has a pipe to the notebook."""

    def begin(self, spec: LaunchSpec, local_rank: int) -> Mapping[str, str]:
        install(self.pipes.get(STREAM, -1))
        return super().begin(spec, local_rank)


def part(_section: object, _rank: int) -> RankPart:
    return DisplayingRank()


def spec_of(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a replacement for a module that is about to be imported; None: import the module itself."""
    return importlib.util.spec_from_loader(BARS, _TextBars()) if name == BARS else _spec_of_functions(path)


def change(module: ModuleType) -> None:
    """Change a module that a fork of the caller has imported already."""
    if module.__name__ == BARS and (bar := getattr(module, "tqdm_notebook", None)) is not None:
        _turn_to_text(bar)


# Displays. Ranks without a pipe to the notebook print text.

FUNCTIONS = "IPython.core.display_functions"
_COPIES = ("IPython.display", "IPython.core.display")  # they copy its names


_senders: list[_Sender] = []  # this process's, if a notebook has called


def install(fd: int) -> None:
    """Redirect ``IPython.display``, imported before or later. ``fd``: the pipe; -1: this rank prints text."""
    builtins.display = _display  # type: ignore[attr-defined]  # as in each cell
    sender = _Sender(linux.aside(fd) if fd >= 0 else -1)
    _senders[:] = [sender]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # a fork of the notebook's own process, without the kernel's sockets and threads
        shell.display_pub.publish, shell.display_pub.clear_output = sender.publish, sender.clear_output
    elif FUNCTIONS in sys.modules:
        _replace(sys.modules[FUNCTIONS], sender)


@contextlib.contextmanager
def in_cell(formatter: Any, publisher: Any) -> Iterator[None]:
    """Have a cell's shell format objects meanwhile. ``publisher``: takes displays, too; None: the usual one."""
    for sender in _senders:
        sender.formatter, sender.publisher = formatter, publisher
    try:
        yield
    finally:
        for sender in _senders:
            sender.formatter = sender.publisher = None


def _display(*objects: Any, **options: Any) -> Any:
    import IPython.display

    show: Any = IPython.display.display  # untyped
    return show(*objects, **options)


class _Sender:
    """A publisher that writes into the pipe, in place of IPython's, which writes to its frontend."""

    def __init__(self, fd: int) -> None:
        self._pipe = KeptFd(fd)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._formatter: Any = None
        self.formatter: Any = None  # of the cell that runs
        self.publisher: Any = None

    def publish(self, data: dict[str, Any], metadata: Any = None, **options: Any) -> None:
        """Send a bundle; only its text if that is too large. What cannot be sent is printed as text."""
        if self._is_collected:
            self.publisher.publish(data, metadata, **options)
            return
        if not self._is_heard:
            print(data.get("text/plain", ""))
            return
        options = {name: options[name] for name in ("transient", "update") if options.get(name)}
        try:
            line = wire.line_of({"data": data, "metadata": metadata or {}, **options})
        except (TypeError, ValueError):  # no JSON: a key that is no text, a cycle
            print(data.get("text/plain", "") if isinstance(data, dict) else data)
            return
        if line is None:
            most = f"{wire.LIMIT >> 20} MiB"
            text = f"{str(data.get('text/plain', 'an object'))[:200]} (not shown: it takes more than {most})"
            line = wire.line_of({"data": {"text/plain": text}, "metadata": {}, **options})
        self._write(line or b"")

    def clear_output(self, wait: bool = False) -> None:
        """Clear the cell's output."""
        if self._is_collected:
            self.publisher.clear_output(wait=wait)
        elif self._is_heard:
            self._write(wire.line_of({"clear": bool(wait)}) or b"")

    @property
    def _is_collected(self) -> bool:
        return self.publisher is not None and os.getpid() == self._pid

    @property
    def _is_heard(self) -> bool:
        """True if the notebook reads the pipe; not in a worker of the rank, or if other code has closed it."""
        return os.getpid() == self._pid and self._pipe.intact()

    def _write(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # the notebook is gone
            rest = memoryview(line)
            while rest:
                # A pipe takes a large bundle in parts; the lock keeps other threads out.
                rest = rest[os.write(self._pipe.fd, rest) :]

    def format(self, thing: Any, include: Any, exclude: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return data and metadata of the object in all forms; only text if nothing else can be shown."""
        include = include if self._is_collected or self._is_heard else {"text/plain"}
        if self.formatter is not None:
            return self.formatter.format(thing, include=include, exclude=exclude)  # type: ignore[no-any-return]
        if self._formatter is None:
            from IPython.core.formatters import DisplayFormatter

            self._formatter = DisplayFormatter()
            images = self._formatter.formatters["image/png"]
            images.for_type_by_name("matplotlib.figure", "Figure", _png_of)
        return self._formatter.format(thing, include=include, exclude=exclude)  # type: ignore[no-any-return]


def _png_of(figure: Any) -> Any:
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, fmt="png", base64=True)  # type: ignore[no-untyped-call]


def _spec_of_functions(path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of IPython's functions, to be replaced before other modules copy them; None: unchanged.

    So they are not imported here: that would take half a second, even in ranks that display nothing.
    """
    spec = importlib.machinery.PathFinder.find_spec(FUNCTIONS, path) if _senders else None
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            _replace(module, _senders[0])

        spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
    return spec


def _replace(module: ModuleType, sender: _Sender) -> None:
    """Replace functions that look for a shell, which a rank does not have."""

    def display(
        *objects: Any, metadata: Any = None, transient: Any = None, display_id: Any = None, raw: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        forms = options.pop("include", None), options.pop("exclude", None)
        number = uuid.uuid4().hex if display_id is True else display_id
        sent = {**(transient or {}), **({"display_id": number} if number else {})}
        if options.get("update") and "display_id" not in sent:
            raise TypeError("display_id required for update_display")
        if options.pop("clear", False):
            sender.clear_output(wait=True)
        for thing in objects or (({},) if number else ()):
            data, told = (thing, {}) if raw or not objects else sender.format(thing, *forms)
            if data or raw or not objects:  # otherwise the object has displayed itself
                sender.publish(data, {**told, **(metadata or {})}, transient=sent, **options)
        return module.DisplayHandle(number) if number else None

    def publish_display_data(data: Any, metadata: Any = None, *, transient: Any = None, **options: Any) -> None:
        sender.publish(data, metadata, transient=transient, **options)

    new = {"display": display, "publish_display_data": publish_display_data, "clear_output": sender.clear_output}
    for place in (module, *(sys.modules[name] for name in _COPIES if name in sys.modules)):
        with contextlib.suppress(AttributeError):
            vars(place).update({name: function for name, function in new.items() if hasattr(place, name)})


# Bars. A rank has no kernel, so widgets would reach no notebook.

BARS = "tqdm.notebook"


class _TextBars(importlib.abc.Loader):
    """An unpickler that loads text bars under the module's name, which pickled functions of a notebook refer to."""

    def exec_module(self, module: ModuleType) -> None:
        from tqdm import std

        class Bar(std.tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **_for_text(kwargs))

        def bars(*args: Any, **kwargs: Any) -> Bar:
            return Bar(range(*args), **kwargs)

        vars(module).update(tqdm=Bar, tqdm_notebook=Bar, trange=bars, tnrange=bars, IProgress=None, WARN_NOIPYW="")


def _turn_to_text(bar: Any) -> None:
    """Remove all drawing methods from the class of widgets."""
    from tqdm import std

    # The class is changed, not replaced: a function that came by value may hold it, or a subclass.
    for name in vars(bar).keys() & vars(std.tqdm).keys() - {"__module__", "__doc__", "__init__"}:
        delattr(bar, name)

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        super(bar, self).__init__(*args, **_for_text(kwargs))

    bar.__init__ = begin


def _for_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a widget without those that only widgets have."""
    width = kwargs.get("ncols")
    left_out = {"display", *(("ncols",) if isinstance(width, str) else ())}  # such as "100%"
    return {name: value for name, value in kwargs.items() if name not in left_out}
