"""The owner's pauses on disk, so that a restarted node is still paused."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from echo_node.core.manners import OwnerPause
from echo_shared.errors import ConfigError, StorageError
from echo_shared.files.atomic import disk_error, write_private

log = logging.getLogger(__name__)

_ENDS: Final = TypeAdapter(dict[str, Annotated[float, Field(ge=0, lt=2**33)] | None])
"""End of each device's pause in seconds since the epoch, before the year 2242; None = until the owner resumes it."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PART: Final = r"([0-9]+(?:\.[0-9]+)?)([smhd])"
_LONGEST_S: Final = 366 * 86_400


class PauseFile:
    """File pause.json. It is missing if the node is not paused."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> OwnerPause | None:
        """Return the stored pause. An unreadable file counts as a pause without end, because somebody wanted the node
        to pause.
        """
        try:
            until = json.loads(self._file.read_text(encoding="utf-8"))["until"]
            return OwnerPause(None if until is None else datetime.fromtimestamp(until).timestamp())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError, KeyError, TypeError):
            return OwnerPause()

    def save(self, pause: OwnerPause | None) -> None:
        """Store the pause. Raises StorageError; the pause then ends with this process at the latest."""
        _save(self._file, None if pause is None else {"until": pause.until})


class DevicePausesFile:
    """File device_pauses.json: the owner's pauses of single devices. It is missing if no device is paused."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> dict[str, OwnerPause]:
        """Return the stored pauses by device. If the file is unreadable, log a warning and return no pause."""
        try:
            return {device: OwnerPause(until) for device, until in _ENDS.validate_json(self._file.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("The pauses of single devices are lost: %s cannot be read: %s", self._file, error)
            return {}

    def save(self, pauses: Mapping[str, OwnerPause]) -> None:
        """Store the pauses. Raises StorageError; the pauses then end with this process at the latest."""
        _save(self._file, {device: pause.until for device, pause in pauses.items()})


def _save(file: Path, content: Mapping[str, float | None] | None) -> None:
    try:
        if not content:
            file.unlink(missing_ok=True)
        else:
            write_private(file, f"{json.dumps(content)}\n".encode())
    except OSError as error:
        what = "The pause cannot be stored on disk; a running node still keeps it."
        failed = disk_error(what, file.parent, got=f"{file}: {error.strerror}", code=error.errno)
        raise StorageError(what, got=failed.got, do=failed.do, code=failed.code) from error


def pause_for(length: str | None) -> OwnerPause:
    """Return a pause from now on of a length such as "90m" or "1h30m"; None = until resumed. Raises ConfigError."""
    return OwnerPause() if length is None else OwnerPause(time.time() + seconds_of(length))


def seconds_of(length: str) -> float:
    """Return the seconds in "90m" or "1h30m". Raises ConfigError for other texts and for lengths over a year."""
    text = length.strip().lower().replace(" ", "")
    parts = re.findall(_PART, text) if re.fullmatch(f"(?:{_PART})+", text) else []
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            "This is not a length of time.", got=repr(length), do='Write it like "30m", "2h", "1h30m" or "3d".'
        )
    return seconds
