"""The request that ``mlaunch stop`` sends."""

from __future__ import annotations

from mlaunch.agreed_stop.wire import NAME
from mlaunch.protocol.visitors import ASK

STOP = ASK + NAME.encode()  # to a launch
