"""What a diagnosis is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. A problem keeps this node from joining; a warning costs speed, comfort or time; a note is
    something that is not there, and that the node does without."""

    subject: str
    level: Level
    what: str
    do: str = ""
