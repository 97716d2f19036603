"""Turns of sample requests at the drawer: a limited number of samples is drawn at a time, in a fair order of tenants.

The drawer draws in the order of arrival. So it gets only a few more samples than the nodes can draw at once. A tenant
with few requests then waits for a few samples of another tenant, instead of the other's whole queue.

Some requests may never be drawn, for example those of a tenant whose work all nodes refuse. They keep their turns.
So each tenant has some turns in reserve, which it gets even while others hold all.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil

from echo_hub.tenants.fairness import FairOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    tenant_id: str
    num_samples: int
    twins: Hashable | None
    start: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TurnsToDraw:
    """Gives turns to requests while fewer than `most` samples are being drawn."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_drawn = 0
        """Number of samples of all requests that have a turn now."""
        self._held = Counter[str]()
        """The number of samples with a turn, for each tenant."""
        self._order: FairOrder[str] = FairOrder()
        self._waiting: dict[str, _Waiting] = {}
        self._twins: dict[Hashable, OrderedDict[str, None]] = {}
        """Waiting requests that can share a prefill of their prompt, by their common key."""

    def change(self, most: int) -> None:
        """Change the largest number of samples that are drawn at once, for example because nodes have joined."""
        self._most = most
        self._give()

    @asynccontextmanager
    async def turn(
        self, tenant_id: str, request_id: str, cost: float, *, num_samples: int = 1, twins: Hashable | None = None
    ) -> AsyncIterator[None]:
        """Wait for a turn, and hold it within the context. `cost` is the expected number of tokens. Requests with the
        same key `twins` get their turns together, so that the drawer can join them; their tenant pays for all."""
        waiting = self._waiting[request_id] = _Waiting(tenant_id=tenant_id, num_samples=num_samples, twins=twins)
        self._order.add(tenant_id, request_id, cost)
        if twins is not None:
            self._twins.setdefault(twins, OrderedDict())[request_id] = None
        self._give()
        try:
            await waiting.start
            yield
        finally:
            if waiting.start.done() and not waiting.start.cancelled():
                self._count(tenant_id, -num_samples)
            else:
                self._order.remove(request_id)
                self._forget(request_id)
            self._give()

    def settle(self, tenant_id: str, tokens: float) -> None:
        """Credit the tenant with `tokens`, by which its request cost less than expected; a negative number charges
        it."""
        self._order.settle(tenant_id, tokens)

    def _give(self) -> None:
        while (request_id := self._next()) is not None:
            twins = list(self._twins.get(self._waiting[request_id].twins, ()))
            self._start(request_id)
            for twin in twins:
                if twin != request_id:
                    self._order.take_early(twin)
                    self._start(twin)

    def _next(self) -> str | None:
        """Take the request that gets the next turn; None if all turns are taken or no request waits."""
        if self._num_drawn < self._most:
            return self._order.take()
        heads = self._order.heads()
        reserve = ceil((self._most - 1) / (2 * max(1, len(heads.keys() | self._held.keys()))))
        found = next((key for tenant_id, key in heads.items() if self._held[tenant_id] < reserve), None)
        if found is not None:
            self._order.take_early(found)
        return found

    def _count(self, tenant_id: str, num_samples: int) -> None:
        self._num_drawn += num_samples
        self._held[tenant_id] += num_samples
        if not self._held[tenant_id]:
            del self._held[tenant_id]

    def _start(self, request_id: str) -> None:
        waiting = self._forget(request_id)
        if waiting is not None and not waiting.start.cancelled():
            self._count(waiting.tenant_id, waiting.num_samples)
            waiting.start.set_result(None)

    def _forget(self, request_id: str) -> _Waiting | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.twins is not None:
            of_twins = self._twins[waiting.twins]
            del of_twins[request_id]
            if not of_twins:
                del self._twins[waiting.twins]
        return waiting
