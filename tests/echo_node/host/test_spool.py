import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.effects import ForgetLease, RecordReceipts, SpoolLease, SpoolRollout
from echo_node.host.spool import MAX_ASKED, RESEND_BATCH, Spool
from echo_shared.errors import StorageError
from echo_shared.wire.messages import Checked, DropReason, FinishReason, Receipt, ReceiptState, Rollout, rollout_id


def rollout(lease_id: int, index: int, length: int = 3) -> Rollout:
    return Rollout(
        rollout_id=rollout_id(lease_id, index),
        lease_id=lease_id,
        group_id=1,
        index=index,
        policy_version_start=2,
        policy_version_end=2,
        completion_ids=np.arange(length, dtype=np.int32),
        behavior_logprobs=np.full(length, -0.25, np.float32),
        finish_reason=FinishReason.LENGTH,
        sampling_s=0.5,
    )


def spooled(lease_id: int, index: int) -> SpoolRollout:
    return SpoolRollout(rollout=rollout(lease_id, index))


def receipts(*items: tuple[str, ReceiptState]) -> RecordReceipts:
    made = [
        Receipt(rollout_id=name, state=state, drop_reason=DropReason.STALE if state is ReceiptState.DROPPED else None)
        for name, state in items
    ]
    return RecordReceipts(receipts=tuple(made))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "hub" / "spool.db")
    spool.open()
    spool.begin_run("run")
    yield spool
    spool.close()


def test_entries_are_listed_by_newest_lease_state_or_change(spool: Spool) -> None:
    began = time.time()
    spool.write([SpoolLease(lease_id=10, indices=(0, 1)), spooled(9, 0), spooled(9, 1), spooled(2, 0)])
    spool.write([receipts(("9-1", ReceiptState.TRAINED), ("2-0", ReceiptState.DROPPED))])
    found = spool.entries(limit=10)
    assert [(one.rollout_id, one.state, one.drop_reason) for one in found] == [
        ("10-1", "leased", None),
        ("10-0", "leased", None),
        ("9-1", "trained", None),
        ("9-0", "sent", None),
        ("2-0", "dropped", "stale"),
    ]
    assert all(began <= one.changed_at <= time.time() for one in found)
    assert [one.rollout_id for one in spool.entries(limit=2)] == ["10-1", "10-0"]
    assert [one.rollout_id for one in spool.entries(state="sent", limit=2)] == ["9-0"]
    assert spool.entries(since=time.time() + 1, limit=10) == []
    assert spool.entry("9-1") == found[2] and spool.entry("9-7") is None


def test_when_rollouts_of_older_software_changed_is_not_known(spool: Spool, tmp_path: Path) -> None:
    spool.write([spooled(1, 0)])
    spool.close()
    with sqlite3.connect(tmp_path / "hub" / "spool.db") as connection:
        connection.execute("ALTER TABLE rollouts DROP COLUMN changed_at")
    connection.close()
    spool.open()
    assert spool.entry("1-0").changed_at == 0
    spool.write([receipts(("1-0", ReceiptState.SCORED))])
    assert spool.entry("1-0").changed_at > 0


def test_a_rollout_is_stored_unchanged(spool: Spool) -> None:
    spool.write([spooled(1, 0)])
    (back,) = spool.unacked()
    assert back.completion_ids.tolist() == [0, 1, 2]
    assert back.model_dump_json(exclude={"completion_ids", "behavior_logprobs"}) == rollout(1, 0).model_dump_json(
        exclude={"completion_ids", "behavior_logprobs"}
    )


def test_leases_are_unfinished_until_spooled_or_forgotten(spool: Spool) -> None:
    spool.write([SpoolLease(lease_id=1, indices=(0, 1, 2)), SpoolLease(lease_id=2, indices=(5,))])
    spool.write([spooled(1, 1), ForgetLease(lease_id=2)])
    assert spool.unfinished() == {1: (0, 2)}
    spool.write([ForgetLease(lease_id=1)])
    assert spool.unfinished() == {}
    assert spool.unacked_ids() == ["1-1"]


def test_writing_twice_changes_nothing(spool: Spool) -> None:
    batch = [SpoolLease(lease_id=1, indices=(0,)), spooled(1, 0), receipts(("1-0", ReceiptState.SCORED))]
    spool.write(batch)
    before = spool.counts()
    spool.write(batch)
    assert spool.counts() == before
    assert before["scored"] == 1


def test_a_receipt_ends_the_resending_and_states_never_go_back(spool: Spool) -> None:
    spool.write([spooled(1, 0), spooled(1, 1), spooled(1, 2)])
    spool.write([receipts(("1-0", ReceiptState.TRAINED), ("1-1", ReceiptState.DROPPED))])
    spool.write(
        [receipts(("1-0", ReceiptState.RECEIVED), ("1-0", ReceiptState.DROPPED), ("1-1", ReceiptState.TRAINED))]
    )
    assert spool.unacked_ids() == ["1-2"]
    counts = spool.counts()
    assert (counts["sent"], counts["trained"], counts["dropped"], counts["dropped:stale"]) == (1, 1, 1, 1)


def test_an_evaluated_rollout_is_final(spool: Spool) -> None:
    spool.write([spooled(1, 0), receipts(("1-0", ReceiptState.SCORED))])
    assert spool.without_final_receipt() == ["1-0"]
    spool.write([receipts(("1-0", ReceiptState.EVALUATED))])
    spool.write([receipts(("1-0", ReceiptState.DROPPED), ("1-0", ReceiptState.SCORED))])
    assert spool.counts()["evaluated"] == 1 and spool.without_final_receipt() == []
    assert spool.begin_run("another") == 0


def test_receipts_for_unknown_rollouts_are_nothing(spool: Spool) -> None:
    spool.write([receipts(("99-9", ReceiptState.TRAINED))])
    assert set(spool.counts().values()) == {0}


def test_resending_goes_in_batches_that_lose_none(spool: Spool) -> None:
    spool.write([spooled(lease, index) for lease in range(30) for index in range(8)])
    seen: list[str] = []
    while batch := spool.unacked(seen[-1] if seen else ""):
        assert len(batch) <= RESEND_BATCH
        seen += [item.rollout_id for item in batch]
    assert sorted(seen) == sorted(spool.unacked_ids())
    assert len(set(seen)) == 240


def test_received_rollouts_without_an_end_are_listed_newest_first(spool: Spool) -> None:
    spool.write([SpoolLease(lease_id=30, indices=(0,)), *(spooled(lease, 0) for lease in (2, 3, 4, 5, 10, 20))])
    ends = {"2-0": ReceiptState.RECEIVED, "3-0": ReceiptState.TRAINED, "4-0": ReceiptState.DROPPED}
    spool.write([receipts(*ends.items(), ("5-0", ReceiptState.RECEIVED), ("10-0", ReceiptState.SCORED))])
    assert spool.without_final_receipt() == ["10-0", "5-0", "2-0"]


def test_the_list_of_rollouts_without_an_end_is_bounded(spool: Spool) -> None:
    names = [(rollout_id(lease, 0), ReceiptState.RECEIVED) for lease in range(MAX_ASKED + 10)]
    spool.write([*(spooled(lease, 0) for lease in range(MAX_ASKED + 10)), receipts(*names)])
    listed = spool.without_final_receipt()
    assert (len(listed), listed[0], listed[-1]) == (MAX_ASKED, rollout_id(MAX_ASKED + 9, 0), "10-0")


def test_another_run_starts_with_an_empty_spool(spool: Spool) -> None:
    spool.write([spooled(1, 0), spooled(1, 1), receipts(("1-1", ReceiptState.TRAINED))])
    assert spool.begin_run("run") == 0
    assert spool.begin_run("other") == 1
    assert spool.unacked_ids() == []


def test_survives_being_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        spool = Spool(tmp_path / "spool.db")
        spool.open()
        spool.begin_run("run")
        spool.write([spooled(1, 0)])
        assert spool.unacked_ids() == ["1-0"]
        spool.close()


def test_written_rollouts_survive_a_kill(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_spool import Spool, spooled, Path
spool = Spool(Path({str(tmp_path / "spool.db")!r}))
spool.open(); spool.begin_run("run"); spool.write([spooled(1, 0), spooled(1, 1)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert killed.returncode < 0, killed.stderr
    spool = Spool(tmp_path / "spool.db")
    spool.open()
    assert spool.unacked_ids() == ["1-0", "1-1"]
    spool.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes")
def test_a_full_disk_is_an_error_that_loses_nothing(spool: Spool, tmp_path: Path) -> None:
    import resource

    spool.write([spooled(1, 0)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="cannot be written") as caught:
            spool.write([SpoolRollout(rollout=rollout(2, index, length=20_000)) for index in range(8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "spool.db" in str(caught.value) and "Free some disk space" in str(caught.value)
    assert spool.unacked_ids() == ["1-0"]
    spool.write([spooled(2, index) for index in range(8)])
    assert len(spool.unacked_ids()) == 9


def test_a_file_that_is_no_spool_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spool.db").write_bytes(b"something else entirely" * 1_000)
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    with pytest.raises(StorageError, match="spool") as caught:
        Spool(tmp_path / "spool.db").open()
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)
    (connection,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


STATES = st.sampled_from(list(ReceiptState))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), STATES), max_size=12))
def test_a_rollout_is_always_in_exactly_one_state(said: list[tuple[int, ReceiptState]]) -> None:
    spool = Spool(Path(":memory:"))
    spool.open()
    spool.begin_run("run")
    spool.write([spooled(1, index) for index in range(4)])
    for index, state in said:
        spool.write([receipts((rollout_id(1, index), state))])
        counts = spool.counts()
        assert sum(count for state_name, count in counts.items() if ":" not in state_name) == 4
    spool.close()


def test_a_check_result_is_never_replaced(spool: Spool) -> None:
    spool.write([spooled(1, 0), spooled(1, 1)])
    for state, checked in (
        (ReceiptState.RECEIVED, Checked.NO),
        (ReceiptState.RECEIVED, Checked.PASSED),
        (ReceiptState.TRAINED, Checked.NO),
    ):
        spool.write([RecordReceipts(receipts=(Receipt(rollout_id="1-0", state=state, checked=checked),))])
    failed = Receipt(
        rollout_id="1-1", state=ReceiptState.DROPPED, drop_reason=DropReason.FORGED, checked=Checked.FAILED
    )
    spool.write([RecordReceipts(receipts=(failed,))])
    counts = spool.counts()
    assert (counts["trained"], counts["checked:passed"], counts["checked:failed"]) == (1, 1, 1)
    assert counts["dropped:forged"] == 1


def test_a_spool_of_older_software_is_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "spool.db"
    with sqlite3.connect(path) as old:
        old.execute(
            "CREATE TABLE rollouts (rollout_id TEXT PRIMARY KEY, lease_id INTEGER NOT NULL, idx INTEGER NOT NULL,"
            " state INTEGER NOT NULL, drop_reason TEXT, payload BLOB) WITHOUT ROWID"
        )
        old.execute("INSERT INTO rollouts VALUES ('1-0', 1, 0, 2, NULL, NULL)")
    old.close()
    spool = Spool(path)
    for _ in range(2):
        spool.open()
        spool.write([RecordReceipts(receipts=(Receipt(rollout_id="1-0", state="trained", checked="passed"),))])
        assert spool.counts()["checked:passed"] == 1
        spool.close()
