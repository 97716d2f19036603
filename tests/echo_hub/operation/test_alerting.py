from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation import alert
from echo_hub.operation.alert import HOUR_S, AboutRun
from echo_hub.operation.alerting import MOST_WAITING, Alerts, new_id, webhook_of
from echo_hub.operation.problems import Change, ProblemKind, RunProblem
from echo_hub.operation.webhook import Webhook
from tests.echo_hub.operation.receivers import webhook


def change(kind: ProblemKind, *, began: bool = True, at: float = 0.0) -> Change:
    return Change(problem=RunProblem(kind=kind, text=f"{kind.value}!", since=at), began=began, at=at)


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


class Told:
    def __init__(self, about: AboutRun) -> None:
        self._about = about

    def about(self) -> AboutRun:
        return self._about


async def test_problems_and_the_end_are_told_as_they_come(about: AboutRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert, "PER_HOUR", 2)
    async with webhook() as hook:
        settings = AlertsConfig(webhook_url=hook.url)
        alerts = Alerts(settings, Told(about), webhook=webhook_of(settings))
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


async def test_a_dead_receiver_costs_the_oldest_alerts_and_is_reported_once(
    about: AboutRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with webhook() as hook:
        hook.answers = [0, *[410] * MOST_WAITING]
        settings = AlertsConfig(webhook_url=hook.url)
        alerts = Alerts(settings, Told(about), webhook=Webhook(settings, attempts=1))
        async with running(alerts):
            alerts.changed(change(ProblemKind.DISK, at=0.0))
            await hook.news.wait()
            for number in range(1, 100):
                alerts.changed(change(ProblemKind.DISK, began=number % 2 == 0, at=number * HOUR_S))
            assert len(hook.got) == 1
            hook.end.set()
            while len(hook.got) < 1 + MOST_WAITING:
                hook.news.clear()
                await hook.news.wait()
    assert [json.loads(body)["at"] for body, _ in hook.got[-3:]] == [97 * HOUR_S, 98 * HOUR_S, 99 * HOUR_S], (
        "the oldest were dropped"
    )
    lines = [record for record in caplog.records if "not delivered" in record.getMessage()]
    assert [record.levelno for record in lines[:3]] == [logging.WARNING, logging.INFO, logging.INFO]
    assert lines[0].event == "alert_failed"  # type: ignore[attr-defined]


async def test_without_a_webhook_nothing_is_sent(about: AboutRun) -> None:
    assert webhook_of(AlertsConfig()) is None
    alerts = Alerts(AlertsConfig(), Told(about), webhook=None)
    alerts.changed(change(ProblemKind.DISK))
    async with asyncio.timeout(60):
        await alerts.run()


def test_each_alert_has_its_own_id() -> None:
    assert new_id() != new_id()
