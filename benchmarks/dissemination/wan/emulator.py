"""A wide-area network in user space, for kernels without netem: moves packets between the TUN devices of hosts.

`python -m benchmarks.dissemination.wan.emulator`. The first line of standard input is a JSON object with `homes` (each
with `namespace`, `networks` and the fields of a `Home`), `weather` and `seed`. The emulator makes a device `wan` in
each namespace, which carries packets to and from the `networks` of the home, and prints "ready". For each further line
of input it prints a JSON object with its counts since the previous line. At the end of its input the emulator ends, and
its devices disappear.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import select
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from benchmarks.dissemination.links import run_command

TUN: Final = "/dev/net/tun"
HEADER_BYTES: Final = 10
MTU: Final = 1_500
_TCP: Final = 6
_FIN_PSH: Final = 0x09
_NONE, _TCPV4, _ECN = 0, 1, 0x80
_HEADER: Final = struct.Struct("<BBHHHH")
"""Header of each frame of a TUN device, in Linux's virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start,
csum_offset.
"""


def sizes(frame: bytes) -> list[int]:
    """Return the sizes in bytes of the IP packets into which a network card would split this frame from the kernel.
    Each packet gets a copy of the headers.
    """
    gso_type, gso_size = frame[1], int.from_bytes(frame[4:6], "little")
    num_bytes = len(frame) - HEADER_BYTES
    if gso_type & ~_ECN == _NONE:
        return [num_bytes]
    headers = _headers_bytes(frame)
    whole, rest = divmod(num_bytes - headers, gso_size)
    return [headers + gso_size] * whole + ([headers + rest] if rest else [])


def cut(frame: bytes, first: int, end: int) -> bytes:
    """Return a frame that has only the packets `first` to `end - 1` of the given frame."""
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
    # The kernel completes the checksum from the sum over addresses, protocol and length.
    of_pseudo_header = bytes(packet[12:20]) + struct.pack("!BBH", 0, _TCP, headers - ip_bytes + len(data))
    packet[ip_bytes + 16 : ip_bytes + 18] = _sum(of_pseudo_header).to_bytes(2, "big")
    if len(data) <= gso_size:
        gso_type = gso_size = hdr_len = 0
    return _HEADER.pack(flags, gso_type, hdr_len, gso_size, csum_start, csum_offset) + packet + data


def _headers_bytes(frame: bytes) -> int:
    ip_bytes = 4 * (frame[HEADER_BYTES] & 15)
    return ip_bytes + 4 * (frame[HEADER_BYTES + ip_bytes + 12] >> 4)


def _sum(data: bytes) -> int:
    """Return the ones' complement sum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


LEAST_QUEUE_BYTES: Final = 16_384
"""Minimum queue of a home router in bytes, however slow its line is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Rates of a home in Mbit/s, and the one-way delay of its link in milliseconds."""

    up: float
    down: float
    delay_ms: float
    loss: float = 0.0
    """Share of packets, in both directions, that the home's own link loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Properties of all links. A queue holds as many bytes as its line carries in `up_queue_ms` or `down_queue_ms`
    milliseconds.
    """

    loss: float
    """Share of packets that are lost in addition to the losses of the homes' own links."""
    jitter_ms: float
    """Maximum additional delay of a packet, in milliseconds; the delay is uniformly distributed from 0."""
    up_queue_ms: float
    down_queue_ms: float


class _Line:
    """One direction of one link: first in, first out."""

    __slots__ = ("_free_at", "_most_waiting_s", "_s_per_byte")

    def __init__(self, mbit_s: float, queue_ms: float) -> None:
        self._s_per_byte = 8e-6 / mbit_s
        self._most_waiting_s = max(queue_ms / 1e3, LEAST_QUEUE_BYTES * self._s_per_byte)
        self._free_at = 0.0

    def carry(self, num_bytes: int, at: float) -> float | None:
        """Put a packet of this size on the line at time `at`; return its departure time, or None if the queue
        is full.
        """
        begins = self._free_at if self._free_at > at else at
        if begins - at > self._most_waiting_s:
            return None
        self._free_at = begins + num_bytes * self._s_per_byte
        return self._free_at


class Network:
    """Home links in virtual time, without I/O. `now` is in seconds and never decreases.

        uplink queue → uplink → lost? → delays of both homes, jitter → downlink queue → downlink

    Each home has two lines of finite rate. A packet that finds a queue full is dropped. Packets from home to home keep
    their order. The network carries the packets of a frame (`sizes`) one by one, and may lose single packets.
    """

    def __init__(self, homes: Sequence[Home], weather: Weather, rng: Random) -> None:
        self._up = [_Line(home.up, weather.up_queue_ms) for home in homes]
        self._down = [_Line(home.down, weather.down_queue_ms) for home in homes]
        self._delays_s = [home.delay_ms / 1e3 for home in homes]
        arrive = [1 - home.loss for home in homes]
        self._losses = [[1 - (1 - weather.loss) * one * other for other in arrive] for one in arrive]
        self._jitter_s = weather.jitter_ms / 1e3
        self._random = rng.random
        self._last_at: dict[tuple[int, int], float] = {}
        self._agenda: list[tuple[float, int, int, bytes, int]] = []
        """Heap of (time, order, target, frame, bytes). Before the frame enters the downlink, `bytes` is its size; then
        0.
        """
        self._order = 0
        self.counts: Counter[str] = Counter()
        """Packets `sent` into uplinks, `lost`, and dropped from a `full` queue."""

    @property
    def next_at(self) -> float | None:
        return self._agenda[0][0] if self._agenda else None

    def send(self, source: int, target: int, frame: bytes, now: float) -> None:
        """Send a frame of the home `source` into its uplink."""
        packets = sizes(frame)
        self.counts["sent"] += len(packets)
        up, loss, begin, left_at = self._up[source], self._losses[source][target], 0, now
        for number, size in enumerate(packets):
            through_at = up.carry(size, now)
            if through_at is not None and self._random() >= loss:
                left_at = through_at
                continue
            self.counts["full" if through_at is None else "lost"] += 1
            self._travel(source, target, frame, packets, begin, number, left_at)
            begin = number + 1
        self._travel(source, target, frame, packets, begin, len(packets), left_at)

    def _travel(
        self, source: int, target: int, frame: bytes, packets: list[int], begin: int, end: int, left_at: float
    ) -> None:
        """Carry the packets `begin` to `end` of a frame from the uplink, which they left at `left_at`, to the target's
        downlink.
        """
        if begin == end:
            return
        if end - begin < len(packets):
            frame, packets = cut(frame, begin, end), packets[begin:end]
        there_at = left_at + self._delays_s[source] + self._delays_s[target] + self._random() * self._jitter_s
        there_at = max(there_at, self._last_at.get((source, target), 0.0))
        self._last_at[source, target] = there_at
        self._push(there_at, target, frame, sum(packets))

    def deliver(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Yield (target, frame) for each frame that has left its target's downlink by now."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= now:
            at, _, target, frame, num_bytes = heappop(agenda)
            if not num_bytes:
                yield target, frame
                continue
            through_at = self._down[target].carry(num_bytes, at)
            if through_at is None:
                self.counts["full"] += len(sizes(frame))
            else:
                self._push(through_at, target, frame, 0)

    def _push(self, at: float, target: int, frame: bytes, num_bytes: int) -> None:
        self._order += 1
        heappush(self._agenda, (at, self._order, target, frame, num_bytes))


DEVICE: Final = "wan"
QUEUED_PACKETS: Final = 5_000
"""Packets that fit between a host and this program. The number is high because only the emulated queues may drop
packets.
"""
AT_ONCE: Final = 32
"""Maximum packets read from one host before the next host has its turn."""
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_TUNSETOFFLOAD: Final = 0x400454D0
_TUN_F_CSUM: Final = 0x01
_TUN_F_TSO4: Final = 0x02
_MOST_FRAME_BYTES: Final = 2**16 + HEADER_BYTES
_DESTINATIONS: Final = {4: slice(HEADER_BYTES + 16, HEADER_BYTES + 20), 6: slice(HEADER_BYTES + 24, HEADER_BYTES + 32)}
"""The bytes of a packet that decide its destination, by IP version: an IPv4 address, or the first half of an IPv6
address.
"""
_PRIORITY: Final = 1


def main() -> None:
    order = json.loads(sys.stdin.readline())
    devices = [_open_device(number, home) for number, home in enumerate(order["homes"])]
    homes = [Home(**{one.name: home[one.name] for one in fields(Home)}) for home in order["homes"]]
    numbers = {_key(network): number for number, home in enumerate(order["homes"]) for network in home["networks"]}
    _go_before_programs()
    print("ready", flush=True)
    carry(devices, numbers, Network(homes, Weather(**order["weather"]), Random(order["seed"])))


def _key(network: str) -> bytes:
    """Return the bytes at `_DESTINATIONS` of all packets to an IPv4 address, or to an IPv6 network with a 64-bit
    prefix.
    """
    return ipaddress.ip_network(network).network_address.packed[:8]


def _open_device(number: int, home: dict[str, Any]) -> int:
    """Open a device in the home's namespace: reading gives the home's packets, writing delivers packets to the home."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    name = f"ew{os.getpid()}n{number}"
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    run_command("ip", "link", "set", name, "netns", home["namespace"], "name", DEVICE)
    inside = ("-n", home["namespace"])
    run_command("ip", *inside, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", str(QUEUED_PACKETS))
    run_command("ip", *inside, "link", "set", DEVICE, "up")
    return device


def _go_before_programs() -> None:
    """Take real-time priority, so that packets are carried on time even if the hosts use all processors."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        print("the emulator has no right to real-time priority", file=sys.stderr)


def carry(devices: list[int], numbers: dict[bytes, int], network: Network) -> None:
    """Carry packets until standard input ends. `numbers` gives the home's number for each destination key."""
    orders = sys.stdin.fileno()
    watched = [*devices, orders]
    sources = {device: number for number, device in enumerate(devices)}
    began_at, began_cpu_s = time.monotonic(), time.process_time()
    while True:
        due_at = network.next_at
        wait_s = None if due_at is None else max(0.0, due_at - time.monotonic())
        readable, _, _ = select.select(watched, [], [], wait_s)
        for device in readable:
            if device == orders:
                if not os.read(orders, 4_096):
                    return
                cores = (time.process_time() - began_cpu_s) / (time.monotonic() - began_at)
                print(json.dumps({**network.counts, "cores": cores}), flush=True)
                network.counts.clear()
                began_at, began_cpu_s = time.monotonic(), time.process_time()
            else:
                _take(device, sources[device], numbers, network)
        for target, frame in network.deliver(time.monotonic()):
            os.write(devices[target], frame)


def _take(device: int, source: int, numbers: dict[bytes, int], network: Network) -> None:
    """Read the host's packets. Drop packets that go to no known home."""
    for _ in range(AT_ONCE):
        try:
            frame = os.read(device, _MOST_FRAME_BYTES)
        except BlockingIOError:
            return
        target = numbers.get(frame[_DESTINATIONS[frame[HEADER_BYTES] >> 4]])
        if target is not None:
            network.send(source, target, frame, time.monotonic())


if __name__ == "__main__":
    main()
