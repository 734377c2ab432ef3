"""The agent's comparison of how long ranks wait for others."""

from mlaunch.slow.agent.slow_watch import part as part
