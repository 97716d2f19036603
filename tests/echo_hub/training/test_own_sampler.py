from __future__ import annotations

from echo_hub.config.training_sections import TrainingConfig
from echo_hub.core.accounting.events import NodeConnected, NodeReported
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.driving.event_queue import EventQueue
from echo_hub.training.own_sampler import OwnSampler


async def test_the_hub_takes_a_whole_step_by_the_version_that_is_out() -> None:
    queue = EventQueue()
    own = OwnSampler(TrainingConfig(groups_per_step=3, group_size=4), queue)
    await own.join(2)
    await own.holds(3)
    assert [*queue.take(), *queue.take(2)] == [
        NodeConnected(node_id=HUB_NODE_ID),
        NodeReported(node_id=HUB_NODE_ID, capacity=12, policy_version=2),
        NodeReported(node_id=HUB_NODE_ID, capacity=12, policy_version=3),
    ]
