"""The owner's commands (pause, resume and others) work through the real control socket and the real page."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from echo_node.core.manners import OwnerPause
from echo_node.host.control import ask, control_server
from echo_node.owner_word import OwnerWord
from echo_node.panel import NodeSnapshot, rows
from echo_shared.errors import ConfigError
from tests.echo_node.status_page.test_page import Site, live
from tests.echo_node.test_device_watch import chooser
from tests.echo_node.test_owner_watch import Watched
from tests.echo_node.test_panel import SNAPSHOT

AS_JSON = json.loads(json.dumps(asdict(SNAPSHOT)))


class Recorder:
    """Stands for a node, and records the owner's commands."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.settings: Mapping[str, Any] | ConfigError = {"engine": ["width"]}

    def snapshot(self) -> NodeSnapshot:
        return SNAPSHOT

    def stop_once(self, *, leaves: str) -> None:
        self.done.append(f"stop {leaves}")

    def finish_for_good(self) -> None:
        self.done.append("finish")

    def reload(self) -> Mapping[str, Any]:
        if isinstance(self.settings, ConfigError):
            raise self.settings
        return self.settings


class Owned(Site):
    """A node with a page and a watch over its owner's activity; other commands are recorded."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.watched = Watched(directory)
        self.node = Recorder()
        self.word = OwnerWord(node=self.node, watch=self.watched.watch)  # type: ignore[arg-type]
        self.page = self.word.page()
        self.file = directory / "control.json"

    async def reasons(self) -> list[str]:
        await self.watched.watch.look()
        return await self.watched.next()


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[Owned]:
    owned = Owned(tmp_path)
    async with control_server(owned.file, owned.word.verbs(owned.page), owned.page):
        yield owned


async def test_the_status_is_all_of_the_snapshot(owned: Owned) -> None:
    assert await ask(owned.file, "status") == AS_JSON


async def test_a_pause_holds_until_it_ends_or_the_owner_resumes(owned: Owned) -> None:
    assert await ask(owned.file, "pause", {"length": None}) == {"until": None}
    assert await owned.reasons() == ["paused"] and owned.watched.file.load() == OwnerPause()
    assert await ask(owned.file, "resume") == {}
    assert await owned.reasons() == [] and owned.watched.file.load() is None
    until = (await ask(owned.file, "pause", {"length": "1h30m"}))["until"]
    kept = owned.watched.file.load()
    assert kept is not None and kept.until == pytest.approx(until)
    assert await owned.reasons() == ["paused"]


async def test_an_invalid_duration_pauses_nothing(owned: Owned) -> None:
    with pytest.raises(ConfigError, match="not a length of time") as refused:
        await ask(owned.file, "pause", {"length": "soon"})
    assert refused.value.got == "'soon'"
    await owned.watched.watch.look()
    assert owned.watched.told.empty() and owned.watched.file.load() is None


async def test_stop_and_finish_return_the_process_that_ends(owned: Owned) -> None:
    assert await ask(owned.file, "finish") == {"pid": os.getpid(), "held_rollouts": 3}
    assert await ask(owned.file, "stop") == {"pid": os.getpid()}
    assert await ask(owned.file, "stop", {"leaves": "http://127.0.0.1:8710"}) == {"pid": os.getpid()}
    assert owned.node.done == ["finish", "stop ", "stop http://127.0.0.1:8710"]


async def test_settings_are_read_again_and_bad_ones_refused(owned: Owned) -> None:
    assert await ask(owned.file, "reload") == {"engine": ["width"]}
    owned.node.settings = ConfigError("The settings are not valid.", got="width = 'wide'", do="Write a number.")
    with pytest.raises(ConfigError, match="not valid") as refused:
        await ask(owned.file, "reload")
    assert (refused.value.got, refused.value.do) == ("width = 'wide'", "Write a number.")


async def test_the_page_is_opened_by_its_verb_shows_the_node_and_pauses_it(owned: Owned) -> None:
    url = (await ask(owned.file, "page"))["url"]
    assert (await owned.get(url.removeprefix(f"http://{owned.host}")))[0] == 200
    async with live(owned, await owned.enter()) as socket:
        view = json.loads(await socket.recv())["view"]
        assert view == {"snapshot": AS_JSON, "rows": [list(row) for row in rows(SNAPSHOT)]}
        await socket.send(json.dumps({"verb": "pause", "arguments": {"length": None}}))
        assert json.loads(await socket.recv()) == {"done": "pause", "until": None}
        assert await owned.reasons() == ["paused"]
        await socket.send(json.dumps({"verb": "stop"}))
        assert "refused" in json.loads(await socket.recv()) and owned.node.done == []


async def test_one_device_is_paused_and_resumed_by_its_name(owned: Owned) -> None:
    owned.watched.chooser.by_device = chooser("a", "b").by_device
    assert await ask(owned.file, "pause", {"device": "cuda:1"}) == {"until": None}
    await owned.watched.watch.look()
    assert list((await owned.watched.told.get()).of_devices) == ["cuda:1"]
    assert await ask(owned.file, "resume", {"device": "cuda:1"}) == {}
    await owned.watched.watch.look()
    assert (await owned.watched.told.get()).of_devices == {}
    with pytest.raises(ConfigError, match="no device cuda:7"):
        await ask(owned.file, "pause", {"device": "cuda:7"})
