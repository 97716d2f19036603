from __future__ import annotations

import io
from dataclasses import replace

import pytest
from PIL import Image

from echo_hub.dashboard.share_picture import HEIGHT, WIDTH, SharePicture, _drawable, draw
from echo_hub.dashboard.work_curve import work_curve
from echo_shared.records.credit import StepShare
from tests.echo_hub.dashboard.conftest import HOSTILE_NAMES
from tests.echo_hub.dashboard.test_milestones import STANDING

CURVE = work_curve(
    1,
    [{"step": float(step), "mean_reward": step / 40} for step in range(1, 38)],
    {step: StepShare(rollouts=3, share=0.1 + step / 100) for step in range(0, 37, 2)},
)
PICTURE = SharePicture(run_name="sums", standing=STANDING, num_ranked=57, curve=CURVE)


def opened(body: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(body))
    assert (image.format, image.size) == ("PNG", (WIDTH, HEIGHT))
    return image


def test_the_picture_is_the_same_for_the_same_standing_and_another_for_another() -> None:
    assert draw(PICTURE) == draw(PICTURE)
    assert draw(replace(PICTURE, standing=replace(STANDING, rank=2))) != draw(PICTURE)


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "W" * 64, "x"])
def test_any_name_stays_on_its_line(name: str) -> None:
    image = opened(draw(replace(PICTURE, standing=replace(STANDING, name=name, node="0123456789"))))
    right = image.crop((WIDTH - 40, 0, WIDTH, HEIGHT)).getcolors()
    assert right is not None and len(right) == 1, "nothing runs into the margin"


def test_a_new_team_has_a_picture_too() -> None:
    fresh = replace(STANDING, kind="team", rollouts=0, tokens=0, streak_days=0)
    opened(draw(SharePicture(run_name="日本", standing=fresh, num_ranked=1, curve=work_curve(1, [], {}))))


def test_a_name_without_glyphs_is_replaced_by_the_id() -> None:
    assert _drawable("ada", "node 01") == "ada"
    assert _drawable("日本語", "node 01") == "node 01"
