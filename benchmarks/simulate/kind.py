"""What a kind of cases is to the benchmark: what there is to measure, and which headlines come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Row = dict[str, Any]
"""A case's line in the table. What is in its `details`, if there are any, goes into the conditions instead."""


class Case(Protocol):
    """Measured in a process of its own: it can be pickled."""

    @property
    def name(self) -> str:
        """No other case of any kind has it."""

    @property
    def seconds(self) -> float:
        """About, of one processor."""

    @property
    def lacks(self) -> str:
        """Why it cannot be measured; empty: it can."""

    def row(self, seed: int) -> Row:
        """Measures it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    cases: tuple[Case, ...]
    headline: Callable[[Mapping[str, Row]], dict[str, Any]]
    """Of the rows of all cases that were measured, by the cases' names. A figure whose cases are not there is None."""
    told: tuple[str, ...]
    """Figures of a row that are said once it is there."""
    alone: bool = False
    """It measures processor time: one case after the other, and none of another kind beside them."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
