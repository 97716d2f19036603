"""The rights of a caged (sandboxed) process, and the guards that the system enforces. A guard is a limit on files,
network or other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo_shared.cage.guards import GUARDS, Guard
from echo_shared.cage.leeway import SEALED, Leeway

CageMode = Literal["auto", "off", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cage:
    """Rights of a process besides running this Python and its libraries. A directory includes everything below it."""

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    """Directories that the process may write and read. They must exist when the process enters the cage."""
    connects: tuple[int, ...] = ()
    """TCP ports to which the process may connect, on any host; empty = it may use no sockets."""
    gpu: bool = False
    """True if the process needs the devices and files of GPU drivers."""
    leeway: Leeway = SEALED
    """Rights on Linux, beyond those of the narrowest cage, that the GPU's driver needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Guards that the system enforces on a caged process."""

    by: tuple[str, ...]
    """Names of the system's mechanisms that enforce the guards, such as seccomp; empty = no cage."""
    lacks: Mapping[Guard, str] = field(default_factory=dict)
    """Missing guards (limits on the process), each with the reason."""

    @classmethod
    def to_nothing(cls, why: str, guards: Iterable[Guard] = tuple(GUARDS)) -> Held:
        return cls(by=(), lacks=dict.fromkeys(guards, why))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Held:
        return cls(by=tuple(fields["by"]), lacks=dict(fields["lacks"]))

    @property
    def holds(self) -> tuple[Guard, ...]:
        return tuple(guard for guard in GUARDS if guard not in self.lacks)

    @property
    def sentence(self) -> str:
        if not self.holds:
            return f"none: {'; '.join(dict.fromkeys(self.lacks.values()))}"
        kept = f"{', '.join(self.holds)} (by {' and '.join(self.by)})"
        for_one_reason: dict[str, list[Guard]] = {}
        for guard, why in self.lacks.items():
            for_one_reason.setdefault(why, []).append(guard)
        return "; ".join([kept, *(f"not {', '.join(guards)}: {why}" for why, guards in for_one_reason.items())])

    def as_json(self) -> dict[str, Any]:
        return {"by": list(self.by), "holds": list(self.holds), "lacks": dict(self.lacks)}
