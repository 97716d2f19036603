"""Lists the engines, and chooses the best one for this machine. Heavy imports wait until an engine is created."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Final

from echo_node.backends.base import Engine
from echo_node.host.devices import Device
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError
from echo_shared.installation import how_to_install


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """An engine on a device, with the reason for its choice."""

    name: str
    device: str
    reason: str
    unused_gpu: str = ""
    """Reason why this machine's GPU is not used, and the remedy, in one line; empty = a GPU is used, or none would
    help.
    """
    on: Device | None = None
    """The device that the owner has chosen; None = the engine finds its device itself."""

    @property
    def label(self) -> str:
        """Name of the device for the user."""
        return self.device if self.on is None else self.on.name

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which the engine's process sees only its device."""
        return {} if self.on is None else self.on.environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Possibility:
    """An engine on a kind of device. `missing` names what the engine lacks on this machine; None = nothing."""

    choice: BackendChoice
    missing: BackendError | None
    on_request: bool
    """True: used only if the settings name this engine, never chosen automatically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backend:
    module: str
    engine: str
    packages: tuple[str, ...]
    distribution: str
    """Name of the distribution that contains the first of `packages`."""
    extra: str
    """Optional dependencies (extra) of the package echo-swarm that install `packages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    backend: str
    device: str
    fits: Callable[[Hardware], bool]
    reason: str
    needs: str = "GPU"
    """Device that the engine needs, in words for error texts."""
    on_request: bool = False


_BACKENDS: Final = {
    "torch": _Backend(
        module="echo_node.backends.torch_engine",
        engine="TorchEngine",
        packages=("torch", "transformers"),
        distribution="torch",
        extra="cuda",
    ),
    "llama_cpp": _Backend(
        module="echo_node.backends.llama_cpp_engine",
        engine="LlamaCppEngine",
        packages=("llama_cpp", "gguf"),
        distribution="llama-cpp-python",
        extra="cpu",
    ),
    "mlx": _Backend(
        module="echo_node.backends.mlx_engine",
        engine="MlxEngine",
        packages=("mlx", "mlx_lm"),
        distribution="mlx",
        extra="mlx",
    ),
    "vllm": _Backend(
        module="echo_node.backends.vllm_engine",
        engine="VllmEngine",
        packages=("vllm",),
        distribution="vllm",
        extra="vllm",
    ),
}

_VLLM_GPU_BYTES: Final = 12 * 10**9
"""Memory of the smallest GPU for vLLM, which reserves most of it and needs some GB for graphs and kernels. A GPU sold
as 12 GB has slightly more than 12e9 bytes.
"""

_PREFERENCE: Final = (
    _Candidate(
        backend="vllm",
        device="cuda",
        fits=lambda hardware: (
            sys.platform == "linux" and any(gpu.memory_bytes >= _VLLM_GPU_BYTES for gpu in hardware.cuda_gpus)
        ),
        reason="this machine has a CUDA GPU with room for vLLM",
        needs="CUDA GPU of 12 GB on Linux",
    ),
    _Candidate(
        backend="torch",
        device="cuda",
        fits=lambda hardware: bool(hardware.cuda_gpus) and _torch_has_cuda(),
        reason="this machine has a CUDA GPU",
        needs="CUDA GPU",
    ),
    _Candidate(
        backend="mlx",
        device="gpu",
        fits=lambda hardware: hardware.apple_silicon,
        reason="this is Apple silicon",
        needs="Apple silicon",
    ),
    _Candidate(
        backend="llama_cpp",
        device="gpu",
        fits=lambda hardware: _llama_has_gpu(),
        reason="llama.cpp was built for a GPU",
        needs="llama.cpp that was built for a GPU",
    ),
    _Candidate(
        backend="llama_cpp", device="cpu", fits=lambda hardware: True, reason="this machine has no better device"
    ),
    _Candidate(backend="torch", device="cpu", fits=lambda hardware: True, reason="llama.cpp is not installed"),
    # On a CPU, MLX is for tests only: llama.cpp and PyTorch are faster.
    _Candidate(backend="mlx", device="cpu", fits=lambda hardware: True, reason="requested", on_request=True),
)
"""Engines with their devices, best first."""

_GPU_LIBRARY: Final = re.compile(r"(lib)?ggml-(cuda|hip|metal|musa|opencl|sycl|vulkan)\b")
_ONE_OF_SEVERAL: Final = re.compile(r"(lib)?ggml-cpu-")
"""Name of a library of llama.cpp for one type of processor. Only builds that choose their devices at run time contain
such files.
"""
_DRIVER_S: Final = 30.0
"""Seconds within which a GPU's driver must start."""

NAMES: Final = tuple(_BACKENDS)
NO_DEVICE: Final = "no_device"
"""Code of the BackendError for a missing device, which no installation can provide."""


def survey(hardware: Hardware, on: Device | None = None) -> tuple[Possibility, ...]:
    """Return every engine on every kind of device, best first; with `on`, every engine for that device. Requirements
    are looked up in files; no engine is started.
    """
    return tuple(
        Possibility(
            choice=BackendChoice(name=candidate.backend, device=candidate.device, reason=candidate.reason, on=on),
            missing=_missing(candidate, hardware),
            on_request=candidate.on_request,
        )
        for candidate in _PREFERENCE
        if on is None or _reaches(candidate, on)
    )


def _reaches(candidate: _Candidate, device: Device) -> bool:
    """Return True if this engine can use a device of that kind."""
    if candidate.device == "gpu" and candidate.backend == "llama_cpp":
        return device.api == "gpu" or device.api in _llama_gpu_kinds()
    return candidate.device == device.api


def common_backend(
    devices: Mapping[str, tuple[Device, Hardware]],
    requested: str,
    measured: Mapping[str, Mapping[tuple[str, str], float]],
) -> str:
    """Return the best backend that all devices can use. `devices`: each device with the hardware that its engine sees,
    by name; `measured`: see `choose`, by device. If all usable backends are measured, the backend with the largest sum
    of speeds is the best.

    Raises BackendError if no backend suits all devices.
    """
    rates: dict[str, float] = {}
    on, here = next(iter(devices.values()))
    for possible in survey(here, on):
        name = possible.choice.name
        if requested != name and (requested != "auto" or possible.on_request):
            continue
        try:
            found = {device: choose(seen, name, on=one) for device, (one, seen) in devices.items()}
        except BackendError:
            continue
        each = [measured.get(device, {}).get((one.name, one.device), -1.0) for device, one in found.items()]
        rates[name] = sum(each) if min(each) >= 0 else -1.0
    if not rates:
        choose(here, requested, on=on)  # This raises BackendError if not even the device `here` has a usable engine.
        raise BackendError(
            "No sampling engine can use all devices of this node.",
            got=f"devices {', '.join(devices)}, backend {requested}",
            do="Name fewer devices. Run another node on the others, with its own --data-dir.",
        )
    if min(rates.values()) >= 0.0 and max(rates.values()) > 0.0:
        return max(rates, key=lambda name: rates[name])
    return next(iter(rates))


def choose(
    hardware: Hardware,
    requested: str = "auto",
    measured: Mapping[tuple[str, str], float] = MappingProxyType({}),
    failures: Mapping[tuple[str, str], str] = MappingProxyType({}),
    *,
    on: Device | None = None,
) -> BackendChoice:
    """Return the best usable backend, or the best device for the requested one; with `on`, only for that device. Raises
    BackendError if none is usable.

    `measured`: tokens per second by (name, device); 0 = failed. If all usable backends are measured, the fastest one is
    the best. `failures`: error texts by (name, device). Failed backends are the last choice.
    """
    if requested != "auto" and requested not in _BACKENDS:
        raise BackendError("There is no such backend.", got=requested, do=f"Use auto, {' or '.join(NAMES)}.")
    wanted = [
        possible
        for possible in survey(hardware, on)
        if requested == possible.choice.name or (requested == "auto" and not possible.on_request)
    ]
    usable = [possible.choice for possible in wanted if possible.missing is None]
    if not usable and on is not None:
        raise _nothing_usable_on(on, requested, [possible.missing for possible in wanted])
    if not usable:
        raise _nothing_usable(hardware, requested, [possible.missing for possible in wanted])
    best = next((choice for choice in usable if (choice.name, choice.device) not in failures), usable[0])
    rates = [measured.get((choice.name, choice.device), -1.0) for choice in usable]
    if requested != "auto":
        best = replace(best, reason="requested")
    elif len(usable) > 1 and min(rates) >= 0.0 and max(rates) > 0.0:
        rate, best = max(zip(rates, usable, strict=True), key=itemgetter(0))
        best = replace(best, reason=f"measured the fastest: {rate:.0f} tokens/s")
    if best.device != "cpu" or on is not None:
        return best
    return replace(best, unused_gpu=_unused_gpu(hardware, wanted, failures))


def _unused_gpu(hardware: Hardware, wanted: Sequence[Possibility], failures: Mapping[tuple[str, str], str]) -> str:
    """Return why this machine's GPU is not used, and the remedy. "" = no GPU would help, or a GPU works but was
    measured slower than the processor.
    """
    if hardware.silent_gpu:
        return (
            "The NVIDIA GPU is not used, only the processor: its driver does not answer. Repair the driver until"
            " nvidia-smi lists the GPU. Start a container with --gpus all."
        )
    names = [gpu.name for gpu in hardware.cuda_gpus] or (["Apple silicon"] if hardware.apple_silicon else [])
    on_gpu = [possible for possible in wanted if possible.choice.device != "cpu"]
    whys = [_why_unused(possible, failures.get((possible.choice.name, possible.choice.device))) for possible in on_gpu]
    if not names or not on_gpu or None in whys:
        return ""
    told = [why for why in whys if why] or ["no requested engine can use it."]
    return f"The GPU ({names[0]}) is not used, only the processor: {' '.join(told)}"


def _why_unused(possible: Possibility, failure: str | None) -> str | None:
    """Return in sentences why this engine does not use the GPU. "" = the engine does not suit this machine; None = the
    engine could use the GPU.
    """
    choice, missing = possible.choice, possible.missing
    if missing is None:
        do = "Repair it, then run: echo-node bench."
        return None if failure is None else f"{choice.name} on {choice.device} failed ({failure}). {do}"
    # Do not report vLLM: it is needed only in place of PyTorch's engine.
    if missing.code == NO_DEVICE or choice.name == "vllm":
        return ""
    return " ".join(part for part in (missing.what, missing.do) if part)


def _nothing_usable(hardware: Hardware, requested: str, missing: Sequence[BackendError | None]) -> BackendError:
    if requested == "auto":
        extra = "cuda" if hardware.cuda_gpus else "mlx" if hardware.apple_silicon else "cpu"
        return BackendError(
            "No sampling backend is installed.", got=f"none of {', '.join(NAMES)}", do=how_to_install(extra)
        )
    # Prefer an error that an installation can solve to the error of a missing device.
    return min((error for error in missing if error is not None), key=lambda error: error.code == NO_DEVICE)


def _nothing_usable_on(device: Device, requested: str, missing: Sequence[BackendError | None]) -> BackendError:
    known = [error for error in missing if error is not None]
    why = min(known, key=lambda error: error.code == NO_DEVICE, default=None)
    wanted = "a sampling engine" if requested == "auto" else f"the {requested} backend"
    return BackendError(
        f"The device {device.name} cannot be used: {wanted} for it is missing.",
        got="" if why is None else " ".join(part for part in (why.what, why.got) if part),
        do=None if why is None else why.do,
        code=NO_DEVICE if why is None else why.code,
    )


def _missing(candidate: _Candidate, hardware: Hardware) -> BackendError | None:
    name, backend = candidate.backend, _BACKENDS[candidate.backend]
    fits, blind = candidate.fits(hardware), (name, candidate.device) == ("torch", "cuda") and bool(hardware.cuda_gpus)
    if not fits and not blind:
        return BackendError(f"The {name} backend has no device here.", got=f"no {candidate.needs}", code=NO_DEVICE)
    absent = [package for package in backend.packages if not _is_present(package)]
    if absent:
        return BackendError(
            f"The {name} backend is not installed.", got=f"no {', '.join(absent)}", do=how_to_install(backend.extra)
        )
    if fits:
        return None
    return BackendError(
        f"The {name} backend cannot use the GPU.",
        got="a build of PyTorch without CUDA",
        do="Install PyTorch's build for CUDA: https://pytorch.org/get-started/locally/",
    )


def make_engine(name: str) -> Engine:
    """Create an unopened engine. Imports the engine's library."""
    backend = _BACKENDS[name]
    engine: Engine = getattr(importlib.import_module(backend.module), backend.engine)()
    return engine


def packages(name: str) -> tuple[str, ...]:
    return _BACKENDS[name].packages


def reinstall(name: str) -> str:
    """Return the command that reinstalls the backend's packages. Blocks the calling thread for tenths of a second."""
    distributions = [found for package in packages(name) for found in _distributions().get(package, [package])]
    return f"{sys.executable} -m pip install --force-reinstall --no-deps {' '.join(sorted(set(distributions)))}"


def reinstall_llama_with_rpc() -> str:
    """Return the shell command that rebuilds llama.cpp's package with RPC, for this platform."""
    package = f"llama-cpp-python=={importlib.metadata.version('llama-cpp-python')}"
    pip = f"{sys.executable} -m pip install --force-reinstall --no-cache-dir --no-deps {package}"
    if sys.platform == "win32":
        return f"$env:CMAKE_ARGS='-DGGML_RPC=ON'; {pip}"
    return f'CMAKE_ARGS="-DGGML_RPC=ON" {pip}'


def software(name: str) -> str:
    """Return name and version of the backend's library. May block for some tenths of a second."""
    try:
        usual = importlib.metadata.distribution(_BACKENDS[name].distribution)
        return f"{usual.name} {usual.version}"
    except importlib.metadata.PackageNotFoundError:
        distributions = _distributions().get(packages(name)[0], [])
        return ", ".join(f"{found} {importlib.metadata.version(found)}" for found in sorted(set(distributions)))


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return, for each importable package, the names of the distributions that contain it."""
    return importlib.metadata.packages_distributions()


def _is_present(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _torch_has_cuda() -> bool:
    """Return True if the installed torch was built for CUDA, by its version file, because importing torch takes
    seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b[^=\n]*=\s*['\"]", version.read_text(), re.MULTILINE) is not None


def _llama_has_gpu() -> bool:
    """Return True if the installed llama.cpp can use a GPU here. This follows from the GPU libraries among its files; a
    build for all kinds of machines is also asked, in a child process, whether it finds a GPU.
    """
    if not _llama_gpu_kinds():
        return False
    return not any(_ONE_OF_SEVERAL.match(name) for name in _llama_libraries()) or _llama_finds_gpu()


def _llama_libraries() -> list[str]:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return []
    return [path.name for path in Path(spec.origin).with_name("lib").glob("*ggml-*")]


def _llama_gpu_kinds() -> frozenset[str]:
    """Return the kinds of GPU for which the installed llama.cpp was built, such as cuda and vulkan."""
    return frozenset(found[2] for name in _llama_libraries() if (found := _GPU_LIBRARY.match(name)))


def vulkan_devices() -> int:
    """Return the number of GPUs that llama.cpp reaches through Vulkan. Blocks the calling thread for seconds."""
    return _llama_vulkan_devices() if "vulkan" in _llama_gpu_kinds() else 0


@cache
def _llama_vulkan_devices() -> int:
    code = "from echo_shared.gguf.llama_cpp_devices import gpu_names; print(*gpu_names())"
    try:
        asked = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_DRIVER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(name.startswith("Vulkan") for name in asked.stdout.split())


@cache
def _llama_finds_gpu() -> bool:
    code = "from echo_shared.gguf.llama_cpp_devices import has_gpu; raise SystemExit(not has_gpu())"
    try:
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=_DRIVER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
