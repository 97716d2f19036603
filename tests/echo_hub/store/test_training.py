from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import select

from echo_hub.core.accounting.effects import GroupDropped, RolloutReceived, RolloutsDropped, StepTrained
from echo_hub.store import training
from echo_hub.store.database import open_to_read
from echo_hub.store.reading import read_payloads, read_receipts
from echo_hub.store.reports import read_accounting, read_leaderboard, read_newest_step
from echo_hub.store.store import Store
from echo_hub.store.tables import credit, credit_days, credit_steps, tallies
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import LocalProtocolError
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason, ReceiptState


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 6)
    monkeypatch.setattr(training, "CHANGED_A_STATEMENT", 2)


def books(store: Store) -> Mapping[str, list[Any]]:
    """Return all credit totals, rounded, because sums that are made in parts add numbers in another order."""
    with open_to_read(store.engine) as connection:
        return {
            table.name: sorted(
                tuple(round(value, 9) if isinstance(value, float) else value for value in row)
                for row in connection.execute(select(table))
            )
            for table in (credit, credit_days, credit_steps, tallies)
        }


@pytest.mark.usefixtures("in_parts")
def test_a_large_step_is_counted_part_by_part(store: Store, records: Any) -> None:
    store.apply(records.large_step(1, num_groups=10), now=5.0)
    assert store.read(read_newest_step) is not None and store.is_uncounted
    trained = [store.read(read_accounting).trained]
    before = store.touched.number
    store.count_trained()
    trained.append(store.read(read_accounting).trained)
    assert store.touched.since(before) == {"n0"}, "a node's rollouts are counted together"
    while store.is_uncounted:
        store.count_trained()
        trained.append(store.read(read_accounting).trained)
        assert store.read(read_accounting).balanced
    assert trained == [0, 6, 12, 18, 20]
    assert {row.node_id: (row.trained_rollouts, row.received) for row in store.read(read_leaderboard)} == {
        "n0": (10, 10),
        "n1": (10, 10),
    }


def test_counting_in_parts_equals_counting_at_once(store: Store, records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large steps are counted in parts. Results must stay equal, even with a rollout of several nodes and a dropped
    group.
    """
    ids = tuple(f"{each}-{index}" for each in range(10, 20) for index in range(2))
    spans = tuple(DrawnSpan(node_id=who, policy_version=0, num_tokens=2) for who in ("far", "n0"))
    left_out = ("17-0", "17-1")
    step = [
        replace(record, payload=replace(records.payload(4), spans=spans))
        if isinstance(record, RolloutReceived) and record.rollout_id == "14-1"
        else replace(record, rollout_ids=tuple(x for x in ids if x not in left_out), drawn_by_several=("14-1",))
        if isinstance(record, StepTrained)
        else record
        for record in records.large_step(1, num_groups=10)
    ]
    step += [
        RolloutsDropped(rollout_ids=left_out, reason=DropReason.SCREENED),
        GroupDropped(group_id=17, reason=DropReason.SCREENED),
    ]
    store.apply(step, now=5.0)
    assert not store.is_uncounted
    whole = books(store)
    shifted = Store.open("sqlite://")
    monkeypatch.setattr(training, "COUNTED_AT_ONCE", 4)
    shifted.apply(step, now=5.0)
    assert shifted.is_uncounted and books(shifted) != whole
    shifted.count_all()
    assert books(shifted) == whole
    assert ("far", 1, 0, 2) in whole["credit_steps"] and shifted.read(read_accounting).trained == 18
    shifted.close()


@pytest.mark.usefixtures("in_parts")
def test_a_start_continues_where_the_last_process_ended(store: Store, records: Any) -> None:
    store.apply(records.large_step(1, num_groups=10), now=5.0)
    store.apply(records.large_step(2, num_groups=10), now=6.0)
    store.count_trained()
    assert store.read(read_accounting).trained == 6
    beside = Store.open(store.engine.url.render_as_string(hide_password=False), beside_hub=True)
    assert beside.read(read_accounting).trained == 6, "a second process only reads"
    beside.close()
    again = Store.open(store.engine.url.render_as_string(hide_password=False))
    assert again.read(read_accounting).trained == 40 and again.read(read_accounting).balanced
    assert again.read(read_snapshot).rollouts == ()
    assert {receipt.state for receipt in again.read(read_receipts, "n1", ["11-0", "29-1"])} == {ReceiptState.TRAINED}
    again.close()


@pytest.mark.usefixtures("in_parts")
def test_tokens_stay_until_their_step_is_counted(store: Store, records: Any) -> None:
    store.apply(records.large_step(1, num_groups=10), now=5.0)
    store.prune(1)
    assert len(store.read(read_payloads, ["10-0", "19-1"])) == 2 and store.read(read_snapshot).replayable == {1}
    store.count_all()
    store.prune(1)
    assert store.read(read_payloads, ["10-0", "19-1"]) == [] and store.read(read_snapshot).replayable == frozenset()


@pytest.mark.usefixtures("in_parts")
def test_a_batch_of_which_something_is_not_scored_is_not_trained(store: Store, records: Any) -> None:
    *before, trained = records.large_step(1, num_groups=10)
    scored = next(record for record in before if record == records.scored("10-0")[0])
    store.apply([record for record in before if record is not scored], now=4.0)
    with pytest.raises(LocalProtocolError, match="19 of 20 rollouts could be trained"):
        store.apply([trained], now=5.0)
    assert store.read(read_newest_step) is None and not store.is_uncounted
    store.apply([scored, trained], now=5.0)
    store.count_all()
    assert store.read(read_accounting).trained == 20 and store.read(read_accounting).balanced


KILLED_BETWEEN_PARTS: Final = """
import os, signal, sys
from echo_hub.store import training
from echo_hub.store.store import Store
from tests.echo_hub.store.conftest import Records
training.COUNTED_AT_ONCE = 6
store = Store.open(sys.argv[1])
store.apply(Records.large_step(1, num_groups=10), now=5.0)
store.count_trained()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_between_parts_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'echo.db'}"
    killed = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_PARTS, url], check=False)
    assert killed.returncode == -signal.SIGKILL
    beside = Store.open(url, beside_hub=True)
    assert beside.read(read_accounting).trained == 6 and beside.read(read_accounting).balanced
    beside.close()
    again = Store.open(url)
    assert again.read(read_accounting).trained == 20 and again.read(read_accounting).balanced
    again.close()
