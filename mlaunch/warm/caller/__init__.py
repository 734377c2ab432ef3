"""The caller's side of zygotes: it gets its fork server from one, and starts, inspects and ends them."""

from mlaunch.warm.caller.at_hand import server as server
