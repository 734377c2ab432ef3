"""A call's way to its devices."""

from mlaunch.leases.caller.requests import part as part
