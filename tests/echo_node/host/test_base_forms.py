"""A base model is on disk as weights or as a converted file. The node changes from one to the other. A kill between any
two steps of this change must leave a usable base model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from echo_node.host import artefact_files
from echo_node.host.artefact_files import read_marker, write_marker
from echo_node.host.base_forms import (
    came_as_gguf,
    conversion_bytes,
    conversion_progress,
    drop_replaced,
    keep_one_form,
    largest_base_bytes,
    want_weights,
)
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.artefacts.manifest import Manifest
from echo_shared.errors import StorageError
from echo_shared.wire.messages import Fetched

REPORT = Fetched(info_hash=bytes(20), policy_version=None, seconds=0.5, swarm_bytes=1, web_seed_bytes=2)
CONTENT, OTHER_CONTENT = "0" * 32, "1" * 32
GIB = 2**30


def of_files(base: Path, carrier: Literal["files", "gguf"]) -> Manifest:
    return Manifest(
        kind="base",
        run_id="run",
        name="run-base",
        policy_version=0,
        carrier=carrier,
        key_id=1,
        info_hash="ab" * 20,
        files=describe_files(base),
    )


class Killed(BaseException):
    """Sudden death of the process: no error handler catches this exception."""


class Disk:
    """A verified base with two weight files, two conversions of it, and other files of a node."""

    def __init__(self, root: Path) -> None:
        self.base = root / "artefacts" / "run-base"
        self.derived = root / "derived" / "run-base" / CONTENT
        self.old = self.derived.with_name(OTHER_CONTENT)
        self.converted = self.derived / "run-base-f16-1.gguf"
        self.base.mkdir(parents=True)
        for name in ("config.json", "a.safetensors", "b.safetensors"):
            (self.base / name).write_text(name)
        for directory in (self.derived, self.old):
            directory.mkdir(parents=True)
            for name in ("run-base-f16-1.gguf", "run-base-q8_0-1.gguf", "run-base-f16-1.7.tmp"):
                (directory / name).write_text(name)
        self.manifest = of_files(self.base, "files")
        write_marker(self.base, self.manifest, REPORT)

    @property
    def here(self) -> set[str]:
        files = [*self.base.rglob("*"), *self.derived.parent.rglob("*")]
        root = self.base.parent.parent
        return {path.relative_to(root).as_posix() for path in files if path.is_file()}

    @property
    def is_whole(self) -> bool:
        found = read_marker(self.base)
        return found is not None and found.content == self.manifest.content and found.fetched == REPORT


def kill_after(num_steps: int, patch: pytest.MonkeyPatch) -> None:
    """Simulate a kill: after `num_steps` changes of the disk, the next change raises Killed in place of taking
    place.
    """
    steps = iter(range(num_steps))

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def step(path: Path, *args: object, **options: object) -> object:
            if next(steps, None) is None:
                raise Killed
            return real(path, *args, **options)

        return step

    for name in ("write_text", "replace", "unlink"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


CONVERTED = {"artefacts/run-base/config.json", f"derived/run-base/{CONTENT}/run-base-f16-1.gguf"}
OWN = {f"artefacts/run-base/{name}" for name in ("config.json", "a.safetensors", "b.safetensors")}


def test_a_converted_file_takes_the_place_of_the_weights(disk: Disk) -> None:
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert disk.here == CONVERTED and disk.is_whole


def test_an_adapter_that_another_engine_loads_stays(disk: Disk) -> None:
    """The engines of a node's devices share the directory. Only adapters of killed engines may be deleted."""
    used, left = (disk.derived / f"adapter-{pid}-3.gguf" for pid in (os.getpid(), 2**31 - 1))
    for path in (used, left):
        path.write_text("an adapter")
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert used.exists() and not left.exists()


def test_the_weights_stay_for_an_engine_that_reads_them(disk: Disk) -> None:
    keep_one_form(disk.base, disk.derived, None)
    assert disk.here == OWN and disk.is_whole


@pytest.mark.parametrize("converted", [True, False])
def test_a_kill_between_any_two_steps_leaves_a_whole_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool
) -> None:
    """After a kill at any step, a usable form of the base is left, and the next start completes the change."""
    kept, num_kills = CONVERTED if converted else OWN, 0
    while True:
        disk = Disk(tmp_path / str(num_kills))
        read = disk.converted if converted else None
        with monkeypatch.context() as patch:
            kill_after(num_kills, patch)
            try:
                keep_one_form(disk.base, disk.derived, read)
            except Killed:
                pass
            else:
                break
        assert disk.is_whole and disk.here >= kept, f"killed after {num_kills} steps"
        replaced = drop_replaced(disk.base)
        assert len(disk.here & (OWN - CONVERTED)) == (0 if replaced else 2), "all weights, or none"
        keep_one_form(disk.base, disk.derived, read)
        assert disk.here == kept and disk.is_whole
        num_kills += 1
    assert num_kills == (6 if converted else 3)


def test_the_marker_is_on_disk_before_weights_are_deleted(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    unlink, sync = Path.unlink, artefact_files.sync
    monkeypatch.setattr(Path, "unlink", lambda path, **options: (steps.append(path.suffix), unlink(path, **options)))
    monkeypatch.setattr(artefact_files, "sync", lambda path: (steps.append(f"sync {path.name}"), sync(path)))
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert steps[:4] == ["sync run-base.verified", "sync artefacts", ".safetensors", ".safetensors"]


def test_a_base_without_a_marker_keeps_its_weights(disk: Disk) -> None:
    artefact_files.unmark(disk.base)
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert disk.here >= OWN


@pytest.mark.skipif(os.name == "nt", reason="links take a right that few users of Windows have")
@pytest.mark.parametrize("linked", ["artefacts", "derived"])
def test_a_directory_may_be_a_link_to_another_disk(disk: Disk, tmp_path: Path, linked: str) -> None:
    elsewhere = tmp_path / "far" / "away" / linked
    elsewhere.parent.mkdir(parents=True)
    (tmp_path / linked).rename(elsewhere)
    (tmp_path / linked).symlink_to(elsewhere)
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert disk.is_whole and not any(disk.base.glob("*.safetensors"))


def test_a_converted_file_that_is_gone_or_changed_makes_the_base_incomplete(disk: Disk) -> None:
    keep_one_form(disk.base, disk.derived, disk.converted)
    times = disk.converted.stat()
    disk.converted.write_text("something else")
    assert not disk.is_whole
    disk.converted.write_text("run-base-f16-1.gguf")
    os.utime(disk.converted, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert disk.is_whole
    disk.converted.unlink()
    assert not disk.is_whole


def test_weights_are_requested_again_only_if_they_were_deleted(disk: Disk) -> None:
    assert not want_weights(disk.base) and disk.is_whole
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert want_weights(disk.base) and not disk.is_whole
    assert not want_weights(disk.base)
    assert disk.here == CONVERTED, "the converted file stays until another engine is up"


def test_a_disk_that_refuses_is_a_storage_error(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "The file is in use")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match="cannot be written or read"):
        keep_one_form(disk.base, disk.derived, disk.converted)
    assert disk.is_whole


@pytest.mark.parametrize(
    ("backend", "precision", "base_bytes", "expected"),
    [
        ("torch", "bf16", GIB, 0),
        ("mlx", "auto", GIB, 0),
        ("llama_cpp", "f16", GIB, GIB),
        ("auto", "bf16", GIB, GIB),
        ("llama_cpp", "f32", GIB, 2 * GIB),
        ("llama_cpp", "q8_0", GIB, int(0.54 * GIB)),
        ("llama_cpp", "q4_k_m", GIB, int(1.5 * GIB)),
        ("auto", "auto", GIB, GIB),
        ("auto", "auto", 2**20, 2**21),
    ],
)
def test_the_space_that_a_conversion_needs(backend: str, precision: str, base_bytes: int, expected: int) -> None:
    assert conversion_bytes(base_bytes, backend=backend, precision=precision) == expected


@pytest.mark.parametrize(
    ("backend", "precision", "times"), [("torch", "auto", 2), ("auto", "auto", 2), ("llama_cpp", "q4_k_m", 2.5)]
)
def test_the_largest_base_fits_including_temporary_files(backend: str, precision: str, times: float) -> None:
    largest = largest_base_bytes(10 * GIB, backend=backend, precision=precision)
    assert largest == int(10 * GIB / times)
    conversion = conversion_bytes(largest, backend=backend, precision=precision)
    assert largest + max(largest, conversion) <= 10 * GIB


@pytest.mark.parametrize(("precision", "total"), [("f16", 1_000), ("q8_0", 540), ("q4_k_m", 1_500)])
def test_a_running_conversion_shows_its_progress(tmp_path: Path, precision: str, total: int) -> None:
    base, derived = tmp_path / "base", tmp_path / "derived"
    base.mkdir()
    assert conversion_progress(base, derived, precision) is None
    derived.mkdir()
    (base / "a.safetensors").write_bytes(bytes(400))
    (base / "b.safetensors").write_bytes(bytes(600))
    (derived / "old.gguf").write_bytes(bytes(900))
    assert conversion_progress(base, derived, precision) is None
    (derived / "new.7.tmp").write_bytes(bytes(200))
    assert conversion_progress(base, derived, precision) == (200, total)
    (derived / "new.7.f16").write_bytes(bytes(4_000))
    assert conversion_progress(base, derived, precision) == (total, total)


def test_a_gguf_file_of_the_hub_is_the_only_form_until_the_weights_are_wanted(tmp_path: Path) -> None:
    base = tmp_path / "artefacts" / "run-base"
    base.mkdir(parents=True)
    for name in ("config.json", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (base / name).write_text(name)
    derived = tmp_path / "derived" / "run-base" / CONTENT
    derived.mkdir(parents=True)
    (derived / "run-base-f16-1.gguf").write_text("of an earlier engine")
    assert not came_as_gguf(base) and not want_weights(base), "it is not verified yet"
    write_marker(base, of_files(base, "gguf"), REPORT)
    keep_one_form(base, derived, None)
    assert came_as_gguf(base) and not drop_replaced(base) and read_marker(base) is not None
    assert list(derived.iterdir()) == [] and len(list(base.iterdir())) == 3
    assert want_weights(base)
    assert not base.exists() and read_marker(base) is None and not came_as_gguf(base)


def test_converted_files_are_no_gguf_file_of_the_hub(disk: Disk) -> None:
    assert not came_as_gguf(disk.base)
    keep_one_form(disk.base, disk.derived, disk.converted)
    assert not came_as_gguf(disk.base) and drop_replaced(disk.base)
