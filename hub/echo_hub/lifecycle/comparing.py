"""Compare runs: curves by step, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from echo_hub.config.sections import HubConfig
from echo_hub.store.reports import read_evaluations, read_steps
from echo_hub.store.store import Store
from echo_shared.records.run import EvaluationKind, StepRecord
from echo_shared.records.step_figures import SECONDS, STEP_FIGURES, TRAIN_S, Better
from echo_shared.settings import without_secrets

STEPS_A_READ: Final = 1_000
_BARS: Final = "▁▂▃▄▅▆▇█"
ELSEWHERE: Final = "(set, but not shown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run over its steps. `points` are (step, value) pairs in order, at least one."""

    label: str
    better: Better
    points: tuple[tuple[int, float], ...]

    ALSO_IN_JSON = ("last", "best", "best_step")

    @property
    def last(self) -> float:
        return self.points[-1][1]

    @property
    def best(self) -> float | None:
        """Return the best value of the curve; None if no direction of the metric is better."""
        return None if not self.better else self._best[1]

    @property
    def best_step(self) -> int | None:
        return None if not self.better else self._best[0]

    @property
    def _best(self) -> tuple[int, float]:
        sign = 1 if self.better == "higher" else -1
        return max(self.points, key=lambda point: sign * point[1])


_OF_BOOKS: Final[Mapping[str, tuple[str, Better]]] = {
    "mean_reward": ("reward", "higher"),
    "heldout_accuracy": ("held-out accuracy, greedy", "higher"),
    "heldout_mean_at_k": ("held-out accuracy, mean@k", "higher"),
    "idle_share": ("learner idle, share of time", "lower"),
    "staleness_mean": ("staleness, mean", "lower"),
    "staleness_max": ("staleness, largest", "lower"),
    "rollouts_per_s": ("rollouts trained per second", "higher"),
    "completion_tokens_mean": ("tokens of a completion", ""),
    "dropped_per_rollout": ("rollouts dropped per rollout trained", "lower"),
}
"""Metrics that are computed from the database: title, and which direction is better ("" for none), by key. In the
table, the learner's own metrics follow them."""


def curves_of(store: Store) -> dict[str, Curve]:
    """Return all metrics of the run as curves, by key, in the order of the table rows."""
    points: dict[str, list[tuple[int, float]]] = {}
    for before, step in pairwise([None, *_steps(store)]):
        assert step is not None
        for key, value in _figures(step, before).items():
            points.setdefault(key, []).append((step.step, value))
    for evaluation in store.read(read_evaluations):
        if evaluation.name:
            continue  # Leave out single evaluation sets: the run's own metrics are means over its sets.
        key = "heldout_accuracy" if evaluation.kind is EvaluationKind.GREEDY else "heldout_mean_at_k"
        points.setdefault(key, []).append((evaluation.policy_version, evaluation.accuracy))
    labels: dict[str, tuple[str, Better]] = {
        **_OF_BOOKS,
        **{figure.key: (f"learner: {figure.label}", figure.better) for figure in STEP_FIGURES if figure is not TRAIN_S},
    }
    return {
        key: Curve(label=label, better=better, points=tuple(sorted(points[key])))
        for key, (label, better) in labels.items()
        if key in points
    }


def _steps(store: Store) -> Iterator[StepRecord]:
    last = 0
    while some := store.read(read_steps, last, STEPS_A_READ):
        yield from some
        last = some[-1].step


def _figures(step: StepRecord, before: StepRecord | None) -> dict[str, float]:
    found = {
        "mean_reward": step.mean_reward,
        "staleness_mean": step.staleness_mean,
        "staleness_max": float(step.staleness_max),
        **{key: value for key, value in step.figures.items() if value is not None},
    }
    if step.num_rollouts:
        dropped = sum(step.dropped.values()) - (sum(before.dropped.values()) if before else 0)
        found["dropped_per_rollout"] = dropped / step.num_rollouts
        found["completion_tokens_mean"] = step.num_tokens / step.num_rollouts
    # The first step's duration is unknown, because it includes the wait for the first nodes.
    lasted_s = step.trained_at - before.trained_at if before else 0.0
    if lasted_s > 0:
        found["rollouts_per_s"] = step.num_rollouts / lasted_s
        found["idle_share"] = 1 - min(1.0, (step.figures.get(SECONDS.key) or 0.0) / lasted_s)
    return found


def differing(configs: Sequence[HubConfig]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ, by `section.key`, with each run's value."""
    dumps = [config.model_dump(mode="json") for config in configs]
    shown = [without_secrets(config).model_dump(mode="json") for config in configs]
    found = {}
    for section, settings in dumps[0].items():
        for key in settings:
            values = tuple(dump[section][key] for dump in dumps)
            if any(value != values[0] for value in values):
                masked = tuple(dump[section][key] for dump in shown)
                found[f"{section}.{key}"] = tuple(
                    value if value == here else ELSEWHERE for value, here in zip(values, masked, strict=True)
                )
    return found


def sparkline(curve: Curve, *, low: float, high: float, last_step: int, width: int) -> str:
    """Draw the curve from step 0 to `last_step` as `width` characters.

    Each character stands for several steps. Its height is their mean value, on the scale from `low` to `high`. A space
    means that these steps have no values.
    """
    columns: dict[int, list[float]] = {}
    for step, value in curve.points:
        columns.setdefault(min(width - 1, step * width // max(1, last_step + 1)), []).append(value)
    return "".join(_bar(columns.get(place), low, high) for place in range(width))


def _bar(values: Sequence[float] | None, low: float, high: float) -> str:
    if not values:
        return " "
    share = 0.5 if high <= low else (sum(values) / len(values) - low) / (high - low)
    return _BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))]
