"""The word of ``mlaunch stop``."""

from __future__ import annotations

from mlaunch.agreed_stop.wire import NAME
from mlaunch.protocol.visitors import ASK

STOP = ASK + NAME.encode()  # what ``mlaunch stop`` says to a launch
