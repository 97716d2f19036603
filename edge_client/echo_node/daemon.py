"""The node's daemon: one hub connection, one run's shell, one swarm client, one control socket, wired together.

All events go through one bounded queue and are handled one at a time. When it is full, whoever reports waits: the hub's
socket, the engine's pipe, a fetch. Ticks are skipped then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from echo_node.backends import registry
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.core.events import Disconnected, DrainRequested, Event, Tick
from echo_node.engine.choosing import Choices
from echo_node.engine.speeds import SpeedBook
from echo_node.engine.supervisor import Engine, EngineFiles, EngineParts, limits_of, measured_rates, settings_of
from echo_node.engine.widths import Widths
from echo_node.host import hardware
from echo_node.host.artefact_files import content_here
from echo_node.host.control import control_server
from echo_node.host.hubs import HubRecord, Hubs, Joining
from echo_node.host.paths import Paths
from echo_node.host.signals import stop_signals
from echo_node.host.spool import Spool
from echo_node.net.client import HubClient, Introduction
from echo_node.net.fetcher import Fetcher, Source
from echo_node.net.mesh import Mesh
from echo_node.net.receiver import Receiver
from echo_node.shell import Parts, RunShell, artefact_title
from echo_node.view import Snapshot, View
from echo_shared.errors import EchoError, RefusedError
from echo_shared.identity import Identity, fingerprint
from echo_shared.messages import FromHub, KeysRotated, Links, Peers, Piece, RefusalCode, RunKeys, Unwanted, Welcome
from echo_shared.messages import Mesh as MeshNews
from echo_shared.swarm import SwarmSettings, open_swarm

log = logging.getLogger(__name__)

INBOX_EVENTS: Final = 1_024
TICK_S: Final = 0.25
COUNT_EVERY_TICKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnded:
    """The connection will not be tried again."""

    error: EchoError


class Daemon:
    """`run` ends after the drain that a signal, the control socket, or the hub's last word asks for."""

    def __init__(self, *, paths: Paths, config: NodeConfig, me: Identity, joining: Joining, view: View) -> None:
        self._paths = paths
        self._config = config
        self._me = me
        self._joining = joining
        self._view = view
        self._name = config.name or f"node-{me.node_id[:8]}"
        self._choices = Choices(self._look, on_change=self._introduce)
        self._inbox: asyncio.Queue[FromHub | Event | ConnectionEnded] = asyncio.Queue(INBOX_EVENTS)
        self._shell: RunShell | None = None
        self._welcome: Welcome | None = None
        self._connected = False
        self._ended_by: EchoError | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._mesh = Mesh(me, upload_limit_bytes_s=config.upload_share_bytes_s)
        self._links_are_news = asyncio.Event()

    async def run(self) -> None:
        """Raises the EchoError that made it end, if one did; CancelledError after a second request to stop."""
        self._main_task = asyncio.current_task()
        await self._choices.decide()
        self._swarm = await open_swarm(
            SwarmSettings(
                listen_host=self._config.swarm_host,
                port=self._config.swarm_port,
                upload_limit_bytes_s=self._config.upload_share_bytes_s,
            )
        )
        try:
            await self._mesh.open(  # Lets nobody in before the hub has told the run's keys.
                self._config.swarm_host,
                self._config.mesh_port,
                on_piece=self._take,
                on_links=lambda _: self._links_are_news.set(),
            )
            self._client = self._make_client()
            self._receiver = Receiver(self._client.send, self._mesh)
            if self._config.exit_with_stdin:
                self._watch_stdin()
            with stop_signals(lambda name: self.request_stop(f"got {name}")):
                async with control_server(
                    self._paths.control_file, {"status": self._status_verb, "stop": self._stop_verb}
                ):
                    await self._run_tasks()
        except ExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            if self._shell is not None:
                await self._shell.close()
            await self._mesh.close()
            await self._swarm.close()
        if isinstance(self._ended_by, RefusedError) and self._ended_by.code == RefusalCode.FINISHED:
            log.info("The run is finished. Thank you for your part in it.")
        elif self._ended_by is not None:
            raise self._ended_by

    def request_stop(self, reason: str) -> None:
        """First time: return the leases and leave in good order. Second time: at once."""
        if self._stopping is None:
            log.info("Stopping: %s.", reason)
            self._stopping = asyncio.ensure_future(self._inbox.put(DrainRequested(reason=reason)))
        else:
            assert self._main_task is not None, "the daemon runs in a task"
            self._main_task.cancel()

    def snapshot(self) -> Snapshot:
        """The node now."""
        about: dict[str, Any] = {
            "pid": os.getpid(),
            "node_id": self._me.node_id,
            "name": self._name,
            "backend": self._choices.choice.name,
            "device": self._choices.choice.device,
            "hub": self._joining.address.origin,
            "connected": self._connected,
        }
        shell, welcome = self._shell, self._welcome
        if shell is None or welcome is None or self._client.hub_key is None:
            return Snapshot(**about, activity="connecting")
        status = shell.work.status(asyncio.get_running_loop().time())
        return Snapshot(
            **about,
            activity=status.activity,
            hub_fingerprint=fingerprint(self._client.hub_key),
            run_name=welcome.run_name,
            policy_version=status.policy_version,
            published_version=shell.work.newest_published,
            capacity=status.capacity,
            held_rollouts=shell.work.held_rollouts,
            tokens_per_s=status.tokens_per_s,
            rollouts=shell.writer.counts,
            fetching={artefact_title(version): amount for version, amount in shell.fetching.items()},
            problem=shell.writer.problem,
        )

    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._connection(), name="connection"),
                group.create_task(self._ticks(), name="ticks"),
                group.create_task(self._receiver.run(), name="receiver"),
                group.create_task(self._tell_links(), name="links"),
            ]
            await self._work()
            for task in tasks:
                task.cancel()

    async def _connection(self) -> None:
        try:
            await self._client.run(self._inbox.put, take=self._take, patient=self._joining.patient)
        except EchoError as error:
            await self._inbox.put(ConnectionEnded(error=error))

    async def _ticks(self) -> None:
        ticks = 0
        while True:
            if not self._inbox.full():
                self._inbox.put_nowait(Tick(progress={} if self._shell is None else dict(self._shell.fetching)))
            if self._shell is not None and ticks % COUNT_EVERY_TICKS == 0:
                await self._shell.writer.refresh()
            self._view.update(self.snapshot())
            ticks += 1
            await asyncio.sleep(TICK_S)

    def _take(self, piece: Piece, node_id: str | None = None) -> None:
        self._receiver.take(piece, node_id)

    async def _tell_links(self) -> None:
        """Whenever they have changed, and after each Welcome."""
        while True:
            await self._links_are_news.wait()
            self._links_are_news.clear()
            await self._client.send(Links(node_ids=self._mesh.links))

    async def _work(self) -> None:
        """Until the work loop has stopped."""
        while self._shell is None or not self._shell.stopped:
            event = await self._inbox.get()
            if isinstance(event, Welcome):
                await self._welcomed(event)
            elif isinstance(event, Peers):
                await self._swarm.add_peers(event.info_hash, event.peers)
            elif isinstance(event, KeysRotated):
                self._use_keys(event.run_keys)
            elif isinstance(event, MeshNews):
                self._mesh.set_peers(event.peers)
            elif isinstance(event, Unwanted) and self._shell is not None:
                self._shell.unwanted(event.info_hashes)
            elif isinstance(event, ConnectionEnded):
                self._ended_by = event.error
                event = DrainRequested(reason=event.error.what)
                await self._tell_shell(Disconnected())
            if isinstance(event, Disconnected):
                self._connected = False
            if isinstance(event, DrainRequested):
                if self._shell is None:
                    return
                self._shell.writer.retry_now()
            if isinstance(event, Event):
                await self._tell_shell(event)

    async def _tell_shell(self, event: Event) -> None:
        if self._shell is not None:
            await self._shell.handle(event)
            if self._shell.failure is not None:
                raise self._shell.failure

    async def _welcomed(self, welcome: Welcome) -> None:
        hub_key = self._client.hub_key
        assert hub_key is not None, "the handshake pins the hub's key"
        self._connected = True
        if self._welcome is None:
            known = self._joining.pinned is not None and self._joining.pinned.hub_key == hub_key
            log.info("Connected to %s at %s.", welcome.run_name, self._joining.address.origin)
            log.info("The hub's key: %s (%s).", fingerprint(hub_key), "as before" if known else "pinned now")
        else:
            log.info("Connected again.")
        if self._welcome is not None and self._welcome.run_id != welcome.run_id and self._shell is not None:
            log.warning("The hub has begun another run: what belonged to the last one is deleted.")
            await self._shell.close()
            await self._shell.fetcher.close()
            self._shell = None
        self._welcome = welcome
        if self._shell is None:
            await self._open_shell(welcome, hub_key)
        self._use_keys(welcome.run_keys)
        self._mesh.set_peers(welcome.mesh)
        self._receiver.say_all()
        self._links_are_news.set()

    def _use_keys(self, run_keys: RunKeys) -> None:
        self._mesh.set_keys(run_keys)
        if self._shell is not None:
            self._shell.fetcher.set_keys(run_keys)

    async def _open_shell(self, welcome: Welcome, hub_key: bytes) -> None:
        record = HubRecord(
            url=self._joining.address.origin,
            hub_key_hex=hub_key.hex(),
            joined_at=time.time(),
            invite_token=self._joining.invite_token,
            run_id=welcome.run_id,
            run_name=welcome.run_name,
            flags=dict(self._joining.flags),
        )
        hubs = Hubs(self._paths)
        await asyncio.to_thread(hubs.save, record)
        spool = Spool(hubs.directory(record) / "spool.db")
        await asyncio.to_thread(spool.open)
        lost = await asyncio.to_thread(spool.begin_run, welcome.run_id)
        if lost:
            log.warning("%d rollouts of the hub's last run can no longer be trained on.", lost)
        source = Source(
            address=self._joining.address, hub_key=hub_key, run_id=welcome.run_id, tracker_path=welcome.tracker_path
        )
        shell = RunShell(
            Parts(
                spool=spool,
                fetcher=Fetcher(
                    self._swarm,
                    self._receiver,
                    source,
                    artefacts=self._paths.artefacts,
                    carriers=self._paths.carriers,
                ),
                make_engine=self._make_engine,
                send=self._client.send,
                deliver=self._inbox.put,
                derived=self._paths.derived,
                logs=self._paths.logs,
                capacity_factor=self._config.capacity_factor,
            )
        )
        try:
            await shell.open(welcome.policy_version)
        except BaseException:
            await shell.close()
            raise
        self._shell = shell  # Not before: a tick shows what the shell does.

    def _look(self) -> tuple[hardware.Hardware, BackendChoice]:
        found = hardware.detect()
        return found, registry.choose(found, self._config.wanted_backend, self._measured(found))

    def _measured(self, found: hardware.Hardware) -> dict[tuple[str, str], float]:
        """What engines were measured at on the run's base model, if that is here."""
        known = self._welcome or self._joining.pinned
        content = None if known is None else content_here(self._paths.base(known.run_id))
        if content is None:
            return {}
        return measured_rates(SpeedBook(self._paths.speeds), found, content, settings_of(self._config))

    async def _introduce(self) -> None:
        """The engine runs elsewhere now, which the hub is to know."""
        await self._client.introduce(self._introduction())

    def _introduction(self) -> Introduction:
        return Introduction(
            name=self._name,
            invite_token=self._joining.invite_token,
            backend=self._choices.choice.name,
            device=self._choices.hardware.summary,
            swarm_port=self._swarm.port,
            mesh_port=self._mesh.port,
        )

    def _make_client(self) -> HubClient:
        return HubClient(
            self._joining.address,
            me=self._me,
            introduction=self._introduction(),
            pinned_hub_key=None if self._joining.pinned is None else self._joining.pinned.hub_key,
            retry_first_s=self._config.reconnect_first_s,
            jitter=random.random,
        )

    def _make_engine(self, files: EngineFiles) -> Engine:
        parts = EngineParts(
            choices=self._choices,
            widths=Widths(self._paths.widths),
            speeds=SpeedBook(self._paths.speeds),
            settings=settings_of(self._config),
            limits=limits_of(self._config, self._choices.hardware),
            bench_seconds=self._config.bench_seconds,
            deliver=self._inbox.put,
        )
        return Engine(parts, files)

    def _status_verb(self) -> Mapping[str, Any]:
        return asdict(self.snapshot())

    def _stop_verb(self) -> Mapping[str, Any]:
        if self._stopping is None:
            self.request_stop("asked to by echo-node")
        return {"pid": os.getpid()}

    def _watch_stdin(self) -> None:
        """A daemon thread, because a read of standard input can be neither awaited nor cancelled everywhere."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            # Not through sys.stdin: its lock, held by this thread, would abort the interpreter at its end.
            while os.read(0, 4_096):
                pass
            with suppress(RuntimeError):  # The loop has ended before its standard input did.
                loop.call_soon_threadsafe(self.request_stop, "standard input ended")

        threading.Thread(target=wait, name="stdin", daemon=True).start()


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """What went wrong first in a task group; the others ended because of it."""
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first
