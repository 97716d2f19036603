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
from operator import itemgetter
from typing import Any, Final

import numpy as np

from echo_hub.net.gateway import NodeInfo
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import FinishReason, Rollout, VersionSpan

Item = list[Any]
"""A Kind, then the fields listed with that kind."""


class ItemKind(IntEnum):
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


_NAMES: Final = tuple(name for name in Rollout.model_fields if name != "type")
_IN_ORDER: Final = itemgetter(*_NAMES)
_REASONS: Final[Mapping[str, FinishReason]] = {reason.value: reason for reason in FinishReason}


def rollout_item(node_id: str, session: int, rollout: Rollout) -> Item:
    """Encode a validated rollout."""
    values = {
        **rollout.__dict__,
        "completion_ids": rollout.completion_ids.astype("<i4", copy=False).tobytes(),
        "behavior_logprobs": rollout.behavior_logprobs.astype("<f4", copy=False).tobytes(),
        "finish_reason": rollout.finish_reason.value,
        "versions": [[span.policy_version, span.num_tokens] for span in rollout.versions],
    }
    return [ItemKind.ROLLOUT, node_id, session, *_IN_ORDER(values)]


def rollout_of(item: Item) -> Rollout:
    """Decode a rollout without validating it again."""
    values = dict(zip(_NAMES, item[3:], strict=True))
    values["completion_ids"] = np.frombuffer(values["completion_ids"], "<i4")
    values["behavior_logprobs"] = np.frombuffer(values["behavior_logprobs"], "<f4")
    values["finish_reason"] = _REASONS[values["finish_reason"]]
    values["versions"] = tuple(
        VersionSpan(policy_version=version, num_tokens=count) for version, count in values["versions"]
    )
    return Rollout.model_construct(type="rollout", **values)


def node_fields(node: NodeInfo) -> dict[str, Any]:
    """Encode the node of a JOIN."""
    return asdict(node)


def node_of(fields: dict[str, Any]) -> NodeInfo:
    """Decode the node of a JOIN."""
    return NodeInfo(**fields)


def refusal_item(request: int, error: RefusedError) -> Item:
    """Encode the hub's refusal."""
    return [ItemKind.REFUSED, request, error.code, error.what, error.got, error.do]


def refusal_of(item: Item) -> RefusedError:
    """Decode the hub's refusal."""
    _, _, code, what, got, do = item
    return RefusedError(what, got=got, do=do, code=code)
