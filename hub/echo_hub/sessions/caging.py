"""Commands that start environments in a cage (`echo_shared.cage`, a sandbox), and the error on systems that have no
cage."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from echo_hub.config.sessions_section import SessionsConfig
from echo_shared import cage
from echo_shared.cage import session_cage
from echo_shared.cage.session_terms import MIB, Children, SessionTerms
from echo_shared.errors import ConfigError

_SESSION_FILES, _SERVER_FILES = 256, 4096
"""Limits on open files: for one session's process, and for a server process, which holds one socket for each
session."""
_WARDEN: Final = Path(cage.__path__[0], "warden.py")


def terms_of(
    config: SessionsConfig,
    *,
    directory: Path,
    hidden: Sequence[Path],
    reads: Sequence[Path] = (),
    children: Children = "forks",
    connects: Sequence[int] = (),
    listens: Sequence[int] = (),
) -> SessionTerms:
    """Return what an environment's processes may read, write and use. The settings give the limits.

    Only `directory` is writable. `hidden` are unreadable directories, such as the run's.
    """
    return SessionTerms(
        directory=str(directory.resolve()),
        hidden=tuple(str(one.resolve()) for one in hidden),
        reads=tuple(str(one.resolve()) for one in reads),
        children=children,
        connects=tuple(connects),
        listens=tuple(listens),
        memory_bytes=config.memory_mb * MIB,
        step_cpu_s=config.step_cpu_s,
        processes=config.processes,
        file_bytes=config.disk_mb * MIB,
        disk_bytes=config.disk_mb * MIB,
        open_files=_SESSION_FILES + config.most if children == "forks" else _SERVER_FILES,
    )


def server_command(
    python: str, program: Sequence[str], place: Mapping[str, Any], *, reads: Path, port: int
) -> tuple[str, ...]:
    """Return the command that starts an environment's server in a cage. The server may listen on `port`, but may not
    start a process.

    `place` is what the hub told the adapter's process about the run. The server may read its own code below `reads`.
    Raises ConfigError if the server needs a cage and this system has none.
    """
    config = SessionsConfig.model_validate(place["sessions"])
    terms = terms_of(
        config,
        directory=Path(place["directory"], f"server-{port}"),
        hidden=[Path(one) for one in place["hidden"]],
        reads=[reads, Path(program[0]).parent],
        children="none",
        listens=[port],
    )
    terms = replace(terms, environment={"PYTHONPATH": str(reads)})
    return command(python, program, terms, environment=place["task"], config=config)


def caged(python: str, program: Sequence[str], terms: SessionTerms) -> tuple[str, ...]:
    """Return the command that runs a Python program in a cage. `program` is a file, or "-m" and a module, with its
    arguments.

    The program has the command's standard input, output and error. When the command gets SIGTERM or this process ends,
    the program and all its descendants end. Creates the directory of `terms`.
    """
    Path(terms.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    return (sys.executable, "-I", "-S", str(_WARDEN), terms.to_text(), str(os.getpid()), python, *program)


def command(
    python: str, program: Sequence[str], terms: SessionTerms, *, environment: str, config: SessionsConfig
) -> tuple[str, ...]:
    """Return the command that runs the program of an environment: caged, unless the settings trust the environment.

    Raises ConfigError if the environment needs a cage and this system has none.
    """
    if config.trusted:
        Path(terms.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        return (python, *program)
    if why := session_cage.unsupported(terms):
        raise ConfigError(
            f"The environment {environment} is not part of Echo, and this system cannot keep it in a cage.",
            got=why,
            do="Run the hub on Linux 6.2 or newer (6.12 for environments that start programs), or set sessions.trusted "
            "if you trust the environment with all files of the hub's user.",
        )
    return caged(python, program, terms)
