"""Carries out the decisions of `echo_node.core.updating`: updates a node that a hub refuses as too old, if its owner
allows that.

Current leases are finished first, for at most ten minutes. Then the installer runs while the node keeps answering. If
the node is a service, the installer restarts it, and restores the old version if the new one does not answer. Any other
node ends in good order and becomes the new version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, assert_never

import echo_shared
from echo_node.core.events import Incoming, Upgraded
from echo_node.core.notices import Notice
from echo_node.core.updating import (
    ComeBack,
    Decision,
    Install,
    Known,
    Stay,
    UpdateMode,
    decide,
    host_of,
)
from echo_node.current_run import CurrentRun
from echo_node.host.hubs import Hubs
from echo_node.host.installed_copy import InstalledCopy
from echo_node.host.installing import install
from echo_node.host.notifications import notify
from echo_node.host.paths import NodePaths
from echo_node.host.update_book import UpdateBook
from echo_node.net.client import HubClient
from echo_node.owner_watch import OwnerWatch
from echo_shared.errors import StorageError
from echo_shared.installation import how_to_upgrade

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
FINISH_S: Final = 600.0
BEGINS: Final = "This node updates itself"
FAILED: Final = "This node could not update itself"
_INSTALLED: Final = "Release {release} was installed."
_NOTHING_NEW: Final = "{source} had no other release."


class Updater:
    """Updates the node. `run` checks regularly; `said` is the sentence about updates that `status` shows, empty without
    news.
    """

    def __init__(
        self,
        paths: NodePaths,
        *,
        mode: UpdateMode,
        client: HubClient,
        run: CurrentRun,
        watch: OwnerWatch,
        inbox: asyncio.Queue[Incoming],
        copy: InstalledCopy | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        """`copy`: None = the running installation."""
        self.said = ""
        self.mode = mode
        self._paths = paths
        self._client = client
        self._run = run
        self._watch = watch
        self._inbox = inbox
        self._copy = copy or InstalledCopy()
        self._book = UpdateBook(self._copy.home)
        self._log_file = paths.logs / "update.log"
        self._look_s = look_s
        self._is_unwritable = False
        """True if an attempt could not be recorded. No further attempt is made until the next start."""

    async def run(self) -> None:
        """Check regularly if an update is due, until another version takes over."""
        while True:
            decision = self._decide()
            match decision:
                case Stay():
                    self._say(decision.sentence and f"{decision.sentence} {how_to_upgrade()}")
                case Install():
                    await self._update(decision)
                case ComeBack():
                    await self._inbox.put(Upgraded(release=self._copy.newest_release or "another one"))
                    return
                case _:
                    assert_never(decision)
            await asyncio.sleep(self._look_s)

    def _decide(self) -> Decision:
        mode, refusal, now = self.mode, self._client.too_old, time.time()
        if mode != "auto" or not refusal:  # Usually no update is due. Then read no files.
            return decide(Known(mode=mode, refusal=refusal, is_by_installer=False, now=now))
        try:
            hosts, tries = self._hub_hosts(), None if self._is_unwritable else self._book.tries()
        # The hubs' hosts are unknown, so the source might be a hub. Without `tries`, no update is made.
        except StorageError:
            hosts, tries = frozenset(), None
        return decide(
            Known(
                mode=mode,
                refusal=refusal,
                is_by_installer=self._copy.is_by_installer,
                is_replaced=self._copy.is_replaced,
                note=self._copy.note(),
                hub_hosts=hosts,
                tries=tries,
                is_held=bool(self._watch.holds),
                now=now,
            )
        )

    def _hub_hosts(self) -> frozenset[str]:
        known = [record.url for record in Hubs(self._paths).all()]
        return frozenset(host_of(url) for url in (*known, self._client.address.origin))

    async def _update(self, decision: Install) -> None:
        self._say(f"The hub refuses nodes of release {echo_shared.__version__}: updating from {decision.source}.")
        await self._finish()
        # Decide again: the owner's settings or the hub's refusal may have changed during the wait.
        if self._decide() != decision:
            return
        try:
            if not self._book.begin(decision.name, time.time()):
                return  # Another node of this installation has started the update.
        except StorageError as error:
            self._is_unwritable = True
            await self._fail(error.brief)
            return
        await _show(Notice(BEGINS, self.said))
        given = self._copy.given()
        assert given is not None, "the decision used the note"
        try:
            trouble = await install(self._copy, given, self._log_file)
        except OSError as error:
            trouble = f"The installer cannot be started: {error}"
        if not trouble and not self._copy.is_replaced:
            trouble = _NOTHING_NEW.format(source=decision.source)
        self._note(decision.name, trouble or _INSTALLED.format(release=self._copy.newest_release or "another one"))
        if trouble:
            await self._fail(trouble)

    async def _finish(self) -> None:
        """Wait until all leases are finished, at most `FINISH_S`. A hub that refuses this release gives no new ones."""
        ends_at = time.monotonic() + FINISH_S
        while self._run.held_rollouts and time.monotonic() < ends_at:  # noqa: ASYNC110
            await asyncio.sleep(self._look_s)

    async def _fail(self, trouble: str) -> None:
        log.error("The update failed; the node continues unchanged. %s", trouble)
        await _show(Notice(FAILED, f"{trouble} {how_to_upgrade()}"))

    def _note(self, name: str, outcome: str) -> None:
        try:
            self._book.end(name, outcome)
        except StorageError as error:
            log.warning("%s", error)

    def _say(self, sentence: str) -> None:
        if sentence and sentence != self.said:
            log.warning("%s", sentence)
        self.said = sentence


async def _show(notice: Notice) -> None:
    await asyncio.to_thread(notify, notice)
