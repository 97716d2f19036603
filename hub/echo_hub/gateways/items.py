"""What travels between gateways and hub, as short lists of plain values that are read in one go.

Sealed lists need no second look: the gateway has validated what comes from nodes, and only hub and gateways can seal.

    stored:  [gateway, number, [item, …]]    ROLLOUT, SAID, LEFT: in the order in which nodes sent
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
"""Its Kind, then what that says."""


class Kind(IntEnum):
    ROLLOUT = 0
    """node, session, a rollout's fields."""
    SAID = 1
    """node, session, any other frame of the node's."""
    LEFT = 2
    """node, session."""
    HERE = 3
    """The gateway, or the hub, goes on."""
    MEET = 4
    """request, node, invite token, nonce: what does the hub say of this node, which has proven who it is?"""
    MET = 5
    """request, invite or None, whether it is known."""
    JOIN = 6
    """request, NodeInfo: the node wants its Welcome."""
    JOINED = 7
    """request, session, Welcome's frame."""
    REFUSED = 8
    """request, code, what, got, do."""
    SEND = 9
    """session, frame."""
    PUSH = 10
    """session, frame, rank."""
    PART = 11
    """session, code, what: the connection is to end."""
    CLOSE = 12
    """code, what: all connections are."""
    GONE = 13
    """The gateway has ended, and so have its connections."""


_REASONS: Final[Mapping[str, FinishReason]] = {reason.value: reason for reason in FinishReason}


def rollout_item(node_id: str, session: int, rollout: Rollout) -> Item:
    """A validated rollout."""
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
    """The rollout again, not validated a second time."""
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
    """For JOIN."""
    return asdict(node)


def node_of(fields: dict[str, Any]) -> NodeInfo:
    """Whom JOIN is about."""
    return NodeInfo(**fields)


def refusal_item(request: int, error: RefusedError) -> Item:
    """The hub's no."""
    return [Kind.REFUSED, request, error.code, error.what, error.got, error.do]


def refusal_of(item: Item) -> RefusedError:
    """The hub's no again."""
    _, _, code, what, got, do = item
    return RefusedError(what, got=got, do=do, code=code)
