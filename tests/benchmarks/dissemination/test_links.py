"""The lower bound on dissemination time, computed by hand; and emulated links, if this process may create them."""

import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from benchmarks.dissemination import links
from benchmarks.dissemination.links import HUB, Links, LinkSet, open_links, remove_leftovers, run_command

shaped = pytest.mark.skipif(not links.can_shape(), reason="namespaces with shaped links take root and iproute2")
SET = LinkSet(hub_up=20, node_down=100, node_up=40)

LISTEN = """
import socket
with socket.create_server(("0.0.0.0", {port})) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(bytes({size}))
        connection.close()
"""
CONNECT = """
import socket
with socket.create_connection(("{address}", {port}), timeout=1) as connection:
    left = {size}
    while left and (data := connection.recv(65536)):
        left -= len(data)
raise SystemExit(left)
"""


@pytest.mark.parametrize(
    ("hub_up", "node_up", "megabytes", "num_nodes", "bound_s"),
    [
        (20, 20, 64, 8, 25.6),  # Bound by the hub's uplink, which must send one copy.
        (1000, 40, 8, 1, 0.64),  # Bound by each node's downlink.
        # Bound by all uplinks together, which must carry a copy per node.
        (100, 20, 64, 8, 8 * 64 * 8 / (100 + 8 * 20)),
    ],
)
def test_the_bound(hub_up: int, node_up: int, megabytes: int, num_nodes: int, bound_s: float) -> None:
    of = LinkSet(hub_up=hub_up, node_down=100, node_up=node_up)
    assert of.bound_s(megabytes * 10**6, num_nodes) == pytest.approx(bound_s)


def reaches(net: Links, *, host: int, to: int, port: int, size: int = 1) -> bool:
    code = CONNECT.format(address=net.address(to), port=port, size=size)
    return subprocess.run([*net.command(host), sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture
def serve():
    """Yield `serve(net, host, port, size)`, which starts a server that sends each client `size` bytes."""
    servers = []

    def start(net: Links, host: int, port: int, size: int = 1) -> None:
        code = LISTEN.format(port=port, size=size)
        server = subprocess.Popen([*net.command(host), sys.executable, "-c", code], stdout=subprocess.PIPE)
        servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"

    yield start
    for server in servers:
        server.kill()
        with closing(server.stdout):
            server.wait()


@shaped
def test_hosts_reach_each_other(serve) -> None:
    with open_links(2, SET) as net:
        assert isinstance(net, Links)
        serve(net, HUB, 7000)
        serve(net, 1, 7000)
        assert reaches(net, host=1, to=HUB, port=7000)
        assert reaches(net, host=2, to=1, port=7000)


@shaped
def test_an_uplink_has_its_configured_rate(serve) -> None:
    size = 1_000_000
    with open_links(1, SET) as net:
        assert isinstance(net, Links)
        serve(net, HUB, 7000, size)
        sent_before = sent_bytes(net)
        assert reaches(net, host=1, to=HUB, port=7000, size=size)
        assert sent_bytes(net) - sent_before > size
        shaping = run_command("tc", "-n", net.command(HUB)[-1], "qdisc", "show", "dev", "wan")
        assert "tbf" in shaping
        assert "rate 20Mbit" in shaping


def sent_bytes(net: Links) -> int:
    counted = run_command(*net.command(HUB), "cat", "/sys/class/net/wan/statistics/tx_bytes")
    return int(counted)


def of_ours() -> list[str]:
    return [line for line in run_command("ip", "netns", "list").splitlines() if line.startswith("echo-bench-")]


@shaped
def test_nothing_is_left_behind() -> None:
    before = of_ours()
    with pytest.raises(KeyboardInterrupt), open_links(2, SET):
        assert len(of_ours()) > len(before)
        raise KeyboardInterrupt
    assert of_ours() == before


@shaped
def test_leftovers_of_a_killed_run_are_removed() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert not psutil.pid_exists(child.pid)
    left = f"echo-bench-{child.pid}-0-bridge"
    run_command("ip", "netns", "add", left)
    remove_leftovers()
    assert left not in run_command("ip", "netns", "list")
