"""The engine's process with a pace of its own: `echo_node.backends.worker` around the real engine, slowed down.

The real engine draws every token; behind each of its steps, which draw one token for every rollout in its batch, the
process sleeps until the step has lasted `TOKEN_S`. So a small model on a small machine takes the time of a large one,
and several such nodes leave the machine's processor to the learner. `paced_node` starts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.capacity.counted_engine import CountedEngine
from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.scoring import Intervals

TOKEN_S: Final = "ECHO_BENCH_TOKEN_S"
"""The environment variable with the seconds that a step lasts at least."""

DRAWN: Final = "ECHO_BENCH_DRAWN"
"""The environment variable with the file that every drawn token is written down in (`counted_engine`); unset: none."""


class PacedEngine:
    """Another engine, none of whose steps takes less than `token_s`."""

    def __init__(self, engine: Engine, token_s: float) -> None:
        self._engine = engine
        self._token_s = token_s

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        width = self._engine.open(base_dir, derived_dir, settings)
        self.precision, self.scores = self._engine.precision, self._engine.scores
        self.converted = self._engine.converted
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self._engine.prepare(adapter_dir)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self._engine.set_policy(policy)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        began = time.perf_counter()
        for events in self._engine.sample(groups):
            slept_s = max(0.0, began + self._token_s - time.perf_counter())
            time.sleep(slept_s)
            yield [_later(event, slept_s) for event in events]
            began = time.perf_counter()

    def cancel(self, lease_id: int) -> None:
        self._engine.cancel(lease_id)

    def news(self) -> list[DrawnPart]:
        return self._engine.news()

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        return self._engine.score(ids, first, temperature)

    def close(self) -> None:
        self._engine.close()


def _later(event: EngineEvent, seconds: float) -> EngineEvent:
    return replace(event, sampling_s=event.sampling_s + seconds) if isinstance(event, FinishedRollout) else event


def main() -> None:
    make, token_s, drawn = registry.make_engine, float(os.environ[TOKEN_S]), os.environ.get(DRAWN)
    counted = (lambda name: CountedEngine(make(name), Path(drawn))) if drawn else make
    registry.make_engine = lambda name: PacedEngine(counted(name), token_s)
    worker.main()


if __name__ == "__main__":
    main()
