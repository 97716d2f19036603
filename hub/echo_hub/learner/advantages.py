"""Advantages: each rollout's reward compared with the rewards of its group. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.objective_defaults import Advantage
from echo_shared.records.rewards import all_equal

STD_EPSILON: Final = 1e-4
"""Small number added to a standard deviation before rewards are divided by it, so that no division by 0 occurs. Source:
GRPOTrainer of TRL.
"""


def advantages(rewards: Sequence[NDArray[np.float64]], kind: Advantage) -> list[NDArray[np.float64]]:
    """Return each group's advantages [G]; exactly zero if a group's rewards are `all_equal`.

        mean            R_i - mean(R)                                     Dr. GRPO (arXiv 2503.20783)
        mean_std        (R_i - mean(R)) / (std(R) + ε)                    DeepSeekMath (arXiv 2402.03300)
        batch_std       (R_i - mean(R)) / (std(all of the step) + ε)      Lite PPO (arXiv 2508.08221)
        leave_one_out   R_i - mean(R without i)                           RLOO (arXiv 2402.14740)

    Standard deviations are those of a sample (n - 1).
    """
    less_mean = [centred(rewards_G) for rewards_G in rewards]
    match kind:
        case "mean":
            return less_mean
        case "mean_std":
            return [
                values / (standard_deviation(group) + STD_EPSILON)
                for values, group in zip(less_mean, rewards, strict=True)
            ]
        case "batch_std":
            std = standard_deviation(np.concatenate(rewards))
            return [values / (std + STD_EPSILON) for values in less_mean]
        case "leave_one_out":
            return [values * (len(values) / max(1, len(values) - 1)) for values in less_mean]
        case _:
            assert_never(kind)


def centred(rewards_G: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the group's rewards minus their mean [G]; exactly zero if all rewards are equal up to rounding
    (`all_equal`).
    """
    # Test for equality first: dividing by a tiny deviation would blow up rounding differences to normal size.
    return np.zeros_like(rewards_G) if all_equal(rewards_G.tolist()) else rewards_G - rewards_G.mean()


def standard_deviation(rewards: NDArray[np.float64]) -> float:
    """Return the sample standard deviation (n - 1); 0 for a single value."""
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
