"""By which congestion control a connection sends: the system's own, or BBR where packets are lost without congestion.

Cubic and Reno take each loss for a full queue, and halve their window or so: with 1 % of packets lost, and 60 ms there
and back, one connection carries 2.4 Mbit/s whatever the line (Mathis et al., The Macroscopic Behavior of the TCP
Congestion Avoidance Algorithm, 1997). BBR goes by the rate at which packets arrive (Cardwell et al., 2016). Where
nothing is lost but to full queues it is the slower one, so a connection changes to it only when it has seen that its
line is lossy: retransmissions while no queue had formed, by Page's cumulative sum test (1954). It does not change back.

A hub pools what its connections see: each carries too few packets to tell a loss of 0.2 % before many versions have
gone, while all together tell it within one. What one place reports, which can feign losses, is not enough for
that, nor is what two do: several have to lose packets at the same time. A node does not pool: its few slow links fill
its uplink by Cubic, of whose flows a loss slows down one, and would drive each other's packets out of its router's
queue by BBR.

Linux only, and where the kernel has BBR; elsewhere nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from math import log
from typing import Final

from echo_shared.sent import Sent

_log = logging.getLogger(__name__)

CLEAN_LOSS: Final = 2e-4
LOSSY_LOSS: Final = 3e-3
"""Shares of packets, between which the test tells."""
ENOUGH: Final = 4.0
"""Natural logarithm of how much more likely a lossy line makes what was seen: two losses among 500 packets."""
FEWEST_PLACES: Final = 3
BYTES_A_LOSS: Final = 2_000_000
"""What a pool takes for lossy: where 0.2 % are lost, that is about three losses."""
LOOK_BYTES: Final = 16_384
"""Are sent between two looks."""
CAN_LOOK: Final = hasattr(socket, "TCP_INFO") and hasattr(socket, "TCP_CONGESTION")
"""Whether this system counts what a connection sends, and lets a program choose how it does."""
BBR: Final = b"bbr"
_SO_MAX_PACING_RATE: Final = 47
_NAME_BYTES: Final = 16
_INFO_BYTES: Final = 220
_PACKET_BYTES, _RTT, _RETRANSMITTED, _MIN_RTT, _PACKETS, _DELIVERED, _NEEDLESS = 16, 68, 100, 148, 156, 192, 216
"""Where these stand in Linux' `struct tcp_info`."""


class LossTest:
    """Whether a line loses packets that no queue had to drop."""

    def __init__(self) -> None:
        self._sum = 0.0
        self.is_lossy = False

    def saw(self, last: Sent, sent: Sent) -> None:
        """Two looks at its connection, one after the other."""
        if sent.queues or last.queues:
            return
        num_packets, num_lost = sent.num_packets - last.num_packets, sent.num_lost - last.num_lost
        per_loss, per_packet = log(LOSSY_LOSS / CLEAN_LOSS), log((1 - LOSSY_LOSS) / (1 - CLEAN_LOSS))
        self._sum = max(0.0, self._sum + num_lost * per_loss + max(0, num_packets - num_lost) * per_packet)
        self.is_lossy |= self._sum >= ENOUGH


class LossPool:
    """Whether lines to several places lose such packets at the same time.

    Of each place one loss counts. All are forgotten once BYTES_A_LOSS have arrived for each, at whatever place: not
    packets, of which a place may ask for small ones.
    """

    def __init__(self) -> None:
        self._to_come = 0
        """Bytes that are to arrive until then."""
        self._num_lost: dict[str, int] = {}
        """By place; those that turned out to have arrived are taken back."""
        self.is_lossy = False

    def saw(self, last: Sent, sent: Sent, place: str) -> None:
        """Two looks at one connection, which is with this place, one after the other."""
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
    """Of one connection. Tell it of each frame that is `sent`."""

    def __init__(self, transport: asyncio.BaseTransport | None, pool: LossPool | None = None, place: str = "") -> None:
        """`pool`: of all connections of this host, where they are to change together; this one is with `place`."""
        self._socket = transport.get_extra_info("socket") if CAN_LOOK and transport is not None else None
        """None: there is nothing to look at, or no more."""
        self._test = LossTest()
        self._pool, self._place = pool, place
        self._last: Sent | None = None
        self._unseen_bytes = LOOK_BYTES

    def sent(self, num_bytes: int) -> None:
        """So much more; changes to BBR once the line is known to be lossy. Raises nothing."""
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
        except OSError as error:  # It has ended, or the kernel does not have it, or does not let this process.
            _log.debug("A connection keeps its congestion control: %s", error)
            self._socket = None


def pace(connection: socket.socket, bytes_per_s: int) -> None:
    """Has the kernel send no faster, packet by packet: a frame at once would stand in the line's queue. Raises OSError.

    Linux only, as `CAN_LOOK` says.
    """
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)


def _use_bbr(connection: socket.socket) -> None:
    """Does nothing where that is what it sends by. Raises OSError."""
    now = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    if now.rstrip(b"\0") != BBR:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, BBR)
        _log.debug("Packets are lost without congestion on the way to %s: BBR from now on.", connection.getpeername())


def sent_by(connection: socket.socket) -> Sent | None:
    """None: this kernel does not count it. Raises OSError."""
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
