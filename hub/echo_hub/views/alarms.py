"""What in the newest step's figures an operator should look at, and what to do: signs of forged rollouts, or of a run
that comes apart.

The hub goes on by itself after each of them, so none makes it unready: else a hostile node could.
"""

from __future__ import annotations

from typing import Final

from echo_shared.books import StepRecord
from echo_shared.step_figures import (
    FITTED_TOKENS,
    GRAD_NORM,
    GROUPS_LEFT_OUT,
    HELD_BACK,
    MISMATCH_KL,
    OUT_OF_MEMORY,
    RATIO_MAX,
)

LARGEST_RATIO: Final = 1e3
"""A fair draw gives a token of this ratio or more once in so many at most, whatever the two policies. Of 2e5 tokens of
the built-in model, four steps old and from engines of 4 bits too, the largest was 6; at four times the default learning
rate 41."""
LARGEST_MISMATCH: Final = 0.1
"""Nats per token. Of such rollouts two steps old it is 2e-3."""


def alarms(step: StepRecord | None) -> tuple[str, ...]:
    """A sentence or two each; none before the first step."""
    if step is None:
        return ()
    figures = step.figures
    found = []
    if held_back := figures.get(HELD_BACK.key):
        norm = figures.get(GRAD_NORM.key)
        size = "is not finite" if norm is None else f"{norm:.3g}, is far outside of the run's own history"
        found.append(
            f"Step {step.step}: {held_back:.0f} updates were held back, for their gradient's norm, {size}. "
            f"Version {step.step} has the weights from before them. If it goes on, set a smaller learning rate."
        )
    if left_out := figures.get(GROUPS_LEFT_OUT.key):
        found.append(
            f"Step {step.step}: {left_out:.0f} of {step.num_groups} groups were left out, because no honest engine "
            "gives what a node claimed of a rollout in each. Such nodes are checked from now on: see Trust."
        )
    if figures.get(OUT_OF_MEMORY.key):
        tokens = figures.get(FITTED_TOKENS.key) or 0
        found.append(
            f"Step {step.step}: the learner's device had too little memory. The step was begun anew with micro-batches "
            f"of at most {tokens:.0f} tokens, as are all from now on. If something else took that memory, restart the "
            "hub with another learner.micro_batch_tokens once it is free."
        )
    if (ratio := figures.get(RATIO_MAX.key) or 0) > LARGEST_RATIO:
        found.append(
            f"Step {step.step}: the largest importance ratio of a trained token is {ratio:.3g}. Look at that step's "
            "rollouts: either it is forged, or the run falls apart and wants a smaller learning rate."
        )
    if (mismatch := figures.get(MISMATCH_KL.key) or 0) > LARGEST_MISMATCH:
        found.append(
            f"Step {step.step}: what nodes claim and what the learner finds are {mismatch:.2g} nats per token apart. "
            "Look at the mismatch by node: one that is far off may forge; if all are, their engines are too imprecise."
        )
    return tuple(found)
