from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, null, select

from echo_hub.core.accounting.effects import (
    RECORDS,
    GroupDropped,
    RolloutsDropped,
    RolloutsEvaluated,
    ScoreRecorded,
    StepTrained,
    VersionRecorded,
)
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store.browsing import NEWEST, find_rollouts, read_batch_rewards
from echo_hub.store.bulk import key_of
from echo_hub.store.database import open_to_read
from echo_hub.store.reading import read_batch, read_evaluated, read_groups, read_payloads, read_receipts, read_turns
from echo_hub.store.reports import read_accounting, read_steps
from echo_hub.store.store import Store
from echo_hub.store.tables import payloads
from echo_hub.store.unfinished import read_snapshot
from echo_hub.store.writing import WRITERS
from echo_shared.errors import LocalProtocolError, StorageError
from echo_shared.records.rollout import DrawnSpan, RolloutFilter
from echo_shared.records.run import Accounting, Evaluation, EvaluationKind
from echo_shared.wire.messages import DropReason, FinishReason, ReceiptState


def test_key_of_a_rollout() -> None:
    assert key_of("12-3") == (12, 3)


def test_one_turn_may_hold_a_rollouts_whole_life(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=5, group_id=0), now=1.0)
    assert store.read(read_accounting) == Accounting(leased=2, trained=2)
    assert store.read(read_receipts, "a", ["5-1"])[0].state is ReceiptState.TRAINED


def test_records_of_one_kind_may_be_many(store: Store, records: Any) -> None:
    leases = [records.leased(lease, lease, *range(8)) for lease in range(64)]
    store.apply([*records.opened(*range(64)), *leases], now=1.0)
    ids = [f"{lease}-{index}" for lease in range(64) for index in range(8)]
    store.apply(records.received(*ids), now=2.0)
    assert store.read(read_accounting) == Accounting(leased=512, in_flight=512)
    assert [row.rollout_id for row in store.read(read_payloads, ids)] == ids


def test_a_batch_is_read_back_in_order_and_unchanged(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), records.leased(1, 0, 0, 1), records.leased(2, 1, 1, version=3)], now=1.0)
    store.apply([records.leased(3, 1, 0, node_id="b", version=4)], now=1.0)
    ids = ("1-0", "1-1", "3-0", "2-1")
    store.apply([*records.received(*ids), *records.scored(*ids), records.planned(1, (0, 1), ids)], now=2.0)
    first, second = store.read(read_batch, 1)
    assert (first.group_id, first.seed, second.group_id, second.seed) == (0, 2**64 - 1, 1, 2**64 - 2)
    episodes = (*first.episodes, *second.episodes)
    assert [[turn.rollout_id for turn in episode.turns] for episode in episodes] == [[each] for each in ids]
    (last,) = second.episodes[1].turns
    drawn = last.payload
    assert (drawn.spans, second.episodes[1].reward) == (
        (DrawnSpan(node_id="a", policy_version=3, num_tokens=5),),
        3.0,
    )
    assert drawn.finish_reason is FinishReason.STOP and len(drawn.observation_ids) == 0
    assert drawn.completion_ids.dtype == np.int32 and drawn.completion_ids.tolist() == [300, 301, 302, 303, 304]
    assert drawn.behavior_logprobs.dtype == np.float32 and drawn.behavior_logprobs[-1] == -0.625


def test_a_screened_group_stays_in_its_steps_batch(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), records.leased(1, 0, 0, 1), records.leased(2, 1, 0, 1)], now=1.0)
    ids = ("1-0", "1-1", "2-0", "2-1")
    store.apply([*records.received(*ids), *records.scored(*ids), records.planned(1, (0, 1), ids)], now=2.0)
    before = list(map(held_of, store.read(read_batch, 1)))
    trained = StepTrained(step=1, rollout_ids=(), metrics={}, trained_at=3.0)
    dropped = [RolloutsDropped(rollout_ids=ids, reason=DropReason.SCREENED)]
    store.apply([trained, *dropped, GroupDropped(group_id=0, reason=DropReason.SCREENED)], now=3.0)
    assert list(map(held_of, store.read(read_batch, 1))) == before, (
        "a learner with an older checkpoint repeats the step"
    )
    assert store.read(read_accounting) == Accounting(leased=4, dropped={"screened": 4})
    assert store.read(read_snapshot).replayable == {1}
    store.prune(1)
    assert store.read(read_payloads, ids) == []


def test_each_turn_knows_its_seed_and_index(store: Store, records: Any) -> None:
    lost = RolloutsDropped(rollout_ids=("1-1",), reason=DropReason.SCORER_FAILED)
    store.apply([*records.opened(3), records.leased(1, 3, 0, 1)], now=1.0)
    store.apply([*records.received("1-0", "1-1"), lost], now=2.0)
    store.apply([records.leased(2, 3, 1), *records.received("2-1"), *records.scored("1-0", "2-1")], now=3.0)
    (group,) = store.read(read_groups, {3: ("1-0", "2-1")})
    first, again = (episode.turns[0] for episode in group.episodes)
    assert (first.seed, first.index) == (group.seed, 0)
    assert (again.seed, again.index) == (turn_seed(group.seed, 0, 1), 1), "the scorer failed on its first draw"


def test_spans_are_stored_only_if_they_differ_from_the_lease(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(4, 0, 0, 1, node_id="b", version=3)], now=1.0)
    spans = (
        DrawnSpan(node_id="a", policy_version=3, num_tokens=2),
        DrawnSpan(node_id="b", policy_version=3, num_tokens=1),
    )
    first, second = records.received("4-0", "4-1")
    two = replace(second.payload, spans=spans)
    store.apply([first, replace(second, payload=two)], now=2.0)
    leased = (DrawnSpan(node_id="b", policy_version=3, num_tokens=len(first.payload.completion_ids)),)
    assert [row.payload.spans for row in store.read(read_payloads, ["4-0", "4-1"])] == [leased, spans]
    with open_to_read(store.engine) as connection:
        stored = connection.execute(select(payloads.c.index, payloads.c.spans).order_by(payloads.c.index)).all()
        assert [row.spans for row in stored] == [None, [["a", 3, 2], ["b", 3, 1]]]
        assert connection.scalar(select(func.count()).where(payloads.c.spans.is_(null()))) == 1


def held_of(group: Any) -> tuple[int, int, list[tuple[str, bytes, float]]]:
    turns = [
        (turn.rollout_id, turn.payload.completion_ids.tobytes(), e.reward) for e in group.episodes for turn in e.turns
    ]
    return group.group_id, group.seed, turns


def test_groups_can_be_read_before_they_are_planned(store: Store, records: Any) -> None:
    leases = [records.leased(lease, group, 0, 1) for lease, group in ((1, 0), (2, 1), (3, 2))]
    store.apply([*records.opened(0, 1, 2), *leases], now=1.0)
    ids = {group: (f"{group + 1}-0", f"{group + 1}-1") for group in range(3)}
    every = [name for names in ids.values() for name in names]
    store.apply(records.received(*every), now=2.0)
    unscored = store.read(read_groups, ids)
    assert [group.group_id for group in unscored] == [0, 1, 2]
    assert {episode.reward for group in unscored for episode in group.episodes} == {None}
    store.apply(records.scored(*every), now=2.0)
    store.apply([RolloutsDropped(rollout_ids=("2-1",), reason=DropReason.STALE)], now=3.0)
    ahead = store.read(read_groups, ids)
    assert [group.group_id for group in ahead] == [0, 2], "a rollout dropped meanwhile is left out, with its group"
    assert store.read(read_groups, {}) == []
    store.apply([records.planned(1, (0, 2), (*ids[0], *ids[2]))], now=4.0)
    assert list(map(held_of, store.read(read_batch, 1))) == list(map(held_of, ahead))


def test_a_batch_and_a_new_coordinator_are_told_by_which_versions_a_rollout_was_drawn(
    store: Store, records: Any
) -> None:
    store.apply([*records.opened(0), records.leased(4, 0, 0, 1, node_id="b", version=5)], now=1.0)
    spans = (
        DrawnSpan(node_id="a", policy_version=4, num_tokens=2),
        DrawnSpan(node_id="b", policy_version=6, num_tokens=1),
    )
    (first,) = records.received("4-0")
    store.apply([replace(first, payload=replace(first.payload, spans=spans)), *records.received("4-1")], now=2.0)
    assert [(row.policy_version, row.oldest_version) for row in store.read(read_snapshot).rollouts] == [
        (5, 4),
        (5, None),
    ]
    store.apply([*records.scored("4-0", "4-1"), records.planned(1, (0,), ("4-0", "4-1"))], now=3.0)
    (group,) = store.read(read_batch, 1)
    assert [[span.policy_version for span in each.turns[0].payload.spans] for each in group.episodes] == [[4, 6], [5]]
    assert group.episodes[0].turns[0].payload.spans == spans


def test_reward_components_and_their_step_means_are_stored(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1, 2), *records.received("1-0", "1-1", "1-2")], now=1.0)
    told = [{"score": 1.0, "format": 0.5}, {"score": 0.0}, None]
    scores = [
        ScoreRecorded(rollout_id=f"1-{number}", reward=0.5, components=components)
        for number, components in enumerate(told)
    ]
    ids = ("1-0", "1-1", "1-2")
    store.apply([*scores, records.planned(1, (0,), ids)], now=2.0)
    store.apply([StepTrained(step=1, rollout_ids=ids, metrics={}, trained_at=5.0)], now=5.0)
    found = store.read(find_rollouts, RolloutFilter(), NEWEST, 9).rollouts
    assert [each.components for each in sorted(found, key=lambda each: each.rollout_id)] == told
    (step,) = store.read(read_steps)
    assert step.components == {"score": 0.5, "format": 0.5}


def test_an_episodes_turns_are_read_with_the_texts_between_them(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    answer = ScoreRecorded(rollout_id="1-0", reward=None, observation_ids=np.array([8, 9], np.int32), turn_reward=-0.25)
    store.apply([answer, *records.scored("1-1")], now=2.0)
    store.apply([records.leased(2, 0, 0, turn=1, version=1), *records.received("2-0")], now=3.0)
    assert {row.rollout_id: row.turn_reward for row in store.read(read_snapshot).rollouts} == {
        "1-0": -0.25,
        "1-1": 0,
        "2-0": 0,
    }
    assert store.read(read_turns, {(0, 1), (7, 7)}) == {}
    ((episode, (turn,)),) = store.read(read_turns, {(0, 0), (0, 1)}).items()
    assert (episode, turn.completion_ids.tolist(), turn.observation_ids.tolist()) == ((0, 0), [0, 1], [8, 9])
    earlier = {row.rollout_id: row.earlier_turns for row in store.read(read_payloads, ["1-1", "2-0"])}
    assert [len(turns) for turns in earlier.values()] == [0, 1]
    assert earlier["2-0"][0].observation_ids.tolist() == [8, 9]
    ids = ("1-0", "2-0", "1-1")
    store.apply([ScoreRecorded(rollout_id="2-0", reward=1.0), records.planned(1, (0,), ids)], now=4.0)
    (group,) = store.read(read_batch, 1)
    assert [[turn.rollout_id for turn in each.turns] for each in group.episodes] == [["1-0", "2-0"], ["1-1"]]
    assert [turn.payload.observation_ids.tolist() for turn in group.episodes[0].turns] == [[8, 9], []]
    assert [turn.turn_reward for turn in group.episodes[0].turns] == [-0.25, 0.0]
    assert [(end.index, end.reward, end.turn_rewards) for end in store.read(read_batch_rewards, 1)] == [
        (0, 1.0, (-0.25,)),
        (1, 0.0, ()),
    ]
    assert [each.reward for each in group.episodes] == [1.0, 0.0]
    store.apply([StepTrained(step=1, rollout_ids=ids, metrics={}, trained_at=5.0)], now=5.0)
    (step,) = store.read(read_steps)
    assert (step.num_rollouts, step.num_tokens, step.mean_reward) == (3, 7, 0.5), "the mean reward is over episodes"


@pytest.mark.parametrize("final", ["trained", "dropped"])
def test_a_final_state_never_changes_and_a_turn_is_all_or_nothing(store: Store, records: Any, final: str) -> None:
    if final == "trained":
        store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    else:
        store.apply([*records.opened(0), records.leased(1, 0, 0, 1)], now=1.0)
        store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.EXPIRED)], now=1.0)
    before = store.read(read_accounting)
    for late in (
        records.received("1-0"),
        records.scored("1-0"),
        [RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.INVALID)],
        [RolloutsDropped(rollout_ids=("9-9",), reason=DropReason.INVALID)],
        [StepTrained(step=1, rollout_ids=("1-0",), metrics={}, trained_at=1.0)],
    ):
        with pytest.raises(LocalProtocolError, match="no record of this turn was written"):
            store.apply([*records.opened(7), *late], now=2.0)
    assert store.read(read_accounting) == before
    assert store.read(read_snapshot).next_group_id == 1


def test_a_step_that_was_not_planned_cannot_be_trained(store: Store, records: Any) -> None:
    with pytest.raises(LocalProtocolError, match="never planned"):
        store.apply([StepTrained(step=3, rollout_ids=(), metrics={}, trained_at=1.0)], now=1.0)


def test_a_dropped_rollout_keeps_its_receipt_and_loses_its_tokens(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.INVALID, detail="not drawn")], now=2.0)
    assert [row.rollout_id for row in store.read(read_payloads, ["1-0", "1-1"])] == ["1-1"]
    receipt = store.read(read_receipts, "a", ["1-0"])[0]
    assert (receipt.state, receipt.drop_reason) == (ReceiptState.DROPPED, DropReason.INVALID)


def test_a_dropped_group_is_not_taken_up_again(store: Store, records: Any) -> None:
    store.apply([*records.opened(0, 1), GroupDropped(group_id=0, reason=DropReason.STALE)], now=1.0)
    assert [group.group_id for group in store.read(read_snapshot).groups] == [1]
    assert store.read(read_snapshot).next_group_id == 2


def test_a_version_that_is_published_twice_keeps_its_first_time(store: Store) -> None:
    store.apply([VersionRecorded(policy_version=3, published_at=1.0)], now=1.0)
    store.apply([VersionRecorded(policy_version=3, published_at=2.0)], now=2.0)
    assert [version.published_at for version in store.versions_history(newest=9)] == [1.0]


def test_versions_may_be_as_large_as_messages_allow(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, version=2**31)], now=1.0)
    store.apply([VersionRecorded(policy_version=2**31, published_at=1.0)], now=1.0)
    assert store.read(read_snapshot).published_version == store.read(read_snapshot).rollouts[0].policy_version == 2**31


def test_pruning_deletes_only_tokens(store: Store, records: Any) -> None:
    for step in (1, 2, 3):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=1.0)
    store.prune(2)
    store.prune(2)
    assert store.read(read_snapshot).replayable == {3}
    assert store.read(read_accounting).trained == 6
    assert len(store.read(read_batch, 3)) == 1
    for step, said in ((2, "pruned"), (4, "never planned")):
        with pytest.raises(StorageError, match=f"(?s)not in the store.*{said}"):
            store.read(read_batch, step)


def evaluation(version: int) -> Evaluation:
    figures = dict.fromkeys(("accuracy", "accuracy_error", "mean_reward", "mean_tokens", "share_truncated"), 0.5)
    return Evaluation(
        policy_version=version,
        kind=EvaluationKind.GREEDY,
        num_problems=1,
        samples=1,
        num_unscored=0,
        pass_at={},
        seconds=1.0,
        evaluated_at=2.0,
        **figures,
    )


def test_an_evaluations_episodes_are_kept_until_its_result_is_recorded(store: Store, records: Any) -> None:
    greedy, sampled = (EvaluationGroup(policy_version=3, greedy=greedy, number=7) for greedy in (True, False))
    store.apply([*records.opened(0), records.leased(1, greedy.group_id, 0, version=3)], now=5.0)
    store.apply([records.leased(2, sampled.group_id, 0, 1, 2, version=3)], now=6.0)
    store.apply([*records.received("1-0", "2-0", "2-1"), ScoreRecorded(rollout_id="1-0", reward=1.0)], now=7.0)
    store.apply([RolloutsEvaluated(rollout_ids=("1-0",))], now=7.0)
    answered = ScoreRecorded(rollout_id="2-0", reward=None, observation_ids=np.array([4], np.int32))
    store.apply([answered, ScoreRecorded(rollout_id="2-1", reward=None)], now=7.0)
    store.apply([RolloutsEvaluated(rollout_ids=("2-1",))], now=7.0)
    store.apply([records.leased(3, sampled.group_id, 0, version=3, turn=1), *records.received("3-0")], now=8.0)
    ended = [ScoreRecorded(rollout_id="3-0", reward=0.5), RolloutsEvaluated(rollout_ids=("2-0", "3-0"))]
    store.apply(ended, now=9.0)
    assert [(one.about, one.num_tokens, one.reward) for one in store.read(read_evaluated, 3)] == [
        (greedy, 2, 1.0),
        (sampled, 3 + 2, 0.5),
        (sampled, 4, None),
    ]
    assert store.read(read_evaluated, 3)[1].leased_at == 6.0 and store.read(read_evaluated, 2) == []
    snapshot = store.read(read_snapshot)
    assert snapshot.evaluated == {(greedy.group_id, 0), (sampled.group_id, 0), (sampled.group_id, 1)}
    assert snapshot.next_group_id == 1 and [row.rollout_id for row in snapshot.rollouts] == ["2-2"]
    with pytest.raises(LocalProtocolError):
        store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.STALE)], now=9.0)
    store.record_evaluations([evaluation(3)])
    assert store.read(read_snapshot).evaluated == frozenset() and store.read(read_evaluated, 3) == []
    assert store.read(read_payloads, ["1-0", "2-0", "2-1", "3-0"]) == []


def test_every_record_has_a_writer() -> None:
    assert set(WRITERS) == set(RECORDS)


def test_a_record_without_a_writer_is_not_passed_over(store: Store, records: Any) -> None:
    with pytest.raises(KeyError):
        store.apply([*records.opened(0), object()], now=1.0)  # type: ignore[list-item]
    assert store.read(read_snapshot).next_group_id == 0, "nothing of the turn is written"
