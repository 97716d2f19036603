"""Settings of sessions, in which environments with state play their episodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from echo_hub.config.section import Section


class SessionsConfig(Section):
    """Sessions of environments with state. Each episode has one, from its first turn to its end. Tasks without state
    need none."""

    most: Annotated[int, Field(ge=1, le=4096)] = 64
    """Largest number of sessions that are open at once. The hub opens a group only while enough sessions are free."""
    python: Annotated[str, Field(max_length=4096)] = ""
    """Path of the Python interpreter that has the environment's package, such as textarena or verifiers; empty = the
    hub's own interpreter. The interpreter does not need Echo's packages."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Limit in MB on the memory that each session's process may allocate; Linux only."""
    disk_mb: Annotated[int, Field(ge=1)] = 256
    """Limit in MB on the files of a session."""
    step_cpu_s: Annotated[float, Field(gt=0)] = 60.0
    """Limit in seconds on the processor time that a session uses for one step."""
    processes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Limit on the number of processes and threads of a session at a time."""
    trusted: bool = False
    """True = run environments without a cage (sandbox), with all rights of the hub's user. Set it only for environments
    that you trust, on systems that have no cage (docs/operator/operation.md)."""
    open_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Longest time in seconds until a session has begun its episode."""
    step_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Longest time of one step, in seconds. After this time the step is ended, and the session is rebuilt from the
    stored turns."""
    close_timeout_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time in seconds that a session may take to close. After this time it is killed."""
    age_s: Annotated[float, Field(gt=0)] = 86_400.0
    """Age in seconds at which a session is killed. If its episode is still open, the session is rebuilt."""
    losses: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of lost sessions after which an episode ends, with the lowest reward, or with the environment's own reward
    for this case. A loss is a session that cannot be rebuilt, or a rebuilt one that answers differently."""
