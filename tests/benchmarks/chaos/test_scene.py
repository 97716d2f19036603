"""The chaos benchmark counts lost rollouts, rollouts trained twice and unbalanced accounts, here in handwritten
rows.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, insert, update

from benchmarks.chaos.scene import check, newest_evaluation, newest_step
from echo_hub.store.database import connect
from echo_hub.store.store import Store
from echo_hub.store.tables import groups, rollouts, steps


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """Write two groups of two rollouts: group 0 is trained in step 1, group 1 has a dropped and a leased rollout."""
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    with store.engine.begin() as connection:
        for group in (0, 1):
            connection.execute(insert(groups), {"group_id": group, "seed": group, "opened_at": 0.0})
        for lease, index, state, reason in (
            (1, 0, "trained", None), (1, 1, "trained", None), (2, 0, "dropped", "stale"), (2, 1, "leased", None),
        ):  # fmt: skip
            connection.execute(
                insert(rollouts),
                {
                    "lease_id": lease, "index": index, "node_id": "n", "group_id": lease - 1, "policy_version": 0,
                    "leased_at": 0.0, "deadline": 9.0, "state": state, "drop_reason": reason, "turn": 0,
                    "checked": "no", "final_at": None if state == "leased" else 1.0,
                },
            )  # fmt: skip
        connection.execute(insert(steps), _step(1, ["1-0", "1-1"]))
        connection.execute(insert(steps), {**_step(2, []), "trained_at": None})
    yield store.engine
    store.close()


def _step(step: int, rollout_ids: list[str]) -> dict[str, Any]:
    return {
        "step": step, "group_ids": [], "rollout_ids": rollout_ids, "staleness": [], "num_groups": 1, "num_rollouts": 2,
        "num_tokens": 2, "mean_reward": 0.0, "planned_at": 0.0, "trained_at": 1.0, "pruned": False,
    }  # fmt: skip


def change(engine: Engine, **values: Any) -> None:
    with engine.begin() as connection:
        connection.execute(update(rollouts).where(rollouts.c.lease_id == 2, rollouts.c.index == 1).values(**values))


def test_good_books(engine: Engine) -> None:
    found = check(engine, {"1-0", "1-1", "2-0"})
    assert asdict(found) == {
        "acknowledged": 3, "lost_after_ack": 0, "trained_twice": 0, "identity_holds": True, "quarantined": 0,
    }  # fmt: skip
    assert newest_step(engine) == 1 and newest_evaluation(engine) is None


def test_a_database_without_tables_has_nothing_to_tell(tmp_path: Path) -> None:
    engine = connect(f"sqlite:///{tmp_path / 'empty.db'}")
    assert newest_step(engine) is None and newest_evaluation(engine) is None
    engine.dispose()


def test_acknowledged_rollouts_still_leased_or_unknown_are_lost(engine: Engine) -> None:
    assert check(engine, {"1-0", "2-1", "7-0"}).lost_after_ack == 2


def test_a_member_in_two_batches_is_trained_twice(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(insert(steps), _step(3, ["1-1"]))
    assert check(engine, ()).trained_twice == 1


@pytest.mark.parametrize(
    "values",
    [
        {"state": "dropped", "final_at": 1.0},  # Invalid: no drop reason.
        {"state": "trained", "final_at": 1.0},  # Invalid: in no step.
        {"state": "received", "final_at": 1.0},  # Invalid: an end time, although `received` is not a final state.
        {"state": "dropped", "drop_reason": "stale"},  # Invalid: no end time.
    ],
)
def test_books_that_do_not_balance(engine: Engine, values: dict[str, Any]) -> None:
    change(engine, **values)
    assert not check(engine, ()).identity_holds
