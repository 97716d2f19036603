"""Stored rollouts as readable texts, from a real store with a real tokenizer and real problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import RolloutReceived, RolloutsAnswered, RolloutsLeased
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.lifecycle import rollouts as module
from echo_hub.lifecycle.rollouts import HubRollouts, RolloutReader
from echo_hub.scoring.problems import Problems
from echo_hub.store.keeping import Keeping
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutFilter, RolloutPayload
from echo_shared.wire.messages import FinishReason
from tests.echo_hub.written_rollouts import NODE, OTHER, TEXTS, codec_of_bytes, write_rollouts

ALL = ["3-1", "3-0", "2-1", "2-0", "1-1", "1-0"]
Make = Callable[..., RolloutReader]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    yield opened
    opened.close()


@pytest.fixture
def make(store: Store) -> Make:
    def made(texts: tuple[str, ...] = TEXTS, **objective: Any) -> RolloutReader:
        codec = codec_of_bytes()
        config = HubConfig(objective=ObjectiveConfig(**objective))
        write_rollouts(store, codec, texts)
        problems = Problems.of_run(config, codec)
        return RolloutReader(config, store=store, codec=codec, problems=problems)

    return made


def test_pages_of_texts_continue_each_other(make: Make) -> None:
    reader = make()
    first = reader.page(RolloutFilter(), before="", limit=4)
    assert [row.summary.rollout_id for row in first.rollouts] == ALL[:4]
    assert [row.text for row in first.rollouts] == [f"{text}<end>" for text in reversed(TEXTS[2:])]
    rest = reader.page(RolloutFilter(), before=first.before, limit=4)
    assert [row.summary.rollout_id for row in rest.rollouts] == ALL[4:] and rest.before == ""
    assert rest.kept_rollouts == 6 and rest.kept_bytes > 0


def test_a_text_is_looked_for_in_any_case_and_with_other_conditions(make: Make) -> None:
    reader = make()

    def found(**wanted: Any) -> list[str]:
        page = reader.page(RolloutFilter(**wanted), before="", limit=10)
        assert page.before == ""
        return [row.summary.rollout_id for row in page.rollouts]

    assert found(text="ALL WRONG") == ["3-1", "3-0"]
    assert found(text="lo", node=NODE) == ["2-1"]
    assert found(text="<SCRIPT", step=1) == ["1-0"]
    assert found(text="nowhere") == []


def test_a_search_stops_after_a_token_limit_and_can_continue(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = make()
    monkeypatch.setattr(module, "TOKENS_READ", 30)
    found, before, answers = [], "", 0
    while True:
        page = reader.page(RolloutFilter(text="<end>"), before=before, limit=10)
        found += [row.summary.rollout_id for row in page.rollouts]
        answers += 1
        if not page.before:
            break
        before = page.before
    assert found == ALL and answers > 2


def test_a_group_in_full(make: Make) -> None:
    group = make(advantage="mean").group(0)
    assert group is not None
    assert (group.step, group.staleness, group.opened_at, group.drop_reason) == (1, 0, 2.0, None)
    assert (group.planned_at, group.trained_at, group.published_at) == (8.0, 10.0, 11.0)
    assert "+" in group.prompt
    first, second = group.rollouts
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    drawn = first.drawn
    assert drawn is not None and second.drawn is not None
    assert drawn.text == "".join(piece.text for piece in drawn.pieces) == f"{TEXTS[0]}<end>"
    assert [piece.logprob for piece in drawn.pieces] == pytest.approx([-0.05 * n for n in range(len(drawn.pieces))])
    assert [piece.version for piece in drawn.pieces] == [0] * 3 + [1] * (len(drawn.pieces) - 3)
    assert [(span.node_id, span.policy_version) for span in drawn.payload.spans] == [(NODE, 0), (OTHER, 1)]
    assert {piece.version for piece in second.drawn.pieces} == {0}
    assert (drawn.payload.finish_reason, drawn.payload.sampling_s, drawn.observation) == ("stop", 0.5, "")
    assert len(drawn.payload.completion_ids) == len(drawn.payload.behavior_logprobs) == len(drawn.pieces)
    summary = first.summary
    assert (summary.leased_at, summary.received_at, summary.scored_at, summary.final_at) == (2.0, 6.0, 7.0, 10.0)


def test_advantages_are_the_objectives_over_the_whole_step(make: Make) -> None:
    reader = make(advantage="batch_std")
    std = float(np.std([1.0, 0.0, 0.25, 0.5], ddof=1)) + 1e-4
    found = {group: reader.group(group) for group in (0, 1)}
    gains = [each.advantage for group in found.values() if group for each in group.rollouts]
    assert gains == pytest.approx([0.5 / std, -0.5 / std, -0.125 / std, 0.125 / std])


def test_a_penalty_for_length_is_in_the_advantage(make: Make) -> None:
    reader = make(advantage="mean", overlong="penalty", overlong_buffer_tokens=HubConfig().sampling.max_tokens)
    group = reader.group(1)
    assert group is not None
    lengths = [each.summary.num_tokens or 0 for each in group.rollouts]
    most = HubConfig().sampling.max_tokens
    rewards = [0.25 - min(1.0, lengths[0] / most), 0.5 - min(1.0, lengths[1] / most)]
    half = (rewards[0] - rewards[1]) / 2
    assert [each.advantage for each in group.rollouts] == pytest.approx([half, -half])


def test_a_dropped_group_has_no_advantage_and_still_its_texts(make: Make) -> None:
    group = make().group(2)
    assert group is not None and (group.step, group.drop_reason) == (None, "no_advantage")
    assert [each.advantage for each in group.rollouts] == [None, None]
    assert [each.drawn.text for each in group.rollouts if each.drawn] == ["All wrong<end>", "all wrong<end>"]


def test_a_rollout_without_kept_tokens_lacks_only_its_text(make: Make, store: Store) -> None:
    store.keeping = Keeping(share=0.0)
    reader = make()
    page = reader.page(RolloutFilter(), before="", limit=10)
    assert {(row.text, row.summary.not_kept) for row in page.rollouts} == {(None, "share")}
    assert page.left_out_by_share == 6
    group = reader.group(0)
    assert group is not None and group.rollouts[0].drawn is None and group.rollouts[0].summary.reward == 1.0
    assert reader.page(RolloutFilter(text="plain"), before="", limit=10).rollouts == ()
    assert reader.group(77) is None


def test_everything_that_fits_is_exported(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_READ", 2)
    reader = make()
    exported = list(reader.export(RolloutFilter()))
    assert [one.summary.rollout_id for one in exported] == ALL
    assert [one.drawn.text for one in exported if one.drawn] == [f"{text}<end>" for text in reversed(TEXTS)]
    assert len({one.prompt for one in exported}) > 1
    for group_id, of_group in groupby(exported, key=lambda one: one.summary.group_id):
        shown = {each.summary.rollout_id: each.advantage for each in reader.group(group_id).rollouts}  # type: ignore[union-attr]
        assert {one.summary.rollout_id: one.advantage for one in of_group} == shown
    assert any(one.advantage for one in exported)
    assert [one.summary.rollout_id for one in reader.export(RolloutFilter(text="wrong"))] == ["3-1", "3-0"]


async def test_the_hub_reads_on_a_thread(make: Make) -> None:
    rollouts = HubRollouts(make())
    assert len((await rollouts.page(RolloutFilter(), before="", limit=3)).rollouts) == 3
    group = await rollouts.group(1)
    assert group is not None and group.group_id == 1


def test_tenants_samples_are_listed_without_their_texts(make: Make, store: Store) -> None:
    reader = make()
    group_id = FIRST_ANSWER_ID
    lease = RolloutsLeased(lease_id=9, node_id=NODE, group_id=group_id, indices=(0,), policy_version=0, deadline=99.0)
    payload = RolloutPayload(
        completion_ids=np.array([7, 8], np.int32),
        behavior_logprobs=np.zeros(2, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=1.0,
    )
    received = RolloutReceived(rollout_id="9-0", received_at=30.0, payload=payload)
    store.apply([lease, received, RolloutsAnswered(rollout_ids=("9-0",))], now=30.0)
    newest = reader.page(RolloutFilter(), before="", limit=1).rollouts[0]
    assert (newest.summary.rollout_id, newest.summary.state, newest.text) == ("9-0", "answered", None)
    assert newest.summary.evaluation == "a tenant's request"
    group = reader.group(group_id)
    assert group is not None and (group.prompt, group.task, group.rollouts[0].drawn) == ("", "", None)
    (whole,) = [one for one in reader.export(RolloutFilter()) if one.summary.rollout_id == "9-0"]
    assert (whole.prompt, whole.drawn, whole.advantage) == ("", None, None)
