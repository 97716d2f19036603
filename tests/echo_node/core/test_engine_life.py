from echo_node.core.effects import StartEngine
from echo_node.core.engine_life import MAX_FAILED_GROUPS, STEADY_S, USUAL_WIDTH, EngineEnding, EngineLife
from echo_node.core.events import EngineLost, EngineReady

DIED = EngineLost(what="killed")
WIDTH = 8


def engine(*, is_up: bool = True) -> EngineLife:
    life = EngineLife()
    if is_up:
        life.ready(EngineReady(width=WIDTH), 0.0)
    return life


def full(width: int) -> EngineLost:
    return EngineLost(what="full", cause="out_of_memory", width=width)


def again(after_s: float = 0.0, *, max_width: int = 0) -> StartEngine:
    return StartEngine(after_s=after_s, max_width=max_width)


def test_an_engine_is_up_between_ready_and_lost() -> None:
    life = engine(is_up=False)
    assert not life.is_up
    life.ready(EngineReady(width=WIDTH), 0.0)
    assert life.is_up and life.width == WIDTH
    life.lost(DIED, 1.0, 0.0)
    assert not life.is_up and life.width == 0


def test_a_stopped_engine_restarts_at_once_without_blame() -> None:
    life = engine()
    for _ in range(5):
        assert life.lost(EngineLost(what="a GPU", cause="stopped"), 1.0, 0.0) == EngineEnding(
            start=again(), blame="nobody"
        )
        life.ready(EngineReady(width=WIDTH), 1.0)
    assert life.lost(DIED, 1.0, 0.0).start == again(), "those were no deaths"


def test_out_of_memory_halves_the_width_until_it_is_one() -> None:
    life = engine()
    assert life.lost(full(8), 1.0, 0.0) == EngineEnding(start=again(max_width=4), blame="nobody")
    assert life.lost(full(3), 1.0, 0.0) == EngineEnding(start=again(max_width=1), blame="nobody")
    assert life.lost(full(1), 1.0, 0.0) == EngineEnding(start=again(), blame="the start")
    life.ready(EngineReady(width=1), 1.0)
    assert life.lost(full(1), 1.0, 0.0) == EngineEnding(start=again(1.0), blame="the work")


def test_out_of_memory_before_the_engine_reports_its_width() -> None:
    assert engine(is_up=False).lost(full(0), 1.0, 0.0).start == again(max_width=USUAL_WIDTH // 2)


def test_out_of_memory_after_long_work_keeps_the_width() -> None:
    for width in (8, 1):
        assert engine().lost(full(width), STEADY_S, 0.0) == EngineEnding(start=again(), blame="nobody")
    assert engine().lost(full(8), STEADY_S - 1.0, 0.0).start == again(max_width=4)


def test_an_engine_that_never_started_was_not_steady() -> None:
    assert engine(is_up=False).lost(full(8), 2.0 * STEADY_S, 0.0).start == again(max_width=4)


def test_deaths_in_a_row_wait_longer_each_time_until_a_rollout_is_finished() -> None:
    life = engine()
    assert life.lost(DIED, 1.0, 0.0) == EngineEnding(start=again(), blame="the work")
    assert [life.lost(DIED, 1.0, 0.0) for _ in range(3)] == [
        EngineEnding(start=again(after_s), blame="the start") for after_s in (1.0, 2.0, 4.0)
    ]
    life.ready(EngineReady(width=WIDTH), 1.0)
    life.finished_rollout()
    assert life.lost(DIED, 1.0, 0.0) == EngineEnding(start=again(), blame="the work")


def test_waits_are_jittered() -> None:
    life = EngineLife()
    assert [life.lost(DIED, 0.0, 0.5).start.after_s for _ in range(3)] == [0.0, 0.75, 1.5]


def test_an_engine_rests_after_several_failed_groups() -> None:
    life = engine()
    for _ in range(MAX_FAILED_GROUPS - 1):
        life.group_failed(10.0, 0.0, what="it fails", code="")
    assert not life.is_resting(10.0)
    life.group_failed(10.0, 0.0, what="it fails", code="")
    assert life.is_resting(10.9) and not life.is_resting(11.0)
    life.group_failed(11.0, 0.0, what="it fails", code="")
    assert life.is_resting(12.9) and not life.is_resting(13.0)
    life.finished_rollout()
    life.group_failed(14.0, 0.0, what="it fails", code="")
    assert not life.is_resting(14.0)
