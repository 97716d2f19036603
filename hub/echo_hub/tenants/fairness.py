"""Fair order of tenants' requests: deficit round robin by tokens. Pure: no clock, no I/O.

Each tenant has a queue of its own. In each round, a tenant with waiting requests may spend `QUANTUM` tokens more. A
request is taken when its tenant has saved as many tokens as the request is expected to cost. So a tenant with long
requests waits for more rounds, and over time all waiting tenants get the same number of tokens. How many requests a
tenant queues does not matter.

Source: M. Shreedhar and G. Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995. Between two
tenants that always wait, the tokens given differ by at most QUANTUM plus twice the largest cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

QUANTUM: Final = 1_024.0
"""Tokens that each tenant may spend in addition in each round."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Queue(Generic[Key]):
    saved: float = 0.0
    """Tokens that the tenant has saved and may spend now."""
    is_served: bool = False
    """True during the tenant's turn in a round: it has received this round's tokens."""
    costs: OrderedDict[Key, float] = field(default_factory=OrderedDict)
    """Costs of the waiting requests, oldest first."""

    @property
    def head_cost(self) -> float:
        return next(iter(self.costs.values()))


class FairOrder(Generic[Key]):
    """Waiting requests of all tenants. `take` returns them in a fair order."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, _Queue[Key]] = OrderedDict()
        """Tenants with waiting requests, in the order of their turns."""
        self._tenants: dict[Key, str] = {}
        self._debts: dict[str, float] = {}
        """For tenants without waiting requests: tokens below 0, if they used more than they had saved."""

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, tenant_id: str, key: Key, cost: float) -> None:
        """Queue a request that is expected to cost `cost` tokens. A known key is ignored."""
        if key in self._tenants:
            return
        self._tenants[key] = tenant_id
        if tenant_id not in self._queues:
            self._queues[tenant_id] = _Queue(saved=self._debts.pop(tenant_id, 0.0))
        self._queues[tenant_id].costs[key] = max(cost, 1.0)

    def remove(self, key: Key) -> None:
        """Forget a waiting request, for example a cancelled one."""
        tenant_id = self._tenants.pop(key, None)
        if tenant_id is not None:
            self._forget(tenant_id, key)

    def take(self) -> Key | None:
        """Remove and return the next request. None: none waits."""
        if not self._queues:
            return None
        self._skip_rounds()
        while True:
            tenant_id, queue = next(iter(self._queues.items()))
            if not queue.is_served:
                queue.saved += QUANTUM
                queue.is_served = True
            if queue.head_cost <= queue.saved:
                key, cost = next(iter(queue.costs.items()))
                queue.saved -= cost
                del self._tenants[key]
                self._forget(tenant_id, key)
                return key
            queue.is_served = False
            self._queues.move_to_end(tenant_id)

    def take_early(self, key: Key) -> None:
        """Remove a waiting request, because it is drawn together with another one. Its tenant pays for it in later
        rounds."""
        tenant_id = self._tenants.pop(key)
        queue = self._queues[tenant_id]
        queue.saved -= queue.costs[key]
        self._forget(tenant_id, key)

    def settle(self, tenant_id: str, tokens: float) -> None:
        """Return tokens to a tenant whose request cost less than expected; a negative number charges for one that cost
        more. A tenant without waiting requests cannot save tokens for later, but it keeps its debts."""
        queue = self._queues.get(tenant_id)
        if queue is not None:
            queue.saved += tokens
            return
        debt = self._debts.pop(tenant_id, 0.0) + tokens
        if debt < 0:
            self._debts[tenant_id] = debt

    def heads(self) -> dict[str, Key]:
        """Return the oldest waiting request of each tenant."""
        return {tenant_id: next(iter(queue.costs)) for tenant_id, queue in self._queues.items()}

    def waiting(self, tenant_id: str) -> int:
        """Return the number of the tenant's waiting requests."""
        queue = self._queues.get(tenant_id)
        return 0 if queue is None else len(queue.costs)

    def _skip_rounds(self) -> None:
        """Skip the rounds in which no request can be paid: give each tenant the tokens of all of them at once."""
        rounds = min(
            -(-(queue.head_cost - queue.saved - (0.0 if queue.is_served else QUANTUM)) // QUANTUM)
            for queue in self._queues.values()
        )
        for queue in self._queues.values():
            queue.saved += max(rounds, 0.0) * QUANTUM

    def _forget(self, tenant_id: str, key: Key) -> None:
        queue = self._queues[tenant_id]
        del queue.costs[key]
        if not queue.costs:
            del self._queues[tenant_id]
            if queue.saved < 0:
                self._debts[tenant_id] = queue.saved
