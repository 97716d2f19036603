"""States of the sampling engine while the node pauses for its owner.

A hold is a reason to pause. An engine has "told all" once it has reported all tokens of its unfinished rollouts.

           hold            told all, or              keep_memory_s, or
    AT WORK ───► LEAVING ─────YIELD_S─────► STILL ───memory is wanted───► ENDING ──EngineLost──► GONE
       ▲                                      │                                                   │
       └─────────────── no hold ──────────────┴───────────────────── no hold ─────────────────────┘

A starting engine is ended at once. A STILL engine keeps its memory; none of its threads runs, and it gets no commands.
An engine whose settings have changed (`renew`) also ends, once it has reported all tokens: another one with the new
settings takes its place.
"""

from __future__ import annotations

import math
from typing import Final

from echo_node.core.effects import Effect, EndEngine, ResumeEngine, StartEngine, SuspendEngine
from echo_node.core.manners import Hold

YIELD_S: Final = 0.15
"""Seconds that a pausing engine gets to report its tokens before its threads are stopped."""


class Yielding:
    """State of one engine while it pauses for the machine's owner. The work loop calls `due` after every event."""

    def __init__(self, device: str = "") -> None:
        self._device = device
        self.holds: tuple[Hold, ...] = ()
        """Reasons to pause; empty = no pause."""
        self._keep_memory_s = math.inf
        self._exists = False
        """True if an engine runs or starts."""
        self._still_since: float | None = None
        self._is_ending = False
        self._renewed_by: float | None = None
        """Deadline for ending the engine that is being replaced by one with new settings; None = no engine is being
        replaced.
        """
        self._waiting: StartEngine | None = None
        """Postponed start of an engine: it waits for the end of the holds (reasons to pause) and of the previous
        engine.
        """

    @property
    def is_still(self) -> bool:
        """True while the engine must get no commands: it is stopped, ending, or being replaced."""
        return self._still_since is not None or self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """True while the engine ends or is being replaced."""
        return self._is_ending or self.is_renewing

    @property
    def rests(self) -> bool:
        """True while the pause is complete: the engine's threads are stopped, or there is no engine."""
        return bool(self.holds) and not self._is_ending and (self._still_since is not None or not self._exists)

    @property
    def exists(self) -> bool:
        """True if an engine runs or starts, or waits for its start."""
        return self._exists or self._waiting is not None

    def end(self) -> list[Effect]:
        """Return the effects that end the engine at once."""
        if not self._exists or self._is_ending:
            return []
        self._is_ending = True
        return [EndEngine(device=self._device)]

    @property
    def is_renewing(self) -> bool:
        """True while the engine is being replaced by one with new settings."""
        return self._renewed_by is not None

    def hold(self, holds: tuple[Hold, ...], *, keep_memory_s: float) -> bool:
        """Store the current holds (reasons to pause). Return True if they begin a pause."""
        begins = bool(holds) and not self.holds
        self.holds, self._keep_memory_s = holds, keep_memory_s
        return begins

    def renew(self, by: float) -> bool:
        """Replace the engine at the time `by` at the latest. Return False without an engine, or if the engine is
        already ending.
        """
        if self._exists and not self._is_ending:
            self._renewed_by = by
        return self.is_renewing

    def start(self, effect: StartEngine) -> list[Effect]:
        """Return the effect, or keep it until the holds (reasons to pause) end and the previous engine is gone."""
        if self.holds or self._is_ending:
            self._waiting = effect
            return []
        self._exists = True
        return [effect]

    def lost(self) -> None:
        self._exists = self._is_ending = False
        self._still_since = self._renewed_by = None

    def due(self, now: float, *, is_up: bool, is_told: bool) -> list[Effect]:
        """Return the effects that are due. `is_up`: the engine has loaded its model; `is_told`: it has reported all
        tokens of the leases that it was told to stop.
        """
        if self._is_ending:
            return []
        if self._renewed_by is not None and (is_told or not is_up or now >= self._renewed_by):
            self._is_ending = True
            return [EndEngine(device=self._device)]
        if self._renewed_by is not None:
            return []
        if not self.holds:
            return self._release()
        if not self._exists or not is_told:
            return []
        wanted = any(hold.frees_memory for hold in self.holds)
        if wanted or not is_up or (self._still_since is not None and now - self._still_since >= self._keep_memory_s):
            self._is_ending = True
            return [EndEngine(device=self._device)]
        if self._still_since is None:
            self._still_since = now
            return [SuspendEngine(device=self._device)]
        return []

    def _release(self) -> list[Effect]:
        if self._still_since is not None:
            self._still_since = None
            return [ResumeEngine(device=self._device)]
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            return self.start(waiting)
        return []
