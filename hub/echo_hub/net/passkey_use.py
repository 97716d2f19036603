"""From how many addresses a node's passkey is used: a node has a few, a passkey that was given away has many."""

from __future__ import annotations

from typing import Final

from echo_hub.net.client_address import place_of

MOST_PLACES: Final = 8
"""Addresses of one node at a time: lines that change, and both versions of the Internet Protocol."""
FORGOTTEN_AFTER_S: Final = 3_600.0
MOST_NODES: Final = 100_000
"""Of more, those are forgotten that came first."""


class PasskeyUse:
    """`now` is any clock that only goes forward."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        """By node, its addresses and when each was used last."""

    def may_use(self, node_id: str, ip: str, *, now: float) -> bool:
        """Whether this address is one of the node's, or may become one. Those that it has keep their places."""
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
