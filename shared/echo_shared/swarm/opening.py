"""Takes part in the swarm by whichever client this platform has."""

from __future__ import annotations

import logging

from echo_shared.errors import SwarmError
from echo_shared.swarm.base import Swarm, SwarmSettings
from echo_shared.swarm.web_seed import WebSeedSwarm

log = logging.getLogger(__name__)


async def open_swarm(settings: SwarmSettings) -> Swarm:
    """Return a client that is listening: by libtorrent if there is one that fits, else by the web seed alone.

    Raises SwarmError if libtorrent cannot listen there.
    """
    try:
        from echo_shared.swarm.bittorrent import BitTorrentSwarm, check_libtorrent

        check_libtorrent()
    except (ImportError, SwarmError) as error:
        why = error.brief if isinstance(error, SwarmError) else f"libtorrent is not installed ({error})"
        log.warning("Artefacts come from the hub's web seed alone: %s", why)
        return WebSeedSwarm(settings)
    swarm = BitTorrentSwarm(settings)
    await swarm.listen()
    return swarm
