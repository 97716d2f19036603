"""Send connected nodes their totals (counts of their rollouts since the run began), and their rank on the
leaderboard."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from echo_hub.dashboard.model import public_id
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.live_nodes import NodeSender
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.credits import Credit, read_credits
from echo_shared.wire.messages import DroppedCount, Totals

FIRST_S: Final = 2.0
"""Shortest time between two rounds of sending, in seconds. Most rounds go only to nodes that have joined since the last
round."""
EVERY_S: Final = 15.0
"""Shortest time between two rounds to all nodes, in seconds. Unchanged totals are not sent."""
REST: Final = 19.0
"""Pause after a round, as a multiple of the round's duration, so that totals take at most a twentieth of the time."""


class TotalsNews:
    """Sends totals (counts of a node's rollouts) to the connected nodes that understand this message."""

    def __init__(self, *, store: AsyncStore, nodes: Mapping[str, NodeInfo], connections: NodeSender) -> None:
        self._store = store
        self._nodes = nodes
        self._connections = connections
        self._told: dict[str, tuple[NodeInfo, Totals]] = {}
        """Last totals sent to each node, with the connection on which they were sent."""

    async def run(self) -> None:
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
        """Send totals to every node whose totals have changed."""
        gone = [node_id for node_id in self._told if node_id not in self._nodes]
        for node_id in gone:
            del self._told[node_id]
        await self._tell(self._listening())

    async def tell_new(self) -> None:
        """Send totals to the nodes that have joined since the last round."""
        is_told = {node_id: node for node_id, (node, _) in self._told.items()}
        new = {node_id: node for node_id, node in self._listening().items() if is_told.get(node_id) is not node}
        await self._tell(new)

    def _listening(self) -> dict[str, NodeInfo]:
        return {node_id: node for node_id, node in self._nodes.items() if node.hears_totals}

    async def _tell(self, nodes: Mapping[str, NodeInfo]) -> None:
        if not nodes:
            return
        credits = await self._store.read(read_credits, nodes.keys())
        for node_id, node in nodes.items():
            totals = as_message(node_id, credits[node_id])
            told_node, told = self._told.get(node_id, (None, None))
            if self._nodes.get(node_id) is node and (told_node is not node or told != totals):
                self._told[node_id] = (node, totals)
                self._connections.send(node_id, totals)


def as_message(node_id: str, credit: Credit) -> Totals:
    return Totals(
        trained_rollouts=credit.trained,
        trained_tokens=credit.trained_tokens,
        evaluated_rollouts=credit.evaluated,
        answered_rollouts=credit.answered,
        answered_tokens=credit.answered_tokens,
        dropped=tuple(DroppedCount(reason=reason, rollouts=count) for reason, count in credit.dropped.items()),
        others_checked=credit.others_checked,
        share=credit.share,
        rank=credit.rank,
        num_ranked=credit.num_ranked,
        page=f"/nodes/{public_id(node_id)}",
    )
