"""Figures about the sessions in which environments with state play episodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Number of sessions, slots and waiting turns of a run at one moment."""

    open: int
    slots: int
    """Number of sessions that may be open at once; 0 while the environment is away."""
    most: int
    """Largest number of open sessions that the operator allows: the setting `sessions.most`."""
    waiting: int
    """Number of turns that wait for a slot."""
    is_short: bool = False
    """True if a group of rollouts cannot start because there are too few free slots for its sessions."""
    away: str = ""
    """Why the environment does not answer; "" if it answers."""
    away_since: float | None = None
    """Unix time in seconds since which the environment does not answer."""
