"""What this machine has, asked of the machine itself; no table of models. What cannot be found out is empty or zero."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_NVIDIA_SMI: Final = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_NVIDIA_SMI_TIMEOUT_S: Final = 10.0
_CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """This machine."""

    cpu_name: str
    physical_cores: int
    usable_cores: int
    """Logical cores that this process may run on."""
    memory_bytes: int
    cuda_gpus: tuple[Gpu, ...]
    apple_silicon: bool

    @property
    def summary(self) -> str:
        """One line for people, at most 128 characters."""
        gib = 2**30
        parts = [f"{gpu.name} {gpu.memory_bytes / gib:.0f} GiB" for gpu in self.cuda_gpus]
        parts.append(f"{self.cpu_name}, {self.physical_cores} cores, {self.memory_bytes / gib:.0f} GiB")
        return "; ".join(parts)[:128]


def detect() -> Hardware:
    """Asks the system; never raises. Takes up to seconds where an NVIDIA driver has to wake up."""
    return Hardware(
        cpu_name=_cpu_name(),
        physical_cores=_physical_cores(),
        usable_cores=_usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        cuda_gpus=_cuda_gpus(),
        apple_silicon=platform.system() == "Darwin" and platform.machine() == "arm64",
    )


def sensible_threads() -> int:
    """For work that fills a core's arithmetic units, where a core's second thread gains nothing."""
    return min(_physical_cores(), _usable_cores())


def _physical_cores() -> int:
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Only Linux has this file.
    return platform.processor() or platform.machine() or "unknown CPU"


def _cuda_gpus() -> tuple[Gpu, ...]:
    try:
        result = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, errors="replace", timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()  # No driver, or one that does not answer: no CUDA.
    return parse_nvidia_smi(result.stdout)


def parse_nvidia_smi(output: str) -> tuple[Gpu, ...]:
    """GPUs from lines of "name, MiB"; a line with no number (shared memory) has 0 bytes."""
    gpus = []
    for line in output.splitlines():
        name, separator, mebibytes = line.rpartition(",")
        if separator:
            memory = mebibytes.strip()
            gpus.append(Gpu(name=name.strip(), memory_bytes=int(memory) * 2**20 if memory.isdecimal() else 0))
    return tuple(gpus)
