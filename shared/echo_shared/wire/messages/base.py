"""Base class of all messages, protocol version, and limits on frame and batch sizes."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

PROTOCOL_VERSION: Final = 8
"""Protocol version of this software. Increase it when an old peer could misread a new message."""
OLDEST_PROTOCOL_VERSION: Final = 8
"""Oldest protocol version that this software still understands."""
MAX_FRAME_BYTES: Final = 8 * 2**20
MAX_FRAME_FROM_NODE_BYTES: Final = 2 * 2**20
"""Maximum size of a frame from a node, in bytes: nodes send less than the hub. Their largest message, a rollout of
`MAX_TOKENS`, takes half of this limit.
"""
MAX_GROUP_SIZE: Final = 1_024
MAX_BATCHED: Final = 4_096


class WireMessage(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True
    )
