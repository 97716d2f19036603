"""A logging handler that stores the hub's log lines as events."""

from __future__ import annotations

import logging
from collections.abc import Callable

from echo_hub.operation.events import event_of
from echo_hub.operation.log_lines import EXTRA
from echo_shared.books import RunEvent


class EventLog(logging.Handler):
    """Makes an event of each line from level INFO on, and passes it to `note` in the logging thread."""

    def __init__(self, note: Callable[[RunEvent], object]) -> None:
        super().__init__(logging.INFO)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        extra = {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        try:
            event = event_of(at=record.created, level=record.levelno, text=record.getMessage(), extra=extra)
        except (TypeError, ValueError):
            self.handleError(record)
        else:
            self._note(event)
