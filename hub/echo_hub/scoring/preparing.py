"""Problems for the groups that the coordinator is about to open: sampled and tokenised off the event loop, in order.

To have a thread begin, and to hear that it is done, takes several times as long as most problems do: what waits is
prepared together, and told of after a moment.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from echo_hub.core.events import GroupPrepared
from echo_hub.scoring.problems import Problems

TOGETHER_S: Final = 0.005
"""How long a thread goes on to the next problem before it tells of those that it has."""


class GroupPreparation:
    """The queue holds at most the groups that may be open, so it needs no bound of its own."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._waiting: deque[int] = deque()
        self._there_are = asyncio.Event()

    def submit(self, group_id: int) -> None:
        self._waiting.append(group_id)
        self._there_are.set()

    async def run(self, report: Callable[[GroupPrepared], Awaitable[None]]) -> None:
        """Prepares for ever."""
        while True:
            await self._there_are.wait()
            self._there_are.clear()
            while self._waiting:
                for event in await asyncio.to_thread(self._prepare_some):
                    await report(event)

    def _prepare_some(self) -> list[GroupPrepared]:
        """The next ones: one at least."""
        until, prepared = time.monotonic() + TOGETHER_S, list[GroupPrepared]()
        while self._waiting and (not prepared or time.monotonic() < until):
            prepared.append(prepare(self._problems, self._waiting.popleft()))
        return prepared


def prepare(problems: Problems, group_id: int) -> GroupPrepared:
    """Samples and tokenises the group's problem, which may take a while."""
    prompt_ids = problems.prompt_ids(group_id)  # Fills the cache.
    return GroupPrepared(
        group_id=group_id,
        seed=problems.seed(group_id),
        prompt=int.from_bytes(hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest()),
        prompt_tokens=len(prompt_ids),
    )
