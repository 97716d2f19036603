"""The operator's front page, `/`. It says whether the run learns, whether the learner gets enough rollouts, and whether
anything is wrong; after that come details by topic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard import bars, charts
from echo_hub.dashboard.answers import answers
from echo_hub.dashboard.curves import CurvesRoom, Trend
from echo_hub.dashboard.fleet import foremost, kinds
from echo_hub.dashboard.live import LivePages, LiveRequest
from echo_hub.dashboard.model import EvaluationView, RunView
from echo_hub.dashboard.run_now import run_now
from echo_hub.dashboard.snapshots import Snapshot
from echo_hub.dashboard.source import PagesSource
from echo_hub.dashboard.templating import Template
from echo_shared.records import step_figures
from echo_shared.records.run import StepRecord

STEPS_SHOWN: Final = 12
VERSIONS_SHOWN: Final = 8
EVENTS_SHOWN: Final = 12
EVALUATIONS_SHOWN: Final = 8
TICKS_SHOWN: Final = 60
CHARTS: Final = {
    "reward": charts.REWARD,
    "staleness": charts.STALENESS,
    "speed": charts.SPEED,
    "spread": charts.SPREAD,
}


class OperatorPage:
    """The operator's front page. It is rendered once for all operators who watch it."""

    def __init__(self, source: PagesSource, live: LivePages, templates: jinja2.Environment, curves: CurvesRoom) -> None:
        self._source = source
        self._curves = curves
        self._live = live
        self._template = Template(templates, "operator.html")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /"""

        async def prepare(snapshot: Snapshot) -> Callable[[], str]:
            recent = await self._source.steps(max(0, snapshot.run.trained_step - STEPS_SHOWN))
            trend = (await self._curves.newest()).trend
            return partial(self._render, snapshot, recent, trend)

        look = LiveRequest(key=("operator",), prepare=prepare, has_curves=True)
        return await self._live.answer(request, look)

    def _render(self, snapshot: Snapshot, recent: Sequence[StepRecord], trend: Trend | None) -> str:
        run, now = snapshot.run, run_now(snapshot.run, recent)
        nodes = snapshot.nodes
        connected = [node for node in nodes.here.values() if node.connected]
        mistrusted = {one.node_id: nodes.get(one.node_id) for one in run.trust.mismatch}
        return self._template.render(
            room="operator",
            run=run,
            recent=recent[::-1][:STEPS_SHOWN],
            now=now,
            answers=answers(run, now, trend),
            charts={**CHARTS, "learner": charts.learner(), "sets": charts.of_sets(run)},
            tables=charts.tables(run),
            columns=[figure for figure in step_figures.STEP_FIGURES if figure.column],
            ticks=rail_ticks(run),
            segments=bars.accounting_segments(run),
            learner_time=bars.learner_time_segments(run.capacity),
            staleness=bars.staleness_bars(run.work),
            lengths=bars.lengths_bars(run.work),
            mismatch=bars.mismatch_bars(
                run.trust.mismatch, {node_id: node.totals.name for node_id, node in mistrusted.items() if node}
            ),
            evaluations=newest_evaluations(run),
            versions=run.versions[:VERSIONS_SHOWN],
            nodes_by_version=Counter(node.policy_version for node in connected),
            events=run.events[:EVENTS_SHOWN],
            nodes=foremost(nodes),
            node_kinds=kinds(nodes),
            num_nodes=max(len(nodes), run.nodes_known),
            num_connected=len(connected),
            tokens_per_s=sum(node.tokens_per_s for node in connected),
        )


def rail_ticks(run: RunView) -> tuple[tuple[float, float], ...]:
    """Return the marks of at most `TICKS_SHOWN` evaluations on the progress bar, each as position (in thousandths of
    the run) and accuracy."""
    shown = [view.greedy for view in run.evaluations[:: 1 + len(run.evaluations) // TICKS_SHOWN]]
    return tuple((1000 * min(e.policy_version / run.steps_total, 1.0), e.accuracy) for e in shown)


def newest_evaluations(run: RunView) -> tuple[EvaluationView, ...]:
    """Return the newest evaluations, newest first, and always the run's first evaluation as last entry, for
    comparison."""
    newest = run.evaluations[: -EVALUATIONS_SHOWN - 1 : -1]
    return newest if len(newest) == len(run.evaluations) else (*newest[:-1], run.evaluations[0])
