"""The operator's room, `/`: is the run learning, is it fed, and what does every node do?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import jinja2
from aiohttp import web

from echo_hub.dashboard import charts
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.fleet import foremost, kinds
from echo_hub.dashboard.forms import FormTokens
from echo_hub.dashboard.live import LivePages, Look
from echo_hub.dashboard.model import CapacityView, EvaluationView, PagesSource, RunState, RunView
from echo_hub.dashboard.snapshots import Snapshot
from echo_shared import step_figures
from echo_shared.books import StepRecord

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


IDLE: Final = {
    "rollouts": "waiting for rollouts",
    "hand_off": "hand-off to the learner",
    "evaluation": "evaluation",
    "down": "learner down",
    "start": "start of the run",
}
"""What the learner does while it does not train, by `CapacityView.idle_by_reason`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar, in thousandths of its length."""

    label: str
    kind: str
    value: float
    start: float
    length: float


class OperatorPage:
    """All operators see one rendering; each session's own form token is put into it when it is sent."""

    def __init__(self, source: PagesSource, live: LivePages, guard: Guard, templates: jinja2.Environment) -> None:
        self._source = source
        self._live = live
        self._forms = FormTokens(guard)
        self._template = templates.get_template("operator.html")

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """GET /"""

        async def render(snapshot: Snapshot) -> str:
            recent = await self._source.steps(max(0, snapshot.run.trained_step - STEPS_SHOWN))
            return self._render(snapshot, recent)

        look = Look(key=("operator",), render=render, personal=self._forms.personal(request), has_curves=True)
        return await self._live.answer(request, look)

    def _render(self, snapshot: Snapshot, recent: Sequence[StepRecord]) -> str:
        run = snapshot.run
        connected = [node for node in snapshot.nodes if node.connected]
        return self._template.render(
            room="operator",
            form_token=self._forms.slot,
            run=run,
            recent=recent[::-1][:STEPS_SHOWN],
            remaining_s=remaining_s(run, recent),
            charts={**CHARTS, "learner": charts.learner()},
            tables=charts.tables(run),
            columns=[figure for figure in step_figures.STEP_FIGURES if figure.column],
            ticks=rail_ticks(run),
            segments=accounting_segments(run),
            learner_time=learner_time_segments(run.capacity),
            evaluations=newest_evaluations(run),
            versions=run.versions[:VERSIONS_SHOWN],
            nodes_by_version=Counter(node.policy_version for node in connected),
            events=run.events[:EVENTS_SHOWN],
            nodes=foremost(snapshot.nodes),
            node_kinds=kinds(snapshot.nodes),
            num_nodes=max(len(snapshot.nodes), run.nodes_known),
            num_connected=len(connected),
            tokens_per_s=sum(node.tokens_per_s for node in connected),
        )


def remaining_s(run: RunView, recent: Sequence[StepRecord]) -> float | None:
    """What the steps still to come take at the pace of the recent ones, waiting included."""
    if run.state is not RunState.RUNNING or len(recent) < 3:
        return None
    pace_s = (recent[-1].trained_at - recent[0].trained_at) / (len(recent) - 1)
    return pace_s * (run.steps_total - run.trained_step)


def rail_ticks(run: RunView) -> tuple[tuple[float, float], ...]:
    """(place along the run in thousandths, accuracy) of the evaluations, as far as they can be told apart."""
    shown = [view.greedy for view in run.evaluations[:: 1 + len(run.evaluations) // TICKS_SHOWN]]
    return tuple((1000 * min(e.policy_version / run.steps_total, 1.0), e.accuracy) for e in shown)


def newest_evaluations(run: RunView) -> tuple[EvaluationView, ...]:
    """Newest first, and always the base, which the others are compared with."""
    newest = run.evaluations[: -EVALUATIONS_SHOWN - 1 : -1]
    return newest if len(newest) == len(run.evaluations) else (*newest[:-1], run.evaluations[0])


def accounting_segments(run: RunView) -> tuple[Segment, ...]:
    """Trained, evaluated, in flight, then every drop reason, the largest first."""
    accounting = run.accounting
    parts: list[tuple[str, str, float]] = [("trained", "trained", accounting.trained)]
    parts += [("evaluated", "evaluated", accounting.evaluated)] if accounting.evaluated else []
    parts += [("in flight", "flight", accounting.in_flight)]
    dropped = sorted(accounting.dropped.items(), key=lambda item: -item[1])
    parts += [(reason.replace("_", " "), f"drop-{reason}", number) for reason, number in dropped if number]
    return _segments(parts, whole=max(accounting.leased, 1))


def learner_time_segments(capacity: CapacityView | None) -> tuple[Segment, ...]:
    """Training, then what it waited for."""
    if capacity is None:
        return ()
    parts: list[tuple[str, str, float]] = [("training", "trained", 1 - capacity.idle_share)]
    parts += [
        (label, f"idle-{reason}", share)
        for reason, label in IDLE.items()
        if (share := capacity.idle_by_reason.get(reason, 0.0))
    ]
    return _segments(parts, whole=1.0)


def _segments(parts: Iterable[tuple[str, str, float]], *, whole: float) -> tuple[Segment, ...]:
    segments, start = [], 0.0
    for label, kind, value in parts:
        length = 1000 * value / whole
        segments.append(Segment(label=label, kind=kind, value=value, start=start, length=length))
        start += length
    return tuple(segments)
