"""Finds the narrowest cage (sandbox) in which an engine starts on this machine's GPU, and caches it.

A child process tries each step of `leeway.LEEWAYS`, from narrow to wide: it enters the cage and computes on the GPU. If
a driver needs the MPS daemon, for example, the steps "sealed" and "listening socket" fail, "local sockets" works, and
the engine gets "local sockets". If the child fails even without a cage, the GPU is unusable. Only working steps are
cached, because the user may repair the driver at any time. Only Linux has steps.
"""

from __future__ import annotations

import logging
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from echo_node.backends import registry
from echo_node.backends.caging import CAGED_ENVIRONMENT, UNCAGED, CageTerms
from echo_node.backends.registry import BackendChoice
from echo_node.host.probing import failure_of
from echo_shared.cage.description import CageMode
from echo_shared.cage.leeway import BY_NAME, LEEWAYS, NO_CAGE, SEALED, Leeway
from echo_shared.errors import BackendError
from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)

GPU_UNUSABLE: Final = "gpu_unusable"
"""Code of the BackendError for a GPU that does not start."""
RULES: Final = 1
"""Version of the rules of all cages (sandboxes), part of the cache key. A new version invalidates all cached results.
"""
KEPT_S: Final = 7 * 86_400.0
"""Seconds for which a cached sandbox (`Leeway`) is used if it lacks a protection. After them, a new search may find a
narrower sandbox.
"""
STARTS: Final[Mapping[str, Sequence[str]]] = {
    "torch": (
        "from echo_node.backends import cuda_driver; cuda_driver.start()",
        "import torch; one = torch.ones(64, 64, device='cuda'); (one @ one).sum().item()",
    ),
    "llama_cpp": (
        "from echo_shared.gguf.llama_cpp_devices import has_gpu\n"
        "if not has_gpu(): raise SystemExit('llama.cpp finds no GPU')",
    ),
}
"""Python code that uses the GPU as each backend does, in parts. Quick parts come first: if CUDA's driver fails, no time
is spent on importing PyTorch.
"""
_MODULES: Final = Path("/sys/module")
_DRIVERS: Final = ("nvidia", "amdgpu", "xe", "i915")

Probe = Callable[[str], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Narrowest sandbox in which an engine starts on this machine's GPU, or the error if it starts in none."""

    leeway: Leeway
    failure: str = ""
    """Error text of starting the GPU without a cage (sandbox); empty = the GPU works."""


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)

    leeway: str
    found_at: float


_ENTRIES: Final = TypeAdapter(dict[str, _Entry])


def _probe(code: str) -> str | None:
    return failure_of(code, env=CAGED_ENVIRONMENT)


class GpuCages:
    """Finds, and caches in a file of the data directory, the narrowest sandbox (`Leeway`) in which each engine starts
    on this machine's GPU. All methods block the calling thread. Disk errors are only logged.
    """

    def __init__(self, file: Path, *, starts: Mapping[str, Sequence[str]] = STARTS, probe: Probe = _probe) -> None:
        self._file = file
        self._starts = starts
        self._probe = probe

    def terms(self, choice: BackendChoice, mode: CageMode, policies: Path | None = None) -> CageTerms:
        """Return the cage settings for starting this engine. Raises BackendError if the GPU does not work."""
        fit = self.find(choice, mode)
        if fit.failure:
            raise BackendError(
                f"The GPU{'' if choice.on is None else f' {choice.label}'} cannot be used by {choice.name}.",
                got=fit.failure,
                do=f"Repair the driver: echo-node doctor says more. To use the processor: {_on_cpu(choice)}.",
                code=GPU_UNUSABLE,
            )
        return CageTerms(mode=mode, policies=policies, leeway=fit.leeway)

    def find(self, choice: BackendChoice, mode: CageMode) -> Fit:
        """Return the narrowest cage (sandbox) of `LEEWAYS` in which the engine starts. Without a cached result this
        takes seconds for each cage tried.
        """
        has_steps = sys.platform == "linux" and choice.device != "cpu" and choice.name in self._starts
        if mode == "off" or not has_steps or choice.name in UNCAGED:
            return Fit(leeway=SEALED)
        key = _key(choice)
        if (known := self._known(key)) is not None:
            return Fit(leeway=known)
        place = 0
        for code in self._starts[choice.name]:
            found = self._first(choice, code, place)
            if isinstance(found, str):
                return Fit(leeway=SEALED, failure=found)
            place = found
        step = LEEWAYS[place]
        if step.lacks:
            log.warning("%s on %s: %s.", choice.name, choice.label, step.why)
        self._remember(key, step)
        return Fit(leeway=step)

    def _first(self, choice: BackendChoice, code: str, place: int) -> int | str:
        """Return the index in `LEEWAYS` of the first cage (sandbox), from index `place` on, in which the engine starts;
        or the error text if the GPU fails even without a cage.
        """
        if self._try(choice, code, LEEWAYS[place]) is None:
            return place
        if (failure := self._try(choice, code, NO_CAGE)) is not None:
            return failure
        last = len(LEEWAYS) - 1
        return next((at for at in range(place + 1, last) if self._try(choice, code, LEEWAYS[at]) is None), last)

    def _try(self, choice: BackendChoice, code: str, step: Leeway) -> str | None:
        """Run `code` in the cage (sandbox) that `step` describes. Return the error text, or None if it succeeds."""
        with tempfile.TemporaryDirectory(prefix="echo-gpu-cage-", ignore_cleanup_errors=True) as scratch:
            arguments = f"{choice.name!r}, {choice.device!r}, {scratch!r}, 'auto', {step.name!r}"
            enter = f"from echo_node.backends.caging import cage_trial; cage_trial({arguments})"
            # Set the variables first: a driver reads them when it is loaded.
            see = f"import os; os.environ.update({dict(choice.environment)!r})\n" if choice.environment else ""
            failure = self._probe(f"{see}{enter}\n{code}")
        log.info("%s on %s, cage %r: %s", choice.name, choice.label, step.name, failure or "it starts")
        return failure

    def _known(self, key: str) -> Leeway | None:
        entry = self._entries().get(key)
        step = None if entry is None else BY_NAME.get(entry.leeway)
        if entry is None or step is None or (step.lacks and time.time() - entry.found_at >= KEPT_S):
            return None
        return step

    def _remember(self, key: str, step: Leeway) -> None:
        entries = {**self._entries(), key: _Entry(leeway=step.name, found_at=time.time())}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._file, _ENTRIES.dump_json(entries, indent=1))
        except OSError as error:
            log.warning("The cage of the GPU's engine cannot be stored: %s: %s", self._file, error.strerror)

    def _entries(self) -> dict[str, _Entry]:
        try:
            return _ENTRIES.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("The cage of the GPU's engine is searched again: %s cannot be read: %s", self._file, error)
            return {}


def _on_cpu(choice: BackendChoice) -> str:
    return "--backend llama_cpp" if choice.name != "llama_cpp" else "llama.cpp built for the processor"


def _key(choice: BackendChoice) -> str:
    """Return the cache key: everything that can change what the driver needs."""
    drivers = [f"{name} {version}" for name in _DRIVERS if (version := _version(name))]
    software = registry.software(choice.name)
    return " | ".join([choice.name, choice.device, software, *drivers, platform.release(), f"rules {RULES}"])


def _version(module: str) -> str:
    try:
        return (_MODULES / module / "version").read_text().strip()
    except OSError:
        return ""  # No driver is loaded, or the kernel includes the driver: the cache key has the kernel's release.
