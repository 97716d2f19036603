"""Numbers of adapters that tenants publish.

Numbers below `FIRST_TENANT_VERSION` are versions of the run's own training; 0 is the base model.
"""

from __future__ import annotations

from pathlib import Path

from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

__all__ = ["FIRST_TENANT_VERSION", "is_of_tenant", "version_directory"]


def is_of_tenant(policy_version: int) -> bool:
    return policy_version >= FIRST_TENANT_VERSION


def version_directory(run_dir: Path, policy_version: int) -> Path:
    """Return the directory of a tenant's published adapter, in PEFT's layout."""
    return run_dir / "tenants" / "versions" / f"v{policy_version}"
