import errno
import stat
import sys
from pathlib import Path

import pytest

from echo_shared.errors import StorageError
from echo_shared.files.atomic import atomic_directory, disk_errors, sync, write_private


def test_private_files_are_replaced_whole_and_readable_by_their_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "dir" / "secret.json"
    write_private(file, b"one\n")
    write_private(file, b"two\n")
    assert file.read_bytes() == b"two\n"
    assert [path.name for path in file.parent.iterdir()] == ["secret.json"]
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_sync_does_not_change_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    sync(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"content"
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "nowhere")


def test_a_disks_refusal_is_reported_in_the_projects_words(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be kept") as caught, disk_errors("It cannot be kept.", tmp_path):
        (tmp_path / "nowhere" / "file").read_bytes()
    assert "nowhere" in str(caught.value) and str(tmp_path) in str(caught.value.do)
    with pytest.raises(StorageError, match="The disk is full"), disk_errors("It cannot be kept.", tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "final"
    with pytest.raises(ZeroDivisionError), atomic_directory(final) as directory:
        (directory / "file").write_text("half")
        raise ZeroDivisionError
    assert not final.exists()
    for text in ("first", "second"):
        with atomic_directory(final) as directory:
            assert list(directory.iterdir()) == []
            (directory / "file").write_text(text)
        assert (final / "file").read_text() == text
    assert list(tmp_path.iterdir()) == [final]


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(StorageError, match="could not be written"),
        atomic_directory(tmp_path / "file" / "x"),
    ):
        pass
