"""Limit the number of addresses that use a node's passkey. A node has few addresses; a leaked passkey is used from
many."""

from __future__ import annotations

from typing import Final

from echo_hub.net.client_address import place_of

MOST_PLACES: Final = 8
"""Maximum number of addresses per node: enough for changing internet connections and for IPv4 next to IPv6."""
FORGOTTEN_AFTER_S: Final = 3_600.0
MOST_NODES: Final = 100_000
"""Maximum number of nodes remembered; above it the node that was first seen longest ago is forgotten."""


class PasskeyUse:
    """The addresses from which each node's passkey was used. `now` is a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        """Time of the last use, by node id and address."""

    def may_use(self, node_id: str, ip: str, *, now: float) -> bool:
        """Return True if `ip` is a known address of the node, or becomes one now. A known address keeps its place until
        it was unused for FORGOTTEN_AFTER_S."""
        places, place = self._seen.setdefault(node_id, {}), place_of(ip)
        if place not in places and len(places) >= MOST_PLACES:
            for old in [old for old, at in places.items() if now - at > FORGOTTEN_AFTER_S]:
                del places[old]
            if len(places) >= MOST_PLACES:
                return False
        places[place] = now
        if len(self._seen) > MOST_NODES:
            del self._seen[next(iter(self._seen))]
        return True
