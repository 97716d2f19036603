"""The node's current run: opened at the hub's first Welcome, and closed when the hub starts another run.

It survives reconnects. Every Welcome updates its data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from echo_node.about import Welcomed
from echo_node.core.history import TokenHistory
from echo_node.host.hubs import Joining
from echo_node.host.trouble_log import TroubleLog
from echo_node.shell import RunShell
from echo_shared.errors import DISK_FULL, StorageError
from echo_shared.signing.identity import fingerprint
from echo_shared.wire.messages import Totals, Welcome

log = logging.getLogger(__name__)

OPENING: Final = "opening the run"
"""Name of the node's part that has a trouble when a run cannot be opened."""

OpenShell = Callable[[Welcome, bytes], Awaitable[RunShell]]
"""Open the shell for a Welcome's run and the hub's key. Raises StorageError."""


class CurrentRun:
    """Call `take_up` at each Welcome, and `close` at the end."""

    def __init__(self, joining: Joining, troubles: TroubleLog, open_shell: OpenShell) -> None:
        self.welcomed: Welcomed | None = None
        """The run, once a hub has admitted the node; None before."""
        self._joining = joining
        self._troubles = troubles
        self._open_shell = open_shell
        self._history = TokenHistory()

    @property
    def shell(self) -> RunShell | None:
        return None if self.welcomed is None else self.welcomed.shell

    @property
    def run_id(self) -> str | None:
        """Id of this run; without one, of the hub's last known run; None = unknown."""
        known = self._joining.pinned if self.welcomed is None else self.welcomed.welcome
        return None if known is None else known.run_id

    @property
    def token_rates(self) -> tuple[float, ...]:
        """See `TokenHistory.rates`, for this run."""
        return self._history.rates

    async def take_up(self, welcome: Welcome, hub_key: bytes) -> bool:
        """Open or update the run. Return False if the disk is full and the node may wait. Raises StorageError.

        Files of another run are deleted first.
        """
        self._log(welcome, hub_key)
        before = self.welcomed
        if before is not None and before.welcome.run_id != welcome.run_id:
            log.warning("The hub has started another run: files of the old run are deleted.")
            self.welcomed, self._history = None, TokenHistory()
            await before.shell.close()
            await before.shell.fetcher.close()
        known = self.welcomed or await self._open(welcome, hub_key)
        if known is None:
            return False
        self.welcomed = replace(known, hub_key=hub_key, welcome=welcome)
        return True

    def hear(self, totals: Totals) -> None:
        """Store the hub's totals of this node's key."""
        if self.welcomed is not None:
            self.welcomed = replace(self.welcomed, totals=totals)

    async def count(self) -> None:
        """Update the counts that the owner sees."""
        if (shell := self.shell) is not None:
            await shell.writer.refresh()
            self._history.note(shell.work.progress.drawn_tokens, asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End the run's tasks and its engine. Its data stays readable."""
        if self.welcomed is not None:
            await self.welcomed.shell.close()

    def _log(self, welcome: Welcome, hub_key: bytes) -> None:
        if self.welcomed is not None:
            return  # The client logs when it reconnects.
        known = self._joining.pinned is not None and self._joining.pinned.hub_key == hub_key
        log.info("Connected to %s at %s.", welcome.run_name, self._joining.address.origin)
        log.info("The hub's key: %s (%s).", fingerprint(hub_key), "as before" if known else "pinned now")

    async def _open(self, welcome: Welcome, hub_key: bytes) -> Welcomed | None:
        try:
            shell = await self._open_shell(welcome, hub_key)
        except StorageError as error:
            if not self._joining.patient or error.code != DISK_FULL:
                raise
            self._troubles.met(OPENING, error)
            return None
        self._troubles.end(OPENING)
        await shell.writer.refresh()
        return Welcomed(hub_key=hub_key, welcome=welcome, shell=shell, counts_before=shell.writer.counts)
