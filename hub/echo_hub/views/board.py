"""The leaderboard for the pages. Answers are read on threads and cached briefly, however many clients ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from echo_hub.store.board import read_board, read_credited_node, read_public_receipt, read_shares
from echo_hub.store.store import Store
from echo_hub.store.teams import read_team
from echo_shared.records.credit import Board, BoardQuery, Holder, PublicReceipt, StepShare

LEAST_S: Final = 2.0
"""Shortest time for which an answer is cached, in seconds."""
REST: Final = 19.0
"""Time for which an answer is cached, as a multiple of its reading time. So constantly repeated queries use at most
1/20 of a thread.
"""
MOST_KEPT: Final = 256
"""Largest number of cached answers. The limit is needed because clients can make any number of different searches."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Answer:
    task: asyncio.Task[Any]
    good_until: float


class HubBoard:
    """The hub's `BoardSource`, which caches answers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._answers: dict[Hashable, _Answer] = {}

    async def board(self, wanted: BoardQuery) -> Board:
        return await self._ask(("board", wanted), lambda: self._store.read(read_board, wanted, time.time()))

    async def node(self, start: str) -> tuple[str, Holder] | None:
        return await self._ask(("node", start), lambda: self._store.read(read_credited_node, start, time.time()))

    async def team(self, name: str) -> tuple[str, Holder] | None:
        return await self._ask(("team", name), lambda: self._store.read(read_team, name, time.time()))

    async def shares(self, holder: str, width: int) -> Mapping[int, StepShare]:
        return await self._ask(("shares", holder, width), lambda: self._store.read(read_shares, holder, width))

    async def receipt(self, rollout_id: str) -> PublicReceipt | None:
        """Return one receipt. It is not cached: reading a single row is cheap, and the node that requests it wants
        current data.
        """
        lease_id, _, index = rollout_id.partition("-")
        return await asyncio.to_thread(self._store.read, read_public_receipt, int(lease_id), int(index))

    async def _ask(self, key: Hashable, read: Callable[[], _T]) -> _T:
        """Return the cached answer, or read it once for all concurrent callers."""
        clock = asyncio.get_running_loop().time
        known = self._answers.get(key)
        if known is None or (known.task.done() and (clock() >= known.good_until or known.task.exception() is not None)):
            known = _Answer(asyncio.create_task(asyncio.to_thread(read), name="the leaderboard"), 0.0)
            self._answers.pop(key, None)
            self._answers[key] = known
            began = clock()

            def done(_: asyncio.Task[Any], answer: _Answer = known) -> None:
                answer.good_until = clock() + max(LEAST_S, REST * (clock() - began))

            known.task.add_done_callback(done)
            if len(self._answers) > MOST_KEPT:
                del self._answers[next(iter(self._answers))]
        found: _T = await asyncio.shield(known.task)  # Shielded: other callers still wait for this reading.
        return found
