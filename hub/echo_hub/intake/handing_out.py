"""Leases and revocations on their way to the nodes, in the order in which the coordinator gave them.

What a lease says beyond the coordinator's action is put together here: the prompt's ids or the whole conversation so
far, how to sample, what was drawn before of its rollouts, and, for a version that a node may not have, where to fetch
it. In co-located mode the hub's own leases go to its learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from echo_hub.config.task_sections import SamplingConfig
from echo_hub.core.effects import RevokeLease, SendLease
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE
from echo_hub.intake.connected import LiveNode
from echo_hub.intake.episodes import conversation
from echo_hub.net.gateway import NodeInfo
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import AnsweredTurn, read_turns
from echo_shared.messages import ArtefactOffer, FromHub, Lease, LeasedPrefix, LeaseRevoked
from echo_shared.sampling import GroupRequest


class Offers(Protocol):
    """What nodes can fetch: `echo_hub.net.distributor`."""

    def has(self, version: int) -> bool: ...

    def lend(self, version: int, node: NodeInfo) -> ArtefactOffer: ...


class HandingOut:
    """`nodes` are those that are connected; `send` gives a node a message, `sample` the learner a request."""

    def __init__(
        self,
        settings: SamplingConfig,
        *,
        stop_ids: tuple[int, ...],
        store: AsyncStore,
        problems: Problems,
        nodes: Mapping[str, LiveNode],
        offers: Offers,
        send: Callable[[str, FromHub], object],
        sample: Callable[[GroupRequest], None],
    ) -> None:
        self._settings = settings
        self._stop_ids = stop_ids
        self._store = store
        self._problems = problems
        self._nodes = nodes
        self._offers = offers
        self._send = send
        self._sample = sample
        self._waiting: asyncio.Queue[tuple[SendLease | RevokeLease, Sequence[LeasedPrefix]]] = asyncio.Queue()

    def submit(self, action: SendLease | RevokeLease, prefixes: Sequence[LeasedPrefix] = ()) -> None:
        """`prefixes`: what the lease goes on with. The queue holds at most what the coordinator leases, so it needs no
        bound of its own."""
        self._waiting.put_nowait((action, prefixes))

    async def run(self) -> None:
        """Hands out for ever. What a later turn is asked with is read from the store, for all that wait at once."""
        while True:
            actions = [await self._waiting.get()]
            while not self._waiting.empty():
                actions.append(self._waiting.get_nowait())
            leases = [action for action, _ in actions if isinstance(action, SendLease)]
            episodes = {(lease.group_id, lease.indices[0]) for lease in leases if lease.turn}
            turns = await self._store.read(read_turns, episodes) if episodes else {}
            for action, prefixes in actions:
                if isinstance(action, SendLease):
                    before = turns.get((action.group_id, action.indices[0]), ())[: action.turn]
                    self._lease(action, before, prefixes)
                else:
                    self._send(action.node_id, LeaseRevoked(lease_id=action.lease_id, reason=action.reason))

    def _lease(self, action: SendLease, turns: Sequence[AnsweredTurn], prefixes: Sequence[LeasedPrefix]) -> None:
        """`turns`: those before, in order; gone when the group was dropped meanwhile, and the lease with it."""
        if len(turns) < action.turn:
            return
        if action.node_id == HUB_NODE_ID:
            self._sample(self._request(action, turns))
            return
        about, node = EvaluationGroup.of(action.group_id), self._nodes.get(action.node_id)
        if node is None or (about is not None and not self._offers.has(action.policy_version)):
            return  # The node has left, or the evaluation has ended: who still wants the lease sees to its deadline.
        request = self._request(action, turns)
        offered = about is not None and about.policy_version > 0
        if about is None and 0 < action.policy_version < (node.policy_version or 0):
            # It goes on with what another has drawn, perhaps by a version from before it came.
            offered = self._offers.has(action.policy_version)
        lease = Lease(
            lease_id=request.lease_id,
            group_id=request.group_id,
            indices=request.indices,
            prompt_ids=request.prompt_ids,
            seed=request.seed,
            # What follows a prefix is drawn by no older version than its end.
            policy_version=max([request.policy_version, *(one.versions[-1].policy_version for one in prefixes)]),
            temperature=GREEDY_TEMPERATURE if about and about.greedy else request.temperature,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            deadline_s=action.deadline_s,
            offer=self._offers.lend(action.policy_version, node.info) if offered else None,
            prefixes=tuple(prefixes),
            on_new_version="interrupt" if action.may_move_on else "finish",
        )
        self._send(action.node_id, lease)

    def _request(self, action: SendLease, turns: Sequence[AnsweredTurn]) -> GroupRequest:
        return GroupRequest(
            lease_id=action.lease_id,
            group_id=action.group_id,
            indices=action.indices,
            prompt_ids=conversation(self._problems.prompt_ids(action.group_id), turns),
            seed=action.seed,
            policy_version=action.policy_version,
            temperature=self._settings.temperature,
            max_tokens=self._settings.max_tokens,
            stop_ids=self._stop_ids,
        )
