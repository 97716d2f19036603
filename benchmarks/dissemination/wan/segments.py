"""Frames of a TUN device with segmentation offload: one frame holds several TCP segments, and a line may lose some.

A frame is a virtio-net header and an IPv4 packet. If the header says so, the packet's data are segments of `gso_size`
bytes, the last one shorter. Moving them together costs the emulator little more than moving one.
"""

from __future__ import annotations

import struct
from typing import Final

TUN: Final = "/dev/net/tun"
HEADER_BYTES: Final = 10
MTU: Final = 1_500
_TCP: Final = 6
_FIN_PSH: Final = 0x09
_NONE, _TCPV4, _ECN = 0, 1, 0x80
_HEADER: Final = struct.Struct("<BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset"""


def sizes(frame: bytes) -> list[int]:
    """Sizes of the IPv4 packets that a line carries for the frame. All segments have the headers of the first."""
    gso_type, gso_size = frame[1], int.from_bytes(frame[4:6], "little")
    num_bytes = len(frame) - HEADER_BYTES
    if gso_type & ~_ECN == _NONE:
        return [num_bytes]
    headers = _headers_bytes(frame)
    whole, rest = divmod(num_bytes - headers, gso_size)
    return [headers + gso_size] * whole + ([headers + rest] if rest else [])


def cut(frame: bytes, first: int, end: int) -> bytes:
    """Extract segments `first` to `end - 1` of a frame."""
    flags, gso_type, hdr_len, gso_size, csum_start, csum_offset = _HEADER.unpack_from(frame)
    headers = _headers_bytes(frame)
    data_at = HEADER_BYTES + headers
    data = frame[data_at + first * gso_size : data_at + end * gso_size]
    is_last = data_at + end * gso_size >= len(frame)
    packet = bytearray(frame[HEADER_BYTES:data_at])
    ip_bytes = 4 * (packet[0] & 15)
    packet[2:4] = (headers + len(data)).to_bytes(2, "big")
    number = int.from_bytes(packet[4:6], "big") + first
    packet[4:6] = (number & 0xFFFF).to_bytes(2, "big")
    packet[10:12] = b"\0\0"
    packet[10:12] = (_sum(bytes(packet[:ip_bytes])) ^ 0xFFFF).to_bytes(2, "big")
    sequence = int.from_bytes(packet[ip_bytes + 4 : ip_bytes + 8], "big") + first * gso_size
    packet[ip_bytes + 4 : ip_bytes + 8] = (sequence & 0xFFFFFFFF).to_bytes(4, "big")
    if not is_last:
        packet[ip_bytes + 13] &= ~_FIN_PSH
    # The kernel completes the checksum; this is the sum over addresses, protocol and length.
    of_pseudo_header = bytes(packet[12:20]) + struct.pack("!BBH", 0, _TCP, headers - ip_bytes + len(data))
    packet[ip_bytes + 16 : ip_bytes + 18] = _sum(of_pseudo_header).to_bytes(2, "big")
    if len(data) <= gso_size:
        gso_type = gso_size = hdr_len = 0
    return _HEADER.pack(flags, gso_type, hdr_len, gso_size, csum_start, csum_offset) + packet + data


def _headers_bytes(frame: bytes) -> int:
    """Size of the IP and TCP headers together."""
    ip_bytes = 4 * (frame[HEADER_BYTES] & 15)
    return ip_bytes + 4 * (frame[HEADER_BYTES + ip_bytes + 12] >> 4)


def _sum(data: bytes) -> int:
    """Ones' complement sum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
