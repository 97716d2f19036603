"""The spool: every leased rollout until its final receipt, in one crash-safe SQLite file.

States of a rollout: `leased` (held, unfinished) → `sent` (finished and on disk; sent again until the hub has it) →
`received` → `scored` → `trained` | `evaluated` | `answered` | `dropped`. The states after `sent` come only from the
hub's receipts, and a state never goes back. The rollout's tokens are kept from `sent` until the first receipt. The
result of the hub's check is stored next to the state.

Each call is one transaction, durable when the call returns. A lock makes calls from several threads take turns.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

from echo_node.core.effects import ForgetLease, RecordReceipts, SpoolEffect, SpoolLease, SpoolRollout
from echo_shared.errors import StorageError
from echo_shared.files.atomic import disk_error
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.messages import (
    Checked,
    ReceiptState,
    Rollout,
    rollout_id,
)

SENT: Final = "sent"
STATES: Final = ("leased", SENT, "received", "scored", "trained", "dropped", "evaluated", "answered")
"""States, stored as their index in this tuple. States from `trained` on are final."""
_FINAL: Final = STATES.index("trained")
_CANNOT: Final = "The spool, which stores finished rollouts for the hub, cannot be written."
_LEAST_FREE_BYTES: Final = 64 * 1024
"""Free space below which an SQLite I/O error counts as a full disk, because SQLite does not report a full disk for its
own log.
"""

RESEND_BATCH: Final = 64
MAX_ASKED: Final = 4_096
"""Maximum number of rollouts in the receipt requests of one connection. Older rollouts follow when these have final
states.
"""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id  TEXT PRIMARY KEY,
    lease_id    INTEGER NOT NULL,
    idx         INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    drop_reason TEXT,
    payload     BLOB,
    checked     TEXT NOT NULL DEFAULT 'no',
    changed_at  REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollouts_by_state ON rollouts (state, drop_reason);
CREATE INDEX IF NOT EXISTS rollouts_by_lease ON rollouts (lease_id);
CREATE TABLE IF NOT EXISTS run (run_id TEXT NOT NULL);
"""
_ADDED: Final = {"checked": "TEXT NOT NULL DEFAULT 'no'", "changed_at": "REAL NOT NULL DEFAULT 0"}
_CHECKED_INDEX: Final = """
CREATE INDEX IF NOT EXISTS rollouts_by_check ON rollouts (checked) WHERE checked <> 'no'
"""


_ENTRY: Final = "rollout_id, state, drop_reason, checked, changed_at"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolEntry:
    """This node's record of one rollout: its state here, and the result of the hub's check."""

    rollout_id: str
    state: str
    drop_reason: str | None
    checked: str
    changed_at: float
    """Time of the last state change, in seconds since the epoch; 0 = an older release wrote the row."""


class Spool:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open or create the file. Raises StorageError, and leaves the file closed, if it cannot be opened or is not a
        spool.
        """
        with self._guarded():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def begin_run(self, run_id: str) -> int:
        """Delete the rows of any other run, because rollout ids are unique only within a run. Return the number of
        deleted rows whose state was not final.
        """
        with self._transaction() as connection:
            row = connection.execute("SELECT run_id FROM run").fetchone()
            if row is not None and row[0] == run_id:
                return 0
            (lost,) = connection.execute("SELECT count(*) FROM rollouts WHERE state < ?", (_FINAL,)).fetchone()
            connection.execute("DELETE FROM rollouts")
            connection.execute("DELETE FROM run")
            connection.execute("INSERT INTO run VALUES (?)", (run_id,))
            return int(lost)

    def write(self, effects: Iterable[SpoolEffect]) -> None:
        """Write all effects in one transaction. Raises StorageError, and then writes nothing.

        Writing the same effects again changes nothing.
        """
        now = time.time()
        with self._transaction() as connection:
            for effect in effects:
                match effect:
                    case SpoolLease(lease_id=lease_id, indices=indices):
                        connection.executemany(
                            "INSERT INTO rollouts (rollout_id, lease_id, idx, state, changed_at) VALUES (?, ?, ?, 0, ?)"
                            " ON CONFLICT DO NOTHING",
                            [(rollout_id(lease_id, index), lease_id, index, now) for index in indices],
                        )
                    case ForgetLease(lease_id=lease_id):
                        connection.execute("DELETE FROM rollouts WHERE lease_id = ? AND state = 0", (lease_id,))
                    case SpoolRollout(rollout=rollout):
                        _add(connection, rollout, now)
                    case RecordReceipts(receipts=receipts):
                        connection.executemany(
                            "UPDATE rollouts SET state = ?1, drop_reason = ?2, payload = NULL, changed_at = ?5"
                            " WHERE rollout_id = ?3 AND state < ?1 AND state < ?4",
                            [
                                (STATES.index(item.state), item.drop_reason, item.rollout_id, _FINAL, now)
                                for item in receipts
                                if item.state is not ReceiptState.LEASED
                            ],
                        )
                        connection.executemany(
                            "UPDATE rollouts SET checked = ? WHERE rollout_id = ?",
                            [(item.checked, item.rollout_id) for item in receipts if item.checked is not Checked.NO],
                        )
                    case _:
                        assert_never(effect)

    def unfinished(self) -> dict[int, tuple[int, ...]]:
        """Return the indices that are neither finished nor returned, by lease."""
        leases: dict[int, list[int]] = {}
        with self._reading() as connection:
            for lease_id, index in connection.execute(
                "SELECT lease_id, idx FROM rollouts WHERE state = 0 ORDER BY 1, 2"
            ):
                leases.setdefault(lease_id, []).append(index)
        return {lease_id: tuple(indices) for lease_id, indices in leases.items()}

    def unacked_ids(self) -> list[str]:
        """Return the ids of finished rollouts without a receipt."""
        with self._reading() as connection:
            return [row[0] for row in connection.execute("SELECT rollout_id FROM rollouts WHERE state = 1")]

    def unacked(self, after: str = "") -> list[Rollout]:
        """Return at most `RESEND_BATCH` finished rollouts without a receipt, in order of their ids, from the first id
        behind `after` on.
        """
        query = "SELECT payload FROM rollouts WHERE state = 1 AND rollout_id > ? ORDER BY rollout_id LIMIT ?"
        with self._reading() as connection:
            rows = connection.execute(query, (after, RESEND_BATCH)).fetchall()
        rollouts = [decode_from_node(payload) for (payload,) in rows]
        return [rollout for rollout in rollouts if isinstance(rollout, Rollout)]

    def without_final_receipt(self) -> list[str]:
        """Return the ids of rollouts that the hub has received and whose final state is unknown here: at most
        `MAX_ASKED`, newest first.
        """
        states = (STATES.index("received"), STATES.index("scored"))
        query = "SELECT rollout_id FROM rollouts WHERE state IN (?, ?) ORDER BY lease_id DESC, idx DESC LIMIT ?"
        with self._reading() as connection:
            return [row[0] for row in connection.execute(query, (*states, MAX_ASKED))]

    def counts(self) -> dict[str, int]:
        """Count rollouts by state. Dropped ones also count as `dropped:REASON`, checked ones as `checked:passed` or
        `checked:failed`.
        """
        counts = dict.fromkeys(STATES, 0)
        with self._reading() as connection:
            query = "SELECT state, drop_reason, count(*) FROM rollouts GROUP BY 1, 2 ORDER BY 1, 2"
            for state, reason, count in connection.execute(query):
                counts[STATES[state]] += count
                if reason is not None:
                    counts[f"dropped:{reason}"] = count
            query = "SELECT checked, count(*) FROM rollouts WHERE checked <> 'no' GROUP BY 1 ORDER BY 1"
            for found, count in connection.execute(query):
                counts[f"checked:{found}"] = count
        return counts

    def entries(self, *, state: str | None = None, since: float = 0.0, limit: int) -> list[SpoolEntry]:
        """Return the rollouts in `state` (None = any) that changed at `since` or later, newest leases first."""
        wanted = range(len(STATES)) if state is None else [STATES.index(state)]
        query = (
            f"SELECT {_ENTRY} FROM rollouts WHERE state IN ({', '.join(map(str, wanted))}) AND changed_at >= ?"
            " ORDER BY lease_id DESC, idx DESC LIMIT ?"
        )
        with self._reading() as connection:
            return [_entry(row) for row in connection.execute(query, (since, limit))]

    def entry(self, wanted_id: str) -> SpoolEntry | None:
        """Return this node's record of a rollout; None if this node got no lease for the rollout in this run, or
        returned it unfinished.
        """
        with self._reading() as connection:
            query = f"SELECT {_ENTRY} FROM rollouts WHERE rollout_id = ?"
            row = connection.execute(query, (wanted_id,)).fetchone()
        return None if row is None else _entry(row)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._guarded():
            assert self._connection is not None, "the spool is not open"
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                if _is_full(error, self._path.parent):
                    raise disk_error(
                        _CANNOT, self._path.parent, got=f"{self._path}: {error}", code=errno.ENOSPC
                    ) from error
                raise StorageError(
                    _CANNOT,
                    got=f"{self._path}: {error}",
                    do="Free some disk space or make the directory writable; the node retries by itself."
                    if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError)
                    else "If the disk is healthy, move this file away and restart the node.",
                ) from error


def _entry(row: tuple[str, int, str | None, str, float]) -> SpoolEntry:
    name, state, reason, checked, changed_at = row
    return SpoolEntry(rollout_id=name, state=STATES[state], drop_reason=reason, checked=checked, changed_at=changed_at)


def _is_full(error: Exception, directory: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return True
    try:
        has_no_room = shutil.disk_usage(directory).free < _LEAST_FREE_BYTES
    except OSError:
        return False
    return has_no_room and isinstance(error, sqlite3.OperationalError)


def _prepare(connection: sqlite3.Connection) -> None:
    """Create the tables, and add columns that files of older releases lack."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(_SCHEMA)
    columns = {row[1] for row in connection.execute("PRAGMA table_info(rollouts)")}
    for name, kind in _ADDED.items():
        if name not in columns:
            connection.execute(f"ALTER TABLE rollouts ADD COLUMN {name} {kind}")
    connection.execute(_CHECKED_INDEX)


def _add(connection: sqlite3.Connection, rollout: Rollout, now: float) -> None:
    connection.execute(
        "INSERT INTO rollouts (rollout_id, lease_id, idx, state, payload, changed_at) VALUES (?, ?, ?, 1, ?, ?)"
        " ON CONFLICT (rollout_id)"
        " DO UPDATE SET state = 1, payload = excluded.payload, changed_at = excluded.changed_at WHERE state = 0",
        (rollout.rollout_id, rollout.lease_id, rollout.index, encode(rollout), now),
    )
