"""What is an event of a run, and how it is said. Pure: a line of the log in, an event out.

Whatever the hub logs at `info` or above is an event, of the kind `log` unless the line says another in its `extra`:

    log.info("node %s joined", name, extra={"event": "node_joined", "subject": node_id, "data": {"engine": "torch"}})

So one line goes to the terminal, to hub.log, into the store and onto the page, and says the same in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Any, Final

from echo_hub.core.effects import TrustDecided
from echo_hub.core.trust.standing import Decision
from echo_shared.books import RunEvent, Severity
from echo_shared.messages.fields import printable_line

MOST_CHARACTERS: Final = 500
MOST_OF_SUBJECT: Final = 64
MOST_DATA: Final = 16
"""Items of `data`."""
_WARNING: Final = 30
_ERROR: Final = 40
"""The levels of the standard library's logging."""


class EventKind(StrEnum):
    """What may happen."""

    LOG = "log"
    HUB_STARTED = "hub_started"
    HUB_STOPPED = "hub_stopped"
    HUB_FAILED = "hub_failed"
    RUN_FINISHED = "run_finished"
    NODE_JOINED = "node_joined"
    NODE_LEFT = "node_left"
    NODE_REFUSED = "node_refused"
    NODE_BANNED = "node_banned"
    NODE_UNBANNED = "node_unbanned"
    NODE_QUARANTINED = "node_quarantined"
    NODE_RELEASED = "node_released"
    NODE_PARDONED = "node_pardoned"
    NODE_TRUSTED = "node_trusted"
    NODE_DISTRUSTED = "node_distrusted"
    LEARNER_DIED = "learner_died"
    SCORER_DIED = "scorer_died"
    VERIFIER_DIED = "verifier_died"
    NOT_MEASURED = "not_measured"
    EVALUATOR_DIED = "evaluator_died"
    VERSION_EVALUATED = "version_evaluated"
    VERSION_UNUSABLE = "version_unusable"
    DISK_FULL = "disk_full"
    DISK_HAS_ROOM = "disk_has_room"
    DATABASE_AWAY = "database_away"
    DATABASE_BACK = "database_back"
    PROBLEM_BEGAN = "problem_began"
    PROBLEM_ENDED = "problem_ended"
    ALERT_FAILED = "alert_failed"
    LOGIN_REFUSED = "login_refused"
    ACTION = "action"
    """Of an operator."""


_DECIDED: Final[Mapping[Decision, tuple[EventKind, int, str]]] = {
    Decision.QUARANTINED: (EventKind.NODE_QUARANTINED, _WARNING, "node %s is in quarantine: %s"),
    Decision.RELEASED: (EventKind.NODE_RELEASED, _WARNING, "node %s is out of quarantine: %s"),
    Decision.PARDONED: (EventKind.NODE_PARDONED, 20, "node %s is pardoned: %s"),
    Decision.TRUSTED: (EventKind.NODE_TRUSTED, 20, "node %s is taken for proven: %s"),
    Decision.DISTRUSTED: (EventKind.NODE_DISTRUSTED, 20, "node %s has to prove itself anew: %s"),
}


def event_of(*, at: float, level: int, text: str, extra: Mapping[str, Any]) -> RunEvent:
    """The event of one line of the log. `extra` holds what the line has beside its text; strangers' words in it are
    made safe to store and to show, and cut."""
    data = extra.get("data")
    return RunEvent(
        at=at,
        kind=_line(extra.get("event") or EventKind.LOG, 32),
        severity=Severity.ERROR if level >= _ERROR else Severity.WARNING if level >= _WARNING else Severity.INFO,
        subject=_line(extra.get("subject") or "", MOST_OF_SUBJECT),
        text=_line(text, MOST_CHARACTERS),
        data=_safe(data) if isinstance(data, Mapping) else {},
    )


def decision_line(decided: TrustDecided) -> tuple[int, str, tuple[str, str], dict[str, Any]]:
    """How the log says a decision on a node: level, text, what goes into it, extra."""
    kind, level, text = _DECIDED[decided.decision]
    data = {"rollout_id": decided.rollout_id} if decided.rollout_id else {}
    reason = decided.reason or "no reason given"
    return level, text, (decided.node_id, reason), {"event": kind, "subject": decided.node_id, "data": data}


def _line(value: object, most: int) -> str:
    return printable_line(str(value)[:most])


def _safe(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's plain values, and text that is cut."""
    return {
        _line(name, 32): value if _is_plain(value) else _line(value, 200)
        for name, value in list(data.items())[:MOST_DATA]
    }


def _is_plain(value: object) -> bool:
    """JSON has it as it is; of numbers, PostgreSQL's has only finite ones."""
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
