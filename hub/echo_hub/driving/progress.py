"""Progress of the run: number of received rollouts, and if the last version is published and evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from echo_shared.wire.messages import RefusalCode


class RunProgress:
    """Decides if the run is over. The event `finished` is set once the last version is published and evaluated."""

    def __init__(self, *, last_version: int, evaluated: Collection[int]) -> None:
        """`evaluated` holds the versions whose evaluations were in the store when the hub started."""
        self.num_received = 0
        """Number of received rollouts whose records were committed since the hub started."""
        self.finished = asyncio.Event()
        self.last_is_published = False
        """True once the last version of the run is published. From then on nothing is leased for training."""
        self._last_version = last_version
        self._last_is_evaluated = last_version in evaluated

    def published(self) -> None:
        self.last_is_published = True
        self._settle()

    def evaluated(self, policy_version: int) -> None:
        """Record that the store holds the evaluation of this version."""
        self._last_is_evaluated |= policy_version == self._last_version
        self._settle()

    def _settle(self) -> None:
        if self.last_is_published and self._last_is_evaluated:
            self.finished.set()

    def farewell(self) -> tuple[RefusalCode, str]:
        """Return the code and the text with which the hub closes its nodes' connections, if it ends now."""
        if self.finished.is_set():
            return RefusalCode.FINISHED, "The run is finished."
        return RefusalCode.SHUTTING_DOWN, "The hub stops. Your node waits and connects again."
