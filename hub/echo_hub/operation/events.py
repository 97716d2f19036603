"""Convert log lines to events of a run. Pure.

Every line that the hub logs at `info` or above becomes an event. Its kind is `log`, unless the line's `extra` names
another kind:

    log.info("node %s joined", name, extra={"event": "node_joined", "subject": node_id, "data": {"engine": "torch"}})

So terminal, hub.log, database and page show the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Any, Final

from echo_hub.core.accounting.effects import TrustDecided
from echo_hub.core.trust.standing import Decision
from echo_shared.records.run import RunEvent, Severity
from echo_shared.wire.messages.fields import printable_line

MOST_CHARACTERS: Final = 500
MOST_OF_SUBJECT: Final = 64
MOST_DATA: Final = 16
"""Maximum number of items of `data` that are kept."""
_WARNING: Final = 30
_ERROR: Final = 40
"""Levels as in the standard library's module `logging`."""


class EventKind(StrEnum):
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
    FORGED_ANSWER = "forged_answer"
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
    """An operator has carried out an action."""


_DECIDED: Final[Mapping[Decision, tuple[EventKind, int, str]]] = {
    Decision.QUARANTINED: (EventKind.NODE_QUARANTINED, _WARNING, "node %s is in quarantine: %s"),
    Decision.RELEASED: (EventKind.NODE_RELEASED, _WARNING, "node %s is out of quarantine: %s"),
    Decision.PARDONED: (EventKind.NODE_PARDONED, 20, "node %s is pardoned: %s"),
    Decision.TRUSTED: (EventKind.NODE_TRUSTED, 20, "node %s counts as proven: %s"),
    Decision.DISTRUSTED: (EventKind.NODE_DISTRUSTED, 20, "node %s must prove itself again: %s"),
}


def event_of(*, at: float, level: int, text: str, extra: Mapping[str, Any]) -> RunEvent:
    """Return the event of one log line. Text from strangers in `extra` is sanitised and truncated."""
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
    """Return the log line for a decision on a node's trust: level, format, arguments and `extra`."""
    kind, level, text = _DECIDED[decided.decision]
    data = {"rollout_id": decided.rollout_id} if decided.rollout_id else {}
    reason = decided.reason or "no reason given"
    return level, text, (decided.node_id, reason), {"event": kind, "subject": decided.node_id, "data": data}


def _line(value: object, most: int) -> str:
    return printable_line(str(value)[:most])


def _safe(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _line(name, 32): value if _is_plain(value) else _line(value, 200)
        for name, value in list(data.items())[:MOST_DATA]
    }


def _is_plain(value: object) -> bool:
    """Return True for a plain JSON value. Floats must be finite, as PostgreSQL's JSON requires."""
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value))
