"""Detection of a line that loses packets without congestion, and the switch to another congestion control, on emulated
lines.
"""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.dissemination.links import HUB
from benchmarks.dissemination.wan import homes
from benchmarks.dissemination.wan.emulator import Home
from benchmarks.dissemination.wan.homes import Wan, WanSet, open_wan
from echo_shared.wire.congestion import BYTES_A_LOSS, FEWEST_PLACES, LossPool, LossTest, LossWatch
from echo_shared.wire.sent import Sent

LOOK_PACKETS = 12
PACKET_BYTES = 1_448
FIRST = Sent(num_packets=0, num_lost=0, arrived_bytes=0, rtt_s=0.06, min_rtt_s=0.06)
QUIET, FULL = (0.0601, 0.060), (0.160, 0.060)
"""(round trip, minimum round trip) in seconds: of a line without queue, and of a line with a full queue."""


def looks(shares: list[tuple[float, tuple[float, float]]], seed: int = 1) -> LossTest:
    """Return a LossTest after one observation for each element of `shares`, in order: (share of lost packets, round
    trips).
    """
    test, rng, last = LossTest(), Random(seed), FIRST
    for share, (rtt_s, min_rtt_s) in shares:
        sent = replace(more(last, share, rng), rtt_s=rtt_s, min_rtt_s=min_rtt_s)
        test.saw(last, sent)
        last = sent
    return test


def more(last: Sent, share: float, rng: Random) -> Sent:
    num_lost = last.num_lost + sum(rng.random() < share for _ in range(LOOK_PACKETS))
    arrived_bytes = PACKET_BYTES * (last.num_packets + LOOK_PACKETS - num_lost)
    return replace(last, num_packets=last.num_packets + LOOK_PACKETS, num_lost=num_lost, arrived_bytes=arrived_bytes)


def found_after(shares: list[float], num_looks: int, seed: int = 1) -> int | None:
    """Return the number of packets after which the lines count as lossy; None = they do not. `shares` has each line's
    share of lost packets. All lines are observed together.
    """
    pool, rng = LossPool(), Random(seed)
    lasts = dict.fromkeys(range(len(shares)), FIRST)
    for number in range(num_looks):
        for place, share in enumerate(shares):
            sent = more(lasts[place], share, rng)
            pool.saw(lasts[place], sent, str(place))
            lasts[place] = sent
            if pool.is_lossy:
                return (number * len(shares) + place + 1) * LOOK_PACKETS
    return None


@pytest.mark.parametrize(("share", "num_packets"), [(0.01, 2_500), (0.002, 15_000), (0.05, 400)])
def test_a_lossy_line_is_found_from_its_own_traffic(share: float, num_packets: int) -> None:
    found = [looks([(share, QUIET)] * (num_packets // LOOK_PACKETS), seed).is_lossy for seed in range(20)]
    assert sum(found) >= 19


def test_a_line_that_loses_next_to_nothing_never_is() -> None:
    assert not any(looks([(2e-5, QUIET)] * 5_000, seed).is_lossy for seed in range(10))


def test_losses_by_full_queues_do_not_count() -> None:
    assert not looks([(0.1, FULL)] * 500).is_lossy
    assert not looks([(0.0, QUIET), (0.0, FULL), (0.3, FULL), (0.0, FULL)] * 200).is_lossy


def test_lines_that_each_carry_too_little_are_reported_together() -> None:
    together = [found_after([0.002] * 8, 1_500, seed) for seed in range(40)]
    assert None not in together
    alone = sum(looks([(0.002, QUIET)] * 25, seed).is_lossy for seed in range(40))
    assert sum(num is not None and num < 8 * 25 * LOOK_PACKETS for num in together) > 20, "within 300 packets of each"
    assert alone < 10


@pytest.mark.parametrize("num_hostile", [1, FEWEST_PLACES - 1])
@pytest.mark.parametrize("feigned", [1.0, 0.3, 0.001])
def test_heavy_losses_on_few_lines_do_not_change_the_others(num_hostile: int, feigned: float) -> None:
    shares = [feigned] * num_hostile + [0.0] * 18
    assert found_after(shares, 1_000) is None
    assert num_hostile > 1 or found_after(shares[:1] + [2e-5] * 19, 1_000) is None


def test_losses_on_many_lines_to_one_place_count_as_one_place() -> None:
    pool, rng, lasts = LossPool(), Random(1), [FIRST] * 20
    for _ in range(200):
        for line, last in enumerate(lasts):
            lasts[line] = more(last, 0.1, rng)
            pool.saw(last, lasts[line], "one place")
    assert not pool.is_lossy


@pytest.mark.parametrize("num_needless", [0, 1])
def test_packets_that_arrived_after_all_do_not_count_for_a_place(num_needless: int) -> None:
    pool, lost = LossPool(), replace(FIRST, num_packets=LOOK_PACKETS, num_lost=1)
    for place in range(FEWEST_PLACES):
        assert not pool.is_lossy
        pool.saw(FIRST, lost, str(place))
        pool.saw(lost, replace(lost, num_lost=1 - num_needless), str(place))
    assert pool.is_lossy is not bool(num_needless)


def test_losses_are_forgotten_once_enough_has_arrived_anywhere() -> None:
    lost = replace(FIRST, num_packets=1, num_lost=1)
    for arrived_bytes, is_lossy in ((BYTES_A_LOSS, False), (BYTES_A_LOSS - 1, True)):
        pool = LossPool()
        for place in range(FEWEST_PLACES):
            pool.saw(FIRST, lost, str(place))
            pool.saw(FIRST, replace(FIRST, num_packets=100_000, arrived_bytes=arrived_bytes), "carries")
        assert pool.is_lossy is is_lossy


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
from echo_shared.wire.congestion import LossPool, LossWatch
from echo_shared.wire.sockets import keep_unsent_short

pool, used = LossPool(), {}

async def main():
    listening = await asyncio.start_server(serve, "0.0.0.0", 5000)
    print("listening", flush=True)
    await asyncio.get_running_loop().create_future()

async def serve(reader, writer):
    keep_unsent_short(writer.transport, 65536)
    found, (place, _) = writer.get_extra_info("socket"), writer.get_extra_info("peername")
    watch = LossWatch(writer.transport, pool, place)
    before = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    for _ in range(int(sys.argv[1]) // 65536):
        writer.write(bytes(65536))
        await writer.drain()
        watch.sent(65536)
    after = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    used[place] = [one.rstrip(b"\\0").decode() for one in (before, after)]
    if len(used) == int(sys.argv[2]):
        print(json.dumps(used), flush=True)
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
PATIENCE_S = 120.0
emulated = pytest.mark.skipif(
    not homes.can_emulate() or "bbr" not in CONTROLS.read_text(),
    reason="takes an emulated network: root, iproute2, TUN devices; and a kernel with BBR",
)


def send(wan: Wan, source: int, targets: list[int], megabytes: int) -> list[tuple[str, str]]:
    """Send from one host to the others; return the congestion control of each connection at the start and at the
    end.
    """
    code = [sys.executable, "-c", SEND, str(megabytes * 2**20), str(len(targets))]
    with ExitStack() as processes:
        sender = processes.enter_context(
            subprocess.Popen([*wan.command(source), *code], stdout=subprocess.PIPE, text=True)
        )
        processes.callback(sender.terminate)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "listening\n"
        receive = [sys.executable, "-c", RECEIVE, wan.address(source)]
        receivers = [subprocess.Popen([*wan.command(target), *receive]) for target in targets]
        assert [receiver.wait(PATIENCE_S) for receiver in receivers] == [0] * len(targets)
        used = json.loads(sender.stdout.readline())
    return [tuple(used[wan.address(target)]) for target in targets]


@emulated
@pytest.mark.parametrize(("loss", "megabytes"), [(0.0, 6), (0.02, 3)])
def test_bbr_is_for_lossy_lines_alone(loss: float, megabytes: int) -> None:
    home = Home(up=20, down=100, delay_ms=15)
    with open_wan(1, WanSet(loss=loss, homes=(home,))) as wan:
        [(before, after)] = send(wan, 1, [HUB], megabytes)
        carried = wan.carried()
    assert before != "bbr"
    if loss:
        assert after == "bbr"
    else:
        assert carried["full"] > 0, "the full uplink queue dropped packets"
        assert after == before


@emulated
def test_one_lossy_home_does_not_change_the_transfers_to_others() -> None:
    clean = Home(up=20, down=100, delay_ms=15)
    with open_wan(4, WanSet(loss=0.0, homes=(replace(clean, loss=0.05), clean, clean, clean))) as wan:
        (_, lossy), *others = send(wan, HUB, [1, 2, 3, 4], 3)
    assert lossy == "bbr"
    assert all(before == after != "bbr" for before, after in others)
