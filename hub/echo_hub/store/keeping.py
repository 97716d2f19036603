"""Delete tokens that the hub no longer needs, and keep copies of some of them for people to read.

Groups are kept whole, so that a kept group can be read in full. Whether a group is kept depends only on its number:
among any consecutive groups, the share `Keeping.share` is kept. If the copies exceed `Keeping.max_bytes`, those with
the oldest leases are deleted.

For a rollout without tokens, the column `not_kept` gives the reason: `share` or `bytes`. NULL without a copy has two
causes: the rollout never came in, or keeping was off when its tokens were deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from sqlalchemy import Connection, bindparam, delete, insert, select, tuple_, update

from echo_hub.core.answer_groups import is_answer
from echo_hub.store.bulk import among, execute_many
from echo_hub.store.payload_rows import NAMES
from echo_hub.store.reading import in_parts
from echo_hub.store.retired import read_last
from echo_hub.store.tables import WITH_PAYLOAD, keeping_tallies, kept, payloads, rollouts
from echo_hub.store.tallies import add_to

BY_SHARE: Final = "share"
BY_BYTES: Final = "bytes"
_KEPT: Final = "kept"
_RETIRED: Final = "retired"
_ROW_BYTES: Final = 100
"""Approximate size in bytes of a stored copy's row and index entry, without the arrays of tokens."""
TRIMMED_AT_ONCE: Final = 5_000
"""Largest number of copies that one transaction deletes. If the operator lowers the byte limit a lot, deletion takes
several transactions."""
TRIMMED_A_QUERY: Final = 250
"""Number of copies read at a time to decide which are deleted. Usually only a few must be deleted, but PostgreSQL's
driver fetches all rows of a query.
"""
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio. The multiples of this number modulo 2**64 are evenly spread (Knuth, The Art of
Computer Programming 3, 6.4), so they choose an even share of consecutive group numbers.
"""

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Limits on the copies of tokens that are kept for people to read."""

    share: float = 1.0
    """Share of all groups whose tokens are kept, 0 to 1."""
    max_bytes: int = 500_000_000

    def chooses(self, group_id: int) -> bool:
        """Return True if copies of this group's tokens are kept. Tenants' samples are never kept."""
        if is_answer(group_id):
            return False
        return self.max_bytes > 0 and group_id * _GOLDEN % 2**64 < self.share * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTotals:
    """Numbers of final rollouts (trained on, evaluated, answered or dropped) with and without readable tokens."""

    rollouts: int = 0
    bytes: int = 0
    rollouts_by_share: int = 0
    """Rollouts that were never copied, because `Keeping.share` did not choose their groups."""
    rollouts_by_bytes: int = 0
    """Rollouts whose copies were deleted to stay below the byte limit."""
    rollouts_retired: int = 0
    """Rollouts whose database rows were deleted as well (`echo_hub.store.retiring`)."""
    retired_step: int = 0
    """Newest step whose rollouts' rows were deleted; 0 if none were."""


def forget(connection: Connection, keys: Iterable[Key], keeping: Keeping) -> None:
    """Delete the stored payloads of these rollouts, given as (lease, index). If `keeping` chooses a rollout's group,
    copy its payload first.
    """
    wanted = set(keys)
    rows = [
        row
        for lease_ids in in_parts(sorted({lease_id for lease_id, _ in wanted}))
        for row in connection.execute(_PAYLOADS.where(among(connection, payloads.c.lease_id, lease_ids)))
        if (row.lease_id, row.at) in wanted
    ]
    if not rows:
        return
    copies = [_copy(row) for row in rows if keeping.chooses(row.group_id)]
    left_out = [row for row in rows if not keeping.chooses(row.group_id)]
    execute_many(connection, _FORGET, [{"lease": row.lease_id, "at": row.at} for row in rows])
    if copies:
        execute_many(connection, _NEW_KEPT, copies)
        _count(connection, _KEPT, len(copies), sum(copy["size_bytes"] for copy in copies))
    if left_out:
        _say_why(connection, left_out, BY_SHARE)
        _count(connection, BY_SHARE, len(left_out), 0)
    trim(connection, keeping)


def forget_copies(connection: Connection, keys: Set[Key]) -> None:
    """Delete the kept copies of rollouts whose rows are being deleted, and count the rollouts as retired."""
    rows = [
        row
        for lease_ids in in_parts(sorted({lease_id for lease_id, _ in keys}))
        for row in connection.execute(
            select(kept.c.lease_id, kept.c.index.label("at"), kept.c.size_bytes)
            .where(among(connection, kept.c.lease_id, lease_ids))
            .with_for_update()
        )
        if (row.lease_id, row.at) in keys
    ]
    if rows:
        connection.execute(_TRIM, [{"lease": row.lease_id, "at": row.at} for row in rows])
        _count(connection, _KEPT, -len(rows), -sum(row.size_bytes for row in rows))
    _count(connection, _RETIRED, len(keys), 0)


def trim(connection: Connection, keeping: Keeping) -> None:
    """Delete the oldest copies until the rest fits the byte limit, but at most `TRIMMED_AT_ONCE` of them."""
    excess = _totals(connection).bytes - keeping.max_bytes
    if excess <= 0:
        return
    gone: list[Any] = []
    for row in islice(_oldest(connection), TRIMMED_AT_ONCE):
        gone.append(row)
        excess -= row.size_bytes
        if excess <= 0:
            break
    if gone:
        connection.execute(_TRIM, [{"lease": row.lease_id, "at": row.at} for row in gone])
        _say_why(connection, gone, BY_BYTES)
        _count(connection, _KEPT, -len(gone), -sum(row.size_bytes for row in gone))
        _count(connection, BY_BYTES, len(gone), 0)


def _oldest(connection: Connection) -> Iterator[Any]:
    lease_id, at = 0, -1
    in_order = (kept.c.lease_id, kept.c.index)
    while True:
        part = connection.execute(
            select(kept.c.lease_id, kept.c.index.label("at"), kept.c.size_bytes)
            .where(tuple_(*in_order) > (lease_id, at))
            .order_by(*in_order)
            .limit(TRIMMED_A_QUERY)
        ).all()
        if not part:
            return
        yield from part
        lease_id, at = part[-1].lease_id, part[-1].at


def read_kept_totals(connection: Connection) -> KeptTotals:
    """Return how many final rollouts have readable tokens and how many do not, and the last retired step."""
    last = read_last(connection)
    return replace(_totals(connection), retired_step=0 if last is None else last.through.step)


def _totals(connection: Connection) -> KeptTotals:
    known = {row.outcome: row for row in connection.execute(select(keeping_tallies))}
    return KeptTotals(
        rollouts=known[_KEPT].rollouts if _KEPT in known else 0,
        bytes=known[_KEPT].bytes if _KEPT in known else 0,
        rollouts_by_share=known[BY_SHARE].rollouts if BY_SHARE in known else 0,
        rollouts_by_bytes=known[BY_BYTES].rollouts if BY_BYTES in known else 0,
        rollouts_retired=known[_RETIRED].rollouts if _RETIRED in known else 0,
    )


_PAYLOADS: Final = select(
    payloads.c.lease_id,
    payloads.c.index.label("at"),
    *(payloads.c[name] for name in NAMES),
    rollouts.c.group_id,
).join_from(payloads, rollouts, WITH_PAYLOAD)
_NEW_KEPT: Final = insert(kept)
_FORGET: Final = delete(payloads).where(payloads.c.lease_id == bindparam("lease"), payloads.c.index == bindparam("at"))
_TRIM: Final = delete(kept).where(kept.c.lease_id == bindparam("lease"), kept.c.index == bindparam("at"))
_SAY_WHY: Final = (
    update(rollouts)
    .where(rollouts.c.lease_id == bindparam("lease"), rollouts.c.index == bindparam("at"))
    .values(not_kept=bindparam("why"))
)


def _copy(row: Any) -> dict[str, Any]:
    # Only the learner and the verifier use routes, and they take up to a hundred times the bytes of the tokens.
    values = {name: getattr(row, name) for name in NAMES} | {"routes": None}
    arrays = sum(len(value) for value in values.values() if isinstance(value, bytes))
    size_bytes = arrays + _ROW_BYTES * (1 + len(row.spans or ()))
    return {"lease_id": row.lease_id, "index": row.at, **values, "size_bytes": size_bytes}


def _say_why(connection: Connection, rows: Sequence[Any], why: str) -> None:
    connection.execute(_SAY_WHY, [{"lease": row.lease_id, "at": row.at, "why": why} for row in rows])


def _count(connection: Connection, outcome: str, num_rollouts: int, num_bytes: int) -> None:
    add_to(connection, keeping_tallies, [{"outcome": outcome}], [{"rollouts": num_rollouts, "bytes": num_bytes}])
