"""Prepare problems of groups that the coordinator will open soon: sample and tokenize them on a thread, in order.

To start a thread and wait for it takes longer than to prepare most problems. So one thread prepares all waiting
problems for a short time, and reports them together.

An environment with state may be away when a problem is drawn. Then the group waits, and the session host tells the
operator. If the environment was away when the hub started, this module also draws the held-out problems.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import deque
from typing import Final

from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.driving.event_queue import EventQueue
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
from echo_hub.tasks.environments.base import EnvironmentAway, NoSlot, SessionGone
from echo_shared.process.backoff import backoff_s

TOGETHER_S: Final = 0.005
"""Seconds for which the thread collects prepared problems before it reports them together. Reporting each alone would
take longer than to prepare it."""
FIRST_TRY_S: Final = 0.5
"""Seconds after which the hub asks an unreachable environment for a problem again. The delay doubles with each failed
try."""
LAST_TRY_S: Final = 30.0
"""Longest delay in seconds between two tries."""


class GroupPreparation:
    """Queue of groups whose problems must be prepared. The coordinator limits its length."""

    def __init__(self, problems: Problems, queue: EventQueue, sessions: SessionHost | None = None) -> None:
        """`sessions` is the host of the run's environments with state; None if the run has none."""
        self._problems = problems
        self._sessions = sessions
        self._queue = queue
        self._waiting: deque[int] = deque()
        self._there_are = asyncio.Event()
        self._is_first = False
        """True while the held-out problems and the first training problem must still be drawn, because the environment
        was away."""

    def submit(self, group_id: int) -> None:
        self._waiting.append(group_id)
        self._there_are.set()

    async def run(self) -> None:
        if self._sessions is not None and self._sessions.absence:
            self._is_first = True
            self._there_are.set()
        while True:
            await self._there_are.wait()
            self._there_are.clear()
            while self._waiting or self._is_first:
                for event in await self._prepared():
                    await self._queue.put(event)

    async def _prepared(self) -> list[GroupPrepared]:
        """Prepare some of the waiting groups. Waits while their environment is away."""
        tries = 0
        while True:
            try:
                found = await asyncio.to_thread(self._prepare_some)
            except (EnvironmentAway, NoSlot, SessionGone) as error:
                if self._sessions is None:
                    raise
                self._sessions.drawing_waits(error.brief)
                await asyncio.sleep(backoff_s(tries, random.random(), first_s=FIRST_TRY_S, limit_s=LAST_TRY_S))
                tries += 1
            else:
                if self._sessions is not None:
                    self._sessions.drawing_waits("")
                return found

    def _prepare_some(self) -> list[GroupPrepared]:
        """Prepare waiting groups for `TOGETHER_S` seconds, at least one group. If an exception is raised, no group is
        lost: all remain in the queue."""
        if self._is_first:
            self._problems.prepare()
            self._is_first = False
        until, prepared = time.monotonic() + TOGETHER_S, list[GroupPrepared]()
        while self._waiting and (not prepared or time.monotonic() < until):
            try:
                prepared.append(prepare(self._problems, self._waiting[0]))
            except (EnvironmentAway, NoSlot, SessionGone):
                if not prepared:
                    raise
                return prepared
            self._waiting.popleft()
        return prepared


def prepare(problems: Problems, group_id: int) -> GroupPrepared:
    """Sample and tokenize the group's problem. Blocks, and may take long."""
    prompt_ids = problems.prompt_ids(group_id)  # The result stays in the cache for leases and scoring.
    return GroupPrepared(
        group_id=group_id,
        seed=problems.seed(group_id),
        prompt=int.from_bytes(hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest()),
        prompt_tokens=len(prompt_ids),
    )
