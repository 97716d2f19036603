"""Names of the guards of a cage, for settings and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Guard = Literal["reading", "writing", "network", "programs", "processes"]

GUARDS: Final[Mapping[Guard, str]] = {
    "reading": "it reads no files but its own and the system's",
    "writing": "it writes nowhere but where it must",
    "network": "it connects to nothing and nobody",
    "programs": "it starts no program",
    "processes": "it touches no other process",
}
"""Meaning of each guard, for people."""
