"""The process that runs an environment's sessions, as the hub sees it. It is started when a session is first needed.

Each session has a socket pair of its own, whose other end the process gets through its control socket. So any thread
may open a session: the hub's event loop for episodes, and the threads that draw problems.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from echo_hub.tasks.environments.base import EnvironmentAway
from echo_shared.errors import ConfigError
from echo_shared.logs.log_file import append_printed
from echo_shared.wire.messages.fields import printable_line

PROGRAM: Final = Path(__file__).parent / "inside" / "program.py"
READY_S: Final = 300.0
"""Longest time in seconds for the process to import its environment's package."""
SENDING_S: Final = 10.0
"""Longest time in seconds to send a line to the process."""
ENDING_S: Final = 10.0
"""Seconds that the process has to end its sessions. After that, the hub kills the process."""
_LONGEST_READY: Final = 65_536
_PRINTED_BYTES: Final = 65_536
_PRINTED_EVERY_S: Final = 0.005
"""Pause in seconds between two reads of what the process prints. A flood of output then waits in the pipe, and does not
take the hub's processor time."""
_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
"""Variables of the hub's environment that the process gets. Other variables may be secrets. If the process uses the
hub's own interpreter, it also gets the hub's module path."""
_OWN: Final = {
    "PYTHONHASHSEED": "0",  # A rebuilt session must iterate over sets in the same order.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class ProgramLaunch(Protocol):
    """Function that gets a command and returns it unchanged, or wrapped so that it runs in a cage (sandbox)."""

    def __call__(self, command: Sequence[str], directory: Path, /) -> Sequence[str]: ...


def bare(command: Sequence[str], directory: Path, /) -> Sequence[str]:
    """Return the command unchanged: it runs without a cage."""
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan:
    """How the process is started."""

    way: Literal["fork", "shared"]
    adapter: str
    """`MODULE:FACTORY` of the adapter in the process."""
    python: str
    options: Mapping[str, Any]
    place: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the run, for the adapter."""
    variables: Sequence[str] = ()
    """Names of the hub's environment variables that the process gets, in addition to harmless ones such as PATH."""
    memory_mb: int = 0
    """Memory in MB that each session may allocate; 0 = no limit. Used only if sessions are forked."""
    launch: ProgramLaunch = bare
    directory: Path | None = None
    """Directory of the process, with one below it for each session. None: a temporary one."""
    log: Path | None = None
    """File for what the process prints. None: this process's stderr."""


class SessionProcess:
    """The process that runs an environment's sessions. All methods may be called from any thread."""

    def __init__(self, plan: ProgramPlan) -> None:
        self.plan = plan
        self._lock = threading.Lock()
        """Held while the process is started, which may take minutes."""
        self._sending = threading.Lock()
        """Held while a line is sent, which is short, so event loops may wait for it."""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._number = 0
        self._oldest = 0
        """Number of the first session that the running process got."""
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def connect(self) -> tuple[int, socket.socket]:
        """Open a session in the process, and return its number and socket. Starts the process if necessary; this may
        take long.

        Raises ConfigError if the adapter cannot be made, EnvironmentAway if the process cannot be started or reached.
        """
        try:
            return self._connected()
        except OSError as error:
            raise EnvironmentAway("The system opens no session now.", got=str(error)) from error

    def _connected(self) -> tuple[int, socket.socket]:
        with self._lock:
            ours, theirs = socket.socketpair()
            try:
                for is_second in (False, True):
                    control = self._started()
                    self._number += 1
                    directory = str(self._directory() / f"session-{self._number}")
                    line = {"do": "session", "session": self._number, "directory": directory}
                    try:
                        with self._sending:
                            socket.send_fds(control, [_line(line)], [theirs.fileno()])
                    except OSError as error:
                        self._stop()
                        if is_second:
                            raise EnvironmentAway("The sessions' process has died.", got=str(error)) from error
                    else:
                        return self._number, ours
                raise AssertionError("the second try returns or raises")
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()

    def end(self, number: int) -> None:
        """End a session. Its socket gets a last line with the cause, and closes."""
        self._say({"do": "end", "session": number})

    def allow_cpu(self, number: int) -> None:
        """Give a session the processor time of one more step. Without a cage, there is no limit and nothing happens."""
        self._say({"do": "cpu", "session": number})

    @property
    def pid(self) -> int | None:
        """Id of the running process; None if there is none."""
        with self._lock:
            return None if self._process is None or self._process.poll() is not None else self._process.pid

    def has_died(self, number: int) -> bool:
        """Return True if a session has ended because the process of all sessions has died."""
        if self.plan.way != "fork":
            return False
        with self._sending:
            if self._control is None or number < self._oldest:
                return True
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            return bool(poll.poll(0))  # After its start, the process sends nothing, so this means: closed.

    def stop(self) -> None:
        """End the process with all its sessions. If a session is opened later, a new process starts."""
        starting = self._process
        if starting is not None and self._control is None:
            starting.kill()  # Another thread waits for it to get ready.
        with self._lock:
            self._stop()
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _say(self, line: Mapping[str, Any]) -> None:
        with self._sending:
            if self._control is not None:
                with contextlib.suppress(OSError):  # The process is dead, and so are its sessions.
                    self._control.sendall(_line(line))

    def _directory(self) -> Path:
        if self.plan.directory is not None:
            self.plan.directory.mkdir(parents=True, exist_ok=True)
            return self.plan.directory
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="echo-sessions-")
        return Path(self._temporary.name)

    def _started(self) -> socket.socket:
        """Return the control socket of the running process. Starts one if there is none."""
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._stop()
        _check_system()
        ours, theirs = socket.socketpair()
        ours.settimeout(SENDING_S)
        directory = self._directory()
        command = [self.plan.python or sys.executable, str(PROGRAM), self.plan.way, self.plan.adapter]
        try:
            with self._output() as output:
                self._process = subprocess.Popen(
                    list(self.plan.launch(command, directory)),
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    cwd=directory,
                    env=self._environment(),
                    start_new_session=True,
                )
        except ConfigError:
            ours.close()
            raise
        except OSError as error:
            ours.close()
            raise ConfigError(
                "The sessions' process cannot be started.",
                got=f"{command[0]}: {error}",
                do="Set sessions.python to the Python interpreter that has the environment's package.",
            ) from error
        finally:
            theirs.close()
        try:
            self._open(ours)
        except BaseException:
            ours.close()
            self._stop()
            raise
        with self._sending:
            self._control, self._oldest = ours, self._number + 1
        return ours

    def _environment(self) -> dict[str, str]:
        found = {**{name: os.environ[name] for name in (*_KEPT, *self.plan.variables) if name in os.environ}, **_OWN}
        if not self.plan.python:  # The operator's own modules are where the hub finds them.
            found["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
        return found

    @contextlib.contextmanager
    def _output(self) -> Iterator[int | None]:
        """Yield the descriptor to which the process prints: a pipe to the log, or this process's stderr."""
        if self.plan.log is None:
            yield None
            return
        self.plan.log.parent.mkdir(parents=True, exist_ok=True)
        printed, output = os.pipe()
        threading.Thread(target=_keep, args=(printed, self.plan.log), name="sessions-log", daemon=True).start()
        try:
            yield output
        finally:
            os.close(output)

    def _open(self, control: socket.socket) -> None:
        plan = self.plan
        place = {**plan.place, "directory": str(self._directory()), "python": plan.python or sys.executable}
        opening = {"options": dict(plan.options), "place": place, "memory_mb": plan.memory_mb}
        line, until = b"", time.monotonic() + READY_S
        try:
            control.sendall(_line(opening))
            while not line.endswith(b"\n") and len(line) < _LONGEST_READY:
                control.settimeout(max(0.01, until - time.monotonic()))
                part = control.recv(65_536)
                if not part:
                    break
                line += part
        except OSError as error:
            raise EnvironmentAway("The sessions' process does not get ready.", got=str(error)) from error
        control.settimeout(SENDING_S)
        try:
            ready = json.loads(line)
        except (ValueError, RecursionError):
            ready = {"failed": "it ended, or said something else, before it was ready"}
        if "failed" in ready:
            raise ConfigError(
                "The environment cannot be made in its interpreter.",
                got=f"{plan.adapter} in {plan.python or sys.executable}: {printable_line(str(ready['failed']))}",
                do="Install the environment's package there, or set sessions.python to the interpreter that has it.",
            )

    def _stop(self) -> None:
        with self._sending:
            if self._control is not None:
                self._control.close()
                self._control = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # A cage's warden then ends all processes. After SIGKILL it could not.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            process.wait()


def _keep(printed: int, log: Path) -> None:
    """Append what arrives in a pipe to the log, until all processes that print to it have ended.

    Sessions do not write to the log file directly: a session that printed too much would fill the file to the size
    limit, and then no session could print.
    """
    with open(printed, "rb", buffering=0) as pipe:
        while part := pipe.read(_PRINTED_BYTES):
            with contextlib.suppress(OSError):  # The disk is full, or the directory was removed. The process goes on.
                append_printed(log, part)
            time.sleep(_PRINTED_EVERY_S)


def _line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _check_system() -> None:
    if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
        raise ConfigError(
            "Environments with state do not run on this system: their sessions are forked processes.",
            got=sys.platform,
            do="Run the hub on Linux or macOS, or use a task without state.",
        )
