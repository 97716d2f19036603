from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from echo_hub.run.directory import RunDirectory
from echo_hub.tenants.computing import ComputerHost
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.hub_drawer import DEATHS, HubDrawer
from echo_hub.tenants.requests import Sample
from echo_shared.process.child import ChildExited
from tests.echo_hub.tenants.small_models import SmallModels, SmallStarter, exited

JOB = DrawJob(
    request_id="r-1",
    tenant_id="ada",
    prompt_ids=np.array([1], np.int32),
    sequence_ids=("r-1-0", "r-1-1", "r-1-2"),
    policy_version=0,
    temperature=1.0,
    max_tokens=4,
    stop_ids=(),
    stop_strings=(),
    seed=5,
    checked=False,
)


class DyingModels(SmallModels):
    """A model process that dies after `pieces` pieces and samples."""

    pieces = 3

    async def draw(self, job: DrawJob, adapter: Path | None) -> AsyncIterator[DrawnPiece | Sample]:
        left = self.pieces
        async for piece in super().draw(job, adapter):
            if not left:
                self.is_dead = True
                raise exited()
            left -= 1
            yield piece


class DyingStarter(SmallStarter):
    """Starts `deaths` model processes that die, and then one that does not."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self._deaths = deaths

    async def start(self) -> SmallModels:
        is_dying = len(self.lives) < self._deaths
        self.lives.append(DyingModels() if is_dying else SmallModels())
        return self.lives[-1]


async def drawn(starter: SmallStarter, root: Path) -> list[DrawnPiece | Sample]:
    drawer = HubDrawer(ComputerHost(starter, first_wait_s=0.001), RunDirectory(root))
    return [piece async for piece in drawer.draw(JOB)]


async def test_a_death_changes_no_token_and_repeats_nothing(tmp_path: Path) -> None:
    undisturbed = await drawn(SmallStarter(), tmp_path)
    starter = DyingStarter(deaths=2)
    disturbed = await drawn(starter, tmp_path)
    assert len(starter.lives) == 3
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert type(one) is type(other) and one.token_ids.tolist() == other.token_ids.tolist()
    assert [each.sequence_id for each in disturbed if isinstance(each, Sample)] == list(JOB.sequence_ids)


async def test_a_job_that_kills_each_process_fails(tmp_path: Path) -> None:
    starter = DyingStarter(deaths=DEATHS)
    with pytest.raises(ChildExited):
        await drawn(starter, tmp_path)
    assert len(starter.lives) == DEATHS
