"""How far a run's rollouts have left its books (`echo_hub.store.retiring`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Connection, select

from echo_hub.store.tables import run_meta
from echo_hub.store.tallies import dialect_of

_RETIRED: Final = "retired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """All that belongs to steps up to `step`, dropped groups up to `group` among it."""

    step: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What belongs to steps behind `after` up to `through`."""

    after: Mark
    through: Mark

    def __str__(self) -> str:
        return f"{self.after.step + 1} to {self.through.step}"


def read_last(connection: Connection) -> Span | None:
    """What went last: all before it is gone, and it is gone or going. None: nothing ever went."""
    found = connection.scalar(select(run_meta.c.value).where(run_meta.c.key == _RETIRED))
    if found is None:
        return None
    said = json.loads(found)
    return Span(after=Mark(**said["after"]), through=Mark(**said["through"]))


def note_last(connection: Connection, span: Span) -> bool:
    """It goes from now on. Whoever else would write so waits for this transaction. False: it went before."""
    connection.execute(select(run_meta.c.key).where(run_meta.c.key == _RETIRED).with_for_update())
    last = read_last(connection)
    if last is not None and last.through.step >= span.through.step:
        return False
    fresh = dialect_of(connection).insert(run_meta)
    statement = fresh.on_conflict_do_update(index_elements=["key"], set_={"value": fresh.excluded.value})
    connection.execute(statement, {"key": _RETIRED, "value": json.dumps(asdict(span))})
    return True
