"""The engine's process with a pace of its own: `echo_node.backends.worker` around the real engine, slowed down.

The real engine draws every token; behind each of its steps, which draw one token for every rollout in its batch, the
process sleeps until the step has lasted `TOKEN_S`. So a small model on a small machine takes the time of a large one,
and several such nodes leave the machine's processor to the learner. `paced_node` starts it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.sampling import DrawnPart, GroupRequest

TOKEN_S: Final = "ECHO_BENCH_TOKEN_S"
"""The environment variable with the seconds that a step lasts at least."""


class PacedEngine:
    """Another engine, none of whose steps takes less than `token_s`."""

    def __init__(self, engine: Engine, token_s: float) -> None:
        self._engine = engine
        self._token_s = token_s

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        return self._engine.open(base_dir, derived_dir, settings)

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self._engine.prepare(adapter_dir)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self._engine.set_policy(policy)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        began = time.perf_counter()
        for events in self._engine.sample(groups):
            time.sleep(max(0.0, began + self._token_s - time.perf_counter()))
            yield events
            began = time.perf_counter()

    def cancel(self, lease_id: int) -> None:
        self._engine.cancel(lease_id)

    def news(self) -> list[DrawnPart]:
        return self._engine.news()

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    make, token_s = registry.make_engine, float(os.environ[TOKEN_S])
    registry.make_engine = lambda name: PacedEngine(make(name), token_s)
    worker.main()


if __name__ == "__main__":
    main()
