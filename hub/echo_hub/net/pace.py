"""Limit the rate at which the hub reads messages from one node.

There are two token buckets, one for messages and one for bytes; a node that works normally never empties them. From a
node that has emptied one, the hub reads more slowly: TCP flow control holds the data back, and no data is lost.
"""

from __future__ import annotations

from typing import Final

MESSAGES_PER_S: Final = 1_000.0
BYTES_PER_S: Final = 8.0 * 2**20
BURST_S: Final = 10.0
"""Capacity of the buckets, in seconds of the allowed rate. It lets a node that was offline send all stored messages at
once.
"""
_LONGEST_S: Final = 2.0
"""Longest pause after one message, in seconds, whatever the size of the message."""


class ConnectionPace:
    """The rate limit of one connection. `now` is a monotonic clock, in seconds."""

    def __init__(self, *, now: float) -> None:
        self._messages = MESSAGES_PER_S * BURST_S
        self._bytes = BYTES_PER_S * BURST_S
        self._at = now

    def wait_s(self, num_bytes: int, *, now: float) -> float:
        """Account for a message of `num_bytes` and return for how many seconds to pause reading; 0 means no pause."""
        passed, self._at = now - self._at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * BURST_S) - 1
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * BURST_S) - num_bytes
        missing_s = max(-self._messages / MESSAGES_PER_S, -self._bytes / BYTES_PER_S)
        return min(max(missing_s, 0.0), _LONGEST_S)
