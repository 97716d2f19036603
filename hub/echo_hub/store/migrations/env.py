"""Alembic runs this file for every migration, on the connection that `echo_hub.store.database` passes."""

from __future__ import annotations

from alembic import context

from echo_hub.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
