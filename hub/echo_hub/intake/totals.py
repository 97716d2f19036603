"""Tells connected nodes what their keys have done over all time, and where that puts them on the leaderboard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from echo_hub.dashboard.model import public_id
from echo_hub.net.gateway import NodeInfo
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.credits import Credit, read_credits
from echo_shared.messages import DroppedCount, FromHub, Totals

FIRST_S: Final = 2.0
"""A node that has joined is told within this time, together with all that joined in it."""
EVERY_S: Final = 15.0
"""The others are told again no more often than this, and only what has changed."""
REST: Final = 19.0
"""Times what it took to ask the store: that takes no more than a twentieth of its time, in any books."""


class Listening(Protocol):
    """A connected node: `echo_hub.intake.connected.LiveNode`."""

    @property
    def info(self) -> NodeInfo: ...


class TotalsNews:
    """`nodes`: the connected ones, by their ids; a new connection is another object. `send` gives a node a message."""

    def __init__(
        self, *, store: AsyncStore, nodes: Mapping[str, Listening], send: Callable[[str, FromHub], object]
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._send = send
        self._told: dict[str, tuple[Listening, Totals]] = {}
        """What each connection was told last."""

    async def run(self) -> None:
        """Tells for ever."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            began = clock()
            if began >= due:
                await self.tell_all()
                due = clock() + EVERY_S
            else:
                await self.tell_new()
            await asyncio.sleep(max(FIRST_S, REST * (clock() - began)))

    async def tell_all(self) -> None:
        """Tells every node for which something has changed."""
        gone = [node_id for node_id in self._told if node_id not in self._nodes]
        for node_id in gone:
            del self._told[node_id]
        await self._tell(self._listening())

    async def tell_new(self) -> None:
        """Tells the nodes that have joined since."""
        is_told = {node_id: node for node_id, (node, _) in self._told.items()}
        new = {node_id: node for node_id, node in self._listening().items() if is_told.get(node_id) is not node}
        await self._tell(new)

    def _listening(self) -> dict[str, Listening]:
        return {node_id: node for node_id, node in self._nodes.items() if node.info.hears_totals}

    async def _tell(self, nodes: Mapping[str, Listening]) -> None:
        if not nodes:
            return
        credits = await self._store.read(read_credits, nodes.keys())
        for node_id, node in nodes.items():
            totals = as_message(node_id, credits[node_id])
            if self._nodes.get(node_id) is node and self._told.get(node_id) != (node, totals):
                self._told[node_id] = (node, totals)
                self._send(node_id, totals)


def as_message(node_id: str, credit: Credit) -> Totals:
    """What a node is told of itself."""
    return Totals(
        trained_rollouts=credit.trained,
        trained_tokens=credit.trained_tokens,
        evaluated_rollouts=credit.evaluated,
        dropped=tuple(DroppedCount(reason=reason, rollouts=count) for reason, count in credit.dropped.items()),
        others_checked=credit.others_checked,
        share=credit.share,
        rank=credit.rank,
        num_ranked=credit.num_ranked,
        page=f"/nodes/{public_id(node_id)}",
    )
