"""Calls that return before the ranks do, as their caller has them."""

from mlaunch.sweeps.caller.methods import ManyCalls as ManyCalls
