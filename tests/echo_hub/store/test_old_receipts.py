from __future__ import annotations

from dataclasses import replace

from echo_hub.store import old_receipts
from echo_hub.store.database import open_to_read, open_to_write
from echo_hub.store.old_receipts import LEASES, OldReceipt
from echo_hub.store.store import Store

DONE = OldReceipt(
    lease_id=1,
    index=0,
    node_id="a" * 64,
    state="trained",
    drop_reason=None,
    checked="passed",
    policy_version=7,
    group_id=2**48 + 3,
    num_tokens=12,
    leased_at=1_764_000_000.125,
    received_at=1_764_000_002.25,
    scored_at=1_764_000_002.5,
    final_at=1_764_000_009.001,
)
LOST = replace(
    DONE,
    index=3,
    node_id="b",
    state="dropped",
    drop_reason="expired",
    checked="no",
    group_id=5,
    num_tokens=None,
    received_at=None,
    scored_at=None,
)


def test_all_fields_are_read_back_with_any_other_columns(store: Store) -> None:
    others = [replace(DONE, lease_id=lease_id, policy_version=lease_id % 3) for lease_id in range(2, 3 * LEASES)]
    with open_to_write(store.engine) as connection:
        old_receipts.add(connection, [DONE, *others[:100]])
        old_receipts.add(connection, [*others[100:], LOST])
    wanted = [DONE, LOST, *others]
    with open_to_read(store.engine) as connection:
        assert list(old_receipts.find(connection, [one.key for one in wanted]).values()) == wanted
        assert old_receipts.find(connection, [(1, 1), (10**6, 0)]) == {}
        assert old_receipts.newest_lease(connection) == 3 * LEASES - 1


def test_a_check_is_noted_only_for_stored_receipts(store: Store) -> None:
    with open_to_write(store.engine) as connection:
        assert old_receipts.newest_lease(connection) == 0
        old_receipts.add(connection, [DONE, LOST])
        assert old_receipts.note_checked(connection, {LOST.key: "failed", (9, 9): "failed"}) == 1
        assert old_receipts.find(connection, [DONE.key, LOST.key, (9, 9)]) == {
            DONE.key: DONE,
            LOST.key: replace(LOST, checked="failed"),
        }
