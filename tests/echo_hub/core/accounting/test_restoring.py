from __future__ import annotations

import pytest

from echo_hub.core.accounting.restoring import restore_failure, restore_rollout
from echo_hub.core.accounting.snapshot import GroupRow, UnfinishedRollout
from echo_shared.wire.messages import ReceiptState
from tests.echo_hub.core.books import Books


@pytest.mark.parametrize("state", [ReceiptState.LEASED, ReceiptState.RECEIVED, ReceiptState.SCORED])
def test_a_restored_rollout_keeps_its_place(state: ReceiptState) -> None:
    books = Books()
    books.training.restore([GroupRow(group_id=0, seed=7)])
    for index in range(2):
        restore_rollout(
            books.ledger,
            UnfinishedRollout(
                rollout_id=f"4-{index}",
                lease_id=4,
                node_id="a",
                group_id=0,
                index=index,
                policy_version=3,
                deadline=9.0,
                state=state,
                reward=0.5 if state is ReceiptState.SCORED else None,
            ),
            4.0,
        )
    assert books.out.take() == []
    assert (0 in books.ledger.complete) is (state is ReceiptState.SCORED)
    assert books.nodes.held_by_node == ({"a": 2} if state is ReceiptState.LEASED else {})
    assert 0 not in books.wanting


def test_a_restored_episode_is_at_its_turn() -> None:
    books = Books()
    books.training.restore([GroupRow(group_id=0, seed=7)])
    for lease_id, turn, state, reward in (
        (1, 0, ReceiptState.SCORED, None),
        (2, 1, ReceiptState.SCORED, None),
        (3, 2, ReceiptState.SCORED, 0.5),
    ):
        restore_rollout(
            books.ledger,
            UnfinishedRollout(
                rollout_id=f"{lease_id}-0",
                lease_id=lease_id,
                node_id="a",
                group_id=0,
                index=0,
                turn=turn,
                policy_version=3,
                deadline=9.0,
                state=state,
                num_tokens=4,
                reward=reward,
                turn_reward=0.0 if turn == 2 else 0.25,
            ),
            4.0,
        )
        assert books.ledger.groups[0].slots[0].turn == min(turn + 1, 2)
    group = books.ledger.groups[0]
    assert (group.unleased, group.num_ended, group.num_tokens) == ({1}, 1, 12)
    assert [turn.turn_reward for turn in group.slots[0].turns] == [0.25, 0.25]


def test_a_turn_that_the_scorer_failed_on_is_drawn_with_another_seed_after_a_restart_too() -> None:
    books = Books()
    books.training.restore([GroupRow(group_id=0, seed=7)])
    restore_failure(books.ledger, 0, 1, 0)
    group = books.ledger.groups[0]
    assert [slot.scorer_failures for slot in group.slots] == [0, 1]
    assert not group.is_plain and books.wanting == [0]
