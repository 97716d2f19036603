"""`echo-hub backup` and `restore`: save a run to a single file, also while a hub serves it, and restore it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import RunArgument, when
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint

if TYPE_CHECKING:
    from echo_hub.config.sections import HubConfig

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]


def backup(run_directory: RunArgument, file: FileArgument) -> None:
    """Write a run into one new file, also while a hub serves it: settings, keys, database, checkpoints, adapters."""
    from echo_hub.dashboard.formats import size
    from echo_hub.run.backup import SECRET, write_backup

    directory = RunDirectory(run_directory)
    directory.check()
    made = write_backup(directory, _database(directory, load_config(directory.config, {})), file)
    typer.echo(f"Wrote {file}: {size(made.size_bytes)}, {made.trained_step} steps trained.")
    typer.echo(
        f"It contains the run's keys ({', '.join(SECRET)}), which let anyone impersonate this hub. Keep it secret."
    )


def restore(
    file: FileArgument, run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A new directory.")]
) -> None:
    """Restore a run directory from a backup; every file is checked. `echo-hub serve` then resumes the run."""
    from echo_hub.run.backup import read_backup

    found = read_backup(file, run_directory)
    directory = RunDirectory(run_directory)
    _own_database(directory)
    key = key_file.load(directory.key).public_key
    typer.echo(f"Restored {run_directory} as of {when(found.made_at)}: {found.trained_step} steps trained.")
    typer.echo(f"Key fingerprint: {fingerprint(key)}")
    typer.echo("Never serve it while the original hub runs: nodes could not tell the two apart.")
    typer.echo(f"Next: echo-hub serve {run_directory}")


def _database(directory: RunDirectory, config: HubConfig) -> Path:
    """Return the run's SQLite file. Raises ConfigError if its database is not SQLite."""
    from sqlalchemy import make_url

    url = make_url(config.store.url or directory.database_url)
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith("file:"):
        raise ConfigError(
            "This run's database is not an SQLite file, so this command does not back it up.",
            got=f"store.url = {url.render_as_string()}",
            do=f"Stop the hub; run pg_dump --format=custom --file=echo.dump DATABASE; and copy {directory.root} "
            "without artefacts. To restore: pg_restore --dbname=DATABASE echo.dump, and copy the directory back.",
        )
    return Path(url.database)


def _own_database(directory: RunDirectory) -> None:
    """Remove store.url from the restored config.toml, because the restored database is in the run directory."""
    import tomlkit

    text = directory.config.read_text(encoding="utf-8-sig")
    settings = tomlkit.parse(text)
    store = settings.get("store", {})
    if store.get("url"):
        store["url"] = ""
        write_private(directory.config, tomlkit.dumps(settings).encode())
        typer.echo("store.url is now empty: the database is in the run directory.")
