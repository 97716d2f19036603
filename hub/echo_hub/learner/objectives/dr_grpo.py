"""Dr. GRPO: GRPO without its two biases.

    l_t = -min(r_t A, clip(r_t, 1 - ε_low, 1 + ε_high) A), as in GRPO

l_t, r_t and A are the loss, the probability ratio and the advantage of token t; R is the rollout's reward. Published: A
= R - mean, because the standard deviation favours prompts that are almost always or almost never solved. The sum over
tokens is divided by a constant (the generation budget), because each rollout's length favours long wrong answers. ε =
0.2.

Source: Understanding R1-Zero-Like Training (arXiv 2503.20783).
"""

from __future__ import annotations

from echo_hub.learner.objectives.grpo import Grpo


class DrGrpo(Grpo):
    """GRPO's token loss. Dr. GRPO's advantage and weighting are in `echo_hub.config.objective_defaults.PUBLISHED`."""
