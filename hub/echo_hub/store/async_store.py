"""The store for the event loop: its methods as coroutines, those that write on one thread, those that read on another.

SQLite has one writer, and what is told to it in order is committed in order; what a full disk does not take waits, and
all behind it. Reads go on beside writes, and have what was committed when they began. While a database server is away,
both wait, and each write is done once, also where the answer to its commit was lost. Pages and curves read `store`
directly, on threads of theirs, and wait for nothing.

What a trained step means for its rollouts is written a part at a time, and other writes in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from echo_hub.core.effects import Record
from echo_hub.core.snapshot import CoordinatorSnapshot
from echo_hub.core.spread.holdings import Arrival, Release
from echo_hub.store.credits import Credit
from echo_hub.store.drawing import StoredDraw
from echo_hub.store.lost_commits import finding_out
from echo_hub.store.reading import AnsweredTurn, BatchGroup, EvaluatedEpisode, StoredPayload
from echo_hub.store.store import Store
from echo_shared.books import CountedName, Evaluation, Invite, RunEvent
from echo_shared.contribution import Contribution
from echo_shared.errors import DATABASE_AWAY, DISK_FULL, StorageError
from echo_shared.messages import Receipt
from echo_shared.room import Room

OTHERS_SHARE: Final = 2.0
"""While a large step is counted: how long others have the writer and the interpreter after each part, by its time."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class AsyncStore:
    """Each method is the store's of that name, and raises what it raises. `write` and `read` take those of books that
    are classes of their own. `room` is what waits for a full disk, `server` for a database server that is away."""

    def __init__(self, store: Store, room: Room | None = None, server: Room | None = None) -> None:
        self.store = store
        self.room = room or Room()
        self.server = server or Room(code=DATABASE_AWAY)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._counting: asyncio.Task[None] | None = None

    async def write(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        def write() -> _T:
            with finding_out(self.server):
                return self.room.until(lambda: self.server.until(lambda: method(*args, **kwargs)))

        return await asyncio.get_running_loop().run_in_executor(self._writer, write)

    async def read(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        read = partial(self.server.until, lambda: method(*args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)

    def give_up(self) -> None:
        """Nobody waits any more for a disk or a server: what they do not take is raised."""
        self.room.give_up()
        self.server.give_up()

    async def close(self) -> None:
        """What a full disk, or a server that is away, does not let be counted is left to the next start."""
        self.give_up()
        try:
            await self.counted()
        except StorageError as error:
            if error.code not in (DISK_FULL, DATABASE_AWAY):
                raise
        finally:
            await asyncio.to_thread(self._reader.shutdown)
            await self.write(self.store.close)
            self._writer.shutdown()

    async def counted(self) -> None:
        """Returns when all rollouts of what is trained by now are counted. Raises StorageError when that failed."""
        if self._counting is not None:
            await asyncio.shield(self._counting)

    async def _count(self) -> None:
        loop = asyncio.get_running_loop()
        while self.store.is_uncounted:
            began_at = loop.time()
            await self.write(self.store.count_trained)
            await asyncio.sleep(OTHERS_SHARE * (loop.time() - began_at))

    async def apply(self, records: Sequence[Record], now: float, events: Sequence[RunEvent] = ()) -> None:
        await self.write(self.store.apply, records, now, events)
        if self._counting is not None and self._counting.done():
            counted, self._counting = self._counting, None
            counted.result()
        if self.store.is_uncounted and self._counting is None:
            self._counting = asyncio.create_task(self._count())

    async def snapshot(self) -> CoordinatorSnapshot:
        return await self.read(self.store.snapshot)

    async def receipts(self, node_id: str, rollout_ids: Sequence[str]) -> list[Receipt]:
        await self.counted()
        return await self.read(self.store.receipts, node_id, rollout_ids)

    async def contribution(
        self, node_id: str, *, run_id: str, run_name: str, hub_key: bytes, now: float
    ) -> Contribution | None:
        await self.counted()
        return await self.read(
            self.store.contribution, node_id, run_id=run_id, run_name=run_name, hub_key=hub_key, now=now
        )

    async def load_payloads(self, rollout_ids: Sequence[str]) -> list[StoredPayload]:
        return await self.read(self.store.load_payloads, rollout_ids)

    async def load_turns(
        self, episodes: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], tuple[AnsweredTurn, ...]]:
        return await self.read(self.store.load_turns, episodes)

    async def load_draws(self, rollout_ids: Sequence[str]) -> list[StoredDraw]:
        return await self.read(self.store.load_draws, rollout_ids)

    async def load_batch(self, step: int) -> list[BatchGroup]:
        return await self.read(self.store.load_batch, step)

    async def load_groups(self, wanted: Mapping[int, Sequence[str]]) -> list[BatchGroup]:
        return await self.read(self.store.load_groups, wanted)

    async def load_evaluated(self, policy_version: int) -> list[EvaluatedEpisode]:
        return await self.read(self.store.load_evaluated, policy_version)

    async def prune(self, checkpoint_step: int) -> None:
        await self.write(self.store.prune, checkpoint_step)

    async def node_seen(
        self,
        *,
        node_id: str,
        public_key: bytes,
        name: str,
        backend: str,
        device: str,
        now: float,
        cost_per_hour: float = 0.0,
        power_watts: float = 0.0,
        invite_id: int | None = None,
    ) -> None:
        await self.write(
            self.store.node_seen,
            node_id=node_id,
            public_key=public_key,
            name=name,
            backend=backend,
            device=device,
            now=now,
            cost_per_hour=cost_per_hour,
            power_watts=power_watts,
            invite_id=invite_id,
        )

    async def nodes_still_here(self, node_ids: Sequence[str], now: float) -> None:
        await self.write(self.store.nodes_still_here, node_ids, now)

    async def ban(self, node_ids: Collection[str], now: float) -> None:
        await self.write(self.store.ban, node_ids, now)

    async def unban(self, node_ids: Collection[str]) -> None:
        await self.write(self.store.unban, node_ids)

    async def banned_nodes(self) -> frozenset[str]:
        return await self.read(self.store.banned_nodes)

    async def useful_nodes(self) -> frozenset[str]:
        return await self.read(self.store.useful_nodes)

    async def counted_names(self) -> list[CountedName]:
        return await self.read(self.store.counted_names)

    async def want_pardon(self, node_ids: Collection[str], now: float) -> None:
        await self.write(self.store.want_pardon, node_ids, now)

    async def wanted_pardons(self) -> frozenset[str]:
        return await self.read(self.store.wanted_pardons)

    async def credits(self, node_ids: Collection[str]) -> dict[str, Credit]:
        return await self.read(self.store.credits, node_ids)

    async def num_invites(self) -> tuple[int, int]:
        return await self.read(self.store.num_invites)

    async def invites(self) -> list[Invite]:
        return await self.read(self.store.invites)

    async def came_by(self) -> dict[str, int]:
        return await self.read(self.store.came_by)

    async def record_distribution(self, news: Sequence[Release | Arrival], now: float) -> None:
        await self.write(self.store.record_distribution, news, now)

    async def record_evaluations(self, measured: Sequence[Evaluation]) -> None:
        await self.write(self.store.record_evaluations, measured)

    async def evaluated_versions(self) -> set[int]:
        return await self.read(self.store.evaluated_versions)

    async def run_meta(self) -> dict[str, str]:
        return await self.read(self.store.run_meta)

    async def set_run_meta(self, key: str, value: str) -> None:
        await self.write(self.store.set_run_meta, key, value)
