"""Limits on the width (rollouts at the same time) of engines, learnt when memory ran out, in a file of the data
directory.

A limit applies only to the same engine version, hardware and memory limit. It expires after `KEPT_S` seconds, because
memory that other programs used then may be free again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)

KEPT_S: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryCase:
    """Everything besides the width (rollouts at the same time) that decides how much memory an engine needs."""

    backend: str
    device: str
    software: str
    """Name and version of the engine's library."""
    machine: str
    """Description of the hardware."""
    base: str
    """Id of the base model's content."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)

    width: PositiveInt
    learnt_at: float


_ENTRIES: Final = TypeAdapter(dict[str, _Entry])


class Widths:
    """The limits on widths that are stored in one data directory. All methods block the calling thread. Disk errors are
    only logged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def limit(self, place: EngineMemoryCase, memory_bytes: int) -> int:
        """Return the largest width (rollouts at the same time) that fits this memory limit; 0 = unknown."""
        entry = self._entries().get(_key(place, memory_bytes))
        return 0 if entry is None or time.time() - entry.learnt_at >= KEPT_S else entry.width

    def remember(self, place: EngineMemoryCase, memory_bytes: int, width: int) -> None:
        entries = {**self._entries(), _key(place, memory_bytes): _Entry(width=width, learnt_at=time.time())}
        try:
            write_private(self._file, _ENTRIES.dump_json(entries, indent=1))
        except OSError as error:
            log.warning("The engine's width cannot be stored: %s: %s", self._file, error.strerror)

    def forget(self) -> None:
        """Delete all limits. Raises OSError."""
        self._file.unlink(missing_ok=True)

    def _entries(self) -> dict[str, _Entry]:
        try:
            return _ENTRIES.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("The engines' widths are learnt again: %s cannot be read: %s", self._file, error)
            return {}


def _key(place: EngineMemoryCase, memory_bytes: int) -> str:
    return " | ".join([*dataclasses.astuple(place), f"{memory_bytes} bytes"])
