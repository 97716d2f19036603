"""A wide-area network in user space, for kernels without netem: moves packets between the TUN devices of hosts.

`python -m benchmarks.dissemination.wan.emulator`. The first line of standard input is a JSON object with `homes` (each
with `namespace`, `address` and the fields of a `Home`), `weather` and `seed`. The emulator makes a device `wan` in each
namespace, sets its address, and prints "ready". For each further line it prints a JSON object with its counts since the
previous line. The emulator ends with its standard input, and its devices with it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import fields
from random import Random
from typing import Any, Final

from benchmarks.dissemination.wan.network import HEADER_BYTES, MTU, TUN, Home, Network, Weather

DEVICE: Final = "wan"
QUEUED_PACKETS: Final = 5_000
"""Queue between a host and this program, which must not drop packets: the emulated queues do."""
AT_ONCE: Final = 32
"""Most packets that are read from one host before the next host has its turn."""
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
_TUNSETOFFLOAD: Final = 0x400454D0
_TUN_F_CSUM: Final = 0x01
_TUN_F_TSO4: Final = 0x02
_MOST_FRAME_BYTES: Final = 2**16 + HEADER_BYTES
_IPV4: Final = 4
_DESTINATION: Final = slice(HEADER_BYTES + 16, HEADER_BYTES + 20)
_PRIORITY: Final = 1


def main() -> None:
    order = json.loads(sys.stdin.readline())
    devices = [_open_device(number, home) for number, home in enumerate(order["homes"])]
    homes = [Home(**{one.name: home[one.name] for one in fields(Home)}) for home in order["homes"]]
    numbers = {ipaddress.ip_address(home["address"]).packed: number for number, home in enumerate(order["homes"])}
    _go_before_programs()
    print("ready", flush=True)
    carry(devices, numbers, Network(homes, Weather(**order["weather"]), Random(order["seed"])))


def _open_device(number: int, home: dict[str, Any]) -> int:
    """Open a device in the home's namespace. Reading gives packets from the host; writing delivers packets to the
    host."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    name = f"ew{os.getpid()}n{number}"
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    _ip("link", "set", name, "netns", home["namespace"], "name", DEVICE)
    inside = ("-n", home["namespace"])
    _ip(*inside, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", str(QUEUED_PACKETS))
    _ip(*inside, "address", "add", f"{home['address']}/24", "dev", DEVICE)
    _ip(*inside, "link", "set", DEVICE, "up")
    return device


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _go_before_programs() -> None:
    """Take real-time priority, because a line carries packets however busy the hosts are."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        print("the emulator has no right to real-time priority", file=sys.stderr)


def carry(devices: list[int], numbers: dict[bytes, int], network: Network) -> None:
    """Carry packets until standard input ends. `numbers` are those of homes, by address."""
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
    """Read the host's packets. Drop packets without IPv4 or without a known home, like a router."""
    for _ in range(AT_ONCE):
        try:
            frame = os.read(device, _MOST_FRAME_BYTES)
        except BlockingIOError:
            return
        is_ipv4 = frame[HEADER_BYTES] >> 4 == _IPV4
        target = numbers.get(frame[_DESTINATION]) if is_ipv4 else None
        if target is not None:
            network.send(source, target, frame, time.monotonic())


if __name__ == "__main__":
    main()
