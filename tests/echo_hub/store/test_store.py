from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from echo_hub.store import database
from echo_hub.store.board import read_board
from echo_hub.store.database import connect, open_to_write, read_meta, write_meta
from echo_hub.store.keeping import Keeping
from echo_hub.store.reading import read_payloads
from echo_hub.store.reports import read_accounting
from echo_hub.store.store import Store
from echo_hub.store.teams import remove_team
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import StorageError
from echo_shared.records.credit import BoardQuery

WRITER = """
import sys
import numpy as np
from echo_hub.core.accounting.effects import GroupOpened, RolloutReceived, RolloutsLeased
from echo_shared.records.rollout import RolloutPayload
from echo_hub.store.store import Store
from echo_shared.wire.messages import FinishReason

payload = RolloutPayload(
    completion_ids=np.arange(64, dtype=np.int32), behavior_logprobs=np.zeros(64, np.float32),
    finish_reason=FinishReason.STOP, sampling_s=0.0,
)
store = Store.open(sys.argv[1])
for group in range(100_000):
    lease = RolloutsLeased(
        lease_id=group + 1, node_id="a", group_id=group, indices=tuple(range(8)), policy_version=0, deadline=1.0
    )
    arrived = [RolloutReceived(rollout_id=f"{group + 1}-{i}", received_at=1.0, payload=payload) for i in range(8)]
    store.apply([GroupOpened(group_id=group, seed=1), lease, *arrived], now=1.0)
    print(group, flush=True)
"""


def test_acked_records_survive_kill_9(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'echo.db'}"
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        acked = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        acked += [int(line) for line in writer.stdout]
    store = Store.open(url)
    groups = [group.group_id for group in store.read(read_snapshot).groups]
    assert groups[: len(acked)] == acked
    assert len(groups) in (len(acked), len(acked) + 1), "at most one turn more, which was not acked yet, is stored"
    assert store.read(read_accounting).in_flight == 8 * len(groups), "a turn is stored as a whole"
    ids = [f"{group + 1}-{index}" for group in groups for index in range(8)]
    assert len(store.read(read_payloads, ids)) == len(ids)
    store.close()


def test_a_reopened_store_gives_the_same_snapshot(tmp_path: Path, records: Any) -> None:
    url = f"sqlite:///{tmp_path / 'echo.db'}"
    store = Store.open(url)
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    store.apply([*records.opened(1), records.leased(2, 1, 0, 1), *records.received("2-0")], now=2.0)
    store.write(write_meta, "run_id", "abc")
    before = store.read(read_snapshot)
    store.close()
    again = Store.open(url)
    assert again.read(read_snapshot) == before
    assert again.read(read_meta) == {"run_id": "abc"}
    again.close()


def test_run_meta_is_replaced(store: Store) -> None:
    store.write(write_meta, "mode", "async")
    store.write(write_meta, "mode", "sequential")
    assert store.read(read_meta)["mode"] == "sequential"


def test_a_reader_neither_blocks_the_writer_nor_sees_half_a_turn(tmp_path: Path, records: Any) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    store.apply(records.one_step(1, lease_id=1, group_id=0), now=1.0)
    with store.engine.connect() as connection:
        from echo_hub.store.reports import read_accounting

        assert read_accounting(connection).trained == 2
        store.apply(records.one_step(2, lease_id=2, group_id=1), now=2.0)
        assert read_accounting(connection).trained == 2
    assert store.read(read_accounting).trained == 4
    store.close()


def test_a_second_process_that_writes_never_breaks_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Second processes (operators' commands) that would have to wait too long for the database must fail themselves.
    The timeout here is 1 ms.
    """
    url = f"sqlite:///{tmp_path / 'echo.db'}"
    hub = Store.open(url)
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 1)
    operator = Store.open(url)
    with open_to_write(hub.engine) as connection:
        connection.execute(text("SELECT key FROM run_meta"))
        with pytest.raises(StorageError, match="locked"):
            operator.write(write_meta, "operator", "waits")
        connection.execute(text("INSERT INTO run_meta VALUES ('hub', 'goes on')"))
    operator.write(write_meta, "operator", "has waited")
    assert hub.read(read_meta) == {"hub": "goes on", "operator": "has waited"}
    for store in (hub, operator):
        store.close()


def test_a_file_that_is_no_database_can_be_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "echo.db").write_bytes(b"this is no database, and never was" * 100)
    store = Store(connect(f"sqlite:///{tmp_path / 'echo.db'}"), Keeping())
    with pytest.raises(StorageError, match="cannot be read"):
        store.read(read_board, BoardQuery(), 1.0)
    with pytest.raises(StorageError, match="cannot be written"):
        store.write(remove_team, "x")


def test_a_command_that_raises_leaves_nothing_behind(store: Store) -> None:
    def half(connection: Connection) -> None:
        write_meta(connection, "half", "done")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write(half)
    assert "half" not in store.read(read_meta)
