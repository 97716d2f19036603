"""Connected priced nodes as arrays, so that a choice among 100,000 of them reads the columns in one pass."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FIRST: Final = 64
"""Initial number of rows; the table doubles when full."""
_COLUMNS: Final[dict[str, Any]] = {
    "cost": np.float64,
    "rate": np.float64,
    "late_s": np.float64,
    "silent_s": np.float64,
    "willing": np.bool_,
    "active": np.bool_,
    "since": np.float64,
    "not_before": np.float64,
    "trials": np.int64,
    "tried_s": np.float64,
    "settled_from": np.float64,
}


class Priced:
    """Table with one row per connected priced node, in no order. A column such as `priced.cost` is a view of all rows:
    assign to its elements.

    - `cost`: dollars per hour
    - `rate`: rollouts per second; 0 = not measured yet
    - `late_s`: seconds from the training of a version until a rollout sampled with it is back
    - `silent_s`: seconds since the node's first rollout that is still late; 0 = none is late
    - `willing`: True if the node asks for work and does not pause after misbehaviour (rest)
    - `active`: True if the node may get leases
    - `since`: time of the last change of `active`
    - `not_before`: earliest time of the next trial (activation of a node of unknown speed)
    - `trials`: number of trials without results
    - `tried_s`: seconds of a trial that the node's departure interrupted; they count in the next trial
    - `settled_from`: time from which the node counts as reliable, so that other nodes may be sent to standby
    """

    def __init__(self) -> None:
        self.row_of: dict[str, int] = {}
        self.node_ids: list[str] = []
        self._columns = {name: np.zeros(_FIRST, kind) for name, kind in _COLUMNS.items()}

    def __len__(self) -> int:
        return len(self.node_ids)

    def __getattr__(self, name: str) -> NDArray[Any]:
        columns = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(name)
        column: NDArray[Any] = columns[name][: len(self.node_ids)]
        return column

    def add(self, node_id: str, cost: float, now: float) -> None:
        row = len(self.node_ids)
        if row == len(self._columns["cost"]):
            self._columns = {name: np.concatenate((held, np.zeros_like(held))) for name, held in self._columns.items()}
        self.row_of[node_id] = row
        self.node_ids.append(node_id)
        for column in self._columns.values():
            column[row] = 0
        self._columns["cost"][row], self._columns["since"][row] = cost, now

    def remove(self, node_id: str) -> None:
        """Remove the node; the last row moves into its place."""
        row, last = self.row_of.pop(node_id), len(self.node_ids) - 1
        for column in self._columns.values():
            column[row] = column[last]
        self.node_ids[row] = self.node_ids[last]
        self.node_ids.pop()
        if row != last:
            self.row_of[self.node_ids[row]] = row
