"""The shares of a node's hubs, on disk: read anew for each turn, so that a running node heeds what is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_node.core.shares import HubShare
from echo_shared.errors import StorageError
from echo_shared.files import write_private


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    hubs: dict[str, HubShare] = {}
    """By address."""


class SharesFile:
    """shares.json; no file = no hub has a share."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> dict[str, HubShare]:
        """Raises StorageError."""
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
        """`hub` is worked for from now on: beside the others, or alone where it has no share (0).

        `before`: whom the node worked for until now; it has a share of 1 beside the new one, unless it has another.
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
        """Adds what a hub has had. `now`: seconds since the epoch."""
        hubs = self.load()
        self.save({**hubs, hub: hubs.get(hub, HubShare()).worked(seconds, now)})

    def forget(self, hub: str) -> None:
        hubs = self.load()
        if hubs.pop(hub, None) is not None:
            self.save(hubs)

    def save(self, hubs: Mapping[str, HubShare]) -> None:
        """Raises StorageError."""
        text = _Document(hubs=dict(hubs)).model_dump_json(indent=2)
        try:
            write_private(self._file, f"{text}\n".encode())
        except OSError as error:
            raise StorageError("The shares cannot be kept.", got=f"{self._file}: {error.strerror}") from error
