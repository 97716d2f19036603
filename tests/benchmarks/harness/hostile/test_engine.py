"""A hostile engine, which wraps a real one, reports additional samples as results of the given lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from benchmarks.harness.hostile.engine import FALSIFICATIONS, HostileEngine, Problems
from echo_node.backends.base import Engine, EngineEvent, GroupFailed
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from tests.benchmarks.harness.hostile.test_engine_falsifications import BASE, request, rollout


class _Draws:
    def __init__(self, first: str) -> None:
        self.first = first
        self.asked: list[GroupRequest] = []
        self.cancelled: list[int] = []

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        for group in groups:
            self.asked.append(group)
            finished = rollout("46" if len(self.asked) > 1 else self.first)
            yield [FinishedRollout(**{**_fields(finished), "lease_id": group.lease_id})]
        yield [GroupFailed(lease_id=self.asked[-1].lease_id, code="x", what="x")]

    def cancel(self, lease_id: int) -> None:
        self.cancelled.append(lease_id)


def _fields(finished: FinishedRollout) -> dict[str, object]:
    return {name: getattr(finished, name) for name in FinishedRollout.__slots__}


@pytest.mark.parametrize(("first", "written"), [("45", "7-0\n"), ("46", "")])
def test_extra_samples_are_reported_under_the_given_lease(tmp_path: Path, first: str, written: str) -> None:
    falsification = FALSIFICATIONS["re-rolled for reward"](1.0)
    falsification.problems = Problems(Path(BASE))
    inner, forged = _Draws(first), tmp_path / "forged"
    engine = HostileEngine(cast(Engine, inner), falsification, forged)
    told = [event for events in engine.sample(iter([request()])) for event in events]
    assert [event.lease_id for event in told] == [7], "one rollout, and no failure of an invented lease"
    assert len({group.lease_id for group in inner.asked}) == 4
    assert forged.read_text() == written, "the honest sample is not forged"
    engine.cancel(7)
    assert set(inner.cancelled) == {group.lease_id for group in inner.asked}
