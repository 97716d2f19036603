"""One alert, whether it is sent at all, and how a webhook and an e-mail say it. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Any, Final, Literal

from echo_hub.operation.problems import Change

HOUR_S: Final = 3_600.0
VERSION: Final = 1
"""Of the JSON; fields are only ever added to one version."""
_SUBJECT: Final = 150
"""Characters of an e-mail's subject."""

AlertState = Literal["began", "ended", "finished", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What is told."""

    alert_id: str
    """The same in every attempt to deliver it."""
    kind: str
    """A `ProblemKind`, `finished` or `test`."""
    state: AlertState
    text: str
    at: float
    since: float
    """When the problem began."""
    held_back: int = 0
    """Alerts that were not sent since the one before, for there were too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutRun:
    """Which run an alert is of."""

    run_id: str
    name: str
    url: str
    """The hub's address."""


def alert_of(change: Change, alert_id: str) -> Alert:
    problem = change.problem
    state: AlertState = "began" if change.began else "ended"
    return Alert(
        alert_id=alert_id, kind=problem.kind, state=state, text=problem.text, at=change.at, since=problem.since
    )


class AlertGate:
    """Which alerts are sent: of the kinds that are wanted, none twice, and not too many.

    The end of a problem is told to who was told of its beginning, and to nobody else.
    """

    def __init__(self, *, kinds: Collection[str], repeat_s: float, per_hour: int) -> None:
        self._kinds = frozenset(kinds)
        self._repeat_s = repeat_s
        self._per_hour = per_hour
        self._began: dict[str, float] = {}
        """When the newest beginning of a kind was told."""
        self._open: set[str] = set()
        """Told to have begun, and not yet to have ended."""
        self._sent: deque[float] = deque()
        self.held_back = 0
        """Since one was sent."""

    def admits(self, kind: str, state: AlertState, now: float) -> bool:
        """Whether this one is sent; if so, it counts as sent. `held_back` is then 0 again for the next."""
        if kind not in self._kinds or not self._is_news(kind, state, now):
            return False
        while self._sent and self._sent[0] <= now - HOUR_S:
            self._sent.popleft()
        if len(self._sent) >= self._per_hour:
            self.held_back += 1
            return False
        self._sent.append(now)
        if state == "began":
            self._began[kind] = now
            self._open.add(kind)
        self._open -= {kind} if state == "ended" else set()
        return True

    def _is_news(self, kind: str, state: AlertState, now: float) -> bool:
        if state == "ended":
            return kind in self._open
        if state == "began":
            told = self._began.get(kind)
            return kind not in self._open and (told is None or now - told >= self._repeat_s)
        return True


def payload(alert: Alert, about: AboutRun) -> bytes:
    """What is posted to a webhook. `text` alone is what chat services show."""
    said: dict[str, Any] = {
        "version": VERSION,
        "id": alert.alert_id,
        "text": headline(alert, about),
        "run": {"id": about.run_id, "name": about.name, "url": about.url},
        "kind": alert.kind,
        "state": alert.state,
        "message": alert.text,
        "at": alert.at,
        "since": alert.since,
        "held_back": alert.held_back,
    }
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode()


def signature(body: bytes, secret: str, at: int) -> str:
    """The value of Echo-Signature: `t=SECONDS,v1=HEX`, by HMAC-SHA256 of "SECONDS." and the body. Who receives it
    compares in constant time, and refuses what is minutes old, so that nobody sends it again later."""
    mac = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256)
    return f"t={at},v1={mac.hexdigest()}"


def email(alert: Alert, about: AboutRun, *, sender: str, to: Collection[str]) -> EmailMessage:
    """As RFC 5322 has it. The run's name is the operator's own, all else the hub's."""
    message = EmailMessage()
    message["From"], message["To"] = sender, ", ".join(to)
    message["Subject"] = " ".join(headline(alert, about).split())[:_SUBJECT]
    message["Date"] = datetime.fromtimestamp(alert.at, UTC)
    message["Message-ID"] = f"<{alert.alert_id}@{sender.partition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    lines = [alert.text, "", f"Run: {about.name} ({about.run_id})", f"Hub: {about.url}", f"When: {_time(alert.at)}"]
    if alert.state == "ended":
        lines.append(f"It began: {_time(alert.since)}")
    if alert.held_back:
        lines.append(f"Before this, {alert.held_back} alerts were held back: there were too many within an hour.")
    message.set_content("\n".join(lines) + "\n", cte="quoted-printable")  # Not every server takes eight bits.
    return message


def headline(alert: Alert, about: AboutRun) -> str:
    """One line."""
    over = "Over: " if alert.state == "ended" else ""
    return f"[{about.name}] {over}{alert.text}"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
