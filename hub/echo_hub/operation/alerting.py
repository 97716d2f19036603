"""Queue alerts and send them to the run's webhook in a separate task, so that a receiver that does not answer never
delays the hub.

If the queue is full, the oldest alerts are dropped, because the newest alerts describe the current state.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from dataclasses import replace
from typing import Final, Protocol

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.alert import AboutRun, Alert, AlertGate, alert_of
from echo_hub.operation.problems import Change
from echo_hub.operation.webhook import Webhook
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 50
"""Maximum number of alerts in the queue."""


class RunDescription(Protocol):
    """Describes the run in alerts. Implemented by `echo_hub.oversight.operating`."""

    def about(self) -> AboutRun: ...


class Alerts:
    """The queue of alerts. `changed` and `finished` return at once; `run` delivers alerts until cancelled. If `webhook`
    is None, no alert is sent."""

    def __init__(self, settings: AlertsConfig, about: RunDescription, *, webhook: Webhook | None) -> None:
        self._about = about
        self._webhook = webhook
        self._gate = AlertGate(kinds=settings.told_of)
        self._waiting: deque[Alert] = deque(maxlen=MOST_WAITING)
        self._news = asyncio.Event()
        self._fails = False

    def changed(self, change: Change) -> None:
        self._tell(alert_of(change, new_id()))

    def finished(self, text: str, at: float) -> None:
        self._tell(Alert(alert_id=new_id(), kind="finished", state="finished", text=text, at=at, since=at))

    def _tell(self, alert: Alert) -> None:
        held_back = self._gate.held_back
        if self._webhook is None or not self._gate.admits(alert.kind, alert.state, alert.at):
            return
        self._gate.held_back = 0
        self._waiting.append(replace(alert, held_back=held_back))
        self._news.set()

    async def run(self) -> None:
        """Deliver queued alerts one at a time, until cancelled."""
        if self._webhook is None:
            return
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._deliver(self._webhook, self._waiting.popleft())

    async def _deliver(self, webhook: Webhook, alert: Alert) -> None:
        try:
            await webhook.send(alert, self._about.about())
        except EchoError as error:
            # Warn only at the first of several failures in a row. The page and the log also show the problems.
            level = logging.INFO if self._fails else logging.WARNING
            extra = {"event": "alert_failed", "data": {"alert": alert.kind}}
            log.log(level, "an alert was not delivered: %s", error.brief, extra=extra)
            self._fails = True
        except Exception:  # An alert that cannot be built must not stop the hub.
            log.exception("an alert could not be built", extra={"event": "alert_failed"})
        else:
            self._fails = False


def webhook_of(settings: AlertsConfig) -> Webhook | None:
    return Webhook(settings) if settings.webhook_url else None


def new_id() -> str:
    return secrets.token_hex(16)
