"""One alert, its JSON form, and the gate that decides whether it is sent. Pure: no input or output."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from echo_hub.operation.problems import Change

HOUR_S: Final = 3_600.0
PER_HOUR: Final = 20
"""Maximum number of alerts per hour; people could not act on more. The next alert that is sent tells how many were
suppressed."""
VERSION: Final = 1
"""Version of the JSON format. A later release may add fields to a version, but removes no field."""

AlertState = Literal["began", "ended", "finished", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    alert_id: str
    """Id of the alert. All delivery attempts have the same id, so receivers can recognise repetitions."""
    kind: str
    """Kind of the alert: a `ProblemKind`, `finished` (the run is over) or `test`."""
    state: AlertState
    text: str
    at: float
    since: float
    """Time when the problem began."""
    held_back: int = 0
    """Number of alerts that were not sent since the previous alert, because of the hourly limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutRun:
    run_id: str
    name: str
    url: str


def alert_of(change: Change, alert_id: str) -> Alert:
    problem = change.problem
    state: AlertState = "began" if change.began else "ended"
    return Alert(
        alert_id=alert_id, kind=problem.kind, state=state, text=problem.text, at=change.at, since=problem.since
    )


class AlertGate:
    """Decides which alerts are sent: only wanted kinds, no duplicates, at most `PER_HOUR` per hour.

    A problem's end is sent only after its beginning. Problems that recur within an hour of their last beginning cause
    no further alert.
    """

    def __init__(self, *, kinds: Collection[str]) -> None:
        self._kinds = frozenset(kinds)
        self._began: dict[str, float] = {}
        """Time at which the last alert about the beginning of a problem was sent, by kind of problem."""
        self._open: set[str] = set()
        """Kinds of problems whose beginning was sent, while the end was not sent yet."""
        self._sent: deque[float] = deque()
        self.held_back = 0
        """Number of alerts that the hourly limit suppressed since the last sent one."""

    def admits(self, kind: str, state: AlertState, now: float) -> bool:
        """Return True if this alert must be sent. The gate then counts the alert as sent."""
        if kind not in self._kinds or not self._is_news(kind, state, now):
            return False
        while self._sent and self._sent[0] <= now - HOUR_S:
            self._sent.popleft()
        if len(self._sent) >= PER_HOUR:
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
            return kind not in self._open and (told is None or now - told >= HOUR_S)
        return True


def payload(alert: Alert, about: AboutRun) -> bytes:
    """Return the alert's JSON body. Chat services show the field `text`."""
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
    """Return the value of the header Echo-Signature: `t=SECONDS,v1=HEX`, where HEX is the HMAC-SHA256 of "SECONDS." and
    the body.

    Receivers should compare it in constant time. Signatures that are minutes old may be replays, and receivers should
    refuse them.
    """
    mac = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256)
    return f"t={at},v1={mac.hexdigest()}"


def headline(alert: Alert, about: AboutRun) -> str:
    over = "Over: " if alert.state == "ended" else ""
    return f"[{about.name}] {over}{alert.text}"
