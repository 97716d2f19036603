"""The effect of a holder's (a node's or a team's) work: the run's reward curve, and the holder's share of each step's
training tokens.

The points are those of /api/v1/curves, each for `width` consecutive steps, with the holder's share added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from echo_shared.records.credit import StepShare

WIDE: Final = 1_000.0
HIGH: Final = 200.0
"""Height of the drawing. Height and width are in the drawing's own units, not in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPoint:
    step: int
    """The last step for which the point stands."""
    mean_reward: float | None
    rollouts: int
    """Number of the holder's rollouts that were trained on in the point's steps."""
    share: float
    """The holder's share of the tokens trained on in the point's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCurve:
    width: int
    """Number of steps for which each point stands."""
    points: tuple[WorkPoint, ...]

    @property
    def is_empty(self) -> bool:
        return not any(point.rollouts or point.share for point in self.points)

    @property
    def largest_share(self) -> float:
        return max((point.share for point in self.points), default=0.0)

    def reward_line(self, wide: float = WIDE, high: float = HIGH) -> list[tuple[float, float]]:
        """Return the reward curve as points: x to the right, y downwards, the lowest reward at the bottom."""
        known = [(i, p.mean_reward) for i, p in enumerate(self.points) if p.mean_reward is not None]
        if not known:
            return []
        low, top = min(reward for _, reward in known), max(reward for _, reward in known)
        step = wide / max(len(self.points) - 1, 1)
        return [(i * step, high - high * (reward - low) / ((top - low) or 1.0)) for i, reward in known]

    def bars(self, wide: float = WIDE, high: float = HIGH) -> list[tuple[float, float, float]]:
        """Return the left edge, width and height of a bar for each point in which the holder has a share. The highest
        bar has half the height of the drawing.
        """
        each = wide / max(len(self.points), 1)
        largest = self.largest_share or 1.0
        return [
            (i * each, each, high / 2 * point.share / largest) for i, point in enumerate(self.points) if point.share
        ]

    @property
    def svg_line(self) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.reward_line())


def work_curve(width: int, points: Sequence[Mapping[str, float | None]], shares: Mapping[int, StepShare]) -> WorkCurve:
    """Combine the points of /api/v1/curves with a holder's share of the work in the same steps. `shares` has one entry
    for each bucket of `width` steps, by the bucket's number, from 0."""
    found = []
    for point in points:
        step = int(point["step"] or 0)
        own = shares.get((step - 1) // width, StepShare(rollouts=0, share=0.0))
        found.append(WorkPoint(step=step, mean_reward=point["mean_reward"], rollouts=own.rollouts, share=own.share))
    return WorkCurve(width=width, points=tuple(found))
