"""Actions that the host's core (`host_core`, pure decisions) orders from the session host (`echo_hub.sessions.host`,
which does I/O)."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.sessions.turns import Answer, PlayedTurn, SessionKey
from echo_shared.records.rollout import SessionEventKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open a session for this episode's problem, and begin the episode in it."""

    session: int
    key: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSession:
    """Give the last of `turns` to the session. The session has answered all earlier turns."""

    session: int
    turns: tuple[PlayedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """Close the session, and report when it is closed."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCall:
    """Return an answer to a waiting call of `SessionHost.respond`. The call is then over."""

    call: int
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSession:
    """Add a line to the history of an episode, for the operator."""

    key: SessionKey
    what: SessionEventKind
    turn: int | None = None
    detail: str = ""


Effect = OpenSession | StepSession | EndSession | TellCall | NoteSession
