"""Time since the owner's last input, full-screen programs, and metered networks.

Linux: D-Bus is asked, first the desktop's idle monitor, then the screen saver, then the login manager. On a machine
without a desktop login, the owner counts as away. macOS and Windows have a system counter.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from echo_node.host.sensors.bus import Bus

_LOGIN: Final = "org.freedesktop.login1"
_SCREEN_SAVER: Final = "org.freedesktop.ScreenSaver"
_DESKTOPS: Final = ("x11", "wayland", "mir")
_FULL_SCREEN_STATES: Final = (2, 3, 4)
"""Results of SHQueryUserNotificationState: QUNS_BUSY, QUNS_RUNNING_D3D_FULL_SCREEN, QUNS_PRESENTATION_MODE."""


class LinuxOwner:
    """Activity of the owner of a Linux desktop, through D-Bus."""

    def __init__(self) -> None:
        self._session, self._system = Bus("SESSION"), Bus("SYSTEM")
        self._saver = _ScreenSaverClock()

    def idle_s(self) -> float | None:
        """Return seconds since the last input; inf = no desktop is in use; None = the desktop does not report it."""
        for ask in (self._by_mutter, self._by_screen_saver, self._by_login):
            if (idle_s := ask()) is not None:
                return idle_s
        return None if self._has_desktop else math.inf

    def full_screen(self) -> bool | None:
        """Return True if a game uses GameMode, which Linux's game launchers call; None without GameMode."""
        service, path = "com.feralinteractive.GameMode", "/com/feralinteractive/GameMode"
        clients = self._session.get(service, path, service, "ClientCount")
        return None if clients is None else int(clients) > 0

    def metered(self) -> bool | None:
        """Return True if the network is metered, by NetworkManager's NMMetered (1 yes, 3 guessed yes); None if unknown.

        https://networkmanager.dev/docs/api/latest/nm-dbus-types.html#NMMetered
        """
        service = "org.freedesktop.NetworkManager"
        said = self._system.get(service, "/org/freedesktop/NetworkManager", service, "Metered")
        return None if said in (None, 0) else said in (1, 3)

    def close(self) -> None:
        self._session.close()
        self._system.close()

    @property
    def _has_desktop(self) -> bool:
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or any(self._desktops())

    def _by_mutter(self) -> float | None:
        answer = self._session.call(
            *("org.gnome.Mutter.IdleMonitor", "/org/gnome/Mutter/IdleMonitor/Core"),
            *("org.gnome.Mutter.IdleMonitor", "GetIdletime"),
        )
        return None if answer is None else float(answer[0]) / 1000

    def _by_screen_saver(self) -> float | None:
        for path in ("/org/freedesktop/ScreenSaver", "/ScreenSaver"):
            answer = self._session.call(_SCREEN_SAVER, path, _SCREEN_SAVER, "GetSessionIdleTime")
            if answer is not None:
                return self._saver.idle_s(float(answer[0]), time.monotonic())
        return None

    def _by_login(self) -> float | None:
        """Return the shortest idle time of all desktop logins."""
        found = []
        for said in self._desktops():
            if "IdleHint" not in said:
                continue
            since_us = said.get("IdleSinceHint", ("t", 0))[1]
            found.append(max(0.0, time.time() - since_us / 1e6) if said["IdleHint"][1] and since_us else 0.0)
        return min(found, default=None)

    def _desktops(self) -> Iterator[dict[str, Any]]:
        manager = f"{_LOGIN}.Manager"
        answer = self._system.call(_LOGIN, "/org/freedesktop/login1", manager, "ListSessions")
        for *_, path in () if answer is None else answer[0]:
            of_session = self._system.call(
                _LOGIN, path, "org.freedesktop.DBus.Properties", "GetAll", "s", (f"{_LOGIN}.Session",)
            )
            said: dict[str, Any] = {} if of_session is None else of_session[0]
            if said.get("Type", ("s", ""))[1] in _DESKTOPS and said.get("Class", ("s", "user"))[1] == "user":
                yield said


class _ScreenSaverClock:
    """Converts the screen saver's idle time to seconds. The interface defines seconds, but some desktops send
    milliseconds.

    The speed at which the value grows shows its unit. Until it is known, milliseconds are assumed, so that the owner
    seems active: an unneeded pause of the node is better than a missing one.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._unit_s = 0.001

    def idle_s(self, value: float, now: float) -> float:
        if self._last is None or value < self._last[0]:
            self._last = (value, now)
        elif now - self._last[1] >= 3.0:
            grown = (value - self._last[0]) / (now - self._last[1])
            if grown > 0:
                self._unit_s = 0.001 if grown > 30 else 1.0
            self._last = (value, now)
        return value * self._unit_s


class MacOwner:
    """Activity of the owner of a Mac, through Quartz."""

    def idle_s(self) -> float | None:
        """Return seconds since the session's last input (kCGEventSourceStateHIDSystemState, kCGAnyInputEventType)."""
        quartz = ctypes.CDLL("/System/Library/Frameworks/ApplicationServices.framework/ApplicationServices")
        quartz.CGEventSourceSecondsSinceLastEventType.restype = ctypes.c_double
        quartz.CGEventSourceSecondsSinceLastEventType.argtypes = (ctypes.c_int32, ctypes.c_uint32)
        return float(quartz.CGEventSourceSecondsSinceLastEventType(1, 0xFFFFFFFF))

    def full_screen(self) -> bool | None:
        return None

    def metered(self) -> bool | None:
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


class WindowsOwner:
    """Activity of the owner of a Windows desktop, through user32 and shell32."""

    def idle_s(self) -> float | None:
        class LastInput(ctypes.Structure):
            _fields_ = (("cbSize", ctypes.c_uint32), ("dwTime", ctypes.c_uint32))

        last = LastInput(cbSize=ctypes.sizeof(LastInput))
        libraries: Any = ctypes.windll  # type: ignore[attr-defined,unused-ignore]
        if not libraries.user32.GetLastInputInfo(ctypes.byref(last)):
            return None
        return float((libraries.kernel32.GetTickCount() - last.dwTime) % 2**32) / 1000

    def full_screen(self) -> bool | None:
        state = ctypes.c_int()
        libraries: Any = ctypes.windll  # type: ignore[attr-defined,unused-ignore]
        if libraries.shell32.SHQueryUserNotificationState(ctypes.byref(state)):
            return None
        return state.value in _FULL_SCREEN_STATES

    def metered(self) -> bool | None:
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


Owner = LinuxOwner | MacOwner | WindowsOwner


def owner_here() -> Owner:
    if sys.platform == "win32":
        return WindowsOwner()
    return MacOwner() if sys.platform == "darwin" else LinuxOwner()
