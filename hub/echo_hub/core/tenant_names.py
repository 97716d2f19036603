"""Names of tenants as nodes see them: the tenant's own name if the operator allows it, else a pseudonym."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantNames:
    """Gives the name by which nodes know each tenant: its own name or a pseudonym. A tenant's pseudonym stays the same
    for the whole run, and only the hub knows whose it is."""

    secret: bytes = b""
    shown: bool = False
    """True: nodes see tenants' own names."""

    def of(self, tenant_id: str) -> str:
        """Return the name by which nodes know the tenant."""
        if self.shown:
            return tenant_id
        key = blake2b(self.secret, person=b"echo tenants").digest()
        return f"tenant-{blake2b(tenant_id.encode(), key=key, digest_size=4).hexdigest()}"
