import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_node import owner_watch
from echo_node.core.events import Holding
from echo_node.core.manners import Manners, MannersConfig, OwnerPause, SensorReading
from echo_node.core.troubles import TroubleCode
from echo_node.device_watch import DeviceWatch
from echo_node.host.pause import DevicePausesFile, PauseFile
from echo_node.host.sensors.machine import MachineSensors
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from echo_node.owner_watch import OwnerWatch
from echo_shared.errors import StorageError
from tests.echo_node.core.test_duty import ThermalPlant
from tests.echo_node.fake_sensors import FakeSensors, FakeWakeLock
from tests.echo_node.host.sensors.test_nvidia import Nvml
from tests.small_disk import mounted, needs_mounts

PATIENCE_S = 60.0


class Watched:
    """The node's watch over its owner's activity, with scripted sensors and a scripted engine."""

    def __init__(self, directory: Path) -> None:
        self.sensors = FakeSensors()
        self.chooser = SimpleNamespace(choice=SimpleNamespace(device="cuda"), by_device={"": None})
        self.run = SimpleNamespace(engine_pids={}, works=False)
        self.lock = FakeWakeLock()
        self.told: asyncio.Queue[Holding] = asyncio.Queue()
        self.file = PauseFile(directory / "pause.json")
        self.device_file = DevicePausesFile(directory / "device_pauses.json")
        self.troubles = TroubleLog()
        self.meter = TrafficMeter(directory / "traffic.json", self.troubles)
        self.watch = self.again()

    def again(self, *, look_s: float = 0.001, **settings: Any) -> OwnerWatch:
        manners = Manners(MannersConfig(keep_memory_s=7.0, **settings))
        self.watch = OwnerWatch(
            manners,
            self.sensors,
            self.file,
            chooser=self.chooser,  # type: ignore[arg-type]
            run=self.run,  # type: ignore[arg-type]
            inbox=self.told,  # type: ignore[arg-type]
            meter=self.meter,
            look_s=look_s,
            troubles=self.troubles,
            devices=DeviceWatch(self.chooser, manners.settings, self.device_file),  # type: ignore[arg-type]
            wake_lock=self.lock,
        )
        return self.watch

    async def next(self) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            return [hold.reason.value for hold in (await self.told.get()).holds]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.watch.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert self.sensors.is_closed and not self.lock.held_by


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


async def test_changes_are_reported_once(watched: Watched) -> None:
    async with watched.running():
        await watched.sensors.looked_at()
        assert watched.told.empty(), "a free machine is not reported"
        watched.sensors.reading = SensorReading(on_battery=True, battery_share=0.9)
        assert await watched.next() == ["on_battery"]
        watched.sensors.reading = SensorReading(on_battery=True, battery_share=0.8)
        await watched.sensors.looked_at()
        assert watched.told.empty() and "80%" in watched.watch.holds[0].sentence
        watched.sensors.reading = SensorReading(on_battery=True, idle_s=0.0)
        assert await watched.next() == ["on_battery", "owner_active"]
        watched.sensors.reading = SensorReading(idle_s=math.inf)
        assert await watched.next() == []


async def test_the_load_of_the_owner_s_hub_is_known_and_pauses_nothing(watched: Watched) -> None:
    watched.sensors.reading = SensorReading(others_gpu=0.1, hub_gpu=0.9)
    await watched.watch.look()
    assert (watched.watch.hub_gpu, watched.watch.holds) == (0.9, ())


async def test_the_owner_s_word_counts_at_once_and_after_a_restart(watched: Watched) -> None:
    watched.again(look_s=1_000.0)
    async with watched.running():
        await watched.sensors.looked_at(times=1)
        watched.watch.change(OwnerPause())
        assert await watched.next() == ["paused"]
    again = watched.again()
    await again.look()
    assert await watched.next() == ["paused"]
    again.change(None)
    await again.look()
    assert await watched.next() == [] and watched.file.load() is None


async def test_a_pause_that_cannot_be_stored_still_holds(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watched.file = PauseFile(tmp_path / "file" / "pause.json")
    watch = watched.again()
    with pytest.raises(StorageError):
        watch.change(OwnerPause())
    await watch.look()
    assert await watched.next() == ["paused"]


@needs_mounts
async def test_a_pause_is_stored_once_the_full_disk_has_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 64 * 1024) as disk:
        watched = Watched(disk.directory)
        disk.fill()
        with pytest.raises(StorageError, match="still keeps it"):
            watched.watch.change(OwnerPause())
        await watched.watch.look()
        assert await watched.next() == ["paused"]
        assert [trouble.code for trouble in watched.troubles.now] == [TroubleCode.DISK_FULL]
        assert list(disk.directory.iterdir()) == [disk.ballast], "no half-written file stays"
        disk.empty()
        await watched.watch.look()
        assert watched.troubles.now == () and watched.file.load() == OwnerPause()


async def test_changed_settings_are_reported_even_if_the_reasons_stay(watched: Watched) -> None:
    watched.sensors.reading = SensorReading(on_battery=True)
    await watched.watch.look()
    assert (await watched.told.get()).keep_memory_s == 7.0
    watched.watch.use(MannersConfig(keep_memory_s=8.0))
    await watched.watch.look()
    assert (await watched.told.get()).keep_memory_s == 8.0


async def test_the_sensors_know_the_engine_and_its_memory(watched: Watched) -> None:
    watched.chooser.choice.device, watched.run.engine_pids = "cpu", {"": os.getpid()}
    await watched.watch.look()
    assert watched.sensors.asked[-1] == (False, (os.getpid(),))
    watched.run.engine_pids = {}
    watched.sensors.reading = SensorReading(free_memory_bytes=0)
    await watched.watch.look()
    assert watched.sensors.asked[-1] == (False, ())
    watched.sensors.reading = SensorReading(free_memory_bytes=2**30)
    assert watched.watch._read((), False).engine_bytes > 2**20


async def test_the_share_of_the_schedule_is_reported_once(watched: Watched) -> None:
    watched.again(schedule=("25%",))
    await watched.watch.look()
    await watched.watch.look()
    told = watched.told.get_nowait()
    assert (told.holds, told.shares.get("", 1.0)) == ((), 0.25) and watched.told.empty()
    assert watched.watch.duty.sentence == "25 % of the GPU's time because of the schedule"
    watched.watch.use(MannersConfig())
    await watched.watch.look()
    assert watched.told.get_nowait().shares.get("", 1.0) == 1.0


async def test_a_warm_gpu_gets_a_smaller_share(watched: Watched) -> None:
    watched.again(target_gpu_celsius=70)
    watched.sensors.reading = SensorReading(gpu_celsius=60.0)
    await watched.watch.look()
    assert watched.told.empty()
    watched.sensors.reading = SensorReading(gpu_celsius=80.0)
    await watched.watch.look()
    told = watched.told.get_nowait()
    assert told.holds == () and 0.3 < told.shares.get("", 1.0) < 0.7


async def test_the_machine_is_kept_awake_only_if_the_owner_wants_it(watched: Watched) -> None:
    watched.run.works = True
    await watched.watch.look()
    assert watched.watch.awake == "" and not watched.lock.held_by
    watched.again(keep_awake=True)
    await watched.watch.look()
    assert watched.watch.awake == "kept by the test" and watched.lock.held_by


@pytest.mark.parametrize("change", ["pause", "battery", "idle", "setting", "exit"])
async def test_the_machine_may_sleep_at_once_when_the_reason_ends(watched: Watched, change: str) -> None:
    watched.run.works = True
    watched.again(keep_awake=True, on_battery=True, look_s=0.001)
    async with watched.running():
        await watched.sensors.looked_at()
        assert watched.lock.held_by
        if change == "pause":
            watched.watch.change(OwnerPause())
        elif change == "battery":
            watched.sensors.reading = SensorReading(on_battery=True)
        elif change == "idle":
            watched.run.works = False
            watched.watch._waking._worked_at = -1_000.0
        elif change == "setting":
            watched.watch.use(MannersConfig(on_battery=True))
        if change != "exit":
            async with asyncio.timeout(PATIENCE_S):
                while watched.lock.held_by:  # noqa: ASYNC110 - The lock is not told to the test.
                    await asyncio.sleep(0.001)
            assert watched.watch.awake == ""


async def test_a_system_without_a_lock_is_reported(watched: Watched) -> None:
    watched.run.works, watched.lock.granted_by = True, ""
    watched.again(keep_awake=True)
    await watched.watch.look()
    assert watched.watch.awake.startswith("this system grants no lock against sleep")


class WarmGpu(Nvml):
    """NVIDIA's library with a GPU that warms by 60 °C and draws 300 W more at full load; the room has 30 °C."""

    def __init__(self, watch: Callable[[], OwnerWatch]) -> None:
        super().__init__()
        self.plant = ThermalPlant(warms=60.0, lag_s=20.0)
        self._watch = watch

    def nvmlDeviceGetTemperature(self, device: int, kind: int) -> int:
        return int(self.plant.run(self._watch().duty.share))

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        return int(1_000 * (50 + 300 * self._watch().duty.share))


async def watch_for(watched: Watched, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1_000, 100_000))
    monkeypatch.setattr(owner_watch, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    for _ in range(seconds):
        await watched.watch.look()


@pytest.mark.parametrize(
    ("wish", "share"), [({"target_gpu_celsius": 66}, 0.6), ({"target_gpu_watts": 200, "max_gpu_celsius": 0}, 0.5)]
)
async def test_nvidias_library_steers_the_engine(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], share: float
) -> None:
    gpu = WarmGpu(lambda: watched.watch)
    monkeypatch.setitem(sys.modules, "pynvml", gpu)
    watched.sensors = MachineSensors(tmp_path, sys_root=tmp_path)  # type: ignore[assignment]
    watched.again(gpu="always", full_screen=True, metered=True, **wish)
    await watch_for(watched, 400, monkeypatch)
    assert watched.watch.holds == () and watched.watch.duty.share == pytest.approx(share, abs=0.06)
    told = [watched.told.get_nowait().shares.get("", 1.0) for _ in range(watched.told.qsize())]
    assert told[-1] == watched.watch.duty.share and min(told) > 0.3


async def test_linux_files_steer_an_engine_on_the_processor(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = tmp_path / "class" / "hwmon" / "hwmon0"
    chip.mkdir(parents=True)
    (chip / "name").write_text("k10temp\n")
    plant = ThermalPlant(warms=60.0, lag_s=20.0)

    class Sensors(MachineSensors):
        def read(self, *args: Any, **options: Any) -> SensorReading:
            (chip / "temp1_input").write_text(f"{1_000 * plant.run(watched.watch.duty.share):.0f}\n")
            return super().read(*args, **options)

    watched.chooser.choice.device = "cpu"
    watched.sensors = Sensors(tmp_path, sys_root=tmp_path)  # type: ignore[assignment]
    watched.again(full_screen=True, metered=True, target_cpu_celsius=60)
    await watch_for(watched, 400, monkeypatch)
    assert watched.watch.duty.share == pytest.approx(0.48, abs=0.06) and 57 <= plant.chip <= 61.5
    assert "of the processor's time to stay at 60 °C" in watched.watch.duty.sentence
