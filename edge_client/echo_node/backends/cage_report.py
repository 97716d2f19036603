"""Report for `echo-node doctor --cage`: which system calls and files the cage refuses to a GPU's driver.

The cage, a sandbox, limits an engine's process to what it needs. It has steps from narrow to wide
(`echo_shared.cage.leeway`). A child process enters the cage of each step and starts the GPU, while this process records
the child's refused calls and opened files. One run on a machine with a GPU thus names the rule that blocks the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from echo_node.backends.base import EngineSettings
from echo_node.backends.caging import CAGED_ENVIRONMENT, CageTerms, cage_engine
from echo_node.backends.gpu_cage import STARTS
from echo_node.backends.registry import BackendChoice
from echo_shared.cage import tracing
from echo_shared.cage.leeway import BY_NAME, LEEWAYS, Leeway
from echo_shared.cage.tracing import Opened, Supervisor
from echo_shared.errors import BackendError
from echo_shared.wire.messages.fields import printable_line

_PATIENCE_S: Final = 120.0
_CHILD: Final = (sys.executable, "-m", "echo_node.backends.cage_report")
_MOST_SAID: Final = 300
_OF_A_THREAD: Final = "/proc/self/task/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Result of starting the engine in one of the cages (sandboxes) that are tried from narrow to wide."""

    step: Leeway
    failure: str
    """Error text of the engine's start; empty = the engine starts."""
    refused: Mapping[str, int]
    """Number of refused calls, by a description of the call."""
    unopened: Sequence[str]
    """Existing files that the driver tried to open and the cage refuses."""
    unwatched: str = ""
    """Reason why refused calls could not be recorded; empty = `refused` is complete."""


def report(choice: BackendChoice, starts: Mapping[str, Sequence[str]] = STARTS) -> Iterator[str]:
    """Yield text lines, a block for each cage (sandbox) tried, from narrow to wide. The last block is that of the first
    cage in which the engine starts.
    """
    yield f"{choice.name} on {choice.device}:"
    for step in LEEWAYS:
        tried = try_step(choice, step, "\n".join(starts[choice.name]))
        yield f'  step "{step.name}" (its driver may {step.what}): {tried.failure or "it starts"}'
        if tried.unwatched:
            yield f"    what was refused is not known: {tried.unwatched}"
        yield from (f"    refused: {what}{f' ({count} times)' * (count > 1)}" for what, count in tried.refused.items())
        yield from (f"    kept closed: {what}" for what in tried.unopened)
        if not tried.failure:
            return


def try_step(choice: BackendChoice, step: Leeway, code: str) -> Tried:
    """Run `code`, which starts an engine, in the cage (sandbox) that `step` describes. Blocks the calling thread for
    seconds.
    """
    with tempfile.TemporaryDirectory(prefix="echo-cage-", ignore_cleanup_errors=True) as scratch:
        arguments = [choice.name, choice.device, step.name, scratch]
        child = subprocess.Popen(
            [*_CHILD, "watched", *arguments, code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **CAGED_ENVIRONMENT},
        )
        ending = threading.Timer(_PATIENCE_S, child.kill)
        ending.start()
        try:
            supervisor, unwatched = _supervised(child)
            _, said = child.communicate()
        finally:
            ending.cancel()
        opened = [] if supervisor is None else [_again(one, child.pid) for one in supervisor.opened]
        unopened = _unopened(arguments, opened) if step.file_rules else []
    last = (said.decode(errors="replace").strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return Tried(
        step=step,
        failure=printable_line(last)[:_MOST_SAID] if child.returncode else "",
        refused={} if supervisor is None else supervisor.refused,
        unopened=unopened,
        unwatched=unwatched,
    )


def _supervised(child: subprocess.Popen[bytes]) -> tuple[Supervisor | None, str]:
    """Record the child's calls until it ends. Return the supervisor with the recorded calls, or None and the reason why
    recording failed.
    """
    assert child.stdout is not None
    told = child.stdout.readline().decode().strip()
    if not told.isdecimal():
        return None, told
    try:
        supervisor = Supervisor(child.pid, int(told))
    except OSError as error:
        child.kill()  # No process answers the child's refused calls now, so the child would wait forever.
        return None, error.strerror or str(error)
    supervisor.run()
    return supervisor, ""


def _again(opened: Opened, pid: int) -> Opened:
    """Return the opened file under a path that is valid in every process: "self" takes the place of the process id
    `pid`.
    """
    path = opened.path.replace(f"/proc/{pid}/", "/proc/self/")
    if path.startswith(_OF_A_THREAD):
        thread, _, rest = path.removeprefix(_OF_A_THREAD).partition("/")
        path = f"/proc/thread-self/{rest}" if thread.isdecimal() else path
    return Opened(path, opened.flags)


def _unopened(arguments: Sequence[str], opened: Sequence[Opened]) -> list[str]:
    """Return those of the `opened` files that exist but cannot be opened in the cage that `arguments` describe."""
    asked = json.dumps([(one.path, one.flags) for one in opened if Path(one.path).is_absolute()])
    done = subprocess.run(
        [*_CHILD, "opening", *arguments],
        input=asked.encode(),
        capture_output=True,
        env={**os.environ, **CAGED_ENVIRONMENT},
        timeout=_PATIENCE_S,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


# The functions below run in child processes.


def _enter(backend: str, device: str, step: Leeway, scratch: str) -> None:
    where = Path(scratch)
    cage_engine(backend, where, where, EngineSettings(device=device), CageTerms(leeway=step))


def _watched(backend: str, device: str, name: str, scratch: str, code: str) -> None:
    """Enter the cage's file rules, and a filter of system calls that reports refused calls to the parent process. Then
    run `code`.
    """
    step = BY_NAME[name]
    _enter(backend, device, replace(step, call_filter=False), scratch)
    try:
        told = str(tracing.watch(tcp=False, local=step.sockets)) if step.call_filter else "the step has no filter"
    except OSError as error:
        told = printable_line(str(error))
    os.write(1, f"{told}\n".encode())
    try:
        exec(compile(code, "<start>", "exec"), {})
    except BackendError as error:
        raise SystemExit(printable_line(str(error))) from error


def _opening(backend: str, device: str, name: str, scratch: str) -> None:
    asked = json.loads(sys.stdin.read())
    _enter(backend, device, replace(BY_NAME[name], call_filter=False), scratch)
    print(json.dumps([f"{path} (to {_purpose(flags)})" for path, flags in asked if not _opens(path, flags)]))


def _opens(path: str, flags: int) -> bool:
    """Return False if the cage refuses the file. A missing file counts as opened, because drivers expect some to be
    missing.
    """
    kept = flags & (os.O_ACCMODE | getattr(os, "O_DIRECTORY", 0))
    try:
        os.close(os.open(path, kept | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def _purpose(flags: int) -> str:
    return "read" if flags & os.O_ACCMODE == os.O_RDONLY else "write"


_CHILDREN: Final[Mapping[str, Callable[..., None]]] = {"watched": _watched, "opening": _opening}

if __name__ == "__main__":
    _CHILDREN[sys.argv[1]](*sys.argv[2:])
