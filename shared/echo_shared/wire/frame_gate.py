"""Rate limit on the small websocket frames (RFC 6455) of a peer, counted on raw bytes before any parsing.

A frame of two bytes costs the receiver about as much as a message of a kilobyte, and a websocket library answers or
joins frames before the program sees a message. Small frames therefore draw from two token buckets:
- Control frames (pings, pongs, closes), frames too short for a message, and fragments shorter than SMALL_BYTES that end
  no message. A working peer sends a few per minute; a proxy that splits messages makes larger fragments.
- Other frames shorter than SMALL_BYTES. A working peer sends many only while the receiver keeps up.

A message has at most MOST_FRAGMENTS fragments. Larger frames are limited elsewhere, by their bytes.

    gate = FrameGate(now=0.0)
    gate.admits(chunk, now=0.1)    # False: too many small frames have arrived; end the connection
"""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 1_024
LEAST_BYTES: Final = 24
"""Size of Echo's smallest message, except for a node's Goodbye."""
CONTROLS_PER_S: Final = 50.0
CONTROLS_AT_ONCE: Final = 500.0
MESSAGES_PER_S: Final = 1_000.0
MESSAGES_AT_ONCE: Final = 20_000.0
"""Number of small messages that may arrive at once. An honest peer cannot send more at once: that is the number that
piles up in buffers within ten seconds at MESSAGES_PER_S.
"""
MOST_FRAGMENTS: Final = 16_384
"""Maximum fragments of one message. A websocket library may hold every fragment in memory until the last
one has come.
"""

_HEAD_ENDS: Final = b"\r\n\r\n"
_FINAL: Final = 0x80
_CONTROL: Final = 0x08
_MASKED: Final = 0x80
_SIZES: Final = 0x7F
_ENDS: Final = (_FINAL, _FINAL | 0x1, _FINAL | 0x2)
"""First bytes of frames that end a message, with continuation, text or binary opcode."""


class FrameGate:
    """Counts the frames of one direction of one connection. `now`: seconds of a monotonic clock."""

    def __init__(self, *, now: float, after_head: bool = False) -> None:
        """`after_head`: True if the direction begins with an HTTP head, which ends at the first empty line."""
        self._at = now
        self._controls = CONTROLS_AT_ONCE
        self._messages = MESSAGES_AT_ONCE
        self._begun = b""
        """Bytes of an incomplete frame header; within the HTTP head, its last three bytes."""
        self._in_head = after_head
        self._fragments = 0
        """Fragments of the unfinished message."""
        self._left_bytes = 0
        """Bytes of the current frame's payload that have not arrived."""

    def admits(self, data: bytes, *, now: float) -> bool:
        """Count the frames that begin in `data`. Return False once there are too many."""
        passed, self._at = now - self._at, now
        self._controls = min(self._controls + passed * CONTROLS_PER_S, CONTROLS_AT_ONCE)
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_AT_ONCE)
        if self._left_bytes >= len(data):
            self._left_bytes -= len(data)
            return True
        if self._begun:
            data, self._begun = self._begun + data, b""
        at = self._left_bytes
        if self._in_head:
            end = data.find(_HEAD_ENDS)
            if end < 0:
                self._begun = data[-3:]
                return True
            self._in_head, at = False, end + len(_HEAD_ENDS)
        return self._count(data, at)

    def _count(self, data: bytes, at: int) -> bool:
        """Count the frames in `data`, whose first header is at offset `at`. Return False once there are too many."""
        end = len(data)
        while at + 2 <= end:
            first, second = data[at], data[at + 1]
            size, begins = second & _SIZES, at + 2
            if size > 125:
                begins += 2 if size == 126 else 8
                if begins > end:
                    break
                size = int.from_bytes(data[at + 2 : begins])
            begins += 4 if second & _MASKED else 0
            if begins > end:
                break
            if not first & _CONTROL:
                self._fragments = 0 if first & _FINAL else self._fragments + 1
            if first & _CONTROL or size < SMALL_BYTES:
                if first in _ENDS and size >= LEAST_BYTES:
                    self._messages -= 1
                else:
                    self._controls -= 1
            if self._controls < 0 or self._messages < 0 or self._fragments > MOST_FRAGMENTS:
                return False
            at = begins + size
        self._left_bytes = max(at - end, 0)
        self._begun = data[at:]
        return True
