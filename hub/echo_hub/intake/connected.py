"""The connected nodes as people see them, and the translation of what they say into the coordinator's events."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from echo_hub.core.events import (
    Event,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
    RolloutsBegun,
)
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.intake.partials import Finished, Partials
from echo_hub.net.client_address import origin_of
from echo_hub.net.distributor import Distributor
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.invitations import Invitations
from echo_hub.net.peer_log import PeerLog
from echo_hub.net.tracker import Tracker
from echo_hub.store.async_store import AsyncStore
from echo_shared.errors import LocalProtocolError, RefusedError
from echo_shared.messages import (
    CheckResult,
    Fetched,
    FromNode,
    Goodbye,
    Have,
    Hello,
    KeyframeWanted,
    LeaseReturned,
    Links,
    NodeStatus,
    Proof,
    ReceiptsWanted,
    Rollout,
    RolloutParts,
    Standby,
    StandbyReason,
    TeamWanted,
    Welcome,
)
from echo_shared.rollout_books import RolloutPayload

log = logging.getLogger(__name__)

SHOWN_TOKENS_PER_S: Final = 1e9
"""No node is shown as faster than this, whatever it claims, so that sums stay numbers."""


_KINDS: Final = {
    "cuda": ("nvidia", "cuda", "geforce", "rtx", "tesla"),
    "metal": ("apple", "metal"),
    "gpu": ("radeon", "amd gpu", "intel arc", "rocm", "vulkan", "gpu"),
}
"""Whose numerics are alike, by words in what nodes say of their hardware; all else computes on its processor."""


@dataclass(slots=True, kw_only=True)
class LiveNode:
    """What a connected node last said of itself. Claims, for display only: nothing is credited from here."""

    info: NodeInfo
    activity: str = "preparing"
    capacity: int = 0
    policy_version: int | None = None
    tokens_per_s: float = 0.0
    precision: str = ""
    """Of its engine's weights; empty = not known, or no engine is up."""
    cost_per_hour: float = 0.0
    """What it costs while it is active, its power included where that is counted."""
    standby: str = ""
    """Why it has no work, as it was told; empty = it was told nothing. The hub's own words, all of it."""
    affordable: bool = True
    """The spend cap does not keep it from work."""


class Distribution(Protocol):
    """Who may be here, and what of: `echo_hub.net.distributor`."""

    def admit(self, node_id: str) -> None:
        """Raises RefusedError for a node that may not join."""

    def node_joined(self, node: NodeInfo) -> None: ...

    def node_left(self, node_id: str) -> None: ...

    async def node_said(self, node_id: str, message: Fetched | Have | Links | KeyframeWanted) -> None: ...


class Checks(Protocol):
    """What nodes find of each other's rollouts: `echo_hub.verify.by_nodes`."""

    async def answered(self, node_id: str, result: CheckResult) -> None: ...

    def left(self, node_id: str) -> None: ...


class ConnectedNodes:
    """The gateway's inbox. `welcome` makes the answer to a node that joins; `check_name` raises
    RefusedError for one that looks like another; `remember` commits who it is; `look_up`
    answers a node that asks what became of its rollouts, with what the store says of each; `partials` keeps what they
    have drawn of unfinished ones; `checks` takes what they find of each other's; `invitations` are people's."""

    def __init__(
        self,
        *,
        report: Callable[[Event], Awaitable[None]],
        check_name: Callable[[NodeInfo], Awaitable[None]],
        remember: Callable[[NodeInfo], Awaitable[None]],
        look_up: Callable[[str, Sequence[str]], Awaitable[None]],
        welcome: Callable[[NodeInfo], Welcome],
        distributor: Distribution,
        partials: Partials,
        checks: Checks,
        invitations: Invitations,
        electricity_per_kwh: float = 0.0,
    ) -> None:
        self._report = report
        self._check_name = check_name
        self._remember = remember
        self._look_up = look_up
        self._welcome = welcome
        self._distributor = distributor
        self._partials = partials
        self._checks = checks
        self._invitations = invitations
        self._electricity_per_kwh = electricity_per_kwh
        self.live: dict[str, LiveNode] = {}
        self._useful: frozenset[str] = frozenset()
        self._log = PeerLog(log)  # Keys cost nothing.

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> ConnectedNodes:
        return self

    def admit(self, node_id: str) -> None:
        self._distributor.admit(node_id)

    def knows(self, node_id: str) -> bool:
        return node_id in self._useful or self._invitations.has(node_id)

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return self._invitations.find(node_id, token)

    def note_useful(self, node_ids: frozenset[str]) -> None:
        """These, and no others, have done something that was of use."""
        self._useful = node_ids

    async def node_joined(self, node: NodeInfo) -> Welcome:
        self._distributor.admit(node.node_id)
        await self._check_name(node)
        if node.invite_id is not None:
            self._invitations.take(node.node_id, node.invite_id)
        await self._remember(node)
        extra = {"event": "node_joined", "subject": node.node_id, "data": {"name": node.name, "backend": node.backend}}
        self._log.info("node %s (%s, %s) joined", node.name, node.node_id, node.backend, extra=extra)
        cost = node.cost_per_hour + node.power_watts / 1000 * self._electricity_per_kwh
        await self._report(
            NodeConnected(
                node_id=node.node_id,
                cost_per_hour=cost,
                origin=origin_of(node.host),
                invite="" if node.invite_id is None else f"invite {node.invite_id}",
                numerics=NumericsClass(node.backend, device=_kind_of(node.device)),
            )
        )
        try:
            self._distributor.admit(node.node_id)  # It may have been banned meanwhile.
        except RefusedError:
            await self._report(NodeDisconnected(node_id=node.node_id))
            raise
        self.live[node.node_id] = LiveNode(info=node, cost_per_hour=cost)
        self._distributor.node_joined(node)
        # Last, with nothing awaited behind it: no version may be announced between this answer and the open session.
        return self._welcome(node)

    def told(self, node_id: str, reason: StandbyReason | None, detail: str) -> Standby:
        """What the node is to be told of why it has no work, which pages show from now on."""
        live = self.live.get(node_id)
        if live is not None:
            live.affordable = reason is not StandbyReason.SPEND_CAP
            live.standby = "" if reason is None else f"{reason.value.replace('_', ' ')}. {detail}".strip()
        return Standby(reason=reason, detail=detail)

    def stands_by(self, node_id: str) -> bool:
        """Whether it was told why it has no work, and nothing else since."""
        live = self.live.get(node_id)
        return live is not None and bool(live.standby)

    async def node_left(self, node_id: str) -> None:
        self.live.pop(node_id, None)
        self._distributor.node_left(node_id)
        self._checks.left(node_id)
        await self._report(NodeDisconnected(node_id=node_id))

    async def node_said(self, node_id: str, message: FromNode) -> None:
        match message:
            case Fetched() | Have() | Links() | KeyframeWanted():
                await self._distributor.node_said(node_id, message)
            case ReceiptsWanted():
                await self._look_up(node_id, message.rollout_ids)
            case NodeStatus():
                live = self.live[node_id]
                live.activity, live.capacity = message.activity, message.capacity
                live.policy_version = message.policy_version
                live.tokens_per_s = min(message.tokens_per_s, SHOWN_TOKENS_PER_S)
                live.precision = message.precision
                await self._report(
                    NodeReported(
                        node_id=node_id,
                        capacity=message.capacity,
                        policy_version=message.policy_version,
                        precision=message.precision,
                        checks=message.checks,
                    )
                )
            case CheckResult():
                await self._checks.answered(node_id, message)
            case RolloutParts():
                if begun := self._partials.take(node_id, message.parts):
                    await self._report(RolloutsBegun(rollout_ids=begun))
            case Rollout():
                await self._report(_arrived(node_id, message, self._partials.finish(node_id, message)))
            case LeaseReturned():
                self._partials.given_back(node_id, message.lease_id, message.indices)
                await self._report(
                    LeaseGivenBack(
                        node_id=node_id,
                        lease_id=message.lease_id,
                        indices=message.indices,
                        reason=message.reason,
                        unusable_version=message.unusable_version,
                    )
                )
            case Hello() | Proof() | Goodbye() | TeamWanted():
                raise LocalProtocolError("No open session passes on such a message.", got=message.type)
            case _:
                assert_never(message)


def _kind_of(device: str) -> str:
    """The kind of device in what a node says of its hardware."""
    said = device.casefold()
    return next((kind for kind, signs in _KINDS.items() if any(sign in said for sign in signs)), "cpu")


def _arrived(node_id: str, rollout: Rollout, finished: Finished) -> RolloutArrived:
    return RolloutArrived(
        node_id=node_id,
        rollout_id=rollout.rollout_id,
        lease_id=rollout.lease_id,
        group_id=rollout.group_id,
        index=rollout.index,
        policy_version_start=rollout.policy_version_start,
        policy_version_end=rollout.policy_version_end,
        payload=RolloutPayload.of(rollout, finished.spans),
        problem=finished.problem,
        is_unattributed=finished.is_unattributed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcoming:
    """What a node is told when it joins, or comes back."""

    run_id: str
    run_name: str
    heartbeat_s: float
    tracker: Tracker
    distributor: Distributor
    published_version: Callable[[], int]

    def __call__(self, node: NodeInfo) -> Welcome:
        version = self.published_version()
        return Welcome(
            run_id=self.run_id,
            run_name=self.run_name,
            node_id=node.node_id,
            base=self.distributor.offer(0, node),
            policy=None if version == 0 else self.distributor.offer(version, node),
            policy_version=version,
            tracker_path=f"/announce/{self.tracker.passkey(node.node_id)}",
            heartbeat_s=self.heartbeat_s,
            run_keys=self.distributor.run_keys(),
            mesh=self.distributor.mesh_for(node),
        )


async def remember(store: AsyncStore, node: NodeInfo) -> None:
    """Commits who a node is."""
    await store.on_writer(
        store.store.node_seen,
        node_id=node.node_id,
        public_key=node.public_key,
        name=node.name,
        backend=node.backend,
        device=node.device,
        cost_per_hour=node.cost_per_hour,
        power_watts=node.power_watts,
        invite_id=node.invite_id,
        now=time.time(),
    )
