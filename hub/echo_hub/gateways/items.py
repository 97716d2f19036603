"""Items exchanged between gateways and hub: short lists of plain values that are cheap to decode.

Sealed items are not validated again: the gateway has validated node messages, and only hub and gateways can seal.

    stored:  [gateway, number, [item, …]]    ROLLOUT, SAID, LEFT: in the order of the nodes' messages
    asked:   [gateway, epoch, number, item]  HERE, MEET, JOIN, GONE
    told:    [epoch, number, [item, …]]      HERE, MET, JOINED, REFUSED, SEND, PUSH, PART, CLOSE
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import IntEnum
from typing import Any, Final

import numpy as np

from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import RefusedError
from echo_shared.messages import FinishReason, Rollout, VersionSpan

Item = list[Any]
"""A Kind, then the fields listed with that kind."""


class Kind(IntEnum):
    ROLLOUT = 0
    """node, session, fields of the rollout."""
    SAID = 1
    """node, session, any other frame from the node."""
    LEFT = 2
    """node, session."""
    HERE = 3
    """Heartbeat of a gateway or the hub."""
    MEET = 4
    """request, node, invite token, nonce: asks for the hub's facts about this authenticated node."""
    MET = 5
    """request, invite id or None, True if the node is known."""
    JOIN = 6
    """request, NodeInfo: the node asks to join."""
    JOINED = 7
    """request, session, encoded Welcome."""
    REFUSED = 8
    """request, code, what, got, do."""
    SEND = 9
    """session, frame."""
    PUSH = 10
    """session, frame, rank."""
    PART = 11
    """session, code, what: close this connection."""
    CLOSE = 12
    """code, what: close all connections."""
    GONE = 13
    """The gateway and all its connections have ended."""


_REASONS: Final[Mapping[str, FinishReason]] = {reason.value: reason for reason in FinishReason}


def rollout_item(node_id: str, session: int, rollout: Rollout) -> Item:
    """Encode a validated rollout."""
    return [
        Kind.ROLLOUT,
        node_id,
        session,
        rollout.rollout_id,
        rollout.lease_id,
        rollout.group_id,
        rollout.index,
        rollout.policy_version_start,
        rollout.policy_version_end,
        rollout.completion_ids.astype("<i4", copy=False).tobytes(),
        rollout.behavior_logprobs.astype("<f4", copy=False).tobytes(),
        rollout.finish_reason.value,
        rollout.sampling_s,
        rollout.num_given,
        [[span.policy_version, span.num_tokens] for span in rollout.versions],
    ]


def rollout_of(item: Item) -> Rollout:
    """Decode a rollout without validating it again."""
    return Rollout.model_construct(
        type="rollout",
        rollout_id=item[3],
        lease_id=item[4],
        group_id=item[5],
        index=item[6],
        policy_version_start=item[7],
        policy_version_end=item[8],
        completion_ids=np.frombuffer(item[9], "<i4"),
        behavior_logprobs=np.frombuffer(item[10], "<f4"),
        finish_reason=_REASONS[item[11]],
        sampling_s=item[12],
        num_given=item[13],
        versions=tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in item[14]),
    )


def node_fields(node: NodeInfo) -> dict[str, Any]:
    """Encode the node of a JOIN."""
    return asdict(node)


def node_of(fields: dict[str, Any]) -> NodeInfo:
    """Decode the node of a JOIN."""
    return NodeInfo(**fields)


def refusal_item(request: int, error: RefusedError) -> Item:
    """Encode the hub's refusal."""
    return [Kind.REFUSED, request, error.code, error.what, error.got, error.do]


def refusal_of(item: Item) -> RefusedError:
    """Decode the hub's refusal."""
    _, _, code, what, got, do = item
    return RefusedError(what, got=got, do=do, code=code)
