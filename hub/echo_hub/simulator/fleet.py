"""All nodes of a simulated run: they connect and leave, fetch versions, take leases, and send rollouts.

A node that vanishes is disconnected at once. Either its work is lost, or the node keeps sampling and sends finished
rollouts when it is back; revocations do not reach it meanwhile. A node whose day (hours of availability) ends gives
back unfinished work. If a lease is sent twice, the node skips rollouts that it still holds or finished while it was
away. Nodes stream the tokens of unfinished rollouts to the hub; a reconnected node streams all of them again. A node
that gets a rollout begun elsewhere continues from the tokens that the hub has. Every rollout carries its spans: which
node sampled how many tokens with which version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from echo_hub.core.accounting.effects import RevokeLease, SendLease
from echo_hub.core.accounting.events import (
    Event,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutsBegun,
)
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.costs import asked_of_hub
from echo_hub.simulator.hours import Hours
from echo_hub.simulator.lengths import LengthModel
from echo_hub.simulator.node import HeldLease, Moves, Sampling, SimulatedNode
from echo_hub.simulator.population import Traits, draw_nodes, liar
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.spans import Spans
from echo_hub.simulator.spreading import Spreading
from echo_hub.simulator.work import MadeUp, SimulatedWork
from echo_shared.wire.messages import rollout_id

_NOTHING: Final[Mapping[int, Spans]] = MappingProxyType({})


class SimulatedHub(Protocol):
    """Receiver of the nodes' events, such as `echo_hub.simulator.world.World`."""

    def tell(self, event: Event) -> None: ...


class SimulatedFleet:
    """All nodes, honest ones and liars, and what happens to them in virtual time.

    `hub` gets the events; `work` provides what nodes sample; `hours` counts connected nodes. `nodes`: the honest nodes,
    if they are not drawn from the scenario. Scheduled calls (`agenda`) from a node's earlier connections are ignored.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        agenda: Agenda,
        hub: SimulatedHub,
        work: SimulatedWork | None = None,
        hours: Hours | None = None,
        nodes: Sequence[Traits] | None = None,
    ) -> None:
        self._scenario = scenario
        self._agenda = agenda
        self._hub = hub
        self._work = work or MadeUp(scenario)
        self._hours = hours or Hours()
        self.lengths = LengthModel(scenario.lengths, group_size=scenario.training.group_size, seed=scenario.run.seed)
        self._chance = np.random.default_rng([scenario.run.seed, 4])
        self._delay_s = scenario.nodes.delay_s
        self._newest_version = 0
        self._num_keys = 0
        name = HUB_NODE_ID if scenario.run.mode == "colocated" else "node-{}"
        self.honest = [
            SimulatedNode(name.format(number), number, traits, self._moves())
            for number, traits in enumerate(draw_nodes(scenario) if nodes is None else nodes)
        ]
        self._liars: dict[str, SimulatedNode] = {}
        self._begun: dict[int, list[Sampling]] = {}
        """Attempts at rollouts, by group id, while the group is neither planned nor dropped."""
        self.tokens = TokenCounts()
        publication = scenario.publication
        self._spreading = Spreading(
            agenda=agenda,
            hub_uplink_bytes_s=publication.hub_uplink_bytes_s,
            delay_s=scenario.nodes.delay_s,
            takers=self,
        )
        self._by_id = {node.node_id: node for node in self.honest}

    def begin(self) -> None:
        """Connect all nodes whose day (hours of availability) has begun, schedule the others, and connect the liars."""
        for node in self.honest:
            self._come(node)
        claims = self._scenario.false_claims
        for number in range(claims.count):
            self._come_falsely((number + 1) / claims.count * claims.fresh_key_s)

    def node(self, node_id: str) -> SimulatedNode:
        return self._by_id[node_id]

    def _moves(self) -> Moves | None:
        if self._scenario.training.on_new_version == "finish":
            return None
        return Moves(
            max_tokens=self.lengths.longest,
            prompt_tokens=round(self._scenario.lengths.prompt_tokens),
            swap_s=self._scenario.nodes.swap_s,
        )

    # --- what the hub sends

    def send_lease(self, effect: SendLease) -> None:
        """Send a lease to its node, with the tokens that the hub has of earlier attempts at its rollouts."""
        node = self._by_id[effect.node_id]
        if node.traits.width:
            given = self._given(effect) if effect.goes_on else _NOTHING
            self._agenda.at(self._agenda.now + self._delay_s, self._lease_came, (node, node.session, effect, given))

    def _given(self, lease: SendLease) -> Mapping[int, Spans]:
        """Return, by rollout index, the parts (which node sampled how many tokens with which version) of the earlier
        attempts that the lease continues, as far as the hub has their tokens."""
        earlier = set(lease.goes_on)
        return {
            sampling.index: sampling.spans(known)
            for sampling in self._begun.get(lease.group_id, ())
            if (sampling.index, sampling.lease.lease_id) in earlier and (known := self._known(sampling))
        }

    def _known(self, sampling: Sampling) -> int:
        if sampling.known is not None:
            return sampling.known
        node = sampling.lease.node
        streamed = sampling.drawn(node.streamed_at(self._agenda.now - self._delay_s, self._scenario.nodes.stream_s))
        return min(streamed, sampling.tokens - 1)

    def ended(self, group_id: int) -> None:
        """Count the tokens that were sampled for a group that is planned or dropped."""
        begun = self._begun.pop(group_id, None)
        if begun is not None:
            self.tokens.count(begun, self._agenda.now)

    def revoke(self, effect: RevokeLease) -> None:
        node = self._by_id[effect.node_id]
        self._agenda.at(self._agenda.now + self._delay_s, self._revoke_came, (node, node.session, effect.lease_id))

    def announce(self, policy_version: int) -> None:
        self._newest_version = policy_version
        there = [node for node in self.honest if node.connected]
        if self._is_planned(there):
            self._spreading.announce(policy_version, self._scenario.publication.payload_bytes, there)
        else:
            for node in there:
                self.fetch(node)
        for node in self._liars.values():
            self._report(node, policy_version)

    # --- nodes that work

    def _lease_came(self, subject: tuple[SimulatedNode, int, SendLease, Mapping[int, Spans]]) -> None:
        node, session, sent, given = subject
        if session != node.session or sent.lease_id in node.held:
            return
        if node.paused:
            self._give_back(node, sent.lease_id, sent.indices)
            return
        lease = HeldLease(node=node, lease_id=sent.lease_id, group_id=sent.group_id, policy_version=sent.policy_version)
        # The continuation must use at least the version of the prefix's last token.
        lease.needs = max([sent.policy_version, *(spans[-1].policy_version for spans in given.values())])
        tokens = self._work.lengths(sent) or dict(enumerate(self.lengths.of_group(sent.group_id)))
        lease.unfinished = {
            index: Sampling(lease, index, tokens[index], given.get(index, ()))
            for index in sent.indices
            if (sent.lease_id, index) not in node.sent_late
        }
        if lease.unfinished:
            self._begun.setdefault(sent.group_id, []).extend(lease.unfinished.values())
            self._watch(node.take(lease, self._agenda.now))

    def _revoke_came(self, subject: tuple[SimulatedNode, int, int]) -> None:
        node, session, lease_id = subject
        if session == node.session:
            self._watch(node.stop(lease_id, self._agenda.now))

    def _watch(self, begun: Iterable[Sampling]) -> None:
        for sampling in begun:
            self._agenda.at(sampling.ends_at, self._sampled, sampling)

    def _sampled(self, sampling: Sampling) -> None:
        if sampling.stopped or sampling.ends_at > self._agenda.now:
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
        payload, spans = self._work.draw(sampling), sampling.spans(sampling.tokens)
        as_leased = (lease.node.node_id, lease.policy_version)
        if any((span.node_id, span.policy_version) != as_leased for span in spans):
            payload = replace(payload, spans=spans)
        self._hub.tell(
            RolloutArrived(
                node_id=lease.node.node_id,
                rollout_id=rollout_id(lease.lease_id, index),
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                index=index,
                policy_version_start=spans[0].policy_version,
                policy_version_end=spans[-1].policy_version,
                payload=payload,
            )
        )

    # --- versions

    def _is_planned(self, nodes: Sequence[SimulatedNode]) -> bool:
        publication = self._scenario.publication
        return len(nodes) <= publication.planned_nodes and self._spreading.can_carry(publication.payload_bytes, nodes)

    def version_arrived(self, node: SimulatedNode, policy_version: int) -> None:
        """Handle a version that arrived. Of two versions in transit, the older one may arrive last."""
        if policy_version > node.policy_version:
            self._watch(node.version_came(policy_version, self._agenda.now))
            self._look_at_moves(node)
            self._report(node, policy_version)

    def _look_at_moves(self, node: SimulatedNode) -> None:
        """Schedule the node's next attempt to switch its leases to the newest version, if the leases may not switch
        yet.
        """
        if self._agenda.now < node.moves_at < inf:
            self._agenda.at(node.moves_at, self._move_on, (node, node.session))

    def _move_on(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session == node.session:
            self._watch(node.move_on(self._agenda.now))
            self._look_at_moves(node)

    def fetch(self, node: SimulatedNode) -> None:
        if node.fetching is None and node.policy_version < self._newest_version:
            node.fetching = self._newest_version
            self._agenda.at(self._agenda.now + node.traits.fetch_s, self._fetched, (node, node.session))

    def _fetched(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session != node.session or node.fetching is None:
            return
        version, node.fetching = node.fetching, None
        self.version_arrived(node, version)
        self.fetch(node)

    def _report(self, node: SimulatedNode, policy_version: int) -> None:
        self._agenda.at(self._agenda.now + self._delay_s, self._reported, (node, node.session, policy_version))

    def _reported(self, subject: tuple[SimulatedNode, int, int]) -> None:
        node, session, policy_version = subject
        if session == node.session:
            self._hub.tell(self._report_of(node, policy_version))

    def _report_of(self, node: SimulatedNode, policy_version: int) -> NodeReported:
        return NodeReported(
            node_id=node.node_id,
            capacity=node.capacity,
            policy_version=policy_version,
            tokens_per_s=node.traits.tokens_per_s,
        )

    # --- nodes that come and go

    def _come(self, node: SimulatedNode) -> None:
        """Connect the node now if its day (hours of availability) has begun, else when the day begins."""
        now, day = self._agenda.now, self._scenario.availability
        left_s = inf
        if day.on_share < 1:
            # Round the time: with an error in the last digit, the same day could end twice.
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
        self._await_pause(node)
        spool, node.spool = node.spool, []
        node.sent_late = {(sampling.lease.lease_id, sampling.index) for sampling in spool}
        for sampling in spool:
            self._send(sampling)
        self.fetch(node)

    def _connect(self, node: SimulatedNode) -> None:
        node.session += 1
        node.connected, node.connected_at, node.gone_at, node.paused = True, self._agenda.now, inf, False
        self._hours.connect(node.traits.width > 0, self._agenda.now)
        self._hub.tell(NodeConnected(node_id=node.node_id, cost_per_hour=asked_of_hub(self._scenario, node.traits)))
        self._hub.tell(self._report_of(node, node.policy_version))

    def _disconnect(self, node: SimulatedNode) -> None:
        self._tell_begun(sampling for lease in node.held.values() for sampling in lease.unfinished.values())
        node.session += 1
        node.connected, node.gone_at, node.fetching = False, self._agenda.now, None
        node.connected_s += self._agenda.now - node.connected_at
        self._hours.connect(-(node.traits.width > 0), self._agenda.now)
        self._spreading.left(node)
        self._hub.tell(NodeDisconnected(node_id=node.node_id))

    def _go(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session != node.session:
            return
        self._give_all_back(node)
        self._disconnect(node)
        self._come(node)

    def _give_all_back(self, node: SimulatedNode) -> None:
        """Give all unfinished work back, after sending the sampled tokens."""
        for lease in node.stop_all(self._agenda.now):
            for sampling in lease.unfinished.values():
                sampling.known = sampling.drawn(self._agenda.now)
            self._tell_begun(lease.unfinished.values())
            self._give_back(node, lease.lease_id, tuple(lease.unfinished))

    def _tell_begun(self, samplings: Iterable[Sampling]) -> None:
        """Tell the hub which of these rollouts have streamed tokens, so that other nodes can continue them. Called only
        when the node stops: before that, no other node needs the tokens.
        """
        ids = [rollout_id(one.lease.lease_id, one.index) for one in samplings if self._known(one)]
        if ids:
            self._hub.tell(RolloutsBegun(rollout_ids=tuple(ids)))

    def _give_back(self, node: SimulatedNode, lease_id: int, indices: tuple[int, ...]) -> None:
        reason = "the node is paused" if node.paused else "the node is leaving"
        self._hub.tell(LeaseGivenBack(node_id=node.node_id, lease_id=lease_id, indices=indices, reason=reason))

    def _await_pause(self, node: SimulatedNode) -> None:
        if rate := self._scenario.availability.pauses_per_hour:
            begins_at = self._agenda.now + self._chance.exponential(3600 / rate)
            self._agenda.at(begins_at, self._pause, (node, node.session))

    def _pause(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session == node.session:
            node.paused = True
            self._give_all_back(node)
            self._report(node, node.policy_version)
            self._agenda.at(self._agenda.now + self._scenario.availability.pause_s, self._resume, (node, session))

    def _resume(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session == node.session:
            node.paused = False
            self._report(node, node.policy_version)
            self._await_pause(node)

    def _vanish(self, subject: tuple[SimulatedNode, int]) -> None:
        node, session = subject
        if session != node.session:
            return
        failures = self._scenario.failures
        if self._chance.random() < failures.lost_share:
            self._lose(node)
        self._disconnect(node)
        self._agenda.at(self._agenda.now + failures.away_s, self._come, node)

    def _lose(self, node: SimulatedNode) -> None:
        """Drop all unfinished rollouts of a node that vanished. The hub keeps the tokens that were streamed."""
        now = self._agenda.now
        lost = [sampling for lease in node.stop_all(now) for sampling in lease.unfinished.values()]
        streamed_at = node.streamed_at(now, self._scenario.nodes.stream_s)
        for sampling in lost:
            sampling.known = min(sampling.drawn(streamed_at), sampling.tokens - 1)
        self._tell_begun(lost)
        self.tokens.lose([sampling.drawn(now) - (sampling.known or 0) for sampling in lost])

    # --- nodes that claim falsely

    def _come_falsely(self, for_s: float) -> None:
        """Connect a liar (a node that claims capacity and returns nothing) under a new key, for `for_s` seconds."""
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


class TokenCounts:
    """Counts of the tokens sampled for planned and dropped groups. `lost` and `failures` count over the whole run."""

    def __init__(self) -> None:
        self.drawn = 0
        self.given = 0
        """Number of tokens that were taken over from earlier attempts instead of being sampled."""
        self.again = 0
        """Tokens sampled at positions that another lease of the same rollout had sampled before, with any version."""
        self.lost = 0
        """Number of unsent tokens that vanished together with nodes."""
        self.failures = 0
        """Number of times that a node vanished with unfinished rollouts."""

    def count(self, begun: Sequence[Sampling], now: float) -> None:
        furthest: dict[int, int] = {}
        for sampling in begun:
            there = sampling.drawn(now)
            self.drawn += there - sampling.given
            self.given += sampling.given
            furthest[sampling.index] = max(there, furthest.get(sampling.index, 0))
            self.again += there - sampling.given
        self.again -= sum(furthest.values())

    def lose(self, tokens: Sequence[int]) -> None:
        """Count the unsent tokens of a node that vanished: `tokens` has one number per unfinished rollout."""
        self.failures += bool(tokens)
        self.lost += sum(tokens)
