"""Interface of all swarm clients, independent of the transport."""

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
"""Called on the event loop with (bytes that have arrived and match their hash, total bytes)."""


class SwarmSettings(BaseModel):
    """Addresses, rate limits and timeouts of this process's swarm client."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    listen_host: str = "0.0.0.0"
    """Address on which other peers may connect; 127.0.0.1 blocks remote peers."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for other peers; 0 = any free one."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload to peers outside the local network; 0 = unlimited."""
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download from the web seed, and from peers outside the local network; 0 = unlimited."""
    web_seed_after_s: Annotated[float, Field(ge=0)] = 3.0
    """Silence of all peers, in seconds, after which a fetch also uses the hub's web seed.

    0 = at once. A fetch without peers and trackers does not wait either.
    """
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Silence of peers and web seed, in seconds, after which a fetch fails; the next try resumes from the files."""


class FetchStats(BaseModel):
    """Time and traffic of one fetch. Bytes count received payload, including pieces that failed their hash check."""

    model_config = ConfigDict(frozen=True)

    seconds: float
    swarm_bytes: int
    web_seed_bytes: int


class TorrentStats(BaseModel):
    """Current state of one torrent."""

    model_config = ConfigDict(frozen=True)

    peers: int
    downloaded_bytes: int
    uploaded_bytes: int
    complete: bool


class Swarm(ABC):
    """Swarm client of this process. Create it with `opening.open_swarm`, end it with `close`."""

    port: int = 0
    """TCP port for incoming connections; 0 = none."""

    @abstractmethod
    async def seed(self, torrent: bytes, directory: Path, tracker_urls: Iterable[str] = ()) -> None:
        """Serve the complete `directory`, without checking its contents, until `remove` or `close`."""

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
        """Complete the torrent's directory below `parent`, then continue to serve it.

        Resumes from existing files. `web_seed_url` ends in a slash; the artefact's name and the file's path are
        appended to it. Raises SwarmError if no peer serves the artefact, StorageError if the disk fails. Cancel-safe:
        the transfer stops and keeps what has arrived.
        """

    @abstractmethod
    async def add_peers(self, info_hash: bytes, peers: Iterable[PeerAddress]) -> None:
        """Add peers to a running transfer; no effect if there is none."""

    @abstractmethod
    async def remove(self, info_hash: bytes) -> None:
        """Stop serving or fetching this torrent, and return once its files are closed. No effect if it is unknown."""

    @abstractmethod
    async def stats(self) -> Mapping[bytes, TorrentStats]:
        """Return the state of every torrent that is served or fetched, by info-hash."""

    @abstractmethod
    async def traffic(self) -> tuple[int, int]:
        """Return (bytes sent, bytes received) since opening, protocol overhead included."""

    @abstractmethod
    def set_online(self, is_online: bool) -> None:
        """Pause or resume all traffic; paused fetches wait. A new client is online."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the swarm. Running fetches fail."""


def stalled(name: str, *, after_s: float, last_problem: str) -> SwarmError:
    """Return the error for a fetch that no peer and no web seed serves."""
    return SwarmError(
        f"No peer and no web seed has sent anything of {name} for {after_s:.0f} s.",
        got=last_problem or "no answer",
        do="Check the connection to the hub. The next try resumes from what has arrived.",
    )


async def resolve(peers: Iterable[PeerAddress]) -> list[PeerAddress]:
    """Return `peers` with host names replaced by IP addresses; peers that do not resolve are left out."""
    loop = asyncio.get_running_loop()
    found: list[PeerAddress] = []
    for host, port in peers:
        try:
            answers = await loop.getaddrinfo(host, port, type=1)
        except OSError as error:
            log.info("Skipping the swarm peer %s:%d, which does not resolve: %s.", host, port, error)
            continue
        found += [(str(answer[4][0]), port) for answer in answers]
    return list(dict.fromkeys(found))
