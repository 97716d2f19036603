"""GPU readings of Linux's own graphics drivers: load, temperature, power. AMD's driver reports all of them.

https://docs.kernel.org/gpu/amdgpu/thermal.html, https://docs.kernel.org/gpu/drm-usage-stats.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_node.host.sensors.gpu_reading import GpuReading
from echo_node.host.sensors.sysfs import number_of, text_of

_ENGINES: Final = ("drm-engine-gfx", "drm-engine-compute", "drm-engine-render")
_NANOSECONDS: Final = 1e9
SHORTEST_S: Final = 0.5
"""Minimum seconds between two readings. The used share of the GPU is measured between two readings, and would be
inexact over a shorter time.
"""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Total GPU time of this node's processes since their start, by device."""

    at: float
    by_device_s: dict[str, float]


class DrmSensors:
    """Sensors of the GPUs below `sys_root`. `proc_root`: Linux's process directory."""

    def __init__(self, sys_root: Path, proc_root: Path) -> None:
        self._cards = sys_root / "class" / "drm"
        self._proc = proc_root
        self._taken: _Taken | None = None
        self._own: dict[str, float] = {}
        """Share of each device's time that this node used between the last two readings."""

    def read(self, own: Collection[int], now: float) -> list[GpuReading]:
        """Return one reading for each GPU whose driver reports something. `own`: processes of this node; `now`:
        monotonic time.
        """
        self._look(own, now)
        return [
            reading
            for device in sorted({card.resolve() for card in self._cards.glob("card[0-9]*/device")})
            if (reading := self._of(device)) != GpuReading()
        ]

    def _of(self, device: Path) -> GpuReading:
        busy = number_of(device / "gpu_busy_percent")
        others = None if busy is None else max(0.0, busy / 100 - self._own.get(device.name, 0.0))
        celsius = [number_of(file) for file in device.glob("hwmon/hwmon*/temp*_input")]
        watts = [
            number_of(file) for name in ("average", "input") for file in device.glob(f"hwmon/hwmon*/power1_{name}")
        ]
        return GpuReading(
            others=others,
            celsius=max((one / 1e3 for one in celsius if one is not None), default=None),
            watts=max((one / 1e6 for one in watts if one is not None), default=None),
        )

    def _look(self, own: Collection[int], now: float) -> None:
        if self._taken is not None and now - self._taken.at < SHORTEST_S:
            return
        taken: dict[str, float] = {}
        for device, seconds in self._clients(own):
            taken[device] = taken.get(device, 0.0) + seconds
        if self._taken is not None:
            passed_s, before = now - self._taken.at, self._taken.by_device_s
            # Clip at 0: the total falls when a process has ended.
            self._own = {name: max(0.0, all_s - before.get(name, 0.0)) / passed_s for name, all_s in taken.items()}
        self._taken = _Taken(now, taken)

    def _clients(self, own: Collection[int]) -> Iterator[tuple[str, float]]:
        """Yield (device, seconds) of each connection of a process to a device. A connection with several open files
        counts once.
        """
        seen: set[tuple[str, str]] = set()
        for pid in own:
            for file in (self._proc / str(pid) / "fdinfo").glob("*"):
                said = dict(_said(text_of(file)))
                client = (said.get("drm-pdev", ""), said.get("drm-client-id", ""))
                if all(client) and client not in seen:
                    seen.add(client)
                    yield client[0], sum(_whole(said.get(name, "")) for name in _ENGINES) / _NANOSECONDS


def _said(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def _whole(text: str) -> int:
    """Return the number in "123 ns"; 0 for other texts."""
    first = text.split(" ")[0]
    return int(first) if first.isdecimal() else 0
