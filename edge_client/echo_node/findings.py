"""Result type of `echo-node doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result for one examined part. A problem prevents joining; a warning costs speed or comfort; a note reports a
    missing part that the node does not need.
    """

    subject: str
    level: Level
    what: str
    do: str = ""
