"""One model on several machines through llama.cpp's RPC backend: the server of a lent device, and the node's split of
layers.

Run as a program, this module is the device server of `echo-node lend`: a child process that serves one client and ends
with its parent. The node gives itself and each helper (a machine that lends its devices) layers in proportion to free
memory. Embedding and output matrix stay on the node, so that only one hidden state per token crosses the network each
way.

llama.cpp ends its process if a helper disappears during a computation. The node survives, because its engine is a child
process.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import llama_cpp
import psutil
from llama_cpp._ctypes_extensions import load_shared_library

from echo_node.backends import registry
from echo_node.host import hardware
from echo_node.lending.pairing import HelperAddress
from echo_node.lending.tunnel import LOOPBACK, Lent, tunnel
from echo_shared.errors import BackendError
from echo_shared.gguf.llama_cpp_devices import LIBRARIES, ggml, load_devices
from echo_shared.process import process_memory
from echo_shared.process.child import ParentPipe

_CPU: Final = 0
_ACCELERATOR: Final = 3
"""Value of ggml_backend_dev_type for accelerators. The values of GPUs lie between _CPU and this one."""
_NICE: Final = 10
_LOOK_S: Final = 0.02
_GIB: Final = 2**30
_OUTPUT_TENSORS: Final = b"^(output|token_embd)"


class _Override(ctypes.Structure):
    """The C struct llama_model_tensor_buft_override of llama.h, which places tensors on devices."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _Ggml:
    """Functions of ggml that llama_cpp does not declare. Raises BackendError if llama.cpp was built without RPC."""

    def __init__(self) -> None:
        load_devices()
        if not llama_cpp.llama_supports_rpc():
            raise BackendError(
                "llama.cpp was installed without RPC, which a model on several devices needs.",
                got=f"llama-cpp-python {llama_cpp.__version__}",
                do=registry.reinstall_llama_with_rpc(),
                code="no_rpc",
            )
        rpc = load_shared_library("ggml-rpc", LIBRARIES)
        devices = ggml()
        base = load_shared_library("ggml-base", LIBRARIES) if sys.platform == "win32" else devices
        pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
        pointers = ctypes.POINTER(pointer)
        sizes = ctypes.POINTER(size)
        self.dev_count = _declare(devices.ggml_backend_dev_count, size)
        self.dev_get = _declare(devices.ggml_backend_dev_get, pointer, size)
        self.dev_type = _declare(base.ggml_backend_dev_type, ctypes.c_int, pointer)
        self.dev_memory = _declare(base.ggml_backend_dev_memory, None, pointer, sizes, sizes)
        self.dev_buffer_type = _declare(base.ggml_backend_dev_buffer_type, pointer, pointer)
        self.reg_dev_get = _declare(base.ggml_backend_reg_dev_get, pointer, pointer, size)
        self.backend_free = _declare(base.ggml_backend_free, None, pointer)
        self.rpc_init = _declare(rpc.ggml_backend_rpc_init, pointer, text, ctypes.c_uint32)
        self.rpc_add_server = _declare(rpc.ggml_backend_rpc_add_server, pointer, text)
        self.rpc_start_server = _declare(rpc.ggml_backend_rpc_start_server, None, text, text, size, size, pointers)

    def gpus(self) -> list[int]:
        return [device for device in self._devices() if _CPU < self.dev_type(device) < _ACCELERATOR]

    def cpu(self) -> int:
        return next(device for device in self._devices() if self.dev_type(device) == _CPU)

    def free_bytes(self, device: int) -> int:
        """Return the device's free memory. For a CPU the system is asked, because ggml reports all memory as free."""
        if self.dev_type(device) == _CPU:
            return psutil.virtual_memory().available
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        return free.value

    def _devices(self) -> list[int]:
        return [self.dev_get(number) for number in range(self.dev_count())]


def _declare(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def share_layers(num_layers: int, free_bytes: Sequence[int]) -> list[int]:
    """Return the number of layers for each device: at least one, the rest in proportion to free memory.

    Raises BackendError if there are more devices than layers.
    """
    spare = num_layers - len(free_bytes)
    if spare < 0:
        raise BackendError(
            "The model has fewer layers than devices.",
            got=f"{num_layers} layers, {len(free_bytes)} devices including this node",
            do="Join with fewer helpers.",
        )
    total = max(1, sum(free_bytes))
    exact = [spare * free / total for free in free_bytes]
    counts = [int(share) for share in exact]
    largest_rest = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in largest_rest[: spare - sum(counts)]:
        counts[number] += 1
    return [1 + count for count in counts]


class Helpers:
    """A node's connections to its helpers, the machines that hold parts of its model. Call `open`, then `place`, load
    the model, and `close` at the end.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helpers", daemon=True)
        self._tunnels = AsyncExitStack()
        self._backends: list[int] = []
        self._devices: list[int] = []
        self._free_bytes: list[int] = []
        self._kept: list[Any] = []

    def open(self, addresses: Sequence[str], doors: Sequence[int] = ()) -> None:
        """Connect to all helpers. `doors`: see `EngineSettings`. Raises BackendError or ConfigError; call `close` even
        then.
        """
        self._thread.start()
        self._ggml = _Ggml()
        # Turn off graph reuse: after an adapter is freed, the server forgets the graph that the client asks it to
        # reuse.
        os.environ["LLAMA_GRAPH_REUSE_DISABLE"] = "1"
        # Turn off backtraces: after the loss of a helper, the last output must be llama.cpp's error, not a debugger's.
        os.environ["GGML_NO_BACKTRACE"] = "1"
        opened: list[socket.socket | None] = [socket.socket(fileno=door) for door in doors]
        opened = opened or [None] * len(addresses)
        for address, door in zip(map(HelperAddress.parse, addresses), opened, strict=True):
            entering = self._tunnels.enter_async_context(tunnel(address, door))
            lent = asyncio.run_coroutine_threadsafe(entering, self._loop).result()
            if lent.release != llama_cpp.__version__:
                raise BackendError(
                    "A helper has another version of llama.cpp than this node.",
                    got=f"{lent.release} on {address}, {llama_cpp.__version__} here",
                    do=f"On the helper: pip install --upgrade llama-cpp-python=={llama_cpp.__version__}",
                    code="helper_version",
                )
            self._attach(lent)

    def _attach(self, lent: Lent) -> None:
        """Connect to a helper and add its devices. Keep the ggml backend of the helper until `close`, because this
        backend holds the only connection.
        """
        endpoint = f"{LOOPBACK}:{lent.port}".encode()
        self._backends.append(self._ggml.rpc_init(endpoint, 0))
        server = self._ggml.rpc_add_server(endpoint)
        self._devices += [self._ggml.reg_dev_get(server, number) for number in range(len(lent.free_bytes))]
        self._free_bytes += lent.free_bytes

    def place(self, params: Any, *, num_layers: int, model_bytes: int, gpu: bool) -> None:
        """Set in `params` how the model's layers are split among the helpers and this machine, which gets the last
        layers.

        `params` is a llama_model_params. It points to arrays that this object owns, so keep the object while `params`
        is in use.
        """
        local = self._ggml.gpus() if gpu else []
        own_bytes = [self._ggml.free_bytes(device) for device in local or [self._ggml.cpu()]]
        free_bytes = [*self._free_bytes, *own_bytes]
        if model_bytes > sum(free_bytes):
            raise BackendError(
                "The model does not fit into the memory of this node and its helpers.",
                got=f"{model_bytes / _GIB:.1f} GiB, {sum(free_bytes) / _GIB:.1f} GiB free",
                do="Add another helper: --with HOST:PORT#CODE. Or lower the precision.",
            )
        counts = share_layers(num_layers, free_bytes)
        devices = [*self._devices, *local]
        split = counts[: len(devices)]
        split[-1] += 1  # llama.cpp counts the output as one more layer.
        params.n_gpu_layers = sum(split)
        params.devices = self._keep((ctypes.c_void_p * (len(devices) + 1))(*devices, None))
        shares = (ctypes.c_float * llama_cpp.LLAMA_MAX_DEVICES)(*split)
        params.tensor_split = shares
        self._kept.append(shares)
        if not local:
            buffer_type = self._ggml.dev_buffer_type(self._ggml.cpu())
            end = _Override(None, None)
            params.tensor_buft_overrides = self._keep((_Override * 2)(_Override(_OUTPUT_TENSORS, buffer_type), end))

    def _keep(self, array: Any) -> Any:
        self._kept.append(array)
        return ctypes.cast(array, ctypes.c_void_p)

    def close(self) -> None:
        """Disconnect from the helpers. Free the model first."""
        for backend in self._backends:
            self._ggml.backend_free(backend)
        self._backends.clear()
        asyncio.run_coroutine_threadsafe(self._tunnels.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def main() -> None:
    """Serve this machine's GPUs, or its CPU if it has none, until the parent closes the pipe or dies."""
    pipe = ParentPipe()
    frame = pipe.receive()
    if frame is None:
        return
    try:
        ggml = _Ggml()
    except BackendError as error:
        pipe.send({"type": "refused", "what": error.what, "got": error.got, "do": error.do, "code": error.code})
        return
    process_memory.go_first()
    _yield_to_owner()
    devices = ggml.gpus() or [ggml.cpu()]
    port = _free_port()
    free_bytes = [ggml.free_bytes(device) for device in devices]
    serving = {"type": "serving", "port": port, "release": llama_cpp.__version__, "free_bytes": free_bytes}
    threading.Thread(target=_announce, args=(pipe, serving), daemon=True).start()
    threads = frame["threads"] or hardware.sensible_threads()
    handles = (ctypes.c_void_p * len(devices))(*devices)
    ggml.rpc_start_server(f"{LOOPBACK}:{port}".encode(), None, threads, len(devices), handles)
    raise SystemExit("ggml's RPC server has ended.")


def _yield_to_owner() -> None:
    if sys.platform == "win32":
        psutil.Process().nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        os.nice(_NICE)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _announce(pipe: ParentPipe, serving: dict[str, Any]) -> None:
    """Report the server's port once it listens, then end the process with the parent: the server itself
    never returns.
    """
    try:
        while not _listens(serving["port"]):
            time.sleep(_LOOK_S)
        pipe.send(serving)
        while pipe.receive() is not None:
            pass
    finally:
        os._exit(0)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


if __name__ == "__main__":
    main()
