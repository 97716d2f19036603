"""A hub that sends and serves too much must not fill the memory, disk or logs of a real node in a separate process."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from benchmarks.harness.site import node_process
from echo_shared.process.process_memory import own_bytes
from echo_shared.wire.messages import (
    DropReason,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    Rollout,
    Standby,
    StandbyReason,
    Way,
)
from echo_shared.wire.messages.fields import printable
from tests.driven_hub import DrivenHub, make_lease, write_adapter

QUIET_S: Final = 3.0
MOST_BYTES: Final = 2**30
"""Limit on the node's memory, and on its disk; its model needs only some kilobytes."""
MOST_LOGGED: Final = 16 * 10**6
STEERING: Final = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2028<b>\x00"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Node:
    process: subprocess.Popen[str]
    home: Path

    @property
    def logged(self) -> str:
        files = [self.home.with_suffix(".log"), *self.home.rglob("*.log*")]
        return "".join(path.read_bytes().decode(errors="surrogateescape") for path in files)

    def check(self) -> None:
        """Check that the node still runs, without an internal error, in little memory, with short logs of plain
        text.
        """
        logged = self.logged
        assert self.process.poll() is None and "Traceback (most recent call last)" not in logged
        assert own_bytes(self.process.pid) < MOST_BYTES
        assert len(logged) < MOST_LOGGED and printable(logged) == logged


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[DrivenHub]:
    hub = DrivenHub(tmp_path / "hub")
    hub.welcome_changes = {"run_name": STEERING}
    await hub.open()
    await hub.publish_base()
    yield hub
    await hub.end()


@pytest.fixture
def node(hub: DrivenHub, tmp_path: Path) -> Iterator[Node]:
    home = tmp_path / "node"
    options = ["--backend", "llama_cpp", "--precision", "f32", "--swarm-host", "127.0.0.1"]
    with node_process(hub.url, home, options) as process:
        yield Node(process, home)


async def ready(hub: DrivenHub) -> None:
    await hub.until(lambda: any(status.policy_version == 0 for status in hub.all(NodeStatus)))


async def test_a_hub_that_sends_too_much_fills_no_log_memory_or_disk(hub: DrivenHub, node: Node) -> None:
    await ready(hub)
    await texts_that_steer_a_terminal(hub)
    await a_flood_of_news(hub)
    node.check()
    await a_version_without_end(hub)
    assert sum(path.stat().st_size for path in node.home.rglob("*") if path.is_file()) < MOST_BYTES
    node.check()
    await ten_thousand_leases(hub)
    node.check()


async def texts_that_steer_a_terminal(hub: DrivenHub) -> None:
    for reason in ("no_work_now", "spend_cap", "quarantined", None):
        await hub.send_raw(Standby(reason=None), reason=reason, detail=STEERING)
    handshakes = hub.handshakes
    await hub.send_raw(LeaseRevoked(lease_id=1, reason=DropReason.REVOKED), reason=STEERING)
    await hub.until(lambda: hub.handshakes > handshakes)


async def a_flood_of_news(hub: DrivenHub) -> None:
    forged = hub.offers[None].model_copy(update={"signature": bytes(64)})
    for number in range(3_000):
        await hub.send(LeaseRevoked(lease_id=number, reason=DropReason.REVOKED))
        await hub.send(Standby(reason=StandbyReason.NO_WORK_NOW if number % 2 else None, detail=f"detail {number}"))
        await hub.send(Receipts(receipts=(Receipt(rollout_id=f"{number}-0", state=ReceiptState.DROPPED),)))
        await hub.send(PolicyPublished(policy_version=number + 1, offer=forged))
    await asyncio.sleep(QUIET_S)


async def a_version_without_end(hub: DrivenHub) -> None:
    directory = hub.published(9_999)
    write_adapter(directory, 9_999)
    offer = await hub.offer(9_999, directory, way=Way.WEB_SEED)
    hub.never_ends = True
    await hub.send(PolicyPublished(policy_version=9_999, offer=offer.model_copy(update={"peers": ()})))
    await asyncio.sleep(QUIET_S)
    await hub.finished(await hub.lease(20_000, version=0, count=1))
    assert not any(status.policy_version == 9_999 for status in hub.all(NodeStatus))


async def ten_thousand_leases(hub: DrivenHub) -> None:
    for lease_id in range(1, 10_000):
        with suppress(ConnectionError, RuntimeError):
            await hub.send(make_lease(lease_id, version=0, count=64))
    await hub.until(lambda: hub.all(LeaseReturned) and hub.all(Rollout))
    await asyncio.sleep(QUIET_S)
