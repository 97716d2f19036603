"""Tell whether two computations ran on the same kind of machine with the same libraries."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner.device import resolve_device
from echo_shared.sampling.torch_precision import multiplies

_LIBRARIES = ("torch", "transformers", "peft", "numpy")


def machine_digest(device: str) -> str:
    """Return a hash of everything that usually decides the bits of a step: processor or GPU, threads and libraries.

    `device` is the setting learner.device. Equal hashes mean equal machines; the hash hides the machine's properties.
    """
    found = resolve_device(device)
    name = torch.cuda.get_device_name(found) if found.type == "cuda" else _processor()
    # The learner's process chooses its threads by these, if learner.threads is 0.
    threads = (str(os.cpu_count()), os.environ.get("OMP_NUM_THREADS", ""))
    parts = [found.type, name, platform.machine(), *threads]
    parts += [f"{library} {metadata.version(library)}" for library in _LIBRARIES]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def computing_precision(learner: LearnerConfig) -> Literal["float32", "bfloat16"]:
    """Return the precision in which a learner with these settings computes on this machine."""
    if learner.precision != "auto":
        return learner.precision
    device = resolve_device(learner.device)
    return "bfloat16" if device.type == "cuda" and multiplies(device, torch.bfloat16) else "float32"


def _processor() -> str:
    """Return the processor's model name, and the instructions that PyTorch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
