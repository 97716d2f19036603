"""The order in which training requests run, without I/O.

Example: requests 2, 3 and 1 of a model arrive in this order. Nothing runs before 1 has come; then 1, 2 and 3 run, one
after the other. If 1 never comes, 2 and 3 fail after `GAP_S` seconds. A refused request has used up its seq_id: it
takes its turn like the others, with nothing to do.

A request is one (model, seq_id). The caller drops duplicates: it knows all requests that were ever accepted.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final

GAP_S: Final = 300.0
"""Seconds for which requests wait for a missing one with a lower seq_id. Clients retry a request for the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Result of waiting too long for a request with a missing seq_id: the requests behind it fail."""

    model_id: str
    missing: int
    """Lowest seq_id that was missing."""
    failed: tuple[int, ...]
    """The seq_ids of the requests that waited for the missing one."""


class ModelOrder:
    """Order of one model's requests. `next_seq` is the lowest seq_id that is not done."""

    def __init__(self, next_seq: int) -> None:
        self.next_seq = next_seq
        self._waiting: set[int] = set()
        self._gap_since: float | None = None
        """Time since which requests wait for the missing `next_seq`. None if it is here, or if no request waits."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_ready(self) -> bool:
        """True if the next request is here."""
        return self.next_seq in self._waiting

    @property
    def gap_ends_at(self) -> float | None:
        """Time at which the waiting requests fail; None if no request is missing."""
        return None if self._gap_since is None else self._gap_since + GAP_S

    def is_late(self, seq_id: int) -> bool:
        """Return True if the request can no longer run, because a later one ran or failed."""
        return seq_id < self.next_seq

    def arrive(self, seq_id: int, now: float) -> None:
        """Add a request. It must not be late (`is_late`)."""
        assert not self.is_late(seq_id)
        self._waiting.add(seq_id)
        if self.is_ready:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now

    def finish(self, seq_id: int, now: float) -> None:
        """Count the request `next_seq`, which ran or was refused, as done."""
        assert seq_id == self.next_seq and seq_id in self._waiting
        self._waiting.remove(seq_id)
        self.next_seq += 1
        self._gap_since = now if self._waiting and not self.is_ready else None

    def give_up(self, now: float) -> tuple[int, ...]:
        """If requests have waited too long for a missing one, return all waiting requests in order. They and the
        missing one then count as done."""
        if self._gap_since is None or now < self._gap_since + GAP_S:
            return ()
        failed = tuple(sorted(self._waiting))
        self.next_seq = failed[-1] + 1
        self._waiting.clear()
        self._gap_since = None
        return failed


class ModelOrders:
    """The orders of all models. Among tenants with a request that can run, the least recently served comes first, and
    among the tenant's models also the least recently served. So a tenant with many models waits no less than others."""

    def __init__(self) -> None:
        self._orders: dict[str, ModelOrder] = {}
        self._tenants: dict[str, str] = {}
        self._served: dict[str, int] = {}
        """For each model and each tenant: the number of its last turn. One that had no turn yet is missing here."""
        self._turns = 0

    def add(self, model_id: str, order: ModelOrder, *, tenant_id: str) -> None:
        self._orders[model_id] = order
        self._tenants[model_id] = tenant_id

    def remove(self, model_id: str) -> None:
        if self._orders.pop(model_id, None) is not None:
            tenant_id = self._tenants.pop(model_id)
            self._served.pop(model_id, None)
            if tenant_id not in self._tenants.values():
                self._served.pop(tenant_id, None)

    def of(self, model_id: str) -> ModelOrder | None:
        return self._orders.get(model_id)

    def take(self, busy: Container[str] = (), among: Container[str] | None = None) -> tuple[str, int] | None:
        """Return the next model and the seq_id of its request; None if no request can run. The request runs until
        `ModelOrder.finish`. `busy`: tenants with a running request, which are skipped. `among`: models that may be
        taken; None = all."""
        ready = [
            model_id
            for model_id, order in self._orders.items()
            if order.is_ready and self._tenants[model_id] not in busy and (among is None or model_id in among)
        ]
        if not ready:
            return None
        model_id = min(ready, key=lambda each: (self._served.get(self._tenants[each], 0), self._served.get(each, 0)))
        self._turns += 1
        self._served[model_id] = self._served[self._tenants[model_id]] = self._turns
        return model_id, self._orders[model_id].next_seq

    def give_up(self, now: float) -> list[GivenUp]:
        """Return each gap older than `GAP_S`, with the requests that fail because of it."""
        found = []
        for model_id, order in self._orders.items():
            missing = order.next_seq
            if failed := order.give_up(now):
                found.append(GivenUp(model_id=model_id, missing=missing, failed=failed))
        return found

    def next_gap_end(self) -> float | None:
        """Return the time at which `give_up` next finds a gap; None if there is none."""
        ends = [order.gap_ends_at for order in self._orders.values()]
        return min((end for end in ends if end is not None), default=None)
