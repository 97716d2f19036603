"""Detects whether the machine runs on its battery."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from echo_node.host.sensors.sysfs import number_of, text_of

_EXTERNAL: Final = ("Mains", "USB", "Wireless")


@dataclass(frozen=True, slots=True)
class Battery:
    """State of the machine's own batteries, without those of peripherals."""

    in_use: bool
    share: float | None
    """Average charge of the batteries, from 0 to 1."""


def battery(sys_root: Path) -> Battery | None:
    """Return the battery's state; None if there is no battery. `sys_root`: usually /sys."""
    if sys.platform == "linux":
        return _from_sysfs(sys_root / "class" / "power_supply")
    found = psutil.sensors_battery()
    return None if found is None else Battery(found.power_plugged is False, found.percent / 100)


def _from_sysfs(supplies: Path) -> Battery | None:
    """Read sysfs: https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-power"""
    levels: list[float] = []
    is_plugged = is_discharging = has_battery = False
    for supply in sorted(supplies.glob("*")):
        kind = text_of(supply / "type")
        if kind in _EXTERNAL:
            is_plugged = is_plugged or text_of(supply / "online") == "1"
        elif kind == "Battery" and text_of(supply / "scope") != "Device":
            has_battery = True
            is_discharging = is_discharging or text_of(supply / "status") == "Discharging"
            if (percent := number_of(supply / "capacity")) is not None:
                levels.append(min(100, max(0, percent)) / 100)
    if not has_battery:
        return None
    return Battery(is_discharging and not is_plugged, sum(levels) / len(levels) if levels else None)
