"""Reads the sensors once a second, and reports to the work loop the holds (reasons to pause) and the share of the
device's time that the engine may use. Keeps the machine awake while the node works, if its owner wants that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

from echo_node.core.duty import DeviceFigures, Duty, DutyRules
from echo_node.core.events import Holding, Incoming
from echo_node.core.manners import Hold, HoldReason, Manners, MannersConfig, OwnerPause, SensorReading
from echo_node.core.waking import Waking
from echo_node.current_run import CurrentRun
from echo_node.device_watch import DeviceWatch
from echo_node.engine.choosing import EngineChoosers
from echo_node.host.clock import local_now
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
_Told = Mapping[str, tuple[tuple[HoldReason, bool], ...]]
"""Reported (reason, frees memory) of all holds, by device; the node's own holds have the key ""."""


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
        chooser: EngineChoosers,
        run: CurrentRun,
        inbox: asyncio.Queue[Incoming],
        meter: TrafficMeter,
        troubles: TroubleLog,
        devices: DeviceWatch,
        wake_lock: WakeLock,
        look_s: float = LOOK_S,
    ) -> None:
        self.holds: tuple[Hold, ...] = ()
        self.duty = Duty()
        self._is_to_be_awake = False
        """True while the watch wants to keep the machine awake."""
        self._wake_lock = wake_lock
        self.hub_gpu: float | None = None
        """Share of the GPU that this user's own hub uses (`SensorReading.hub_gpu`)."""
        self._manners = manners
        self._duty_rules = DutyRules(manners.settings)
        self._waking = Waking()
        self._sensors = sensors
        self._pause_file = pause_file
        self._pause = pause_file.load()
        self._devices = devices
        self._troubles = troubles
        self._meter = meter
        self._is_unsaved = False
        """True if the owner's last command could not be saved to disk."""
        self._chooser = chooser
        self._run = run
        self._inbox = inbox
        self._look_s = look_s
        self._engine_bytes = 0
        """Bytes of memory that the engines used when they last ran."""
        self._told: _Told | None = _told((), {})
        self._told_shares: Mapping[str, float] = {}
        self._wake = asyncio.Event()
        self._looking = asyncio.Lock()

    @property
    def awake(self) -> str:
        """Text about how the machine is kept awake; empty = it need not be kept awake."""
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
            with suppress(StorageError):  # The first failure to save was already reported.
                self._devices.save_again()
            if self._is_unsaved:
                with suppress(StorageError):
                    self._save()
            on_gpu = self._chooser.choice.device != "cpu"
            reading = await asyncio.to_thread(self._read, tuple(self._run.engine_pids.values()), on_gpu)
            self.hub_gpu = reading.hub_gpu
            now, local = time.monotonic(), local_now()
            reading = self._devices.look(reading, now=now, local=local)
            self.holds = self._manners.holds(
                replace(reading, traffic=self._meter.now()),
                pause=self._pause,
                on_gpu=on_gpu,
                now=now,
                local=local,
            )
            self.duty, shares = self._duties(reading, now=now, local=local)
            await self._keep_awake(reading.on_battery, now)
            told = _told(self.holds, self._devices.holds)
            if told != self._told:
                for sentence in _news(self._told, self.holds, self._devices.holds):
                    log.info("%s", sentence)
            if (told, shares) != (self._told, self._told_shares):
                self._told, self._told_shares = told, shares
                await self._inbox.put(
                    Holding(
                        holds=self.holds,
                        keep_memory_s=self._manners.settings.keep_memory_s,
                        of_devices=dict(self._devices.holds),
                        shares=shares,
                    )
                )

    def _duties(self, reading: SensorReading, *, now: float, local: datetime) -> tuple[Duty, Mapping[str, float]]:
        """Return the strictest duty (limit on the share of a device's time), and the shares below 1 by device."""
        if not self._devices.figures:
            device = self._chooser.choice.device
            figures = DeviceFigures.of(reading, on_gpu=device != "cpu")
            duty = self._duty_rules.duty(device, figures, now=now, local=local)
            return duty, {} if duty.share == 1 else {"": duty.share}
        duties = {}
        for name, gpu in self._devices.figures.items():
            figures = DeviceFigures(celsius=gpu.celsius, watts=gpu.watts)
            if name == "cpu":
                figures = DeviceFigures.of(reading, on_gpu=False)
            duties[name] = self._duty_rules.duty(name, figures, now=now, local=local)
        strictest = min(duties, key=lambda name: duties[name].share)
        said = duties[strictest].sentence
        shares = {name: duty.share for name, duty in duties.items() if duty.share < 1}
        return replace(duties[strictest], sentence=f"{strictest}: {said}" if said else ""), shares

    @property
    def device_holds(self) -> Mapping[str, tuple[Hold, ...]]:
        """Holds (reasons to pause) of single devices, by device."""
        return self._devices.holds

    def change_device(self, device: str, pause: OwnerPause | None) -> None:
        """Pause or resume one device. Raises ConfigError if the node has no such device, and StorageError if the disk
        fails; the pause then still takes effect.
        """
        self._wake.set()
        self._devices.change(device, pause)

    async def _keep_awake(self, on_battery: bool | None, now: float) -> None:
        allowed = self._manners.settings.keep_awake and not self.holds
        wants = self._waking.wants(allowed=allowed, works=self._run.works, on_battery=on_battery, now=now)
        if wants:
            await asyncio.to_thread(self._wake_lock.keep)
        else:
            self._wake_lock.release()
        # Set this last: otherwise a lock that is being taken would look like a missing lock.
        self._is_to_be_awake = wants

    def change(self, pause: OwnerPause | None) -> None:
        """Pause or resume the node for its owner. Raises StorageError if the disk fails; the change still
        takes effect.
        """
        self._pause = pause
        self._wake.set()
        self._save()

    def use(self, settings: MannersConfig) -> None:
        self._manners.settings = self._duty_rules.settings = settings
        self._devices.use(settings)
        self._told = None  # Report again: the seconds for which the engine keeps its memory may have changed.
        self._wake.set()

    def _save(self) -> None:
        """Save the owner's pause to disk. Raises StorageError; the node retries at the next reading of the sensors."""
        self._is_unsaved = True
        try:
            self._pause_file.save(self._pause)
        except StorageError as error:
            self._troubles.met(_PAUSE, error)
            raise
        self._is_unsaved = False
        self._troubles.end(_PAUSE)

    def _read(self, pids: tuple[int, ...], on_gpu: bool) -> SensorReading:
        if pids:
            self._engine_bytes = sum(own_bytes(pid) or 0 for pid in pids) or self._engine_bytes
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


def _told(holds: tuple[Hold, ...], of_devices: Mapping[str, tuple[Hold, ...]]) -> _Told:
    return {
        name: tuple((hold.reason, hold.frees_memory) for hold in some)
        for name, some in {"": holds, **of_devices}.items()
    }


def _news(before: _Told | None, holds: tuple[Hold, ...], of_devices: Mapping[str, tuple[Hold, ...]]) -> Iterator[str]:
    """Yield a sentence for the node, and for each device, whose holds (reasons to pause) have changed."""
    known, now = before or {}, _told(holds, of_devices)
    if before is None or known.get("") != now[""]:
        said = " ".join(hold.sentence for hold in holds)
        yield f"The node pauses. {said}" if holds else "The machine is free again: the node resumes."
    for name in sorted((known.keys() | now.keys()) - {""}):
        if known.get(name, ()) != now.get(name, ()):
            said = " ".join(hold.sentence for hold in of_devices.get(name, ()))
            yield f"The engine of {name} pauses. {said}" if said else f"The engine of {name} resumes."
