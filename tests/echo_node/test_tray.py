"""The node's tray icon on a real X display, with a tray that this test provides, and a real control server."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from echo_node import tray as tray_module
from echo_node.core.looks import START, look_of
from echo_node.core.notices import Notice
from echo_node.host.control import control_server
from echo_node.host.last_word import LastWord
from echo_node.host.paths import NodePaths
from echo_node.tray import Tray, picture
from echo_shared.errors import ConfigError
from tests.echo_node.status_page.test_browser import Browser

pytest.importorskip("PIL")
XVFB = shutil.which("Xvfb")
DOCK = 0


class Desk:
    """An X display whose tray shows icons, which dock by freedesktop's protocol."""

    def __init__(self, name: str) -> None:
        from Xlib import X, display

        self.x = X
        self.display = display.Display(name)
        screen = self.display.screen()
        self.window = screen.root.create_window(0, 0, 64, 64, 0, screen.root_depth)
        self.window.map()
        self.window.set_selection_owner(self.display.intern_atom("_NET_SYSTEM_TRAY_S0"), X.CurrentTime)
        self.display.sync()

    def docked(self) -> Any:
        while True:
            event = self.display.next_event()
            if event.type == self.x.ClientMessage and event.data[1][1] == DOCK:
                icon = self.display.create_resource_object("window", event.data[1][2])
                icon.reparent(self.window, 0, 0)
                icon.configure(width=64, height=64)
                icon.map()
                self.display.sync()
                return icon

    def title(self, icon: Any) -> str | None:
        """Return the title of the icon's window. It is read in one request: between two requests it could become
        shorter.
        """
        from Xlib import Xatom

        return icon.get_full_text_property(Xatom.WM_NAME, sizehint=1024)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not condition():
            assert time.monotonic() < deadline
            self.display.sync()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    if XVFB is None:
        pytest.skip("Xvfb is not installed")
    reading, writing = os.pipe()
    command = [XVFB, "-displayfd", str(writing), "-screen", "0", "320x200x24", "-nolisten", "tcp", "-noreset"]
    server = subprocess.Popen(command, pass_fds=(writing,), stderr=subprocess.DEVNULL)
    os.close(writing)
    with os.fdopen(reading) as told:
        name = f":{told.readline().strip()}"
    monkeypatch.setenv("DISPLAY", name)
    monkeypatch.setenv("PYSTRAY_BACKEND", "xorg")
    pytest.importorskip("pystray")  # Importing pystray connects to a display.
    desk = Desk(name)
    yield desk
    desk.display.close()
    server.terminate()
    server.wait(10)


class Node:
    def __init__(self, paths: NodePaths) -> None:
        self.paths = paths
        self.told: list[tuple[str, Mapping[str, Any]]] = []
        self.status: dict[str, Any] = {"state": "sampling", "reason": "Drawing.", "holds": {}}
        self.verbs: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "status": lambda _: self.status,
            "page": lambda _: {"url": "http://127.0.0.1:1/x/"},
            **{verb: self._noting(verb) for verb in ("pause", "resume", "finish")},
        }

    def _noting(self, verb: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
        def note(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            self.told.append((verb, dict(arguments)))
            if verb == "pause":
                self.status = {"state": "paused", "reason": "Paused by you.", "holds": {"paused": "Paused by you."}}
            if verb == "resume":
                self.status = {"state": "sampling", "reason": "Drawing.", "holds": {}}
            return {}

        return note


@pytest.fixture
def paths(tmp_path: Path) -> NodePaths:
    return NodePaths.find(tmp_path)


@pytest.fixture
async def node(paths: NodePaths) -> AsyncIterator[Node]:
    node = Node(paths)
    async with control_server(paths.control_file, node.verbs):
        yield node


class Icon:
    HAS_MENU = True
    HAS_NOTIFICATION = True

    def __init__(self) -> None:
        self.title = ""
        self.icon: Any = None
        self.notified: list[tuple[str, str]] = []

    def update_menu(self) -> None:
        pass

    def notify(self, text: str, title: str) -> None:
        self.notified.append((text, title))


def lines(tray: Tray) -> list[str]:
    import pystray

    return [item.text for item in tray._menu(pystray) if item.text != "- - - -"]


async def test_the_menu_has_the_buttons_for_the_nodes_state(
    desk: Desk, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pystray

    tray, icon = Tray(node.paths), Icon()
    menu = tray._menu(pystray)

    async def press(name: str) -> None:
        (item,) = (item for item in menu if item.text == name)
        await asyncio.to_thread(item, icon)

    assert lines(tray) == ["Echo: not running", START, "Close this icon"]
    await asyncio.to_thread(tray._show, icon)
    assert icon.title == "Echo: sampling. Drawing."
    work = ["Open the page", "Pause for an hour", "Pause until resumed", "Finish and stop", "Close this icon"]
    assert lines(tray) == ["Echo: sampling", "Drawing.", *work]
    await press("Pause for an hour")
    assert node.told == [("pause", {"length": "1h"})]
    assert lines(tray) == ["Echo: paused", "Paused by you.", "Open the page", "Resume", "Finish and stop", work[-1]]
    await press("Resume")
    await press("Finish and stop")
    assert [verb for verb, _ in node.told] == ["pause", "resume", "finish"]
    browser = Browser()
    monkeypatch.setattr(webbrowser, "_tryorder", [])
    monkeypatch.setattr(webbrowser, "_browsers", {})
    webbrowser.register("noting", None, browser, preferred=True)
    await asyncio.to_thread(menu, icon)
    assert browser.opened == [node.paths.page_file.as_uri()]


async def test_the_icon_docks_in_the_tray_and_changes_with_the_node(desk: Desk, node: Node, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo_node.main", "tray", "--data-dir", str(tmp_path)]
    program = await asyncio.create_subprocess_exec(*command, env=dict(os.environ))
    try:
        async with asyncio.timeout(120):
            icon = await asyncio.to_thread(desk.docked)
            await asyncio.to_thread(desk.until, lambda: desk.title(icon) == "Echo: sampling. Drawing.")
            node.status = {"state": "paused", "reason": "Чужая игра runs.", "holds": {"application": "A game runs."}}
            await asyncio.to_thread(desk.until, lambda: desk.title(icon) == "Echo: paused. ????? ???? runs.")
    finally:
        program.kill()
        await program.wait()


async def test_where_the_daemon_cannot_tell_the_desktop_the_icon_does(
    paths: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tray_module.sys, "platform", "darwin")
    word = LastWord(paths.last_word_file)
    word.save(Notice("Old", "It was there before."))
    tray, icon = Tray(paths), Icon()
    await asyncio.to_thread(tray._show, icon)
    assert icon.notified == [] and icon.title == "Echo: not running. Old"
    word.save(Notice("The hub has banned this node", "The hub says: no."))
    for _ in range(2):
        await asyncio.to_thread(tray._show, icon)
    assert icon.notified == [("The hub says: no.", "The hub has banned this node")]


def test_pictures_differ_in_colour_and_in_form() -> None:
    working = picture(look_of({"state": "sampling", "reason": "", "holds": {}}))
    still = picture(look_of({"state": "paused", "reason": "", "holds": {}}))
    assert working.getpixel((14, 32)) != still.getpixel((14, 32))
    assert still.getpixel((25, 32)) == (255, 255, 255, 255) != working.getpixel((25, 32))


def test_without_a_desktop_the_command_reports_it(paths: NodePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tray_module.sys, "platform", "linux")
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="No desktop") as refused:
        Tray(paths).run()
    assert "echo-node page" in str(refused.value)
