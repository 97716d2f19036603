"""What a hub does now and then: notes who is there, whom the operator has banned, and forgets what nobody needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from echo_hub.config.sections import LearnerConfig
from echo_hub.core.status import CoordinatorStatus
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore

HOUSEKEEPING_S: Final = 15.0
BANS_S: Final = 1.0
"""How often the store is asked who is banned: the operator's command writes there."""


class Housekeeping:
    """`nodes` are the ids of those that are connected; `evaluating` the versions that evaluations still need; `bar` is
    told who is banned."""

    def __init__(
        self,
        settings: LearnerConfig,
        *,
        store: AsyncStore,
        directory: RunDirectory,
        status: Callable[[], CoordinatorStatus],
        nodes: Iterable[str],
        evaluating: Collection[int],
        bar: Callable[[frozenset[str]], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._directory = directory
        self._status = status
        self._nodes = nodes
        self._evaluating = evaluating
        self._bar = bar

    async def run(self) -> None:
        """Keeps house for ever."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self.keep_house()

    async def keep_house(self) -> None:
        """Notes who is still there; forgets old adapters, and the tokens of steps that every kept checkpoint holds."""
        status = self._status()
        await self._store.nodes_still_here(list(self._nodes), time.time())
        await asyncio.to_thread(
            self._directory.forget_adapters,
            kept=self._settings.adapters_kept,
            published_version=status.published_version,
            evaluating=set(self._evaluating),
        )
        kept_steps = self._settings.checkpoint_every * (self._settings.checkpoints_kept + 1)
        await self._store.prune(status.trained_steps - kept_steps)

    async def watch_bans(self) -> None:
        """Bars for ever who is banned, and lets in again who is not any more."""
        while True:
            self._bar(await self._store.banned_nodes())
            await asyncio.sleep(BANS_S)
