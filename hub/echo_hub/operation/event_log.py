"""A logging handler that stores the hub's log lines as events."""

from __future__ import annotations

import logging
from typing import Protocol

from echo_hub.operation.events import event_of
from echo_hub.operation.log_lines import EXTRA
from echo_shared.records.run import RunEvent


class Notes(Protocol):
    """Takes events for the store. Implemented by `echo_hub.driving.driver`."""

    def note_threadsafe(self, event: RunEvent) -> None:
        """Take an event. May be called from any thread."""


class EventLog(logging.Handler):
    """Makes an event of each line at level INFO or above of the loggers that it is added to. Passes it to `notes` on
    the thread that logs."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.INFO)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        try:
            event = event_of(at=record.created, level=record.levelno, text=record.getMessage(), extra=extra)
        except (TypeError, ValueError):
            self.handleError(record)
        else:
            self._notes.note_threadsafe(event)
