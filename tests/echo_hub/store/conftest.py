"""Stores with records: in an SQLite file, in memory, and on a private PostgreSQL server if one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    GroupOpened,
    Record,
    RolloutReceived,
    RolloutsLeased,
    ScoreRecorded,
    StepPlanned,
    StepTrained,
    VersionRecorded,
)
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import FinishReason


class Records:
    @staticmethod
    def payload(length: int, start: int = 0) -> RolloutPayload:
        return RolloutPayload(
            completion_ids=np.arange(start, start + length, dtype=np.int32),
            behavior_logprobs=np.arange(-1, -length - 1, -1).astype(np.float32) / np.float32(8),
            finish_reason=FinishReason.STOP,
            sampling_s=0.5,
            routes=bytes(2 * length),
        )

    @staticmethod
    def opened(*group_ids: int) -> list[Record]:
        return [GroupOpened(group_id=group_id, seed=2**64 - 1 - group_id) for group_id in group_ids]

    @staticmethod
    def leased(
        lease_id: int, group_id: int, *indices: int, node_id: str = "a", version: int = 0, turn: int = 0
    ) -> RolloutsLeased:
        return RolloutsLeased(
            lease_id=lease_id,
            node_id=node_id,
            group_id=group_id,
            indices=indices,
            turn=turn,
            policy_version=version,
            deadline=99.5,
        )

    @staticmethod
    def received(*ids: str) -> list[Record]:
        return [
            RolloutReceived(rollout_id=each, received_at=10.0, payload=Records.payload(2 + number, 100 * number))
            for number, each in enumerate(ids)
        ]

    @staticmethod
    def scored(*ids: str) -> list[Record]:
        return [ScoreRecorded(rollout_id=each, reward=float(number)) for number, each in enumerate(ids)]

    @staticmethod
    def planned(step: int, group_ids: tuple[int, ...], ids: tuple[str, ...]) -> StepPlanned:
        staleness = tuple(range(len(group_ids)))
        return StepPlanned(step=step, group_ids=group_ids, rollout_ids=ids, staleness=staleness, planned_at=20.0)

    @staticmethod
    def one_step(step: int, *, lease_id: int, group_id: int, node_id: str = "a") -> list[Record]:
        """Return all records of one group of two rollouts, from opening to published version."""
        ids = (f"{lease_id}-0", f"{lease_id}-1")
        return [
            *Records.opened(group_id),
            Records.leased(lease_id, group_id, 0, 1, node_id=node_id),
            *Records.received(*ids),
            *Records.scored(*ids),
            Records.planned(step, (group_id,), ids),
            StepTrained(step=step, rollout_ids=ids, metrics={"loss": 0.25}, trained_at=30.0 + step),
            VersionRecorded(policy_version=step, published_at=40.0 + step),
        ]

    @staticmethod
    def large_step(step: int, *, num_groups: int) -> list[Record]:
        """Return all records of a step of `num_groups` groups of two rollouts, leased to two nodes in turn."""
        of_step = tuple(range(10 * step, 10 * step + num_groups))
        ids = tuple(f"{each}-{index}" for each in of_step for index in range(2))
        return [
            *Records.opened(*of_step),
            *(Records.leased(each, each, 0, 1, node_id=f"n{each % 2}") for each in of_step),
            *Records.received(*ids),
            *Records.scored(*ids),
            Records.planned(step, of_step, ids),
            StepTrained(
                step=step,
                rollout_ids=ids,
                metrics={},
                trained_at=30.0 + step,
                node_ids=tuple(f"n{each % 2}" for each in of_step for _ in range(2)),
            ),
        ]


@pytest.fixture
def records() -> type[Records]:
    return Records


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield an empty store: one test on SQLite, one on PostgreSQL."""
    is_file = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'echo.db'}" if is_file else request.getfixturevalue("postgresql_without_rows")
    opened_store = Store.open(url)
    yield opened_store
    opened_store.close()
