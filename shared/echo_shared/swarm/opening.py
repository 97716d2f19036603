"""Takes part in the swarm by whichever client this platform has."""

from __future__ import annotations

import logging

from echo_shared.swarm.base import Swarm, SwarmSettings
from echo_shared.swarm.web_seed import WebSeedSwarm

log = logging.getLogger(__name__)


async def open_swarm(settings: SwarmSettings) -> Swarm:
    """A client that is listening, by libtorrent where it has a build. Raises SwarmError when it cannot listen there."""
    try:
        from echo_shared.swarm.bittorrent import BitTorrentSwarm
    except ImportError as error:
        log.warning("libtorrent is not installed (%s): artefacts come from the hub's web seed alone.", error)
        return WebSeedSwarm(settings)
    swarm = BitTorrentSwarm(settings)
    await swarm.listen()
    return swarm
