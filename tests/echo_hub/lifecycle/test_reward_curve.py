from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from echo_hub.lifecycle.reward_curve import ROWS, RewardPoint, few, picture, read_reward_curve
from echo_hub.store.store import Store
from tests.echo_hub.written_books import write_books


def test_the_curve_has_the_steps_up_to_the_version(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    assert read_reward_curve(store, 9) == []
    write_books(store, steps=6)
    points = read_reward_curve(store, 4)
    store.close()
    assert [point.step for point in points] == [1, 2, 3, 4]
    assert points[0].reward == points[0].smoothed


def points(count: int) -> list[RewardPoint]:
    return [RewardPoint(step=step, reward=step % 3, smoothed=step / count) for step in range(1, count + 1)]


def test_a_table_has_few_rows_with_the_first_and_the_last() -> None:
    assert few(points(3)) == points(3)
    chosen = few(points(1_000))
    assert len(chosen) == ROWS and (chosen[0].step, chosen[-1].step) == (1, 1_000)


def test_the_picture_shows_the_curve() -> None:
    drawn = Image.open(io.BytesIO(picture(points(50))))
    level = Image.open(io.BytesIO(picture([RewardPoint(step=step, reward=1.0, smoothed=1.0) for step in (1, 2)])))
    assert drawn.size == level.size and drawn.format == "PNG"
    line = (11, 122, 117)
    heights = [
        [y for y in range(drawn.height) if image.getpixel((x, y)) == line] for image, x in ((drawn, 100), (drawn, 900))
    ]
    assert all(heights) and min(heights[0]) > min(heights[1]), "it rises from left to right"
