"""The node's daemon: one hub connection, one run's shell, one swarm client and one control socket, wired together.

All events go through one bounded queue and are handled one at a time. When the queue is full, all senders wait: the
hub's socket, the engine's pipe, a fetch. Ticks are skipped then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from echo_node.about import About
from echo_node.config import NodeConfig, load_config
from echo_node.connections import Connections, open_connections
from echo_node.core import work
from echo_node.core.events import (
    Disconnected,
    DrainRequested,
    EngineOutdated,
    Event,
    FinishRequested,
    Holding,
    Tick,
)
from echo_node.core.manners import Manners
from echo_node.core.notices import Notice, notice_of_end, notice_of_standby
from echo_node.core.standby import sentence
from echo_node.core.yielding import YIELD_S
from echo_node.current_run import CurrentRun
from echo_node.engine.choosing import PROBE_S, EngineChooser
from echo_node.engine.making import EngineMaker
from echo_node.engine.supervisor import EngineFiles, EngineSupervisor
from echo_node.host.clock import running_s
from echo_node.host.control import control_server
from echo_node.host.hubs import Joining
from echo_node.host.last_word import LastWord
from echo_node.host.notifications import notify
from echo_node.host.paths import NodePaths
from echo_node.host.pause import PauseFile
from echo_node.host.sensors.machine import MachineSensors, Sensors
from echo_node.host.signals import stop_signals, watch_stdin
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_node.machine_watch import MachineWatch
from echo_node.network_hold import NetworkHold
from echo_node.opening import Opening
from echo_node.owner_watch import EngineNow, OwnerWatch
from echo_node.owner_word import OwnerWord
from echo_node.panel import NodeSnapshot, Panel
from echo_node.releases import newer_release, upgraded
from echo_node.reloading import ChangedSettings, changes, in_force
from echo_node.shell import RunShell
from echo_node.updating import NodeToUpdate, Updater
from echo_shared.errors import EchoError, RefusedError
from echo_shared.signing.identity import Identity
from echo_shared.wire.codec import check_codec
from echo_shared.wire.messages import (
    Challenge,
    FromHub,
    KeysRotated,
    Peers,
    Piece,
    RefusalCode,
    Refused,
    RunKeys,
    Standby,
    Team,
    Totals,
    Unwanted,
    Welcome,
)
from echo_shared.wire.messages import Mesh as MeshNews

log = logging.getLogger(__name__)

INBOX_EVENTS: Final = 1_024
TICK_S: Final = 0.25
RESTING_TICK_S: Final = 1.0
"""Tick interval while the owner uses the machine and no work runs, to leave computing time to the owner."""
COUNT_EVERY_TICKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionEnded:
    """The connection has failed for good."""

    error: EchoError


Incoming = FromHub | Event | ConnectionEnded


class Daemon:
    """The daemon of one hub. `run` ends after a drain, which a signal, the control socket or the hub's refusal
    starts.
    """

    def __init__(
        self,
        *,
        paths: NodePaths,
        config: NodeConfig,
        me: Identity,
        joining: Joining,
        panel: Panel,
        probe_s: float = PROBE_S,
        sensors: Sensors | None = None,
    ) -> None:
        """`probe_s`: see `EngineChooser`. `sensors`: this machine's by default."""
        self._paths = paths
        self._config = config
        self._joining = joining
        self._panel = panel
        self._troubles = TroubleLog()
        self._run = CurrentRun(joining, self._troubles, self._open_shell)
        self._engines = EngineMaker(paths=paths, config=lambda: self._config, run_id=lambda: self._run.run_id)
        self._chooser = EngineChooser(self._engines.look, on_change=self._introduce, probe_s=probe_s)
        self._about = About.of(config, me=me, joining=joining, chooser=self._chooser)
        self._inbox: asyncio.Queue[Incoming] = asyncio.Queue(INBOX_EVENTS)
        self._meter = TrafficMeter(paths.traffic_file, self._troubles)
        self._watch = OwnerWatch(
            Manners(config.manners),
            sensors or MachineSensors(paths.data_dir),
            PauseFile(paths.pause_file),
            engine=self._engine_now,
            deliver=self._inbox.put,
            troubles=self._troubles,
            traffic=self._meter.now,
        )
        self._holding: Holding | None = None
        """Newest report of the owner's watch: the current holds."""
        self._connections: Connections | None = None
        self._is_connected = False
        self._is_over = False
        self._ended_by: EchoError | None = None
        self._running: asyncio.Task[Any] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._reloading: set[asyncio.Task[None]] = set()
        self._update = ""
        self._updater: Updater | None = None
        self._network: NetworkHold | None = None
        self.is_told_to_end = False
        """True after a stop by the owner or the system. False at the end of a turn."""
        self.leaves = False
        """True if the owner wants to forget the hub."""

    @property
    def hub(self) -> str:
        """The hub's address."""
        return self._joining.address.origin

    @property
    def is_finishing(self) -> bool:
        """True if the node ends after its current leases."""
        return self._finishing is not None

    @property
    def connections(self) -> Connections:
        """The connections of the running daemon."""
        assert self._connections is not None, "the daemon does not run"
        return self._connections

    async def run(self) -> None:
        """Run until the node ends. Raises the EchoError that ended it, if any; CancelledError after a second stop
        request.
        """
        check_codec()
        self._running = asyncio.current_task()
        LastWord(self._paths.last_word_file).save(None)
        await self._chooser.decide()
        await self._watch.look()
        try:
            async with open_connections(self._config, self._about, self._troubles, self._meter) as self._connections:
                try:
                    await self._run_connected()
                finally:
                    await self._run.close()
        except ExceptionGroup as group:
            raise _first_cause(group) from group
        if isinstance(self._ended_by, RefusedError) and self._ended_by.code == RefusalCode.FINISHED:
            log.info("The run has finished. Thank you for contributing.")
        elif self._ended_by is not None:
            raise self._ended_by

    def request_stop(self, reason: str) -> None:
        """Stop. The first call returns the leases to the hub; the second cancels at once."""
        self.is_told_to_end = True
        if self._stopping is None:
            log.info("Stopping: %s.", reason)
            self._stopping = asyncio.ensure_future(self._inbox.put(DrainRequested(reason=reason)))
        else:
            assert self._running is not None, "the daemon runs in a task"
            self._running.cancel()

    def finish(self, reason: str) -> None:
        """Take no new leases, finish the current ones, then end."""
        if self._finishing is None:
            log.info("Finishing the current leases, then leaving: %s.", reason)
            self._finishing = asyncio.ensure_future(self._inbox.put(FinishRequested(reason=reason)))

    @property
    def has_worked(self) -> bool:
        """True if a hub has admitted the node."""
        return self._run.welcomed is not None

    def snapshot(self) -> NodeSnapshot:
        """Return the node's current snapshot."""
        snapshot = self._about.snapshot(
            self._run.welcomed,
            self._watch.holds,
            self._troubles.now,
            connected=self._is_connected,
            now=running_s(),
            token_rates=self._run.token_rates,
        )
        return replace(snapshot, update=(self._updater and self._updater.said) or self._update)

    async def _run_connected(self) -> None:
        if self._config.exit_with_stdin:
            watch_stdin(self.request_stop)
        self._network = NetworkHold(
            self.connections,
            is_wanted=lambda: any(hold.keeps_offline for hold in self._watch.holds),
            owes_the_hub=lambda: self._shell is not None and self._shell.work.owes_the_hub,
        )
        await self._network.begin()
        word = OwnerWord(
            snapshot=self.snapshot,
            watch=self._watch,
            stop=self._stop_once,
            finish=self._finish_for_good,
            reload=self._reload,
        )
        page = word.page()
        machine = MachineWatch(
            self.connections.client,
            self._troubles,
            on_wake=self._chooser.look_again,
            on_upgrade=self._end_upgraded,
        )
        self._updater = self._make_updater()
        with stop_signals(lambda name: self.request_stop(f"got {name}")):
            async with control_server(self._paths.control_file, word.verbs(page), page), asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._connection(), name="connection"),
                    group.create_task(self._ticks(), name="ticks"),
                    group.create_task(self._watch.run(), name="owner watch"),
                    group.create_task(machine.run(), name="machine watch"),
                    group.create_task(self._updater.run(), name="updater"),
                    group.create_task(self._meter.run(self.connections.swarm.traffic), name="traffic"),
                    group.create_task(self.connections.receiver.run(), name="receiver"),
                    group.create_task(self.connections.tell_links(), name="links"),
                ]
                await self._work()
                for task in tasks:
                    task.cancel()

    def _make_updater(self) -> Updater:
        node = NodeToUpdate(
            mode=lambda: self._config.update,
            refusal=lambda: self.connections.client.too_old,
            hub=self.hub,
            is_held=lambda: bool(self._watch.holds),
            held_rollouts=lambda: self.snapshot().held_rollouts,
            end=self._end_upgraded,
        )
        return Updater(self._paths, node)

    def _end_upgraded(self, release: str) -> None:
        error = upgraded(release, takes_over=self._config.update == "auto")
        self._inbox.put_nowait(ConnectionEnded(error=error))

    async def _connection(self) -> None:
        client, receiver = self.connections.client, self.connections.receiver
        try:
            await client.run(
                self._inbox.put, take=lambda piece: receiver.take(piece, None), patient=self._joining.patient
            )
        except EchoError as error:
            await self._inbox.put(ConnectionEnded(error=error))

    async def _ticks(self) -> None:
        ticks = 0
        while True:
            self._tick()
            if ticks % COUNT_EVERY_TICKS == 0:
                await self._run.count()
            self._panel.update(self.snapshot())
            ticks += 1
            await asyncio.sleep(RESTING_TICK_S if self._shell is not None and self._shell.work.rests else TICK_S)

    def _tick(self) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(Tick(progress={} if self._shell is None else dict(self._shell.fetching)))

    async def _work(self) -> None:
        """Handle events until the work loop stops, or until a stop request without a run."""
        while not self._is_over:
            incoming = await self._inbox.get()
            await HANDLERS[type(incoming)](self, incoming)

    async def _take_event(self, event: Event) -> None:
        """Forward the event. A separate method, so that subclasses can observe the shell's events."""
        await self._tell_shell(event)

    async def _tell_shell(self, event: Event) -> None:
        shell = self._shell
        if shell is not None:
            await shell.handle(event)
            if shell.failure is not None:
                raise shell.failure
            self._is_over = shell.stopped

    async def _take_welcome(self, welcome: Welcome) -> None:
        hub_key = self.connections.client.hub_key
        assert hub_key is not None, "the handshake pins the hub's key"
        self._is_connected = True
        if self._config.update != "never":
            self._update = newer_release(self.connections.client.hub_version)
        if not await self._run.take_up(welcome, hub_key):
            await self.connections.client.close()  # The client reconnects, with growing waits.
            return
        self._use_keys(welcome.run_keys)
        self.connections.use_mesh(welcome.mesh)
        self.connections.receiver.say_all()
        self.connections.links_are_news.set()
        if self._holding is not None:
            await self._tell_shell(self._holding)
        await self._tell_shell(welcome)

    async def _take_peers(self, news: Peers) -> None:
        await self.connections.swarm.add_peers(news.info_hash, news.peers)

    async def _take_keys(self, news: KeysRotated) -> None:
        self._use_keys(news.run_keys)

    async def _take_totals(self, news: Totals) -> None:
        self._run.hear(news)

    async def _take_mesh(self, news: MeshNews) -> None:
        self.connections.use_mesh(news.peers)

    async def _take_standby(self, news: Standby) -> None:
        log.info("%s", sentence(news))
        await _notify(notice_of_standby(news, sentence(news)))
        await self._tell_shell(news)

    async def _take_holding(self, event: Holding) -> None:
        self._holding = event
        await self._tell_shell(event)
        if self._network is not None:
            self._network.look()
        # Tick when the engine's time to report is over: the next regular tick would let the owner wait longer.
        asyncio.get_running_loop().call_later(YIELD_S, self._tick)

    async def _take_finish(self, event: FinishRequested) -> None:
        if self._shell is None:
            self._is_over = True
        else:
            await self._tell_shell(event)

    async def _take_unwanted(self, news: Unwanted) -> None:
        if self._shell is not None:
            self._shell.unwanted(news.info_hashes)

    async def _take_loss(self, event: Disconnected) -> None:
        self._is_connected = False
        await self._tell_shell(event)

    async def _take_end(self, event: ConnectionEnded) -> None:
        self._ended_by = event.error
        notice = notice_of_end(event.error)
        LastWord(self._paths.last_word_file).save(notice)
        await _notify(notice)
        await self._take_loss(Disconnected())
        # The error's own text may be too long for the messages that return leases.
        await self._drain(DrainRequested(reason="the connection to the hub has ended"))

    async def _drain(self, event: DrainRequested) -> None:
        if self._shell is None:
            self._is_over = True
        else:
            self._shell.writer.retry_now()
            await self._tell_shell(event)

    @property
    def _shell(self) -> RunShell | None:
        return self._run.shell

    def _use_keys(self, run_keys: RunKeys) -> None:
        self.connections.mesh.set_keys(run_keys)
        if self._shell is not None:
            self._shell.fetcher.set_keys(run_keys)

    async def _open_shell(self, welcome: Welcome, hub_key: bytes) -> RunShell:
        opening = Opening(
            paths=self._paths,
            config=self._config,
            joining=self._joining,
            connections=self.connections,
            make_engine=self._make_engine,
            deliver=self._inbox.put,
            troubles=self._troubles,
        )
        return await opening.open(welcome, hub_key)

    async def _introduce(self) -> None:
        """Introduce the node to the hub again, after a change of its engine."""
        await self.connections.introduce(self._about)

    def _engine_now(self) -> EngineNow:
        pid = None if self._shell is None else self._shell.engine_pid
        return EngineNow(on_gpu=self._chooser.choice.device != "cpu", pid=pid)

    def _make_engine(self, files: EngineFiles) -> EngineSupervisor:
        return self._engines.make(files, self._chooser, self._inbox.put)

    def _stop_once(self, left: str) -> None:
        self.leaves = self.leaves or left == self.hub
        if self._stopping is None:
            self.request_stop("asked to by echo-node")

    def _finish_for_good(self) -> None:
        self.is_told_to_end = True
        self.finish("asked to by echo-node")

    def _reload(self) -> Mapping[str, Any]:
        """Load the settings again. Raises ConfigError and keeps the old settings if they are invalid."""
        file = self._paths.config_file
        after = load_config(file if file.exists() else None, {**self._joining.flags, **self._joining.given})
        changed = changes(self._config, after)
        self._config = in_force(self._config, after)
        log.info("Settings loaded again: %s.", ", ".join(changed.all) or "nothing has changed")
        self._watch.use(after.manners)
        task = asyncio.ensure_future(self._take_settings(changed))
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)
        return {"file": str(file), **asdict(changed)}

    async def _take_settings(self, changed: ChangedSettings) -> None:
        if changed.choice:
            self._chooser.renew()
        if changed.engine:
            await self._inbox.put(EngineOutdated())
        if changed.introduction:
            self._about = self._about.with_settings(self._config)
            await self._introduce()


HANDLERS: Final[dict[type, Callable[[Daemon, Any], Awaitable[None]]]] = {
    **dict.fromkeys(work.HANDLERS, Daemon._take_event),
    Welcome: Daemon._take_welcome,
    Peers: Daemon._take_peers,
    KeysRotated: Daemon._take_keys,
    MeshNews: Daemon._take_mesh,
    Unwanted: Daemon._take_unwanted,
    Standby: Daemon._take_standby,
    Totals: Daemon._take_totals,
    ConnectionEnded: Daemon._take_end,
    Disconnected: Daemon._take_loss,
    Holding: Daemon._take_holding,
    FinishRequested: Daemon._take_finish,
    DrainRequested: Daemon._drain,
}
"""Handlers of everything in the inbox. Messages in `FOR_THE_CLIENT` never get there."""
FOR_THE_CLIENT: Final = (Challenge, Refused, Piece, Team)
"""Messages that the hub's connection handles itself: handshake, refusal, and pieces, which go directly to the receiver.
Team messages answer only a command's requests; the session's state table refuses them here.
"""


async def _notify(notice: Notice | None) -> None:
    if notice is not None:
        await asyncio.to_thread(notify, notice)


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a task group, which ended the others."""
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first
