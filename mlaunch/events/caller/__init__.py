"""Where the events of a call go: to a callable, into a file, to OpenTelemetry."""

from mlaunch.events.caller.call_events import part as part
