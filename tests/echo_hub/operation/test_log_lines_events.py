from __future__ import annotations

import logging

from echo_hub.operation.log_lines import EventLog
from echo_shared.records.run import RunEvent, Severity


class Noted:
    def __init__(self, events: list[RunEvent]) -> None:
        self._events = events

    def note_threadsafe(self, event: RunEvent) -> None:
        self._events.append(event)


def test_lines_from_info_on_are_events() -> None:
    noted: list[RunEvent] = []
    handler = EventLog(Noted(noted))
    log = logging.getLogger("test.event_log")
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    log.debug("not for the operator")
    log.info("node %s joined", "a", extra={"event": "node_joined", "subject": "a"})
    log.error("broken")
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.handle(logging.LogRecord("x", logging.INFO, __file__, 1, "%d", ("no number",), None))
    log.removeHandler(handler)
    assert [(event.kind, event.subject, event.text, event.severity) for event in noted] == [
        ("node_joined", "a", "node a joined", Severity.INFO),
        ("log", "", "broken", Severity.ERROR),
    ]
    assert noted[0].at > 1e9
