from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.run.directory import RunDirectory
from echo_hub.store.beginnings import LINEAGE, Beginning
from echo_hub.store.store import Store
from echo_shared.errors import StorageError


def test_books_begin_with_what_the_run_was_given_once(tmp_path: Path) -> None:
    store = Store.open(RunDirectory(tmp_path).database_url)
    empty = store.snapshot()
    assert (empty.trained_steps, empty.published_version, empty.next_group_id) == (0, 0, 0)
    store.begin_at(Beginning(policy_version=40, group_id=320), "{}", 5.0)
    begun = store.snapshot()
    assert (begun.trained_steps, begun.published_version, begun.next_group_id) == (40, 40, 320)
    assert store.run_meta()[LINEAGE] == "{}"
    with pytest.raises(StorageError):
        store.begin_at(Beginning(policy_version=41), "{}", 6.0)
    assert store.snapshot() == begun
    store.close()
