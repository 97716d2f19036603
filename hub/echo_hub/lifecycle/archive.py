"""Archive old steps' rollouts in Parquet files, one file for each range of steps, and delete them from the database.

    steps-000001-000212.parquet   all rollouts of these steps, by group (`echo_hub.store.retiring`)
    steps-000213-000380.parquet   its metadata `echo` names the run, the steps and the number of rows

A file gets its final name only when it is on disk and has been read back without a difference; after that it never
changes. So after a kill, a restart continues with the steps after the last complete file. A row is deleted from the
database only if the file has valid checksums and contains the same facts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

import echo_shared
from echo_hub.lifecycle.rollouts import RolloutReader
from echo_hub.lifecycle.rollouts_parquet import AT_ONCE, pyarrow_parquet, schema, tables
from echo_hub.store.bulk import key_of
from echo_hub.store.retired import RetiredMark, StepSpan, read_last
from echo_hub.store.retiring import (
    FACTS,
    ROWS_AT_ONCE,
    Copies,
    Ripe,
    read_final_keys,
    read_first_mark,
    read_groups_of_steps,
    read_ripe,
    read_trained_at,
    retire,
)
from echo_hub.store.store import Store
from echo_shared.errors import ConfigError, StorageError
from echo_shared.files.atomic import disk_errors, sync

FORMAT: Final = 1
ROWS_A_FILE: Final = 50_000
TOKENS_A_FILE: Final = 5_000_000
"""Approximate number of tokens in a file, small enough to compare the file in memory. A step is never split, so a file
may have more."""
METADATA: Final = b"echo"
_CANNOT_WRITE: Final = "The archive cannot be written."


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFile:
    """One complete file of an archive."""

    path: Path
    span: StepSpan
    rollouts: int


class Archive:
    """A directory of one run's archive files.

    Raises ConfigError if pyarrow is not installed or the directory contains another run's files. Raises StorageError if
    a file is damaged or the disk refuses.
    """

    def __init__(self, folder: Path, *, run_id: str, store: Store, reader: RolloutReader) -> None:
        self._folder = folder
        self._run_id = run_id
        self._store = store
        self._reader = reader
        self._arrow, self._parquet = pyarrow_parquet()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the archive, and delete unfinished files of a killed process."""
        lock = FileLock(self._folder / ".lock")
        with disk_errors(_CANNOT_WRITE, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise ConfigError(
                    "Another process is using this archive.", got=str(self._folder), do="Wait until it has ended."
                ) from error
        try:
            for left in self._folder.glob(".steps-*.tmp"):
                left.unlink()
            yield
        finally:
            lock.release()

    def files(self) -> list[ArchiveFile]:
        """Return the archive's files in order of steps, after checking that each belongs to this run and matches its
        database.
        """
        found = sorted(map(self._about, self._folder.glob("steps-*.parquet")), key=lambda one: one.span.after.step)
        there, gone = self._store.read(read_first_mark).step, self._gone()
        for one in found:
            if one.span.after.step < there:
                raise ConfigError(
                    "Two archive files cover the same steps.",
                    got=f"{one.path.name}, and one before it up to step {there}",
                    do="Archive into another directory.",
                )
            if one.span.after.step > max(there, gone):
                raise ConfigError(
                    "An archive file is missing; its rollouts are still in the database.",
                    got=f"{one.path.name}, but no file for steps {there + 1} to {one.span.after.step}",
                    do="Put it back, or archive into another directory.",
                )
            there = one.span.through.step
        return found

    def missing(self, files: Sequence[ArchiveFile]) -> list[tuple[int, int]]:
        """Return step ranges whose rollouts neither the database nor these files contain: these rollouts were deleted
        without an archive, or archived elsewhere."""
        found, there = [], self._store.read(read_first_mark).step
        for after, through in [*((one.span.after.step, one.span.through.step) for one in files), (self._gone(), 0)]:
            if after > there:
                found.append((there + 1, after))
            there = max(there, through)
        return found

    def _gone(self) -> int:
        last = self._store.read(read_last)
        return 0 if last is None else last.through.step

    def _about(self, path: Path) -> ArchiveFile:
        with self._readable(path):
            said = json.loads((self._parquet.read_schema(path).metadata or {}).get(METADATA, b"{}"))
        if said.get("run_id") != self._run_id or said.get("format") != FORMAT:
            raise ConfigError(
                "The directory contains files that are not this run's archive.",
                got=f"{path.name}, of {'run ' + str(said['run_id']) if 'run_id' in said else 'no run'}",
                do="Archive each run into a separate directory.",
            )
        span = StepSpan(after=RetiredMark(**said["after"]), through=RetiredMark(**said["through"]))
        if self._store.read(read_trained_at, span.through.step) != said["trained_at"]:
            raise ConfigError(
                "The archive does not match the run's database, perhaps because the run was restored from a backup.",
                got=f"{path.name}: step {span.through.step} was trained at another time",
                do="Archive into another directory.",
            )
        return ArchiveFile(path=path, span=span, rollouts=said["rollouts"])

    def write(self, *, before_step: int) -> Iterator[ArchiveFile]:
        """Write files for all archivable steps before `before_step` that no file contains yet. Yield each file
        when it is complete.
        """
        there, last, beginning = self.files(), self._store.read(read_last), self._store.read(read_first_mark)
        after = max(
            [
                beginning,
                *(one.span.through for one in there),
                *([last.through] if last else []),
            ],
            key=lambda mark: mark.step,
        )
        while ripe := self._store.read(read_ripe, after, before_step):
            for steps in _portions(ripe):
                span = StepSpan(after=after, through=steps[-1].mark)
                yield self._write(span, steps[-1].trained_at)
                after = span.through

    def _write(self, span: StepSpan, trained_at: float) -> ArchiveFile:
        keys = set(self._store.read(read_final_keys, span))
        rollouts = self._reader.of_groups(self._store.read(read_groups_of_steps, span), keys)
        parts = list(tables(self._arrow, rollouts))
        table = self._arrow.concat_tables([schema(self._arrow).empty_table(), *parts])
        about = {
            "format": FORMAT,
            "software": echo_shared.__version__,
            "run_id": self._run_id,
            **asdict(span),
            "trained_at": trained_at,
            "rollouts": table.num_rows,
            "written_at": time.time(),
        }
        table = table.replace_schema_metadata({METADATA: json.dumps(about).encode()})
        path = self._folder / f"steps-{span.after.step + 1:06d}-{span.through.step:06d}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        with disk_errors(_CANNOT_WRITE, self._folder):
            try:
                self._parquet.write_table(
                    table, temporary, compression="zstd", row_group_size=AT_ONCE, write_page_checksum=True
                )
                sync(temporary)
                if not self._read(temporary).equals(table):
                    raise StorageError(
                        "An archive file read back differs from what was written; the file was deleted.",
                        got=str(path),
                        do="Check the disk's health, or archive to another disk.",
                    )
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            sync(self._folder)
        return ArchiveFile(path=path, span=span, rollouts=table.num_rows)

    def delete(self, one: ArchiveFile, *, who: str) -> int:
        """Delete the rollouts of this file from the database, and return their number.

        After each transaction, pause for as long as the transaction took, so that a running hub can write meanwhile.
        """
        last = self._store.read(read_last)
        if last is not None and one.span.through.step <= last.after.step:
            return 0
        table = self._read(one.path)
        if table.num_rows != one.rollouts:
            raise _damaged(one.path, f"{table.num_rows} of {one.rollouts} rows")
        facts = {row.pop("rollout_id"): row for row in table.select(["rollout_id", *FACTS]).to_pylist()}
        copies = Copies(facts=facts, who=who, place=str(one.path.resolve()), now=time.time())
        keys, gone = iter(sorted(map(key_of, facts))), 0
        while part := list(islice(keys, ROWS_AT_ONCE)):
            began_s = time.monotonic()
            gone += retire(self._store, part, one.span, copies)
            time.sleep(time.monotonic() - began_s)
        return gone

    def _read(self, path: Path) -> Any:
        with self._readable(path):
            return self._parquet.read_table(path, page_checksum_verification=True)

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, self._arrow.ArrowException) as error:
            raise _damaged(path, str(error)) from error


def _damaged(path: Path, got: str) -> StorageError:
    return StorageError(
        "An archive file is damaged.",
        got=f"{path}: {got}",
        do="Restore it from a copy. If its rollouts are still in the database, delete the file: it is written again.",
    )


def _portions(ripe: Sequence[Ripe]) -> Iterator[list[Ripe]]:
    steps: list[Ripe] = []
    for one in ripe:
        steps.append(one)
        rows, tokens = sum(each.num_rollouts for each in steps), sum(each.num_tokens for each in steps)
        if rows >= ROWS_A_FILE or tokens >= TOKENS_A_FILE:
            yield steps
            steps = []
    if steps:
        yield steps
