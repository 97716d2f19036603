"""The reward of a run's steps for a model card: a picture, and a few rows of a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from echo_hub.dashboard.curves import SMOOTH, Curves
from echo_hub.dashboard.picture_font import font
from echo_hub.store.reports import read_steps

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

    from echo_hub.store.store import Store

PICTURE: Final = "reward.png"
"""Name of the picture's file next to the model card."""
ROWS: Final = 8
_WIDTH: Final = 960
_HEIGHT: Final = 360
_LEFT, _TOP, _RIGHT, _BOTTOM = 72, 44, _WIDTH - 24, _HEIGHT - 44
_PAPER, _INK, _FAINT, _LINE, _STEPS, _ACCENT = "#ffffff", "#14213d", "#5b6782", "#d9d4c4", "#bfe3df", "#0b7a75"
_LEAST_SPREAD: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPoint:
    """One point of the curve. It has two values: the mean reward of the steps after the previous point, up to `step`,
    and the smoothed mean at `step`."""

    step: int
    reward: float
    smoothed: float


def read_reward_curve(store: Store, up_to: int) -> list[RewardPoint]:
    """Return the reward of the steps 1 to `up_to`."""
    curves = Curves()
    while more := store.read(read_steps, curves.last_step):
        for step in more:
            if step.step > up_to:
                break
            curves.add(step)
        else:
            continue
        break
    found = []
    for point in curves.after(0):
        last, reward, smoothed = point["step"], point["mean_reward"], point[SMOOTH]
        if last is not None and reward is not None and smoothed is not None:
            found.append(RewardPoint(step=int(last), reward=reward, smoothed=smoothed))
    return found


def few(points: Sequence[RewardPoint]) -> list[RewardPoint]:
    """Return at most `ROWS` points, evenly spaced, with the first and the last one."""
    if len(points) <= ROWS:
        return list(points)
    return [points[round(place * (len(points) - 1) / (ROWS - 1))] for place in range(ROWS)]


def picture(points: Sequence[RewardPoint]) -> bytes:
    """Return a PNG file with the curve. `points` must have at least two points."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_WIDTH, _HEIGHT), _PAPER)
    pen = ImageDraw.Draw(image)
    rewards = [value for point in points for value in (point.reward, point.smoothed)]
    low, high = min(rewards), max(rewards)
    if high - low < _LEAST_SPREAD:
        low, high = low - 0.5, high + 0.5
    first, last = points[0].step, points[-1].step

    def place(step: int, reward: float) -> tuple[float, float]:
        across = (step - first) / (last - first)
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - (reward - low) / (high - low) * (_BOTTOM - _TOP)

    _scale(pen, low, high, first, last)
    for point in points:
        x, y = place(point.step, point.reward)
        pen.ellipse((x - 2, y - 2, x + 2, y + 2), fill=_STEPS)
    pen.line([place(point.step, point.smoothed) for point in points], fill=_ACCENT, width=3, joint="curve")
    pen.text((_LEFT, 10), "Mean reward by step; the line is smoothed", font=font(18), fill=_INK)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _scale(pen: ImageDraw, low: float, high: float, first: int, last: int) -> None:
    for part in range(5):
        y = _BOTTOM - part / 4 * (_BOTTOM - _TOP)
        pen.line((_LEFT, y, _RIGHT, y), fill=_LINE)
        label = f"{low + part / 4 * (high - low):.3g}"
        pen.text((_LEFT - 8 - font(15).getlength(label), y - 9), label, font=font(15), fill=_FAINT)
    pen.text((_LEFT, _BOTTOM + 10), f"step {first:,}", font=font(15), fill=_FAINT)
    label = f"step {last:,}"
    pen.text((_RIGHT - font(15).getlength(label), _BOTTOM + 10), label, font=font(15), fill=_FAINT)
