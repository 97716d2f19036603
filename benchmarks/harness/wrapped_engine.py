"""A sampling engine around another one. Subclasses override only the methods whose behaviour they change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.sampling.interface import DrawnPart, GroupRequest
from echo_shared.sampling.scoring import Intervals


class WrappedEngine:
    """Pass every call on to `engine`. Implements `echo_node.backends.base.Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.precision, self.scores = "", False
        self.converted: Path | None = None

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        width = self.engine.open(base_dir, derived_dir, settings)
        self.precision, self.scores = self.engine.precision, self.engine.scores
        self.converted = self.engine.converted
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self.engine.prepare(adapter_dir)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self.engine.set_policy(policy)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        return self.engine.sample(groups)

    def cancel(self, lease_id: int) -> None:
        self.engine.cancel(lease_id)

    def news(self) -> list[DrawnPart]:
        return self.engine.news()

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        return self.engine.score(ids, first, temperature)

    def close(self) -> None:
        self.engine.close()
