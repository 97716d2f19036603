"""Records up to which step the rollouts of a run were retired, that is deleted from its database
(`echo_hub.store.retiring`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Connection, select

from echo_hub.store.tables import run_meta
from echo_hub.store.tallies import dialect_of

_RETIRED: Final = "retired"
_ANSWERS: Final = "retired_answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredMark:
    """A point in the run: after step `step`, and after all groups with ids up to `group`."""

    step: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """The steps after `after`, up to and including `through`, whose rollouts are retired (deleted from the database)
    together."""

    after: RetiredMark
    through: RetiredMark

    def __str__(self) -> str:
        return f"{self.after.step + 1} to {self.through.step}"


def read_last(connection: Connection) -> StepSpan | None:
    """Return the steps whose rollouts were retired (deleted from the database) last; None if none ever were.

    All rollouts of earlier steps are deleted. Rollouts of the returned steps are deleted, or are being deleted.
    """
    found = connection.scalar(select(run_meta.c.value).where(run_meta.c.key == _RETIRED))
    if found is None:
        return None
    said = json.loads(found)
    return StepSpan(after=RetiredMark(**said["after"]), through=RetiredMark(**said["through"]))


def note_last(connection: Connection, span: StepSpan) -> bool:
    """Record that these steps are being retired. Return False if they or later steps were recorded before.

    This locks the row, so another process that calls this function waits for this transaction.
    """
    connection.execute(select(run_meta.c.key).where(run_meta.c.key == _RETIRED).with_for_update())
    last = read_last(connection)
    if last is not None and last.through.step >= span.through.step:
        return False
    _note(connection, _RETIRED, json.dumps(asdict(span)))
    return True


def read_last_answer(connection: Connection) -> int:
    """Return the largest id of a group of tenants' samples with deleted rows; 0 if none were deleted."""
    return int(connection.scalar(select(run_meta.c.value).where(run_meta.c.key == _ANSWERS)) or 0)


def note_last_answer(connection: Connection, group_id: int) -> None:
    """Record that rows of this group of tenants' samples are being deleted."""
    if group_id > read_last_answer(connection):
        _note(connection, _ANSWERS, str(group_id))


def _note(connection: Connection, key: str, value: str) -> None:
    fresh = dialect_of(connection).insert(run_meta)
    statement = fresh.on_conflict_do_update(index_elements=["key"], set_={"value": fresh.excluded.value})
    connection.execute(statement, {"key": key, "value": value})
