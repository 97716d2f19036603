"""Warn operators about suspicious figures of the newest step: signs of forged rollouts, or of a run that diverges.

Alarms never make the hub unready: otherwise a hostile node could make the hub unready with forged rollouts.
"""

from __future__ import annotations

from typing import Final

from echo_shared.records.run import StepRecord
from echo_shared.records.step_figures import (
    FITTED_TOKENS,
    GRAD_NORM,
    GROUPS_LEFT_OUT,
    HELD_BACK,
    MISMATCH_KL,
    OUT_OF_MEMORY,
    RATIO_MAX,
)

LARGEST_RATIO: Final = 1e3
"""Largest ratio of a token's probability (the learner's, divided by the one that the node claimed) that raises no
alarm. For any two policies, an honestly drawn token has a ratio of r or more with a probability of at most 1/r.

Measured with the built-in model on 2e5 tokens, four steps old, some from 4-bit engines: the largest ratio was 6. At
four times the default learning rate it was 41."""
LARGEST_MISMATCH: Final = 0.1
"""Largest KL divergence between the claimed and the learner's log-probabilities that raises no alarm, in nats per
token. In the measurement described at LARGEST_RATIO, rollouts that were two steps old had 2e-3."""


def alarms(step: StepRecord | None) -> tuple[str, ...]:
    """Return a warning of one or two sentences for each suspicious figure; none before the first step."""
    if step is None:
        return ()
    figures = step.figures
    found = []
    if held_back := figures.get(HELD_BACK.key):
        norm = figures.get(GRAD_NORM.key)
        size = "is not finite" if norm is None else f"of {norm:.3g} is far outside the run's history"
        found.append(
            f"Step {step.step}: {held_back:.0f} updates were skipped because their gradient's norm {size}. "
            f"Version {step.step} has the weights from before. If this continues, lower the learning rate."
        )
    if left_out := figures.get(GROUPS_LEFT_OUT.key):
        found.append(
            f"Step {step.step}: {left_out:.0f} of {step.num_groups} groups were left out: no honest engine "
            "produces what a node claimed for a rollout in each. These nodes are checked from now on: see Trust."
        )
    if figures.get(OUT_OF_MEMORY.key):
        tokens = figures.get(FITTED_TOKENS.key) or 0
        found.append(
            f"Step {step.step}: the learner's device had too little memory. The step was restarted with micro-batches "
            f"of at most {tokens:.0f} tokens, as are all from now on. If something else took that memory, restart the "
            "hub with another learner.micro_batch_tokens once it is free."
        )
    if (ratio := figures.get(RATIO_MAX.key) or 0) > LARGEST_RATIO:
        found.append(
            f"Step {step.step}: the largest importance ratio of a trained token is {ratio:.3g}. Look at that step's "
            "rollouts: either it is forged, or the run diverges and needs a smaller learning rate."
        )
    if (mismatch := figures.get(MISMATCH_KL.key) or 0) > LARGEST_MISMATCH:
        found.append(
            f"Step {step.step}: the nodes' and the learner's log-probabilities differ by {mismatch:.2g} nats per token."
            " Compare the mismatch by node: one outlier may forge; if all are high, their engines are too imprecise."
        )
    return tuple(found)
