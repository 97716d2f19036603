"""Starts greedy programs, each in a new session (setsid) and directory, and prints a JSON object: the exit status of
each program, and why the warden (the process that enforces the cage's limits) ended it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

session_cage = sys.modules["session_cage"]
PYTHON = sys.executable
WAYS = {
    "bomb": ["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 30"],
    "memory": [PYTHON, "-c", "pieces = []\nwhile True: pieces.append(b'a' * 2**20)"],
    "many_memories": ["bash", "-c", "for n in 1 2 3 4; do head -c 60M /dev/zero | tail -c 60M | sleep 30 & done; wait"],
    "loop": ["bash", "-c", "while :; do :; done"],
    "loops": ["bash", "-c", "for n in 1 2 3; do (while :; do :; done) & done; sleep 30"],
    "orphans": ["bash", "-c", "(while :; do :; done &); sleep 30"],
    "files": ["bash", "-c", "for n in 1 2 3; do head -c 8M /dev/zero > file-$n; done; sleep 30"],
    "honest": ["bash", "-c", "echo hello | cat > said; sleep 0.2; exit 3"],
}


def main() -> None:
    running = {}
    for name in sys.argv[1:]:
        Path(name).mkdir()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running[name] = subprocess.Popen(WAYS[name], cwd=name, start_new_session=True, **quiet)
    found = {name: process.wait() for name, process in running.items()}
    time.sleep(0.1)
    print(json.dumps({name: [status, session_cage.cause_of(name)] for name, status in found.items()}), flush=True)


if __name__ == "__main__":
    main()
