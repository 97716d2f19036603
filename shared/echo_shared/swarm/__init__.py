"""Distribution of artefacts between hub and nodes: BitTorrent first, the hub's web seed (HTTP) as fallback.

`open_swarm` returns a libtorrent session, or a client that downloads from the web seed only if libtorrent is not
available. The caller must check a fetched artefact against its signed manifest (`echo_shared.artefacts.manifest`).
"""

from echo_shared.swarm.base import FetchStats, OnProgress, PeerAddress, Swarm, SwarmSettings, TorrentStats
from echo_shared.swarm.opening import open_swarm
from echo_shared.swarm.torrent import Torrent, make_torrent, read_torrent

__all__ = [
    "FetchStats",
    "OnProgress",
    "PeerAddress",
    "Swarm",
    "SwarmSettings",
    "Torrent",
    "TorrentStats",
    "make_torrent",
    "open_swarm",
    "read_torrent",
]
