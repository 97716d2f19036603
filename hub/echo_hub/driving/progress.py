"""Progress of the run: received rollouts, and whether the last version is published and evaluated."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from echo_shared.wire.messages import RefusalCode


class RunProgress:
    """The one place that knows whether the run is over. `finished` is set at the end of the run, for good."""

    def __init__(self, *, last_version: int, evaluated: Collection[int]) -> None:
        """`evaluated`: versions that were evaluated before this start of the hub."""
        self.num_received = 0
        """Number of rollouts committed since the hub's start."""
        self.finished = asyncio.Event()
        self.last_is_published = False
        """True once the run's last version is published: nothing is leased for training any more."""
        self._last_version = last_version
        self._last_is_evaluated = last_version in evaluated

    def published(self) -> None:
        """Note that the last version is published."""
        self.last_is_published = True
        self._settle()

    def evaluated(self, policy_version: int) -> None:
        """Note that the store holds the evaluation of this version."""
        self._last_is_evaluated |= policy_version == self._last_version
        self._settle()

    def _settle(self) -> None:
        if self.last_is_published and self._last_is_evaluated:
            self.finished.set()

    def farewell(self) -> tuple[RefusalCode, str]:
        """Return code and text for nodes whose connections the hub closes now."""
        if self.finished.is_set():
            return RefusalCode.FINISHED, "The run is finished."
        return RefusalCode.SHUTTING_DOWN, "The hub stops. Your node waits and connects again."
