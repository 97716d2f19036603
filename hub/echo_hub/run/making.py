"""Makes run directories."""

from __future__ import annotations

from echo_hub.config.file import load_config, render_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_hub.run.siblings import siblings_of
from echo_shared import key_file
from echo_shared.errors import ConfigError
from echo_shared.files import write_private


def make_run(
    directory: RunDirectory, config: HubConfig, *, beside: RunDirectory | None = None, rendered: str = ""
) -> None:
    """Writes config.toml (last) and hub.key, that of the run `beside` if one is given. `rendered`: the settings as they
    are to stand in the file; empty: every setting. Raises ConfigError when there is a run already."""
    if directory.config.exists():
        raise ConfigError(
            "There is a run in this directory already.",
            got=str(directory.config),
            do="Serve it, or name another directory.",
        )
    try:
        if beside is not None:
            _take_key(directory, beside)
        directory.root.mkdir(parents=True, exist_ok=True)
        key_file.load_or_create(directory.key)
        text = rendered or render_config(config)
        write_private(directory.config, text.encode())  # Invitations may come to stand in it.
    except OSError as error:
        raise ConfigError(
            "The run directory cannot be made.", got=str(error), do="Name a directory that you may write."
        ) from error


def port_beside(beside: RunDirectory) -> int:
    """The first port above that of the run and of all others of its hub; 0 where they take any free one. Raises
    ConfigError where there is no run."""
    beside.check()
    ports = [load_config(run.config, {}).server.port for run in (beside, *siblings_of(beside))]
    return 0 if 0 in ports else max(ports) + 1


def _take_key(directory: RunDirectory, beside: RunDirectory) -> None:
    """Makes the new run one of the hub whose run lies beside it. Raises ConfigError where it does not."""
    beside.check()
    if directory.root.resolve().parent != beside.root.resolve().parent:
        raise ConfigError(
            "A hub's runs lie side by side, in one directory.",
            got=f"{directory.root} beside {beside.root}",
            do=f"Name it {beside.root.parent / directory.root.resolve().name}",
        )
    key = key_file.load(beside.key)
    directory.root.mkdir(parents=True, exist_ok=True)
    if directory.key.exists() and key_file.load(directory.key).public_key != key.public_key:
        raise ConfigError("There is another hub's key in this directory already.", got=str(directory.key))
    write_private(directory.key, key.to_pem())
