"""Debuggers in ranks, from the process that calls or from another terminal."""

from mlaunch.debug.caller.debugged_call import adapt as adapt
from mlaunch.debug.caller.debugged_call import handle as handle
from mlaunch.debug.caller.debugged_call import noted as noted
from mlaunch.debug.caller.debugged_call import part as part
