"""Examples of every message between hub and node, and functions that make messages invalid."""

from typing import Any

import msgpack
import numpy as np

from echo_shared.wire.codec import encode
from echo_shared.wire.messages import (
    ArtefactOffer,
    Challenge,
    CheckLease,
    CheckResult,
    DroppedCount,
    DropReason,
    Fetched,
    FinishReason,
    Fleet,
    FleetCommand,
    FleetNode,
    FleetReport,
    FleetWanted,
    FromHub,
    FromNode,
    Goodbye,
    Have,
    Hello,
    KeyframeWanted,
    KeysRotated,
    Lease,
    LeasedPrefix,
    LeaseReturned,
    LeaseRevoked,
    Links,
    Meet,
    MeetWanted,
    Mesh,
    MeshPeer,
    NodeStatus,
    OwnerClaim,
    Peers,
    Piece,
    PolicyPublished,
    Proof,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Refused,
    Rollout,
    RolloutPart,
    RolloutParts,
    RunKey,
    SharedMemory,
    Standby,
    StandbyReason,
    Team,
    TeamWanted,
    Totals,
    Unwanted,
    VersionSpan,
    Welcome,
)
from echo_shared.wire.messages.fields import pack_array

OFFER = ArtefactOffer(
    manifest=b"{}", signature=bytes(64), torrent=b"d1:ae", web_seed_path="/artefacts/", peers=(("10.0.0.1", 6881),)
)


IN_MEMORY = OFFER.model_copy(
    update={"shared_memory": SharedMemory(pid=4_321, descriptor=17, name=f"echo-{'0123456789abcdef' * 2}")}
)


LEASE = Lease(
    lease_id=3,
    group_id=4,
    indices=(0, 5),
    prompt_ids=np.array([1, 2, 3], np.int32),
    seed=2**64 - 1,
    policy_version=7,
    temperature=0.5,
    max_tokens=9,
    stop_ids=(1,),
    deadline_s=60.0,
)


ROLLOUT = Rollout(
    rollout_id="3-5",
    lease_id=3,
    group_id=4,
    index=5,
    policy_version_start=7,
    policy_version_end=7,
    completion_ids=np.array([8, 1], np.int32),
    behavior_logprobs=np.array([-0.5, -0.25], np.float32),
    finish_reason=FinishReason.STOP,
    sampling_s=0.125,
    num_given=1,
)


PREFIX = LeasedPrefix(index=5, ids=np.array([8, 6], np.int32), logprobs=np.array([-0.5, -2.0], np.float32))


VERSIONS = (VersionSpan(policy_version=6, num_tokens=1), VersionSpan(policy_version=8, num_tokens=1))


CONTINUED = LEASE.model_copy(
    update={
        "lease_id": 9,
        "prefixes": (PREFIX.model_copy(update={"versions": VERSIONS}),),
        "on_new_version": "interrupt",
    }
)


MIXED = ROLLOUT.model_copy(update={"policy_version_start": 6, "policy_version_end": 8, "versions": VERSIONS})


PARTS = RolloutParts(
    parts=(
        RolloutPart(
            lease_id=3,
            index=5,
            start=2,
            policy_version=7,
            ids=np.array([8, 1], np.int32),
            logprobs=np.array([-0.5, -0.25], np.float32),
        ),
        RolloutPart(
            lease_id=4,
            index=0,
            start=0,
            policy_version=2**31 - 1,
            ids=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
        ),
    )
)


CHECK = CheckLease(
    rollout_id="3-5",
    prompt_ids=np.array([1], np.int32),
    completion_ids=np.array([2, 3], np.int32),
    versions=(VersionSpan(policy_version=4, num_tokens=2),),
    temperature=1.0,
    deadline_s=9.0,
)


CLAIM = OwnerClaim(owner_key=bytes(32), signature=bytes(64))
COMMAND = FleetCommand(body=b"{}", signature=bytes(64))
REPORT = FleetReport(command_id=bytes(16), body=b"{}", signature=bytes(64))
FLEET_WANTED = FleetWanted(owner=CLAIM, command=COMMAND, to=("a",), counts_once=True)
FLEET = Fleet(
    counts_once=True,
    nodes=(
        FleetNode(
            node_key=bytes(32),
            claim=bytes(64),
            name="attic",
            is_connected=True,
            last_seen=5.0,
            rollouts=3,
            tokens=9,
            report=REPORT,
        ),
    ),
)
TEAM = Team(
    name="Herons",
    is_founder=True,
    members=3,
    rollouts=512,
    tokens=6_000,
    tokens_per_day=812.5,
    rank=1,
    num_ranked=2,
    page="/teams/Herons",
)


TOTALS = Totals(
    trained_rollouts=39_544,
    trained_tokens=5_139_912,
    evaluated_rollouts=412,
    dropped=(DroppedCount(reason="stale", rollouts=7),),
    others_checked=3,
    share=0.125,
    rank=3,
    num_ranked=57,
    page="/leaderboard?node=0123456789",
)


FROM_HUB: list[FromHub] = [
    Challenge(protocol_version=2, software_version="1", hub_key=bytes(32), nonce=bytes(32), signature=bytes(64)),
    Welcome(
        run_id="r",
        run_name="n",
        node_id="id",
        base=OFFER,
        policy=None,
        policy_version=0,
        tracker_path="/announce/k",
        heartbeat_s=5.0,
        run_keys=(RunKey(key_id=1, key=bytes(32)),),
        mesh=(MeshPeer(node_id="abc", host="10.0.0.1", port=7_000, number=0),),
    ),
    Refused(code="bad_token", what="No."),
    PolicyPublished(policy_version=3, offer=IN_MEMORY),
    Peers(info_hash=bytes(20), peers=(("::1", 1), ("host", 65_535))),
    KeysRotated(run_keys=(RunKey(key_id=2, key=bytes(32)),)),
    Mesh(peers=(MeshPeer(node_id="abc", host="host", port=65_535, number=65_535),)),
    Meet(node_id="abc", addresses=(("203.0.113.7", 40_000), ("2001:db8::7", 65_535)), answers=True),
    Piece(info_hash=bytes(20), index=2**20 - 1, data=b"x", hand_on=bytes(3)),
    Unwanted(info_hashes=(bytes(20), b"a" * 20)),
    LEASE,
    CONTINUED,
    Standby(reason=StandbyReason.CHEAPER_NODES_SUFFICE, detail="They return 1.15 times what it takes."),
    Standby(reason=None),
    LeaseRevoked(lease_id=1, reason=DropReason.STALE),
    CHECK,
    Receipts(receipts=(Receipt(rollout_id="3-5", state=ReceiptState.DROPPED, drop_reason=DropReason.STALE),)),
    TOTALS,
    COMMAND,
    TEAM,
    FLEET,
]


FROM_NODE: list[FromNode] = [
    Hello(protocol_version=2, software_version="1", node_key=bytes(32), nonce=bytes(32)),
    Proof(signature=bytes(64), name="n", invite_token=None, backend="torch", device="d", swarm_port=1, mesh_port=2),
    Proof(signature=bytes(64), name="n", backend="torch", device="d", cost_per_hour=0.4, power_watts=220, owner=CLAIM),
    NodeStatus(activity="waiting", capacity=16, policy_version=None, tokens_per_s=0.0),
    Fetched(
        info_hash=bytes(20), policy_version=None, seconds=1.5, swarm_bytes=1, web_seed_bytes=2, shared_memory_bytes=3
    ),
    Have(info_hash=bytes(20), pieces=(0, 7), wanted=False),
    Links(node_ids=("abc", "0")),
    Links(node_ids=("abc", "0"), punched=("0",)),
    MeetWanted(node_id="abc", port=40_000, sightings=("203.0.113.7 40000 90 ff",), local_hosts=("192.168.1.2",)),
    KeyframeWanted(policy_version=4),
    ROLLOUT,
    MIXED,
    PARTS,
    LeaseReturned(lease_id=1, indices=(0, 1), reason="full"),
    LeaseReturned(lease_id=1, indices=(0,), reason="not finite", unusable_version=8),
    CheckResult(rollout_id="3-5", below=np.array([0, 1], np.float32), logprobs=np.array([-1, 0], np.float32)),
    ReceiptsWanted(rollout_ids=("3-5", "3-0")),
    REPORT,
    TeamWanted(action="join", name="Herons"),
    FLEET_WANTED,
    Goodbye(),
]


def plain(message: Any) -> Any:
    return message.model_dump(mode="python")


def changed(message: FromHub | FromNode, **fields: Any) -> bytes:
    value = msgpack.unpackb(encode(message))
    for path, new in fields.items():
        target = value
        *parents, last = path.split("__")
        for part in parents:
            target = target[part]
        if new is ...:
            del target[last]
        else:
            target[last] = new
    packed: bytes = msgpack.packb(value)
    return packed


def array(values: list[float], dtype: str) -> dict[str, Any]:
    return pack_array(np.array(values, dtype))


def part(tokens: int, **fields: Any) -> dict[str, Any]:
    arrays = {"ids": array([0] * tokens, "<i4"), "logprobs": array([0] * tokens, "<f4")}
    return {"lease_id": 1, "index": 0, "start": 0, "policy_version": 0, **arrays, **fields}
