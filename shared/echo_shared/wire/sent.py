"""The system's counters of a sending TCP connection, and the queueing delay that they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

QUEUE_S: Final = 0.025
QUEUE_SHARE: Final = 0.25
"""A queue on the path is assumed if the round trip time exceeds its minimum by both QUEUE_S seconds and this share of
the minimum. Smaller differences are jitter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The system's counters of one TCP connection since it began."""

    num_packets: int
    num_lost: int
    """Retransmitted packets, except those whose original arrived after all."""
    arrived_bytes: int
    """Approximate number of bytes that the other end has acknowledged."""
    rtt_s: float
    min_rtt_s: float

    @property
    def queues(self) -> bool:
        """True if packets wait in a queue on the path, as the round trip time shows."""
        return self.rtt_s > self.min_rtt_s + max(QUEUE_S, QUEUE_SHARE * self.min_rtt_s)
