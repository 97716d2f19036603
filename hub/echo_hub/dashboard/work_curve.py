"""What one's work did: the run's reward curve, and one's share of the tokens that each of its steps was trained on.

The points are those of /api/v1/curves, a point for `width` consecutive steps, with a share beside the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from echo_shared.credit_books import StepShare

WIDE: Final = 1_000.0
HIGH: Final = 200.0
"""Of the drawing, in units of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPoint:
    step: int
    """The last of those that it stands for."""
    mean_reward: float | None
    rollouts: int
    """One's own, of these steps."""
    share: float
    """Of the tokens that these steps were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCurve:
    width: int
    """Steps that a point stands for."""
    points: tuple[WorkPoint, ...]

    @property
    def is_empty(self) -> bool:
        return not any(point.rollouts or point.share for point in self.points)

    @property
    def largest_share(self) -> float:
        return max((point.share for point in self.points), default=0.0)

    def reward_line(self, wide: float = WIDE, high: float = HIGH) -> list[tuple[float, float]]:
        """The reward as x to the right and y downwards; the lowest lies at the bottom, the highest on top."""
        known = [(i, p.mean_reward) for i, p in enumerate(self.points) if p.mean_reward is not None]
        if not known:
            return []
        low, top = min(reward for _, reward in known), max(reward for _, reward in known)
        step = wide / max(len(self.points) - 1, 1)
        return [(i * step, high - high * (reward - low) / ((top - low) or 1.0)) for i, reward in known]

    def bars(self, wide: float = WIDE, high: float = HIGH) -> list[tuple[float, float, float]]:
        """Left edge, width and height of each point's share, the largest of them half as high as the drawing."""
        each = wide / max(len(self.points), 1)
        largest = self.largest_share or 1.0
        return [
            (i * each, each, high / 2 * point.share / largest) for i, point in enumerate(self.points) if point.share
        ]

    @property
    def svg_line(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.reward_line())


def work_curve(width: int, points: Sequence[Mapping[str, float | None]], shares: Mapping[int, StepShare]) -> WorkCurve:
    """`points` as /api/v1/curves has them; `shares` by the number of their `width` steps, from 0."""
    found = []
    for point in points:
        step = int(point["step"] or 0)
        own = shares.get((step - 1) // width, StepShare(rollouts=0, share=0.0))
        found.append(WorkPoint(step=step, mean_reward=point["mean_reward"], rollouts=own.rollouts, share=own.share))
    return WorkCurve(width=width, points=tuple(found))
