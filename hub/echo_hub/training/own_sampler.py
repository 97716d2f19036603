"""Co-located mode: the learner also samples, on the hub's own device. The coordinator treats it as a node."""

from __future__ import annotations

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.events import NodeConnected, NodeReported
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.driving.event_queue import EventQueue


class OwnSampler:
    """The learner's own sampler, which the coordinator treats as a node. It takes all rollouts of a step at once, and
    samples with the newest published version."""

    def __init__(self, settings: TrainingConfig, queue: EventQueue) -> None:
        self._capacity = settings.groups_per_step * settings.group_size
        self._queue = queue

    async def join(self, policy_version: int) -> None:
        """Tell the coordinator that the sampler is connected and holds this version."""
        await self._queue.put(NodeConnected(node_id=HUB_NODE_ID))
        await self.holds(policy_version)

    async def holds(self, policy_version: int) -> None:
        """Report a version that was just published. From now on, the sampler uses it."""
        await self._queue.put(NodeReported(node_id=HUB_NODE_ID, capacity=self._capacity, policy_version=policy_version))
