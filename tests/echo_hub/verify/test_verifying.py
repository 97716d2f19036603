"""Checks by the odd process of the verifier's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from echo_hub.core.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.drawn import DrawnRollout
from echo_hub.verify.verifier import Verifier
from echo_hub.verify.verifying import Finding, Verifying
from tests.echo_hub.verify.conftest import Versions
from tests.echo_hub.verify.odd_worker import clean
from tests.echo_hub.verify.test_verifier import ODD, beside, of_one_token, prompts


async def test_each_check_becomes_an_event_and_its_time_is_counted(versions: Versions, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()

    async def load(rollout_ids: Sequence[str]) -> Mapping[str, DrawnRollout | str]:
        return {rollout_id: of_one_token(rollout_id) for rollout_id in rollout_ids if rollout_id != "gone"}

    found = asyncio.Queue[Finding]()
    process = beside(versions.settings, tmp_path, ODD)
    directory = RunDirectory(tmp_path)
    checker = Verifier(process, versions.settings, directory=directory, kept=1, patience=1, load=load, prompts=prompts)
    verifying = Verifying(checker, report=found.put)
    working = asyncio.create_task(verifying.run())
    verifying.measure("q8_0", 0)
    for rollout_id in ("1-0", "gone"):
        verifying.submit(rollout_id, is_urgent=True)
    measured, *others = [await found.get() for _ in range(3)]
    events = {event.rollout_id: event for event in others if not isinstance(event, NumericsMeasured)}
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    assert measured == NumericsMeasured(rounding="q8_0", policy_version=0, evidence=clean(3))
    shown = (("a", clean(1)),)
    assert events == {
        "1-0": RolloutChecked(rollout_id="1-0", spans=shown),
        "gone": CheckAbandoned(rollout_id="gone"),
    }
    assert (verifying.seconds, verifying.num_abandoned) == (0.75, 1)
