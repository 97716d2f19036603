from __future__ import annotations

from pathlib import Path
from typing import Any

from echo_hub.core.accounting.effects import CheckingCredited, CostAccrued, NodeCost, RolloutsDropped, StandingRecorded
from echo_hub.core.trust.standing import StandingRow
from echo_hub.store.reports import read_under_way
from echo_hub.store.store import Store
from echo_hub.store.touched import Touched
from echo_shared.wire.messages import DropReason


def test_touched_nodes_are_listed_since_a_number() -> None:
    touched = Touched()
    touched.note(["a", "b"])
    looked = touched.number
    touched.note(["b", "c"])
    assert touched.since(looked) == {"b", "c"} and touched.since(0) == {"a", "b", "c"}
    assert touched.since(touched.number) == frozenset()


def test_whoevers_totals_are_others_is_touched(tmp_path: Path, records: Any) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    seen = 0

    def touched() -> frozenset[str]:
        nonlocal seen
        before, seen = seen, store.touched.number
        return store.touched.since(before)

    store.node_seen(node_id="a", public_key=bytes(32), name="a", backend="torch", device="cpu", now=1.0)
    assert touched() == {"a"}
    store.apply([*records.opened(9), records.leased(9, 9, 0, 1, node_id="b"), *records.received("9-0")], now=1.0)
    assert touched() == frozenset(), "rollouts in progress are counted when read"
    assert store.read(read_under_way) == {"b": 1}
    store.apply([RolloutsDropped(rollout_ids=("9-0", "9-1"), reason=DropReason.STALE)], now=2.0)
    assert touched() == {"b"} and store.read(read_under_way) == {}
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="c"), now=3.0)
    assert touched() == {"c"}
    store.apply(
        [
            CostAccrued(nodes=(NodeCost("d", 1.0, 0.5),)),
            CheckingCredited(node_id="e", num_tokens=3),
            StandingRecorded(row=StandingRow(node_id="f")),
        ],
        now=4.0,
    )
    assert touched() == {"d", "e", "f"}
    store.close()
