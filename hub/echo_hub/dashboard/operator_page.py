"""The operator's room, `/`: is the run learning, is it fed, is anything wrong; then plane by plane."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard import bars, charts
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.answers import answers
from echo_hub.dashboard.curves import CurvesRoom, Trend
from echo_hub.dashboard.live import LivePages, Look
from echo_hub.dashboard.model import EvaluationView, NodeView, PagesSource, RunView
from echo_hub.dashboard.run_now import run_now
from echo_hub.dashboard.snapshots import Snapshot
from echo_hub.dashboard.tables import Column, headings, known_sort, sort_rows
from echo_shared import step_figures
from echo_shared.books import StepRecord

STEPS_SHOWN: Final = 12
VERSIONS_SHOWN: Final = 8
EVENTS_SHOWN: Final = 12
EVALUATIONS_SHOWN: Final = 8
TICKS_SHOWN: Final = 60
NODES_SHOWN: Final = 100
CHARTS: Final = {
    "reward": charts.REWARD,
    "staleness": charts.STALENESS,
    "speed": charts.SPEED,
    "spread": charts.SPREAD,
}

STANDINGS: Final = {"quarantined": 0, "suspect": 1, "new": 2, "proven": 3}
"""The order in which an operator wants to see them."""

NODE_COLUMNS: Final[tuple[Column[NodeView], ...]] = (
    Column(key="name", title="Node", order=lambda node: (node.totals.name.casefold(), node.totals.node_id)),
    Column(key="activity", title="Doing", order=lambda node: (not node.connected, node.activity)),
    Column(
        key="version",
        title="Version",
        order=lambda node: -1 if node.policy_version is None else node.policy_version,
        descending=True,
        css="number wide",
    ),
    Column(key="speed", title="Tokens/s", order=lambda node: node.tokens_per_s, descending=True, css="number"),
    Column(key="held", title="Holds", order=lambda node: node.in_flight, descending=True, css="number wide"),
    Column(
        key="received", title="Received", order=lambda node: node.totals.received, descending=True, css="number wide"
    ),
    Column(key="trained", title="Trained", order=lambda node: node.trained, descending=True, css="number"),
    Column(key="dropped", title="Dropped", order=lambda node: node.totals.dropped, descending=True, css="number wide"),
    Column(
        key="standing",
        title="Checked",
        order=lambda node: (STANDINGS.get(node.totals.standing, len(STANDINGS)), -node.totals.checks),
        css="number wide",
    ),
    Column(key="seen", title="Last seen", order=lambda node: node.totals.last_seen, descending=True, css="number wide"),
)


class OperatorPage:
    """All operators see one rendering; each session's own form token is put into it when it is sent."""

    def __init__(
        self, source: PagesSource, live: LivePages, guard: Guard, templates: jinja2.Environment, curves: CurvesRoom
    ) -> None:
        self._source = source
        self._curves = curves
        self._live = live
        self._guard = guard
        self._form_token_slot = secrets.token_hex()
        """Stands for the token of whoever looks, and nobody can know it."""
        self._template = templates.get_template("operator.html")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /"""
        sort = known_sort(NODE_COLUMNS, request.query.get("sort", ""))
        session = self._guard.session(request)  # None for a script, which needs no forms.

        async def render(snapshot: Snapshot) -> str:
            recent = await self._source.steps(max(0, snapshot.run.trained_step - STEPS_SHOWN))
            trend = (await self._curves.newest()).trend
            return self._render(snapshot, recent, sort, trend)

        def personal(text: str) -> str:
            return text.replace(self._form_token_slot, session.form_token() if session else "")

        look = Look(key=("operator", sort), render=render, personal=personal, has_curves=True)
        return await self._live.answer(request, look)

    def _render(self, snapshot: Snapshot, recent: Sequence[StepRecord], sort: str, trend: Trend | None) -> str:
        run, now = snapshot.run, run_now(snapshot.run, recent)
        by_default = sorted(
            snapshot.nodes, key=lambda node: (not node.connected, -node.tokens_per_s, node.totals.node_id)
        )
        nodes = sort_rows(by_default, NODE_COLUMNS, sort)
        connected = [node for node in nodes if node.connected]
        return self._template.render(
            room="operator",
            form_token=self._form_token_slot,
            run=run,
            recent=recent[::-1][:STEPS_SHOWN],
            now=now,
            answers=answers(run, now, trend),
            charts={**CHARTS, "learner": charts.learner()},
            tables=charts.tables(run),
            columns=[figure for figure in step_figures.STEP_FIGURES if figure.column],
            ticks=rail_ticks(run),
            segments=bars.accounting_segments(run),
            learner_time=bars.learner_time_segments(run.capacity),
            staleness=bars.staleness_bars(run.work),
            lengths=bars.lengths_bars(run.work),
            mismatch=bars.mismatch_bars(
                run.trust.mismatch, {node.totals.node_id: node.totals.name for node in snapshot.nodes}
            ),
            evaluations=newest_evaluations(run),
            versions=run.versions[:VERSIONS_SHOWN],
            nodes_by_version=Counter(node.policy_version for node in connected),
            events=run.events[:EVENTS_SHOWN],
            nodes=nodes[:NODES_SHOWN],
            num_nodes=max(len(nodes), run.nodes_known),
            node_headings=headings(NODE_COLUMNS, sort, kept={}, anchor="nodes"),
            activities=Counter(node.activity for node in connected).most_common(),
            num_connected=len(connected),
            tokens_per_s=sum(node.tokens_per_s for node in connected),
        )


def rail_ticks(run: RunView) -> tuple[tuple[float, float], ...]:
    """(place along the run in thousandths, accuracy) of the evaluations, as far as they can be told apart."""
    shown = [view.greedy for view in run.evaluations[:: 1 + len(run.evaluations) // TICKS_SHOWN]]
    return tuple((1000 * min(e.policy_version / run.steps_total, 1.0), e.accuracy) for e in shown)


def newest_evaluations(run: RunView) -> tuple[EvaluationView, ...]:
    """Newest first, and always the base, which the others are compared with."""
    newest = run.evaluations[: -EVALUATIONS_SHOWN - 1 : -1]
    return newest if len(newest) == len(run.evaluations) else (*newest[:-1], run.evaluations[0])
