from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.run.directory import RunDirectory
from echo_hub.store.beginnings import LINEAGE, Beginning, begin_at
from echo_hub.store.database import read_meta
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.errors import StorageError


def test_a_new_database_starts_with_the_runs_initial_values_once(tmp_path: Path) -> None:
    store = Store.open(RunDirectory(tmp_path).database_url)
    empty = store.read(read_snapshot)
    assert (empty.trained_steps, empty.published_version, empty.next_group_id) == (0, 0, 0)
    store.write(begin_at, Beginning(policy_version=40, group_id=320), "{}", 5.0)
    begun = store.read(read_snapshot)
    assert (begun.trained_steps, begun.published_version, begun.next_group_id) == (40, 40, 320)
    assert store.read(read_meta)[LINEAGE] == "{}"
    with pytest.raises(StorageError):
        store.write(begin_at, Beginning(policy_version=41), "{}", 6.0)
    assert store.read(read_snapshot) == begun
    store.close()
