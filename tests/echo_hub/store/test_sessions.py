from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import (
    AnswerReplaced,
    GroupDropped,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    SessionNoted,
)
from echo_hub.core.accounting.snapshot import SessionLosses
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store.reading import read_batch, read_evaluated, read_payloads, read_turns
from echo_hub.store.retired import RetiredMark, StepSpan
from echo_hub.store.retiring import read_final_keys, retire
from echo_hub.store.sessions import read_session_losses
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import DropReason, ReceiptState

MEASURED = EvaluationGroup(policy_version=0, greedy=True, number=0).group_id


def noted(group_id: int, index: int, *, attempt: int = 0, losses: int = 1, replaced: int = 0) -> SessionNoted:
    return SessionNoted(group_id=group_id, index=index, attempt=attempt, losses=losses, replaced=replaced)


def play(store: Store, records: Any, group_id: int, turns: int, *, lease: int = 1) -> None:
    """Store an episode of index 0 with this many answered turns; turn n is answered with the token 10 + n."""
    for turn in range(turns):
        name = f"{lease + turn}-0"
        store.apply([records.leased(lease + turn, group_id, 0, turn=turn), *records.received(name)], now=1.0)
        answer = ScoreRecorded(rollout_id=name, reward=None, observation_ids=np.array([10 + turn], np.int32))
        store.apply([answer], now=2.0)


def test_a_replaced_answer_is_what_later_turns_follow(store: Store, records: Any) -> None:
    store.apply(records.opened(0), now=1.0)
    play(store, records, 0, 3)
    new = AnswerReplaced(rollout_id="1-0", reward=None, observation_ids=np.array([7, 8], np.int32), turn_reward=0.5)
    lost = RolloutsDropped(rollout_ids=("3-0", "2-0"), reason=DropReason.SESSION_LOST, detail="why")
    store.apply([new, lost, noted(0, 0, replaced=1), records.leased(4, 0, 0, turn=1)], now=3.0)
    ((_, (turn,)),) = store.read(read_turns, {(0, 0)}).items()
    assert turn.observation_ids.tolist() == [7, 8]
    assert turn.behavior_logprobs.tolist() == [-0.125, -0.25], "a session may need them when it is rebuilt"
    snapshot = store.read(read_snapshot)
    assert {row.rollout_id: row.turn_reward for row in snapshot.rollouts} == {"1-0": 0.5, "4-0": 0.0}
    assert snapshot.sessions == (SessionLosses(group_id=0, index=0, attempt=0, losses=1, replaced=1),)
    assert [row.rollout_id for row in store.read(read_payloads, ["1-0", "2-0", "3-0"])] == ["1-0"]


def test_a_replaced_answer_may_end_the_episode(store: Store, records: Any) -> None:
    store.apply(records.opened(0), now=1.0)
    play(store, records, 0, 2)
    ended = AnswerReplaced(rollout_id="1-0", reward=0.25, components={"score": 0.25})
    lost = RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.SESSION_LOST)
    store.apply([ended, lost, records.planned(1, (0,), ("1-0",))], now=3.0)
    ((group),) = store.read(read_batch, 1)
    ((episode),) = group.episodes
    assert (episode.reward, len(episode.turns), len(episode.turns[0].payload.observation_ids)) == (0.25, 1, 0)
    assert store.read(read_turns, {(0, 0)}) == {}


def test_an_evaluations_episode_may_end_by_a_replaced_answer_too(store: Store, records: Any) -> None:
    play(store, records, MEASURED, 2)
    lost = RolloutsDropped(rollout_ids=("2-0",), reason=DropReason.SESSION_LOST)
    ended = RolloutsEvaluated(rollout_ids=("1-0",))
    store.apply([AnswerReplaced(rollout_id="1-0", reward=0.25), lost, ended, noted(MEASURED, 0)], now=3.0)
    assert [one.reward for one in store.read(read_evaluated, 0)] == [0.25]
    assert [row.group_id for row in store.read(read_snapshot).sessions] == [MEASURED]


@pytest.mark.parametrize("state", [ReceiptState.RECEIVED, ReceiptState.DROPPED])
def test_only_a_scored_turn_has_an_answer_to_replace(store: Store, records: Any, state: ReceiptState) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0), *records.received("1-0")], now=1.0)
    if state is ReceiptState.DROPPED:
        store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.STALE)], now=2.0)
    with pytest.raises(LocalProtocolError, match="do not fit the store"):
        store.apply([AnswerReplaced(rollout_id="1-0", reward=0.25)], now=3.0)


def test_losses_are_kept_by_episode_and_of_open_groups_alone(store: Store, records: Any) -> None:
    store.apply(records.opened(0, 1, 2), now=1.0)
    store.apply([noted(0, 1), noted(2, 0, attempt=1), noted(2, 0, attempt=2, losses=2)], now=2.0)
    store.apply([noted(0, 1, attempt=1, losses=2), GroupDropped(group_id=2, reason=DropReason.STALE)], now=3.0)
    first = SessionLosses(group_id=0, index=1, attempt=1, losses=2)
    assert store.read(read_snapshot).sessions == (first,)
    assert store.read(read_session_losses, [2, 0, 1]) == (
        first,
        SessionLosses(group_id=2, index=0, attempt=2, losses=2),
    )


def test_losses_are_deleted_with_their_rollouts(store: Store, records: Any) -> None:
    store.apply([*records.one_step(1, lease_id=1, group_id=1), noted(1, 0)], now=1.0)
    store.prune(1)
    span = StepSpan(after=RetiredMark(step=0, group=0), through=RetiredMark(step=1, group=1))
    assert retire(store, store.read(read_final_keys, span), span) == 2
    assert store.read(read_session_losses, [1]) == ()
