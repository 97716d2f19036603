"""This machine's hardware, as the system reports it. Unknown values are empty or zero."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

_NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits")
_NVIDIA_SMI_TIMEOUT_S: Final = 10.0
_NO_NUMBER: Final = ("[N/A]", "[Not Supported]", "N/A")
_ID: Final = re.compile(r"(GPU-[0-9a-fA-F-]+),\s*")
_MOST_DIGITS: Final = 9
_UNLIMITED: Final = 2**31
_UNSAID: Final = (OSError, ValueError, RuntimeError, psutil.Error)
"""Exceptions that psutil raises if the system does not report a value."""
_CPUINFO: Final = Path("/proc/cpuinfo")
_CGROUPS_OF_THIS_PROCESS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PCI: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""First digits of the PCI class of display controllers and 3D controllers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int
    uuid: str = ""
    """The GPU's permanent id, the same after each restart of the machine; empty = unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    cpu_name: str
    physical_cores: int
    usable_cores: int
    """Logical cores that this process may use. In a container, at most the CPU quota, rounded up."""
    memory_bytes: int
    cuda_gpus: tuple[Gpu, ...]
    apple_silicon: bool
    silent_gpu: bool = False
    """True if an NVIDIA GPU is present, but its driver does not answer."""

    @property
    def summary(self) -> str:
        """Description in one line of at most 128 characters."""
        gib = 2**30
        parts = [f"{gpu.name} {gpu.memory_bytes / gib:.0f} GiB" for gpu in self.cuda_gpus]
        parts.append(f"{self.cpu_name}, {self.physical_cores} cores, {self.memory_bytes / gib:.0f} GiB")
        return "; ".join(parts)[:128]

    def only(self, gpus: Iterable[Gpu | None]) -> Hardware:
        """Return the hardware with only these NVIDIA GPUs. None in `gpus` is ignored."""
        wanted = set(gpus)
        return replace(self, cuda_gpus=tuple(gpu for gpu in self.cuda_gpus if gpu in wanted))

    def joined(self, others: Iterable[Hardware]) -> Hardware:
        """Merge views of one machine: return the hardware with the GPUs of every view."""
        gpus = list(self.cuda_gpus)
        for other in others:
            gpus += [gpu for gpu in other.cuda_gpus if gpu not in gpus]
        return replace(self, cuda_gpus=tuple(gpus))


def detect() -> Hardware:
    """Detect the hardware. Never raises. Takes seconds if an NVIDIA driver has to start."""
    gpus = _cuda_gpus()
    return Hardware(
        cpu_name=_cpu_name(),
        physical_cores=_physical_cores(),
        usable_cores=_usable_cores(),
        memory_bytes=_memory_bytes(),
        cuda_gpus=gpus,
        apple_silicon=platform.system() == "Darwin" and platform.machine() == "arm64",
        silent_gpu=not gpus and _has_nvidia_card(),
    )


def sensible_threads() -> int:
    """Return the number of threads for arithmetic work, which gains nothing from a core's second hardware thread."""
    return min(_physical_cores(), _usable_cores())


def _physical_cores() -> int:
    with suppress(*_UNSAID):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    with suppress(*_UNSAID):
        return int(psutil.virtual_memory().total)
    return 0


def _usable_cores() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):
            cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _cgroup_cores()))


def _cgroup_cores() -> int:
    """Return the smallest CPU quota of this process's control groups and their parents, in cores; _UNLIMITED without a
    quota.
    """
    try:
        groups = _CGROUPS_OF_THIS_PROCESS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _UNLIMITED  # Only Linux has /proc/self/cgroup.
    quotas = [_quota(directory) for directory in _cgroup_directories(groups)]
    return math.ceil(min(quotas, default=_UNLIMITED))


def _cgroup_directories(groups: str) -> list[Path]:
    """Return the directories that may hold quotas, including the root, which a container often sees as its
    own group.
    """
    found = []
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator or not (controllers == "" or "cpu" in controllers.split(",")):
            continue
        root = _CGROUPS if controllers == "" else _CGROUPS / controllers
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [root.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return found


def _quota(directory: Path) -> float:
    with suppress(OSError, ValueError):
        return parse_cpu_max((directory / "cpu.max").read_text(encoding="utf-8"))
    with suppress(OSError, ValueError):
        quota = (directory / "cpu.cfs_quota_us").read_text(encoding="utf-8")
        return parse_cpu_max(f"{quota} {(directory / 'cpu.cfs_period_us').read_text(encoding='utf-8')}")
    return _UNLIMITED


def parse_cpu_max(text: str) -> float:
    """Convert "quota period", both in microseconds, to a number of cores. "max" and any other text mean no limit."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s+([0-9]{1,18})\s*", text)
    quota, period = (int(found[1]), int(found[2])) if found else (0, 0)
    return quota / period if quota and period else _UNLIMITED


def _cpu_name() -> str:
    with suppress(OSError):  # A control group without a quota has no such file.
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name") and line.partition(":")[2].strip():
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def _cuda_gpus() -> tuple[Gpu, ...]:
    try:
        result = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, errors="replace", timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()  # Without an NVIDIA driver that answers, CUDA has no GPU.
    return parse_nvidia_smi(result.stdout)


def _has_nvidia_card() -> bool:
    """Return True if the PCI bus has an NVIDIA GPU. Always False on systems other than Linux."""
    for device in _PCI.glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _NVIDIA and kind.startswith(_DISPLAY):
                return True
    return False


def parse_nvidia_smi(output: str) -> tuple[Gpu, ...]:
    """Parse lines of "id, name, MiB" or "name, MiB". A GPU that shares the machine's memory has no number, and gets 0
    bytes.

    Other lines, such as error texts with a comma, are ignored.
    """
    gpus = []
    for line in output.splitlines():
        name, _, memory = (part.strip() for part in line.rpartition(","))
        mebibytes = int(memory) if memory.isascii() and memory.isdigit() and len(memory) <= _MOST_DIGITS else 0
        uuid = found[1] if (found := _ID.match(name)) else ""
        name = name.removeprefix(found[0]) if found else name
        if name and (mebibytes or memory in _NO_NUMBER):
            gpus.append(Gpu(name=name, memory_bytes=mebibytes * 2**20, uuid=uuid))
    return tuple(gpus)
