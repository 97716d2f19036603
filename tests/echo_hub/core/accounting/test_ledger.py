from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    Effect,
    GroupDropped,
    GroupOpened,
    HandOver,
    RevokeLease,
    RolloutReceived,
    RolloutsDropped,
    ScoreRecorded,
    ScoreRollout,
    SendReceipts,
    SendTrained,
    StepPlanned,
    StepTrained,
)
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason
from tests.echo_hub.core.books import PAYLOAD, Books


def test_a_rollouts_whole_life_is_recorded_and_receipted() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    assert books.out.take()[:1] == [GroupOpened(group_id=0, seed=7)]
    books.receive("1-0", score=False)
    received = books.out.take()
    assert received[0] == RolloutReceived(rollout_id="1-0", received_at=5.0, payload=PAYLOAD)
    assert received[2] == ScoreRollout(rollout_id="1-0")
    books.ledger.score(books.ledger.rollouts["1-0"], 0.5)
    scored = books.out.take()
    assert scored[0] == ScoreRecorded(rollout_id="1-0", reward=0.5)
    books.receive("1-1")
    batch = books.ledger.plan(1, (0,), 6.0)
    books.out.take()
    books.ledger.train(batch, {"loss": 1.0}, 7.0)
    trained, told = books.out.take()
    assert trained == StepTrained(
        step=1, rollout_ids=("1-0", "1-1"), metrics={"loss": 1.0}, trained_at=7.0, node_ids=("a", "a")
    )
    assert told == SendTrained(rollout_ids=("1-0", "1-1"), node_ids=("a", "a"))
    assert books.ledger.groups == {} and books.ledger.rollouts == {} and len(books.ledger.waiting) == 0


def test_a_trained_step_names_rollouts_sampled_by_several_nodes() -> None:
    """Nodes that sampled a rollout together share its credit by tokens, so a trained step lists such rollouts. Rollouts
    of a single node are not listed, even with several versions.
    """
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    spans = {
        "1-0": (("a", 0, 1), ("a", 1, 1)),
        "1-1": (("b", 0, 1), ("a", 1, 1)),
    }
    for rollout_id, of_it in spans.items():
        drawn = tuple(DrawnSpan(node_id=who, policy_version=version, num_tokens=count) for who, version, count in of_it)
        rollout = books.ledger.rollouts[rollout_id]
        books.ledger.receive(rollout, replace(PAYLOAD, spans=drawn), 5.0)
        books.ledger.score(rollout, 0.5)
    batch = books.ledger.plan(1, (0,), 6.0)
    books.out.take()
    books.ledger.train(batch, {}, 7.0)
    (trained,) = [effect for effect in books.out.take() if isinstance(effect, StepTrained)]
    assert trained.drawn_by_several == ("1-1",)


def test_a_complete_group_is_handed_over_and_again_if_a_rollout_changes() -> None:
    """Complete groups go to the learner before their rewards are known, to save time later. If a rollout is replaced
    afterwards, the learner's copy is wrong, so the group is sent again.
    """
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1)
    books.receive("1-0", "1-1", score=False)
    (first,) = handed_over(books)
    assert first == HandOver(group_id=0, rollout_ids=("1-0", "1-1"))
    assert [(turn.rollout_id, turn.rollout_index, turn.payload) for turn in first.first_turns or ()] == [
        ("1-0", 0, PAYLOAD),
        ("1-1", 1, PAYLOAD),
    ], "the payloads are still in memory"
    ledger.fail(ledger.rollouts["1-1"], DropReason.INVALID, "")
    books.lease(0, 1)
    books.receive("2-1", score=False)
    (again,) = handed_over(books)
    assert again == HandOver(group_id=0, rollout_ids=("1-0", "2-1"))
    assert again.first_turns is None, "payloads of a group that was handed over are not kept"
    ledger.go_on(ledger.rollouts["1-0"], np.array([8], np.int32))
    ledger.score(ledger.rollouts["2-1"], 0.5)
    books.lease(0, 0, turn=1)
    books.receive("3-0", score=False)
    assert handed_over(books) == []
    ledger.score(ledger.rollouts["3-0"], 0.5)
    assert handed_over(books) == [HandOver(group_id=0, rollout_ids=("1-0", "3-0", "2-1"))]


def handed_over(books: Books) -> list[Effect]:
    return [effect for effect in books.out.take() if isinstance(effect, HandOver)]


def test_a_complete_group_revokes_its_other_leases() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    books.ledger.expire(books.ledger.rollouts["1-0"], 0.0)
    books.lease(0, 0, node_id="b")
    books.receive("1-0", "1-1")
    effects = books.out.take()
    assert RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.EXPIRED) in effects
    assert RevokeLease(node_id="b", lease_id=2, reason=DropReason.EXPIRED) in effects
    assert 0 in books.ledger.complete and books.nodes.held_by_node == {}


def test_a_dropped_group_takes_all_its_rollouts_along() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    books.receive("1-0")
    books.out.take()
    books.ledger.drop_group(books.ledger.groups[0], DropReason.STALE)
    assert books.kinds() == [RolloutsDropped, RolloutsDropped, GroupDropped, SendReceipts, RevokeLease]
    assert books.ledger.groups == {} and books.ledger.rollouts == {} and books.wanting == []


def test_a_plan_is_in_order_and_knows_each_groups_age() -> None:
    books = Books()
    books.complete(3, version=2)
    books.complete(5, version=1)
    books.out.take()
    books.ledger.plan(4, (3, 5), 6.0)
    (planned,) = books.out.take()
    assert planned == StepPlanned(
        step=4, group_ids=(3, 5), rollout_ids=("1-0", "1-1", "2-0", "2-1"), staleness=(1, 2), planned_at=6.0
    )
    assert len(books.ledger.waiting) == len(books.ledger.complete) == 0


def test_an_episode_continues_until_it_has_its_reward() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1, version=3)
    books.receive("1-1")
    books.receive("1-0", score=False)
    ledger.go_on(ledger.rollouts["1-0"], np.array([4, 5], np.int32))
    assert ledger.groups[0].slots[0].turn == 1 and ledger.groups[0].unleased == {0}
    (answer,) = [e for e in books.out.take() if isinstance(e, ScoreRecorded) and e.reward is None]
    assert answer.rollout_id == "1-0" and answer.observation_ids is not None
    books.lease(0, 0, version=5, turn=1)
    assert not ledger.groups[0].complete
    books.receive("2-0")
    assert ledger.groups[0].complete and ledger.groups[0].oldest_version == 3
    books.out.take()
    planned = ledger.plan(4, (0,), 6.0)
    assert planned.rollout_ids == ("1-0", "2-0", "1-1"), "turns are in order"
    ledger.train(planned, {}, 7.0)
    assert ledger.rollouts == {}


def test_another_lease_of_an_answered_turn_is_useless() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1)
    ledger.expire(ledger.rollouts["1-0"], 0.0)
    books.lease(0, 0, node_id="b")
    books.receive("1-0", score=False)
    books.out.take()
    ledger.go_on(ledger.rollouts["1-0"], np.array([4], np.int32))
    assert RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.EXPIRED) in books.out.take()
    assert ledger.groups[0].unleased == {0} and ledger.groups[0].slots[0].failed_on == ()
    assert books.nodes.held_by_node == {"a": 1}


def test_another_lease_of_an_answered_later_turn_is_revoked() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1)
    books.receive("1-0", score=False)
    ledger.go_on(ledger.rollouts["1-0"], np.array([4], np.int32))
    books.lease(0, 0, turn=1)
    ledger.expire(ledger.rollouts["2-0"], 0.0)
    books.lease(0, 0, node_id="b", turn=1)
    books.receive("2-0", score=False)
    books.out.take()
    ledger.go_on(ledger.rollouts["2-0"], np.array([4], np.int32))
    assert RevokeLease(node_id="b", lease_id=3, reason=DropReason.EXPIRED) in books.out.take()


def test_a_groups_tokens_count_its_received_rollouts() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1)
    books.receive("1-0", score=False)
    ledger.go_on(ledger.rollouts["1-0"], np.array([4], np.int32))
    books.lease(0, 0, turn=1)
    books.receive("1-1", "2-0")
    of_one = len(PAYLOAD.completion_ids)
    assert ledger.groups[0].num_tokens == 3 * of_one
    ledger.drop([ledger.rollouts["2-0"]], DropReason.INVALID)
    assert ledger.groups[0].num_tokens == 2 * of_one


def test_a_failed_turn_is_drawn_again_and_the_earlier_ones_stay() -> None:
    books = Books()
    ledger = books.ledger
    books.open(0)
    books.lease(0, 0, 1)
    books.receive("1-0", score=False)
    ledger.go_on(ledger.rollouts["1-0"], np.array([4], np.int32))
    books.lease(0, 0, turn=1)
    books.receive("2-0", score=False)
    ledger.drop([ledger.rollouts["2-0"]], DropReason.SCORER_FAILED)
    assert ledger.groups[0].slots[0].turn == 1 and ledger.groups[0].unleased == {0}
    books.lease(0, 0, turn=1)
    books.receive("3-0", score=False)
    ledger.drop_group(ledger.groups[0], DropReason.STALE)
    dropped = [effect for effect in books.out.take() if isinstance(effect, RolloutsDropped)]
    assert [(effect.reason, len(effect.rollout_ids)) for effect in dropped] == [
        (DropReason.SCORER_FAILED, 1),
        (DropReason.STALE, 2),
        (DropReason.STALE, 1),
    ]
    assert ledger.rollouts == {} and books.nodes.held_by_node == {}


def test_groups_with_something_of_an_old_version_are_reported_once() -> None:
    books = Books()
    for group_id in range(4):
        books.open(group_id)
    books.lease(2, 0, 1, version=1)
    books.lease(0, 0, version=0)
    books.lease(0, 1, version=2)
    books.lease(1, 0, 1, version=0)
    books.ledger.drop_group(books.ledger.groups[1], DropReason.STALE)
    assert [group.group_id for group in books.ledger.waiting_from_before(2)] == [0, 2]
    assert books.ledger.waiting_from_before(2) == []
    assert [group.group_id for group in books.ledger.waiting_from_before(3)] == [0]


def test_a_group_is_as_old_as_its_oldest_received_rollout() -> None:
    books = Books()
    books.open(0)
    group = books.ledger.groups[0]
    books.lease(0, 0, version=3)
    books.lease(0, 1, version=5)
    assert group.oldest_version is None
    books.receive("2-1")
    assert group.oldest_version == 5
    books.receive("1-0", score=False)
    assert group.oldest_version == 3
    books.ledger.fail(books.ledger.rollouts["1-0"], DropReason.INVALID, "why")
    assert group.oldest_version == 5


def test_a_late_rollout_may_be_leased_to_another_node_and_still_counts() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    books.ledger.mark_late(books.ledger.rollouts["1-0"], 9.0, is_slow=True)
    assert books.ledger.groups[0].unleased == {0} and books.nodes.held_by_node == {"a": 2}
    assert books.ledger.groups[0].slots[0].failed_on == ("a",) and books.ledger.num_under_way == 1
    books.ledger.expire(books.ledger.rollouts["1-0"], 9.0)
    books.ledger.expire(books.ledger.rollouts["1-1"], 9.0)
    assert books.ledger.num_under_way == 0
    books.receive("1-0", score=False)
    assert books.ledger.groups[0].unleased == {1} and books.ledger.num_under_way == 0


def test_a_node_delays_others_until_it_holds_no_late_rollout() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    node = books.nodes.get("a")
    assert node is not None
    for index, now in ((0, 9.0), (1, 11.0)):
        books.ledger.mark_late(books.ledger.rollouts[f"1-{index}"], now, is_slow=True)
    books.receive("1-0", score=False)
    assert node.late_since == 9.0
    books.ledger.revoke([books.ledger.rollouts["1-1"]], DropReason.REVOKED)
    assert (node.late_since, node.num_late) == (None, 0)


def test_the_rollouts_that_a_node_holds_are_listed() -> None:
    books = Books()
    books.open(0)
    books.lease(0, 0, 1)
    assert [rollout.rollout_id for rollout in books.ledger.held_by("a")] == ["1-0", "1-1"]
    books.receive("1-0", "1-1")
    assert books.ledger.held_by("a") == books.ledger.held_by("stranger") == []


def test_complete_groups_without_an_advantage_are_known() -> None:
    books = Books()
    books.complete(3)
    assert 3 in books.ledger.flat
    books.ledger.plan(1, (3,), 6.0)
    assert len(books.ledger.flat) == 0


@pytest.mark.parametrize(("discount", "flat"), [(None, [0]), (1.0, [])])
def test_with_credit_by_turn_a_group_of_equal_rewards_may_have_an_advantage(
    discount: float | None, flat: list[int]
) -> None:
    books = Books(discount=discount)
    books.open(0)
    books.lease(0, 0, 1)
    for name, earned in (("1-0", 0.25), ("1-1", -0.25)):
        books.receive(name, score=False)
        books.ledger.go_on(books.ledger.rollouts[name], np.array([4], np.int32), turn_reward=earned)
    answered = [record for record in books.out.take() if isinstance(record, ScoreRecorded)]
    assert [record.turn_reward for record in answered] == [0.25, -0.25]
    for index in (0, 1):
        books.lease(0, index, turn=1)
        books.receive(f"{2 + index}-{index}")
    assert books.ledger.groups[0].complete and list(books.ledger.flat) == flat


def test_a_missing_rollout_may_be_as_long_as_any_completion() -> None:
    """Overdue rollouts have an unknown length. It is taken as that of the longest completions: with the prompt's usual
    length, the node would seem far too slow.
    """
    books = Books()
    books.open(0)
    books.lease(0, 0)
    lengths = books.ledger.lengths
    for _ in range(100):
        lengths.seen(None, 1_000)
    rollout = books.ledger.rollouts["1-0"]
    rollout.expected_tokens = 10.0
    books.ledger.note_missing(rollout, rollout.leased_at + 50.0)
    node = books.nodes.get("a")
    assert node is not None and node.pace.token_s == pytest.approx(2 * 50.0 / 1_000)
