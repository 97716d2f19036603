"""A program of an environment that exceeds limits. For each function named in its arguments, it forks a session that
calls this function. It prints a JSON object: the reason for the end of each session, by function.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

session_cage = sys.modules["session_cage"]
WAYS: dict[str, Callable[[], object]] = {}


def way(function: Callable[[], object]) -> Callable[[], object]:
    WAYS[function.__name__] = function
    return function


@way
def loop() -> None:
    while True:
        pass


@way
def threads() -> None:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


@way
def memory() -> None:
    pieces = []
    while True:
        pieces.append(bytearray(2**20))


@way
def shared_memory() -> None:
    mmap.mmap(-1, 2**32)


@way
def large_file() -> None:
    with Path("large").open("wb") as file:
        while True:
            file.write(bytes(2**20))


@way
def many_large_files() -> None:
    number = 0
    while True:
        number += 1
        Path(f"file-{number}").write_bytes(bytes(2**20))
        time.sleep(0.01)  # Writing without a break uses up the step's processor time as well.


@way
def many_files() -> None:
    for number in range(250):
        Path(f"file-{number}").touch()
    time.sleep(60)  # More files would use up the step's processor time as well.


@way
def deep_directories() -> None:
    for _ in range(100):
        Path("d").mkdir()
        os.chdir("d")
    time.sleep(60)


@way
def crash() -> None:
    os.abort()


@way
def idle() -> None:
    time.sleep(60)


@way
def honest() -> None:
    time.sleep(0.2)


@way
def forks_at_import() -> None:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    time.sleep(60)


def _session(name: str) -> None:
    try:
        if name != "forks_at_import":  # That code runs before the environment is made, in the server's own cage.
            session_cage.enter()
        WAYS[name]()
        os._exit(0)
    except MemoryError:
        os._exit(session_cage.OUT_OF_MEMORY_STATUS)
    except (OSError, RuntimeError) as error:
        Path("said").write_text(session_cage.named(error))
        print(session_cage.named(error), file=sys.stderr, flush=True)
        os._exit(5)


def main() -> None:
    sessions = {}
    for name in sys.argv[1:]:
        if pid := os.fork():
            sessions[pid] = name
        else:
            _session(name)
    found = {}
    while sessions:
        pid, status = os.wait()
        name = sessions.pop(pid)
        said = Path(str(pid), "said")
        cause = session_cage.cause(pid, status)
        found[name] = cause or (said.read_text() if said.exists() else f"status {os.waitstatus_to_exitcode(status)}")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
