"""Whose name is whose: a node may not look like another whose work has counted, and that was there before it.

A key is free, so a name belongs to nobody before its node's work has counted. Nodes of one invite may share names, and
so may those on the hub's own host, which are the operator's.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from echo_hub.net.client_address import origin_of
from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import RefusedError
from echo_shared.messages import RefusalCode
from echo_shared.messages.shown_names import looks_of

LOOK_S: Final = 30.0
"""How old what is known of the books may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedNode:
    """A node whose work has counted."""

    node_id: str
    name: str
    first_seen: float
    invite_id: int | None


class KnownNames:
    """`read` says which nodes' work has counted, those that were seen first first; `clock` in seconds."""

    def __init__(
        self, read: Callable[[], Awaitable[Sequence[CountedNode]]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._read_at = float("-inf")
        self._first: dict[str, CountedNode] = {}
        """By a look of its name."""
        self._looks: dict[str, frozenset[str]] = {}
        """By name."""

    async def check(self, node: NodeInfo) -> None:
        """Raises RefusedError for a node that looks like another one which had the name first."""
        if not origin_of(node.host):
            return
        if self._clock() - self._read_at >= LOOK_S:
            self._read_at = self._clock()
            self._take(await self._read())
        for look in looks_of(node.name):
            first = self._first.get(look)
            if first is None or first.node_id == node.node_id:
                continue
            if node.invite_id is None or node.invite_id != first.invite_id:
                raise RefusedError(
                    "The node's name looks like that of another node, which had it first.",
                    got=f"{node.name}, like {first.name} ({first.node_id[:10]})",
                    do="Give yours another, by --name NAME or echo-node config set name NAME, and start it again. All"
                    " that has counted for it stays with its key.",
                    code=RefusalCode.NAME_TAKEN,
                )

    def _take(self, nodes: Sequence[CountedNode]) -> None:
        self._looks = {node.name: self._looks.get(node.name) or looks_of(node.name) for node in nodes}
        self._first = {}
        for node in nodes:
            for look in self._looks[node.name]:
                self._first.setdefault(look, node)
