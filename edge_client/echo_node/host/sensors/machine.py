"""All sensors of the machine and its owner, behind one interface."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Final, Protocol

import psutil

from echo_node.core.manners import GpuFigures, MannersConfig, SensorReading
from echo_node.host.sensors import cgroup
from echo_node.host.sensors.drm import DrmSensors
from echo_node.host.sensors.gpu_reading import GpuReading, together
from echo_node.host.sensors.kin import Kin
from echo_node.host.sensors.load import OthersLoad
from echo_node.host.sensors.nvidia import NvidiaSensors
from echo_node.host.sensors.owner import owner_here
from echo_node.host.sensors.power import battery
from echo_node.host.sensors.sysfs import number_of, text_of

SYS: Final = Path("/sys")
PROC: Final = Path("/proc")
_PROCESSORS: Final = ("coretemp", "k10temp", "k8temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu")
"""Names of the drivers of processor sensors in hwmon."""
_CELSIUS: Final = (-20.0, 150.0)
"""Plausible temperatures in degrees Celsius. Values outside this range come from sensors that are not connected."""


class Sensors(Protocol):
    """Sensors that are read once a second. A missing value never raises an error."""

    def read(self, settings: MannersConfig, *, engines: Collection[int], on_gpu: bool) -> SensorReading:
        """Read the sensors that the settings need. Blocks the calling thread for milliseconds, or for half a second if
        a desktop hangs.

        `engines`: ids of the node's other processes.
        """
        ...

    def close(self) -> None: ...


class MachineSensors:
    def __init__(self, data_dir: Path, *, sys_root: Path = SYS, proc_root: Path = PROC) -> None:
        self._data_dir = data_dir
        self._sys_root = sys_root
        self._owner = owner_here()
        self._kin = Kin()
        self._nvidia, self._drm = NvidiaSensors(self._kin), DrmSensors(sys_root, proc_root)
        self._load = OthersLoad()

    def read(self, settings: MannersConfig, *, engines: Collection[int], on_gpu: bool) -> SensorReading:
        power = battery(self._sys_root) if settings.keep_awake or not settings.on_battery else None
        waits = (settings.gpu if on_gpu else settings.cpu) == "idle"
        gpus = self._gpus(engines) if on_gpu else []
        gpu = together(gpus)
        return SensorReading(
            idle_s=self._owner.idle_s() if waits else None,
            on_battery=None if power is None else power.in_use,
            battery_share=None if power is None else power.share,
            programs=running(settings.exclusive),
            full_screen=None if settings.full_screen else self._owner.full_screen(),
            others_cpu=self._load.share(self._ours(engines)) if settings.others_cpu < 1 else None,
            others_gpu=gpu.others,
            hub_gpu=gpu.hub,
            cpu_celsius=cpu_celsius(self._sys_root)
            if settings.max_cpu_celsius or settings.target_cpu_celsius
            else None,
            gpu_celsius=gpu.celsius,
            gpu_watts=gpu.watts,
            gpus={
                one.uuid: GpuFigures(others=one.others, celsius=one.celsius, watts=one.watts)
                for one in gpus
                if one.uuid
            },
            free_memory_bytes=_free_memory_bytes() if settings.min_free_memory_bytes else None,
            free_disk_bytes=_free_bytes(self._data_dir) if settings.min_free_disk_bytes else None,
            metered=None if settings.metered else self._owner.metered(),
        )

    def _gpus(self, engines: Collection[int]) -> list[GpuReading]:
        return [*self._nvidia.read(engines), *self._drm.read(self._ours(engines), time.monotonic())]

    def _ours(self, engines: Collection[int]) -> frozenset[int]:
        """Return the ids of the engines and of this user's other Echo processes, without this process."""
        return self._kin.pids().union(engines) - {os.getpid()}

    def close(self) -> None:
        self._owner.close()
        self._nvidia.close()


def _free_memory_bytes() -> int:
    """Return the machine's free memory, or less if a control group limits this process."""
    allowed, free = cgroup.left_bytes(), int(psutil.virtual_memory().available)
    return free if allowed is None else min(free, allowed)


def _free_bytes(directory: Path) -> int | None:
    try:
        return int(psutil.disk_usage(str(directory)).free)
    except OSError:
        return None


def running(names: Collection[str]) -> frozenset[str]:
    """Return the `names` that belong to running programs. Case, directory and ".exe" do not matter."""
    if not names:
        return frozenset()
    wanted = {_plain(name): name for name in names}
    return frozenset(
        wanted[plain]
        for process in psutil.process_iter(["name", "exe"])
        for plain in {_plain(process.info["name"] or ""), _plain(process.info["exe"] or "")}
        if plain in wanted
    )


def _plain(name: str) -> str:
    """Return a program's name as users write it: without directory, case and ".exe"."""
    return PurePath(name).name.casefold().removesuffix(".exe")


def cpu_celsius(sys_root: Path) -> float | None:
    """Return the temperature of the processor's hottest part; None if unknown, as on macOS, and on Windows without
    administrator rights.

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
