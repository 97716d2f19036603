"""Send leases and revocations to nodes, in the order in which the coordinator made them.

A lease message contains more than the coordinator's action: the prompt's ids or the conversation so far, the sampling
parameters of the run or of a tenant's request, earlier tokens of unfinished rollouts, and the offer of a version that
the node may lack. In co-located mode the hub's own leases go to its learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from echo_hub.config.task_sections import SamplingConfig
from echo_hub.core.accounting.effects import RevokeLease, SendLease
from echo_hub.core.answer_groups import is_answer
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE
from echo_hub.intake.episodes import conversation
from echo_hub.net.distributor import Distributor
from echo_hub.net.live_nodes import NodeSender
from echo_hub.scoring.asked import AskedGroups
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import AnsweredTurn, read_turns
from echo_hub.training.trainer import Trainer
from echo_shared.records.run import LiveNode
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import Lease, LeasedPrefix, LeaseRevoked


class HandingOut:
    """Sends leases. `nodes` are the connected nodes."""

    def __init__(
        self,
        settings: SamplingConfig,
        *,
        bounds: SamplingBounds,
        store: AsyncStore,
        problems: Problems,
        asked: AskedGroups,
        nodes: Mapping[str, LiveNode],
        offers: Distributor,
        connections: NodeSender,
        own_device: Trainer,
    ) -> None:
        self._settings = settings
        self._stop_ids = tuple(sorted(bounds.stop_ids))
        self._returns_routes = bounds.experts is not None
        self._store = store
        self._problems = problems
        self._asked = asked
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
        """Send one lease. `turns` holds the earlier turns of the lease's episode. If turns are missing, the group was
        dropped, and no lease is sent. Nor is a lease sent for a tenant's group that is closed."""
        if len(turns) < action.turn or (is_answer(action.group_id) and self._asked.of(action.group_id) is None):
            return
        if action.node_id == HUB_NODE_ID:
            self._own_device.sample(self._request(action, turns))
            return
        about, node = EvaluationGroup.of(action.group_id), self._nodes.get(action.node_id)
        is_exact = about is not None or is_answer(action.group_id)
        """True if the node must sample with exactly the lease's version, however old it is."""
        if node is None or (is_exact and not self._offers.has(action.policy_version)):
            return  # The node has left, or the version is no longer published. The lease expires at its deadline.
        request = self._request(action, turns)
        offered = is_exact and action.policy_version > 0
        if not is_exact and 0 < action.policy_version < (node.policy_version or 0):
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
            returns_routes=request.returns_routes,
            keep_keys=self._problems.multi_turn or is_answer(action.group_id),
            tenant=action.tenant,
        )
        self._connections.send(action.node_id, lease)

    def _request(self, action: SendLease, turns: Sequence[AnsweredTurn]) -> GroupRequest:
        asked, sampling = self._asked.of(action.group_id), action.sampling
        first_ids = self._problems.prompt_ids(action.group_id) if asked is None else asked.prompt_ids
        return GroupRequest(
            lease_id=action.lease_id,
            group_id=action.group_id,
            indices=action.indices,
            prompt_ids=conversation(first_ids, turns),
            seed=action.seed,
            policy_version=action.policy_version,
            temperature=self._settings.temperature if sampling is None else sampling.temperature,
            max_tokens=self._settings.max_tokens if sampling is None else sampling.max_tokens,
            stop_ids=self._stop_ids if sampling is None else sampling.stop_ids,
            returns_routes=self._returns_routes and sampling is None,
        )
