"""Reads the sensors once a second, and reports to the work loop the holds (reasons to pause) and the share of the
device's time that the engine may use. Keeps the machine awake while the node works, if its owner wants that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

from echo_node.core.duty import DeviceFigures, Duty, DutyRules
from echo_node.core.events import Holding, Incoming
from echo_node.core.manners import Hold, HoldReason, Manners, MannersConfig, OwnerPause, SensorReading
from echo_node.core.waking import Waking
from echo_node.current_run import CurrentRun
from echo_node.engine.choosing import EngineChooser
from echo_node.host.pause import PauseFile
from echo_node.host.sensors.machine import Sensors
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_node.host.wake_lock import WakeLock
from echo_shared.errors import StorageError
from echo_shared.process.process_memory import own_bytes

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
_PAUSE: Final = "the pause"
NO_LOCK: Final = "this system grants no lock against sleep: the machine may fall asleep while the node works"
PAUSED_LOOK_S: Final = 5.0
"""Seconds between two readings while the owner has paused the node, so that sensor values do not matter."""


class OwnerWatch:
    """Watch of the sensors and of the owner's pause. `run` reads the sensors regularly; `change` and `use` take effect
    at once.
    """

    def __init__(
        self,
        manners: Manners,
        sensors: Sensors,
        pause_file: PauseFile,
        *,
        chooser: EngineChooser,
        run: CurrentRun,
        inbox: asyncio.Queue[Incoming],
        meter: TrafficMeter,
        troubles: TroubleLog,
        wake_lock: WakeLock,
        look_s: float = LOOK_S,
    ) -> None:
        self.holds: tuple[Hold, ...] = ()
        self.duty = Duty()
        self._is_to_be_awake = False
        """True while the machine is to be kept awake."""
        self._wake_lock = wake_lock
        self.hub_gpu: float | None = None
        """See `SensorReading.hub_gpu`."""
        self._manners = manners
        self._duty_rules = DutyRules(manners.settings)
        self._waking = Waking()
        self._sensors = sensors
        self._pause_file = pause_file
        self._pause = pause_file.load()
        self._troubles = troubles
        self._meter = meter
        self._is_unsaved = False
        """True if the owner's last command is not on disk."""
        self._chooser = chooser
        self._run = run
        self._inbox = inbox
        self._look_s = look_s
        self._engine_bytes = 0
        """Bytes of memory that the engine used when it ran last."""
        self._told: list[tuple[HoldReason, bool]] | None = []
        self._told_share = 1.0
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()

    @property
    def awake(self) -> str:
        """How the machine is kept awake, in words; empty = it is not to be kept awake."""
        if not self._is_to_be_awake:
            return ""
        return f"kept by {self._wake_lock.held_by}" if self._wake_lock.held_by else NO_LOCK

    async def run(self) -> None:
        try:
            while True:
                await self.look()
                await self._wait()
        finally:
            self._wake_lock.release()
            self._sensors.close()

    async def look(self) -> None:
        """Read the sensors once, and report a Holding if the holds (reasons to pause) or the share have changed."""
        async with self._looking:
            if self._is_unsaved:
                with suppress(StorageError):  # The first failure was reported.
                    self._save()
            device = self._chooser.choice.device
            on_gpu = device != "cpu"
            reading = await asyncio.to_thread(self._read, self._run.engine_pid, on_gpu)
            self.hub_gpu = reading.hub_gpu
            now, local = time.monotonic(), datetime.now().astimezone()
            self.holds = self._manners.holds(
                replace(reading, traffic=self._meter.now()),
                pause=self._pause,
                on_gpu=on_gpu,
                now=now,
                local=local,
            )
            self.duty = self._duty_rules.duty(device, DeviceFigures.of(reading, on_gpu=on_gpu), now=now, local=local)
            await self._keep_awake(reading.on_battery, now)
            reasons = [(hold.reason, hold.frees_memory) for hold in self.holds]
            if reasons != self._told:
                log.info("%s", _news(self.holds))
            if (reasons, self.duty.share) != (self._told, self._told_share):
                self._told, self._told_share = reasons, self.duty.share
                keep_memory_s = self._manners.settings.keep_memory_s
                await self._inbox.put(Holding(holds=self.holds, keep_memory_s=keep_memory_s, share=self.duty.share))

    async def _keep_awake(self, on_battery: bool | None, now: float) -> None:
        allowed = self._manners.settings.keep_awake and not self.holds
        self._is_to_be_awake = self._waking.wants(
            allowed=allowed, works=self._run.works, on_battery=on_battery, now=now
        )
        if self._is_to_be_awake:
            await asyncio.to_thread(self._wake_lock.keep)
        else:
            self._wake_lock.release()

    def change(self, pause: OwnerPause | None) -> None:
        """Pause or resume the node for its owner. Raises StorageError if the disk fails; the change still
        takes effect.
        """
        self._pause = pause
        self._wake.set()
        self._save()

    def use(self, settings: MannersConfig) -> None:
        self._manners.settings = self._duty_rules.settings = settings
        self._told = None  # Report again: the time for keeping memory may have changed.
        self._wake.set()

    def _save(self) -> None:
        """Save the pause. Raises StorageError; the next reading of the sensors retries."""
        self._is_unsaved = True
        try:
            self._pause_file.save(self._pause)
        except StorageError as error:
            self._troubles.met(_PAUSE, error)
            raise
        self._is_unsaved = False
        self._troubles.end(_PAUSE)

    def _read(self, engine_pid: int | None, on_gpu: bool) -> SensorReading:
        if engine_pid is not None:
            self._engine_bytes = own_bytes(engine_pid) or self._engine_bytes
        pids = () if engine_pid is None else (engine_pid,)
        reading = self._sensors.read(self._manners.settings, engines=pids, on_gpu=on_gpu)
        return reading if pids else replace(reading, engine_bytes=self._engine_bytes)

    async def _wait(self) -> None:
        is_paused = any(hold.reason is HoldReason.PAUSED for hold in self.holds)
        try:
            async with asyncio.timeout(max(self._look_s, PAUSED_LOOK_S) if is_paused else self._look_s):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()


def _news(holds: tuple[Hold, ...]) -> str:
    if not holds:
        return "The machine is free again: the node resumes."
    return f"The node pauses. {' '.join(hold.sentence for hold in holds)}"
