"""What all messages keep: the protocol's version, the size of a frame and of what comes by the batch."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

PROTOCOL_VERSION: Final = 8
"""What this software speaks. It rises when an old peer could misread a new one."""
OLDEST_PROTOCOL_VERSION: Final = 8
"""The oldest peer version that this software still understands."""
MAX_FRAME_BYTES: Final = 8 * 2**20
MAX_FRAME_FROM_NODE_BYTES: Final = 2 * 2**20
"""Nodes say less: their largest message, a rollout of `MAX_TOKENS`, takes half of it."""
MAX_GROUP_SIZE: Final = 1_024
MAX_BATCHED: Final = 4_096


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True
    )
