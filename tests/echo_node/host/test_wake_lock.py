"""Locks against sleep, from scripted services on a real D-Bus, from a scripted `caffeinate`, and from a scripted
Windows.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_node.host.wake_lock import REASON, LinuxWakeLock, MacWakeLock, WindowsWakeLock, wake_lock_here
from tests.echo_node.host.sensors.conftest import Desktop

PATIENCE_S = 30.0
LOGIND = "/org/freedesktop/login1"
KEEPER = (
    "from echo_node.host.wake_lock import {name} as Lock\nlock = Lock({argument})\nlock.keep()\nprint(lock.held_by)"
)
needs_dbus = pytest.mark.skipif(sys.platform != "linux", reason="Linux has D-Bus")
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="the script needs a POSIX shell")


class Login:
    """A login manager that grants locks. `is_locked`: True while a process holds the lock's file descriptor."""

    def __init__(self, desktop: Desktop) -> None:
        self.desktop = desktop
        desktop.serve("org.freedesktop.login1")

    def grants(self) -> None:
        self.reads, self.writes = os.pipe()
        self.desktop.answers[LOGIND, "Inhibit"] = ("h", (self.writes,))

    def granted(self) -> None:
        """Close the login manager's own copy of the file descriptor, as a login manager does after its answer."""
        os.close(self.writes)

    def is_locked(self, *, within_s: float = 0.0) -> bool:
        return not select.select([self.reads], [], [], within_s)[0]


@pytest.fixture
def login(desktop: Desktop) -> Login:
    return Login(desktop)


@contextmanager
def keeper(name: str, argument: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes a lock, and wait until it has the lock."""
    code = KEEPER.format(name=name, argument=argument) + "\nimport sys; sys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        try:
            yield process
        finally:
            process.kill()


@needs_dbus
def test_the_login_manager_holds_an_idle_lock_until_its_release(login: Login) -> None:
    lock = LinuxWakeLock()
    for _ in range(2):
        login.grants()
        lock.keep()
        login.granted()
        lock.keep()  # The lock is held, so no service is asked again.
        assert lock.held_by == "the login manager" and login.is_locked()
        lock.release()
        assert not lock.held_by and not login.is_locked(within_s=PATIENCE_S)
        os.close(login.reads)
    assert login.desktop.bodies == [("idle", "echo-node", REASON, "block")] * 2


@needs_dbus
def test_a_killed_node_holds_no_lock_of_the_login_manager(login: Login) -> None:
    login.grants()
    with keeper("LinuxWakeLock") as process:
        login.granted()
        assert login.is_locked()
        process.kill()
        assert not login.is_locked(within_s=PATIENCE_S)
    os.close(login.reads)


@needs_dbus
def test_the_engines_process_does_not_prolong_the_lock(login: Login) -> None:
    login.grants()
    lock = LinuxWakeLock()
    lock.keep()
    login.granted()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as engine:
        lock.release()
        assert not login.is_locked(within_s=PATIENCE_S)
        engine.kill()
    os.close(login.reads)


GNOME = ("org.gnome.SessionManager", "/org/gnome/SessionManager", ("echo-node", 0, REASON, 4))
DESKTOP = ("org.freedesktop.PowerManagement", "/org/freedesktop/PowerManagement/Inhibit", ("echo-node", REASON))


@needs_dbus
@pytest.mark.parametrize(("service", "path", "body"), [GNOME, DESKTOP])
def test_a_desktop_is_asked_first_and_drops_the_lock_of_a_killed_node(
    login: Login, service: str, path: str, body: tuple[object, ...]
) -> None:
    desktop = login.desktop
    desktop.serve(service)
    desktop.answers[path, "Inhibit"] = ("u", (17,))
    lock = LinuxWakeLock()
    lock.keep()
    assert lock.held_by.endswith("session manager" if service == GNOME[0] else "power management")
    assert desktop.bodies[-1] == body and desktop.is_connected(desktop.senders[-1])
    lock.release()
    _until_gone(desktop, desktop.senders[-1])
    with keeper("LinuxWakeLock") as process:
        name = desktop.senders[-1]
        assert desktop.is_connected(name)
        process.kill()
        _until_gone(desktop, name)
    assert (LOGIND, "Inhibit") not in desktop.asked


def _until_gone(desktop: Desktop, name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while desktop.is_connected(name):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_dbus
def test_a_lock_that_ended_with_its_desktop_is_taken_again(login: Login) -> None:
    desktop = login.desktop
    desktop.serve(GNOME[0])
    desktop.answers[GNOME[1], "Inhibit"] = ("u", (17,))
    lock = LinuxWakeLock()
    lock.keep()
    lock._not_before = 0.0
    lock.keep()
    assert lock.held_by == "GNOME's session manager" and desktop.asked == [(GNOME[1], "Inhibit")]
    desktop.stop(GNOME[0])
    login.grants()
    lock._not_before = 0.0
    lock.keep()
    login.granted()
    assert lock.held_by == "the login manager" and login.is_locked()
    lock.release()
    os.close(login.reads)


@needs_dbus
def test_a_refused_lock_is_asked_for_again_later(
    login: Login, desktop: Desktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = LinuxWakeLock()
    lock.keep()
    lock.keep()
    assert not lock.held_by and desktop.asked == [(LOGIND, "Inhibit")]
    login.grants()
    lock._not_before = time.monotonic()
    lock.keep()
    login.granted()
    assert lock.held_by
    lock.release()
    os.close(login.reads)
    for variable in ("DBUS_SESSION_BUS_ADDRESS", "DBUS_SYSTEM_BUS_ADDRESS"):
        monkeypatch.setenv(variable, "unix:path=/nowhere/at/all")
    lock.keep()
    assert not lock.held_by


@needs_posix
def test_caffeinate_watches_this_process_and_ends_with_the_lock(tmp_path: Path) -> None:
    said, program = tmp_path / "said", tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$@" >> {said}\nexec sleep 1000\n')
    program.chmod(0o755)
    lock = MacWakeLock(program)
    lock.keep()
    process = lock._process
    deadline = time.monotonic() + PATIENCE_S
    while not (said.exists() and said.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert said.read_text() == f"-i -w {os.getpid()}\n"
    lock.keep()
    assert lock.held_by == "caffeinate" and process is lock._process and process is not None
    lock.release()
    lock.release()
    assert process.poll() is not None and not lock.held_by
    lock.keep()
    assert lock.held_by
    lock.release()
    nowhere = MacWakeLock(tmp_path / "nowhere")
    nowhere.keep()
    assert not nowhere.held_by


def test_windows_holds_the_lock_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def set_state(flags: int) -> int:
        calls.append((threading.current_thread().name, flags))
        return 1

    kernel32 = SimpleNamespace(SetThreadExecutionState=set_state)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    lock = WindowsWakeLock()
    lock.keep()
    lock.keep()
    assert lock.held_by == "Windows" and calls == [("wake lock", 0x80000001)]
    lock.release()
    lock.release()
    assert not lock.held_by and calls[1:] == [("wake lock", 0x80000000)]


@pytest.mark.parametrize(("platform", "kind"), [("win32", WindowsWakeLock), ("darwin", MacWakeLock)])
def test_each_system_has_its_own_lock(monkeypatch: pytest.MonkeyPatch, platform: str, kind: type) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert type(wake_lock_here()) is kind
