"""Landlock (a Linux sandbox) must restrict all that its version (ABI) can restrict, for each version up to this
kernel's. Each case runs in a short-lived process.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from echo_shared.cage import landlock

if sys.platform != "linux":
    pytest.skip("Linux alone has Landlock", allow_module_level=True)
try:
    NEWEST = landlock.abi()
except OSError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)

SCRIPT = """
import json, os, socket, sys
from pathlib import Path
from echo_shared.cage import interpreter, landlock

def outcome(function):
    try:
        function()
    except OSError as error:
        return error.errno
    return 0

version, port, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
own, others = directory / "own", directory / "others"
rules = dict.fromkeys(interpreter.directories(), landlock.READ)
rules |= {own: landlock.WRITE, directory / "model": landlock.READ, directory / "missing": landlock.READ}
landlock.restrict(version, rules, (port,))
print(json.dumps({
    "write": outcome(lambda: (own / "new").write_bytes(b"x")),
    "write elsewhere": outcome(lambda: (others / "new").write_bytes(b"x")),
    "read": outcome((directory / "model").read_bytes),
    "read elsewhere": outcome((others / "file").read_bytes),
    "empty": outcome(lambda: os.truncate(directory / "model", 0)),
    "start": outcome(lambda: os.execv("/bin/true", ["true"])),
    "connect": outcome(lambda: socket.create_connection(("127.0.0.1", port))),
    "connect elsewhere": outcome(lambda: socket.create_connection(("127.0.0.1", int(sys.argv[4])))),
    "bind": outcome(lambda: socket.create_server(("127.0.0.1", 0))),
    "signal": outcome(lambda: os.kill(os.getppid(), 0)),
}))
"""
EACCES, EPERM = 13, 1


@pytest.mark.parametrize("version", range(1, NEWEST + 1))
def test_an_older_abi_restricts_what_it_knows(version: int, tmp_path: Path) -> None:
    for made in ("own", "others"):
        (tmp_path / made).mkdir()
    (tmp_path / "others" / "file").write_bytes(b"private")
    (tmp_path / "model").write_bytes(b"weights")
    with socket.create_server(("127.0.0.1", 0)) as known, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(server.getsockname()[1]) for server in (known, other)]
        command = [sys.executable, "-c", SCRIPT, str(version), ports[0], str(tmp_path), ports[1]]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(said.stdout) == {
        "write": 0,
        "write elsewhere": EACCES,
        "read": 0,
        "read elsewhere": EACCES,
        "empty": EACCES if version >= landlock.TRUNCATING_ABI else 0,
        "start": EACCES,
        "connect": 0,
        "connect elsewhere": EACCES if version >= landlock.PORTS_ABI else 0,
        "bind": EACCES if version >= landlock.PORTS_ABI else 0,
        "signal": EPERM if version >= landlock.SCOPES_ABI else 0,
    }
