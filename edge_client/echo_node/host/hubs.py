"""The hubs that a node has joined: address, pinned key, and the flags of `join`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_node.host.address import HubAddress
from echo_node.host.paths import NodePaths
from echo_node.host.shares import SharesFile
from echo_shared.artefacts.manifest import artefact_name
from echo_shared.errors import StorageError
from echo_shared.files.atomic import write_private

Flag = str | int | float | bool | list[str]


class HubRecord(BaseModel):
    """Contents of hub.json: one hub, whose key was pinned at first use."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: str
    hub_key_hex: str
    joined_at: float
    """Time of the last `join`, in seconds since the epoch; `run` uses the hub that was joined last."""
    invite_token: str | None = None
    run_id: str = ""
    run_name: str = ""
    flags: dict[str, Flag] = {}
    """Flags of `join`, by setting. `run` and the service use them too."""

    @property
    def hub_key(self) -> bytes:
        return bytes.fromhex(self.hub_key_hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Parameters of one run of the daemon."""

    address: HubAddress
    pinned: HubRecord | None
    """Record of the hub; None at first use, when the hub's key will be pinned."""
    invite_token: str | None
    flags: Mapping[str, Flag] = field(default_factory=dict)
    """Flags of the command line that are stored with the hub, for later runs."""
    given: Mapping[str, Flag] = field(default_factory=dict)
    """Other flags of the command line. They apply to this run only, and override `flags`."""
    patient: bool
    """True: keep trying even if the first connection fails."""
    share: float | None = None
    """New share of the hub in the node's time; 0 = the node works for this hub alone; None = unchanged."""


class Hubs:
    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths

    def all(self) -> list[HubRecord]:
        """Return the records of all joined hubs, last joined first. Raises StorageError if one is unreadable."""
        records = [_read(path) for path in self._paths.hubs.glob("*/hub.json")]
        return sorted(records, key=lambda record: record.joined_at, reverse=True)

    def at(self, url: str) -> HubRecord | None:
        return next((record for record in self.all() if record.url == url), None)

    def last(self) -> HubRecord | None:
        return next(iter(self.all()), None)

    def save(self, record: HubRecord) -> None:
        """Store the record. Remove the record of another hub at the same address, and the files of this hub's previous
        run.
        """
        for other in self.all():
            if other.hub_key_hex == record.hub_key_hex:
                if other.run_id != record.run_id:
                    self.delete_run(other.run_id)
            elif other.url == record.url:
                (self.directory(other) / "hub.json").unlink()
        write_private(self.directory(record) / "hub.json", f"{record.model_dump_json(indent=2)}\n".encode())

    def directory(self, record: HubRecord) -> Path:
        return self._paths.hub(record.hub_key)

    def forget(self, record: HubRecord) -> None:
        """Delete everything about this hub: its record, its stored rollouts, its run's files, and its share."""
        SharesFile(self._paths.shares_file).forget(record.url)
        shutil.rmtree(self.directory(record))
        self.delete_run(record.run_id)

    def delete_run(self, run_id: str) -> None:
        """Delete the run's artefacts with their markers, their encrypted copies (carriers), and the engine's
        conversions.
        """
        base, policy = artefact_name("base", run_id, 0), artefact_name("policy", run_id, 0).rstrip("0")
        of_this_run = re.compile(rf"({re.escape(base)}|{re.escape(policy)}\d+)(\.[a-z]+\d*)?")
        for directory in (self._paths.artefacts, self._paths.carriers, self._paths.derived):
            for path in directory.glob("*"):
                if of_this_run.fullmatch(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read(path: Path) -> HubRecord:
    try:
        record = HubRecord.model_validate_json(path.read_bytes())
        assert len(record.hub_key) == 32
    except (OSError, ValueError, ValidationError, AssertionError) as error:
        raise StorageError(
            "A hub's record on this node cannot be read.",
            got=f"{path}: {error}",
            do="Delete that file and join the hub again.",
        ) from error
    return record
