"""Enter a cage, then run a Python program in it: `PYTHON launcher.py TERMS NOTES CAUSES PROGRAM ...`.

The warden (`warden.py`, the process that enforces the cage's limits) starts this program. PYTHON may be any
interpreter, also one without Echo's packages. TERMS is the JSON text of the `SessionTerms`; NOTES and CAUSES:
descriptors of the pipes to and from the warden. PROGRAM is a file, or `-m` and a module. PROGRAM can import
`session_cage`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

FAILED_STATUS = 71
"""Exit status of a process that did not get a complete cage."""


def _own_package() -> None:
    """Import `echo_shared` from the directory above this file. Remove this file's own directory, which Python added,
    from the import path: its modules have common names and could hide others.
    """
    root = Path(__file__).resolve().parents[1]
    sys.path[:] = [name for name in sys.path if not name or Path(name).resolve() != root / "cage"]
    spec = importlib.util.spec_from_file_location(
        "echo_shared", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["echo_shared"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["echo_shared"])


def main(arguments: list[str]) -> None:
    text, notes, causes, *program = arguments
    _own_package()
    from echo_shared.cage import session_cage
    from echo_shared.cage.session_terms import SessionTerms

    try:
        listener = session_cage.enter_server(SessionTerms.of_text(text), int(notes), int(causes))
        if listener is not None:
            session_cage.hand_over(listener)
    except OSError as error:
        print(f"The environment was not started: {error.strerror or error}.", file=sys.stderr, flush=True)
        os._exit(FAILED_STATUS)
    sys.modules["session_cage"] = session_cage
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        # Add the program's directory to the import path, as Python itself does when it runs a script.
        sys.path.insert(0, str(Path(program[0]).resolve().parent))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
