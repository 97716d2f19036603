"""Scoring process: `python -m echo_hub.scoring.worker [WARDEN_PID]`, started by `echo_hub.scoring.pool`. Loads no
torch.

Scorers are plug-ins and completions are untrusted, so every effect of a call must end in this process. Exceptions are
returned as answers. If a call takes too long, a timer of the system ends the process, even inside C code (a power of
large numbers, a regular expression), and even if the hub was killed in the meantime. Memory is limited where the system
supports it. If a call runs out of memory, the process ends, because later calls would fail as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import psutil

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.warden import end_with
from echo_hub.tasks.awaited import LOOP_ANSWERS_S
from echo_hub.tasks.math_answers import is_equal
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.errors import ConfigError, EchoError
from echo_shared.process.child import OUT_OF_MEMORY_STATUS, Frame, ParentPipe

log = logging.getLogger(__name__)

DETAIL_CHARACTERS: Final = 500
"""Maximum number of characters that are returned of an exception's text."""
_CACHED_PROBLEMS: Final = 256


def _open(frame: Frame) -> Problems:
    """Create the run's problems. Raises ConfigError if a task cannot be created, or if its files differ from the
    hub's."""
    config = HubConfig.model_validate(frame["config"])
    codec = PromptCodec.of_run(config, Path(frame["base_dir"]))
    held_out = {
        key: HeldOutProblems(**{name: tuple(numbers) for name, numbers in drawn.items()})
        for key, drawn in frame["held_out"].items()
    }
    problems = Problems.of_run(
        config, codec, cached=_CACHED_PROBLEMS, held_out=held_out, base_dir=Path(frame["base_dir"])
    )
    if problems.content_hash != frame["content_hash"]:
        raise ConfigError(
            "The files of the task's problems have changed while the hub runs.",
            got=", ".join(f"{task.name} with options = {task.options}" for task in config.task.members.values()),
            do="Put back what was there. New problems go into new files, for a new run.",
        )
    if any(task.name == "jsonl" for task in config.task.members.values()):
        is_equal("1 cm", "1 m")  # Import pint and sympy now: it takes long, and calls have time limits.
        is_equal("$x+1$", "1+x")
    return problems


def _limit_memory(megabytes: int) -> None:
    """Limit the memory that this process may allocate from now on, where the system supports it. Further allocations
    then fail with MemoryError."""
    if sys.platform == "linux":
        import resource

        limit = psutil.Process().memory_info().vms + megabytes * 2**20
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _set_timer(seconds: float) -> None:
    """Let the system end this process after `seconds`; 0 turns the timer off. On Windows there is no such timer; there
    the hub ends a late process."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _call(problems: Problems, method: str, arguments: Sequence[Any], timeout_s: float, failures: Counter[Any]) -> Frame:
    _set_timer(timeout_s)
    try:
        return _called(problems, method, arguments, failures)
    finally:
        _set_timer(0)


def _called(problems: Problems, method: str, arguments: Sequence[Any], failures: Counter[Any]) -> Frame:
    try:
        return {"value": getattr(problems, method)(*arguments)}
    except MemoryError:
        raise
    except Exception as error:
        # A task is a plug-in, so its exception is a failed call. The exception must neither become a reward nor end
        # this process.
        if _is_for_memory(error):
            raise MemoryError from error
        *_, (raised_in, line) = traceback.walk_tb(error.__traceback__)
        kind = (type(error).__name__, raised_in.f_code.co_filename, line)
        failures[kind] += 1
        if failures[kind].bit_count() == 1:  # Log only the 1st, 2nd, 4th, 8th ... failure.
            log.exception("%s%r failed, for the %d. time like this", method, tuple(arguments), failures[kind])
        return {"failed": repr(error)[:DETAIL_CHARACTERS]}


def _is_for_memory(error: BaseException | None) -> bool:
    """Return True if this error was caused by a MemoryError. Many scorers wrap a MemoryError in another exception."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


def serve(pipe: ParentPipe) -> int:
    """Answer calls one by one until the parent process is gone. Return the exit status."""
    frame = pipe.receive()
    if frame is None:
        return 0
    try:
        problems = _open(frame)
    except EchoError as error:
        pipe.send({"failed": str(error)})
        return 1
    timeout_s, width = frame["timeout_s"], frame["concurrency"]
    failures: Counter[Any] = Counter()
    _limit_memory(frame["memory_mb"])
    if width > 1:
        return _serve_many(pipe, problems, timeout_s, width)
    pipe.send({"value": "ready"})
    while (frame := pipe.receive()) is not None:
        for arguments in frame["arguments"]:
            try:
                pipe.send(_call(problems, frame["method"], arguments, timeout_s, failures))
            except MemoryError:
                return OUT_OF_MEMORY_STATUS
    return 0


def _serve_many(pipe: ParentPipe, problems: Problems, timeout_s: float, width: int) -> int:
    """Serve an async scorer: run up to `width` calls at the same time, and answer each finished call with its index in
    the message.

    If no call finishes in time, the timer ends the process.
    """
    failures: Counter[Any] = Counter()
    limit_s = 2 * timeout_s + LOOP_ANSWERS_S

    def answer(method: str, at: int, arguments: Sequence[Any]) -> None:
        try:
            answered = _called(problems, method, arguments, failures)
        except MemoryError:
            os._exit(OUT_OF_MEMORY_STATUS)
        _set_timer(limit_s)
        with contextlib.suppress(BrokenPipeError):
            pipe.send({**answered, "at": at})

    pipe.send({"value": "ready"})
    with ThreadPoolExecutor(width) as threads:
        while (frame := pipe.receive()) is not None:
            _set_timer(limit_s)
            calls = [threads.submit(answer, frame["method"], *each) for each in enumerate(frame["arguments"])]
            wait(calls)
            _set_timer(0)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if sys.platform != "win32":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if len(sys.argv) > 1:
        end_with(int(sys.argv[1]), signal.SIGKILL)
    sys.exit(serve(ParentPipe()))
