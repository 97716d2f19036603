"""Works for several hubs by turns, one engine at a time: each as long as its owner's shares say.

A turn ends after TURN_S, or sooner when its hub could not be reached or has had no work for IDLE_S. What is held is
finished first. The hub that had nothing is asked again after AGAIN_S.
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
"""Of time had, that is written down together."""


_IDLE: Final = ("connecting", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Seconds of all that a turn waits for."""

    turn_s: float = TURN_S
    idle_s: float = IDLE_S
    again_s: float = AGAIN_S
    look_s: float = LOOK_S


class Turns:
    """`run` until the owner says otherwise, or no hub is left."""

    def __init__(self, shares: SharesFile, make: Callable[[str], Daemon], *, paces: Paces | None = None) -> None:
        """`make`: a daemon for the hub at an address."""
        self._shares = shares
        self._make = make
        self._paces = paces or Paces()
        self._away_until: dict[str, float] = {}
        """By hub without work: the monotonic time at which it is asked again; inf = it refuses this node."""
        self._refused: EchoError | None = None

    async def run(self, first: Daemon | None = None) -> None:
        """Begins with `first`. Raises the last hub's EchoError when all have refused; CancelledError as the daemon."""
        hub = self._next() if first is None else first.hub
        while hub is not None:
            daemon = first or self._make(hub)
            turn = asyncio.create_task(self._end_in_time(daemon, hub), name="turn")
            try:
                await daemon.run()
            except EchoError as error:
                if first is not None or error.code == TAKES_OVER:  # Its owner sees the hub fail that is being joined.
                    raise
                log.error("No more turns for %s: %s", hub, error)
                self._refused, self._away_until[hub] = error, math.inf
            finally:
                turn.cancel()
            if daemon.is_told_to_end:
                return
            if hub not in self._away_until and not daemon.is_finishing:
                self._away_until[hub] = math.inf  # Its run is over.
            first, hub = None, self._next(hub)
        if self._refused is not None:
            raise self._refused

    def _next(self, before: str | None = None) -> str | None:
        """The hub whose turn is next, after `before`; where all have had no work, the one that is to be asked first."""
        soonest = sorted(self._away_until.items(), key=lambda one: one[1])
        asked = next((hub for hub, until in soonest if until < math.inf), None)
        return self._with_work(besides=before) or asked

    def _with_work(self, *, besides: str | None = None) -> str | None:
        """Of those that may have some. Raises StorageError."""
        now = time.monotonic()
        away = {hub for hub, until in self._away_until.items() if until > now}
        return next_hub(self._shares.load(), away=away | {besides} if besides else away, now=time.time())

    async def _end_in_time(self, daemon: Daemon, hub: str) -> None:
        """Counts the time that this hub has, until another one's turn is due."""
        self._away_until.pop(hub, None)
        began = seen = busy_at = time.monotonic()
        had_s = 0.0
        try:
            while True:
                await asyncio.sleep(self._paces.look_s)
                now, snapshot = time.monotonic(), daemon.snapshot()
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
                after = self._with_work(besides=hub if has_none else None)
                if after in (None, hub):
                    began = busy_at = now
                    continue
                if has_none:
                    self._away_until[hub] = now + self._paces.again_s
                daemon.finish("it has no work now" if has_none else "another hub's turn has come")
        finally:
            self._keep(hub, had_s)

    def _keep(self, hub: str, seconds: float) -> None:
        """A file of a few lines: to write it takes no longer than a look."""
        try:
            self._shares.worked(hub, seconds, time.time())
        except StorageError as error:
            log.warning("%s", error)
