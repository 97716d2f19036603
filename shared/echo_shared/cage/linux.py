"""The cage (sandbox) on Linux, without root: Landlock for files, ports and other processes, seccomp for system calls.

Landlock applies to the calling thread and the threads that it starts later, so a process enters before it starts
threads. From ABI 8 on, Landlock applies to all threads, as seccomp always does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from echo_shared.cage import interpreter, landlock, seccomp
from echo_shared.cage.description import Cage, Held
from echo_shared.cage.guards import Guard
from echo_shared.cage.landlock import DEVICE, READ, WRITE, AccessRights
from echo_shared.cage.leeway import NO_CAGE, SEALED

_TASKS: Final = Path("/proc/self/task")
_SYSTEM: Final = (
    *("/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"),
    *("/etc/localtime", "/etc/locale.alias", "/etc/os-release", "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf"),
    *("/dev/urandom", "/dev/random", "/dev/zero", "/sys"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/zoneinfo", "/proc/vmstat", "/proc/sys"),
)
"""Files that the C library, Python, psutil and hardware detection read."""
_NOTHING: Final = "/dev/null"
_GPU_DEVICES: Final = ("dri", "kfd", "nvidia*", "dxg", "nvhost*", "nvmap", "nvgpu*", "mali*")
"""Device files below /dev, in order: AMD and Intel, AMD, NVIDIA, Windows Subsystem for Linux, Jetson boards, ARM."""
_GPU_FILES: Final = (
    *("proc/driver/nvidia*", "proc/devices", "proc/modules", "proc/filesystems", "proc/version", "proc/bus/pci"),
    *("opt/cuda*", "opt/rocm*", "opt/amdgpu*", "opt/intel", "run/opengl-driver"),
    *("etc/OpenCL", "etc/vulkan", "etc/glvnd", "etc/egl", "etc/nvidia", "etc/drirc", "etc/nv_tegra_release"),
)
"""Files and directories, as paths below the root directory, that GPU drivers read."""
_OWN_THREADS: Final = "/proc/self/task"
"""Directory with the names of this process's threads, to which CUDA writes. All writable files below it concern only
this process.
"""
_SHARED_PLACES: Final = ("/tmp", "/dev/shm")


def enter(cage: Cage) -> Held:
    """Limit this process with Landlock and seccomp, for the rest of its life. See `entering.enter`."""
    leeway = cage.leeway if cage.gpu else SEALED
    if leeway is NO_CAGE:
        return Held.to_nothing(leeway.why)
    lacks: dict[Guard, str] = dict.fromkeys(leeway.lacks, leeway.why)
    by: list[str] = []
    version = _lock_files(cage, by, lacks) if leeway.file_rules else 0
    if leeway.call_filter:
        _filter_calls(cage, by, lacks)
    if cage.connects and leeway.sockets == "listening":
        lacks.setdefault("network", "with helpers, and a GPU whose driver listens, the process could be a TCP server")
    if cage.connects and version < landlock.PORTS_ABI:
        lacks.setdefault("network", "Landlock does not limit ports here: the process could reach any helper's address")
    return Held(by=tuple(by), lacks=lacks)


def _filter_calls(cage: Cage, by: list[str], lacks: dict[Guard, str]) -> None:
    try:
        seccomp.install(tcp=bool(cage.connects), local=cage.leeway.sockets if cage.gpu else "none")
    except OSError as error:
        why = error.strerror or str(error)
        lacks |= {"network": why, "programs": why, "processes": why}
        return
    by.append("seccomp")


def _lock_files(cage: Cage, by: list[str], lacks: dict[Guard, str]) -> int:
    """Apply Landlock. Return Landlock's interface version (ABI), 0 if Landlock failed."""
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
        why = f"{threads - 1} threads were running, and Landlock {version} does not include them"
        lacks |= {"reading": why, "writing": why, "processes": why}
        return 0
    if version < landlock.TRUNCATING_ABI:
        lacks["writing"] = f"with Landlock {version} the process can empty files that it may read"
    return version


def basic_rules(reads: Iterable[Path], read: AccessRights = READ) -> dict[Path, AccessRights]:
    """Return Landlock's rules for a process that runs Python, reads `reads`, and writes nothing. `read`: access rights
    to the files that the process may read.
    """
    rules = dict.fromkeys([*map(Path, _SYSTEM), *interpreter.directories()], read)
    rules |= dict.fromkeys((path.resolve() for path in reads), read)
    rules[Path(_NOTHING)] = READ | AccessRights.WRITE_FILE
    return rules


def _rules(cage: Cage) -> dict[Path, AccessRights]:
    rules = basic_rules(cage.reads)
    if cage.gpu:
        rules |= _gpu_rules(cage)
    return rules | dict.fromkeys((path.resolve() for path in cage.writes), WRITE)


def _gpu_rules(cage: Cage) -> dict[Path, AccessRights]:
    root = Path("/")
    rules = dict.fromkeys((path for pattern in _GPU_FILES for path in root.glob(pattern)), READ)
    if cage.leeway.system_files:
        rules |= dict.fromkeys(interpreter.narrow(root.iterdir()), READ)
        rules |= dict.fromkeys(interpreter.narrow(map(Path, _SHARED_PLACES)), WRITE)
        rules[Path(_NOTHING)] = READ | AccessRights.WRITE_FILE
    rules[Path(_OWN_THREADS)] = READ | AccessRights.WRITE_FILE | AccessRights.TRUNCATE
    devices = (path for pattern in _GPU_DEVICES for path in root.glob(f"dev/{pattern}"))
    return rules | dict.fromkeys(devices, DEVICE)
