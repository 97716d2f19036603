"""Which engines there are, and which one suits this machine. Nothing heavy is imported until an engine is made."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.backends.base import Engine
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """An engine on a device, and why."""

    name: str
    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backend:
    module: str
    engine: str
    packages: tuple[str, ...]
    extra: str
    """The extra of echo-swarm that installs the packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    backend: str
    device: str
    fits: Callable[[Hardware], bool]
    reason: str


_BACKENDS: Final = {
    "torch": _Backend(
        module="echo_node.backends.torch_engine",
        engine="TorchEngine",
        packages=("torch", "transformers", "peft"),
        extra="cuda",
    ),
    "llama_cpp": _Backend(
        module="echo_node.backends.llama_cpp_engine",
        engine="LlamaCppEngine",
        packages=("llama_cpp", "gguf"),
        extra="cpu",
    ),
}

_PREFERENCE: Final = (
    _Candidate(
        backend="torch",
        device="cuda",
        fits=lambda hardware: bool(hardware.cuda_gpus) and _torch_has_cuda(),
        reason="a CUDA GPU is here",
    ),
    _Candidate(
        backend="llama_cpp", device="cpu", fits=lambda hardware: True, reason="the fastest on this machine's CPU"
    ),
    _Candidate(backend="torch", device="cpu", fits=lambda hardware: True, reason="llama.cpp is not installed"),
)
"""Best first."""

NAMES: Final = tuple(_BACKENDS)


def choose(hardware: Hardware, requested: str = "auto") -> BackendChoice:
    """The best installed backend, or the best device for the requested one. Raises BackendError when there is none."""
    if requested != "auto" and requested not in _BACKENDS:
        raise BackendError("There is no such backend.", got=requested, do=f"Use auto, {' or '.join(NAMES)}.")
    for candidate in _PREFERENCE:
        wanted = requested in ("auto", candidate.backend)
        if wanted and _is_installed(candidate.backend) and candidate.fits(hardware):
            reason = candidate.reason if requested == "auto" else "requested"
            return BackendChoice(name=candidate.backend, device=candidate.device, reason=reason)
    if requested == "auto":
        extra = "cuda" if hardware.cuda_gpus else "cpu"
        raise BackendError(
            "No sampling backend is installed.",
            got=f"none of {', '.join(NAMES)}",
            do=f"pip install 'echo-swarm[{extra}]'",
        )
    missing = [name for name in _BACKENDS[requested].packages if not _is_present(name)]
    raise BackendError(
        f"The {requested} backend is not installed.",
        got=f"no {', '.join(missing)}",
        do=f"pip install 'echo-swarm[{_BACKENDS[requested].extra}]'",
    )


def make_engine(name: str) -> Engine:
    """A new engine, not yet open; imports its library."""
    backend = _BACKENDS[name]
    engine: Engine = getattr(importlib.import_module(backend.module), backend.engine)()
    return engine


def _is_installed(name: str) -> bool:
    return all(_is_present(package) for package in _BACKENDS[name].packages)


def _is_present(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its files: to import it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b[^=\n]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None
