"""Losses of sessions, seen from the coordinator: two nodes, groups of two episodes that are sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    AnswerReplaced,
    CloseSession,
    RevokeLease,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    ScoreRollout,
    SendLease,
    SessionNoted,
)
from echo_hub.core.accounting.events import (
    EvaluationWanted,
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    SessionDiverged,
    SessionLost,
    SlotsChanged,
    Tick,
)
from echo_hub.core.accounting.parameters import SessionRules
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot, GroupRow, SessionLosses
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import DropReason, ReceiptState

BenchOf = Callable[..., Any]


def lost(rollout_id: str, *, is_loss: bool = True) -> SessionLost:
    if_lost = RolloutScored(rollout_id=rollout_id, reward=-1.0)
    return SessionLost(rollout_id=rollout_id, if_lost=if_lost, is_loss=is_loss, detail="died")


def diverged(rollout_id: str, turn: int, *, is_loss: bool = True, reward: float | None = None) -> SessionDiverged:
    return SessionDiverged(
        rollout_id=rollout_id,
        turn=turn,
        observation_ids=None if reward is not None else np.array([77], np.int32),
        turn_reward=0.25,
        reward=reward,
        if_lost=RolloutScored(rollout_id=rollout_id, reward=-1.0),
        is_loss=is_loss,
    )


@pytest.fixture
def run(bench: BenchOf) -> Any:
    """Return a run with one group of two episodes. The second episode has ended. The first has played two turns, and
    waits for the score of the third.
    """
    b = bench(session_rules=lambda group_id: SessionRules(), groups_per_step=1, max_staleness=0, multi_turn=True)
    b.learner()
    b.tell(SlotsChanged(slots=2))
    b.node("a", capacity=2)
    both = newest(b)
    b.tell(*(b.arrival(both, index) for index in (0, 1)))
    b.tell(RolloutScored(rollout_id="1-1", reward=1.0))
    b.tell(RolloutContinued(rollout_id="1-0", observation_ids=np.array([9], np.int32)))
    b.go_on(newest(b))
    b.deliver(newest(b), score=False)
    assert [one.rollout_id for one in b.of(ScoreRollout)] == ["3-0"]
    return b


def newest(b: Any) -> SendLease:
    return b.leases[max(b.leases)]


def dropped(b: Any) -> list[tuple[tuple[str, ...], DropReason]]:
    return [(record.rollout_ids, record.reason) for record in b.of(RolloutsDropped)]


def test_turns_behind_another_answer_are_dropped_and_the_next_turn_is_leased(run: Any) -> None:
    run.tell(diverged("3-0", 0))
    assert dropped(run) == [(("3-0", "2-0"), DropReason.SESSION_LOST)]
    (replaced,) = run.of(AnswerReplaced)
    assert (replaced.rollout_id, replaced.observation_ids.tolist(), replaced.turn_reward) == ("1-0", [77], 0.25)
    assert run.of(SessionNoted) == [SessionNoted(group_id=0, index=0, attempt=0, losses=1, replaced=1)]
    (lease,) = run.of(SendLease)
    assert (lease.turn, lease.indices) == (1, (0,))
    assert run.of(CloseSession) == [], "the rebuilt session stands at the next turn"
    receipts = [(one.rollout_id, one.state, one.drop_reason) for one in run.receipts("a")]
    assert ("2-0", ReceiptState.DROPPED, DropReason.SESSION_LOST) in receipts
    assert not run.coordinator._nodes.get("a").num_failures, "no node is at fault"


def test_another_answer_may_end_the_episode_at_an_earlier_turn(run: Any) -> None:
    run.tell(diverged("3-0", 1, reward=0.5))
    assert dropped(run) == [(("3-0",), DropReason.SESSION_LOST)]
    (replaced,) = run.of(AnswerReplaced)
    assert (replaced.rollout_id, replaced.reward, replaced.observation_ids) == ("2-0", 0.5, None)
    assert run.of(ScoreRecorded) == [], "the turn is scored already"
    assert run.of(CloseSession) == [CloseSession(group_id=0, index=0, attempt=0)]
    slot = run.coordinator._ledger.groups[0].slots[0]
    assert [turn.rollout_id for turn in slot.received] == ["1-0", "2-0"]
    assert slot.winner is not None and slot.winner.reward == 0.5


def test_a_lost_session_starts_the_episode_again_with_the_next_attempt(run: Any) -> None:
    run.tell(lost("3-0"))
    assert dropped(run) == [(("3-0", "2-0", "1-0"), DropReason.SESSION_LOST)]
    assert run.of(SessionNoted) == [SessionNoted(group_id=0, index=0, attempt=1, losses=1, replaced=0)]
    assert run.of(CloseSession) == [CloseSession(group_id=0, index=0, attempt=0)]
    (lease,) = run.of(SendLease)
    assert lease.turn == 0 and lease.seed == run.leases[1].seed, "the prompt's draws are the same: no luck by crashing"
    run.deliver(lease, score=False)
    (scoring,) = run.of(ScoreRollout)
    assert scoring.attempt == 1


@pytest.mark.parametrize("second", [lost, lambda name: diverged(name, 0)])
def test_the_second_loss_ends_the_episode_with_all_its_turns(run: Any, second: Callable[[str], Any]) -> None:
    run.tell(diverged("3-0", 1))
    run.deliver(newest(run), score=False)
    run.tell(second("4-0"))
    assert dropped(run) == []
    assert [(one.rollout_id, one.reward) for one in run.of(ScoreRecorded)] == [("4-0", -1.0)]
    turns = run.coordinator._ledger.groups[0].slots[0].received
    assert [turn.rollout_id for turn in turns] == ["1-0", "2-0", "4-0"]


def test_restarts_of_the_hub_are_no_losses(run: Any) -> None:
    for attempt in range(1, 4):
        waiting = f"{newest(run).lease_id}-0"
        run.tell(lost(waiting, is_loss=False))
        assert run.of(SessionNoted) == [SessionNoted(group_id=0, index=0, attempt=attempt, losses=0, replaced=0)]
        run.deliver(newest(run), score=False)


def test_a_session_is_closed_whenever_a_turn_that_it_may_have_got_is_dropped(run: Any) -> None:
    run.tell(RolloutRejected(rollout_id="3-0", reason=DropReason.SCORER_FAILED, detail="no"))
    assert run.of(CloseSession) == [CloseSession(group_id=0, index=0, attempt=0)]
    (lease,) = run.of(SendLease)
    assert lease.turn == 2


def test_leases_of_a_turn_that_is_behind_another_answer_are_revoked(run: Any) -> None:
    run.tell(RolloutContinued(rollout_id="3-0", observation_ids=np.array([9], np.int32)))
    lease = newest(run)
    run.node("b", capacity=1)
    run.now += 61.0
    run.tell(Tick())
    twice = newest(run)
    assert twice.node_id == "b" and (twice.turn, lease.turn) == (3, 3)
    run.tell(run.arrival(lease, 0))
    run.tell(diverged("4-0", 0))
    assert RevokeLease(node_id="b", lease_id=twice.lease_id, reason=DropReason.SESSION_LOST) in run.effects


def test_an_answer_about_a_dropped_rollout_changes_nothing(run: Any) -> None:
    run.tell(RolloutRejected(rollout_id="3-0", reason=DropReason.INVALID, detail="no"))
    assert run.tell(lost("3-0")) == [] and run.tell(diverged("3-0", 0)) == []


def test_a_divergence_at_the_asked_turn_is_an_error_of_the_host(run: Any) -> None:
    with pytest.raises(LocalProtocolError, match="does not follow"):
        run.tell(diverged("3-0", 2))


def test_a_restart_remembers_attempts_and_losses(bench: BenchOf) -> None:
    snapshot = CoordinatorSnapshot(
        next_group_id=1,
        groups=(GroupRow(group_id=0, seed=100),),
        sessions=(SessionLosses(group_id=0, index=1, attempt=2, losses=1),),
    )
    b = bench(snapshot, session_rules=lambda group_id: SessionRules(), groups_per_step=1, max_staleness=0)
    b.learner()
    b.node("a")
    (lease,) = b.of(SendLease)
    b.deliver(lease, score=False)
    assert {one.rollout_id: one.attempt for one in b.of(ScoreRollout)} == {"1-0": 0, "1-1": 2}
    b.tell(lost("1-1"))
    assert [one.reward for one in b.of(ScoreRecorded)] == [-1.0], "the second loss"


def test_a_lost_session_of_an_evaluation_starts_again_and_may_end_earlier(bench: BenchOf) -> None:
    b = bench(session_rules=lambda group_id: SessionRules(losses=9), evaluation_problems=1, trains=False)
    b.tell(SlotsChanged(slots=8), EvaluationWanted(policy_version=0))
    b.node("a", capacity=1)
    first = newest(b)
    assert first.group_id == EvaluationGroup(policy_version=0, greedy=True, number=0).group_id
    b.deliver(first, score=False)
    b.tell(lost("1-0"))
    assert dropped(b) == [(("1-0",), DropReason.SESSION_LOST)]
    b.go_on(newest(b))
    b.deliver(newest(b), score=False)
    b.tell(diverged("3-0", 0, reward=0.5))
    assert [record.rollout_ids for record in b.of(RolloutsEvaluated)] == [("2-0",)]
    assert [record.reward for record in b.of(AnswerReplaced)] == [0.5]


def test_groups_without_sessions_have_none_to_close(bench: BenchOf) -> None:
    b = bench()
    b.learner()
    b.node("a")
    b.deliver_group(0)
    assert b.of(CloseSession) == []
