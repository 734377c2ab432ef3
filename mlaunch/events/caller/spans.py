"""Events as spans of OpenTelemetry, through its API: they go nowhere unless its SDK is set up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import opentelemetry.trace as trace


class EventSpans:
    """A span for each attempt, as a child of the caller's current one, with events in it."""

    def __init__(self) -> None:
        self._span: trace.Span | None = None

    def close(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def take(self, event: Mapping[str, Any]) -> None:
        if self._span is None:
            self._span = trace.get_tracer("mlaunch").start_span(f"mlaunch {event['function']}")
        if event["event"] == "end":
            self.close()
            return
        facts = {name: value for name, value in event.items() if isinstance(value, bool | int | float | str)}
        if event["event"] == "failure":
            failure = event["failure"]
            facts |= {name: failure[name] for name in ("kind", "rank", "host", "text") if failure[name] is not None}
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, failure["text"].partition("\n")[0]))
        attributes = {f"mlaunch.{name}": value for name, value in facts.items() if name not in {"schema", "at"}}
        self._span.add_event(event["event"], attributes, timestamp=int(event["at"] * 1e9))
