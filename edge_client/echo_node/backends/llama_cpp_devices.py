"""llama.cpp's devices, where they are files of their own that are chosen at run time: one for each kind of processor.

Such a build works on every machine, as fast as one that was compiled on it. By itself llama.cpp looks for the files
beside the interpreter and in the current directory, where anybody may have put them; here only the package's own folder
counts. A build with its devices inside needs none of this, and is left alone.
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
"""ggml_backend_dev_type: with memory of its own, and without."""


def ggml() -> Any:
    """The functions of ggml, from the very library that llama.cpp uses: a package holds several copies of it, by its
    names with and without a version, and each would have devices of its own."""
    if sys.platform == "win32":
        return load_shared_library("ggml", LIBRARIES)
    return llama_cpp.llama_cpp._lib  # The linker looks for names in what it was linked with as well.


@cache
def load_devices() -> None:
    """To be called before anything else of llama.cpp's: what it finds out without devices holds for the process.
    Raises BackendError when there is none."""
    count, load = ggml().ggml_backend_reg_count, ggml().ggml_backend_load_all_from_path
    count.restype = ctypes.c_size_t
    load.restype, load.argtypes = None, (ctypes.c_char_p,)
    if count() == 0:
        load(str(LIBRARIES).encode())
    if count() == 0:
        raise BackendError(
            "llama.cpp has no device to compute with, not even the processor.",
            got=f"{LIBRARIES} holds none that works here",
            do="Install the node anew.",
        )


def has_gpu() -> bool:
    """Whether llama.cpp finds a GPU on this machine that it was built for."""
    load_devices()
    find = ggml().ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_int,)
    return any(find(kind) is not None for kind in _GPUS)
