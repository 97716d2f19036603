"""The watch over single devices: it assigns sensor values to devices, and pauses single devices for the owner."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_node.core.manners import GpuFigures, HoldReason, MannersConfig, SensorReading
from echo_node.device_watch import DeviceWatch
from echo_node.host.devices import Device
from echo_node.host.hardware import Gpu
from echo_node.host.pause import DevicePausesFile, pause_for
from echo_shared.errors import ConfigError, StorageError
from tests.echo_node.test_owner_watch import Watched

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)


def chooser(*uuids: str) -> SimpleNamespace:
    """Return a stand-in for a node's engine choosers, one for a GPU with each of these ids; "" = the system does not
    report the GPU's id.
    """
    by_device = {}
    for number, uuid in enumerate(uuids):
        gpu = Gpu(name="gpu", memory_bytes=1, uuid=uuid) if uuid else None
        choice = SimpleNamespace(device="cuda", on=Device(name=f"cuda:{number}", api="cuda", gpu=gpu))
        by_device[f"cuda:{number}"] = SimpleNamespace(has_decided=True, choice=choice)
    return SimpleNamespace(by_device=by_device, choice=SimpleNamespace(device="cuda"))


def watching(choosers: SimpleNamespace, directory: Path) -> DeviceWatch:
    file = DevicePausesFile(directory / "device_pauses.json")
    return DeviceWatch(choosers, MannersConfig(), file)  # type: ignore[arg-type]


def held(watch: DeviceWatch, reading: SensorReading) -> dict[str, list[HoldReason]]:
    watch.look(reading, now=0.0, local=NOON)
    return {name: [hold.reason for hold in holds] for name, holds in watch.holds.items()}


def test_each_device_has_the_values_of_its_gpu(tmp_path: Path) -> None:
    watch = watching(chooser("a", "b"), tmp_path)
    gpus = {"a": GpuFigures(celsius=50.0), "b": GpuFigures(celsius=95.0)}
    reading = SensorReading(gpu_celsius=95.0, gpu_watts=1.0, others_gpu=0.0, cpu_celsius=40.0, gpus=gpus)
    assert held(watch, reading) == {"cuda:1": [HoldReason.GPU_HOT]}
    rest = watch.look(reading, now=0.0, local=NOON)
    assert (rest.gpu_celsius, rest.gpu_watts, rest.others_gpu, rest.cpu_celsius) == (None, None, None, 40.0)


def test_values_that_no_gpu_owns_count_for_all(tmp_path: Path) -> None:
    watch = watching(chooser("", "c"), tmp_path)
    reading = SensorReading(gpu_celsius=95.0, gpus={"a": GpuFigures(celsius=50.0)})
    assert held(watch, reading) == {"cuda:0": [HoldReason.GPU_HOT], "cuda:1": [HoldReason.GPU_HOT]}


def test_the_processor_does_not_obey_the_rules_of_the_gpu(tmp_path: Path) -> None:
    choice = SimpleNamespace(device="cpu", on=Device(name="cpu", api="cpu"))
    by_device = {"cpu": SimpleNamespace(has_decided=True, choice=choice)}
    watch = watching(SimpleNamespace(by_device=by_device, choice=choice), tmp_path)
    reading = SensorReading(others_gpu=0.9, gpu_celsius=95.0, gpu_watts=400.0)
    assert held(watch, reading) == {}
    watch.change("cpu", pause_for(None))
    assert held(watch, reading) == {"cpu": [HoldReason.PAUSED]}


def test_a_node_that_chooses_its_device_has_no_device_of_its_own(tmp_path: Path) -> None:
    watch = watching(SimpleNamespace(by_device={"": None}), tmp_path)
    reading = SensorReading(gpu_celsius=95.0)
    assert watch.look(reading, now=0.0, local=NOON) == reading and watch.holds == {}
    with pytest.raises(ConfigError, match=r"(?s)no device cuda:0.*has chosen its device itself"):
        watch.change("cuda:0", pause_for(None))


def test_a_device_stays_paused_after_a_restart(tmp_path: Path) -> None:
    watch = watching(chooser("a", "b"), tmp_path)
    watch.change("cuda:1", pause_for(None))
    assert held(watch, SensorReading()) == {"cuda:1": [HoldReason.PAUSED]}
    again = watching(chooser("a", "b"), tmp_path)
    assert held(again, SensorReading()) == {"cuda:1": [HoldReason.PAUSED]}
    again.change("cuda:1", None)
    assert held(again, SensorReading()) == {} and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"(?s)no device cuda:2.*cuda:0, cuda:1"):
        again.change("cuda:2", None)


def test_a_pause_that_cannot_be_stored_holds_and_is_stored_later(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watch = watching(chooser("a", "b"), tmp_path / "file")
    with pytest.raises(StorageError, match="still keeps it"):
        watch.change("cuda:0", pause_for(None))
    assert held(watch, SensorReading()) == {"cuda:0": [HoldReason.PAUSED]}
    (tmp_path / "file").unlink()
    watch.save_again()
    assert watching(chooser("a"), tmp_path / "file")._pauses.keys() == {"cuda:0"}


async def test_a_change_of_one_device_is_reported_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watched = Watched(tmp_path)
    watched.chooser = chooser("a", "b")
    watch = watched.again(look_s=1_000.0)
    async with watched.running():
        await watched.sensors.looked_at(times=1)
        watch.change_device("cuda:1", pause_for(None))
        told = await watched.told.get()
        assert told.holds == () and [hold.reason for hold in told.of_devices["cuda:1"]] == [HoldReason.PAUSED]
        watch.change_device("cuda:1", None)
        assert (await watched.told.get()).of_devices == {}
    assert "The engine of cuda:1 pauses. You have paused cuda:1." in caplog.text
    assert "The engine of cuda:1 resumes." in caplog.text and "The node pauses" not in caplog.text


async def test_each_device_has_its_own_share(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.chooser = chooser("a", "b")
    watch = watched.again(target_gpu_celsius=70)
    for warm in (60.0, 80.0):
        watched.sensors.reading = SensorReading(
            gpu_celsius=warm, gpus={"a": GpuFigures(celsius=50.0), "b": GpuFigures(celsius=warm)}
        )
        await watch.look()
    told = watched.told.get_nowait()
    assert list(told.shares) == ["cuda:1"] and 0.3 < told.shares["cuda:1"] < 0.7
    assert watch.duty.share == told.shares["cuda:1"] and watch.duty.sentence.startswith("cuda:1: ")
