"""What a launch tells of its ranks to who looks at it."""

from mlaunch.insight.agent.inspector import Inspector

part = Inspector
