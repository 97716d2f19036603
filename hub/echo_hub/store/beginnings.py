"""The policy version with which a run's database begins: 0 for the bare base model, or the version from which the run
was started or forked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, func, insert, select

from echo_hub.store.database import open_to_read
from echo_hub.store.tables import groups, run_meta, versions

LINEAGE: Final = "lineage"
"""Key in `run_meta` under which the run's origin is stored, an `echo_hub.run.start.Start` as JSON."""
_VERSION: Final = "first_version"
_GROUP: Final = "first_group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The policy version before the run's first step, and the id of the first group to sample."""

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
    """Return the first group id after all groups that the steps up to `step` have trained on."""
    with open_to_read(engine) as connection:
        newest = connection.scalar(select(func.max(groups.c.group_id)).where(groups.c.step <= step))
        return read_beginning(connection).group_id if newest is None else newest + 1
