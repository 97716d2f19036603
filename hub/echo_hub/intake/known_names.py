"""Whose name is whose: a node may not look like another whose work has counted, and that was there before it.

A key is free, so a name belongs to nobody before its node's work has counted. Nodes of one invite may share names, and
so may those on the hub's own host, which are the operator's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from echo_hub.net.client_address import origin_of
from echo_hub.net.gateway import NodeInfo
from echo_shared.books import CountedName
from echo_shared.errors import RefusedError
from echo_shared.messages import RefusalCode
from echo_shared.messages.shown_names import looks_of

LOOK_S: Final = 30.0
"""Seconds after which the names are read from the database again."""


class KnownNames:
    """Names by how they look. `read` returns the counted nodes in the order in which they were first seen; `clock` in
    seconds."""

    def __init__(
        self, read: Callable[[], Awaitable[Sequence[CountedName]]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._first: dict[str, CountedName] = {}
        """By a look of its name."""

    async def check(self, node: NodeInfo) -> None:
        """Raises RefusedError for a node that looks like another one which had the name first."""
        if not origin_of(node.host):
            return
        async with self._reading:  # A second node that joins meanwhile is held against the same names.
            if self._clock() - self._read_at >= LOOK_S:
                # In a thread: 100,000 names take half a second.
                self._first = await asyncio.to_thread(_by_look, await self._read())
                self._read_at = self._clock()
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


def _by_look(nodes: Sequence[CountedName]) -> dict[str, CountedName]:
    """The first of the nodes that have each look."""
    return {look: node for node in reversed(nodes) for look in looks_of(node.name)}
