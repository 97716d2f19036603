"""Writes steps and evaluations into a store; their figures follow from their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_hub.core.accounting.effects import (
    GroupOpened,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRecorded,
    StepPlanned,
    StepTrained,
)
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutPayload
from echo_shared.records.run import Evaluation, EvaluationKind, TaskFigures
from echo_shared.wire.messages import DropReason, FinishReason


def train(
    store: Store,
    step: int,
    *,
    components: Mapping[str, float] | None = None,
    by_task: Mapping[str, TaskFigures] | None = None,
) -> None:
    """Record a step of one group of two rollouts, and a rollout that was dropped before. Reward and time equal the
    step's number.
    """
    ids = (f"{step}-0", f"{step}-1")
    payload = RolloutPayload(
        completion_ids=np.array([5, 6, 1], np.int32),
        behavior_logprobs=np.zeros(3, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )
    lease = RolloutsLeased(
        lease_id=step, node_id="a", group_id=step, indices=(0, 1, 2), policy_version=step - 1, deadline=1.0
    )
    store.apply([GroupOpened(group_id=step, seed=step), lease], now=1.0)
    store.apply([RolloutsDropped(rollout_ids=(f"{step}-2",), reason=DropReason.EXPIRED)], now=1.0)
    store.apply([RolloutReceived(rollout_id=each, received_at=1.0, payload=payload) for each in ids], now=1.0)
    scores = [ScoreRecorded(rollout_id=each, reward=float(step), components=components) for each in ids]
    store.apply(scores, now=1.0)
    planned = StepPlanned(
        step=step, group_ids=(step,), rollout_ids=ids, staleness=(step % 3,), planned_at=1.0, by_task=by_task or {}
    )
    metrics = {"loss": step / 4, "share_without_advantage": 0.5, "train_s": 2.0, "eval_s": 1.0}
    done = StepTrained(step=step, rollout_ids=ids, metrics=metrics, trained_at=1_000.0 + 4 * step)
    store.apply([planned, done], now=1.0)


def evaluated(version: int, accuracy: float) -> list[Evaluation]:
    greedy: dict[str, Any] = {
        "policy_version": version,
        "num_problems": 10,
        "num_unscored": 0,
        "accuracy_error": 0.125,
        "mean_reward": 0.625,
        "mean_tokens": 12.5,
        "share_truncated": 0.25,
        "seconds": 3.5,
        "evaluated_at": 2_000.0 + version,
    }
    return [
        Evaluation(kind=EvaluationKind.GREEDY, samples=1, accuracy=accuracy, pass_at={}, **greedy),
        Evaluation(kind=EvaluationKind.SAMPLED, samples=4, accuracy=accuracy / 2, pass_at={2: 0.5, 4: 0.75}, **greedy),
    ]
