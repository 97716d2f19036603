"""The result type of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One examined thing. A problem prevents joining. A warning costs speed, comfort or time. A note is an absent part
    that the node does not need.
    """

    subject: str
    level: Level
    what: str
    do: str = ""
