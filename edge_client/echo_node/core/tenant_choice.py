"""The owner's choice for which tenants of a hub (other people, whose programs sample on its nodes) the node works."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChoice:
    answers: bool = True
    """False: the node works for no tenant."""
    refuses: tuple[str, ...] = ()
    """Names of tenants for which the node does not work."""

    def refuses_work_of(self, tenant: str) -> bool:
        """Return True if the node does not work for this tenant. The run's own work, "", is never refused."""
        return bool(tenant) and (not self.answers or tenant in self.refuses)
