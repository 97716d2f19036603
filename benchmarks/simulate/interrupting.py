"""Effect of nodes that continue a completion with a newer version (training.on_new_version).

Two simulations per seed share one scenario: with `finish`, a node ends a completion with its version; with `interrupt`,
it continues with a newer one. 50 nodes sample 0.7 of what the learner needs (`echo_hub.simulator.rule`); lengths differ
1:30. A node that changes versions reads the completion's tokens again, each in 1/16 of the time of a sampled token.

    s_per_step          virtual seconds from one trained step to the next, after the warm-up; mean of the seeds
    interrupt_speed_up  s_per_step with `finish`, divided by s_per_step with `interrupt`
    staleness           mean over trained rollouts; a rollout is as old as the oldest token of its group
    token_staleness     the same, with each token as old as the version that sampled it
    ..._finish          figures of the run that interrupts nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any, Final

from benchmarks.harness.progress import least, most
from benchmarks.simulate.cases import GROUP_SIZE, Case, Row, check, measured, scenario_of, with_margin
from echo_hub.simulator.report import report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World
from echo_shared.sampling.moving_on import READING

MARGIN: Final = 0.7
STEPS: Final = 40
WARM_UP_STEPS: Final = 10
SEEDS: Final = 3


def _row(seed: int, *, max_staleness: int) -> Row:
    """Simulate a pool of 50 nodes that samples less than the learner needs, with `finish` and with `interrupt`."""
    finish, interrupt = (_reports(seed, max_staleness, way) for way in ("finish", "interrupt"))
    row: Row = {"interrupt_speed_up": _mean(finish, "s_per_step") / _mean(interrupt, "s_per_step")}
    figures = {"s_per_step": "s_per_step", "staleness": "mean_staleness", "token_staleness": "token_staleness"}
    for column, figure in figures.items():
        row |= {column: _mean(interrupt, figure), f"{column}_finish": _mean(finish, figure)}
    return {
        **row,
        "drops": _drops(interrupt),
        "drops_finish": _drops(finish),
        "details": {"finish": finish, "interrupt": interrupt},
    }


def _reports(seed: int, max_staleness: int, on_new_version: str) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    for each in range(seed, seed + SEEDS):
        make = partial(_scenario, seed=each, max_staleness=max_staleness, on_new_version=on_new_version)
        world = World(with_margin(MARGIN, make))
        world.run()
        report = report_of(world)
        check(report)
        reports.append({**asdict(report), "s_per_step": seconds_per_step(world)})
    return reports


def _scenario(*, seed: int, max_staleness: int, on_new_version: str, s_per_token: float) -> Scenario:
    prefill_s = READING * s_per_token
    return scenario_of(
        seed,
        training={
            "steps": STEPS,
            "groups_per_step": 24,
            "max_staleness": max_staleness,
            "on_new_version": on_new_version,
        },
        learner={"step_s": 6.0},
        nodes={"count": 50, "width": GROUP_SIZE, "s_per_token": s_per_token, "prefill_s_per_token": prefill_s},
        lengths={"ratio": 30.0, "prompts": 200},
        measuring={"warm_up_steps": WARM_UP_STEPS},
    )


def seconds_per_step(world: World) -> float:
    """Return the virtual seconds from one trained step to the next, after the warm-up; infinite if there is no such
    step.
    """
    warm_up = world.scenario.measuring.warm_up_steps
    ends = [end for _, end in world.steps if end <= world.agenda.now]
    if len(ends) <= warm_up:
        return float("inf")
    return ((ends[-1] if world.finished else world.agenda.now) - ends[warm_up - 1]) / (len(ends) - warm_up)


def headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Return the smallest and the largest speed-up by `interrupt`, and the largest ratio of token staleness with
    `interrupt` to that with `finish`.
    """
    found = measured(CASES, rows)
    ages = [row["token_staleness"] / row["token_staleness_finish"] for row in found]
    return {
        "interrupt_speed_up": least(found, "interrupt_speed_up"),
        "interrupt_speed_up_most": most(found, "interrupt_speed_up"),
        "interrupt_token_staleness": max(ages, default=None),
    }


def _mean(reports: list[dict[str, Any]], figure: str) -> float:
    return fmean(report[figure] for report in reports)


def _drops(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return dropped rollouts by reason, as shares of the rollouts that all seeds leased."""
    leased = sum(report["leased"] for report in reports)
    reasons = sorted({reason for report in reports for reason in report["dropped"]})
    return {
        reason: round(sum(report["dropped"].get(reason, 0) for report in reports) / leased, 4) for reason in reasons
    }


CASES: Final = tuple(
    Case(
        name=f"interrupt, S = {bound}",
        row=partial(_row, max_staleness=bound),
        told=("s_per_step", "interrupt_speed_up", "token_staleness", "token_staleness_finish"),
    )
    for bound in (1, 2, 4)
)
