"""Calls that return before their ranks do, in the process that makes them."""

from mlaunch.sweeps.caller.methods import ManyCalls as ManyCalls
