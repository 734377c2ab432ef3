"""Events as spans of OpenTelemetry, by its API: without a set-up of its SDK they go nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import opentelemetry.trace as trace

from mlaunch.events.caller.sinks import EventSink


class SpanSink(EventSink):
    """A span for each attempt, below the caller's present one; what happens in it are its events."""

    def __init__(self) -> None:
        super().__init__()
        self._span: trace.Span | None = None

    def close(self) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def _take(self, event: Mapping[str, Any]) -> None:
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
