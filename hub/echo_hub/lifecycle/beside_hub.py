"""Functions for the operator's commands that read a run's database, whether a hub serves the run or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.store.store import Store

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")]


@contextmanager
def store_of(directory: RunDirectory) -> Iterator[Store]:
    """Open the run's database. Raises ConfigError if no hub has created it yet."""
    from echo_hub.store.store import Store

    directory.check()
    config = load_config(directory.config, {})
    store = Store.open(config.store.url or directory.database_url, beside_hub=True)
    try:
        yield store
    finally:
        store.close()


def check_writable(figures: Path | None) -> None:
    """Raise ConfigError if the command could not write its results to the file `figures`. Call it before any work
    begins."""
    if figures is not None and not figures.parent.is_dir():
        raise ConfigError("The figures cannot be written there.", got=str(figures), do="Name a directory that exists.")


def when(seconds: float) -> str:
    """Format a time in local time; "" for 0."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}" if seconds else ""
