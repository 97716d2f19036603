"""Cages (sandboxes) for a GPU's driver, called steps, from narrow to wide.

Example: NVIDIA's driver creates a Unix socket when CUDA starts. The first step refuses that, and CUDA answers with
error 304; the second step allows it, and CUDA starts. `backends.gpu_cage` finds the first step that works on a machine.

Calls at CUDA's start that sandboxes have refused, as other projects traced them with driver 570 and newer:
- CUDA writes thread names to /proc/self/task/*/comm. EACCES leads to error 304. Every step allows it.
  https://github.com/nolabs-ai/nono/pull/673, https://github.com/NVIDIA/OpenShell/issues/1486
- CUDA opens nvidia-uvm-tools and reads /proc/driver/nvidia-uvm. Every step allows it.
  https://github.com/nolabs-ai/nono/pull/652
- CUDA connects a SOCK_SEQPACKET socket to /tmp/nvidia-mps/control. On ENOENT it starts without MPS.
  https://github.com/NVIDIA/cuda-checkpoint/issues/10
- CUDA binds such a socket to the abstract name cuda-uvmfd-NAMESPACE-PID and listens, for CUDA IPC. A refusal leads to
  error 304. https://forum.snapcraft.io/t/hello-world-cuda-analysis/11250
- CUDA calls memfd_create. Every step allows it. https://github.com/NVIDIA/OpenShell/issues/1696
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from echo_shared.cage.guards import GUARDS, Guard

LocalSockets = Literal["none", "listening", "any"]
"""Unix sockets that a process may use. none: no sockets; listening: SOCK_SEQPACKET sockets, which may bind and listen,
but neither connect nor accept; any: all kinds, which may connect to other programs on this machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leeway:
    """One of the cages (sandboxes) that are tried for a GPU, as rights of the GPU's driver beyond the narrowest
    cage.
    """

    name: str
    what: str
    """The driver's rights, as the end of the sentence "The GPU's driver may ..."."""
    sockets: LocalSockets
    system_files: bool = False
    """True if the driver may read all files outside the user's home, and write to /dev/shm and /tmp."""
    file_rules: bool = True
    """False if this step does without Landlock, which limits files and ports."""
    call_filter: bool = True
    """False if this step does without seccomp, which limits system calls."""
    lacks: tuple[Guard, ...] = ()
    """Guards (limits on the process) that are left out at this step towards a weaker cage."""

    @property
    def why(self) -> str:
        return f'the GPU does not start without this (step "{self.name}"): its driver may {self.what}'


SEALED: Final = Leeway(name="sealed", what="use its devices and read its own files", sockets="none")
NO_CAGE: Final = Leeway(
    name="no cage",
    what="do everything that you may do",
    sockets="any",
    system_files=True,
    file_rules=False,
    call_filter=False,
    lacks=tuple(GUARDS),
)
LEEWAYS: Final = (
    SEALED,
    Leeway(name="listening socket", what="listen on a local socket on which nothing is accepted", sockets="listening"),
    Leeway(name="local sockets", what="connect to other programs of this machine", sockets="any", lacks=("network",)),
    Leeway(
        name="system files",
        what="connect to other programs of this machine, read all files outside your home, and write to /tmp",
        sockets="any",
        system_files=True,
        lacks=("reading", "writing", "network"),
    ),
    Leeway(
        name="no call filter",
        what="make every system call, read all files outside your home, and write to /tmp",
        sockets="any",
        system_files=True,
        call_filter=False,
        lacks=("reading", "writing", "network", "programs", "processes"),
    ),
    Leeway(
        name="no file rules",
        what="read and write all your files, and connect to other programs of this machine",
        sockets="any",
        system_files=True,
        file_rules=False,
        lacks=("reading", "writing", "network"),
    ),
    NO_CAGE,
)
"""All cages (sandboxes) that are tried for a GPU, from narrow to wide."""


BY_NAME: Final = {step.name: step for step in LEEWAYS}
