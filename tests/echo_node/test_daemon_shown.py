"""A running daemon shows its owner the hub's totals, its own token count, the page, and notices."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from echo_node.farewell import farewell
from echo_node.host import control
from echo_node.host.last_word import LastWord
from echo_node.host.notifications import PATH, SERVICE
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import Proof, ReceiptState, RefusalCode
from tests.echo_node.host.conftest import Desktop, desktop
from tests.echo_node.test_daemon import Node, ready_for
from tests.echo_shared.wire.messages.examples import TOTALS

__all__ = ["desktop"]
pytest.importorskip("llama_cpp")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


async def test_the_hubs_totals_are_shown_once_received(hub: Any, node: Node) -> None:
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        assert hub.all(Proof)[-1].hears_totals, "the hub learns that it may send them"
        assert daemon.snapshot().totals is None
        await hub.send(TOTALS)
        await hub.until(lambda: daemon.snapshot().totals is not None)
        lease = await hub.lease(1, version=0)
        await hub.finished(lease)
        await hub.acknowledge("1-0", "1-1", state=ReceiptState.TRAINED)
        await hub.until(lambda: daemon.snapshot().rollouts.get("trained") == 2)
        answer = await control.ask(node.paths.control_file, "status")
        assert (answer["totals"]["trained"], answer["rollouts"]["trained"]) == (39_544, 2)
        assert answer["since_start"] == {"trained": 2}
        assert answer["page"] == f"{hub.url}{TOTALS.page}"
        assert answer["drawn_rollouts"] == 4
        assert answer["drawn_tokens"] >= 4
        url = (await control.ask(node.paths.control_file, "page"))["url"]
        assert url.startswith("http://127.0.0.1:") and "/enter?code=" in url
    ended = daemon.snapshot()
    assert ended.rollouts["trained"] == 2, "counted to the end"
    assert any(
        line.startswith("Over all time, by the hub's last count: 39,544 trained")
        for line in farewell(ended, ended.started_at + 1)
    )


async def test_earlier_work_does_not_count_for_this_session(hub: Any, node: Node) -> None:
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        await hub.finished(await hub.lease(1, version=0))
        await hub.acknowledge("1-0", state=ReceiptState.TRAINED)
        await hub.until(lambda: daemon.snapshot().rollouts.get("trained") == 1)
    hub.said.clear()
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        await hub.until(lambda: daemon.snapshot().rollouts.get("trained") == 1)
        assert daemon.snapshot().since_start == {}


@pytest.mark.skipif(sys.platform != "linux", reason="D-Bus is how Linux desktops do it")
async def test_a_ban_is_reported_on_the_desktop_and_kept_until_the_next_start(
    hub: Any, node: Node, desktop: Desktop
) -> None:
    desktop.answers[PATH, "GetCapabilities"] = ("as", (["body", "body-markup"],))
    desktop.answers[PATH, "Notify"] = ("u", (1,))
    desktop.serve(SERVICE)
    task = asyncio.create_task(node.daemon(hub.url).run())
    await hub.until(ready_for(hub, 0))
    await hub.refuse(RefusalCode.BANNED, "This node is <banned>.")
    with pytest.raises(RefusedError, match="banned"):
        async with asyncio.timeout(60):
            await task
    title, text = next(body[3:5] for key, body in zip(desktop.asked, desktop.bodies, strict=True) if key[1] == "Notify")
    assert title == "The hub has banned this node"
    assert "This node is &lt;banned&gt;." in text and "operator" in text
    word = LastWord(node.paths.last_word_file)
    kept = word.load()
    assert kept is not None and kept.title == title
    async with node.running(hub.url):
        await hub.until(lambda: word.load() is None)
