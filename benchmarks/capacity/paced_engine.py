"""A real engine that is slowed down to a fixed speed: `echo_node.backends.worker` with a pause after each step.

The real engine draws every token. After each of its steps, which draw one token of every rollout in the batch, the
process sleeps until the step has lasted `TOKEN_S`. So a small model takes as long as a large one, and the nodes leave
most processor time to the learner. `paced_node` starts this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, cast

from benchmarks.harness.wrapped_engine import WrappedEngine
from echo_node.backends import registry, worker
from echo_node.backends.base import Engine, EngineEvent
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

TOKEN_S: Final = "ECHO_BENCH_TOKEN_S"
"""Name of the environment variable with the minimum duration of an engine's step, in seconds."""


class PacedEngine(WrappedEngine):
    """An engine whose steps each last at least `token_s` seconds."""

    def __init__(self, engine: Engine, token_s: float) -> None:
        super().__init__(engine)
        self._token_s = token_s

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        began = time.perf_counter()
        for events in self.engine.sample(groups):
            slept_s = max(0.0, began + self._token_s - time.perf_counter())
            time.sleep(slept_s)
            yield [_later(event, slept_s) for event in events]
            began = time.perf_counter()


def _later(event: EngineEvent, seconds: float) -> EngineEvent:
    return replace(event, sampling_s=event.sampling_s + seconds) if isinstance(event, FinishedRollout) else event


def main() -> None:
    make, token_s = registry.make_engine, float(os.environ[TOKEN_S])
    registry.make_engine = lambda name: cast(Engine, PacedEngine(make(name), token_s))
    worker.main()


if __name__ == "__main__":
    main()
