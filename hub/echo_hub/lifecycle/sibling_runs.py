"""Read the hub's other runs ("siblings"): their state for the pages, and their nodes' credit for the leaderboard.

Each run has its own process and directory; runs with the same key belong to one hub (`echo_hub.run.siblings`).
Processes never wait for each other: each process reads the other runs' databases and writes only its own database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from echo_hub.config.file import load_config
from echo_hub.dashboard.model import SiblingView
from echo_hub.dashboard.source import Changes
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.run.directory import RunDirectory
from echo_hub.run.siblings import siblings_of
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.database import holds_run, read_meta, write_meta
from echo_hub.store.elsewhere import read_run_credit, take_in
from echo_hub.store.reports import read_newest_step
from echo_shared.errors import EchoError
from echo_shared.records.run_credit import NodeCredit, RunCredit

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
REST: Final = 50.0
"""Pause between two readings of the other runs' databases, as a multiple of the reading time. So readings use at most 2
% of a processor."""
ADDRESS: Final = "address"
"""Key in `run_meta` under which a run stores the URL of its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    view: SiblingView
    credit: RunCredit


class SiblingRuns:
    """Reads the hub's other runs. `run_id` and `hub_key` belong to this run; `changes` is notified when a view
    changes."""

    def __init__(
        self,
        directory: RunDirectory,
        store: AsyncStore,
        *,
        run_id: str,
        hub_key: bytes,
        changes: Changes,
    ) -> None:
        self.views: tuple[SiblingView, ...] = ()
        """Views of the other runs as of the last reading, sorted by name."""
        self._directory = directory
        self._store = store
        self._run_id = run_id
        self._hub_key = hub_key
        self._changes = changes
        self._taken: dict[str, tuple[NodeCredit, ...]] = {}
        self._troubles: dict[str, str] = {}
        """Last logged problem of each unreadable directory, to log each problem only once."""

    async def run(self, address: str) -> None:
        """Store this run's URL for the other runs, then read those runs repeatedly until cancelled."""
        if (await self._store.read(read_meta)).get(ADDRESS) != address:
            await self._store.write(write_meta, ADDRESS, address)
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(LOOK_S, REST * (time.monotonic() - began)))

    async def look(self) -> None:
        """Read the other runs once, and import their new credit. A run that cannot be read is only logged."""
        found = await asyncio.to_thread(lambda: list(self._read()))
        for each in found:
            nodes = each.credit.nodes
            if self._taken.get(each.view.run_id) == nodes:
                continue
            if await self._store.write(take_in, each.credit, time.time()) != "known":
                self._taken[each.view.run_id] = nodes
        views = tuple(sorted((each.view for each in found), key=lambda view: (view.name, view.run_id)))
        if views != self.views:
            self.views = views
            self._changes.notify()

    def _read(self) -> Iterator[_Found]:
        """Yield the runs that can be read. If two directories hold the same run, for example a backup, yield the one
        with more steps.
        """
        by_run: dict[str, _Found] = {}
        try:
            siblings = siblings_of(self._directory)
        except EchoError as error:
            self._say(RunDirectory(self._directory.root.resolve().parent), error)
            return
        for directory in siblings:
            try:
                found = self._read_one(directory)
            except (EchoError, ValidationError) as error:  # ValidationError: more nodes than an export may have.
                self._say(directory, error)
                continue
            self._troubles.pop(directory.root.name, None)
            if found is None or found.view.run_id == self._run_id:
                continue
            known = by_run.get(found.view.run_id)
            if known is None or known.view.trained_step < found.view.trained_step:
                by_run[found.view.run_id] = found
        yield from by_run.values()

    def _read_one(self, directory: RunDirectory) -> _Found | None:
        """Return the run's view and credit; None for a run that was never served."""
        config = load_config(directory.config, {})
        if not holds_run(config.store.url or directory.database_url):
            return None
        with store_of(directory) as store:
            meta, newest = store.read(read_meta), store.read(read_newest_step)
            view = SiblingView(
                run_id=meta["run_id"],
                name=config.run.name,
                address=meta.get(ADDRESS, ""),
                trained_step=newest.step if newest else 0,
                steps_total=config.training.steps,
            )
            credit = store.read(
                read_run_credit, run_id=view.run_id, run_name=view.name, hub_key=self._hub_key, now=time.time()
            )
        return _Found(view=view, credit=credit)

    def _say(self, directory: RunDirectory, error: Exception) -> None:
        if self._troubles.get(directory.root.name) != str(error):
            self._troubles[directory.root.name] = str(error)
            log.warning("the run in %s cannot be read, and is left out of the pages: %s", directory.root, error)
