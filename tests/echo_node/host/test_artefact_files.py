import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest

from echo_node.host import artefact_files
from echo_node.host.artefact_files import (
    check_room,
    content_here,
    delete_artefact,
    delete_changed,
    headroom_bytes,
    read_marker,
    write_marker,
)
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.artefacts.manifest import Manifest
from echo_shared.errors import StorageError
from echo_shared.files.atomic import sync
from echo_shared.wire.messages import Fetched

MIB = 2**20
REPORT = Fetched(info_hash=bytes(range(20)), policy_version=3, seconds=0.5, swarm_bytes=1, web_seed_bytes=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-v000003"
    directory.mkdir()
    (directory / "a.json").write_text("{}")
    (directory / "b.safetensors").write_bytes(bytes(100))
    return directory


def manifest_of(directory: Path, kind: Literal["base", "policy"] = "policy") -> Manifest:
    return Manifest(
        kind=kind,
        run_id="run",
        name=directory.name,
        policy_version=3,
        carrier="files" if kind == "base" else "keyframe",
        key_id=1,
        info_hash="ab" * 20,
        files=describe_files(directory),
    )


def test_a_marker_has_the_manifest_and_the_fetch_report(directory: Path) -> None:
    assert read_marker(directory) is None and content_here(directory) is None
    manifest = manifest_of(directory)
    write_marker(directory, manifest, REPORT)
    verified = read_marker(directory)
    assert verified is not None and (verified.content, verified.fetched) == (manifest.content, REPORT)
    assert content_here(directory) == manifest.content[:32]
    assert sorted(path.name for path in directory.parent.iterdir()) == [directory.name, f"{directory.name}.verified"]


@pytest.mark.parametrize("change", ["longer", "touched", "gone", "marker"])
def test_files_changed_since_the_marker_do_not_count(directory: Path, change: str) -> None:
    write_marker(directory, manifest_of(directory), REPORT)
    file = directory / "b.safetensors"
    match change:
        case "longer":
            with file.open("ab") as end:
                end.write(b"!")
        case "touched":
            os.utime(file, ns=(1, 1))
        case "gone":
            file.unlink()
        case "marker":
            directory.with_name(f"{directory.name}.verified").write_bytes(b'{"content": \xff}')
    assert read_marker(directory) is None


def test_files_that_never_reached_the_disk_fail_the_next_hash(directory: Path) -> None:
    write_marker(directory, manifest_of(directory), REPORT)
    verified = read_marker(directory)
    assert verified is not None and read_marker(directory, hash_again=True) == verified
    file = directory / "b.safetensors"
    times = file.stat()
    file.write_bytes(bytes(99) + b"!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert read_marker(directory) == verified and read_marker(directory, hash_again=True) is None


def test_only_files_verified_before_are_deleted_after_a_change(directory: Path) -> None:
    delete_changed(directory)  # The files have no marker, like those of an interrupted fetch, so they stay.
    assert (directory / "a.json").exists()
    write_marker(directory, manifest_of(directory), REPORT)
    (directory / "a.json").write_text("{ }")
    delete_changed(directory)
    assert list(directory.parent.iterdir()) == []


def test_the_marker_goes_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "The file is in use")

    write_marker(directory, manifest_of(directory), REPORT)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(StorageError, match="cannot be written or read"):
        delete_artefact(directory)
    assert directory.exists() and read_marker(directory) is None


def test_space_is_needed_for_missing_files_and_a_reserve(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "half").write_bytes(bytes(MIB))
    files = [(directory / "half", 2 * MIB), (directory / "new", 3 * MIB)]
    monkeypatch.setattr(artefact_files.shutil, "disk_usage", lambda _: SimpleNamespace(total=100 * MIB, free=9 * MIB))
    check_room(directory, "It", files)
    monkeypatch.setattr(artefact_files.shutil, "disk_usage", lambda _: SimpleNamespace(total=100 * MIB, free=8 * MIB))
    with pytest.raises(StorageError, match="It does not fit") as caught:
        check_room(directory, "It", files)
    assert caught.value.got == "up to 4 MiB needed, 8 MiB free"


def test_headroom_is_a_share_of_a_small_disk_and_a_fixed_amount_of_a_large_one() -> None:
    assert headroom_bytes(100 * MIB) == 5 * MIB
    assert headroom_bytes(2**50) == 256 * MIB


@pytest.mark.parametrize(("kind", "expected"), [("base", ["a.json", "b.safetensors"]), ("policy", [])])
def test_only_a_base_is_flushed_to_disk_before_its_marker(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["base", "policy"], expected: list[str]
) -> None:
    synced: list[str] = []

    def noted(path: Path) -> None:
        assert read_marker(directory) is None
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(artefact_files, "sync", noted)
    write_marker(directory, manifest_of(directory, kind), REPORT)
    assert synced == expected
    assert read_marker(directory) is not None
