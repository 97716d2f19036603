from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from echo_hub.bundles.blocks import BundledGroup, BundledRollout
from echo_hub.bundles.discrepancies import Discrepancies
from echo_hub.bundles.reading import BundledRun, BundledStep
from echo_hub.bundles.records import RecordCheck, draw_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_shared.wire.messages import DropReason, ReceiptState
from tests.echo_hub.bundles.made import group, lease, payload_of

SEED = 3
STEP = BundledStep(
    step=1,
    num_groups=2,
    num_rollouts=4,
    num_tokens=12,
    mean_reward=0.5,
    staleness=0,
    planned_at=1.0,
    trained_at=2.0,
    metrics={},
)


def groups() -> list[BundledGroup]:
    """Return the groups of one step (two groups of two rollouts, with one expired lease), and a group of an
    evaluation."""
    expired: dict[str, Any] = {"state": ReceiptState.DROPPED, "drop_reason": DropReason.EXPIRED, "place": -1}
    found = [
        group(0, lease(1, place=0), lease(2, index=1, place=1, reward=0.0)),
        group(1, lease(3, **expired, payload=None), lease(4, place=2), lease(4, index=1, place=3, reward=0.0)),
    ]
    about = EvaluationGroup(policy_version=1, greedy=True, number=2)
    found.append(group(about.group_id, lease(9, state=ReceiptState.EVALUATED, place=-1), step=None))
    return [replace(one, seed=draw_seed(SEED, one.group_id)) for one in found]


def run(**facts: Any) -> BundledRun:
    known = {
        "settings": {},
        "base": {},
        "started_with": 0,
        "accounting": {"trained": 4, "evaluated": 1, "dropped": {"expired": 1}, "in_flight": 0},
        "retired": {"rollouts": 0, "through_step": 0},
        "rollouts": 6,
        "versions": (),
    }
    return BundledRun.model_validate({**known, **facts})


def found(those: Sequence[BundledGroup], *, step: BundledStep = STEP, of: BundledRun | None = None) -> list[str]:
    discrepancies = Discrepancies()
    check = RecordCheck(of or run(), run_seed=SEED, group_size=2, discrepancies=discrepancies)
    for one in those:
        check.take(one)
    check.take_step(step)
    check.end()
    return [str(one) for one in discrepancies]


def test_records_that_fit_together() -> None:
    assert found(groups()) == []
    check = RecordCheck(run(), run_seed=SEED, group_size=2, discrepancies=Discrepancies())
    for one in groups():
        check.take(one)
    assert check.states == {"trained": 4, "expired": 1, "evaluated": 1}
    assert (check.num_groups, check.num_rollouts) == (3, 6)


def with_rollout(of_group: int, at: int, /, **fields: Any) -> list[BundledGroup]:
    those = groups()
    rollouts = list(those[of_group].rollouts)
    rollouts[at] = replace(rollouts[at], **fields)
    those[of_group] = replace(those[of_group], rollouts=tuple(rollouts))
    return those


@pytest.mark.parametrize(
    ("those", "texts"),
    [
        (with_rollout(0, 0, reward=0.25), ["mean reward"]),
        (with_rollout(0, 0, place=1), ["places in its batch"]),
        (
            with_rollout(0, 0, place=-1),
            ["in no step's batch", "indices [1]", "batch has 3", "batch has 9", "places", "mean reward"],
        ),
        (with_rollout(0, 0, payload=payload_of(5, 6, 1, version=1)), ["version 1 drew it for step 1"]),
        (with_rollout(1, 0, drop_reason=DropReason.STALE), ["expired rollouts: the hub counts 1", "stale rollouts"]),
        (with_rollout(0, 0, num_tokens=9), ["records 9 tokens and has 3", "18"]),
        (with_rollout(0, 1, lease_id=1, index=0), ["indices [0]", "turns [0, 0]", "occur twice"]),
        (with_rollout(1, 0, drop_reason=None), ["drop reason is None", "dropped rollouts", "expired rollouts"]),
        (with_rollout(2, 0, place=4), ["but evaluated"]),
        ([replace(one, seed=1) for one in groups()], ["does not follow from run.seed"] * 3),
        (groups()[::-1], ["higher id", "higher id"]),
        (
            groups()[:1],
            [
                "records 2 groups",
                "4 rollouts",
                "12 tokens",
                "2 instead of 6",
                "evaluated",
                "expired",
                "trained rollouts",
            ],
        ),
        ([], ["no rollout of its batch", "0 instead of 6", "evaluated", "expired", "trained rollouts"]),
    ],
)
def test_records_that_do_not_fit_are_named(those: list[BundledGroup], texts: list[str]) -> None:
    lines = found(those)
    assert len(lines) == len(texts), lines
    assert [text for text, line in zip(texts, lines, strict=True) if text not in line] == []


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"mean_reward": 0.75}, "records the mean reward 0.75"),
        ({"num_tokens": 13}, "records 13 tokens, its batch has 12"),
    ],
)
def test_a_wrong_record_of_a_step_is_named(step: dict[str, Any], text: str) -> None:
    (line,) = found(groups(), step=STEP.model_copy(update=step))
    assert text in line


def with_episode(*rollouts: BundledRollout) -> list[BundledGroup]:
    """Return the groups with these rollouts in place of the first group's second one."""
    those = groups()
    those[0] = replace(those[0], rollouts=(those[0].rollouts[0], *rollouts))
    return those


@pytest.mark.parametrize(
    ("rollouts", "text"),
    [
        ([lease(2, index=1, place=1, reward=0.0, payload=None, num_tokens=None)], "trained, but records no tokens"),
        ([lease(2, index=1, place=1, reward=None)], "a reward after its last turn"),
        ([lease(2, index=0, place=1, reward=0.0)], "[0], and the group has the indices 0 to 1"),
        ([lease(2, index=2, place=1, reward=0.0)], "[0, 2], and the group has the indices 0 to 1"),
        ([lease(2, index=1, place=1, reward=0.0), lease(5, index=1, place=4)], "[0, 0] are in the batch"),
        ([lease(2, index=1, turn=1, place=1, reward=0.0)], "[1] are in the batch"),
        ([lease(2, index=1, place=1, reward=1.0), lease(5, index=1, turn=1, place=4)], "a reward after its last turn"),
    ],
)
def test_a_batch_must_have_each_episode_once_and_whole(rollouts: list[BundledRollout], text: str) -> None:
    """A forger could choose a group's best completions, repeat them, or leave out the rewards of bad ones."""
    lines = found(with_episode(*rollouts))
    assert any(text in line for line in lines), lines


def test_episodes_of_several_turns_fit_together() -> None:
    turns = [lease(2, index=1, place=1, reward=None), lease(5, index=1, turn=1, place=2, reward=0.0)]
    lines = found(with_episode(*turns))
    assert not any("group 0" in line or "rollout 2" in line for line in lines), lines


def test_a_record_and_a_batch_without_each_other_are_named() -> None:
    without_batch, without_record = found(groups(), step=STEP.model_copy(update={"step": 2}))
    assert without_batch == "step 2: the bundle has no rollout of its batch"
    assert without_record == "step 1: 4 rollouts are trained on in it, but it has no record"


def test_tokens_older_than_the_recorded_staleness_are_named() -> None:
    those = groups()
    late = [replace(one, step=5) if one.step else one for one in those]
    step = STEP.model_copy(update={"step": 5, "staleness": 3})
    (line,) = found(late, step=step)
    assert "staleness of at most 3, a token of its batch has 4" in line


def test_retired_steps_are_not_expected() -> None:
    retired = run(retired={"rollouts": 4, "through_step": 1}, rollouts=1)
    assert found(groups()[2:], of=retired) == []


def test_totals_that_are_no_numbers_are_named() -> None:
    lines = found(groups(), of=run(accounting={"trained": "4", "dropped": [1]}))
    assert [line.split(" ")[0] for line in lines] == ["evaluated", "expired", "trained"]


def test_a_batch_that_is_there_is_compared_although_it_is_retired() -> None:
    """A forger could otherwise say that all steps are retired, and no record would be compared."""
    retired = run(retired={"rollouts": 0, "through_step": 10**9})
    (line,) = found(groups(), step=STEP.model_copy(update={"mean_reward": 0.75}), of=retired)
    assert "records the mean reward 0.75" in line
    (line,) = found(with_rollout(0, 0, reward=None), of=retired, step=STEP.model_copy(update={"mean_reward": 1 / 3}))
    assert "index 0 must have a reward" in line


def test_a_group_whose_parts_are_in_two_steps_is_named() -> None:
    whole, *rest = groups()
    parts = [replace(whole, rollouts=whole.rollouts[:1]), replace(whole, step=7, rollouts=whole.rollouts[1:])]
    lines = found([*parts, *rest], of=run(retired={"rollouts": 9, "through_step": 9}))
    assert "group 0: one part of it is in the batch of step 1, another of 7" in lines


def test_missing_rollouts_of_retired_steps_are_counted() -> None:
    retired = run(retired={"rollouts": 3, "through_step": 1}, rollouts=1)
    (line,) = found(groups()[2:], of=retired)
    assert line == "retired rollouts: 4 are missing in batches, the hub counts 3"
    check = RecordCheck(retired, run_seed=SEED, group_size=2, discrepancies=Discrepancies())
    check.take_step(STEP)
    assert check.retired_steps == 1


def test_steps_that_are_being_retired_are_not_compared() -> None:
    retired = run(retired={"rollouts": 1, "through_step": 1}, rollouts=5)
    those = groups()
    those[0] = replace(those[0], rollouts=those[0].rollouts[1:])
    assert found(those, of=retired) == []
