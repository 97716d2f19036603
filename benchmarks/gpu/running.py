"""Run each part in its own process, so that a crash, a hang or exhausted memory costs one part only.

A server process imports PyTorch and the other libraries once, then forks for each part. The server never uses the GPU,
so each fork can create a CUDA context. On systems without fork, each part imports the libraries itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

MODULE: Final = "benchmarks.gpu.part"
SERVE: Final = "--serve"
CAN_FORK: Final = hasattr(os, "fork") and sys.platform == "linux"
STARTS_WITHIN_S: Final = 120.0
_NO_CUDA_IN_SERVER: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment of the server: PyTorch looks for a GPU through NVML. If it looked through CUDA, no forked process could
use CUDA.
"""
_NOT_IN_A_FORK: Final = ("forked subprocess", "initialization error")
_KILLED_AFTER_S: Final = 5.0
_MOST_SAID: Final = 800

Run = Callable[[str, str, int, float], dict[str, Any]]
"""Function that runs a part: (part, shape, seed, seconds) -> figures of the part."""


class Budget:
    """Time budget of one part, with progress lines on standard error."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._began_at = time.monotonic()

    @property
    def left_s(self) -> float:
        return self._limit_s - (time.monotonic() - self._began_at)

    def say(self, what: str) -> None:
        elapsed_s = self._limit_s - self.left_s
        print(f"  {self._name}, {elapsed_s:.0f} of {self._limit_s:.0f} s: {what}", file=sys.stderr, flush=True)


class Server:
    """Context manager for the server process, which forks for each part. The process starts with the first part."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is None:
            return
        try:
            self._process.communicate(timeout=_KILLED_AFTER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_NO_CUDA_IN_SERVER},
                text=True,
            )
        return self._process

    def run(self, part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, Any]:
        """Run one part. Return its figures, or the reason for their absence as `error`."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([part, shape, seed, limit_s]) + "\n")
            process.stdin.flush()
            line = _line(process.stdout.fileno(), STARTS_WITHIN_S + limit_s)
        except BrokenPipeError:
            line = ""
        if not line:
            process.kill()
            process.communicate()
            why = "does not answer" if line is None else "has ended"
            return {"error": f"the process that runs the parts {why}"}
        figures: dict[str, Any] = json.loads(line)
        if any(words in figures.get("error", "") for words in _NOT_IN_A_FORK):
            return run_alone(part, shape, seed, limit_s=limit_s)
        return figures


def run_alone(part: str, shape: str, seed: int, *, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", MODULE, part, shape, str(seed), str(limit_s)]
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:.0f} s"}
    return _figures(run.stdout, run.returncode)


def _figures(output: str, status: int) -> dict[str, Any]:
    lines = output.splitlines()
    try:
        figures: dict[str, Any] = json.loads(lines[-1])
        return figures
    except (IndexError, ValueError):
        return {"error": f"ended with status {status}, and its last line is no figures: {' '.join(lines[-1:])[:300]}"}


def _line(descriptor: int, within_s: float) -> str | None:
    """Read one line of a pipe. Return the partial line at the pipe's end; None after `within_s`."""
    read, until = b"", time.monotonic() + within_s
    while not read.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            return None
        more = os.read(descriptor, 65_536)
        if not more:
            break
        read += more
    return read.decode(errors="replace").strip()


# Code from here on runs in the server process.


def serve(run: Run) -> None:
    """Read requests from standard input; write a line of figures for each to standard output."""
    for line in sys.stdin:
        part, shape, seed, limit_s = json.loads(line)
        print(json.dumps(_forked(run, part, shape, seed, limit_s)), flush=True)


def _forked(run: Run, part: str, shape: str, seed: int, limit_s: float) -> dict[str, Any]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()  # Make a process group, so that killpg ends this part and its children.
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - It lives as long as the process.
        os.dup2(2, 1)  # Libraries print to standard output, which is reserved for the server's answers.
        status = _answer(run, part, shape, seed, limit_s, writing)
        os._exit(status)
    os.close(writing)
    output = _line(reading, limit_s)
    os.close(reading)
    if output is None:
        _kill(child)
        return {"error": f"took more than {limit_s:.0f} s"}
    _, status = os.waitpid(child, 0)
    return _figures(output, os.waitstatus_to_exitcode(status))


def _answer(run: Run, part: str, shape: str, seed: int, limit_s: float, writing: int) -> int:
    """Run the part, and write its figures or its error to the pipe `writing`. Return the process's exit status."""
    try:
        figures = run(part, shape, seed, limit_s)
    except BaseException as error:  # noqa: BLE001 - This process ends after reporting it.
        sys.excepthook(type(error), error, error.__traceback__)
        figures = {"error": f"{type(error).__name__}: {error}"[:_MOST_SAID]}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(figures) + "\n")
    sys.stderr.flush()
    return 0


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
