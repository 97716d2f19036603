"""Congestion control of a TCP connection: the system's default, or BBR on a line that loses packets without congestion.

Cubic and Reno, the usual defaults, treat each loss as a full queue and shrink their window. With 1 % of packets lost
and a round trip of 60 ms, one connection carries 2.4 Mbit/s on any line (Mathis et al., The Macroscopic Behavior of the
TCP Congestion Avoidance Algorithm, 1997). BBR follows the rate at which packets arrive (Cardwell et al., 2016), but is
slower on lines that lose packets only in full queues. A connection therefore switches to BBR only after its line proved
lossy: packets were retransmitted while no queue had formed, by Page's cumulative sum test (1954). It never switches
back.

A hub pools the observations of its connections: alone, each needs many policy versions to detect a loss of 0.2 %,
together they need one. Losses on one or two peers do not suffice, because a peer can feign them: several peers must
lose packets at the same time. A node does not pool: its few slow connections fill its uplink well with Cubic, where a
loss slows only one of them, whereas several BBR connections would push each other's packets out of the router's queue.

Linux only, with BBR in the kernel; on other systems nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from math import log
from typing import Final

from echo_shared.wire.sent import Sent

_log = logging.getLogger(__name__)

CLEAN_LOSS: Final = 2e-4
LOSSY_LOSS: Final = 3e-3
"""Fraction of packets that a clean line (CLEAN_LOSS) and a lossy line lose. The test decides which of the two fits
better.
"""
ENOUGH: Final = 4.0
"""Log-likelihood ratio of lossy to clean at which a line counts as lossy. Two losses among 500 packets reach it."""
FEWEST_PLACES: Final = 3
BYTES_A_LOSS: Final = 2_000_000
"""A pool of lines counts as lossy if it loses more than one packet in this many delivered bytes. A loss rate of 0.2 %
costs about three packets in this amount.
"""
LOOK_BYTES: Final = 16_384
CAN_LOOK: Final = hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_CONGESTION")
"""True if the system reports a connection's counters and lets a program choose its congestion control."""
BBR: Final = b"bbr"
_SO_MAX_PACING_RATE: Final = 47
_NAME_BYTES: Final = 16
_INFO_BYTES: Final = 220
_PACKET_BYTES, _RTT, _RETRANSMITTED, _MIN_RTT, _PACKETS, _DELIVERED, _NEEDLESS = 16, 68, 100, 148, 156, 192, 216
"""Byte offsets in Linux's `struct tcp_info`."""


class LossTest:
    """Detects packet losses that no full queue explains, on one connection."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.is_lossy = False

    def saw(self, last: Sent, sent: Sent) -> None:
        """Count packets and losses between two consecutive snapshots of the connection."""
        if sent.queues or last.queues:
            return
        num_packets, num_lost = sent.num_packets - last.num_packets, sent.num_lost - last.num_lost
        per_loss, per_packet = log(LOSSY_LOSS / CLEAN_LOSS), log((1 - LOSSY_LOSS) / (1 - CLEAN_LOSS))
        self._sum = max(0.0, self._sum + num_lost * per_loss + max(0, num_packets - num_lost) * per_packet)
        self.is_lossy |= self._sum >= ENOUGH


class LossPool:
    """Detects packet losses that no full queue explains, on connections to several peers at the same time.

    Each peer counts as one loss at most. All losses expire once BYTES_A_LOSS bytes per loss were delivered, to any
    peers. Bytes count instead of packets, because a peer could request small packets.
    """

    def __init__(self) -> None:
        self._to_come = 0
        """Bytes that must still be delivered before the losses expire."""
        self._num_lost: dict[str, int] = {}
        """Number of lost packets by peer. If the original of a retransmitted packet arrives late after all, the packet
        no longer counts as lost.
        """
        self.is_lossy = False

    def saw(self, last: Sent, sent: Sent, place: str) -> None:
        """Count the losses between two consecutive snapshots of one connection to the peer `place`."""
        if sent.queues or last.queues:
            return
        before = self._num_lost.pop(place, 0)
        if (after := before + sent.num_lost - last.num_lost) > 0:
            self._num_lost[place] = after
        self._to_come += BYTES_A_LOSS * ((after > 0) - (before > 0))
        self._to_come -= max(0, sent.arrived_bytes - last.arrived_bytes)
        if self._to_come <= 0:
            self._to_come = 0
            self._num_lost.clear()
        self.is_lossy |= len(self._num_lost) >= FEWEST_PLACES


class LossWatch:
    """Watches one connection and switches it to BBR. Call `sent` for each frame."""

    def __init__(self, transport: asyncio.BaseTransport | None, pool: LossPool | None = None, place: str = "") -> None:
        """`pool`: observations shared by all connections of this host that switch together; `place`: the connection's
        peer.
        """
        self._socket = transport.get_extra_info("socket") if CAN_LOOK and transport is not None else None
        """Socket of the watched connection; None: the connection cannot be watched, or watching has ended."""
        self._test = LossTest()
        self._pool, self._place = pool, place
        self._last: Sent | None = None
        self._unseen_bytes = LOOK_BYTES

    def sent(self, num_bytes: int) -> None:
        """Count sent bytes, and switch to BBR once the line proved lossy. Raises nothing."""
        self._unseen_bytes += num_bytes
        if self._socket is None or self._unseen_bytes < LOOK_BYTES:
            return
        self._unseen_bytes = 0
        try:
            last, self._last = self._last, sent_by(self._socket)
            if last is not None and self._last is not None:
                self._test.saw(last, self._last)
                if self._pool is not None:
                    self._pool.saw(last, self._last, self._place)
            is_lossy = self._test.is_lossy or (self._pool is not None and self._pool.is_lossy)
            if is_lossy:
                _use_bbr(self._socket)
            if self._last is None or is_lossy:
                self._socket = None
        # The connection has ended, or BBR is missing in the kernel or forbidden to this process.
        except OSError as error:
            _log.debug("A connection keeps its congestion control: %s", error)
            self._socket = None


def pace(connection: socket.socket, bytes_per_s: int) -> None:
    """Limit the kernel's sending rate, packet by packet: a whole frame sent at once would fill the line's queue.

    Raises OSError. Linux only, see `CAN_LOOK`.
    """
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)


def _use_bbr(connection: socket.socket) -> None:
    now = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    if now.rstrip(b"\0") != BBR:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
        _log.debug("Packets to %s are lost without congestion: switching to BBR.", connection.getpeername())


def sent_by(connection: socket.socket) -> Sent | None:
    """Return the connection's counters, None if the kernel reports none. Raises OSError."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    packet_bytes, rtt_us, retransmitted, min_rtt_us, num_packets, num_delivered, needless = (
        struct.unpack_from("=I", info, place)[0]
        for place in (_PACKET_BYTES, _RTT, _RETRANSMITTED, _MIN_RTT, _PACKETS, _DELIVERED, _NEEDLESS)
    )
    return Sent(
        num_packets=num_packets,
        num_lost=max(0, retransmitted - needless),
        arrived_bytes=num_delivered * packet_bytes,
        rtt_s=rtt_us * 1e-6,
        min_rtt_s=min_rtt_us * 1e-6,
    )
