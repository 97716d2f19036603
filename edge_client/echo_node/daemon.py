"""The node's daemon: opens a node's connections and runs its tasks until the node ends."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from echo_node.connections import open_connections
from echo_node.core.events import ConnectionEnded
from echo_node.host.control import control_server
from echo_node.host.signals import stop_signals, watch_stdin
from echo_node.machine_watch import MachineWatch
from echo_node.network_hold import NetworkHold
from echo_node.node import JoinedNode
from echo_node.owner_word import OwnerWord
from echo_node.updating import Updater
from echo_shared.errors import EchoError, RefusedError
from echo_shared.wire.codec import check_codec
from echo_shared.wire.messages import RefusalCode

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
RESTING_TICK_S: Final = 1.0
"""Seconds between two ticks while the owner uses the machine and no work runs. Few ticks leave the processor to the
owner.
"""
COUNT_EVERY_TICKS: Final = 4
PORTS_AGAIN_S: Final = 300.0
"""Minimum seconds between two introductions of the node because its router's ports have changed."""


class Daemon(JoinedNode):
    """A running node. A signal, a command on the control socket or a refusal by the hub ends the node: the node returns
    its leases to the hub, then `run` returns.
    """

    async def run(self) -> None:
        """Run until the node ends. Raises the EchoError that ended it, if any; CancelledError after a second request to
        stop.
        """
        check_codec()
        self._running = asyncio.current_task()
        self._last_word.save(None)
        await self._engines.chooser.decide()
        await self._watch.look()
        try:
            async with open_connections(self._config, self._about, self._troubles, self._meter) as self._connections:
                try:
                    await self._run_connected()
                finally:
                    await self._run.close()
        except ExceptionGroup as group:
            raise _first_cause(group) from group
        if isinstance(self.ended_by, RefusedError) and self.ended_by.code == RefusalCode.FINISHED:
            log.info("The run has finished. Thank you for contributing.")
        elif self.ended_by is not None:
            raise self.ended_by

    async def _run_connected(self) -> None:
        if self._config.exit_with_stdin:
            watch_stdin(self)
        connections, client = self.connections, self.connections.client
        self._network = NetworkHold(connections, self._run)
        if self._is_kept_offline:
            await self._network.begin()
        word = OwnerWord(node=self, watch=self._watch)
        page = word.page()
        machine = MachineWatch(client, self._troubles, self._engines.chooser, self._inbox)
        self._updater = Updater(
            self._paths,
            mode=self._config.update,
            client=client,
            run=self._run,
            watch=self._watch,
            inbox=self._inbox,
        )
        with stop_signals(self):
            async with control_server(self._paths.control_file, word.verbs(page), page), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._connection(), name="connection"),
                    group.create_task(self._ticks(), name="ticks"),
                    group.create_task(self._introductions(), name="introductions"),
                    group.create_task(self._router_ports(), name="router ports"),
                    group.create_task(self._watch.run(), name="owner watch"),
                    group.create_task(machine.run(), name="machine watch"),
                    group.create_task(self._updater.run(), name="updater"),
                    group.create_task(self._meter.run(connections.swarm), name="traffic"),
                    group.create_task(connections.tell_pieces(), name="pieces"),
                    group.create_task(connections.tell_links(), name="links"),
                ]
                while not self.is_over:
                    await self.handle_next()
                for task in tasks:
                    task.cancel()

    async def _connection(self) -> None:
        connections = self.connections
        try:
            await connections.client.run(self._inbox, connections.receiver, patient=self._joining.patient)
        except EchoError as error:
            await self._inbox.put(ConnectionEnded(error=error))

    async def _introductions(self) -> None:
        """Send the hub a new introduction of the node whenever the node's engine, name or costs have changed."""
        while True:
            await self._engines.changed.wait()
            self._engines.changed.clear()
            await self.connections.introduce(self._about)

    async def _router_ports(self) -> None:
        """After a change of the node's public port, tell the hub the new port by joining again. Joining restarts the
        hub's connection, so the next change waits for PORTS_AGAIN_S seconds.
        """
        router, mesh_port = self.connections.swarm.router, self.connections.mesh.port
        told = router.external(mesh_port)
        while True:
            await router.changed.wait()
            router.changed.clear()
            log.info("The router %s.", router.sentence)
            if router.external(mesh_port) != told:
                told = router.external(mesh_port)
                await self.connections.introduce(self._about)
                await asyncio.sleep(PORTS_AGAIN_S)

    async def _ticks(self) -> None:
        ticks = 0
        while True:
            self._tick()
            if ticks % COUNT_EVERY_TICKS == 0:
                await self._run.count()
            self._panel.update(self.snapshot())
            ticks += 1
            await asyncio.sleep(RESTING_TICK_S if self._run.rests else TICK_S)


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a task group: the other tasks were ended because of it."""
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first
