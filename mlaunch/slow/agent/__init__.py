"""Compares what the ranks of a machine wait for."""

from mlaunch.slow.agent.lookout import part as part
