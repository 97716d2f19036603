"""Names of a cage's guards (its limits on a process), for settings and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Guard = Literal["reading", "writing", "network", "programs", "processes"]

GUARDS: Final[Mapping[Guard, str]] = {
    "reading": "it reads only its own files and the system's",
    "writing": "it writes only to its own directory",
    "network": "it opens no connection except to its helpers",
    "programs": "it starts no program",
    "processes": "it touches no other process",
}
"""Meaning of each guard (limit of a cage) in words, for reports."""
