"""Run a process that holds sessions in its cage, and end all processes that it starts: `python -I -S warden.py TERMS
PARENT PYTHON PROGRAM ...`, on Linux.

The warden stands between the hub and the process that holds sessions, and runs no code of an environment. It is the
*subreaper* (prctl(2)) of all descendants: none can escape by starting a new session or by losing its parent. Several
times a second it compares what each session uses with its limits. It kills a session that uses too much, and writes the
cause to the process that holds the sessions. It kills all of them when that process ends, when the hub sends SIGTERM,
and when the hub dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":  # Run by path: Python has put this file's directory on the import path.
    import importlib.util

    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:] = [name for name in sys.path if Path(name).resolve() != _ROOT / "cage"]
    _spec = importlib.util.spec_from_file_location(
        "echo_shared", _ROOT / "__init__.py", submodule_search_locations=[str(_ROOT)]
    )
    assert _spec is not None
    sys.modules["echo_shared"] = importlib.util.module_from_spec(_spec)

from echo_shared.cage import descent
from echo_shared.cage.session_terms import MIB, SessionTerms

if TYPE_CHECKING:
    from echo_shared.cage.supervising import CallSupervisor

_PR_SET_CHILD_SUBREAPER: Final = 36
LOOK_S: Final = 0.25
_DISK_LOOKS: Final = 8
"""Number of checks of the processes for each check of their files, which takes longer."""
OF_THE_SERVER, OF_NO_SESSION = 0, -1
_LONGEST_PATH: Final = 3_500
"""Longest path, in bytes, of a directory that a session may create. In a directory with a longer path, paths of files
could exceed the system's limit.
"""
_DEEPEST: Final = 32
"""Maximum depth of directories that a session may create below its own."""
_KEPT: Final = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
)
_KEPT_PREFIXES: Final = ("LC_", "OMP_", "OPENBLAS_", "MKL_")


def clean(environment: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a caged process: harmless ones, and `more`. All others are left out, because
    they may contain keys.
    """
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return kept | {"USER": "echo", "LOGNAME": "echo"} | dict(more)


class SessionWarden:
    """Watches the process `server`, which holds sessions, and all its descendants."""

    def __init__(self, terms: SessionTerms, server: int, *, parent: int, notes: int, causes: int) -> None:
        """`parent` is the hub; `notes` and `causes` are pipes from and to the server."""
        self._terms = terms
        self._parent = parent
        self._server = server
        self._notes = notes
        self._causes = causes
        self._used_s: dict[int, float] = {}
        """Processor time of each session at the beginning of its step, by the id of its first process."""
        self._root = Path(terms.directory)
        self._places: dict[int, Path] = {}
        """Directory of each session, by the id of its first process."""
        self._member_of: dict[int, int] = {}
        """Process id -> first process of the session to which the process belonged at the last check."""
        self._rest = b""
        self._looks = 0
        self.supervisor: CallSupervisor | None = None

    def run(self, wakes: int) -> int:
        """Watch until the server ends, the hub ends or SIGTERM comes. Return the exit status of the server.
        `wakes`: descriptor that becomes readable at a signal."""
        poll = select.poll()
        poll.register(self._notes, select.POLLIN)
        poll.register(wakes, select.POLLIN)
        next_look = time.monotonic()
        while True:
            wait_s = max(0.0, next_look - time.monotonic())
            for descriptor, _ in poll.poll(wait_s * 1000):
                if descriptor == wakes and signal.SIGTERM in os.read(wakes, 4096):
                    return 0
                if descriptor == self._notes and not self._read_notes(poll):
                    poll.unregister(self._notes)
                if self.supervisor is not None and descriptor == self.supervisor.listener:
                    self.supervisor.answer(self)
            status = self._reap()
            if status is not None:
                return status
            if time.monotonic() >= next_look:
                if os.getppid() != self._parent:
                    return 0
                self._look()
                next_look = time.monotonic() + LOOK_S

    def _reap(self) -> int | None:
        """Wait for ended processes. Return the exit status of the server, None while it runs."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return None
                if pid == self._server:
                    return os.waitstatus_to_exitcode(status)
        return 0

    def _read_notes(self, poll: select.poll) -> bool:
        """Read the notes of the server (the process that holds the sessions). Return False once it has closed its end
        of the pipe.
        """
        piece = os.read(self._notes, 65_536)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self._rest = self._rest[-64:]
        for line in lines:
            what, _, name = line.decode(errors="replace").partition(" ")
            if what == "listener" and self.supervisor is None and name.isdecimal():
                self._supervise(int(name), poll)
                continue
            for pid in [one for one in self.sessions() if self._name(one) == name]:
                if what == "step":
                    self._used_s[pid] = sum(one.cpu_s for one in self._figures(self.processes(pid)))
                elif what == "end":
                    self._kill(pid)
        return bool(piece)

    def _supervise(self, listener: int, poll: select.poll) -> None:
        from echo_shared.cage.supervising import CallSupervisor

        self.supervisor = CallSupervisor(self._server, listener, self._terms)
        poll.register(self.supervisor.listener, select.POLLIN)
        os.write(self._causes, b"0 supervised\n")

    def _figures(self, pids: Iterable[int]) -> list[descent.ProcessFigures]:
        """Return the processor time and memory of each of these processes that still runs."""
        return [found for one in pids if (found := descent.figures(one)) is not None]

    def processes(self, pid: int) -> list[int]:
        """Return all processes of the session whose first process is `pid`, beginning with that process."""
        if self._terms.children == "none":
            return [pid]
        pids = [pid, *descent.descendants(pid)]
        if self._terms.children == "forks":
            return pids
        for orphan in descent.children(os.getpid()):
            if orphan != self._server and self.session_of(orphan) == pid:
                pids += [orphan, *descent.descendants(orphan)]
        return pids

    def session_of(self, pid: int) -> int:
        """Return the first process of the session of process `pid`; OF_THE_SERVER or OF_NO_SESSION if it has none.

        An orphan is a child of the warden. Its session is found by its session id (setsid), or else remembered from the
        last check.
        """
        found, one = OF_THE_SERVER, pid
        while (known := descent.figures(one)) is not None and one != self._server:
            if known.session == one:
                found = one
            if known.parent == os.getpid():
                for first in (known.session, self._member_of.get(one), self._member_of.get(pid)):
                    if first in self._places and descent.figures(first) is not None:
                        return first
                return OF_NO_SESSION
            one = known.parent
        if known is None:
            return OF_NO_SESSION
        if found != OF_THE_SERVER:
            self._place(found)  # Store it now: later, the process may have changed its directory.
        return found

    def _place(self, pid: int) -> Path:
        """Return the directory of a session: the one with its first process's id, or with `programs` the one in which
        that process began.
        """
        if pid not in self._places:
            self._places[pid] = self._root / str(pid)
            if self._terms.children == "programs":
                with contextlib.suppress(OSError):
                    self._places[pid] = Path(f"/proc/{pid}/cwd").readlink()
        return self._places[pid]

    def _name(self, pid: int) -> str:
        """Return the name by which the server (the process that holds the sessions) knows this session."""
        return "".join(self._place(pid).name.split())

    def sessions(self) -> list[int]:
        """Return the first process of each session.

        If the terms forbid child processes, the server process itself is the only session. If the terms allow programs,
        a program counts as a session if the server or a worker started it in a new process session (setsid).
        """
        if self._terms.children == "none":
            return [self._server]
        if self._terms.children == "forks":
            return descent.children(self._server)
        found, waiting = [], descent.children(self._server)
        while waiting:
            pid = waiting.pop()
            known = descent.figures(pid)
            if known is not None and known.session == pid:
                found.append(pid)
            else:
                waiting += descent.children(pid)
        return found

    def _look(self) -> None:
        """Check all processes once: end sessions that exceed a limit, and processes that belong to no session."""
        sessions = self.sessions()
        for pid in self._places.keys() - set(sessions):
            del self._places[pid]
            self._used_s.pop(pid, None)
        members: dict[int, int] = {}
        for pid in sessions:
            self._place(pid)
            pids = self.processes(pid)
            members |= dict.fromkeys(pids, pid)
            if cause := self._excess(pid, pids):
                self.end(pid, cause)
        if len(sessions) > self._terms.open_files:  # The server holds a socket of each session.
            self.end(self._server, f"processes: it had {len(sessions)}, more than {self._terms.open_files}")
        self._member_of = members
        for orphan in descent.children(os.getpid()):
            if orphan != self._server and orphan not in members:
                self._kill(orphan)
        self._looks += 1
        if self._looks % _DISK_LOOKS == 0:
            self._look_at_files(sessions)

    def _excess(self, pid: int, pids: Iterable[int]) -> str:
        """Return which limit the session with the processes `pids` exceeds; "" if none."""
        used = self._figures(pids)
        terms = self._terms
        memory = sum(one.memory_bytes for one in used)
        if memory > terms.memory_bytes and terms.children != "forks":  # The kernel limits the memory of a fork.
            return f"memory: it used {memory // MIB} MB, more than {terms.memory_bytes // MIB} MB"
        if (threads := sum(one.threads for one in used)) > terms.processes:
            return f"processes: it had {threads} processes and threads, more than {terms.processes}"
        cpu_s = sum(one.cpu_s for one in used) - self._used_s.setdefault(pid, 0.0)
        # A server without child processes takes no steps, so step_cpu_s does not apply.
        if cpu_s > terms.step_cpu_s and terms.children != "none":
            return f"time: it used {cpu_s:.0f} s of processor time in one step, more than {terms.step_cpu_s:g} s"
        return ""

    def _look_at_files(self, sessions: Sequence[int]) -> None:
        """Check all files once: end sessions whose files are too large.

        With `forks`, remove the directories of ended sessions. Otherwise the server does so, and ends if the files of
        all sessions together are too large.
        """
        terms = self._terms
        places = {pid: place for pid in sessions if self._root in (place := self._place(pid)).parents}
        greedy = {pid: text for pid, place in places.items() if (text := disk_excess(place, terms))}
        for pid, text in greedy.items():
            self.end(pid, text)
        if terms.children == "forks":
            names = [entry.name for entry in self._root.iterdir() if entry.name.isdecimal()]
            remove(self._root / name for name in names if descent.figures(int(name)) is None)
        elif not greedy:  # Else the server must first remove their files.
            shares = 1 + (len(places) if terms.children == "programs" else 0)
            most = replace(terms, disk_bytes=shares * terms.disk_bytes, files=shares * terms.files)
            if text := disk_excess(self._root, most):
                self.end(self._server, text)

    def end(self, pid: int, cause: str) -> None:
        """Kill a session, and tell the server (the process that holds the sessions) why."""
        name = self._name(pid)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._causes, f"{name} {cause}\n".encode())
        print(f"session {name} was ended: {cause}", file=sys.stderr, flush=True)
        self._kill(pid)

    def _kill(self, pid: int) -> None:
        """Kill a process and its descendants. They are stopped first, so that they cannot start others during the
        kills.
        """
        pids = self.processes(pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, number)
            pids = list(dict.fromkeys([*pids, *self.processes(pid)]))


def disk_excess(directory: Path, terms: SessionTerms) -> str:
    """Return which limit on files the directory exceeds; "" if none. Follows no links."""
    size = count = 0
    waiting = [(directory, 0)]
    while waiting:
        place, depth = waiting.pop()
        if depth > _DEEPEST or len(os.fsencode(place)) > _LONGEST_PATH:
            return f"disk: its directories are more than {_DEEPEST} levels deep, or have long names"
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((Path(entry.path), depth + 1))
                else:
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                if size > terms.disk_bytes:
                    return f"disk: its files are larger than {terms.disk_bytes // MIB} MB"
                if count > terms.files:
                    return f"disk: it has more than {terms.files} files"
    return ""


def remove(directories: Iterable[Path]) -> None:
    """Remove directories, however deep they are."""
    if names := [str(one) for one in directories]:
        subprocess.run(["rm", "-rf", "--", *names], check=False, stderr=subprocess.DEVNULL)


def end_all() -> None:
    """Kill all descendants, including processes started or adopted meanwhile."""
    with contextlib.suppress(ChildProcessError):  # No child is left.
        while True:
            for pid in descent.descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def start(terms: SessionTerms, text: str, program: list[str], *, notes: int, causes: int) -> int:
    """Start the launcher in a child process, with a clean environment and no other descriptors; return its id."""
    python, *rest = program
    for descriptor in (notes, causes):
        os.set_inheritable(descriptor, True)
    launcher = Path(__file__).resolve().with_name("launcher.py")
    child = subprocess.Popen(
        [python, str(launcher), text, str(notes), str(causes), *rest],
        env=clean(os.environ, terms.environment),
        pass_fds=(notes, causes),
        start_new_session=True,
        restore_signals=True,
    )
    os.close(notes)
    os.close(causes)
    child.returncode = 0  # The warden itself waits for its children, so keep Popen from waiting.
    return child.pid


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main(text: str, parent: int, program: list[str]) -> int:
    """Run the warden and return its exit status."""
    terms = SessionTerms.of_text(text)
    wakes, wake = os.pipe()
    for descriptor in (wakes, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    (notes, to_warden), (from_warden, causes) = os.pipe(), os.pipe()
    os.set_blocking(causes, False)
    server = start(terms, text, program, notes=to_warden, causes=from_warden)
    # Close the warden's copies of the hub's pipes: the hub then sees the pipes close as soon as the server ends.
    os.closerange(0, 2)
    try:
        status = SessionWarden(terms, server, parent=parent, notes=notes, causes=causes).run(wakes)
    finally:
        end_all()
        root = Path(terms.directory)
        remove(root.iterdir())
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
