"""Items exchanged between gateways and hub: short lists of plain values, which are cheap to decode.

Items from a sealed message are not validated again: the gateway has validated the nodes' messages, and only hub and
gateways can seal.

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
"""An `ItemKind`, then the fields that its docstring lists."""


class ItemKind(IntEnum):
    ROLLOUT = 0
    """Fields: node, session, fields of the rollout."""
    SAID = 1
    """Fields: node, session, frame of any other message from the node."""
    LEFT = 2
    """Fields: node, session. The session's connection has ended."""
    HERE = 3
    """Heartbeat of a gateway or the hub."""
    MEET = 4
    """Fields: request, node, invite token, nonce. Asks for the hub's facts about this authenticated node."""
    MET = 5
    """Fields: request, invite id or None, True if the node is known. Answers MEET."""
    JOIN = 6
    """Fields: request, NodeInfo. The node asks to join."""
    JOINED = 7
    """Fields: request, session, encoded Welcome. Answers JOIN."""
    REFUSED = 8
    """Fields: request, code, what, got, do. Refuses a MEET or JOIN."""
    SEND = 9
    """Fields: session, frame. A message to the node."""
    PUSH = 10
    """Fields: session, frame, rank. A low-priority message to the node."""
    PART = 11
    """Fields: session, code, what. Close this node's connection."""
    CLOSE = 12
    """Fields: code, what. Close all connections."""
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
