"""Tells the operator, wherever he is: each receiver has a queue and a task of its own, and none holds up the hub.

A receiver that is dead costs its own alerts. When as many wait as may, the oldest are let go: the newest say how it is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from echo_hub.config.operation_sections import AlertsConfig
from echo_hub.operation.alert import AboutRun, Alert, AlertGate, alert_of
from echo_hub.operation.mail import Mail
from echo_hub.operation.problems import Change
from echo_hub.operation.webhook import Webhook
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)

MOST_WAITING: Final = 50
"""Alerts for one receiver."""


class Receiver(Protocol):
    """Where alerts go."""

    @property
    def name(self) -> str: ...

    async def send(self, alert: Alert, about: AboutRun) -> None:
        """Raises EchoError when it was not taken."""


def receivers_of(settings: AlertsConfig) -> tuple[Receiver, ...]:
    """Those that the settings name."""
    found: list[Receiver] = [Webhook(settings)] if settings.webhook_url else []
    return (*found, *([Mail(settings)] if settings.email_to else []))


class Alerts:
    """`changed` and `finished` return at once; `run` delivers, for ever."""

    def __init__(
        self, settings: AlertsConfig, about: Callable[[], AboutRun], *, receivers: tuple[Receiver, ...] | None = None
    ) -> None:
        self._about = about
        self._gate = AlertGate(kinds=settings.told_of, repeat_s=settings.repeat_s, per_hour=settings.per_hour)
        self._lines = [_Line(one) for one in (receivers_of(settings) if receivers is None else receivers)]

    def changed(self, change: Change) -> None:
        """A problem began, or is over."""
        self._tell(alert_of(change, new_id()))

    def finished(self, text: str, at: float) -> None:
        """The run is over."""
        self._tell(Alert(alert_id=new_id(), kind="finished", state="finished", text=text, at=at, since=at))

    def _tell(self, alert: Alert) -> None:
        held_back = self._gate.held_back
        if not self._lines or not self._gate.admits(alert.kind, alert.state, alert.at):
            return
        self._gate.held_back = 0
        for line in self._lines:
            line.put(replace(alert, held_back=held_back))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for line in self._lines:
                tasks.create_task(line.run(self._about))


class _Line:
    """Alerts on their way to one receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._waiting: deque[Alert] = deque(maxlen=MOST_WAITING)
        self._news = asyncio.Event()
        self._fails = False

    def put(self, alert: Alert) -> None:
        self._waiting.append(alert)
        self._news.set()

    async def run(self, about: Callable[[], AboutRun]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await self._deliver(self._waiting.popleft(), about())

    async def _deliver(self, alert: Alert, about: AboutRun) -> None:
        try:
            await self._receiver.send(alert, about)
        except EchoError as error:
            # Once a row: what cannot be told by it is still on the page and in the log.
            level = logging.INFO if self._fails else logging.WARNING
            data = {"receiver": self._receiver.name, "alert": alert.kind}
            log.log(level, "an alert was not delivered: %s", error.brief, extra={"event": "alert_failed", "data": data})
            self._fails = True
        except Exception:  # A task's edge: alerts are not what a hub ends of.
            log.exception("an alert could not be made", extra={"event": "alert_failed"})
        else:
            self._fails = False


def new_id() -> str:
    return secrets.token_hex(16)
