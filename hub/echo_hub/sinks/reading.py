"""Entries for other programs, read from the database: one for each step and each evaluation, in order.

    train/*         the figures of `echo_shared.records.step_figures`, and the mean reward
    reward/*        the mean of each reward component, if there are several
    rollouts/*      the step's batch: number, tokens, staleness, and rollouts trained per second
    drops/*         rollouts dropped since the previous step, by reason
    tasks/*         figures of each task, if the run has several
    eval/*          held-out problems; the step is the evaluated version
    distribution/*  histograms over the step's rollouts: reward, completion_tokens, staleness
    samples         texts of a few rollouts of the step, if the operator has turned that on

The step of an entry is always a policy version. Its wall time comes from the database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from echo_hub.sinks.texts import SampleText, SampleTexts
from echo_hub.store.browsing import read_batch_rewards
from echo_hub.store.reports import read_evaluations, read_newest_step, read_steps
from echo_hub.store.store import Store
from echo_shared.records.run import Evaluation, EvaluationKind, StepRecord

DISTRIBUTION: Final = "distribution/"
SAMPLES: Final = "samples"
STEPS_A_READ: Final = 100
HISTOGRAMS_AT_START: Final = 500
"""Number of the newest steps before the hub's start that get histograms. Each of these steps needs a query for its
rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The metrics of one policy version, by tag."""

    policy_version: int
    at: float
    scalars: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Sequence[SampleText] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A point in the run. All entries up to this point are written."""

    step: int = 0
    evaluated_at: float = 0.0


class EntryReader:
    """Reads the entries after `position`, and the sample texts of each step. Blocks, and is not thread-safe."""

    def __init__(self, store: Store, position: Position, *, texts: SampleTexts | None = None) -> None:
        self.position = position
        """Position after the last entry that `read` has returned."""
        self._store = store
        self._texts = texts
        self._before = next(iter(store.read(read_steps, position.step - 1, 1)), None) if position.step else None
        newest = store.read(read_newest_step)
        self._whole_from = (newest.step if newest else 0) - HISTOGRAMS_AT_START

    def read(self) -> list[Entry]:
        """Return the next entries; an empty list if no new entries exist yet. After an error, the next call returns the
        same entries."""
        entries = []
        evaluated_at, before = self.position.evaluated_at, self._before
        for record in self._store.read(read_steps, self.position.step, STEPS_A_READ):
            entries.append(self._of_step(record, before))
            before = record
        for evaluation in self._store.read(read_evaluations, evaluated_at):
            entries.append(_of_evaluation(evaluation))
            evaluated_at = max(evaluated_at, evaluation.evaluated_at)
        self.position, self._before = Position(step=before.step if before else 0, evaluated_at=evaluated_at), before
        return entries

    def _of_step(self, record: StepRecord, before: StepRecord | None) -> Entry:
        is_whole = record.step > self._whole_from
        return Entry(
            policy_version=record.step,
            at=record.trained_at,
            scalars=_scalars(record, before),
            histograms=self._histograms(record.step) if is_whole else {},
            texts=self._texts.of_step(record.step) if is_whole and self._texts is not None else (),
        )

    def _histograms(self, step: int) -> dict[str, list[float]]:
        ends = self._store.read(read_batch_rewards, step)
        if not ends:
            return {}
        return {
            f"{DISTRIBUTION}reward": [end.reward for end in ends],
            f"{DISTRIBUTION}completion_tokens": [float(end.num_tokens) for end in ends],
            f"{DISTRIBUTION}staleness": [float(step - 1 - end.policy_version) for end in ends],
        }


def _scalars(record: StepRecord, before: StepRecord | None) -> dict[str, float]:
    dropped = {
        f"drops/{reason}": float(number - (before.dropped.get(reason, 0) if before else 0))
        for reason, number in record.dropped.items()
    }
    seconds = record.trained_at - before.trained_at if before else 0.0
    return {
        **{f"train/{name}": value for name, value in record.figures.items() if value is not None},
        "train/mean_reward": record.mean_reward,
        **{f"reward/{name}": value for name, value in record.components.items()},
        "rollouts/number": float(record.num_rollouts),
        "rollouts/tokens": float(record.num_tokens),
        "rollouts/groups": float(record.num_groups),
        "rollouts/staleness_mean": record.staleness_mean,
        "rollouts/staleness_max": float(record.staleness_max),
        **({"rollouts/per_second": record.num_rollouts / seconds} if seconds > 0 else {}),
        **dropped,
        **{
            f"tasks/{key}/{name}": float(value)
            for key, figures in record.by_task.items()
            for name, value in asdict(figures).items()
            if value is not None
        },
    }


def _of_evaluation(evaluation: Evaluation) -> Entry:
    sampled = evaluation.kind is EvaluationKind.SAMPLED
    name = "sampled" if sampled else "greedy"
    prefix = f"eval/{evaluation.name}" if evaluation.name else "eval"
    accuracy = f"{prefix}/mean_at_{evaluation.samples}" if sampled else f"{prefix}/greedy_accuracy"
    scalars = {
        accuracy: evaluation.accuracy,
        f"{accuracy}_error": evaluation.accuracy_error,
        **{f"{prefix}/pass_at_{k}": share for k, share in evaluation.pass_at.items()},
        f"{prefix}/{name}_reward": evaluation.mean_reward,
        **{f"{prefix}/{name}_reward_{component}": mean for component, mean in evaluation.components.items()},
        f"{prefix}/{name}_tokens": evaluation.mean_tokens,
        f"{prefix}/{name}_truncated": evaluation.share_truncated,
        f"{prefix}/{name}_unscored": float(evaluation.num_unscored),
        f"{prefix}/{name}_seconds": evaluation.seconds,
    }
    return Entry(policy_version=evaluation.policy_version, at=evaluation.evaluated_at, scalars=scalars)
