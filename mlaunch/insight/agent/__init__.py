"""Answers about a launch's ranks."""

from mlaunch.insight.agent.inspector import Inspector

part = Inspector
