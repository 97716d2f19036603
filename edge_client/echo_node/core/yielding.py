"""The sampling engine while its node is to hold still: told to stop, stopped, ended, and what brings it back.

           hold            told all, or              keep_memory_s, or
    AT WORK ───► LEAVING ─────YIELD_S─────► STILL ───memory is wanted───► ENDING ──EngineLost──► GONE
       ▲                                      │                                                   │
       └─────────────── no hold ──────────────┴───────────────────── no hold ─────────────────────┘

An engine that is being started is not waited for: it ends. One that is STILL has its memory, no thread of it runs, and
it is told nothing.

An engine that is `renewed` ends as well, once it has told all: another is started in its place, with other settings.
"""

from __future__ import annotations

import math
from typing import Final

from echo_node.core.effects import Effect, EndEngine, ResumeEngine, StartEngine, SuspendEngine
from echo_node.core.manners import Hold

YIELD_S: Final = 0.15
"""So long the engine has to tell what it has drawn, before it is stopped where it is."""


class Yielding:
    """Asked by the work loop after every event: what is `due` then."""

    def __init__(self) -> None:
        self.holds: tuple[Hold, ...] = ()
        """Why the node is to hold still; empty = it is not."""
        self._keep_memory_s = math.inf
        self._exists = False
        """There is an engine, or one is being started."""
        self._still_since: float | None = None
        self._is_ending = False
        self._renewed_by: float | None = None
        """When the engine ends at the latest to be started anew; None = it does not."""
        self._waiting: StartEngine | None = None
        """A start that is due once nothing holds the node."""

    @property
    def is_still(self) -> bool:
        """Whether the engine is to be told nothing."""
        return self._still_since is not None or self._is_ending or self.is_renewing

    @property
    def rests(self) -> bool:
        """Whether the node holds still already, and nothing more is due but by news, or within seconds."""
        return bool(self.holds) and not self._is_ending and (self._still_since is not None or not self._exists)

    @property
    def is_renewing(self) -> bool:
        """Whether the engine ends because another is to be started in its place."""
        return self._renewed_by is not None

    def hold(self, holds: tuple[Hold, ...], *, keep_memory_s: float) -> bool:
        """Whether the node is to hold still from here on, and was not before."""
        begins = bool(holds) and not self.holds
        self.holds, self._keep_memory_s = holds, keep_memory_s
        return begins

    def renew(self, by: float) -> bool:
        """The engine is to end, at `by` at the latest, and to start anew; whether there is one that is not ending."""
        if self._exists and not self._is_ending:
            self._renewed_by = by
        return self.is_renewing

    def start(self, effect: StartEngine) -> list[Effect]:
        """An engine is due: now, or once nothing holds the node."""
        if self.holds or self._is_ending:
            self._waiting = effect
            return []
        self._exists = True
        return [effect]

    def lost(self) -> None:
        """The engine is gone."""
        self._exists = self._is_ending = False
        self._still_since = self._renewed_by = None

    def due(self, now: float, *, is_up: bool, is_told: bool) -> list[Effect]:
        """`is_up`: the engine has its model; `is_told`: nothing more is waited for from it."""
        if self._is_ending:
            return []
        if self._renewed_by is not None and (is_told or not is_up or now >= self._renewed_by):
            self._is_ending = True
            return [EndEngine()]
        if self._renewed_by is not None:
            return []
        if not self.holds:
            return self._release()
        if not self._exists or not is_told:
            return []
        wanted = any(hold.frees_memory for hold in self.holds)
        if wanted or not is_up or (self._still_since is not None and now - self._still_since >= self._keep_memory_s):
            self._is_ending = True
            return [EndEngine()]
        if self._still_since is None:
            self._still_since = now
            return [SuspendEngine()]
        return []

    def _release(self) -> list[Effect]:
        if self._still_since is not None:
            self._still_since = None
            return [ResumeEngine()]
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            return self.start(waiting)
        return []
