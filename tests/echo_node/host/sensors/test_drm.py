from collections.abc import Callable
from pathlib import Path

import pytest

from echo_node.host.sensors.drm import DrmSensors
from echo_node.host.sensors.gpu_reading import GpuReading

SECOND = 1_000_000_000
CARD = "class/drm/card0/device"


@pytest.fixture
def sensors(tmp_path: Path) -> DrmSensors:
    return DrmSensors(tmp_path, tmp_path / "proc")


def computed(write: Callable[..., Path], pid: int, seconds: float, *, file: str = "7", client: int = 1) -> None:
    """Write the file by which Linux shows that a process has used the GPU for `seconds`."""
    lines = f"drm-driver:\tamdgpu\ndrm-pdev:\tdevice\ndrm-client-id:\t{client}\npos:\t0"
    engines = f"drm-engine-gfx:\t{int(seconds * SECOND / 2)} ns\ndrm-engine-compute:\t{int(seconds * SECOND / 2)} ns"
    write(f"proc/{pid}/fdinfo", **{file: f"{lines}\n{engines}"})


def test_a_machine_without_cards_tells_nothing(sensors: DrmSensors) -> None:
    assert sensors.read((1,), 0.0) == []


def test_a_cards_temperature_and_power_are_read(sensors: DrmSensors, write: Callable[..., Path]) -> None:
    write(f"{CARD}/hwmon/hwmon3", temp1_input=61_000, temp2_input=74_500, power1_average=142_000_000)
    assert sensors.read((), 0.0) == [GpuReading(celsius=74.5, watts=142.0)]


def test_a_card_without_figures_is_ignored(sensors: DrmSensors, write: Callable[..., Path]) -> None:
    write(CARD, vendor="0x8086", gpu_busy_percent="what")
    assert sensors.read((), 0.0) == []


def test_the_load_of_others_excludes_this_nodes(sensors: DrmSensors, write: Callable[..., Path]) -> None:
    write(CARD, gpu_busy_percent=90)
    computed(write, 5, 100.0)
    # A second file descriptor of the same GPU context, whose time must not count twice.
    computed(write, 5, 100.0, file="8")
    assert sensors.read((5,), 10.0) == [GpuReading(others=0.9)], "nothing to compare with yet"
    for file in ("7", "8"):
        computed(write, 5, 101.2, file=file)
    (reading,) = sensors.read((5,), 12.0)
    assert reading.others == pytest.approx(0.3)
    assert sensors.read((5,), 12.1) == [reading], "too soon for another figure"
    assert sensors.read((), 14.0) == [GpuReading(others=0.9)], "the process has ended"


def test_two_connections_of_a_process_add_up(sensors: DrmSensors, write: Callable[..., Path]) -> None:
    write(CARD, gpu_busy_percent=80)
    for seconds in (0.0, 0.5):
        computed(write, 5, seconds, file="7", client=1)
        computed(write, 5, seconds, file="8", client=2)
        readings = sensors.read((5,), 2 * seconds)
    assert readings == [GpuReading(others=0.0)]
