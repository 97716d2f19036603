"""What a hub does now and then: notes who is there, whom the operator has banned, pardoned or invited, and forgets what
nobody needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.core.events import NodePardoned
from echo_hub.core.status import CoordinatorStatus
from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.invites import read_invites, read_num_invites
from echo_hub.store.known_nodes import note_still_here, read_banned_nodes
from echo_hub.store.standings import read_wanted_pardons
from echo_hub.store.tallies import read_useful_nodes
from echo_shared.books import Invite

log = logging.getLogger(__name__)

HOUSEKEEPING_S: Final = 15.0
BANS_S: Final = 1.0
"""How often the store is asked who is banned, invited or to be pardoned: the operator's commands write there."""


def kept_steps(settings: LearnerConfig) -> int:
    """For how many steps, at least 2, the tokens of one are kept: each kept checkpoint holds those of the older."""
    return settings.checkpoint_every * (settings.checkpoints_kept + 1)


class Housekeeping:
    """`nodes` are the ids of those that are connected; `evaluating` the versions that evaluations still need; `bar` is
    told who is banned, `invite` of all invites, `know` whose work has been of use."""

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
        invite: Callable[[Sequence[Invite]], None],
        know: Callable[[frozenset[str]], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._directory = directory
        self._status = status
        self._nodes = nodes
        self._evaluating = evaluating
        self._bar = bar
        self._invite = invite
        self._know = know

    async def run(self) -> None:
        """Keeps house for ever."""
        self._know(await self._store.read(read_useful_nodes))
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self.keep_house()

    async def keep_house(self) -> None:
        """Notes who is still there and who has been of use; forgets old adapters, and the tokens of steps that every
        kept checkpoint holds."""
        status = self._status()
        if self._nodes:
            await self._store.write(note_still_here, list(self._nodes), time.time())
        self._know(await self._store.read(read_useful_nodes))
        await asyncio.to_thread(
            self._directory.forget_adapters,
            kept=self._settings.adapters_kept,
            max_bytes=self._settings.adapters_max_bytes,
            published_version=status.published_version,
            evaluating=set(self._evaluating),
        )
        await self._store.on_writer(self._store.store.prune, status.trained_steps - kept_steps(self._settings))

    async def watch_bans(self) -> None:
        """Bars for ever who is banned, and lets in again who is not any more; tells of all invites that there are
        whenever they have changed."""
        known, barred = None, None
        while True:
            if (number := await self._store.read(read_num_invites)) != known:
                self._invite(await self._store.read(read_invites))
                known = number
            banned = await self._store.read(read_banned_nodes)
            self._bar(banned)
            if barred is not None:
                _say_who(banned - barred, barred - banned)
            barred = banned
            await asyncio.sleep(BANS_S)

    async def watch_pardons(self, report: Callable[[NodePardoned], Awaitable[None]]) -> None:
        """Reports for ever whom the operator pardons; once it is recorded, it is wanted no more."""
        while True:
            for node_id in sorted(await self._store.read(read_wanted_pardons)):
                await report(NodePardoned(node_id=node_id))
            await asyncio.sleep(BANS_S)


def _say_who(banned: Iterable[str], unbanned: Iterable[str]) -> None:
    for node_id in sorted(banned):
        log.warning("node %s is banned", node_id, extra={"event": "node_banned", "subject": node_id})
    for node_id in sorted(unbanned):
        log.info("node %s may take part again", node_id, extra={"event": "node_unbanned", "subject": node_id})
