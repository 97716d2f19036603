from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.alert import AboutRun, Alert
from echo_hub.operation.alerting import MOST_WAITING, Alerts, new_id, receivers_of
from echo_hub.operation.problems import Change, Problem, ProblemKind
from echo_shared.errors import ConnectError
from tests.echo_hub.operation.receivers import webhook


class Dead:
    """Takes nothing for as long as `answers` is not set, and then refuses."""

    name = "dead"

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked: list[Alert] = []
        self.refused = asyncio.Semaphore(0)

    async def send(self, alert: Alert, about: AboutRun) -> None:
        self.asked.append(alert)
        await self.answers.wait()
        self.refused.release()
        raise ConnectError("Nobody is there.")


def change(kind: ProblemKind, *, began: bool = True, at: float = 0.0) -> Change:
    return Change(problem=Problem(kind=kind, text=f"{kind.value}!", since=at), began=began, at=at)


@asynccontextmanager
async def running(alerts: Alerts) -> AsyncIterator[None]:
    task = asyncio.create_task(alerts.run())
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_problems_and_the_end_are_told_as_they_come(about: AboutRun) -> None:
    async with webhook() as hook:
        settings = AlertsConfig(webhook_url=hook.url, per_hour=2)
        alerts = Alerts(settings, lambda: about)
        async with running(alerts):
            alerts.changed(change(ProblemKind.DISK))
            alerts.changed(change(ProblemKind.DISK, at=1.0))
            alerts.changed(change(ProblemKind.DISK, began=False, at=2.0))
            alerts.changed(change(ProblemKind.ATTACK, at=3.0))
            alerts.finished("The run is finished.", 4_000.0)
            while len(hook.got) < 3:
                hook.news.clear()
                await hook.news.wait()
    said = [json.loads(body) for body, _ in hook.got]
    assert [(one["kind"], one["state"], one["held_back"]) for one in said] == [
        ("disk", "began", 0),
        ("disk", "ended", 0),
        ("finished", "finished", 1),
    ]
    assert said[2]["message"] == "The run is finished."


async def test_a_dead_receiver_holds_up_nobody_and_is_said_once(
    about: AboutRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dead = Dead()
    settings = AlertsConfig(repeat_s=0.0, per_hour=1_000)
    async with webhook() as hook:
        (well,) = receivers_of(AlertsConfig(webhook_url=hook.url))
        alerts = Alerts(settings, lambda: about, receivers=(dead, well))
        async with running(alerts):
            for number in range(100):
                alerts.changed(change(ProblemKind.DISK, began=number % 2 == 0, at=float(number)))
            while len(hook.got) < MOST_WAITING:
                hook.news.clear()
                await hook.news.wait()
            assert len(dead.asked) == 1
            dead.answers.set()
            for _ in range(MOST_WAITING):
                await dead.refused.acquire()
            await asyncio.sleep(0)
    assert [alert.at for alert in dead.asked[-3:]] == [97.0, 98.0, 99.0], "the oldest were let go"
    lines = [record for record in caplog.records if "not delivered" in record.getMessage()]
    assert [record.levelno for record in lines[:3]] == [logging.WARNING, logging.INFO, logging.INFO]
    assert lines[0].event == "alert_failed"  # type: ignore[attr-defined]


async def test_without_a_receiver_nothing_is_told(about: AboutRun) -> None:
    assert receivers_of(AlertsConfig()) == ()
    Alerts(AlertsConfig(), lambda: about).changed(change(ProblemKind.DISK))


def test_the_settings_name_the_receivers() -> None:
    both = AlertsConfig(
        webhook_url="https://x.example/hook", email_to=("a@b.example",), email_from="h@b.example", smtp_host="b.example"
    )
    assert [receiver.name for receiver in receivers_of(both)] == ["webhook", "e-mail"]
    assert new_id() != new_id()
