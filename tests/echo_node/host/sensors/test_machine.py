import math
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.host.sensors.machine import MachineSensors
from tests.echo_node.host.sensors.conftest import Desktop


def test_this_machines_sensors_are_read(desktop: Desktop, write: Callable[..., Path], tmp_path: Path) -> None:
    write("class/hwmon/hwmon0", name="coretemp", temp1_input=61_000)
    root = write("class/power_supply/BAT0", type="Battery", status="Discharging", capacity=55)
    sensors = MachineSensors(tmp_path, sys_root=root)
    found = sensors.read(MannersConfig(cpu="idle"), engines=(), on_gpu=False)
    sensors.close()
    assert (found.on_battery, found.battery_share, found.cpu_celsius) == (True, 0.55, 61.0)
    assert found.idle_s == math.inf
    assert found.free_memory_bytes is not None and 0 < found.free_memory_bytes < psutil.virtual_memory().total
    assert found.free_disk_bytes is not None and found.free_disk_bytes > 0
    assert (found.others_cpu, found.others_gpu, found.programs) == (None, None, frozenset())


def test_sensors_without_a_setting_are_not_read(desktop: Desktop, tmp_path: Path) -> None:
    desktop.serve("org.freedesktop.ScreenSaver")
    waived = MannersConfig(
        gpu="always",
        on_battery=True,
        full_screen=True,
        max_cpu_celsius=0,
        min_free_memory_bytes=0,
        min_free_disk_bytes=0,
        metered=True,
    )
    sensors = MachineSensors(tmp_path)
    assert sensors.read(waived, engines=(), on_gpu=False) == SensorReading()
    sensors.close()
    assert desktop.asked == []


@pytest.mark.usefixtures("desktop")
def test_a_data_directory_that_is_gone_does_not_end_the_node(tmp_path: Path) -> None:
    sensors = MachineSensors(tmp_path / "gone")
    assert sensors.read(MannersConfig(), engines=(1,), on_gpu=False).free_disk_bytes is None
    sensors.close()
