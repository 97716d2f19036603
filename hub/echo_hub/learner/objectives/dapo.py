"""DAPO: GRPO with a higher upper bound than lower bound, and equal weight for every token.

    l_t = -min(r_t A, clip(r_t, 1 - ε_low, 1 + ε_high) A), ε_low = 0.2, ε_high = 0.28

l_t, r_t and A are the loss, the probability ratio and the advantage of token t, as in `grpo`. Published: the mean over
all tokens of the batch (its formula says: of the group; its code: of the batch), A = (R - mean) / std, no KL term. Its
other parts are settings of their own: `training.dynamic_sampling` and `objective.overlong`.

Source: DAPO (arXiv 2503.14476, eq. 8).
"""

from __future__ import annotations

from echo_hub.learner.objectives.grpo import Grpo


class Dapo(Grpo):
    """GRPO's token loss. DAPO's clip bounds are in `echo_hub.config.objective_defaults.PUBLISHED`."""
