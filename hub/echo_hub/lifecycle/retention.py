"""Delete the rollouts of all but the newest `keeping.steps` steps from the database, and tenants' samples older than
`keeping.answered_days`, in small transactions while the hub runs."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from echo_hub.core.status import StatusSource
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.retired import StepSpan, read_last
from echo_hub.store.retiring import (
    ROWS_AT_ONCE,
    read_final_keys,
    read_first_mark,
    read_old_answers,
    read_ripe,
    retire,
    retire_answers,
)

LOOKED_S: Final = 15.0
DAY_S: Final = 86_400.0
REST: Final = 4.0
"""Pause after each transaction, as a multiple of its duration. During the pause, the hub can write to the database."""


class Retention:
    """Deletes old rollouts. `steps` is the number of newest steps whose rollouts are kept, and `answered_days` the age
    up to which tenants' samples are kept; for both, 0 keeps all."""

    def __init__(self, steps: int, *, store: AsyncStore, coordinator: StatusSource, answered_days: float = 0.0) -> None:
        self._steps = steps
        self._answered_s = answered_days * DAY_S
        self._store = store
        self._coordinator = coordinator

    async def run(self) -> None:
        """Delete rollouts as they become old enough, until cancelled."""
        if not self._steps and not self._answered_s:
            return
        last = await self._store.read(read_last) if self._steps else None
        if last is not None:
            await self._let_go_of(last)  # If the hub stopped during an earlier deletion, finish that deletion first.
        while True:
            if self._steps:
                await self.let_go()
            if self._answered_s:
                await self.let_go_of_answers()
            await asyncio.sleep(LOOKED_S)

    async def let_go_of_answers(self) -> None:
        """Delete tenants' samples that are older than `answered_days`."""
        while found := await self._store.read(read_old_answers, time.time() - self._answered_s):
            began_s = time.monotonic()
            await self._store.write(retire_answers, found)
            await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def let_go(self) -> None:
        """Delete all rollouts older than the newest `steps` steps, step by step."""
        last = await self._store.read(read_last)
        after = await self._store.read(read_first_mark) if last is None else last.through
        end = self._coordinator.status().trained_steps - self._steps + 1
        while ripe := await self._store.read(read_ripe, after, end):
            for one in ripe:
                await self._let_go_of(StepSpan(after=after, through=one.mark))
                after = one.mark

    async def _let_go_of(self, span: StepSpan) -> None:
        keys = await self._store.read(read_final_keys, span)
        for start in range(0, len(keys), ROWS_AT_ONCE):
            began_s = time.monotonic()
            part = keys[start : start + ROWS_AT_ONCE]
            await self._store.on_writer(retire, self._store.store, part, span)
            await asyncio.sleep(REST * (time.monotonic() - began_s))
