"""What it gains and costs that nodes go on by a newer version in mid-completion (training.on_new_version).

The same scenario is simulated with `finish` and with `interrupt`, with the same seeds: 50 nodes that sample in time .7
of what the learner takes, by the rule of `echo_hub.simulator.rule`; lengths differ 1:30. Who goes on by a newer version
reads again what is there, each token in 1/16 of the time that it takes to draw one, as often as the node's own rule has
it.

    s_per_step          virtual seconds from one trained step to the next, after the warm-up; the mean of the seeds
    interrupt_speed_up  that of finish over that of interrupt: steps an hour of interrupt over those of finish
    staleness           the mean over what is trained on; a rollout is as old as the oldest token of its group
    token_staleness     likewise, each token as old as the version that drew it
    ..._finish          of the run that interrupts nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any, Final, Literal

from benchmarks.simulate.cases import GROUP_SIZE, scenario_of, with_margin
from benchmarks.simulate.kind import Kind, Row
from benchmarks.simulate.simulated import check
from benchmarks.simulate.speed_up import seconds_per_step
from echo_hub.simulator.report import Report, report_of
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.world import World
from echo_shared.moving_on import READING

MARGIN: Final = 0.7
STEPS: Final = 40
WARM_UP_STEPS: Final = 10
SEEDS: Final = 3

OnNewVersion = Literal["finish", "interrupt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptCase:
    """One pool of 50 nodes that is not enough, in both ways."""

    max_staleness: int

    @property
    def name(self) -> str:
        return f"interrupt, S = {self.max_staleness}"

    @property
    def seconds(self) -> float:
        return 15.0

    @property
    def lacks(self) -> str:
        return ""

    def row(self, seed: int) -> Row:
        finish, interrupt = self._reports(seed, "finish"), self._reports(seed, "interrupt")
        s_per_step, plain_s_per_step = _mean(interrupt, "s_per_step"), _mean(finish, "s_per_step")
        return {
            "s_per_step": s_per_step,
            "s_per_step_finish": plain_s_per_step,
            "interrupt_speed_up": plain_s_per_step / s_per_step,
            "staleness": _mean(interrupt, "mean_staleness"),
            "staleness_finish": _mean(finish, "mean_staleness"),
            "token_staleness": _mean(interrupt, "token_staleness"),
            "token_staleness_finish": _mean(finish, "token_staleness"),
            "mixed_share": _mean(interrupt, "mixed_share"),
            "drops": _drops(interrupt),
            "drops_finish": _drops(finish),
            "details": {"finish": finish, "interrupt": interrupt},
        }

    def _reports(self, seed: int, on_new_version: OnNewVersion) -> list[dict[str, Any]]:
        """One for each seed."""
        reports: list[dict[str, Any]] = []
        for each in range(seed, seed + SEEDS):
            world = World(self.scenario(each, on_new_version))
            world.run()
            report: Report = report_of(world)
            check(f"{self.name}, {on_new_version}", report)
            reports.append({**asdict(report), "s_per_step": seconds_per_step(world)})
        return reports

    def scenario(self, seed: int, on_new_version: OnNewVersion) -> Scenario:
        return with_margin(MARGIN, partial(self._scenario, seed, on_new_version))

    def _scenario(self, seed: int, on_new_version: OnNewVersion, *, s_per_token: float) -> Scenario:
        return scenario_of(
            seed,
            training={
                "steps": STEPS,
                "groups_per_step": 24,
                "max_staleness": self.max_staleness,
                "on_new_version": on_new_version,
            },
            learner={"step_s": 6.0},
            nodes={
                "count": 50,
                "width": GROUP_SIZE,
                "s_per_token": s_per_token,
                "prefill_s_per_token": READING * s_per_token,
            },
            lengths={"ratio": 30.0, "prompts": 200},
            measuring={"warm_up_steps": WARM_UP_STEPS},
        )


def headline(rows: Mapping[str, Row]) -> dict[str, Any]:
    """The least speed-up of all cases, and the most; and the most token staleness over that of finish."""
    found = [rows[case.name] for case in CASES if case.name in rows]
    gains = [row["interrupt_speed_up"] for row in found]
    ages = [row["token_staleness"] / row["token_staleness_finish"] for row in found]
    return {
        "interrupt_speed_up": min(gains, default=None),
        "interrupt_speed_up_most": max(gains, default=None),
        "interrupt_token_staleness": max(ages, default=None),
    }


def _mean(reports: list[dict[str, Any]], figure: str) -> float:
    return fmean(report[figure] for report in reports)


def _drops(reports: list[dict[str, Any]]) -> dict[str, float]:
    """By reason, as shares of what all seeds leased."""
    leased = sum(report["leased"] for report in reports)
    reasons = sorted({reason for report in reports for reason in report["dropped"]})
    return {
        reason: round(sum(report["dropped"].get(reason, 0) for report in reports) / leased, 4) for reason in reasons
    }


CASES: Final = tuple(InterruptCase(max_staleness=bound) for bound in (1, 2, 4))
KIND: Final = Kind(
    cases=CASES,
    headline=headline,
    told=("s_per_step", "interrupt_speed_up", "token_staleness", "token_staleness_finish"),
    conditions={"interrupt_useful_over_needed": MARGIN, "interrupt_seeds": SEEDS},
)
