"""The events of a call, and their sinks: a callable, a file, OpenTelemetry."""

from mlaunch.events.caller.call_events import part as part
