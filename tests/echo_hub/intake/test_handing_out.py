from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import SamplingConfig
from echo_hub.core.accounting.effects import RevokeLease, SendLease
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.core.nodes.node import HUB_NODE_ID
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE
from echo_hub.intake.handing_out import HandingOut
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.experts import Experts
from echo_hub.scoring.asked import AskedGroup, AskedGroups
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.problems import Problems
from echo_shared.records.run import LiveNode
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import ArtefactOffer, DropReason, FromHub, Lease, LeasedPrefix, LeaseRevoked, VersionSpan

Drive = Callable[..., Awaitable[Any]]
STOP_IDS = (1, 2)


class Around:
    """Hands out leases over real problems and a real store, and keeps the messages to nodes. `published`: versions that
    nodes can fetch.
    """

    def __init__(self, driven: Any, experts: Experts | None = None) -> None:
        config = HubConfig()
        self.problems = Problems.of_run(config, PromptCodec.of_run(config, resolve_base("builtin:tiny")))
        self.nodes = {"a": LiveNode()}
        self.published = {0}
        self.sent: list[tuple[str, FromHub]] = []
        self.sampled: list[GroupRequest] = []
        self._news = asyncio.Event()
        self.asked = AskedGroups()
        self.handing_out = HandingOut(
            SamplingConfig(temperature=0.5, max_tokens=7),
            bounds=SamplingBounds(vocabulary_size=128, max_tokens=7, stop_ids=frozenset(STOP_IDS), experts=experts),
            store=driven.async_store,
            problems=self.problems,
            asked=self.asked,
            nodes=self.nodes,
            offers=self,
            connections=self,
            own_device=self,
        )

    def has(self, version: int) -> bool:
        return version in self.published

    def lend(self, version: int, node_id: str) -> ArtefactOffer:
        return ArtefactOffer(
            manifest=str(version).encode(), signature=bytes(64), torrent=b"", web_seed_path=f"/{node_id}"
        )

    def sample(self, request: GroupRequest) -> None:
        self.sampled.append(request)

    def send(self, node_id: str, message: FromHub) -> bool:
        self.sent.append((node_id, message))
        self._news.set()

    async def hand_out(self, *actions: SendLease | RevokeLease) -> list[tuple[str, FromHub]]:
        """Return the messages sent for these actions. A revocation, sent last, marks the end of the messages."""
        for action in actions:
            self.handing_out.submit(action)
        self.handing_out.submit(RevokeLease(node_id="end", lease_id=0, reason=DropReason.REVOKED))
        working = asyncio.create_task(self.handing_out.run())
        async with asyncio.timeout(60):
            while not self.sent or self.sent[-1][0] != "end":
                self._news.clear()
                await self._news.wait()
        working.cancel()
        await asyncio.wait([working])
        return self.sent[:-1]


def lease(node_id: str = "a", group_id: int = 3, **about: Any) -> SendLease:
    base: dict[str, Any] = {"lease_id": 9, "indices": (0, 2), "seed": 77, "policy_version": 4, "deadline_s": 30.0}
    return SendLease(node_id=node_id, group_id=group_id, **{**base, **about})


@pytest.fixture
async def around(drive: Drive) -> Around:
    return Around(await drive(running=False))


async def test_a_lease_carries_the_prompt_and_how_to_sample(around: Around) -> None:
    ((node_id, said),) = await around.hand_out(lease())
    assert node_id == "a" and isinstance(said, Lease)
    assert (said.lease_id, said.group_id, said.indices, said.seed, said.policy_version) == (9, 3, (0, 2), 77, 4)
    assert (said.temperature, said.max_tokens, said.stop_ids, said.deadline_s) == (0.5, 7, STOP_IDS, 30.0)
    assert np.array_equal(said.prompt_ids, around.problems.prompt_ids(3)) and said.offer is None


async def test_a_request_is_leased_with_its_own_prompt_and_parameters(around: Around) -> None:
    sampling = SamplingParameters(temperature=1.5, max_tokens=99, stop_ids=(8,))
    asked = AskedGroup(prompt_ids=np.array([3, 4], np.int32), seed=5, sampling=sampling)
    around.asked.add(FIRST_ANSWER_ID, asked)
    around.published.add(4)
    wanted = lease(group_id=FIRST_ANSWER_ID, sampling=sampling)
    ((_, said),) = await around.hand_out(wanted)
    assert isinstance(said, Lease)
    assert (said.temperature, said.max_tokens, said.stop_ids, said.seed) == (1.5, 99, (8,), 77)
    assert said.prompt_ids.tolist() == [3, 4] and said.on_new_version == "finish"
    assert said.offer is not None and said.offer.manifest == b"4"


async def test_a_closed_request_or_version_is_not_leased(around: Around) -> None:
    sampling = SamplingParameters(temperature=1.5, max_tokens=99)
    asked = AskedGroup(prompt_ids=np.array([3, 4], np.int32), seed=5, sampling=sampling)
    around.asked.add(FIRST_ANSWER_ID + 1, asked)
    leases = [lease(group_id=FIRST_ANSWER_ID + each, sampling=sampling) for each in range(2)]
    assert await around.hand_out(*leases) == []


async def test_a_lease_carries_the_earlier_tokens(around: Around) -> None:
    prefix = LeasedPrefix(
        index=2,
        ids=np.array([5, 9], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=(VersionSpan(policy_version=3, num_tokens=1), VersionSpan(policy_version=6, num_tokens=1)),
    )
    around.handing_out.submit(lease(), (prefix,))
    ((_, said),) = await around.hand_out()
    assert isinstance(said, Lease)
    (carried,) = said.prefixes
    assert carried == prefix
    assert said.policy_version == 6, "the continuation is sampled with no older version"


async def test_a_lease_says_if_newer_versions_interrupt_it(around: Around) -> None:
    said = await around.hand_out(lease(may_move_on=True), lease(lease_id=10))
    assert [one.on_new_version for _, one in said if isinstance(one, Lease)] == ["interrupt", "finish"]


async def test_keys_are_kept_for_later_turns_and_for_tenants(around: Around, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParameters(temperature=1.5, max_tokens=99, stop_ids=(8,))
    around.asked.add(FIRST_ANSWER_ID, AskedGroup(prompt_ids=np.array([3, 4], np.int32), seed=5, sampling=sampling))
    around.published.add(4)
    said = await around.hand_out(lease(), lease(group_id=FIRST_ANSWER_ID, sampling=sampling))
    assert [one.keep_keys for _, one in said if isinstance(one, Lease)] == [False, True]
    monkeypatch.setattr(Problems, "multi_turn", True)
    ((_, said_now),) = (await around.hand_out(lease()))[-1:]
    assert isinstance(said_now, Lease) and said_now.keep_keys


async def test_leases_and_revocations_keep_their_order(around: Around) -> None:
    revoke = RevokeLease(node_id="a", lease_id=9, reason=DropReason.STALE)
    said = await around.hand_out(lease(), revoke, lease(lease_id=10))
    assert [type(message) for _, message in said] == [Lease, LeaseRevoked, Lease]


async def test_a_missing_node_or_conversation_sends_no_lease(around: Around) -> None:
    assert await around.hand_out(lease("gone"), lease(turn=1, indices=(0,))) == []


async def test_the_hubs_own_lease_goes_to_its_learner(around: Around) -> None:
    assert await around.hand_out(lease(HUB_NODE_ID)) == []
    (request,) = around.sampled
    assert (request.lease_id, request.temperature, request.policy_version) == (9, 0.5, 4)


@pytest.mark.parametrize("greedy", [True, False])
async def test_an_evaluation_lease_offers_its_version(around: Around, greedy: bool) -> None:
    about = EvaluationGroup(policy_version=4, greedy=greedy, number=0)
    wanted = lease(group_id=about.group_id)
    assert await around.hand_out(wanted) == [], "nodes cannot fetch it any more, because the evaluation has ended"
    around.published.add(4)
    around.sent.clear()
    ((_, said),) = await around.hand_out(wanted)
    assert isinstance(said, Lease) and said.offer is not None and said.offer.manifest == b"4"
    assert said.temperature == (GREEDY_TEMPERATURE if greedy else 0.5)


@pytest.mark.parametrize(("version", "offered"), [(3, True), (4, False), (2, False)])
async def test_a_lease_of_an_older_version_offers_it(around: Around, version: int, offered: bool) -> None:
    """Node a has version 4, and can fetch versions 3 and 4. Only a lease of version 3 must come with an offer to fetch
    the version.
    """
    around.published |= {3, 4}
    around.nodes["a"] = LiveNode(policy_version=4)
    ((_, said),) = await around.hand_out(lease(policy_version=version))
    assert isinstance(said, Lease) and (said.offer is not None) == offered


async def test_a_lease_asks_for_routes_if_the_base_has_experts(drive: Drive) -> None:
    for experts in (Experts(count=4, most_route_bytes=4), None):
        around = Around(await drive(running=False), experts)
        ((_, said),) = await around.hand_out(lease(HUB_NODE_ID), lease())
        assert isinstance(said, Lease) and said.returns_routes == (experts is not None)
        assert around.sampled[0].returns_routes == (experts is not None), "the hub's own sampler too"
