"""The node holds a device's temperature and power at their targets, on simulated devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_node.core.duty import CELSIUS, LEAST_SHARE, SILENCE_S, DeviceFigures, Duty, DutyRules, TargetController
from echo_node.core.manners import MannersConfig, SensorReading
from echo_shared.errors import ConfigError

MONDAY = datetime(2026, 11, 2, 12, 0, tzinfo=UTC)
GPU = "cuda:0"


@dataclass
class ThermalPlant:
    """A chip that warms towards `room + warms * share` with the time constant `lag_s`; its sensor reports whole
    degrees.
    """

    warms: float
    lag_s: float
    room: float = 30.0
    chip: float = 30.0

    def run(self, share: float, seconds: float = 1.0) -> float:
        self.chip += (self.room + self.warms * share - self.chip) * (1 - math.exp(-seconds / self.lag_s))
        return float(math.floor(self.chip))


def driven(rules: DutyRules, plant: ThermalPlant, seconds: int, *, begin: int = 0) -> list[tuple[float, float]]:
    """Return (temperature, share) of each second."""
    found, share = [], 1.0
    for second in range(begin, begin + seconds):
        celsius = plant.run(share)
        share = rules.duty(GPU, DeviceFigures(celsius=celsius), now=float(second), local=MONDAY).share
        found.append((plant.chip, share))
    return found


@settings(max_examples=25, deadline=None)
@given(warms=st.floats(20, 100), lag_s=st.floats(5, 120), room=st.floats(10, 40))
def test_any_chip_settles_at_its_target(warms: float, lag_s: float, room: float) -> None:
    rules = DutyRules(MannersConfig(target_gpu_celsius=70))
    found = driven(rules, ThermalPlant(warms, lag_s, room, room), 1_800)
    above = sum(celsius > 75 for celsius, _ in found)
    assert above <= 20, f"{above} s more than 5 °C above the target"
    last = found[-600:]
    needed = (70 - room) / warms
    if needed >= 1.05:
        assert min(share for _, share in last) >= 0.97, "a chip that stays cool is not slowed down"
    elif LEAST_SHARE < needed <= 1:
        assert all(67 <= celsius < 71.5 for celsius, _ in last)
        shares = [share for _, share in last]
        assert max(shares) - min(shares) <= 0.06
        turns = sum((b - a) * (c - b) < 0 for (a, b), c in zip(pairwise(shares), shares[2:], strict=False))
        assert turns <= 10, "the share does not go up and down"


def test_a_hot_chip_never_reaches_the_limit_that_stops_it() -> None:
    settings = MannersConfig(target_gpu_celsius=78, max_gpu_celsius=87)
    rules, plant = DutyRules(settings), ThermalPlant(warms=70, lag_s=30)
    found = driven(rules, plant, 900)
    assert max(celsius for celsius, _ in found) < 81
    plant.room = 45.0  # The room becomes hotter.
    after = driven(rules, plant, 900, begin=900)
    assert max(celsius for celsius, _ in after) < 87 and 75 <= after[-1][0] <= 79
    plant.room = 10.0  # The room becomes so cold that the target needs no limit.
    celsius, share = driven(rules, plant, 900, begin=1_800)[-1]
    assert 75 <= celsius <= 79 and share > 0.9


@pytest.mark.parametrize("idle_watts", [20.0, 90.0])
@pytest.mark.parametrize("most_watts", [250.0, 700.0])
@pytest.mark.parametrize("period_s", [0.01, 4.0])
def test_the_power_is_held_although_steps_and_pauses_alternate(
    idle_watts: float, most_watts: float, period_s: float
) -> None:
    """In each period, the engine's steps take the permitted share of the time. The driver reports the average power of
    the last second.
    """
    rules, share, busy_s = DutyRules(MannersConfig(target_gpu_watts=200)), 1.0, 0.0
    watts: list[float] = []
    for second in range(600):
        parts = [(second + part / 100) % period_s < share * period_s for part in range(100)]
        busy_s = share if period_s < 1 else sum(parts) / 100
        watts.append(idle_watts + (most_watts - idle_watts) * busy_s)
        share = rules.duty(GPU, DeviceFigures(watts=watts[-1]), now=float(second), local=MONDAY).share
    assert 180 <= sum(watts[-200:]) / 200 <= 208


def test_a_missing_sensor_limits_nothing_and_a_silent_one_keeps_the_share() -> None:
    settings = MannersConfig(target_gpu_celsius=70, target_gpu_watts=100, target_cpu_celsius=70)
    rules = DutyRules(settings)
    for second in range(100):
        assert rules.duty(GPU, DeviceFigures(), now=float(second), local=MONDAY) == Duty()
        assert rules.duty("cpu", DeviceFigures(), now=float(second), local=MONDAY) == Duty()
    shares = [share for _, share in driven(rules, ThermalPlant(60, 20), 300, begin=100)]
    assert 0.5 < shares[-1] < 0.8
    silent = [rules.duty(GPU, DeviceFigures(), now=400.0 + second, local=MONDAY) for second in range(60)]
    assert {duty.share for duty in silent} == {shares[-1]}
    assert silent[0].sentence == f"{shares[-1]:.0%}".replace("%", " %") + " of the GPU's time to stay at 70 °C"


def test_the_share_rises_slowly_after_the_sensor_is_gone() -> None:
    rules = DutyRules(MannersConfig(schedule=("80%",), target_gpu_celsius=70))
    for second in range(200):
        hot = rules.duty(GPU, DeviceFigures(celsius=90.0), now=float(second), local=MONDAY)
    assert hot.share == LEAST_SHARE
    silent = [rules.duty(GPU, DeviceFigures(), now=200.0 + second, local=MONDAY) for second in range(600)]
    shares = [duty.share for duty in silent]
    rising = shares.index(0.06)
    assert SILENCE_S <= rising <= SILENCE_S + 5 and shares[rising + 60] < 0.4, "it rises slowly"
    assert shares == sorted(shares) and silent[-1] == Duty(0.8, "80 % of the GPU's time because of the schedule")
    assert silent[rising].sentence == (
        "6 % of the GPU's time to stay at 70 °C; the sensor is gone, so the share rises slowly"
    )
    for second in range(800, 860):
        back = rules.duty(GPU, DeviceFigures(celsius=90.0), now=float(second), local=MONDAY)
    assert back.share < 0.2 and back.sentence.endswith("to stay at 70 °C, now 90 °C"), "the sensor is back"


def test_seconds_without_a_call_are_no_silence_of_the_sensor() -> None:
    controller = TargetController(CELSIUS)
    controller.read(60.0, 70.0, 0.0)
    before = controller.read(80.0, 70.0, 1.0)
    assert before < 1 and controller.read(None, 70.0, 3_600.0) == before, "the machine has slept"


def test_each_device_has_its_own_share() -> None:
    rules = DutyRules(MannersConfig(target_gpu_celsius=70))
    for second in range(60):
        hot = rules.duty("cuda:0", DeviceFigures(celsius=85.0), now=float(second), local=MONDAY)
        cool = rules.duty("cuda:1", DeviceFigures(celsius=60.0), now=float(second), local=MONDAY)
        processor = rules.duty("cpu", DeviceFigures(celsius=90.0), now=float(second), local=MONDAY)
    assert hot.share < 0.6 and cool == processor == Duty()
    assert hot.sentence.endswith("of the GPU's time to stay at 70 °C, now 85 °C")


def test_the_strictest_limit_counts_and_is_named() -> None:
    at_night = datetime(2026, 11, 2, 23, 0, tzinfo=UTC)
    rules = DutyRules(MannersConfig(schedule=("22:00-07:00", "07:00-22:00 25%"), target_cpu_celsius=70))
    by_day = rules.duty("cpu", DeviceFigures(celsius=60.0), now=0.0, local=MONDAY)
    assert by_day == Duty(0.25, "25 % of the processor's time until 22:00, because of the schedule")
    assert rules.duty("cpu", DeviceFigures(celsius=60.0), now=1.0, local=at_night) == Duty()
    for second in range(2, 200):
        hot = rules.duty("cpu", DeviceFigures(celsius=80.0), now=float(second), local=MONDAY)
    assert hot == Duty(LEAST_SHARE, "5 % of the processor's time to stay at 70 °C, now 80 °C")
    rules.settings = MannersConfig(schedule=("40%",))
    assert rules.duty("cpu", DeviceFigures(celsius=80.0), now=200.0, local=MONDAY) == Duty(
        0.4, "40 % of the processor's time because of the schedule"
    )


@given(st.lists(st.none() | st.floats(-50, 200), max_size=50), st.floats(1, 150), st.floats(0, 1e6))
def test_whatever_a_sensor_says_the_share_stays_within_its_bounds(
    figures: list[float | None], target: float, gap_s: float
) -> None:
    controller = TargetController(CELSIUS)
    for number, figure in enumerate(figures):
        before = controller.share
        share = controller.read(figure, target, number * gap_s)
        assert LEAST_SHARE <= share <= 1
        assert figure is not None or share >= before


def test_figures_are_those_of_the_engines_device() -> None:
    reading = SensorReading(cpu_celsius=50.0, gpu_celsius=60.0, gpu_watts=70.0)
    assert DeviceFigures.of(reading, on_gpu=True) == DeviceFigures(celsius=60.0, watts=70.0)
    assert DeviceFigures.of(reading, on_gpu=False) == DeviceFigures(celsius=50.0)


@pytest.mark.parametrize(
    "limits",
    [
        {"target_gpu_celsius": 87},
        {"target_cpu_celsius": 95},
        {"target_gpu_watts": 100, "max_gpu_watts": 90},
    ],
)
def test_a_target_that_a_limit_hides_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="which stops the engine"):
        MannersConfig(**limits)  # type: ignore[arg-type]
    MannersConfig(**{f"max_{name.partition('_')[2]}": 0 for name in limits} | {"target_cpu_celsius": 94})  # type: ignore[arg-type]
