"""What a process may still do once it is in its cage, and what of that the system was able to hold it to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from echo_node.host.cage.guards import GUARDS, Guard
from echo_node.host.cage.leeway import SEALED, Leeway

CageMode = Literal["auto", "off", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cage:
    """What a process may do beyond running on this Python and its libraries. Directories stand for all below them."""

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    """Read as well; only those that exist when it is entered."""
    connects: tuple[int, ...] = ()
    """TCP ports of whichever host; empty = it opens no socket at all."""
    gpu: bool = False
    """Whether it uses the devices and files of GPU drivers."""
    leeway: Leeway = SEALED
    """What else the driver of that GPU needs, on Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a process in its cage is held to."""

    by: tuple[str, ...]
    """What the system does it with; empty = there is no cage."""
    lacks: Mapping[Guard, str] = field(default_factory=dict)
    """Why each of the other guards does not hold."""

    @classmethod
    def to_nothing(cls, why: str, guards: Iterable[Guard] = tuple(GUARDS)) -> Held:
        return cls(by=(), lacks=dict.fromkeys(guards, why))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Held:
        """As `as_json` gave it."""
        return cls(by=tuple(fields["by"]), lacks=dict(fields["lacks"]))

    @property
    def holds(self) -> tuple[Guard, ...]:
        return tuple(guard for guard in GUARDS if guard not in self.lacks)

    @property
    def sentence(self) -> str:
        """For people, on one line."""
        if not self.holds:
            return f"none: {'; '.join(dict.fromkeys(self.lacks.values()))}"
        kept = f"{', '.join(self.holds)} (by {' and '.join(self.by)})"
        for_one_reason: dict[str, list[Guard]] = {}
        for guard, why in self.lacks.items():
            for_one_reason.setdefault(why, []).append(guard)
        return "; ".join([kept, *(f"not {', '.join(guards)}: {why}" for why, guards in for_one_reason.items())])

    def as_json(self) -> dict[str, Any]:
        return {"by": list(self.by), "holds": list(self.holds), "lacks": dict(self.lacks)}
