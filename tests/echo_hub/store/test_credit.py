"""Totals of credit must equal what the receipts say, in both databases."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

from echo_hub.core.accounting.effects import RolloutReceived, RolloutsDropped, RolloutsEvaluated, ScoreRecorded
from echo_hub.store.credit import RUN, kind_of, team_holder
from echo_hub.store.recent_average import average
from echo_hub.store.store import Store
from echo_hub.store.tables import credit, credit_days, credit_steps, rollouts
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason

DAY = 86_400.0


def rows(store: Store, table: Any, *order: str) -> list[dict[str, Any]]:
    with store.engine.connect() as connection:
        return [dict(row) for row in connection.execute(select(table).order_by(*order)).mappings()]


def of(store: Store, holder: str) -> dict[str, Any]:
    (row,) = [row for row in rows(store, credit) if row["holder"] == holder]
    return row


def test_trained_rollouts_count_for_the_node_and_for_the_run(store: Store, records: Any) -> None:
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=DAY)
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="b"), now=2 * DAY)
    store.apply(records.one_step(3, lease_id=3, group_id=2, node_id="a"), now=3 * DAY)
    a = of(store, "a")
    assert (a["kind"], a["rollouts"], a["tokens"], a["steps"]) == ("node", 4, 10, 2)
    assert (a["first_day"], a["last_day"], a["streak_days"], a["longest_streak"]) == (1, 3, 1, 1)
    run = of(store, RUN)
    assert (run["rollouts"], run["tokens"], run["steps"], run["streak_days"]) == (6, 15, 3, 3)
    with store.engine.connect() as connection:
        counted = connection.scalar(select(func.sum(rollouts.c.num_tokens)))
    assert counted == run["tokens"]
    assert [(row["holder"], row["day"], row["tokens"]) for row in rows(store, credit_days, "day", "holder")] == [
        (RUN, 1, 5),
        ("a", 1, 5),
        (RUN, 2, 5),
        ("b", 2, 5),
        (RUN, 3, 5),
        ("a", 3, 5),
    ]
    assert [(row["holder"], row["step"], row["rollouts"]) for row in rows(store, credit_steps, "step", "holder")] == [
        (RUN, 1, 2),
        ("a", 1, 2),
        (RUN, 2, 2),
        ("b", 2, 2),
        (RUN, 3, 2),
        ("a", 3, 2),
    ]


def test_the_average_follows_from_the_receipts(store: Store, records: Any) -> None:
    for step in range(1, 6):
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id="a"), now=step * DAY)
    with store.engine.connect() as connection:
        work = connection.execute(select(rollouts.c.num_tokens, rollouts.c.final_at)).all()
    exact = sum(tokens * 0.693147 / 7 * 2 ** ((at / DAY - 9) / 7) for tokens, at in work)
    assert average(of(store, "a")["recent"], 9 * DAY) == pytest.approx(exact, rel=1e-5)


def test_dropped_rollouts_give_no_credit(store: Store, records: Any) -> None:
    store.apply([*records.opened(0), records.leased(1, 0, 0, 1), *records.received("1-0")], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=("1-0", "1-1"), reason=DropReason.STALE)], now=1.0)
    assert rows(store, credit) == []


def test_a_token_is_credited_to_the_node_that_sampled_it(store: Store, records: Any) -> None:
    payload = records.payload(5)
    spans = tuple(DrawnSpan(node_id=node, policy_version=0, num_tokens=n) for node, n in (("b", 3), ("a", 2)))
    shared = RolloutReceived(
        rollout_id="1-0",
        received_at=1.0,
        payload=type(payload)(
            completion_ids=payload.completion_ids,
            behavior_logprobs=payload.behavior_logprobs,
            finish_reason=payload.finish_reason,
            sampling_s=0.5,
            spans=spans,
        ),
    )
    store.apply([*records.opened(2**62), records.leased(1, 2**62, 0), shared], now=1.0)
    store.apply([ScoreRecorded(rollout_id="1-0", reward=1.0), RolloutsEvaluated(rollout_ids=("1-0",))], now=1.0)
    assert [(of(store, node)["rollouts"], of(store, node)["tokens"]) for node in ("a", "b")] == [(1, 2), (0, 3)]
    assert of(store, "a")["steps"] == 0, "an evaluation is not a step"


def test_an_update_reads_no_history(store: Store, records: Any) -> None:
    """The number of statements per update must not grow with the number of earlier steps."""
    from sqlalchemy import event

    counts: list[int] = []
    event.listen(store.engine, "before_cursor_execute", lambda *_: counts.__setitem__(-1, counts[-1] + 1))
    for step in range(1, 12):
        counts.append(0)
        store.apply(records.one_step(step, lease_id=step, group_id=step - 1, node_id="a"), now=step * DAY)
    assert counts[-1] == counts[2]


def test_a_token_holder_names_its_kind() -> None:
    assert [kind_of(holder) for holder in (RUN, team_holder(3), "ab12")] == ["run", "team", "node"]
