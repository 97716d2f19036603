"""Alembic runs this file for every migration, on the connection that `echo_hub.store.database` passes."""

from __future__ import annotations

from alembic import context

import echo_hub.store.answers  # Adds its table to `metadata`.
import echo_hub.store.tenant_tables  # noqa: F401  # Adds the tenants' tables to `metadata`.
from echo_hub.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
