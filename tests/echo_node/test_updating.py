"""A node that its hub refuses as too old updates itself by a scripted installer of a few lines; tests/installers has
the real installer and a real node.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node.core.events import Upgraded
from echo_node.core.updating import SENTENCES, Try, UpdateMode, Why, name_of
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.installed_copy import InstalledCopy
from echo_node.host.paths import NodePaths
from echo_node.host.update_book import UpdateBook
from echo_node.updating import Updater
from echo_shared.installation import how_to_upgrade
from tests.echo_node.host.installed import SWITCH, make_copy
from tests.echo_node.waiting import until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the installer of Windows notes nothing")
SAID = "Too old."


class Told:
    def __init__(self, tmp_path: Path, copy: InstalledCopy) -> None:
        self.client = SimpleNamespace(too_old=SAID, address=SimpleNamespace(origin="https://hub.example.org"))
        self.run = SimpleNamespace(held_rollouts=0)
        self.watch = SimpleNamespace(holds=())
        self.ended: asyncio.Queue[Any] = asyncio.Queue()
        self.copy = copy
        self.paths = NodePaths.find(tmp_path / "node")
        parts: dict[str, Any] = {"client": self.client, "run": self.run, "watch": self.watch, "inbox": self.ended}
        self.updater = Updater(self.paths, mode="auto", copy=copy, look_s=0.01, **parts)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Told]:
        task = asyncio.create_task(self.updater.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None, task.exception()

    @property
    def tries(self) -> list[Try]:
        return list(UpdateBook(self.copy.home).tries() or ())

    def says(self, why: Why) -> bool:
        return self.updater.said.startswith(SENTENCES[why].partition("{")[0])


async def test_a_node_that_is_too_old_installs_and_makes_way(tmp_path: Path) -> None:
    async with Told(tmp_path, make_copy(tmp_path / "home")).running() as node:
        await until(lambda: not node.ended.empty())
    assert node.ended.get_nowait() == Upgraded(release="another one"), "the new copy does not note its release"
    assert node.copy.newest.name == "2"
    (only,) = node.tries
    assert only.name == name_of(SAID) and "installed" in only.outcome


async def test_held_leases_are_finished_before_an_update(tmp_path: Path) -> None:
    node = Told(tmp_path, make_copy(tmp_path / "home"))
    node.run.held_rollouts = 3
    async with node.running():
        await until(lambda: "updating from" in node.updater.said)
        assert node.tries == [] and str(node.copy.home / "echo.tar") in node.updater.said
        node.run.held_rollouts = 0
        await until(lambda: not node.ended.empty())


async def test_an_owner_can_cancel_an_update_while_the_node_finishes(tmp_path: Path) -> None:
    node = Told(tmp_path, make_copy(tmp_path / "home"))
    node.run.held_rollouts = 3
    async with node.running():
        await until(lambda: "updating from" in node.updater.said)
        node.updater.mode, node.run.held_rollouts = "tell", 0
        await until(lambda: node.updater.said == "")
    assert node.tries == [] and node.ended.empty()


@pytest.mark.parametrize(
    ("installer", "trouble"),
    [("echo 'error: no such processor'; exit 1", "no such processor"), ("true", "had no other release")],
)
async def test_an_update_that_fails_is_not_tried_again_and_the_node_continues(
    tmp_path: Path, installer: str, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    copy = make_copy(tmp_path / "home", f"echo ran >> '{tmp_path}/runs'; {installer}")
    async with Told(tmp_path, copy).running() as node:
        await until(lambda: node.says(Why.TRIED))
        assert trouble in node.updater.said and node.updater.said.endswith(how_to_upgrade())
        node.client.too_old = "Too old, under another name."
        await until(lambda: node.says(Why.TODAY))
    async with Told(tmp_path, copy).running() as again:
        await until(lambda: again.says(Why.TRIED))
    assert (tmp_path / "runs").read_text() == "ran\n"
    assert node.ended.empty() and again.ended.empty()
    assert [one for one in caplog.messages if one.startswith("The update failed")] != []


@pytest.mark.parametrize("mode", ["never", "tell"])
async def test_a_disabled_updater_does_nothing(tmp_path: Path, mode: UpdateMode) -> None:
    node = Told(tmp_path, make_copy(tmp_path / "home", f"touch '{tmp_path}/ran'; {SWITCH}"))
    node.updater.mode = mode
    async with node.running():
        for _ in range(10):
            await asyncio.sleep(0)
        node.updater.mode, node.watch.holds = "auto", ("a hold",)
        await until(lambda: node.says(Why.HELD))
    assert not (tmp_path / "ran").exists() and node.tries == []


async def test_an_installer_from_a_hubs_host_is_not_run(tmp_path: Path) -> None:
    for number, source in enumerate(("https://hub.example.org/x.tar", "https://other.example.org/x.tar")):
        node = Told(tmp_path, make_copy(tmp_path / str(number), source=source))
        Hubs(node.paths).save(HubRecord(url="https://other.example.org:9", hub_key_hex="00" * 32, joined_at=0.0))
        async with node.running():
            await until(lambda node=node: node.says(Why.FROM_HUB))
        assert node.tries == []


async def test_without_readable_records_no_update_is_tried(tmp_path: Path) -> None:
    node = Told(tmp_path, make_copy(tmp_path / "home", f"touch '{tmp_path}/ran'"))
    (node.copy.home / "updates.lock").mkdir()
    async with node.running():
        await until(lambda: node.says(Why.NO_BOOK))
    (node.copy.home / "updates.lock").rmdir()
    node = Told(tmp_path, node.copy)
    (node.paths.hubs / "x").mkdir(parents=True)
    (node.paths.hubs / "x" / "hub.json").write_text("?")
    async with node.running():
        await until(lambda: node.says(Why.NO_BOOK))
    assert not (tmp_path / "ran").exists()


async def test_a_version_installed_by_someone_else_takes_over(tmp_path: Path) -> None:
    copy = make_copy(tmp_path / "home", f"touch '{tmp_path}/ran'")
    (copy.home / "current").unlink()
    (copy.home / "versions" / "2" / "installers").mkdir(parents=True)
    (copy.home / "current").symlink_to("versions/2")
    async with Told(tmp_path, copy).running() as node:
        await until(lambda: not node.ended.empty())
    assert not (tmp_path / "ran").exists()
