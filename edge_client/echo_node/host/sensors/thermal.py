"""The processor's temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from echo_node.host.sensors.sysfs import number_of, text_of

_PROCESSORS: Final = ("coretemp", "k10temp", "k8temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu")
"""Drivers of processor sensors, as hwmon names them."""
_CELSIUS: Final = (-20.0, 150.0)
"""Range of plausible temperatures in degrees Celsius. Values outside come from unconnected sensors."""


def cpu_celsius(sys_root: Path) -> float | None:
    """Return the temperature of the hottest part; None if unknown, as on macOS and Windows without administrator
    rights.

    https://www.kernel.org/doc/Documentation/hwmon/sysfs-interface.rst: thousandths of a degree.
    """
    found = [
        said / 1000
        for chip in (sys_root / "class" / "hwmon").glob("*")
        if text_of(chip / "name") in _PROCESSORS
        for file in chip.glob("temp*_input")
        if (said := number_of(file)) is not None
    ]
    return max((celsius for celsius in found if _CELSIUS[0] < celsius < _CELSIUS[1]), default=None)
