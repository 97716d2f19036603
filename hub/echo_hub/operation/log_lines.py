"""Handlers for everything that the hub and its libraries log while serving: RUN/logs/hub.log, and the run's events.

RUN/logs/hub.log has one JSON object per line:

    {"time": "2026-11-25T10:00:00.123Z", "level": "warning", "logger": "echo_hub.training.trainer",
     "message": "the learner died", "event": "learner_died", "subject": "", "data": {}, "exception": "Traceback ..."}

The last four fields are optional. Output is ASCII, so no line can control a terminal. Secrets from the settings are
never logged; if one appears in a library's text, it is replaced by `[secret]`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

from echo_hub.config.operation_sections import LogConfig
from echo_hub.operation.events import event_of
from echo_shared.logs.log_file import LogFile
from echo_shared.records.run import RunEvent

log = logging.getLogger(__name__)

MAX_BYTES: Final = 10_000_000
KEPT: Final = 4
"""Number of older log files that are kept. The database keeps events, so the log is needed only for details of recent
days."""
EXTRA: Final = ("event", "subject", "data")
"""Optional fields of a log line. The module `events` explains them."""
_SECRET: Final = "[secret]"


def path_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "hub.log"


class JsonLines(logging.Formatter):
    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(sorted(filter(None, secrets), key=len, reverse=True))

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in EXTRA if hasattr(record, name)},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(self._without_secrets(line), default=str, separators=(",", ":"))

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, _SECRET)
            return value
        if isinstance(value, dict):
            return {str(name): self._without_secrets(item) for name, item in value.items()}
        return value if value is None or isinstance(value, bool | int | float) else self._without_secrets(str(value))


@contextmanager
def logged_to_file(settings: LogConfig, run_dir: Path, *, secrets: Collection[str]) -> Iterator[LogFile]:
    """Inside the block, copy everything that this program logs to the run's log file, at the configured level.

    While the disk is full or the directory is read-only, lines are lost, but the program continues. The other log
    handlers report the failure once. When writing works again, the log says how many lines are missing.
    """
    path = path_of(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)

    def refused(error: OSError) -> None:
        log.warning("hub.log cannot be written; logging resumes when the disk accepts writes: %s", error.strerror)

    handler = LogFile(path, max_bytes=MAX_BYTES, kept=KEPT, refused=refused)
    handler.setFormatter(JsonLines(secrets))
    handler.setLevel(settings.level.upper())
    root, own = logging.getLogger(), logging.getLogger("echo_hub")
    before = own.level
    own.setLevel(min(own.getEffectiveLevel(), logging.INFO, handler.level))
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        own.setLevel(before)
        handler.close()


class Notes(Protocol):
    """Stores run events. Implemented by the driver (`echo_hub.driving.driver`)."""

    def note_threadsafe(self, event: RunEvent) -> None:
        """Store an event. May be called from any thread."""


class EventLog(logging.Handler):
    """Added to a logger, makes an event of each line at level INFO or above. Passes the event to `notes` on the thread
    that logs."""

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
