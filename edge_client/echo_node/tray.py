"""An icon in the desktop's tray with the node's state, its reason, and buttons. It is a separate program.

It asks the daemon for its status every `LOOK_S` seconds. Desktops whose tray has no menus (plain X11) show only the
state; the status page has the same buttons.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from echo_node.core.looks import IconLook, look_of
from echo_node.core.notices import Notice
from echo_node.host import control
from echo_node.host.last_word import LastWord
from echo_node.host.paths import NodePaths
from echo_node.status_page.browser import open_in_browser
from echo_shared.errors import ConfigError, EchoError
from echo_shared.installation import how_to_install

if TYPE_CHECKING:
    from PIL import Image

LOOK_S: Final = 2.0
SIZE: Final = 64
"""Icon size in pixels. Desktops scale it."""
MOST_SHOWN: Final = 80
"""Maximum characters of a menu line."""


class Tray:
    """The tray icon. Call `run` on the main thread, because macOS requires that; `run` returns when the icon is
    closed.
    """

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths
        self._last_word = LastWord(paths.last_word_file)
        self._look = look_of(None)
        self._told: Notice | None = self._last_word.load()
        """Notice that was shown last. A notice from before this icon's start is not shown."""
        self._said = ""
        """Error text of the last pressed button's command; empty = none."""
        self._closed = threading.Event()

    def run(self) -> None:
        """Show the icon. Raises ConfigError if there is no tray, or a needed package is missing."""
        pystray = _pystray()
        try:
            icon = pystray.Icon("echo-node", picture(self._look), _for_x11(self._look.title), self._menu(pystray))
        except Exception as error:  # Each desktop's library raises its own errors.
            raise _no_tray(str(error) or type(error).__name__) from error
        icon.run(setup=self._follow)

    def _menu(self, pystray: Any) -> Any:
        item, separator = pystray.MenuItem, pystray.Menu.SEPARATOR
        running = lambda _: self._look.is_running  # noqa: E731
        working = lambda _: self._look.is_running and not self._look.is_paused  # noqa: E731
        return pystray.Menu(
            item(lambda _: f"Echo: {self._look.state}", None, enabled=False),
            item(lambda _: _cut(self._said or self._look.reason), None, enabled=False),
            separator,
            item("Open the page", self._button("page"), default=True, visible=running),
            item("Pause for an hour", self._button("pause", length="1h"), visible=working),
            item("Pause until resumed", self._button("pause"), visible=working),
            item("Resume", self._button("resume"), visible=lambda _: self._look.is_paused),
            item("Finish and stop", self._button("finish"), visible=running),
            separator,
            item("Close this icon", self._close),
        )

    def _button(self, verb: str, **arguments: str) -> Callable[[Any], None]:
        def pressed(icon: Any) -> None:
            try:
                answer = self._ask(verb, **arguments)
                if verb == "page":
                    open_in_browser(answer["url"], self._paths.page_file)
                self._said = ""
            except EchoError as error:
                self._said = str(error)
            self._show(icon)

        return pressed

    def _ask(self, verb: str, **arguments: str) -> dict[str, Any]:
        return asyncio.run(control.ask(self._paths.control_file, verb, arguments))

    def _close(self, icon: Any) -> None:
        self._closed.set()
        icon.stop()

    def _follow(self, icon: Any) -> None:
        """Update the icon regularly, on a thread of its own."""
        icon.visible = True
        while not self._closed.is_set():
            self._show(icon)
            self._closed.wait(LOOK_S)

    def _show(self, icon: Any) -> None:
        """Ask the daemon for its status, and show what has changed on the icon."""
        try:
            look = look_of(self._ask("status"))
        except EchoError:
            word = self._last_word.load()
            look = look_of(None, "" if word is None else word.title)
            self._notify(icon, word)
        if look != self._look:
            is_other = (look.colour, look.has_bars) != (self._look.colour, self._look.has_bars)
            self._look = look
            icon.title = look.title if icon.HAS_MENU else _for_x11(look.title)
            if is_other:
                icon.icon = picture(look)
        icon.update_menu()

    def _notify(self, icon: Any, word: Notice | None) -> None:
        """Show a notification, except on Linux, where the daemon does this through D-Bus."""
        if word is not None and word != self._told and sys.platform != "linux" and icon.HAS_NOTIFICATION:
            icon.notify(word.text, word.title)
        self._told = word


def picture(look: IconLook) -> Image.Image:
    """Draw a disc in the state's colour, with two bars if the node is paused, on standby or finishing."""
    from PIL import Image, ImageDraw

    image = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    draw.ellipse((4, 4, SIZE - 5, SIZE - 5), fill=look.colour)
    if look.has_bars:
        for left in (22, 36):
            draw.rectangle((left, 20, left + 6, 43), fill="white")
    return image


def _for_x11(text: str) -> str:
    """Replace characters outside Latin-1, on which pystray fails in X11 window names."""
    return text.encode("latin-1", "replace").decode("latin-1")


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def _pystray() -> Any:
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise _no_tray("neither DISPLAY nor WAYLAND_DISPLAY is set")
    try:
        import PIL  # noqa: F401
        import pystray
    except ImportError as error:
        raise ConfigError(
            "The tray's icon needs two more packages.",
            got=str(error),
            do=f"{how_to_install('tray')}. Without an icon: echo-node page",
            code="no_tray",
        ) from error
    # Each desktop's library raises its own errors. The library for X11 looks for a display when it is imported.
    except Exception as error:
        raise _no_tray(str(error) or type(error).__name__) from error
    return pystray


def _no_tray(got: str) -> ConfigError:
    return ConfigError(
        "No desktop is available for an icon.", got=got, do="Without an icon: echo-node page", code="no_tray"
    )
