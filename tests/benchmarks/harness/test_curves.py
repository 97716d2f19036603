"""Curves of several seeds become a picture."""

from __future__ import annotations

from benchmarks.learning.plot import draw
from benchmarks.learning.virtual_run import Point


def test_a_picture_is_a_png_and_the_same_for_the_same_curves() -> None:
    points = [
        Point(trained_rollouts=0, reward=None, accuracy=0.1, staleness=0.0),
        Point(trained_rollouts=128, reward=0.5, accuracy=0.4, staleness=1.0),
    ]
    curves = {"one": [points, points], "other": [points]}
    assert draw(curves).startswith(b"\x89PNG") and draw(curves) == draw(curves)
