"""All nodes of a simulated run: they come and go, fetch versions, take leases, send what they have sampled.

A node that falls silent is disconnected at once. What it held is lost, or it samples on and sends what it has finished
once it is back; it does not hear what is revoked meanwhile. One whose day is over gives back what it has not finished.
A lease may be sent again: a node that still has it, or has finished some of it while it was away, does nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.effects import RevokeLease, SendLease
from echo_hub.core.events import (
    Event,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
)
from echo_hub.core.payload import RolloutPayload
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.costs import asked_of_hub
from echo_hub.simulator.lengths import Lengths
from echo_hub.simulator.node import HeldLease, Sampling, SimulatedNode
from echo_hub.simulator.population import draw_nodes, liar
from echo_hub.simulator.scenario import Scenario
from echo_shared.messages import FinishReason, rollout_id


class Fleet:
    """`tell`: what the hub hears. Entries of an earlier session of a node's come to nothing."""

    def __init__(self, scenario: Scenario, *, agenda: Agenda, tell: Callable[[Event], None]) -> None:
        self._scenario = scenario
        self._agenda = agenda
        self._tell = tell
        self._lengths = Lengths(scenario.lengths, group_size=scenario.training.group_size, seed=scenario.run.seed)
        self._chance = np.random.default_rng([scenario.run.seed, 4])
        self._delay_s = scenario.nodes.delay_s
        self._ids: dict[int, NDArray[np.int32]] = {}
        self._newest_version = 0
        self._num_keys = 0
        self.honest = [SimulatedNode(f"node-{number}", number, t) for number, t in enumerate(draw_nodes(scenario))]
        self._liars: dict[str, SimulatedNode] = {}
        self._by_id = {node.node_id: node for node in self.honest}

    def begin(self) -> None:
        """Whoever is on is there."""
        for node in self.honest:
            self._come(node)
        claims = self._scenario.false_claims
        for number in range(claims.count):
            self._come_falsely((number + 1) / claims.count * claims.fresh_key_s)

    def node(self, node_id: str) -> SimulatedNode:
        return self._by_id[node_id]

    # --- what the hub sends

    def send_lease(self, effect: SendLease) -> None:
        node = self._by_id[effect.node_id]
        if node.traits.width:
            self._agenda.at(self._agenda.now + self._delay_s, self._lease_came, (node, node.session, effect))

    def revoke(self, effect: RevokeLease) -> None:
        node = self._by_id[effect.node_id]
        self._agenda.at(self._agenda.now + self._delay_s, self._revoke_came, (node, node.session, effect.lease_id))

    def announce(self, policy_version: int) -> None:
        self._newest_version = policy_version
        for node in self.honest:
            if node.connected:
                self._fetch(node)
        for node in self._liars.values():
            self._report(node, policy_version)

    # --- nodes that work

    def _lease_came(self, subject: tuple[SimulatedNode, int, SendLease]) -> None:
        node, session, sent = subject
        if session != node.session or sent.lease_id in node.held:
            return
        lease = HeldLease(node=node, lease_id=sent.lease_id, group_id=sent.group_id, policy_version=sent.policy_version)
        tokens = self._lengths.of_group(sent.group_id)
        lease.unfinished = {
            index: Sampling(lease, index, tokens[index])
            for index in sent.indices
            if (sent.lease_id, index) not in node.sent_late
        }
        if lease.unfinished:
            self._watch(node.take(lease, self._agenda.now))

    def _revoke_came(self, subject: tuple[SimulatedNode, int, int]) -> None:
        node, session, lease_id = subject
        if session == node.session:
            self._watch(node.stop(lease_id, self._agenda.now))

    def _watch(self, begun: Iterable[Sampling]) -> None:
        for sampling in begun:
            self._agenda.at(sampling.ends_at, self._sampled, sampling)

    def _sampled(self, sampling: Sampling) -> None:
        if sampling.stopped:
            return
        node = sampling.lease.node
        self._watch(node.finish(sampling, self._agenda.now))
        if node.connected:
            self._send(sampling)
        else:
            node.spool.append(sampling)

    def _send(self, sampling: Sampling) -> None:
        self._agenda.at(self._agenda.now + self._delay_s, self._arrived, sampling)

    def _arrived(self, sampling: Sampling) -> None:
        lease, index = sampling.lease, sampling.index
        self._tell(
            RolloutArrived(
                node_id=lease.node.node_id,
                rollout_id=rollout_id(lease.lease_id, index),
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                index=index,
                policy_version_start=lease.policy_version,
                policy_version_end=lease.policy_version,
                payload=self._payload(sampling),
            )
        )

    def _payload(self, sampling: Sampling) -> RolloutPayload:
        """Its tokens have no meaning: one array serves all completions of a length."""
        ids = self._ids.get(sampling.tokens)
        if ids is None:
            ids = self._ids[sampling.tokens] = np.zeros(sampling.tokens, np.int32)
        return RolloutPayload(
            completion_ids=ids,
            behavior_logprobs=ids.view(np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=sampling.ends_at - sampling.began_at,
        )

    # --- versions

    def _fetch(self, node: SimulatedNode) -> None:
        if node.fetching is None and node.policy_version < self._newest_version:
            node.fetching = self._newest_version
            self._agenda.at(self._agenda.now + node.traits.fetch_s, self._fetched, (node, node.session))

    def _fetched(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session != node.session or node.fetching is None:
            return
        version, node.fetching = node.fetching, None
        self._watch(node.version_came(version, self._agenda.now))
        self._report(node, version)
        self._fetch(node)

    def _report(self, node: SimulatedNode, policy_version: int) -> None:
        self._agenda.at(self._agenda.now + self._delay_s, self._reported, (node, node.session, policy_version))

    def _reported(self, subject: tuple[SimulatedNode, int, int]) -> None:
        node, session, policy_version = subject
        if session == node.session:
            self._tell(NodeReported(node_id=node.node_id, capacity=node.traits.capacity, policy_version=policy_version))

    # --- nodes that come and go

    def _come(self, node: SimulatedNode) -> None:
        """Joins, if its day allows it, or else when that begins."""
        now, day = self._agenda.now, self._scenario.availability
        left_s = inf
        if day.on_share < 1:
            # Rounded, for a day must not end again at the moment at which it has ended.
            since_on = round((now / day.day_s + node.traits.phase) % 1.0, 9) % 1.0 * day.day_s
            left_s = round(day.on_share, 9) * day.day_s - since_on
            if left_s <= 0:
                self._agenda.at(now + day.day_s - since_on, self._come, node)
                return
        self._connect(node)
        if left_s < inf:
            self._agenda.at(now + left_s, self._go, (node, node.session))
        if rate := self._scenario.failures.per_hour:
            self._agenda.at(now + self._chance.exponential(3600 / rate), self._vanish, (node, node.session))
        spool, node.spool = node.spool, []
        node.sent_late = {(sampling.lease.lease_id, sampling.index) for sampling in spool}
        for sampling in spool:
            self._send(sampling)
        self._fetch(node)

    def _connect(self, node: SimulatedNode) -> None:
        node.session += 1
        node.connected, node.connected_at = True, self._agenda.now
        self._tell(NodeConnected(node_id=node.node_id, cost_per_hour=asked_of_hub(self._scenario, node.traits)))
        self._tell(
            NodeReported(node_id=node.node_id, capacity=node.traits.capacity, policy_version=node.policy_version)
        )

    def _disconnect(self, node: SimulatedNode) -> None:
        node.session += 1
        node.connected, node.fetching = False, None
        node.connected_s += self._agenda.now - node.connected_at
        self._tell(NodeDisconnected(node_id=node.node_id))

    def _go(self, subject: tuple[SimulatedNode, int]) -> None:
        """Its day is over."""
        node, session = subject
        if session != node.session:
            return
        for lease in node.stop_all():
            self._tell(
                LeaseGivenBack(
                    node_id=node.node_id,
                    lease_id=lease.lease_id,
                    indices=tuple(lease.unfinished),
                    reason="the node is leaving",
                )
            )
        self._disconnect(node)
        self._come(node)

    def _vanish(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session != node.session:
            return
        failures = self._scenario.failures
        if self._chance.random() < failures.lost_share:
            node.stop_all()
        self._disconnect(node)
        self._agenda.at(self._agenda.now + failures.away_s, self._come, node)

    # --- nodes that claim falsely

    def _come_falsely(self, for_s: float) -> None:
        """A key that nobody knows, for so long."""
        number = len(self.honest) + self._num_keys
        self._num_keys += 1
        node = SimulatedNode(f"liar-{self._num_keys}", number, liar(self._scenario))
        node.policy_version = self._newest_version
        self._liars[node.node_id] = self._by_id[node.node_id] = node
        self._connect(node)
        self._agenda.at(self._agenda.now + for_s, self._change_key, node)

    def _change_key(self, node: SimulatedNode) -> None:
        del self._liars[node.node_id]
        self._disconnect(node)
        self._come_falsely(self._scenario.false_claims.fresh_key_s)
