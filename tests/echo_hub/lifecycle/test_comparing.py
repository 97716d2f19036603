from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_hub.config.file import load_config
from echo_hub.lifecycle import comparing
from echo_hub.lifecycle.comparing import Curve, curves_of, differing, sparkline
from echo_hub.store.store import Store
from tests.echo_hub.written_books import HAND_OFF_S, PERIOD_S, TRAIN_S, write_books
from tests.echo_hub.written_steps import evaluated, train


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


def test_curves_equal_the_stored_steps(store: Store) -> None:
    write_books(store, steps=6)
    curves = curves_of(store)
    assert curves["mean_reward"].points == tuple((step, 0.5) for step in range(1, 7))
    assert curves["completion_tokens_mean"].last == 3
    assert [step for step, _ in curves["idle_share"].points] == [2, 3, 4, 5, 6], "the first step's value is unknown"
    assert curves["idle_share"].last == pytest.approx(1 - TRAIN_S / PERIOD_S)
    assert curves["rollouts_per_s"].last == pytest.approx(8 / PERIOD_S)
    assert curves["seconds"].last == TRAIN_S and HAND_OFF_S > 0
    assert list(curves)[:2] == ["mean_reward", "idle_share"] and "heldout_accuracy" not in curves


def test_evaluations_and_drops_are_curves_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "STEPS_A_READ", 2)
    for step in range(1, 6):
        train(store, step)
    store.record_evaluations(evaluated(5, 0.5))
    store.record_evaluations(evaluated(0, 0.25))
    curves = curves_of(store)
    assert curves["heldout_accuracy"].points == ((0, 0.25), (5, 0.5))
    assert curves["heldout_mean_at_k"].points == ((0, 0.125), (5, 0.25))
    assert curves["mean_reward"].points == tuple((step, float(step)) for step in range(1, 6))
    assert {value for _, value in curves["dropped_per_rollout"].points} == {0.5}
    assert (curves["staleness_max"].best, curves["staleness_max"].best_step) == (0, 3)
    assert (curves["mean_reward"].best, curves["mean_reward"].best_step) == (5, 5)
    assert curves["loss"].best is None and curves["loss"].last == 1.25


def test_a_run_without_a_step_has_no_curves(store: Store) -> None:
    assert curves_of(store) == {}


def test_only_settings_that_differ_are_reported_and_no_secret() -> None:
    one = load_config(None, {"training": {"steps": 5}, "store": {"url": "postgresql://me:hunter2@host/db"}})
    two = load_config(None, {"training": {"steps": 7}, "server": {"invite_tokens": ["open-sesame"]}})
    found = differing([one, two, one])
    assert found["training.steps"] == (5, 7, 5)
    assert set(found) == {"training.steps", "store.url", "server.invite_tokens"}
    assert "hunter2" not in str(found) and "sesame" not in str(found)
    assert differing([one, one]) == {}


def test_a_sparkline_has_the_same_scale_for_all() -> None:
    curve = Curve(label="", better="", points=((0, 0.0), (1, 0.5), (2, 1.0), (3, 1.0)))
    assert sparkline(curve, low=0, high=1, last_step=3, width=4) == "▁▅██"
    assert sparkline(curve, low=0, high=1, last_step=7, width=8) == "▁▅██    "
    assert sparkline(curve, low=0, high=1, last_step=3, width=2) == "▃█"
    assert sparkline(curve, low=-1, high=3, last_step=3, width=4) == "▃▄▅▅"
    flat = Curve(label="", better="", points=((1, 2.0),))
    assert sparkline(flat, low=2, high=2, last_step=1, width=4) == "  ▅ "
