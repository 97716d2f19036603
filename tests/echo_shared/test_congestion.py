"""What is taken for a lossy line, and what the system then does on emulated ones."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.homes import WanSet, open_wan
from benchmarks.dissemination.wan.network import Home
from echo_shared.congestion import LossTest, LossWatch
from echo_shared.sent import Sent

LOOK_PACKETS = 12
QUIET, FULL = (0.0601, 0.060), (0.160, 0.060)
"""Round trip and least round trip, in seconds."""


def looks(shares: list[tuple[float, tuple[float, float]]], seed: int = 1) -> LossTest:
    """Of lines that lose these shares, with these round trips, look by look."""
    test, rng, last = (
        LossTest(),
        Random(seed),
        Sent(num_packets=0, num_lost=0, arrived_bytes=0, rtt_s=0.06, min_rtt_s=0.06),
    )
    for share, (rtt_s, min_rtt_s) in shares:
        lost = last.num_lost + sum(rng.random() < share for _ in range(LOOK_PACKETS))
        sent = Sent(
            num_packets=last.num_packets + LOOK_PACKETS,
            num_lost=lost,
            arrived_bytes=0,
            rtt_s=rtt_s,
            min_rtt_s=min_rtt_s,
        )
        test.saw(last, sent)
        last = sent
    return test


@pytest.mark.parametrize(("share", "num_packets"), [(0.01, 2_500), (0.002, 15_000), (0.05, 400)])
def test_a_lossy_line_is_found_by_what_it_carries(share: float, num_packets: int) -> None:
    found = [looks([(share, QUIET)] * (num_packets // LOOK_PACKETS), seed).is_lossy for seed in range(20)]
    assert sum(found) >= 19


def test_a_line_that_loses_next_to_nothing_never_is() -> None:
    assert not any(looks([(2e-5, QUIET)] * 5_000, seed).is_lossy for seed in range(10))


def test_what_full_queues_drop_does_not_count() -> None:
    assert not looks([(0.1, FULL)] * 500).is_lossy
    assert not looks([(0.0, QUIET), (0.0, FULL), (0.3, FULL), (0.0, FULL)] * 200).is_lossy


def test_lines_that_each_carry_too_little_are_told_together() -> None:
    num_lossy = 0
    for seed in range(20):
        together, alone, rng = LossTest(), [LossTest() for _ in range(20)], Random(seed)
        lasts = [Sent(num_packets=0, num_lost=0, arrived_bytes=0, rtt_s=0.06, min_rtt_s=0.06)] * len(alone)
        for _ in range(60):
            for line, (test, last) in enumerate(zip(alone, lasts, strict=True)):
                lost = last.num_lost + sum(rng.random() < 0.002 for _ in range(LOOK_PACKETS))
                num_packets = last.num_packets + LOOK_PACKETS
                lasts[line] = Sent(num_packets=num_packets, num_lost=lost, arrived_bytes=0, rtt_s=0.06, min_rtt_s=0.06)
                together.saw(last, lasts[line])
                test.saw(last, lasts[line])
        assert together.is_lossy
        num_lossy += sum(test.is_lossy for test in alone)
    assert num_lossy < 10 * 20, "half of them do not know it by themselves"


def test_a_connection_that_has_ended_is_left_alone() -> None:
    class Ended:
        def get_extra_info(self, name: str) -> socket.socket:
            closed = socket.socket()
            closed.close()
            return closed

    LossWatch(Ended()).sent(2**20)
    LossWatch(None).sent(2**20)


SEND = """
import asyncio, json, socket, sys
from echo_shared.congestion import LossWatch
from echo_shared.sockets import keep_unsent_short

async def main():
    listening = await asyncio.start_server(serve, "0.0.0.0", 5000)
    print("listening", flush=True)
    await asyncio.get_running_loop().create_future()

async def serve(reader, writer):
    keep_unsent_short(writer.transport, 65536)
    watch, found = LossWatch(writer.transport), writer.get_extra_info("socket")
    before = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    for _ in range(int(sys.argv[1]) // 65536):
        writer.write(bytes(65536))
        await writer.drain()
        watch.sent(65536)
    after = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    print(json.dumps([one.rstrip(b"\\0").decode() for one in (before, after)]), flush=True)
    writer.close()

asyncio.run(main())
"""
RECEIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    while connection.recv(2**20):
        pass
"""
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
emulated = pytest.mark.skipif(
    not homes.can_emulate() or "bbr" not in CONTROLS.read_text(),
    reason="takes an emulated network: root, iproute2, TUN devices; and a kernel with BBR",
)


@emulated
@pytest.mark.parametrize(("loss", "megabytes"), [(0.0, 6), (0.02, 3)])
def test_bbr_is_for_lossy_lines_alone(loss: float, megabytes: int) -> None:
    home = Home(up=20, down=100, delay_ms=15)
    with open_wan(1, WanSet(loss=loss, homes=(home,))) as wan:
        code = [sys.executable, "-c", SEND, str(megabytes * 2**20)]
        with subprocess.Popen([*wan.command(1), *code], stdout=subprocess.PIPE, text=True) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "listening\n"
            subprocess.run([*wan.command(HUB), sys.executable, "-c", RECEIVE, wan.address(1)], check=True, timeout=120)
            before, after = json.loads(sender.stdout.readline())
            sender.terminate()
        carried = wan.carried()
    assert before != "bbr"
    if loss:
        assert after == "bbr"
    else:
        assert carried["full"] > 0, "the uplink's queue was full, and dropped some"
        assert after == before
