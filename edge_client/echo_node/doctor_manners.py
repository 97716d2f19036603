"""Shows the sensors that this machine offers, and the conditions under which a node would pause now."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from echo_node.config import NodeConfig
from echo_node.core.clocks import in_words
from echo_node.core.duty import DeviceFigures, DutyRules
from echo_node.core.manners import Manners, MannersConfig, SensorReading
from echo_node.findings import Finding
from echo_node.host import control
from echo_node.host.paths import NodePaths
from echo_node.host.pause import PauseFile
from echo_node.host.sensors.machine import MachineSensors, Sensors
from echo_node.host.wake_lock import WakeLock, wake_lock_here
from echo_shared.errors import ConnectError


def examine_manners(
    paths: NodePaths,
    config: NodeConfig,
    *,
    on_gpu: bool,
    sensors: Sensors | None = None,
    wake_lock: WakeLock | None = None,
) -> Iterator[Finding]:
    """Yield findings. `on_gpu`: the engine would use a GPU. `sensors`, `wake_lock`: None = this machine's. Blocks the
    calling thread for a second.
    """
    found = sensors or MachineSensors(paths.data_dir)
    try:
        reading = found.read(_with_every_sensor(config.manners), engines=(), on_gpu=True)
        yield from _sensors(reading)
        yield from _targets(config.manners, reading, on_gpu=on_gpu)
        if config.manners.keep_awake:
            yield _awake(wake_lock or wake_lock_here())
        running = _running(paths)
        if running is not None:
            yield from _of_the_running_node(running)
        else:
            yield from _of_a_new_node(paths, config.manners, found, on_gpu=on_gpu)
    finally:
        found.close()


def _with_every_sensor(settings: MannersConfig) -> MannersConfig:
    """Return settings under which every sensor is read."""
    asks = MannersConfig()
    return settings.model_copy(
        update={
            "gpu": "idle",
            "cpu": "idle",
            "on_battery": False,
            "full_screen": False,
            "metered": False,
            "max_cpu_celsius": asks.max_cpu_celsius,
            "min_free_memory_bytes": asks.min_free_memory_bytes,
            "min_free_disk_bytes": asks.min_free_disk_bytes,
        }
    )


def _sensors(reading: SensorReading) -> Iterator[Finding]:
    said = {
        "the owner's keyboard and mouse": _idle(reading.idle_s),
        "battery": None if reading.on_battery is None else ("in use" if reading.on_battery else "not in use"),
        "full screen": None if reading.full_screen is None else ("yes" if reading.full_screen else "no"),
        "the GPU's load": _gpu_load(reading),
        "the GPU's temperature": _celsius(reading.gpu_celsius),
        "the GPU's power": None if reading.gpu_watts is None else f"{reading.gpu_watts:.0f} W",
        "the processor's temperature": _celsius(reading.cpu_celsius),
        "metered network": None if reading.metered is None else ("yes" if reading.metered else "no"),
    }
    told = "; ".join(f"{name}: {value}" for name, value in said.items() if value is not None)
    missing = ", ".join(name for name, value in said.items() if value is None)
    if told:
        yield Finding(subject="sensors", level="ok", what=told)
    if missing:
        what = f"this machine does not report: {missing}. A missing value pauses nothing"
        yield Finding(subject="sensors", level="note", what=what)


def _targets(settings: MannersConfig, reading: SensorReading, *, on_gpu: bool) -> Iterator[Finding]:
    """Report the targets of temperature and power that have no effect on this machine."""
    whose = "the GPU's" if on_gpu else "the processor's"
    for key, target, figure, what, is_used, device in (
        ("target_cpu_celsius", settings.target_cpu_celsius, reading.cpu_celsius, "temperature", not on_gpu, "GPU"),
        ("target_gpu_celsius", settings.target_gpu_celsius, reading.gpu_celsius, "temperature", on_gpu, "processor"),
        ("target_gpu_watts", settings.target_gpu_watts, reading.gpu_watts, "power", on_gpu, "processor"),
    ):
        if target and not is_used:
            what = f"manners.{key} = {target:g} has no effect: the engine of this node computes on the {device}"
            yield Finding(subject="target", level="note", what=what)
        elif target and figure is None:
            yield Finding(
                subject="target",
                level="warning",
                what=f"manners.{key} = {target:g} has no effect: this machine does not report {whose} {what}",
                do="Limit the node by a level instead: echo-node config set manners.schedule 50%",
            )


def _awake(lock: WakeLock) -> Finding:
    """Take and release the lock that keeps the machine awake, and report which service granted it."""
    lock.keep()
    held_by = lock.held_by
    lock.release()
    if held_by:
        what = f"{held_by} keeps this machine awake while the node works on mains power"
        return Finding(subject="keep awake", level="ok", what=what)
    what = "this system grants no lock against sleep: the machine may fall asleep while the node works"
    return Finding(
        subject="keep awake",
        level="warning",
        what=what,
        do="Turn off automatic sleep in the system's power settings, or run: echo-node config unset manners.keep_awake",
    )


def _idle(idle_s: float | None) -> str | None:
    if idle_s is None:
        return None
    return "no desktop is in use here" if math.isinf(idle_s) else f"last used {in_words(idle_s)} ago"


def _gpu_load(reading: SensorReading) -> str | None:
    if reading.others_gpu is None:
        return None
    hub = f", {reading.hub_gpu:.0%} by your own hub, which pauses nothing" if reading.hub_gpu else ""
    return f"{reading.others_gpu:.0%} by others{hub}"


def _celsius(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} °C"


def _running(paths: NodePaths) -> Mapping[str, Any] | None:
    try:
        return asyncio.run(control.ask(paths.control_file, "status"))
    except ConnectError:
        return None


def _of_the_running_node(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Report the running node's holds (reasons to pause), its share of the device's time, and its problems."""
    if share := status.get("share_reason"):  # Nodes of older releases send no share.
        yield Finding(subject="share", level="note", what=f"the node that runs here uses at most {share}")
    for sentence in status["holds"].values():
        yield Finding(subject="held back", level="note", what=sentence)
    problems = status.get("problems", {})  # Nodes of older releases send no problems.
    for sentence in problems.values():
        yield Finding(subject="running node", level="warning", what=sentence)
    if not status["holds"] and not problems:
        yield Finding(subject="held back", level="ok", what="by nothing; the node that runs here works")


def _of_a_new_node(paths: NodePaths, settings: MannersConfig, sensors: Sensors, *, on_gpu: bool) -> Iterator[Finding]:
    """Report the holds (reasons to pause) of a node that would start now."""
    reading = sensors.read(settings, engines=(), on_gpu=on_gpu)
    now, local = time.monotonic(), datetime.now().astimezone()
    pause = PauseFile(paths.pause_file).load()
    holds = Manners(settings).holds(reading, pause=pause, on_gpu=on_gpu, now=now, local=local)
    device, figures = "gpu" if on_gpu else "cpu", DeviceFigures.of(reading, on_gpu=on_gpu)
    if share := DutyRules(settings).duty(device, figures, now=now, local=local).sentence:
        yield Finding(subject="share", level="note", what=f"a node would now use at most {share}")
    for hold in holds:
        yield Finding(
            subject="held back",
            level="note",
            what=f"a node would pause now. {hold.sentence}",
        )
    if not holds:
        yield Finding(subject="held back", level="ok", what="by nothing at this moment")
