"""What every swarm client can do, whatever carries the bytes."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from echo_shared.errors import SwarmError

log = logging.getLogger(__name__)

PeerAddress = tuple[str, int]
"""(host name or IP address, TCP port)."""
OnProgress = Callable[[int, int], None]
"""Called on the event loop with (bytes that are there and match their hash, bytes in all)."""


class SwarmSettings(BaseModel):
    """How this process takes part in the swarm."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    listen_host: str = "0.0.0.0"
    """Address on which other peers may connect; 127.0.0.1 keeps them out."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for other peers; 0 = any free one."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload to peers outside the local network; 0 = unlimited."""
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download from the web seed, and from peers outside the local network; 0 = unlimited."""
    web_seed_after_s: Annotated[float, Field(ge=0)] = 3.0
    """A fetch that no peer has served for so long turns to the hub's web seed as well; 0 = at once, and so does one
    that is told of no peer and no tracker."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """A fetch that neither peer nor web seed has served for so long fails; what is there is kept for the next try."""


class FetchStats(BaseModel):
    """How one fetch went. The bytes are payload that arrived, what failed its hash check included."""

    model_config = ConfigDict(frozen=True)

    seconds: float
    swarm_bytes: int
    web_seed_bytes: int


class TorrentStats(BaseModel):
    """One torrent, now."""

    model_config = ConfigDict(frozen=True)

    peers: int
    downloaded_bytes: int
    uploaded_bytes: int
    complete: bool


class Swarm(ABC):
    """This process's part in the swarm. Made by `opening.open_swarm`; end it with `close`."""

    port: int = 0
    """Where peers can connect; 0 = nowhere."""

    @abstractmethod
    async def seed(self, torrent: bytes, directory: Path, tracker_urls: Iterable[str] = ()) -> None:
        """Serves the complete `directory`, without checking it first, until `remove` or `close`."""

    @abstractmethod
    async def fetch(
        self,
        torrent: bytes,
        parent: Path,
        *,
        peers: Iterable[PeerAddress] = (),
        tracker_urls: Iterable[str] = (),
        web_seed_url: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> FetchStats:
        """Makes the torrent's directory below `parent` complete, and goes on serving it.

        Continues from what is there already. `web_seed_url` ends in a slash; the artefact's name and a file's path
        follow it. Raises SwarmError when nobody serves it, StorageError when the disk does not take it. Cancel-safe:
        the transfer then stops, and what has arrived is kept.
        """

    @abstractmethod
    async def add_peers(self, info_hash: bytes, peers: Iterable[PeerAddress]) -> None:
        """Tells a running transfer of more peers; does nothing when there is no such transfer."""

    @abstractmethod
    async def remove(self, info_hash: bytes) -> None:
        """Stops serving or fetching this torrent; returns when its files are closed. Harmless when there is none."""

    @abstractmethod
    async def stats(self) -> Mapping[bytes, TorrentStats]:
        """All torrents that are served or fetched now, by info-hash."""

    @abstractmethod
    async def traffic(self) -> tuple[int, int]:
        """Bytes sent and received since it was opened, the protocol's own included."""

    @abstractmethod
    def set_online(self, is_online: bool) -> None:
        """Off: no byte goes in either direction, and fetches stand still; on is how it begins."""

    @abstractmethod
    async def close(self) -> None:
        """Leaves the swarm. Fetches that are under way fail."""


def stalled(name: str, *, after_s: float, last_problem: str) -> SwarmError:
    """The error of a fetch that nobody serves."""
    return SwarmError(
        f"No peer and no web seed has sent anything of {name} for {after_s:.0f} s.",
        got=last_problem or "no answer",
        do="Check the connection to the hub. The next try goes on from what has arrived.",
    )


async def resolve(peers: Iterable[PeerAddress]) -> list[PeerAddress]:
    """`peers` with IP addresses in place of names; those that do not resolve are left out."""
    loop = asyncio.get_running_loop()
    found: list[PeerAddress] = []
    for host, port in peers:
        try:
            answers = await loop.getaddrinfo(host, port, type=1)
        except OSError as error:
            log.info("The swarm peer %s:%d is left out: %s.", host, port, error)
            continue
        found += [(str(answer[4][0]), port) for answer in answers]
    return list(dict.fromkeys(found))
