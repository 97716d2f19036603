"""The hubs' shares of the node's time, on disk. They are read before each turn, so that a running node uses changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_node.core.shares import HubShare
from echo_shared.errors import StorageError
from echo_shared.files.atomic import write_private


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    hubs: dict[str, HubShare] = {}
    """Shares by hub address."""


class SharesFile:
    """File shares.json. It is missing if no hub has a share."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> dict[str, HubShare]:
        """Return the shares by hub address. Raises StorageError."""
        try:
            return dict(_Document.model_validate_json(self._file.read_bytes()).hubs)
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            raise StorageError(
                "The shares of this node's hubs cannot be read.",
                got=f"{self._file}: {error}",
                do="Delete that file and set them again: echo-node hubs share URL SHARE",
            ) from error

    def joined(self, hub: str, share: float, *, before: str | None) -> None:
        """Add a hub with its share. A share of 0 removes all shares, so that the joined hub gets all time.

        `before`: the previous hub. It gets a share of 1 next to the new hub, unless shares exist already.
        """
        hubs = self.load()
        if share == 0:
            if any(one.share for one in hubs.values()):
                self.save({name: one.model_copy(update={"share": 0.0}) for name, one in hubs.items()})
            return
        if before not in (None, hub) and not any(one.share for one in hubs.values()):
            hubs[before] = hubs.get(before, HubShare()).model_copy(update={"share": 1.0})
        hubs[hub] = hubs.get(hub, HubShare()).model_copy(update={"share": share})
        self.save(hubs)

    def worked(self, hub: str, seconds: float, now: float) -> None:
        """Add `seconds` of work to the stored time of work for a hub. `now`: seconds since the epoch."""
        hubs = self.load()
        self.save({**hubs, hub: hubs.get(hub, HubShare()).worked(seconds, now)})

    def forget(self, hub: str) -> None:
        hubs = self.load()
        if hubs.pop(hub, None) is not None:
            self.save(hubs)

    def save(self, hubs: Mapping[str, HubShare]) -> None:
        """Store the shares. Raises StorageError."""
        text = _Document(hubs=dict(hubs)).model_dump_json(indent=2)
        try:
            write_private(self._file, f"{text}\n".encode())
        except OSError as error:
            raise StorageError("The shares cannot be stored.", got=f"{self._file}: {error.strerror}") from error
