"""Starts CUDA through the driver's own library: a check of the GPU in tenths of a second, without PyTorch.

https://docs.nvidia.com/cuda/cuda-driver-api/
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

from echo_shared.errors import BackendError

LIBRARY: Final = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_ALLOCATED_BYTES: Final = 2**20


def start() -> None:
    """Start CUDA and allocate memory on the first GPU. Raises BackendError with the driver's message if that fails."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise BackendError(f"CUDA does not start: the driver's library cannot be loaded: {error}") from error
    count, device, context, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(cuda, "cuInit", 0)
    _check(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise BackendError("CUDA does not start: the driver finds no device.")
    _check(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _check(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _check(cuda, "cuCtxSetCurrent", context)
    _check(cuda, "cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_ALLOCATED_BYTES))
    _check(cuda, "cuMemFree_v2", memory)
    _check(cuda, "cuDevicePrimaryCtxRelease_v2", device)


def _check(cuda: Any, name: str, *arguments: Any) -> None:
    status = getattr(cuda, name)(*arguments)
    if status:
        said = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(said))
        meaning = (said.value or b"which has no name").decode()
        raise BackendError(f"CUDA does not start: {name} failed with error {status}: {meaning}")
