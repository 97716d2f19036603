"""Create run directories, for a new hub or next to another run of the same hub."""

from __future__ import annotations

from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.siblings import siblings_of
from echo_shared.errors import ConfigError
from echo_shared.files.atomic import write_private
from echo_shared.signing import key_file


def make_run(
    directory: RunDirectory, config: HubConfig, *, beside: RunDirectory | None = None, rendered: str = ""
) -> None:
    """Write hub.key and then config.toml. If a run `beside` is given, copy its hub.key, so that both runs belong to one
    hub.

    `rendered` is the text of config.toml; "" writes every setting of `config`. Raises ConfigError if the directory
    already contains a run.
    """
    if directory.config.exists():
        raise ConfigError(
            "This directory already contains a run.",
            got=str(directory.config),
            do="Serve it, or name another directory.",
        )
    try:
        if beside is not None:
            _take_key(directory, beside)
        directory.root.mkdir(parents=True, exist_ok=True)
        key_file.load_or_create(directory.key)
        text = rendered or render_config(config)
        write_private(directory.config, text.encode())  # Private, because it may contain invite tokens.
    except OSError as error:
        raise ConfigError(
            "The run directory cannot be created.", got=str(error), do="Name a directory that you may write to."
        ) from error


def port_beside(beside: RunDirectory) -> int:
    """Return a port for a new run: one above the highest port among all runs of `beside`'s hub. Return 0 (any free
    port) if one of these runs has port 0.

    Raises ConfigError if `beside` is not a run.
    """
    beside.check()
    ports = [load_config(run.config, {}).server.port for run in (beside, *siblings_of(beside))]
    return 0 if 0 in ports else max(ports) + 1


def _take_key(directory: RunDirectory, beside: RunDirectory) -> None:
    """Copy the key of a run in the same parent directory. Raises ConfigError if the parent directories differ."""
    beside.check()
    if directory.root.resolve().parent != beside.root.resolve().parent:
        raise ConfigError(
            "All runs of a hub must have the same parent directory.",
            got=f"{directory.root} and {beside.root}",
            do=f"Use {beside.root.parent / directory.root.resolve().name}",
        )
    key = key_file.load(beside.key)
    directory.root.mkdir(parents=True, exist_ok=True)
    if directory.key.exists() and key_file.load(directory.key).public_key != key.public_key:
        raise ConfigError("This directory already contains another hub's key.", got=str(directory.key))
    write_private(directory.key, key.to_pem())
