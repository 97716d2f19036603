"""Holds (reasons to pause) of single devices: each device has its own pause, load, temperature and power."""

from __future__ import annotations

from datetime import UTC, datetime

from echo_node.core.device_manners import DeviceManners
from echo_node.core.manners import CALM_S, GpuFigures, Hold, HoldReason, MannersConfig, OwnerPause

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
COOL, HOT = GpuFigures(celsius=50.0), GpuFigures(celsius=95.0)
NEVER = MannersConfig(schedule=("sun 03:00-03:01",))


def holds(
    manners: DeviceManners, device: str, figures: GpuFigures, *, now: float = 0.0, pause: OwnerPause | None = None
) -> tuple[Hold, ...]:
    return manners.holds(device, figures, pause=pause, now=now, local=NOON)


def reasons(found: tuple[Hold, ...]) -> list[HoldReason]:
    return [hold.reason for hold in found]


def test_a_hot_gpu_holds_its_own_engine_until_it_stays_cool() -> None:
    manners = DeviceManners(NEVER)
    (hot,) = holds(manners, "cuda:1", HOT)
    assert (hot.reason, hot.frees_memory) == (HoldReason.GPU_HOT, False)
    assert hot.sentence == "cuda:1: The GPU is 95 °C warm; the limit is 87 °C."
    assert holds(manners, "cuda:0", COOL) == (), "the working hours concern the whole node"
    assert reasons(holds(manners, "cuda:1", COOL, now=CALM_S / 2)) == [HoldReason.GPU_HOT]
    assert holds(manners, "cuda:1", COOL, now=CALM_S) == ()


def test_other_programs_and_power_count_by_device() -> None:
    manners = DeviceManners(MannersConfig(max_gpu_watts=200))
    (busy,) = holds(manners, "cuda:0", GpuFigures(others=0.9, watts=100.0))
    assert (busy.reason, busy.frees_memory) == (HoldReason.OTHERS_GPU, True)
    assert reasons(holds(manners, "cuda:1", GpuFigures(others=0.1, watts=300.0))) == [HoldReason.GPU_POWER]


def test_a_paused_device_says_how_to_resume_it() -> None:
    manners = DeviceManners(MannersConfig())
    (paused,) = holds(manners, "cuda:1", COOL, pause=OwnerPause())
    assert paused.reason is HoldReason.PAUSED
    assert paused.sentence == "You have paused cuda:1. Resume it with: echo-node resume --device cuda:1"
    until = OwnerPause(until=NOON.timestamp() + 3_600)
    assert "until Mon 13:00" in holds(manners, "cuda:1", COOL, pause=until)[0].sentence
    assert holds(manners, "cuda:1", COOL, pause=OwnerPause(until=NOON.timestamp())) == ()


def test_changed_limits_count_at_once() -> None:
    manners = DeviceManners(MannersConfig())
    assert holds(manners, "cuda:0", GpuFigures(celsius=80.0)) == ()
    manners.use(MannersConfig(max_gpu_celsius=70, schedule=("sun 03:00-03:01",)))
    assert reasons(holds(manners, "cuda:0", GpuFigures(celsius=80.0))) == [HoldReason.GPU_HOT]
