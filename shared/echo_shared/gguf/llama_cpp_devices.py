"""Loads llama.cpp's device libraries, one for each kind of processor, in builds that choose devices at run time.

Such a build works on every machine at full speed. By default llama.cpp also searches next to the interpreter and in the
current directory, where other programs may have put files. This module loads only from the package's own directory. A
build with built-in devices needs no loading.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import llama_cpp
from llama_cpp._ctypes_extensions import load_shared_library

from echo_shared.errors import BackendError

LIBRARIES: Final = Path(llama_cpp.__file__).parent / "lib"
_GPUS: Final = (1, 2)
"""Values of ggml_backend_dev_type: GPU with its own memory, and integrated GPU."""


def ggml() -> Any:
    """Return ggml's functions from the library that llama.cpp itself uses. A package may hold several copies of the
    library, and each copy has its own list of devices.
    """
    if sys.platform == "win32":
        return load_shared_library("ggml", LIBRARIES)
    return llama_cpp.llama_cpp._lib  # The linker also searches the libraries that llama.cpp is linked with.


@cache
def load_devices() -> None:
    """Load the devices. Call this before any other function of llama.cpp, which caches the list of devices.

    Raises BackendError if no device can be loaded.
    """
    count, load = ggml().ggml_backend_reg_count, ggml().ggml_backend_load_all_from_path
    count.restype = ctypes.c_size_t
    load.restype, load.argtypes = None, (ctypes.c_char_p,)
    if count() == 0:
        load(str(LIBRARIES).encode())
    if count() == 0:
        raise BackendError(
            "llama.cpp has no device to compute with, not even the processor.",
            got=f"{LIBRARIES} holds no device library for this machine",
            do="Reinstall the node.",
        )


def has_gpu() -> bool:
    """Return True if llama.cpp was built for a GPU and finds one."""
    load_devices()
    find = ggml().ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    return any(find(kind) is not None for kind in _GPUS)


def gpu_names() -> list[str]:
    """Return the names of the GPUs that llama.cpp finds, such as Vulkan0."""
    load_devices()
    library = ggml()
    count, get, kind, name = (getattr(library, f"ggml_backend_dev_{what}") for what in ("count", "get", "type", "name"))
    count.restype, get.restype, name.restype = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    get.argtypes, kind.argtypes, name.argtypes = (ctypes.c_size_t,), (ctypes.c_void_p,), (ctypes.c_void_p,)
    devices = [get(number) for number in range(count())]
    return [name(device).decode() for device in devices if kind(device) in _GPUS]
