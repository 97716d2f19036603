from __future__ import annotations

import pytest

from echo_hub.core.policy.measured import FIRST_MARGIN, MOST_MARGIN, PROMPTS, RECENT_LENGTHS, CompletionLengths, Tempo


def test_nothing_is_known_at_first() -> None:
    lengths = CompletionLengths()
    assert (lengths.mean_tokens, lengths.long_tokens, lengths.predict(None), lengths.predict(7)) == (0, 0, 0, 0)


def test_a_prompt_that_came_before_is_predicted_from_its_own_history() -> None:
    lengths = CompletionLengths()
    for _ in range(50):
        lengths.seen(1, 300)
        lengths.seen(2, 10)
    assert lengths.mean_tokens == 155.0
    assert lengths.predict(1) == pytest.approx(300, rel=0.05) and lengths.predict(2) == pytest.approx(10, rel=1.0)
    assert lengths.predict(3) == lengths.predict(None) == 155.0


def test_one_completion_moves_its_prompts_prediction_only_partly() -> None:
    lengths = CompletionLengths()
    for _ in range(100):
        lengths.seen(None, 100)
    lengths.seen(1, 400)
    assert 150 < lengths.predict(1) < 250


def test_a_prompts_length_changes_with_the_policy() -> None:
    lengths = CompletionLengths()
    for _ in range(200):
        lengths.seen(1, 100)
    for _ in range(200):
        lengths.seen(1, 500)
    assert lengths.predict(1) > 450


def test_few_completions_are_longer_than_the_long_ones() -> None:
    lengths = CompletionLengths()
    for number in range(1_000):
        lengths.seen(None, 10 if number % 25 else 600)
    assert lengths.long_tokens == 600.0
    for _ in range(RECENT_LENGTHS):
        lengths.seen(None, 10)
    assert (lengths.long_tokens, lengths.mean_tokens) == (10.0, 10.0)


def test_prompts_without_end_need_no_memory_without_end() -> None:
    lengths = CompletionLengths()
    for prompt in range(PROMPTS + 100):
        lengths.seen(prompt, 100 if prompt else 900)
    assert lengths.predict(0) == lengths.mean_tokens, "forgotten"
    assert len(lengths._prompts) == PROMPTS


def test_how_much_longer_than_predicted_completions_become() -> None:
    lengths = CompletionLengths()
    assert lengths.longer == 1.0
    for _ in range(50):
        lengths.seen(1, 100)
    assert lengths.longer == 1.0, "all lengths are equal"
    for turn in range(2_000):
        lengths.seen(1, 50 if turn % 2 else 150)
    assert lengths.longer == pytest.approx(1.0 + 1.5 * 0.5, abs=0.05), "each length is half off"
    for _ in range(3_000):
        lengths.seen(1, 100)
    assert lengths.longer < 1.1, "old lengths are forgotten"


def trained(steps: int, *, step_s: float = 10.0, waits_s: float = 0.0, ready_s: float = 0.0) -> tuple[Tempo, float]:
    """Return the measured tempo of a learner after `steps` steps, and the time. Each batch comes `waits_s` after the
    learner is free, or `ready_s` before.
    """
    tempo, now = Tempo(), 0.0
    for step in range(1, steps + 1):
        if waits_s:
            tempo.filled(step, now + waits_s)
            now += waits_s
        tempo.given(step, now)
        if not waits_s:
            tempo.filled(step + 1, now + step_s - ready_s)
        now += step_s
        tempo.done(step, now)
    return tempo, now


def test_before_the_first_step_no_estimate_exists() -> None:
    tempo = Tempo()
    assert tempo.step_s is None
    assert tempo.begins(5, next_step=1, now=7.0) == 7.0
    tempo.given(1, 7.0)
    assert tempo.begins(5, next_step=2, now=7.0) == 7.0


def test_steps_begin_one_after_the_other() -> None:
    tempo, now = trained(3)
    assert tempo.step_s == 10.0
    assert [tempo.begins(step, next_step=4, now=now) for step in (4, 5)] == [now, now + 10.0]
    tempo.given(4, now + 2.0)
    assert [tempo.begins(step, next_step=5, now=now + 3.0) for step in (5, 6, 7)] == [now + 12, now + 22, now + 32]
    assert tempo.begins(5, next_step=5, now=now + 15.0) == now + 15.0, "the step takes longer than usual"


def test_a_step_that_is_given_beforehand_begins_when_the_one_before_is_done() -> None:
    tempo, now = trained(3)
    tempo.given(4, now)
    tempo.given(5, now + 1.0)
    tempo.done(4, now + 10.0)
    tempo.given(5, now + 10.0)
    tempo.done(5, now + 20.0)
    assert tempo.step_s == 10.0


def test_an_unusual_step_changes_little() -> None:
    tempo, now = trained(5)
    tempo.given(6, now)
    tempo.done(6, now + 500.0)
    assert tempo.step_s == 10.0


def test_the_margin_grows_with_the_learners_waiting_time() -> None:
    little, much = trained(4, waits_s=0.5)[0], trained(4, waits_s=5.0)[0]
    assert FIRST_MARGIN < little.margin < much.margin
    assert trained(40, waits_s=9.0)[0].margin == MOST_MARGIN
    assert little.lead_s(4.0, 1.0) == pytest.approx(5.0 * little.margin)


def test_the_margin_shrinks_while_batches_lie_ready() -> None:
    assert trained(4, ready_s=0.2)[0].margin == FIRST_MARGIN
    early, longer = trained(3, ready_s=1.0)[0], trained(5, ready_s=1.0)[0]
    assert 1.0 <= longer.margin < early.margin < FIRST_MARGIN


def test_a_learner_that_was_away_did_not_wait() -> None:
    tempo, now = trained(3)
    tempo.lost()
    tempo.filled(4, now + 600.0)
    assert tempo.margin == FIRST_MARGIN


def test_a_learner_that_has_its_next_step_already_begins_it_at_once() -> None:
    tempo = Tempo()
    tempo.given(1, 0.0)
    tempo.given(2, 4.0)
    tempo.done(1, 10.0)
    assert tempo.begins(3, next_step=3, now=10.0) == 20.0
    tempo.given(3, 11.0)
    tempo.done(2, 20.0)
    assert (tempo.step_s, tempo.begins(4, next_step=4, now=21.0)) == (10.0, 30.0)


def test_steps_come_as_often_as_the_learner_trains_and_waits() -> None:
    """Steps of 10 s whose batches come 5 s late end 15 s after the step before."""
    assert Tempo().every_s == 0.0
    assert trained(6, ready_s=1.0)[0].every_s == pytest.approx(10.0)
    assert trained(6, waits_s=5.0)[0].every_s == pytest.approx(15.0)


def test_a_first_step_takes_at_least_as_long_as_the_learner_has_been_at_it() -> None:
    tempo = Tempo()
    tempo.filled(1, 60.0)
    assert tempo.begins(9, next_step=1, now=64.0) == 64.0, "without a learner there is no bound"
    tempo.given(1, 70.0)
    assert [tempo.begins(step, next_step=2, now=80.0) for step in (2, 3, 4)] == [80.0, 90.0, 100.0]
    tempo.done(1, 82.0)
    assert tempo.step_s == 12.0
