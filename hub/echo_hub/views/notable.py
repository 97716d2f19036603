"""The hub's newest log lines, kept for the operator's page."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from echo_hub.dashboard.model import NotableEvent

EVENTS_KEPT: Final = 50
MOST_CHARACTERS: Final = 500


class NotableLog(logging.Handler):
    """Keeps the newest lines of the loggers that it is added to, newest first; `notify` is called for each, by the
    thread that logs it."""

    def __init__(self, notify: Callable[[], object]) -> None:
        super().__init__(logging.INFO)
        self._notify = notify
        self.events: deque[NotableEvent] = deque(maxlen=EVENTS_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:MOST_CHARACTERS]
        except (TypeError, ValueError):
            self.handleError(record)
        else:
            warning = record.levelno >= logging.WARNING
            self.events.appendleft(NotableEvent(at=record.created, text=text, warning=warning))
            self._notify()
