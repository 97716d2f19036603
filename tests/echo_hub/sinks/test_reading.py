from __future__ import annotations

from dataclasses import replace

import pytest

from echo_hub.sinks import reading as module
from echo_hub.sinks.reading import EntryReader, Position
from echo_hub.sinks.texts import SampleText
from echo_hub.store.store import Store
from echo_shared.records.run import TaskFigures
from tests.echo_hub.sinks.fixed_texts import FixedTexts
from tests.echo_hub.written_steps import evaluated, train


def test_a_steps_figures_by_tag(store: Store) -> None:
    for step in (1, 2):
        train(store, step)
    first, second = EntryReader(store, Position()).read()
    assert (first.policy_version, first.at, second.policy_version, second.at) == (1, 1_004.0, 2, 1_008.0)
    assert first.scalars["train/loss"] == 0.25 and second.scalars["train/mean_reward"] == 2.0
    assert "rollouts/per_second" not in first.scalars and second.scalars["rollouts/per_second"] == 0.5
    assert [entry.scalars["rollouts/staleness_max"] for entry in (first, second)] == [1.0, 2.0]
    assert [entry.scalars["drops/expired"] for entry in (first, second)] == [1.0, 1.0], "since the step before"
    assert {"train/train_s", "train/eval_s", "train/share_without_advantage"} < set(first.scalars)
    assert second.histograms == {
        "distribution/reward": [2.0, 2.0],
        "distribution/completion_tokens": [3.0, 3.0],
        "distribution/staleness": [0.0, 0.0],
    }


def test_the_means_of_components_have_tags_of_their_own(store: Store) -> None:
    train(store, 1, components={"score": 0.25, "format": 1.0})
    (entry,) = EntryReader(store, Position()).read()
    assert {tag: entry.scalars[tag] for tag in ("reward/score", "reward/format")} == {
        "reward/score": 0.25,
        "reward/format": 1.0,
    }


def test_an_evaluations_figures_by_tag(store: Store) -> None:
    store.record_evaluations([replace(each, components={"format": 0.5}) for each in evaluated(3, 0.5)])
    greedy, sampled = EntryReader(store, Position()).read()
    assert sampled.scalars["eval/sampled_reward_format"] == 0.5
    assert greedy.policy_version == 3 and greedy.at == 2_003.0
    assert greedy.scalars["eval/greedy_accuracy"] == 0.5 and greedy.scalars["eval/greedy_accuracy_error"] == 0.125
    assert sampled.scalars["eval/mean_at_4"] == 0.25 and sampled.scalars["eval/pass_at_4"] == 0.75


def test_a_set_of_several_and_a_task_of_several_have_rooms_of_their_own(store: Store) -> None:
    by_task = {
        "sums": TaskFigures(num_groups=3, mean_reward=0.5, share_solved=0.25, num_flat=1),
        "x": TaskFigures(num_groups=0),
    }
    train(store, 1, by_task=by_task)
    store.record_evaluations([replace(one, name="hard") for one in evaluated(3, 0.5)])
    step, greedy, sampled = EntryReader(store, Position()).read()
    assert step.scalars["tasks/sums/mean_reward"] == 0.5 and step.scalars["tasks/sums/num_flat"] == 1.0
    assert step.scalars["tasks/x/num_groups"] == 0.0 and "tasks/x/mean_reward" not in step.scalars
    assert greedy.scalars["eval/hard/greedy_accuracy"] == 0.5 and sampled.scalars["eval/hard/pass_at_4"] == 0.75


def test_reading_resumes_at_a_sinks_position(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS_A_READ", 2)
    for step in range(1, 6):
        train(store, step)
    store.record_evaluations(evaluated(0, 0.5))
    reading, got = EntryReader(store, Position()), []
    while entries := reading.read():
        got.append([entry.policy_version for entry in entries])
    assert got == [[1, 2, 0, 0], [3, 4], [5]]
    assert reading.position == Position(step=5, evaluated_at=2_000.0)
    train(store, 6)
    (entry,) = EntryReader(store, reading.position).read()
    assert entry.policy_version == 6
    assert entry.scalars["drops/expired"] == 1.0 and entry.scalars["rollouts/per_second"] == 0.5, "since step 5"
    assert EntryReader(store, Position(step=6, evaluated_at=2_000.0)).read() == []


def test_old_steps_have_only_scalars(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTOGRAMS_AT_START", 2)
    for step in range(1, 5):
        train(store, step)
    text = SampleText(rollout_id="", reward=0, prompt="", completion="")
    reading = EntryReader(store, Position(), texts=FixedTexts(text))
    train(store, 5)
    assert [(bool(entry.histograms), len(entry.texts)) for entry in reading.read()] == [(False, 0)] * 2 + [
        (True, 1)
    ] * 3
