"""Connected nodes: admits them, and turns their messages into events of the coordinator."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, assert_never

from echo_hub.core.accounting.events import (
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutsBegun,
)
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.driving.event_queue import EventQueue
from echo_hub.intake.command_relay import CommandRelay
from echo_hub.intake.early_stops import EarlyStops
from echo_hub.intake.known_nodes import KnownNodes
from echo_hub.intake.partials import FinishedPartial, Partials
from echo_hub.intake.receipts import ReceiptLookUps
from echo_hub.net.client_address import origin_of
from echo_hub.net.distributor import Distributor
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.invitations import Invitations
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.peer_log import PeerLog
from echo_hub.net.sightings import SIGHTING_PATH
from echo_hub.net.tracker import Tracker
from echo_hub.scoring.asked import GroupBounds
from echo_hub.verify.by_nodes import NodeChecks
from echo_hub.verify.scores_by_nodes import NodeScores
from echo_shared.errors import LocalProtocolError, RefusedError
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import LiveNode
from echo_shared.wire.messages import (
    CheckResult,
    Fetched,
    FleetReport,
    FleetWanted,
    FromNode,
    Goodbye,
    Have,
    Hello,
    KeyframeWanted,
    LeaseReturned,
    Links,
    MeetWanted,
    NodeStatus,
    Proof,
    ReceiptsWanted,
    Rollout,
    RolloutParts,
    TeamWanted,
    Welcome,
)
from echo_shared.wire.routes import own_routes

log = logging.getLogger(__name__)

SHOWN_TOKENS_PER_S: Final = 1e9
"""Highest speed displayed for a node, in tokens per second, so that sums of claimed speeds stay finite."""


_KINDS: Final = {
    "cuda": ("nvidia", "cuda", "geforce", "rtx", "tesla"),
    "metal": ("apple", "metal"),
    "gpu": ("radeon", "amd gpu", "intel arc", "rocm", "vulkan", "gpu"),
}
"""Device kinds whose devices compute with similar rounding, each with the words by which a reported device name is
recognised. All other devices are CPUs."""


class ConnectedNodes:
    """The inbox of the hub's connections: receives every message of every connected node."""

    def __init__(
        self,
        *,
        queue: EventQueue,
        live: LiveNodes,
        register: KnownNodes,
        welcoming: Welcoming,
        distributor: Distributor,
        look_ups: ReceiptLookUps,
        checks: NodeChecks,
        scores: NodeScores,
        relay: CommandRelay,
        partials: Partials,
        bounds: GroupBounds,
        early_stops: EarlyStops,
        invitations: Invitations,
        electricity_per_kwh: float = 0.0,
    ) -> None:
        """`partials` keeps the tokens of unfinished rollouts. The stop strings of `bounds` cut finished rollouts. This
        object keeps `live` up to date."""
        self._queue = queue
        self._live = live
        self._register = register
        self._welcoming = welcoming
        self._distributor = distributor
        self._look_ups = look_ups
        self._checks = checks
        self._scores = scores
        self._relay = relay
        self._partials = partials
        self._bounds = bounds
        self._early_stops = early_stops
        self._invitations = invitations
        self._electricity_per_kwh = electricity_per_kwh
        self._useful: frozenset[str] = frozenset()
        self._log = PeerLog(log)  # Limit log lines about joins: a stranger can join with any number of new keys.

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> ConnectedNodes:
        return self

    def admit(self, node_id: str) -> None:
        self._distributor.admit(node_id)

    def knows(self, node_id: str) -> bool:
        return node_id in self._useful or self._invitations.has(node_id)

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return self._invitations.find(node_id, token)

    def note_useful(self, node_ids: frozenset[str]) -> None:
        self._useful = node_ids

    async def node_joined(self, node: NodeInfo) -> Welcome:
        self._distributor.admit(node.node_id)
        await self._register.check_name(node)
        if node.invite_id is not None:
            self._invitations.take(node.node_id, node.invite_id)
        await self._register.remember(node)
        extra = {"event": "node_joined", "subject": node.node_id, "data": {"name": node.name, "backend": node.backend}}
        self._log.info("node %s (%s, %s) joined", node.name, node.node_id, node.backend, extra=extra)
        cost = node.cost_per_hour + node.power_watts / 1000 * self._electricity_per_kwh
        await self._queue.put(
            NodeConnected(
                node_id=node.node_id,
                cost_per_hour=cost,
                origin=origin_of(node.host),
                invite="" if node.invite_id is None else f"invite {node.invite_id}",
                owner=f"owner {node.owner_key.hex()}" if node.owner_key else "",
                numerics=NumericsClass(node.backend, device=_kind_of(node.device)),
                answers=node.answers,
                refuses=frozenset(node.refuses),
            )
        )
        try:
            self._distributor.admit(node.node_id)  # The operator may have banned the node meanwhile.
        except RefusedError:
            await self._queue.put(NodeDisconnected(node_id=node.node_id))
            raise
        self._live[node.node_id] = LiveNode(cost_per_hour=cost)
        self._distributor.node_joined(node)
        # Keep this last and without an await: the node would miss a version announced between its Welcome and the
        # opening of its session.
        return self._welcoming.welcome(node)

    async def node_left(self, node_id: str) -> None:
        self._live.pop(node_id, None)
        self._distributor.node_left(node_id)
        self._checks.left(node_id)
        await self._queue.put(NodeDisconnected(node_id=node_id))

    async def node_said(self, node_id: str, message: FromNode, frame: bytes = b"") -> None:
        match message:
            case Fetched() | Have() | Links() | MeetWanted() | KeyframeWanted():
                await self._distributor.node_said(node_id, message)
            case ReceiptsWanted():
                await self._look_ups.answer(node_id, message.rollout_ids)
            case NodeStatus():
                await self._status(node_id, message)
            case CheckResult():
                if not self._scores.answered(node_id, message):
                    await self._checks.answered(node_id, message)
            case FleetReport():
                self._relay.reported(node_id, message)
            case RolloutParts():
                if begun := self._partials.take(node_id, message.parts):
                    await self._queue.put(RolloutsBegun(rollout_ids=begun))
                for ended in self._early_stops.ended(node_id, message.parts):
                    await self._queue.put(replace(self._finished(node_id, ended), ends_early=True))
            case Rollout():
                await self._queue.put(self._finished(node_id, message))
            case LeaseReturned():
                self._partials.given_back(node_id, message.lease_id, message.indices)
                await self._queue.put(
                    LeaseGivenBack(
                        node_id=node_id,
                        lease_id=message.lease_id,
                        indices=message.indices,
                        reason=message.reason,
                        unusable_version=message.unusable_version,
                    )
                )
            case Hello() | Proof() | Goodbye() | TeamWanted() | FleetWanted():
                raise LocalProtocolError("No open session passes on such a message.", got=message.type)
            case _:
                assert_never(message)

    def _finished(self, node_id: str, rollout: Rollout) -> RolloutArrived:
        arrived = _arrived(node_id, rollout, self._partials.finish(node_id, rollout))
        return self._bounds.of(rollout.group_id).stop_strings.arrived(arrived)

    async def _status(self, node_id: str, said: NodeStatus) -> None:
        tokens_per_s = min(said.tokens_per_s, SHOWN_TOKENS_PER_S)
        self._live[node_id] = replace(
            self._live[node_id],
            activity=said.activity,
            capacity=said.capacity,
            policy_version=said.policy_version,
            tokens_per_s=tokens_per_s,
            precision=said.precision,
        )
        await self._queue.put(
            NodeReported(
                node_id=node_id,
                capacity=said.capacity,
                policy_version=said.policy_version,
                tokens_per_s=tokens_per_s,
                precision=said.precision,
                checks=said.checks,
            )
        )


def _kind_of(device: str) -> str:
    """Return the device's kind, a key of `_KINDS` or "cpu", by words in the name that the node reported."""
    said = device.casefold()
    return next((kind for kind, signs in _KINDS.items() if any(sign in said for sign in signs)), "cpu")


def _arrived(node_id: str, rollout: Rollout, finished: FinishedPartial) -> RolloutArrived:
    return RolloutArrived(
        node_id=node_id,
        rollout_id=rollout.rollout_id,
        lease_id=rollout.lease_id,
        group_id=rollout.group_id,
        index=rollout.index,
        policy_version_start=rollout.policy_version_start,
        policy_version_end=rollout.policy_version_end,
        payload=replace(RolloutPayload.of(rollout, finished.spans), routes=own_routes(rollout, rollout.num_given)),
        problem=finished.problem,
        is_unattributed=finished.is_unattributed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcoming:
    """Makes the message (Welcome) that answers a node that joins or reconnects."""

    run_id: str
    run_name: str
    heartbeat_s: float
    tracker: Tracker
    distributor: Distributor
    coordinator: Coordinator
    punching: bool
    """True: the hub helps nodes behind routers to link with each other."""

    def welcome(self, node: NodeInfo) -> Welcome:
        version = self.coordinator.published_version
        passkey = self.tracker.passkey(node.node_id)
        return Welcome(
            run_id=self.run_id,
            run_name=self.run_name,
            node_id=node.node_id,
            base=self.distributor.offer(0, node),
            gguf=self.distributor.gguf_offer(node),
            policy=None if version == 0 else self.distributor.offer(version, node),
            policy_version=version,
            tracker_path=f"/announce/{passkey}",
            heartbeat_s=self.heartbeat_s,
            run_keys=self.distributor.run_keys(),
            mesh=self.distributor.mesh_for(node),
            sighting_path=f"{SIGHTING_PATH}{passkey}" if self.punching else "",
        )
