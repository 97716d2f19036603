from __future__ import annotations

from dataclasses import asdict
from typing import Any

from echo_hub.core.accounting.effects import CheckRecorded, RolloutsDropped, StandingRecorded, TrustDecided
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.store.node_records import ROLLOUTS, read_node_record
from echo_hub.store.store import Store
from echo_shared.records.node import NodeOutcome
from echo_shared.wire.messages import Checked, DropReason

EVIDENCE = Evidence(draws=(1, 1, 0, 0, 0, 1), claims=(1, 0, 1, 1, 0, 0), mismatch_kl=0.6, bias=0.2)


def see(store: Store, node_id: str) -> None:
    named = {"node_id": node_id, "name": f"{node_id}'s", "public_key": bytes(32)}
    store.node_seen(**named, backend="torch", device="cpu", now=1.0)


def test_of_a_node_that_never_came_nothing_is_known(store: Store) -> None:
    assert store.read(read_node_record, "a") is None
    see(store, "a")
    found = store.read(read_node_record, "a")
    assert found is not None
    assert (found.totals.name, found.public_key) == ("a's", "00" * 32)
    assert (found.outcomes, found.decisions, found.checked, found.rollouts, found.shown) == ((), (), (), (), None)


def test_a_nodes_rollouts_are_counted_by_outcome(store: Store, records: Any) -> None:
    see(store, "a")
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=2.0)
    store.apply([*records.opened(5), records.leased(2, 5, 0, 1, 2)], now=3.0)
    store.apply([RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.STALE)], now=3.0)
    found = store.read(read_node_record, "a")
    assert found is not None
    assert [(one.outcome, one.rollouts, one.received) for one in found.outcomes] == [("trained", 2, 2), ("stale", 1, 0)]
    assert isinstance(found.outcomes[0], NodeOutcome) and found.outcomes[0].tokens > 0
    assert [one.rollout_id for one in found.rollouts] == ["2-2", "2-1", "2-0", "1-1", "1-0"]


def test_a_nodes_checked_rollouts_are_its_newest_ones(store: Store, records: Any) -> None:
    see(store, "a")
    see(store, "b")
    count = ROLLOUTS + 2
    store.apply([*records.opened(0), records.leased(1, 0, *range(count))], now=1.0)
    store.apply([records.leased(2, 0, count, node_id="b")], now=1.0)
    checked = [CheckRecorded(rollout_id=f"1-{index}", checked=Checked.PASSED) for index in range(count - 1)]
    store.apply([*checked, CheckRecorded(rollout_id="2-12", checked=Checked.FAILED)], now=2.0)
    found = store.read(read_node_record, "a")
    assert found is not None
    assert [one.rollout_id for one in found.checked] == [f"1-{index}" for index in range(count - 2, 0, -1)]
    assert len(found.rollouts) == ROLLOUTS and found.rollouts[0].checked == Checked.NO
    assert {one.node_id for one in (*found.checked, *found.rollouts)} == {"a"}


def test_decisions_have_their_evidence_by_class(store: Store) -> None:
    see(store, "a")
    row = StandingRow(
        node_id="a", state=StandingState.PROVEN, numerics=NumericsClass("torch", "bf16", "cuda"), shown=EVIDENCE
    )
    condemned = TrustDecided(
        node_id="a",
        decision=Decision.QUARANTINED,
        reason="Not drawn.",
        rollout_id="7-1",
        evidence=EVIDENCE,
        decided_at=5.0,
    )
    pardoned = TrustDecided(node_id="a", decision=Decision.PARDONED, reason="By the operator.", decided_at=6.0)
    of_another = TrustDecided(node_id="b", decision=Decision.PARDONED, reason="By the operator.", decided_at=7.0)
    store.apply([StandingRecorded(row=row), condemned, pardoned, of_another], now=1.0)
    found = store.read(read_node_record, "a")
    assert found is not None and found.totals.precision == "bf16"
    second, first = found.decisions
    assert (second.decision, second.evidence, second.rollout_id) == ("pardoned", None, "")
    assert (first.decision, first.decided_at, first.reason, first.rollout_id) == (
        *("quarantined", 5.0, "Not drawn.", "7-1"),
    )
    assert first.evidence == found.shown and first.evidence is not None
    assert [asdict(one) for one in first.evidence.draws] == [
        {"edge": 0.001, "tokens": 1},
        {"edge": 0.05, "tokens": 1},
        {"edge": 0.2, "tokens": 0},
        {"edge": 0.5, "tokens": 0},
        {"edge": 1.0, "tokens": 0},
        {"edge": None, "tokens": 1},
    ]
    assert [one.tokens for one in first.evidence.claims] == [1, 0, 1, 1, 0, 0]
    assert abs(first.evidence.mismatch_kl - 0.2) < 1e-12
    assert first.evidence.bias is not None and abs(first.evidence.bias - 0.2 / 3) < 1e-12
