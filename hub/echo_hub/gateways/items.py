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
from operator import itemgetter
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


_NAMES: Final = tuple(name for name in Rollout.model_fields if name != "type")
_IN_ORDER: Final = itemgetter(*_NAMES)
_REASONS: Final[Mapping[str, FinishReason]] = {reason.value: reason for reason in FinishReason}


def rollout_item(node_id: str, session: int, rollout: Rollout) -> Item:
    """A validated rollout."""
    values = {
        **rollout.__dict__,
        "completion_ids": rollout.completion_ids.astype("<i4", copy=False).tobytes(),
        "behavior_logprobs": rollout.behavior_logprobs.astype("<f4", copy=False).tobytes(),
        "finish_reason": rollout.finish_reason.value,
        "versions": [[span.policy_version, span.num_tokens] for span in rollout.versions],
    }
    return [Kind.ROLLOUT, node_id, session, *_IN_ORDER(values)]


def rollout_of(item: Item) -> Rollout:
    """The rollout again, not validated a second time."""
    values = dict(zip(_NAMES, item[3:], strict=True))
    values["completion_ids"] = np.frombuffer(values["completion_ids"], "<i4")
    values["behavior_logprobs"] = np.frombuffer(values["behavior_logprobs"], "<f4")
    values["finish_reason"] = _REASONS[values["finish_reason"]]
    values["versions"] = tuple(
        VersionSpan(policy_version=version, num_tokens=count) for version, count in values["versions"]
    )
    return Rollout.model_construct(type="rollout", **values)


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
