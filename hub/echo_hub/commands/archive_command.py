"""`echo-hub archive`: move old steps' rollouts from the database to Parquet files, also while a hub serves the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_hub.commands.action_commands import me
from echo_hub.commands.rollouts_command import reader_of
from echo_hub.lifecycle.beside_hub import RunArgument, store_of
from echo_hub.run.directory import RunDirectory

if TYPE_CHECKING:
    from echo_hub.lifecycle.archive import ArchiveFile


@dataclass(kw_only=True)
class _Done:
    file: str
    first_step: int
    last_step: int
    rollouts: int
    bytes: int
    written: bool
    """True if this command has written the file; False if the file existed before."""
    deleted: int = 0
    """Number of rollouts that the command has deleted from the database."""

    def __str__(self) -> str:
        from echo_hub.dashboard.formats import size

        what = f"{self.rollouts} rollouts of steps {self.first_step} to {self.last_step}"
        wrote = f"Wrote {self.file}: {what}, {size(self.bytes)}." if self.written else f"{self.file}:"
        return f"{wrote} {self.deleted} rollouts deleted from the database." if self.deleted else wrote


def archive(
    run_directory: RunArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="This run's archive; created if necessary.")],
    before_step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Archive only steps before this one.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete archived rollouts from the database.")] = False,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Then compact the SQLite file; only while no hub serves the run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Write old steps' rollouts to Parquet files, also while a hub serves the run."""
    from echo_hub.lifecycle.archive import Archive
    from echo_hub.store.database import read_meta

    directory = RunDirectory(run_directory)
    end = 2**53 if before_step is None else before_step
    done: list[_Done] = []
    with store_of(directory) as store:
        reader = reader_of(directory, store)
        made = Archive(folder, run_id=store.read(read_meta).get("run_id", ""), store=store, reader=reader)

        def see_to(one: ArchiveFile, *, written: bool) -> None:
            gone = made.delete(one, who=me().who) if delete and one.span.through.step < end else 0
            if gone or written:
                done.append(_done(one, written=written, deleted=gone))
                if not as_json:
                    typer.echo(str(done[-1]))

        with made.locked():
            for one in made.files():
                see_to(one, written=False)
            for one in made.write(before_step=end):
                see_to(one, written=True)
            missing = made.missing(made.files())
    smaller = _shrink(directory) if shrink else None
    if as_json:
        sizes = None if smaller is None else {"before_bytes": smaller[0], "after_bytes": smaller[1]}
        said = {"files": [asdict(one) for one in done], "missing_steps": missing, "shrunk": sizes}
        typer.echo(json.dumps(said, indent=2))
        return
    _tell(done, missing, smaller)


def _done(one: ArchiveFile, *, written: bool, deleted: int) -> _Done:
    return _Done(
        file=one.path.name,
        first_step=one.span.after.step + 1,
        last_step=one.span.through.step,
        rollouts=one.rollouts,
        bytes=one.path.stat().st_size,
        written=written,
        deleted=deleted,
    )


def _shrink(directory: RunDirectory) -> tuple[int, int]:
    from echo_hub.store.database import shrink

    with directory.locked(), store_of(directory) as store:
        return shrink(store.engine)


def _tell(done: list[_Done], missing: list[tuple[int, int]], smaller: tuple[int, int] | None) -> None:
    from echo_hub.dashboard.formats import size

    if not done:
        typer.echo(
            "Nothing to do: a step can be archived once all kept checkpoints include it and older steps are complete."
        )
    for first, last in missing:
        typer.echo(f"Steps {first} to {last} were deleted from the database before, and are in no file here.")
    if smaller is not None:
        typer.echo(f"The database takes {size(smaller[1])}; before: {size(smaller[0])}.")
