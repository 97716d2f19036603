"""Works for several hubs in turns, one engine at a time, with time in proportion to the shares that the owner has set.

A turn ends after TURN_S seconds, or earlier if its hub is unreachable or gives no work for IDLE_S seconds. Current
leases are finished first. A hub without work is asked again after AGAIN_S seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from echo_node.core.shares import next_hub
from echo_node.daemon import Daemon
from echo_node.host.shares import SharesFile
from echo_node.releases import TAKES_OVER
from echo_shared.errors import EchoError, StorageError

log = logging.getLogger(__name__)

TURN_S: Final = 3_600.0
IDLE_S: Final = 300.0
AGAIN_S: Final = 900.0
LOOK_S: Final = 2.0
KEEP_S: Final = 60.0
"""Seconds of work after which they are added to the hub's stored time of work, so that a crash loses few of them."""


_IDLE: Final = ("connecting", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Lengths of turns and waits, in seconds."""

    turn_s: float = TURN_S
    idle_s: float = IDLE_S
    again_s: float = AGAIN_S
    look_s: float = LOOK_S


class NodeTurns:
    """The sequence of turns. `run` ends when the owner stops it, or when no hub is left."""

    def __init__(self, shares: SharesFile, make: Callable[[str], Daemon], *, paces: Paces | None = None) -> None:
        """`make`: creates a daemon for the hub at an address."""
        self._shares = shares
        self._make = make
        self._paces = paces or Paces()
        self._away_until: dict[str, float] = {}
        """Monotonic time from which a hub without work is asked again. inf = never, because the hub refuses this node,
        or the run has ended.
        """
        self._refused: EchoError | None = None

    async def run(self, first: Daemon | None = None) -> None:
        """Work in turns, starting with `first`. Raises the last hub's EchoError if all hubs refuse, and CancelledError
        like the daemon.
        """
        hub = self._next() if first is None else first.hub
        while hub is not None:
            daemon = first or self._make(hub)
            turn = asyncio.create_task(self._end_in_time(daemon, hub), name="turn")
            turn.add_done_callback(_tell_failure)
            try:
                await daemon.run()
            except EchoError as error:
                # If the owner has just joined the hub, show the owner the hub's error.
                if first is not None or error.code == TAKES_OVER:
                    raise
                log.error("No more turns for %s: %s", hub, error)
                self._refused, self._away_until[hub] = error, math.inf
            finally:
                turn.cancel()
            if daemon.is_told_to_end:
                return
            if hub not in self._away_until and not daemon.is_finishing:
                self._away_until[hub] = math.inf  # The hub's run is over.
            first, hub = None, self._next(hub)
        if self._refused is not None:
            raise self._refused

    def _next(self, before: str | None = None) -> str | None:
        """Return the hub for the next turn, not `before` if another hub has work. If no hub has work, return the hub to
        ask first.
        """
        soonest = sorted(self._away_until.items(), key=lambda one: one[1])
        asked = next((hub for hub, until in soonest if until < math.inf), None)
        return self._with_work(besides=before) or asked

    def _with_work(self, *, besides: str | None = None) -> str | None:
        """Return the next hub that may have work, other than `besides`. Raises StorageError."""
        now = time.monotonic()
        away = {hub for hub, until in self._away_until.items() if until > now}
        return next_hub(self._shares.load(), away=away | {besides} if besides else away, now=time.time())

    async def _end_in_time(self, daemon: Daemon, hub: str) -> None:
        """Count the seconds in which the hub gave work. End the hub's turn when another hub is due."""
        self._away_until.pop(hub, None)
        began = seen = busy_at = time.monotonic()
        had_s = 0.0
        try:
            while True:
                await asyncio.sleep(self._paces.look_s)
                now = time.monotonic()
                if not daemon.has_engine:  # The daemon has no snapshot yet. Choosing an engine can take seconds.
                    began = seen = busy_at = now
                    continue
                snapshot = daemon.snapshot()
                had_s += now - seen if snapshot.held_rollouts else 0.0
                if had_s >= KEEP_S:
                    self._keep(hub, had_s)
                    had_s = 0.0
                if snapshot.connected and snapshot.activity not in _IDLE:
                    busy_at = now
                seen = now
                has_none = now - busy_at >= self._paces.idle_s
                if not (has_none or now - began >= self._paces.turn_s):
                    continue
                self._keep(hub, had_s)
                had_s = 0.0
                try:
                    after = self._with_work(besides=hub if has_none else None)
                except StorageError as error:
                    log.warning("The turn is prolonged: %s", error)
                    after = None
                if after in (None, hub):
                    began = busy_at = now
                    continue
                if has_none:
                    self._away_until[hub] = now + self._paces.again_s
                daemon.finish("it has no work now" if has_none else "another hub's turn has come")
        finally:
            self._keep(hub, had_s)

    def _keep(self, hub: str, seconds: float) -> None:
        """Add seconds of work to the hub's stored time of work. The file is small enough to be written on the event
        loop.
        """
        try:
            self._shares.worked(hub, seconds, time.time())
        except StorageError as error:
            log.warning("%s", error)


def _tell_failure(turn: asyncio.Task[None]) -> None:
    if not turn.cancelled() and (error := turn.exception()) is not None:
        log.error("The node stays with its present hub until it is restarted.", exc_info=error)
