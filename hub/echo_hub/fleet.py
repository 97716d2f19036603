"""The connected nodes as people see them, and the translation of what they say into the coordinator's events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from echo_hub.core.events import Event, LeaseGivenBack, NodeConnected, NodeDisconnected, NodeReported, RolloutArrived
from echo_hub.core.payload import RolloutPayload
from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import LocalProtocolError, RefusedError
from echo_shared.messages import (
    Fetched,
    FromNode,
    Have,
    KeyframeWanted,
    LeaseReturned,
    Links,
    NodeStatus,
    ReceiptsWanted,
    Rollout,
    Welcome,
)


@dataclass(slots=True, kw_only=True)
class LiveNode:
    """What a connected node last said of itself. Claims, for display only: nothing is credited from here."""

    info: NodeInfo
    activity: str = "preparing"
    capacity: int = 0
    policy_version: int | None = None
    tokens_per_s: float = 0.0


class Distribution(Protocol):
    """Who may be here, and what of: `echo_hub.net.distributor`."""

    def admit(self, node_id: str) -> None:
        """Raises RefusedError for a node that may not join."""

    def node_joined(self, node: NodeInfo) -> None: ...

    def node_left(self, node_id: str) -> None: ...

    async def node_said(self, node_id: str, message: Fetched | Have | Links | KeyframeWanted) -> None: ...


class Fleet:
    """The gateway's inbox. `welcome` makes the answer to a node that joins; `remember` commits who it is; `look_up`
    answers a node that asks what became of its rollouts, with what the store says of each."""

    def __init__(
        self,
        *,
        report: Callable[[Event], Awaitable[None]],
        remember: Callable[[NodeInfo], Awaitable[None]],
        look_up: Callable[[str, Sequence[str]], Awaitable[None]],
        welcome: Callable[[NodeInfo], Welcome],
        distributor: Distribution,
    ) -> None:
        self._report = report
        self._remember = remember
        self._look_up = look_up
        self._welcome = welcome
        self._distributor = distributor
        self.nodes: dict[str, LiveNode] = {}

    async def node_joined(self, node: NodeInfo) -> Welcome:
        self._distributor.admit(node.node_id)
        await self._remember(node)
        await self._report(NodeConnected(node_id=node.node_id))
        try:
            self._distributor.admit(node.node_id)  # It may have been banned meanwhile.
        except RefusedError:
            await self._report(NodeDisconnected(node_id=node.node_id))
            raise
        self.nodes[node.node_id] = LiveNode(info=node)
        self._distributor.node_joined(node)
        # Last, with nothing awaited behind it: no version may be announced between this answer and the open session.
        return self._welcome(node)

    async def node_left(self, node_id: str) -> None:
        self.nodes.pop(node_id, None)
        self._distributor.node_left(node_id)
        await self._report(NodeDisconnected(node_id=node_id))

    async def node_said(self, node_id: str, message: FromNode) -> None:
        if isinstance(message, Fetched | Have | Links | KeyframeWanted):
            await self._distributor.node_said(node_id, message)
            return
        if isinstance(message, ReceiptsWanted):
            await self._look_up(node_id, message.rollout_ids)
            return
        if isinstance(message, NodeStatus):
            live = self.nodes[node_id]
            live.activity, live.capacity = message.activity, message.capacity
            live.policy_version, live.tokens_per_s = message.policy_version, message.tokens_per_s
        await self._report(_event(node_id, message))


def _event(node_id: str, message: FromNode) -> Event:
    if isinstance(message, Rollout):
        return RolloutArrived(
            node_id=node_id,
            rollout_id=message.rollout_id,
            lease_id=message.lease_id,
            group_id=message.group_id,
            index=message.index,
            policy_version_start=message.policy_version_start,
            policy_version_end=message.policy_version_end,
            payload=RolloutPayload(
                completion_ids=message.completion_ids,
                behavior_logprobs=message.behavior_logprobs,
                finish_reason=message.finish_reason,
                sampling_s=message.sampling_s,
            ),
        )
    if isinstance(message, LeaseReturned):
        return LeaseGivenBack(
            node_id=node_id, lease_id=message.lease_id, indices=message.indices, reason=message.reason
        )
    if isinstance(message, NodeStatus):
        return NodeReported(node_id=node_id, capacity=message.capacity, policy_version=message.policy_version)
    raise LocalProtocolError("A node's message has no meaning here.", got=message.type)
