"""What stands in a node's way and is to pass by itself, each with a code and a sentence, told once.

Many parts may meet the same trouble: a full disk stops the spool, a fetch and the log. It begins with the first of them
and is over with the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echo_shared.errors import DISK_FULL, EchoError, StorageError


class TroubleCode(StrEnum):
    """Stable, for programs that read `echo-node status --json`."""

    DISK_FULL = "disk_full"
    STORAGE = "storage"
    """The disk refuses something for another reason."""
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
    """One of them, now."""

    code: TroubleCode
    sentence: str
    """In one line, with what to do where anything can be done."""


OVER: Final[Mapping[TroubleCode, str]] = {
    TroubleCode.DISK_FULL: "There is room on the disk again: the node goes on.",
    TroubleCode.STORAGE: "The disk takes everything again: the node goes on.",
    TroubleCode.FETCH: "What could not be fetched is here.",
    TroubleCode.ENGINE: "The sampling engine works again.",
    TroubleCode.DEVICE_GONE: "The device is back.",
    TroubleCode.GPU_UNUSED: "The GPU is used.",
    TroubleCode.CLOCK: "This machine's clock is right again.",
    TroubleCode.HUB: "Connected again.",
    TroubleCode.SLEPT: "Connected again.",
    TroubleCode.NETWORK_CHANGED: "Connected again.",
    TroubleCode.TOO_OLD: "The hub lets this node in again.",
}
"""What is said when it has passed."""


_CODES: Final = frozenset({DISK_FULL, TroubleCode.CLOCK.value, TroubleCode.TOO_OLD.value})
"""Errors that are a trouble of their own, whoever meets them."""


def trouble_of(error: EchoError, *, otherwise: TroubleCode) -> Trouble:
    """An error as trouble: some under their own codes, the disk's as such, all else as `otherwise`."""
    if error.code in _CODES:
        code = TroubleCode(error.code)
    else:
        code = TroubleCode.STORAGE if isinstance(error, StorageError) else otherwise
    return Trouble(code, f"{error.brief}{'' if error.do is None else f' {error.do}'}")


class Troubles:
    """All of a node's, by the parts that have met them."""

    def __init__(self) -> None:
        self._of_part: dict[str, Trouble] = {}

    def begin(self, part: str, trouble: Trouble) -> str | None:
        """`part` has met it, or goes on to. What is to be told now: nothing where that trouble is known already."""
        is_known = any(other.code == trouble.code for other in self._of_part.values())
        self._of_part[part] = trouble
        return None if is_known else trouble.sentence

    def end(self, part: str) -> str | None:
        """`part` has got through. What is to be told now: nothing where another still meets the same."""
        trouble = self._of_part.pop(part, None)
        if trouble is None or any(other.code == trouble.code for other in self._of_part.values()):
            return None
        return OVER[trouble.code]

    @property
    def now(self) -> tuple[Trouble, ...]:
        """One of each code, as it was met first."""
        first: dict[TroubleCode, Trouble] = {}
        for trouble in self._of_part.values():
            first.setdefault(trouble.code, trouble)
        return tuple(first.values())
