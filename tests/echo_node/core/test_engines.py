"""A node with several engines: the work that it requests, its reports to the hub, and its display for the owner."""

from __future__ import annotations

from echo_node.core.effects import EndEngine, LimitDuty, ResumeEngine, StartEngine, SuspendEngine
from echo_node.core.engines import Engines
from echo_node.core.events import EngineReady, Holding
from echo_node.core.manners import Hold, HoldReason

FAST, SLOW = "cuda:0", "cuda:1"
HOT = Hold(HoldReason.GPU_HOT, "The GPU is 91 °C warm.")


def ready(device: str, *, width: int = 4, rate: float = 0.0, precision: str = "bf16") -> EngineReady:
    return EngineReady(width=width, tokens_per_s=rate, precision=precision, scores=True, device=device)


def running(*events: EngineReady) -> Engines:
    engines = Engines((FAST, SLOW), capacity_factor=2)
    for engine in engines:
        engine.yielding.start(StartEngine(after_s=0.0, device=engine.device))
    for event in events:
        assert engines.ready(event, 0.0) == []
    return engines


def held(**of_devices: tuple[Hold, ...]) -> Holding:
    names = {"fast": FAST, "slow": SLOW}
    return Holding(holds=(), keep_memory_s=60.0, of_devices={names[name]: holds for name, holds in of_devices.items()})


def test_the_node_promises_the_sum_of_its_engines() -> None:
    engines = running(ready(FAST, width=8, rate=100.0), ready(SLOW, rate=50.0))
    assert (engines.capacity(0.0), engines.tokens_per_s) == (2 * 8 + 2 * 4, 150.0)
    for engine in engines:
        engine.pace.leased(deadline_s=20.0, max_tokens=250)
    assert engines.capacity(0.0) == 4 + 2, "in half of the deadline: 100 * 10 / 250 and 50 * 10 / 250"
    assert [(one.device, one.window) for one in engines.seats(0.0)] == [(FAST, 4), (SLOW, 2)]


def test_an_engine_that_pauses_promises_nothing() -> None:
    engines = running(ready(FAST, rate=100.0), ready(SLOW, rate=50.0))
    assert [engine.device for engine in engines.hold(held(slow=(HOT,)))] == [SLOW]
    assert engines.hold(held(slow=(HOT,))) == [], "its pause has begun"
    assert (engines.capacity(0.0), engines.tokens_per_s, engines.is_held) == (8, 100.0, False)
    assert [one.device for one in engines.seats(0.0)] == [FAST]
    assert not any(engines.held_back(0.0).values())
    assert [engine.device for engine in engines.hold(held(slow=(HOT,), fast=(HOT,)))] == [FAST]
    assert engines.is_held and engines.capacity(0.0) == 0 and not engines.can_score
    assert engines.held_back(0.0)["the machine is its owner's"]


def test_a_resting_engine_gets_work_only_if_all_rest() -> None:
    engines = running(ready(FAST), ready(SLOW))
    for _ in range(3):
        engines[FAST].life.group_failed(0.0, 0.0, what="no", code="")
    assert engines.capacity(0.0) == 8 and [one.device for one in engines.seats(0.0)] == [SLOW]
    for _ in range(3):
        engines[SLOW].life.group_failed(0.0, 0.0, what="no", code="")
    assert engines.capacity(0.0) == 0 and engines.held_back(0.0)["groups keep failing"]
    assert [one.device for one in engines.seats(0.0)] == [FAST, SLOW], "leases that are here are sampled all the same"


def test_a_sole_engine_has_no_window() -> None:
    engines = Engines(("",), capacity_factor=2)
    engines.ready(EngineReady(width=4), 0.0)
    assert [one.window for one in engines.seats(0.0)] == [float("inf")]


def test_an_engine_of_another_precision_is_refused_until_the_settings_change() -> None:
    engines = running(ready(FAST))
    assert engines.ready(ready(SLOW, precision="f16"), 0.0) == [EndEngine(device=SLOW)]
    engine = engines[SLOW]
    assert engine.problem is not None
    assert "cuda:1 is not used: its engine draws in f16, and that of cuda:0 in bf16" in engine.problem.sentence
    assert engine.work(0, 0.0).state == "refused" and engines.capacity(0.0) == 8
    engine.yielding.lost()
    assert engines.outdated(engine) and engine.problem is None
    assert not engines.outdated(engine) and not engines.outdated(engines[FAST])


def test_a_refused_engine_that_has_not_ended_restarts_after_its_end() -> None:
    engines = running(ready(FAST))
    engines.ready(ready(SLOW, precision="f16"), 0.0)
    assert not engines.outdated(engines[SLOW]) and engines[SLOW].refusal is None


def test_a_suspended_engine_keeps_its_precision_for_the_node() -> None:
    engines = running(ready(FAST))
    engines.hold(held(fast=(HOT,)))
    assert engines[FAST].yielding.due(0.0, is_up=True, is_told=True) == [SuspendEngine(device=FAST)]
    assert engines.ready(ready(SLOW, precision="f16"), 0.0) == [EndEngine(device=SLOW)]
    engines.hold(held())
    assert engines[FAST].yielding.due(0.0, is_up=True, is_told=True) == [ResumeEngine(device=FAST)]
    assert [engine.device for engine in engines.listening] == [FAST]


def test_an_engine_with_new_settings_is_not_compared_with_one_that_ends() -> None:
    engines = running(ready(FAST), ready(SLOW))
    assert engines[FAST].yielding.renew(1.0)
    assert engines.ready(ready(SLOW, precision="q8_0"), 0.0) == []


def test_an_unknown_precision_is_no_difference() -> None:
    assert running(ready(FAST), ready(SLOW, precision="")).capacity(0.0) == 16


def test_the_engine_with_the_least_work_tests_suspects() -> None:
    engines = running(ready(FAST), ready(SLOW))
    assert engines.testing({FAST: 4, SLOW: 0}) == SLOW
    engines.hold(held(slow=(HOT,)))
    assert engines.testing({FAST: 4, SLOW: 0}) == FAST


def test_a_share_counts_for_the_speed_that_was_measured_without_it() -> None:
    engines = running()
    engines.hold(Holding(holds=(), keep_memory_s=1.0, shares={SLOW: 0.25}))
    engines.ready(ready(FAST, rate=100.0), 0.0)
    engines.ready(ready(SLOW, rate=100.0), 0.0)
    assert [engine.limited() for engine in engines] == [[], [LimitDuty(share=0.25, device=SLOW)]]
    assert [engine.pace.tokens_per_s for engine in engines] == [100.0, 25.0]
    assert engines[SLOW].limited() == []
    engines.hold(Holding(holds=(), keep_memory_s=1.0))
    assert [engine.limited() for engine in engines] == [[], [LimitDuty(share=1.0, device=SLOW)]]
    assert engines[SLOW].pace.tokens_per_s == 25.0, "the higher speed is measured first"


def test_each_device_is_described() -> None:
    engines = running(ready(FAST, rate=100.0))
    engines.hold(held(slow=(HOT,)))
    fast, slow = (engine.work(3, 0.0) for engine in engines)
    assert (fast.state, fast.width, fast.rollouts, fast.tokens_per_s, fast.precision) == (
        "working",
        4,
        3,
        100.0,
        "bf16",
    )
    assert (slow.state, slow.width, slow.holds) == ("paused", 0, (HOT,))
    engines.hold(held())
    assert engines[SLOW].work(0, 0.0).state == "starting"
