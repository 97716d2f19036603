from collections.abc import Callable
from pathlib import Path

from echo_node.host.sensors.thermal import cpu_celsius

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
