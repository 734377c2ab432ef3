"""Names of signals that may ask a run to stop."""

from __future__ import annotations

import signal

_REASONS = {
    signal.SIGKILL: "no process can handle it",
    signal.SIGSTOP: "no process can handle it",
    signal.SIGINT: "Ctrl-C ends a call at once, always",
    signal.SIGCHLD: "it announces the end of any child",
}
# A handler in Python runs after the faulting instruction, which faults again, for ever.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def numbers_of(given: str, text: str) -> tuple[int, ...]:
    """Return the signals that ``text`` names. ValueError, beginning with ``given``, for one that cannot ask."""
    found = []
    for part in text.split(","):
        name = part.strip().upper()
        known = getattr(signal.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if known is None:
            raise ValueError(f"{given}: {part.strip()!r} is no signal; allowed: names with commas, such as 'TERM,USR1'")
        why = "it announces a fault" if known in _FAULTS else _REASONS.get(known)
        if why is not None:
            raise ValueError(f"{given}: {name} cannot ask a run to stop: {why}; allowed: others, such as 'TERM,USR1'")
        found.append(int(known))
    return tuple(dict.fromkeys(found))


def name_of(number: int) -> str:
    """Return a signal's name as people write it: "TERM"."""
    return signal.Signals(number).name.removeprefix("SIG")
