"""Width limits of engines, learnt from running out of memory, in a file of the data directory.

A limit of another engine version, hardware or memory limit does not apply. Neither does a limit older than `KEPT_S`:
memory that other programs used then may be free now.
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
    """An engine's circumstances: everything besides its width that decides its need of memory."""

    backend: str
    device: str
    software: str
    """The engine's library with its version."""
    machine: str
    """The hardware, in words."""
    base: str
    """The base model, by its content."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)

    width: PositiveInt
    learnt_at: float


_ENTRIES: Final = TypeAdapter(dict[str, _Entry])


class Widths:
    """The limits of one data directory. Calls block. Disk errors are logged."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def limit(self, place: EngineMemoryCase, memory_bytes: int) -> int:
        """Return the largest width under this memory limit; 0 = unknown."""
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
