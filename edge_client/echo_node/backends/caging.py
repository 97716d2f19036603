"""The cage (sandbox) of an engine: the files, ports and devices that its process may use, and its setup.

A hub's data reaches an engine as files and messages. The cage lets an engine read only the files of its model and its
libraries, and write only below the directory of its conversions. An engine whose model is spread over several machines
also connects to the helpers, the machines that hold the other parts.
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
from echo_node.host.gpu_nodes import make_nodes
from echo_node.lending.pairing import HelperAddress
from echo_node.lending.tunnel import LOOPBACK
from echo_shared.cage.description import Cage, CageMode, Held
from echo_shared.cage.entering import enter
from echo_shared.cage.leeway import BY_NAME, SEALED, Leeway
from echo_shared.errors import BackendError
from echo_shared.process.user_variables import user_variables

CAGED_ENVIRONMENT: Final[Mapping[str, str]] = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of an engine's process at its start. It stops numpy from starting threads before the process is in its
cage.
"""
NOT_CAGED: Final = "not_caged"
"""Code of the BackendError for an engine that requires a complete cage (sandbox) and got an incomplete one."""

UNCAGED: Final[Mapping[str, str]] = {"vllm": "vLLM starts programs that compile code"}
"""Backends that run without a cage, with the reason."""
_CACHES: Final = (
    *("CUDA_CACHE_PATH", "__GL_SHADER_DISK_CACHE_PATH", "MESA_SHADER_CACHE_DIR", "AMD_COMGR_CACHE_DIR"),
    *("NEO_CACHE_DIR", "SYCL_CACHE_DIR", "XDG_CACHE_HOME"),
)
"""Variables that name the compile caches of GPU drivers. An engine gets its own caches, because other programs trust
the default ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CageTerms:
    """Settings of the cage (sandbox) for an engine's process."""

    mode: CageMode = "auto"
    policies: Path | None = None
    """Parent directory of the adapters, which the engine may read. The engine may always read the base model's
    directory.
    """
    leeway: Leeway = SEALED
    """The narrowest cage (sandbox) in which this machine's GPU driver works, found by `gpu_cage`."""

    def to_frame(self) -> dict[str, Any]:
        policies = None if self.policies is None else str(self.policies)
        return {"mode": self.mode, "policies": policies, "leeway": self.leeway.name}

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> CageTerms:
        policies = frame["policies"]
        directory = None if policies is None else Path(policies)
        return cls(mode=frame["mode"], policies=directory, leeway=BY_NAME[frame["leeway"]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Caged:
    """An engine's settings for use inside its cage, and the protections that are in force."""

    held: Held
    settings: EngineSettings


def cage_engine(backend: str, base_dir: Path, derived_dir: Path, settings: EngineSettings, terms: CageTerms) -> Caged:
    """Put this process into an engine's cage. Call this before any thread starts and before the engine is created.

    Raises BackendError if a required cage is incomplete, OSError if `derived_dir` cannot be created.
    """
    for variable in CAGED_ENVIRONMENT:
        # Remove these limits on threads: libraries that are loaded from here on may start threads.
        os.environ.pop(variable, None)
    if terms.mode == "off":
        return Caged(held=Held.to_nothing("the settings turn it off"), settings=settings)
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
            "The engine needs a complete cage, and this system cannot provide one.",
            got=held.sentence,
            do="Set cage to auto to accept an incomplete cage, or choose another backend.",
            code=NOT_CAGED,
        )
    return Caged(held=held, settings=settings)


def cage_trial(backend: str, device: str, scratch: str, mode: CageMode, leeway: str = SEALED.name) -> Held:
    """Put this process into the cage of an engine with this backend and device. The directory `scratch` takes the place
    of the engine's directories.
    """
    where, terms = Path(scratch), CageTerms(mode=mode, leeway=BY_NAME[leeway])
    return cage_engine(backend, where, where, EngineSettings(device=device), terms).held


def _linked(directory: Path) -> Iterator[Path]:
    """Yield the symbolic links below the directory. A cage allows the files to which they lead: Hugging Face's cache
    stores a model's files elsewhere, behind links.
    """
    for path, folders, files in os.walk(directory, followlinks=True):
        yield from (link for name in files if (link := Path(path, name)).is_symlink())
        # Skip links from a directory to one of its parents: the walk would never end.
        above = {parent.resolve() for parent in (Path(path), *Path(path).parents)}
        folders[:] = [name for name in folders if Path(path, name).resolve() not in above]


def _packages(backend: str) -> Iterator[Path]:
    """Yield the directories of the backend's libraries, which the cage must allow. Those of an editable installation
    lie outside sys.path.
    """
    for name in registry.packages(backend) if backend in registry.NAMES else ():
        spec = importlib.util.find_spec(name)
        yield from map(Path, () if spec is None else spec.submodule_search_locations or ())


def _prepare(derived_dir: Path, *, gpu: bool) -> None:
    """Redirect caches and temporary files of libraries into the engine's own directory, or turn them off."""
    # Set the user's name and home directory as variables: the cage hides the system file that lists them.
    os.environ.update(user_variables())
    os.environ.setdefault("HOME", str(derived_dir))
    os.environ["TMPDIR"] = os.environ["TEMP"] = os.environ["TMP"] = str(derived_dir)
    tempfile.tempdir = None  # Clear tempfile's cached directory, so that it reads the new TMPDIR.
    if gpu:
        make_nodes()
        caches = derived_dir / "driver-caches"
        caches.mkdir(exist_ok=True)
        os.environ.update(dict.fromkeys(_CACHES, str(caches)))
    else:
        os.environ["MLX_DISABLE_COMPILE"] = "1"  # On a CPU, MLX would start a compiler.


def _with_doors(settings: EngineSettings) -> tuple[EngineSettings, tuple[int, ...]]:
    """Resolve the helpers' names, and open a listening loopback socket for each helper. Return the changed settings,
    and the TCP ports to which the cage must allow connections.
    """
    addresses = [_found(HelperAddress.parse(helper)) for helper in settings.helpers]
    doors = [socket.create_server((LOOPBACK, 0)) for _ in addresses]
    ports = [address.port for address in addresses] + [door.getsockname()[1] for door in doors]
    helpers = tuple(address.with_code for address in addresses)
    return replace(settings, helpers=helpers, doors=tuple(door.detach() for door in doors)), tuple(ports)


def _found(address: HelperAddress) -> HelperAddress:
    """Return the address with an IP address as host, because the cage allows no DNS query. A name that cannot be
    resolved stays; the engine then reports it.
    """
    with suppress(OSError):
        known = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        _, _, _, _, where = min(known, key=lambda one: one[0] != socket.AF_INET)
        return replace(address, host=str(where[0]))
    return address
