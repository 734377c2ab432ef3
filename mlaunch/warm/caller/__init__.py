"""A caller that gets its fork server from a zygote, and whoever starts zygotes, looks at them and ends them."""

from mlaunch.warm.caller.at_hand import server as server
