"""Rollouts of old steps leave the books, once nothing will need their rows again; what became of each stays.

    step 1          ...   K | K + 1     ...                     newest
    old_receipts, groups, steps | rollouts, kept copies, groups, steps

Totals, credit and contributions are running totals and know nothing of rows; receipts go on as `old_receipts`. What
belongs to steps up to K are the groups of their batches, the groups that were dropped meanwhile, and the evaluations
of the versions before. A step may go once its tokens are pruned and nothing that is at most as old waits or is under
way, so that no start and no check looks for its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select

from echo_hub.actions.records import Outcome
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, evaluation_ids
from echo_hub.store import old_receipts
from echo_hub.store.beginnings import read_beginning
from echo_hub.store.bulk import among, execute_many
from echo_hub.store.keeping import forget_copies
from echo_hub.store.old_receipts import FIELDS, Key, OldReceipt
from echo_hub.store.reading import in_parts
from echo_hub.store.retired import Mark, Span, note_last
from echo_hub.store.store import Store
from echo_hub.store.tables import IS_OPEN, IS_UNFINISHED, WITH_PAYLOAD, actions, groups, payloads, rollouts, steps
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.messages import ReceiptState, rollout_id

STEPS_AT_ONCE: Final = 1_000
"""That one call looks at."""
ROWS_AT_ONCE: Final = 128
"""That one transaction deletes: some milliseconds of the writer's."""
TRIES: Final = 100
_BRIEFLY: Final = "200ms"
"""How long PostgreSQL lets a command's transaction wait for a row that the hub holds: for less than it lets two wait
for each other, so that it never ends the hub's."""
_HELD_UP: Final = "55P03"
"""PostgreSQL's lock_not_available."""
_FINAL: Final = (ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.DROPPED)
_GONE: Final = delete(rollouts).where(rollouts.c.lease_id == bindparam("lease"), rollouts.c.index == bindparam("at"))
FACTS: Final = ("node_id", "state", "drop_reason", "reward", "num_tokens")
"""Of a rollout, by which a row and a copy of it elsewhere are found to be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ripe:
    """A step that may go, with all before it."""

    mark: Mark
    num_rollouts: int
    num_tokens: int
    trained_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What an operator has of rollouts elsewhere, who asks for their rows to go."""

    facts: Mapping[str, Mapping[str, Any]]
    """`FACTS` by rollout id."""
    who: str
    place: str
    now: float

    def action(self, span: Span) -> dict[str, Any]:
        """How the log of actions has it."""
        return {
            "asked_at": self.now,
            "via": "cli",
            "who": self.who[:128],
            "action": "archive",
            "request": {"steps": str(span), "file": self.place},
            "outcome": Outcome.DONE,
            "settled_at": self.now,
            "detail": f"{len(self.facts)} rollouts are there, and leave the books.",
        }


def read_first_mark(connection: Connection) -> Mark:
    """Return the mark before the run's first step."""
    beginning = read_beginning(connection)
    return Mark(step=beginning.policy_version, group=beginning.group_id - 1)


def read_trained_at(connection: Connection, step: int) -> float | None:
    """Return when a step was trained; None if it is not trained."""
    return connection.scalar(select(steps.c.trained_at).where(steps.c.step == step))


def read_final_keys(connection: Connection, span: Span) -> list[Key]:
    """Return the final rollouts of these steps whose rows are still there, by lease and index."""
    found = [
        (row.lease_id, row.at)
        for part in in_parts(read_groups_of_steps(connection, span))
        for row in connection.execute(_OF_GROUPS.where(among(connection, rollouts.c.group_id, part)))
    ]
    return sorted(found)


def retire(store: Store, keys: Sequence[Key], span: Span, copies: Copies | None = None) -> int:
    """Delete the rows of at most `ROWS_AT_ONCE` rollouts of the span, and return how many there were.

    Each try is one transaction; it is repeated while another process holds the rows. Raises StorageError, and deletes
    nothing, when `copies` differ from the rows.
    """
    for _ in range(TRIES):
        try:
            return store.write(_retire_once, keys, span, copies)
        except StorageError as error:
            if not _is_held_up(error):
                raise
    raise StorageError(
        "Rows could not leave the books: whoever writes there holds them.",
        got=f"{TRIES} tries",
        do="Run the command again when the database has less to do.",
    )


def _retire_once(connection: Connection, keys: Sequence[Key], span: Span, copies: Copies | None) -> int:
    if copies is not None:
        _wait_briefly(connection)
    if note_last(connection, span) and copies is not None:
        connection.execute(insert(actions), copies.action(span))
    return _retire(connection, keys, copies)


def _wait_briefly(connection: Connection) -> None:
    """SQLite has one writer: it waits for its turn before it begins."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_BRIEFLY}'")


def _is_held_up(error: StorageError) -> bool:
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) == _HELD_UP


def read_ripe(connection: Connection, after: Mark, before_step: int) -> list[Ripe]:
    """Return at most `STEPS_AT_ONCE` steps that may go, in order: behind `after` and before `before_step`."""
    old = (steps.c.step > after.step, steps.c.step < before_step)
    columns = (steps.c.step, steps.c.group_ids, steps.c.num_rollouts, steps.c.num_tokens, steps.c.trained_at)
    rows = connection.execute(
        select(*columns, steps.c.pruned).where(*old).order_by(steps.c.step).limit(STEPS_AT_ONCE)
    ).all()
    waiting = connection.scalar(select(func.min(groups.c.group_id)).where(IS_OPEN))
    under_way = connection.scalar(
        # Of the sum no index is in order: else PostgreSQL looks for the first one among all rollouts, and not among
        # the few that are unfinished.
        select(func.min(rollouts.c.group_id + 0)).where(IS_UNFINISHED, rollouts.c.group_id < FIRST_EVALUATION_ID)
    )
    end = min((each for each in (waiting, under_way) if each is not None), default=FIRST_EVALUATION_ID)
    found, group = [], after.group
    for row in rows:
        group = max([group, *row.group_ids])
        if not row.pruned or group >= end:
            break
        found.append(
            Ripe(
                mark=Mark(step=row.step, group=group),
                num_rollouts=row.num_rollouts,
                num_tokens=row.num_tokens,
                trained_at=row.trained_at,
            )
        )
    return found


def read_groups_of_steps(connection: Connection, span: Span) -> list[int]:
    """Return all groups that belong to these steps."""
    batches = select(steps.c.group_ids).where(steps.c.step > span.after.step, steps.c.step <= span.through.step)
    dropped = select(groups.c.group_id).where(
        groups.c.group_id > span.after.group, groups.c.group_id <= span.through.group, groups.c.step.is_(None)
    )
    # Of the base, and of whatever else was measured before the first step, with that.
    first = 0 if span.after == read_first_mark(connection) else span.after.step
    measured = (
        select(rollouts.c.group_id)
        .distinct()
        .where(rollouts.c.group_id.between(evaluation_ids(first)[0], evaluation_ids(span.through.step - 1)[-1]))
    )
    of_steps = [group_id for batch in connection.scalars(batches) for group_id in batch]
    return sorted({*of_steps, *connection.scalars(dropped), *connection.scalars(measured)})


_OF_GROUPS: Final = (
    select(rollouts.c.lease_id, rollouts.c.index.label("at"))
    .join_from(rollouts, payloads, WITH_PAYLOAD, isouter=True)
    .where(rollouts.c.state.in_(_FINAL), payloads.c.lease_id.is_(None))
)
_COLUMNS: Final = (*(rollouts.c[name] for name in FIELDS), rollouts.c.reward)


def _retire(connection: Connection, keys: Sequence[Key], copies: Copies | None) -> int:
    assert len(keys) <= ROWS_AT_ONCE, "the writer would be held for long"
    wanted, lease_ids = set(keys), sorted({lease_id for lease_id, _ in keys})
    of_leases = select(*_COLUMNS).where(among(connection, rollouts.c.lease_id, lease_ids)).with_for_update()
    found = ((OldReceipt(**dict(zip(FIELDS, row, strict=False))), row) for row in connection.execute(of_leases))
    rows = {receipt.key: (receipt, row) for receipt, row in found if receipt.key in wanted}
    if not rows:
        return 0
    for receipt, row in rows.values():
        _check(receipt, row.reward, copies)
    old_receipts.add(connection, [receipt for receipt, _ in rows.values()])
    forget_copies(connection, rows.keys())
    return execute_many(connection, _GONE, [{"lease": lease_id, "at": index} for lease_id, index in rows])


def _check(one: OldReceipt, reward: float | None, copies: Copies | None) -> None:
    name = rollout_id(*one.key)
    if one.state not in _FINAL:
        raise LocalProtocolError("A rollout that is not final was to leave the books; none has.", got=name)
    if copies is None:
        return
    facts = {fact: reward if fact == "reward" else getattr(one, fact) for fact in FACTS}
    if copies.facts.get(name) != facts:
        raise StorageError(
            "The books and the archive say different things of a rollout; neither was changed.",
            got=f"rollout {name}: {facts} in the books, {copies.facts.get(name)} in the archive",
            do="If the run was restored from a backup, archive it into another directory.",
        )
