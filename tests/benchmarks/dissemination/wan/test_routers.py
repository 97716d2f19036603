"""Routers of emulated homes pass all outgoing packets, let only answers in, and translate ports as their kind says."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes, routers
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan
from benchmarks.dissemination.wan.routers import Router

pytestmark = pytest.mark.skipif(
    not homes.can_emulate() or bool(routers.lacking()), reason="routers take root, TUN devices, nftables and miniupnpd"
)
PORT = 5000
QUICK = Home(up=100, down=100, delay_ms=2)
ANSWER = """
import select, socket
servers = []
for port in (5000, 5001):
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        server = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind((host, port))
        servers.append(server)
print("ready", flush=True)
while True:
    for server in select.select(servers, [], [])[0]:
        _, sender = server.recvfrom(100)
        server.sendto(f"{sender[0]} {sender[1]}".encode(), sender)
"""
ASK = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as asked:
    asked.bind(("", 5000))
    asked.settimeout(5)
    for port in (5000, 5001):
        asked.sendto(b"?", (sys.argv[1], port))
        print(asked.recv(100).decode())
"""
PUNCH = """
import socket, sys, time
host, port = sys.argv[1:]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as punched:
    punched.bind(("", 5000))
    punched.settimeout(0.1)
    got = set()
    for _ in range(10):
        punched.sendto(b"heard" if got else b"hello", (host, int(port)))
        try:
            got.add(punched.recv(100).decode())
        except TimeoutError:
            pass
    print(*sorted(got))
"""
LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 5000), family=family) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].close()
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=0.5).close()
    print("open")
except TimeoutError:
    print("silent")
"""
NAT_PMP = """
import socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router:
    router.settimeout(0.3)
    for _ in range(10):
        router.sendto(struct.pack("!BBHHHI", 0, 2, 0, 5000, 5000, 60), ("192.168.1.1", 5351))
        try:
            print(*struct.unpack("!BBHIHHI", router.recv(16))[2:6:3])
            break
        except (TimeoutError, ConnectionError):
            pass
"""


@contextmanager
def opened(*kinds: Router) -> Iterator[Wan]:
    with open_wan(len(kinds), WanSet(loss=0.0, homes=(QUICK,) * len(kinds), routers=kinds)) as wan:
        yield wan


def start(wan: Wan, host: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*wan.command(host), sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def serving(wan: Wan, host: int, code: str, *arguments: str) -> Iterator[None]:
    with start(wan, host, code, *arguments) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


def run(wan: Wan, host: int, code: str, *arguments: str) -> str:
    with start(wan, host, code, *arguments) as process:
        return process.communicate(timeout=20)[0].strip()


def test_kinds_translate_ports_as_they_say() -> None:
    with opened("cone", "symmetric", "ipv6", "dual") as wan, serving(wan, HUB, ANSWER):
        four, six = wan.outside(HUB, socket.AF_INET), wan.outside(HUB, socket.AF_INET6)
        for host in (1, 4):
            assert run(wan, host, ASK, four).splitlines() == [f"{wan.outside(host, socket.AF_INET)} {PORT}"] * 2
        for host in (3, 4):
            assert run(wan, host, ASK, six).splitlines() == [f"{wan.outside(host, socket.AF_INET6)} {PORT}"] * 2
        seen = [line.split() for line in run(wan, 2, ASK, four).splitlines()]
    assert {address for address, _ in seen} == {"11.78.0.3"}
    assert len({PORT, *(int(port) for _, port in seen)}) == 3, "each peer sees another port"


def test_only_cones_can_be_punched() -> None:
    with opened("cone", "cone", "symmetric", "symmetric") as wan:
        for one, other, both_heard in ((1, 2, True), (3, 4, False)):
            ends = [
                start(wan, here, PUNCH, wan.outside(there, socket.AF_INET), str(PORT))
                for here, there in ((one, other), (other, one))
            ]
            assert ["heard" in end.communicate(timeout=20)[0] for end in ends] == [both_heard] * 2


@pytest.mark.parametrize("kind", ["cone", "symmetric", "mapping", "ipv6"])
def test_nobody_can_connect_to_a_home_behind_a_router(kind: Router) -> None:
    with opened(kind, "dual") as wan, serving(wan, 1, LISTEN, wan.address(1)):
        family = socket.AF_INET6 if kind == "ipv6" else socket.AF_INET
        assert run(wan, 2, CONNECT, wan.outside(1, family)) == "silent"


def test_a_router_opens_a_port_on_request() -> None:
    with opened("mapping", "cone") as wan, serving(wan, 1, LISTEN, wan.address(1)):
        assert run(wan, 1, NAT_PMP) == f"0 {PORT}"
        assert run(wan, 2, CONNECT, wan.outside(1, socket.AF_INET)) == "open"
