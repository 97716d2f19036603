"""The engine's process of a hostile node: `echo_node.backends.worker` around a real engine whose work is falsified.

The rest of the node is `echo-node` itself: it joins, fetches and sends as honest nodes do. `node` starts this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness.hostile.falsifications import FALSIFICATIONS, Falsification, Problems
from benchmarks.harness.wrapped_engine import WrappedEngine
from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.wire.messages import rollout_id

ATTACK: Final = "ECHO_BENCH_ATTACK"
"""Environment variable: the name of the falsification."""
SHARE: Final = "ECHO_BENCH_ATTACK_SHARE"
"""Environment variable: the share of rollouts that are falsified."""
FORGED: Final = "ECHO_BENCH_FORGED"
"""Environment variable: the file that gets the ids of forged rollouts."""

_APART: Final = 2**48
"""Distance between the lease ids that the engine sees for one lease of the hub: a falsification may draw the lease
several times.
"""


class _NoPolicy:
    """Replaces an adapter that the engine does not read."""

    def free(self) -> None:
        """Free nothing."""


class HostileEngine(WrappedEngine):
    """An engine whose work is falsified. It reports no partial completions, only finished rollouts."""

    def __init__(self, engine: Engine, falsification: Falsification, forged: Path) -> None:
        super().__init__(engine)
        self._falsification = falsification
        self._forged = forged
        self._leased: dict[int, GroupRequest] = {}
        self._drawn: dict[tuple[int, int], FinishedRollout] = {}
        """Rollouts as an honest node would return them, by lease and index."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        self._falsification.problems = Problems(base_dir)
        other = self._falsification.base(base_dir, derived_dir)
        width = super().open(other, derived_dir / "other" if other != base_dir else derived_dir, settings)
        self.precision = self._falsification.says or self.precision
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return super().prepare(adapter_dir) if self._falsification.has_policies else _NoPolicy()

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        super().set_policy(policy if self._falsification.has_policies else None)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for events in super().sample(self._asked(groups)):
            yield [told for event in events for told in self._told(event)]

    def cancel(self, lease_id: int) -> None:
        request = self._leased.get(lease_id)
        if request is not None:
            for number in range(len(self._falsification.asked(request))):
                super().cancel(lease_id + number * _APART)

    def news(self) -> list[DrawnPart]:
        super().news()
        return []

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


def main() -> None:
    make, share = registry.make_engine, float(os.environ[SHARE])
    falsify, forged = FALSIFICATIONS[os.environ[ATTACK]], Path(os.environ[FORGED])
    registry.make_engine = lambda name: HostileEngine(make(name), falsify(share), forged)
    worker.main()


if __name__ == "__main__":
    main()
