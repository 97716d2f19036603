"""Each check of a rollout, here by the stub process `odd_worker`, becomes an event of the coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from echo_hub.core.accounting.events import CheckAbandoned, Event, NumericsMeasured, RolloutChecked
from echo_hub.driving.event_queue import EventQueue
from echo_hub.run.directory import RunDirectory
from echo_hub.verify.verifier import Verifier
from echo_hub.verify.verifying import Verifying
from tests.echo_hub.verify.conftest import Versions
from tests.echo_hub.verify.odd_worker import clean
from tests.echo_hub.verify.test_verifier import ODD, Committed, beside, of_one_token


async def test_each_check_becomes_an_event_and_its_time_is_counted(versions: Versions, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()

    queue = EventQueue()
    process = beside(versions.settings, tmp_path, ODD)
    directory = RunDirectory(tmp_path)
    checker = Verifier(
        process, versions.settings, directory=directory, kept=1, patience=1, rollouts=Committed([of_one_token("1-0")])
    )
    verifying = Verifying(checker, queue)
    working = asyncio.create_task(verifying.run())
    verifying.measure("q8_0", 0)
    for rollout_id in ("1-0", "gone"):
        verifying.submit(rollout_id, is_urgent=True)
    found: list[Event] = []
    async with asyncio.timeout(60):
        while len(found) < 3:
            await queue.wait()
            found += queue.take()
    measured, *others = found
    events = {event.rollout_id: event for event in others if isinstance(event, RolloutChecked | CheckAbandoned)}
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
