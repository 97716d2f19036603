"""How many small frames the other end of a websocket may send (RFC 6455): counted on raw bytes, before anything is made
of them.

A frame of two bytes costs the reader about as much as a message of a kilobyte, and a library answers or joins frames
before its user sees a message. So small frames have two token buckets:

- Control frames (pings, pongs, closes), frames too short for a message, and fragments shorter than SMALL_BYTES that end
  no message. An end that works sends a few a minute, and a proxy that cuts messages into pieces cuts larger ones.
- Other frames shorter than SMALL_BYTES. An end that works sends so many only where its reader takes them.

A message has at most MOST_FRAGMENTS. Larger frames are bounded by their bytes, which is their reader's business.

    gate = FrameGate(now=0.0)
    gate.admits(chunk, now=0.1)    # False: too many small frames have come; end the connection
"""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 1_024
LEAST_BYTES: Final = 24
"""Echo's messages are at least so long, but for a node's last word."""
CONTROLS_PER_S: Final = 50.0
CONTROLS_AT_ONCE: Final = 500.0
MESSAGES_PER_S: Final = 1_000.0
MESSAGES_AT_ONCE: Final = 20_000.0
"""More than a reader that takes MESSAGES_PER_S after a burst of ten seconds' worth can find in its buffers."""
MOST_FRAGMENTS: Final = 16_384
"""Of one message: a library may keep each by itself until the last one is there."""

_HEAD_ENDS: Final = b"\r\n\r\n"
_FINAL: Final = 0x80
_CONTROL: Final = 0x08
_MASKED: Final = 0x80
_SIZES: Final = 0x7F
_ENDS: Final = (_FINAL, _FINAL | 0x1, _FINAL | 0x2)
"""First bytes of frames that end a message."""


class FrameGate:
    """Counts the frames of one direction of one connection. `now`: seconds by any clock that only goes forward."""

    def __init__(self, *, now: float, after_head: bool = False) -> None:
        """`after_head`: an HTTP head comes first, which ends at the first empty line."""
        self._at = now
        self._controls = CONTROLS_AT_ONCE
        self._messages = MESSAGES_AT_ONCE
        self._begun = b""
        """Bytes of a header that is not whole yet; of the HTTP head its last three."""
        self._in_head = after_head
        self._fragments = 0
        """Of the present message."""
        self._left_bytes = 0
        """Bytes of the present frame's payload that have not come."""

    def admits(self, data: bytes, *, now: float) -> bool:
        """Count the frames that begin in `data`; return False once there are too many."""
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
        """Count from the header at `at` on."""
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
