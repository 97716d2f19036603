"""When a run is over: its last version is published and evaluated, and nobody has anything left to do."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from echo_shared.messages import RefusalCode


class RunEnding:
    """The one place that knows whether the run is over. `finished` is set when the run is over; nothing unsets it."""

    def __init__(self, *, last_version: int, evaluated: Collection[int]) -> None:
        """`evaluated`: the versions whose accuracy is known from before a restart."""
        self.finished = asyncio.Event()
        self.last_is_published = False
        """Nothing is leased for training any more."""
        self._last_version = last_version
        self._last_is_evaluated = last_version in evaluated

    def published(self) -> None:
        """Hears that the last version is out."""
        self.last_is_published = True
        self._settle()

    def evaluated(self, policy_version: int) -> None:
        """Hears that the accuracy of this version is in the store."""
        self._last_is_evaluated |= policy_version == self._last_version
        self._settle()

    def _settle(self) -> None:
        if self.last_is_published and self._last_is_evaluated:
            self.finished.set()

    def farewell(self) -> tuple[RefusalCode, str]:
        """What nodes are told when the hub closes their connections now."""
        if self.finished.is_set():
            return RefusalCode.FINISHED, "The run is finished."
        return RefusalCode.SHUTTING_DOWN, "The hub stops. Your node waits and connects again."
