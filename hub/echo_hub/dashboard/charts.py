"""Definitions of the pages' charts, which `static/charts.js` draws: titles, axes, lines and data columns.

The values of a line are a column of a table. The table is either /api/v1/curves, which grows while the page is open, or
JSON in a live part of the page, {"x": [...], COLUMN: [...], ...}. The horizontal axis shows optimizer steps or policy
versions. Steps and their versions have equal numbers, so one cursor serves all charts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from echo_hub.dashboard import curves
from echo_hub.dashboard.model import EvaluationView, RunView
from echo_shared.records import step_figures

CURVES: Final = "curves"
"""Name by which charts refer to the table at /api/v1/curves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    column: str
    label: str
    colour: str
    """Name of a colour variable in `echo.css`, without its dashes."""
    table: str = CURVES
    """The table of the line's values: CURVES, or the id of the part of the page that holds the table."""
    error: str = ""
    """Column that holds the standard errors of the line's values, drawn as a band around the line; "" for none."""
    style: Literal["line", "steps", "dotted", "points"] = "line"
    width: float = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartView:
    """One chart. Later lines are drawn over earlier ones."""

    key: str
    title: str
    about: str
    """A sentence for readers that explains the chart."""
    figures_at: str
    """Words that tell the reader where the chart's values are shown as numbers."""
    y: str
    """Label of the vertical axis, with its unit."""
    lines: tuple[ChartLine, ...]
    x: str = "optimizer step"
    logarithmic: bool = False
    share: bool = False
    """True if the values are shares, to be shown as percentages."""
    at_least: float = 0.0
    """Smallest value at which the vertical axis may end, so that tiny values do not look large."""
    tall: bool = False
    own_range: bool = False
    """True if the horizontal axis begins at the first value's step; False if it begins at 0."""

    @property
    def drawn(self) -> dict[str, Any]:
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
        lines=tuple(ChartLine(column=figure.key, label=figure.label, colour=figure.colour) for figure in lines),
        logarithmic=chart.logarithmic,
        share=share,
        at_least=0.1 if share else 0.0,
    )


REWARD: Final = ChartView(
    key="reward",
    title="Reward and held-out accuracy",
    about="The training reward, and the accuracy on problems that are never trained on. Bands: the standard deviation "
    "of the steps' rewards around the trend, and the standard error around an accuracy.",
    figures_at="the tables of evaluations and of newest steps",
    y="reward, accuracy",
    lines=(
        ChartLine(
            table="evaluations-data",
            column="mean_at_k",
            error="mean_at_k_error",
            label="held-out mean@k",
            colour="sampled",
            style="points",
        ),
        ChartLine(
            table="evaluations-data",
            column="accuracy",
            error="accuracy_error",
            label="held-out, greedy",
            colour="accuracy",
            style="points",
        ),
        ChartLine(column="mean_reward", label="each step's mean reward", colour="reward-faint", width=1.0),
        ChartLine(column=curves.SMOOTH, error=curves.SPREAD, label="trend of the reward", colour="reward", width=2.0),
    ),
    at_least=0.95,
    tall=True,
)
STALENESS: Final = ChartView(
    key="staleness",
    title="Staleness",
    about="Age of the trained rollouts, in steps, relative to the trained weights. Above the bound, they are dropped.",
    figures_at="the table of newest steps",
    y="steps",
    lines=(
        ChartLine(table="bound-data", column="bound", label="bound", colour="muted", style="dotted"),
        ChartLine(column="staleness_max", label="max", colour="staleness-faint", style="steps"),
        ChartLine(column="staleness_mean", label="mean", colour="staleness", width=2.0),
    ),
    at_least=1.0,
)
SPEED: Final = ChartView(
    key="speed",
    title="Throughput",
    about="Rollouts trained per second, including waits.",
    figures_at="/api/v1/curves",
    y="rollouts/s",
    lines=(ChartLine(column="rollouts_per_s", label="trained", colour="speed", width=2.0),),
    at_least=1.0,
)
SPREAD: Final = ChartView(
    key="spread",
    title="Distribution time",
    about="Time from a version's announcement until half, 95 % and all of the nodes had all of it.",
    figures_at="the table of versions",
    x="policy version",
    y="time, s",
    lines=(
        ChartLine(table="versions-data", column="dissemination_max_s", label="all", colour="accuracy"),
        ChartLine(table="versions-data", column="dissemination_p95_s", label="95 %", colour="staleness"),
        ChartLine(table="versions-data", column="dissemination_p50_s", label="half", colour="speed"),
    ),
    own_range=True,
)


def learner() -> tuple[ChartView, ...]:
    return tuple(_of_step_figures(chart) for chart in step_figures.CHARTS)


SET_COLOURS: Final = ("accuracy", "reward", "staleness", "speed", "sampled", "muted")


def of_sets(run: RunView) -> ChartView | None:
    """Return a chart with one curve for each evaluation set; None if the run has a single set."""
    if not run.evaluation_sets:
        return None
    return ChartView(
        key="sets",
        title="Held-out accuracy by set",
        about="Greedy accuracy on each evaluation set. The accuracy above is their weighted mean.",
        figures_at="the table of evaluation sets and /api/v1/run",
        y="accuracy",
        x="policy version",
        lines=tuple(
            ChartLine(
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
    """Return the data tables of the charts, except /api/v1/curves. A table's key is the id of the page part that holds
    the table."""
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
