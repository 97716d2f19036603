from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

from echo_hub.core.accounting.effects import (
    CheckRecorded,
    CoarseClassesRecorded,
    RolloutsDropped,
    StandingRecorded,
    TrustDecided,
)
from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative
from echo_hub.core.trust.numerics import CoarseClass, NumericsClass
from echo_hub.core.trust.standing import Decision, StandingRow, StandingState
from echo_hub.store.reading import read_receipts
from echo_hub.store.standings import read_wanted_pardons, want_pardon
from echo_hub.store.store import Store
from echo_hub.store.tables import trust, trust_log
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import Checked, DropReason

ROW = StandingRow(
    node_id="a",
    state=StandingState.PROVEN,
    numerics=NumericsClass("torch", "bf16", "cuda"),
    num_verified=7,
    sums=(0.5, 0.0, 1.25, *NOTHING[3:]),
    proof=-8.5,
    shown=Evidence.of([0.0, 0.3], [-0.5, -2.0], [0.25, 0.9], [-0.5, -1.0]),
    num_checked=9,
    num_failed=1,
    checked_at=12.5,
    reason="why",
    since=3.0,
)
STORED_ROW = replace(ROW, shown=ROW.shown.counts)
"""`ROW` without likelihood curves, which are not stored."""


def decided(decision: Decision, **values: Any) -> TrustDecided:
    return TrustDecided(**{"node_id": "a", "decision": decision, "reason": "r", "decided_at": 5.0, **values})


def test_a_standing_is_read_back_unchanged_and_the_newest_counts(store: Store) -> None:
    quarantined = StandingRow(node_id="b", state=StandingState.QUARANTINED, reason="forged")
    store.apply([StandingRecorded(row=StandingRow(node_id="a")), StandingRecorded(row=quarantined)], now=1.0)
    assert store.read(read_snapshot).standings == (StandingRow(node_id="a"), quarantined)
    store.apply([StandingRecorded(row=StandingRow(node_id="a", num_verified=1)), StandingRecorded(row=ROW)], now=2.0)
    assert store.read(read_snapshot).standings == (STORED_ROW, quarantined)


def test_the_newest_list_of_coarse_classes_is_read_back(store: Store) -> None:
    first = CoarseClass(NumericsClass("torch", "bf16", "cuda"), 0.25, 0.5)
    second = CoarseClass(NumericsClass("mlx", "q8_0", "metal"), 1.0, 2.0**0.5)
    assert store.read(read_snapshot).coarse_classes == ()
    for classes in ((first,), (first, second)):
        store.apply([CoarseClassesRecorded(classes=classes)], now=1.0)
        assert store.read(read_snapshot).coarse_classes == classes


OLD = {"draws": [9, 0, 0, 0, 0, 0], "claims": [9, 0, 0, 0, 0, 0], "mismatch_kl": 0.5, "bias": 0.1, "squares": 0.2}
"""Evidence in the form in which an earlier release stored it. That release's trust test kept other sums."""


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: OLD,
        lambda stored: {name: value for name, value in stored.items() if name != "bias"},
        lambda stored: {**stored, "draws": stored["draws"][:-1]},
        lambda stored: {**stored, "claims": [*stored["claims"], 0]},
        lambda stored: {},
    ],
)
def test_evidence_with_other_fields_is_ignored(
    store: Store, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Evidence that another release stored is ignored. Its sums are ignored too, because they belong to another trust
    test."""
    store.apply([StandingRecorded(row=ROW)], now=1.0)
    with store.engine.begin() as connection:
        stored = dict(connection.scalars(select(trust.c.shown)).one())
        connection.execute(update(trust).values(shown=change(stored)))
    assert store.read(read_snapshot).standings == (replace(ROW, shown=NO_EVIDENCE, sums=NOTHING),)


def test_sums_of_another_test_are_reset(store: Store) -> None:
    store.apply([StandingRecorded(row=ROW)], now=1.0)
    with store.engine.begin() as connection:
        connection.execute(update(trust).values(sums=[0.5] * (len(NOTHING) + 1)))
    assert store.read(read_snapshot).standings == (replace(STORED_ROW, sums=NOTHING),)


def test_a_row_without_sums_of_rewards_keeps_the_others(store: Store) -> None:
    store.apply([StandingRecorded(row=ROW)], now=1.0)
    with store.engine.begin() as connection:
        connection.execute(update(trust).values(sums=list(ROW.sums[: Alternative.SHOPPED])))
    assert store.read(read_snapshot).standings == (STORED_ROW,)


def test_restored_evidence_adds_up(store: Store) -> None:
    store.apply([StandingRecorded(row=ROW)], now=1.0)
    (found,) = store.read(read_snapshot).standings
    assert found == STORED_ROW and hash(found) == hash(STORED_ROW)
    assert found.shown + ROW.shown - found.shown == ROW.shown


def test_a_pardon_is_pending_until_it_is_decided(store: Store) -> None:
    store.apply([StandingRecorded(row=ROW)], now=1.0)
    store.write(want_pardon, ["a", "never seen"], now=2.0)
    assert store.read(read_wanted_pardons) == {"a"}
    store.apply([StandingRecorded(row=ROW)], now=3.0)
    store.apply([decided(Decision.QUARANTINED)], now=3.0)
    assert store.read(read_wanted_pardons) == {"a"}
    store.apply([decided(Decision.PARDONED)], now=4.0)
    assert store.read(read_wanted_pardons) == frozenset()


def test_every_decision_stays_in_the_log_with_its_evidence(store: Store) -> None:
    evidence = Evidence.of([0.0], [-1.0], [0.99], [-1.0])
    store.apply([decided(Decision.QUARANTINED, rollout_id="1-0", evidence=evidence)], now=1.0)
    store.apply([decided(Decision.PARDONED), decided(Decision.QUARANTINED, decided_at=9.0)], now=1.0)
    with store.engine.connect() as connection:
        rows = connection.execute(select(trust_log).order_by(trust_log.c.number)).all()
    assert [(row.decision, row.decided_at) for row in rows] == [
        ("quarantined", 5.0),
        ("pardoned", 5.0),
        ("quarantined", 9.0),
    ]
    assert {name: rows[0].evidence[name] for name in ("draws", "claims", "mismatch_kl", "bias")} == {
        "draws": [0, 0, 0, 0, 0, 1],
        "claims": [1, 0, 0, 0, 0, 0],
        "mismatch_kl": 0.0,
        "bias": 0.0,
    }
    assert (rows[0].rollout_id, rows[1].evidence) == ("1-0", None)


def test_a_receipt_has_the_check_result_in_any_rollout_state(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    store.apply([CheckRecorded(rollout_id="1-0", checked=Checked.PASSED)], now=2.0)
    store.apply([RolloutsDropped(rollout_ids=("1-1",), reason=DropReason.FORGED)], now=2.0)
    store.apply([CheckRecorded(rollout_id="1-1", checked=Checked.FAILED)], now=3.0)
    assert [receipt.checked for receipt in store.read(read_receipts, "a", ["1-0", "1-1"])] == [
        Checked.PASSED,
        Checked.FAILED,
    ]
    (row,) = store.read(read_snapshot).rollouts
    assert (row.rollout_id, row.checked, row.drawn_by) == ("1-0", Checked.PASSED, ())


def test_a_leased_rollout_knows_if_another_node_held_it_before(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), records.leased(1, 0, 0, 1), records.leased(2, 1, 0)], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1", "2-0"), reason=DropReason.RETURNED)], now=2.0)
    store.apply([records.leased(3, 0, 0, node_id="b"), records.leased(4, 0, 1), records.leased(5, 1, 1)], now=3.0)
    store.apply([records.leased(6, 1, 0, node_id="b", turn=1)], now=4.0)
    rows = {row.rollout_id: row.others_held for row in store.read(read_snapshot).rollouts}
    assert rows == {"3-0": True, "4-1": False, "5-1": False, "6-0": False}


def test_other_nodes_that_sampled_a_rollout_are_known_after_a_restart(store: Store, records: Any) -> None:
    (received,) = records.received("1-0")
    spans = tuple(DrawnSpan(node_id=node_id, policy_version=0, num_tokens=1) for node_id in ("b", "c", "b", "a"))
    received = replace(received, payload=replace(received.payload, spans=spans))
    store.apply([*records.opened(0), records.leased(1, 0, 0), received], now=1.0)
    (row,) = store.read(read_snapshot).rollouts
    assert row.drawn_by == ("b", "c")
