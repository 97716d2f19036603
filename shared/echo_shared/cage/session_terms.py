"""Rights and limits of an environment's processes in their cage, and the JSON text that carries them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MIB = 2**20

Children = Literal["none", "forks", "programs"]
"""Processes that a process may start. none: no processes; forks: copies of itself, one for each session, which start no
processes; programs: any program that it may read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """Rights and limits of a process that holds sessions, and of all processes that it starts."""

    directory: str
    """The only directory that the processes may write. With `forks`, each session writes only to its own directory
    below it."""
    reads: tuple[str, ...] = ()
    """Further files and directories that the processes may read. Python, its packages and the system's libraries are
    always readable.
    """
    hidden: tuple[str, ...] = ()
    """Files and directories that must not be readable. If one is readable, the process ends at its start."""
    children: Children = "forks"
    connects: tuple[int, ...] = ()
    """TCP ports to which the processes may connect."""
    listens: tuple[int, ...] = ()
    """TCP ports on which the processes may listen."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the processes, besides the hub's harmless ones that `warden.clean` keeps."""
    memory_bytes: int = 1024 * MIB
    """Maximum memory of one session."""
    step_cpu_s: float = 60.0
    """Maximum processor time of one session from one step to the next."""
    processes: int = 64
    """Maximum number of processes and threads of one session at a time; only for `programs`."""
    file_bytes: int = 64 * MIB
    """Maximum size of one file."""
    disk_bytes: int = 256 * MIB
    """Maximum size of all files of one session."""
    files: int = 10_000
    """Maximum number of files and directories of one session."""
    open_files: int = 256
    """Maximum number of open files of one process."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> SessionTerms:
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)
