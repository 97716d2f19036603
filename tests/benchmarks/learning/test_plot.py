from __future__ import annotations

import io

import matplotlib.image
import numpy as np

from benchmarks.learning.plot import draw
from benchmarks.learning.virtual_run import Point


def curve(*accuracies: float) -> list[Point]:
    return [
        Point(trained_rollouts=256 * place, reward=None if place == 0 else value, accuracy=value, staleness=0.0)
        for place, value in enumerate(accuracies)
    ]


def test_a_picture_with_something_in_it() -> None:
    image = draw({"one": [curve(0.1, 0.5, 0.9), curve(0.2, 0.4, 0.8)], "other": [curve(0.1, 0.1, 0.2)]})
    pixels = matplotlib.image.imread(io.BytesIO(image), format="png")
    assert pixels.shape[1] > pixels.shape[0] > 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100


def test_the_same_curves_give_the_same_picture() -> None:
    curves = {"one": [curve(0.1, 0.5, 0.9)]}
    assert draw(curves) == draw(curves)
