"""How a call comes to its devices."""

from mlaunch.leases.caller.requests import part as part
