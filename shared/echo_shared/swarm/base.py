"""Interface of all swarm clients. A swarm client transfers artefacts between this process and its peers."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from echo_shared.errors import SwarmError
from echo_shared.swarm.router_ports import RouterPorts
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

PeerAddress = tuple[str, int]
"""(host name or IP address, TCP port)."""
OnProgress = Callable[[int, int], None]
"""Called on the event loop with (bytes that have arrived and match their hash, total bytes)."""


class SwarmSettings(BaseModel):
    """Addresses, rate limits and timeouts of this process's swarm client."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    listen_host: str = "0.0.0.0"
    """Address on which other peers may connect; 127.0.0.1 refuses peers on other machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for connections of other peers; 0 = any free one."""
    router_ports: bool = False
    """Ask this machine's router, by UPnP, NAT-PMP and PCP, to open `port` and the ports of `Swarm.open_port`."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload limit in bytes per second, for peers outside the local network; 0 = unlimited."""
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download limit in bytes per second, for the web seed and for peers outside the local network; 0 = unlimited."""
    web_seed_after_s: Annotated[float, Field(ge=0)] = 3.0
    """Seconds without data from any peer after which a fetch also uses the hub's web seed.

    0 = at once. A fetch with neither peers nor trackers also uses the web seed at once.
    """
    stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without data from peers and web seed after which a fetch fails. The next attempt resumes from the files
    on disk.
    """


class FetchStats(BaseModel):
    """Duration and traffic of one fetch. Byte counts include pieces that failed their hash check, but no protocol
    overhead.
    """

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
    """Swarm client of this process. Create it with `opening.open_swarm`, and end it with `close`."""

    port: int = 0
    """TCP port for incoming connections; 0 = the client takes none."""

    router: RouterPorts
    """Ports that this machine's router has opened."""

    @abstractmethod
    def open_port(self, port: int) -> None:
        """Ask the router to open a further TCP port of this machine, unless the settings forbid it. `router` has the
        answer.
        """

    @abstractmethod
    async def seed(self, torrent: bytes, directory: Path, tracker_urls: Iterable[str] = ()) -> None:
        """Serve the complete `directory`, whose contents are not checked, until `remove` or `close`."""

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
        appended to it. Raises SwarmError if no peer serves the artefact, StorageError for disk errors. When cancelled,
        the transfer stops and keeps the data on disk.
        """

    @abstractmethod
    async def add_peers(self, info_hash: bytes, peers: Iterable[PeerAddress]) -> None:
        """Add peers to a transfer. No effect if there is no transfer of this torrent."""

    @abstractmethod
    async def remove(self, info_hash: bytes) -> None:
        """Stop serving or fetching this torrent, and return after its files were closed. No effect for an unknown
        torrent.
        """

    @abstractmethod
    async def stats(self) -> Mapping[bytes, TorrentStats]:
        """Return the state of each torrent that is served or fetched, by info-hash."""

    @abstractmethod
    async def traffic(self) -> tuple[int, int]:
        """Return (bytes sent, bytes received) since the start, including protocol overhead."""

    @abstractmethod
    def set_online(self, is_online: bool) -> None:
        """Pause or resume all traffic; paused fetches wait. A client starts online."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the swarm. Running fetches fail."""


def stalled(name: str, *, after_s: float, last_problem: str) -> SwarmError:
    return SwarmError(
        f"No peer and no web seed has sent anything of {name} for {after_s:.0f} s.",
        got=last_problem or "no answer",
        do="Check the connection to the hub. The next try resumes from what has arrived.",
    )


async def resolve(peers: Iterable[PeerAddress]) -> list[PeerAddress]:
    """Return `peers` with host names replaced by IP addresses, without peers that do not resolve."""
    loop = asyncio.get_running_loop()
    found: list[PeerAddress] = []
    for host, port in peers:
        try:
            answers = await loop.getaddrinfo(host, port, type=1)
        except (OSError, ValueError) as error:  # ValueError: no host can have this name.
            log.info(
                "Skipping the swarm peer %s:%d, which does not resolve: %s.",
                printable_line(host),
                port,
                printable_line(str(error)),
            )
            continue
        found += [(str(answer[4][0]), port) for answer in answers]
    return list(dict.fromkeys(found))
