"""Program of an environment's sessions: `python PATH/program.py fork|shared MODULE:FACTORY`, with a socket as stdin.

The program runs in the interpreter that has the environment's package, which need not have Echo's packages or their
libraries. So this folder imports the standard library only, and the adapters in it also their environment's package.

    fork     one process for each session: adapters that hold an environment
    shared   all sessions in this process, on one event loop: adapters that only talk to servers of environments

The hub first sends the options as a JSON line, and gets `{"ready": true}` or `{"failed": TEXT}`. After that, it sends a
line for each new session, with one end of a socket pair; `echo_hub.sessions.inside.calls` describes what is said there.
When the hub ends, its socket closes, and the program ends with all its sessions.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = "echo_hub.sessions.inside"
_HERE: Final = Path(__file__).resolve().parent


def _make_importable() -> None:
    """Make the modules of this folder importable under their full names, without the rest of Echo."""
    parts = _PACKAGE.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        module = types.ModuleType(name)
        module.__path__ = [str(_HERE)] if name == _PACKAGE else []
        sys.modules[name] = module


def _read_opening(control: socket.socket) -> dict[str, Any] | None:
    line = b""
    while not line.endswith(b"\n"):
        part = control.recv(65_536)
        if not part:
            return None
        line += part
    opening: dict[str, Any] = json.loads(line)
    return opening


def main(way: str, adapter: str) -> int:
    """Serve sessions until the hub is gone. Return the exit status."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # Environments may print: send that to stderr.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != _HERE]
    if adapter.startswith(f"{_PACKAGE}."):
        _make_importable()
    opening = _read_opening(control)
    if opening is None:
        return 0
    served = importlib.import_module(f"{_PACKAGE}.{'forking' if way == 'fork' else 'sharing'}")
    try:
        served.serve(control, adapter, opening)
    except ConnectionError:
        return 1  # The hub is gone.
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
