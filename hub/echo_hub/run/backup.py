"""Back up a run to one file while a hub serves it, and restore it elsewhere.

The file is a tar archive of the settings, keys, SQLite database, checkpoints, adapters and weights of tenants, then
`manifest.json` with the SHA-256 of each file. From these files, the next start recreates the published files
(RUN/artefacts); from the database, it recreates the content of metric sinks.

The hub goes on during the backup, so the backup's files must fit its copy of the database. Checkpoints and adapters get
their names when they are complete and never change. They are linked (hard links, which survive the deletion of the
original) before SQLite's online backup copies the database, because some may be deleted meanwhile, and again after it,
because some may be new. Then links to steps that the copy does not list as trained are dropped. The copy also has the
batches of all steps after the newest checkpoint, which the learner repeats bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import echo_shared
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError, StorageError
from echo_shared.files.atomic import disk_errors

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
DATABASE: Final = "echo.db"
SECRET: Final = ("hub.key", "run_keys.json", "operator.token", "operator.password")
_SINGLE: Final = ("config.toml", *SECRET, "wandb/position.json", "start/start.json")
_OF_RUN: Final = ("checkpoints/step-*", "adapters/v*", "start/adapter", "start/checkpoint")
_OF_TENANTS: Final = ("tenants/weights/*", "tenants/versions/v*", "tenants/models/*/after-*")
_FOLDERS: Final = (*_OF_RUN, *_OF_TENANTS)
_BLOCK: Final = 2**20
_MOST_MANIFEST: Final = 2**26
_CANNOT_WRITE: Final = "The backup cannot be written."
_CANNOT_READ: Final = "The backup cannot be read."


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    trained_step: int
    size_bytes: int
    made_at: float


def write_backup(directory: RunDirectory, database: Path, target: Path) -> Backup:
    """Write a new file `target` that only its owner may read. The file gets the name `target` only when it is complete.

    `database` is the run's SQLite file. Raises ConfigError if `target` exists, StorageError.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError("The target file exists already.", got=str(target), do="Name a new file.")
    with disk_errors(_CANNOT_WRITE, target.parent), _staging(directory.root) as stage, _new_file(target) as whole:
        _link(directory.root, stage)
        copy = stage / DATABASE
        _copy_database(database, copy)
        _link(directory.root, stage)
        trained_step = _trained_step(copy)
        _leave_out_newer(stage, trained_step)
        _check_goes_on(stage, copy, trained_step)
        made_at = time.time()
        about = {
            "format": FORMAT,
            "software": echo_shared.__version__,
            "made_at": made_at,
            "trained_step": trained_step,
        }
        _pack(stage, whole, about)
    return Backup(trained_step=trained_step, size_bytes=target.stat().st_size, made_at=made_at)


def read_backup(file: Path, root: Path) -> Backup:
    """Restore a run directory from a backup, and check every file by its hash.

    Raises ConfigError unless `root` is new or empty, and StorageError. After an error, nothing is left behind.
    """
    if root.is_symlink() or (root.exists() and (not root.is_dir() or any(root.iterdir()))):
        raise ConfigError(
            "A run can be restored only into a new or empty directory.", got=str(root), do="Name another directory."
        )
    with disk_errors("The run cannot be restored.", root.parent):
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}-restoring-") as temporary:
            whole = Path(temporary) / "run"
            whole.mkdir(mode=0o700)
            about = _unpack(file, whole)
            if root.exists():
                root.rmdir()
            whole.rename(root)
    return Backup(trained_step=about["trained_step"], size_bytes=file.stat().st_size, made_at=float(about["made_at"]))


@contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """Create a temporary directory inside the run's directory. Hard links to the run's files need the same disk."""
    with tempfile.TemporaryDirectory(dir=root, prefix=".backup-") as stage:
        yield Path(stage)


@contextmanager
def _new_file(target: Path) -> Iterator[Any]:
    """Create a file that gets its name when the block has succeeded and the content is on disk. Otherwise no file
    remains.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # On a full disk, the incomplete file would occupy the remaining space.


def _link(root: Path, stage: Path) -> None:
    """Link the run's files that are not linked in `stage` yet. A file that may still change is copied instead, and
    replaces its earlier copy."""
    for name in _SINGLE:
        with suppress(FileNotFoundError):
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / name, stage / name)
    for pattern in _FOLDERS:
        for folder in sorted(root.glob(pattern)):
            linked = stage / folder.relative_to(root)
            if linked.exists():
                continue
            try:
                _link_folder(folder, linked)
            except FileNotFoundError:  # The hub is just deleting this folder, because newer ones exist.
                shutil.rmtree(linked, ignore_errors=True)


def _link_folder(folder: Path, linked: Path) -> None:
    linked.mkdir(parents=True)
    for path in folder.iterdir():
        try:
            os.link(path, linked / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # The file system has no hard links.
            shutil.copyfile(path, linked / path.name)
    if not folder.exists():
        raise FileNotFoundError(folder)


def _copy_database(database: Path, copy: Path) -> None:
    """Copy a consistent snapshot of the database, even while the hub writes to it."""
    if not database.is_file():
        raise ConfigError(
            "This run has not been served yet.",
            got=f"no database at {database}",
            do="Serve it first: echo-hub serve RUN",
        )
    try:
        with (
            closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=rw", uri=True, timeout=60)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)  # Copy in one call: a backup in steps would start over at each write of the hub.
            target.execute("PRAGMA journal_mode=DELETE")  # Puts everything into one file; the hub switches back to WAL.
            (found,) = target.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        if "full" in str(error):
            raise OSError(28, str(error)) from error
        raise StorageError("The run's database cannot be copied.", got=f"{database}: {error}") from error
    if found != "ok":
        raise StorageError("The run's database is damaged.", got=f"{database}: {found}", do="Use an older backup.")


def _trained_step(copy: Path) -> int:
    with closing(sqlite3.connect(copy)) as database:
        (step,) = database.execute("SELECT max(step) FROM steps WHERE trained_at IS NOT NULL").fetchone()
        first = database.execute("SELECT value FROM run_meta WHERE key = 'first_version'").fetchone()
    return step or (int(first[0]) if first else 0)


def _leave_out_newer(stage: Path, trained_step: int) -> None:
    for pattern in _OF_RUN:
        for folder in stage.glob(pattern):
            if _number(folder) > trained_step:
                shutil.rmtree(folder)


def _check_goes_on(stage: Path, copy: Path, trained_step: int) -> None:
    """Raise StorageError unless the database copy has the batches of all trained steps after the newest checkpoint.
    With them, the learner can repeat these steps after a restore.
    """
    newest = max(map(_number, stage.glob("checkpoints/step-*")), default=0)
    with closing(sqlite3.connect(copy)) as database:
        query = "SELECT count(*) FROM steps WHERE step > ? AND step <= ? AND pruned"
        (pruned,) = database.execute(query, (newest, trained_step)).fetchone()
    if pruned:
        raise StorageError(
            "The newest checkpoint that could be copied is too old for the database, because the run trained too fast.",
            got=f"a checkpoint of step {newest}, {trained_step} steps trained",
            do="Try again, or raise learner.checkpoints_kept.",
        )


def _number(folder: Path) -> int:
    digits = folder.name.rpartition("-")[2].removeprefix("v")
    return int(digits) if digits.isdecimal() else -1


def _pack(stage: Path, file: Any, about: Mapping[str, Any]) -> None:
    hashes: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        names = (path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
        for name in sorted(filter(_is_ours, names)):
            path = stage / name
            with path.open("rb") as content:
                hashes[name] = hashlib.file_digest(content, "sha256").hexdigest()
                content.seek(0)
                archive.addfile(_member(name, os.fstat(content.fileno()).st_size), content)
        manifest = json.dumps({**about, "sha256": hashes}, indent=1).encode()
        with tempfile.SpooledTemporaryFile(_MOST_MANIFEST) as content:
            content.write(manifest)
            content.seek(0)
            archive.addfile(_member(MANIFEST, len(manifest)), content)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


def _unpack(file: Path, whole: Path) -> dict[str, Any]:
    """Extract the archive's files and return the manifest. Raises StorageError unless the files match the manifest's
    hashes.
    """
    hashes: dict[str, str] = {}
    manifest: dict[str, Any] = {}
    try:
        with tarfile.open(file, mode="r:") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is None or not _is_ours(member.name) or member.name in hashes or manifest:
                    raise ValueError(f"{member.name!r} does not belong in a backup")
                if member.name == MANIFEST:
                    manifest = json.loads(content.read(_MOST_MANIFEST))
                else:
                    hashes[member.name] = _write(content, whole / member.name)
        if manifest.get("format") != FORMAT:
            raise ValueError(f"its format is {manifest.get('format')}, this software reads {FORMAT}")
        if manifest["sha256"] != hashes:
            wrong = {name for name, _ in manifest["sha256"].items() ^ hashes.items()}
            raise ValueError(f"damaged or incomplete: {', '.join(sorted(wrong)[:5])}")
        return {**manifest, "trained_step": int(manifest["trained_step"]), "made_at": float(manifest["made_at"])}
    except (tarfile.TarError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise StorageError(_CANNOT_READ, got=f"{file}: {error}", do="Use another backup.") from error
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise StorageError(_CANNOT_READ, got=str(error), do="Name a backup.") from error


def _is_ours(name: str) -> bool:
    if name in (*_SINGLE, DATABASE, MANIFEST):
        return True
    path = PurePosixPath(name)
    inside = ".." not in path.parts and path.as_posix() == name
    depth = len(path.parts) - 2
    return inside and any(pattern.count("/") == depth and path.parent.match(pattern) for pattern in _FOLDERS)


def _write(content: Any, path: Path) -> str:
    for folder in reversed([each for each in path.parents if not each.exists()]):
        folder.mkdir(mode=0o700)  # mkdir's argument `parents` would ignore the mode.
    digest = hashlib.sha256()
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        while block := content.read(_BLOCK):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
