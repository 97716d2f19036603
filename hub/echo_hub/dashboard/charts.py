"""What the charts of pages draw, for `static/charts.js`, which draws any of them: titles, axes, lines, and of what.

A line's numbers are a column of a table: /api/v1/curves, which grows by itself, or a live part of the page that holds
JSON, {"x": [...], COLUMN: [...], ...}. All charts of a page have optimizer steps, or policy versions, which count the
same, along their horizontal axis, so that one cursor serves all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from echo_hub.dashboard import curves
from echo_hub.dashboard.model import EvaluationView, RunView
from echo_shared import step_figures

CURVES: Final = "curves"
"""The table that is /api/v1/curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve."""

    column: str
    label: str
    colour: str
    """A colour of `echo.css`, without its dashes."""
    table: str = CURVES
    """Or the id of the part that holds it."""
    error: str = ""
    """The column with its standard error, drawn as a band."""
    style: Literal["line", "steps", "dotted", "points"] = "line"
    width: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView:
    """One chart; of its lines the last is on top."""

    key: str
    title: str
    about: str
    """A sentence on what it means."""
    figures_at: str
    """Where the same figures are to be read."""
    y: str
    """What stands at its vertical axis, its unit with it."""
    lines: tuple[Line, ...]
    x: str = "optimizer step"
    logarithmic: bool = False
    share: bool = False
    """Its figures are shares, shown as percentages."""
    at_least: float = 0.0
    """How far its vertical axis reaches at least."""
    tall: bool = False
    own_range: bool = False
    """Its horizontal axis begins where its figures do."""

    @property
    def drawn(self) -> dict[str, Any]:
        """For the script."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _plain(value: Any) -> Any:
    return [dataclasses.asdict(line) for line in value] if isinstance(value, tuple) else value


def _of_step_figures(chart: step_figures.Chart) -> ChartView:
    lines = step_figures.lines_of(chart)
    share = any(figure.unit == "share" for figure in lines)
    return ChartView(
        key=chart.key,
        title=chart.title,
        about=chart.about,
        figures_at="the table of newest steps and /api/v1/steps",
        y=chart.axis,
        lines=tuple(Line(column=figure.key, label=figure.label, colour=figure.colour) for figure in lines),
        logarithmic=chart.logarithmic,
        share=share,
        at_least=0.1 if share else 0.0,
    )


REWARD: Final = ChartView(
    key="reward",
    title="Reward and held-out accuracy",
    about="What the model is trained for, and whether it carries over to problems that it is never trained on. Bands: "
    "about the trend, the standard deviation of the steps' rewards; about an accuracy, its standard error.",
    figures_at="the tables of evaluations and of newest steps",
    y="reward, accuracy",
    lines=(
        Line(
            table="evaluations-data",
            column="mean_at_k",
            error="mean_at_k_error",
            label="held-out mean@k",
            colour="sampled",
            style="points",
        ),
        Line(
            table="evaluations-data",
            column="accuracy",
            error="accuracy_error",
            label="held-out, greedy",
            colour="accuracy",
            style="points",
        ),
        Line(column="mean_reward", label="each step's mean reward", colour="reward-faint", width=1.0),
        Line(column=curves.SMOOTH, error=curves.SPREAD, label="trend of the reward", colour="reward", width=2.0),
    ),
    at_least=0.95,
    tall=True,
)
STALENESS: Final = ChartView(
    key="staleness",
    title="Staleness",
    about="How many steps older the rollouts are than the weights that they train; above the bound none is used.",
    figures_at="the table of newest steps",
    y="steps",
    lines=(
        Line(table="bound-data", column="bound", label="bound", colour="muted", style="dotted"),
        Line(column="staleness_max", label="max", colour="staleness-faint", style="steps"),
        Line(column="staleness_mean", label="mean", colour="staleness", width=2.0),
    ),
    at_least=1.0,
)
SPEED: Final = ChartView(
    key="speed",
    title="Throughput",
    about="How many rollouts the run trains on in a second, waiting included.",
    figures_at="/api/v1/curves",
    y="rollouts/s",
    lines=(Line(column="rollouts_per_s", label="trained", colour="speed", width=2.0),),
    at_least=1.0,
)
SPREAD: Final = ChartView(
    key="spread",
    title="Time until nodes had it",
    about="From a version's announcement until half, 95 % and all of the nodes had it whole.",
    figures_at="the table of versions",
    x="policy version",
    y="time, s",
    lines=(
        Line(table="versions-data", column="dissemination_max_s", label="all", colour="accuracy"),
        Line(table="versions-data", column="dissemination_p95_s", label="95 %", colour="staleness"),
        Line(table="versions-data", column="dissemination_p50_s", label="half", colour="speed"),
    ),
    own_range=True,
)


def learner() -> tuple[ChartView, ...]:
    """The learner's own, by the table of step figures."""
    return tuple(_of_step_figures(chart) for chart in step_figures.CHARTS)


SET_COLOURS: Final = ("accuracy", "reward", "staleness", "speed", "sampled", "muted")


def of_sets(run: RunView) -> ChartView | None:
    """Of several evaluation sets, a curve each; None where there is one alone."""
    if not run.evaluation_sets:
        return None
    return ChartView(
        key="sets",
        title="Held-out accuracy by set",
        about="Greedy, of each evaluation set; the accuracy above is their weighted mean.",
        figures_at="the table of evaluation sets and /api/v1/run",
        y="accuracy",
        x="policy version",
        lines=tuple(
            Line(
                table=f"set-{place}-data",
                column="accuracy",
                error="accuracy_error",
                label=one.name,
                colour=SET_COLOURS[place % len(SET_COLOURS)],
            )
            for place, one in enumerate(run.evaluation_sets)
        ),
        share=True,
        at_least=0.95,
    )


def _accuracies(views: Sequence[EvaluationView]) -> Mapping[str, list[float | None]]:
    return {
        "x": [view.greedy.policy_version for view in views],
        "accuracy": _short(view.greedy.accuracy for view in views),
        "accuracy_error": _short(view.greedy.accuracy_error for view in views),
    }


def tables(run: RunView) -> Mapping[str, Mapping[str, list[float | None]]]:
    """The numbers that are not in /api/v1/curves, by the ids of the parts that hold them."""
    evaluations, versions = run.evaluations, run.versions[::-1]
    arrived = [view.record for view in versions if view.record.dissemination_max_s is not None]
    return {
        "evaluations-data": {
            **_accuracies(evaluations),
            "mean_at_k": _short(view.mean_at_k for view in evaluations),
            "mean_at_k_error": _short(view.mean_at_k_error for view in evaluations),
        },
        "bound-data": {"x": [1, max(run.trained_step, 2)], "bound": [run.max_staleness] * 2},
        "versions-data": {
            "x": [record.policy_version for record in arrived],
            "dissemination_max_s": _short(record.dissemination_max_s for record in arrived),
            "dissemination_p95_s": _short(record.dissemination_p95_s for record in arrived),
            "dissemination_p50_s": _short(record.dissemination_p50_s for record in arrived),
        },
        **{f"set-{place}-data": _accuracies(one.evaluations) for place, one in enumerate(run.evaluation_sets)},
    }


def _short(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]
