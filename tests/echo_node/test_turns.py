from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.core.events import Upgraded
from echo_node.daemon import Daemon
from echo_node.host import control
from echo_node.host.shares import SharesFile
from echo_node.releases import TAKES_OVER
from echo_node.turns import NodeTurns, Paces
from echo_shared.errors import ConnectError, EchoError, RefusedError
from echo_shared.wire.messages import Goodbye, LeaseReturned, RefusalCode
from tests.echo_node.conftest import Hub
from tests.echo_node.test_daemon import Node, ready_for
from tests.echo_node.test_daemon_yields import finished, returned
from tests.echo_node.waiting import until

pytest.importorskip("llama_cpp")

LONG = {"count": 8, "max_tokens": 120, "stop_ids": ()}
PATIENCE_S = 120.0


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[Hub]:
    hub = Hub(tmp_path / "other hub")
    await hub.open()
    await hub.publish_base()
    yield hub
    await hub.end()


class Owner:
    """A node's owner, who lets the node work for several hubs, each with a share of the node's time."""

    def __init__(self, node: Node, paces: Paces, **shares: float) -> None:
        self.node = node
        self.file = SharesFile(node.paths.shares_file)
        for url, share in shares.items():
            self.file.joined(url, share, before=None)
        self.made: list[str] = []
        self.turns = NodeTurns(self.file, self._make, paces=paces)

    def _make(self, hub: str) -> Daemon:
        self.made.append(hub)
        return self.node.daemon(hub, patient=True)

    async def stop(self) -> None:
        with suppress(ConnectError):
            await control.ask(self.node.paths.control_file, "stop")


async def works_for(hub: Any, leases: Iterator[int]) -> None:
    """Wait until the node has finished a lease of this hub; lease again if the node's turn for this hub ended before it
    was finished.
    """
    while True:
        turns = hub.handshakes
        lease = await hub.lease(next(leases), version=0, **LONG)
        wanted = {(lease.lease_id, index) for index in lease.indices}

        def is_drawn(wanted: set[tuple[int, int]] = wanted) -> bool:
            return wanted <= finished(hub)

        await hub.until(lambda turns=turns, is_drawn=is_drawn: is_drawn() or hub.handshakes > turns)
        if is_drawn():
            return


async def test_a_hub_without_work_yields_its_turn_and_gets_another(hub: Any, other: Any, tmp_path: Path) -> None:
    owner = Owner(
        Node(tmp_path / "node"),
        Paces(idle_s=2.0, again_s=0.1, look_s=0.02),
        **{hub.url: 1.0, other.url: 1.0},
    )
    running, leases = asyncio.create_task(owner.turns.run(owner.node.daemon(hub.url))), count(1)
    for one, times in ((hub, 1), (other, 1), (hub, 2)):
        await one.until(lambda one=one, times=times: one.handshakes >= times)
        await works_for(one, leases)
    assert owner.made[:2] == [other.url, hub.url], "by turns"
    await owner.stop()
    async with asyncio.timeout(PATIENCE_S):
        await running
    worked = owner.file.load()
    assert worked[hub.url].worked_s > 0 and worked[other.url].worked_s > 0
    assert owner.node.engine_pids() == []


async def test_a_turn_ends_after_its_time_and_held_leases_are_finished(hub: Any, other: Any, tmp_path: Path) -> None:
    owner = Owner(Node(tmp_path / "node"), Paces(turn_s=0.0, look_s=0.02), **{hub.url: 1.0, other.url: 1.0})
    owner.file.save({name: one.model_copy(update={"share": 0.0}) for name, one in owner.file.load().items()})
    running = asyncio.create_task(owner.turns.run(owner.node.daemon(hub.url)))
    await hub.until(ready_for(hub, 0))
    leases = [await hub.lease(n, version=0, **LONG) for n in range(1, 9)]
    assert hub.all(Goodbye) == [], "no other hub has a share"
    owner.file.joined(other.url, 1.0, before=hub.url)
    await other.until(ready_for(other, 0))
    assert hub.all(Goodbye)
    leased = {(lease.lease_id, index) for lease in leases for index in lease.indices}
    assert finished(hub) | returned(hub) == leased and finished(hub)
    assert {one.reason for one in hub.all(LeaseReturned)} <= {"the node is leaving"}, "held rollouts were finished"
    await owner.stop()
    async with asyncio.timeout(PATIENCE_S):
        await running


async def test_a_turn_still_ends_after_shares_could_not_be_read(tmp_path: Path) -> None:
    file, ended = SharesFile(tmp_path / "shares.json"), asyncio.Event()
    for hub in ("a", "b"):
        file.joined(hub, 1.0, before=None)
    readable = (tmp_path / "shares.json").read_bytes()
    idle = SimpleNamespace(held_rollouts=0, connected=True, activity="waiting")
    daemon: Any = SimpleNamespace(has_engine=True, snapshot=lambda: idle, finish=lambda why: ended.set())
    turns = NodeTurns(file, lambda hub: daemon, paces=Paces(idle_s=0.0, look_s=0.001))
    (tmp_path / "shares.json").write_text("unreadable")
    turn = asyncio.create_task(turns._end_in_time(daemon, "a"))
    await asyncio.sleep(0.05)
    (tmp_path / "shares.json").write_bytes(readable)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait({turn, asyncio.create_task(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not turn.done() and ended.is_set()
    turn.cancel()


async def test_a_turn_waits_for_the_choice_of_an_engine(tmp_path: Path) -> None:
    daemon = Node(tmp_path / "node").daemon("http://127.0.0.1:1")
    turns = NodeTurns(SharesFile(tmp_path / "shares.json"), lambda hub: daemon, paces=Paces(look_s=0.001))
    turn = asyncio.create_task(turns._end_in_time(daemon, daemon.hub))
    await asyncio.sleep(0.05)
    assert not turn.done() and not daemon.has_engine
    turn.cancel()


async def test_a_failure_that_keeps_the_node_with_its_hub_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daemon: Any = SimpleNamespace(
        hub="a", has_engine=True, snapshot=lambda: 1 // 0, run=lambda: asyncio.sleep(0.05), is_told_to_end=True
    )
    turns = NodeTurns(SharesFile(tmp_path / "shares.json"), lambda hub: daemon, paces=Paces(look_s=0.001))
    await turns.run(daemon)
    assert "stays with its present hub" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_a_hub_that_refuses_this_node_has_no_further_turn(hub: Any, other: Any, tmp_path: Path) -> None:
    owner = Owner(Node(tmp_path / "node"), Paces(), **{hub.url: 1.0, other.url: 1.0})
    for one in (hub, other):
        one.refusal = RefusedError("You are banned.", code=RefusalCode.BANNED)
    with pytest.raises(RefusedError, match="banned"):
        async with asyncio.timeout(PATIENCE_S):
            await owner.turns.run()
    assert sorted(owner.made) == sorted([hub.url, other.url]), "each hub was asked once"


async def test_a_failed_join_is_an_error_at_once(hub: Any, tmp_path: Path) -> None:
    owner = Owner(Node(tmp_path / "node"), Paces(), **{hub.url: 1.0})
    with pytest.raises(ConnectError):
        async with asyncio.timeout(PATIENCE_S):
            await owner.turns.run(owner.node.daemon("http://127.0.0.1:9"))
    assert owner.made == []


async def test_a_release_that_takes_over_ends_the_turns_of_all_hubs(hub: Any, other: Any, tmp_path: Path) -> None:
    node, made = Node(tmp_path / "node"), list[Daemon]()
    shares = SharesFile(node.paths.shares_file)
    for url in (hub.url, other.url):
        shares.joined(url, 1.0, before=None)

    def make(url: str) -> Daemon:
        made.append(node.daemon(url, patient=True))
        made[-1]._config = made[-1]._config.model_copy(update={"update": "auto"})
        return made[-1]

    running = asyncio.create_task(NodeTurns(shares, make).run())
    await until(lambda: hub.handshakes + other.handshakes > 0)
    await made[0]._inbox.put(Upgraded(release="99.0"))
    with pytest.raises(EchoError) as raised:
        await running
    assert raised.value.code == TAKES_OVER and len(made) == 1
