from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.backends import duty_cycle
from echo_node.backends.duty_cycle import CREDIT_S, LONGEST_STEP_S, DutyCycle


@dataclass
class ScriptedTime:
    """Stand-in for the module `time`, with scripted times."""

    now: float = 100.0
    cpu_s: float = 5.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.cpu_s


class ScriptedEngine:
    """An engine whose steps take scripted times."""

    def __init__(self, clock: ScriptedTime, duty: DutyCycle) -> None:
        self.clock, self.duty = clock, duty
        self.rested: list[float] = []

    def step(self, seconds: float, cpu_s: float = 0.0, *, late_s: float = 0.0) -> float:
        """Take a step, then rest, `late_s` longer than needed. Return the rest's length."""
        self.duty.begin()
        self.clock.now += seconds
        self.clock.cpu_s += cpu_s
        self.duty.end()
        rest_s = self.duty.rest_s
        self.clock.now += rest_s + (late_s if rest_s else 0.0)
        self.rested.append(rest_s)
        return rest_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ScriptedTime:
    clock = ScriptedTime()
    monkeypatch.setattr(duty_cycle, "time", clock)
    return clock


def test_a_gpu_rests_in_proportion_to_its_steps(clock: ScriptedTime) -> None:
    engine = ScriptedEngine(clock, DutyCycle(0))
    assert engine.step(0.02) == 0.0, "no limit"
    engine.duty.limit(0.25)
    assert [engine.step(seconds) for seconds in (0.02, 0.1)] == pytest.approx([0.06, 0.3])
    assert engine.step(3 * LONGEST_STEP_S) == pytest.approx(LONGEST_STEP_S)
    assert engine.step(1_000.0) == 0.0, "the process was suspended"


def test_a_processor_rests_by_the_time_of_all_threads(clock: ScriptedTime) -> None:
    engine = ScriptedEngine(clock, DutyCycle(4))
    engine.duty.limit(0.25)
    assert engine.step(0.02, cpu_s=0.08) == pytest.approx(0.06)
    assert engine.step(0.02, cpu_s=0.02) == pytest.approx(0.0), "one core of four is the share"
    clock.cpu_s += 0.4  # Another thread converts an adapter.
    assert engine.step(0.02, cpu_s=0.0) == pytest.approx(0.38)
    clock.cpu_s += 40.0
    engine.duty.forgive()
    assert engine.step(0.02, cpu_s=0.02) == pytest.approx(0.0)


@given(
    share=st.floats(0.01, 0.99),
    steps=st.lists(st.floats(0.001, 2.0), min_size=100, max_size=100),
    late_s=st.floats(0.0, 0.003),
)
def test_the_share_is_kept_although_rests_end_late(share: float, steps: list[float], late_s: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = ScriptedTime()
        patch.setattr(duty_cycle, "time", clock)
        engine = ScriptedEngine(clock, DutyCycle(0))
        engine.duty.limit(share)
        began = clock.now
        for seconds in steps:
            engine.step(seconds, late_s=late_s)
        used = sum(steps) / (clock.now - began)
    assert used <= share + 1e-9
    assert used > share * 0.97 or sum(steps) / share - sum(steps) < 100 * late_s


def test_a_new_share_changes_a_running_rest(clock: ScriptedTime) -> None:
    duty = DutyCycle(0)
    duty.limit(0.05)
    duty.begin()
    clock.now += 1.0
    duty.end()
    assert duty.rest_s == pytest.approx(19.0)
    duty.limit(0.5)
    assert duty.rest_s == pytest.approx(1.9)
    duty.limit(1.0)
    assert duty.rest_s == 0.0


def test_time_without_a_limit_is_no_debt(clock: ScriptedTime) -> None:
    engine = ScriptedEngine(clock, DutyCycle(4))
    for _ in range(100):
        assert engine.step(1.0, cpu_s=8.0) == 0.0
    engine.duty.limit(0.5)
    assert engine.duty.rest_s == 0.0 and engine.step(1.0, cpu_s=4.0) == pytest.approx(1.0)


def test_an_idle_time_is_no_credit(clock: ScriptedTime) -> None:
    engine = ScriptedEngine(clock, DutyCycle(0))
    engine.duty.limit(0.5)
    engine.step(1.0)
    clock.now += 1_000.0
    assert engine.step(1.0) == pytest.approx(1.0 - CREDIT_S)
