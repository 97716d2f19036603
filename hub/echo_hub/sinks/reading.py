"""What the store has for metric sinks, in order, from where a sink has come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

from echo_hub.sinks.base import DISTRIBUTION, Entry, Position, SampleText
from echo_hub.store.store import Store
from echo_shared.books import Evaluation, EvaluationKind, StepRecord

STEPS_A_READ: Final = 100
HISTOGRAMS_AT_START: Final = 500
"""Of the steps before a sink was opened, histograms of so many newest: of each its rollouts are read again."""


class Reading:
    """The entries after `position`. Blocks; not for use from two threads at once."""

    def __init__(
        self, store: Store, position: Position, *, texts: Callable[[int], Sequence[SampleText]] = lambda step: ()
    ) -> None:
        """`texts`: the sample texts of a step."""
        self.position = position
        """Behind what `read` gave last."""
        self._store = store
        self._texts = texts
        self._before = next(iter(store.steps_history(position.step - 1, 1)), None) if position.step else None
        newest = store.newest_step()
        self._whole_from = (newest.step if newest else 0) - HISTOGRAMS_AT_START

    def read(self) -> list[Entry]:
        """The next entries; none: there are no more yet. When it fails, the next reading gives the same."""
        entries = []
        evaluated_at, before = self.position.evaluated_at, self._before
        for record in self._store.steps_history(self.position.step, STEPS_A_READ):
            entries.append(self._of_step(record, before))
            before = record
        for evaluation in self._store.evaluations(evaluated_at):
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
            texts=self._texts(record.step) if is_whole else (),
        )

    def _histograms(self, step: int) -> dict[str, list[float]]:
        ends = self._store.batch_rewards(step)
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
    room = f"eval/{evaluation.name}" if evaluation.name else "eval"
    accuracy = f"{room}/mean_at_{evaluation.samples}" if sampled else f"{room}/greedy_accuracy"
    scalars = {
        accuracy: evaluation.accuracy,
        f"{accuracy}_error": evaluation.accuracy_error,
        **{f"{room}/pass_at_{k}": share for k, share in evaluation.pass_at.items()},
        f"{room}/{name}_reward": evaluation.mean_reward,
        **{f"{room}/{name}_reward_{component}": mean for component, mean in evaluation.components.items()},
        f"{room}/{name}_tokens": evaluation.mean_tokens,
        f"{room}/{name}_truncated": evaluation.share_truncated,
        f"{room}/{name}_unscored": float(evaluation.num_unscored),
        f"{room}/{name}_seconds": evaluation.seconds,
    }
    return Entry(policy_version=evaluation.policy_version, at=evaluation.evaluated_at, scalars=scalars)
