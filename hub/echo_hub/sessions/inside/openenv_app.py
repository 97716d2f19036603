"""Serve an OpenEnv application: `PYTHON openenv_app.py MODULE:APP PORT DIRECTORY`. The module is in the directory.

Runs in the interpreter of sessions.python, which need not have Echo's packages. Ends when standard input ends, so that
the server never outlives the process that started it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    try:
        uvicorn = importlib.import_module("uvicorn")
    except ImportError:
        sys.exit(f"There is no uvicorn in {sys.executable}: install openenv there, or set sessions.python.")
    place, port, directory = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.chdir(directory)
    sys.path.insert(0, directory)
    uvicorn.run(place, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
