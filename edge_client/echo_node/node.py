"""A node: its parts, the messages that it handles, and its owner's commands. `echo_node.daemon` runs it.

The hub's messages and the parts' reports come through one bounded inbox, and are handled one at a time. When the inbox
is full, all senders wait: the hub's connection, the engine's pipe, a fetch. Ticks are then skipped. The owner's wishes
come through a queue of their own, which is handled first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from echo_node.about import About
from echo_node.config import NodeConfig, load_config
from echo_node.connections import NodeNetwork
from echo_node.core.events import (
    ConnectionEnded,
    Disconnected,
    DrainRequested,
    EngineOutdated,
    Event,
    FinishRequested,
    Holding,
    Incoming,
    NodeTick,
    Upgraded,
)
from echo_node.core.manners import Manners, OwnerPause
from echo_node.core.notices import Notice, notice_of_end, notice_of_standby
from echo_node.core.owner_commands import OwnerCommands
from echo_node.core.standby import sentence
from echo_node.core.yielding import YIELD_S
from echo_node.current_run import CurrentRun
from echo_node.device_watch import DeviceWatch
from echo_node.engine.choosing import PROBE_S
from echo_node.engine.making import EngineMaker
from echo_node.host.clock import read_clocks, running_s
from echo_node.host.hubs import Joining
from echo_node.host.last_word import LastWord
from echo_node.host.notifications import notify
from echo_node.host.paths import NodePaths
from echo_node.host.pause import DevicePausesFile, PauseFile
from echo_node.host.sensors.machine import MachineSensors, Sensors
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_node.host.wake_lock import wake_lock_here
from echo_node.network_hold import NetworkHold
from echo_node.owner_watch import OwnerWatch
from echo_node.panel import NodeSnapshot, Panel, report_of
from echo_node.releases import newer_release, upgraded
from echo_node.reloading import ChangedSettings, changes, in_force
from echo_node.shell import RunShell
from echo_node.updating import Updater
from echo_shared.errors import EchoError
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import (
    Challenge,
    Fleet,
    FleetCommand,
    KeysRotated,
    Meet,
    Mesh,
    Peers,
    Piece,
    Refused,
    RunKeys,
    Standby,
    Team,
    Totals,
    Unwanted,
    Welcome,
)
from echo_shared.wire.owner_commands import id_of, sign_report

log = logging.getLogger(__name__)

INBOX_EVENTS: Final = 1_024
SETTLE_LOOKS: Final = 50
"""Maximum number of checks, within one second, whether an owner's command has taken effect."""


class JoinedNode:
    """The node of one hub. Call `handle_next` until `is_over`."""

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
        """`probe_s`: see `EngineChooser`. `sensors`: None = this machine's."""
        self.is_over = False
        self.ended_by: EchoError | None = None
        self.is_told_to_end = False
        """True if the owner or the system has stopped the node; False if only its turn for this hub has ended."""
        self.leaves = False
        """True if the owner wants the node to forget the hub."""
        self._paths = paths
        self._config = config
        self._joining = joining
        self._panel = panel
        self._troubles = TroubleLog()
        self._inbox: asyncio.Queue[Incoming] = asyncio.Queue(INBOX_EVENTS)
        self._from_owner = _OwnerQueue(self)
        """What the owner wants. It is handled before the inbox, which a hub can fill."""
        self._engines = EngineMaker(paths, config, self._inbox, probe_s=probe_s)
        self._run = CurrentRun(paths, joining, self._engines, self._inbox, self._troubles)
        self._about = About.of(config, me=me, joining=joining, chooser=self._engines.chooser, owner=_owner(paths))
        self._commands: OwnerCommands | None = None
        self._owner_since = running_s()
        """Monotonic time of the last reading of the owner's key. Commands sent before it are refused, so that none is
        obeyed twice.
        """
        self._obeying: set[asyncio.Task[None]] = set()
        self._meter = TrafficMeter(paths.traffic_file, self._troubles)
        self._watch = OwnerWatch(
            Manners(config.manners),
            sensors or MachineSensors(paths.data_dir),
            PauseFile(paths.pause_file),
            chooser=self._engines.chooser,
            run=self._run,
            inbox=self._from_owner,
            meter=self._meter,
            troubles=self._troubles,
            devices=DeviceWatch(self._engines.chooser, config.manners, DevicePausesFile(paths.device_pauses_file)),
            wake_lock=wake_lock_here(),
        )
        self._last_word = LastWord(paths.last_word_file)
        self._holding: Holding | None = None
        """Newest report of the owner's watch: the current holds (reasons to pause)."""
        self._is_connected = False
        self._newer_release = ""
        self._running: asyncio.Task[Any] | None = None
        self._is_stopping = False
        self._finishing: asyncio.Task[None] | None = None
        self._reloading: set[asyncio.Task[None]] = set()
        self._connections: NodeNetwork | None = None
        self._network: NetworkHold | None = None
        self._updater: Updater | None = None

    @property
    def hub(self) -> str:
        return self._joining.address.origin

    @property
    def has_worked(self) -> bool:
        """True if the hub has admitted the node at least once."""
        return self._run.welcomed is not None

    @property
    def has_engine(self) -> bool:
        """True once an engine is chosen. Before that, the node has no snapshot."""
        return self._engines.chooser.has_decided

    @property
    def is_finishing(self) -> bool:
        """True if the node ends after its current leases."""
        return self._finishing is not None

    @property
    def connections(self) -> NodeNetwork:
        assert self._connections is not None, "the daemon does not run"
        return self._connections

    def snapshot(self) -> NodeSnapshot:
        """Return the node's state for its owner. Call this only after an engine was chosen (`has_engine`)."""
        snapshot = self._about.snapshot(
            self._run.welcomed,
            self._watch.holds,
            self._troubles.now,
            connected=self._is_connected,
            now=running_s(),
            token_rates=self._run.token_rates,
            device_holds=self._watch.device_holds,
        )
        update = (self._updater and self._updater.said) or self._newer_release
        router = "" if self._connections is None else self._connections.swarm.router.sentence
        links = "" if self._connections is None else self._connections.mesh.sentence
        return replace(
            snapshot,
            update=update,
            hub_gpu=self._watch.hub_gpu,
            router=router,
            links=links,
            share=self._watch.duty.share,
            share_reason=self._watch.duty.sentence,
            awake=self._watch.awake,
        )

    def request_stop(self, reason: str) -> None:
        """Stop the node. The first call makes the node return its leases to the hub; the second call cancels the node
        at once.
        """
        self.is_told_to_end = True
        if not self._is_stopping:
            log.info("Stopping: %s.", reason)
            self._is_stopping = True
            self._from_owner.put_nowait(DrainRequested(reason=reason))
        else:
            assert self._running is not None, "the daemon runs in a task"
            self._running.cancel()

    def stop_once(self, *, leaves: str) -> None:
        """Stop the node for its owner. Further calls change nothing. `leaves`: address of the hub to forget; empty =
        none.
        """
        self.leaves = self.leaves or leaves == self.hub
        if not self._is_stopping:
            self.request_stop("asked to by echo-node")

    def finish(self, reason: str) -> None:
        """Take no new leases, finish the current ones, then end."""
        if self._finishing is None:
            log.info("Finishing the current leases, then leaving: %s.", reason)
            self._finishing = asyncio.ensure_future(self._inbox.put(FinishRequested(reason=reason)))

    def finish_for_good(self) -> None:
        """Finish the current leases, then end without a turn for another hub, because the owner wants that."""
        self.is_told_to_end = True
        self.finish("asked to by echo-node")

    def reload(self) -> Mapping[str, Any]:
        """Load the settings again, and return the changes. Raises ConfigError, and keeps the old settings, if the new
        ones are invalid.
        """
        file = self._paths.config_file
        after = load_config(file if file.exists() else None, {**self._joining.flags, **self._joining.given})
        changed = changes(self._config, after)
        self._config = self._engines.config = in_force(self._config, after)
        log.info("Settings loaded again: %s.", ", ".join(changed.all) or "nothing has changed")
        self._watch.use(after.manners)
        if self._updater is not None:
            self._updater.mode = self._config.update
        task = asyncio.ensure_future(self._take_settings(changed))
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)
        return {"file": str(file), **asdict(changed)}

    def reload_owner(self) -> None:
        """Read the owner's key again: the node has joined or left a fleet. Tell the hub. Raises ConfigError."""
        self._about = replace(self._about, owner=_owner(self._paths))
        self._commands, self._owner_since = None, running_s()
        self._engines.changed.set()

    async def _obey(self, said: FleetCommand) -> None:
        """Carry out a command of the owner that came through the hub, and report the node's state."""
        if self._commands is None:
            return
        problem = ""
        try:
            command = self._commands.take(said, read_clocks())
            if command.verb == "pause":
                self._watch.change(OwnerPause(None if command.pause_s is None else time.time() + command.pause_s))
            elif command.verb == "resume":
                self._watch.change(None)
            if command.verb != "status":
                await self._watch.look()
                await self._settle(paused=command.verb == "pause")
        except EchoError as error:
            problem = str(error)
            log.warning("A command of the owner, through the hub, is refused. %s", error)
        report = report_of(self.snapshot(), problem=problem)
        await self.connections.client.send(sign_report(report, id_of(said), self._about.me))

    async def _settle(self, *, paused: bool) -> None:
        """Wait at most a second until the work loop has read the start or the end of a pause from the inbox: other
        reasons to pause may remain.
        """
        for _ in range(SETTLE_LOOKS):
            if (self.snapshot().state == "paused") == paused:
                return
            await asyncio.sleep(1.0 / SETTLE_LOOKS)

    async def _take_settings(self, changed: ChangedSettings) -> None:
        if changed.choice:
            self._engines.renew()
        if changed.engine:
            await self._inbox.put(EngineOutdated())
        if changed.introduction:
            self._about = self._about.with_settings(self._config)
            self._engines.changed.set()

    async def handle_next(self) -> None:
        """Wait for the next entry of the inbox. Handle all that the owner wants, then the entry."""
        incoming = await self._inbox.get()
        await asyncio.sleep(0)  # A full inbox never waits, so the owner's watch would not run.
        while not (self.is_over or self._from_owner.empty()):
            await self.handle(self._from_owner.get_nowait())
        if not self.is_over:
            await self.handle(incoming)

    def urge(self, wish: Incoming) -> None:
        """Make the node handle this wish of the owner soon. If a pause or the stop begins, a hub that reads nothing
        loses its connection.
        """
        is_pressing = isinstance(wish, DrainRequested) or (_pauses(wish) and not _pauses(self._holding))
        if is_pressing and self._connections is not None:
            self._connections.client.put_owner_first()
        self._tick()  # `handle_next` may wait for an entry of the inbox.

    async def handle(self, incoming: Incoming) -> None:
        """Handle an entry of the inbox, and pass on the events that the work loop needs."""
        match incoming:
            case Peers(info_hash=info_hash, peers=peers):
                await self.connections.swarm.add_peers(info_hash, peers)
            case KeysRotated(run_keys=run_keys):
                self._use_keys(run_keys)
            case Mesh(peers=nodes):
                self.connections.use_mesh(nodes)
            case Meet():
                self.connections.mesh.meet(incoming)
            case Unwanted(info_hashes=info_hashes):
                if self._shell is not None:
                    self._shell.unwanted(info_hashes)
            case Totals():
                self._run.hear(incoming)
            case FleetCommand():
                # A task of its own: obeying a pause waits for an event that comes through this same inbox.
                task = asyncio.create_task(self._obey(incoming), name="owner's command")
                self._obeying.add(task)
                task.add_done_callback(self._obeying.discard)
            case Welcome():
                await self._welcome(incoming)
            case Standby():
                log.info("%s", sentence(incoming))
                await _notify(notice_of_standby(incoming, sentence(incoming)))
                await self._tell_shell(incoming)
            case Disconnected():
                self._is_connected = False
                await self._tell_shell(incoming)
            case ConnectionEnded(error=error):
                await self._end(error)
            case Upgraded(release=release):
                await self._end(upgraded(release, takes_over=self._config.update == "auto"))
            case Holding():
                await self._hold(incoming)
            case FinishRequested() | DrainRequested():
                await self._leave(incoming)
            case Challenge() | Refused() | Piece() | Team() | Fleet():
                raise AssertionError(f"the hub's connection handles a {incoming.type} itself")
            case _:
                await self._tell_shell(incoming)

    async def _tell_shell(self, event: Event) -> None:
        if (shell := self._shell) is not None:
            await shell.handle(event)
            if shell.failure is not None:
                raise shell.failure
            self.is_over = shell.stopped

    async def _welcome(self, welcome: Welcome) -> None:
        self._is_connected = True
        owner, hub_key = self._about.owner, self.connections.client.hub_key
        if owner is not None and self._commands is None and hub_key is not None:
            self._commands = OwnerCommands(
                node_id=self._about.me.node_id,
                owner_key=owner.public_key,
                hub_key=hub_key,
                started_s=self._owner_since,
            )
        if self._config.update != "never":
            self._newer_release = newer_release(self.connections.client.hub_version)
        if not await self._run.take_up(welcome, self.connections):
            await self.connections.client.close()  # The client reconnects by itself, after growing waits.
            return
        self._use_keys(welcome.run_keys)
        self.connections.use_rendezvous(welcome.sighting_path)
        self.connections.use_mesh(welcome.mesh)
        self.connections.receiver.say_all()
        self.connections.links_are_news.set()
        if self._holding is not None:
            await self._tell_shell(self._holding)
        if (shell := self._shell) is not None:
            shell.work.willing = self._about.willing
        await self._tell_shell(welcome)

    async def _hold(self, event: Holding) -> None:
        self._holding = event
        await self._tell_shell(event)
        if self._network is not None:
            self._network.turn(online=not self._is_kept_offline)
        # Tick when the engine's time to report is over: the next regular tick would come later, and the owner would
        # wait.
        asyncio.get_running_loop().call_later(YIELD_S, self._tick)

    async def _end(self, error: EchoError) -> None:
        self.ended_by = error
        notice = notice_of_end(error)
        self._last_word.save(notice)
        await _notify(notice)
        self._is_connected = False
        await self._tell_shell(Disconnected())
        # Do not use the error's own text: it may be too long for the messages that return leases.
        await self._leave(DrainRequested(reason="the connection to the hub has ended"))

    async def _leave(self, event: FinishRequested | DrainRequested) -> None:
        if self._shell is None:
            self.is_over = True
            return
        if isinstance(event, DrainRequested):
            self._shell.writer.retry_now()
        await self._tell_shell(event)

    def _tick(self) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(NodeTick(progress={} if self._shell is None else dict(self._shell.fetching)))

    def _use_keys(self, run_keys: RunKeys) -> None:
        self.connections.mesh.set_keys(run_keys)
        if self._shell is not None:
            self._shell.fetcher.set_keys(run_keys)

    @property
    def _shell(self) -> RunShell | None:
        return self._run.shell

    @property
    def _is_kept_offline(self) -> bool:
        return any(hold.keeps_offline for hold in self._watch.holds)


class _OwnerQueue(asyncio.Queue[Incoming]):
    """The owner's wishes, which the node learns of at once."""

    def __init__(self, node: JoinedNode) -> None:
        super().__init__()
        self._node = node

    def _put(self, item: Incoming) -> None:
        super()._put(item)
        self._node.urge(item)


def _pauses(event: Incoming | None) -> bool:
    """Return True if the event reports a hold (a reason to pause) of the node or of a device."""
    return isinstance(event, Holding) and bool(event.holds or any(event.of_devices.values()))


def _owner(paths: NodePaths) -> Identity | None:
    """Return the key of the owner's machines; None if the node belongs to no fleet. Raises ConfigError."""
    return key_file.load(paths.owner_key) if paths.owner_key.exists() else None


async def _notify(notice: Notice | None) -> None:
    if notice is not None:
        await asyncio.to_thread(notify, notice)
