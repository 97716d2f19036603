"""Troubles of a node: problems that may pass by themselves. Each has a code and a sentence, and is reported once.

Several parts of the node may meet the same trouble: a full disk stops the spool, a fetch and the log. The trouble
begins with the first part that meets it and ends with the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echo_shared.errors import DISK_FULL, EchoError, StorageError


class TroubleCode(StrEnum):
    """Codes of troubles. They are stable, for programs that read `echo-node status --json`."""

    DISK_FULL = "disk_full"
    STORAGE = "storage"
    """The disk refuses an operation for another reason than lack of space."""
    FETCH = "fetch"
    ENGINE = "engine"
    DEVICE_GONE = "device_gone"
    GPU_UNUSED = "gpu_unused"
    CLOCK = "clock"
    HUB = "hub"
    SLEPT = "slept"
    NETWORK_CHANGED = "network_changed"
    TOO_OLD = "too_old"


@dataclass(frozen=True, slots=True)
class Trouble:
    code: TroubleCode
    sentence: str
    """One line, with a remedy if there is one."""


OVER: Final[Mapping[TroubleCode, str]] = {
    TroubleCode.DISK_FULL: "The disk has free space again: the node resumes.",
    TroubleCode.STORAGE: "The disk accepts writes again: the node resumes.",
    TroubleCode.FETCH: "The failed fetch has succeeded.",
    TroubleCode.ENGINE: "The sampling engine works again.",
    TroubleCode.DEVICE_GONE: "The device is back.",
    TroubleCode.GPU_UNUSED: "The GPU is in use.",
    TroubleCode.CLOCK: "This machine's clock is right again.",
    TroubleCode.HUB: "Reconnected.",
    TroubleCode.SLEPT: "Reconnected.",
    TroubleCode.NETWORK_CHANGED: "Reconnected.",
    TroubleCode.TOO_OLD: "The hub admits this node again.",
}
"""Sentence with which the node reports the end of a trouble, by the trouble's code."""


_CODES: Final = frozenset({DISK_FULL, TroubleCode.CLOCK.value, TroubleCode.TOO_OLD.value})
"""Error codes that are also trouble codes."""


def trouble_of(error: EchoError, *, otherwise: TroubleCode) -> Trouble:
    """Return the trouble for an error. Its code is the error's if that is also a trouble code, STORAGE for other disk
    errors, else `otherwise`.
    """
    if error.code in _CODES:
        code = TroubleCode(error.code)
    else:
        code = TroubleCode.STORAGE if isinstance(error, StorageError) else otherwise
    return Trouble(code, f"{error.brief}{'' if error.do is None else f' {error.do}'}")


class Troubles:
    """All current troubles (problems that may pass by themselves), by the part of the node that met them."""

    def __init__(self) -> None:
        self._of_part: dict[str, Trouble] = {}

    def begin(self, part: str, trouble: Trouble) -> str | None:
        """Record that `part` of the node has met the trouble. Return the message to report; None if another part has
        already reported the same trouble.
        """
        is_known = any(other.code == trouble.code for other in self._of_part.values())
        self._of_part[part] = trouble
        return None if is_known else trouble.sentence

    def end(self, part: str) -> str | None:
        """Record that `part` no longer has its trouble. Return the message to report; None if another part still has
        the same trouble.
        """
        trouble = self._of_part.pop(part, None)
        if trouble is None or any(other.code == trouble.code for other in self._of_part.values()):
            return None
        return OVER[trouble.code]

    @property
    def now(self) -> tuple[Trouble, ...]:
        """Current troubles, one for each code: the one that was met first."""
        first: dict[TroubleCode, Trouble] = {}
        for trouble in self._of_part.values():
            first.setdefault(trouble.code, trouble)
        return tuple(first.values())
