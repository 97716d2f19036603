"""Print a plan in a terminal: tables, a verdict, and a character picture of a few steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Final

from echo_hub.commands.plan import Plan
from echo_hub.core.capacity.advice import Mix
from echo_hub.core.capacity.model import Pool
from echo_hub.core.capacity.timeline import Lane, TimeSpan, timeline

COLUMNS: Final = 76
"""Width of the picture's time axis, in characters."""

LANES: Final[dict[str, tuple[Lane, ...]]] = {
    "learner": ("training", "waiting"),
    "broadcast": ("broadcast",),
    "sampling": ("sampling",),
}
"""Rows of the picture: for each row's name, the kinds of time spans that are drawn in it."""

FILL: Final[dict[Lane, str]] = {"training": "=", "waiting": ".", "broadcast": ">", "sampling": "-"}
KINDS_SHOWN: Final = 20

SPENT: Final = {
    "rollouts": "waiting for rollouts",
    "hand_off": "hand-off",
    "evaluation": "evaluation",
    "down": "learner down",
    "start": "start of the run",
}
"""Labels for the reasons why the learner waits, keyed as in `learner_time.REASONS`."""


def plan_lines(plan: Plan) -> Iterator[str]:
    yield from _workload(plan)
    yield ""
    yield from _nodes(plan)
    yield ""
    yield from _answers(plan)
    if plan.prediction.rollouts_per_s:
        yield ""
        yield from picture(timeline(plan.fleet.workload, Pool.of(plan.fleet.nodes)))
    yield ""
    yield plan.verdict


def _workload(plan: Plan) -> Iterator[str]:
    workload = plan.fleet.workload
    settings = f", {_settings(workload.max_staleness, workload.publish_every)}"
    yield f"Mode          {workload.mode}{settings if workload.mode == 'async' else ''}"
    yield f"A step takes  {workload.rollouts_per_step:.4g} rollouts and {seconds(workload.step_s)}: " + (
        f"{seconds(workload.train_s)} of training, {seconds(workload.hand_off_s)} of hand-off"
    )
    if workload.mode != "colocated":
        yield f"A version     reaches the nodes {seconds(workload.broadcast_s)} after its training"
    if plan.fleet.scoring:
        yield f"Scoring       {plan.fleet.scoring}"
        yield f"Verifying     {plan.fleet.verifying}"
        yield f"Evaluating    {plan.fleet.evaluating}"
    if plan.fleet.spent is not None:
        spent = plan.fleet.spent
        idle = [f"{SPENT[reason]} {share:.1%}" for reason, share in spent.idle.items() if share >= 0.0005]
        yield f"Measured      over {seconds(spent.window_s)}: {', '.join([f'training {spent.training:.1%}', *idle])}"


def _nodes(plan: Plan) -> Iterator[str]:
    added = dict(plan.advice.added)
    rows = [("Nodes", "Number", "Rollouts/s", "Latency", "Cost/h", "To add")]
    for kind in plan.fleet.kinds[:KINDS_SHOWN]:
        number = added.get(kind.name)
        cells = (f"{kind.count:,}", f"{kind.rollouts_per_s:.3g}", seconds(kind.latency_s), f"{kind.cost_per_h:.2f}")
        rows.append((kind.name, *cells, "see below" if number is None else f"{number:,}"))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join((row[0].ljust(widths[0]), *numbers))
    if len(plan.fleet.kinds) > KINDS_SHOWN:
        yield f"and {len(plan.fleet.kinds) - KINDS_SHOWN} more classes; --json has all"


def _answers(plan: Plan) -> Iterator[str]:
    told, advice, times = plan.prediction, plan.advice, plan.times_as_many
    yield f"A step every  {seconds(told.period_s)}; the learner trains {told.utilisation:.1%} of the time"
    there, needed, missing = told.rollouts_per_s, told.needed_per_s, told.missing_per_s
    yield f"Rollouts/s    {there:.4g} available, {needed:.4g} needed, {missing:.4g} missing"
    yield f"To reach {plan.target:.0%} of the learner's capacity, use any of these:"
    yield f"  training.max_staleness  {_or_none(advice.max_staleness)}"
    yield f"  training.publish_every  {_or_none(advice.publish_every)}"
    num_nodes = sum(node.count for node in plan.fleet.nodes)
    yield f"  nodes of the same mix   {f'{ceil(num_nodes * times):,}, now {num_nodes:,}' if times else '-'}"
    yield f"  cheapest nodes to add   {_mix(plan.cheapest)}"
    if plan.placement is not None:
        settings = _settings(plan.placement.max_staleness, plan.placement.publish_every)
        yield f"Cheapest subset of these nodes: {_mix(plan.placement.mix)}; {settings}"


def _settings(max_staleness: int, publish_every: int) -> str:
    return f"staleness <= {max_staleness}, a version every {f'{publish_every} steps' if publish_every > 1 else 'step'}"


def _or_none(value: int | None) -> str:
    return "- (no value is enough)" if value is None else str(value)


def _mix(mix: Mix | None) -> str:
    if mix is None:
        return "-"
    nodes = " + ".join(f"{count:,} x {name}" for name, count in mix.counts) or "nothing"
    return f"{nodes}, {mix.cost_per_h:.2f} an hour" if mix.cost_per_h else nodes


def seconds(value: float) -> str:
    """Format a duration, such as 1.25 s; "never" for infinity."""
    return "never" if value == float("inf") else f"{value:.3g} s" if value < 1_000 else f"{value:,.0f} s"


def picture(spans: Sequence[TimeSpan]) -> Iterator[str]:
    """Yield the picture's rows for learner, broadcast and sampling. Time runs from left to right."""
    end = max(span.end_s for span in spans)
    scale = COLUMNS / end
    for name, lanes in LANES.items():
        drawn = [span for span in spans if span.lane in lanes]
        if drawn:
            yield f"{name:<10}{_line(drawn, scale)}"
    yield f"{'':<10}{'0 s':<{COLUMNS // 2}}{seconds(end):>{COLUMNS // 2}}"
    yield f"{'':<10}[12==] trains step 12, .... waits; [12>>] version 12 being sent; [12--] sampled with version 12"


def _line(spans: Iterable[TimeSpan], scale: float) -> str:
    line = [" "] * COLUMNS
    for span in spans:
        first, last = round(span.begin_s * scale), min(round(span.end_s * scale), COLUMNS)
        drawn = FILL[span.lane] * (last - first)
        label = f"[{span.number}"
        if span.lane != "waiting" and len(drawn) > len(label):
            drawn = label + drawn[len(label) : -1] + "]"
        line[first:last] = drawn
    return "".join(line).rstrip()
