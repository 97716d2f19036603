"""Dr. GRPO: GRPO without its two biases.

    l_t = -min(r_t A, clip(r_t, 1 - ε_low, 1 + ε_high) A), as in GRPO

Published: A = R - mean, without the standard deviation, which favours prompts that are nearly always or never solved;
the sum over tokens over a constant (the generation budget), without each rollout's length, which favours long wrong
answers. ε = 0.2.

Source: Understanding R1-Zero-Like Training (arXiv 2503.20783).
"""

from __future__ import annotations

from echo_hub.learner.objectives.grpo import Grpo


class DrGrpo(Grpo):
    """A token's loss is GRPO's; `published` has the difference."""
