"""A run's keys on a real disk: a restart keeps all keys that are still needed, and a ban makes a new one."""

from __future__ import annotations

import stat
import sys
import traceback
from pathlib import Path

import pytest

from echo_hub.run.keys import RunKeys
from echo_shared.errors import StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "run_keys.json"


def test_the_first_key_is_made_once_and_private(path: Path) -> None:
    first = RunKeys.open(path).current
    assert len(first.key) == 32
    assert RunKeys.open(path).current == first
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_barring_a_node_makes_a_new_key_and_keeps_the_old_ones(path: Path) -> None:
    keys = RunKeys.open(path)
    first = keys.current
    assert keys.bar({"a"})
    second = keys.current
    assert second.key_id == first.key_id + 1 and second.key != first.key
    assert not keys.bar(["a"]), "already barred"
    assert keys.current == second
    assert keys.bar({"a", "b"})
    third = keys.current
    assert keys.ids == {first.key_id, second.key_id, third.key_id}
    assert keys.named((third.key_id, first.key_id, second.key_id)) == (first, second, third)


def test_barring_a_readmitted_node_makes_another_key(path: Path) -> None:
    keys = RunKeys.open(path)
    keys.bar({"a", "b"})
    before = keys.current
    assert not keys.bar({"b"})
    assert keys.current == before
    assert keys.bar({"a", "b"})
    assert keys.current.key_id == before.key_id + 1


def test_a_restart_keeps_all_keys_and_bars(path: Path) -> None:
    keys = RunKeys.open(path)
    keys.bar({"a"})
    again = RunKeys.open(path)
    assert again.named(again.ids) == keys.named(keys.ids)
    assert not again.bar({"a"})
    assert again.bar({"a", "banned while the hub was down"})


def test_a_lost_file_is_replaced_by_a_key_with_another_number(path: Path) -> None:
    before = RunKeys.open(path)
    path.unlink()
    assert not RunKeys.open(path).ids & before.ids


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"keys": {}}', '{"keys": {"0": "ab"}}', '{"keys": {"-1": "%s"}}' % ("ab" * 32)]
)
def test_a_damaged_file_is_a_storage_error_and_is_not_replaced(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(StorageError, match="cannot be read"):
        RunKeys.open(path)
    assert path.read_text() == text


def test_an_error_never_shows_a_key(path: Path) -> None:
    key = RunKeys.open(path).current.key.hex()
    path.write_text(path.read_text().replace(key, key.upper() + "x"))
    with pytest.raises(StorageError) as caught:
        RunKeys.open(path)
    shown = "".join(traceback.format_exception(caught.value)).lower()
    assert "cannot be read" in shown and key[:6] not in shown


def test_keys_that_nothing_needs_are_forgotten_for_good(path: Path) -> None:
    keys = RunKeys.open(path)
    first = keys.current
    keys.bar({"a"})
    second = keys.current
    keys.bar({"a", "b"})
    keys.keep({first.key_id})
    assert keys.ids == {first.key_id, second.key_id + 1}
    keys.keep(())
    assert keys.ids == RunKeys.open(path).ids == {second.key_id + 1}
    assert first.key.hex() not in path.read_text()
    assert not RunKeys.open(path).bar({"a", "b"}), "bars are still known"


def test_a_key_that_cannot_be_written_down_is_not_used(path: Path) -> None:
    keys = RunKeys.open(path)
    before = keys.current
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the directory was")
    with pytest.raises(StorageError, match="cannot be written"):
        keys.bar({"a"})
    assert keys.current == before


def test_a_renewed_key_keeps_all_bars(path: Path) -> None:
    keys = RunKeys.open(path)
    keys.bar({"a"})
    before = keys.current
    keys.renew()
    assert keys.current.key_id == before.key_id + 1 and keys.current.key != before.key
    again = RunKeys.open(path)
    assert again.current == keys.current and not again.bar({"a"}) and before.key_id in again.ids
