from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.events import (
    Event,
    LeaseGivenBack,
    NodeConnected,
    NodeDisconnected,
    NodeReported,
    RolloutArrived,
)
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.driving.event_queue import EventQueue
from echo_hub.intake.connected import ConnectedNodes
from echo_hub.intake.early_stops import EarlyStops
from echo_hub.intake.partials import Partials
from echo_hub.net.gateway import NodeInfo
from echo_hub.net.invitations import Invitations, hash_of
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.net.peer_log import BURST
from echo_hub.scoring.asked import AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.verify.scores_by_nodes import NodeScores
from echo_shared.errors import LocalProtocolError, RefusedError, StorageError
from echo_shared.records.rollout import DrawnSpan
from echo_shared.records.run import Invite, LiveNode
from echo_shared.wire.messages import (
    ArtefactOffer,
    CheckResult,
    Fetched,
    FinishReason,
    Goodbye,
    Have,
    KeyframeWanted,
    LeaseReturned,
    Links,
    NodeStatus,
    ReceiptsWanted,
    Rollout,
    RolloutPart,
    RolloutParts,
    Standby,
    StandbyReason,
    VersionSpan,
    Welcome,
)

NODE = NodeInfo(
    node_id="a",
    public_key=bytes(32),
    name="n",
    backend="torch",
    device="cpu",
    host="127.0.0.1",
    hub_host="127.0.0.1",
    swarm_port=0,
    mesh_port=0,
)
INVITE = Invite(invite_id=3, name="Ada", token_hash=hash_of("let me in"), max_keys=1, created_at=1.0, expires_at=9e9)
STATUS = NodeStatus(activity="sampling", capacity=5, policy_version=3, tokens_per_s=9.5)
ROLLOUT = Rollout(
    rollout_id="4-1",
    lease_id=4,
    group_id=2,
    index=1,
    policy_version_start=3,
    policy_version_end=5,
    completion_ids=np.array([5, 7], np.int32),
    behavior_logprobs=np.array([-0.5, -1.0], np.float32),
    finish_reason=FinishReason.LENGTH,
    sampling_s=0.25,
    versions=(VersionSpan(policy_version=3, num_tokens=1), VersionSpan(policy_version=5, num_tokens=1)),
)


class Reports(EventQueue):
    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    async def put(self, event: Event) -> None:
        await self._hub.report(event)


class Hub:
    """Stand-in for the parts around the connected nodes; records the order of their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.full = False
        self.banned = False
        self.banned_meanwhile = False
        self.asked = AskedGroups()
        bounds = GroupBounds(SamplingBounds(vocabulary_size=9, max_tokens=9, stop_ids=frozenset()), self.asked)
        self.partials = Partials(bounds, published_version=5)
        self.invitations = Invitations([INVITE])
        self.live = LiveNodes()
        self.nodes = ConnectedNodes(
            queue=Reports(self),
            live=self.live,
            register=self,
            welcoming=self,
            distributor=self,
            look_ups=self,
            bounds=bounds,
            early_stops=EarlyStops(self.partials, bounds, self.asked),
            partials=self.partials,
            checks=self,
            scores=NodeScores(pairs=self, connections=self, temperature=1.0),
            relay=self,
            invitations=self.invitations,
            electricity_per_kwh=0.5,
        )

    async def report(self, event: object) -> None:
        self.calls.append(("report", event))

    async def check_name(self, node: NodeInfo) -> None:
        if node.name == "taken":
            raise RefusedError("The name is another's.")

    async def remember(self, node: NodeInfo) -> None:
        if self.full:
            raise StorageError("The disk is full.")
        self.banned |= self.banned_meanwhile
        self.calls.append(("remember", node))

    def admit(self, node_id: str) -> None:
        if self.banned:
            raise RefusedError("Banned.")

    def node_joined(self, node: NodeInfo) -> None:
        self.calls.append(("joined", node))

    def node_left(self, node_id: str) -> None:
        self.calls.append(("left", node_id))

    async def node_said(self, node_id: str, message: Fetched | Have | Links | KeyframeWanted) -> None:
        self.calls.append(("said", (node_id, message)))

    async def answered(self, node_id: str, result: CheckResult) -> None:
        self.calls.append(("checked", (node_id, result)))

    def left(self, node_id: str) -> None:
        self.calls.append(("checks nothing", node_id))

    async def answer(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        self.calls.append(("look_up", (node_id, rollout_ids)))

    def welcome(self, node: NodeInfo) -> Welcome:
        assert node.node_id in self.live, "a version that is announced from here on must reach it"
        self.calls.append(("welcome", node))
        offer = ArtefactOffer(manifest=b"", signature=bytes(64), torrent=b"", web_seed_path="/x")
        return Welcome(
            run_id="r",
            run_name="r",
            node_id=node.node_id,
            base=offer,
            policy=None,
            policy_version=0,
            tracker_path="/x",
            heartbeat_s=1.0,
            run_keys=(),
        )


NUMERICS = NumericsClass("torch", device="cpu")


@pytest.fixture
def hub() -> Hub:
    return Hub()


async def test_a_node_is_remembered_then_reported_then_welcomed(hub: Hub) -> None:
    assert (await hub.nodes.node_joined(NODE)).node_id == "a"
    steps = ["remember", "report", "joined", "welcome"]
    assert hub.calls == list(zip(steps, [NODE, NodeConnected(node_id="a", numerics=NUMERICS), NODE, NODE], strict=True))
    assert hub.live == {"a": LiveNode()}


async def test_fresh_keys_do_not_fill_the_log(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for number in range(10 * BURST):
        await hub.nodes.node_joined(replace(NODE, node_id=f"{number:020x}"))
    assert BURST <= caplog.text.count("joined") < 2 * BURST


async def test_a_node_that_cannot_be_stored_is_not_connected(hub: Hub) -> None:
    hub.full = True
    with pytest.raises(StorageError):
        await hub.nodes.node_joined(NODE)
    assert (hub.live, hub.calls) == ({}, [])


async def test_a_node_banned_while_joining_is_not_connected(hub: Hub) -> None:
    hub.banned_meanwhile = True
    with pytest.raises(RefusedError):
        await hub.nodes.node_joined(NODE)
    assert hub.live == {}
    events = [NodeConnected(node_id="a", numerics=NUMERICS), NodeDisconnected(node_id="a")]
    assert hub.calls == [("remember", NODE), *(("report", event) for event in events)]


async def test_a_node_that_left_is_not_connected(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_left("a")
    assert hub.live == {}
    assert hub.calls[-3:] == [("left", "a"), ("checks nothing", "a"), ("report", NodeDisconnected(node_id="a"))]


async def test_a_banned_node_is_not_even_remembered(hub: Hub) -> None:
    hub.banned = True
    with pytest.raises(RefusedError):
        await hub.nodes.node_joined(NODE)
    assert (hub.live, hub.calls) == ({}, [])


async def test_an_invite_is_stored_with_its_node_and_has_a_limit(hub: Hub) -> None:
    assert (hub.nodes.find_invite("a", "let me in"), hub.nodes.find_invite("b", "let me in")) == (3, 3)
    assert not hub.nodes.knows("a")
    await hub.nodes.node_joined(replace(NODE, invite_id=3))
    assert hub.nodes.knows("a") and not hub.nodes.knows("b")
    assert hub.calls[1] == ("report", NodeConnected(node_id="a", numerics=NUMERICS, invite="invite 3"))
    before = list(hub.calls)
    with pytest.raises(RefusedError, match="Ada is used up"):
        await hub.nodes.node_joined(replace(NODE, node_id="b", invite_id=3))
    assert hub.calls == before, "both passed the gateway together, but the second one is not recorded"
    await hub.nodes.node_joined(replace(NODE, invite_id=hub.nodes.find_invite("a", None)))


async def test_a_nodes_status_is_shown_and_reported(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_said("a", STATUS)
    live = hub.live["a"]
    assert (live.activity, live.capacity, live.policy_version, live.tokens_per_s) == ("sampling", 5, 3, 9.5)
    assert hub.calls[-1] == ("report", NodeReported(node_id="a", capacity=5, policy_version=3, tokens_per_s=9.5))
    await hub.nodes.node_said("a", STATUS.model_copy(update={"tokens_per_s": 1e308, "precision": "bf16"}))
    assert hub.live["a"].precision == "bf16"
    assert hub.live["a"].tokens_per_s == 1e9, "sums of such claims stay finite"


@pytest.mark.parametrize(
    "message",
    [
        Fetched(info_hash=bytes(20), policy_version=1, seconds=0.5, swarm_bytes=1, web_seed_bytes=2),
        Have(info_hash=bytes(20), pieces=(3, 4)),
        Links(node_ids=("b",)),
        KeyframeWanted(policy_version=1),
    ],
)
async def test_distribution_messages_do_not_reach_the_coordinator(
    hub: Hub, message: Fetched | Have | Links | KeyframeWanted
) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_said("a", message)
    assert hub.calls[-1] == ("said", ("a", message))


async def test_receipts_that_a_node_wants_are_looked_up(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_said("a", ReceiptsWanted(rollout_ids=("4-1", "3-0")))
    assert hub.calls[-1] == ("look_up", ("a", ("4-1", "3-0")))


async def test_a_rollout_and_a_returned_lease_become_events(hub: Hub) -> None:
    await hub.nodes.node_said("a", ROLLOUT)
    (_, arrived) = hub.calls[-1]
    assert isinstance(arrived, RolloutArrived)
    names = ("node_id", "rollout_id", "lease_id", "group_id", "index", "policy_version_start", "policy_version_end")
    assert [getattr(arrived, name) for name in names] == ["a", "4-1", 4, 2, 1, 3, 5]
    assert arrived.payload.completion_ids is ROLLOUT.completion_ids
    assert arrived.payload.behavior_logprobs is ROLLOUT.behavior_logprobs
    assert (arrived.payload.finish_reason, arrived.payload.sampling_s) == (FinishReason.LENGTH, 0.25)
    drawn = tuple(DrawnSpan(node_id="a", policy_version=version, num_tokens=1) for version in (3, 5))
    assert arrived.payload.spans == drawn and arrived.problem == ""
    await hub.nodes.node_said("a", LeaseReturned(lease_id=4, indices=(0, 2), reason="on battery"))
    expected = LeaseGivenBack(node_id="a", lease_id=4, indices=(0, 2), reason="on battery")
    assert hub.calls[-1] == ("report", expected)


async def test_a_nodes_findings_go_to_the_checks(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_said("a", STATUS.model_copy(update={"checks": 7}))
    assert hub.calls[-1][1].checks == 7
    found = np.zeros(1, np.float32)
    result = CheckResult(rollout_id="4-1", below=found, logprobs=found)
    await hub.nodes.node_said("a", result)
    assert hub.calls[-1] == ("checked", ("a", result))


def parts(start: int, *ids: int) -> RolloutParts:
    logprobs = np.full(len(ids), -0.5, np.float32)
    one = RolloutPart(
        lease_id=4, index=1, start=start, policy_version=3, ids=np.array(ids, np.int32), logprobs=logprobs
    )
    return RolloutParts(parts=(one,))


async def test_parts_are_kept_until_the_rollout_is_there(hub: Hub) -> None:
    hub.partials.leased("a", 4, (1, 2), policy_version=3)
    await hub.nodes.node_said("a", parts(0, 5, 7))
    await hub.nodes.node_said("a", parts(9, 5))
    await hub.nodes.node_said("b", parts(2, 5))
    assert hub.partials.refused.total() == 2
    await hub.nodes.node_said("a", LeaseReturned(lease_id=4, indices=(1,), reason="on battery"))
    kept = hub.partials.prefix(4, 1)
    assert kept is not None and kept.ids.tolist() == [5, 7]
    await hub.nodes.node_said("a", parts(2, 5))
    assert hub.partials.refused.total() == 3
    hub.calls.clear()
    await hub.nodes.node_said("a", ROLLOUT)
    assert hub.partials.prefix(4, 1) is None and len(hub.calls) == 1


async def test_a_continued_rollout_keeps_its_given_prefix_and_spans(hub: Hub) -> None:
    hub.partials.leased("b", 3, (1,), policy_version=3)
    part = RolloutPart(
        lease_id=3,
        index=1,
        start=0,
        policy_version=3,
        ids=np.array([5], np.int32),
        logprobs=np.array([-0.5], np.float32),
    )
    await hub.nodes.node_said("b", RolloutParts(parts=(part,)))
    for given, expected in (
        (1, ("", ["b", "a"])),
        (0, ("0 given tokens instead of 1", [])),
    ):
        hub.partials.begin(
            SendLease(
                node_id="a",
                lease_id=4,
                group_id=2,
                indices=(1,),
                seed=1,
                policy_version=3,
                deadline_s=1.0,
                goes_on=((1, 3),),
            )
        )
        await hub.nodes.node_said("a", ROLLOUT.model_copy(update={"num_given": given, "routes": b"abcd"}))
        (_, arrived) = hub.calls[-1]
        assert arrived.payload.routes == (b"\xff\xffcd" if given else b"abcd"), (
            "not the routes of another node's tokens"
        )
        assert (arrived.problem, [span.node_id for span in arrived.payload.spans]) == expected


async def test_a_message_that_the_gateway_keeps_is_our_bug(hub: Hub) -> None:
    with pytest.raises(LocalProtocolError, match="goodbye"):
        await hub.nodes.node_said("a", Goodbye())
    assert hub.calls == []


async def test_a_node_costs_what_it_asks_for_and_its_power(hub: Hub) -> None:
    priced = replace(NODE, cost_per_hour=0.4, power_watts=200.0)
    await hub.nodes.node_joined(priced)
    (connected,) = [event for what, event in hub.calls if what == "report"]
    assert connected == NodeConnected(node_id="a", cost_per_hour=0.5, numerics=NUMERICS)
    assert hub.live["a"].cost_per_hour == 0.5


async def test_a_standby_reason_is_shown_until_the_node_works_again(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    assert not hub.live.stands_by("a") and not hub.live.stands_by("b")
    told = hub.live.told("a", StandbyReason.SPEND_CAP, "It costs $9 an hour.")
    assert told == Standby(reason=StandbyReason.SPEND_CAP, detail="It costs $9 an hour.")
    assert hub.live["a"].standby == "spend cap. It costs $9 an hour." and hub.live.stands_by("a")
    assert not hub.live["a"].affordable
    assert hub.live.told("a", None, "") == Standby(reason=None)
    assert hub.live["a"].affordable
    assert not hub.live.stands_by("a")
    assert hub.live.told("gone", None, "") == Standby(reason=None)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("16-core CPU, 63 GB", "cpu"),
        ("NVIDIA GeForce RTX 4090, 24 GB", "cuda"),
        ("Apple M3 Max, 64 GB", "metal"),
        ("AMD Radeon RX 7900", "gpu"),
        ("", "cpu"),
    ],
)
async def test_a_nodes_address_and_device_are_reported(hub: Hub, device: str, kind: str) -> None:
    await hub.nodes.node_joined(replace(NODE, device=device, host="2001:db8::7"))
    (connected,) = [event for what, event in hub.calls if what == "report"]
    assert connected.numerics == NumericsClass("torch", "", kind)
    assert (connected.origin, connected.owner) == ("2001:db8::/64", "")


async def test_nodes_of_one_owner_are_reported_as_such(hub: Hub) -> None:
    await hub.nodes.node_joined(replace(NODE, owner_key=bytes([7]) * 32, owner_claim=bytes(64)))
    (connected,) = [event for what, event in hub.calls if what == "report"]
    assert connected.owner == f"owner {'07' * 32}"


async def test_the_precision_is_that_of_the_engine_that_is_up(hub: Hub) -> None:
    await hub.nodes.node_joined(NODE)
    await hub.nodes.node_said("a", STATUS.model_copy(update={"precision": "q4_k_m"}))
    assert hub.calls[-1][1].precision == "q4_k_m"
