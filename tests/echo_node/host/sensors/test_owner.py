"""A node asks scripted desktops on a real D-Bus how long its owner has been idle, if a game fills the screen, and if
the network is metered.
"""

import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from echo_node.host.sensors.owner import LinuxOwner, _ScreenSaverClock
from tests.echo_node.host.sensors.conftest import Desktop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has D-Bus")
SAVER = "/org/freedesktop/ScreenSaver"


@pytest.fixture
def owner(desktop: Desktop) -> Iterator[LinuxOwner]:
    owner = LinuxOwner()
    yield owner
    owner.close()


def session(kind: str, *, idle_since_us: int | None, of: str = "user") -> dict[str, Any]:
    said = {"Type": ("s", kind), "Class": ("s", of), "IdleHint": ("b", idle_since_us is not None)}
    return {**said, "IdleSinceHint": ("t", idle_since_us or 0)}


def log_in(desktop: Desktop, **sessions: dict[str, Any]) -> None:
    desktop.serve("org.freedesktop.login1")
    listed = [(name, 1_000, "me", "seat0", f"/session/{name}") for name in sessions]
    desktop.answers["/org/freedesktop/login1", "ListSessions"] = ("a(susso)", (listed,))
    for name, said in sessions.items():
        desktop.answers[f"/session/{name}", "GetAll"] = ("a{sv}", (said,))


def test_a_machine_without_a_desktop_has_no_owner_activity(desktop: Desktop, owner: LinuxOwner) -> None:
    assert owner.idle_s() == math.inf
    log_in(desktop, ssh=session("tty", idle_since_us=None), greeter=session("x11", idle_since_us=None, of="greeter"))
    owner = LinuxOwner()
    assert owner.idle_s() == math.inf
    owner.close()


def test_a_desktop_that_does_not_tell_is_known_to_be_there(
    desktop: Desktop, owner: LinuxOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert owner.idle_s() is None


def test_the_login_manager_tells_of_the_least_idle_desktop(desktop: Desktop, owner: LinuxOwner) -> None:
    now_us = int(time.time() * 1e6)
    log_in(
        desktop,
        one=session("x11", idle_since_us=now_us - 500_000_000),
        two=session("wayland", idle_since_us=now_us - 100_000_000),
        three=session("tty", idle_since_us=None),
    )
    idle_s = owner.idle_s()
    assert idle_s is not None and 100 <= idle_s < 160
    desktop.answers["/session/one", "GetAll"] = ("a{sv}", (session("x11", idle_since_us=None),))
    assert owner.idle_s() == 0.0


def test_the_desktop_s_own_monitor_is_asked_first(desktop: Desktop, owner: LinuxOwner) -> None:
    desktop.serve("org.freedesktop.ScreenSaver")
    desktop.answers[SAVER, "GetSessionIdleTime"] = ("u", (50_000,))
    assert owner.idle_s() == 50.0, "in milliseconds until the unit is known"
    desktop.serve("org.gnome.Mutter.IdleMonitor")
    desktop.answers["/org/gnome/Mutter/IdleMonitor/Core", "GetIdletime"] = ("t", (1_500,))
    assert owner.idle_s() == 1.5


def test_a_screen_savers_unit_follows_from_its_speed() -> None:
    seconds, milliseconds = _ScreenSaverClock(), _ScreenSaverClock()
    assert seconds.idle_s(100.0, 0.0) == 0.1
    assert seconds.idle_s(102.0, 2.0) == pytest.approx(0.102)
    assert seconds.idle_s(103.0, 3.0) == 103.0
    assert seconds.idle_s(2.0, 10.0) == 2.0, "the user is back"
    assert milliseconds.idle_s(100_000.0, 0.0) == 100.0
    assert milliseconds.idle_s(104_000.0, 4.0) == 104.0
    assert milliseconds.idle_s(104_000.0, 8.0) == 104.0


def test_game_mode_and_metered_networks_are_detected(desktop: Desktop, owner: LinuxOwner) -> None:
    assert (owner.full_screen(), owner.metered()) == (None, None)
    desktop.serve("com.feralinteractive.GameMode")
    desktop.serve("org.freedesktop.NetworkManager")
    for clients, plays in ((0, False), (2, True)):
        desktop.answers["/com/feralinteractive/GameMode", "Get/ClientCount"] = ("v", (("i", clients),))
        assert owner.full_screen() is plays
    for said, metered in ((0, None), (1, True), (2, False), (3, True), (4, False)):
        desktop.answers["/org/freedesktop/NetworkManager", "Get/Metered"] = ("v", (("u", said),))
        assert owner.metered() is metered
