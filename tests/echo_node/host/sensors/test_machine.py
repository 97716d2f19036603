import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.host.sensors.machine import MachineSensors, cpu_celsius, running
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
def test_a_wish_that_needs_a_sensor_has_it_read(write: Callable[..., Path], tmp_path: Path) -> None:
    write("class/hwmon/hwmon0", name="coretemp", temp1_input=61_000)
    root = write("class/power_supply/BAT0", type="Battery", status="Discharging", capacity=55)
    sensors = MachineSensors(tmp_path, sys_root=root)
    wishes = MannersConfig(on_battery=True, keep_awake=True, max_cpu_celsius=0, target_cpu_celsius=70)
    found = sensors.read(wishes, engines=(), on_gpu=False)
    sensors.close()
    assert (found.on_battery, found.cpu_celsius) == (True, 61.0)


@pytest.mark.usefixtures("desktop")
def test_a_data_directory_that_is_gone_does_not_end_the_node(tmp_path: Path) -> None:
    sensors = MachineSensors(tmp_path / "gone")
    assert sensors.read(MannersConfig(), engines=(1,), on_gpu=False).free_disk_bytes is None
    sensors.close()


def test_a_program_is_found_by_the_name_of_its_file(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    game = tmp_path / "A game with a long name.exe"
    shutil.copy(Path(sleep).resolve(), game)
    names = ("a GAME with a long name", "blender", "sleeep")
    assert running(names) == frozenset()
    with subprocess.Popen([game, "100"]) as process:
        try:
            assert running(names) == {"a GAME with a long name"}
            assert running((str(game),)) == {str(game)}
        finally:
            process.kill()
    assert running(names) == frozenset() == running(())


HWMON = "class/hwmon"


def test_only_the_hottest_part_of_the_processor_counts(write: Callable[..., Path]) -> None:
    write(f"{HWMON}/hwmon0", name="nvme", temp1_input=99_000)
    root = write(f"{HWMON}/hwmon1", name="coretemp", temp1_input=61_000, temp2_input=72_500, temp1_max=100_000)
    assert cpu_celsius(root) == 72.5
    write(f"{HWMON}/hwmon2", name="k10temp", temp1_input=80_125)
    assert cpu_celsius(root) == 80.125


def test_implausible_temperatures_are_ignored(tmp_path: Path, write: Callable[..., Path]) -> None:
    assert cpu_celsius(tmp_path) is None
    write(
        f"{HWMON}/hwmon0", name="coretemp", temp1_input=-273_000, temp2_input="", temp3_input=255_000, temp4_input="x"
    )
    assert cpu_celsius(tmp_path) is None
    write(f"{HWMON}/hwmon0", temp5_input=-5_000)
    assert cpu_celsius(tmp_path) == -5.0
