"""`echo-node lend`: this machine holds a part of a model for a node on another one, and computes it.

The device server is a child process that is started for each node and ends with it, so that an idle helper holds no
memory. It listens on loopback only; `lending.tunnel` stands before it.
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
from echo_node.host.paths import Paths
from echo_node.host.signals import stop_signals
from echo_node.lending.pairing import HelperAddress, Pairing
from echo_node.lending.tunnel import START_S, Lent, Relay
from echo_shared import process_memory
from echo_shared.child import Child, Frame
from echo_shared.errors import BackendError

log = logging.getLogger(__name__)

_STOP_S: Final = 3.0
_LOOK_S: Final = 1.0
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """How much is lent, and where."""

    host: str | None
    """None: all interfaces."""
    port: int
    threads: int
    """0 = one for each physical core."""
    memory_bytes: int
    """0 = all that is free when a node comes."""


class Helper:
    """`run` lends until a signal comes."""

    def __init__(self, paths: Paths, lending: Lending) -> None:
        self._paths = paths
        self._lending = lending

    async def run(self) -> None:
        """Raises EchoError when this machine cannot lend."""
        registry.choose(await asyncio.to_thread(hardware.detect), "llama_cpp")  # Raises BackendError without it.
        async with self._lend() as lent:
            log.info("llama.cpp %s is ready; %.1f GiB can be lent.", lent.release, sum(lent.free_bytes) / _GIB)
        pairing = Pairing.load_or_create(self._paths.data_dir / "lend.pem")
        relay = Relay(pairing, self._lend)
        stopping = asyncio.Event()

        def stop(name: str) -> None:
            log.info("Stopping: got %s.", name)
            stopping.set()

        with stop_signals(stop):
            async with relay.listening(self._lending.host, self._lending.port) as port:
                address = HelperAddress(host=self._lending.host or _own_address(), port=port, code=pairing.code)
                log.info("Lending to one node at a time. There: echo-node join URL --with %s#%s", address, pairing.code)
                await stopping.wait()

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[Lent]:
        """A device server of its own, from start to end. Raises BackendError or ChildExited when there is none."""
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
        """Nodes ask for no more than they are told is free; one that takes more all the same is shut out."""
        while True:
            await asyncio.sleep(_LOOK_S)
            used = await asyncio.to_thread(process_memory.own_bytes, child.pid)
            if used > self._lending.memory_bytes:
                log.warning("The node took %.1f GiB, more than is lent: it is shut out.", used / _GIB)
                child.kill()
                return


def _own_address() -> str:
    """The address that this machine has towards others, as far as it knows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing: a datagram socket only chooses its own address.
            address: str = probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
    return address
