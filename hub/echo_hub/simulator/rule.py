"""Description of a scenario as input of the capacity model (`echo_hub.core.capacity`). A node that is connected for a
share `on_share` of the day counts with that share of its throughput. The values come from the scenario; a hub would
have to measure them."""

from __future__ import annotations

from typing import Final

import numpy as np

from echo_hub.core.capacity.model import NodeClass, Workload
from echo_hub.core.capacity.rule import NodeByNode, needed_staleness, useful_rollouts
from echo_hub.simulator.lengths import LengthModel
from echo_hub.simulator.population import draw_nodes
from echo_hub.simulator.scenario import Scenario

__all__ = ["classes_of", "demand_of", "needed_staleness", "pool_of", "useful_rollouts"]

SLOW: Final = 0.9
"""A node's latency in a `NodeClass` is this quantile of its times from lease to receipt."""
_GROUPS_LOOKED_AT: Final = 256


def pool_of(scenario: Scenario) -> NodeByNode:
    """Return the honest nodes' throughputs and latencies, for rollouts of mean length."""
    nodes = draw_nodes(scenario)
    mean = _lengths(scenario).mean
    delay_s = scenario.nodes.delay_s
    sampling_s = mean * np.array([node.s_per_token for node in nodes])
    prefill_s = np.array([node.prefill_s for node in nodes])
    width = np.array([node.width for node in nodes])
    return NodeByNode(
        rollouts_per_s=width / sampling_s * scenario.availability.on_share,
        latency_s=sampling_s + prefill_s + 2 * delay_s + scenario.learner.score_s,
        broadcast_s=scenario.publication.export_s + np.array([node.fetch_s for node in nodes]) + delay_s,
    )


def demand_of(scenario: Scenario) -> Workload:
    """Return the learner's demand for rollouts. A version counts as distributed when the last node has it."""
    learner, training = scenario.learner, scenario.training
    is_async = scenario.run.mode == "async"
    return Workload(
        mode=scenario.run.mode,
        rollouts_per_step=scenario.rollouts_per_step,
        train_s=learner.step_s + learner.step_s_per_rollout * scenario.rollouts_per_step,
        hand_off_s=learner.handoff_s,
        broadcast_s=float(pool_of(scenario).broadcast_s.max()),
        max_staleness=training.max_staleness if is_async else 0,
        publish_every=training.publish_every if is_async else 1,
    )


def classes_of(scenario: Scenario) -> tuple[NodeClass, ...]:
    """Return a class of one node for each honest node, for `echo_hub.core.capacity.schedule`."""
    pool, nodes = pool_of(scenario), draw_nodes(scenario)
    lengths = _lengths(scenario)
    tokens = [count for group in range(_GROUPS_LOOKED_AT) for count in lengths.of_group(group)]
    longer = float(np.quantile(tokens, SLOW)) - lengths.mean
    return tuple(
        NodeClass(name=str(number), count=1, rollouts_per_s=rate, latency_s=latency_s + longer * node.s_per_token)
        for number, (rate, latency_s, node) in enumerate(
            zip(pool.rollouts_per_s.tolist(), pool.latency_s.tolist(), nodes, strict=True)
        )
    )


def _lengths(scenario: Scenario) -> LengthModel:
    return LengthModel(scenario.lengths, group_size=scenario.training.group_size, seed=scenario.run.seed)
