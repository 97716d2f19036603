"""The choices and numbers in each objective's own paper. This module loads no torch, because it serves to validate
settings.

If a paper's formula differs from the paper's code, the code counts. Where Echo departs from a paper, or a paper leaves
a choice open:

- DeepSeekMath, DAPO, GSPO and SAPO divide by a standard deviation without an epsilon; `weighting.STD_EPSILON` is added.
- AReaL normalises returns over the batch, without a group's baseline. The nearest choice here is batch_std.
- LlamaRL gives a range for its cap, 2 to 10. The value below is in this range.
- CISPO's paper does not give its bound. The value is from ScaleRL (arXiv 2510.13786), which finds 4 to 8 equivalent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "constant"]
Advantage = Literal["mean", "mean_std", "batch_std", "leave_one_out"]
NUMBERS: Final = ("clip_low", "clip_high", "cap")
"""Settings that only some objectives use. 0 means the paper's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The choices of one objective's paper."""

    aggregation: Aggregation
    advantage: Advantage
    numbers: Mapping[str, float]
    """Values of those settings in NUMBERS that the objective uses."""
    takes_old_policy: bool = True
    """True if `objective.old_policy` selects the denominator of the ratio. False if the objective's formula
    fixes it."""


_CLIP: Final = {"clip_low": 0.2, "clip_high": 0.2}

PUBLISHED: Final[Mapping[str, Published]] = {
    "grpo": Published(aggregation="sequence_mean", advantage="mean_std", numbers=_CLIP),
    "dr_grpo": Published(aggregation="constant", advantage="mean", numbers=_CLIP),
    "dapo": Published(aggregation="token_mean", advantage="mean_std", numbers={"clip_low": 0.2, "clip_high": 0.28}),
    "gspo": Published(aggregation="sequence_mean", advantage="mean_std", numbers={"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": Published(aggregation="group_mean", advantage="mean_std", numbers={"cap": 5.0}),
    "aipo": Published(aggregation="token_mean", advantage="mean", numbers={"cap": 5.0}, takes_old_policy=False),
    "decoupled_ppo": Published(
        aggregation="token_mean", advantage="batch_std", numbers={**_CLIP, "cap": 5.0}, takes_old_policy=False
    ),
    "two_sided": Published(aggregation="token_mean", advantage="mean_std", numbers={**_CLIP, "cap": 4.0}),
    "sapo": Published(aggregation="sequence_mean", advantage="mean_std", numbers={}),
    "vespo": Published(aggregation="token_mean", advantage="mean_std", numbers={}),
}
"""The choices of each objective's paper, by the objective's name in the settings."""
