"""RUN/logs/hub.log: what the hub and its libraries log, a JSON object a line, while it serves.

    {"time": "2026-11-25T10:00:00.123Z", "level": "warning", "logger": "echo_hub.training.trainer",
     "message": "the learner died", "event": "learner_died", "subject": "", "data": {}, "exception": "Traceback ..."}

The last four are there where the line has them. Everything is ASCII: no line steers a terminal. The settings' secrets
are nowhere logged; should one turn up in a library's text all the same, `[secret]` stands in its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from echo_hub.config.operation_sections import LogConfig
from echo_shared.log_file import LogFile

log = logging.getLogger(__name__)

EXTRA: Final = ("event", "subject", "data")
"""What a line may have beside its text: see `events`."""
_SECRET: Final = "[secret]"


def path_of(run_dir: Path) -> Path:
    return run_dir / "logs" / "hub.log"


class JsonLines(logging.Formatter):
    """One object, on one line."""

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
    """Inside, everything that this program logs goes to the run's log as well, at the level that is set.

    A disk that is full, or a directory that may not be written, costs lines and nothing else: it is said once, by all
    other handlers, and when it takes lines again the log says how many are missing.
    """
    path = path_of(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)

    def refused(error: OSError) -> None:
        log.warning("hub.log takes no lines; it goes on by itself once the disk does: %s", error.strerror)

    handler = LogFile(path, max_bytes=settings.max_bytes, kept=settings.kept, refused=refused)
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
