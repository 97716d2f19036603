"""Permanent receipts of rollouts whose rows were deleted, so that requests for receipts are answered as before.

The receipts of `LEASES` consecutive leases form one row: their values, column by column, as compressed JSON, about 30
bytes a rollout. Times are kept to the millisecond.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from sqlalchemy import Connection, select

from echo_hub.store.bulk import among
from echo_hub.store.tables import old_receipts
from echo_hub.store.tallies import dialect_of

LEASES: Final = 64
"""Number of consecutive leases whose receipts share a row. To unpack, change and repack such a row takes about a
millisecond.
"""
_BLOCKS_A_QUERY: Final = 1_000

Key = tuple[int, int]
"""Lease number and index, which identify a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldReceipt:
    """One receipt. Its fields are the columns of the deleted row that a receipt needs."""

    lease_id: int
    index: int
    node_id: str
    state: str
    drop_reason: str | None
    checked: str
    policy_version: int
    group_id: int
    num_tokens: int | None
    leased_at: float
    received_at: float | None
    scored_at: float | None
    final_at: float | None

    @property
    def key(self) -> Key:
        return self.lease_id, self.index


FIELDS: Final = tuple(field.name for field in fields(OldReceipt))
TIMES: Final = ("leased_at", "received_at", "scored_at", "final_at")
_FROM_THE_FIRST: Final = ("lease_id", "group_id", "policy_version", "leased_at")
"""Columns stored as differences from the first value in the row, because differences compress better."""


def add(connection: Connection, receipts: Iterable[OldReceipt]) -> None:
    """Add receipts. A new receipt replaces the rollout's older receipt in this table."""
    new: dict[int, dict[Key, OldReceipt]] = {}
    for receipt in receipts:
        new.setdefault(receipt.lease_id // LEASES, {})[receipt.key] = receipt
    if not new:
        return
    there = _read(connection, new, to_change=True)
    rows = [
        {"block": block, "receipts": _packed((there.get(block, {}) | of_block).values())}
        for block, of_block in new.items()
    ]
    fresh = dialect_of(connection).insert(old_receipts)
    replaced = {"receipts": fresh.excluded.receipts}
    connection.execute(fresh.on_conflict_do_update(index_elements=["block"], set_=replaced), rows)


def find(connection: Connection, keys: Collection[Key]) -> dict[Key, OldReceipt]:
    blocks = _read(connection, {lease_id // LEASES for lease_id, _ in keys})
    found = {key: blocks.get(key[0] // LEASES, {}).get(key) for key in keys}
    return {key: receipt for key, receipt in found.items() if receipt is not None}


def note_checked(connection: Connection, checked: Mapping[Key, str]) -> int:
    """Record the results of checks that ended after the rollouts' rows were deleted. Return how many of these rollouts
    have a receipt here.
    """
    found = find(connection, checked)
    add(connection, (replace(receipt, checked=checked[key]) for key, receipt in found.items()))
    return len(found)


def newest_lease(connection: Connection) -> int:
    """Return the newest lease with a receipt in this table; 0 if the table is empty."""
    newest = connection.scalar(select(old_receipts.c.receipts).order_by(old_receipts.c.block.desc()).limit(1))
    return 0 if newest is None else _unpacked(newest)[-1].lease_id


def _read(
    connection: Connection, blocks: Collection[int], *, to_change: bool = False
) -> dict[int, dict[Key, OldReceipt]]:
    wanted, found = sorted(blocks), dict[int, dict[Key, OldReceipt]]()
    query = select(old_receipts).with_for_update() if to_change else select(old_receipts)
    for start in range(0, len(wanted), _BLOCKS_A_QUERY):
        part = among(connection, old_receipts.c.block, wanted[start : start + _BLOCKS_A_QUERY])
        for row in connection.execute(query.where(part)):
            found[row.block] = {receipt.key: receipt for receipt in _unpacked(row.receipts)}
    return found


def _packed(receipts: Iterable[OldReceipt]) -> bytes:
    in_order = sorted(receipts, key=lambda receipt: receipt.key)
    columns = {name: [getattr(receipt, name) for receipt in in_order] for name in FIELDS}
    names = sorted(set(columns["node_id"]))
    places = {name: place for place, name in enumerate(names)}
    columns["node_id"] = [places[name] for name in columns["node_id"]]
    first = {name: columns[name][0] for name in _FROM_THE_FIRST}
    first["leased_at"] = _ms(first["leased_at"])
    leased_ms = [_ms(at) for at in columns["leased_at"]]
    for name in TIMES[1:]:
        columns[name] = [_since(at, leased) for at, leased in zip(columns[name], leased_ms, strict=True)]
    columns["leased_at"] = leased_ms
    for name, least in first.items():
        columns[name] = [value - least for value in columns[name]]
    whole = {"names": names, "first": first, "columns": columns}
    return zlib.compress(json.dumps(whole, separators=(",", ":")).encode())


def _unpacked(packed: bytes) -> list[OldReceipt]:
    whole = json.loads(zlib.decompress(packed))
    names, columns = whole["names"], whole["columns"]
    for name, least in whole["first"].items():
        columns[name] = [value + least for value in columns[name]]
    columns["node_id"] = [names[place] for place in columns["node_id"]]
    for name in TIMES[1:]:
        pairs = zip(columns[name], columns["leased_at"], strict=True)
        columns[name] = [None if ms is None else (leased + ms) / 1000 for ms, leased in pairs]
    columns["leased_at"] = [ms / 1000 for ms in columns["leased_at"]]
    rows = zip(*(columns[name] for name in FIELDS), strict=True)
    return [OldReceipt(**dict(zip(FIELDS, row, strict=True))) for row in rows]


def _ms(at: float) -> int:
    return round(1000 * at)


def _since(at: float | None, leased_ms: int) -> int | None:
    return None if at is None else _ms(at) - leased_ms
