"""An environment whose actions cost something gets a turn only after the turn's check."""

from __future__ import annotations

from typing import Any

import pytest

from echo_hub.core.accounting.effects import CheckRollout, RolloutsDropped, ScoreRollout
from echo_hub.core.accounting.events import CheckAbandoned, SlotsChanged, Tick
from echo_hub.core.accounting.parameters import SessionRules
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, UnfinishedRollout
from echo_hub.core.trust.settings import TrustSettings
from echo_hub.core.trust.trust import REPEAT_S
from echo_shared.wire.messages import Checked, DropReason, ReceiptState
from tests.echo_hub.core.trust.checked_run import FORGED, HONEST, arrive, join, name, proven, verdict

FIRST: dict[str, Any] = {"session_rules": lambda group_id: SessionRules(verify_first=True), "group_size": 2}


@pytest.fixture
def run(world: Any) -> Any:
    """Return a run with a proven node that has returned a rollout. Few rollouts of this node are checked."""
    b = world(proven("a"), **FIRST)
    b.learner()
    b.tell(SlotsChanged(slots=9))
    join(b, "a", capacity=1)
    assert arrive(b, b.leases[1]) == ["1-0"]
    return b


def test_a_turn_is_checked_urgently_before_the_environment_gets_it(run: Any) -> None:
    assert run.of(CheckRollout) == [CheckRollout(rollout_id="1-0", is_urgent=True)] and run.of(ScoreRollout) == []
    verdict(run, run.leases[1], HONEST)
    assert run.of(ScoreRollout) == [ScoreRollout(rollout_id="1-0")]


def test_the_environment_never_gets_a_forged_turn(run: Any) -> None:
    verdict(run, run.leases[1], FORGED)
    assert run.of(ScoreRollout) == []
    assert [record.reason for record in run.of(RolloutsDropped)][-1] is DropReason.FORGED
    assert 0 in run.coordinator._ledger.groups[0].unleased, "another node draws the turn"


def test_an_abandoned_check_is_repeated_until_it_has_a_result(run: Any) -> None:
    run.tell(CheckAbandoned(rollout_id="1-0"))
    assert run.of(ScoreRollout) == []
    run.now += REPEAT_S
    run.tell(Tick())
    assert run.of(CheckRollout) == [CheckRollout(rollout_id="1-0", is_urgent=True)]
    verdict(run, run.leases[1], HONEST)
    assert [one.rollout_id for one in run.of(ScoreRollout)] == [name(run.leases[1])]


@pytest.mark.parametrize("checked", [Checked.NO, Checked.PASSED])
def test_a_restarted_hub_checks_what_was_not_checked_before(world: Any, checked: Checked) -> None:
    received = UnfinishedRollout(
        rollout_id="1-0",
        lease_id=1,
        node_id="a",
        group_id=0,
        index=0,
        policy_version=0,
        deadline=2_000.0,
        state=ReceiptState.RECEIVED,
        reward=None,
        checked=checked,
    )
    snapshot = CoordinatorSnapshot(
        next_group_id=1, next_lease_id=2, groups=(GroupRow(group_id=0, seed=1),), rollouts=(received,)
    )
    b = world(snapshot=snapshot, **FIRST)
    is_checked = checked is Checked.PASSED
    assert len(b.of(ScoreRollout)) == is_checked and len(b.of(CheckRollout)) == (not is_checked)


def test_without_a_verifier_the_environment_gets_the_turn_at_once(world: Any) -> None:
    b = world(trust=TrustSettings(enabled=False), **FIRST)
    b.learner()
    b.tell(SlotsChanged(slots=9))
    join(b, "a", capacity=1)
    assert arrive(b, b.leases[1]) == [] and len(b.of(ScoreRollout)) == 1
