"""`python -m echo_shared.cage.trial FILE`: enters a cage, tries to break each of its guards, and reports the guards
that held.

It runs in its own process and prints `Held.as_json` on its last line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from echo_shared.cage.description import Cage, Held
from echo_shared.cage.entering import enter
from echo_shared.cage.guards import Guard


def _read(private: Path) -> None:
    private.read_bytes()


def _write(private: Path) -> None:
    private.write_bytes(b"overwritten")


def _connect(_: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5.0).close()


def _start(_: Path) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True, timeout=60.0)


def _touch(_: Path) -> None:
    if sys.platform == "win32":
        parent = psutil.Process(os.getppid())
        parent.nice(parent.nice())
    else:
        os.kill(os.getppid(), 0)


ATTEMPTS: Final[Mapping[Guard, Callable[[Path], None]]] = {
    "reading": _read,
    "writing": _write,
    "network": _connect,
    "programs": _start,
    "processes": _touch,
}
"""For each guard (limit of the cage), a function that tries to break it. The function's argument is a file that the
cage does not allow.
"""


def tried(private: Path, held: Held) -> Held:
    """Try to break each guard in `held`. Return `held` without the guards that did not withstand the attempt."""
    broken: dict[Guard, str] = {}
    for guard in held.holds:
        try:
            ATTEMPTS[guard](private)
        except (OSError, subprocess.SubprocessError, psutil.Error):
            continue
        broken[guard] = "an attempt was not refused"
    return replace(held, lacks={**held.lacks, **broken})


def main() -> None:
    print(json.dumps(tried(Path(sys.argv[1]), enter(Cage())).as_json()), flush=True)


if __name__ == "__main__":
    main()
