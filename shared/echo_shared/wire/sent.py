"""The system's counters of a sending connection, and the queueing delay that they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUE_S: Final = 0.025
QUEUE_SHARE: Final = 0.25
"""A round trip time that exceeds the minimum by QUEUE_S, and by this share of the minimum, shows a queue on the path.
Smaller excesses are jitter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Counters of one connection since it began."""

    num_packets: int
    num_lost: int
    """Retransmitted packets, except those whose original arrived."""
    arrived_bytes: int
    """Approximate bytes that the other end has acknowledged."""
    rtt_s: float
    min_rtt_s: float

    @property
    def queues(self) -> bool:
        """True if packets wait in a queue on the path."""
        return self.rtt_s > self.min_rtt_s + max(QUEUE_S, QUEUE_SHARE * self.min_rtt_s)
