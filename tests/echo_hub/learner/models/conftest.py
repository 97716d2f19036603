"""The built-in base model with a place for exchangeable adapters, random data, and a worker that needs no pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.harness.plain_losses import ModelsBench, tiny_settings
from echo_hub.learner.models.worker import ModelWorker, of_models
from echo_hub.learner.settings import LearnerSettings
from echo_shared.process.child import Frame

Ask = Callable[..., Frame]


@pytest.fixture(scope="session", name="tiny_settings")
def _tiny_settings() -> LearnerSettings:
    return tiny_settings()


@pytest.fixture(scope="session")
def bench(tiny_settings: LearnerSettings) -> ModelsBench:
    return ModelsBench.of(tiny_settings)


@dataclass(slots=True)
class Answers:
    """Collects the worker's answers; `of` returns those to one call."""

    frames: list[Frame] = field(default_factory=list)

    def send(self, frame: Frame) -> None:
        self.frames.append(frame)

    def of(self, call: int) -> list[Frame]:
        return [frame for frame in self.frames if frame["call"] == call]


@pytest.fixture
def make_worker(tiny_settings: LearnerSettings, bench: ModelsBench) -> Callable[[], tuple[ModelWorker, Answers]]:
    """Return a function that makes a worker. It computes with the base model that all tests of the session share."""

    def make() -> tuple[ModelWorker, Answers]:
        answers = Answers()
        worker = ModelWorker(bench.policy, of_models(tiny_settings), answers, kv_bytes=2**26, tokens=64)
        return worker, answers

    return make


@pytest.fixture(autouse=True)
def _seat_is_free(bench: ModelsBench) -> None:
    """Take earlier tests' adapters off the base, which all tests of the session share."""
    bench.seat.hold(None)


def run(worker: ModelWorker) -> None:
    while worker.has_work:
        worker.work()


def read_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
