"""The comparison of how long ranks wait for others, in an agent."""

from mlaunch.slow.agent.slow_watch import part as part
