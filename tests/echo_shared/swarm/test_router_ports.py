"""A router opens ports on request, sometimes with other numbers than requested, and closes them when the client
closes.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.dissemination.links import HUB, run_command
from benchmarks.dissemination.wan import homes, routers
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan
from benchmarks.dissemination.wan.routers import Router
from echo_shared.swarm.router_ports import UNANSWERED, RouterPorts

emulated = pytest.mark.skipif(
    not homes.can_emulate() or bool(routers.lacking()), reason="routers take root, TUN devices, nftables and miniupnpd"
)
LISTENING, MESH = 6881, 7000


def ports() -> RouterPorts:
    found = RouterPorts(unasked="")
    found.listening_at(LISTENING)
    found.requested(MESH, [2, 2])
    return found


def test_ports_are_told_apart_by_their_request() -> None:
    router = ports()
    assert router.sentence == UNANSWERED
    router.granted(0, LISTENING, "NAT-PMP")
    router.granted(2, 40_001, "NAT-PMP")
    assert (router.external(LISTENING), router.external(MESH), router.external(80)) == (LISTENING, 40_001, 80)
    assert router.sentence == "has opened port 6881, 40001 for this machine's 7000 (NAT-PMP)"
    assert router.changed.is_set()


def test_a_second_protocol_changes_nothing() -> None:
    router = ports()
    router.granted(2, MESH, "NAT-PMP")
    router.changed.clear()
    router.granted(2, 40_001, "UPnP")
    router.refused(2, "UPnP", "conflict")
    assert not router.changed.is_set()
    assert router.external(MESH) == MESH


def test_a_port_that_could_not_be_renewed_is_closed() -> None:
    router = ports()
    router.granted(2, 40_001, "NAT-PMP")
    router.refused(2, "NAT-PMP", "out of resources")
    assert router.external(MESH) == MESH
    assert router.sentence == "opens no ports (NAT-PMP: out of resources)"


def test_a_refused_udp_port_closes_no_tcp_port() -> None:
    router = ports()
    router.granted(0, 40_002, "NAT-PMP")
    router.refused(1, "NAT-PMP", "unsupported protocol")
    assert router.external(LISTENING) == 40_002


def test_a_router_that_is_not_asked() -> None:
    assert RouterPorts(unasked="router_ports is off").sentence == "is not asked to open ports: router_ports is off"


CLIENT = """
import asyncio, sys
from echo_shared.swarm import SwarmSettings, open_swarm

async def main():
    swarm = await open_swarm(SwarmSettings(port=6881, router_ports=True))
    swarm.open_port(7000)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 7000)
    async with asyncio.timeout(10):
        while len(swarm.router.opened) < 2:
            await swarm.router.changed.wait()
            swarm.router.changed.clear()
    print(swarm.router.sentence, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await swarm.close()

asyncio.run(main())
"""
OCCUPY = """
import socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as router:
    router.bind(("192.168.1.3", 0))
    router.settimeout(0.3)
    for _ in range(10):
        router.sendto(struct.pack("!BBHHHI", 0, 2, 0, 7000, 7000, 60), ("192.168.1.1", 5351))
        try:
            print(struct.unpack("!BBHIHHI", router.recv(16))[5])
            break
        except (TimeoutError, ConnectionError):
            pass
"""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=0.5).close()
    print("open")
except OSError:
    print("closed")
"""


@pytest.fixture
def wan() -> Iterator[Wan]:
    kinds: tuple[Router, ...] = ("mapping",)
    with open_wan(1, WanSet(loss=0.0, homes=(Home(up=50, down=50, delay_ms=2),), routers=kinds)) as found:
        yield found


@contextmanager
def client(wan: Wan) -> Iterator[str]:
    """Run a client with two ports in the home network; yield its sentence about the router."""
    command = [*wan.command(1), sys.executable, "-c", CLIENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        assert process.communicate("\n", timeout=10) == ("", None)


def run(wan: Wan, host: int, code: str, *arguments: str) -> str:
    command = [*wan.command(host), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def reached(wan: Wan, port: int) -> str:
    return run(wan, HUB, CONNECT, wan.outside(1, socket.AF_INET), str(port))


@emulated
def test_others_connect_until_the_client_closes(wan: Wan) -> None:
    with client(wan) as sentence:
        assert sentence == "has opened port 6881, 7000 (NAT-PMP)"
        assert (reached(wan, LISTENING), reached(wan, MESH)) == ("open", "open")
    assert (reached(wan, LISTENING), reached(wan, MESH)) == ("closed", "closed")


@emulated
def test_a_taken_port_gets_another_number(wan: Wan) -> None:
    other = ("192.168.1.3/24", "dev", "wan")
    run_command("ip", "-n", wan.command(1)[3], "address", "add", *other)
    assert run(wan, 1, OCCUPY) == str(MESH)
    run_command("ip", "-n", wan.command(1)[3], "address", "delete", *other)
    with client(wan) as sentence:
        external = int(sentence.partition(", ")[2].partition(" ")[0])
        assert sentence == f"has opened port 6881, {external} for this machine's 7000 (NAT-PMP)"
        assert external != MESH
        assert reached(wan, external) == "open"
