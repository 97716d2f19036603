"""Keeps the machine from falling asleep by itself. The screen may turn off and lock, and the owner can still put the
machine to sleep.

Each lock ends with this process, even if the process is killed: D-Bus services drop the lock when the connection or the
file descriptor closes, `caffeinate` watches the process, and Windows ends the request with its thread.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol

from echo_node.host.sensors.bus import AGAIN_S, Bus

CAFFEINATE: Final = Path("/usr/bin/caffeinate")
REASON: Final = "Lends this machine to an Echo run"
_NAME: Final = "echo-node"
_GNOME: Final = "org.gnome.SessionManager"
_POWER_MANAGEMENT: Final = "org.freedesktop.PowerManagement"
_SUSPEND: Final = 4
"""Flag of GNOME's session manager: no automatic suspend. The screen still turns off and locks."""
_ES_CONTINUOUS: Final = 0x80000000
_ES_SYSTEM_REQUIRED: Final = 0x00000001


class WakeLock(Protocol):
    """A lock against automatic sleep."""

    @property
    def held_by(self) -> str:
        """Program or service of the system that holds the lock; empty = the lock is not held."""

    def keep(self) -> None:
        """Take the lock, unless it is held. A refusal leaves `held_by` empty. May block for a second."""

    def release(self) -> None:
        """Give up the lock. Waits for a call of `keep` that runs in another thread. Allowed without a lock."""


class LinuxWakeLock:
    """Lock of the first of these services that grants it: GNOME's session manager, the desktop's power management
    (KDE, Xfce), the login manager.

    The login manager comes last, because some desktops do not lock the screen while it holds an idle lock.
    """

    def __init__(self) -> None:
        self.held_by = ""
        self._session: Bus | None = None
        self._changing = threading.Lock()
        self._lock: Any = None
        """File descriptor of the login manager's lock; None = no such lock is held."""
        self._owner: tuple[str, str] | None = None
        """Service of the desktop session that holds the lock, and the name of its connection to D-Bus; None = no such
        service holds it.
        """
        self._not_before = 0.0
        """Monotonic time before which `keep` does nothing. At least AGAIN_S seconds lie between two requests for the
        lock.
        """

    def keep(self) -> None:
        with self._changing:
            if time.monotonic() < self._not_before:
                return
            if not self._is_held():
                self._drop()
                self._take()
            self._not_before = time.monotonic() + AGAIN_S

    def release(self) -> None:
        with self._changing:
            self._drop()
            self._not_before = 0.0

    def _is_held(self) -> bool:
        """Return False if no lock is held, or if the session's service that held it has ended, such as after a
        logout.
        """
        if self._session is None or self._owner is None:
            return bool(self.held_by)
        service, owner = self._owner
        return owner != "" and _owner_of(self._session, service) == owner

    def _take(self) -> None:
        self._session = Bus("SESSION")
        for service, name, take in (
            (_GNOME, "GNOME's session manager", self._by_gnome),
            (_POWER_MANAGEMENT, "the desktop's power management", self._by_power_management),
        ):
            if take(self._session):
                self.held_by, self._owner = name, (service, _owner_of(self._session, service))
                return
        if self._by_login_manager():
            self.held_by = "the login manager"

    def _drop(self) -> None:
        self.held_by, self._owner = "", None
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _by_gnome(self, session: Bus) -> bool:
        """Ask GNOME's session manager for the lock. Return True if it grants the lock.

        https://gitlab.gnome.org/GNOME/gnome-session/-/blob/main/gnome-session/org.gnome.SessionManager.xml
        """
        path, body = "/org/gnome/SessionManager", (_NAME, 0, REASON, _SUSPEND)
        return session.call(_GNOME, path, _GNOME, "Inhibit", "susu", body) is not None

    def _by_power_management(self, session: Bus) -> bool:
        path, interface = "/org/freedesktop/PowerManagement/Inhibit", f"{_POWER_MANAGEMENT}.Inhibit"
        return session.call(_POWER_MANAGEMENT, path, interface, "Inhibit", "ss", (_NAME, REASON)) is not None

    def _by_login_manager(self) -> bool:
        """Ask the login manager for the lock (https://systemd.io/INHIBITOR_LOCKS/). Return True if it grants it."""
        service, system = "org.freedesktop.login1", Bus("SYSTEM", takes_files=True)
        answer = system.call(
            *(service, "/org/freedesktop/login1", f"{service}.Manager", "Inhibit", "ssss"),
            ("idle", _NAME, REASON, "block"),
        )
        system.close()
        if answer is None:
            return False
        self._lock = answer[0]
        # Close the descriptor in child processes: an engine must not prolong the lock.
        os.set_inheritable(self._lock.fileno(), False)
        return True


def _owner_of(bus: Bus, service: str) -> str:
    """Return the name of the service's connection; empty if the service or the bus is gone."""
    name = "org.freedesktop.DBus"
    answer = bus.call(name, "/org/freedesktop/DBus", name, "GetNameOwner", "s", (service,))
    return "" if answer is None else str(answer[0])


class MacWakeLock:
    """Lock that the program `caffeinate` holds for this process, until this process ends."""

    def __init__(self, program: Path = CAFFEINATE) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def held_by(self) -> str:
        return "caffeinate" if self._process is not None and self._process.poll() is None else ""

    def keep(self) -> None:
        if self.held_by or not self._program.exists():
            return
        self.release()
        self._process = subprocess.Popen(
            [str(self._program), "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def release(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class WindowsWakeLock:
    """Lock by SetThreadExecutionState, which holds only while the calling thread exists."""

    def __init__(self) -> None:
        self.held_by = ""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self) -> None:
        if self._thread is None:
            asked, self._ends = threading.Event(), threading.Event()
            self._thread = threading.Thread(target=self._hold, args=(asked, self._ends), name="wake lock", daemon=True)
            self._thread.start()
            asked.wait()

    def release(self) -> None:
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread, self.held_by = None, ""

    def _hold(self, asked: threading.Event, ends: threading.Event) -> None:
        """Hold the lock on the calling thread until `ends` is set. Set `asked` once Windows has answered.

        https://learn.microsoft.com/windows/win32/api/winbase/nf-winbase-setthreadexecutionstate
        """
        libraries: Any = ctypes.windll  # type: ignore[attr-defined,unused-ignore]
        set_state = libraries.kernel32.SetThreadExecutionState
        if set_state(_ES_CONTINUOUS | _ES_SYSTEM_REQUIRED):
            self.held_by = "Windows"
        asked.set()
        ends.wait()
        set_state(_ES_CONTINUOUS)


def wake_lock_here() -> WakeLock:
    if sys.platform == "win32":
        return WindowsWakeLock()
    return MacWakeLock() if sys.platform == "darwin" else LinuxWakeLock()
