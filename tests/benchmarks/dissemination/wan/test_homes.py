"""Emulated home connections have the given delay, rate and loss, as programs on the emulated hosts measure them."""

import json
import subprocess
import sys
from contextlib import closing

import pytest

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan

emulated = pytest.mark.skipif(
    not homes.can_emulate(), reason="an emulated network takes root, iproute2 and TUN devices"
)
TWO = (Home(up=10, down=50, delay_ms=20), Home(up=40, down=100, delay_ms=10))
PAYLOAD_BYTES = 1_000_000

SERVE = """
import hashlib, random, socket, sys
payload = random.Random(1).randbytes(int(sys.argv[1]))
with socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print(hashlib.sha256(payload).hexdigest(), flush=True)
    connection, _ = server.accept()
    with connection:
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
"""
FETCH = """
import hashlib, socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    found, first_at, received = hashlib.sha256(), None, 0
    while data := connection.recv(65536):
        found.update(data)
        received += len(data)
        first_at = first_at or time.monotonic()
    print(found.hexdigest(), received * 8e-6 / (time.monotonic() - first_at))
"""
ROUND_TRIP = """
import socket, sys, time
times = []
for _ in range(5):
    began = time.monotonic()
    try:
        socket.create_connection((sys.argv[1], 9), timeout=5).close()
    except ConnectionRefusedError:
        times.append(time.monotonic() - began)
print(1e3 * min(times))
"""


def test_the_bound_of_unequal_homes() -> None:
    of = WanSet(loss=0.0)
    assert of.bound_s(8_000_000, 8) == pytest.approx(8 * 64 / (100 + 113))
    assert of.bound_s(8_000_000, 1) == pytest.approx(64 / 40)
    assert (len(of.homes), min(home.up for home in of.homes), max(home.up for home in of.homes)) == (8, 8, 45)


def run(wan: Wan, host: int, code: str, *arguments: str) -> str:
    command = [*wan.command(host), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def fetch(wan: Wan, *, source: int, target: int) -> float:
    """Send data between two emulated homes over one connection; check that it arrives unchanged. Return the rate in
    Mbit/s.
    """
    command = [*wan.command(source), sys.executable, "-c", SERVE, str(PAYLOAD_BYTES)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with closing(server.stdout):
        digest = server.stdout.readline().strip()
        got, mbit_s = run(wan, target, FETCH, wan.address(source)).split()
        server.wait(10)
    assert got == digest
    return float(mbit_s)


@emulated
def test_a_clean_network_has_the_given_delays_and_rates() -> None:
    with open_wan(2, WanSet(loss=0.0, homes=TWO)) as wan:
        # The nominal 60 ms, plus jitter both ways, plus 20 ms for a busy machine, in the best of five round trips.
        assert 60 <= float(run(wan, 1, ROUND_TRIP, wan.address(2))) < 60 + 2 * homes.JITTER_MS + 20
        assert 30 <= float(run(wan, HUB, ROUND_TRIP, wan.address(2))) < 30 + 2 * homes.JITTER_MS + 20
        wan.carried()
        assert 4 < fetch(wan, source=1, target=2) <= 10, "one connection fills an uplink of 10 Mbit/s"
        carried = wan.carried()
    assert carried["sent"] > PAYLOAD_BYTES / 1_460
    assert carried["lost"] == 0
    assert 0 < carried["cores"] < 1


@emulated
def test_the_given_share_is_lost_and_connections_stay_intact() -> None:
    with open_wan(2, WanSet(loss=0.05, homes=TWO)) as wan:
        fetch(wan, source=2, target=HUB)
        carried = wan.carried()
    assert carried["lost"] / carried["sent"] == pytest.approx(0.05, abs=0.03)  # Of about 1,000 packets.
    assert carried["sent"] > PAYLOAD_BYTES / 1_460


@emulated
def test_a_killed_emulator_is_reported_and_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match="has ended"), open_wan(1, WanSet(loss=0.0)) as wan:
        assert wan._emulator is not None
        wan._emulator.kill()
        wan._emulator.wait()
        wan.carried()
    prefix = wan.command(HUB)[3].rpartition("-")[0]
    assert prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


@emulated
def test_an_emulator_that_cannot_open_gives_the_reason() -> None:
    home = {"namespace": "none-of-this-name", "networks": ["11.78.0.1"], "up": 1, "down": 1, "delay_ms": 1}
    failed = subprocess.run(
        [sys.executable, "-m", "benchmarks.dissemination.wan.emulator"],
        input=json.dumps({"homes": [home]}) + "\n",
        capture_output=True,
        text=True,
    )
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "none-of-this-name" in failed.stderr
