"""Co-located mode: the hub's learner samples for itself, and is to the coordinator a node like any other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.events import NodeConnected, NodeReported
from echo_hub.core.nodes.node import HUB_NODE_ID


class OwnSampler:
    """A node that takes a whole step's rollouts at once, by the newest published version."""

    def __init__(
        self, settings: TrainingConfig, *, report: Callable[[NodeConnected | NodeReported], Awaitable[None]]
    ) -> None:
        self._capacity = settings.groups_per_step * settings.group_size
        self._report = report

    async def join(self, policy_version: int) -> None:
        """Reports that it is there from now on."""
        await self._report(NodeConnected(node_id=HUB_NODE_ID))
        await self.holds(policy_version)

    async def holds(self, policy_version: int) -> None:
        """Reports that this version is out, so that it can be sampled from."""
        await self._report(NodeReported(node_id=HUB_NODE_ID, capacity=self._capacity, policy_version=policy_version))
