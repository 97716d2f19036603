"""The batch of a step: C3PO's token budget, Shuffle-R1's choice of rollouts, a fleet that samples in few bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance
from typing import Any, Final

from benchmarks.papers.cases import ASYNC, GROUPS, MOST_SEEDS, Case, stale
from benchmarks.papers.ran import Ran
from benchmarks.papers.table import Entry, Table, accuracy, finite

TARGET: Final = 0.8
"""Held-out accuracy."""


UPDATES: Final = 4
"""Updates a step. Each update of Shuffle-R1 has two of its eight sub-batches."""


def _of_updates(name: str, **objective: Any) -> Case:
    training = {"group_size": 16, "updates_per_step": UPDATES, "learning_rate": 2e-4}
    return Case(name=name, settings={"objective": objective, "training": training}, evaluate_every=5, seconds=12)


SHUFFLE_GRPO: Final = _of_updates(f"all of 16, {UPDATES} updates")
PAIRED: Final = _of_updates(f"pairs, of 16, {UPDATES} updates", selection="shuffle_r1")
SHUFFLED: Final = _of_updates(
    f"pairs, of 16, and batch shuffle, {UPDATES} updates", selection="shuffle_r1", shuffle_batches=8
)


def _steps_to(case: Case, ran: Sequence[Ran]) -> float:
    return fmean(one.steps_to(TARGET, evaluate_every=case.evaluate_every) for one in ran)


SHUFFLE_R1: Final = Table(
    name="Shuffle-R1: steps to target",
    source="arXiv 2508.05612",
    scale="Qwen2.5-VL-3B and 7B; geometry and mathematics with pictures",
    entries=(
        Entry(case=SHUFFLE_GRPO, reports="GRPO"),
        Entry(case=PAIRED, reports="-"),
        Entry(case=SHUFFLED, reports="GRPO's accuracy in about half the steps"),
    ),
    headline=lambda found: {
        "shuffle_steps_ratio": finite(
            _steps_to(SHUFFLED, found[SHUFFLED]) / _steps_to(SHUFFLE_GRPO, found[SHUFFLE_GRPO])
        )
    },
    columns=lambda case, ran: {f"steps_to_{TARGET}": finite(_steps_to(case, ran))},
    seeds=MOST_SEEDS,
)

MIXED: Final = {"task": {"name": "arithmetic", "options": {"digits": 3, "operations": ["+", "-"]}}}
BUDGET: Final = GROUPS * 8 * 4
NOT_BUDGETED: Final = Case(name="whole groups", settings={"objective": {"aggregation": "token_mean"}})
BUDGETED: Final = Case(
    name=f"{BUDGET} tokens a step", settings={"training": {"tokens_per_step": BUDGET, "groups_per_step": 2 * GROUPS}}
)


def variance(ran: Sequence[Ran]) -> float:
    """Relative variance of the gradient's norm from step to step; mean of all seeds."""
    norms = [[step["grad_norm"] for step in one.steps] for one in ran]
    return fmean(pvariance(of_one) / fmean(of_one) ** 2 for of_one in norms)


def _gradients(case: Case, ran: Sequence[Ran]) -> Mapping[str, Any]:
    return {
        "gradient_variance": variance(ran),
        "tokens_variance": fmean(
            pvariance(tokens) / fmean(tokens) ** 2
            for tokens in ([step["completion_tokens"] for step in one.steps] for one in ran)
        ),
    }


C3PO: Final = Table(
    name="Ring-lite: C3PO",
    source="arXiv 2506.14731, section on C3PO",
    scale="Ring-lite, 16.8B mixture of experts; mathematics and code",
    entries=(
        Entry(case=NOT_BUDGETED, reports="gradient norms swing with the tokens of a step"),
        Entry(case=BUDGETED, reports="stable gradient norms"),
    ),
    headline=lambda found: {"budget_variance_ratio": variance(found[BUDGETED]) / variance(found[NOT_BUDGETED])},
    columns=_gradients,
)

QUANTISED: Final = {
    precision: Case(name=f"fleet in {precision}", settings=stale(2), precision=precision)
    for precision in ("q8_0", "q4_k_m")
}
FLEET: Final = Table(
    name="Quantised fleet",
    source="arXiv 2508.05387, the inference swarm",
    scale="consumer devices; its engine samples in the trainer's own precision",
    entries=(
        Entry(case=ASYNC, reports="float32"),
        *(Entry(case=case, reports="-") for case in QUANTISED.values()),
    ),
    headline=lambda found: {
        "q8_fleet_gap": accuracy(found[ASYNC]) - accuracy(found[QUANTISED["q8_0"]]),
        "q4_fleet_gap": accuracy(found[ASYNC]) - accuracy(found[QUANTISED["q4_k_m"]]),
    },
)
