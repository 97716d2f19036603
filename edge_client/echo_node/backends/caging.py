"""The cage that an engine works in: which files, ports and devices it needs, and what is done before it is entered.

What a hub sends reaches an engine as files and messages. It reads its model's files and those of its libraries, and
writes below the directory of its conversions alone. One whose model lies on several machines connects to these.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.host.cage.description import Cage, CageMode, Held
from echo_node.host.cage.entering import enter
from echo_node.host.cage.leeway import BY_NAME, SEALED, Leeway
from echo_node.host.gpu_nodes import make_nodes
from echo_node.lending.pairing import HelperAddress
from echo_node.lending.tunnel import LOOPBACK
from echo_shared.errors import BackendError
from echo_shared.user_variables import user_variables

CAGED_ENVIRONMENT: Final[Mapping[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}
"""With which an engine's process is started: numpy's threads would run before there is a cage around them."""
NOT_CAGED: Final = "not_caged"
"""Code of the BackendError of an engine that must have a cage, and has none."""

UNCAGED: Final[Mapping[str, str]] = {"vllm": "vLLM compiles by programs that it starts"}
"""Backends that have no cage, and why."""
_CACHES: Final = (
    *("CUDA_CACHE_PATH", "__GL_SHADER_DISK_CACHE_PATH", "MESA_SHADER_CACHE_DIR", "AMD_COMGR_CACHE_DIR"),
    *("NEO_CACHE_DIR", "SYCL_CACHE_DIR", "XDG_CACHE_HOME"),
)
"""Where GPU drivers keep what they have compiled; other programs of the user read theirs, and trust it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Under which an engine is started."""

    mode: CageMode = "auto"
    policies: Path | None = None
    """The directory below which adapters lie; the base model's is read in any case."""
    leeway: Leeway = SEALED
    """What a GPU's driver needs on this machine, as `gpu_cage` has found."""

    def to_frame(self) -> dict[str, Any]:
        policies = None if self.policies is None else str(self.policies)
        return {"mode": self.mode, "policies": policies, "leeway": self.leeway.name}

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> Terms:
        policies = frame["policies"]
        directory = None if policies is None else Path(policies)
        return cls(mode=frame["mode"], policies=directory, leeway=BY_NAME[frame["leeway"]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Caged:
    """An engine's settings in its cage, and what it is held to."""

    held: Held
    settings: EngineSettings


def cage_engine(backend: str, base_dir: Path, derived_dir: Path, settings: EngineSettings, terms: Terms) -> Caged:
    """Puts this process into the cage of an engine that is not yet made; before it has threads.

    Raises BackendError when there must be a cage and something of it is missing, and OSError when `derived_dir` cannot
    be made.
    """
    for variable in CAGED_ENVIRONMENT:
        os.environ.pop(variable, None)  # What is loaded from here on may have threads.
    if terms.mode == "off":
        return Caged(held=Held.to_nothing("the settings say so"), settings=settings)
    if backend in UNCAGED:
        held = Held.to_nothing(UNCAGED[backend])
    else:
        derived_dir.mkdir(parents=True, exist_ok=True)
        reads = [base_dir, *_linked(base_dir), *_packages(backend)]
        reads += [] if terms.policies is None else [terms.policies]
        gpu = settings.device != "cpu"
        _prepare(derived_dir, gpu=gpu)
        settings, ports = _with_doors(settings)
        cage = Cage(reads=tuple(reads), writes=(derived_dir,), connects=ports, gpu=gpu, leeway=terms.leeway)
        held = enter(cage)
    if terms.mode == "required" and held.lacks:
        raise BackendError(
            "The engine is to run in a cage, and this system does not hold it in one.",
            got=held.sentence,
            do="Set cage to auto, which takes what there is, or choose another backend.",
            code=NOT_CAGED,
        )
    return Caged(held=held, settings=settings)


def cage_trial(backend: str, device: str, scratch: str, mode: CageMode, leeway: str = SEALED.name) -> Held:
    """The cage of such an engine around this process, with `scratch` for its model and its conversions."""
    where, terms = Path(scratch), Terms(mode=mode, leeway=BY_NAME[leeway])
    return cage_engine(backend, where, where, EngineSettings(device=device), terms).held


def _linked(directory: Path) -> Iterator[Path]:
    """Yield the links to files, as a cache of Hugging Face's keeps a model's files elsewhere. What lies next to such a
    file is not read."""
    for path, folders, files in os.walk(directory, followlinks=True):
        yield from (link for name in files if (link := Path(path, name)).is_symlink())
        # A folder that is a link to one of those above it would be walked for ever.
        above = {parent.resolve() for parent in (Path(path), *Path(path).parents)}
        folders[:] = [name for name in folders if Path(path, name).resolve() not in above]


def _packages(backend: str) -> Iterator[Path]:
    """Of the backend's libraries: one that is installed as a link to somewhere else is on no path."""
    for name in registry.packages(backend) if backend in registry.NAMES else ():
        spec = importlib.util.find_spec(name)
        yield from map(Path, () if spec is None else spec.submodule_search_locations or ())


def _prepare(derived_dir: Path, *, gpu: bool) -> None:
    """What libraries write without being asked to, they write beside the engine's conversions, or not at all."""
    os.environ.update(user_variables())  # Who this is stands in a file that the cage does not let be read.
    os.environ.setdefault("HOME", str(derived_dir))
    os.environ["TMPDIR"] = os.environ["TEMP"] = os.environ["TMP"] = str(derived_dir)
    tempfile.tempdir = None  # It is looked for anew.
    if gpu:
        make_nodes()
        caches = derived_dir / "driver-caches"
        caches.mkdir(exist_ok=True)
        os.environ.update(dict.fromkeys(_CACHES, str(caches)))
    else:
        os.environ["MLX_DISABLE_COMPILE"] = "1"  # On a CPU it would compile by a program.


def _with_doors(settings: EngineSettings) -> tuple[EngineSettings, tuple[int, ...]]:
    """With helpers found and doors to them opened, and the TCP ports that the engine must be let connect to."""
    addresses = [_found(HelperAddress.parse(helper)) for helper in settings.helpers]
    doors = [socket.create_server((LOOPBACK, 0)) for _ in addresses]
    ports = [address.port for address in addresses] + [door.getsockname()[1] for door in doors]
    helpers = tuple(address.with_code for address in addresses)
    return replace(settings, helpers=helpers, doors=tuple(door.detach() for door in doors)), tuple(ports)


def _found(address: HelperAddress) -> HelperAddress:
    """By number: names are asked for where no cage reaches. One that nobody knows stays, for the engine to say."""
    with suppress(OSError):
        known = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        _, _, _, _, where = min(known, key=lambda one: one[0] != socket.AF_INET)
        return replace(address, host=str(where[0]))
    return address
