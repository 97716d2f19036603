"""How long the store keeps tokens that training no longer needs, and the reason that it gives for missing tokens."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, func, select
from sqlalchemy.event import listen, remove

from echo_hub.core.accounting.effects import RolloutsDropped, RolloutsEvaluated
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.store import keeping
from echo_hub.store.browsing import read_group, read_tokens
from echo_hub.store.keeping import Keeping, KeptTotals, read_kept_totals
from echo_hub.store.reading import read_payloads
from echo_hub.store.store import Store
from echo_hub.store.tables import kept, rollouts
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.wire.messages import DropReason


def not_kept(store: Store) -> dict[int, str | None]:
    """Return the reason why tokens are missing, by lease id."""
    with store.engine.connect() as connection:
        rows = connection.execute(select(rollouts.c.lease_id, rollouts.c.not_kept))
        return {row.lease_id: row.not_kept for row in rows}


def train(store: Store, records: Any, *, steps: int) -> None:
    for step in range(1, steps + 1):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1), now=float(step))
    store.prune(99)


def test_trained_and_pruned_rollouts_can_still_be_read(store: Store, records: Any) -> None:
    train(store, records, steps=2)
    assert store.read(read_payloads, ["1-0", "2-1"]) == []
    found = store.read(read_tokens, [(1, 0), (1, 1), (2, 1), (7, 0)])
    assert found.keys() == {(1, 0), (1, 1), (2, 1)}
    drawn, second = records.payload(2), found[1, 1]
    assert found[1, 0].completion_ids.tolist() == drawn.completion_ids.tolist()
    assert found[1, 0].behavior_logprobs.tolist() == drawn.behavior_logprobs.tolist()
    assert (second.finish_reason, second.sampling_s, second.spans) == ("stop", 0.5, ())
    assert found[1, 0].routes == b"", "copies for people have no routes"
    totals = store.read(read_kept_totals)
    assert (totals.rollouts, totals.rollouts_by_share, totals.rollouts_by_bytes) == (4, 0, 0)
    with store.engine.connect() as connection:
        assert totals.bytes == connection.scalar(select(func.sum(kept.c.size_bytes))) > 4 * 2 * 8


def test_rollouts_dropped_after_arrival_can_still_be_read(store: Store, records: Any) -> None:
    lost = [*records.opened(5), records.leased(9, 5, 0, 1), *records.received("9-0"), *records.scored("9-0")]
    store.apply(lost, now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("9-0", "9-1"), reason=DropReason.NO_ADVANTAGE)], now=2.0)
    assert store.read(read_payloads, ["9-0"]) == []
    assert store.read(read_tokens, [(9, 0), (9, 1)]).keys() == {(9, 0)}


def test_a_screened_rollout_stays_until_its_step_is_pruned(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0)[:-2], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.SCREENED)], now=2.0)
    assert [row.rollout_id for row in store.read(read_payloads, ["1-0"])] == ["1-0"]
    assert store.read(read_kept_totals) == KeptTotals()


def test_an_evaluations_tokens_are_kept_once_it_is_recorded(store: Store, records: Any) -> None:
    group_id = EvaluationGroup(policy_version=3, greedy=True, number=2).group_id
    drawn = [records.leased(4, group_id, 0, version=3), *records.received("4-0"), *records.scored("4-0")]
    store.apply([*drawn, RolloutsEvaluated(rollout_ids=("4-0",))], now=1.0)
    assert store.read(read_kept_totals).rollouts == 0
    store.record_evaluations(
        [
            Evaluation(
                policy_version=3,
                kind=EvaluationKind.GREEDY,
                num_problems=4,
                samples=1,
                num_unscored=0,
                accuracy=0.5,
                accuracy_error=0.125,
                pass_at={},
                mean_reward=0.5,
                mean_tokens=3.0,
                share_truncated=0.25,
                seconds=2.0,
                evaluated_at=9.0,
            )
        ]
    )
    assert store.read(read_payloads, ["4-0"]) == []
    assert store.read(read_tokens, [(4, 0)]).keys() == {(4, 0)}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9, 1.0])
def test_a_share_of_any_groups_in_a_row_is_kept(share: float) -> None:
    chosen = [Keeping(share=share).chooses(group_id) for group_id in range(1_000)]
    for start in range(0, 1_000, 100):
        assert sum(chosen[start : start + 100]) == pytest.approx(100 * share, abs=3)


def test_groups_beyond_the_share_are_marked_as_not_kept(store: Store, records: Any) -> None:
    store.keeping = Keeping(share=0.5)
    train(store, records, steps=8)
    gone = {lease for lease, why in not_kept(store).items() if why == "share"}
    assert {lease for lease, why in not_kept(store).items() if why is None} == set(range(1, 9)) - gone
    assert gone == {lease for lease in range(1, 9) if not store.keeping.chooses(lease - 1)} != set()
    assert store.read(read_tokens, [(lease, 0) for lease in range(1, 9)]).keys() == {
        (lease, 0) for lease in range(1, 9) if lease not in gone
    }
    totals = store.read(read_kept_totals)
    left_out = 2 * len(gone)
    assert (totals.rollouts, totals.rollouts_by_share, totals.rollouts_by_bytes) == (16 - left_out, left_out, 0)


def test_above_the_cap_the_oldest_are_removed_and_marked(store: Store, records: Any) -> None:
    train(store, records, steps=1)
    of_group = store.read(read_kept_totals).bytes
    store.keeping = Keeping(max_bytes=2 * of_group)
    train(store, records=Shifted(records), steps=4)
    assert not_kept(store) == {1: "bytes", 2: "bytes", 3: "bytes", 4: None, 5: None}
    totals = store.read(read_kept_totals)
    assert totals.bytes <= 2 * of_group
    assert (totals.rollouts, totals.rollouts_by_bytes) == (4, 6)


class Shifted:
    """Makes the same records with all numbers increased by one, for a later step."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def one_step(self, step: int, *, lease_id: int, group_id: int) -> Any:
        return self.records.one_step(step + 1, lease_id=lease_id + 1, group_id=group_id + 1)


def test_a_cap_that_was_lowered_is_met_by_and_by(store: Store, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(store, records, steps=4)
    monkeypatch.setattr(keeping, "TRIMMED_AT_ONCE", 3)
    store.keeping = Keeping(max_bytes=0)
    left = []
    for _ in range(4):
        store.prune(0)
        left.append(store.read(read_kept_totals).rollouts)
    assert left == [5, 2, 0, 0]
    assert store.read(read_kept_totals).bytes == 0 and set(not_kept(store).values()) == {"bytes"}


def test_pruning_reads_at_most_one_part_more_than_it_removes(
    store: Store, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, records, steps=8)
    of_group = store.read(read_kept_totals).bytes // 8
    monkeypatch.setattr(keeping, "TRIMMED_A_QUERY", 3)
    asked: list[int] = []

    def hear(_connection: Connection, _cursor: Any, sql: str, _given: Any, _context: Any, _many: bool) -> None:
        if sql.startswith("SELECT kept."):
            asked.append(1)

    listen(store.engine, "before_cursor_execute", hear)
    for groups, queries in ((7, 1), (5, 2), (1, 3)):  # Tokens of two, four, then eight rollouts are removed.
        store.keeping = Keeping(max_bytes=groups * of_group)
        asked.clear()
        store.prune(0)
        assert (len(asked), store.read(read_kept_totals).rollouts) == (queries, 2 * groups)
    remove(store.engine, "before_cursor_execute", hear)


def test_the_times_of_scoring_and_of_the_end_are_noted(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0", "1-1")], now=1.0)
    store.apply(records.scored("1-0"), now=2.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.STALE)], now=3.0)
    first, second = store.read(read_group, 0).rollouts  # type: ignore[union-attr]
    assert (first.scored_at, first.final_at) == (2.0, 3.0)
    assert (second.scored_at, second.final_at) == (None, 3.0)
