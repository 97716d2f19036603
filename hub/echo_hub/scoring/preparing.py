"""Problems for the groups that the coordinator is about to open: sampled and tokenised off the event loop, in order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from echo_hub.core.events import GroupPrepared
from echo_hub.scoring.problems import Problems


class GroupPreparation:
    """The queue holds at most the groups that may be open, so it needs no bound of its own."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._waiting: asyncio.Queue[int] = asyncio.Queue()

    def submit(self, group_id: int) -> None:
        self._waiting.put_nowait(group_id)

    async def run(self, report: Callable[[GroupPrepared], Awaitable[None]]) -> None:
        """Prepares for ever."""
        while True:
            group_id = await self._waiting.get()
            await report(await asyncio.to_thread(prepare, self._problems, group_id))


def prepare(problems: Problems, group_id: int) -> GroupPrepared:
    """Samples and tokenises the group's problem, which may take a while."""
    prompt_ids = problems.prompt_ids(group_id)  # Fills the cache.
    return GroupPrepared(
        group_id=group_id,
        seed=problems.seed(group_id),
        prompt=int.from_bytes(hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest()),
        prompt_tokens=len(prompt_ids),
    )
