"""Send leases and revocations to nodes, in the order in which the coordinator made them.

A lease message contains more than the coordinator's action: the prompt's ids or the conversation so far, the sampling
parameters, earlier tokens of unfinished rollouts, and the offer of a version that the node may lack. In co-located mode
the hub's own leases go to its learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from echo_hub.config.task_sections import SamplingConfig
from echo_hub.core.accounting.effects import RevokeLease, SendLease
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE
from echo_hub.intake.episodes import conversation
from echo_hub.net.distributor import Distributor
from echo_hub.net.live_nodes import NodeSender
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import AnsweredTurn, read_turns
from echo_hub.training.trainer import Trainer
from echo_shared.records.run import LiveNode
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Lease, LeasedPrefix, LeaseRevoked


class HandingOut:
    """Sends leases. `nodes` are the connected nodes, `stop_ids` the stop tokens."""

    def __init__(
        self,
        settings: SamplingConfig,
        *,
        stop_ids: tuple[int, ...],
        store: AsyncStore,
        problems: Problems,
        nodes: Mapping[str, LiveNode],
        offers: Distributor,
        connections: NodeSender,
        own_device: Trainer,
    ) -> None:
        self._settings = settings
        self._stop_ids = stop_ids
        self._store = store
        self._problems = problems
        self._nodes = nodes
        self._offers = offers
        self._connections = connections
        self._own_device = own_device
        self._waiting: asyncio.Queue[tuple[SendLease | RevokeLease, Sequence[LeasedPrefix]]] = asyncio.Queue()

    def submit(self, action: SendLease | RevokeLease, prefixes: Sequence[LeasedPrefix] = ()) -> None:
        """Queue an action. `prefixes`: tokens from earlier leases that the rollouts of this lease continue. The queue
        is not bounded, because the coordinator limits the number of leases."""
        self._waiting.put_nowait((action, prefixes))

    async def run(self) -> None:
        """Send queued actions until cancelled. The earlier turns of all queued leases are read from the store
        together."""
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
                    self._connections.send(action.node_id, LeaseRevoked(lease_id=action.lease_id, reason=action.reason))

    def _lease(self, action: SendLease, turns: Sequence[AnsweredTurn], prefixes: Sequence[LeasedPrefix]) -> None:
        """Send one lease. `turns`: the earlier turns of its episode; missing turns mean a dropped group, and no lease
        is sent."""
        if len(turns) < action.turn:
            return
        if action.node_id == HUB_NODE_ID:
            self._own_device.sample(self._request(action, turns))
            return
        about, node = EvaluationGroup.of(action.group_id), self._nodes.get(action.node_id)
        if node is None or (about is not None and not self._offers.has(action.policy_version)):
            return  # The node has left, or the version is no longer published. The lease expires at its deadline.
        request = self._request(action, turns)
        offered = about is not None and about.policy_version > 0
        if about is None and 0 < action.policy_version < (node.policy_version or 0):
            # The lease names an older version than the node has, because it resumes another node's tokens. The node may
            # never have fetched that version, so offer it.
            offered = self._offers.has(action.policy_version)
        lease = Lease(
            lease_id=request.lease_id,
            group_id=request.group_id,
            indices=request.indices,
            prompt_ids=request.prompt_ids,
            seed=request.seed,
            # The continuation must use at least the version of the prefix's last token.
            policy_version=max([request.policy_version, *(one.versions[-1].policy_version for one in prefixes)]),
            temperature=GREEDY_TEMPERATURE if about and about.greedy else request.temperature,
            max_tokens=request.max_tokens,
            stop_ids=request.stop_ids,
            deadline_s=action.deadline_s,
            offer=self._offers.lend(action.policy_version, action.node_id) if offered else None,
            prefixes=tuple(prefixes),
            on_new_version="interrupt" if action.may_move_on else "finish",
        )
        self._connections.send(action.node_id, lease)

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
