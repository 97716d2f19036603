"""Opens the swarm client that this platform supports."""

from __future__ import annotations

import logging

from echo_shared.errors import SwarmError
from echo_shared.swarm.base import Swarm, SwarmSettings
from echo_shared.swarm.web_seed import WebSeedSwarm

log = logging.getLogger(__name__)


async def open_swarm(settings: SwarmSettings) -> Swarm:
    """Return a client that listens: libtorrent if a compatible version is installed, else the web seed client.

    Raises SwarmError if libtorrent cannot listen on the configured address.
    """
    try:
        from echo_shared.swarm.bittorrent import BitTorrentSwarm, check_libtorrent

        check_libtorrent()
    except (ImportError, SwarmError) as error:
        why = error.brief if isinstance(error, SwarmError) else f"libtorrent is not installed ({error})"
        log.warning("Artefacts are fetched from the hub's web seed only: %s", why)
        return WebSeedSwarm(settings)
    swarm = BitTorrentSwarm(settings)
    await swarm.listen()
    return swarm
