"""Retire old steps: delete their rollouts from the database once nothing needs the rows. Their receipts are kept.

    step 1          ...   K | K + 1     ...                     newest
    old_receipts, groups, steps | rollouts, kept copies, groups, steps

Totals, credit and contributions are running totals and do not depend on the rows. Receipts continue in the table
`old_receipts`. The rollouts of steps up to K are: the groups of their batches, groups dropped in that time, and the
evaluations of versions before K. Retiring a step requires that its tokens are deleted and all groups up to its newest
group are finished. Then neither a restarted hub nor a check reads the step's rows.

Tenants' samples belong to no step. Their rows are retired by age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, func, insert, select

from echo_hub.actions.records import ActionOutcome
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, evaluation_ids
from echo_hub.store import old_receipts
from echo_hub.store.beginnings import read_beginning
from echo_hub.store.bulk import among, execute_many
from echo_hub.store.keeping import forget_copies
from echo_hub.store.old_receipts import FIELDS, Key, OldReceipt
from echo_hub.store.reading import in_parts
from echo_hub.store.retired import RetiredMark, StepSpan, note_last, note_last_answer
from echo_hub.store.sessions import forget_losses
from echo_hub.store.store import Store
from echo_hub.store.tables import IS_OPEN, IS_UNFINISHED, WITH_PAYLOAD, actions, groups, payloads, rollouts, steps
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.wire.messages import ReceiptState, rollout_id

STEPS_AT_ONCE: Final = 1_000
"""Largest number of steps that one call reads."""
ROWS_AT_ONCE: Final = 128
"""Largest number of rollouts that one transaction deletes. Such a transaction occupies the writer for a few
milliseconds.
"""
TRIES: Final = 100
_BRIEFLY: Final = "200ms"
"""Longest wait of this command for a row that the hub has locked, in PostgreSQL. It is shorter than PostgreSQL's
deadlock timeout, so the server never cancels the hub's transaction instead.
"""
_HELD_UP: Final = "55P03"
"""PostgreSQL's error code lock_not_available: the wait for a row exceeded the limit."""
_FINAL: Final = (ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.ANSWERED, ReceiptState.DROPPED)
_GONE: Final = delete(rollouts).where(rollouts.c.lease_id == bindparam("lease"), rollouts.c.index == bindparam("at"))
FACTS: Final = ("node_id", "state", "drop_reason", "reward", "num_tokens")
"""Columns that must be equal in a rollout's row and in its archived copy before the row is deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ripe:
    """A step whose rollouts may be deleted, together with those of all earlier steps."""

    mark: RetiredMark
    num_rollouts: int
    num_tokens: int
    trained_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """An operator's archive of rollouts. The operator wants the archived rollouts' rows deleted from the database."""

    facts: Mapping[str, Mapping[str, Any]]
    """The values of `FACTS` in the archive, by rollout id."""
    who: str
    place: str
    now: float

    def action(self, span: StepSpan) -> dict[str, Any]:
        return {
            "asked_at": self.now,
            "via": "cli",
            "who": self.who[:128],
            "action": "archive",
            "request": {"steps": str(span), "file": self.place},
            "outcome": ActionOutcome.DONE,
            "settled_at": self.now,
            "detail": f"{len(self.facts)} rollouts were archived and are deleted from the database.",
        }


def read_first_mark(connection: Connection) -> RetiredMark:
    beginning = read_beginning(connection)
    return RetiredMark(step=beginning.policy_version, group=beginning.group_id - 1)


def read_trained_at(connection: Connection, step: int) -> float | None:
    """Return the time at which a step was trained; None if it is not trained yet."""
    return connection.scalar(select(steps.c.trained_at).where(steps.c.step == step))


def read_final_keys(connection: Connection, span: StepSpan) -> list[Key]:
    """Return the rollouts of these steps whose rows can be deleted now, as (lease, index): rollouts that are final and
    have no stored payload.
    """
    found = [
        (row.lease_id, row.at)
        for part in in_parts(read_groups_of_steps(connection, span))
        for row in connection.execute(_OF_GROUPS.where(among(connection, rollouts.c.group_id, part)))
    ]
    return sorted(found)


def retire(store: Store, keys: Sequence[Key], span: StepSpan, copies: Copies | None = None) -> int:
    """Delete up to `ROWS_AT_ONCE` rollouts of these steps; return the number of deleted rows.

    Each attempt is one transaction; if another process has locked the rows, it is repeated. If `copies` differ from the
    rows, raises StorageError and deletes nothing.
    """
    for _ in range(TRIES):
        try:
            return store.write(_retire_once, keys, span, copies)
        except StorageError as error:
            if not _is_held_up(error):
                raise
    raise StorageError(
        "The rollouts could not be deleted from the database: another process keeps their rows locked.",
        got=f"{TRIES} tries",
        do="Run the command again when the database has less to do.",
    )


def _retire_once(connection: Connection, keys: Sequence[Key], span: StepSpan, copies: Copies | None) -> int:
    if copies is not None:
        _wait_briefly(connection)
    if note_last(connection, span) and copies is not None:
        connection.execute(insert(actions), copies.action(span))
    return _retire(connection, keys, copies)


def _wait_briefly(connection: Connection) -> None:
    """Limit waits for row locks in PostgreSQL. SQLite has no row locks: its single writer waits before its transaction
    begins.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_BRIEFLY}'")


def _is_held_up(error: StorageError) -> bool:
    return getattr(getattr(error.__cause__, "orig", None), "sqlstate", None) == _HELD_UP


def read_ripe(connection: Connection, after: RetiredMark, before_step: int) -> list[Ripe]:
    """Return steps after `after` and before `before_step` that may be retired, in order, at most `STEPS_AT_ONCE`."""
    old = (steps.c.step > after.step, steps.c.step < before_step)
    columns = (steps.c.step, steps.c.group_ids, steps.c.num_rollouts, steps.c.num_tokens, steps.c.trained_at)
    rows = connection.execute(
        select(*columns, steps.c.pruned).where(*old).order_by(steps.c.step).limit(STEPS_AT_ONCE)
    ).all()
    waiting = connection.scalar(select(func.min(groups.c.group_id)).where(IS_OPEN))
    under_way = connection.scalar(
        # Add 0 so that PostgreSQL cannot search all rollouts in the order of the group index. It then uses the partial
        # index, which holds only the few unfinished rollouts.
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
                mark=RetiredMark(step=row.step, group=group),
                num_rollouts=row.num_rollouts,
                num_tokens=row.num_tokens,
                trained_at=row.trained_at,
            )
        )
    return found


def read_groups_of_steps(connection: Connection, span: StepSpan) -> list[int]:
    """Return all groups that belong to these steps: groups trained on, dropped groups with ids in the span, and groups
    of evaluations of versions in the span.
    """
    batches = select(steps.c.group_ids).where(steps.c.step > span.after.step, steps.c.step <= span.through.step)
    dropped = select(groups.c.group_id).where(
        groups.c.group_id > span.after.group, groups.c.group_id <= span.through.group, groups.c.step.is_(None)
    )
    # Evaluations of versions before the run's first step, such as the base model, belong to the first span.
    first = 0 if span.after == read_first_mark(connection) else span.after.step
    measured = (
        select(rollouts.c.group_id)
        .distinct()
        .where(rollouts.c.group_id.between(evaluation_ids(first)[0], evaluation_ids(span.through.step - 1)[-1]))
    )
    of_steps = [group_id for batch in connection.scalars(batches) for group_id in batch]
    return sorted({*of_steps, *connection.scalars(dropped), *connection.scalars(measured)})


def read_old_answers(connection: Connection, before: float) -> list[tuple[int, Key]]:
    """Return (group, key) of the oldest samples for tenants, at most `ROWS_AT_ONCE`, that were final before this time.

    Group ids increase with time, so the search ends at the first `ROWS_AT_ONCE` rows without tokens.
    """
    oldest = connection.execute(
        _ANSWERS.order_by(rollouts.c.group_id, rollouts.c.lease_id, rollouts.c.index).limit(ROWS_AT_ONCE)
    )
    return [
        (row.group_id, (row.lease_id, row.at)) for row in oldest if row.final_at is not None and row.final_at < before
    ]


def retire_answers(connection: Connection, found: Sequence[tuple[int, Key]]) -> int:
    """Delete these rows of samples for tenants; return the number of deleted rows. Their receipts are kept."""
    if not found:
        return 0
    note_last_answer(connection, max(group_id for group_id, _ in found))
    return len(_move_to_receipts(connection, [key for _, key in found], None))


_ANSWERS: Final = (
    select(rollouts.c.group_id, rollouts.c.lease_id, rollouts.c.index.label("at"), rollouts.c.final_at)
    .join_from(rollouts, payloads, WITH_PAYLOAD, isouter=True)
    .where(
        rollouts.c.group_id >= FIRST_ANSWER_ID,
        rollouts.c.state.in_((ReceiptState.ANSWERED, ReceiptState.DROPPED)),
        payloads.c.lease_id.is_(None),
    )
)
_OF_GROUPS: Final = (
    select(rollouts.c.lease_id, rollouts.c.index.label("at"))
    .join_from(rollouts, payloads, WITH_PAYLOAD, isouter=True)
    .where(rollouts.c.state.in_(_FINAL), payloads.c.lease_id.is_(None))
)
_COLUMNS: Final = (*(rollouts.c[name] for name in FIELDS), rollouts.c.reward)


def _retire(connection: Connection, keys: Sequence[Key], copies: Copies | None) -> int:
    gone = _move_to_receipts(connection, keys, copies)
    if gone:
        forget_copies(connection, gone)
    return len(gone)


def _move_to_receipts(connection: Connection, keys: Sequence[Key], copies: Copies | None) -> Set[Key]:
    """Delete these rollouts' rows, and keep their receipts. Return the keys of the rows that existed."""
    assert len(keys) <= ROWS_AT_ONCE, "a larger transaction would occupy the writer for too long"
    wanted, lease_ids = set(keys), sorted({lease_id for lease_id, _ in keys})
    of_leases = select(*_COLUMNS).where(among(connection, rollouts.c.lease_id, lease_ids)).with_for_update()
    found = ((OldReceipt(**dict(zip(FIELDS, row, strict=False))), row) for row in connection.execute(of_leases))
    rows = {receipt.key: (receipt, row) for receipt, row in found if receipt.key in wanted}
    if not rows:
        return set()
    for receipt, row in rows.values():
        _check(receipt, row.reward, copies)
    old_receipts.add(connection, [receipt for receipt, _ in rows.values()])
    forget_losses(connection, {receipt.group_id for receipt, _ in rows.values()})
    execute_many(connection, _GONE, [{"lease": lease_id, "at": index} for lease_id, index in rows])
    return rows.keys()


def _check(one: OldReceipt, reward: float | None, copies: Copies | None) -> None:
    name = rollout_id(*one.key)
    if one.state not in _FINAL:
        raise LocalProtocolError("A rollout to be retired is not final; no rollout was deleted.", got=name)
    if copies is None:
        return
    facts = {fact: reward if fact == "reward" else getattr(one, fact) for fact in FACTS}
    if copies.facts.get(name) != facts:
        raise StorageError(
            "The database and the archive differ on a rollout; neither was changed.",
            got=f"rollout {name}: {facts} in the database, {copies.facts.get(name)} in the archive",
            do="If the run was restored from a backup, archive it into another directory.",
        )
