"""The cage on Linux, without root: Landlock for files, ports and other processes, seccomp for system calls.

Landlock holds for the thread that asks for it and those that it starts, so a process enters before it has threads; from
its ABI 8 on, and in seccomp, all threads are taken in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo_node.host.cage import interpreter, landlock, seccomp
from echo_node.host.cage.description import Cage, Guard, Held
from echo_node.host.cage.landlock import DEVICE, READ, WRITE, Access

_TASKS: Final = Path("/proc/self/task")
_SYSTEM: Final = (
    *("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"),
    *("/etc/localtime", "/etc/locale.alias", "/etc/os-release", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf"),
    *("/dev/urandom", "/dev/random", "/dev/zero", "/sys"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/zoneinfo", "/proc/vmstat", "/proc/sys"),
)
"""Read by the C library, Python, psutil, and what looks at processor and memory."""
_NOTHING: Final = "/dev/null"
_GPU_DEVICES: Final = ("dri", "kfd", "nvidia*")
"""Below /dev, of AMD, Intel and NVIDIA."""
_GPU_FILES: Final = (
    *("/proc/driver/nvidia", "/proc/devices", "/proc/modules", "/opt/cuda", "/opt/rocm", "/run/opengl-driver"),
    *("/etc/OpenCL", "/etc/vulkan", "/etc/glvnd", "/etc/nvidia"),
)


def enter(cage: Cage) -> Held:
    """See `entering.enter`."""
    lacks: dict[Guard, str] = {}
    by: list[str] = []
    version = _lock_files(cage, by, lacks)
    try:
        seccomp.install(tcp=bool(cage.connects))
        by.append("seccomp")
    except OSError as error:
        why = error.strerror or str(error)
        lacks |= {"network": why, "programs": why, "processes": why}
    if cage.connects and version < landlock.PORTS_ABI:
        lacks.setdefault("network", "Landlock does not limit ports here: any helper's address would do")
    return Held(by=tuple(by), lacks=lacks)


def _lock_files(cage: Cage, by: list[str], lacks: dict[Guard, str]) -> int:
    """Landlock's ABI; 0 where it does not hold."""
    threads = len(list(_TASKS.iterdir()))
    try:
        version = landlock.abi()
        landlock.restrict(version, _rules(cage), cage.connects)
    except OSError as error:
        why = error.strerror or str(error)
        lacks |= {"reading": why, "writing": why, "processes": why}
        return 0
    by.append(f"Landlock {version}")
    if threads > 1 and version < landlock.THREADS_ABI:
        why = f"{threads - 1} threads ran before, which Landlock {version} does not take in"
        lacks |= {"reading": why, "writing": why, "processes": why}
        return 0
    if version < landlock.TRUNCATING_ABI:
        lacks["writing"] = f"with Landlock {version} it can empty the files that it reads"
    return version


def _rules(cage: Cage) -> dict[Path, Access]:
    """What may be done where; later ones count."""
    rules = dict.fromkeys([*map(Path, _SYSTEM), *interpreter.directories()], READ)
    rules |= dict.fromkeys((path.resolve() for path in cage.reads), READ)
    rules[Path(_NOTHING)] = READ | Access.WRITE_FILE
    if cage.gpu:
        devices = [path for pattern in _GPU_DEVICES for path in Path("/dev").glob(pattern)]
        rules |= dict.fromkeys(map(Path, _GPU_FILES), READ) | dict.fromkeys(devices, DEVICE)
    return rules | dict.fromkeys((path.resolve() for path in cage.writes), WRITE)
