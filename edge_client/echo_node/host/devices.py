"""The devices on which a node's engines run, by their names in the setting `devices`:

    all                 every GPU of the machine
    cuda:N              NVIDIA's GPU number N, as nvidia-smi counts; if CUDA_VISIBLE_DEVICES is set, its entry number N
    GPU-..., MIG-...    an NVIDIA GPU, or a part of one (Multi-Instance GPU), by its id from `nvidia-smi -L`
    vulkan:N            the GPU number N of llama.cpp's build for Vulkan; see GGML_VK_VISIBLE_DEVICES
    gpu                 the GPU of a machine that has no other name for it, such as Apple silicon
    cpu                 the processor

An engine's process sees only its own device: variables of the environment hide the others. So no library of an engine
can allocate memory on another device.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError, ConfigError

ALL: Final = "all"
NOT_HERE: Final = "device_not_here"
"""Code of the BackendError for a device that this machine lacks now."""
_NAME: Final = re.compile(r"all|cpu|gpu|(cuda|vulkan):[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]{4,80}")
_LIST_S: Final = 10.0
_LISTED: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)")
_CUDA: Final = "CUDA_VISIBLE_DEVICES"
_VULKAN: Final = "GGML_VK_VISIBLE_DEVICES"

Api = Literal["cpu", "cuda", "vulkan", "gpu"]
"""Kind of interface through which engines reach a device; "gpu" = any interface to a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that the owner has chosen for an engine."""

    name: str
    """Name in the setting `devices`."""
    api: Api
    title: str = ""
    """Name of the product, if known."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with which a process sees only this device."""
    gpu: Gpu | None = None
    """NVIDIA GPU that is, or contains, the device; None = another kind of device, or unknown."""


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError unless these are names of different devices of one kind, as one node may use."""
    wrong = [name for name in names if _NAME.fullmatch(name) is None]
    if wrong:
        raise ConfigError(
            "This is not the name of a device.",
            got=repr(wrong[0]),
            do="Write all, cpu, gpu, cuda:0, vulkan:0, or an id that `nvidia-smi -L` prints, such as MIG-...",
        )
    if len(set(names)) < len(names) or (ALL in names and len(names) > 1):
        do = "Name each device once; all stands alone."
        raise ConfigError("The list of devices names a device twice.", got=", ".join(names), do=do)
    if len({_api_of(name) for name in names}) > 1:
        raise ConfigError(
            "One node uses one kind of device, because the hub judges a node's rollouts by one kind of numerics.",
            got=", ".join(names),
            do="Name devices of one kind. Run another node on the others, with its own --data-dir.",
        )


def names_here(names: Sequence[str], hardware: Hardware, vulkan: int, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names, with `all` replaced by the names of this machine's GPUs. `vulkan`: number of llama.cpp's Vulkan
    devices; `variables`: this process's environment. May block the calling thread. Raises BackendError if `all` finds
    nothing.
    """
    if tuple(names) != (ALL,):
        return tuple(names)
    visible = _entries(variables.get(_CUDA))
    if visible is not None:
        found = [f"cuda:{number}" for number in range(len(visible))]
    else:
        parts = _parts() if hardware.cuda_gpus else {}
        by_gpu = [parts.get(gpu.uuid) or [f"cuda:{number}"] for number, gpu in enumerate(hardware.cuda_gpus)]
        found = [name for names in by_gpu for name in names]
    found = found or [f"vulkan:{number}" for number in range(vulkan)]
    if not found and hardware.apple_silicon:
        found = ["gpu"]
    if not found:
        do = "Name the devices, or remove the setting: echo-node config unset devices"
        raise BackendError("This machine has no GPU that the node could use.", got="devices = all", do=do)
    return tuple(found)


def find(name: str, hardware: Hardware, variables: Mapping[str, str]) -> Device:
    """Return the device of this name. `variables`: this process's environment. May block the calling thread.

    Raises BackendError with the code NOT_HERE if the machine lacks the device now. For devices other than NVIDIA's,
    this function cannot tell; their engine fails later.
    """
    api = _api_of(name)
    if name == "cpu":
        return Device(name=name, api=api, title=hardware.cpu_name)
    if name == "gpu":
        return Device(name=name, api=api)
    number = name.partition(":")[2]
    if api == "vulkan":
        visible = _entries(variables.get(_VULKAN))
        if visible is not None and int(number) >= len(visible):
            raise _missing(name, [f"vulkan:{n}" for n in range(len(visible))])
        chosen = number if visible is None else visible[int(number)]
        return Device(name=name, api=api, environment={_VULKAN: chosen})
    if name.startswith("cuda:"):
        return _numbered(name, int(number), hardware.cuda_gpus, variables)
    if name.startswith("GPU-"):
        named = [gpu for gpu in hardware.cuda_gpus if gpu.uuid.startswith(name)]
        if not named:
            raise _missing(name, [gpu.uuid for gpu in hardware.cuda_gpus])
        gpu = named[0]
        return Device(name=name, api=api, title=gpu.name, environment={_CUDA: name}, gpu=gpu)
    parts = _parts()
    owner = next((uuid for uuid, ids in parts.items() if name in ids), None)
    if owner is None:
        raise _missing(name, [one for ids in parts.values() for one in ids])
    whole = next((gpu for gpu in hardware.cuda_gpus if gpu.uuid == owner), None)
    title = "part of a GPU" if whole is None else f"part of {whole.name}"
    return Device(name=name, api=api, title=title, environment={_CUDA: name}, gpu=whole)


def _numbered(name: str, number: int, gpus: Sequence[Gpu], variables: Mapping[str, str]) -> Device:
    visible = _entries(variables.get(_CUDA))
    count = len(gpus) if visible is None else len(visible)
    if number >= count or not gpus:
        raise _missing(name, [f"cuda:{n}" for n in range(count)] if gpus else [])
    if visible is None:
        gpu = gpus[number]
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", _CUDA: gpu.uuid or str(number)}
        return Device(name=name, api="cuda", title=gpu.name, environment=environment, gpu=gpu)
    entry = visible[number]
    by_id = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    # Without this order, CUDA numbers the GPUs by their speed, which nvidia-smi does not tell.
    is_by_bus = variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(gpus) == 1
    if not by_id and is_by_bus and entry.isdecimal() and int(entry) < len(gpus):
        by_id = [gpus[int(entry)]]
    known = by_id[0] if by_id else None
    title = "" if known is None else known.name
    return Device(name=name, api="cuda", title=title, environment={_CUDA: entry}, gpu=known)


def _entries(value: str | None) -> list[str] | None:
    """Return the entries of a variable that lists devices; None = the variable is not set."""
    return None if value is None else [entry.strip() for entry in value.split(",") if entry.strip()]


def _api_of(name: str) -> Api:
    if name in ("cpu", "gpu"):
        return "cpu" if name == "cpu" else "gpu"
    return "vulkan" if name.startswith("vulkan:") else "cuda"


def _parts() -> dict[str, list[str]]:
    """Return the ids of the parts (MIG devices) of each GPU, by the GPU's id. Blocks the calling thread."""
    try:
        listed = subprocess.run(
            ("nvidia-smi", "-L"), capture_output=True, text=True, errors="replace", timeout=_LIST_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_listed(listed.stdout)


def parse_listed(output: str) -> dict[str, list[str]]:
    """Parse the output of `nvidia-smi -L`: each GPU's line precedes the lines of its parts."""
    found: dict[str, list[str]] = {}
    parts: list[str] = []
    for uuid in _LISTED.findall(output):
        if uuid.startswith("MIG-"):
            parts.append(uuid)
        else:
            parts = found[uuid] = []
    return found


def _missing(name: str, here: Collection[str]) -> BackendError:
    return BackendError(
        f"The device {name} is not here.",
        got=f"this machine has {', '.join(here)}" if here else "the driver names no such device",
        do="Correct the setting: echo-node config set devices NAME ... If the device vanished, restart the computer.",
        code=NOT_HERE,
    )
