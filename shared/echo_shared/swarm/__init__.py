"""The swarm: how artefacts travel between the hub and the nodes. BitTorrent first, the hub's web seed where that fails.

`open_swarm` gives libtorrent's session where libtorrent has a build, and downloads over the web seed alone elsewhere.
Whoever fetches checks the result against the signed manifest (`echo_shared.artefacts`) before using it.
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
