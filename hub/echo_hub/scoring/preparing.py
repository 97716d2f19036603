"""Prepare problems of groups that the coordinator will open soon: sample and tokenize them on a thread, in order.

To start a thread and wait for it takes longer than to prepare most problems. So one thread prepares all waiting
problems for a short time, and reports them together.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from typing import Final

from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.driving.event_queue import EventQueue
from echo_hub.scoring.problems import Problems

TOGETHER_S: Final = 0.005
"""Seconds for which a thread prepares problems before it reports them."""


class GroupPreparation:
    """Queue of groups whose problems must be prepared. The coordinator limits its length."""

    def __init__(self, problems: Problems, queue: EventQueue) -> None:
        self._problems = problems
        self._queue = queue
        self._waiting: deque[int] = deque()
        self._there_are = asyncio.Event()

    def submit(self, group_id: int) -> None:
        self._waiting.append(group_id)
        self._there_are.set()

    async def run(self) -> None:
        while True:
            await self._there_are.wait()
            self._there_are.clear()
            while self._waiting:
                for event in await asyncio.to_thread(self._prepare_some):
                    await self._queue.put(event)

    def _prepare_some(self) -> list[GroupPrepared]:
        until, prepared = time.monotonic() + TOGETHER_S, list[GroupPrepared]()
        while self._waiting and (not prepared or time.monotonic() < until):
            prepared.append(prepare(self._problems, self._waiting.popleft()))
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
