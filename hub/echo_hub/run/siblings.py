"""Find the other runs of a hub: run directories in the same parent directory with the same key."""

from __future__ import annotations

from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError, StorageError
from echo_shared.signing import key_file


def siblings_of(directory: RunDirectory) -> list[RunDirectory]:
    """Return the other runs of this run's hub, sorted by name. Directories that cannot be read are skipped."""
    own = key_file.load(directory.key).public_key
    here = directory.root.resolve()
    try:
        others = sorted(path for path in here.parent.iterdir() if path != here)
    except OSError as error:
        raise StorageError(
            "The directory of this hub's runs cannot be read.",
            got=str(error),
            do="Let the hub's user read it, or move the run to a separate directory.",
        ) from error
    return [run for run in map(RunDirectory, others) if _is_run(run) and _key_of(run) == own]


def _is_run(run: RunDirectory) -> bool:
    try:
        return run.config.is_file()
    except OSError:  # The directory of another user, which this user may not read.
        return False


def _key_of(run: RunDirectory) -> bytes | None:
    try:
        return key_file.load(run.key).public_key
    except ConfigError:
        return None
