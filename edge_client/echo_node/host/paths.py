"""Locations of a node's files.

data_dir/
    identity.key              the node's private key
    owner.key                 private key that all machines of the owner share, if they are a fleet
    node.lock                 held while a daemon runs on this directory
    control.json              address and secret of the daemon's control socket
    pause.json                the owner's pause
    shares.json               shares of the node's time by hub
    hubs/<hub>/hub.json       record of a hub; <hub> is a hash of its key
    hubs/<hub>/spool.db       finished rollouts and their receipts
    artefacts/<name>/         fetched and verified base models and policy versions
    carriers/<name>.<kind>/   sealed files as transferred: those of policy versions, kept for other nodes, and those
                              of a base model during its download
    derived/<name>/<content>/ files made from a base model by an engine; <content> is a hash of its manifest. A
                              converted base replaces the weights (`echo_node.host.base_forms`)
    widths.json               widths for which engines had enough memory
    speeds.json               measured speeds of engines
    gpu_cages.json            the cage in which an engine on the GPU starts
    logs/
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from echo_shared.artefacts.manifest import artefact_name
from echo_shared.errors import ConfigError, StorageError

APP: str = "echo-node"
HOME_VARIABLE: str = "ECHO_NODE_HOME"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePaths:
    """Paths of all files of a node. Except for the settings file, these files lie in the data directory."""

    data_dir: Path
    config_file: Path

    @classmethod
    def find(cls, data_dir: Path | None) -> NodePaths:
        """Return the paths below `data_dir`, else below ECHO_NODE_HOME, else at the platform's usual place.

        Raises ConfigError if the usual place is needed and the user has no home directory.
        """
        home = os.environ.get(HOME_VARIABLE)
        try:
            config_dir = Path(home or platformdirs.user_config_dir(APP, appauthor=False)).expanduser()
            default = Path(home or platformdirs.user_data_dir(APP, appauthor=False))
            chosen = (data_dir if data_dir is not None else default).expanduser().absolute()
        except RuntimeError as error:
            if data_dir is None:
                raise _homeless(f"Name another directory, by --data-dir DIR or by {HOME_VARIABLE}.") from error
            chosen = config_dir = data_dir.absolute()
        return cls(data_dir=chosen, config_file=config_dir / "config.toml")

    @property
    def identity_key(self) -> Path:
        return self.data_dir / "identity.key"

    @property
    def owner_key(self) -> Path:
        return self.data_dir / "owner.key"

    @property
    def control_file(self) -> Path:
        return self.data_dir / "control.json"

    @property
    def pause_file(self) -> Path:
        return self.data_dir / "pause.json"

    @property
    def device_pauses_file(self) -> Path:
        return self.data_dir / "device_pauses.json"

    @property
    def shares_file(self) -> Path:
        return self.data_dir / "shares.json"

    @property
    def traffic_file(self) -> Path:
        return self.data_dir / "traffic.json"

    @property
    def last_word_file(self) -> Path:
        return self.data_dir / "last_word.json"

    @property
    def page_file(self) -> Path:
        return self.data_dir / "page.html"

    @property
    def hubs(self) -> Path:
        return self.data_dir / "hubs"

    @property
    def artefacts(self) -> Path:
        return self.data_dir / "artefacts"

    @property
    def carriers(self) -> Path:
        return self.data_dir / "carriers"

    def base(self, run_id: str) -> Path:
        return self.artefacts / artefact_name("base", run_id, 0)

    @property
    def derived(self) -> Path:
        return self.data_dir / "derived"

    @property
    def widths(self) -> Path:
        return self.data_dir / "widths.json"

    @property
    def speeds(self) -> Path:
        return self.data_dir / "speeds.json"

    @property
    def gpu_cages(self) -> Path:
        return self.data_dir / "gpu_cages.json"

    @property
    def logs(self) -> Path:
        return self.data_dir / "logs"

    def hub(self, hub_key: bytes) -> Path:
        return self.hubs / hashlib.blake2b(hub_key, digest_size=10).hexdigest()

    @contextmanager
    def lock(self, *, wait_s: float = 0.0) -> Iterator[None]:
        """Lock the data directory. Raises StorageError if another process still holds the lock after
        `wait_s` seconds.
        """
        lock = self._acquire(wait_s)
        try:
            yield
        finally:
            lock.release()

    def _acquire(self, wait_s: float) -> FileLock:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.data_dir / "node.lock")
            lock.acquire(timeout=wait_s)
        except Timeout as error:
            raise StorageError(
                "A node already runs on this data directory.",
                got=str(self.data_dir),
                do="See it with: echo-node status. A second node needs a directory of its own: --data-dir DIR",
                code="in_use",
            ) from error
        except OSError as error:
            raise StorageError(
                "The data directory cannot be used.",
                got=f"{self.data_dir}: {error.strerror or error}",
                do="Make it writable, or choose another: --data-dir DIR",
            ) from error
        return lock


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise _homeless("Set HOME.") from error


def _homeless(do: str) -> ConfigError:
    got = "neither HOME nor an entry in the system's list of users"
    return ConfigError("This user has no home directory for the node's files.", got=got, do=do)
