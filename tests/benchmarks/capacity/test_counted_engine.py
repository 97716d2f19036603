"""A counting engine writes each token to the disk at once, and reports its inner engine's news at any time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.capacity.counted_engine import CountedEngine, read_drawn
from echo_node.backends.base import Engine, EngineEvent
from echo_shared.messages import FinishReason
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest


class _ThreeSteps:
    """Draws token 5 for indices 0 and 1 of lease 7, which continue from two given tokens; index 1 ends at step
    three."""

    def __init__(self) -> None:
        self.step = 0
        self.told = [0, 0]
        self.cancelled: list[int] = []

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for self.step in (1, 2, 3):
            yield [_finished()] if self.step == 3 else []

    def news(self) -> list[DrawnPart]:
        parts = [
            _part(index, 2 + self.told[index], self.step - self.told[index])
            for index in ((0,) if self.step == 3 else (0, 1))
        ]
        self.told = [self.step, self.step]
        return [part for part in parts if len(part.ids)]

    def cancel(self, lease_id: int) -> None:
        self.cancelled.append(lease_id)


def _part(index: int, start: int, count: int) -> DrawnPart:
    return DrawnPart(
        lease_id=7,
        index=index,
        policy_version=0,
        start=start,
        ids=np.full(count, 5, np.int32),
        logprobs=np.zeros(count, np.float32),
    )


def _finished() -> FinishedRollout:
    ids = np.full(5, 5, np.int32)
    return FinishedRollout(
        lease_id=7,
        group_id=0,
        index=1,
        policy_version=0,
        completion_ids=ids,
        behavior_logprobs=np.zeros(5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=1.0,
        num_given=2,
    )


@pytest.fixture
def counted(tmp_path: Path) -> CountedEngine:
    return CountedEngine(cast(Engine, _ThreeSteps()), tmp_path / "drawn")


def test_each_step_is_on_disk_before_the_next(counted: CountedEngine, tmp_path: Path) -> None:
    assert read_drawn(tmp_path / "drawn") == {}
    found = [read_drawn(tmp_path / "drawn") for _ in counted.sample(iter(()))]
    assert found == [{(7, 0): 3, (7, 1): 3}, {(7, 0): 4, (7, 1): 4}, {(7, 0): 5, (7, 1): 4}]


def test_a_record_that_was_cut_is_left_out(counted: CountedEngine, tmp_path: Path) -> None:
    list(counted.sample(iter(())))
    with (tmp_path / "drawn").open("ab") as file:
        file.write(b"half a record")
    assert read_drawn(tmp_path / "drawn") == {(7, 0): 5, (7, 1): 4}


def test_news_are_joined_and_told_once(counted: CountedEngine) -> None:
    steps = counted.sample(iter(()))
    next(steps), next(steps)
    assert [(part.index, part.start, len(part.ids)) for part in counted.news()] == [(0, 2, 2), (1, 2, 2)]
    assert counted.news() == []
    next(steps)
    assert [(part.index, part.start, len(part.ids)) for part in counted.news()] == [(0, 4, 1)]


def test_finished_or_cancelled_rollouts_have_no_news(counted: CountedEngine) -> None:
    steps = counted.sample(iter(()))
    next(steps)
    counted.cancel(7)
    assert counted.news() == []
    list(steps)
    assert [part.index for part in counted.news()] == [0]
