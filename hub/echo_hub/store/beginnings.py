"""Where a run's database begins: at version 0, the bare base model, or at a version that the run was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, func, insert, select

from echo_hub.store.database import open_to_read
from echo_hub.store.tables import groups, run_meta, versions

LINEAGE: Final = "lineage"
"""Key in `run_meta`; the value is an `echo_hub.run.start.Start` as JSON."""
_VERSION: Final = "first_version"
_GROUP: Final = "first_group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The policy version that the first step starts from, and the first problem to sample."""

    policy_version: int = 0
    group_id: int = 0


def begin_at(connection: Connection, beginning: Beginning, lineage: str, now: float) -> None:
    """Record the first version as published, in the empty database of a new run."""
    meta = {LINEAGE: lineage, _VERSION: str(beginning.policy_version), _GROUP: str(beginning.group_id)}
    connection.execute(insert(run_meta), [{"key": key, "value": value} for key, value in meta.items()])
    connection.execute(insert(versions), {"policy_version": beginning.policy_version, "published_at": now})


def read_beginning(connection: Connection) -> Beginning:
    rows = connection.execute(select(run_meta).where(run_meta.c.key.in_((_VERSION, _GROUP))))
    found = {row.key: int(row.value) for row in rows}
    return Beginning(policy_version=found.get(_VERSION, 0), group_id=found.get(_GROUP, 0))


def first_group_behind(engine: Engine, step: int) -> int:
    """Return the first group, in order of ids, that no step up to `step` has trained on."""
    with open_to_read(engine) as connection:
        newest = connection.scalar(select(func.max(groups.c.group_id)).where(groups.c.step <= step))
        return read_beginning(connection).group_id if newest is None else newest + 1
