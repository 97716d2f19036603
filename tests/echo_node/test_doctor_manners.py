"""The doctor's report on manners (the rules by which a node yields to its owner), with scripted and with real
sensors.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from echo_node.config import NodeConfig
from echo_node.core.manners import MannersConfig, OwnerPause, SensorReading
from echo_node.doctor_manners import examine_manners
from echo_node.findings import Finding
from echo_node.host.control import control_server
from echo_node.host.paths import NodePaths
from echo_node.host.pause import PauseFile
from tests.echo_node.fake_sensors import FakeSensors, FakeWakeLock


def found(paths: NodePaths, reading: SensorReading, **manners: object) -> list[Finding]:
    sensors = FakeSensors()
    sensors.reading = reading
    config = NodeConfig(manners=MannersConfig(**manners))  # type: ignore[arg-type]
    findings = list(examine_manners(paths, config, on_gpu=True, sensors=sensors))
    assert sensors.is_closed
    return findings


def test_available_and_missing_sensors_are_listed(tmp_path: Path) -> None:
    told, missing, held = found(
        NodePaths.find(tmp_path), SensorReading(idle_s=math.inf, on_battery=False, cpu_celsius=45.4)
    )
    assert (told.subject, told.level) == ("sensors", "ok")
    assert told.what == (
        "the owner's keyboard and mouse: no desktop is in use here; battery: not in use;"
        " the processor's temperature: 45 °C"
    )
    assert (missing.subject, missing.level) == ("sensors", "note")
    assert missing.what.startswith("this machine does not report: full screen, the GPU's load, the GPU's temperature,")
    assert (held.subject, held.level, held.what) == ("held back", "ok", "by nothing at this moment")


def test_a_hub_on_the_same_gpu_is_named_and_pauses_nothing(tmp_path: Path) -> None:
    reading = SensorReading(others_gpu=0.02, hub_gpu=0.85)
    told, _, held = found(NodePaths.find(tmp_path), reading)
    assert told.what == "the GPU's load: 2% by others, 85% by your own hub, which pauses nothing"
    assert (held.subject, held.level) == ("held back", "ok")


def test_current_reasons_to_hold_a_node_are_shown(tmp_path: Path) -> None:
    paths = NodePaths.find(tmp_path)
    PauseFile(paths.pause_file).save(OwnerPause())
    held = [one for one in found(paths, SensorReading(on_battery=True)) if one.subject == "held back"]
    assert [one.level for one in held] == ["note", "note"]
    assert "a node would pause now. Paused by you." in held[0].what and "On battery." in held[1].what


async def test_a_running_nodes_holds_and_troubles_are_shown(tmp_path: Path) -> None:
    paths = NodePaths.find(tmp_path)
    status = {"holds": {"on_battery": "On battery."}, "problems": {"disk_full": "The disk is full."}}
    async with control_server(paths.control_file, {"status": lambda _: status}):
        findings = await asyncio.to_thread(found, paths, SensorReading())
        status |= {"holds": {}, "problems": {}}
        well = await asyncio.to_thread(found, paths, SensorReading())
    told = [(one.subject, one.level, one.what) for one in findings if one.subject != "sensors"]
    assert told == [("held back", "note", "On battery."), ("running node", "warning", "The disk is full.")]
    assert well[-1].level == "ok" and "works" in well[-1].what


def test_this_machine_s_own_sensors_are_asked(tmp_path: Path) -> None:
    settings = NodeConfig(manners=MannersConfig(min_free_disk_bytes=2**62))
    findings = list(examine_manners(NodePaths.find(tmp_path), settings, on_gpu=False))
    assert findings[-1].subject == "held back" and "of the disk are free" in findings[-1].what
    assert {one.subject for one in findings} == {"sensors", "held back"}


@pytest.mark.parametrize("idle_s", [0.0, 600.0])
def test_recent_activity_of_the_owner_is_shown(tmp_path: Path, idle_s: float) -> None:
    findings = found(NodePaths.find(tmp_path), SensorReading(idle_s=idle_s))
    assert f"last used {'0 s' if idle_s == 0 else '10 min'} ago" in findings[0].what


def test_a_target_without_its_sensor_is_reported(tmp_path: Path) -> None:
    paths = NodePaths.find(tmp_path)
    wishes = {"target_gpu_celsius": 70, "target_gpu_watts": 200, "target_cpu_celsius": 80}
    reading = SensorReading(gpu_watts=100.0)
    told = [(one.level, one.what) for one in found(paths, reading, **wishes) if one.subject == "target"]
    assert told == [
        ("note", "manners.target_cpu_celsius = 80 has no effect: the engine of this node computes on the GPU"),
        (
            "warning",
            "manners.target_gpu_celsius = 70 has no effect: this machine does not report the GPU's temperature",
        ),
    ]


def test_the_current_share_is_shown(tmp_path: Path) -> None:
    shares = found(NodePaths.find(tmp_path), SensorReading(), schedule=("30%",))
    assert [one.what for one in shares if one.subject == "share"] == [
        "a node would now use at most 30 % of the GPU's time because of the schedule"
    ]


@pytest.mark.parametrize(("held_by", "level"), [("the test", "ok"), ("", "warning")])
def test_the_lock_against_sleep_is_tried_if_the_owner_wants_it(tmp_path: Path, held_by: str, level: str) -> None:
    lock = FakeWakeLock()
    lock.granted_by = held_by
    config = NodeConfig(manners=MannersConfig(keep_awake=True))
    findings = examine_manners(NodePaths.find(tmp_path), config, on_gpu=False, sensors=FakeSensors(), wake_lock=lock)
    (finding,) = [one for one in findings if one.subject == "keep awake"]
    assert finding.level == level and not lock.held_by
    assert not [one for one in found(NodePaths.find(tmp_path), SensorReading()) if one.subject == "keep awake"]
