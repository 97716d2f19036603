"""What the system has counted of one connection that sends, and whether that tells of a queue on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUE_S: Final = 0.025
QUEUE_SHARE: Final = 0.25
"""More than the least round trip, by both of these, is taken for a queue; less for jitter, and for busy programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Of one connection, since it began."""

    num_packets: int
    num_lost: int
    """Retransmitted, those that turned out to have arrived left out."""
    arrived_bytes: int
    """About, as the other end has said."""
    rtt_s: float
    min_rtt_s: float

    @property
    def queues(self) -> bool:
        """Packets wait in a queue on the way."""
        return self.rtt_s > self.min_rtt_s + max(QUEUE_S, QUEUE_SHARE * self.min_rtt_s)
