"""The kernel passes several TCP segments to the network emulator as one large frame. The emulator counts the segments,
and splits the frame into valid smaller ones.
"""

import struct

import pytest

from benchmarks.dissemination.wan.emulator import HEADER_BYTES, cut, sizes

GSO_SIZE = 100
FIN_PSH_ACK = 0x19
SOURCE, DESTINATION = bytes((10, 78, 0, 1)), bytes((10, 78, 0, 2))


def train(num_bytes: int, *, sequence: int = 1_000, options: bytes = b"") -> bytes:
    """Return a frame like the kernel's: `num_bytes` of TCP data, to be split into segments of GSO_SIZE."""
    offset = (20 + len(options)) // 4 << 4
    tcp = struct.pack("!HHIIBBHHH", 5_000, 80, sequence, 7, offset, FIN_PSH_ACK, 512, 0, 0) + options
    total = 20 + len(tcp) + num_bytes
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, total, 65_535, 0x4000, 64, 6, 0, SOURCE, DESTINATION)
    header = struct.pack("<BBHHHH", 1, 1, 20 + len(tcp), GSO_SIZE, 20, 16)
    return header + ip + tcp + bytes(place % 251 for place in range(num_bytes))


def ones_complement_sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    return total % 0xFFFF or 0xFFFF


def parts(frame: bytes) -> tuple[int, int, bytes, int]:
    """Check the lengths and checksums in a frame's headers. Return its sequence number, TCP flags, data and IP
    identification.
    """
    ip, tcp = frame[HEADER_BYTES : HEADER_BYTES + 20], frame[HEADER_BYTES + 20 :]
    assert int.from_bytes(ip[2:4]) == len(frame) - HEADER_BYTES
    assert ones_complement_sum(ip) == 0xFFFF
    pseudo_header = SOURCE + DESTINATION + struct.pack("!BBH", 0, 6, len(tcp))
    assert ones_complement_sum(pseudo_header) == int.from_bytes(tcp[16:18])
    data_at = 4 * (tcp[12] >> 4)
    return int.from_bytes(tcp[4:8]), tcp[13], tcp[data_at:], int.from_bytes(ip[4:6])


def test_a_single_packet_counts_as_one() -> None:
    assert sizes(bytes(HEADER_BYTES) + bytes(700)) == [700]


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(300, [140] * 3), (250, [140, 140, 90]), (101, [140, 41]), (100, [140])]
)
def test_segments_have_headers_of_their_own(num_bytes: int, expected: list[int]) -> None:
    assert sizes(train(num_bytes)) == expected


def test_options_are_headers_too() -> None:
    assert sizes(train(150, options=bytes(12))) == [152, 102]


def test_the_middle_is_lost() -> None:
    whole = train(450)
    first, last = cut(whole, 0, 2), cut(whole, 3, 5)
    data = whole[HEADER_BYTES + 40 :]
    assert parts(first) == (1_000, 0x10, data[:200], 65_535)
    # The IP identification wraps at 16 bits; only the last segment has FIN and PSH.
    assert parts(last) == (1_300, FIN_PSH_ACK, data[300:], 2)
    assert sizes(first) == [140, 140]
    assert sizes(last) == [140, 90]


def test_the_last_remaining_segment_becomes_a_plain_packet() -> None:
    one = cut(train(450, sequence=2**32 - 100), 1, 2)
    assert parts(one)[0] == 0
    assert one[1:6] == bytes(5)
    assert one[0] == 1, "its checksum is still incomplete"
    assert sizes(one) == [140]
