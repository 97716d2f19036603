"""All data that the pages request from the hub."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from echo_hub.dashboard.api import STEPS_PER_ANSWER
from echo_hub.dashboard.model import FleetView, RunView
from echo_hub.dashboard.source import Changes, RunPicture
from echo_hub.store.events import read_events
from echo_hub.store.node_records import read_node_record
from echo_hub.store.reports import read_steps
from echo_hub.store.store import Store
from echo_hub.views.all_nodes import AllNodes
from echo_hub.views.run import Moment, MomentSource, RunViews, health
from echo_shared.records.health import Health
from echo_shared.records.node import NodeRecord
from echo_shared.records.run import EventFilter, LiveNode, RunEvent, StepRecord

WINDOW_S: Final = 30.0


class Rate:
    def __init__(self, now: float) -> None:
        self._seen: deque[tuple[float, int]] = deque([(now, 0)])

    def per_s(self, number: int, now: float) -> float:
        """Return by how much `number` has grown per second since the oldest reading within `WINDOW_S`. If that time has
        no other reading, compare with the previous reading.
        """
        self._seen.append((now, number))
        while len(self._seen) > 2 and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (number - before) / (now - since) if now > since else 0.0


class HubPages:
    """The hub's `PagesSource`. It reads the hub's current state on the event loop, and the database on a thread."""

    def __init__(
        self,
        *,
        changes: Changes,
        store: Store,
        run: RunViews,
        nodes: Mapping[str, LiveNode],
        moments: MomentSource,
    ) -> None:
        """`nodes` maps the ids of connected nodes to their latest reports."""
        self.changes = changes
        self._store = store
        self._run = run
        self._nodes = nodes
        self._moments = moments
        self._all_nodes = AllNodes(store)
        self._received = Rate(time.time())

    async def run_view(self) -> RunView:
        return await asyncio.to_thread(self._reading_of_run(self._moments.now()))

    async def picture(self) -> RunPicture:
        moment = self._moments.now()
        run, nodes = self._reading_of_run(moment), self._reading_of_nodes(moment)

        def read() -> RunPicture:
            began_s = time.thread_time()
            with self._store.one_look():
                return RunPicture(run=run(), nodes=nodes(), processor_s=time.thread_time() - began_s)

        return await asyncio.to_thread(read)

    def _reading_of_run(self, moment: Moment) -> Callable[[], RunView]:
        rollouts_per_s = self._received.per_s(moment.num_received, time.time())
        connected = frozenset(node_id for node_id, node in self._nodes.items() if node.affordable)
        return partial(self._run.read, moment, rollouts_per_s=rollouts_per_s, connected=connected)

    def _reading_of_nodes(self, moment: Moment) -> Callable[[], FleetView]:
        """Copy the coordinator's leases now, on the event loop, and return a function to call on a thread. Without the
        copy, the leases would change while the thread reads them.
        """
        leased, touched = dict(moment.status.leased_by_node), self._store.touched.number
        return partial(self._all_nodes.fleet, dict(self._nodes), leased, touched=touched)

    def health(self) -> Health:
        return health(self._moments.now())

    async def events(self, wanted: EventFilter, limit: int) -> tuple[RunEvent, ...]:
        return tuple(await asyncio.to_thread(self._store.read, read_events, wanted, limit))

    async def nodes(self) -> FleetView:
        return await asyncio.to_thread(self._reading_of_nodes(self._moments.now()))

    async def node(self, node_id: str) -> NodeRecord | None:
        return await asyncio.to_thread(self._store.read, read_node_record, node_id)

    async def steps(self, since: int) -> tuple[StepRecord, ...]:
        return tuple(await asyncio.to_thread(self._store.read, read_steps, since, STEPS_PER_ANSWER))
