"""`echo-node lend`: holds and computes a part of a model for a node on another machine.

The device server is a child process. It starts for one node and ends with that node's connection, so an idle helper
uses no memory. It listens only on loopback, behind `lending.tunnel`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from echo_node.backends import registry
from echo_node.host import hardware
from echo_node.host.paths import NodePaths
from echo_node.host.signals import stop_signals
from echo_node.lending.pairing import HelperAddress, Pairing
from echo_node.lending.tunnel import START_S, DeviceRelay, Lent
from echo_shared.errors import BackendError
from echo_shared.process import process_memory
from echo_shared.process.child import Child, Frame

log = logging.getLogger(__name__)

_STOP_S: Final = 3.0
_LOOK_S: Final = 1.0
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Address and limits of the lent device."""

    host: str | None
    """Address on which this machine accepts nodes; None = on all interfaces."""
    port: int
    threads: int
    """CPU threads of the lent device; 0 = one for each physical core."""
    memory_bytes: int
    """Memory limit of the lent device in bytes; 0 = all memory that is free when a node connects."""


class _Stopping:
    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def request_stop(self, reason: str) -> None:
        log.info("Stopping: %s.", reason)
        self.requested.set()


class Helper:
    """This machine as a helper: it lends its device to one node at a time."""

    def __init__(self, paths: NodePaths, lending: Lending) -> None:
        self._paths = paths
        self._lending = lending

    async def run(self) -> None:
        """Lend until a signal arrives. Raises EchoError if this machine cannot lend."""
        # This raises BackendError if llama.cpp is not installed.
        registry.choose(await asyncio.to_thread(hardware.detect), "llama_cpp")
        async with self._lend() as lent:
            log.info("llama.cpp %s is ready; %.1f GiB can be lent.", lent.release, sum(lent.free_bytes) / _GIB)
        pairing = Pairing.load_or_create(self._paths.data_dir / "lend.pem")
        relay = DeviceRelay(pairing, self._lend)
        stopping = _Stopping()
        with stop_signals(stopping):
            async with relay.listening(self._lending.host, self._lending.port) as port:
                address = HelperAddress(host=self._lending.host or _own_address(), port=port, code=pairing.code)
                log.info("Lending to one node at a time. There: echo-node join URL --with %s#%s", address, pairing.code)
                await stopping.requested.wait()

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[Lent]:
        """Run a device server for one node. Raises BackendError or ChildExited if it does not start."""
        child = await Child.start(
            "echo_node.backends.llama_cpp_rpc", name="device server's", log=self._paths.logs / "lend-device.log"
        )
        watch: asyncio.Task[None] | None = None
        try:
            lent = await self._start(child)
            if self._lending.memory_bytes:
                watch = asyncio.create_task(self._watch(child), name="memory watch")
            yield lent
        finally:
            if watch is not None:
                watch.cancel()
            await child.stop(timeout_s=_STOP_S)

    async def _start(self, child: Child) -> Lent:
        try:
            async with asyncio.timeout(START_S):
                await child.send({"threads": self._lending.threads})
                frame = await child.receive()
        except TimeoutError as error:
            raise BackendError("The device server does not start.", got=f"nothing after {START_S:.0f} s") from error
        if frame["type"] != "serving":
            raise BackendError(frame["what"], got=frame["got"], do=frame["do"], code=frame["code"])
        return Lent(port=frame["port"], release=frame["release"], free_bytes=self._limited(frame))

    def _limited(self, frame: Frame) -> tuple[int, ...]:
        free_bytes: list[int] = frame["free_bytes"]
        limit, free = self._lending.memory_bytes, sum(free_bytes)
        share = min(1.0, limit / free) if limit and free else 1.0
        return tuple(int(share * amount) for amount in free_bytes)

    async def _watch(self, child: Child) -> None:
        """Kill the device server if a node exceeds the memory limit. Honest nodes stay within the reported
        free memory.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            used = await asyncio.to_thread(process_memory.own_bytes, child.pid)
            if used > self._lending.memory_bytes:
                log.warning("The node used %.1f GiB, more than is lent: it is disconnected.", used / _GIB)
                child.kill()
                return


def _own_address() -> str:
    """Return this machine's address in its network, or its host name if the address is unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends no packet. It only selects this machine's own address.
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return address
