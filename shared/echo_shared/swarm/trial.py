"""Self-test of libtorrent: one client on this machine fetches a small artefact from another.

    python -m echo_shared.swarm.trial

The command fails with an exception if a function that a transfer needs is missing or broken.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from echo_shared.errors import SwarmError
from echo_shared.swarm.base import SwarmSettings
from echo_shared.swarm.bittorrent import BitTorrentSwarm
from echo_shared.swarm.torrent import make_torrent

_LOOPBACK: Final = "127.0.0.1"
_TRIAL_S: Final = 30.0


async def trial(directory: Path) -> None:
    """Fetch an artefact within `directory`. Raises SwarmError, TimeoutError, or any error of a broken libtorrent."""
    artefact = directory / "from" / "artefact"
    artefact.mkdir(parents=True)
    (artefact / "file").write_bytes(bytes(range(256)) * 256)
    torrent = make_torrent(artefact)
    settings = SwarmSettings(listen_host=_LOOPBACK)
    seeder, fetcher = BitTorrentSwarm(settings), BitTorrentSwarm(settings)
    async with asyncio.timeout(_TRIAL_S):
        try:
            await seeder.listen()
            await fetcher.listen()
            await seeder.seed(torrent.torrent, artefact)
            await fetcher.fetch(torrent.torrent, directory / "to", peers=[(_LOOPBACK, seeder.port)])
            await fetcher.stats()
            await fetcher.traffic()
        finally:
            await fetcher.close()
            await seeder.close()
    if (directory / "to" / "artefact" / "file").read_bytes() != (artefact / "file").read_bytes():
        raise SwarmError("The fetched file differs from the file that was sent.")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="echo-swarm-trial-", ignore_cleanup_errors=True) as directory:
        asyncio.run(trial(Path(directory)))


if __name__ == "__main__":
    main()
