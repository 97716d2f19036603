"""The engine's process of a hostile node: `echo_node.backends.worker` around a real engine whose work is falsified.

All else of the node is `echo-node`'s own: it joins, fetches and sends as honest nodes do. `node` starts it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.hostile.falsifications import AS_CHECKERS, FALSIFICATIONS, Falsification, Problems
from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.messages import rollout_id
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.scoring import Intervals

ATTACK: Final = "ECHO_BENCH_ATTACK"
"""The environment variable with the name of what the engine does."""
SHARE: Final = "ECHO_BENCH_ATTACK_SHARE"
"""The environment variable with the share of rollouts of which it does so."""
FORGED: Final = "ECHO_BENCH_FORGED"
"""The environment variable with the file in which the ids of forged rollouts are written down."""

_APART: Final = 2**48
"""Leases that the engine is given beside one of the hub's have its number and so many more each."""


class _NoPolicy:
    """In place of an adapter that is not read."""

    def free(self) -> None:
        """It holds nothing."""


class HostileEngine:
    """Another engine, falsified. It tells of no rollout before it is finished."""

    def __init__(self, engine: Engine, falsification: Falsification, forged: Path) -> None:
        self.precision, self.scores = "", False
        self.converted: Path | None = None
        self._engine = engine
        self._falsification = falsification
        self._forged = forged
        self._leased: dict[int, GroupRequest] = {}
        self._drawn: dict[tuple[int, int], FinishedRollout] = {}
        """What was drawn as it was leased, by lease and index."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._falsification.problems = Problems(base_dir)
        other = self._falsification.base(base_dir, derived_dir)
        width = self._engine.open(other, derived_dir / "other" if other != base_dir else derived_dir, settings)
        self.precision = self._falsification.says or self._engine.precision
        self.scores = self._engine.scores
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self._engine.prepare(adapter_dir) if self._falsification.has_policies else _NoPolicy()

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self._engine.set_policy(policy if self._falsification.has_policies else None)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for events in self._engine.sample(self._asked(groups)):
            yield [told for event in events for told in self._told(event)]

    def _asked(self, groups: Iterator[GroupRequest]) -> Iterator[GroupRequest]:
        for request in groups:
            self._leased[request.lease_id] = request
            for number, other in enumerate(self._falsification.asked(request)):
                yield replace(other, lease_id=request.lease_id + number * _APART)

    def _told(self, event: EngineEvent) -> list[EngineEvent]:
        number, lease_id = divmod(event.lease_id, _APART)
        if not isinstance(event, FinishedRollout):
            return [event] if number == 0 else []
        own = replace(event, lease_id=lease_id)
        if number == 0:
            self._drawn[lease_id, own.index] = own
        told = list(self._falsification.told(own, self._leased[lease_id], number))
        with self._forged.open("a") as file:
            for one in told:
                if isinstance(one, FinishedRollout) and self._is_forged(one):
                    file.write(f"{rollout_id(one.lease_id, one.index)}\n")
        return told

    def _is_forged(self, told: FinishedRollout) -> bool:
        drawn = self._drawn.pop((told.lease_id, told.index))
        return (
            self._falsification.draws_otherwise
            or not np.array_equal(told.completion_ids, drawn.completion_ids)
            or not np.array_equal(told.behavior_logprobs, drawn.behavior_logprobs)
        )

    def cancel(self, lease_id: int) -> None:
        request = self._leased.get(lease_id)
        if request is not None:
            for number in range(len(self._falsification.asked(request))):
                self._engine.cancel(lease_id + number * _APART)

    def news(self) -> list[DrawnPart]:
        self._engine.news()
        return []

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        return self._falsification.found(self._engine.score(ids, first, temperature))

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    make, share = registry.make_engine, float(os.environ[SHARE])
    falsify = {**FALSIFICATIONS, **AS_CHECKERS}[os.environ[ATTACK]]
    forged = Path(os.environ[FORGED])
    registry.make_engine = lambda name: HostileEngine(make(name), falsify(share), forged)
    worker.main()


if __name__ == "__main__":
    main()
